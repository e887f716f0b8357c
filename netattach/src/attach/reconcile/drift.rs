//! Detects changes that other programs make to what an attachment has on the node, and restores its state: the node's
//! end of its link, and its leases. `lost_records` rewrites a removed record, and `enforcement` reattaches programs.
//! CHECK and the agent's periodic checks compare what is in the pod, but nothing there is restored: for example, the
//! network binding of a virtual machine renames the pod's interface on purpose. Nothing is restored either for a
//! sandbox whose DEL has begun, even if that DEL failed: the sandbox is about to end, and its addresses are free
//! already.
//!
//! [`differences`] makes the decisions, and is pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::attach::AttachError;
use crate::attach::apply::bridges::{self, Beneath, Change};
use crate::attach::apply::owner;
use crate::attach::engine::Engine;
use crate::attach::registry::Attached;
use crate::error_chain::Chain;
use crate::ipam::{self, Failure, Lacking, Lessee, Owner};
use crate::journal::{JournalKey, Loaded};
use crate::netlink::{self, Changed, ChangedLinks, Handle, LinkState, VlanUses};
use crate::plan::{AttachmentPlan, addressing, result, routing};
use crate::spec::{Addressing, BridgePort, LinkMode, NetkitWays, Tie};
use crate::step::{Brought, Interface, Output, Role, Step};
use crate::sync::{Mutex, locked};

/// A difference between the node's end of a link and its recorded state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Difference {
    /// A difference of the bridge that the end is a port of.
    Bridge(Change),
    Renamed,
    Mtu(u32),
    /// The end is not a port of its bridge, which has this index.
    NotInBridge(u32),
    Hairpin,
    /// The port exchanges frames with other isolated ports.
    Isolation,
    /// The port is in other VLANs.
    Vlans,
    /// A netkit has other policies than these.
    Policies(NetkitWays),
    Down,
    /// An address or route of a routed link is gone.
    Addressing,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bridge(Change::Gone) => f.write_str("left without its bridge, which was removed"),
            Self::Bridge(Change::Unfiltered(_)) => {
                f.write_str("in one segment with all VLANs: its bridge was told not to filter by them")
            }
            Self::Bridge(Change::Down(_)) => f.write_str("cut off: its bridge was set down"),
            Self::Bridge(Change::Gateways(_, gateways)) => {
                write!(f, "left without a gateway: its bridge was deprived of")?;
                gateways.iter().try_for_each(|gateway| write!(f, " {gateway}"))
            }
            Self::Renamed => f.write_str("renamed"),
            Self::Mtu(mtu) => write!(f, "its MTU set to {mtu}"),
            Self::NotInBridge(_) => f.write_str("taken out of its bridge"),
            Self::Hairpin => f.write_str("taken out of hairpin mode"),
            Self::Isolation => f.write_str("no longer isolated"),
            Self::Vlans => f.write_str("put into other VLANs"),
            Self::Policies(_) => f.write_str("given other netkit policies"),
            Self::Down => f.write_str("set down"),
            Self::Addressing => f.write_str("deprived of an address or route"),
        }
    }
}

/// The node's end of a link that netattach created, in its recorded state.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct End {
    made: Interface,
    kind: &'static str,
    group: u32,
    /// The MTU in bytes; 0 if another plugin of the network may have changed it.
    mtu: u32,
    /// The bridge, and the port's settings.
    port: Option<(Beneath, BridgePort)>,
    /// Addresses and routes of a routed link.
    routed: Option<Addressing>,
    /// The mode and policies of a netkit.
    netkit: Option<NetkitWays>,
}

impl End {
    /// Returns the end of an attachment; `None` if the attachment has none, or another plugin created the interface.
    fn of(attached: &Attached, attachment: &AttachmentPlan, outputs: Brought<'_>) -> Option<Self> {
        let link = attachment.link()?;
        let made = outputs.iter().find_map(|output| match output {
            Output::Link { host, .. } => host.clone(),
            _ => None,
        })?;
        let Tie::NodeEnd { port, .. } = link.tie() else { return None };
        let is_plugin = |step: &Step| matches!(step, Step::Delegate(it) if it.role == Role::Plugin);
        let mtu = if attachment.steps.iter().any(is_plugin) { 0 } else { made.mtu };
        let has_routes = attachment.steps.iter().any(|step| matches!(step, Step::RouteToPod));
        let leased = result::leased(attachment, outputs).unwrap_or_default();
        Some(Self {
            made,
            kind: link.shown_kind(),
            group: attached.plan.sandbox.link_group(),
            mtu,
            port: port.and_then(|port| Some((Beneath::of(attachment, outputs)?, port.clone()))),
            routed: has_routes.then(|| addressing::host_side(routing::style(attachment), &leased.addresses)),
            netkit: ways(link.mode()),
        })
    }

    /// Finds the current link. The index alone does not suffice: the kernel may have given it to another link.
    fn find<'l>(&self, links: &'l BTreeMap<u32, LinkState>) -> Option<&'l LinkState> {
        let found = links.get(&self.made.index)?;
        (found.kind == self.kind && (found.name == self.made.name || found.group == self.group))
            .then_some(found)
    }
}

/// Returns how the node's end of a link differs from its recorded state. `bridge`: the current bridge with the
/// recorded name. `vlans`: those of the link as a port. `has_addressing`: whether a routed link has its addresses and
/// routes.
fn differences(
    end: &End,
    found: &LinkState,
    bridge: Option<bridges::CurrentBridge<'_>>,
    vlans: Option<&VlanUses>,
    has_addressing: bool,
) -> Vec<Difference> {
    let mut differences = Vec::new();
    let mut note = |is_different, difference| differences.extend(Some(difference).filter(|_| is_different));
    note(found.name != end.made.name, Difference::Renamed);
    note(end.mtu != 0 && found.mtu != end.mtu, Difference::Mtu(found.mtu));
    if let Some((beneath, port)) = &end.port {
        for change in beneath.changes(bridge) {
            note(true, Difference::Bridge(change));
        }
        if let Some(bridges::CurrentBridge { link: bridge, .. }) = bridge {
            let is_in = found.controller == Some(bridge.index);
            note(!is_in, Difference::NotInBridge(bridge.index));
            note(port.hairpin && (!is_in || found.hairpin != Some(true)), Difference::Hairpin);
            note(port.isolated && (!is_in || !found.isolated), Difference::Isolation);
            let has_vlans = |wanted| vlans.is_some_and(|vlans| netlink::has_vlans(vlans, wanted));
            let lacks_vlans = port.vlans.as_ref().is_some_and(|wanted| !is_in || !has_vlans(wanted));
            note(lacks_vlans, Difference::Vlans);
        }
    }
    if let (Some(made), Some(found)) = (end.netkit, ways(found.mode)) {
        note(found != made, Difference::Policies(made));
    }
    note(!found.up, Difference::Down);
    note(!has_addressing || (end.routed.is_some() && !found.up), Difference::Addressing);
    differences
}

/// Returns the mode and policies of a netkit. The mode cannot be changed, the policies can.
fn ways(mode: Option<LinkMode>) -> Option<NetkitWays> {
    match mode {
        Some(LinkMode::Netkit(ways)) => Some(ways),
        _ => None,
    }
}

/// Whether an end can reach links that it must not reach: it is in another bridge, or its port in its own bridge
/// lacks isolation or is in other VLANs. An end in no bridge reaches nothing, and without hairpin mode a port reaches
/// less. VLAN filtering is not enabled on a bridge that other programs created, so that difference does not count as
/// urgent there.
fn is_open(found: &LinkState, links: &BTreeMap<u32, LinkState>, differences: &[Difference]) -> bool {
    let opens = |difference: &Difference| match difference {
        Difference::NotInBridge(_) | Difference::Isolation | Difference::Vlans => true,
        Difference::Bridge(Change::Unfiltered(bridge)) => {
            links.get(bridge).is_some_and(LinkState::own_bridge)
        }
        _ => false,
    };
    found.controller.is_some() && differences.iter().any(opens)
}

/// The sandboxes whose ends on the node differ from their recorded state.
#[derive(Debug, Default)]
pub struct Drifted {
    /// All of them.
    pub keys: Vec<JournalKey>,
    /// Those that can meanwhile reach links that they must not reach.
    pub open: BTreeSet<JournalKey>,
    /// Those whose bridges are among the changed links.
    pub on_changed: BTreeSet<JournalKey>,
}

impl Engine {
    /// Returns the sandboxes whose ends on the node differ from their recorded state, among `these` and those whose
    /// links or bridges have changed. If any of these has an end on the node, costs one dump of the node's links and,
    /// with routed ends, of its addresses and routes.
    ///
    /// # Errors
    /// The kernel objects cannot be listed.
    pub fn with_drifted_links(
        &self,
        changed: &Changed,
        these: &BTreeSet<JournalKey>,
    ) -> Result<Drifted, AttachError> {
        let mut all = self.registry.staying();
        if let Changed::Of(links) = changed {
            all.retain(|attached| these.contains(&attached.key) || is_on(attached, links));
        }
        // Sandboxes without an end on the node have nothing to compare.
        let with_ends = all.into_iter().map(|attached| (ends(&attached), attached));
        let mut all: Vec<(Vec<End>, Arc<Attached>)> =
            with_ends.filter(|(ends, _)| !ends.is_empty()).collect();
        if all.is_empty() {
            return Ok(Drifted::default());
        }
        let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
        let seen = Seen::gather(&mut host, all.iter().flat_map(|(ends, _)| ends))?;
        all.retain(|(ends, _)| ends.iter().any(|end| !seen.differences(end).is_empty()));
        let key = |attached: &Arc<Attached>| attached.key.clone();
        let is_open = |ends: &[End]| ends.iter().any(|end| seen.is_open(end));
        let is_on_changed = |attached: &Attached| match changed {
            Changed::Of(links) => has_bridge_among(attached, links),
            Changed::Anything => false,
        };
        Ok(Drifted {
            open: all.iter().filter(|(ends, _)| is_open(ends)).map(|(_, it)| key(it)).collect(),
            on_changed: all.iter().filter(|(_, it)| is_on_changed(it)).map(|(_, it)| key(it)).collect(),
            keys: all.iter().map(|(_, attached)| key(attached)).collect(),
        })
    }

    /// Restores the node's ends of a sandbox to their recorded state, in the container's turn. Returns the
    /// differences that were restored.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn put_links_back(&self, key: &JournalKey) -> Result<Vec<String>, AttachError> {
        let Some(attached) = self.registry.stays(key) else { return Ok(Vec::new()) };
        let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
        let ends = ends(&attached);
        let mut seen = Seen::gather(&mut host, &ends)?;
        let (mut changed, mut gone, mut unfiltered) = (Vec::new(), None, None);
        for end in &ends {
            let mut differences = seen.differences(end);
            let is_gone = Difference::Bridge(Change::Gone);
            if let (true, Some((beneath, _))) = (differences.contains(&is_gone), &end.port) {
                if self.has_made(beneath) {
                    self.restore(beneath, &mut host)?;
                    changed.push(format!("link {} was {is_gone}", end.made.name));
                    seen = Seen::gather(&mut host, &ends)?;
                    differences = seen.differences(end);
                } else {
                    gone = Some(beneath.name().to_owned());
                    differences.retain(|difference| *difference != is_gone);
                }
            }
            for difference in differences {
                if let Difference::Bridge(Change::Unfiltered(bridge)) = &difference
                    && let Err(error) = filter_again(*bridge, &seen, &mut host)
                {
                    // Everything else is restored nevertheless.
                    unfiltered.get_or_insert(error);
                    continue;
                }
                let opened = match (&difference, &end.port) {
                    (Difference::Bridge(Change::Gateways(..)), Some((beneath, _))) => Some(beneath),
                    _ => None,
                };
                opened.map_or(Ok(()), |beneath| self.open(beneath))?;
                put_back(end, &difference, &mut host).map_err(|error| AttachError::Open(error.into()))?;
                // Another process may have closed it before it saw the addresses.
                opened.map_or(Ok(()), |beneath| self.open(beneath))?;
                changed.push(format!("link {} was {difference}", end.made.name));
            }
        }
        match (gone, unfiltered) {
            (Some(bridge), _) => Err(AttachError::BridgeGone { bridge }),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(changed),
        }
    }

    /// Whether netattach manages the bridge of an attachment alone. An ADD creates a missing bridge, and later ADDs
    /// find it: so the records of all attachments to that bridge count.
    fn has_made(&self, beneath: &Beneath) -> bool {
        beneath.is_ours()
            || self.registry.all().iter().flat_map(ends).any(|end| {
                end.port.is_some_and(|(other, _)| other.name() == beneath.name() && other.is_ours())
            })
    }

    fn open(&self, beneath: &Beneath) -> Result<(), AttachError> {
        beneath.open(&self.node.bridges).map_err(|source| AttachError::PutBack {
            what: format!("have bridge {} be a gateway again", beneath.name()),
            source: Box::new(source),
        })
    }

    fn restore(&self, beneath: &Beneath, host: &mut Handle) -> Result<(), AttachError> {
        let opened = || match &self.node.nat {
            Some(nat) => Ok(nat.reopen(beneath.name())?),
            None => Ok(()),
        };
        beneath.restore(&self.node.bridges, host).and_then(|()| opened()).map_err(|source| {
            AttachError::PutBack {
                what: format!("make bridge {} again", beneath.name()),
                source: Box::new(source),
            }
        })
    }

    /// Returns the key of the record that was planned last; `None` if that cannot be determined.
    pub fn newest(&self, keys: &[&JournalKey]) -> Option<JournalKey> {
        let planned = |key: &JournalKey| match self.journal.peek(key) {
            Ok(Loaded::Whole(record)) => record.planned.since_boot,
            _ => None,
        };
        let times: Option<Vec<_>> = keys.iter().map(|key| planned(key).map(|at| (at, *key))).collect();
        times?.into_iter().max().map(|(_, key)| key.clone())
    }

    /// Returns the sandboxes that lack a lease. Costs one read of each pool; a pool whose lock another process holds
    /// is skipped. Leases that cannot be read are not lacking: the log warns of them, and of pools that cannot be read.
    ///
    /// # Errors
    /// None.
    pub fn without_lease(&self) -> Result<Vec<JournalKey>, AttachError> {
        let staying = self.registry.staying();
        let mut pools: BTreeMap<ipam::Pool, Holders> = BTreeMap::new();
        for (sandbox, attached) in staying.iter().enumerate() {
            for Held { config, owner, addresses } in leases(attached) {
                let Some(pool) = config.pool() else { continue };
                let holders = pools.entry(pool).or_default();
                holders.sandboxes.push(sandbox);
                holders.leases.push((owner, addresses));
            }
        }
        self.unread_leases.keep(&pools);
        let mut without: BTreeSet<usize> = BTreeSet::new();
        for (pool, Holders { sandboxes, leases }) in &pools {
            match self.node.leases.lacking(pool, leases) {
                Ok(Lacking { holders, unread }) => {
                    without.extend(holders.into_iter().filter_map(|at| sandboxes.get(at).copied()));
                    self.unread_leases.tell(pool, &unread);
                }
                // Another process has the lock.
                Err(error) if error.failure() == Failure::TryLater => {
                    tracing::debug!(%pool, error = %Chain(&error), "cannot check its leases");
                }
                Err(error) => {
                    self.unread_leases.tell(pool, &[error]);
                }
            }
        }
        Ok(without.into_iter().filter_map(|at| staying.get(at)).map(|it| it.key.clone()).collect())
    }

    /// Restores the missing leases of a sandbox, in the container's turn. Returns descriptions of the missing leases.
    ///
    /// # Errors
    /// Another container has the address now, or the pool cannot be read or written.
    pub fn take_leases_back(&self, key: &JournalKey) -> Result<Vec<String>, AttachError> {
        let Some(attached) = self.registry.stays(key) else { return Ok(Vec::new()) };
        let mut taken = Vec::new();
        for Held { config, owner, addresses } in leases(&attached) {
            let lessee = Lessee { owner: &owner, netns: None };
            let restored = self.node.leases.restore(config, lessee, &addresses);
            let restored = restored.map_err(AttachError::DriftedLease)?;
            taken.extend(restored.iter().map(|address| format!("the lease of {address} was removed")));
        }
        Ok(taken)
    }
}

/// Most leases of a pool that one check names in the log: without a free descriptor, for example, none can be read.
const NAMED: usize = 8;

/// What the log says of each pool whose leases, all or some, could not be read when they were last checked.
#[derive(Debug, Default)]
pub(in crate::attach) struct UnreadLeases(Mutex<BTreeMap<ipam::Pool, Told>>);

/// What the log says of a pool.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    /// Number of the errors.
    unread: usize,
    /// The first of them, each of which names its file.
    errors: Vec<String>,
}

impl UnreadLeases {
    /// Forgets all pools but these.
    fn keep<T>(&self, pools: &BTreeMap<ipam::Pool, T>) {
        locked(&self.0).retain(|pool, _| pools.contains_key(pool));
    }

    /// Tells why leases of a pool cannot be read: as a warning unless the log said the same last time. Returns whether
    /// it was one.
    fn tell(&self, pool: &ipam::Pool, unread: &[ipam::Error]) -> bool {
        let mut all = locked(&self.0);
        if unread.is_empty() {
            all.remove(pool);
            return false;
        }
        let errors = unread.iter().take(NAMED).map(|error| Chain(error).to_string()).collect();
        let told = Told { unread: unread.len(), errors };
        let is_new = all.get(pool) != Some(&told);
        for error in unread.iter().take(NAMED) {
            if is_new {
                tracing::warn!(%pool, unread = unread.len(), error = %Chain(error), "cannot check leases");
            } else {
                tracing::debug!(%pool, unread = unread.len(), error = %Chain(error), "cannot check leases");
            }
        }
        all.insert(pool.clone(), told);
        is_new
    }
}

/// The leases of sandboxes in a pool.
#[derive(Default)]
struct Holders {
    /// The index of the sandbox of each lease.
    sandboxes: Vec<usize>,
    leases: Vec<(Owner, Vec<IpAddr>)>,
}

/// A lease of an attachment.
struct Held<'a> {
    config: &'a ipam::Config,
    owner: Owner,
    addresses: Vec<IpAddr>,
}

/// Returns the leases in a sandbox's record that a pool keeps.
fn leases(attached: &Attached) -> impl Iterator<Item = Held<'_>> {
    attached.plan.steps().filter_map(|(at, attachment, step)| {
        let Step::Lease(config) = step else { return None };
        let addresses = attached.outputs.leased(&at)?;
        let is_kept = config.pool().is_some();
        is_kept.then(|| Held { config, owner: owner(&attached.plan.sandbox, attachment), addresses })
    })
}

/// Whether an end of the sandbox is one of these links, or a port of one.
fn is_on(attached: &Attached, links: &ChangedLinks) -> bool {
    let is_end = |output: &Output| match output {
        Output::Link { host: Some(host), .. } => links.indices.contains(&host.index),
        _ => false,
    };
    attached.outputs.iter().any(|(_, output)| is_end(output)) || has_bridge_among(attached, links)
}

/// Whether a bridge that an end of the sandbox is a port of is one of these links.
fn has_bridge_among(attached: &Attached, links: &ChangedLinks) -> bool {
    let is_of_output = |output: &Output| match output {
        Output::Bridge(bridge) => links.indices.contains(&bridge.link.index),
        _ => false,
    };
    // A bridge that was recreated has another index.
    let is_of_step = |step: &Step| match step {
        Step::EnsureBridge(bridge) => links.names.contains(&bridge.name),
        _ => false,
    };
    attached.outputs.iter().any(|(_, output)| is_of_output(output))
        || attached.plan.attachments.iter().flat_map(|it| &it.steps).any(is_of_step)
}

fn ends(attached: &Arc<Attached>) -> Vec<End> {
    let numbered = attached.plan.attachments.iter().enumerate();
    // Attachment numbers fit into a `u16`: see `Plan::steps`.
    numbered.filter_map(|(number, it)| End::of(attached, it, attached.outputs.of(number as u16))).collect()
}

/// The state of the node with which ends are compared.
struct Seen {
    links: BTreeMap<u32, LinkState>,
    /// Indices of the bridges.
    bridges: BTreeMap<String, u32>,
    /// The VLANs of each port; read only if ends have VLANs.
    vlans: BTreeMap<u32, VlanUses>,
    /// Those bridges of ends in VLANs that filter by VLAN.
    filtering: BTreeSet<u32>,
    /// Addresses of each link; read only for routed ends and gateways on bridges. Routes are read only for routed
    /// ends.
    addresses: BTreeMap<u32, Vec<IpNet>>,
    routes: BTreeMap<u32, Vec<IpNet>>,
}

impl Seen {
    fn gather<'e>(host: &mut Handle, ends: impl IntoIterator<Item = &'e End>) -> Result<Self, AttachError> {
        let failed = |error: netlink::Error| AttachError::Open(error.into());
        let links = host.links().map_err(failed)?;
        let bridges = links.iter().filter(|link| link.kind == "bridge");
        let bridges = bridges.map(|link| (link.name.clone(), link.index)).collect();
        let links = links.into_iter().map(|link| (link.index, link)).collect();
        let (vlans, addresses, routes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let filtering = BTreeSet::new();
        let mut seen = Self { links, bridges, vlans, filtering, addresses, routes };
        let (mut is_routed, mut has_gateways, mut has_vlans) = (false, false, false);
        let mut to_filter = BTreeSet::new();
        for end in ends {
            is_routed |= end.routed.is_some();
            has_vlans |= end.port.as_ref().is_some_and(|(_, port)| port.vlans.is_some());
            let beneath = end.port.iter().map(|(beneath, _)| beneath).filter(|it| it.spec.vlan_filtering);
            to_filter.extend(beneath.filter_map(|it| seen.bridges.get(it.name()).copied()));
            has_gateways |= end.port.as_ref().is_some_and(|(beneath, _)| beneath.has_gateways());
        }
        if has_vlans {
            seen.vlans = host.port_vlans().map_err(failed)?;
        }
        for bridge in to_filter {
            if host.filters_by_vlan(bridge).map_err(failed)? {
                seen.filtering.insert(bridge);
            }
        }
        if is_routed || has_gateways {
            for (index, address) in host.addresses_by_link().map_err(failed)? {
                seen.addresses.entry(index).or_default().push(address);
            }
        }
        if is_routed {
            for (index, destination) in host.destinations_by_link().map_err(failed)? {
                seen.routes.entry(index).or_default().push(destination);
            }
        }
        Ok(seen)
    }

    fn differences(&self, end: &End) -> Vec<Difference> {
        let Some(found) = end.find(&self.links) else { return Vec::new() };
        let bridge = end.port.as_ref().and_then(|(beneath, _)| self.bridges.get(beneath.name()));
        let bridge = bridge.and_then(|index| self.links.get(index));
        let bridge = bridge.map(|link| bridges::CurrentBridge {
            link,
            addresses: self.addresses.get(&link.index).map_or(&[], Vec::as_slice),
            filters_by_vlan: self.filtering.contains(&link.index),
        });
        differences(end, found, bridge, self.vlans.get(&found.index), self.has_addressing(end))
    }

    fn is_open(&self, end: &End) -> bool {
        end.find(&self.links).is_some_and(|found| is_open(found, &self.links, &self.differences(end)))
    }

    /// Whether a routed end has its addresses and routes. Returns `true` for other ends.
    fn has_addressing(&self, end: &End) -> bool {
        let Some(wanted) = &end.routed else { return true };
        let index = &end.made.index;
        let has =
            |all: &BTreeMap<u32, Vec<IpNet>>, net: &IpNet| all.get(index).is_some_and(|it| it.contains(net));
        wanted.addresses.iter().all(|address| has(&self.addresses, address))
            && wanted.routes.iter().all(|route| has(&self.routes, &route.destination.trunc()))
    }
}

/// Enables VLAN filtering on a bridge again. A bridge that other programs created is left unchanged.
fn filter_again(bridge: u32, seen: &Seen, host: &mut Handle) -> Result<(), AttachError> {
    let Some(link) = seen.links.get(&bridge) else { return Ok(()) };
    bridges::filter_by_vlan(host, link).map_err(|source| AttachError::PutBack {
        what: format!("have bridge {} filter by VLAN", link.name),
        source: Box::new(source),
    })
}

fn put_back(end: &End, difference: &Difference, host: &mut Handle) -> Result<(), netlink::Error> {
    let index = end.made.index;
    match difference {
        // `put_links_back` has recreated it before.
        Difference::Bridge(Change::Gone) => Ok(()),
        // `put_links_back` has enabled filtering before.
        Difference::Bridge(Change::Unfiltered(_)) => Ok(()),
        Difference::Bridge(Change::Down(bridge)) => host.ensure_up(*bridge),
        Difference::Bridge(Change::Gateways(bridge, gateways)) => {
            gateways.iter().try_for_each(|gateway| host.ensure_address(*bridge, *gateway))
        }
        Difference::Renamed => host.rename(index, &end.made.name),
        Difference::Mtu(_) => host.set_mtu(index, end.mtu),
        Difference::NotInBridge(bridge) => {
            end.port.as_ref().map_or(Ok(()), |(_, port)| host.join_bridge(index, *bridge, port))
        }
        Difference::Hairpin | Difference::Isolation | Difference::Vlans => {
            end.port.as_ref().map_or(Ok(()), |(_, port)| host.ensure_port(index, port))
        }
        Difference::Policies(made) => host.set_netkit_policies(index, *made),
        Difference::Down => host.ensure_up(index),
        Difference::Addressing => end.routed.as_ref().map_or(Ok(()), |routed| host.configure(index, routed)),
    }
}

#[cfg(test)]
#[path = "drift_tests.rs"]
mod tests;
