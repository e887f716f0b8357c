//! Errors of attaching programs.

use crate::bpf::BpfError;
use crate::netlink;
use crate::netns::NetnsError;

/// Why programs could not be attached to a device, looked at, or taken off.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// A map, a program or a link.
    #[error("dataplane")]
    Bpf(#[from] BpfError),
    /// A filter.
    #[error("attach programs")]
    Netlink(#[from] netlink::Error),
    /// The filter of an uplink.
    #[error("uplink program on device {device}")]
    Uplink {
        /// Index of the device.
        device: u32,
        /// Why not.
        source: netlink::Error,
    },
    /// The programs that run by tcx.
    #[error("list the tcx programs on device {device}")]
    Tcx {
        /// Index of the device.
        device: u32,
        /// Why not.
        source: std::io::Error,
    },
    /// The pod's namespace could not be entered.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// No netlink socket.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// A filter of others has the place of one of ours, on a device that is not the attachment's alone.
    #[error(
        "another program's filter on device {device} has priority 1 and handle {number:#x}, which netattach's own filter needs; give it another priority, or set attach: tcx"
    )]
    NumberTaken {
        /// Index of the device.
        device: u32,
        /// The number of our filter.
        number: u32,
    },
    /// A filter has no room for the attachment's number.
    #[error("attachment number {0} is more than a filter can hold")]
    NoClass(u32),
    /// The namespace that the interface is in is another one by now, or none.
    #[error("the pod's network namespace is gone")]
    PodGone,
}

impl HookError {
    /// Whether that is because the interface has gone meanwhile.
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
            HookError::Bpf(BpfError::AttachLink { program: "na_pod_to", ifindex: 7, source })
        };
        assert!(link(libc::ENODEV).is_device_gone());
        assert!(HookError::PodGone.is_device_gone());
        assert!(!link(libc::EEXIST).is_device_gone());
        assert!(!HookError::NoClass(1 << 16).is_device_gone());
    }
}
