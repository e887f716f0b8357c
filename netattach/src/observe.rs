//! The latest events of packets and flows, with numbers, for readers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::bpf::{Ended, Record};

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A packet that opened a flow or was dropped, reported by the programs.
    Packet(Record),
    /// A flow that has ended, reported by the flow table.
    Ended(Ended),
}

impl Event {
    /// Time in nanoseconds of the monotonic clock.
    fn monotonic_ns(&self) -> u64 {
        match self {
            Self::Packet(record) => record.time,
            Self::Ended(ended) => u64::from(ended.at) * 1_000_000_000,
        }
    }
}

/// The same moment on the kernel's monotonic clock and on the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WallClock {
    /// Nanoseconds since the machine started.
    pub monotonic_ns: u64,
    /// Milliseconds since 1970.
    pub wall_ms: u64,
}

impl WallClock {
    fn wall_ms(self, at_ns: u64) -> u64 {
        self.wall_ms.saturating_sub(self.monotonic_ns.saturating_sub(at_ns) / 1_000_000)
    }
}

/// Number of events kept.
const KEPT: usize = 8192;

/// How long a reader waits for what has come since the last read: longer than a read takes on a node that works.
const FRESH: Duration = Duration::from_millis(200);

/// The latest events.
#[derive(Debug, Default)]
pub struct Observer {
    recent: Mutex<Recent>,
    /// Whether a reader has asked since the last [`Observer::was_asked`].
    asked: AtomicBool,
    /// Tells who takes events in that a reader waits for them, and the readers that they are there.
    wanted: Notify,
    taken: Notify,
}

#[derive(Debug, Default)]
struct Recent {
    /// Each with its wall-clock time, in milliseconds since 1970. The time is computed once: the two clocks are never
    /// read at the same moment, and a client that asks twice should see the same event, not two events a millisecond
    /// apart.
    events: VecDeque<(u64, Event)>,
    /// Number of the first entry in `events`.
    first: u64,
    /// Number of ended flows that were not reported, because there were too many.
    untold: u64,
}

/// Events from a given number on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The events, oldest first, with their times in milliseconds since 1970.
    pub events: Vec<(u64, Event)>,
    /// The number to request next.
    pub next: u64,
    /// The number of requested events that are no longer kept.
    pub missed: u64,
    /// The number of ended flows that were not reported since the agent started.
    pub untold: u64,
}

impl Observer {
    /// Adds events and drops the oldest. `untold`: number of ended flows that are not among them. `clock`: now.
    pub fn take_in(&self, events: impl Iterator<Item = Event>, untold: u64, clock: WallClock) {
        let mut recent = self.lock();
        recent.untold += untold;
        for event in events {
            if recent.events.len() == KEPT {
                recent.events.pop_front();
                recent.first += 1;
            }
            recent.events.push_back((clock.wall_ms(event.monotonic_ns()), event));
        }
        drop(recent);
        self.taken.notify_waiters();
    }

    /// Has events taken in at once, and waits until they are, for [`FRESH`] at most: between reads there may be a second.
    pub async fn refresh(&self) {
        let taken = self.taken.notified();
        self.asked.store(true, Ordering::Relaxed);
        self.wanted.notify_one();
        // Otherwise the reader gets what is there.
        let _ = tokio::time::timeout(FRESH, taken).await;
    }

    /// Waits until a reader wants events at once.
    pub async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// Returns at most `most` events from number `from` on; without a number, the last ones.
    pub fn from(&self, from: Option<u64>, most: usize) -> Batch {
        let recent = self.lock();
        let end = recent.first + recent.events.len() as u64;
        let from = from.unwrap_or_else(|| end.saturating_sub(most as u64).max(recent.first));
        let start = from.max(recent.first).min(end);
        // Below the length, which is a usize.
        let events: Vec<(u64, Event)> =
            recent.events.iter().skip((start - recent.first) as usize).take(most).copied().collect();
        let (next, missed) = (start + events.len() as u64, start.saturating_sub(from));
        Batch { events, next, missed, untold: recent.untold }
    }

    /// Whether a reader has asked for events since the last call of this function.
    pub fn was_asked(&self) -> bool {
        self.asked.swap(false, Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Recent> {
        // No lock is poisoned: a panic ends the agent.
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use netattach_common::{Address, Ip6, Port};

    use super::*;

    fn event(time: u64) -> Event {
        Event::Packet(Record {
            time,
            attachment: 1,
            ifindex: 2,
            ingress: 0,
            egress: 0,
            rule: 0,
            length: 60,
            source: Ip6::UNSPECIFIED,
            destination: Ip6::UNSPECIFIED,
            source_port: Port::NONE,
            destination_port: Port::NONE,
            ethertype: 0,
            vlan: 0,
            reason: 0,
            to_pod: 0,
            protocol: 0,
            flags: 0,
            parsed: 0,
            responder: 0,
            pad: [0; 2],
        })
    }

    /// A reader that comes between two reads has what is there read, and one that nobody reads for does not hang.
    #[tokio::test]
    async fn a_reader_has_events_taken_in_and_waits_for_them() {
        let observer = Observer::default();
        let clock = WallClock { monotonic_ns: 0, wall_ms: 0 };
        let reads = async {
            observer.wanted().await;
            tokio::task::yield_now().await;
            observer.take_in([event(7)].into_iter(), 0, clock);
        };
        tokio::join!(observer.refresh(), reads);
        assert_eq!(observer.from(None, 10).events.len(), 1);
        assert_eq!([observer.was_asked(), observer.was_asked()], [true, false]);
        let begun = tokio::time::Instant::now();
        observer.refresh().await;
        assert!(begun.elapsed() >= FRESH);
        // The wish is kept for who reads next.
        observer.wanted().await;
    }

    #[test]
    fn a_reader_gets_each_record_once_and_is_told_what_it_missed() {
        let observer = Observer::default();
        let clock = WallClock { monotonic_ns: 3_500_000, wall_ms: 1_000 };
        let batch = |events: Vec<(u64, Event)>, next, missed, untold| Batch { events, next, missed, untold };
        let event_at = |time| (1_000, event(time));
        assert_eq!(observer.from(None, 10), batch(vec![], 0, 0, 0));
        observer.take_in((0..5).map(|time| event(3_000_000 + time)), 0, clock);
        assert_eq!(observer.from(None, 2), batch(vec![event_at(3_000_003), event_at(3_000_004)], 5, 0, 0));
        assert_eq!(observer.from(Some(1), 2), batch(vec![event_at(3_000_001), event_at(3_000_002)], 3, 0, 0));
        assert_eq!(observer.from(Some(5), 2), batch(vec![], 5, 0, 0));
        // The time of an event does not change when the clock is set.
        let later = WallClock { monotonic_ns: 4_000_000, wall_ms: 2_000 };
        observer.take_in(std::iter::once(event(2_000_000)), 0, later);
        let told = observer.from(Some(4), 2);
        assert_eq!(told, batch(vec![event_at(3_000_004), (1_998, event(2_000_000))], 6, 0, 0));
        observer.take_in((0..KEPT as u64).map(|_| event(3_000_000)), 7, clock);
        assert_eq!(observer.from(Some(3), 1), batch(vec![event_at(3_000_000)], 7, 3, 7));
        assert_eq!(observer.from(Some(u64::MAX), 1).missed, 0, "an agent that was restarted counts anew");
    }
}
