//! Judges routed packets behind the node's address translation: the table in its packet filter, and the devices that
//! leave their packets to it.
//!
//! A device leaves packets to the table only while the table is in place. If it is removed, that is noticed within a
//! second: the devices then judge everything, the table is restored, and only then do they leave packets to it again.
//! If it cannot be restored, pods isolated for egress cannot reach Services, nor their node, whose address
//! may lead elsewhere; nor while it is left alone for a minute, because another program removes it again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::attachment::EnforcedAttachment;
use super::error::EnforceError;
use crate::bpf::{self, Gate};
use crate::error_chain::Chain;
use crate::hooks::HookPoint;
use crate::mac::Mac;
use crate::netlink::{self, Changes, Handle};
use crate::objects::access::Restrictions;
use crate::policy::index::is_on_default;
use crate::put_back::PutBack;

/// The table and its attachments.
pub(super) struct Routed(Mutex<State>);

struct State {
    maps: bpf::Routed,
    /// Whose the table is: the agent's state directory.
    owner: String,
    /// Whether the table is to be used.
    wanted: bool,
    /// Why the table is not in place.
    missing: Option<String>,
    /// Whether the table is in place, as [`Routed::keep`] has told last.
    told: bool,
    /// How often it was put back after others had removed or changed it.
    put_back: PutBack<()>,
    /// The packet filter's generation when the table was seen to be in place.
    seen: Option<u32>,
    /// Whether the table also sees bridged packets, per family.
    bridged: [bool; 2],
    /// By attachment.
    gateways: BTreeMap<u32, Gateway>,
}

/// Where the node receives frames of an attachment for routing.
struct Gateway {
    /// The node's end of the link.
    device: u32,
    /// The node routes packets that arrive there; otherwise a bridge switches them.
    routed: bool,
    /// The link that owns `mac`.
    link: u32,
    /// `None`: nowhere.
    mac: Option<Mac>,
}

impl Routed {
    /// Installs the table, replacing an earlier agent's, if it is `wanted`; otherwise has devices judge everything, and
    /// removes it. `succeeds`: devices may still run programs on other maps, which leave packets to an existing table:
    /// then both are postponed to [`Routed::take_over`] and [`Routed::finish`]. `owner`: the agent's state directory, which the
    /// table says.
    pub(super) fn begin(
        maps: bpf::Routed,
        owner: String,
        wanted: bool,
        succeeds: bool,
    ) -> Result<Self, EnforceError> {
        let mut state = State {
            maps,
            owner,
            wanted,
            missing: None,
            told: true,
            put_back: PutBack::default(),
            seen: None,
            bridged: [false; 2],
            gateways: BTreeMap::new(),
        };
        let waits = succeeds && netlink::guard_exists()?;
        if wanted {
            state.bridged = bridged();
        } else {
            for id in state.maps.known() {
                state.maps.forget(id)?;
            }
        }
        let begun = Self(Mutex::new(state));
        match (waits, wanted) {
            (true, _) => {}
            (false, true) => begun.take_over()?,
            (false, false) => begun.finish()?,
        }
        Ok(begun)
    }

    /// Installs the table once the earlier attachments are known. Where another's has its name, that stays, and devices judge
    /// everything.
    pub(super) fn take_over(&self) -> Result<(), EnforceError> {
        let mut state = self.lock();
        if !state.wanted {
            return Ok(());
        }
        if let Some(whose) = netlink::guard_of_another(&state.owner)? {
            state.missing = Some(of_another(&whose));
            return state.close();
        }
        netlink::install_guard(&state.owner, state.maps.program()).map_err(EnforceError::NoGuard)
    }

    /// Removes the table if it is not wanted, when no device leaves packets to it.
    pub(super) fn finish(&self) -> Result<(), EnforceError> {
        let state = self.lock();
        let is_own = || Ok::<_, EnforceError>(netlink::guard_of_another(&state.owner)?.is_none());
        if !state.wanted && netlink::guard_exists()? && is_own()? {
            netlink::remove_guard()?;
        }
        Ok(())
    }

    /// Whether packets that the node may translate are judged behind the translation.
    pub(super) fn is_active(&self) -> bool {
        let state = self.lock();
        state.wanted && state.missing.is_none()
    }

    /// Why they are not, although they should be.
    pub(super) fn missing(&self) -> Option<String> {
        self.lock().missing.clone()
    }

    /// Has routed packets from and to an attachment judged behind the node's address translation, if the attachment is
    /// on the default network.
    pub(super) fn guard(
        &self,
        attachment: &EnforcedAttachment,
        restrictions: &Restrictions,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        let mut state = self.lock();
        let is_default = attachment.endpoint.as_ref().is_some_and(|it| is_on_default(&it.at, restrictions));
        if !state.wanted || !is_default || attachment.point.is_nowhere() {
            return Ok(());
        }
        state.maps.guard(attachment.id, &attachment.own)?;
        // Only in this case is it known how packets reach the node.
        if let (HookPoint::NodeEnd(device), false) = (&attachment.point, attachment.is_delegated()) {
            let gateway = Gateway::find(*device, attachment.routed, host)?;
            state.gateways.insert(attachment.id, gateway);
            state.set_gate(attachment.id)?;
        }
        Ok(())
    }

    /// Forgets an attachment. Idempotent.
    pub(super) fn forget(&self, id: u32) -> Result<(), EnforceError> {
        let mut state = self.lock();
        state.gateways.remove(&id);
        Ok(state.maps.forget(id)?)
    }

    /// Forgets all attachments but these.
    pub(super) fn retain(&self, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
        let strays: Vec<u32> = self.lock().maps.known().difference(known).copied().collect();
        strays.into_iter().try_for_each(|id| self.forget(id))
    }

    /// Maintains the table and checks links that may have changed. `true`: the table has been installed or removed
    /// since the last call that did not fail, which changes what policies may refer to. `put_back` is called if the table was gone.
    pub(super) fn keep(&self, changes: &Changes, put_back: impl FnOnce()) -> Result<bool, EnforceError> {
        let mut state = self.lock();
        if !state.wanted {
            return Ok(false);
        }
        let (generation, bridged) = (netlink::filter_generation()?, bridged());
        if state.stands(generation, bridged, changes) {
            return Ok(false);
        }
        if state.missing.is_some() || state.seen != Some(generation) {
            if !netlink::guard_is_whole(&state.owner)? {
                state.close()?;
                if state.install(Instant::now()) {
                    put_back();
                }
            } else {
                state.missing = None;
            }
            // Later changes are handled at the next call.
            state.seen = state.missing.is_none().then_some(generation);
        }
        state.bridged = bridged;
        state.look(changes, &mut Handle::open()?)?;
        let is_there = state.missing.is_none();
        Ok(std::mem::replace(&mut state.told, is_there) != is_there)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No lock is poisoned: a panic ends the agent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether the table is in place as it was seen, and nothing has changed since that gates depend on.
    fn stands(&self, generation: u32, bridged: [bool; 2], changes: &Changes) -> bool {
        self.missing.is_none()
            && self.seen == Some(generation)
            && self.bridged == bridged
            && changes.is_none()
    }

    /// Has all devices judge everything, including those of an earlier agent's attachments that are not adopted.
    fn close(&mut self) -> Result<(), EnforceError> {
        self.maps.open_gates().into_iter().try_for_each(|id| Ok(self.maps.set_gate(id, Gate::NONE)?))
    }

    /// Puts the table back, unless another's has its name or that was done too often just now. Returns whether it did; else
    /// notes why not.
    fn install(&mut self, now: Instant) -> bool {
        self.missing = self.try_to_install(now).err();
        self.missing.is_none()
    }

    fn try_to_install(&mut self, now: Instant) -> Result<(), String> {
        let said = |error: netlink::Error| Chain(&error).to_string();
        if let Some(whose) = netlink::guard_of_another(&self.owner).map_err(said)? {
            return Err(of_another(&whose));
        }
        self.put_back.check(&(), now).map_err(fought_over)?;
        netlink::install_guard(&self.owner, self.maps.program()).map_err(said)?;
        self.put_back.count((), now);
        Ok(())
    }

    fn set_gate(&mut self, id: u32) -> Result<(), EnforceError> {
        let mac = self.gateways.get(&id).and_then(|gateway| gateway.mac);
        let [v4, v6] = self.bridged;
        let gate = match mac.filter(|_| self.missing.is_none()) {
            Some(mac) => Gate::new(netattach_common::Mac { octets: mac.0 }, v4, v6),
            None => Gate::NONE,
        };
        Ok(self.maps.set_gate(id, gate)?)
    }

    fn look(&mut self, changes: &Changes, host: &mut Handle) -> Result<(), EnforceError> {
        for gateway in self.gateways.values_mut() {
            let changed = match changes {
                Changes::Anything => true,
                Changes::Of(touched) => {
                    [gateway.device, gateway.link].iter().any(|it| touched.links.contains(it))
                }
            };
            if changed {
                *gateway = Gateway::find(gateway.device, gateway.routed, host)?;
            }
        }
        let ids: Vec<u32> = self.gateways.keys().copied().collect();
        ids.into_iter().try_for_each(|id| self.set_gate(id))
    }
}

/// Why the table is not in place where another program removes it again and again.
fn fought_over(times: u32) -> String {
    format!(
        "another program removes or changes it again and again: it was put back {times} times, and from now on is once a minute \
         (`nft monitor` shows which program it is)"
    )
}

/// Why the table is not in place where another's has its name.
fn of_another(whose: &str) -> String {
    let table = netlink::GUARD_TABLE;
    format!(
        "a table of that name is another agent's or another program's ({whose}): one agent of a network namespace judges what it \
         routes. If nobody needs it, remove it: nft delete table inet {table}"
    )
}

impl Gateway {
    fn find(device: u32, routed: bool, host: &mut Handle) -> Result<Self, EnforceError> {
        let nowhere = Self { device, routed, link: device, mac: None };
        let Some(end) = host.forwarding_state(device)? else { return Ok(nowhere) };
        if routed {
            return Ok(Self { mac: end.mac, ..nowhere });
        }
        let Some(index) = end.controller else { return Ok(nowhere) };
        let bridge = host.forwarding_state(index)?.filter(|link| {
            // A VLAN-aware bridge may not know its own address in each VLAN, and floods frames for it.
            link.bridge.is_some_and(|bridge| !bridge.vlan_filtering)
        });
        Ok(Self { link: index, mac: bridge.and_then(|bridge| bridge.mac), ..nowhere })
    }
}

/// Whether bridges pass forwarded packets to the packet filter, per family.
fn bridged() -> [bool; 2] {
    ["iptables", "ip6tables"].map(netlink::bridges_call)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::netlink::Touched;

    /// That of an agent which wants the table, with these gates.
    fn state(gates: &[(u32, Gate)]) -> State {
        State {
            maps: bpf::Routed::in_memory(gates),
            owner: "/state".to_owned(),
            wanted: true,
            missing: None,
            told: true,
            put_back: PutBack::default(),
            seen: None,
            bridged: [false; 2],
            gateways: BTreeMap::new(),
        }
    }

    #[test]
    fn without_the_table_no_device_leaves_packets_to_it_whoever_opened_its_gate() {
        let gate = Gate::new(netattach_common::Mac { octets: [2, 0, 0, 0, 0, 9] }, false, false);
        let mut state = state(&[(3, gate), (4, gate)]);
        // The record of the other attachment could not be read.
        let mac = Some(Mac([2, 0, 0, 0, 0, 9]));
        state.gateways.insert(3, Gateway { device: 7, routed: true, link: 7, mac });
        assert_eq!(state.maps.open_gates(), [3, 4]);
        state.close().unwrap();
        assert_eq!(state.maps.open_gates(), Vec::<u32>::new());
        state.set_gate(3).unwrap();
        assert_eq!(state.maps.open_gates(), [3], "the table is complete again");
    }

    #[test]
    fn nothing_is_done_only_while_the_table_and_what_gates_depend_on_are_as_they_were() {
        let mut state = state(&[]);
        let none = Changes::Of(Touched::default());
        let links = Changes::Of(Touched { links: [7].into(), ..Touched::default() });
        assert!(!state.stands(5, [false; 2], &none), "it was not looked at yet");
        state.seen = Some(5);
        assert!(state.stands(5, [false; 2], &none));
        assert!(!state.stands(6, [false; 2], &none));
        assert!(!state.stands(5, [true, false], &none));
        assert!(!state.stands(5, [false; 2], &links));
        assert!(!state.stands(5, [false; 2], &Changes::Anything), "the last call may have failed");
        state.missing = Some("gone".to_owned());
        assert!(!state.stands(5, [false; 2], &none));
    }

    /// Needs root, like the agent.
    #[test]
    fn a_table_that_others_remove_again_and_again_is_left_alone_for_a_while_and_that_is_said() {
        let mut state = state(&[]);
        let now = Instant::now();
        (0..5).for_each(|_| state.put_back.count((), now));
        assert!(!state.install(now));
        assert_eq!(state.missing, Some(fought_over(5)));
    }

    /// Needs root, like the agent.
    #[test]
    fn what_a_call_has_found_that_fails_after_it_is_told_by_the_next() {
        let mut state = state(&[]);
        let now = Instant::now();
        // So that it is not installed here.
        (0..5).for_each(|_| state.put_back.count((), now));
        // No device has that index, and the kernel refuses to be asked for it.
        state.gateways.insert(3, Gateway { device: 0, routed: true, link: 0, mac: None });
        let routed = Routed(Mutex::new(state));
        let keep = || routed.keep(&Changes::Anything, || panic!("nothing is put back"));
        let refused = keep().unwrap_err();
        let is_refused = |error: &netlink::Error| error.errno() == Some(Errno::INVAL);
        assert!(matches!(&refused, EnforceError::Netlink(error) if is_refused(error)), "{refused}");
        assert_eq!(routed.missing(), Some(fought_over(5)));
        routed.lock().gateways.clear();
        assert_eq!([keep().unwrap(), keep().unwrap()], [true, false]);
    }
}
