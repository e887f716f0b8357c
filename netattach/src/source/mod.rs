//! Where pods, networks and policies come from.
//!
//! A [`Source`] keeps one immutable snapshot of all objects ([`crate::objects`]) and replaces it as a whole, so that a
//! reader never sees half of a change. [`files`] reads a directory of manifests; a source that watches the Kubernetes API gives
//! the same snapshot. [`read`] turns an object of the API into the model, for every source.

pub mod files;
pub mod read;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::objects::{ObjectName, Objects, Pod};

pub use files::Files;

/// A supplier of snapshots.
///
/// The duties of every source:
///
/// - A snapshot is whole and never changes. The next one replaces it at once.
/// - **An object that did not change is the same value in the next snapshot** (`Arc::ptr_eq`), and a map of which no entry
///   changed is the same map ([`Shared::identity`](crate::objects::Shared::identity)). The policy compiler and other readers find
///   changes by comparing addresses: an equal copy costs a compilation, and a changed value in an old place would be missed.
/// - Until its first snapshot is complete, [`Source::synced`] says so. Policies are compiled from a complete snapshot only: the
///   agent starts the enforcer with a source whose first snapshot is complete.
/// - An object that cannot be read is one of [`Objects::problems`](crate::objects::Objects::problems), and what it gave before
///   stands. It never takes others with it, and never takes a policy out of force.
/// - Reading is done by the source's own thread. Of these functions, only [`Source::pod`] waits for it.
pub trait Source: Send + Sync {
    /// The newest snapshot. Cheap: a reference count.
    fn snapshot(&self) -> Arc<Objects>;

    /// The number of the newest snapshot, which grows with each one that differs from the one before. Marked as
    /// changed only after [`Source::snapshot`] returns the new one.
    fn changes(&self) -> watch::Receiver<u64>;

    /// The condition of readiness: the first complete snapshot is there, and changes are followed.
    ///
    /// # Errors
    /// Which of the two does not hold, and why.
    fn synced(&self) -> Result<(), NotSynced> {
        Ok(())
    }

    /// The pod, at once if the newest snapshot has it. A pod that it does not have is waited for until the deadline: the runtime may
    /// ask for a pod before the source has read it. `None`: it has not come.
    fn pod<'a>(&'a self, wanted: &'a WantedPod, deadline: Instant) -> PodFuture<'a> {
        Box::pin(follow(self, wanted, deadline))
    }

    /// How long the newest snapshot took to read, from the moment that its change was complete.
    fn reading(&self) -> Duration;
}

/// The outcome of [`Source::pod`].
pub type PodFuture<'a> = Pin<Box<dyn Future<Output = Option<Arc<Pod>>> + Send + 'a>>;

/// Why a source is not ready.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotSynced {
    /// The first complete snapshot is not there yet: an object that the snapshot does not have may exist. No ADD is decided by it.
    #[error("objects have not been read completely yet: {0}")]
    Incomplete(String),
    /// There is a complete snapshot, and changes are not followed any more. ADDs go on by what it has.
    #[error("{0}")]
    Stale(String),
}

/// A pod by its name, and by its identity if that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedPod {
    /// Namespace and name.
    pub name: ObjectName,
    /// Its uid. A pod of that name with another uid is an earlier one.
    pub uid: Option<String>,
}

impl WantedPod {
    /// The pod in a snapshot.
    pub fn find<'o>(&self, objects: &'o Objects) -> Option<&'o Arc<Pod>> {
        let is_other =
            |pod: &&Arc<Pod>| matches!((&pod.uid, &self.uid), (Some(known), Some(uid)) if known != uid);
        objects.pods.get(&self.name).filter(|pod| !is_other(pod))
    }
}

/// Looks for a pod in each new snapshot, until the deadline.
async fn follow<S: Source + ?Sized>(source: &S, wanted: &WantedPod, deadline: Instant) -> Option<Arc<Pod>> {
    // Before the first look: a change after it is seen.
    let mut changes = source.changes();
    loop {
        if let Some(pod) = wanted.find(&source.snapshot()) {
            return Some(Arc::clone(pod));
        }
        // An error of either is the end: the time is over, or nothing changes any more.
        tokio::time::timeout_at(deadline.into(), changes.changed()).await.ok()?.ok()?;
    }
}
