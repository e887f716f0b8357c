//! A blocking route-netlink socket that sends several requests in one datagram.
//!
//! The kernel carries out the messages of a datagram one after another and acknowledges each, so a batch costs one
//! system call each way. It does not stop at an error: callers batch only requests that are harmless if an earlier one
//! fails.

use std::sync::{Mutex, PoisonError};

use netlink_packet_core::{NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};

use super::answer::{
    Body, HEADER_LEN, NLMSG_DONE, NLMSG_ERROR, Received, parse_datagram, parse_message, u16_at, u32_at,
};
use super::error::{Error, Refused};
use super::receive::{LONGEST, Receiver};
use crate::netns::cookie_of;
use crate::timing;

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
/// The dump may be inconsistent: objects changed while it was produced.
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
/// Report the resulting object to the sender.
pub(super) const ECHO: u16 = 0x8;
/// Fail if the object exists.
pub(super) const EXCL: u16 = 0x200;
/// Create the object if it does not exist.
pub(super) const CREATE: u16 = 0x400;
/// Change the object if it exists.
pub(super) const REPLACE: u16 = 0x100;
/// Append to a list (for routes: another next hop).
pub(super) const APPEND: u16 = 0x800;
const DUMP_TRIES: u32 = 5;
/// Most requests in one datagram. The kernel queues all answers to a datagram before the first is read. That
/// queue may be limited to 208 KiB (`net.core.rmem_default`), and each answer counts at least a kilobyte;
/// answers that do not fit are lost (ENOBUFS).
const AT_ONCE: usize = 64;

/// Prefix of the names of requests that change nothing.
const ASKS: &str = "RTM_GET";
/// Name of the request that deletes links.
const DELETES: &str = "RTM_DELLINK";
/// Name of the request for links. The kernel makes room for the longest description of a link in each datagram of their
/// list (`rtnl_calcit`), and for 32 KiB at most in those of other lists (`netlink_dump`).
const LINKS: &str = "RTM_GETLINK";
/// Lock held while a datagram is sent. It protects no data.
static SENDS: Mutex<()> = Mutex::new(());

/// One request of a batch.
pub(super) struct NetlinkRequest {
    pub(super) message: RouteNetlinkMessage,
    pub(super) flags: u16,
}

impl NetlinkRequest {
    pub(super) fn new(message: RouteNetlinkMessage, flags: u16) -> Self {
        Self { message, flags }
    }
}

/// The answer to one request: the messages before its acknowledgement, or the kernel's refusal.
pub(super) type Reply = Result<Vec<RouteNetlinkMessage>, Refused>;

/// A socket bound to the namespace of the thread that opened it.
pub(super) struct Socket {
    raw: RawSocket,
    sequence: u32,
    receiver: Receiver,
    /// Bytes of all received answers.
    received: u64,
    /// Limits of a list: objects, and bytes of their messages. A single route may have thousands of next
    /// hops.
    most: usize,
    most_bytes: usize,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Socket").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Socket {
    pub(super) fn open() -> Result<Self, Error> {
        let mut raw = RawSocket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        raw.bind_auto().map_err(Error::Open)?;
        raw.set_ext_ack(true).map_err(Error::Open)?;
        raw.set_cap_ack(true).map_err(Error::Open)?;
        raw.set_netlink_get_strict_chk(true).map_err(Error::Open)?;
        // The size is a limit: nothing is allocated. If the kernel refuses it, because the process lacks
        // privileges in the initial user namespace, answers may be lost, which is reported as an error.
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&raw, LONGEST);
        let receiver = Receiver::new();
        Ok(Self { raw, sequence: 0, receiver, received: 0, most: usize::MAX, most_bytes: usize::MAX })
    }

    /// Limits the lists that are read from now on to that many objects and bytes.
    pub(super) fn limit(&mut self, most: usize, most_bytes: usize) {
        (self.most, self.most_bytes) = (most, most_bytes);
    }

    /// Cookie of the socket's namespace, 0 on kernels without cookies (before 5.14).
    pub(super) fn netns_cookie(&self) -> u64 {
        cookie_of(&self.raw).unwrap_or_default()
    }

    /// Sends `requests`, at most [`AT_ONCE`] in one datagram, and waits for all their acknowledgements.
    pub(super) fn batch(&mut self, requests: Vec<NetlinkRequest>) -> Result<Vec<Reply>, Error> {
        let mut replies = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter().peekable();
        while requests.peek().is_some() {
            replies.extend(self.datagram(requests.by_ref().take(AT_ONCE).collect())?);
        }
        Ok(replies)
    }

    fn datagram(&mut self, requests: Vec<NetlinkRequest>) -> Result<Vec<Reply>, Error> {
        let Some(first) = requests.first() else { return Ok(Vec::new()) };
        let name = request_name(&first.message);
        let names: Vec<_> = requests.iter().map(|request| request_name(&request.message)).collect();
        let base = self.sequence;
        // An acknowledgement without an object has a bounded length, as it repeats nothing of the request.
        let are_short = names.iter().all(|name| !name.starts_with(ASKS))
            && requests.iter().all(|request| request.flags & ECHO == 0);
        let mut datagram = Vec::with_capacity(256 * requests.len());
        for request in requests {
            self.append(&mut datagram, request.message, request.flags | NLM_F_REQUEST | NLM_F_ACK);
        }
        self.receiver.expect_short(are_short);
        let replies = timing::part(name, || self.exchange(name, &names, base, &datagram));
        self.receiver.expect_short(false);
        replies
    }

    /// Sends a datagram; the kernel carries it out before this call returns. Only one thread sends at a time:
    /// the kernel has one lock for the links of all namespaces, and threads that wait for it spin.
    fn send(&self, datagram: &[u8]) -> std::io::Result<usize> {
        let _turn = SENDS.lock().unwrap_or_else(PoisonError::into_inner);
        self.raw.send(datagram, 0)
    }

    /// As [`Socket::send`], without the lock, for a datagram that deletes links. Most of the time of such a
    /// request the kernel has released its own lock and waits until no reader can be using the links any more
    /// (`netdev_run_todo`, some 20 ms); one such wait serves all requests that wait at the same time.
    fn send_beside(&self, datagram: &[u8]) -> std::io::Result<usize> {
        self.raw.send(datagram, 0)
    }

    /// Sends a datagram and waits until each of its requests is acknowledged.
    fn exchange(
        &mut self,
        name: &'static str,
        names: &[&'static str],
        base: u32,
        datagram: &[u8],
    ) -> Result<Vec<Reply>, Error> {
        let sent = if names.contains(&DELETES) { self.send_beside(datagram) } else { self.send(datagram) };
        sent.map_err(|source| Error::Send(name, source))?;
        let mut replies: Vec<Option<Reply>> = names.iter().map(|_| None).collect();
        let mut pending: Vec<Vec<RouteNetlinkMessage>> = names.iter().map(|_| Vec::new()).collect();
        let mut unreadable = None;
        let mut missing = names.len();
        while missing > 0 {
            for message in self.receive(name)? {
                let Some(index) = message.sequence.wrapping_sub(base).checked_sub(1) else { continue };
                let Some(slot) = replies.get_mut(index as usize) else { continue };
                if slot.is_some() {
                    continue;
                }
                match message.body {
                    Body::Ack(0, _) => *slot = Some(Ok(std::mem::take(&mut pending[index as usize]))),
                    Body::Ack(errno, text) => {
                        *slot = Some(Err(Refused { request: names[index as usize], errno, text }));
                    }
                    Body::Done(..) => continue,
                    Body::Unreadable => {
                        unreadable =
                            Some(names[index as usize]).filter(|name| name.starts_with(ASKS)).or(unreadable);
                        continue;
                    }
                    Body::Payload(payload) => {
                        pending[index as usize].push(payload);
                        continue;
                    }
                }
                missing -= 1;
            }
        }
        if let Some(request) = unreadable {
            // An object that cannot be read is not absent.
            return Err(Error::Unreadable(request));
        }
        if names.iter().any(|name| !name.starts_with(ASKS)) {
            crate::crash_point!("netlink", names);
        }
        Ok(replies.into_iter().flatten().collect())
    }

    /// Sends one request and returns its answers.
    pub(super) fn request(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let name = request_name(&message);
        let reply = self.batch(vec![NetlinkRequest::new(message, flags)])?.pop();
        Ok(reply.ok_or(Error::Malformed { request: name, what: "no acknowledgement" })??)
    }

    /// Sends several requests and reports the first refusal.
    pub(super) fn all(&mut self, requests: Vec<NetlinkRequest>) -> Result<(), Error> {
        for reply in self.batch(requests)? {
            reply?;
        }
        Ok(())
    }

    /// Sends several requests and reports the first refusal other than the `harmless`.
    pub(super) fn all_but(
        &mut self,
        requests: Vec<NetlinkRequest>,
        harmless: &[rustix::io::Errno],
    ) -> Result<(), Error> {
        for reply in self.batch(requests)? {
            match reply {
                Err(refused) if !harmless.iter().any(|one| one.raw_os_error() == refused.errno) => {
                    return Err(refused.into());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Dumps objects; starts again if the kernel reports that they changed meanwhile.
    ///
    /// # Errors
    /// The kernel refuses the dump, or has aborted it.
    pub(super) fn dump(&mut self, message: RouteNetlinkMessage) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let name = request_name(&message);
        for _ in 0..DUMP_TRIES {
            if let Some(found) = timing::part(name, || self.dump_once(message.clone(), name))? {
                return Ok(found);
            }
        }
        Err(Error::Interrupted(name))
    }

    /// Sends requests for single objects and adds their answers to a list, within the same limits as for a
    /// dump. As in a dump, objects that are gone or cannot be read are left out.
    ///
    /// # Errors
    /// The kernel refuses a request; [`Error::TooMany`].
    pub(super) fn add_each(
        &mut self,
        found: &mut Vec<RouteNetlinkMessage>,
        requests: impl Iterator<Item = RouteNetlinkMessage>,
    ) -> Result<(), Error> {
        let before = self.received;
        for message in requests {
            let name = request_name(&message);
            let bytes = self.received.wrapping_sub(before);
            if found.len() >= self.most || bytes > self.most_bytes as u64 {
                return Err(Error::TooMany(name, found.len()));
            }
            match self.request(message, 0) {
                Err(Error::Unreadable(_)) => {}
                Err(error) if error.not_found() => {}
                answers => found.extend(answers?),
            }
        }
        Ok(())
    }

    /// Dumps objects, and passes the part of each message after the header to `read`: far cheaper than
    /// parsing all of a long list. Starts again if the kernel reports that objects changed meanwhile.
    pub(super) fn scan<T>(
        &mut self,
        message: RouteNetlinkMessage,
        read: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let name = request_name(&message);
        for _ in 0..DUMP_TRIES {
            if let Some(found) = timing::part(name, || self.scan_once(message.clone(), name, &read))? {
                return Ok(found);
            }
        }
        Err(Error::Interrupted(name))
    }

    fn scan_once<T>(
        &mut self,
        message: RouteNetlinkMessage,
        name: &'static str,
        read: &impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Option<Vec<T>>, Error> {
        let mut found = Vec::new();
        let walked =
            self.walk((message, NLM_F_DUMP), name, usize::MAX, |object| found.extend(read(object)))?;
        Ok((walked == Walked::Whole).then_some(found))
    }

    /// Requests one object, and passes the part of its message after the header to `read`.
    pub(super) fn look<T>(
        &mut self,
        message: RouteNetlinkMessage,
        read: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let name = request_name(&message);
        let mut found = None;
        let see = |object: &[u8]| found = read(object);
        timing::part(name, || self.walk((message, NLM_F_ACK), name, usize::MAX, see))?;
        Ok(found)
    }

    /// Passes the first `most` objects of a dump to `see`, for each the part of its message after the header.
    /// Returns how far the dump was read. After [`Walked::Left`] the socket cannot be used any more, since
    /// the rest of the dump is still unread. A dump during which objects changed is not repeated; it returns
    /// [`Walked::Interrupted`].
    pub(super) fn first(
        &mut self,
        message: RouteNetlinkMessage,
        most: usize,
        see: impl FnMut(&[u8]),
    ) -> Result<Walked, Error> {
        let name = request_name(&message);
        timing::part(name, || self.walk((message, NLM_F_DUMP), name, most, see))
    }

    /// `flags`: those of a dump, or of a request that is acknowledged.
    fn walk(
        &mut self,
        (message, flags): (RouteNetlinkMessage, u16),
        name: &'static str,
        most: usize,
        see: impl FnMut(&[u8]),
    ) -> Result<Walked, Error> {
        self.receiver.expect_short(flags & NLM_F_DUMP != 0 && name != LINKS);
        let walked = self.walk_answers((message, flags), name, most, see);
        self.receiver.expect_short(false);
        walked
    }

    fn walk_answers(
        &mut self,
        (message, flags): (RouteNetlinkMessage, u16),
        name: &'static str,
        most: usize,
        mut see: impl FnMut(&[u8]),
    ) -> Result<Walked, Error> {
        let malformed = |what| Error::Malformed { request: name, what };
        let mut datagram = Vec::new();
        self.append(&mut datagram, message, flags | NLM_F_REQUEST);
        let wanted = self.sequence;
        self.send(&datagram).map_err(|source| Error::Send(name, source))?;
        let (mut seen, mut interrupted) = (0, false);
        loop {
            let mut bytes = self.receiver.answer(&self.raw, name)?;
            while bytes.len() >= HEADER_LEN {
                let length = u32_at(bytes, 0).ok_or(malformed("short header"))? as usize;
                if length < HEADER_LEN || length > bytes.len() {
                    return Err(malformed("message length outside the datagram"));
                }
                let (message, rest) = bytes.split_at(length.next_multiple_of(4).min(bytes.len()));
                bytes = rest;
                if u32_at(message, 8) != Some(wanted) {
                    continue;
                }
                interrupted |= u16_at(message, 6).is_some_and(|flags| flags & NLM_F_DUMP_INTR != 0);
                match u16_at(message, 4) {
                    Some(NLMSG_DONE | NLMSG_ERROR) => {
                        match parse_message(&message[..length]).map_err(malformed)? {
                            Received { body: Body::Ack(errno, text) | Body::Done(errno, text), .. }
                                if errno != 0 =>
                            {
                                return Err(Refused { request: name, errno, text }.into());
                            }
                            Received { body: Body::Done(..), .. } if interrupted => {
                                return Ok(Walked::Interrupted);
                            }
                            // An acknowledgement ends a request for one object; dumps have none.
                            _ => return Ok(Walked::Whole),
                        }
                    }
                    _ if seen == most => return Ok(Walked::Left),
                    _ => {
                        seen += 1;
                        see(&message[HEADER_LEN..length]);
                    }
                }
            }
        }
    }

    fn dump_once(
        &mut self,
        message: RouteNetlinkMessage,
        name: &'static str,
    ) -> Result<Option<Vec<RouteNetlinkMessage>>, Error> {
        self.receiver.expect_short(name != LINKS);
        let found = self.dump_answers(message, name);
        self.receiver.expect_short(false);
        found
    }

    fn dump_answers(
        &mut self,
        message: RouteNetlinkMessage,
        name: &'static str,
    ) -> Result<Option<Vec<RouteNetlinkMessage>>, Error> {
        let mut datagram = Vec::new();
        self.append(&mut datagram, message, NLM_F_REQUEST | NLM_F_DUMP);
        let wanted = self.sequence;
        self.send(&datagram).map_err(|source| Error::Send(name, source))?;
        let (mut found, mut bytes, mut unreadable) = (Vec::new(), 0_usize, 0);
        let mut interrupted = false;
        loop {
            let received = self.receive(name)?;
            bytes = bytes.saturating_add(self.receiver.bytes().len());
            for message in received {
                if message.sequence != wanted {
                    continue;
                }
                interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
                match message.body {
                    Body::Payload(_) | Body::Unreadable
                        if found.len() + unreadable >= self.most || bytes > self.most_bytes =>
                    {
                        return Err(Error::TooMany(name, found.len()));
                    }
                    Body::Payload(payload) => found.push(payload),
                    // An unreadable object counts as absent here: one object that a newer kernel describes
                    // differently would otherwise hide all others. Data that a pod writes does not make an
                    // object unreadable, see `blurred` and `text`.
                    Body::Unreadable => unreadable += 1,
                    Body::Done(0, _) => return Ok((!interrupted).then_some(found)),
                    Body::Ack(0, _) => {}
                    // This also applies if objects changed meanwhile: an object that is missing from an
                    // aborted dump is not absent.
                    Body::Done(errno, text) | Body::Ack(errno, text) => {
                        return Err(Refused { request: name, errno, text }.into());
                    }
                }
            }
        }
    }

    fn append(&mut self, datagram: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let start = datagram.len();
        // Messages of a datagram start at multiples of four bytes (NLMSG_ALIGN).
        datagram.resize(start + message.buffer_len().next_multiple_of(4), 0);
        message.serialize(&mut datagram[start..start + message.buffer_len()]);
    }

    fn receive(&mut self, name: &'static str) -> Result<Vec<Received>, Error> {
        let datagram = self.receiver.answer(&self.raw, name)?;
        self.received = self.received.wrapping_add(datagram.len() as u64);
        parse_datagram(datagram).map_err(|what| Error::Malformed { request: name, what })
    }
}

/// How far a dump was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Walked {
    /// To its end.
    Whole,
    /// To its end, but objects changed meanwhile.
    Interrupted,
    /// Not to its end.
    Left,
}

fn request_name(message: &RouteNetlinkMessage) -> &'static str {
    use RouteNetlinkMessage as M;
    match message {
        M::NewLink(_) => "RTM_NEWLINK",
        M::DelLink(_) => DELETES,
        M::GetLink(_) => LINKS,
        M::SetLink(link) => set_link_name(link),
        M::NewAddress(_) => "RTM_NEWADDR",
        M::DelAddress(_) => "RTM_DELADDR",
        M::GetAddress(_) => "RTM_GETADDR",
        M::NewRoute(_) => "RTM_NEWROUTE",
        M::DelRoute(_) => "RTM_DELROUTE",
        M::GetRoute(_) => "RTM_GETROUTE",
        M::NewRule(_) => "RTM_NEWRULE",
        M::DelRule(_) => "RTM_DELRULE",
        M::GetRule(_) => "RTM_GETRULE",
        M::NewNeighbour(_) => "RTM_NEWNEIGH",
        M::GetNeighbour(_) => "RTM_GETNEIGH",
        M::NewQueueDiscipline(_) => "RTM_NEWQDISC",
        M::GetQueueDiscipline(_) => "RTM_GETQDISC",
        M::DelQueueDiscipline(_) => "RTM_DELQDISC",
        M::NewTrafficFilter(_) => "RTM_NEWTFILTER",
        M::DelTrafficFilter(_) => "RTM_DELTFILTER",
        M::GetTrafficFilter(_) => "RTM_GETTFILTER",
        M::GetNsId(_) => "RTM_GETNSID",
        M::GetStats(_) => "RTM_GETSTATS",
        _ => "a netlink request",
    }
}

/// The name includes what is changed, since one kind of change may take a hundred times as long as another.
fn set_link_name(link: &LinkMessage) -> &'static str {
    let named = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::VfInfoList(_) => Some("RTM_SETLINK of a VF by its card"),
        LinkAttribute::NetNsFd(_) | LinkAttribute::NetNsPid(_) => Some("RTM_SETLINK to another namespace"),
        LinkAttribute::Address(_) => Some("RTM_SETLINK of an address"),
        _ => None,
    });
    named.unwrap_or("RTM_SETLINK")
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::address::AddressMessage;
    use rtnetlink::{LinkMessageBuilder, LinkUnspec};

    use super::super::link::show;
    use super::*;

    impl Socket {
        /// Shrinks the receive queue, as if the kernel had refused a longer one.
        pub(in crate::netlink) fn narrow(&self) {
            rustix::net::sockopt::set_socket_recv_buffer_size(&self.raw, 64 << 10).unwrap();
        }
    }

    /// The kernel refuses to list the addresses of an interface that does not exist (from Linux 5.0 on).
    #[test]
    fn a_list_that_the_kernel_refuses_is_refused_however_it_is_read() {
        let mut addresses = AddressMessage::default();
        addresses.header.index = 0x7fff_ffff;
        let message = RouteNetlinkMessage::GetAddress(addresses);
        let mut socket = Socket::open().unwrap();
        let refusals = [
            socket.dump(message.clone()).map(drop),
            socket.scan(message.clone(), |_| Some(())).map(drop),
            socket.first(message, 8, |_| {}).map(drop),
        ];
        let errno = |refusal: Result<(), Error>| refusal.unwrap_err().errno();
        assert_eq!(refusals.map(errno), [Some(rustix::io::Errno::NODEV); 3]);
        // The socket is still in step with the kernel.
        let links = show(LinkMessageBuilder::<LinkUnspec>::new());
        assert!(!socket.dump(links).unwrap().is_empty());
    }
}
