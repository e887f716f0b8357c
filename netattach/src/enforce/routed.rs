//! Judges routed packets after the node's address translation: maintains the table in the node's packet
//! filter, and the devices that leave their packets to the table.
//!
//! A device leaves packets to the table only while the table is installed. A removal is noticed within a
//! second: the devices then judge everything, the table is restored, and only after that they leave packets
//! to it again. While it cannot be restored, pods isolated for egress cannot reach Services or their node,
//! whose address may be translated. The same holds for the minute during which the table is not restored
//! because another program removes it repeatedly.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::attachment::EnforcedAttachment;
use super::error::EnforceError;
use super::routed_to::{self, RoutedTo};
use crate::bpf::{self, Gate};
use crate::error_chain::Chain;
use crate::hooks::HookPoint;
use crate::mac::Mac;
use crate::netlink::{self, Changes, Handle};
use crate::objects::access::Restrictions;
use crate::plan::host_access;
use crate::policy::index::is_on_default;
use crate::put_back::PutBack;

/// The table and its attachments.
pub(super) struct Routed(Mutex<State>);

struct State {
    maps: bpf::Routed,
    /// Owner of the table: the agent's state directory.
    owner: String,
    /// Whether the table is to be used.
    wanted: bool,
    /// Why the table is not installed.
    missing: Option<String>,
    /// Whether the table is installed, as [`Routed::keep`] last returned.
    told: bool,
    /// How often it was restored after other processes had removed or changed it.
    put_back: PutBack<()>,
    /// The packet filter's generation when the table was last seen installed.
    seen: Option<u32>,
    /// Whether the table also sees bridged packets, per family.
    bridged: [bool; 2],
    /// By attachment.
    gateways: BTreeMap<u32, Gateway>,
    /// The names, for errors, of attachments that are found by their addresses.
    labels: BTreeMap<u32, String>,
    /// Counts the gateways found so far.
    found: u64,
}

/// Where the node receives frames of an attachment for routing, and sends its own to the attachment from.
struct Gateway {
    way: Way,
    /// The links on which `mac` and `opens` depend, besides those of `way`.
    links: Vec<u32>,
    /// `None`: nowhere.
    mac: Option<Mac>,
    /// Whether all frames to `mac` reach the node's routing and no others do: the device may leave them to the table.
    opens: bool,
    /// Its number in the count of found gateways.
    found: u64,
}

/// How an attachment and the node's routing reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By this end of the link, where the node routes.
    End(u32),
    /// By the bridge of which this end of the link is a port. The address is one of the attachment's.
    Bridge(u32, IpAddr),
    /// As another plugin has made it, with this end of the link on the node. The address is one of the attachment's.
    Found(u32, IpAddr),
    /// By the node's own link on this parent (`hostAccess`).
    Beside(u32),
}

impl Way {
    /// Returns the way of an attachment that the node routes these addresses to; `None`: it is not known.
    fn of(attachment: &EnforcedAttachment, addresses: &[IpAddr]) -> Option<Self> {
        let address = *addresses.first()?;
        match (&attachment.point, &attachment.routed_to) {
            (HookPoint::NodeEnd(device), _) if attachment.is_delegated() => {
                Some(Self::Found(*device, address))
            }
            (HookPoint::NodeEnd(device), _) if attachment.routed => Some(Self::End(*device)),
            (HookPoint::NodeEnd(device), _) => Some(Self::Bridge(*device, address)),
            (HookPoint::Parent { .. } | HookPoint::Pod(_), RoutedTo::Beside { parent, .. }) => {
                Some(Self::Beside(*parent))
            }
            (HookPoint::Parent { .. } | HookPoint::Pod(_) | HookPoint::Nowhere(_), _) => None,
        }
    }

    /// The link that it is known by.
    fn link(self) -> u32 {
        match self {
            Self::End(link) | Self::Bridge(link, _) | Self::Found(link, _) | Self::Beside(link) => link,
        }
    }
}

impl Routed {
    /// Installs the table if it is `wanted`, replacing an earlier agent's; otherwise makes devices judge
    /// everything, and removes the table. `succeeds`: devices may still run programs on other maps, which
    /// leave packets to an existing table; then both are postponed to [`Routed::take_over`] and
    /// [`Routed::finish`]. `owner`: the agent's state directory, recorded in the table.
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
            labels: BTreeMap::new(),
            found: 0,
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

    /// Installs the table once the earlier attachments are known. If another owner's table has its name,
    /// that table stays, and devices judge everything.
    pub(super) fn take_over(&self) -> Result<(), EnforceError> {
        let mut state = self.lock();
        if !state.wanted {
            return Ok(());
        }
        if let Some(whose) = netlink::guard_of_another(&state.owner)? {
            state.missing = Some(of_another(&whose));
            return state.close();
        }
        netlink::install_guard(&state.owner, state.maps.programs()).map_err(EnforceError::NoGuard)
    }

    /// Removes the table if it is not wanted, once no device leaves packets to it.
    pub(super) fn finish(&self) -> Result<(), EnforceError> {
        let state = self.lock();
        let is_own = || Ok::<_, EnforceError>(netlink::guard_of_another(&state.owner)?.is_none());
        if !state.wanted && netlink::guard_exists()? && is_own()? {
            netlink::remove_guard()?;
        }
        Ok(())
    }

    /// Whether packets that the node may translate are judged after the translation.
    pub(super) fn is_active(&self) -> bool {
        let state = self.lock();
        state.wanted && state.missing.is_none()
    }

    /// Returns why they are not, although they should be.
    pub(super) fn missing(&self) -> Option<String> {
        self.lock().missing.clone()
    }

    /// Judges routed packets from and to an attachment after the node's address translation, if the
    /// attachment is on the default network, as far as the node routes to it.
    ///
    /// # Errors
    /// [`EnforceError::AddressGuarded`]: one of its addresses belongs to another attachment there already,
    /// which keeps it.
    pub(super) fn guard(
        &self,
        attachment: &EnforcedAttachment,
        restrictions: &Restrictions,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        self.guard_if(attachment, restrictions, host, |address, holder| {
            let (own, holder) = (attachment.label.clone(), told_to(&attachment.label, holder, address));
            Err(EnforceError::AddressGuarded { address, own, holder })
        })
    }

    /// As [`Routed::guard`], for an existing attachment. An address that two attachments have stays with
    /// the first one; traffic of the other one by that address is judged at its device until the first one
    /// ends.
    pub(super) fn adopt(
        &self,
        attachment: &EnforcedAttachment,
        restrictions: &Restrictions,
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        self.guard_if(attachment, restrictions, host, |address, holder| {
            tracing::warn!(
                attachment = attachment.label,
                %address,
                holder,
                "two attachments have the same routed address: this one's packets are judged only at its own device"
            );
            Ok(())
        })
    }

    /// Guards the addresses of an attachment. If another one has an address already, only if `shared` agrees, which
    /// gets the address and the other one's name.
    fn guard_if(
        &self,
        attachment: &EnforcedAttachment,
        restrictions: &Restrictions,
        host: &mut Handle,
        shared: impl FnOnce(IpAddr, String) -> Result<(), EnforceError>,
    ) -> Result<(), EnforceError> {
        let addresses = self.addresses(attachment, restrictions, host)?;
        let mut state = self.lock();
        if let Some((address, holder)) = state.maps.holder(attachment.id, &addresses) {
            shared(address, state.label(holder))?;
        }
        state.guard(attachment, &addresses, host)
    }

    /// Returns the addresses by which an attachment is found: on the default network those that the node
    /// routes to it.
    fn addresses(
        &self,
        attachment: &EnforcedAttachment,
        restrictions: &Restrictions,
        host: &mut Handle,
    ) -> Result<Vec<IpAddr>, EnforceError> {
        let is_wanted = self.lock().wanted;
        let is_default = attachment.endpoint.as_ref().is_some_and(|it| is_on_default(&it.at, restrictions));
        if !is_wanted || !is_default || attachment.point.is_nowhere() {
            return Ok(Vec::new());
        }
        Ok(attachment.routed_addresses(host)?)
    }

    /// The attachment that each address leads to in the table.
    pub(super) fn leads(&self) -> BTreeMap<IpAddr, u32> {
        self.lock().maps.leads()
    }

    /// Forgets an attachment. Idempotent.
    pub(super) fn forget(&self, id: u32) -> Result<(), EnforceError> {
        self.lock().forget(id)
    }

    /// Removes all attachments except these.
    pub(super) fn retain(&self, known: &BTreeSet<u32>) -> Result<(), EnforceError> {
        let strays: Vec<u32> = self.lock().maps.known().difference(known).copied().collect();
        strays.into_iter().try_for_each(|id| self.forget(id))
    }

    /// Maintains the table and checks links that may have changed. `true`: the table has been installed or
    /// removed since the last successful call, which changes what policies may refer to. `put_back` is
    /// called if the table was gone. One call at a time. Attachments may be added and removed during the
    /// call: they wait for it only while the table is being restored, not while the kernel is queried.
    /// After a failure the next call must be with [`Changes::Anything`].
    pub(super) fn keep(&self, changes: &Changes, put_back: impl FnOnce()) -> Result<bool, EnforceError> {
        if !self.lock().wanted {
            return Ok(false);
        }
        let (generation, bridged) = (netlink::filter_generation()?, bridged());
        let owner = {
            let state = self.lock();
            if state.stands(generation, bridged, changes) {
                return Ok(false);
            }
            let is_to_check = state.missing.is_some() || state.seen != Some(generation);
            is_to_check.then(|| state.owner.clone())
        };
        let is_whole = owner.map(|owner| netlink::guard_is_whole(&owner)).transpose()?;
        let touched = self.lock().take_in((is_whole, generation), bridged, changes, put_back)?;
        self.look(touched)?;
        let mut state = self.lock();
        let is_there = state.missing.is_none();
        Ok(std::mem::replace(&mut state.told, is_there) != is_there)
    }

    /// Finds the gateways of these attachments again. A failure for one does not prevent the others.
    fn look(&self, touched: BTreeSet<u32>) -> Result<(), EnforceError> {
        if touched.is_empty() {
            return Ok(());
        }
        let mut host = Handle::open()?;
        let mut outcome = Ok(());
        for id in touched {
            let known = self.lock().gateways.get(&id).map(|it| (it.way, it.found));
            let Some((way, found)) = known else { continue };
            let looked = Gateway::find(way, &mut host);
            let put = looked.and_then(|gateway| self.lock().put_again(id, found, gateway));
            outcome = put.and(outcome);
        }
        outcome
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No lock is poisoned: a panic ends the agent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Finds an attachment by these addresses; without any, its device judges everything, whatever an
    /// earlier agent had set.
    fn guard(
        &mut self,
        attachment: &EnforcedAttachment,
        addresses: &[IpAddr],
        host: &mut Handle,
    ) -> Result<(), EnforceError> {
        if !self.wanted {
            return Ok(());
        }
        if addresses.is_empty() {
            return self.forget(attachment.id);
        }
        self.maps.guard(attachment.id, addresses)?;
        self.labels.insert(attachment.id, attachment.label.clone());
        match Way::of(attachment, addresses) {
            Some(way) => self.put(attachment.id, Gateway::find(way, host)?),
            None => {
                self.gateways.remove(&attachment.id);
                self.set_gate(attachment.id)
            }
        }
    }

    fn forget(&mut self, id: u32) -> Result<(), EnforceError> {
        self.gateways.remove(&id);
        self.labels.remove(&id);
        Ok(self.maps.forget(id)?)
    }

    /// Returns the name of an attachment. One left by an earlier agent, with an unreadable record, is named
    /// by its number.
    fn label(&self, id: u32) -> String {
        self.labels.get(&id).cloned().unwrap_or_else(|| format!("the attachment with number {id}"))
    }

    /// Whether the table is installed as last seen, and nothing that gates depend on has changed since.
    fn stands(&self, generation: u32, bridged: [bool; 2], changes: &Changes) -> bool {
        self.missing.is_none()
            && self.seen == Some(generation)
            && self.bridged == bridged
            && changes.is_none()
    }

    /// Makes all devices judge everything, including those of an earlier agent's attachments that are not
    /// adopted.
    fn close(&mut self) -> Result<(), EnforceError> {
        Ok(self.maps.close()?)
    }

    /// Restores the table, unless another owner's table has its name or it was restored too often lately.
    /// Returns whether it did; otherwise records the reason.
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
        netlink::install_guard(&self.owner, self.maps.programs()).map_err(said)?;
        self.put_back.count((), now);
        Ok(())
    }

    fn set_gate(&mut self, id: u32) -> Result<(), EnforceError> {
        let known = self.gateways.get(&id).and_then(|gateway| Some((gateway.mac?, gateway.opens)));
        let known = known.map(|(mac, opens)| (netattach_common::Mac { octets: mac.0 }, opens));
        let [v4, v6] = self.bridged;
        let gate = match known {
            Some((mac, true)) if self.missing.is_none() => Gate::new(mac, v4, v6),
            Some((mac, _)) => Gate::closed(mac),
            None => Gate::NONE,
        };
        Ok(self.maps.set_gate(id, gate)?)
    }

    /// Records the state of the table, if it was checked, and whether it sees bridged packets. Returns the
    /// attachments whose gateways must be found again; all other gates are up to date.
    fn take_in(
        &mut self,
        (is_whole, generation): (Option<bool>, u32),
        bridged: [bool; 2],
        changes: &Changes,
        put_back: impl FnOnce(),
    ) -> Result<BTreeSet<u32>, EnforceError> {
        let was_there = self.missing.is_none();
        match is_whole {
            Some(true) => self.missing = None,
            Some(false) => {
                self.close()?;
                if self.install(Instant::now()) {
                    put_back();
                }
            }
            None => {}
        }
        if is_whole.is_some() {
            // Later changes are handled at the next call.
            self.seen = self.missing.is_none().then_some(generation);
        }
        let is_other = is_whole == Some(false) || was_there != self.missing.is_none();
        let is_other = is_other || self.bridged != bridged;
        self.bridged = bridged;
        let touched = self.touched(changes);
        if is_other {
            let others: Vec<u32> = self.gateways.keys().copied().filter(|id| !touched.contains(id)).collect();
            others.into_iter().try_for_each(|id| self.set_gate(id))?;
        }
        Ok(touched)
    }

    /// Returns the attachments whose gateways may have changed.
    fn touched(&self, changes: &Changes) -> BTreeSet<u32> {
        let is_touched = |gateway: &Gateway| match changes {
            Changes::Anything => true,
            Changes::Of(touched) => {
                // The node's link on a parent is found by its name: any link may have become that one.
                let may_come = gateway.mac.is_none() && matches!(gateway.way, Way::Beside(_));
                let is_one = |it: &u32| touched.links.contains(it);
                is_one(&gateway.way.link())
                    || gateway.links.iter().any(is_one)
                    || may_come && !touched.links.is_empty()
            }
        };
        self.gateways.iter().filter(|(_, gateway)| is_touched(gateway)).map(|(id, _)| *id).collect()
    }

    /// Sets the gateway of an attachment.
    fn put(&mut self, id: u32, gateway: Gateway) -> Result<(), EnforceError> {
        self.found += 1;
        self.gateways.insert(id, Gateway { found: self.found, ..gateway });
        self.set_gate(id)
    }

    /// Sets a gateway that was found again, unless the attachment has ended since or its number belongs to
    /// another one, whose gateway was found later.
    fn put_again(&mut self, id: u32, before: u64, gateway: Gateway) -> Result<(), EnforceError> {
        match self.gateways.get(&id) {
            Some(known) if known.found == before => self.put(id, gateway),
            _ => Ok(()),
        }
    }
}

/// Returns the holder of an address in words for the author of another pod, by name only if it is of the same
/// namespace. The log names each.
fn told_to(own: &str, holder: String, address: IpAddr) -> String {
    let namespace = |label: &str| {
        let (namespace, _) = label.split(' ').next()?.split_once('/')?;
        Some(namespace.to_owned())
    };
    // A container that is no pod has no namespace, and its runtime may know everything.
    if namespace(own).is_none_or(|own| Some(own) == namespace(&holder)) {
        return holder;
    }
    tracing::info!(
        attachment = own, %address, holder,
        "address refused: the node routes it to another attachment"
    );
    "an attachment of another namespace".to_owned()
}

/// Returns the reason if another program removes the table repeatedly.
fn fought_over(times: u32) -> String {
    format!(
        "another program removes or changes it again and again: it was put back {times} times, and from now on is once a minute \
         (`nft monitor` shows which program it is)"
    )
}

/// Returns the reason if another owner's table has the name.
fn of_another(whose: &str) -> String {
    let table = netlink::GUARD_TABLE;
    format!(
        "a table of that name is another agent's or another program's ({whose}): one agent of a network namespace judges what it \
         routes. If nobody needs it, remove it: nft delete table inet {table}"
    )
}

impl Gateway {
    fn find(way: Way, host: &mut Handle) -> Result<Self, EnforceError> {
        let at = |links: Vec<u32>, mac, opens| Self { way, links, mac, opens, found: 0 };
        let nowhere = at(Vec::new(), None, false);
        let (device, address) = match way {
            Way::Beside(parent) => {
                let link = host.find_link(&host_access::device(parent))?;
                return Ok(link.map_or(nowhere, |link| at(vec![link.index], link.mac, false)));
            }
            Way::End(device) => {
                let end = host.forwarding_state(device)?;
                return Ok(end.map_or(nowhere, |end| at(Vec::new(), end.mac, true)));
            }
            Way::Bridge(device, address) | Way::Found(device, address) => (device, address),
        };
        let Some(end) = host.forwarding_state(device)? else { return Ok(nowhere) };
        let controller = match end.controller {
            Some(index) => host.forwarding_state(index)?,
            None => None,
        };
        let is_own = matches!(way, Way::Bridge(..));
        let Some(controller) = controller else {
            // Another plugin's end by which the node routes.
            let mac = end.mac.filter(|_| !is_own && end.controller.is_none());
            return Ok(at(end.controller.into_iter().collect(), mac, false));
        };
        let Some(settings) = controller.bridge else {
            // Another plugin's: the end routes within a VRF, or is a port of Open vSwitch, whose own port the node
            // routes by.
            let by = match controller.kind.as_str() {
                _ if is_own => None,
                "vrf" => Some(device),
                _ => host.matching_route(address)?.and_then(|route| route.interface),
            };
            return match by {
                Some(by) => at(vec![controller.index, by], None, false).with_mac_of(by, host),
                None => Ok(at(vec![controller.index], None, false)),
            };
        };
        let (bridge, mac) = (controller.index, controller.mac);
        if is_own && !settings.vlan_filtering {
            return Ok(at(vec![bridge], mac, true));
        }
        // A VLAN-aware bridge may not know its own address in each VLAN, and floods frames for it: the node receives
        // them where it routes to the attachment, and others may as well.
        let Some(by) = routed_to::gateway_on(bridge, address, host)? else {
            return Ok(at(vec![bridge], None, false));
        };
        at(vec![bridge, by], None, false).with_mac_of(by, host)
    }

    fn with_mac_of(self, link: u32, host: &mut Handle) -> Result<Self, EnforceError> {
        Ok(Self { mac: host.forwarding_state(link)?.and_then(|link| link.mac), ..self })
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
    use crate::enforce::attachment::tests::attachment;
    use crate::enforce::routed_to::RoutedTo;
    use crate::netlink::Touched;

    /// The state of an agent that wants the table, with these gates.
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
            labels: BTreeMap::new(),
            found: 0,
        }
    }

    #[test]
    fn without_the_table_no_device_leaves_packets_to_it_whoever_opened_its_gate() {
        let gate = Gate::new(netattach_common::Mac { octets: [2, 0, 0, 0, 0, 9] }, false, false);
        let mut state = state(&[(3, gate), (4, gate)]);
        // The record of the other attachment could not be read.
        let mac = Some(Mac([2, 0, 0, 0, 0, 9]));
        let gateway = Gateway { way: Way::End(7), links: Vec::new(), mac, opens: true, found: 0 };
        state.gateways.insert(3, gateway);
        assert_eq!(state.maps.open_gates(), [3, 4]);
        state.close().unwrap();
        assert_eq!(state.maps.open_gates(), Vec::<u32>::new());
        state.set_gate(3).unwrap();
        assert_eq!(state.maps.open_gates(), [3], "the table is complete again");
    }

    /// An attachment to the default network, to which the node routes these addresses.
    fn routed_to(id: u32, addresses: &[IpAddr]) -> EnforcedAttachment {
        let mut attachment = attachment(id);
        attachment.label = format!("shop/{id} eth0");
        attachment.routed_to = RoutedTo::These(addresses.to_vec());
        attachment
    }

    /// Rows: SVC-one-owner.
    #[test]
    fn nobody_takes_an_address_that_the_node_routes_to_another_and_who_waits_for_it_gets_it() {
        let routed = Routed(Mutex::new(state(&[])));
        let (none, mut host) = (Restrictions::default(), Handle::open().unwrap());
        let [shared, own]: [IpAddr; 2] = ["10.0.0.7", "10.0.0.8"].map(|text| text.parse().unwrap());
        let [first, second] = [routed_to(1, &[shared]), routed_to(2, &[own, shared])];
        let holder_of = |address| routed.lock().maps.holder(0, &[address]).map(|(_, id)| id);
        let holders = || [shared, own].map(holder_of);
        for _ in 0..2 {
            routed.guard(&first, &none, &mut host).unwrap();
            let told = routed.guard(&second, &none, &mut host).map_err(|error| error.to_string());
            let why = "shop/2 eth0 cannot have address 10.0.0.7 on the default network: the node routes it to shop/1 eth0, whose policies it applies to traffic from and to the address";
            assert_eq!(told, Err(why.to_owned()));
            assert_eq!(holders(), [Some(1), None]);
        }
        // Both exist at a start.
        routed.adopt(&second, &none, &mut host).unwrap();
        assert_eq!(holders(), [Some(1), Some(2)]);
        routed.forget(1).unwrap();
        assert_eq!(holders(), [Some(2), Some(2)]);
        let told = routed.guard(&first, &none, &mut host).map_err(|error| error.to_string());
        assert!(told.unwrap_err().contains("shop/2 eth0"));
        // On a layer-2 network the node does not route to the address, even if an earlier agent had
        // recorded that it does.
        let mut unrouted = second;
        unrouted.routed_to = RoutedTo::None;
        routed.adopt(&unrouted, &none, &mut host).unwrap();
        assert_eq!(holders(), [None, None]);
        routed.guard(&first, &none, &mut host).unwrap();
        assert_eq!(holders(), [Some(1), None]);
    }

    /// Rows: SVC-layer-2.
    #[test]
    fn what_an_earlier_agent_has_led_to_layer_2_alone_goes_to_whom_the_node_routes_it() {
        let (none, mut host) = (Restrictions::default(), Handle::open().unwrap());
        let shared: IpAddr = "10.0.0.7".parse().unwrap();
        for first in [0, 1] {
            let mut left = state(&[]);
            left.maps.guard(2, &[shared]).unwrap();
            let routed = Routed(Mutex::new(left));
            let both = [routed_to(1, &[shared]), attachment(2)];
            for at in [first, 1 - first] {
                routed.adopt(&both[at], &none, &mut host).unwrap();
            }
            let holder = || routed.lock().maps.holder(0, &[shared]);
            assert_eq!(holder(), Some((shared, 1)), "{first}");
            routed.forget(2).unwrap();
            assert_eq!(holder(), Some((shared, 1)), "a DEL that comes late");
        }
    }

    /// Needs root, like the agent.
    #[test]
    fn a_gate_opens_where_all_frames_for_the_node_reach_it_and_elsewhere_the_address_alone_is_known() {
        use std::os::fd::AsFd;

        use crate::netns::{Netns, within};
        use crate::spec::{self, Addressing};

        within(&Netns::private().unwrap(), || {
            let mut host = Handle::open().unwrap();
            let mut port_of = |name: &str, address: &str| {
                let bridge = spec::Bridge { name: name.to_owned(), ..spec::Bridge::default() };
                let bridge = host.ensure_bridge(&bridge).unwrap().link.index;
                let addressing =
                    Addressing { addresses: vec![address.parse().unwrap()], ..Addressing::default() };
                host.configure(bridge, &addressing).unwrap();
                let port = spec::BridgePort { bridge: name.to_owned(), ..spec::BridgePort::default() };
                let [host_name, pod_name] = [format!("{name}a"), format!("{name}b")];
                let veth =
                    spec::Veth { host_name, pod_name, mtu: None, mac: None, group: 0, port: Some(port) };
                let (own, mut inside) = (Netns::current().unwrap(), Handle::open().unwrap());
                host.create_veth(&veth, Some(bridge), own.as_fd(), &mut inside).unwrap();
                let [port, end] = ["a", "b"].map(|last| host.link(&format!("{name}{last}")).unwrap());
                (host.link(name).unwrap(), port.index, end)
            };
            // A bridge that filters VLANs is no row: not every kernel that runs the tests has them.
            let (plain, port, end) = port_of("plain", "10.9.0.1/24");
            let [on_plain, beyond]: [IpAddr; 2] = ["10.9.0.7", "10.7.0.7"].map(|it| it.parse().unwrap());
            for (way, mac, opens) in [
                (Way::Bridge(port, on_plain), plain.mac, true),
                (Way::Found(port, on_plain), plain.mac, false),
                (Way::Found(end.index, beyond), end.mac, false),
                (Way::End(end.index), end.mac, true),
                (Way::Beside(plain.index), None, false),
            ] {
                let found = Gateway::find(way, &mut host).unwrap();
                assert_eq!((found.mac, found.opens), (mac, opens), "{way:?}");
            }
        })
        .unwrap();
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

    #[test]
    fn gates_are_set_where_something_has_changed_and_of_who_was_not_looked_at_meanwhile() {
        let gateway = |device: u32, link: u32, last: u8| {
            let mac = Some(Mac([2, 0, 0, 0, 0, last]));
            let way = match device == link {
                true => Way::End(device),
                false => Way::Bridge(device, [10, 0, 0, 7].into()),
            };
            Gateway { way, links: vec![link], mac, opens: true, found: 0 }
        };
        let gate =
            |last: u8, v4| Gate::new(netattach_common::Mac { octets: [2, 0, 0, 0, 0, last] }, v4, false);
        let is_open = |state: &State, id, gate: Gate| state.maps.gate(id) == gate;
        let mut state = state(&[]);
        state.seen = Some(5);
        for (id, device, link) in [(3, 7, 7), (4, 8, 20), (5, 9, 20)] {
            state.put(id, gateway(device, link, 1)).unwrap();
        }
        let links = |links: &[u32]| {
            Changes::Of(Touched { links: links.iter().copied().collect(), ..Touched::default() })
        };
        assert_eq!(state.touched(&links(&[7, 30])), BTreeSet::from([3]));
        assert_eq!(state.touched(&links(&[20])), BTreeSet::from([4, 5]));
        assert_eq!(state.touched(&Changes::Anything), BTreeSet::from([3, 4, 5]));
        let take_in = |state: &mut State, bridged, links: &Changes| {
            state.take_in((None, 5), [bridged, false], links, || panic!("nothing is put back")).unwrap()
        };
        assert_eq!(take_in(&mut state, true, &links(&[20])), BTreeSet::from([4, 5]));
        assert!(is_open(&state, 3, gate(1, true)), "bridged packets are seen now");
        assert!(is_open(&state, 4, gate(1, false)), "it is looked at first");
        // The number of one belongs to another attachment meanwhile.
        let [before, other] = [4, 5].map(|id| state.gateways[&id].found);
        state.put(5, gateway(10, 20, 6)).unwrap();
        state.put_again(4, before, gateway(8, 20, 2)).unwrap();
        state.put_again(5, other, gateway(9, 20, 2)).unwrap();
        state.put_again(6, other, gateway(9, 20, 2)).unwrap();
        assert!(is_open(&state, 4, gate(2, true)) && is_open(&state, 5, gate(6, true)));
        assert_eq!(state.gateways.len(), 3);
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
        let gateway = Gateway { way: Way::End(0), links: Vec::new(), mac: None, opens: false, found: 0 };
        state.gateways.insert(3, gateway);
        let routed = Routed(Mutex::new(state));
        let keep = || routed.keep(&Changes::Anything, || panic!("nothing is put back"));
        let refused = keep().unwrap_err();
        let is_refused = |error: &netlink::Error| error.errno() == Some(Errno::INVAL);
        assert!(matches!(&refused, EnforceError::Netlink(error) if is_refused(error)), "{refused}");
        assert_eq!(routed.missing(), Some(fought_over(5)));
        routed.lock().gateways.clear();
        assert_eq!([keep().unwrap(), keep().unwrap()], [true, false]);
    }

    #[test]
    fn who_has_an_address_is_told_to_pods_of_the_same_namespace_alone() {
        let holder = "shop/db eth0 on pods";
        let told = |own: &str| told_to(own, holder.to_owned(), IpAddr::from([10, 0, 0, 7]));
        assert_eq!(told("shop/web eth0 on pods"), holder);
        assert_eq!(told("evil/web eth0 on shop/pods"), "an attachment of another namespace");
        assert_eq!(told("0123 eth0 on evil/pods"), holder);
    }
}
