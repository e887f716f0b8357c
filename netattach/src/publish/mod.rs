//! Where the `network-status` of attached pods is published. `files` writes it below a directory, as a cluster would have it in
//! the pod's annotation.

mod files;

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;

pub use files::StatusFiles;

use crate::npwg::StatusEntry;
use crate::plan::PodRef;

/// A place where pods' status is published.
///
/// An ADD does not wait for its outcome, and a failure takes nothing back: what is published is made again from the journal at
/// every start. So an implementation may fail, and must never block for longer than it says.
pub trait Publish: fmt::Debug + Send + Sync {
    /// A pod's status is these entries from here on, in this order. To publish what is published already costs no write.
    ///
    /// # Errors
    /// [`PublishError`]; what was published before stands.
    fn publish(&self, pod: &PodRef, entries: &[StatusEntry]) -> Result<(), PublishError>;

    /// A pod has no status any more. Idempotent.
    ///
    /// # Errors
    /// [`PublishError`].
    fn withdraw(&self, pod: &PodRef) -> Result<(), PublishError>;

    /// Withdraws the status of every pod but these: of pods that an earlier agent had begun to detach when it ended.
    ///
    /// # Errors
    /// [`PublishError`] of the first that cannot be withdrawn.
    fn withdraw_others(&self, attached: &BTreeSet<PodRef>) -> Result<(), PublishError>;
}

/// A pod's status could not be published or withdrawn.
#[derive(Debug, thiserror::Error)]
#[error("publish network-status {place}")]
pub struct PublishError {
    /// Where: a path, or an object.
    pub place: String,
    /// Why not.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}
