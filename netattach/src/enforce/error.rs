//! Errors of enforcement.

use crate::bpf::BpfError;
use crate::fast_path::KeepError;
use crate::hooks::HookError;
use crate::netlink;
use crate::netns::NetnsError;

/// Why an attachment could not be put under its policies.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// A map or a program.
    #[error("dataplane")]
    Bpf(#[from] BpfError),
    /// Programs on a device.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// The fast path.
    #[error("fast path")]
    Fast(#[from] KeepError),
    /// A device.
    #[error("devices of attachments")]
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
}

impl EnforceError {
    /// Whether that is because the interface has gone meanwhile.
    pub(crate) fn is_of_a_device_that_is_gone(&self) -> bool {
        match self {
            Self::Hook(error) => error.is_of_a_device_that_is_gone(),
            Self::Netlink(error) => error.not_found(),
            Self::Bpf(error) => error.is_of_a_device_that_is_gone(),
            _ => false,
        }
    }
}
