//! What was told lately of packets and flows: the last events, numbered, for whoever asks.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::bpf::{Ended, Record};

/// Something that was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The programs, of a packet that opened a flow or was dropped.
    Packet(Record),
    /// The flow table, of a flow that is over.
    Ended(Ended),
}

/// How many events are kept.
const KEPT: usize = 8192;

/// The last events.
#[derive(Debug, Default)]
pub struct Observer {
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    events: VecDeque<Event>,
    /// Number of the first in `events`.
    first: u64,
    /// Ended flows that were too many to be handed over.
    untold: u64,
}

/// Events from some number on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// What to ask for next.
    pub next: u64,
    /// How many of those asked for are no longer there.
    pub missed: u64,
    /// How many ended flows nobody was told of since the agent started.
    pub untold: u64,
}

impl Observer {
    /// Adds events; the oldest give way. `untold`: ended flows that are not among them.
    pub fn take_in(&self, events: impl Iterator<Item = Event>, untold: u64) {
        let mut recent = self.lock();
        recent.untold += untold;
        for event in events {
            if recent.events.len() == KEPT {
                recent.events.pop_front();
                recent.first += 1;
            }
            recent.events.push_back(event);
        }
    }

    /// At most `most` events from number `from` on; without a number, the last ones.
    pub fn from(&self, from: Option<u64>, most: usize) -> Batch {
        let recent = self.lock();
        let end = recent.first + recent.events.len() as u64;
        let from = from.unwrap_or_else(|| end.saturating_sub(most as u64).max(recent.first));
        let start = from.max(recent.first).min(end);
        // Below the length, which is a usize.
        let events: Vec<Event> =
            recent.events.iter().skip((start - recent.first) as usize).take(most).copied().collect();
        let (next, missed) = (start + events.len() as u64, start.saturating_sub(from));
        Batch { events, next, missed, untold: recent.untold }
    }

    fn lock(&self) -> MutexGuard<'_, Recent> {
        // A panic between two pushes leaves a list that is as good as any.
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

    #[test]
    fn a_reader_gets_each_record_once_and_is_told_what_it_missed() {
        let observer = Observer::default();
        let batch = |events: Vec<Event>, next, missed, untold| Batch { events, next, missed, untold };
        assert_eq!(observer.from(None, 10), batch(vec![], 0, 0, 0));
        observer.take_in((0..5).map(event), 0);
        assert_eq!(observer.from(None, 2), batch(vec![event(3), event(4)], 5, 0, 0));
        assert_eq!(observer.from(Some(1), 2), batch(vec![event(1), event(2)], 3, 0, 0));
        assert_eq!(observer.from(Some(5), 2), batch(vec![], 5, 0, 0));
        observer.take_in((5..5 + KEPT as u64).map(event), 7);
        assert_eq!(observer.from(Some(3), 1), batch(vec![event(5)], 6, 2, 7));
        assert_eq!(observer.from(Some(u64::MAX), 1).missed, 0, "an agent that was restarted counts anew");
    }
}
