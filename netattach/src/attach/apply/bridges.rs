//! Bridges that ADDs create: removes a bridge that a failed ADD created, and recreates a bridge that was deleted
//! while pods use it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ipnet::IpNet;

use super::bridge::{BridgeError, not_made};
use super::{bridge_stack, ensure_if_present};
use crate::attach::StepError;
use crate::error_chain::Chain;
use crate::flock;
use crate::link;
use crate::netlink::{self, Born, Handle, LinkState};
use crate::netns::Netns;
use crate::plan::addressing::Others;
use crate::plan::{AttachmentPlan, addressing, result};
use crate::spec;
use crate::step::{Brought, Interface, Output, Outputs, Step};

/// How long another process may hold the lock while it removes a bridge.
const PATIENCE: Duration = Duration::from_secs(1);

/// The bridges that unfinished plans are about to use. Neither this process nor another one removes such a bridge.
#[derive(Debug, Default)]
pub struct Bridges {
    users: Mutex<Users>,
    /// Lock for closing or opening a bridge ([`bridge_stack`]).
    turn: Mutex<()>,
}

#[derive(Debug, Default)]
struct Users {
    /// The number of plans that are about to use each bridge.
    plans: BTreeMap<String, u32>,
    /// A shared lock that keeps other processes from removing a bridge, see [`hold`]. All plans use one lock, because
    /// two locks of one process exclude each other like those of two processes. `None`: no plan is about to use a
    /// bridge, or another process holds the lock exclusively.
    held: Option<File>,
}

/// The bridges of one plan while it is being carried out.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    bridges: &'a Bridges,
    names: Vec<String>,
}

/// The bridge of an attachment, as it was when the attachment was made.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::attach) struct Beneath {
    pub(in crate::attach) spec: spec::Bridge,
    pub(in crate::attach) link: Interface,
    /// The gateway addresses that the bridge has for the pods.
    pub(in crate::attach) gateways: Vec<IpNet>,
    /// Whether other addresses may exist beside these.
    pub(in crate::attach) others: Others,
    /// Whether the attachment's ADD created the bridge, or found one that netattach had created.
    pub(in crate::attach) made: bool,
}

/// A difference between the bridge of an attachment and its recorded state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::attach) enum Change {
    /// The bridge is gone.
    Gone,
    /// The bridge, which has this index, is down.
    Down(u32),
    /// The bridge with this index lacks these addresses.
    Gateways(u32, Vec<IpNet>),
    /// The bridge does not filter by VLAN any more: all its VLANs are one segment.
    Unfiltered(u32),
}

/// The current state of a bridge.
#[derive(Debug, Clone, Copy)]
pub(in crate::attach) struct CurrentBridge<'a> {
    pub(in crate::attach) link: &'a LinkState,
    pub(in crate::attach) addresses: &'a [IpNet],
    /// Read only if ports have VLANs.
    pub(in crate::attach) filters_by_vlan: bool,
}

impl Beneath {
    /// Returns the bridge of an attachment; `None` if the attachment has none.
    pub(in crate::attach) fn of(attachment: &AttachmentPlan, outputs: Brought<'_>) -> Option<Self> {
        let spec = attachment.steps.iter().find_map(|step| match step {
            Step::EnsureBridge(bridge) => Some(bridge.clone()),
            _ => None,
        })?;
        let bridge = outputs.iter().find_map(|output| match output {
            Output::Bridge(bridge) => Some(bridge.clone()),
            _ => None,
        })?;
        // The gateways of a VLAN are on a separate device.
        let beside = attachment.steps.iter().find_map(|step| match step {
            Step::Gateway { beside, vlan: None, .. } => Some(*beside),
            _ => None,
        });
        let leased = result::leased(attachment, outputs).unwrap_or_default();
        let gateways = match beside {
            Some(_) => addressing::gateways(&leased.addresses),
            None => Vec::new(),
        };
        // Addresses that a later ADD removed on request (`forceAddress`) must not be restored for earlier ones.
        let others = if beside == Some(true) { Others::Kept } else { Others::Refused };
        Some(Self { spec, link: bridge.link, gateways, others, made: bridge.made || bridge.ours })
    }

    pub(in crate::attach) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(in crate::attach) fn has_gateways(&self) -> bool {
        !self.gateways.is_empty()
    }

    /// Whether the attachment shows that netattach manages the bridge alone: an ADD created it, or it is the pods'
    /// gateway, which only ADDs create and configure. Any other bridge may connect the node to surrounding networks,
    /// and only the administrator knows its other ports.
    pub(in crate::attach) fn is_ours(&self) -> bool {
        self.made || !self.gateways.is_empty()
    }

    /// Returns the differences of the bridge. `found`: the current bridge with that name. A gateway address that was
    /// replaced by another address is not reported: a later ADD was told to replace it (`forceAddress`), or an
    /// administrator did.
    pub(in crate::attach) fn changes(&self, found: Option<CurrentBridge<'_>>) -> Vec<Change> {
        let Some(CurrentBridge { link: bridge, addresses, filters_by_vlan }) = found else {
            return vec![Change::Gone];
        };
        let is_unfiltered = self.spec.vlan_filtering && !filters_by_vlan;
        let mut changes: Vec<Change> =
            is_unfiltered.then_some(Change::Unfiltered(bridge.index)).into_iter().collect();
        if !bridge.up {
            // Its addresses are checked once it is up.
            changes.push(Change::Down(bridge.index));
            return changes;
        }
        let missing =
            addressing::gateway_changes(addresses, &self.gateways, self.others).unwrap_or_default().add;
        changes.extend((!missing.is_empty()).then_some(Change::Gateways(bridge.index, missing)));
        changes
    }

    /// Recreates the bridge without its ports, unless it exists again.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(in crate::attach) fn restore(&self, bridges: &Bridges, host: &mut Handle) -> Result<(), StepError> {
        let mut entered = bridges.begin();
        entered.enter(&self.spec.name);
        let _turn = bridges.turn();
        // If another attachment has its gateways on the bridge, restoring these opens the bridge.
        let is_closed = !self.has_gateways();
        let born = if is_closed { Born::Down } else { Born::Up };
        let ensured = host.restore_bridge(&self.spec, self.link.index, self.link.mac, born);
        let ensured = ensured.map_err(|error| not_made(&self.spec, error))?;
        if ensured.created {
            // As at the first creation.
            ensure_if_present(&format!("ipv6/conf/{}/accept_ra", self.spec.name), "0")?;
            if is_closed {
                close(host, &ensured.link)?;
            }
        }
        Ok(())
    }

    /// Opens the bridge, on which the node has gateways: before the gateways are restored, and after that.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(in crate::attach) fn open(&self, bridges: &Bridges) -> Result<(), StepError> {
        let _turn = bridges.turn();
        // A bridge of another program is never closed.
        if self.made { bridge_stack::open(&self.spec.name) } else { Ok(()) }
    }
}

impl Bridges {
    /// Starts with no bridge in use by the plan.
    pub(super) fn begin(&self) -> Entered<'_> {
        Entered { bridges: self, names: Vec::new() }
    }

    /// Deletes the bridges that this ADD created and that have no port, unless another plan of this process, or
    /// possibly an ADD of another process, is about to use them, see [`hold`].
    ///
    /// # Errors
    /// The kernel refuses.
    pub(in crate::attach) fn remove_made(&self, outputs: &Outputs) -> Result<(), netlink::Error> {
        let made = |output: &Output| match output {
            Output::Bridge(bridge) if bridge.made => Some(bridge.link.clone()),
            _ => None,
        };
        let made: Vec<_> = outputs.values().filter_map(made).collect();
        if made.is_empty() {
            return Ok(());
        }
        // The locks are held until the bridges are deleted: an ADD that comes meanwhile recreates its bridge.
        let mut users = self.lock();
        let Some(alone) = users.alone() else {
            tracing::debug!("a bridge of a failed ADD stays: another process may be about to use it");
            return Ok(());
        };
        let removed = users.remove_unused(&made);
        users.share(alone);
        removed
    }

    /// Lock for closing or opening a bridge; released when the guard is dropped.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        // No lock is poisoned: a panic ends the agent.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Users> {
        // No lock is poisoned: a panic ends the agent.
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Users {
    fn remove_unused(&self, made: &[Interface]) -> Result<(), netlink::Error> {
        let mut host = Handle::open()?;
        let own = host.own_bridges()?;
        for bridge in made.iter().filter(|bridge| !self.plans.contains_key(&bridge.name)) {
            let is_it = |link: &LinkState| link.index == bridge.index && link.name == bridge.name;
            let Some((link, _)) = own.iter().find(|(link, ports)| is_it(link) && *ports == 0) else {
                continue;
            };
            tracing::info!(bridge = bridge.name, "removing a bridge that a failed ADD created");
            host.ensure_own_bridge_absent(link)?;
        }
        Ok(())
    }

    /// Takes the lock exclusively, so that ADDs of other processes wait until the lock is [shared](Self::share) again
    /// or dropped; `None`: another process holds it.
    fn alone(&mut self) -> Option<File> {
        let Some(held) = self.held.take() else {
            return locked(|namespace| flock::lock(namespace, Duration::ZERO));
        };
        // When converting a lock, the kernel releases the shared lock before it tries to take the exclusive one.
        if matches!(flock::lock(&held, Duration::ZERO), Ok(true)) {
            return Some(held);
        }
        self.share(held);
        None
    }

    /// Converts the lock to a shared one while plans are about to use bridges. If another process has taken the lock
    /// meanwhile, the plans continue without it, as if [waiting](hold) had timed out.
    fn share(&mut self, lock: File) {
        let is_shared =
            !self.plans.is_empty() && matches!(flock::lock_shared(&lock, Duration::ZERO), Ok(true));
        self.held = is_shared.then_some(lock);
    }
}

impl Entered<'_> {
    /// Records that the plan is about to use a bridge, until this value is dropped: then the plan's link is a port of
    /// the bridge, or the bridge is unused. Waits for a process that is removing a bridge.
    pub(in crate::attach) fn enter(&mut self, name: &str) {
        let is_held = {
            let mut users = self.bridges.lock();
            *users.plans.entry(name.to_owned()).or_default() += 1;
            users.held.is_some()
        };
        self.names.push(name.to_owned());
        if !is_held {
            // The others do not wait with this one, and a plan waits once, however many bridges it has.
            let held = hold(if self.names.len() == 1 { PATIENCE } else { Duration::ZERO });
            let mut users = self.bridges.lock();
            users.held = users.held.take().or(held);
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut users = self.bridges.lock();
        for name in &self.names {
            if let Some(count) = users.plans.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    users.plans.remove(name);
                }
            }
        }
        if users.plans.is_empty() {
            users.held = None;
        }
    }
}

/// Whether the attachment's gateway addresses are on its bridge itself. Those of a VLAN are on a separate device.
pub(super) fn is_gateway(attachment: &AttachmentPlan) -> bool {
    attachment.steps.iter().any(|step| matches!(step, Step::Gateway { vlan: None, .. }))
}

/// Closes a bridge that netattach created to the node's IP stack ([`bridge_stack`]) and brings the bridge up; the
/// caller holds [`Bridges::turn`]. A bridge on which the node has an address stays open: an ADD of another process,
/// or an administrator, has added that address.
///
/// # Errors
/// The kernel refuses.
pub(super) fn close(host: &mut Handle, bridge: &LinkState) -> Result<(), StepError> {
    let is_given = |net: &IpNet| !is_link_local(net);
    if !host.addresses(bridge.index)?.iter().any(is_given) {
        bridge_stack::close(&bridge.name)?;
        if host.addresses(bridge.index)?.iter().any(is_given) {
            bridge_stack::open(&bridge.name)?;
        }
    }
    Ok(host.ensure_up(bridge.index)?)
}

/// Whether the kernel may have generated the address itself.
fn is_link_local(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local())
}

/// Takes a shared lock on the node's network namespace (that of the calling thread), for an ADD that may be about to
/// use a bridge: until the returned file is dropped, other processes do not remove bridges that they made. `None`:
/// another process has held the lock exclusively for all of `patience`, which any process of the node's namespace can
/// do; the ADD continues without the lock.
fn hold(patience: Duration) -> Option<File> {
    locked(|namespace| flock::lock_shared(namespace, patience))
}

fn locked(lock: impl FnOnce(&File) -> io::Result<bool>) -> Option<File> {
    let namespace = File::open("/proc/thread-self/ns/net");
    let locked = namespace.and_then(|namespace| Ok(lock(&namespace)?.then_some(namespace)));
    locked.unwrap_or_else(|error| {
        tracing::debug!(error = %Chain(&error), "the node's network namespace cannot be locked");
        None
    })
}

/// Enables VLAN filtering on an existing bridge. Ports of other pods are then in the bridge's default VLAN, as
/// before. A bridge that netattach did not create is left to its administrator.
///
/// # Errors
/// netattach did not create the bridge, or the kernel refuses.
pub(in crate::attach) fn filter_by_vlan(host: &mut Handle, bridge: &LinkState) -> Result<(), StepError> {
    if host.filters_by_vlan(bridge.index)? {
        return Ok(());
    }
    if !bridge.own_bridge() {
        return Err(BridgeError::NotFiltering(bridge.name.clone()).into());
    }
    Ok(host.filter_by_vlan(&bridge.name, bridge.index)?)
}

/// Ensures the device that has the gateway addresses of a VLAN of the bridge: an end of a veth pair whose peer is a
/// port in that VLAN. It exists as long as the bridge.
///
/// # Errors
/// Another link has the name, or the kernel refuses.
pub(super) fn ensure_vlan_device(
    host: &mut Handle,
    (bridge, bridge_index): (&str, u32),
    vlan: u16,
    keeps_default: bool,
) -> Result<LinkState, StepError> {
    let device = spec::vlan_device(bridge, vlan);
    let vlans = spec::PortVlans { native: Some(vlan), keeps_default, ..spec::PortVlans::default() };
    let port =
        spec::BridgePort { bridge: bridge.to_owned(), vlans: Some(vlans), ..spec::BridgePort::default() };
    if let Some(found) = host.find_link(&device)? {
        return adopt_vlan_device(host, found, (bridge_index, &port));
    }
    let mtu = host.link_by_index(bridge_index)?.mtu;
    let veth = spec::Veth {
        host_name: link::host_name(bridge, &device),
        pod_name: device.clone(),
        mtu: Some(mtu),
        mac: None,
        group: 0,
        port: Some(port.clone()),
    };
    let own = Netns::current()?;
    match host.create_veth(&veth, Some(bridge_index), own.as_fd(), &mut Handle::open()?) {
        Ok((near, far)) => {
            host.mark_own(near.index)?;
            // As for the bridge itself.
            ensure_if_present(&format!("ipv6/conf/{device}/accept_ra"), "0")?;
            host.ensure_up(far.index)?;
            Ok(LinkState { up: true, ..far })
        }
        // Another attachment created the device first, or an agent was killed while it did.
        Err(error) if error.already_exists() => {
            let found = host.link(&device)?;
            adopt_vlan_device(host, found, (bridge_index, &port))
        }
        Err(error) => Err(error.into()),
    }
}

/// Checks that a device with that name belongs to the VLAN, and restores its peer's membership of the bridge and the
/// VLAN.
fn adopt_vlan_device(
    host: &mut Handle,
    device: LinkState,
    (bridge, port): (u32, &spec::BridgePort),
) -> Result<LinkState, StepError> {
    let near = host.find_end_here(&device)?;
    let is_ours = near.as_ref().is_some_and(|it| it.name == link::host_name(&port.bridge, &device.name));
    match near {
        Some(near) if near.controller == Some(bridge) => {
            // Ports that the reference plugin created are left as they are.
            if is_ours {
                host.ensure_port(near.index, port)?;
                host.mark_own(near.index)?;
            }
        }
        Some(near) if is_ours && near.controller.is_none() => {
            host.join_bridge(near.index, bridge, port)?;
            host.mark_own(near.index)?;
        }
        _ => {
            let actual = format!("no gateway of a VLAN of {}", port.bridge);
            let (name, wanted) = (device.name, "a veth whose other end is a port of the bridge");
            return Err(netlink::Error::WrongKind { name, wanted, actual }.into());
        }
    }
    if !device.up {
        host.ensure_up(device.index)?;
    }
    Ok(LinkState { up: true, ..device })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::netns::within;
    use crate::step::{Bridge, StepRef};

    /// Rows: BRG-at-once.
    #[test]
    fn a_bridge_that_another_process_may_be_about_to_use_stays() {
        let node = Netns::private().unwrap();
        within(&node, || {
            let mut host = Handle::open().unwrap();
            let outputs = made(&mut host, "br0");
            let bridges = Bridges::default();
            let mut is_there_after = || {
                bridges.remove_made(&outputs).unwrap();
                host.find_link("br0").unwrap().is_some()
            };
            let [first, second] = [(); 2].map(|()| hold(PATIENCE).unwrap());
            assert!(is_there_after());
            drop(first);
            assert!(is_there_after());
            drop(second);
            assert!(!is_there_after());
        })
        .unwrap();
    }

    /// The outputs of a failed ADD that created the bridge.
    fn made(host: &mut Handle, name: &str) -> Outputs {
        let name = name.to_owned();
        let bridge = spec::Bridge { name, mtu: None, promiscuous: false, vlan_filtering: false };
        let LinkState { name, index, mac, mtu, .. } = host.ensure_bridge(&bridge).unwrap().link;
        let link = Interface { name, index, mac, mtu };
        let mut outputs = Outputs::default();
        outputs.insert(StepRef(0, 0), Output::Bridge(Bridge { link, made: true, ours: false }));
        outputs
    }

    /// Each plan has its own lock of the namespace, as two processes have.
    ///
    /// Rows: BRG-at-once.
    #[test]
    fn plans_of_a_process_keep_a_bridge_from_others_and_its_own_failed_ones_from_no_other_bridge() {
        let node = Netns::private().unwrap();
        within(&node, || {
            let mut host = Handle::open().unwrap();
            let [agent, executable] = [(); 2].map(|()| Bridges::default());
            let [used, another] = ["br0", "br1"].map(|name| made(&mut host, name));
            let mut left = |by: &Bridges, outputs: &Outputs| {
                by.remove_made(outputs).unwrap();
                ["br0", "br1"].map(|name| host.find_link(name).unwrap().is_some())
            };
            let mut first = agent.begin();
            first.enter("br0");
            let mut second = agent.begin();
            second.enter("br2");
            assert_eq!(left(&executable, &used), [true, true]);
            assert_eq!(left(&agent, &used), [true, true]);
            assert_eq!(left(&agent, &another), [true, false]);
            // The agent's lock is shared again.
            assert_eq!(left(&executable, &used), [true, false]);
            drop(second);
            assert_eq!(left(&executable, &used), [true, false]);
            drop(first);
            assert_eq!(left(&executable, &used), [false, false]);
        })
        .unwrap();
    }

    /// Rows: BRG-at-once.
    #[test]
    fn a_plan_waits_once_for_who_does_not_let_go_of_the_lock() {
        let node = Netns::private().unwrap();
        within(&node, || {
            let _alone = locked(|namespace| flock::lock(namespace, Duration::ZERO)).unwrap();
            let bridges = Bridges::default();
            let mut entered = bridges.begin();
            let mut waited = |name: &str| {
                let begun = Instant::now();
                entered.enter(name);
                begun.elapsed() >= PATIENCE
            };
            assert_eq!(["br0", "br1", "br2"].map(&mut waited), [true, false, false]);
        })
        .unwrap();
    }

    /// Rows: BRG-at-once.
    #[test]
    fn an_agent_that_is_refused_the_lock_alone_has_it_shared_as_before() {
        let node = Netns::private().unwrap();
        within(&node, || {
            let mut host = Handle::open().unwrap();
            let outputs = made(&mut host, "br0");
            let bridges = Bridges::default();
            let mut entered = bridges.begin();
            entered.enter("br1");
            let others = hold(PATIENCE).unwrap();
            bridges.remove_made(&outputs).unwrap();
            assert!(host.find_link("br0").unwrap().is_some());
            drop(others);
            let alone = || locked(|namespace| flock::lock(namespace, Duration::ZERO)).is_some();
            assert!(!alone());
            drop(entered);
            assert!(alone());
        })
        .unwrap();
    }
}
