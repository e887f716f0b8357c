//! Why the node does not translate as asked.

use std::fmt;
use std::net::IpAddr;

use super::Holder;
use super::ports::{NoRoom, ReservedFor};
use super::wish::{self, HostPort};
use crate::budget::Exceeded;
use crate::netlink;
use crate::netlink::nat::{SHARED_TABLE, TABLE};
use crate::npwg::selection::PortProtocol;
use crate::sysctl::SysctlError;

/// Without which the kernel refuses the tables.
const NEEDED: &str = "nftables with NAT (CONFIG_NF_TABLES_INET, CONFIG_NFT_NAT, CONFIG_NFT_MASQ)";

/// Why the node does not translate as asked.
#[derive(Debug, thiserror::Error)]
pub enum NatError {
    /// The attachment has no address of the needed family.
    #[error(transparent)]
    NoAddress(#[from] wish::NoAddress),
    /// Another attachment holds the port of the node.
    #[error("hostPort {} is taken: {} has it", Shown(&.0.port), .0.holder.who)]
    PortTaken(Box<Taken>),
    /// The port of the node is reserved.
    #[error("hostPort {} is reserved {why}", Shown(.port))]
    PortReserved {
        /// The port.
        port: Box<HostPort>,
        /// Why it is reserved.
        why: ReservedFor,
    },
    /// The pod would hold more ports of the node than one pod may.
    #[error(transparent)]
    ManyPortsOfPod(Exceeded),
    /// All pods of the node together would hold more ports than they may.
    #[error(transparent)]
    ManyPorts(Exceeded),
    /// Another attachment has the same address and asks for a different translation.
    #[error("another attachment also has address {0}, with a different translation")]
    Ambiguous(IpAddr),
    /// Another attachment has the same address, and its translation is in the table that plain executables share.
    #[error("another attachment also has address {address}, which is translated for it: {}", .holder.who)]
    AddressTaken {
        /// The address.
        address: IpAddr,
        /// The attachment that has it.
        holder: Box<Holder>,
    },
    /// The table could not be read or changed.
    #[error("read or change table {TABLE} in the node's packet filter, for which the kernel needs {NEEDED}")]
    Table(#[from] netlink::Error),
    /// The table that plain executables share could not be read or changed.
    #[error(
        "read or change table {SHARED_TABLE} in the node's packet filter, for which the kernel needs {NEEDED}"
    )]
    Shared(#[source] netlink::Error),
    /// Other processes kept changing the packet filter.
    #[error(
        "table {SHARED_TABLE} in the node's packet filter: other programs keep changing the packet filter"
    )]
    Busy,
    /// Another program keeps removing elements that the agent puts back.
    #[error(
        "table {TABLE} in the node's packet filter: another program removes it or a part of it again and again: it was put back {0} \
         times, and from now on is once a minute (`nft monitor` shows which program it is)"
    )]
    FoughtOver(u32),
    /// The table belongs to another agent.
    #[error(
        "table {TABLE} in the node's packet filter is another agent's ({comment}): only one agent per network namespace translates addresses. If that \
         agent is gone for good, remove it: nft delete table inet {TABLE}"
    )]
    Foreign {
        /// The comment of the table, which names the other agent's state directory.
        comment: String,
    },
    /// A device could not be opened for packets with loopback addresses.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
}

impl From<NoRoom> for NatError {
    fn from(no_room: NoRoom) -> Self {
        match no_room {
            NoRoom::OfPod(excess) => Self::ManyPortsOfPod(excess),
            NoRoom::OfNode(excess) => Self::ManyPorts(excess),
        }
    }
}

/// A port of the node that another attachment holds.
#[derive(Debug)]
pub struct Taken {
    /// The port.
    pub port: HostPort,
    /// The attachment that holds it.
    pub holder: Holder,
}

/// A port of the node in the form that messages show.
struct Shown<'p>(&'p HostPort);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.0.protocol {
            PortProtocol::Tcp => "tcp",
            PortProtocol::Udp => "udp",
            PortProtocol::Sctp => "sctp",
        };
        match self.0.at {
            at if at.ip().is_unspecified() => {
                let family = if at.is_ipv4() { "IPv4" } else { "IPv6" };
                write!(f, "{}/{protocol} ({family})", at.port())
            }
            at => write!(f, "{}/{protocol} of {}", at.port(), at.ip()),
        }
    }
}
