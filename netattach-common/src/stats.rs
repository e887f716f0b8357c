//! Counters of one attachment, one copy per CPU (map `na_stat`).

use crate::DropReason;

/// Packets and their bytes (Ethernet header included; a segmentation-offloaded packet counts once).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Traffic {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Counters of one attachment. Slot 0 of the map counts packets of devices without an attachment, and of numbers
/// without a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Stats {
    /// Sent by the pod and allowed at its device. Packets that the node's packet filter drops later, by the policies
    /// behind the node's translation, are counted here and in [`drops`](Self::drops).
    pub from_pod: Traffic,
    /// Received by the pod.
    pub to_pod: Traffic,
    /// Sent by the pod and dropped at its device.
    pub dropped_from_pod: Traffic,
    /// Dropped on the way to the pod.
    pub dropped_to_pod: Traffic,
    /// Flows entered into the flow table.
    pub new_flows: u64,
    /// Flows that were displaced early, because the attachment entered more than it has places for.
    pub flows_displaced: u64,
    /// Records that were not written because the attachment exceeded its share.
    pub records_withheld: u64,
    /// Records that were not written because earlier ones had not been read yet.
    pub records_lost: u64,
    /// Dropped packets by [`DropReason`] number, wherever they were dropped.
    pub drops: [u64; DropReason::SLOTS],
}

const _: () = assert!(size_of::<Stats>() == 352);

impl Default for Stats {
    fn default() -> Self {
        let none = Traffic { packets: 0, bytes: 0 };
        Self {
            from_pod: none,
            to_pod: none,
            dropped_from_pod: none,
            dropped_to_pod: none,
            new_flows: 0,
            flows_displaced: 0,
            records_withheld: 0,
            records_lost: 0,
            drops: [0; DropReason::SLOTS],
        }
    }
}

impl Stats {
    /// Adds another CPU's counters.
    pub fn add(&mut self, other: &Self) {
        for (total, part) in [
            (&mut self.from_pod, &other.from_pod),
            (&mut self.to_pod, &other.to_pod),
            (&mut self.dropped_from_pod, &other.dropped_from_pod),
            (&mut self.dropped_to_pod, &other.dropped_to_pod),
        ] {
            total.packets = total.packets.wrapping_add(part.packets);
            total.bytes = total.bytes.wrapping_add(part.bytes);
        }
        self.new_flows = self.new_flows.wrapping_add(other.new_flows);
        self.flows_displaced = self.flows_displaced.wrapping_add(other.flows_displaced);
        self.records_withheld = self.records_withheld.wrapping_add(other.records_withheld);
        self.records_lost = self.records_lost.wrapping_add(other.records_lost);
        for (total, part) in self.drops.iter_mut().zip(other.drops) {
            *total = total.wrapping_add(part);
        }
    }

    /// The reasons for which packets were dropped, with their counts.
    pub fn dropped(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL
            .iter()
            .map(|reason| (*reason, self.drops[*reason as usize]))
            .filter(|(_, packets)| *packets > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adding_sums_every_field() {
        let mut one = Stats {
            new_flows: 1,
            flows_displaced: 2,
            records_withheld: 20,
            records_lost: 30,
            ..Stats::default()
        };
        one.from_pod = Traffic { packets: 3, bytes: 4 };
        one.to_pod = Traffic { packets: 5, bytes: 6 };
        one.dropped_from_pod = Traffic { packets: 7, bytes: 8 };
        one.dropped_to_pod = Traffic { packets: 9, bytes: 10 };
        one.drops[DropReason::Malformed as usize] = 11;
        let mut two = one;
        two.add(&one);
        let mut expected = Stats {
            new_flows: 2,
            flows_displaced: 4,
            records_withheld: 40,
            records_lost: 60,
            ..Stats::default()
        };
        expected.from_pod = Traffic { packets: 6, bytes: 8 };
        expected.to_pod = Traffic { packets: 10, bytes: 12 };
        expected.dropped_from_pod = Traffic { packets: 14, bytes: 16 };
        expected.dropped_to_pod = Traffic { packets: 18, bytes: 20 };
        expected.drops[3] = 22;
        assert_eq!(two, expected);
        assert_eq!(two.dropped().collect::<Vec<_>>(), [(DropReason::Malformed, 22)]);
    }
}
