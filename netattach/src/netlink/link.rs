//! Links: creating them in place, finding them, deleting them.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoBridgePort, InfoData, InfoIpVlan, InfoKind, InfoMacVlan, InfoMacVtap, InfoPortData, InfoVeth,
    InfoVlan, InfoVrf, IpVlanMode, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkMessage,
    MacVlanMode, MacVtapMode, State, VlanProtocol,
};
use rtnetlink::{LinkBridge, LinkMacVlan, LinkMacVtap, LinkMessageBuilder, LinkUnspec};

use super::address::no_link_local;
use super::netkit::observed_ways;
use super::socket::{CREATE, EXCL, NetlinkRequest, Reply};
use super::tap::observed_access;
use super::{Error, Handle};
use crate::error_chain::Chain;
use crate::mac::Mac;
use crate::spec;
use crate::timing;

/// Temporary name of a new macvlan if the node has a link of the final name, see [`Handle::create_macvlan`].
const TEMPORARY_PREFIX: &str = "nat";

/// Alias of a bridge or VRF that netattach has created. Such links outlast the attachment that they were
/// created for; only links with this alias may be deleted.
pub(super) const BRIDGE_ALIAS: &str = "netattach";

/// MTU of a veth without a configured one, in bytes: that of Ethernet (`ETH_DATA_LEN`), the kernel's default too.
const DEFAULT_MTU: u32 = 1500;

/// The indices for new links. The kernel counts up from 1 and skips those in use. If a chosen index is in use, the
/// kernel chooses one instead.
const INDICES: std::ops::RangeInclusive<u16> = 4096..=u16::MAX;

/// Maximum time for a link to carry packets once both its ends are up.
const CARRIER_WAIT: Duration = Duration::from_secs(1);
/// Most links that are requested in one datagram: each answer takes some kilobytes of the receive queue.
const SHOWN_AT_ONCE: usize = 32;
/// Time between two checks of the carrier.
const CARRIER_POLL: Duration = Duration::from_millis(1);

/// A link as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkState {
    /// Index in its namespace.
    pub index: u32,
    /// Name in its namespace.
    pub name: String,
    /// `veth`, `bridge`, `macvlan`, ...; empty for physical and loopback devices.
    pub kind: String,
    /// Ethernet address, if it has one of six bytes.
    pub mac: Option<Mac>,
    /// In bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// Whether the link was configured to receive all frames.
    pub promiscuous: bool,
    /// Index of the bridge (or other controller) of which the link is a port.
    pub controller: Option<u32>,
    /// Whether frames may leave through the port on which they arrived; only for a bridge port.
    pub hairpin: Option<bool>,
    /// Whether the port exchanges no frames with other isolated ports.
    pub isolated: bool,
    /// Index of the peer or parent, possibly in another namespace.
    pub link: Option<u32>,
    /// Mode, if the kind has modes.
    pub mode: Option<spec::LinkMode>,
    /// Link group.
    pub group: u32,
    /// Created by netattach, and not for a single pod or attachment: a bridge, the port that holds the node's
    /// gateway in a VLAN of a bridge, or a VRF.
    pub own: bool,
    /// Routing table, of a VRF.
    pub table: Option<u32>,
}

impl LinkState {
    /// Whether the kernel may change its Ethernet address with that of its parent: see
    /// [`spec::Link::follows_parent`]. Nothing shows whether the address of a VLAN was set.
    pub fn may_follow_parent(&self) -> bool {
        let is_passthru = self.mode == Some(spec::LinkMode::Macvlan(spec::MacvlanMode::Passthru));
        is_passthru || matches!(self.kind.as_str(), "ipvlan" | "vlan")
    }

    /// Whether the link is a network card: its driver reports no kind.
    pub fn is_card(&self) -> bool {
        self.kind.is_empty()
    }

    /// Whether the link is a bridge that netattach has created.
    pub fn own_bridge(&self) -> bool {
        self.own && self.kind == "bridge"
    }
}

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
const NO_ACKNOWLEDGEMENT: Error = Error::Malformed { request: "RTM_NEWLINK", what: "no acknowledgement" };

/// The object that `ensure` found or created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ensured {
    /// The link.
    pub link: LinkState,
    /// Whether this call created it.
    pub created: bool,
}

/// Administrative state of a new bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Born {
    /// Up.
    Up,
    /// Down, until further settings have been made.
    Down,
}

impl Born {
    /// Begins a request that creates a bridge.
    pub(super) fn bridge(self, name: &str) -> LinkMessageBuilder<LinkBridge> {
        match self {
            Self::Up => LinkBridge::new(name),
            Self::Down => LinkMessageBuilder::<LinkBridge>::new(name),
        }
    }
}

impl Handle {
    /// The link of that name, or `None`.
    pub fn find_link(&mut self, name: &str) -> Result<Option<LinkState>, Error> {
        match self.socket.request(show(LinkUnspec::new_with_name(name)), 0) {
            Ok(answers) => Ok(answers.into_iter().find_map(observed)),
            Err(error) if error.not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the link of that name. Also returns `None` if the link exists but cannot be described
    /// ([`Error::is_untold`]), which a process in the namespace can cause.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn find_told(&mut self, name: &str) -> Result<Option<LinkState>, Error> {
        match self.find_link(name) {
            Err(error) if error.is_untold() => Ok(None),
            found => found,
        }
    }

    /// The link of that name.
    ///
    /// # Errors
    /// [`Error::NoSuchLink`] if there is none.
    pub fn link(&mut self, name: &str) -> Result<LinkState, Error> {
        self.find_link(name)?.ok_or_else(|| Error::NoSuchLink(name.to_owned()))
    }

    /// The link of that index.
    ///
    /// # Errors
    /// [`Error::NoSuchLink`] if there is none.
    pub fn link_by_index(&mut self, index: u32) -> Result<LinkState, Error> {
        let found = match self.socket.request(show(LinkUnspec::new_with_index(index)), 0) {
            Err(error) if error.not_found() => Vec::new(),
            other => other?,
        };
        found.into_iter().find_map(observed).ok_or_else(|| Error::NoSuchLink(format!("with index {index}")))
    }

    /// All links of the namespace.
    pub fn links(&mut self) -> Result<Vec<LinkState>, Error> {
        Ok(self.all_links()?.into_iter().filter_map(observed).collect())
    }

    /// The bridges of the namespace that netattach has made, each with the number of its ports. The ports by which the
    /// node has gateways in VLANs are not counted: they go with the bridge.
    pub fn own_bridges(&mut self) -> Result<Vec<(LinkState, usize)>, Error> {
        let links = self.links()?;
        let is_port = |link: &&LinkState, bridge: u32| !link.own && link.controller == Some(bridge);
        let ports = |bridge: u32| links.iter().filter(|link| is_port(link, bridge)).count();
        let own = links.iter().filter(|link| link.own_bridge());
        Ok(own.map(|bridge| (bridge.clone(), ports(bridge.index))).collect())
    }

    /// Creates a veth pair, as [`Handle::create_links`] does. Returns the near end and the far end.
    pub fn create_veth(
        &mut self,
        veth: &spec::Veth,
        bridge: Option<u32>,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<(LinkState, LinkState), Error> {
        let made = self.create_links(&[NewLink::Veth { veth, bridge }], pod, pod_handle)?;
        match made.into_iter().next().transpose()? {
            Some((Some(near), far)) => Ok((near, far)),
            _ => Err(NO_ACKNOWLEDGEMENT),
        }
    }

    /// Creates a macvlan on `parent`, as [`Handle::create_links`] does.
    pub fn create_macvlan(
        &mut self,
        macvlan: &spec::Macvlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let made = self.create_links(&[NewLink::Macvlan { macvlan, parent }], pod, pod_handle)?;
        let made = made.into_iter().next().transpose()?;
        made.map(|(_, far)| far).ok_or(NO_ACKNOWLEDGEMENT)
    }

    /// Creates links of a pod in one datagram, directly in `pod` and down. A refused link does not prevent
    /// the others. Returns for each link its near end, if it has one, and its far end.
    ///
    /// A veth's near end is created up (and, for a port, in its bridge); the kernel cannot create the far end
    /// up. Both ends get one queue in each direction: otherwise veth creates one per CPU, and creation takes
    /// almost a third longer.
    ///
    /// # Errors
    /// The socket failed: some of the links may exist.
    pub fn create_links(
        &mut self,
        links: &[NewLink<'_>],
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<Vec<Result<Ends, Error>>, Error> {
        let chosen: Vec<_> = links.iter().map(NewLink::choose).collect();
        let tries = links.iter().zip(&chosen).map(|(link, chosen)| link.requests(pod, chosen));
        let tries: Vec<Vec<NetlinkRequest>> = tries.collect();
        let counts: Vec<usize> = tries.iter().map(Vec::len).collect();
        let mut replies = self.socket.batch(tries.into_iter().flatten().collect())?.into_iter();
        let mut made = Vec::with_capacity(links.len());
        for ((link, chosen), count) in links.iter().zip(&chosen).zip(counts) {
            // All replies of a link are consumed, so that the next reply belongs to the next link. Failures
            // of the further requests are ignored: these requests only save work.
            let own: Vec<_> = replies.by_ref().take(count).collect();
            let created = own.into_iter().next().ok_or(NO_ACKNOWLEDGEMENT)?;
            let ends = match created.map_err(Error::from) {
                Ok(_) => link.ends(chosen, pod_handle),
                Err(error) if error.is_taken() => self.create_again(link, chosen, pod, pod_handle),
                Err(error) => Err(error),
            };
            made.push(ends.and_then(|ends| {
                if let (NewLink::Veth { veth: spec::Veth { port: Some(port), .. }, .. }, Some(near)) =
                    (link, &ends.0)
                {
                    // No frame passes before this: the far end is down.
                    self.ensure_port(near.index, port)?;
                }
                Ok(ends)
            }));
        }
        Ok(made)
    }

    /// Creates a link whose chosen index or name is already taken.
    ///
    /// The kernel checks a macvlan's new name in the sender's namespace, so it refuses a name that the node also uses as
    /// existing; the link is then created under a temporary name and renamed by `pod_handle`.
    fn create_again(
        &mut self,
        link: &NewLink<'_>,
        chosen: &[Chosen],
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<Ends, Error> {
        let chosen: Vec<Chosen> = chosen.iter().map(Chosen::without_index).collect();
        let mut create = |link: &NewLink<'_>| {
            let replies = self.socket.batch(link.requests(pod, &chosen))?;
            let created = replies.into_iter().next().ok_or(NO_ACKNOWLEDGEMENT)?;
            Ok::<_, Error>(created.map(drop)?)
        };
        let created = create(link);
        match *link {
            NewLink::Veth { veth, .. } => {
                created?;
                Ok((Some(self.link(&veth.host_name)?), pod_handle.link(&veth.pod_name)?))
            }
            NewLink::Macvlan { macvlan, parent } => {
                let name = macvlan.pod_name.as_str();
                match created {
                    Err(error) if error.already_exists() && pod_handle.find_link(name)?.is_none() => {
                        let pod_name = format!("{TEMPORARY_PREFIX}{:08x}", fnv32(name.as_bytes()));
                        let temporary = spec::Macvlan { pod_name, ..macvlan.clone() };
                        create(&NewLink::Macvlan { macvlan: &temporary, parent })?;
                        let index = pod_handle.link(&temporary.pod_name)?.index;
                        let rename = LinkUnspec::new_with_index(index).name(name).build();
                        pod_handle.socket.request(RouteNetlinkMessage::SetLink(rename), 0)?;
                    }
                    other => other?,
                }
                Ok((None, pod_handle.link(name)?))
            }
        }
    }

    /// Creates an ipvlan on `parent` directly in `pod`, down. Uses a temporary name, since the node may have
    /// a link of the final name, see [`Handle::create_macvlan`]. The link has its parent's address.
    pub fn create_ipvlan(
        &mut self,
        ipvlan: &spec::Ipvlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let link = new_ipvlan(ipvlan, parent).setns_by_fd(pod.as_raw_fd());
        self.create_and_rename(link, &ipvlan.pod_name, pod_handle)
    }

    /// Creates an ipvlan on `parent` in this namespace, down.
    pub fn create_ipvlan_here(
        &mut self,
        ipvlan: &spec::Ipvlan,
        parent: &LinkState,
    ) -> Result<LinkState, Error> {
        let link = new_ipvlan(ipvlan, parent).name(ipvlan.pod_name.clone());
        self.create_and_show(RouteNetlinkMessage::NewLink(link.build()), &ipvlan.pod_name)
    }

    /// Creates a VLAN of `parent` directly in `pod`, down. The link has its parent's address unless another
    /// one is requested.
    pub fn create_vlan(
        &mut self,
        vlan: &spec::Vlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let protocol = if vlan.tag.service { VlanProtocol::Ieee8021Ad } else { VlanProtocol::Ieee8021Q };
        let data = InfoData::Vlan(vec![InfoVlan::Id(vlan.tag.id), InfoVlan::Protocol(protocol)]);
        let mut link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Vlan)
            .link(parent.index)
            .setns_by_fd(pod.as_raw_fd())
            .link_group(vlan.group)
            .mtu(vlan.mtu.unwrap_or(parent.mtu))
            .set_info_data(data);
        if let Some(mac) = vlan.mac {
            link = link.address(mac.0.to_vec());
        }
        self.create_and_rename(link, &vlan.pod_name, pod_handle)
    }

    /// Creates a dummy in this namespace, down.
    pub fn create_dummy(&mut self, dummy: &spec::Dummy) -> Result<LinkState, Error> {
        let mut link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Dummy)
            .name(dummy.pod_name.clone())
            .link_group(dummy.group);
        if let Some(mtu) = dummy.mtu {
            link = link.mtu(mtu);
        }
        if let Some(mac) = dummy.mac {
            link = link.address(mac.0.to_vec());
        }
        self.create_and_show(RouteNetlinkMessage::NewLink(link.build()), &dummy.pod_name)
    }

    /// Creates a link under a temporary name and has `pod_handle` rename it.
    fn create_and_rename(
        &mut self,
        link: LinkMessageBuilder<LinkUnspec>,
        name: &str,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let temporary = format!("{TEMPORARY_PREFIX}{:08x}", fnv32(name.as_bytes()));
        let link = link.name(temporary.clone()).build();
        self.socket.request(RouteNetlinkMessage::NewLink(link), CREATE | EXCL)?;
        let index = pod_handle.link(&temporary)?.index;
        let rename = LinkUnspec::new_with_index(index).name(name).build();
        pod_handle.socket.request(RouteNetlinkMessage::SetLink(rename), 0)?;
        pod_handle.link(name)
    }

    /// Returns the bridge of that name, up; creates a missing one. Leaves the properties of an existing
    /// bridge unchanged except `promiscuous`, which is switched on if requested.
    ///
    /// # Errors
    /// [`Error::WrongKind`] if another kind of link has that name.
    pub fn ensure_bridge(&mut self, bridge: &spec::Bridge) -> Result<Ensured, Error> {
        let present = self.find_link(&bridge.name)?;
        self.ensure_bridge_beside(bridge, present, Born::Up)
    }

    /// As [`Handle::ensure_bridge`], for a caller that has already looked up the link of that name. `born`:
    /// state of a created bridge.
    pub fn ensure_bridge_beside(
        &mut self,
        bridge: &spec::Bridge,
        present: Option<LinkState>,
        born: Born,
    ) -> Result<Ensured, Error> {
        if let Some(link) = present {
            return self.adopt_bridge(link, bridge).map(|link| Ensured { link, created: false });
        }
        let mut create = born.bridge(&bridge.name);
        if let Some(mtu) = bridge.mtu {
            create = create.mtu(mtu);
        }
        if bridge.promiscuous {
            create = create.promiscuous(true);
        }
        if bridge.vlan_filtering {
            create = create.vlan_filtering(true);
        }
        let create = RouteNetlinkMessage::NewLink(create.build());
        match self.create_and_show(create, &bridge.name) {
            Ok(link) => {
                // A bridge without a configured address changes its address with its ports. Setting the address
                // that the bridge already has makes it permanent.
                if let Some(mac) = link.mac {
                    let pin = LinkUnspec::new_with_index(link.index).address(mac.0.to_vec());
                    let mark = LinkAttribute::IfAlias(BRIDGE_ALIAS.to_owned());
                    let set = pin.append_extra_attribute(mark).build();
                    self.socket.request(RouteNetlinkMessage::SetLink(set), 0)?;
                }
                Ok(Ensured { link, created: true })
            }
            // Another attachment created it first.
            Err(error) if error.already_exists() => {
                let link = self.link(&bridge.name)?;
                self.adopt_bridge(link, bridge).map(|link| Ensured { link, created: false })
            }
            Err(error) => Err(error),
        }
    }

    fn adopt_bridge(&mut self, mut link: LinkState, bridge: &spec::Bridge) -> Result<LinkState, Error> {
        if link.kind != "bridge" {
            let actual =
                if link.kind.is_empty() { "a device".to_owned() } else { format!("a {}", link.kind) };
            return Err(Error::WrongKind { name: link.name, wanted: "a bridge", actual });
        }
        if !link.up || (bridge.promiscuous && !link.promiscuous) {
            let mut set = LinkUnspec::new_with_index(link.index).up();
            if bridge.promiscuous {
                set = set.promiscuous(true);
            }
            self.socket.request(RouteNetlinkMessage::SetLink(set.build()), 0)?;
            link.up = true;
            link.promiscuous |= bridge.promiscuous;
        }
        Ok(link)
    }

    /// Waits at most [`CARRIER_WAIT`] until a link whose far end has just come up carries packets. Returns whether it
    /// does.
    ///
    /// The kernel processes this change asynchronously (`net/core/link_watch.c`), late on a busy node. Until then the
    /// link has no queue and loses packets that it should send, and a bridge accepts nothing from it: the pod's first
    /// request for its gateway's address would be lost, and repeated only after a second. From Linux 6.8 on, the
    /// kernel processes the change when the link is queried.
    pub fn await_carrier(&mut self, index: u32) -> Result<bool, Error> {
        self.await_carriers(&[index])?.into_iter().next().unwrap_or(Ok(false))
    }

    /// As [`Handle::await_carrier`], for several links at once, in their order.
    ///
    /// # Errors
    /// The socket failed.
    pub fn await_carriers(&mut self, links: &[u32]) -> Result<Vec<Result<bool, Error>>, Error> {
        timing::part("carrier", || self.poll_carriers(links))
    }

    fn poll_carriers(&mut self, links: &[u32]) -> Result<Vec<Result<bool, Error>>, Error> {
        let deadline = Instant::now() + CARRIER_WAIT;
        let mut found: Vec<Result<bool, Error>> = links.iter().map(|_| Ok(false)).collect();
        loop {
            let waiting: Vec<usize> = (0..links.len()).filter(|at| matches!(found[*at], Ok(false))).collect();
            for some in waiting.chunks(SHOWN_AT_ONCE) {
                let ask = |at: &usize| NetlinkRequest::new(show(LinkUnspec::new_with_index(links[*at])), 0);
                let replies = self.socket.batch(some.iter().map(ask).collect())?;
                for (at, reply) in some.iter().zip(replies) {
                    found[*at] = reply.map(|shown| shown.iter().any(is_operational)).map_err(Error::from);
                }
            }
            if !found.iter().any(|it| matches!(it, Ok(false))) || Instant::now() > deadline {
                return Ok(found);
            }
            std::thread::sleep(CARRIER_POLL);
        }
    }

    /// Brings a link up.
    pub fn ensure_up(&mut self, index: u32) -> Result<(), Error> {
        let up = LinkUnspec::new_with_index(index).up().build();
        self.socket.request(RouteNetlinkMessage::SetLink(up), 0)?;
        Ok(())
    }

    /// Deletes all links of `group`, if given, in this namespace for the cost of one grace period. Then
    /// deletes, one by one, the links with these indices that still exist: a process in the pod may have
    /// changed their group, or may have added a link to the group that cannot be deleted. Returns once the
    /// links are gone, with the outcome for each index. Links that are already absent count as deleted.
    ///
    /// # Errors
    /// The socket failed: it is unknown which links remain.
    pub fn delete_links(
        &mut self,
        group: Option<u32>,
        links: &[u32],
    ) -> Result<Vec<Result<(), Error>>, Error> {
        if let Some(group) = group {
            let mut all = LinkMessage::default();
            all.attributes.push(LinkAttribute::Group(group));
            match self.socket.request(RouteNetlinkMessage::DelLink(all), 0) {
                Err(error) if !error.not_found() => {
                    tracing::debug!(error = %Chain(&error), "no deletion by group, deleting links one by one");
                }
                _ => {}
            }
        }
        let delete = |index: &u32| {
            NetlinkRequest::new(RouteNetlinkMessage::DelLink(LinkUnspec::new_with_index(*index).build()), 0)
        };
        let replies = self.socket.batch(links.iter().map(delete).collect())?;
        let outcome = |reply: Reply| match reply.map_err(Error::from) {
            Err(error) if !error.not_found() => Err(error),
            _ => Ok(()),
        };
        Ok(replies.into_iter().map(outcome).collect())
    }

    /// Deletes the link of that name. Returns whether it existed.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn delete_link_named(&mut self, name: &str) -> Result<bool, Error> {
        let named = LinkUnspec::new_with_name(name).build();
        match self.socket.request(RouteNetlinkMessage::DelLink(named), 0) {
            Err(error) if error.not_found() => Ok(false),
            deleted => deleted.map(|_| true),
        }
    }

    /// Deletes the link of that name if it exists.
    pub fn ensure_link_absent(&mut self, name: &str) -> Result<(), Error> {
        self.delete_link_named(name).map(drop)
    }

    pub(super) fn create_and_show(
        &mut self,
        create: RouteNetlinkMessage,
        name: &str,
    ) -> Result<LinkState, Error> {
        self.create_change_and_show(create, None, name)
    }

    /// As [`Handle::create_and_show`], with a change of the link in the same datagram, which the kernel carries out
    /// as a whole: this process cannot end between the two. The change is also carried out if the link is not
    /// created.
    pub(super) fn create_change_and_show(
        &mut self,
        create: RouteNetlinkMessage,
        change: Option<RouteNetlinkMessage>,
        name: &str,
    ) -> Result<LinkState, Error> {
        let mut requests = vec![NetlinkRequest::new(create, CREATE | EXCL)];
        requests.extend(change.map(|change| NetlinkRequest::new(change, 0)));
        requests.push(NetlinkRequest::new(show(LinkUnspec::new_with_name(name)), 0));
        let mut replies = self.socket.batch(requests)?;
        let shown = replies.pop();
        for reply in replies {
            reply?;
        }
        let shown = shown.transpose()?.unwrap_or_default();
        shown.into_iter().find_map(observed).ok_or_else(|| Error::Vanished(name.to_owned()))
    }
}

fn new_ipvlan(ipvlan: &spec::Ipvlan, parent: &LinkState) -> LinkMessageBuilder<LinkUnspec> {
    let data = InfoData::IpVlan(vec![InfoIpVlan::Mode(kernel_ipvlan_mode(ipvlan.mode))]);
    LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::IpVlan)
        .link(parent.index)
        .link_group(ipvlan.group)
        .mtu(ipvlan.mtu.unwrap_or(parent.mtu))
        .set_info_data(data)
}

/// Requests one link without its statistics: collecting and parsing them would take longer than everything
/// else.
pub(super) fn show(link: LinkMessageBuilder<LinkUnspec>) -> RouteNetlinkMessage {
    let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]);
    RouteNetlinkMessage::GetLink(link.append_extra_attribute(mask).build())
}

impl NewLink<'_> {
    /// Chooses what the kernel would otherwise choose for the ends, the near one first.
    fn choose(&self) -> Vec<Chosen> {
        match self {
            Self::Veth { veth, .. } => vec![Chosen::new(None), Chosen::new(veth.mac)],
            Self::Macvlan { macvlan, .. } => vec![Chosen::new(macvlan.mac)],
        }
    }

    /// The requests for the link, of which the first creates it. `chosen`: the values from
    /// [`NewLink::choose`].
    fn requests(&self, pod: BorrowedFd<'_>, chosen: &[Chosen]) -> Vec<NetlinkRequest> {
        match (*self, chosen) {
            (Self::Veth { veth, bridge }, [near, far]) => veth_requests(veth, bridge, pod, near, far),
            (Self::Macvlan { macvlan, parent }, [chosen]) => {
                vec![NetlinkRequest::new(macvlan_message(macvlan, parent, pod, chosen), CREATE | EXCL)]
            }
            _ => Vec::new(),
        }
    }

    /// The ends of the link after it was created with the chosen values.
    fn ends(&self, chosen: &[Chosen], pod_handle: &mut Handle) -> Result<Ends, Error> {
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
struct Chosen {
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

    fn without_index(&self) -> Self {
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

fn kernel_mode(mode: spec::MacvlanMode) -> MacVlanMode {
    match mode {
        spec::MacvlanMode::Bridge => MacVlanMode::Bridge,
        spec::MacvlanMode::Private => MacVlanMode::Private,
        spec::MacvlanMode::Vepa => MacVlanMode::Vepa,
        spec::MacvlanMode::Passthru => MacVlanMode::Passthrough,
    }
}

fn kernel_tap_mode(mode: spec::MacvlanMode) -> MacVtapMode {
    match mode {
        spec::MacvlanMode::Bridge => MacVtapMode::Bridge,
        spec::MacvlanMode::Private => MacVtapMode::Private,
        spec::MacvlanMode::Vepa => MacVtapMode::Vepa,
        spec::MacvlanMode::Passthru => MacVtapMode::Passthrough,
    }
}

fn observed_tap_mode(mode: &MacVtapMode) -> Option<spec::MacvlanMode> {
    Some(match mode {
        MacVtapMode::Bridge => spec::MacvlanMode::Bridge,
        MacVtapMode::Private => spec::MacvlanMode::Private,
        MacVtapMode::Vepa => spec::MacvlanMode::Vepa,
        MacVtapMode::Passthrough => spec::MacvlanMode::Passthru,
        _ => return None,
    })
}

fn kind_of(macvlan: &spec::Macvlan) -> &'static str {
    if macvlan.tap { "macvtap" } else { "macvlan" }
}

/// The tag of a VLAN's frames.
fn observed_tag(data: &[InfoVlan]) -> Option<spec::VlanTag> {
    let id = data.iter().find_map(|datum| match datum {
        InfoVlan::Id(id) => Some(*id),
        _ => None,
    })?;
    Some(spec::VlanTag { id, service: data.contains(&InfoVlan::Protocol(VlanProtocol::Ieee8021Ad)) })
}

fn kernel_ipvlan_mode(mode: spec::IpvlanMode) -> IpVlanMode {
    match mode {
        spec::IpvlanMode::L2 => IpVlanMode::L2,
        spec::IpvlanMode::L3 => IpVlanMode::L3,
        spec::IpvlanMode::L3s => IpVlanMode::L3S,
    }
}

fn observed_ipvlan_mode(mode: &IpVlanMode) -> Option<spec::IpvlanMode> {
    Some(match mode {
        IpVlanMode::L2 => spec::IpvlanMode::L2,
        IpVlanMode::L3 => spec::IpvlanMode::L3,
        IpVlanMode::L3S => spec::IpvlanMode::L3s,
        _ => return None,
    })
}

fn observed_mode(mode: &MacVlanMode) -> Option<spec::MacvlanMode> {
    Some(match mode {
        MacVlanMode::Bridge => spec::MacvlanMode::Bridge,
        MacVlanMode::Private => spec::MacvlanMode::Private,
        MacVlanMode::Vepa => spec::MacvlanMode::Vepa,
        MacVlanMode::Passthrough => spec::MacvlanMode::Passthru,
        _ => return None,
    })
}

/// Uses the operational state (RFC 2863), which the kernel changes only after the link has its queue. The flags are no
/// substitute: they say that a link runs although its first change of carrier has not been processed yet.
fn is_operational(message: &RouteNetlinkMessage) -> bool {
    matches!(message, RouteNetlinkMessage::NewLink(link)
        if link.attributes.contains(&LinkAttribute::OperState(State::Up)))
}

pub(super) fn observed(message: RouteNetlinkMessage) -> Option<LinkState> {
    let RouteNetlinkMessage::NewLink(link) = message else { return None };
    let flags = link.header.flags;
    let mut state = LinkState {
        index: link.header.index,
        name: String::new(),
        kind: String::new(),
        mac: None,
        mtu: 0,
        up: flags.contains(LinkFlags::Up),
        promiscuous: flags.contains(LinkFlags::Promisc),
        controller: None,
        hairpin: None,
        isolated: false,
        link: None,
        mode: None,
        group: 0,
        own: false,
        table: None,
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfAlias(alias) => state.own = alias == BRIDGE_ALIAS,
            LinkAttribute::IfName(name) => state.name = name,
            LinkAttribute::Address(bytes) => state.mac = <[u8; 6]>::try_from(bytes).ok().map(Mac),
            LinkAttribute::Mtu(mtu) => state.mtu = mtu,
            LinkAttribute::Controller(index) => state.controller = Some(index).filter(|index| *index != 0),
            LinkAttribute::Link(index) => state.link = Some(index),
            LinkAttribute::Group(group) => state.group = group,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => state.kind = kind.to_string(),
                        LinkInfo::PortData(InfoPortData::BridgePort(data)) => {
                            state.hairpin = data.iter().find_map(|datum| match datum {
                                InfoBridgePort::HairpinMode(on) => Some(*on),
                                _ => None,
                            });
                            state.isolated = data.contains(&InfoBridgePort::Isolated(true));
                        }
                        LinkInfo::Data(InfoData::MacVlan(data)) => {
                            state.mode = data.iter().find_map(|datum| match datum {
                                InfoMacVlan::Mode(mode) => observed_mode(mode).map(spec::LinkMode::Macvlan),
                                _ => None,
                            });
                        }
                        LinkInfo::Data(InfoData::MacVtap(data)) => {
                            state.mode = data.iter().find_map(|datum| match datum {
                                InfoMacVtap::Mode(mode) => {
                                    observed_tap_mode(mode).map(spec::LinkMode::Macvlan)
                                }
                                _ => None,
                            });
                        }
                        LinkInfo::Data(InfoData::Vlan(data)) => {
                            state.mode = observed_tag(&data).map(spec::LinkMode::Vlan);
                        }
                        LinkInfo::Data(InfoData::Netkit(data)) => {
                            state.mode = observed_ways(&data).map(spec::LinkMode::Netkit);
                        }
                        LinkInfo::Data(InfoData::Tun(data)) => {
                            state.mode = observed_access(&data).map(spec::LinkMode::Tap);
                        }
                        LinkInfo::Data(InfoData::Vrf(data)) => {
                            state.table = data.iter().find_map(|datum| match datum {
                                InfoVrf::TableId(table) => Some(*table),
                                _ => None,
                            });
                        }
                        LinkInfo::Data(InfoData::IpVlan(data)) => {
                            state.mode = data.iter().find_map(|datum| match datum {
                                InfoIpVlan::Mode(mode) => {
                                    observed_ipvlan_mode(mode).map(spec::LinkMode::Ipvlan)
                                }
                                _ => None,
                            });
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(state)
}

/// FNV-1a, for a short name that differs between the interfaces of one pod.
fn fnv32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::netns::Netns;

    fn veth(number: u8) -> spec::Veth {
        spec::Veth {
            host_name: format!("near{number}"),
            pod_name: format!("far{number}"),
            mtu: None,
            mac: None,
            group: 7,
            port: Some(spec::BridgePort {
                bridge: "br0".to_owned(),
                hairpin: number == 1,
                isolated: false,
                vlans: None,
            }),
        }
    }

    #[test]
    fn links_of_some_kinds_may_change_their_address_with_their_parent() {
        let chosen = Chosen { index: 3, mac: Mac([2, 0, 0, 0, 0, 1]) };
        let may = |kind, mode| LinkState { mode, ..chosen.link("net1", kind, 1500) }.may_follow_parent();
        let macvlan = |mode| Some(spec::LinkMode::Macvlan(mode));
        assert!(may("ipvlan", None) && may("vlan", None));
        assert!(may("macvlan", macvlan(spec::MacvlanMode::Passthru)));
        assert!(may("macvtap", macvlan(spec::MacvlanMode::Passthru)));
        assert!(!may("macvlan", macvlan(spec::MacvlanMode::Bridge)) && !may("veth", None));
    }

    #[test]
    fn of_links_created_together_each_has_its_own_outcome() {
        let (node, pod) = (Netns::private().unwrap(), Netns::private().unwrap());
        let (mut host, mut inside) = (Handle::open_in(&node).unwrap(), Handle::open_in(&pod).unwrap());
        let bridge =
            spec::Bridge { name: "br0".into(), mtu: None, promiscuous: false, vlan_filtering: false };
        let index = host.ensure_bridge(&bridge).unwrap().link.index;
        let taken = spec::Bridge { name: "near2".into(), ..bridge };
        host.ensure_bridge(&taken).unwrap();
        let veths = [1, 2, 3].map(veth);
        let links = veths.each_ref().map(|veth| NewLink::Veth { veth, bridge: Some(index) });
        let made = host.create_links(&links, pod.as_fd(), &mut inside).unwrap();
        let [Ok(first), Err(second), Ok(third)] = <[_; 3]>::try_from(made).unwrap() else {
            panic!("the second alone is refused")
        };
        assert!(second.already_exists(), "{second}");
        for ((near, far), number) in [(first, 1), (third, 3)] {
            assert_eq!(host.link(&format!("near{number}")).unwrap(), near.unwrap());
            assert_eq!(inside.link(&format!("far{number}")).unwrap(), far);
        }
        assert_eq!(inside.find_link("far2").unwrap(), None);
    }

    #[test]
    fn of_links_configured_together_each_has_its_own_outcome() {
        let pod = Netns::private().unwrap();
        let mut inside = Handle::open_in(&pod).unwrap();
        let bridge = |name: &str| spec::Bridge {
            name: name.to_owned(),
            mtu: None,
            promiscuous: false,
            vlan_filtering: false,
        };
        let [a, c] = ["a", "c"].map(|name| inside.ensure_bridge(&bridge(name)).unwrap().link.index);
        let addressing = |net: &str| spec::Addressing {
            addresses: vec![net.parse().unwrap()],
            no_link_local: true,
            ..spec::Addressing::default()
        };
        let (first, second, third) =
            (addressing("10.1.0.2/24"), addressing("10.2.0.2/24"), addressing("10.3.0.2/24"));
        let all = [(a, &first), (4000, &second), (c, &third)];
        let outcomes = inside.configure_all(&all).unwrap();
        let refused: Vec<bool> = outcomes.iter().map(Result::is_err).collect();
        assert_eq!(refused, [false, true, false]);
        assert!(outcomes[1].as_ref().unwrap_err().not_found());
        for (index, addressing) in [(a, first), (c, third)] {
            assert!(inside.addresses(index).unwrap().contains(&addressing.addresses[0]));
        }
    }
}
