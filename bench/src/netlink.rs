//! Just enough netlink for the floor: several requests in one datagram, one acknowledgement each.
//!
//! Deliberately not the code under test: the floor must show the kernel's cost, not netattach's.

pub(super) mod interfaces;

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

use anyhow::{Context, bail};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcMessage, TcOption};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Larger than any answer of the kernel to one request.
const RECEIVE_BUFFER: usize = 64 * 1024;

/// A route socket; it stays in the namespace of the thread that opened it.
pub(super) struct Netlink {
    socket: Socket,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket in the calling thread's namespace.
    pub(super) fn open() -> anyhow::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE).context("open a netlink socket")?;
        socket.bind_auto().context("bind a netlink socket")?;
        Ok(Self { socket, buffer: Vec::with_capacity(RECEIVE_BUFFER) })
    }

    /// Opens a socket in another namespace and returns to `home`.
    pub(super) fn open_in(namespace: BorrowedFd<'_>, home: BorrowedFd<'_>) -> anyhow::Result<Self> {
        enter(namespace)?;
        let opened = Self::open();
        enter(home)?;
        opened
    }

    /// Sends all requests at once and waits until each is acknowledged.
    pub(super) fn send(&mut self, requests: Vec<RouteNetlinkMessage>) -> anyhow::Result<()> {
        let count = requests.len();
        let mut datagram = Vec::new();
        for request in requests {
            // In a deletion the bit of NLM_F_EXCL has another meaning.
            let create = match request {
                RouteNetlinkMessage::DelLink(_)
                | RouteNetlinkMessage::SetLink(_)
                | RouteNetlinkMessage::DelQueueDiscipline(_) => 0,
                _ => NLM_F_CREATE | NLM_F_EXCL,
            };
            append(&mut datagram, request, NLM_F_REQUEST | NLM_F_ACK | create);
        }
        self.socket.send(&datagram, 0).context("send to the kernel")?;
        let mut acknowledged = 0;
        while acknowledged < count {
            self.receive(|message| {
                if let NetlinkPayload::Error(answer) = message.payload {
                    if let Some(code) = answer.code {
                        bail!(io::Error::from_raw_os_error(-code.get()));
                    }
                    acknowledged += 1;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Names of all links.
    pub(super) fn link_names(&mut self) -> anyhow::Result<Vec<String>> {
        Ok(self.links()?.into_iter().filter_map(name_of).collect())
    }

    /// Names of the links that are up and have a carrier.
    #[cfg(feature = "cluster")]
    pub(super) fn running(&mut self) -> anyhow::Result<Vec<String>> {
        let mut links = self.links()?;
        links.retain(|link| link.header.flags.contains(LinkFlags::Running));
        Ok(links.into_iter().filter_map(name_of).collect())
    }

    fn links(&mut self) -> anyhow::Result<Vec<LinkMessage>> {
        let mut datagram = Vec::new();
        append(
            &mut datagram,
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            NLM_F_REQUEST | NLM_F_DUMP,
        );
        self.socket.send(&datagram, 0).context("send to the kernel")?;
        let (mut links, mut done) = (Vec::new(), false);
        while !done {
            self.receive(|message| {
                match message.payload {
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => links.push(link),
                    NetlinkPayload::Done(_) => done = true,
                    _ => {}
                }
                Ok(())
            })?;
        }
        Ok(links)
    }

    fn receive(
        &mut self,
        mut each: impl FnMut(NetlinkMessage<RouteNetlinkMessage>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.buffer.clear();
        self.socket.recv(&mut self.buffer, 0).context("receive from the kernel")?;
        let mut rest = self.buffer.as_slice();
        while !rest.is_empty() {
            let message =
                NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).context("read a netlink message")?;
            // Messages stand at multiples of four bytes.
            let length = usize::try_from(message.header.length).context("read a length")?.next_multiple_of(4);
            each(message)?;
            rest = rest.get(length..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Moves the calling thread into a network namespace.
pub(super) fn enter(namespace: BorrowedFd<'_>) -> anyhow::Result<()> {
    move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
        .context("enter a network namespace")
}

/// Moves the calling thread into a new network namespace.
pub(super) fn leave_for_new() -> anyhow::Result<()> {
    // SAFETY: only the network namespace of this thread changes; memory and descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.context("make a network namespace (root is needed)")
}

/// A bridge, up.
pub(super) fn bridge(name: &str, index: u32) -> RouteNetlinkMessage {
    let mut link = named(name, index);
    up(&mut link);
    link.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]));
    RouteNetlinkMessage::NewLink(link)
}

/// A veth pair in one namespace; the first end is up. A kernel without modules has no dummy links.
pub(super) fn pair(near: (&str, u32), far: (&str, u32)) -> RouteNetlinkMessage {
    let mut link = named(near.0, near.1);
    up(&mut link);
    link.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(named(far.0, far.1)))),
    ]));
    RouteNetlinkMessage::NewLink(link)
}

/// One end of a veth here, up, as a port of a bridge if one is named; the other in `pod` with its final name. One
/// queue each.
pub(super) fn veth(
    near: (&str, u32),
    far: (&str, u32),
    bridge: Option<u32>,
    pod: BorrowedFd<'_>,
    group: u32,
) -> RouteNetlinkMessage {
    let mut peer = named(far.0, far.1);
    one_queue(&mut peer);
    peer.attributes.extend([LinkAttribute::NetNsFd(pod.as_raw_fd()), LinkAttribute::Group(group)]);
    let mut link = named(near.0, near.1);
    up(&mut link);
    one_queue(&mut link);
    link.attributes.extend(bridge.map(LinkAttribute::Controller));
    link.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
    ]));
    RouteNetlinkMessage::NewLink(link)
}

/// A macvlan in bridge mode, made in `pod` with its final name, up.
pub(super) fn macvlan(
    name: &str,
    index: u32,
    parent: u32,
    pod: BorrowedFd<'_>,
    group: u32,
) -> RouteNetlinkMessage {
    interfaces::made_in(interfaces::Driver::Macvlan, (name, index), Some(parent), pod, group)
}

/// Sets a link up.
pub(super) fn set_up(index: u32) -> RouteNetlinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    up(&mut link);
    RouteNetlinkMessage::SetLink(link)
}

/// Gives a link an IPv4 address.
pub(super) fn address(index: u32, address: Ipv4Addr, prefix: u8) -> RouteNetlinkMessage {
    RouteNetlinkMessage::NewAddress(address_of(index, address, prefix))
}

fn address_of(index: u32, address: Ipv4Addr, prefix: u8) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = AddressFamily::Inet;
    message.header.prefix_len = prefix;
    message.header.index = index;
    message
        .attributes
        .extend([AddressAttribute::Local(address.into()), AddressAttribute::Address(address.into())]);
    message
}

/// The default route.
pub(super) fn default_route(gateway: Ipv4Addr) -> RouteNetlinkMessage {
    RouteNetlinkMessage::NewRoute(route_with(vec![RouteAttribute::Gateway(RouteAddress::Inet(gateway))]))
}

/// A route of the main table.
fn route_with(attributes: Vec<RouteAttribute>) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Static;
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::Unicast;
    message.attributes = attributes;
    message
}

/// Deletes every link of a group, in one wait of the kernel.
pub(super) fn delete_group(group: u32) -> RouteNetlinkMessage {
    let mut link = LinkMessage::default();
    link.attributes.push(LinkAttribute::Group(group));
    RouteNetlinkMessage::DelLink(link)
}

/// The hook of a device's programs.
#[derive(Clone, Copy)]
pub(super) enum Hook {
    Ingress,
    Egress,
}

/// Hooks for programs on a device.
pub(super) fn clsact(index: u32) -> RouteNetlinkMessage {
    RouteNetlinkMessage::NewQueueDiscipline(clsact_of(index))
}

/// Takes a device's hooks away, and the programs with them.
pub(super) fn no_clsact(index: u32) -> RouteNetlinkMessage {
    RouteNetlinkMessage::DelQueueDiscipline(clsact_of(index))
}

/// A program on a hook of a device, by its number among those there.
pub(super) fn program(index: u32, hook: Hook, number: u32, program: BorrowedFd<'_>) -> RouteNetlinkMessage {
    const ETH_P_ALL: u16 = 3;
    let minor = match hook {
        Hook::Ingress => TcHandle::MIN_INGRESS,
        Hook::Egress => TcHandle::MIN_EGRESS,
    };
    let mut message = TcMessage::with_index(index.cast_signed());
    message.header.handle = TcHandle::from(number);
    message.header.parent = TcHandle { major: 0xffff, minor };
    message.header.info = 1 << 16 | u32::from(ETH_P_ALL.to_be());
    message.attributes.push(TcAttribute::Kind("bpf".into()));
    message.attributes.push(TcAttribute::Options(vec![
        // A file descriptor is never negative.
        TcOption::Bpf(TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned())),
        TcOption::Bpf(TcFilterBpfOption::ProgName("floor".into())),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ]));
    RouteNetlinkMessage::NewTrafficFilter(message)
}

fn clsact_of(index: u32) -> TcMessage {
    let mut message = TcMessage::with_index(index.cast_signed());
    message.header.handle = TcHandle { major: 0xffff, minor: 0 };
    message.header.parent = TcHandle::CLSACT;
    message.attributes.push(TcAttribute::Kind("clsact".into()));
    message
}

fn named(name: &str, index: u32) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.attributes.push(LinkAttribute::IfName(name.to_owned()));
    link
}

fn up(link: &mut LinkMessage) {
    link.header.flags |= LinkFlags::Up;
    link.header.change_mask |= LinkFlags::Up;
}

fn one_queue(link: &mut LinkMessage) {
    link.attributes.extend([LinkAttribute::NumTxQueues(1), LinkAttribute::NumRxQueues(1)]);
}

fn name_of(link: LinkMessage) -> Option<String> {
    link.attributes.into_iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name),
        _ => None,
    })
}

fn append(datagram: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
    message.finalize();
    let start = datagram.len();
    datagram.resize(start + message.buffer_len().next_multiple_of(4), 0);
    message.serialize(&mut datagram[start..]);
}
