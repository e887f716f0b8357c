//! An operation in the lanes that may have to wait for a resource that another container still holds: an
//! address that is being released is usually free within a moment, and the pod that takes over a name or an
//! address arrives in just that moment.
//!
//! The operation has failed and rolled back. It waits without a slot in the lanes and without a thread, for
//! that container only, and then starts over.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::agent::admission::scheduler::{Slot, Turns};
use crate::waits::{Crowded, Footprint, Place, Resource};

/// Total time that an operation waits for other containers: as long as for the lock of a pool.
const PATIENCE: Duration = Duration::from_secs(10);

/// An operation that has begun.
#[derive(Debug)]
pub(super) struct Operation {
    slot: Arc<Slot>,
    turns: Arc<Turns>,
    waits_for: Mutex<Option<String>>,
    held_by: Mutex<Option<String>>,
}

impl Operation {
    pub(in crate::agent) fn new(slot: Arc<Slot>, turns: Arc<Turns>) -> Arc<Self> {
        Arc::new(Self { slot, turns, waits_for: Mutex::default(), held_by: Mutex::default() })
    }

    /// Returns the container whose detachment the operation waits for.
    pub(super) fn waits_for(&self) -> Option<String> {
        // No lock is poisoned: a panic ends the agent.
        self.waits_for.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the container that holds the missing resource.
    pub(super) fn held_by(&self) -> Option<String> {
        let named = self.held_by.lock().unwrap_or_else(PoisonError::into_inner).clone();
        named.or_else(|| self.waits_for())
    }
}

impl Place for Operation {
    fn admit(&self, needs: &Footprint) -> Result<(), Crowded> {
        self.slot.admit(needs)
    }

    fn arrive(&self, resource: &Resource) {
        self.slot.arrive(resource);
    }

    fn depart(&self) {
        self.slot.depart();
    }

    fn leaving(&self) -> Vec<String> {
        self.turns.leaving()
    }

    fn put_off(&self, container: String) {
        *self.waits_for.lock().unwrap_or_else(PoisonError::into_inner) = Some(container);
    }

    fn held_by(&self, container: String) {
        *self.held_by.lock().unwrap_or_else(PoisonError::into_inner) = Some(container);
    }
}

/// The remaining time that an operation waits for other containers.
#[derive(Debug)]
pub(super) struct Patience {
    /// Total waiting time, counted from the first wait.
    whole: Duration,
    until: Option<Instant>,
}

impl Default for Patience {
    fn default() -> Self {
        Self { whole: PATIENCE, until: None }
    }
}

impl Patience {
    /// Waits until a container is detached. `false`: it was not detached in the remaining time.
    pub(in crate::agent) async fn wait(&mut self, turns: &Turns, container: &str) -> bool {
        let until = *self.until.get_or_insert_with(|| Instant::now() + self.whole);
        match turns.departure(container) {
            Some(departure) => tokio::time::timeout_at(until.into(), departure).await.is_ok(),
            // The container is detached already.
            None => Instant::now() < until,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn containers_that_leave_are_waited_for_within_one_patience() {
        let turns = Arc::new(Turns::default());
        let stays = turns.take("stays").unwrap();
        assert!(Patience::default().wait(&turns, "stays").await, "nothing is rolled back");
        stays.rolls_back();
        let leaves = turns.take("leaves").unwrap();
        leaves.rolls_back();
        let mut leaving = turns.leaving();
        leaving.sort();
        assert_eq!(leaving, ["leaves", "stays"]);
        let mut patience = Patience::default();
        let waited = async {
            tokio::task::yield_now().await;
            drop(leaves);
        };
        assert!(tokio::join!(patience.wait(&turns, "leaves"), waited).0);
        assert_eq!(turns.leaving(), ["stays"]);
        let mut little = Patience { whole: Duration::from_millis(20), until: None };
        let mut twice = [false; 2];
        for outcome in &mut twice {
            *outcome = little.wait(&turns, "stays").await;
        }
        assert_eq!((twice, little.wait(&turns, "gone").await), ([false; 2], false), "it is used up");
        drop(stays);
        assert_eq!(turns.leaving(), [""; 0]);
    }
}
