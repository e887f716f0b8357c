//! Chooses the addresses of an attachment, given the existing reservations. Pure.
//!
//! Addresses are chosen round robin: the search starts after the address reserved last and wraps around to it, so that
//! a released address stays unused for as long as the set allows.

use std::net::IpAddr;

use ipnet::IpNet;

use super::range::{Range, RangeSet, from_bits, to_bits};
use super::{Config, Owner};

/// The reservations of a network, as the allocator needs them.
pub trait Reservations {
    /// Whether the address cannot be handed out.
    fn is_taken(&self, address: IpAddr) -> bool;
    /// The holder of an address, if that can be read.
    fn holder(&self, address: IpAddr) -> Option<Owner>;
    /// An address that `owner` holds in the set.
    fn held_by(&self, owner: &Owner, set: &RangeSet) -> Option<IpAddr>;
    /// The address reserved last in the set with this index, whether or not it lies in the set.
    fn last_reserved(&self, set: usize) -> Option<IpAddr>;
}

/// One chosen address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The address with the prefix length of its subnet.
    pub address: IpNet,
    /// The gateway of its range.
    pub gateway: IpAddr,
}

/// No address can be leased.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// A second ADD without a DEL.
    #[error(
        "{address} is already reserved for {owner}; a second address from the same range set is not given"
    )]
    Duplicate {
        /// The address that it holds.
        address: IpAddr,
        /// The owner.
        owner: Owner,
    },
    /// Every address of the set is reserved or excluded.
    #[error(
        "no address is available in range set {index} ({set}); where an agent runs, netattachctl pools --holders shows who has them"
    )]
    Exhausted {
        /// Position of the set.
        index: usize,
        /// The set.
        set: RangeSet,
    },
    /// A requested address belongs to the gateway.
    #[error("requested address {0} is the gateway of its subnet")]
    RequestedGateway(IpAddr),
    /// A requested address is under `ipam.exclude`.
    #[error("requested address {0} is excluded by ipam.exclude")]
    RequestedExcluded(IpAddr),
    /// A requested address is reserved.
    #[error(
        "requested address {address} is not available in range set {index} ({set}): {}",
        holder.as_ref().map_or_else(|| "it is reserved".to_owned(), |holder| format!("{holder} holds it"))
    )]
    RequestedTaken {
        /// The address.
        address: IpAddr,
        /// The owner, if the reservation can be read.
        holder: Option<Box<Owner>>,
        /// Position of the set that holds it.
        index: usize,
        /// The set.
        set: RangeSet,
    },
    /// No set contains these requested addresses, or there are more of them than sets that contain them.
    #[error("requested addresses {} cannot be given: no range set is left that holds them", list(.0))]
    RequestedOutside(Vec<IpAddr>),
}

/// Chooses one address per range set, in the order of the sets.
///
/// A requested address is taken by the first set that contains it; each set takes at most one.
///
/// # Errors
/// See [`AllocateError`]. Nothing is chosen unless every set and every requested address is served.
pub fn choose(
    config: &Config,
    owner: &Owner,
    reserved: &impl Reservations,
) -> Result<Vec<Choice>, AllocateError> {
    let mut requested = config.requested.clone();
    let mut choices = Vec::with_capacity(config.sets.len());
    for (index, set) in config.sets.iter().enumerate() {
        let wanted = requested.iter().position(|&address| set.range_of(address).is_some());
        choices.push(match wanted.map(|position| requested.remove(position)) {
            Some(address) => take_requested(config, index, set, address, reserved)?,
            None => take_next(config, index, set, owner, reserved)?,
        });
    }
    if requested.is_empty() { Ok(choices) } else { Err(AllocateError::RequestedOutside(requested)) }
}

fn take_requested(
    config: &Config,
    index: usize,
    set: &RangeSet,
    address: IpAddr,
    reserved: &impl Reservations,
) -> Result<Choice, AllocateError> {
    let range = set.range_of(address).ok_or_else(|| AllocateError::RequestedOutside(vec![address]))?;
    if address == range.gateway {
        return Err(AllocateError::RequestedGateway(address));
    }
    if config.exclude.iter().any(|excluded| excluded.contains(&address)) {
        return Err(AllocateError::RequestedExcluded(address));
    }
    if reserved.is_taken(address) {
        let holder = reserved.holder(address).map(Box::new);
        return Err(AllocateError::RequestedTaken { address, holder, index, set: set.clone() });
    }
    Ok(choice(address, range))
}

fn take_next(
    config: &Config,
    index: usize,
    set: &RangeSet,
    owner: &Owner,
    reserved: &impl Reservations,
) -> Result<Choice, AllocateError> {
    if let Some(address) = reserved.held_by(owner, set) {
        return Err(AllocateError::Duplicate { address, owner: owner.clone() });
    }
    candidates(set, reserved.last_reserved(index), &config.exclude)
        .find(|(address, range)| *address != range.gateway && !reserved.is_taken(*address))
        .map(|(address, range)| choice(address, range))
        .ok_or_else(|| AllocateError::Exhausted { index, set: set.clone() })
}

/// Every address of the set once, starting after `last` (or at the beginning if `last` is not in the set) and ending
/// with it, without the excluded networks.
///
/// Excluded networks are skipped as a whole: a step costs the same for 2 addresses and for 2^64.
fn candidates<'a>(
    set: &'a RangeSet,
    last: Option<IpAddr>,
    exclude: &'a [IpNet],
) -> impl Iterator<Item = (IpAddr, &'a Range)> {
    round_from(set, last).into_iter().flat_map(move |(range, first, end)| {
        let mut next = first;
        std::iter::from_fn(move || {
            while let Some(bits) = next.filter(|bits| *bits <= end) {
                let address = from_bits(bits, range.start);
                match exclude.iter().find(|excluded| excluded.contains(&address)) {
                    Some(excluded) => next = to_bits(excluded.broadcast()).checked_add(1),
                    None => {
                        next = bits.checked_add(1);
                        return Some((address, range));
                    }
                }
            }
            None
        })
    })
}

/// Part of a range: first and last address as numbers, both included. `None`: the part is empty.
type Stretch<'a> = (&'a Range, Option<u128>, u128);

/// The parts of the set in the order of the search.
fn round_from(set: &RangeSet, last: Option<IpAddr>) -> Vec<Stretch<'_>> {
    let ranges = set.ranges();
    let Some((last, at)) =
        last.and_then(|last| Some((last, ranges.iter().position(|range| range.contains(last))?)))
    else {
        return ranges.iter().map(whole).collect();
    };
    let range = &ranges[at];
    let mut round = vec![(range, to_bits(last).checked_add(1), to_bits(range.end))];
    round.extend(ranges[at + 1..].iter().chain(&ranges[..at]).map(whole));
    round.push((range, Some(to_bits(range.start)), to_bits(last)));
    round
}

fn whole(range: &Range) -> Stretch<'_> {
    (range, Some(to_bits(range.start)), to_bits(range.end))
}

fn choice(address: IpAddr, range: &Range) -> Choice {
    // The prefix length belongs to a network of the same family, so it always fits.
    let address = IpNet::new_assert(address, range.subnet.prefix_len());
    Choice { address, gateway: range.gateway }
}

fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::super::range::Limits;
    use super::*;

    #[derive(Default)]
    struct Fake {
        taken: BTreeSet<IpAddr>,
        holders: BTreeMap<IpAddr, Owner>,
        last: BTreeMap<usize, IpAddr>,
        held: Option<IpAddr>,
    }

    impl Reservations for Fake {
        fn is_taken(&self, address: IpAddr) -> bool {
            self.taken.contains(&address)
        }
        fn holder(&self, address: IpAddr) -> Option<Owner> {
            self.holders.get(&address).cloned()
        }
        fn held_by(&self, _: &Owner, set: &RangeSet) -> Option<IpAddr> {
            self.held.filter(|address| set.range_of(*address).is_some())
        }
        fn last_reserved(&self, set: usize) -> Option<IpAddr> {
            self.last.get(&set).copied()
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn ips(text: &str) -> Vec<IpAddr> {
        text.split_whitespace().map(ip).collect()
    }

    fn set(subnets: &[&str]) -> RangeSet {
        RangeSet(
            subnets
                .iter()
                .map(|text| Range::new(text.parse().unwrap(), Limits::default()).unwrap())
                .collect(),
        )
    }

    fn config(sets: Vec<RangeSet>) -> Config {
        Config {
            network: "net".to_owned(),
            data_dir: "/nowhere".into(),
            sets,
            exclude: Vec::new(),
            requested: Vec::new(),
            routes: Vec::new(),
            resolv_conf: None,
        }
    }

    fn owner() -> Owner {
        Owner { container_id: "id".to_owned(), ifname: "eth0".to_owned() }
    }

    /// Allocates until no address is left and returns the addresses in order.
    fn drain(config: &Config, fake: &mut Fake) -> Vec<IpAddr> {
        let mut order = Vec::new();
        while let Ok(choices) = choose(config, &owner(), fake) {
            let address = choices[0].address.addr();
            fake.taken.insert(address);
            fake.last.insert(0, address);
            order.push(address);
        }
        order
    }

    #[test]
    fn next_address_follows_the_vectors_of_the_go_plugin() {
        let table = [
            (&["10.0.0.0/29"][..], "", None, "10.0.0.2/29"),
            (&["2001:db8:1::/64"], "", None, "2001:db8:1::2/64"),
            (&["10.0.0.0/30"], "", None, "10.0.0.2/30"),
            (&["10.0.0.0/29"], "10.0.0.2", None, "10.0.0.3/29"),
            (&["10.0.0.0/29"], "", Some("10.0.0.5"), "10.0.0.6/29"),
            (&["10.0.0.0/29"], "10.0.0.4 10.0.0.5", Some("10.0.0.3"), "10.0.0.6/29"),
            (&["10.0.0.0/29"], "10.0.0.6", Some("10.0.0.5"), "10.0.0.2/29"),
            (&["10.0.0.0/29"], "10.0.0.2", Some("10.0.0.128"), "10.0.0.3/29"),
            (&["10.0.0.0/29"], "10.0.0.2 10.0.0.4 10.0.0.5 10.0.0.6", Some("10.0.0.3"), "10.0.0.3/29"),
            (&["10.0.0.0/30", "10.0.1.0/30"], "", None, "10.0.0.2/30"),
            (&["10.0.0.0/30", "10.0.1.0/30"], "", Some("10.0.0.2"), "10.0.1.2/30"),
            (&["10.0.0.0/30", "10.0.1.0/30", "10.0.2.0/30"], "", Some("10.0.2.2"), "10.0.0.2/30"),
        ];
        for (subnets, taken, last, expected) in table {
            let fake = Fake {
                taken: ips(taken).into_iter().collect(),
                last: last.map(|text| (0, ip(text))).into_iter().collect(),
                ..Fake::default()
            };
            let choices = choose(&config(vec![set(subnets)]), &owner(), &fake).unwrap();
            let address: IpNet = expected.parse().unwrap();
            let gateway = from_bits(to_bits(address.network()) + 1, address.addr());
            assert_eq!(choices, [Choice { address, gateway }], "{subnets:?} {taken} {last:?}");
        }
    }

    const HOLDERS: &str = "; where an agent runs, netattachctl pools --holders shows who has them";

    #[test]
    fn exhausted_sets_are_listed() {
        let table = [
            (&["10.0.0.0/30"][..], "10.0.0.2", "10.0.0.1-10.0.0.2"),
            (&["10.0.0.0/29"], "10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5 10.0.0.6", "10.0.0.1-10.0.0.6"),
            (&["10.0.0.0/30", "10.0.1.0/30"], "10.0.0.2 10.0.1.2", "10.0.0.1-10.0.0.2,10.0.1.1-10.0.1.2"),
        ];
        for (subnets, taken, listed) in table {
            let fake = Fake { taken: ips(taken).into_iter().collect(), ..Fake::default() };
            assert_eq!(
                choose(&config(vec![set(subnets)]), &owner(), &fake).unwrap_err().to_string(),
                format!("no address is available in range set 0 ({listed}){HOLDERS}")
            );
        }
    }

    #[test]
    fn a_set_is_handed_out_in_order_and_the_broadcast_address_never() {
        let config = config(vec![set(&["192.168.1.0/29"])]);
        let mut fake = Fake::default();
        assert_eq!(
            drain(&config, &mut fake),
            ips("192.168.1.2 192.168.1.3 192.168.1.4 192.168.1.5 192.168.1.6")
        );
    }

    #[test]
    fn a_released_address_comes_last() {
        let config = config(vec![set(&["192.168.1.0/29"])]);
        let mut fake = Fake { last: BTreeMap::from([(0, ip("192.168.1.3"))]), ..Fake::default() };
        assert_eq!(
            drain(&config, &mut fake),
            ips("192.168.1.4 192.168.1.5 192.168.1.6 192.168.1.2 192.168.1.3")
        );
    }

    #[test]
    fn stated_limits_hand_out_network_and_broadcast_addresses() {
        let wide = |subnet: &str| {
            let subnet: IpNet = subnet.parse().unwrap();
            let limits =
                Limits { start: Some(subnet.network()), end: Some(subnet.broadcast()), gateway: None };
            Range::new(subnet, limits).unwrap()
        };
        let config = config(vec![RangeSet(vec![wide("10.0.0.0/30"), wide("10.0.1.0/30")])]);
        assert_eq!(
            drain(&config, &mut Fake::default()),
            ips("10.0.0.0 10.0.0.2 10.0.0.3 10.0.1.0 10.0.1.2 10.0.1.3")
        );
    }

    #[test]
    fn the_last_addresses_of_both_families_do_not_overflow() {
        for subnet in ["255.255.255.252/30", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffc/126"] {
            let subnet: IpNet = subnet.parse().unwrap();
            let (last, gateway) = (subnet.broadcast(), subnet.network());
            let config = config(vec![RangeSet(vec![Range { subnet, start: last, end: last, gateway }])]);
            assert_eq!(drain(&config, &mut Fake::default()), [subnet.broadcast()]);
        }
    }

    #[test]
    fn excluded_networks_of_any_size_are_skipped() {
        let mut config = config(vec![set(&["2001:db8::/64"])]);
        config.exclude = vec!["2001:db8::/65".parse().unwrap()];
        let choices = choose(&config, &owner(), &Fake::default()).unwrap();
        assert_eq!(choices[0].address.to_string(), "2001:db8:0:0:8000::/64");
        config.exclude.push("2001:db8:0:0:8000::/65".parse().unwrap());
        assert_eq!(
            choose(&config, &owner(), &Fake::default()).unwrap_err().to_string(),
            format!(
                "no address is available in range set 0 (2001:db8::1-2001:db8::ffff:ffff:ffff:ffff){HOLDERS}"
            )
        );
    }

    #[test]
    fn requested_addresses_go_to_the_sets_that_hold_them() {
        let mut config = config(vec![set(&["10.0.0.0/24", "10.0.9.0/24"]), set(&["2001:db8::/64"])]);
        config.requested = ips("2001:db8::77 10.0.9.5");
        let addresses: Vec<_> = choose(&config, &owner(), &Fake::default())
            .unwrap()
            .iter()
            .map(|choice| choice.address.to_string())
            .collect();
        assert_eq!(addresses, ["10.0.9.5/24", "2001:db8::77/64"]);
    }

    #[test]
    fn refused_requests_say_why() {
        let holder = Owner { container_id: "c9".into(), ifname: "net1".into() };
        let holders = [(ip("10.0.0.8"), holder)].into();
        let fake = Fake { taken: ips("10.0.0.8 10.0.0.9").into_iter().collect(), holders, ..Fake::default() };
        let table = [
            ("10.0.0.1", "requested address 10.0.0.1 is the gateway of its subnet"),
            (
                "10.0.0.9",
                "requested address 10.0.0.9 is not available in range set 0 (10.0.0.1-10.0.0.254): it is reserved",
            ),
            (
                "10.0.0.8",
                "requested address 10.0.0.8 is not available in range set 0 (10.0.0.1-10.0.0.254): interface net1 of \
                 container c9 holds it",
            ),
            ("10.0.0.64", "requested address 10.0.0.64 is excluded by ipam.exclude"),
            (
                "10.0.0.5 10.0.0.6 10.3.0.1",
                "requested addresses 10.0.0.6, 10.3.0.1 cannot be given: no range set is left that holds them",
            ),
        ];
        for (requested, expected) in table {
            let mut config = config(vec![set(&["10.0.0.0/24"])]);
            config.exclude = vec!["10.0.0.64/26".parse().unwrap()];
            config.requested = ips(requested);
            assert_eq!(choose(&config, &owner(), &fake).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_second_allocation_is_refused_unless_an_address_is_requested() {
        let fake = Fake { held: Some(ip("10.0.0.7")), ..Fake::default() };
        let mut config = config(vec![set(&["10.0.0.0/24"])]);
        assert_eq!(
            choose(&config, &owner(), &fake),
            Err(AllocateError::Duplicate { address: ip("10.0.0.7"), owner: owner() })
        );
        config.requested = ips("10.0.0.8");
        assert_eq!(
            choose(&config, &owner(), &fake).unwrap(),
            [Choice { address: "10.0.0.8/24".parse().unwrap(), gateway: ip("10.0.0.1") }]
        );
    }

    proptest! {
        #[test]
        fn every_free_address_is_handed_out_exactly_once(
            taken in prop::collection::btree_set(0u32..64, 0..64),
            last in prop::option::of(0u32..80),
            hole in prop::option::of((0u32..64, 26u8..=32)),
        ) {
            let base = u32::from_be_bytes([10, 0, 0, 0]);
            let at = |offset: u32| IpAddr::from(std::net::Ipv4Addr::from_bits(base + offset));
            let mut config = config(vec![set(&["10.0.0.0/27", "10.0.0.32/27"])]);
            config.exclude =
                hole.map(|(offset, bits)| IpNet::new_assert(at(offset), bits).trunc()).into_iter().collect();
            let mut fake = Fake {
                taken: taken.iter().copied().map(at).collect(),
                last: last.map(|offset| (0, at(offset))).into_iter().collect(),
                ..Fake::default()
            };
            let free: BTreeSet<_> = (1..31).chain(33..63)
                .filter(|offset| ![1, 33].contains(offset) && !taken.contains(offset))
                .map(at)
                .filter(|address| !config.exclude.iter().any(|net| net.contains(address)))
                .collect();
            let order = drain(&config, &mut fake);
            prop_assert_eq!(order.len(), free.len());
            prop_assert_eq!(order.into_iter().collect::<BTreeSet<_>>(), free);
        }
    }
}
