//! Whose an address is to an attachment, where policies are for several networks.
//!
//! Two networks may give the same address, each to a pod of its own. To an attachment an address is that of who has it on
//! the attachment's own network, as if the policy were for that one alone. What nobody has there may come by a router from
//! another network of the policy: it is that of all who have it on these together.
//!
//! Tables are the same for all of the policy's attachments, unless an address is answered for differently.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::claims::{AtPlace, Claims, are_selected};
use super::peers::Claimant;
use crate::objects::Place;
use crate::objects::policy::Policy;

/// The networks of a policy on which anybody claims an address, as an attachment sees them.
pub(super) struct Scope<'a> {
    claims: &'a Claims,
    /// The networks that the attachment is on.
    own: &'a BTreeSet<Place>,
    networks: Vec<Network<'a>>,
}

struct Network<'a> {
    at: &'a AtPlace,
    is_own: bool,
    /// Addresses there are those of peers. Otherwise they are nobody's, as the policy's namespace may not use it.
    is_usable: bool,
}

/// What is true of an address.
pub(super) struct Answer<T> {
    pub(super) value: T,
    /// How many of those who have it were looked at.
    pub(super) looked_at: usize,
    /// Whether somebody has it on the attachment's own network, so that only that counts.
    pub(super) is_own: bool,
    /// Whether it is not the same for attachments on every network of the policy.
    pub(super) is_of_network: bool,
}

impl<'a> Scope<'a> {
    /// `places` are the networks of the policy on which its peers are, `own` those of the attachment.
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

    /// The networks that are looked up for an address.
    pub(super) fn len(&self) -> usize {
        self.networks.len()
    }

    /// Whether it is one of the attachment's own networks.
    pub(super) fn is_own(&self, place: &Place) -> bool {
        self.own.contains(place)
    }

    /// Whether all who have an address are selected, of whom one claims it on that network.
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

    /// What is true of an address by who has it. Of several networks that count `both` makes one of two; where nobody is a
    /// peer, it is the default.
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
