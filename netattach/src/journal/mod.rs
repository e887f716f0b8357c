//! What was planned for and done to each sandbox, across crashes.
//!
//! One file for each (container, interface name): JSON lines, appended to. The plan is
//! written before the first effect, and every step leaves a line before it begins and one when it
//! is done. The file goes when every inverse has succeeded, and not before. Lines have checksums ([`format`]).
//!
//! **What is damaged.** A file that ends within its plan is torn: nothing was done. Anything else that is not as it was
//! written is damage, which has a name in the log and in every answer about the sandbox. A damaged record is not taken back
//! at a start, as its sandbox may live. Its DEL takes back all that its plan names, by the owner and the link group that are
//! the sandbox's alone, whatever progress was lost; where the plan itself is lost, or what another plugin answered, it is
//! refused, and the numbers stay taken, until an operator has looked.
//!
//! **What survives what.** A line is in the page cache when `write(2)` returns, so it survives the death of the
//! agent at any instant. The loss of power takes the kernel's links and maps with it; what outlives it are leases
//! and the files of other plugins. A record of an earlier boot counts every step of its plan as begun.
//!
//! A plan that calls other plugins is therefore on disk before the first of them runs ([`Record::start_sync`]
//! begins writing it out while links are being created, [`Record::wait_durable`] waits). A plan with nothing but
//! leases is not synced at all: its file exists before its leases do, which a journalling filesystem keeps in
//! that order, and an empty file still says whose they are. The pools to look for them in are noted once each
//! ([`Store::note_pool`]). A disk that is slow to sync thus does not slow pods.
//!
//! A [`Store`] (`store`) is the directory of records, a [`Record`] (`record`) one file of it, which [`format`] reads and judges. What
//! the journal asks of a directory stands in `files`, so that a model checker can put one in memory behind it.

pub(crate) mod files;
pub mod format;
mod record;
mod store;
#[cfg(test)]
mod tests;

pub use format::Damage;
pub use record::{JournalKey, Record, RecordState};
pub use store::{Loaded, Store};

use std::io;
use std::path::{Path, PathBuf};

use crate::cni::CniError;

/// Why the journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The directory could not be made or read.
    #[error("open journal directory {path}")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// There is a record for that sandbox and interface already.
    #[error("container {} already has a record for interface {}", .0.container_id, .0.ifname)]
    Exists(JournalKey),
    /// A container id or interface name that cannot be part of a file name.
    #[error("container id {0:?} is too long for a file name: at most {max} bytes", max = JournalKey::MAX_CONTAINER_ID)]
    KeyTooLong(String),
    /// A container id or interface name that no path is made of.
    #[error(transparent)]
    Key(CniError),
    /// A record is not as it was written. It is kept: what it describes may be in use.
    #[error(
        "{path} is damaged ({}): nothing is released; take back by hand what is left of the container, then remove the file and repeat DEL",
        list(.damage)
    )]
    Damaged {
        /// The record's file.
        path: PathBuf,
        /// The problems.
        damage: Vec<Damage>,
    },
    /// A record could not be removed, though all is taken back.
    #[error("all is taken back, but {path}, which says otherwise, cannot be removed; repeat DEL when it can")]
    Remove {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A record could not be written.
    #[error("write {path}")]
    Write {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A record could not be read.
    #[error("read {path}")]
    Read {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A record of another version of the agent. It is kept: what it describes may be in use.
    #[error(
        "{path} is of journal version {version}, which this agent does not know; run the agent that wrote it, or remove the record together with its container"
    )]
    Version {
        /// The record's file.
        path: PathBuf,
        /// The version it names.
        version: u64,
    },
    /// A record could not be made durable.
    #[error("sync {path}")]
    Sync {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl JournalError {
    fn damaged(path: &Path, damage: &[Damage]) -> Self {
        Self::Damaged { path: path.to_owned(), damage: damage.to_vec() }
    }
}

fn list(damage: &[Damage]) -> String {
    damage.iter().map(Damage::to_string).collect::<Vec<_>>().join("; ")
}
