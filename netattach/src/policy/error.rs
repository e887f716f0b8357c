//! Why policies are not in force.

use crate::bpf::BpfError;
use crate::fast::KeepError;
use crate::netlink;
use crate::netns::NetnsError;

/// Why an attachment could not be put under its policies.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// A map or a program.
    #[error("dataplane")]
    Bpf(#[from] BpfError),
    /// The fast path.
    #[error("fast path")]
    Fast(#[from] KeepError),
    /// A filter.
    #[error("attach programs")]
    Netlink(#[from] netlink::Error),
    /// A namespace.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// No netlink socket.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// The interface in the pod has no Ethernet address to verify.
    #[error("interface {0} has no Ethernet address")]
    NoMac(String),
    /// Nothing on the node sees what the interface sends and receives.
    #[error("interface {0} has no end and no parent on the node")]
    NoDevice(String),
    /// The kernel does not judge what the node routes.
    #[error(
        "networkPolicy: policies hold behind the node's translation of addresses by a rule of its packet filter, for which the kernel \
         needs nftables with nft_compat and xt_bpf (CONFIG_NFT_COMPAT, CONFIG_NETFILTER_XT_MATCH_BPF)"
    )]
    NoGuard(#[source] netlink::Error),
    /// A filter has no room for the attachment's number.
    #[error("attachment number {0} is more than a filter can hold")]
    NoClass(u32),
    /// The namespace that the interface is in is another one by now, or none.
    #[error("the pod's network namespace is gone")]
    PodGone,
}

impl EnforceError {
    /// Whether that is because the interface has gone meanwhile.
    pub(super) fn is_of_a_device_that_is_gone(&self) -> bool {
        match self {
            Self::PodGone => true,
            Self::Netlink(error) => error.not_found(),
            Self::Bpf(error) => error.is_of_a_device_that_is_gone(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_device_that_is_gone_is_told_from_one_that_refuses() {
        let link = |code| {
            let source = io::Error::from_raw_os_error(code);
            EnforceError::Bpf(BpfError::AttachLink { program: "na_pod_to", ifindex: 7, source })
        };
        assert!(link(libc::ENODEV).is_of_a_device_that_is_gone());
        assert!(EnforceError::PodGone.is_of_a_device_that_is_gone());
        assert!(!link(libc::EEXIST).is_of_a_device_that_is_gone());
        assert!(!EnforceError::NoClass(1 << 16).is_of_a_device_that_is_gone());
    }
}
