//! The bandwidth of an attachment: how its devices are paced and when its programs drop the excess.

use std::time::Duration;

use crate::bpf::Rate;
use crate::npwg::selection::Bandwidth;
use crate::spec::Pace;

/// How long a packet may wait while paced: the capacity of the reference plugin's queue.
const LATENCY: Duration = Duration::from_millis(25);

/// Tolerance for packets that the pod's end has paced: they come in bursts when a processor was busy.
const JITTER: Duration = Duration::from_millis(100);

/// The minimum tolerance without pacing. A TCP sender that has to wait for its retransmission timer is silent for at
/// least two tenths of a second (Linux, `TCP_RTO_MIN`), which this covers.
const UNPACED: Duration = Duration::from_millis(300);

/// Bytes of a frame beyond its interface's MTU: Ethernet header, two VLAN tags.
const HEADERS: u32 = 14 + 2 * 4;

/// Longest packet that a sender leaves to segmentation offload; a queue always has room for one.
const SEGMENTED: u64 = 64 << 10;

/// The bandwidth of an attachment, and the size of its frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BandwidthLimit {
    bandwidth: Bandwidth,
    /// MTU of the interface in bytes.
    mtu: u32,
    /// Whether a device of the node sends to this pod alone, so that packets to it can be queued there.
    paced_to_pod: bool,
}

impl BandwidthLimit {
    /// With the MTU of the interface in bytes. `paced_to_pod`: a device of the node sends to this pod alone.
    pub(super) fn new(bandwidth: Bandwidth, mtu: u32, paced_to_pod: bool) -> Self {
        Self { bandwidth, mtu, paced_to_pod }
    }

    /// Whether packets to the pod can be queued on a device of the node.
    pub(super) fn is_paced_to_pod(&self) -> bool {
        self.paced_to_pod
    }

    /// The limit on received traffic.
    pub(super) fn received(&self) -> Option<DirectionLimit> {
        DirectionLimit::of(self.bandwidth.ingress_rate, self.bandwidth.ingress_burst, self.mtu)
    }

    /// The limit on sent traffic.
    pub(super) fn sent(&self) -> Option<DirectionLimit> {
        DirectionLimit::of(self.bandwidth.egress_rate, self.bandwidth.egress_burst, self.mtu)
    }
}

/// Returns the paces of the received and the sent traffic of a pod if only the kernel's queues enforce a
/// limit. `mtu` is the interface's, in bytes.
pub fn paces(bandwidth: Bandwidth, mtu: u32) -> (Option<Pace>, Option<Pace>) {
    let limit = BandwidthLimit::new(bandwidth, mtu, true);
    (limit.received().map(DirectionLimit::pace), limit.sent().map(DirectionLimit::pace))
}

/// One direction's limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DirectionLimit {
    /// Bytes per second.
    rate: u64,
    /// Bytes that may pass at once.
    burst: u64,
}

impl DirectionLimit {
    /// Converts from bits. The burst is at least one frame, as a token bucket drops packets larger than its burst.
    fn of(rate: Option<u64>, burst: Option<u64>, mtu: u32) -> Option<Self> {
        let longest = u64::from(mtu.saturating_add(HEADERS));
        rate.zip(burst).map(|(rate, burst)| Self { rate: rate / 8, burst: (burst / 8).max(longest) })
    }

    /// The pace of the sending device. The queue's limit is the time it takes to empty.
    pub(super) fn pace(self) -> Pace {
        let bytes = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        let queue = self.during(LATENCY).saturating_add(self.burst).saturating_add(SEGMENTED);
        Pace { rate: self.rate, burst: bytes(self.burst), queue: bytes(queue) }
    }

    /// Packets to the pod above this rate are dropped. The program sees packets before they are paced: it passes as
    /// many as the burst and the queue cover, so that the queue never overflows and every drop has a reason.
    pub(super) fn received(self, paced: bool) -> Rate {
        if paced { self.with(self.burst.saturating_add(self.during(LATENCY))) } else { self.unpaced() }
    }

    /// Packets from the pod above this rate are dropped. Its own end paces them, unless the pod has removed the pacing.
    pub(super) fn sent(self, paced: bool) -> Rate {
        let unpaced = self.unpaced();
        let paced_tolerance = self.with(self.burst.saturating_add(self.during(JITTER)));
        if paced && paced_tolerance.tolerance > unpaced.tolerance { paced_tolerance } else { unpaced }
    }

    fn unpaced(self) -> Rate {
        self.with(self.burst.max(self.during(UNPACED)))
    }

    fn with(self, burst: u64) -> Rate {
        Rate::new(self.rate, burst)
    }

    /// The number of bytes in a time.
    fn during(self, time: Duration) -> u64 {
        let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        (self.rate / 1000).saturating_mul(milliseconds)
    }
}

#[cfg(test)]
mod tests {
    use crate::enforce::bandwidth::*;

    fn limit(rate: u64, burst: u64) -> DirectionLimit {
        DirectionLimit::of(Some(rate), Some(burst), 1500).unwrap()
    }

    #[test]
    fn a_direction_without_rate_has_no_limit() {
        let bandwidth = Bandwidth {
            ingress_rate: Some(8_000_000),
            ingress_burst: Some(800_000),
            egress_rate: None,
            egress_burst: None,
        };
        let limited = BandwidthLimit::new(bandwidth, 1500, true);
        assert_eq!(limited.received(), Some(DirectionLimit { rate: 1_000_000, burst: 100_000 }));
        assert_eq!(limited.sent(), None);
    }

    #[test]
    fn a_burst_holds_the_longest_frame() {
        assert_eq!(limit(8_000_000, 8).burst, 1522);
        assert_eq!(limit(8_000_000, 80_000).burst, 10_000);
    }

    #[test]
    fn the_queue_is_bounded_by_time_and_holds_a_segmented_packet() {
        let expected = Pace { rate: 1_000_000, burst: 100_000, queue: 25_000 + 100_000 + 65_536 };
        assert_eq!(limit(8_000_000, 800_000).pace(), expected);
        let fastest = limit(u64::MAX, u64::MAX).pace();
        assert_eq!(fastest, Pace { rate: u64::MAX / 8, burst: u32::MAX, queue: u32::MAX });
    }

    #[test]
    fn tolerances_leave_room_for_the_queue_and_for_heaps() {
        let short = limit(8_000_000, 80_000);
        assert_eq!(short.received(true), Rate::new(1_000_000, 10_000 + 25_000));
        assert_eq!(short.received(false), Rate::new(1_000_000, 300_000));
        assert_eq!(short.sent(true), Rate::new(1_000_000, 300_000));
        assert_eq!(short.sent(false), Rate::new(1_000_000, 300_000));
        let long = limit(8_000_000, 8_000_000);
        assert_eq!(long.received(true), Rate::new(1_000_000, 1_025_000));
        assert_eq!(long.received(false), Rate::new(1_000_000, 1_000_000));
        assert_eq!(long.sent(true), Rate::new(1_000_000, 1_100_000));
        assert_eq!(long.sent(false), Rate::new(1_000_000, 1_000_000));
    }
}
