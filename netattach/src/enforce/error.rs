//! Errors of enforcement.

use std::net::IpAddr;

use crate::bpf::BpfError;
use crate::fast_path::KeepError;
use crate::hooks::HookError;
use crate::netlink;
use crate::netns::NetnsError;

/// Why an attachment could not be enforced.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// A map or a program failed.
    #[error("dataplane")]
    Bpf(#[from] BpfError),
    /// Attaching or detaching programs on a device failed.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// The fast path failed.
    #[error("fast path")]
    Fast(#[from] KeepError),
    /// A device could not be configured.
    #[error("devices of attachments")]
    Netlink(#[from] netlink::Error),
    /// A namespace could not be used.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// No netlink socket could be opened.
    #[error(transparent)]
    Open(#[from] netlink::OpenError),
    /// The interface in the pod has no Ethernet address to verify.
    #[error("interface {0} has no Ethernet address")]
    NoMac(String),
    /// No device of the node sees the interface's traffic.
    #[error("interface {0} has neither a peer nor a parent on the node")]
    NoDevice(String),
    /// The node's packet filter judges what is routed from and to an address for one attachment.
    #[error(
        "{own} cannot have address {address} on the default network: the node routes it to {holder}, whose policies it applies to traffic from and to the address"
    )]
    AddressGuarded {
        /// The address.
        address: IpAddr,
        /// The attachment that was to have it, in words.
        own: String,
        /// The one that has it, in words.
        holder: String,
    },
    /// The kernel does not judge routed packets.
    #[error(
        "networkPolicy: policies are enforced after the node's address translation by a rule of its packet filter, for which the kernel needs nftables with nft_compat and xt_bpf (CONFIG_NFT_COMPAT, CONFIG_NETFILTER_XT_MATCH_BPF)"
    )]
    NoGuard(#[source] netlink::Error),
}

/// One of several attachments could not be enforced.
#[derive(Debug)]
pub struct AttachFailed {
    /// Its position among them.
    pub at: usize,
    /// Why.
    pub source: Box<EnforceError>,
}

impl EnforceError {
    /// Whether the cause is that the interface has been deleted meanwhile.
    pub(crate) fn is_device_gone(&self) -> bool {
        match self {
            Self::Hook(error) => error.is_device_gone(),
            Self::Netlink(error) => error.not_found(),
            Self::Bpf(error) => error.is_device_gone(),
            _ => false,
        }
    }
}
