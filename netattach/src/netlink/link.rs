//! Links: creating them in place, finding them, deleting them.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoBridgePort, InfoData, InfoIpVlan, InfoKind, InfoMacVlan, InfoMacVtap, InfoPortData, InfoVeth,
    InfoVlan, IpVlanMode, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkMessage, MacVlanMode,
    MacVtapMode, State, VlanProtocol,
};
use rtnetlink::{LinkBridge, LinkMacVlan, LinkMacVtap, LinkMessageBuilder, LinkUnspec};

use super::address::no_link_local;
use super::socket::{CREATE, EXCL, NetlinkRequest};
use super::{Error, Handle};
use crate::mac::Mac;
use crate::spec;
use crate::timing;

/// Name under which a macvlan is created if the node has a link of the final name, see [`Handle::create_macvlan`].
const TEMPORARY_PREFIX: &str = "nat";

/// Alias of a bridge that netattach has made: bridges outlast their pods, and only these may go with netattach.
pub(super) const BRIDGE_ALIAS: &str = "netattach";

/// MTU of a veth without a configured one, in bytes: that of Ethernet (`ETH_DATA_LEN`), the kernel's default too.
const DEFAULT_MTU: u32 = 1500;

/// The indices for new links. The kernel counts up from 1 and skips those in use. If a chosen index is in use, the
/// kernel chooses one instead.
const INDICES: std::ops::RangeInclusive<u16> = 4096..=u16::MAX;

/// Maximum time for a link to carry packets once both its ends are up.
const CARRIER_WAIT: Duration = Duration::from_secs(1);
/// Time between two checks of the carrier.
const CARRIER_POLL: Duration = Duration::from_millis(1);

/// A link as the kernel shows it.
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
    /// Made by netattach, and not for one pod: a bridge, or the port by which a VLAN of one has its gateway.
    pub own: bool,
}

impl LinkState {
    /// Whether it is a bridge that netattach has made.
    pub fn own_bridge(&self) -> bool {
        self.own && self.kind == "bridge"
    }
}

/// The object that `ensure` found or created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ensured {
    /// The link.
    pub link: LinkState,
    /// Whether this call created it.
    pub created: bool,
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
        let all = show(LinkMessageBuilder::<LinkUnspec>::new());
        Ok(self.socket.dump(all)?.into_iter().filter_map(observed).collect())
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

    /// Creates a veth pair with its far end in `pod` and its near end up (and, for a port, in its bridge).
    /// Returns the near end and the far one. The far end is down: the kernel cannot create it up.
    ///
    /// Both ends get one queue each way: otherwise veth creates one per CPU, and creation takes almost a third longer.
    pub fn create_veth(
        &mut self,
        veth: &spec::Veth,
        bridge: Option<u32>,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<(LinkState, LinkState), Error> {
        let (near, far) = (Chosen::new(None), Chosen::new(veth.mac));
        let ends = match self.request_veth(veth, bridge, pod, (&near, &far)) {
            Ok(()) => {
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
                (near_end, far_end)
            }
            Err(error) if error.is_taken() => {
                self.request_veth(veth, bridge, pod, (&near.without_index(), &far.without_index()))?;
                (self.link(&veth.host_name)?, pod_handle.link(&veth.pod_name)?)
            }
            Err(error) => return Err(error),
        };
        if let Some(port) = &veth.port {
            // No frame passes before: the far end is down.
            self.ensure_port(ends.0.index, port)?;
        }
        Ok(ends)
    }

    fn request_veth(
        &mut self,
        veth: &spec::Veth,
        bridge: Option<u32>,
        pod: BorrowedFd<'_>,
        (near, far): (&Chosen, &Chosen),
    ) -> Result<(), Error> {
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
            // A port of a bridge has no network layer. The kernel would give it a link-local address all the same, once
            // the other end is up. By its name, which is derived from the attachment's: the link of the chosen index may
            // be another, and is why the request before failed.
            requests.push(NetlinkRequest::new(no_link_local(LinkUnspec::new_with_name(&veth.host_name)), 0));
        }
        match self.socket.batch(requests)?.into_iter().next() {
            // What becomes of the second is not worth an error: it saves work.
            Some(created) => Ok(created.map(drop)?),
            None => Err(Error::Malformed { request: "RTM_NEWLINK", what: "no acknowledgement" }),
        }
    }

    /// Creates a macvlan on `parent` directly in `pod`, down.
    ///
    /// The kernel checks the new name in the sender's namespace, so it refuses a name that the node also uses as
    /// existing; the link is then created under a temporary name and renamed by `pod_handle`.
    pub fn create_macvlan(
        &mut self,
        macvlan: &spec::Macvlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let name = macvlan.pod_name.as_str();
        let chosen = Chosen::new(macvlan.mac);
        match self.request_macvlan(name, macvlan, parent, pod, &chosen) {
            // It has its parent's address, regardless of the requested one.
            Ok(()) if macvlan.mode == spec::MacvlanMode::Passthru => return pod_handle.link(name),
            Ok(()) => {
                return Ok(LinkState {
                    link: Some(parent.index),
                    mode: Some(spec::LinkMode::Macvlan(macvlan.mode)),
                    group: macvlan.group,
                    ..chosen.link(name, kind_of(macvlan), macvlan.mtu.unwrap_or(parent.mtu))
                });
            }
            Err(error) if error.is_taken() => {}
            Err(error) => return Err(error),
        }
        let chosen = chosen.without_index();
        match self.request_macvlan(name, macvlan, parent, pod, &chosen) {
            Err(error) if error.already_exists() && pod_handle.find_link(name)?.is_none() => {
                let temporary = format!("{TEMPORARY_PREFIX}{:08x}", fnv32(name.as_bytes()));
                self.request_macvlan(&temporary, macvlan, parent, pod, &chosen)?;
                let index = pod_handle.link(&temporary)?.index;
                let rename = LinkUnspec::new_with_index(index).name(name).build();
                pod_handle.socket.request(RouteNetlinkMessage::SetLink(rename), 0)?;
            }
            other => other?,
        }
        pod_handle.link(name)
    }

    fn request_macvlan(
        &mut self,
        name: &str,
        macvlan: &spec::Macvlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        chosen: &Chosen,
    ) -> Result<(), Error> {
        let mtu = macvlan.mtu.unwrap_or(parent.mtu);
        if macvlan.tap {
            let link = LinkMacVtap::new(name, parent.index, kernel_tap_mode(macvlan.mode))
                .setns_by_fd(pod.as_raw_fd())
                .link_group(macvlan.group)
                .mtu(mtu);
            let create = RouteNetlinkMessage::NewLink(chosen.build(link));
            return self.socket.request(create, CREATE | EXCL).map(drop);
        }
        let mut link = LinkMacVlan::new(name, parent.index, kernel_mode(macvlan.mode))
            .setns_by_fd(pod.as_raw_fd())
            .link_group(macvlan.group)
            .mtu(mtu);
        if let Some(length) = macvlan.broadcast_queue {
            link = link.append_info_data(InfoMacVlan::BcQueueLen(length));
        }
        self.socket.request(RouteNetlinkMessage::NewLink(chosen.build(link)), CREATE | EXCL).map(drop)
    }

    /// Creates an ipvlan on `parent` directly in `pod`, down: under a temporary name, as the node may have a link of
    /// the final name, see [`Handle::create_macvlan`]. It has its parent's address.
    pub fn create_ipvlan(
        &mut self,
        ipvlan: &spec::Ipvlan,
        parent: &LinkState,
        pod: BorrowedFd<'_>,
        pod_handle: &mut Handle,
    ) -> Result<LinkState, Error> {
        let data = InfoData::IpVlan(vec![InfoIpVlan::Mode(kernel_ipvlan_mode(ipvlan.mode))]);
        let link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::IpVlan)
            .link(parent.index)
            .setns_by_fd(pod.as_raw_fd())
            .link_group(ipvlan.group)
            .mtu(ipvlan.mtu.unwrap_or(parent.mtu))
            .set_info_data(data);
        self.create_and_rename(link, &ipvlan.pod_name, pod_handle)
    }

    /// Creates a VLAN of `parent` directly in `pod`, down. It has its parent's address unless another is asked for.
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

    /// Creates a link under a temporary name, where `pod_handle` gives it the final one.
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

    /// The bridge of that name, up; created if it is missing. Properties of an existing bridge are left alone except
    /// `promiscuous`, which is switched on if requested.
    ///
    /// # Errors
    /// [`Error::WrongKind`] if another kind of link has that name.
    pub fn ensure_bridge(&mut self, bridge: &spec::Bridge) -> Result<Ensured, Error> {
        if let Some(link) = self.find_link(&bridge.name)? {
            return self.adopt_bridge(link, bridge).map(|link| Ensured { link, created: false });
        }
        let mut create = LinkBridge::new(&bridge.name);
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
                // A bridge without a configured address changes its address with its ports. Writing its own address
                // back fixes it.
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
        timing::part("carrier", || self.poll_carrier(index))
    }

    fn poll_carrier(&mut self, index: u32) -> Result<bool, Error> {
        let deadline = Instant::now() + CARRIER_WAIT;
        loop {
            let answers = self.socket.request(show(LinkUnspec::new_with_index(index)), 0)?;
            if answers.iter().any(is_operational) {
                return Ok(true);
            }
            if Instant::now() > deadline {
                return Ok(false);
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

    /// Deletes all links of `group` in this namespace for the cost of one grace period, then, one by one, those of
    /// `names` that still exist: a process in the pod may have changed their group. Returns once they are gone. Links
    /// that are already absent count as deleted.
    pub fn ensure_links_absent(&mut self, group: u32, names: &[&str]) -> Result<(), Error> {
        if names.len() > 1 {
            let mut all = LinkMessage::default();
            all.attributes.push(LinkAttribute::Group(group));
            match self.socket.request(RouteNetlinkMessage::DelLink(all), 0) {
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "no deletion by group, deleting links one by one"),
            }
        }
        for name in names {
            self.ensure_link_absent(name)?;
        }
        Ok(())
    }

    /// Deletes the link of that name if it exists.
    pub fn ensure_link_absent(&mut self, name: &str) -> Result<(), Error> {
        let named = LinkUnspec::new_with_name(name).build();
        match self.socket.request(RouteNetlinkMessage::DelLink(named), 0) {
            Err(error) if !error.not_found() => Err(error),
            _ => Ok(()),
        }
    }

    pub(super) fn create_and_show(
        &mut self,
        create: RouteNetlinkMessage,
        name: &str,
    ) -> Result<LinkState, Error> {
        let show = show(LinkUnspec::new_with_name(name));
        let requests = vec![NetlinkRequest::new(create, CREATE | EXCL), NetlinkRequest::new(show, 0)];
        let mut replies = self.socket.batch(requests)?.into_iter();
        replies.next().transpose()?;
        let shown = replies.next().transpose()?.unwrap_or_default();
        shown.into_iter().find_map(observed).ok_or_else(|| Error::Vanished(name.to_owned()))
    }
}

/// Requests one link without its counters: gathering and parsing them takes longer than all the rest.
pub(super) fn show(link: LinkMessageBuilder<LinkUnspec>) -> RouteNetlinkMessage {
    let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]);
    RouteNetlinkMessage::GetLink(link.append_extra_attribute(mask).build())
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

    /// With one queue each way: see [`Handle::create_veth`].
    fn build<T: std::fmt::Debug + Default>(&self, link: LinkMessageBuilder<T>) -> LinkMessage {
        let mut message = link
            .append_extra_attribute(LinkAttribute::NumTxQueues(1))
            .append_extra_attribute(LinkAttribute::NumRxQueues(1))
            .address(self.mac.0.to_vec())
            .build();
        message.header.index = self.index;
        message
    }

    /// The state of a link created with these values: down, in no bridge and no group.
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
