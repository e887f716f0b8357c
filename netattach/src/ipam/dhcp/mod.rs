//! `dhcp`: an address of a DHCPv4 server, renewed as long as the pod lives and given back at DEL (RFC 2131).
//!
//! The agent is the client of all its pods: it sends and hears frames by a packet socket on the pod's interface, which is open
//! during an exchange alone. What is leased is on disk, so that a restarted agent goes on with it. The keys are those of
//! `containernetworking/plugins`, `plugins/ipam/dhcp`; a configuration that names the socket of its daemon is carried out by
//! that plugin and its daemon.
//!
//! In the order of one lease: `config` reads the keys, `wire` opens a socket that hears what `filter` lets through, `exchange`
//! decides what is sent (pure, in messages of `codec` and frames of `frame`), `converse` sends and hears it, `probe` finds whether
//! another host has the address and `proxies` which hosts say so of all, `terms` what is due later, `granted` what the options are
//! for the pod, `record` keeps the lease; `leases` is what steps and requests call, `renewal` the thread that extends all leases,
//! `writer` the one that writes them and takes away what is lost.

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

/// How long an ADD waits for a lease: what the daemon of the reference waits, and no longer than any call may take.
const PATIENCE: Duration = super::DEADLINE;

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody would renew the lease.
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
    /// No server has given an address in time.
    #[error("no lease by DHCP within {} s: {heard}", PATIENCE.as_secs())]
    Silence {
        /// What was heard, in words.
        heard: String,
    },
    /// One host has answered for every address that servers gave.
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
        /// Who should have it.
        owner: Owner,
        /// The address, or that of any kind.
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
    /// CHECK: the lease is over.
    #[error("the lease of {address} by dhcp is lost: {why}")]
    Lost {
        /// The address.
        address: IpAddr,
        /// Why.
        why: String,
    },
}

/// What a socket lacks that the kernel has refused, as words that follow.
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
            // Until somebody changes the router or the configuration.
            Self::NoAgent | Self::NotEthernet(_) | Self::Proxy { .. } => Failure::WrongRequest,
            Self::Socket(_) | Self::Read { .. } | Self::Write { .. } => Failure::Io,
            Self::Open(_) | Self::NotHeld { .. } | Self::Lost { .. } => Failure::Other,
        }
    }
}
