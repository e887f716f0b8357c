//! Rates: the generic cell rate algorithm (ITU-T I.371, annex A) with one word of state.
//!
//! The word is the time at which the next unit would arrive if all came exactly at the rate. A packet passes and
//! advances that time if the time is not further ahead of the clock than the tolerance. There is no refill and no
//! lock: one compare-and-exchange of the word is the whole update.

/// A rate, and its current use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Rate {
    /// Theoretical arrival time of the next unit, nanoseconds of the kernel's monotonic clock.
    pub arrival: u64,
    /// Nanoseconds between two units, in units of 2^-[`Rate::FRACTION_BITS`]; 0: no limit.
    pub interval: u64,
    /// How far ahead of the clock `arrival` may be, nanoseconds.
    pub tolerance: u64,
}

/// The one value of map `na_time`: the time of a clock at a timer tick. Only the programs use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Reading {
    /// The tick, jiffies.
    pub tick: u64,
    /// Nanoseconds of the kernel's monotonic clock.
    pub time: u64,
    /// The whole seconds of `time`: a processor divides slowly.
    pub second: u64,
}

/// Value of `na_limit`: the limits of one attachment. All zero: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Limits {
    /// Bytes sent by the pod.
    pub from_pod: Rate,
    /// Bytes received by the pod.
    pub to_pod: Rate,
    /// Flows that are entered into the flow table at the attachment's hooks.
    pub flows: Rate,
    /// Records of new flows.
    pub flow_records: Rate,
    /// Records of drops.
    pub drop_records: Rate,
}

const _: () = {
    assert!(size_of::<Rate>() == 24);
    assert!(size_of::<Limits>() == 120);
    assert!(size_of::<Reading>() == 24);
};

impl Rate {
    /// Bits of [`Rate::interval`] below the point.
    pub const FRACTION_BITS: u32 = 16;
    /// No limit.
    pub const NONE: Self = Self { arrival: 0, interval: 0, tolerance: 0 };
    /// The slowest rate: with it the largest packet (2^20 bytes) still does not overflow.
    pub const SLOWEST: u64 = 100;

    /// `per_second` units (at least [`Rate::SLOWEST`], 0: no limit), of which `burst` may come at once.
    pub const fn new(per_second: u64, burst: u64) -> Self {
        if per_second == 0 {
            return Self::NONE;
        }
        let per_second = if per_second < Self::SLOWEST { Self::SLOWEST } else { per_second };
        let interval = (1_000_000_000_u64 << Self::FRACTION_BITS) / per_second;
        // A rate too fast for the fraction is as good as unlimited, but must not become 0, which means none.
        let interval = if interval == 0 { 1 } else { interval };
        let tolerance = (burst as u128 * interval as u128) >> Self::FRACTION_BITS;
        let tolerance = if tolerance > u64::MAX as u128 / 4 { u64::MAX / 4 } else { tolerance as u64 };
        Self { arrival: 0, interval, tolerance }
    }

    /// Whether there is a limit.
    #[inline(always)]
    pub const fn is_limited(&self) -> bool {
        self.interval != 0
    }

    /// Nanoseconds that `units` (at most 2^20) use up.
    #[inline(always)]
    pub const fn cost(&self, units: u32) -> u64 {
        (units as u64 * self.interval) >> Self::FRACTION_BITS
    }

    /// The rate for one of two parties that charge the same word: it is admitted only up to half of the burst. However many units
    /// it asks for, the other party has the rest of the burst, and each further unit before it does.
    #[inline(always)]
    pub const fn reserving(self) -> Self {
        Self { tolerance: self.tolerance / 2, ..self }
    }

    /// The new [`Rate::arrival`] if `units` pass at `now`; `None`: they are too early. A packet larger than the burst
    /// passes when there is no debt and leaves one, so that no burst is too small for any packet.
    #[inline(always)]
    pub const fn admit(&self, arrival: u64, units: u32, now: u64) -> Option<u64> {
        if arrival > now + self.tolerance {
            return None;
        }
        let from = if arrival > now { arrival } else { now };
        Some(from + self.cost(units))
    }
}

/// Bytes that a packet occupies on the wire: a segmentation-offloaded one with segments of `segment` bytes counts its
/// headers once for each. `headers`: their length, link layer included; `segment`: 0 for a whole packet.
#[inline(always)]
pub const fn wire_length(length: u32, headers: u32, segment: u32) -> u32 {
    if segment == 0 || length <= headers {
        return length;
    }
    let segments = (length - headers).div_ceil(segment);
    length + (segments - 1) * headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Units that pass when `units` are offered at each of `times`.
    fn passed(rate: Rate, offers: &[(u64, u32)]) -> Vec<u32> {
        let mut arrival = 0;
        offers
            .iter()
            .map(|(now, units)| match rate.admit(arrival, *units, *now) {
                Some(next) => {
                    arrival = next;
                    *units
                }
                None => 0,
            })
            .collect()
    }

    #[test]
    fn without_a_rate_everything_passes() {
        assert!(!Rate::new(0, 0).is_limited());
        assert_eq!(Rate::new(0, 9), Rate::NONE);
        assert_eq!(Rate::NONE.admit(0, u32::MAX, 5), Some(5));
    }

    #[test]
    fn a_burst_passes_at_once_and_the_rest_at_the_rate() {
        let rate = Rate::new(1000, 3);
        let at_once = vec![(1_000_000_000, 1); 10];
        // Three units of burst, and the one that finds the bucket just empty.
        assert_eq!(passed(rate, &at_once).iter().sum::<u32>(), 4);
        let later: Vec<_> =
            at_once.into_iter().chain((1..=10).map(|ms| (1_000_000_000 + ms * 1_000_000, 1))).collect();
        assert_eq!(passed(rate, &later).iter().sum::<u32>(), 14);
    }

    #[test]
    fn who_reserves_leaves_half_of_the_burst_and_the_rate_to_the_other() {
        let (own, others) = (Rate::new(1000, 10), Rate::new(1000, 10).reserving());
        let mut arrival = 0;
        let mut pass = |rate: Rate, now| {
            let next = rate.admit(arrival, 1, now);
            arrival = next.unwrap_or(arrival);
            u32::from(next.is_some())
        };
        // The others ask twenty times for each time that the own party does.
        let mut passed = [0, 0];
        for ms in 0..100 {
            let now = 1_000_000_000 + ms * 1_000_000;
            passed[0] += (0..20).map(|_| pass(others, now)).sum::<u32>();
            passed[1] += pass(own, now);
        }
        // Of a hundred units that come at the rate, and a burst of ten: each that the own party has asked for.
        assert_eq!(passed, [6, 100]);
    }

    #[test]
    fn a_packet_larger_than_the_burst_is_paid_for_afterwards() {
        let rate = Rate::new(1_000_000, 10);
        let offers = [(0, 1000), (500_000, 1), (989_000, 1), (990_000, 1)];
        assert_eq!(passed(rate, &offers), [1000, 0, 0, 1]);
    }

    #[test]
    fn headers_count_once_for_each_segment() {
        let cases = [
            (1514, 54, 0, 1514),
            (54, 54, 1460, 54),
            (1514, 54, 1460, 1514),
            (1515, 54, 1460, 1569),
            (54 + 2 * 1460, 54, 1460, 2 * 1514),
            (54 + 44 * 1460, 54, 1460, 44 * 1514),
        ];
        for (length, headers, segment, expected) in cases {
            assert_eq!(wire_length(length, headers, segment), expected, "{length} of {segment}");
        }
    }

    proptest! {
        /// In any window at most the burst, the rate times the window, and one packet pass.
        #[test]
        fn no_window_exceeds_rate_and_burst(
            per_second in 100u64..20_000_000_000,
            burst in 0u64..1_000_000,
            offers in proptest::collection::vec((0u64..2_000_000, 1u32..65_536), 1..200),
            window in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let rate = Rate::new(per_second, burst);
            let mut now = 1_000_000_000;
            let offers: Vec<_> = offers.into_iter().map(|(gap, units)| { now += gap; (now, units) }).collect();
            let passed = passed(rate, &offers);
            let (a, b) = (window.0.index(offers.len()), window.1.index(offers.len()));
            let (first, last) = (a.min(b), a.max(b));
            let sum: u128 = passed[first..=last].iter().map(|units| u128::from(*units)).sum();
            let seconds = u128::from(offers[last].0 - offers[first].0);
            // The rate that the interval's fraction can express, and a nanosecond of rounding for each packet.
            let exact = (1_000_000_000u128 << 16).div_ceil(u128::from(rate.interval));
            let rounding = (offers.len() as u128 + 2) * exact / 1_000_000_000 + 2;
            let most = u128::from(burst) + exact * seconds / 1_000_000_000 + u128::from(65_536u32) + rounding;
            prop_assert!(sum <= most, "{} > {}", sum, most);
        }

        /// A sender that always has data gets the rate: within 1 % over ten seconds of packets.
        #[test]
        fn a_greedy_sender_gets_the_whole_rate(per_second in 10_000u64..10_000_000_000, packet in 64u32..1514) {
            let rate = Rate::new(per_second, per_second / 100);
            let step = (u64::from(packet) * 1_000_000_000 / per_second / 2).max(1);
            let offers: Vec<_> = (0..4000u64).map(|n| (1 + n * step, packet)).collect();
            let sum: u64 = passed(rate, &offers).iter().map(|units| u64::from(*units)).sum();
            let exact = per_second as u128 * u128::from(4000 * step) / 1_000_000_000;
            prop_assert!(u128::from(sum) + u128::from(packet) * 2 >= exact * 99 / 100, "{} of {}", sum, exact);
        }
    }
}
