//! Where pods, networks and policies come from.
//!
//! A [`Source`] keeps one immutable snapshot of everything it knows ([`crate::objects`]) and replaces it as a whole, so that a
//! reader never sees half of a change. [`files`] reads a directory of manifests; a source that watches the Kubernetes API gives
//! the same snapshot. [`read`] turns an object of the API into the model, for every source.

pub mod files;
pub mod read;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::objects::Objects;

pub use files::Files;

/// A supplier of snapshots.
///
/// What every source owes those who read it:
///
/// - A snapshot is whole and never changes. The next one replaces it at once.
/// - **An object that did not change is the same value in the next snapshot** (`Arc::ptr_eq`). The policy compiler and whoever
///   else looks for changes compares addresses: an equal copy costs a compilation, and a changed value in an old place would be
///   missed.
/// - There is a snapshot before anything is served: a source is made with its first one complete.
/// - An object that cannot be read is one of [`Objects::problems`](crate::objects::Objects::problems), and what it gave before
///   stands. It never takes others with it, and never takes a policy out of force.
/// - Reading is done by the source's own thread. None of these functions waits for it.
pub trait Source: Send + Sync {
    /// The newest snapshot. Cheap: a reference count.
    fn snapshot(&self) -> Arc<Objects>;

    /// The number of the newest snapshot, which grows with each one that differs from the one before. Marked as
    /// changed only after [`Source::snapshot`] returns the new one.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Whether changes are followed.
    ///
    /// # Errors
    /// Why they are not any more, in words.
    fn standing(&self) -> Result<(), String> {
        Ok(())
    }

    /// How long the newest snapshot took to read, from the moment that its change was complete.
    fn reading(&self) -> Duration;
}
