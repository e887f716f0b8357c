//! What the programs told lately: the last records, numbered, for whoever asks.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::bpf::Record;

/// How many records are kept.
const KEPT: usize = 8192;

/// The last records.
#[derive(Debug, Default)]
pub struct Observer {
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    records: VecDeque<Record>,
    /// Number of the first in `records`.
    first: u64,
}

/// Records from some number on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The records, oldest first.
    pub records: Vec<Record>,
    /// What to ask for next.
    pub next: u64,
    /// How many of those asked for are no longer there.
    pub missed: u64,
}

impl Observer {
    /// Adds records; the oldest give way.
    pub fn take_in(&self, records: impl Iterator<Item = Record>) {
        let mut recent = self.lock();
        for record in records {
            if recent.records.len() == KEPT {
                recent.records.pop_front();
                recent.first += 1;
            }
            recent.records.push_back(record);
        }
    }

    /// At most `most` records from number `from` on; without a number, the last ones.
    pub fn from(&self, from: Option<u64>, most: usize) -> Batch {
        let recent = self.lock();
        let end = recent.first + recent.records.len() as u64;
        let from = from.unwrap_or_else(|| end.saturating_sub(most as u64).max(recent.first));
        let start = from.max(recent.first).min(end);
        // Below the length, which is a usize.
        let records: Vec<Record> =
            recent.records.iter().skip((start - recent.first) as usize).take(most).copied().collect();
        Batch { next: start + records.len() as u64, missed: start.saturating_sub(from), records }
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

    fn record(time: u64) -> Record {
        Record {
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
        }
    }

    #[test]
    fn a_reader_gets_each_record_once_and_is_told_what_it_missed() {
        let observer = Observer::default();
        assert_eq!(observer.from(None, 10), Batch { records: vec![], next: 0, missed: 0 });
        observer.take_in((0..5).map(record));
        assert_eq!(observer.from(None, 2), Batch { records: vec![record(3), record(4)], next: 5, missed: 0 });
        assert_eq!(
            observer.from(Some(1), 2),
            Batch { records: vec![record(1), record(2)], next: 3, missed: 0 }
        );
        assert_eq!(observer.from(Some(5), 2), Batch { records: vec![], next: 5, missed: 0 });
        observer.take_in((5..5 + KEPT as u64).map(record));
        assert_eq!(observer.from(Some(3), 1), Batch { records: vec![record(5)], next: 6, missed: 2 });
        assert_eq!(observer.from(Some(u64::MAX), 1).missed, 0, "an agent that was restarted counts anew");
    }
}
