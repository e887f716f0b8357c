//! Sources of pods, networks and policies.
//!
//! A [`Source`] keeps one immutable snapshot of all objects ([`crate::objects`]) and replaces it as a
//! whole, so that readers never see half of a change. [`files`] reads a directory of manifests; the source
//! that watches the Kubernetes API provides the same snapshot. [`read`] converts an object of the API into
//! the model, for every source. [`log_share`] bounds the logging of problems that authors cause.

pub mod files;
pub mod log_share;
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
/// - A snapshot is complete and never changes. The next one replaces it at once.
/// - **An object that did not change is the same value in the next snapshot** (`Arc::ptr_eq`), and an unchanged map is
///   the same map ([`Shared::identity`](crate::objects::Shared::identity)). The policy compiler and other readers find
///   changes by comparing addresses: an equal copy costs a compilation, and a value changed in place would be missed.
/// - Until its first snapshot is complete, [`Source::synced`] reports that. Policies are compiled from a complete
///   snapshot only: the agent starts the enforcer with a source whose first snapshot is complete.
/// - An object that cannot be read is reported in [`Objects::problems`](crate::objects::Objects::problems), and its
///   previous version stays in force. It never affects other objects, and never takes a policy out of force.
/// - Reading is done by the source's own thread. Of these functions, only [`Source::pod`] waits for it.
pub trait Source: Send + Sync {
    /// The newest snapshot. Cheap: a reference count.
    fn snapshot(&self) -> Arc<Objects>;

    /// The number of the newest snapshot, which grows with each one that differs from its predecessor. Marked as
    /// changed only after [`Source::snapshot`] returns the new one.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Readiness: the first complete snapshot exists, and changes are followed.
    ///
    /// # Errors
    /// The unmet condition, and why.
    fn synced(&self) -> Result<(), NotSynced> {
        Ok(())
    }

    /// Conditions that an operator should know and that no ADD fails for. Sources without such conditions have none.
    fn warnings(&self) -> Vec<Warning> {
        Vec::new()
    }

    /// Whether changes can be followed at present, where that depends on a server; `None`: it does not.
    ///
    /// # Errors
    /// Since when they cannot, and why.
    fn reachable(&self) -> Option<Result<(), String>> {
        None
    }

    /// Reads everything again, as far as that may find what was missed. Returns at once.
    fn reread(&self) {}

    /// The pod, at once if the newest snapshot has it. Otherwise it is waited for until the deadline: the runtime may
    /// request a pod before the source has read it. `None`: it did not appear.
    fn pod<'a>(&'a self, wanted: &'a WantedPod, deadline: Instant) -> PodFuture<'a> {
        Box::pin(follow(self, wanted, deadline))
    }

    /// How long reading the newest snapshot took, from the moment that its change was complete.
    fn reading(&self) -> Duration;
}

/// The outcome of [`Source::pod`].
pub type PodFuture<'a> = Pin<Box<dyn Future<Output = Option<Arc<Pod>>> + Send + 'a>>;

/// Why a source is not ready.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotSynced {
    /// There is no complete snapshot yet: an object missing from the snapshot may exist. No ADD is decided by it.
    #[error("objects have not been read completely yet: {0}")]
    Incomplete(String),
    /// There is a complete snapshot, but changes are no longer followed. ADDs continue with that snapshot.
    #[error("{0}")]
    Stale(String),
}

/// A condition of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The affected object.
    pub object: String,
    /// The condition, in one line.
    pub problem: String,
}

/// A pod by name, and by uid if that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedPod {
    /// Namespace and name.
    pub name: ObjectName,
    /// Its uid. A pod of that name with another uid is a previous one.
    pub uid: Option<String>,
}

impl WantedPod {
    /// Finds the pod in a snapshot.
    pub fn find<'o>(&self, objects: &'o Objects) -> Option<&'o Arc<Pod>> {
        objects.pods.get(&self.name).filter(|pod| self.is(pod))
    }

    /// Whether the pod of that name is the wanted one. Without a known uid, a pod that has ended is not: no
    /// runtime attaches it.
    pub fn is(&self, pod: &Pod) -> bool {
        self.uid.as_deref().map_or(!pod.phase.has_ended(), |uid| pod.has_uid(uid))
    }
}

/// Searches for a pod in each new snapshot, until the deadline.
pub(crate) async fn follow<S: Source + ?Sized>(
    source: &S,
    wanted: &WantedPod,
    deadline: Instant,
) -> Option<Arc<Pod>> {
    // Subscribed before the first search, so that later changes are seen.
    let mut changes = source.changes();
    loop {
        if let Some(pod) = wanted.find(&source.snapshot()) {
            return Some(Arc::clone(pod));
        }
        // Either error ends the wait: the deadline has passed, or the source has ended.
        tokio::time::timeout_at(deadline.into(), changes.changed()).await.ok()?.ok()?;
    }
}
