//! The plan of each sandbox and the steps carried out, stored so that they survive crashes.
//!
//! One file for each (container, interface name): JSON lines, appended to. The plan is written before the first
//! effect, and every step writes a line before it begins and one when it is done. The file is removed only when every
//! inverse has succeeded. Lines have checksums ([`format`]).
//!
//! **Damage.** A file that ends within its plan is torn: nothing was done. Any other deviation from the written form
//! is damage; it is named in the log and in every answer about the sandbox. A start does not undo a damaged record, as
//! its sandbox may be in use. Its DEL undoes everything that its plan names, by the owner and the link group, which
//! belong to the sandbox alone, even if progress was lost. If the plan itself or another plugin's result is lost, DEL
//! is refused and the numbers stay allocated until an operator has examined the record.
//!
//! **A full disk.** If the line that announces a step cannot be written, the step does not begin. A removal
//! continues, because it needs only one line; if that line cannot be appended, the record is changed in place to that
//! of a sandbox that is not attached yet ([`Record::removing`]). So a restarted agent never takes a sandbox for an
//! attached one whose addresses may have other holders.
//!
//! **Rewritten records.** A record that another program has removed is written from memory under a temporary name,
//! and renamed once it is complete ([`Store::create_whole`]). If the agent ends before that, no record exists: a
//! record with only its plan would claim that no step of a live sandbox had begun.
//!
//! **Torn records.** A record that an agent of this boot leaves torn had no effect, whereas a power failure may have
//! torn the record of a pod with leases. So a torn record of this boot whose container has leases is damage, and one
//! of an earlier boot is not. A torn record does not tell its boot: the first agent of a boot lists the torn records
//! that it finds ([`Store::note_boot`]), before new ones can exist.
//!
//! **Durability.** A line is in the page cache when `write(2)` returns, so it survives the death of the agent at any
//! moment. A power loss also destroys the kernel's links and maps; leases and the files of other plugins survive it.
//! For a record of an earlier boot, every step of its plan counts as begun.
//!
//! A plan that calls other plugins is therefore on disk before the first of them runs ([`Record::start_sync`] starts
//! a sync while links are being created; [`Record::wait_durable`] waits for it, or syncs itself if no thread could be
//! started). A plan whose only lasting effects are leases is not synced: its file exists before its leases do, which
//! a journalling filesystem keeps in that order if both are on it, and even an empty file still identifies their
//! owner. Each pool that may contain such leases is noted once ([`Store::note_pool`]), so a slow sync does not delay
//! pods.
//!
//! `pools` stores the noted pools. Finding a noted pool does not wait for an operation that notes another one.
//!
//! A [`Store`] (`store`) is the directory of records, a [`Record`] (`record`) one file in it, which [`format`] reads
//! and judges. `files` defines the directory operations that the journal needs, so that a model checker can use a
//! directory in memory.

#[cfg(test)]
mod boot_tests;
pub(crate) mod files;
pub mod format;
#[cfg(test)]
pub(crate) mod full_disk;
mod pools;
mod record;
mod store;
#[cfg(test)]
mod sync_tests;
#[cfg(test)]
mod tests;

pub use format::{Damage, VERSIONS};
pub use pools::NotedPool;
pub use record::{JournalKey, Progress, Record, RecordState};
pub use store::{Loaded, Store};

use std::io;
use std::path::{Path, PathBuf};

use crate::cni::CniError;
use crate::durable;

/// The journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The directory could not be created or read.
    #[error("open journal directory {path}")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A record for that sandbox and interface already exists.
    #[error("container {} already has a record for interface {}", .0.container_id, .0.ifname)]
    Exists(JournalKey),
    /// A container id or interface name that cannot be part of a file name.
    #[error("container id {0:?} is too long for a file name: at most {max} bytes", max = JournalKey::MAX_CONTAINER_ID)]
    KeyTooLong(String),
    /// A container id or interface name that must not be used in a path.
    #[error(transparent)]
    Key(CniError),
    /// A record is damaged. It is kept: the objects it describes may be in use.
    #[error(
        "{path} is damaged ({}): nothing is released; remove by hand what is left of the container, then remove the file and repeat DEL",
        list(.damage)
    )]
    Damaged {
        /// The record's file.
        path: PathBuf,
        /// The problems.
        damage: Vec<Damage>,
    },
    /// A record could not be removed, though all its steps are undone.
    #[error("everything is rolled back, but the record {path} cannot be removed; repeat DEL when it can")]
    Remove {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A record could not be written.
    #[error("write {path}{}", durable::remedy(source))]
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
    /// A record of another version of the agent. It is kept: the objects it describes may be in use.
    #[error(
        "{path} is of journal version {version}, which this agent does not know; run the agent that wrote it until the pod has ended, or give up what it names: stop the agent, delete the file, start the agent, and remove the links and leases of the container by hand (docs/troubleshooting.md)"
    )]
    Version {
        /// The record's file.
        path: PathBuf,
        /// The version it names.
        version: u64,
    },
    /// Leases would be taken from more pools than are noted.
    #[error("cannot record another pool: pods already have addresses from {0} pools, the maximum")]
    ManyPools(usize),
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

/// Most problems of a record that are named.
const NAMED: usize = 3;

fn list(damage: &[Damage]) -> String {
    let named = damage.iter().take(NAMED).map(Damage::to_string).collect::<Vec<_>>().join("; ");
    match damage.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named}; {more} more"),
    }
}
