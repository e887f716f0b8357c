//! The places of each attachment in the flow table.
//!
//! [`share_out`] decides. Half of the table is shared equally; the other half goes to attachments that use
//! more, smallest demand first, so that equal demands get equal places. An eighth is kept for new
//! attachments. Places can be withdrawn: an attachment that has fewer places than before is limited to those,
//! and its excess flows are removed while it has more flows than places.

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

/// Fewest places of an attachment, for any number of attachments.
const LEAST: u32 = 16;
/// Places for each live flow.
const HEADROOM: u32 = 4;

/// The places of each attachment in a table of this capacity. `held`: its live flows, and its places so far.
///
/// The sum is at most seven eighths of the capacity, unless every attachment has [`LEAST`].
pub fn share_out(held: &BTreeMap<u32, (u32, u32)>, capacity: u32) -> BTreeMap<u32, u32> {
    let count = u32::try_from(held.len()).unwrap_or(u32::MAX).max(1);
    let room = capacity - capacity / 8;
    let sure = power_below(room / 2 / count).clamp(LEAST, Share::FIRST);
    let most = power_below(capacity / 4).clamp(sure, Share::LAST);
    let mut left = room.saturating_sub(sure.saturating_mul(count));
    let mut wants: Vec<(u32, u32)> = held
        .iter()
        .map(|(id, (live, places))| (wanted(*live, *places, most).saturating_sub(sure), *id))
        .collect();
    wants.sort_unstable();
    let mut shares = BTreeMap::new();
    for (rest, (want, id)) in (1..=count).rev().zip(wants) {
        let given = want.min(left / rest);
        left -= given;
        shares.insert(id, sure + given);
    }
    shares
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
    ) -> Result<BTreeMap<u32, PerFamily>, BpfError> {
        let mut shares: BTreeMap<u32, PerFamily> = BTreeMap::new();
        for family in [0, 1] {
            let held = |(id, live): (&u32, &PerFamily)| {
                let places = self.given.get(id).map_or(0, |given| given[family]);
                (*id, (live[family], places))
            };
            let held = live.iter().map(held).collect();
            for (id, places) in share_out(&held, self.capacity[family]) {
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
        shares.share_out(&BTreeMap::new()).unwrap();
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
        share_out(&held, CAPACITY).into_values().collect()
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
        let again = |live, places| share_out(&[(1, (live, places))].into(), CAPACITY)[&1];
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

    proptest! {
        #[test]
        fn the_sum_fits_and_every_attachment_has_a_share(
            held in proptest::collection::btree_map(1u32..9000, (any::<u32>(), 0u32..=Share::LAST), 1..400),
            capacity in 16_384u32..1_048_576,
        ) {
            let shares = share_out(&held, capacity);
            prop_assert_eq!(shares.len(), held.len());
            prop_assert!(shares.values().all(|places| (LEAST..=Share::LAST).contains(places)));
            prop_assert!(shares.values().sum::<u32>() <= capacity - capacity / 8);
        }
    }
}
