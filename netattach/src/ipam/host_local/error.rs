//! Why an operation on reservations failed, and what follows from it for the request.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use super::allocator::AllocateError;
use super::{Owner, Pool};
use crate::durable;
use crate::ipam::Failure;

/// An operation on reservations failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No address can be leased.
    #[error("allocate an address from {directory}")]
    Allocate {
        /// The network's directory.
        directory: PathBuf,
        /// The reason.
        source: AllocateError,
    },
    /// CHECK: an address that the attachment should hold is not reserved for it.
    #[error("address {address} is not reserved for {owner} in {directory}")]
    NotReserved {
        /// The address of the previous result.
        address: IpAddr,
        /// The owner that should hold it.
        owner: Owner,
        /// The network's directory.
        directory: PathBuf,
    },
    /// CHECK: the attachment holds no address.
    #[error("no address is reserved for {owner} in {directory}")]
    NothingReserved {
        /// The owner that should hold one.
        owner: Owner,
        /// The network's directory.
        directory: PathBuf,
    },
    /// The name cannot be that of a directory.
    #[error("{0:?} is not a network name")]
    NetworkName(String),
    /// Another process held the lock until the deadline: try again later.
    #[error("{path} is locked by another process; find it with: fuser {path}")]
    Busy {
        /// The lock.
        path: PathBuf,
    },
    /// The directory cannot be created.
    #[error("create {path}{}", creating(source))]
    Create {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The directory cannot be opened.
    #[error("open {path}")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The lock cannot be taken, for a reason other than being held.
    #[error("lock {path}{}", durable::remedy(source))]
    Lock {
        /// The lock.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The directory, or a reservation in it, cannot be read now.
    #[error("read {path}")]
    Read {
        /// The directory or the reservation.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A reservation cannot be written.
    #[error("write reservation {path}{}", durable::remedy(source))]
    Reserve {
        /// The reservation.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The address reserved last cannot be stored.
    #[error("write {path}{}", durable::remedy(source))]
    WriteCursor {
        /// The file of the address reserved last.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A reservation cannot be removed.
    #[error("remove reservation {path}{}", durable::remedy(source))]
    Remove {
        /// The reservation.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Returns the advice for a directory that cannot be created, to be appended to a message.
fn creating(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            ": it is on a read-only file system, as is all of an agent's pod that is not mounted there: \
             ipam.dataDir has to be below /var/lib/cni, or another directory that the pod has of the node"
                .to_owned()
        }
        _ => durable::remedy(error),
    }
}

impl Error {
    /// The pool without free addresses, and the requested address, if any.
    pub fn none_free(&self) -> Option<(Pool, Option<IpAddr>)> {
        let Self::Allocate { directory, source } = self else { return None };
        let network = directory.file_name()?.to_str()?.to_owned();
        let pool = Pool { data_dir: directory.parent()?.to_owned(), network };
        match source {
            AllocateError::RequestedTaken { address, .. } => Some((pool, Some(*address))),
            AllocateError::Exhausted { .. } => Some((pool, None)),
            _ => None,
        }
    }

    /// The consequence for the request.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Busy { .. } => Failure::TryLater,
            Self::Allocate { source, .. } => match source {
                // An address becomes free when some pod is deleted. The owner's own address stays until a DEL that
                // has not arrived yet, or has failed.
                AllocateError::Exhausted { .. }
                | AllocateError::RequestedTaken { .. }
                | AllocateError::Duplicate { .. } => Failure::TryLater,
                AllocateError::RequestedGateway(_)
                | AllocateError::RequestedExcluded(_)
                | AllocateError::RequestedOutside(_) => Failure::WrongRequest,
            },
            Self::NotReserved { .. } | Self::NothingReserved { .. } | Self::NetworkName(_) => Failure::Other,
            Self::Create { .. }
            | Self::Open { .. }
            | Self::Lock { .. }
            | Self::Read { .. }
            | Self::Reserve { .. }
            | Self::WriteCursor { .. }
            | Self::Remove { .. } => Failure::Io,
        }
    }

    /// Whether the error concerns reservations rather than files: the directory is unchanged.
    pub(super) fn is_decision(&self) -> bool {
        matches!(self, Self::Allocate { .. } | Self::NotReserved { .. } | Self::NothingReserved { .. })
    }
}
