//! Carries out an operation: in its container's turn, in a slot of its lane, on a thread that may block.
//!
//! It may have to wait for a resource that another container still holds: an address that is being released
//! is usually free within a moment, and the pod that takes over a name or an address arrives in just that
//! moment. The operation has failed then and rolled back. It waits without a slot in the lanes and without a thread, for
//! that container only, and then starts over.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;

use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::admission::scheduler::{Slot, Turn, Turns};
use crate::cni::{CniError, code};
use crate::own_thread;
use crate::waits::{self, Crowded, Footprint, Place, Resource};

/// Total time that an operation waits for other containers: as long as for the lock of a pool.
const PATIENCE: Duration = Duration::from_secs(10);

/// An operation that has begun.
#[derive(Debug)]
pub(super) struct Operation {
    slot: Arc<Slot>,
    turns: Arc<Turns>,
    waits_for: Mutex<Option<String>>,
    held_by: Mutex<Option<Holder>>,
}

/// The container that holds what an operation lacks.
#[derive(Debug, Clone)]
struct Holder {
    container: String,
    /// The container as the author of the refused pod may be told of it.
    who: String,
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
    fn held_by(&self) -> Option<Holder> {
        self.held_by.lock().unwrap_or_else(PoisonError::into_inner).clone()
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

    fn held_by(&self, container: String, who: String) {
        *self.held_by.lock().unwrap_or_else(PoisonError::into_inner) = Some(Holder { container, who });
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

impl Agent {
    /// Runs `work` in the container's turn, after `first` and once the lane has a free slot. `work` gets
    /// the turn, to keep it for the parts of the operation that the caller need not wait for.
    ///
    /// # Errors
    /// Code 11 at once if too many operations of the kind are waiting, or the error of `work`.
    pub(in crate::agent) async fn in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        container: &str,
        class: Class,
        first: impl Future<Output = Result<Option<OwnedSemaphorePermit>, CniError>> + Send,
        work: impl Fn(&Self) -> Result<T, CniError> + Send + Sync + 'static,
    ) -> Result<(T, Turn), CniError> {
        let _admitted = self.admission.admit(class)?;
        let turn = self.admission.turns().wait(container).await;
        let _memory = first.await?;
        if class == Class::Del {
            turn.rolls_back();
        }
        Ok((self.in_lane(class, work).await?, turn))
    }

    /// Runs `work` once the lane has a free slot. Work that is sent back has had no effect, and starts
    /// over. Work that failed because another container still holds something starts over once that
    /// container is detached.
    ///
    /// # Errors
    /// Code 11 if too many operations wait, or the error of `work`.
    pub(in crate::agent) async fn in_lane<T: Send + 'static>(
        self: &Arc<Self>,
        class: Class,
        work: impl Fn(&Self) -> Result<T, CniError> + Send + Sync + 'static,
    ) -> Result<T, CniError> {
        let work = Arc::new(work);
        let mut patience = Patience::default();
        loop {
            let slot = self.admission.enter(class)?;
            let (worked, operation) = self.in_slot(slot, &work).await;
            let (waits_for, held_by) = (operation.waits_for(), operation.held_by());
            // Releases the slot in the lanes while this operation waits.
            drop(operation);
            match waits_for {
                Some(container)
                    if worked.is_err() && patience.wait(self.admission.turns(), &container).await => {}
                _ => match (worked, held_by) {
                    (Err(error), Some(holder)) => return Err(self.with_holder(error, holder).await),
                    (worked, _) => return worked,
                },
            }
        }
    }

    /// Adds to an error which container holds the missing resource, if that container is being detached:
    /// either the operation has waited too long for it, or its DEL has failed.
    async fn with_holder(self: &Arc<Self>, mut error: CniError, holder: Holder) -> CniError {
        let Holder { container, who } = holder;
        let lasts = self.admission.turns().detaching_for(&container);
        let agent = Arc::clone(self);
        // This reads records.
        let told = own_thread::blocking(move || {
            let departs = match lasts {
                Some(lasts) => format!("whose detaching has taken {} s so far", lasts.as_secs()),
                None if agent.engine.is_half_detached(&container) => {
                    "which is half detached: its last DEL has failed, and is to be repeated".to_owned()
                }
                None => return None,
            };
            Some(format!("held by {who}, {departs}"))
        });
        // Otherwise the error is unchanged.
        if let Ok(Some(told)) = told.await {
            let separator = if error.details.is_empty() { "" } else { "; " };
            error.details += &format!("{separator}{told}");
        }
        error
    }

    /// Runs `work` in a slot of the lane. Returns the result, and the notes of the operation.
    async fn in_slot<T: Send + 'static>(
        self: &Arc<Self>,
        slot: Arc<Slot>,
        work: &Arc<impl Fn(&Self) -> Result<T, CniError> + Send + Sync + 'static>,
    ) -> (Result<T, CniError>, Arc<Operation>) {
        loop {
            slot.begin().await;
            let operation = Operation::new(Arc::clone(&slot), Arc::clone(self.admission.turns()));
            let (agent, place, work) = (Arc::clone(self), Arc::clone(&operation), Arc::clone(work));
            let worked = blocking(move || waits::within(place, || work(&agent))).await;
            if worked.is_ok() || !slot.was_sent_back() {
                return (worked, operation);
            }
        }
    }
}

/// Runs blocking work, such as netlink, files and other plugins, on a thread that may block
/// ([`own_thread`]).
pub(in crate::agent) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CniError> + Send + 'static,
) -> Result<T, CniError> {
    own_thread::blocking(work)
        .await
        .unwrap_or_else(|ending| Err(CniError::new(code::TRY_AGAIN_LATER, ending.to_string())))
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
