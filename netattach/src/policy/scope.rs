//! Determines which pods an address stands for, from the view of an attachment, if policies are for several
//! networks.
//!
//! Two networks may use the same address for different pods. For an attachment, an address stands for the
//! pods that have it on the attachment's own network, as if the policy were for that network only. An
//! address that no pod has there may be routed from another network of the policy: it stands for all pods
//! that have it on these networks together.
//!
//! Tables are the same for all of the policy's attachments, unless an address has different answers.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::claims::{AtPlace, Claims, are_selected};
use super::peers::Claimant;
use crate::objects::Place;
use crate::objects::policy::Policy;

/// The networks of a policy on which pods claim addresses, from the view of an attachment.
pub(super) struct Scope<'a> {
    claims: &'a Claims,
    /// The networks of the attachment.
    own: &'a BTreeSet<Place>,
    networks: Vec<Network<'a>>,
}

struct Network<'a> {
    at: &'a AtPlace,
    is_own: bool,
    /// Whether addresses there belong to peers. Otherwise they belong to none, as the policy's namespace
    /// may not use the network.
    is_usable: bool,
}

/// The answer for an address.
pub(super) struct Answer<T> {
    pub(super) value: T,
    /// How many of the pods that have it were examined.
    pub(super) looked_at: usize,
    /// Whether a pod has it on the attachment's own network, so that only that network counts.
    pub(super) is_own: bool,
    /// Whether the answer differs between the policy's networks.
    pub(super) is_of_network: bool,
}

impl<'a> Scope<'a> {
    /// `places`: the networks of the policy with its peers; `own`: those of the attachment.
    pub(super) fn new(
        claims: &'a Claims,
        policy: &Policy,
        places: &BTreeSet<Place>,
        own: &'a BTreeSet<Place>,
    ) -> Self {
        let network = |place: &Place, is_usable: bool| {
            claims.at(place).map(|at| Network { at, is_own: own.contains(place), is_usable })
        };
        let mut networks: Vec<Network<'a>> = places.iter().filter_map(|place| network(place, true)).collect();
        if places.len() < policy.networks.len() {
            let others = policy.networks.iter().cloned().map(Place::Network);
            let unusable = others.filter(|place| !places.contains(place));
            networks.extend(unusable.filter_map(|place| network(&place, false)));
        }
        Self { claims, own, networks }
    }

    /// Returns the number of networks that are looked up for an address.
    pub(super) fn len(&self) -> usize {
        self.networks.len()
    }

    /// Whether it is one of the attachment's own networks.
    pub(super) fn is_own(&self, place: &Place) -> bool {
        self.own.contains(place)
    }

    /// Whether all pods that have an address are selected, given that one of them claims it on that
    /// network.
    pub(super) fn is_allowed(
        &self,
        place: &Place,
        address: IpAddr,
        is_selected: impl Fn(&Claimant) -> bool,
    ) -> Answer<bool> {
        if self.networks.len() > 1 {
            let of_all = |holders: &[Claimant]| are_selected(holders, &is_selected);
            return self.of(address, of_all, |one, other| one && other);
        }
        let (value, looked_at) = self.claims.is_allowed(place, address, is_selected);
        Answer { value, looked_at, is_own: self.is_own(place), is_of_network: false }
    }

    /// Returns the answer for an address from the pods that have it. `both` combines the answers of several
    /// networks; where there are no peers, the answer is the default.
    pub(super) fn of<T: Clone + Default + PartialEq>(
        &self,
        address: IpAddr,
        of_holders: impl Fn(&[Claimant]) -> T,
        both: impl Fn(T, T) -> T,
    ) -> Answer<T> {
        let (mut own, mut others, mut first) = (None, None, None);
        let (mut looked_at, mut is_of_network) = (0, false);
        for network in &self.networks {
            let Some(holders) = network.at.holders_of(address) else { continue };
            let holders = holders.as_slice();
            looked_at += holders.len();
            let value = if network.is_usable { of_holders(holders) } else { T::default() };
            is_of_network |= *first.get_or_insert_with(|| value.clone()) != value;
            let among = match (network.is_own, network.is_usable) {
                (true, _) => &mut own,
                (false, true) => &mut others,
                (false, false) => continue,
            };
            *among = Some(match among.take() {
                Some(before) => both(before, value),
                None => value,
            });
        }
        let is_own = own.is_some();
        Answer { value: own.or(others).unwrap_or_default(), looked_at, is_own, is_of_network }
    }
}
