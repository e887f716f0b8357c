//! A link that a pod gets: the requests that create it, and the state that it then has, which need not be queried.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoMacVlan, InfoVeth, LinkAttribute, LinkMessage};
use rtnetlink::{LinkMacVlan, LinkMacVtap, LinkMessageBuilder, LinkUnspec};

use super::super::address::no_link_local;
use super::super::socket::{CREATE, EXCL, NetlinkRequest};
use super::super::{Error, Handle};
use super::LinkState;
use super::mode::{kernel_mode, kernel_tap_mode};
use crate::mac::Mac;
use crate::spec;

/// MTU of a veth without a configured one, in bytes: that of Ethernet (`ETH_DATA_LEN`), the kernel's default too.
const DEFAULT_MTU: u32 = 1500;

/// The indices for new links. The kernel counts up from 1 and skips those in use. If a chosen index is in use, the
/// kernel chooses one instead.
const INDICES: std::ops::RangeInclusive<u16> = 4096..=u16::MAX;

/// A link to be created for a pod.
#[derive(Debug, Clone, Copy)]
pub enum NewLink<'a> {
    /// A veth pair, one end of which stays on the node.
    Veth {
        /// The pair.
        veth: &'a spec::Veth,
        /// Index of the bridge that gets the near end as a port.
        bridge: Option<u32>,
    },
    /// A macvlan or macvtap.
    Macvlan {
        /// The link.
        macvlan: &'a spec::Macvlan,
        /// Its parent.
        parent: &'a LinkState,
    },
}

/// The node's end of a link, if it has one, and the pod's.
pub type Ends = (Option<LinkState>, LinkState);

/// The kernel acknowledges each request of a datagram.
pub(super) const NO_ACKNOWLEDGEMENT: Error =
    Error::Malformed { request: "RTM_NEWLINK", what: "no acknowledgement" };

impl NewLink<'_> {
    /// Chooses what the kernel would otherwise choose for the ends, the near one first.
    pub(super) fn choose(&self) -> Vec<Chosen> {
        match self {
            Self::Veth { veth, .. } => vec![Chosen::new(None), Chosen::new(veth.mac)],
            Self::Macvlan { macvlan, .. } => vec![Chosen::new(macvlan.mac)],
        }
    }

    /// The requests for the link, of which the first creates it. `chosen`: the values from
    /// [`NewLink::choose`].
    pub(super) fn requests(&self, pod: BorrowedFd<'_>, chosen: &[Chosen]) -> Vec<NetlinkRequest> {
        match (*self, chosen) {
            (Self::Veth { veth, bridge }, [near, far]) => veth_requests(veth, bridge, pod, near, far),
            (Self::Macvlan { macvlan, parent }, [chosen]) => {
                vec![NetlinkRequest::new(macvlan_message(macvlan, parent, pod, chosen), CREATE | EXCL)]
            }
            _ => Vec::new(),
        }
    }

    /// The ends of the link after it was created with the chosen values.
    pub(super) fn ends(&self, chosen: &[Chosen], pod_handle: &mut Handle) -> Result<Ends, Error> {
        match (*self, chosen) {
            (Self::Veth { veth, bridge }, [near, far]) => {
                let mtu = veth.mtu.unwrap_or(DEFAULT_MTU);
                let near_end = LinkState {
                    up: true,
                    controller: bridge,
                    hairpin: veth.port.as_ref().map(|port| port.hairpin),
                    isolated: veth.port.as_ref().is_some_and(|port| port.isolated),
                    link: Some(far.index),
                    group: veth.group,
                    ..near.link(&veth.host_name, "veth", mtu)
                };
                let far_end = LinkState {
                    link: Some(near.index),
                    group: veth.group,
                    ..far.link(&veth.pod_name, "veth", mtu)
                };
                Ok((Some(near_end), far_end))
            }
            // A passthru macvlan has its parent's address, regardless of the requested one.
            (Self::Macvlan { macvlan, .. }, _) if macvlan.mode == spec::MacvlanMode::Passthru => {
                Ok((None, pod_handle.link(&macvlan.pod_name)?))
            }
            (Self::Macvlan { macvlan, parent }, [chosen]) => {
                let mtu = macvlan.mtu.unwrap_or(parent.mtu);
                let link = LinkState {
                    link: Some(parent.index),
                    mode: Some(spec::LinkMode::Macvlan(macvlan.mode)),
                    group: macvlan.group,
                    ..chosen.link(&macvlan.pod_name, kind_of(macvlan), mtu)
                };
                Ok((None, link))
            }
            _ => Err(NO_ACKNOWLEDGEMENT),
        }
    }
}

fn veth_requests(
    veth: &spec::Veth,
    bridge: Option<u32>,
    pod: BorrowedFd<'_>,
    near: &Chosen,
    far: &Chosen,
) -> Vec<NetlinkRequest> {
    let mtu = veth.mtu.unwrap_or(DEFAULT_MTU);
    let far = far.build(
        LinkUnspec::new_with_name(&veth.pod_name)
            .setns_by_fd(pod.as_raw_fd())
            .link_group(veth.group)
            .mtu(mtu),
    );
    let mut create = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Veth)
        .name(veth.host_name.clone())
        .up()
        .link_group(veth.group)
        .mtu(mtu)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(far)));
    if let Some(bridge) = bridge {
        create = create.controller(bridge);
    }
    let create = RouteNetlinkMessage::NewLink(near.build(create));
    let mut requests = vec![NetlinkRequest::new(create, CREATE | EXCL)];
    if bridge.is_some() {
        // A bridge port has no network layer, but the kernel would still give it a link-local address once
        // the other end is up. The request names the port, whose name is derived from the attachment's: the
        // chosen index may belong to another link, which is why the previous request may have failed.
        requests.push(NetlinkRequest::new(no_link_local(LinkUnspec::new_with_name(&veth.host_name)), 0));
    }
    requests
}

fn macvlan_message(
    macvlan: &spec::Macvlan,
    parent: &LinkState,
    pod: BorrowedFd<'_>,
    chosen: &Chosen,
) -> RouteNetlinkMessage {
    let name = macvlan.pod_name.as_str();
    let mtu = macvlan.mtu.unwrap_or(parent.mtu);
    if macvlan.tap {
        let link = LinkMacVtap::new(name, parent.index, kernel_tap_mode(macvlan.mode))
            .setns_by_fd(pod.as_raw_fd())
            .link_group(macvlan.group)
            .mtu(mtu);
        return RouteNetlinkMessage::NewLink(chosen.build(link));
    }
    let mut link = LinkMacVlan::new(name, parent.index, kernel_mode(macvlan.mode))
        .setns_by_fd(pod.as_raw_fd())
        .link_group(macvlan.group)
        .mtu(mtu);
    if let Some(length) = macvlan.broadcast_queue {
        link = link.append_info_data(InfoMacVlan::BcQueueLen(length));
    }
    RouteNetlinkMessage::NewLink(chosen.build(link))
}

/// Properties of a new link that the kernel would choose. Choosing them here avoids a query afterwards, which costs
/// more than everything else about a link that the kernel does not wait for.
pub(super) struct Chosen {
    /// 0: the kernel chooses after all.
    index: u32,
    mac: Mac,
}

impl Chosen {
    /// Chooses random values, except for a requested address. Random numbers come from the standard library's hash
    /// keys: they need to be different, not secret.
    fn new(mac: Option<Mac>) -> Self {
        let random = RandomState::new().build_hasher().finish();
        let [first, .., a, b] = random.to_ne_bytes();
        let (low, high) = (u32::from(*INDICES.start()), u32::from(*INDICES.end()));
        let index = low + u32::from(u16::from_ne_bytes([a, b])) % (high - low + 1);
        let octets = RandomState::new().build_hasher().finish().to_ne_bytes();
        // Locally administered (bit 1 set), unicast (bit 0 clear): like the kernel's random addresses.
        let random = Mac([first & 0xfe | 0x02, octets[0], octets[1], octets[2], octets[3], octets[4]]);
        Self { index, mac: mac.unwrap_or(random) }
    }

    pub(super) fn without_index(&self) -> Self {
        Self { index: 0, mac: self.mac }
    }

    /// Builds the request with one queue in each direction: see [`Handle::create_links`].
    fn build<T: std::fmt::Debug + Default>(&self, link: LinkMessageBuilder<T>) -> LinkMessage {
        let mut message = link
            .append_extra_attribute(LinkAttribute::NumTxQueues(1))
            .append_extra_attribute(LinkAttribute::NumRxQueues(1))
            .address(self.mac.0.to_vec())
            .build();
        message.header.index = self.index;
        message
    }

    /// The state of a link created with these values: down, without bridge and group.
    fn link(&self, name: &str, kind: &str, mtu: u32) -> LinkState {
        LinkState {
            index: self.index,
            name: name.to_owned(),
            kind: kind.to_owned(),
            mac: Some(self.mac),
            mtu,
            up: false,
            promiscuous: false,
            controller: None,
            hairpin: None,
            isolated: false,
            link: None,
            mode: None,
            group: 0,
            own: false,
            table: None,
        }
    }
}

fn kind_of(macvlan: &spec::Macvlan) -> &'static str {
    if macvlan.tap { "macvtap" } else { "macvlan" }
}
