//! Where pods, networks and policies come from.
//!
//! A [`Source`] keeps one immutable snapshot of everything it knows ([`objects`]) and replaces it as a whole, so
//! that a reader never sees half of a change. [`files`] reads a directory of manifests, whose text `documents` takes apart, whose
//! single objects `manifest` understands and `catalogue` puts together; a source that watches the Kubernetes API gives the same snapshot.

mod catalogue;
mod documents;
pub mod files;
mod manifest;
pub mod objects;
mod plain_yaml;
mod pods;
mod policies;
mod powers;
mod tree;
mod version;
mod watched;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

pub use files::Files;
pub use objects::{ObjectName, Objects};

/// A supplier of snapshots.
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
