//! The devices of the node whose filters were found as they should be, and of which the kernel has told nothing
//! since. Listing a device's filters takes two dumps, which are most of what a look at an attachment costs.
//!
//! The kernel tells of each filter and queueing discipline that comes, changes or goes, and that it has dropped
//! notifications. So the lists are read again where it has told of something, everywhere if notifications were
//! lost, and otherwise after [`TRUST`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::netlink::FilterChanges;

/// How long the kernel's word is relied on: it tells of all changes, so nothing should be found then.
const TRUST: Duration = Duration::from_secs(15 * 60);

/// A device, and the number of the first filter that was looked for there.
pub(super) type Filtered = (u32, u32);

/// What is known of devices' filters. `None`: the kernel does not tell of changes, so nothing is known.
#[derive(Debug)]
pub(crate) struct WholeFilters(Option<Mutex<State>>);

#[derive(Debug)]
struct State {
    changes: FilterChanges,
    known: Known,
}

/// The devices, each with the time when its filters were listed.
#[derive(Debug, Default)]
struct Known {
    whole: BTreeMap<Filtered, Instant>,
    /// How often the kernel has told of changes.
    told: u64,
}

impl Known {
    /// Forgets the devices that the kernel has told of; `None`: all.
    fn forget(&mut self, changed: Option<&BTreeSet<u32>>) {
        match changed {
            Some(changed) if changed.is_empty() => return,
            Some(changed) => self.whole.retain(|(index, _), _| !changed.contains(index)),
            None => self.whole.clear(),
        }
        self.told += 1;
    }

    fn is_whole(&self, device: Filtered, now: Instant) -> bool {
        self.whole.get(&device).is_some_and(|listed| now.saturating_duration_since(*listed) < TRUST)
    }

    /// Notes a device that was listed after the kernel had told of changes that many times. If it has told of more
    /// since, and another thread has read that, it may have been of this device.
    fn note(&mut self, device: Filtered, told: u64, now: Instant) {
        if told == self.told {
            self.whole.insert(device, now);
        }
    }
}

impl WholeFilters {
    /// Nothing is known yet. To be called in the namespace of the devices.
    pub(crate) fn open() -> Self {
        let changes = FilterChanges::open().inspect_err(|error| {
            tracing::warn!(%error, "no notifications of filters; all are listed in each look at attachments");
        });
        Self(changes.ok().map(|changes| Mutex::new(State { changes, known: Known::default() })))
    }

    /// Returns what the filters of a device lack. Does not `ask` where they lacked nothing and have not changed.
    ///
    /// # Errors
    /// Those of `ask`.
    pub(super) fn lack<T, E>(
        &self,
        device: Filtered,
        ask: impl FnOnce() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        let Some(mutex) = &self.0 else { return ask() };
        // No lock is poisoned: a panic ends the agent.
        let lock = || mutex.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let told = {
            let mut state = lock();
            let State { changes, known } = &mut *state;
            // Read before the filters: of a change meanwhile the kernel's word is in the socket.
            known.forget(changes.changed().as_ref());
            if known.is_whole(device, now) {
                return Ok(None);
            }
            known.told
        };
        let lack = ask()?;
        if lack.is_none() {
            lock().known.note(device, told, now);
        }
        Ok(lack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Handle;
    use crate::netns::{Netns, within};

    const ONE: Filtered = (3, 1);
    const OTHER: Filtered = (4, 1);

    #[test]
    fn filters_are_listed_again_where_the_kernel_has_told_of_a_change_or_when_that_is_long_ago() {
        let now = Instant::now();
        let known = || {
            let mut known = Known::default();
            [ONE, (3, 2), OTHER].into_iter().for_each(|device| known.note(device, 0, now));
            known
        };
        let are_whole = |known: &Known, now| [ONE, (3, 2), OTHER].map(|device| known.is_whole(device, now));
        let told_of = |changed: Option<&[u32]>| {
            let mut known = known();
            known.forget(changed.map(|changed| changed.iter().copied().collect()).as_ref());
            are_whole(&known, now)
        };
        assert_eq!(told_of(Some(&[])), [true; 3]);
        assert_eq!(told_of(Some(&[3, 9])), [false, false, true]);
        assert_eq!(told_of(None), [false; 3]);
        assert_eq!(are_whole(&known(), now + TRUST), [false; 3]);
        assert!(!known().is_whole((5, 1), now));
    }

    #[test]
    fn what_was_listed_before_another_thread_read_of_a_change_is_not_known() {
        let (mut known, now) = (Known::default(), Instant::now());
        known.forget(Some(&[9].into()));
        known.note(ONE, 0, now);
        assert!(!known.is_whole(ONE, now));
        known.note(ONE, 1, now);
        assert!(known.is_whole(ONE, now));
    }

    #[test]
    fn a_device_that_lacks_something_is_asked_for_each_time_and_another_once_until_it_changes() {
        let netns = Netns::private().unwrap();
        let filters = within(&netns, WholeFilters::open).unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let loopback = handle.link("lo").unwrap().index;
        let mut asked = 0;
        let mut look = |lack: Result<Option<u32>, u32>| {
            let found = filters.lack((loopback, 1), || {
                asked += 1;
                lack
            });
            (found, asked)
        };
        assert_eq!(look(Err(7)), (Err(7), 1));
        assert_eq!(look(Ok(Some(5))), (Ok(Some(5)), 2));
        assert_eq!([look(Ok(None)), look(Ok(Some(5)))], [(Ok(None), 3); 2]);
        handle.ensure_filters(loopback, &[]).unwrap();
        assert_eq!(look(Ok(None)), (Ok(None), 4));
    }
}
