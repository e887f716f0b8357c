//! Keeps track of address holders: an address that a request chooses must not be in use elsewhere on the segment.
//!
//! This module stores the addresses of attachments, because the kernel forgets a pod that is silent. For other holders
//! `in_use` asks the kernel.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::attach::addresses::holder::{Address, AddressError, Holder};
use crate::attach::apply::owner;
use crate::attach::device::take_device::asked_mac;
use crate::attach::{Attached, StepError};
use crate::error_chain::Chain;
use crate::ipam::{Owner, Pool};
use crate::mac::Mac;
use crate::netlink::Changes;
use crate::plan::{AttachmentPlan, Plan, PodRef, Sandbox, result};
use crate::spec::{Link, PortVlans, Tie};
use crate::step::{Brought, Output, Step};

/// Where an address is used: the index of the bridge, of the macvlans' parent, or of the physical function's
/// interface of a VF; 0 for addresses that the node routes to.
pub(super) type Segment = u32;

/// The segment of all addresses that the node routes to.
pub(in crate::attach) const ROUTED: Segment = 0;

/// The addresses of attachments, including those that are still being made.
#[derive(Debug, Default)]
pub struct Occupied {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The holders of each address: several only where pools lease it on different links or out of one directory, or
    /// where an earlier version has let several have it.
    held: BTreeMap<(Segment, Address), Vec<Held>>,
    /// The gateway addresses that the node is getting.
    gateways: BTreeMap<IpAddr, Vec<Gateway>>,
    parents: BTreeMap<Segment, Shared>,
    /// The claims of each owner, so that a release does not search the claims of all others.
    of: HashMap<Owner, Claims>,
}

/// How the attached links share a parent.
#[derive(Debug, Default)]
struct Shared {
    ways: BTreeMap<Owner, Way>,
    /// Number of owners for each way of sharing.
    counts: BTreeMap<&'static str, usize>,
    /// Number of owners whose links follow the parent.
    followers: usize,
}

/// How one link shares its parent.
#[derive(Debug, Clone, Copy)]
struct Way {
    /// [`Link::sharing`]; `None`: beside links of any kind.
    how: Option<&'static str>,
    /// [`Link::follows_parent`].
    follows: bool,
}

/// The claims of one owner.
#[derive(Debug, Default)]
struct Claims {
    addresses: Vec<(Segment, Address)>,
    gateways: Vec<IpAddr>,
    parents: Vec<Segment>,
}

#[derive(Debug)]
struct Held {
    owner: Owner,
    /// The pod, if the owner is a known pod's.
    pod: Option<PodRef>,
    /// The pool that leased the address; `None`: the pod, the network's author or a server chose it.
    pool: Option<Pool>,
    /// The VLANs of the owner's port on a bridge.
    vlans: Option<PortVlans>,
    /// Whether the node's own routes lead to the address by the attachment.
    is_routed: bool,
}

/// A gateway address that the node is getting.
#[derive(Debug)]
struct Gateway {
    /// The attachment that gives it to the node.
    owner: Owner,
    /// See [`NodeLink`].
    link: NodeLink,
}

/// The link on which the node gets a gateway address.
#[derive(Debug, Clone)]
pub(in crate::attach) struct NodeLink {
    /// Name of the bridge, or of the node's end of a routed link.
    pub(in crate::attach) name: String,
    /// The bridge's index; [`ROUTED`] for a routed link.
    pub(in crate::attach) segment: Segment,
    /// The VLAN of the bridge.
    pub(in crate::attach) vlan: Option<u16>,
}

impl NodeLink {
    fn vlans(&self) -> Option<PortVlans> {
        self.vlan.map(|vlan| PortVlans { native: Some(vlan), ..PortVlans::default() })
    }
}

impl Held {
    fn of(segment: Segment, address: Address, (sandbox, attachment): (&Sandbox, &AttachmentPlan)) -> Self {
        let port = attachment.link().and_then(Link::port);
        Self {
            owner: owner(sandbox, attachment),
            pod: sandbox.pod.clone(),
            pool: matches!(address, Address::Ip(_)).then(|| pool(attachment)).flatten(),
            vlans: port.and_then(|port| port.vlans.clone()),
            is_routed: segment == ROUTED || attachment.steps.iter().any(leads_to_pod),
        }
    }

    /// Whether two owners may not have one address on one segment. A pool avoids conflicts within itself.
    fn excludes(&self, other: &Self) -> bool {
        match (&self.pool, &other.pool) {
            _ if self.owner == other.owner => false,
            (Some(own), Some(others)) if own == others => false,
            (Some(_), Some(_)) => have_common_link(self.vlans.as_ref(), other.vlans.as_ref()),
            _ => true,
        }
    }

    /// Whether the node may not have the address as a gateway's: traffic for the attachment would end at the node.
    /// `leads`: the device on whose link the node reaches the address now.
    fn excludes_gateway(&self, segment: Segment, link: &NodeLink, leads: Option<Segment>) -> bool {
        let is_on_link =
            segment == link.segment && have_common_link(self.vlans.as_ref(), link.vlans().as_ref());
        is_on_link || self.is_routed || leads == Some(segment)
    }

    /// The owner as text for operators.
    fn who(&self) -> String {
        let Owner { container_id, ifname } = &self.owner;
        let pod = self.pod.as_ref().map(|pod| format!("pod {pod}, ")).unwrap_or_default();
        format!("{pod}container {container_id}, interface {ifname}")
    }

    /// The owner as text for the author of another pod: who may not see the pods of a namespace is not told their
    /// names, and nothing is hidden from a runtime that names no pod.
    fn told_to(&self, sandbox: &Sandbox) -> String {
        let Some(asking) = &sandbox.pod else { return self.who() };
        match &self.pod {
            Some(pod) if pod.name.namespace == asking.name.namespace => self.who(),
            Some(_) => "a pod of another namespace".to_owned(),
            None => "another container of the node".to_owned(),
        }
    }
}

/// Whether the node gets routes to the attachment's addresses by this step.
fn leads_to_pod(step: &Step) -> bool {
    matches!(step, Step::Gateway { .. } | Step::RouteToPod | Step::ChooseHostAccess)
}

/// Whether two ports of one bridge may be on one link. Without settings of its own a port is in the bridge's default
/// VLAN, usually 1.
fn have_common_link(one: Option<&PortVlans>, other: Option<&PortVlans>) -> bool {
    let (one, other) = (links(one), links(other));
    one.iter().any(|(first, last)| other.iter().any(|(low, high)| first <= high && low <= last))
}

/// First and last VLAN of each range in which a port is.
fn links(port: Option<&PortVlans>) -> Vec<(u16, u16)> {
    const DEFAULT: (u16, u16) = (1, 1);
    let Some(PortVlans { native, tagged, keeps_default }) = port else { return vec![DEFAULT] };
    let native = native.map(|vlan| (vlan, vlan));
    tagged.iter().copied().chain(native).chain(keeps_default.then_some(DEFAULT)).collect()
}

impl Shared {
    /// Returns another owner whose link excludes links that share the parent in the way `how`, and that link's way.
    fn excludes(&self, owner: &Owner, how: Option<&'static str>) -> Option<(&Owner, &'static str)> {
        let how = how?;
        // The usual case, without a search of all owners.
        self.counts.keys().find(|way| **way != how)?;
        let known = self.ways.iter().filter_map(|(of, way)| Some((of, way.how?)));
        known.filter(|(of, _)| *of != owner).find(|(_, way)| *way != how)
    }

    /// Returns whether the owner is new.
    fn add(&mut self, owner: &Owner, way: Way) -> bool {
        if self.ways.contains_key(owner) {
            return false;
        }
        self.ways.insert(owner.clone(), way);
        self.followers += usize::from(way.follows);
        if let Some(how) = way.how {
            *self.counts.entry(how).or_default() += 1;
        }
        true
    }

    fn take(&mut self, owner: &Owner) {
        let Some(way) = self.ways.remove(owner) else { return };
        self.followers -= usize::from(way.follows);
        let Some(how) = way.how else { return };
        if let Some(count) = self.counts.get_mut(how) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(how);
            }
        }
    }
}

impl Occupied {
    /// Whether attachments use the device with this index as their parent.
    pub(in crate::attach) fn is_parent(&self, index: Segment) -> bool {
        self.lock().parents.contains_key(&index)
    }

    /// Returns those parents among the changes whose Ethernet address links of attachments have.
    pub(in crate::attach) fn followed_among(&self, changes: &Changes) -> Vec<Segment> {
        let is_among = |parent: &Segment| match changes {
            Changes::Of(touched) => touched.links.contains(parent),
            Changes::Anything => true,
        };
        let inner = self.lock();
        let followed = inner.parents.iter().filter(|(parent, it)| it.followers > 0 && is_among(parent));
        followed.map(|(parent, _)| *parent).collect()
    }

    /// Claims the address for the attachment until [`Occupied::release`]. Two attachments have one address only if one
    /// pool has leased it to both, or different pools in different VLANs of a bridge.
    ///
    /// # Errors
    /// The address has another holder, or the node is getting it. The error names a holder only to pods of its
    /// namespace; the log names each.
    pub fn claim(
        &self,
        segment: Segment,
        address: Address,
        sandbox: &Sandbox,
        attachment: &AttachmentPlan,
    ) -> Result<(), StepError> {
        let held = Held::of(segment, address, (sandbox, attachment));
        let mut inner = self.lock();
        let mut holders = inner.held.get(&(segment, address)).into_iter().flatten();
        let holder = holders.find(|holder| holder.excludes(&held));
        if let Some(holder) = holder {
            return Err(taken(address, holder, (sandbox, attachment)).into());
        }
        if let Some(gateway) = inner.gateway_excluding(segment, address, &held) {
            let holder = Holder::Gateway(gateway.link.name.clone());
            return Err(AddressError::Taken { address, holder }.into());
        }
        inner.add(segment, address, held);
        Ok(())
    }

    /// Releases one address of an attachment, which its pool takes back.
    pub(in crate::attach) fn release_address(&self, segment: Segment, ip: IpAddr, owner: &Owner) {
        let (mut inner, key) = (self.lock(), (segment, Address::Ip(ip)));
        if let Some(claims) = inner.of.get_mut(owner) {
            claims.addresses.retain(|claimed| *claimed != key);
        }
        inner.remove(&key, owner);
    }

    /// Whether an attachment of another owner has the address, on that segment; `None`: on any.
    pub(in crate::attach) fn is_held_by_another(
        &self,
        on: Option<Segment>,
        ip: IpAddr,
        owner: &Owner,
    ) -> bool {
        let inner = self.lock();
        let mut others = inner.holders(Address::Ip(ip)).filter(|(_, held)| held.owner != *owner);
        others.any(|(segment, _)| on.is_none_or(|on| on == segment))
    }

    /// Claims an address that the node is about to get as a gateway's, until [`Occupied::release_gateways`]: from then
    /// on the node has it. `leads`: the device on whose link the node reaches the address now.
    ///
    /// # Errors
    /// An attachment on that link has the address, or one that the node reaches by it.
    pub(in crate::attach) fn claim_gateway(
        &self,
        ip: IpAddr,
        link: &NodeLink,
        leads: Option<Segment>,
        (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    ) -> Result<(), StepError> {
        let (owner, address) = (owner(sandbox, attachment), Address::Ip(ip));
        let mut inner = self.lock();
        let excludes = |(segment, held): &(Segment, &Held)| {
            held.owner != owner && held.excludes_gateway(*segment, link, leads)
        };
        if let Some((_, holder)) = inner.holders(address).find(excludes) {
            return Err(taken(address, holder, (sandbox, attachment)).into());
        }
        inner.gateways.entry(ip).or_default().push(Gateway { owner: owner.clone(), link: link.clone() });
        inner.of.entry(owner).or_default().gateways.push(ip);
        Ok(())
    }

    /// Ends the claims of an attachment's gateway addresses.
    pub(in crate::attach) fn release_gateways(&self, owner: &Owner) {
        let mut inner = self.lock();
        let gateways = inner.of.get_mut(owner).map(|claims| std::mem::take(&mut claims.gateways));
        inner.remove_gateways(gateways.unwrap_or_default(), owner);
    }

    /// Records that a link of the attachment shares the parent in this way, until [`Occupied::release`]; `None`:
    /// beside links of any kind. Without this check, the kernel would let a later ipvlan change the mode of all
    /// existing ones.
    ///
    /// # Errors
    /// The parent carries links that share it in another way; the error names them, and the container of one.
    pub(in crate::attach) fn share(
        &self,
        parent: Segment,
        how: impl Into<Option<&'static str>>,
        sandbox: &Sandbox,
        attachment: &AttachmentPlan,
    ) -> Result<(), (&'static str, String)> {
        let how = how.into();
        let owner = owner(sandbox, attachment);
        let mut inner = self.lock();
        if let Some(shared) = inner.parents.get(&parent)
            && let Some((of, other)) = shared.excludes(&owner, how)
        {
            return Err((other, of.container_id.clone()));
        }
        let way = Way { how, follows: attachment.link().is_some_and(Link::follows_parent) };
        if inner.parents.entry(parent).or_default().add(&owner, way) {
            inner.of.entry(owner).or_default().parents.push(parent);
        }
        Ok(())
    }

    /// Notes the addresses of an attached sandbox. Sandboxes that an earlier version has attached may have the same
    /// address: each of them holds it.
    pub fn adopt(&self, attached: &Attached) {
        let Attached { plan, outputs, .. } = attached;
        for (number, attachment) in plan.attachments.iter().enumerate() {
            // Attachment numbers fit into a `u16`: see `Plan::steps`.
            let number = number as u16;
            if let Some(parent) = result::ends(outputs.of(number)).and_then(|ends| ends.parent) {
                let how = attachment.link().and_then(Link::sharing);
                // An error is ignored: the kernel has accepted both of two links that exclude each other.
                let _ = self.share(parent.device.index, how, &plan.sandbox, attachment);
            }
            let outputs = outputs.of(number);
            let segment = segment(attachment, outputs);
            if let (Some(segment), Some(mac)) = (segment.or_else(|| card(outputs)), mac(attachment, outputs))
            {
                self.hold(segment, Address::Mac(mac), (&plan.sandbox, attachment));
            }
            let Some(segment) = segment else { continue };
            let leased = match result::leased(attachment, outputs) {
                Ok(leased) => leased,
                Err(error) => {
                    let (container, ifname) = (&plan.sandbox.container_id, &attachment.ifname);
                    tracing::warn!(
                        container, ifname, error = %Chain(&error),
                        "the addresses of an attachment are unknown: another pod may get the same ones"
                    );
                    continue;
                }
            };
            for address in leased.addresses.iter().map(|leased| Address::Ip(leased.address.addr())) {
                self.hold(segment, address, (&plan.sandbox, attachment));
            }
        }
    }

    /// Notes that an attachment has an address, whether or not another one has it.
    fn hold(&self, segment: Segment, address: Address, of: (&Sandbox, &AttachmentPlan)) {
        let held = Held::of(segment, address, of);
        self.lock().add(segment, address, held);
    }

    /// Releases everything that the attachments of a plan hold.
    pub fn release(&self, plan: &Plan) {
        let mut inner = self.lock();
        for attachment in &plan.attachments {
            let owner = owner(&plan.sandbox, attachment);
            let Claims { addresses, gateways, parents } = inner.of.remove(&owner).unwrap_or_default();
            for key in addresses {
                inner.remove(&key, &owner);
            }
            inner.remove_gateways(gateways, &owner);
            for parent in parents {
                if let Some(shared) = inner.parents.get_mut(&parent) {
                    shared.take(&owner);
                    if shared.ways.is_empty() {
                        inner.parents.remove(&parent);
                    }
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No lock is poisoned: a panic ends the agent.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// All holders of an address, with the segment on which each has it. Goes from segment to segment, of which there
    /// are few, and not through the addresses of each.
    fn holders(&self, address: Address) -> impl Iterator<Item = (Segment, &Held)> {
        const LOWEST: Address = Address::Mac(Mac([0; 6]));
        let first_from =
            |segment: Segment| self.held.range((segment, LOWEST)..).next().map(|((segment, _), _)| *segment);
        let next = move |segment: &Segment| first_from(segment.checked_add(1)?);
        let segments = std::iter::successors(first_from(ROUTED), next);
        segments.flat_map(move |segment| {
            let holders = self.held.get(&(segment, address)).into_iter().flatten();
            holders.map(move |held| (segment, held))
        })
    }

    fn add(&mut self, segment: Segment, address: Address, held: Held) {
        let holders = self.held.entry((segment, address)).or_default();
        if holders.iter().any(|holder| holder.owner == held.owner) {
            return;
        }
        self.of.entry(held.owner.clone()).or_default().addresses.push((segment, address));
        holders.push(held);
    }

    fn remove(&mut self, key: &(Segment, Address), owner: &Owner) {
        let Some(holders) = self.held.get_mut(key) else { return };
        holders.retain(|held| held.owner != *owner);
        if holders.is_empty() {
            self.held.remove(key);
        }
    }

    fn remove_gateways(&mut self, gateways: Vec<IpAddr>, owner: &Owner) {
        for ip in gateways {
            let Some(all) = self.gateways.get_mut(&ip) else { continue };
            all.retain(|gateway| gateway.owner != *owner);
            if all.is_empty() {
                self.gateways.remove(&ip);
            }
        }
    }

    /// The gateway address that the node is getting, if the attachment may not have it.
    fn gateway_excluding(&self, segment: Segment, address: Address, held: &Held) -> Option<&Gateway> {
        let Address::Ip(ip) = address else { return None };
        let mut all = self.gateways.get(&ip)?.iter().filter(|gateway| gateway.owner != held.owner);
        all.find(|gateway| held.excludes_gateway(segment, &gateway.link, None))
    }
}

/// The error for an address that another attachment has. The log names the holder.
fn taken(address: Address, held: &Held, (sandbox, attachment): (&Sandbox, &AttachmentPlan)) -> AddressError {
    let who = held.told_to(sandbox);
    tracing::info!(
        container = sandbox.container_id, ifname = attachment.ifname, %address, holder = held.who(),
        "address refused: another attachment has it"
    );
    let holder = Holder::Attachment { container: held.owner.container_id.clone(), who };
    AddressError::Taken { address, holder }
}

/// Returns the pool that leases the attachment's IP addresses; `None`: they are chosen.
fn pool(attachment: &AttachmentPlan) -> Option<Pool> {
    attachment.steps.iter().find_map(|step| match step {
        Step::Lease(config) if !config.is_chosen() => config.pool(),
        _ => None,
    })
}

/// Returns the segment of an attachment's addresses, as far as the outputs of its steps determine it.
pub(in crate::attach) fn segment(attachment: &AttachmentPlan, outputs: Brought<'_>) -> Option<Segment> {
    match attachment.link()?.tie() {
        Tie::NodeEnd { port: Some(_), .. } => outputs.iter().find_map(|output| match output {
            Output::Bridge(bridge) => Some(bridge.link.index),
            _ => None,
        }),
        Tie::NodeEnd { port: None, .. } => result::ends(outputs).map(|_| ROUTED),
        // A VLAN is a segment of its own, with one attachment.
        Tie::Parent { .. } if matches!(attachment.link(), Some(Link::Vlan(_))) => None,
        Tie::Parent { .. } => Some(result::ends(outputs)?.parent?.device.index),
        Tie::InPod => None,
    }
}

/// Returns the physical function of an attachment's VF. Its embedded switch also connects the macvlans on that card,
/// so Ethernet addresses must be unique there. IP addresses may be used again in another VLAN.
fn card(outputs: Brought<'_>) -> Option<Segment> {
    outputs.iter().find_map(|output| match output {
        Output::Claimed(claim) if !claim.is_back => claim.physical,
        _ => None,
    })
}

/// Returns the Ethernet address of the pod's interface; for a device that a process drives, the requested address.
fn mac(attachment: &AttachmentPlan, outputs: Brought<'_>) -> Option<Mac> {
    let made = result::ends(outputs).and_then(|ends| ends.pod.mac);
    made.or_else(|| asked_mac(&attachment.steps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    use crate::attach::rig;
    use crate::cni::{CniArgs, code};
    use crate::ipam;
    use crate::netlink::Touched;
    use crate::objects::ObjectName;
    use crate::plan::fixtures;
    use crate::spec::{self, Macvlan, MacvlanMode, VirtualFunction};
    use crate::step::{Claim, Interface, SetDevice, StepRef};

    fn plan(container: &str) -> Plan {
        let pod = Some(PodRef { name: ObjectName::new("shop", container), uid: None });
        let sandbox = Sandbox { pod, ..fixtures::sandbox(container) };
        Plan { sandbox, attachments: vec![fixtures::attachment("bridge", Vec::new())], dynamic: None }
    }

    #[test]
    fn an_address_has_one_holder_on_each_segment_until_it_is_released() {
        let occupied = Occupied::default();
        let [a, b] = ["a", "b"].map(plan);
        let claim = |segment, address, plan: &Plan| {
            occupied
                .claim(segment, address, &plan.sandbox, &plan.attachments[0])
                .map_err(|error| error.to_string())
        };
        let mac = Address::Mac(Mac([2, 0, 0, 0, 0, 1]));
        let ip = Address::Ip([10, 0, 0, 1].into());
        for address in [mac, ip] {
            let taken = format!("{address} is taken: pod shop/a, container a, interface net1 has it");
            assert_eq!(claim(7, address, &a), Ok(()));
            assert_eq!(claim(7, address, &a), Ok(()), "the same again");
            assert_eq!(claim(7, address, &b), Err(taken.clone()));
            assert_eq!(claim(8, address, &b), Ok(()), "elsewhere");
            occupied.release(&b);
            assert_eq!(claim(7, address, &b), Err(taken), "another's");
        }
        occupied.release(&a);
        assert_eq!(claim(7, mac, &b), Ok(()));
    }

    #[test]
    fn an_address_that_somebody_has_chosen_is_given_to_nobody_else_by_a_pool() {
        let occupied = Occupied::default();
        let (chosen, [a, b]) = (plan("chosen"), ["a", "b"].map(|container| of_pool(container, "net", None)));
        let ip = |last| Address::Ip([10, 0, 0, last].into());
        let claim = |last, plan: &Plan| {
            occupied
                .claim(ROUTED, ip(last), &plan.sandbox, &plan.attachments[0])
                .map_err(|error| error.to_string())
        };
        let taken = |last, of: &str| {
            Err(format!(
                "address 10.0.0.{last} is taken: pod shop/{of}, container {of}, interface net1 has it"
            ))
        };
        assert_eq!(claim(7, &chosen), Ok(()));
        assert_eq!(claim(7, &a), taken(7, "chosen"));
        // One pool that leases it again: it answers for what it gives.
        assert_eq!([claim(8, &a), claim(8, &b)], [Ok(()), Ok(())]);
        assert_eq!(claim(8, &chosen), taken(8, "a"));
        occupied.release(&a);
        assert_eq!(claim(8, &chosen), taken(8, "b"), "who has it still");
        occupied.release(&chosen);
        assert_eq!(claim(7, &a), Ok(()));
        // What is given back is another's, and what else the owner has stays.
        assert_eq!(claim(9, &a), Ok(()));
        occupied.release_address(ROUTED, [10, 0, 0, 7].into(), &owner(&a.sandbox, &a.attachments[0]));
        assert_eq!([claim(7, &chosen), claim(9, &chosen)], [Ok(()), taken(9, "a")]);
    }

    /// An attachment with an address from the pool of that name, by a port of a bridge with these VLANs.
    fn of_pool(container: &str, pool: &str, vlans: Option<PortVlans>) -> Plan {
        let ranges = json!([[{"subnet": "10.0.0.0/24"}]]);
        let config = json!({"name": pool, "ipam": {"type": "host-local", "ranges": ranges}});
        let lease = ipam::Kind::HostLocal.parse(config.as_object().unwrap(), &CniArgs::default()).unwrap();
        let port = spec::BridgePort { bridge: "br0".to_owned(), vlans, ..spec::BridgePort::default() };
        let veth = spec::Veth {
            host_name: format!("veth-{container}"),
            pod_name: "net1".to_owned(),
            mtu: None,
            mac: None,
            group: 1,
            port: Some(port),
        };
        let mut plan = plan(container);
        plan.attachments[0].steps = vec![Step::CreateLink(Link::Veth(veth)), Step::Lease(lease)];
        plan
    }

    fn tagged(native: Option<u16>, tagged: &[(u16, u16)]) -> Option<PortVlans> {
        Some(PortVlans { native, tagged: tagged.to_vec(), keeps_default: false })
    }

    #[test]
    fn two_pools_give_no_address_twice_on_one_link() {
        let is_refused = |first: &Plan, second: &Plan, segments: [Segment; 2]| {
            let occupied = Occupied::default();
            let ip = Address::Ip([10, 0, 0, 7].into());
            let claim = |plan: &Plan, at| occupied.claim(at, ip, &plan.sandbox, &plan.attachments[0]);
            claim(first, segments[0]).unwrap();
            let second = claim(second, segments[1]);
            let code = second.err().map(|error| match error {
                StepError::Address(error) => error.code(),
                other => panic!("{other}"),
            });
            assert!(code.is_none_or(|code| code == code::TRY_AGAIN_LATER));
            code.is_some()
        };
        let victim = of_pool("a", "lan", None);
        assert!(is_refused(&victim, &of_pool("b", "other", None), [7, 7]));
        assert!(is_refused(&victim, &of_pool("b", "other", None), [ROUTED, ROUTED]));
        // The definitions name one pool, or the bridges or their VLANs are others.
        assert!(!is_refused(&victim, &of_pool("b", "lan", None), [7, 7]));
        assert!(!is_refused(&victim, &of_pool("b", "other", None), [7, 8]));
        let by_vlans = |first: Option<PortVlans>, second: Option<PortVlans>| {
            is_refused(&of_pool("a", "lan", first), &of_pool("b", "other", second), [7, 7])
        };
        assert!(by_vlans(tagged(Some(5), &[]), tagged(Some(5), &[])));
        assert!(!by_vlans(tagged(Some(5), &[]), tagged(Some(6), &[])));
        assert!(!by_vlans(tagged(Some(5), &[]), None));
        assert!(by_vlans(tagged(Some(1), &[]), None));
        assert!(by_vlans(tagged(Some(5), &[]), tagged(None, &[(2, 9)])), "by a trunk");
        let keeps = Some(PortVlans { native: Some(6), tagged: Vec::new(), keeps_default: true });
        assert!(by_vlans(keeps, None));
    }

    /// An earlier version let two pools give it.
    #[test]
    fn an_address_that_several_attachments_have_already_stays_taken_until_the_last_is_gone() {
        let occupied = Occupied::default();
        let ip = Address::Ip([10, 0, 0, 7].into());
        let [a, b] = [("a", "lan"), ("b", "other")].map(|(container, pool)| of_pool(container, pool, None));
        for plan in [&a, &b] {
            occupied.hold(7, ip, (&plan.sandbox, &plan.attachments[0]));
        }
        let another = of_pool("c", "third", None);
        let claim = || occupied.claim(7, ip, &another.sandbox, &another.attachments[0]).is_ok();
        assert!(!claim());
        occupied.release(&a);
        assert!(!claim());
        occupied.release(&b);
        assert!(claim());
    }

    #[test]
    fn the_node_gets_no_gateway_that_an_attachment_has_on_that_link_or_by_routing() {
        let (ip, bridge) = (IpAddr::from([10, 0, 0, 7]), 7);
        let link = |vlan| NodeLink { name: "x0".to_owned(), segment: bridge, vlan };
        let evil = plan("evil");
        let gateway = |victim: &Plan, at: Segment, vlan: Option<u16>, leads: Option<Segment>| {
            let occupied = Occupied::default();
            occupied.claim(at, Address::Ip(ip), &victim.sandbox, &victim.attachments[0]).unwrap();
            occupied.claim_gateway(ip, &link(vlan), leads, (&evil.sandbox, &evil.attachments[0])).is_ok()
        };
        let quiet = of_pool("a", "lan", None);
        let mut behind_gateway = of_pool("a", "lan", None);
        let step = Step::Gateway { bridge: "br0".to_owned(), force: false, beside: false, vlan: None };
        behind_gateway.attachments[0].steps.push(step);
        assert!(!gateway(&quiet, bridge, None, None));
        assert!(!gateway(&quiet, ROUTED, None, None));
        assert!(!gateway(&behind_gateway, 8, None, None), "the node routes there by another bridge");
        assert!(!gateway(&quiet, 8, None, Some(8)), "by an address that somebody has given that bridge");
        assert!(gateway(&quiet, 8, None, None), "a network of layer 2 alone is its own world");
        assert!(gateway(&quiet, bridge, Some(5), None), "another VLAN");
        let in_vlan = of_pool("a", "lan", tagged(Some(5), &[]));
        assert!(
            !gateway(&in_vlan, 8, None, Some(8)),
            "the node reaches it by the bridge's device of that VLAN"
        );
        assert!(gateway(&in_vlan, 8, None, None));
        // Until the kernel has it, nobody else gets it.
        let occupied = Occupied::default();
        let of_evil = (&evil.sandbox, &evil.attachments[0]);
        occupied.claim_gateway(ip, &link(None), None, of_evil).unwrap();
        let claim = |plan: &Plan, at| {
            let claimed = occupied.claim(at, Address::Ip(ip), &plan.sandbox, &plan.attachments[0]);
            claimed.map_err(|error| error.to_string())
        };
        let told = "address 10.0.0.7 is taken: x0 is getting it as the gateway's address".to_owned();
        assert_eq!(claim(&quiet, bridge), Err(told.clone()));
        assert_eq!(claim(&behind_gateway, 8), Err(told));
        assert_eq!(claim(&quiet, 9), Ok(()));
        occupied.release_gateways(&owner(of_evil.0, of_evil.1));
        assert_eq!(claim(&quiet, bridge), Ok(()));
    }

    #[test]
    fn of_another_holder_is_known_on_whatever_segment_it_is() {
        let occupied = Occupied::default();
        let [a, b] = ["a", "b"].map(plan);
        let ip = |last| IpAddr::from([10, 0, 0, last]);
        for (segment, last, plan) in
            [(ROUTED, 1, &a), (7, 2, &a), (7, 9, &b), (9, 3, &b), (Segment::MAX, 4, &b)]
        {
            occupied.claim(segment, Address::Ip(ip(last)), &plan.sandbox, &plan.attachments[0]).unwrap();
        }
        let of_b = owner(&b.sandbox, &b.attachments[0]);
        let by_another = |last| occupied.is_held_by_another(None, ip(last), &of_b);
        assert_eq!([1, 2, 3, 4, 5, 9].map(by_another), [true, true, false, false, false, false]);
        let of_a = owner(&a.sandbox, &a.attachments[0]);
        let by_another = |last| occupied.is_held_by_another(None, ip(last), &of_a);
        assert_eq!([1, 2, 3, 4, 5, 9].map(by_another), [false, false, true, true, false, true]);
        let on = |segment| occupied.is_held_by_another(Some(segment), ip(9), &of_a);
        assert_eq!([on(7), on(9)], [true, false]);
        assert!(!Occupied::default().is_held_by_another(None, ip(1), &of_a));
    }

    #[test]
    fn who_has_an_address_is_told_to_pods_of_the_same_namespace_alone() {
        let occupied = Occupied::default();
        let mac = Address::Mac(Mac([2, 0, 0, 0, 0, 1]));
        let victim = plan("victim");
        occupied.claim(7, mac, &victim.sandbox, &victim.attachments[0]).unwrap();
        let mut asking = plan("asking");
        let told = |asking: &Plan| {
            let refused = occupied.claim(7, mac, &asking.sandbox, &asking.attachments[0]).unwrap_err();
            refused.to_string()
        };
        let taken = |by: &str| format!("MAC address 02:00:00:00:00:01 is taken: {by} has it");
        let named = taken("pod shop/victim, container victim, interface net1");
        assert_eq!(told(&asking), named);
        asking.sandbox.pod = Some(PodRef { name: ObjectName::new("evil", "asking"), uid: None });
        assert_eq!(told(&asking), taken("a pod of another namespace"));
        asking.sandbox.pod = None;
        assert_eq!(told(&asking), named, "a runtime that names no pod");
    }

    /// A later agent knows it by the record. A macvlan of the card has the index of the card's interface for its segment.
    ///
    /// Rows: SRV-mac.
    #[test]
    fn the_address_of_a_vf_is_its_own_on_its_card() {
        let device = spec::Device {
            function: Some(VirtualFunction { physical: "0000:03:00.0".to_owned(), number: 1 }),
            ..fixtures::device()
        };
        let claim = Claim {
            device: "0000:03:02.1".to_owned(),
            generation: 1,
            home: None,
            settings: None,
            physical: Some(7),
            representor: None,
            is_back: false,
        };
        let [of_moved, of_driven] = [Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2])];
        let pod = Interface { name: "net1".to_owned(), index: 4, mac: Some(of_moved), mtu: 1500 };
        let claimed = Output::Claimed(Box::new(claim));
        let moved = Output::Link { host: None, pod, parent: None };
        let set = SetDevice { mac: Some(of_driven), ..SetDevice::default() };
        let vf = |container: &str, then: Step, outputs: Vec<Output>| {
            let mut plan = plan(container);
            let steps = vec![Step::ClaimDevice(device.clone()), then];
            plan.attachments = vec![fixtures::attachment("sriov", steps)];
            let numbered = (0..).map(|number| StepRef(0, number)).zip(outputs);
            let (key, outputs) = (rig::key(container), numbered.collect());
            Attached { key, plan, outputs, netns_cookie: None, planned: None }
        };
        let occupied = Occupied::default();
        occupied.adopt(&vf("a", Step::MoveDevice, vec![claimed.clone(), moved]));
        occupied.adopt(&vf("b", Step::SetDevice(set), vec![claimed, Output::Nothing]));
        let other = plan("c");
        let claim = |segment, mac| {
            let claimed = occupied.claim(segment, Address::Mac(mac), &other.sandbox, &other.attachments[0]);
            claimed.map_err(|error| error.to_string())
        };
        for (mac, who) in [(of_moved, "a"), (of_driven, "b")] {
            let taken =
                format!("MAC address {mac} is taken: pod shop/{who}, container {who}, interface net1 has it");
            assert_eq!(claim(7, mac), Err(taken));
            assert_eq!(claim(8, mac), Ok(()), "another card");
        }
    }

    #[test]
    fn a_parent_is_followed_as_long_as_it_has_a_link_that_follows_it() {
        let touched = |links: &[u32]| {
            Changes::Of(Touched { links: links.iter().copied().collect(), ..Touched::default() })
        };
        let passthru = Macvlan { mode: MacvlanMode::Passthru, ..Macvlan::plain("net1", "wire") };
        let with = |container: &str, link: Option<Macvlan>| {
            let mut plan = plan(container);
            let steps = link.map(|link| Step::CreateLink(Link::Macvlan(link))).into_iter().collect();
            plan.attachments = vec![fixtures::attachment("macvlan", steps)];
            plan
        };
        let (follower, other) = (with("a", Some(passthru)), with("b", None));
        let occupied = Occupied::default();
        for (parent, plan) in [(7, &follower), (7, &other), (8, &other)] {
            occupied.share(parent, None, &plan.sandbox, &plan.attachments[0]).unwrap();
        }
        assert_eq!(occupied.followed_among(&Changes::Anything), [7]);
        assert_eq!(occupied.followed_among(&touched(&[7, 8, 9])), [7]);
        assert_eq!(occupied.followed_among(&touched(&[8, 9])), [0; 0]);
        occupied.release(&follower);
        assert_eq!(occupied.followed_among(&Changes::Anything), [0; 0]);
        assert!(occupied.is_parent(7));
    }

    #[test]
    fn links_that_share_a_parent_in_different_ways_are_not_on_it_together() {
        let occupied = Occupied::default();
        let [a, b] = ["a", "b"].map(plan);
        let share =
            |parent, how, plan: &Plan| occupied.share(parent, how, &plan.sandbox, &plan.attachments[0]);
        assert_eq!(share(7, "macvlans", &a), Ok(()));
        assert_eq!(share(7, "macvlans", &a), Ok(()), "the same again");
        assert_eq!(share(7, "macvlans", &b), Ok(()));
        assert_eq!(share(8, "a macvlan in mode passthru", &b), Ok(()), "elsewhere");
        occupied.release(&b);
        // A VLAN does not mind, and is one of the parent's links all the same.
        for parent in [7, 8] {
            assert_eq!(occupied.share(parent, None, &b.sandbox, &b.attachments[0]), Ok(()));
            assert!(occupied.is_parent(parent));
        }
        assert_eq!(share(8, "macvlans", &a), Ok(()));
        occupied.release(&b);
        assert!(occupied.is_parent(7) && !occupied.is_parent(9));
        assert_eq!(
            share(7, "a macvlan in mode passthru", &b),
            Err(("macvlans", a.sandbox.container_id.clone()))
        );
        occupied.release(&a);
        assert_eq!(share(7, "a macvlan in mode passthru", &b), Ok(()));
    }
}
