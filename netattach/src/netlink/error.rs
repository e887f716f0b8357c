//! Errors of netlink requests.

use std::fmt;
use std::io;
use std::net::IpAddr;

/// A request that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket could not be opened.
    #[error("open a netlink socket")]
    Open(#[source] io::Error),
    /// The request could not be sent.
    #[error("send {0}")]
    Send(&'static str, #[source] io::Error),
    /// The answer could not be received.
    #[error("receive the answer to {0}")]
    Receive(&'static str, #[source] io::Error),
    /// The kernel refused the request.
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
    /// The object exists, but its description cannot be parsed.
    #[error("{0}: the object exists, but the kernel's answer about it cannot be read")]
    Unreadable(&'static str),
    /// A dump was interrupted by changes (`NLM_F_DUMP_INTR`) on each of a few attempts.
    #[error("{0} dump kept being interrupted by changes")]
    Interrupted(&'static str),
    /// A list in a pod's namespace is longer than [`Handle::open_in`](super::Handle::open_in) reads.
    #[error("{0}: the namespace has more than {1} of them; the rest is not read")]
    TooMany(&'static str, usize),
    /// There is no link with the requested name.
    #[error("no link named {0}")]
    NoSuchLink(String),
    /// The kernel accepted a new link, but does not list it.
    #[error("link {0} was created but does not exist")]
    Vanished(String),
    /// A link of that name exists, but has another kind.
    #[error("link {name} exists and is {actual}, not {wanted}")]
    WrongKind {
        /// Name of the link.
        name: String,
        /// The required kind.
        wanted: &'static str,
        /// The actual kind.
        actual: String,
    },
    /// Duplicate address detection of the address has not finished.
    #[error("address {0} is still tentative: duplicate address detection has not ended in time")]
    Tentative(IpAddr),
    /// Taps cannot be created: the driver or the device file is missing, or this process may not use it.
    #[error("open /dev/net/tun, which creates taps")]
    NoTun(#[source] io::Error),
    /// Packets that a device receives meet another program's filter before netattach's, which has no effect
    /// if the other filter has decided.
    #[error(
        "{device} has another program's ingress filter of priority {priority}, which runs before the one that paces packets. See: tc filter show dev {device} ingress"
    )]
    FilteredBefore {
        /// Name of the device.
        device: String,
        /// Priority of the filter.
        priority: u32,
    },
    /// A queueing discipline of another kind has the handle of `clsact`, and it has no egress hook.
    #[error(
        "{device} has the queueing discipline {kind:?} where egress programs need \"clsact\"; remove it (tc qdisc del dev {device} {kind}), or make it clsact, or set attach: tcx"
    )]
    WrongDiscipline {
        /// Name of the device.
        device: String,
        /// Kind of the discipline, such as `ingress`.
        kind: String,
    },
    /// There is no default route that would determine the parent interface.
    #[error("there is no default route whose interface could be used; name the interface by the key master")]
    NoDefaultRoute,
}

/// An error that the kernel returned, with its extended-acknowledgement text when it gave one.
#[derive(Debug)]
pub struct Refused {
    /// Netlink's name of the request, such as `RTM_NEWLINK`.
    pub request: &'static str,
    /// Positive errno.
    pub errno: i32,
    /// The kernel's message.
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
    /// The errno that the kernel returned, if it answered.
    pub fn errno(&self) -> Option<rustix::io::Errno> {
        match self {
            Self::Refused(refused) => Some(rustix::io::Errno::from_raw_os_error(refused.errno)),
            _ => None,
        }
    }

    /// Whether an object of that name already exists.
    pub fn already_exists(&self) -> bool {
        self.errno() == Some(rustix::io::Errno::EXIST)
    }

    /// For a list: whether the list is longer than the limits, or the kernel has no room for one of its
    /// objects. The handle cannot be used after that: the kernel continues the list, or continues to fail.
    pub fn is_too_many(&self) -> bool {
        matches!(self, Self::TooMany(..)) || self.has_no_room()
    }

    /// For a request for one object: whether the object exists but cannot be described. A pod can configure a
    /// link so that its description is longer than the kernel or its socket has room for.
    pub fn is_untold(&self) -> bool {
        matches!(self, Self::Unreadable(_)) || self.has_no_room()
    }

    fn has_no_room(&self) -> bool {
        match self {
            Self::Receive(_, source) => source.raw_os_error() == Some(libc::ENOBUFS),
            // Later kernels may refuse a length that would wrap.
            _ => matches!(self.errno(), Some(rustix::io::Errno::NOBUFS | rustix::io::Errno::MSGSIZE)),
        }
    }

    /// Whether another link has the requested name or index.
    pub(super) fn is_taken(&self) -> bool {
        matches!(self.errno(), Some(rustix::io::Errno::EXIST | rustix::io::Errno::BUSY))
    }

    /// Whether the object of the request does not exist.
    pub fn not_found(&self) -> bool {
        matches!(self, Self::NoSuchLink(_))
            || matches!(
                self.errno(),
                Some(rustix::io::Errno::NODEV | rustix::io::Errno::NOENT | rustix::io::Errno::NXIO)
            )
    }
}
