//! Publishes the `network-status` of attached pods. `files` writes it below a directory, with the content
//! of the pod's annotation in a cluster. An `event` is a problem that an operator has to fix.

mod event;
mod files;

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::time::Duration;

pub use event::{Event, Regarding};
pub use files::StatusFiles;

use crate::file_version::FileVersion;
use crate::npwg::StatusEntry;
use crate::plan::PodRef;

/// A destination for the statuses of pods.
///
/// An ADD does not wait for publication, and a failure rolls nothing back: at every start the status is rebuilt from
/// the journal. So an implementation may fail, but must never block for longer than it documents.
pub trait Publish: fmt::Debug + Send + Sync {
    /// Replaces a pod's status by these entries, in this order. Publishing an unchanged status costs no write.
    ///
    /// # Errors
    /// [`PublishError`]; the previous status stays published.
    fn publish(&self, pod: &PodRef, entries: &[StatusEntry]) -> Result<(), PublishError>;

    /// As [`Publish::publish`], and returns when the status is published.
    ///
    /// # Errors
    /// [`PublishError`], at the latest after `within`.
    fn publish_within(
        &self,
        pod: &PodRef,
        entries: &[StatusEntry],
        _within: Duration,
    ) -> Result<(), PublishError> {
        self.publish(pod, entries)
    }

    /// Compares the published status of a pod with these entries: another process may have changed it.
    fn published(&self, _pod: &PodRef, _entries: &[StatusEntry]) -> Published {
        Published::Unknown
    }

    /// Returns a mark that changes with a pod's published status, if there is one that needs no reading of
    /// the status. A status that was [`Published::Same`] is unchanged while the mark read before that
    /// comparison stays the same.
    fn mark(&self, _pod: &PodRef) -> Option<Mark> {
        None
    }

    /// Reports a problem as an event of its object, if the destination supports events. Never blocks.
    fn report(&self, _event: Event) {}

    /// Removes a pod's status. Idempotent.
    ///
    /// # Errors
    /// [`PublishError`].
    fn withdraw(&self, pod: &PodRef) -> Result<(), PublishError>;

    /// Withdraws the status of every pod except these: of pods that a previous agent was detaching when it
    /// stopped. `None`: not all attached pods are known, and every status stays.
    ///
    /// # Errors
    /// [`PublishError`] of the first status that cannot be withdrawn.
    fn withdraw_others(&self, attached: Option<&BTreeSet<PodRef>>) -> Result<(), PublishError>;
}

/// The version of a published status.
#[derive(Debug, PartialEq, Eq)]
pub struct Mark(FileVersion);

/// The published status of a pod, compared with the wanted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The same, and the source's pod shows it: it stays so until the pod's object changes.
    AsShown,
    /// It is about to be published, or cannot be read.
    Unknown,
    /// The same, as of now.
    Same,
    /// Another process has changed it.
    Drifted,
}

/// A pod's status could not be published or withdrawn.
#[derive(Debug, thiserror::Error)]
#[error("publish network-status {place}")]
pub struct PublishError {
    /// The path or object, with the remedy if it is known.
    pub place: String,
    /// The pod is gone, or its name is another's: nothing is wrong with where others are published.
    pub is_gone: bool,
    /// The cause.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}
