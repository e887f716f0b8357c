//! Sums of the packet programs' counters by network, which only grow, although the counters of an
//! attachment end with it.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};

use super::catalogue;
use super::family::{Numbers, Values};
use crate::bpf::{DropReason, Stats, Traffic};
use crate::journal::JournalKey;

/// An attachment: the record of its sandbox, and its index there.
pub(super) type AttachmentKey = (JournalKey, u16);

/// Sums by network, and the counters of each attachment when they were last added.
#[derive(Debug, Default)]
pub(super) struct Totals {
    last: BTreeMap<AttachmentKey, Last>,
    /// Attachments that have ended, the first one first. They are kept for some time, as a failed
    /// detachment is retried.
    ended: VecDeque<AttachmentKey>,
    /// Bounded: by the number of networks that this node used ([`MOST_NETWORKS`]).
    sums: BTreeMap<String, Sum>,
    /// The number of the scrape.
    round: u64,
}

/// Most networks with a sum of their own.
const MOST_NETWORKS: usize = 1024;
/// Most ended attachments that are kept: without scrapes nothing else removes them.
const MOST_ENDED: usize = 1024;

/// The counters of an attachment when they were last added, the last scrape with the attachment, and
/// whether it has ended.
#[derive(Debug, Default, Clone)]
struct Last {
    counted: Counted,
    round: u64,
    ended: bool,
}

/// The summed part of an attachment's [`Stats`]. Most drop reasons have no packets.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Counted {
    to_pod: Traffic,
    from_pod: Traffic,
    new_flows: u64,
    displaced: u64,
    drops: Box<[(DropReason, u64)]>,
}

impl From<&Stats> for Counted {
    fn from(stats: &Stats) -> Self {
        let Stats { to_pod, from_pod, new_flows, flows_displaced, .. } = *stats;
        Self { to_pod, from_pod, new_flows, displaced: flows_displaced, drops: stats.dropped().collect() }
    }
}

impl Counted {
    fn dropped(&self, reason: DropReason) -> u64 {
        self.drops.iter().find(|(known, _)| *known == reason).map_or(0, |(_, packets)| *packets)
    }
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Sum {
    received: (u64, u64),
    sent: (u64, u64),
    new_flows: u64,
    displaced: u64,
    drops: BTreeMap<&'static str, u64>,
}

impl Totals {
    /// Adds what an attachment has counted since the last call.
    pub(super) fn add(&mut self, of: &AttachmentKey, network: &str, now: &Stats) {
        let now = Counted::from(now);
        let last = Last { counted: now.clone(), round: self.round, ended: false };
        let before = match self.last.get_mut(of) {
            Some(known) => Some(std::mem::replace(known, last)),
            None => self.last.insert(of.clone(), last),
        };
        if before.as_ref().is_some_and(|last| last.counted == now) {
            // The usual case.
            return;
        }
        let last = before.map(|last| last.counted).filter(|last| !is_reset(last, &now)).unwrap_or_default();
        let is_known = self.sums.contains_key(network) || self.sums.len() < MOST_NETWORKS;
        let sum = self.sums.entry(if is_known { network } else { catalogue::OTHER }.to_owned()).or_default();
        let since = |now: u64, last: u64| now.saturating_sub(last);
        sum.received.0 += since(now.to_pod.packets, last.to_pod.packets);
        sum.received.1 += since(now.to_pod.bytes, last.to_pod.bytes);
        sum.sent.0 += since(now.from_pod.packets, last.from_pod.packets);
        sum.sent.1 += since(now.from_pod.bytes, last.from_pod.bytes);
        sum.new_flows += since(now.new_flows, last.new_flows);
        sum.displaced += since(now.displaced, last.displaced);
        for (reason, packets) in &now.drops {
            *sum.drops.entry(reason.name()).or_default() += since(*packets, last.dropped(*reason));
        }
    }

    /// Adds what an ending attachment has counted since the last call.
    pub(super) fn add_last(&mut self, of: AttachmentKey, network: &str, now: &Stats) {
        self.add(&of, network, now);
        if let Some(last) = self.last.get_mut(&of) {
            last.ended = true;
        }
        self.ended.push_back(of);
        while self.ended.len() > MOST_ENDED {
            let first = self.ended.pop_front();
            // The attachment may exist again.
            if let Some(first) = first.filter(|of| self.last.get(of).is_some_and(|last| last.ended)) {
                self.last.remove(&first);
            }
        }
    }

    /// Records that an attachment exists, though its counters are not known.
    pub(super) fn mark_seen(&mut self, of: &AttachmentKey) {
        if let Some(last) = self.last.get_mut(of) {
            last.round = self.round;
        }
    }

    /// Ends a scrape: forgets attachments that were not in it, because they no longer exist. Their share of
    /// the sums stays.
    pub(super) fn end_of_scrape(&mut self) {
        let round = self.round;
        self.last.retain(|_, last| last.round == round);
        self.ended.retain(|of| self.last.contains_key(of));
        self.round += 1;
    }

    /// Returns the sums as metrics.
    pub(super) fn numbers(&self) -> [Numbers; 5] {
        let mut all = [
            &catalogue::PACKETS,
            &catalogue::BYTES,
            &catalogue::DROPS,
            &catalogue::NEW_FLOWS,
            &catalogue::DISPLACED,
        ]
        .map(Numbers::of);
        let [packets, bytes, drops, new_flows, displaced] = &mut all;
        for (network, sum) in &self.sums {
            let labels =
                |second: &'static str| -> Values { vec![Cow::Owned(network.clone()), second.into()] };
            for (direction, (count, size)) in [("received", sum.received), ("sent", sum.sent)] {
                packets.add(labels(direction), count as f64);
                bytes.add(labels(direction), size as f64);
            }
            for (reason, count) in &sum.drops {
                drops.add(labels(reason), *count as f64);
            }
            new_flows.add(vec![Cow::Owned(network.clone())], sum.new_flows as f64);
            displaced.add(vec![Cow::Owned(network.clone())], sum.displaced as f64);
        }
        all
    }
}

/// Whether the counters were reset: another attachment has the same record.
fn is_reset(last: &Counted, now: &Counted) -> bool {
    now.to_pod.packets < last.to_pod.packets
        || now.from_pod.packets < last.from_pod.packets
        || now.new_flows < last.new_flows
        || last.drops.iter().any(|(reason, packets)| now.dropped(*reason) < *packets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(container: &str) -> AttachmentKey {
        (JournalKey { container_id: container.into(), ifname: "eth0".into() }, 0)
    }

    fn counted(packets: u64) -> Stats {
        let mut stats = Stats::default();
        stats.to_pod.packets = packets;
        stats.to_pod.bytes = packets * 100;
        stats.drops[1] = packets;
        stats
    }

    fn received(totals: &Totals, network: &str) -> (u64, u64) {
        totals.sums.get(network).map(|sum| sum.received).unwrap_or_default()
    }

    #[test]
    fn sums_only_grow() {
        let mut totals = Totals::default();
        totals.add(&of("a"), "shop/lan", &counted(5));
        totals.add(&of("b"), "shop/lan", &counted(7));
        totals.add(&of("a"), "shop/lan", &counted(6));
        assert_eq!(received(&totals, "shop/lan"), (13, 1300));
        // The container is detached and another one has the same id.
        totals.end_of_scrape();
        totals.add(&of("a"), "shop/lan", &counted(6));
        totals.end_of_scrape();
        assert!(!totals.last.contains_key(&of("b")));
        totals.add(&of("b"), "shop/lan", &counted(2));
        assert_eq!(received(&totals, "shop/lan"), (15, 1500));
        // The same between two scrapes.
        totals.add(&of("a"), "shop/lan", &counted(1));
        assert_eq!(received(&totals, "shop/lan"), (16, 1600));
        let reasons: u64 = totals.sums["shop/lan"].drops.values().sum();
        assert_eq!(reasons, 16);
    }

    #[test]
    fn what_ended_is_counted_once_and_remembered_for_a_while_only() {
        let mut totals = Totals::default();
        totals.add(&of("a"), "shop/lan", &counted(5));
        totals.add_last(of("a"), "shop/lan", &counted(7));
        // The detachment has failed, and is retried.
        totals.add_last(of("a"), "shop/lan", &counted(8));
        assert_eq!(received(&totals, "shop/lan"), (8, 800));
        totals.add_last(of("b"), "shop/lan", &counted(1));
        totals.add(&of("b"), "shop/lan", &counted(2));
        for number in 0..2 * MOST_ENDED {
            totals.add_last(of(&number.to_string()), "shop/other", &counted(1));
        }
        assert_eq!((totals.ended.len(), totals.last.len()), (MOST_ENDED, MOST_ENDED + 1));
        assert!(totals.last.contains_key(&of("b")), "it was attached again");
        totals.end_of_scrape();
        totals.mark_seen(&of("b"));
        totals.end_of_scrape();
        assert_eq!((totals.ended.len(), totals.last.len()), (0, 1));
        totals.end_of_scrape();
        assert_eq!((totals.ended.len(), totals.last.len()), (0, 0));
    }

    #[test]
    fn networks_are_bounded() {
        let mut totals = Totals::default();
        for number in 0..MOST_NETWORKS + 3 {
            totals.add(&of(&number.to_string()), &format!("shop/{number}"), &counted(1));
        }
        assert_eq!(totals.sums.len(), MOST_NETWORKS + 1);
        assert_eq!(received(&totals, catalogue::OTHER), (3, 300));
    }
}
