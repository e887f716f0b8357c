//! `dhcp`: leases an address from a DHCPv4 server, renews the lease as long as the pod lives, and releases it at DEL
//! (RFC 2131).
//!
//! The agent is the DHCP client of all its pods: it sends and receives frames through a packet socket on the pod's
//! interface, which is open only during an exchange. Leases are stored on disk, so that a restarted agent continues
//! to renew them. The keys are those of `containernetworking/plugins`, `plugins/ipam/dhcp`; a configuration that
//! names the socket of that plugin's daemon is left to the plugin and its daemon.
//!
//! In the order of one lease: `config` reads the keys, `wire` opens a socket with the BPF filter of `filter`,
//! `exchange` decides which messages to send (pure, with messages of `codec` and frames of `frame`), `converse` sends
//! and receives them, `probe` checks whether another host has the address and `proxies` remembers hosts that answer
//! for all addresses, `terms` computes renewal times, `granted` converts the options for the pod, `record` stores the
//! lease; steps and requests call `leases`, the thread of `renewal` renews all leases, and the thread of `writer`
//! writes them and removes lost addresses from pods.

mod codec;
mod config;
mod converse;
mod exchange;
mod filter;
mod frame;
mod granted;
mod leases;
mod probe;
mod proxies;
mod record;
mod renewal;
mod terms;
mod wire;
mod writer;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use super::{Failure, Owner};
use crate::mac::Mac;
use crate::netlink::OpenError;

pub use codec::{Kind as MessageKind, Malformed, Message, Options};
pub use config::{Config, ConfigError, is_by_daemon};
pub use frame::{Ends, to_client as read_frame};
pub use granted::lease as granted;
pub use leases::{Leases, Trouble};
pub use probe::holder as read_probe;
pub use terms::{Server, Terms};

/// How long an ADD waits for a lease: as long as the reference plugin's daemon does, and no longer than any call may
/// take.
const PATIENCE: Duration = super::DEADLINE;

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no agent to renew the lease.
    #[error(
        "leases by dhcp are renewed by netattachd; without it, the reference's dhcp and its daemon serve"
    )]
    NoAgent,
    /// The pod's namespace is gone.
    #[error("dhcp sends on the pod's interface, but the pod's namespace is gone")]
    NoNamespace,
    /// The pod's interface cannot be asked by.
    #[error("send on the pod's interface")]
    Open(#[from] OpenError),
    /// An interface without an Ethernet address.
    #[error("dhcp needs an Ethernet address, and {0} has none")]
    NotEthernet(String),
    /// No packet socket could be opened.
    #[error("open a packet socket on the pod's interface{}", lacking(.0))]
    Socket(#[source] io::Error),
    /// No server has offered an address in time.
    #[error("no lease by DHCP within {} s: {heard}", PATIENCE.as_secs())]
    Silence {
        /// The received messages, as text.
        heard: String,
    },
    /// One host has answered for every address that servers offered.
    #[error(
        "every address that DHCP gives is in use by {holder}, {address} the last of them: if that is a router with proxy ARP, turn proxy ARP off on this link, or set ipam.probe to false"
    )]
    Proxy {
        /// Its Ethernet address.
        holder: Mac,
        /// The last address.
        address: Ipv4Addr,
    },
    /// The leases on disk cannot be read.
    #[error("read leases by dhcp in {path}")]
    Read {
        /// Their directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A lease cannot be written.
    #[error("write lease {path}{}", crate::durable::remedy(.source))]
    Write {
        /// Its file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// CHECK: no lease.
    #[error("{owner} has no lease of {address} by dhcp")]
    NotHeld {
        /// The owner that should have the lease.
        owner: Owner,
        /// The address, or a text for any address.
        address: String,
    },
    /// ADD: the lease was lost before the pod had its address from it.
    #[error("the lease of {address} by dhcp was lost before the pod was attached: {why}")]
    LostMeanwhile {
        /// The address.
        address: Ipv4Addr,
        /// Why.
        why: String,
    },
    /// CHECK: the lease is lost.
    #[error("the lease of {address} by dhcp is lost: {why}")]
    Lost {
        /// The address.
        address: IpAddr,
        /// Why.
        why: String,
    },
}

/// Returns the capability that a refused socket lacks, as text to append.
fn lacking(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => ", which needs CAP_NET_RAW",
        _ => "",
    }
}

impl Error {
    /// The consequence for the request.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Silence { .. } | Self::NoNamespace | Self::LostMeanwhile { .. } => Failure::TryLater,
            // These persist until an administrator changes the router or the configuration.
            Self::NoAgent | Self::NotEthernet(_) | Self::Proxy { .. } => Failure::WrongRequest,
            Self::Socket(_) | Self::Read { .. } | Self::Write { .. } => Failure::Io,
            Self::Open(_) | Self::NotHeld { .. } | Self::Lost { .. } => Failure::Other,
        }
    }
}
