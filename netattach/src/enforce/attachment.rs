//! An attachment as enforced: assembled from the steps of its plan and their outputs.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv6Net};

use super::bandwidth::BandwidthLimit;
use super::error::EnforceError;
use super::routed_to::RoutedTo;
use crate::bpf::{Attachment, Checks, Limits, OnParent, Rate, Trunks};
use crate::fast_path::{Member, Reason};
use crate::hooks::{HookError, HookPoint, PodDevice};
use crate::mac::Mac;
use crate::netlink::{self, Handle};
use crate::objects::Place;
use crate::plan::result::{Ends, Leased, is_unaddressed, parent_followed};
use crate::plan::{AttachmentPlan, PodRef, Sandbox, addressing, author, routing};
use crate::policy::index::{Dhcp, Endpoint};
use crate::spec::{Link, Pace, PortVlans, Tie};
use crate::step::{EnforceWhen, HookKind, MadeBy, Parent, Protect, Role, Step, Style};

/// Limit on records of new flows of one attachment, per second.
const FLOW_RECORDS: u64 = 1000;
/// Limit on records of drops of one attachment, per second.
const DROP_RECORDS: u64 = 100;

/// The IPAM plugin whose leases are renewed by packets of the pod's interface.
const DHCP: &str = "dhcp";

/// The parent whose Ethernet address an interface in a pod has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Inherits {
    /// Index of the parent.
    parent: u32,
    /// Whether the interface can have no other one: the kernel has no request for the address of an ipvlan.
    always: bool,
}

/// An attachment to be enforced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnforcedAttachment {
    pub(crate) id: u32,
    /// Pod, interface and network, for the log: `shop/cart net1 on shop/storage`.
    pub(crate) label: String,
    pub(crate) attachment: Attachment,
    /// The hook point of its programs.
    pub(crate) point: HookPoint,
    /// Whether its parent is a network card, if that is known.
    pub(crate) on_card: Option<bool>,
    /// Whether another plugin made its interface.
    delegated: bool,
    /// Whether the end of its link on the node, if any, is a representor: other programs may be attached
    /// there, and the device stays.
    on_representor: bool,
    /// Whether it is a netkit that netattach made.
    netkit: bool,
    /// Index of its parent, if links on the parent reach each other within the parent, either past its
    /// ingress or between pods.
    pub(super) shares: Option<u32>,
    /// The parent whose Ethernet address it has, if it has that of its parent.
    inherits: Option<Inherits>,
    /// Where its frames leave again after they were judged.
    pub(super) trunks: Trunks,
    /// When its programs are attached.
    pub(crate) when: EnforceWhen,
    /// Its pod, if that is known.
    pub(crate) pod: Option<PodRef>,
    /// Index of the interface in the pod's namespace.
    pub(crate) pod_index: u32,
    /// Its own addresses: packets to them belong to the pod only.
    pub(crate) own: Vec<IpAddr>,
    /// Those of its own addresses that the pod has chosen outside the subnets of the network's author:
    /// another host on the network may have them.
    chosen: Vec<IpAddr>,
    /// The addresses by which the node's packet filter may recognise it.
    pub(super) routed_to: RoutedTo,
    bandwidth: Option<BandwidthLimit>,
    /// The attachment as policies select it; `None` if no policy can.
    pub(crate) endpoint: Option<Endpoint>,
    /// Whether the node's stack routes its packets.
    pub(crate) routed: bool,
    /// Why its configuration excludes it from the fast path.
    pub(crate) kept_off: Option<Reason>,
}

impl EnforcedAttachment {
    /// Its number in the maps.
    pub(crate) fn number(&self) -> u32 {
        self.id
    }

    /// Assembles the outputs of an attachment's steps. `cookie`: that of the pod's netns, if known.
    /// `leased`: [its own addresses](crate::plan::result::own).
    pub fn new(
        protect: &Protect,
        (sandbox, cookie): (&Sandbox, Option<u64>),
        attachment: &AttachmentPlan,
        leased: &Leased,
        vantage: HookKind,
        ends: Option<&Ends>,
    ) -> Result<Self, EnforceError> {
        let point = point((sandbox, cookie), attachment, vantage, ends)
            .ok_or_else(|| EnforceError::NoDevice(attachment.ifname.clone()))?;
        let pod = ends.map(|ends| &ends.pod);
        let pod_index = pod.map_or(0, |pod| pod.index);
        let mac: Mac = match (pod.and_then(|pod| pod.mac), &point) {
            (Some(mac), _) => mac,
            (None, HookPoint::Nowhere(_)) => Mac([0; 6]),
            (None, _) => return Err(EnforceError::NoMac(attachment.ifname.clone())),
        };
        let inherits = ends
            .filter(|_| matches!(point, HookPoint::Pod(_)))
            .and_then(|ends| parent_followed(attachment, ends))
            .map(|parent| Inherits { parent, always: matches!(attachment.link(), Some(Link::Ipvlan(_))) });
        let routed = attachment.link().is_some_and(Link::is_routed);
        let pod_name = sandbox.pod.as_ref().map_or_else(|| sandbox.container_id.clone(), ToString::to_string);
        let own: Vec<IpAddr> = leased.addresses.iter().map(|leased| leased.address.addr()).collect();
        Ok(Self {
            id: protect.id,
            label: format!("{pod_name} {} on {}", attachment.ifname, attachment.network),
            attachment: Attachment {
                mac,
                addresses: own.clone(),
                shared: protect.allowed.clone(),
                on_link: on_link(sandbox, attachment, leased),
                ethertypes: protect.ethertypes.clone(),
                zone: protect.zone,
                flags: Checks {
                    source_mac: protect.check_mac,
                    source_address: protect.check_addresses && !is_unaddressed(protect, attachment, leased),
                    one_protocol: may_go_by_named_protocol(attachment),
                    ..Checks::default()
                },
                vlans: trunk(attachment).chain(tagged(protect)).collect(),
                limits: Limits {
                    flow_records: Rate::new(FLOW_RECORDS, FLOW_RECORDS),
                    drop_records: Rate::new(DROP_RECORDS, DROP_RECORDS),
                    ..Limits::default()
                },
            },
            chosen: chosen(sandbox, attachment, leased),
            routed_to: RoutedTo::of((sandbox, attachment), leased, ends),
            own,
            bandwidth: protect.bandwidth.map(|bandwidth| {
                let mtu =
                    ends.map_or(0, |ends| ends.pod.mtu.max(ends.host.as_ref().map_or(0, |host| host.mtu)));
                let paced_to_pod = matches!(point, HookPoint::NodeEnd(_) | HookPoint::Nowhere(_));
                BandwidthLimit::new(bandwidth, mtu, paced_to_pod)
            }),
            point,
            on_card: None,
            delegated: is_delegated(attachment),
            on_representor: is_behind_card(attachment),
            netkit: matches!(attachment.link(), Some(Link::Netkit(_))),
            shares: ends
                .and_then(|ends| ends.parent.as_ref())
                .filter(|_| reach_each_other(attachment))
                .map(|parent| parent.device.index),
            inherits,
            trunks: ends.and_then(|ends| ends.parent.as_ref()).map(trunks).unwrap_or_default(),
            when: protect.when,
            pod: sandbox.pod.clone(),
            pod_index,
            routed,
            kept_off: kept_off(protect, attachment),
            endpoint: sandbox.pod.as_ref().and_then(|pod| endpoint(protect, pod, attachment, leased)),
        })
    }

    /// Whether its programs may be deferred until a policy selects it. The programs of a parent are
    /// attached with the parent's first attachment.
    pub(crate) fn may_wait(&self) -> bool {
        let has_its_own = match self.point {
            HookPoint::NodeEnd(_) | HookPoint::Pod(_) => true,
            HookPoint::Parent { .. } | HookPoint::Nowhere(_) => false,
        };
        has_its_own && self.when == EnforceWhen::Selected
    }

    /// Whether its programs are attached to a device in the pod that netattach has made and that is down
    /// until they run.
    pub(super) fn begins_in_pod(&self) -> bool {
        matches!(self.point, HookPoint::Pod(_)) && self.when == EnforceWhen::Always && !self.delegated
    }

    /// Whether another plugin made its interface.
    pub(crate) fn is_delegated(&self) -> bool {
        self.delegated
    }

    /// Index of the node's end of its netkit, if netattach made one.
    pub(super) fn netkit(&self) -> Option<u32> {
        self.netkit.then(|| self.host_index())
    }

    /// Whether the end of its link on the node is a representor, which belongs to the card.
    pub(crate) fn is_on_representor(&self) -> bool {
        self.on_representor && matches!(self.point, HookPoint::NodeEnd(_))
    }

    /// Index of the parent whose Ethernet address it has, if it has that of its parent.
    pub(crate) fn inherits(&self) -> Option<u32> {
        self.inherits.map(|it| it.parent)
    }

    /// Its Ethernet address.
    pub(crate) fn mac(&self) -> Mac {
        self.attachment.mac
    }

    /// Takes the Ethernet address in its record for its own, if it has its parent's. `noted`: that address, if it has
    /// a record.
    pub(crate) fn keep(&mut self, noted: Option<Mac>) {
        if let Some(noted) = noted.filter(|_| self.inherits.is_some()) {
            self.attachment.mac = noted;
        }
    }

    /// Takes over the Ethernet address that it has now, if it has its parent's, `of_parent`. A VLAN whose address was
    /// set does not follow its parent, and a pod may have set it: so a changed address of the parent counts only if
    /// the interface has it, and otherwise that of the ADD. What cannot be seen, because the parent, the namespace or
    /// the interface is gone, or the pod has given the interface more than the kernel can tell, stays as `noted` in
    /// the record.
    ///
    /// # Errors
    /// The interface cannot be read. The attachment is left unchanged.
    pub(crate) fn follow_parent(
        &mut self,
        noted: Option<Mac>,
        of_parent: Option<Mac>,
    ) -> Result<(), EnforceError> {
        let (Some(inherits), HookPoint::Pod(device)) = (self.inherits, &self.point) else { return Ok(()) };
        let Some(of_parent) = of_parent else {
            self.keep(noted);
            return Ok(());
        };
        if inherits.always || noted == Some(of_parent) || of_parent == self.attachment.mac {
            self.attachment.mac = of_parent;
            return Ok(());
        }
        match own_mac(device)? {
            None => self.keep(noted),
            Some(own) if own == of_parent => self.attachment.mac = of_parent,
            Some(_) => {}
        }
        Ok(())
    }

    /// The attachment as a member of the fast path.
    pub(crate) fn member(&self) -> Member {
        let (id, device, mac) = (self.id, self.host_index(), self.attachment.mac);
        let (addresses, chosen) = (self.own.clone(), self.chosen.clone());
        Member { id, mac, addresses, chosen, device, routed: self.routed, kept_off: self.kept_off.clone() }
    }

    /// Whether the device on which its frames arrive is gone.
    ///
    /// # Errors
    /// The kernel could not be asked.
    pub fn is_gone(&self, host: &mut Handle) -> Result<bool, HookError> {
        self.point.is_gone(host)
    }

    /// Adds what is known of its parent, if it has one.
    #[must_use]
    pub fn on_card(self, is_card: Option<bool>) -> Self {
        Self { on_card: is_card, ..self }
    }

    /// Index of the device on the node; 0 if it has none.
    pub fn host_index(&self) -> u32 {
        self.point.host_index()
    }

    /// The addresses that the node routes to it: by them its packet filter knows it.
    ///
    /// # Errors
    /// The kernel could not be asked.
    pub(super) fn routed_addresses(&self, host: &mut Handle) -> Result<Vec<IpAddr>, netlink::Error> {
        let end = match self.point {
            HookPoint::NodeEnd(device) => Some(device),
            HookPoint::Parent { .. } | HookPoint::Pod(_) | HookPoint::Nowhere(_) => None,
        };
        self.routed_to.addresses(end, host)
    }

    /// Its bandwidth limit, if any.
    pub(super) fn bandwidth(&self) -> Option<&BandwidthLimit> {
        self.bandwidth.as_ref()
    }

    /// The pace of the node's end towards the pod, if there is one and it is limited.
    pub(crate) fn host_pace(&self) -> Option<Pace> {
        let bandwidth = self.bandwidth.filter(BandwidthLimit::is_paced_to_pod)?;
        Some(bandwidth.received()?.pace())
    }

    /// The pace of the pod's end, if it is limited.
    pub(crate) fn pod_pace(&self) -> Option<Pace> {
        Some(self.bandwidth?.sent()?.pace())
    }
}

/// Whether the attachment's programs on the node are on a representor.
pub(crate) fn is_behind_card(attachment: &AttachmentPlan) -> bool {
    matches!(attachment.made_by(), MadeBy::Device(device) if device.switchdev)
}

/// Returns the Ethernet address of a link; `None`: it has none, or is gone, or its pod has given it more than the kernel
/// can tell.
pub(crate) fn present_mac(namespace: &mut Handle, index: u32) -> Result<Option<Mac>, netlink::Error> {
    match namespace.link_by_index(index) {
        Err(error) if error.not_found() || error.is_untold() => Ok(None),
        found => Ok(found?.mac),
    }
}

/// As [`present_mac`], of a device in its pod; `None` also if the namespace is gone.
fn own_mac(device: &PodDevice) -> Result<Option<Mac>, EnforceError> {
    match device.handle()? {
        Some(mut pod) => Ok(present_mac(&mut pod, device.index)?),
        None => Ok(None),
    }
}

/// Whether the attachment has a parent whose links reach each other without leaving it.
fn reach_each_other(attachment: &AttachmentPlan) -> bool {
    matches!(attachment.link().map(Link::tie), Some(Tie::Parent { siblings: true, .. }))
}

/// Returns where frames of a link on that parent leave again.
fn trunks(parent: &Parent) -> Trunks {
    let on = parent.trunks.iter().map(|it| (it.device, it.vlan)).collect();
    Trunks { netns_cookie: parent.netns_cookie, on }
}

/// Whether another plugin made the interface.
fn is_delegated(attachment: &AttachmentPlan) -> bool {
    attachment.made_by() == MadeBy::Plugin
}

/// Whether packets of the pod may be handled by another protocol than that in their frames: see
/// [`Link::goes_by_named_protocol`]. The driver of an interface of another plugin, or of a device of the
/// node, is not known here.
fn may_go_by_named_protocol(attachment: &AttachmentPlan) -> bool {
    attachment.link().is_none_or(Link::goes_by_named_protocol)
}

/// Returns the on-link IPv6 prefixes of an attachment with these addresses, besides the link-local one. A
/// pod may choose an address, but not a prefix: see [`author::prefix_v6`].
fn on_link(sandbox: &Sandbox, attachment: &AttachmentPlan, leased: &Leased) -> Vec<Ipv6Net> {
    let mut found: Vec<Ipv6Net> = Vec::new();
    for leased in &leased.addresses {
        let on_link = match (routing::style(attachment), leased.address) {
            (Style::Subnet, IpNet::V6(address)) => author::prefix_v6(sandbox, attachment, address),
            (Style::PointToPoint, _) => match addressing::only_gateway(leased) {
                IpAddr::V6(gateway) => gateway.into(),
                IpAddr::V4(_) => continue,
            },
            (Style::Subnet | Style::Routed, _) => continue,
        };
        if !found.contains(&on_link) {
            found.push(on_link);
        }
    }
    found
}

/// Returns the addresses that the pod has chosen outside the subnets of the network's author.
fn chosen(sandbox: &Sandbox, attachment: &AttachmentPlan, leased: &Leased) -> Vec<IpAddr> {
    let is_chosen = |address: &IpNet| author::subnet(sandbox, attachment, *address).is_none();
    let addresses = leased.addresses.iter().map(|leased| leased.address).filter(is_chosen);
    addresses.map(|address| address.addr()).collect()
}

/// Returns the VLANs whose tagged frames the attachment's bridge port accepts.
fn trunk(attachment: &AttachmentPlan) -> impl Iterator<Item = u16> {
    let vlans = attachment.link().and_then(Link::port).and_then(|port| port.vlans.as_ref());
    vlans.into_iter().flat_map(PortVlans::tagged_ids)
}

/// Returns the VLANs whose tagged frames the key `vlans` allows.
fn tagged(protect: &Protect) -> impl Iterator<Item = u16> {
    protect.vlans.iter().flat_map(|(first, last)| *first..=*last)
}

/// Returns why an attachment's own configuration excludes it from the fast path.
fn kept_off(protect: &Protect, attachment: &AttachmentPlan) -> Option<Reason> {
    if is_delegated(attachment) {
        return Some(Reason::Plugin(attachment.kind.clone()));
    }
    if let MadeBy::Device(_) = attachment.made_by() {
        return Some(Reason::OnParent("device"));
    }
    if !protect.fast_path {
        return Some(Reason::OptedOut);
    }
    if let Some(link) = attachment.link()
        && let Tie::Parent { .. } | Tie::InPod = link.tie()
    {
        return Some(Reason::OnParent(link.kind()));
    }
    Reason::of_plugins(attachment.steps.iter().filter_map(|step| match step {
        Step::Delegate(chained) if chained.role == Role::Plugin => Some(chained.plugin.as_str()),
        _ => None,
    }))
}

/// Returns the hook point of the attachment's programs; `None`: the device does not exist.
fn point(
    (sandbox, cookie): (&Sandbox, Option<u64>),
    attachment: &AttachmentPlan,
    vantage: HookKind,
    ends: Option<&Ends>,
) -> Option<HookPoint> {
    let siblings = reach_each_other(attachment);
    let in_pod = |ends: &Ends| PodDevice {
        netns: sandbox.netns.clone().into(),
        netns_id: sandbox.netns_id,
        netns_cookie: cookie,
        index: ends.pod.index,
    };
    match vantage {
        HookKind::Node => Some(HookPoint::NodeEnd(ends?.host.as_ref()?.index)),
        HookKind::Parent => {
            let (macvlan, parent) = (in_pod(ends?), ends?.parent.as_ref()?);
            let on = OnParent { parent: parent.device.index, siblings, netns_cookie: parent.netns_cookie };
            Some(HookPoint::Parent { on, macvlan })
        }
        HookKind::Pod => ends.map(|ends| HookPoint::Pod(in_pod(ends))),
        HookKind::Nowhere(why) => Some(HookPoint::Nowhere(why)),
    }
}

/// Returns the endpoint that policies can refer to: by its definition, as its pod's default network, or
/// none.
fn endpoint(
    protect: &Protect,
    pod: &PodRef,
    attachment: &AttachmentPlan,
    leased: &Leased,
) -> Option<Endpoint> {
    let at = places(attachment);
    (!at.is_empty()).then(|| Endpoint {
        id: protect.id,
        pod: pod.name.clone(),
        uid: pod.uid.clone(),
        at: Arc::new(at),
        addresses: leased.addresses.iter().map(|leased| leased.address.addr()).collect(),
        dhcp: dhcp(attachment, leased),
        ethertypes: protect.ethertypes.clone(),
    })
}

/// Returns where DHCP servers are for an attachment with addresses by DHCP. A server or relay that answers
/// is on the link, or has granted the lease.
fn dhcp(attachment: &AttachmentPlan, leased: &Leased) -> Option<Dhcp> {
    let by_dhcp = |step: &Step| match step {
        Step::Delegate(plugin) if plugin.role == Role::Plugin => {
            plugin.config.get("ipam").is_some_and(|ipam| ipam["type"] == DHCP)
        }
        step => step.asks_the_network(),
    };
    if !attachment.steps.iter().any(by_dhcp) {
        return None;
    }
    let addresses = leased.addresses.iter().map(|leased| leased.address);
    let on_link = addresses.filter(|address| address.addr().is_ipv4()).map(|address| address.trunc());
    let on_link: BTreeSet<IpNet> = on_link.collect();
    let server = leased.server.map(|server| IpNet::from(IpAddr::V4(server)));
    let is_leased_here = attachment.steps.iter().any(|step| matches!(step, Step::Lease(_)));
    let hears: BTreeSet<IpNet> = match server {
        // A requested address is not leased yet, and another one may be offered.
        None if is_leased_here => BTreeSet::new(),
        _ => on_link.iter().copied().chain(server).collect(),
    };
    let asks = match server {
        Some(server) => vec![server],
        // A /32 is the pod's own address, as while the address is being requested; a rule for it would have
        // no effect.
        None => on_link.into_iter().filter(|net| net.prefix_len() < 32).collect(),
    };
    Some(Dhcp { asks, hears: hears.into_iter().collect() })
}

/// Returns the places of an attachment, as policies refer to them.
pub(crate) fn places(attachment: &AttachmentPlan) -> BTreeSet<Place> {
    let network = attachment.network.definition().cloned().map(Place::Network);
    network.into_iter().chain(attachment.default.then_some(Place::Default)).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use crate::enforce::attachment::*;
    use crate::objects::ObjectName;
    use crate::plan::fixtures;
    use crate::step::Delegate;

    /// An attachment of pod `shop/a` on a bridge.
    pub(in crate::enforce) fn attachment(id: u32) -> EnforcedAttachment {
        EnforcedAttachment {
            id,
            label: "shop/a net1 on shop/storage".into(),
            attachment: Attachment {
                mac: Mac([2, 0, 0, 0, 0, 1]),
                addresses: Vec::new(),
                shared: Vec::new(),
                on_link: Vec::new(),
                ethertypes: Vec::new(),
                zone: 1,
                flags: Checks::default(),
                vlans: BTreeSet::new(),
                limits: Limits::default(),
            },
            point: HookPoint::NodeEnd(7),
            on_card: None,
            delegated: false,
            on_representor: false,
            netkit: false,
            shares: None,
            inherits: None,
            trunks: Trunks::default(),
            when: EnforceWhen::Always,
            pod: Some(PodRef { name: ObjectName::new("shop", "a"), uid: None }),
            pod_index: 2,
            own: Vec::new(),
            chosen: Vec::new(),
            routed_to: RoutedTo::None,
            bandwidth: None,
            endpoint: Some(Endpoint {
                id,
                pod: ObjectName::new("shop", "a"),
                uid: None,
                at: Arc::new([Place::Default].into()),
                addresses: Vec::new(),
                dhcp: None,
                ethertypes: Vec::new(),
            }),
            routed: false,
            kept_off: None,
        }
    }

    /// An attachment made by another plugin, enforced once a policy selects it.
    pub(in crate::enforce) fn delegated(id: u32) -> EnforcedAttachment {
        EnforcedAttachment { delegated: true, when: EnforceWhen::Selected, ..attachment(id) }
    }

    /// Rows: IVL-parent-mac, VLN-parent-mac.
    #[test]
    fn what_cannot_be_seen_of_a_follower_stays_as_its_record_has_it() {
        let [of_add, noted, of_parent] = [1, 2, 3].map(|last| Mac([2, 0, 0, 0, 0, last]));
        // The namespace of the pod is gone.
        let netns_id = crate::netns::NetnsId { device: 4, inode: 5 };
        let device = PodDevice { netns: "/nonexistent".into(), netns_id, netns_cookie: None, index: 3 };
        let follow = |inherits, noted, of_parent| {
            let point = HookPoint::Pod(device.clone());
            let mut follower = EnforcedAttachment { point, inherits, ..attachment(1) };
            follower.follow_parent(noted, of_parent).unwrap();
            follower.mac()
        };
        let of = |always| Some(Inherits { parent: 7, always });
        let table = [
            // A VLAN whose interface nobody can look at, and whose parent is gone.
            (of(false), Some(noted), Some(of_parent), noted),
            (of(false), Some(noted), None, noted),
            (of(false), None, Some(of_parent), of_add),
            (of(false), Some(noted), Some(noted), noted),
            (of(false), Some(noted), Some(of_add), of_add),
            // An ipvlan can have no other address than its parent's.
            (of(true), Some(noted), Some(of_parent), of_parent),
            (of(true), Some(noted), None, noted),
            (None, Some(noted), Some(of_parent), of_add),
        ];
        for (inherits, noted, of_parent, expected) in table {
            assert_eq!(follow(inherits, noted, of_parent), expected, "{inherits:?} {noted:?} {of_parent:?}");
        }
    }

    /// Rows: C84.
    #[test]
    fn servers_of_dhcp_are_on_the_link_or_have_given_the_lease() {
        let step = |step: Value| serde_json::from_value::<Step>(step).unwrap();
        let leases = step(json!({"step": "lease", "ipam": "dhcp", "network": "lan", "wanted": [1]}));
        let executed = |role, config| {
            let Value::Object(config) = config else { unreachable!() };
            Step::Delegate(Delegate { plugin: "dhcp".into(), config, role })
        };
        let managed = executed(Role::Ipam, json!({}));
        let made = executed(Role::Plugin, json!({"ipam": {"type": "dhcp"}}));
        let made_otherwise = executed(Role::Plugin, json!({"ipam": {"type": "static"}}));
        let given = |addresses: Value, server: Option<&str>| Leased {
            addresses: serde_json::from_value(addresses).unwrap(),
            server: server.map(|server| server.parse().unwrap()),
            ..Leased::default()
        };
        let (nothing, probed) = (given(json!([]), None), given(json!([{"address": "10.77.0.9/32"}]), None));
        let both = json!([{"address": "10.77.0.9/24"}, {"address": "fd00::9/64"}]);
        let (bound, told) = (given(both.clone(), Some("192.0.2.67")), given(both, None));
        let dhcp = |asks: &[&str], hears: &[&str]| {
            let nets = |nets: &[&str]| nets.iter().map(|net| net.parse().unwrap()).collect::<Vec<IpNet>>();
            Some(Dhcp { asks: nets(asks), hears: nets(hears) })
        };
        for (step, leased, expected) in [
            (&leases, &nothing, dhcp(&[], &[])),
            (&leases, &probed, dhcp(&[], &[])),
            (&made, &probed, dhcp(&[], &["10.77.0.9/32"])),
            (&leases, &bound, dhcp(&["192.0.2.67/32"], &["10.77.0.0/24", "192.0.2.67/32"])),
            // Recorded by an agent that did not record the server.
            (&leases, &told, dhcp(&["10.77.0.0/24"], &[])),
            (&managed, &nothing, dhcp(&[], &[])),
            (&managed, &told, dhcp(&["10.77.0.0/24"], &["10.77.0.0/24"])),
            (&made, &told, dhcp(&["10.77.0.0/24"], &["10.77.0.0/24"])),
            (&made_otherwise, &told, None),
        ] {
            let plan = fixtures::attachment("bridge", vec![step.clone()]);
            assert_eq!(super::dhcp(&plan, leased), expected, "{step:?} {leased:?}");
        }
    }
}
