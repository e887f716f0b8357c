//! The places of each attachment in the flow table.
//!
//! [`share_out`] decides. Half of the table is shared equally; the other half goes to attachments that use
//! more, smallest demand first, so that equal demands get equal places. Both halves are shared among
//! namespaces, then among the pods of each, then among a pod's attachments: how many attachments an author has
//! decides nothing about what others get. An eighth is kept for new attachments. Places can be withdrawn: an
//! attachment that has fewer places than before is limited to those, and its excess flows are removed while it
//! has more flows than places.

use std::collections::BTreeMap;

use netattach_common::{FlowKey, Ip4, Ip6, PlaceKey, Share};

use super::BpfError;
use super::batched_map::BatchedMap;
use super::flows;
use super::map_ops::MapOps;
use super::map_table::map_name;
use super::pin::Pins;

/// Places, or flows, of an attachment: IPv4 and IPv6.
pub type PerFamily = [u32; 2];

/// Whose an attachment is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod in it.
    pub pod: String,
}

/// The owners of attachments, by number. An attachment without one counts as a pod of its own; all of these
/// together count as one namespace.
pub type Owners = BTreeMap<u32, Owner>;

/// Fewest places of an attachment, for any number of attachments.
const LEAST: u32 = 16;
/// Places for each live flow.
const HEADROOM: u32 = 4;

/// The places of each attachment in a table of this capacity. `held`: its live flows, and its places so far.
///
/// The sum is at most seven eighths of the capacity, unless every attachment has [`LEAST`].
pub fn share_out(held: &BTreeMap<u32, (u32, u32)>, owners: &Owners, capacity: u32) -> BTreeMap<u32, u32> {
    let count = u32::try_from(held.len()).unwrap_or(u32::MAX);
    let room = capacity - capacity / 8;
    let most = power_below(capacity / 4).clamp(LEAST, Share::LAST);
    let tenants = tenants(held.keys().copied(), owners);
    let equal = (room / 2).min(room.saturating_sub(LEAST.saturating_mul(count)));
    let mut shares = divide(equal, &tenants, |_| Share::FIRST);
    for places in shares.values_mut() {
        *places = power_below(*places).max(LEAST);
    }
    let left = room.saturating_sub(sum(shares.values().copied()));
    let by_use = divide(left, &tenants, |id| {
        let (live, places) = held[&id];
        wanted(live, places, most).saturating_sub(shares[&id])
    });
    shares.into_iter().map(|(id, places)| (id, places + by_use[&id])).collect()
}

/// The attachments of a pod.
type Attachments = Vec<u32>;

/// The pods of each namespace.
type Tenants = Vec<Vec<Attachments>>;

fn tenants(attachments: impl Iterator<Item = u32>, owners: &Owners) -> Tenants {
    let mut namespaces: BTreeMap<&str, BTreeMap<(&str, u32), Attachments>> = BTreeMap::new();
    for id in attachments {
        let (namespace, pod) = match owners.get(&id) {
            Some(owner) => (owner.namespace.as_str(), (owner.pod.as_str(), 0)),
            None => ("", ("", id)),
        };
        namespaces.entry(namespace).or_default().entry(pod).or_default().push(id);
    }
    namespaces.into_values().map(|pods| pods.into_values().collect()).collect()
}

/// Divides `room` fairly among namespaces, each one's part among its pods, and each pod's among its
/// attachments. Asks three times what each attachment wants.
fn divide(room: u32, tenants: &Tenants, want: impl Fn(u32) -> u32) -> BTreeMap<u32, u32> {
    let of_attachment = |id: &u32| want(*id);
    let of_pod = |pod: &Attachments| sum(pod.iter().map(of_attachment));
    let of_namespace = |pods: &Vec<Attachments>| sum(pods.iter().map(of_pod));
    let mut given = BTreeMap::new();
    for (pods, room) in fair(room, tenants, of_namespace) {
        for (pod, room) in fair(room, pods, of_pod) {
            given.extend(fair(room, pod, of_attachment).into_iter().map(|(id, places)| (*id, places)));
        }
    }
    given
}

/// The part of each: those who want least have it, and all others the same, which is more than these want.
fn fair<T>(room: u32, all: &[T], want: impl Fn(&T) -> u32) -> Vec<(&T, u32)> {
    let wants: Vec<u32> = all.iter().map(want).collect();
    let most = fair_most(room, wants.clone());
    all.iter().zip(wants).map(|(one, want)| (one, want.min(most))).collect()
}

/// The most that any of those who want so much can have of `room`.
fn fair_most(room: u32, mut wants: Vec<u32>) -> u32 {
    wants.sort_unstable();
    let mut left = room;
    let count = u32::try_from(wants.len()).unwrap_or(u32::MAX);
    for (rest, want) in (1..=count).rev().zip(wants) {
        if want > left / rest {
            return left / rest;
        }
        left -= want;
    }
    u32::MAX
}

fn sum(numbers: impl Iterator<Item = u32>) -> u32 {
    numbers.fold(0, u32::saturating_add)
}

/// The places that an attachment would get if there were enough: its present ones, unless it uses far fewer.
fn wanted(live: u32, places: u32, most: u32) -> u32 {
    let needed = live.saturating_mul(HEADROOM).checked_next_power_of_two().unwrap_or(most).min(most);
    if (needed..=needed.saturating_mul(HEADROOM)).contains(&places) { places.min(most) } else { needed }
}

/// The largest power of two that is not greater than `number`; at least 1.
fn power_below(number: u32) -> u32 {
    1 << number.max(1).ilog2()
}

/// The maps of places.
pub(super) struct Maps {
    pub(super) shares: Box<dyn MapOps<u32, Share>>,
    pub(super) places_v4: Box<dyn MapOps<PlaceKey, FlowKey<Ip4>>>,
    pub(super) places_v6: Box<dyn MapOps<PlaceKey, FlowKey<Ip6>>>,
}

impl Maps {
    pub(super) fn open(pins: &Pins) -> Result<Self, BpfError> {
        Ok(Self {
            shares: Box::new(BatchedMap::open(pins, map_name::SHARE)?),
            places_v4: Box::new(BatchedMap::open(pins, map_name::OWN4)?),
            places_v6: Box::new(BatchedMap::open(pins, map_name::OWN6)?),
        })
    }
}

/// The maps of shares and places.
pub(super) struct Shares {
    map: Box<dyn MapOps<u32, Share>>,
    places_v4: Box<dyn MapOps<PlaceKey, FlowKey<Ip4>>>,
    places_v6: Box<dyn MapOps<PlaceKey, FlowKey<Ip6>>>,
    capacity: PerFamily,
    /// The places of each attachment.
    given: BTreeMap<u32, PerFamily>,
}

impl Shares {
    /// Reads the entries of the maps.
    pub(super) fn over(maps: Maps, capacity: PerFamily) -> Result<Self, BpfError> {
        let Maps { mut shares, places_v4, places_v6 } = maps;
        let rows = shares.all()?;
        let given = |(id, share): (u32, Share)| {
            let most = [share.most_v4, share.most_v6];
            (most != [0, 0]).then_some((id, most))
        };
        Ok(Self {
            map: shares,
            places_v4,
            places_v6,
            capacity,
            given: rows.into_iter().filter_map(given).collect(),
        })
    }

    /// See [`super::AttachmentMaps::take_answers`].
    pub(super) fn take_answers(&mut self, id: u32) -> Result<(), BpfError> {
        let share = self.get(id)?;
        if share.answers_until != 0 {
            return Ok(());
        }
        // 0 means never.
        let until = flows::now().wrapping_add(Share::GRACE).max(1);
        self.set(id, Share { answers_until: until, ..share })
    }

    /// Leaves the share of a number at rest unchanged, whatever others get: packets in flight may still take
    /// places of it.
    pub(super) fn leave(&mut self, id: u32) {
        self.given.remove(&id);
    }

    /// Clears share and places of a number for which no packet takes places any more: the next attachment
    /// with this number begins without any. Idempotent.
    pub(super) fn clear(&mut self, id: u32) -> Result<(), BpfError> {
        self.leave(id);
        let share = self.get(id)?;
        let taken = taken(&share);
        self.clear_places(id, [0, 0], taken)?;
        clear_on(self.places_v4.as_mut(), id, taken[0])?;
        clear_on(self.places_v6.as_mut(), id, taken[1])?;
        if share == Share::default() { Ok(()) } else { self.set(id, Share::default()) }
    }

    /// Gives each attachment its places, and withdraws the places of all others. `live`: the live flows of
    /// each attachment. Returns the places of each.
    pub(super) fn share_out(
        &mut self,
        live: &BTreeMap<u32, PerFamily>,
        owners: &Owners,
    ) -> Result<BTreeMap<u32, PerFamily>, BpfError> {
        let mut shares: BTreeMap<u32, PerFamily> = BTreeMap::new();
        for family in [0, 1] {
            let held = |(id, live): (&u32, &PerFamily)| {
                let places = self.given.get(id).map_or(0, |given| given[family]);
                (*id, (live[family], places))
            };
            let held = live.iter().map(held).collect();
            for (id, places) in share_out(&held, owners, self.capacity[family]) {
                shares.entry(id).or_default()[family] = places;
            }
        }
        let gone: Vec<u32> = self.given.keys().filter(|id| !shares.contains_key(id)).copied().collect();
        for id in gone {
            self.give(id, [0, 0])?;
        }
        for (id, places) in &shares {
            if self.given.get(id) != Some(places) {
                self.give(*id, *places)?;
            }
        }
        Ok(shares)
    }

    /// Sets the places of an attachment. If there are fewer than before, the share is lowered first, so that
    /// no flow takes a place beyond it; then those places are cleared.
    fn give(&mut self, id: u32, places: PerFamily) -> Result<(), BpfError> {
        let share = self.get(id)?;
        let taken = taken(&share);
        self.set(id, Share { most_v4: places[0], most_v6: places[1], ..share })?;
        if places == [0, 0] {
            self.given.remove(&id);
        } else {
            self.given.insert(id, places);
        }
        self.clear_places(id, places.map(Share::places), taken)
    }

    fn clear_places(&mut self, id: u32, from: PerFamily, to: PerFamily) -> Result<(), BpfError> {
        let keys = |family: usize| -> Vec<PlaceKey> {
            (from[family]..to[family]).map(|place| PlaceKey { attachment: id, place }).collect()
        };
        self.places_v4.remove_all(&keys(0))?;
        self.places_v6.remove_all(&keys(1))
    }

    fn get(&self, id: u32) -> Result<Share, BpfError> {
        Ok(self.map.get(&id)?.unwrap_or_default())
    }

    fn set(&mut self, id: u32, share: Share) -> Result<(), BpfError> {
        self.map.put(id, share)
    }
}

/// Removes an attachment's places from `first` on, up to the first that does not exist, because places are
/// numbered consecutively. A share that was written while a packet took a place does not count that place.
fn clear_on<V>(places: &mut dyn MapOps<PlaceKey, V>, attachment: u32, first: u32) -> Result<(), BpfError> {
    let mut key = PlaceKey { attachment, place: first };
    while places.get(&key)?.is_some() {
        places.remove(&key)?;
        key.place += 1;
    }
    Ok(())
}

/// The number of places that an attachment has ever used, from the first on.
fn taken(share: &Share) -> PerFamily {
    let of = |next: u64, most: u32| u32::try_from(next).unwrap_or(u32::MAX).min(Share::places(most));
    [of(share.next_v4, share.most_v4), of(share.next_v6, share.most_v6)]
}

#[cfg(test)]
mod tests {
    use netattach_common::{Address, Port};
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: u32 = 262_144;

    #[test]
    fn a_number_that_is_cleared_has_no_place_even_if_its_share_does_not_count_all() {
        let key = FlowKey {
            zone: 1,
            low: Ip4::UNSPECIFIED,
            high: Ip4::UNSPECIFIED,
            low_port: Port::NONE,
            high_port: Port::NONE,
            protocol: 17,
            tags: [0; 3],
        };
        let place = |attachment, place| PlaceKey { attachment, place };
        let taken =
            [(7, 0), (7, 1), (7, 2), (7, 3), (8, 0), (8, 1)].map(|(id, number)| (place(id, number), key));
        let used = Share { next_v4: 2, ..Share::default() };
        let given = Share { most_v4: 64, ..used };
        let maps = Maps {
            shares: Box::new(BTreeMap::from([(7, used), (8, given)])),
            places_v4: Box::new(BTreeMap::from(taken)),
            places_v6: Box::new(BTreeMap::new()),
        };
        let mut shares = Shares::over(maps, [CAPACITY; 2]).unwrap();
        shares.leave(8);
        shares.share_out(&BTreeMap::new(), &Owners::new()).unwrap();
        assert_eq!(shares.map.all().unwrap(), [(7, used), (8, given)], "packets on their way count on it");
        shares.clear(7).unwrap();
        assert_eq!(shares.map.all().unwrap(), [(7, Share::default()), (8, given)]);
        assert_eq!(shares.places_v4.all().unwrap(), [(place(8, 0), key), (place(8, 1), key)]);
        shares.clear(8).unwrap();
        assert_eq!(shares.map.all().unwrap(), [(7, Share::default()), (8, Share::default())]);
        assert_eq!(shares.places_v4.all().unwrap(), []);
    }

    fn shares(live: &[u32]) -> Vec<u32> {
        let held = (1..).zip(live.iter().map(|live| (*live, 0))).collect();
        share_out(&held, &Owners::new(), CAPACITY).into_values().collect()
    }

    #[test]
    fn who_uses_little_has_the_same_and_who_uses_more_gets_more() {
        assert_eq!(shares(&[]), Vec::<u32>::new());
        assert_eq!(shares(&[0, 1, 256]), [1024, 1024, 1024]);
        assert_eq!(shares(&[0, 1024, 5000]), [1024, 4096, 32_768]);
        assert_eq!(shares(&[0, u32::MAX]), [1024, 32_768]);
    }

    #[test]
    fn of_a_table_that_is_short_the_modest_get_what_they_want() {
        let many = 1 << 20;
        let greedy = shares(&[0, 1024, many, many, many, many, many, many, many, many]);
        assert_eq!(greedy[..2], [1024, 4096]);
        let others = (CAPACITY - CAPACITY / 8 - 1024 - 4096) / 8;
        assert_eq!(greedy[2..], [others; 8]);
    }

    #[test]
    fn what_was_given_is_kept_while_it_is_not_far_too_much() {
        let again = |live, places| share_out(&[(1, (live, places))].into(), &Owners::new(), CAPACITY)[&1];
        assert_eq!(again(1024, 16_384), 16_384);
        assert_eq!(again(1023, 16_385), 4096);
        assert_eq!(again(0, 16_384), 1024);
    }

    #[test]
    fn thousands_of_attachments_share_what_there_is() {
        assert_eq!(shares(&[0; 1000]), [64; 1000]);
        let mut live = vec![0; 1000];
        live[7] = 20_000;
        assert_eq!(shares(&live)[7], 32_768);
        assert!(shares(&[u32::MAX; 8191]).iter().all(|places| (28..=29).contains(places)));
    }

    /// Attachments of one pod: namespace, pod, how many, live flows of each, and the places that each has so far.
    type Row = (&'static str, &'static str, u32, u32, u32);

    /// The places of an attachment of each row.
    fn places(rows: &[Row]) -> Vec<u32> {
        let (mut held, mut owners, mut firsts) = (BTreeMap::new(), Owners::new(), Vec::new());
        let mut id = 0;
        for (namespace, pod, count, live, places) in rows {
            firsts.push((id + 1, *count));
            for _ in 0..*count {
                id += 1;
                held.insert(id, (*live, *places));
                if !namespace.is_empty() {
                    owners.insert(id, owner(namespace, pod));
                }
            }
        }
        let shares = share_out(&held, &owners, CAPACITY);
        for (first, count) in &firsts {
            assert!((*first..first + count).all(|id| shares[&id] == shares[first]), "{shares:?}");
        }
        firsts.into_iter().map(|(first, _)| shares[&first]).collect()
    }

    fn owner(namespace: &str, pod: &str) -> Owner {
        Owner { namespace: namespace.to_owned(), pod: pod.to_owned() }
    }

    #[test]
    fn many_attachments_of_a_namespace_take_nothing_from_another() {
        let pods = ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9"];
        let rows = |live| -> Vec<Row> {
            let many = pods.into_iter().map(|pod| ("evil", pod, 64, live, 1024));
            [("shop", "db", 1, 10_000, 32_768)].into_iter().chain(many).collect()
        };
        for live in [256, u32::MAX] {
            let shares = places(&rows(live));
            assert_eq!(shares[0], 32_768, "all that it had");
            assert_eq!(shares[1..], [307; 10], "all others have the rest");
        }
        // Even if the least of each is more than half of the table, before the other has any flow.
        let few = places(&[("evil", "p", 8000, u32::MAX, 0), ("shop", "db", 1, 0, 0)]);
        assert_eq!(few, [28, 1024]);
    }

    #[test]
    fn places_are_shared_among_namespaces_then_pods_then_attachments() {
        const ALL: u32 = u32::MAX;
        let table: &[(&[Row], &[u32])] = &[
            // One namespace with one attachment a pod, and attachments of no known pod: all alike.
            (&[("a", "p", 1, 0, 0), ("a", "q", 1, 1024, 0), ("a", "r", 1, 5000, 0)], &[1024, 4096, 32_768]),
            (&[("", "", 1, 0, 0), ("", "", 1, 1024, 0), ("", "", 1, 5000, 0)], &[1024, 4096, 32_768]),
            // A pod that is alone has what all its attachments want.
            (&[("a", "p", 3, 0, 0)], &[1024]),
            (&[("a", "p", 4, ALL, 0)], &[32_768]),
            // Namespaces: b has as much as a, whose pods have the same.
            (&[("a", "p", 64, ALL, 0), ("a", "q", 64, ALL, 0), ("b", "p", 4, ALL, 0)], &[1136, 1136, 20_992]),
            // Pods of the same name in two namespaces are two.
            (&[("a", "p", 64, ALL, 0), ("b", "p", 1, ALL, 0)], &[3072, 32_768]),
            // Pods: the few attachments of q together have as much by use as those of p.
            (&[("a", "p", 60, ALL, 0), ("a", "q", 4, ALL, 0)], &[2389, 21_504]),
            // Attachments of no known pod are pods of one namespace.
            (&[("", "", 64, ALL, 0), ("b", "p", 1, ALL, 0)], &[3072, 32_768]),
            // A namespace of many idle pods leaves what they do not use.
            (&[("a", "p", 1000, 0, 0), ("b", "p", 1, 20_000, 0)], &[64, 32_768]),
        ];
        for (rows, expected) in table {
            assert_eq!(places(rows), *expected, "{rows:?}");
        }
    }

    #[test]
    fn each_attachment_is_asked_three_times_whoever_it_belongs_to() {
        let shapes: [fn(u32) -> Option<Owner>; 5] = [
            |_| None,
            |_| Some(owner("a", "p")),
            |id| Some(owner("a", &id.to_string())),
            |id| Some(owner(&id.to_string(), "p")),
            |id| Some(owner(&(id % 10).to_string(), &(id % 100).to_string())),
        ];
        for shape in shapes {
            let owners: Owners = (1..=1000).filter_map(|id| Some((id, shape(id)?))).collect();
            let asked = std::cell::Cell::new(0);
            let given = divide(10_000, &tenants(1..=1000, &owners), |_| {
                asked.set(asked.get() + 1);
                10
            });
            assert_eq!(given, (1..=1000).map(|id| (id, 10)).collect::<BTreeMap<_, _>>());
            assert_eq!(asked.get(), 3000);
        }
    }

    proptest! {
        #[test]
        fn the_sum_fits_and_every_attachment_has_a_share(
            held in proptest::collection::btree_map(1u32..9000, (any::<u32>(), 0u32..=Share::LAST), 1..400),
            capacity in 16_384u32..1_048_576,
            namespaces in 1u32..20,
            pods in 1u32..40,
        ) {
            // Some attachments are of no known pod.
            let name = |id: u32| owner(&(id % namespaces).to_string(), &(id % pods).to_string());
            let owners: Owners =
                held.keys().filter(|id| **id % 7 != 0).map(|id| (*id, name(*id))).collect();
            let shares = share_out(&held, &owners, capacity);
            prop_assert_eq!(shares.len(), held.len());
            prop_assert!(shares.values().all(|places| (LEAST..=Share::LAST).contains(places)));
            prop_assert!(shares.values().sum::<u32>() <= capacity - capacity / 8);
        }
    }
}
