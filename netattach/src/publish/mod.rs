//! Publishes the `network-status` of attached pods. `files` writes it below a directory, with the content that the
//! pod's annotation has in a cluster. An `event` is a problem that an operator has to mend.

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

/// A place where pods' status is published.
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
    /// [`PublishError`], after that time at the latest.
    fn publish_within(
        &self,
        pod: &PodRef,
        entries: &[StatusEntry],
        _within: Duration,
    ) -> Result<(), PublishError> {
        self.publish(pod, entries)
    }

    /// Whether somebody else has changed what was published of a pod, so that it is not these entries any more.
    fn published(&self, _pod: &PodRef, _entries: &[StatusEntry]) -> Published {
        Published::Unknown
    }

    /// What changes with a pod's published status, where that can be told without reading it. A status that is
    /// [`Published::Same`] stays so while the mark that was asked for before that is the same.
    fn mark(&self, _pod: &PodRef) -> Option<Mark> {
        None
    }

    /// Reports a problem on the object that has it, where objects have events. Never blocks.
    fn report(&self, _event: Event) {}

    /// Removes a pod's status. Idempotent.
    ///
    /// # Errors
    /// [`PublishError`].
    fn withdraw(&self, pod: &PodRef) -> Result<(), PublishError>;

    /// Withdraws the status of every pod but these: of pods that a previous agent was detaching when it stopped. `None`: not
    /// all pods that are attached are known, and every status stays.
    ///
    /// # Errors
    /// [`PublishError`] of the first status that cannot be withdrawn.
    fn withdraw_others(&self, attached: Option<&BTreeSet<PodRef>>) -> Result<(), PublishError>;
}

/// The version of a published status.
#[derive(Debug, PartialEq, Eq)]
pub struct Mark(FileVersion);

/// What is published of a pod, beside what is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The same, and the source's pod shows it: it stays so until the pod is another value there.
    AsShown,
    /// It is about to be published, or what is there cannot be told.
    Unknown,
    /// The same, as of now.
    Same,
    /// Somebody else has changed it.
    Drifted,
}

/// A pod's status could not be published or withdrawn.
#[derive(Debug, thiserror::Error)]
#[error("publish network-status {place}")]
pub struct PublishError {
    /// The path or object, and what is to be done about it where that is known.
    pub place: String,
    /// The pod is gone, or its name is another's: nothing is wrong with where others are published.
    pub is_gone: bool,
    /// The cause.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}
