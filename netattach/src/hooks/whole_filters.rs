//! The devices of the node whose filters were found as they should be, and of which the kernel has told nothing
//! since. Listing a device's filters takes two dumps, which are most of what a look at an attachment costs.
//!
//! The kernel tells of each filter and queueing discipline that comes, changes or goes, and that it has dropped
//! notifications. So the lists are read again where it has told of something, everywhere if notifications were
//! lost, and otherwise after [`TRUST`].
//!
//! The socket is opened when it is first of use: where all programs run by tcx, or in pods, nobody would read it, and
//! what the kernel tells would fill its queue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error_chain::Chain;
use crate::netlink::FilterChanges;
use crate::netns::{Netns, within};

/// How long the kernel's word is relied on: it tells of all changes, so nothing should be found then.
const TRUST: Duration = Duration::from_secs(15 * 60);

/// A device, and the number of the first filter that was looked for there.
pub(super) type Filtered = (u32, u32);

/// What is known of devices' filters.
#[derive(Debug)]
pub(crate) struct WholeFilters(Mutex<State>);

#[derive(Debug)]
struct State {
    changes: Changes,
    known: Known,
}

/// The kernel's notifications.
#[derive(Debug)]
enum Changes {
    /// Nobody has asked yet. The namespace of the devices: the thread that asks first may be in another one.
    Unopened(Netns),
    Open(FilterChanges),
    /// The kernel does not tell of changes, so nothing is known.
    Untold,
}

impl Changes {
    /// Returns the notifications, which are open from now on.
    fn open(&mut self) -> Option<&mut FilterChanges> {
        if let Self::Unopened(netns) = self {
            *self = match within(netns, FilterChanges::open) {
                Ok(Ok(changes)) => Self::Open(changes),
                Ok(Err(error)) => Self::untold(&error),
                Err(error) => Self::untold(&error),
            };
        }
        match self {
            Self::Open(changes) => Some(changes),
            Self::Unopened(_) | Self::Untold => None,
        }
    }

    fn untold(error: &(dyn std::error::Error + 'static)) -> Self {
        tracing::warn!(error = %Chain(error), "no notifications of filters; all are listed in each look at attachments");
        Self::Untold
    }
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
    pub(crate) fn of_namespace() -> Self {
        let changes = Netns::current().map_or_else(|error| Changes::untold(&error), Changes::Unopened);
        Self(Mutex::new(State { changes, known: Known::default() }))
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
        // No lock is poisoned: a panic ends the agent.
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let told = {
            let mut state = lock();
            let State { changes, known } = &mut *state;
            // Read, or opened, before the filters: of a change meanwhile the kernel's word is in the socket.
            changes.open().map(|changes| {
                known.forget(changes.changed().as_ref());
                (known.told, known.is_whole(device, now))
            })
        };
        if let Some((_, true)) = told {
            return Ok(None);
        }
        let lack = ask()?;
        if let (Some((told, _)), None) = (told, &lack) {
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
        let filters = within(&netns, WholeFilters::of_namespace).unwrap();
        // Nobody would read the socket. It is opened below, by a thread that is in another namespace.
        assert!(matches!(filters.0.lock().unwrap().changes, Changes::Unopened(_)));
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

    #[test]
    fn where_the_kernel_tells_nothing_all_devices_are_asked_for_each_time() {
        let state = State { changes: Changes::Untold, known: Known::default() };
        let filters = WholeFilters(Mutex::new(state));
        let mut asked = 0;
        for lack in [None, Some(5), None] {
            let found: Result<_, u32> = filters.lack(ONE, || {
                asked += 1;
                Ok(lack)
            });
            assert_eq!(found, Ok(lack));
        }
        assert_eq!(asked, 3);
    }
}
