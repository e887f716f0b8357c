//! Tracks which pods claim an address of a network, and which pods have it.
//!
//! An address of an attachment of this node belongs to the attachment's pod, even if other pods claim it.
//! Any other address belongs to all its claimants together: traffic is allowed only if a rule selects all
//! of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::slice;
use std::sync::Arc;

use super::desired::{Condition, Subject};
use super::peers::{Claimant, RemotePeer};
use crate::objects::Place;
use crate::objects::budget::CLAIMANTS;
use crate::objects::policy::Severity;
use crate::objects::remote::RemotePod;

/// Every claim, by network and address.
#[derive(Debug, Default)]
pub(super) struct Claims {
    places: BTreeMap<Place, AtPlace>,
}

/// The claims on one network.
#[derive(Debug, Default)]
pub(super) struct AtPlace {
    /// Addresses that one pod claims.
    sole: Sole,
    /// Addresses that several pods claim.
    shared: BTreeMap<IpAddr, Shared>,
    /// Shared addresses that an attachment of this node has, and that a pod of another node claims.
    contested: BTreeSet<IpAddr>,
}

/// Addresses with a single pod each. Nearly all are those of pods of other nodes, which are many: they take
/// as little memory as a map can, 12 bytes for an IPv4 address.
#[derive(Debug, Default)]
struct Sole {
    remote_v4: BTreeMap<Ipv4Addr, Arc<RemotePod>>,
    remote_v6: BTreeMap<Ipv6Addr, Arc<RemotePod>>,
    /// Addresses of pods of this node, and of other pods with more to store.
    others: BTreeMap<IpAddr, Claimant>,
}

/// The pods that have an address.
#[derive(Debug)]
pub(super) enum Holders<'a> {
    One(Claimant),
    Several(&'a [Claimant]),
}

#[derive(Debug)]
struct Shared {
    /// At least two. Claimants with attachments on this node come first.
    claimants: Vec<Claimant>,
    /// The number of claimants with attachments on this node.
    attached: usize,
}

impl Claims {
    pub(super) fn add(&mut self, claimant: &Claimant) {
        for (place, address) in claimant.addresses() {
            if !self.places.contains_key(place) {
                self.places.insert(place.clone(), AtPlace::default());
            }
            if let Some(at) = self.places.get_mut(place) {
                at.add(address, claimant.clone());
            }
        }
    }

    pub(super) fn remove(&mut self, claimant: &Claimant) {
        for (place, address) in claimant.addresses() {
            let Some(at) = self.places.get_mut(place) else { continue };
            at.remove(address, claimant);
            if at.sole.is_empty() && at.shared.is_empty() {
                self.places.remove(place);
            }
        }
    }

    fn shared(&self, place: &Place, address: IpAddr) -> Option<&Shared> {
        self.at(place)?.shared.get(&address)
    }

    /// Returns the claims on a network; `None`: there are none.
    pub(super) fn at(&self, place: &Place) -> Option<&AtPlace> {
        self.places.get(place)
    }

    /// Returns the pods that share an address, as far as a change of one can change what is allowed for the
    /// others.
    pub(super) fn concerned(&self, place: &Place, address: IpAddr) -> &[Claimant] {
        let shared = self.shared(place, address).map_or(&[][..], |shared| &shared.claimants);
        if shared.len() > CLAIMANTS + 1 { &[] } else { shared }
    }

    /// Whether an address belongs to a selected pod alone, or all other pods that have it are selected too.
    /// Returns that, and the number of examined pods.
    pub(super) fn is_allowed(
        &self,
        place: &Place,
        address: IpAddr,
        is_selected: impl Fn(&Claimant) -> bool,
    ) -> (bool, usize) {
        let Some(shared) = self.shared(place, address) else { return (true, 0) };
        let holders = shared.holders();
        (are_selected(holders, is_selected), holders.len())
    }

    /// Iterates over all addresses on these networks with the pods that have them.
    pub(super) fn holders(&self, places: &BTreeSet<Place>) -> impl Iterator<Item = (IpAddr, Holders<'_>)> {
        let places = places.iter().filter_map(|place| self.places.get(place));
        places.flat_map(|at| {
            let sole = at.sole.iter().map(|(address, holder)| (address, Holders::One(holder)));
            let shared = at.shared.iter();
            sole.chain(shared.map(|(address, it)| (*address, Holders::Several(it.holders()))))
        })
    }

    /// Returns a condition for each network with addresses of this node that pods of other nodes claim too.
    pub(super) fn conditions(&self) -> impl Iterator<Item = Condition> {
        self.places.iter().filter_map(|(place, at)| {
            let address = at.contested.first()?;
            let shared = at.shared.get(address)?;
            let (own, others) = shared.claimants.split_at_checked(shared.attached)?;
            let first = |of: &[Claimant]| of.iter().map(Claimant::object_name).min();
            let more = match at.contested.len() - 1 {
                0 => String::new(),
                more => format!(" (and {more} more like it)"),
            };
            Some(Condition {
                object: Subject::Pod(first(others)?),
                severity: Severity::Warning,
                message: format!(
                    "claims address {address} of {place}, which pod {} has on this node{more}: the claim is ignored \
                     here",
                    first(own)?
                ),
            })
        })
    }
}

/// Whether at least one pod that has an address is running, and all such pods are selected.
pub(super) fn are_selected(holders: &[Claimant], is_selected: impl Fn(&Claimant) -> bool) -> bool {
    let mut living = holders.iter().filter(|holder| holder.counts()).peekable();
    living.peek().is_some() && living.all(is_selected)
}

impl Holders<'_> {
    pub(super) fn as_slice(&self) -> &[Claimant] {
        match self {
            Self::One(holder) => slice::from_ref(holder),
            Self::Several(holders) => holders,
        }
    }
}

impl Sole {
    fn insert(&mut self, address: IpAddr, claimant: Claimant) {
        match (claimant.plain(), address) {
            (Some(pod), IpAddr::V4(address)) => drop(self.remote_v4.insert(address, Arc::clone(pod))),
            (Some(pod), IpAddr::V6(address)) => drop(self.remote_v6.insert(address, Arc::clone(pod))),
            (None, address) => drop(self.others.insert(address, claimant)),
        }
    }

    fn remove(&mut self, address: IpAddr) -> Option<Claimant> {
        let remote = match address {
            IpAddr::V4(address) => self.remote_v4.remove(&address),
            IpAddr::V6(address) => self.remote_v6.remove(&address),
        };
        remote.map(plain).or_else(|| self.others.remove(&address))
    }

    fn get(&self, address: IpAddr) -> Option<Claimant> {
        let remote = match address {
            IpAddr::V4(address) => self.remote_v4.get(&address),
            IpAddr::V6(address) => self.remote_v6.get(&address),
        };
        remote.cloned().map(plain).or_else(|| self.others.get(&address).cloned())
    }

    fn is_empty(&self) -> bool {
        self.remote_v4.is_empty() && self.remote_v6.is_empty() && self.others.is_empty()
    }

    fn iter(&self) -> impl Iterator<Item = (IpAddr, Claimant)> {
        let v4 = self.remote_v4.iter().map(|(address, pod)| (IpAddr::from(*address), pod));
        let v6 = self.remote_v6.iter().map(|(address, pod)| (IpAddr::from(*address), pod));
        let others = self.others.iter().map(|(address, claimant)| (*address, claimant.clone()));
        v4.chain(v6).map(|(address, pod)| (address, plain(Arc::clone(pod)))).chain(others)
    }
}

fn plain(pod: Arc<RemotePod>) -> Claimant {
    Claimant::Remote(RemotePeer::of(pod))
}

impl Shared {
    /// Returns the pods that have the address; none if too many claim it.
    fn holders(&self) -> &[Claimant] {
        match self.attached {
            0 if self.claimants.len() > CLAIMANTS => &[],
            0 => &self.claimants,
            attached => self.claimants.get(..attached).unwrap_or_default(),
        }
    }
}

impl AtPlace {
    /// Returns the pods that have an address; `None`: no pod claims it.
    pub(super) fn holders_of(&self, address: IpAddr) -> Option<Holders<'_>> {
        match self.shared.get(&address) {
            Some(shared) => Some(Holders::Several(shared.holders())),
            None => self.sole.get(address).map(Holders::One),
        }
    }

    fn add(&mut self, address: IpAddr, claimant: Claimant) {
        let before = self.sole.remove(address);
        if before.is_none() && !self.shared.contains_key(&address) {
            self.sole.insert(address, claimant);
            return;
        }
        let shared =
            self.shared.entry(address).or_insert_with(|| Shared { claimants: Vec::new(), attached: 0 });
        for claimant in before.into_iter().chain([claimant]) {
            if claimant.is_attached() {
                shared.claimants.insert(shared.attached, claimant);
                shared.attached += 1;
            } else {
                shared.claimants.push(claimant);
            }
        }
        self.note(address);
    }

    fn remove(&mut self, address: IpAddr, claimant: &Claimant) {
        let Some(shared) = self.shared.get_mut(&address) else {
            self.sole.remove(address);
            return;
        };
        if let Some(at) = shared.claimants.iter().position(|one| one.is(claimant)) {
            shared.claimants.remove(at);
            shared.attached -= usize::from(at < shared.attached);
        }
        if shared.claimants.len() < 2 {
            let last = self.shared.remove(&address).and_then(|shared| shared.claimants.into_iter().next());
            if let Some(last) = last {
                self.sole.insert(address, last);
            }
        }
        self.note(address);
    }

    fn note(&mut self, address: IpAddr) {
        let is_contested = |shared: &Shared| (1..shared.claimants.len()).contains(&shared.attached);
        if self.shared.get(&address).is_some_and(is_contested) {
            self.contested.insert(address);
        } else {
            self.contested.remove(&address);
        }
    }
}
