//! The use of a pool: for each range the free addresses and their distribution, and the owners of the others. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::Config;
use super::range::{Range, from_bits, to_bits};
use crate::ipam::{Held, RangeUse, Survey};

/// Surveys the ranges of a configuration over the reservations of its directory.
pub(super) fn survey(config: &Config, held: Vec<Held>) -> Survey {
    let by_address: BTreeMap<IpAddr, ()> = held.iter().map(|held| (held.address, ())).collect();
    let ranges =
        config.sets.iter().enumerate().flat_map(|(set, ranges)| {
            ranges.ranges().iter().map(move |range| (set, range)).collect::<Vec<_>>()
        });
    let ranges = ranges.map(|(set, range)| {
        let (start, end) = (to_bits(range.start), to_bits(range.end));
        let never = never(range, &config.exclude);
        let size = size(range, &never);
        let taken: Vec<u128> = by_address
            .range(range.start..=range.end)
            .map(|(address, ())| to_bits(*address))
            .filter(|bits| !never.iter().any(|(first, last)| (first..=last).contains(&bits)))
            .collect();
        let used = taken.len() as u128;
        let mut blocked: Vec<(u128, u128)> =
            taken.into_iter().map(|bits| (bits, bits)).chain(never).collect();
        blocked.sort_unstable();
        let gaps = gaps(start, end, &merged(blocked));
        let longest = gaps.iter().max_by_key(|(first, last)| last - first);
        RangeUse {
            set,
            first: range.start,
            last: range.end,
            gateway: range.gateway,
            size: narrow(size),
            used: narrow(used),
            free: narrow(size.saturating_sub(used)),
            free_runs: gaps.len() as u64,
            longest_free: longest.map(|(first, _)| from_bits(*first, range.start)),
            longest_free_size: longest.map_or(0, |gap| narrow(length(*gap))),
        }
    });
    Survey { ranges: ranges.collect(), held }
}

/// Returns the parts of a range that are never leased, in order and not adjacent: the gateway, and excluded networks.
pub(super) fn never(range: &Range, exclude: &[IpNet]) -> Vec<(u128, u128)> {
    let (start, end) = (to_bits(range.start), to_bits(range.end));
    let excluded = exclude.iter().filter(|net| net.addr().is_ipv4() == range.start.is_ipv4());
    let excluded = excluded.map(|net| (to_bits(net.network()), to_bits(net.broadcast())));
    let gateway = range.contains(range.gateway).then(|| (to_bits(range.gateway), to_bits(range.gateway)));
    let inside = excluded.chain(gateway).filter(|(first, last)| *first <= end && start <= *last);
    let mut parts: Vec<(u128, u128)> =
        inside.map(|(first, last)| (first.max(start), last.min(end))).collect();
    parts.sort_unstable();
    merged(parts)
}

/// Returns the number of addresses of a range that can be leased. `never`: the result of [`never()`]. All addresses
/// of IPv6 are one more than the largest number, and count as that.
pub(super) fn size(range: &Range, never: &[(u128, u128)]) -> u128 {
    let gaps = gaps(to_bits(range.start), to_bits(range.end), never);
    gaps.into_iter().map(length).fold(0, u128::saturating_add)
}

/// Returns the number of addresses from the first to the last one.
fn length((first, last): (u128, u128)) -> u128 {
    (last - first).saturating_add(1)
}

/// Merges sorted parts that overlap or are adjacent.
fn merged(parts: Vec<(u128, u128)>) -> Vec<(u128, u128)> {
    let mut merged: Vec<(u128, u128)> = Vec::new();
    for (first, last) in parts {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = (*end).max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// Returns the gaps between the parts, from `start` to `end`.
fn gaps(start: u128, end: u128, parts: &[(u128, u128)]) -> Vec<(u128, u128)> {
    let mut gaps = Vec::new();
    let mut next = Some(start);
    for (first, last) in parts {
        if let Some(from) = next.filter(|from| from < first) {
            gaps.push((from, first - 1));
        }
        next = last.checked_add(1);
    }
    gaps.extend(next.filter(|from| *from <= end).map(|from| (from, end)));
    gaps
}

/// Converts a count; saturates.
fn narrow(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::usage;
    use super::*;
    use crate::ipam::Owner;

    fn config(ipam: Value) -> Config {
        let config = json!({"name": "lan", "ipam": ipam});
        Config::parse(config.as_object().unwrap(), None).unwrap()
    }

    fn held(addresses: &[&str]) -> Vec<Held> {
        let owner = || Some(Owner { container_id: "c".into(), ifname: "net1".into() });
        addresses.iter().map(|text| Held { address: text.parse().unwrap(), owner: owner() }).collect()
    }

    fn row(range: &RangeUse) -> (String, u64, u64, u64, u64, String, u64) {
        let longest = range.longest_free.map_or_else(|| "-".into(), |first| first.to_string());
        let span = format!("{}-{}", range.first, range.last);
        (span, range.size, range.used, range.free, range.free_runs, longest, range.longest_free_size)
    }

    /// Rows: HLC-exclude.
    #[test]
    fn a_range_has_what_can_be_given_without_gateway_and_excluded_networks() {
        let ipam = json!({"type": "host-local", "exclude": ["10.0.0.8/30"], "subnet": "10.0.0.0/28"});
        let of = |addresses: &[&str]| row(&survey(&config(ipam.clone()), held(addresses)).ranges[0]);
        let span = || "10.0.0.1-10.0.0.14".to_owned();
        // .1 is the gateway, .8 to .11 are excluded.
        assert_eq!(of(&[]), (span(), 9, 0, 9, 2, "10.0.0.2".into(), 6));
        assert_eq!(of(&["10.0.0.4"]), (span(), 9, 1, 8, 3, "10.0.0.12".into(), 3));
        // Those that are never given, or lie elsewhere, do not count.
        assert_eq!(
            of(&["10.0.0.1", "10.0.0.9", "10.0.1.4", "fd00::4"]),
            (span(), 9, 0, 9, 2, "10.0.0.2".into(), 6)
        );
        let all = ["2", "3", "4", "5", "6", "7", "12", "13", "14"].map(|last| format!("10.0.0.{last}"));
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        assert_eq!(of(&all), (span(), 9, 9, 0, 0, "-".into(), 0));
    }

    #[test]
    fn a_large_range_is_counted_as_far_as_numbers_go() {
        let ipam = json!({"type": "host-local", "ranges": [
            [{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.10", "rangeEnd": "10.0.0.12"}], [{"subnet": "fd00::/32"}]
        ]});
        let ranges = survey(&config(ipam), held(&["10.0.0.11", "fd00::7"])).ranges;
        assert_eq!(row(&ranges[0]), ("10.0.0.10-10.0.0.12".into(), 3, 1, 2, 2, "10.0.0.12".into(), 1));
        let (_, size, used, free, runs, longest, size_of_longest) = row(&ranges[1]);
        assert_eq!((size, used, free, runs), (u64::MAX, 1, u64::MAX, 2));
        assert_eq!((longest.as_str(), size_of_longest, ranges[1].set), ("fd00::8", u64::MAX, 1));
    }

    /// Rows: HLC-exclude.
    #[test]
    fn all_of_a_family_has_what_is_not_excluded() {
        let of = |exclude: &[&str], addresses: &[&str]| {
            let ipam =
                json!({"type": "host-local", "subnet": "::/0", "rangeStart": "::", "exclude": exclude});
            let config = config(ipam);
            let reserved: Vec<IpAddr> = addresses.iter().map(|it| it.parse().unwrap()).collect();
            let of = usage::of(&config, &reserved);
            let ranges = survey(&config, held(addresses)).ranges;
            let RangeUse { size, used, free, free_runs, longest_free_size, .. } = ranges[0];
            (
                of.iter().map(|it| (it.size, it.used)).collect::<Vec<_>>(),
                [size, used, free, free_runs, longest_free_size],
            )
        };
        assert_eq!(of(&["::/0"], &["::7"]), (vec![(0, 0)], [0, 0, 0, 0, 0]));
        // All but the gateway.
        assert_eq!(of(&[], &[]), (vec![(u128::MAX, 0)], [u64::MAX, 0, u64::MAX, 2, u64::MAX]));
        let half = u128::MAX / 2;
        assert_eq!(of(&["8000::/1"], &["::7"]), (vec![(half, 1)], [u64::MAX, 1, u64::MAX, 3, u64::MAX]));
    }

    #[test]
    fn the_whole_of_a_family_does_not_overflow() {
        assert_eq!(gaps(0, u128::MAX, &[]), [(0, u128::MAX)]);
        assert_eq!(gaps(0, u128::MAX, &[(5, u128::MAX)]), [(0, 4)]);
        assert_eq!(merged(vec![(0, 3), (4, 5), (5, 9), (11, 11)]), [(0, 9), (11, 11)]);
    }
}
