//! A cache of the links that each ADD needs, bridges and parents, kept up to date by the kernel's
//! notifications.
//!
//! The cache answers like a new request: the kernel queues the notification of a change on the socket before
//! the request that made the change returns, and each lookup first reads all queued notifications. The kernel
//! reports every change of a link that is up, but not every change of a link that is down, so links that are
//! down are not cached. Neither is the absence of a link. An IPv6 address is reported a moment later, by a
//! worker (`addrconf_dad_work`), so callers that change addresses invalidate the link's entry
//! ([`KnownLinks::readdressed`]); addresses that other programs add to a bridge are known after that moment.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket as RawSocket, protocols::NETLINK_ROUTE};

use super::change_watch::{alone, half, messages, word};
use super::lean::{RTM_NEWLINK, lean};
use super::link::observed;
use super::receive::Receiver;
use super::socket_filter::{By, receive_only};
use super::{Error, Handle, LinkState};

/// `RTNLGRP_LINK`, `RTNLGRP_IPV4_IFADDR` and `RTNLGRP_IPV6_IFADDR` of `linux/rtnetlink.h`.
const GROUPS: [u32; 3] = [1, 5, 9];
const HEADER: usize = 16;
/// Offset of the address family, and of the link's index in `ifinfomsg` and `ifaddrmsg`.
const FAMILY_AT: usize = HEADER;
const INDEX_AT: usize = HEADER + 4;
/// Most links that are cached. A node has a handful of bridges and cards.
const MOST: usize = 64;
/// Most addresses of a link that are cached.
const MOST_ADDRESSES: usize = 64;

/// A cache of bridges and parents in the namespace of the thread that opened it.
pub struct KnownLinks(Mutex<State>);

struct State {
    socket: RawSocket,
    receiver: Receiver,
    links: BTreeMap<u32, Known>,
}

struct Known {
    /// `None`: unknown, to be requested again.
    link: Option<LinkState>,
    /// `None`: unknown, to be requested again.
    addresses: Option<Vec<IpNet>>,
}

impl KnownLinks {
    /// Opens an empty cache.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> Result<Self, Error> {
        let mut socket = RawSocket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        socket.bind_auto().map_err(Error::Open)?;
        socket.set_non_blocking(true).map_err(Error::Open)?;
        // No link is cached yet.
        receive_only(&socket, By::Link(&[])).map_err(Error::Open)?;
        for group in GROUPS {
            socket.add_membership(group).map_err(Error::Open)?;
        }
        Ok(Self(Mutex::new(State { socket, receiver: Receiver::of_notifications(), links: BTreeMap::new() })))
    }

    /// Returns the link of that name, like [`Handle::find_link`]. `host` is a handle in the same namespace.
    ///
    /// # Errors
    /// A request to the kernel failed.
    pub fn find(&self, name: &str, host: &mut Handle) -> Result<Option<LinkState>, Error> {
        let mut state = self.lock();
        state.follow();
        let known =
            state.links.values().filter_map(|known| known.link.as_ref()).find(|link| link.name == name);
        if let Some(link) = known {
            return Ok(Some(link.clone()));
        }
        let Some(found) = host.find_link(name)? else { return Ok(None) };
        if !found.up {
            return Ok(Some(found));
        }
        let link = if state.links.contains_key(&found.index) {
            // Notifications about the link have been received since before this request.
            found
        } else if state.listen(found.index)
            && let Some(link) = host.find_link(name)?.filter(|link| link.up && link.index == found.index)
        {
            // Notifications about the link are received from the filter change on, so the link was requested
            // once more after it.
            link
        } else {
            return Ok(Some(found));
        };
        // The notifications of changes since the request are already queued.
        state.links.entry(link.index).or_insert(Known { link: None, addresses: None }).link =
            Some(link.clone());
        state.follow();
        Ok(Some(link))
    }

    /// Returns the addresses of a link, like [`Handle::addresses`]. `host` is a handle in the same namespace.
    ///
    /// # Errors
    /// A request to the kernel failed.
    pub fn addresses(&self, index: u32, host: &mut Handle) -> Result<Vec<IpNet>, Error> {
        let mut state = self.lock();
        state.follow();
        if let Some(known) = state.links.get(&index).and_then(|known| known.addresses.as_ref()) {
            return Ok(known.clone());
        }
        let found = host.addresses(index)?;
        if found.len() <= MOST_ADDRESSES
            && let Some(known) = state.links.get_mut(&index)
        {
            known.addresses = Some(found.clone());
            state.follow();
        }
        Ok(found)
    }

    /// Processes the notifications that are queued, so that the next lookup has fewer to process. Does
    /// nothing while another thread uses the cache.
    pub fn catch_up(&self) {
        if let Ok(mut state) = self.0.try_lock() {
            state.follow();
        }
    }

    /// Invalidates the cached addresses of a link after a change.
    pub fn readdressed(&self, index: u32) {
        if let Some(known) = self.lock().links.get_mut(&index) {
            known.addresses = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No lock is poisoned: a panic ends the agent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Has the kernel send notifications about one more link. Returns whether that succeeded.
    fn listen(&mut self, index: u32) -> bool {
        if self.links.contains_key(&index) {
            return true;
        }
        if self.links.len() >= MOST {
            self.links.clear();
        }
        self.links.insert(index, Known { link: None, addresses: None });
        let all: Vec<u32> = self.links.keys().copied().collect();
        let is_told = receive_only(&self.socket, By::Link(&all)).is_ok();
        if !is_told {
            self.links.remove(&index);
        }
        is_told
    }

    /// Processes the queued notifications. The kernel sends several notifications about a parent for each
    /// macvlan that is created or deleted: only the last message about a link is parsed.
    fn follow(&mut self) {
        let mut last_words = BTreeMap::new();
        loop {
            match self.receiver.receive(&self.socket) {
                Ok(()) => take_over(&mut self.links, &mut last_words, self.receiver.bytes()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                // The queue was full. The kernel drops further messages until the queue is empty, so no
                // queued message is known to be the last.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    self.empty();
                    return self.forget();
                }
                // Without notifications, each lookup asks the kernel.
                Err(_) => return self.forget(),
            }
        }
        for (index, message) in last_words {
            if let Some(known) = self.links.get_mut(&index) {
                known.link = told(&message).filter(|link| link.up);
            }
        }
    }

    fn empty(&mut self) {
        loop {
            match self.receiver.receive(&self.socket) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(_) => return,
            }
        }
    }

    fn forget(&mut self) {
        self.links.values_mut().for_each(|known| *known = Known { link: None, addresses: None });
    }
}

/// Processes the messages of a datagram about cached links. `last_words`: for each link the last message that
/// describes it completely, unless a later message invalidates it.
fn take_over(links: &mut BTreeMap<u32, Known>, last_words: &mut BTreeMap<u32, Vec<u8>>, datagram: &[u8]) {
    for message in messages(datagram).map(alone) {
        let index = word(message, INDEX_AT);
        if let Some((index, known)) = index.and_then(|index| Some((index, links.get_mut(&index)?))) {
            match (half(message, 4), message.get(FAMILY_AT)) {
                (Some(RTM_NEWLINK), Some(0)) => {
                    known.link = None;
                    let last = last_words.entry(index).or_default();
                    last.clear();
                    last.extend_from_slice(message);
                }
                // The link is gone; or this message is a notification about a bridge port, which does not
                // describe the link completely.
                (Some(kind), _) if kind <= RTM_NEWLINK + 3 => {
                    known.link = None;
                    last_words.remove(&index);
                }
                _ => known.addresses = None,
            }
        }
    }
}

fn told(message: &[u8]) -> Option<LinkState> {
    let mut header = NetlinkHeader::default();
    header.message_type = RTM_NEWLINK;
    let payload = lean(RTM_NEWLINK, message.get(HEADER..)?);
    RouteNetlinkMessage::deserialize(&header, &payload).ok().and_then(observed)
}

impl std::fmt::Debug for KnownLinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KnownLinks").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, within};
    use crate::{spec, timing};

    struct Rig {
        netns: Netns,
        known: KnownLinks,
        host: Handle,
        bridge: u32,
    }

    /// A bridge `br0` in the cache.
    fn rig() -> Rig {
        let netns = Netns::private().unwrap();
        let known = within(&netns, || KnownLinks::open().unwrap()).unwrap();
        let mut host = Handle::open_in(&netns).unwrap();
        let made = host.ensure_bridge(&bridge("br0")).unwrap();
        assert_eq!(known.find("br0", &mut host).unwrap(), host.find_link("br0").unwrap());
        Rig { netns, known, host, bridge: made.link.index }
    }

    fn bridge(name: &str) -> spec::Bridge {
        spec::Bridge { name: name.to_owned(), mtu: None, promiscuous: false, vlan_filtering: false }
    }

    impl Rig {
        fn is_kept(&self) -> bool {
            let mut state = self.known.lock();
            state.follow();
            state.links.get(&self.bridge).is_some_and(|known| known.link.is_some())
        }

        fn agree(&mut self, name: &str) {
            assert_eq!(
                self.known.find(name, &mut self.host).unwrap(),
                self.host.find_link(name).unwrap(),
                "{name}"
            );
        }
    }

    #[test]
    fn a_link_that_changes_is_known_as_it_is_now() {
        let mut rig = rig();
        assert!(rig.is_kept());
        rig.host.set_mtu(rig.bridge, 1400).unwrap();
        assert!(rig.is_kept(), "the notification has all of it");
        rig.agree("br0");
        rig.host.rename(rig.bridge, "br1").unwrap();
        rig.agree("br0");
        rig.agree("br1");
        let other = rig.host.ensure_bridge(&bridge("br0")).unwrap().link;
        assert_eq!(rig.known.find("br0", &mut rig.host).unwrap().map(|link| link.index), Some(other.index));
        rig.host.ensure_link_absent("br1").unwrap();
        rig.agree("br1");
    }

    #[test]
    fn what_has_been_taken_over_is_known_without_a_question() {
        let mut rig = rig();
        rig.host.set_mtu(rig.bridge, 1400).unwrap();
        rig.known.catch_up();
        let state = rig.known.lock();
        let mut told = [0; HEADER];
        let left = state.socket.recv(&mut &mut told[..], libc::MSG_PEEK).map_err(|error| error.kind());
        assert_eq!(left, Err(std::io::ErrorKind::WouldBlock), "nothing is left in the socket");
        let known = state.links.get(&rig.bridge).and_then(|known| known.link.as_ref());
        assert_eq!(known.map(|link| link.mtu), Some(1400));
    }

    #[test]
    fn what_the_kernel_may_not_tell_of_is_not_kept() {
        let mut rig = rig();
        rig.host.set_down(rig.bridge).unwrap();
        assert!(!rig.is_kept());
        rig.agree("br0");
        assert!(!rig.is_kept(), "it is down");
        assert_eq!(rig.known.find("nothing", &mut rig.host).unwrap(), None);
    }

    #[test]
    fn a_link_of_which_the_kernel_tells_is_asked_for_once() {
        let mut rig = rig();
        rig.known.lock().forget();
        let (found, times) = timing::operation(|| rig.known.find("br0", &mut rig.host).unwrap());
        let asked = times.runs().iter().filter(|run| run.name == "RTM_GETLINK").count();
        assert_eq!((found.map(|link| link.index), asked), (Some(rig.bridge), 1));
        assert!(rig.is_kept());
        rig.host.set_mtu(rig.bridge, 1400).unwrap();
        rig.agree("br0");
    }

    #[test]
    fn addresses_are_known_as_they_are_now() {
        let mut rig = rig();
        let agree = |rig: &mut Rig| {
            let known = rig.known.addresses(rig.bridge, &mut rig.host).unwrap();
            assert_eq!(known, rig.host.addresses(rig.bridge).unwrap());
            known.len()
        };
        let before = agree(&mut rig);
        rig.host.ensure_address(rig.bridge, "10.1.0.1/24".parse().unwrap()).unwrap();
        assert_eq!(agree(&mut rig), before + 1);
        rig.host.ensure_address_absent(rig.bridge, "10.1.0.1/24".parse().unwrap()).unwrap();
        assert_eq!(agree(&mut rig), before);
    }

    #[test]
    fn an_address_of_its_own_making_is_known_at_once() {
        let mut rig = rig();
        for number in 1..20 {
            rig.known.addresses(rig.bridge, &mut rig.host).unwrap();
            let net: IpNet = format!("fd00:{number:x}::1/64").parse().unwrap();
            rig.host.ensure_address(rig.bridge, net).unwrap();
            rig.known.readdressed(rig.bridge);
            assert!(rig.known.addresses(rig.bridge, &mut rig.host).unwrap().contains(&net));
        }
    }

    #[test]
    fn a_link_that_is_made_anew_is_known_by_its_index() {
        let mut rig = rig();
        for _ in 0..5 {
            rig.host.ensure_link_absent("br0").unwrap();
            rig.host.ensure_bridge(&bridge("br0")).unwrap();
            rig.agree("br0");
            rig.agree("br0");
        }
    }

    #[test]
    fn a_link_that_has_all_other_names_that_it_may_have_is_known_as_well() {
        let mut rig = rig();
        let many: Vec<String> = (0..496).map(|number| format!("{number:0127}")).collect();
        rig.host.add_other_names(rig.bridge, &many).unwrap();
        // With so many changes some notifications are lost, as is the first that is longer than the buffer.
        rig.agree("br0");
        rig.host.set_group(rig.bridge, 6).unwrap();
        rig.agree("br0");
        rig.host.set_group(rig.bridge, 7).unwrap();
        assert!(rig.is_kept(), "the notification has all of it");
        rig.agree("br0");
    }

    #[test]
    fn notifications_that_were_lost_are_made_up_for() {
        let mut rig = rig();
        // Each notification has a kilobyte or two, and the queue takes some two hundred.
        for mtu in 0..2000 {
            rig.host.set_mtu(rig.bridge, 1400 + mtu % 2).unwrap();
        }
        rig.host.set_mtu(rig.bridge, 1300).unwrap();
        rig.agree("br0");
        drop(rig.netns);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            take_over(&mut BTreeMap::new(), &mut BTreeMap::new(), &bytes);
        }
    }
}
