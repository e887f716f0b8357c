//! What the kernel answered, as data.

use std::fmt;
use std::io;

/// A request that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No socket.
    #[error("open a netlink socket")]
    Open(#[source] io::Error),
    /// The request did not leave.
    #[error("send {0}")]
    Send(&'static str, #[source] io::Error),
    /// The answer did not arrive.
    #[error("receive the answer to {0}")]
    Receive(&'static str, #[source] io::Error),
    /// The kernel refused.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The answer could not be read.
    #[error("the answer to {request} is malformed: {what}")]
    Malformed {
        /// Netlink's name of the request.
        request: &'static str,
        /// The problem.
        what: &'static str,
    },
    /// A dump was interrupted by changes (`NLM_F_DUMP_INTR`) each of the few times it was tried.
    #[error("{0} dump kept being interrupted by changes")]
    Interrupted(&'static str),
    /// The link asked for by name does not exist.
    #[error("no link named {0}")]
    NoSuchLink(String),
    /// The kernel accepted a link and then did not show it.
    #[error("link {0} was created and is not there")]
    Vanished(String),
    /// A link of that name exists and is of another kind.
    #[error("link {name} exists and is {actual}, not {wanted}")]
    WrongKind {
        /// Its name.
        name: String,
        /// The kind that was needed.
        wanted: &'static str,
        /// The kind it has.
        actual: String,
    },
    /// No default route to take the parent interface from.
    #[error("there is no default route whose interface could be used")]
    NoDefaultRoute,
}

/// An error that the kernel returned, with its extended-acknowledgement text when it gave one.
#[derive(Debug)]
pub struct Refused {
    /// Netlink's name of the request, such as `RTM_NEWLINK`.
    pub request: &'static str,
    /// Positive errno.
    pub errno: i32,
    /// The kernel's own words.
    pub text: Option<String>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.request)?;
        if let Some(text) = &self.text {
            write!(f, "{text}: ")?;
        }
        write!(f, "{}", io::Error::from_raw_os_error(self.errno))
    }
}

impl std::error::Error for Refused {}

impl Error {
    /// The errno that the kernel answered with, if it answered.
    pub fn errno(&self) -> Option<rustix::io::Errno> {
        match self {
            Self::Refused(refused) => Some(rustix::io::Errno::from_raw_os_error(refused.errno)),
            _ => None,
        }
    }

    /// Something of that name is there already.
    pub fn already_exists(&self) -> bool {
        self.errno() == Some(rustix::io::Errno::EXIST)
    }

    /// The name or the index that was asked for has another link.
    pub(super) fn is_taken(&self) -> bool {
        matches!(self.errno(), Some(rustix::io::Errno::EXIST | rustix::io::Errno::BUSY))
    }

    /// The object that the request named is not there.
    pub fn not_found(&self) -> bool {
        matches!(self, Self::NoSuchLink(_))
            || matches!(
                self.errno(),
                Some(rustix::io::Errno::NODEV | rustix::io::Errno::NOENT | rustix::io::Errno::NXIO)
            )
    }
}
