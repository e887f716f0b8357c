//! How many requests wait and run at a time, by kind.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::lanes::{Class, Full};
use super::scheduler::{Awaited, MOST_ADDS, MOST_CHECKS, MOST_DELS, Slot, Traffic, Turns};
use crate::cni::{CniError, code};
use crate::rpc::message::Condition;

/// Most queries that are answered or wait at a time; further queries are refused.
pub(in crate::agent) const MOST_QUESTIONS: usize = 32;

/// How long operations may wait at a plugin or pool before the status reports it.
const LONG_STANDING: Duration = Duration::from_secs(3);

/// Memory, in bytes, for the networks of all large ADDs together: more than the largest that a pod may have.
const MOST_WEIGHT: usize = 24 << 20;
/// An ADD whose networks take no more than this, in bytes, is not counted against [`MOST_WEIGHT`]: small
/// ADDs are limited by their number.
const LIGHT: usize = 128 << 10;
/// Unit in which memory is counted, in bytes.
const WEIGHT_UNIT: usize = 1 << 10;
/// How long a large ADD waits for memory.
const MEMORY_PATIENCE: Duration = Duration::from_secs(10);

/// Which request may begin: the turns of containers, the lanes, and how many requests wait and run.
#[derive(Debug)]
pub(in crate::agent) struct Admission {
    turns: Arc<Turns>,
    traffic: Arc<Traffic>,
    /// Limits on waiting and running requests, by kind.
    adds: Semaphore,
    dels: Semaphore,
    checks: Semaphore,
    questions: Semaphore,
    /// Allows one GC at a time.
    collections: Semaphore,
    /// Memory for large ADDs, in units.
    large_adds: Arc<Semaphore>,
}

impl Admission {
    pub(in crate::agent) fn new(parallel_adds: usize) -> Self {
        Self {
            turns: Arc::default(),
            traffic: Traffic::new(parallel_adds),
            adds: Semaphore::new(MOST_ADDS),
            dels: Semaphore::new(MOST_DELS),
            checks: Semaphore::new(MOST_CHECKS),
            questions: Semaphore::new(MOST_QUESTIONS),
            collections: Semaphore::new(1),
            large_adds: Arc::new(Semaphore::new(MOST_WEIGHT / WEIGHT_UNIT)),
        }
    }

    /// The turns of containers.
    pub(in crate::agent) fn turns(&self) -> &Arc<Turns> {
        &self.turns
    }

    /// The lanes.
    pub(in crate::agent) fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
    }

    /// Counts an operation among those that wait or run.
    ///
    /// # Errors
    /// Code 11: there are too many of its kind.
    pub(in crate::agent) fn admit(&self, class: Class) -> Result<SemaphorePermit<'_>, CniError> {
        let places = match class {
            Class::Add => &self.adds,
            Class::Del => &self.dels,
            Class::Check => &self.checks,
        };
        places.try_acquire().map_err(|_| too_many(class))
    }

    /// Lets an operation wait for a slot in its lane.
    ///
    /// # Errors
    /// Code 11: too many operations wait.
    pub(in crate::agent) fn enter(&self, class: Class) -> Result<Arc<Slot>, CniError> {
        self.traffic.enter(class).map_err(|Full| too_many(class))
    }

    /// Lets a query be answered, unless there are [`MOST_QUESTIONS`] already.
    pub(in crate::agent) fn ask(&self) -> Option<SemaphorePermit<'_>> {
        self.questions.try_acquire().ok()
    }

    /// Lets a GC run, unless there is one already.
    pub(in crate::agent) fn collect(&self) -> Option<SemaphorePermit<'_>> {
        self.collections.try_acquire().ok()
    }

    /// Waits for that many bytes of memory, if they exceed [`LIGHT`].
    ///
    /// # Errors
    /// Code 11: other large ADDs have held the memory for [`MEMORY_PATIENCE`].
    pub(in crate::agent) async fn memory_for(
        &self,
        weight: usize,
    ) -> Result<Option<OwnedSemaphorePermit>, CniError> {
        if weight <= LIGHT {
            return Ok(None);
        }
        // An ADD that is estimated to need more than the total takes all of it and runs alone.
        let units = u32::try_from(weight.min(MOST_WEIGHT) / WEIGHT_UNIT).unwrap_or(u32::MAX);
        let memory = Arc::clone(&self.large_adds).acquire_many_owned(units);
        match tokio::time::timeout(MEMORY_PATIENCE, memory).await {
            Ok(Ok(memory)) => Ok(Some(memory)),
            _ => Err(CniError::new(
                code::TRY_AGAIN_LATER,
                format!(
                    "other pods with large network configurations are being attached: {weight} bytes of memory are not free"
                ),
            )),
        }
    }

    /// Returns what operations have been waiting for long. `describe`: names a container's pod.
    pub(in crate::agent) fn conditions(&self, describe: impl Fn(&str) -> String) -> Vec<Condition> {
        let held = self.traffic.held(LONG_STANDING).into_iter().map(|held| Condition {
            object: held.resource.to_string(),
            problem: format!(
                "{} requests have used it for up to {} s, {} more wait for it",
                held.standing,
                held.longest.as_secs(),
                held.waiting
            ),
        });
        let awaited = self.turns.awaited().into_iter().filter(|it| it.lasts >= LONG_STANDING).map(|it| {
            let Awaited { container, lasts, waiting } = it;
            Condition {
                object: describe(&container),
                problem: format!(
                    "its detaching has taken {} s so far, and {waiting} ADDs wait for an address, port or device that it holds",
                    lasts.as_secs()
                ),
            }
        });
        held.chain(awaited).collect()
    }
}

fn too_many(class: Class) -> CniError {
    let verb = match class {
        Class::Add => "ADD",
        Class::Del => "DEL",
        Class::Check => "CHECK",
    };
    CniError::new(code::TRY_AGAIN_LATER, format!("too many {verb} requests are waiting"))
}
