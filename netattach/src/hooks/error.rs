//! Errors of attaching, checking and detaching programs.

use crate::bpf::BpfError;
use crate::netlink;
use crate::netns::NetnsError;

/// Why programs could not be attached to, checked on or detached from a device.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// A map, a program or a link failed.
    #[error("dataplane")]
    Bpf(#[from] BpfError),
    /// A filter could not be read or changed.
    #[error("attach programs")]
    Netlink(#[from] netlink::Error),
    /// The filter of an uplink could not be changed.
    #[error("uplink program on device {device}")]
    Uplink {
        /// Index of the device.
        device: u32,
        /// The cause.
        source: netlink::Error,
    },
    /// The tcx programs could not be read.
    #[error("list the tcx programs on device {device}")]
    Tcx {
        /// Index of the device.
        device: u32,
        /// The cause.
        source: std::io::Error,
    },
    /// The pod's namespace could not be entered.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// No netlink socket could be opened.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// Another program's filter has the number of one of netattach's filters, on a device that does not
    /// belong to the attachment alone.
    #[error(
        "another program's filter on device {device} has priority 1 and handle {number:#x}, which netattach's own filter needs; give it another priority, or set attach: tcx"
    )]
    NumberTaken {
        /// Index of the device.
        device: u32,
        /// The number of netattach's filter.
        number: u32,
    },
    /// The attachment's number does not fit into a filter's class.
    #[error("attachment number {0} is more than a filter can hold")]
    NoClass(u32),
    /// The interface's namespace no longer exists, or its path now denotes another one.
    #[error("the pod's network namespace is gone")]
    PodGone,
}

impl HookError {
    /// Whether the interface has gone meanwhile.
    pub(crate) fn is_device_gone(&self) -> bool {
        match self {
            Self::PodGone => true,
            Self::Netlink(error) => error.not_found(),
            Self::Bpf(error) => error.is_device_gone(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_device_that_is_gone_is_distinguished_from_one_that_refuses() {
        let link = |code| {
            let source = io::Error::from_raw_os_error(code);
            HookError::Bpf(BpfError::AttachLink {
                program: "na_pod_to",
                device: "device 7".to_owned(),
                source,
            })
        };
        assert!(link(libc::ENODEV).is_device_gone());
        assert!(HookError::PodGone.is_device_gone());
        assert!(!link(libc::EEXIST).is_device_gone());
        assert!(!HookError::NoClass(1 << 16).is_device_gone());
    }
}
