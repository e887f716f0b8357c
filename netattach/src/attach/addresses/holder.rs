//! Who has an address, and how a refusal says so.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::cni::code;
use crate::mac::Mac;
use crate::spec::VirtualFunction;

/// An address that may have only one holder on a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Address {
    /// An Ethernet address.
    Mac(Mac),
    /// An IP address.
    Ip(IpAddr),
}

/// The holder of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// An attachment.
    Attachment {
        /// Its container.
        container: String,
        /// The holder as text for messages, by name only if the pod that is refused is of its namespace.
        who: String,
    },
    /// The bridge or the node's end of a link with this name, as its gateway address.
    Gateway(String),
    /// A device of the node, by its name.
    Node(String),
    /// A VF of a card, whatever its user.
    Function(VirtualFunction),
    /// A macvlan on the parent with this name, whatever its user.
    Sibling(String),
    /// The node itself, or a broadcast or multicast address of one of its links.
    Own,
    /// A next hop of one of the node's routes.
    NextHop,
    /// The destination of a host route of the node to that address; with the name of the route's device, if it has
    /// one.
    Route(Option<String>),
    /// The destination of a network route of the node that contains the address; with the name of the route's device,
    /// if it has one.
    Within(IpNet, Option<String>),
    /// A station with a permanent FDB entry in a bridge, behind the port with this name.
    Entered(String),
    /// A station that a bridge has learned behind the port with this name; the FDB entry expires when the station is
    /// silent for a while.
    Seen(String),
}

impl Holder {
    /// Whether the holder may give the address up soon without intervention.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Attachment { .. }
            | Self::Gateway(_)
            | Self::Function(_)
            | Self::Sibling(_)
            | Self::Route(_)
            | Self::Seen(_) => true,
            Self::Node(_) | Self::Own | Self::NextHop | Self::Within(..) | Self::Entered(_) => false,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mac(mac) => write!(f, "MAC address {mac}"),
            Self::Ip(address) => write!(f, "address {address}"),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attachment { who, .. } => write!(f, "{who} has it"),
            Self::Gateway(device) => write!(f, "{device} is getting it as the gateway's address"),
            Self::Node(device) => write!(f, "the node's device {device} has it"),
            Self::Function(VirtualFunction { physical, number }) => {
                write!(f, "VF {number} of {physical} has it")
            }
            Self::Sibling(parent) => write!(f, "a macvlan on {parent} has it"),
            Self::Own => f.write_str("it is an address of the node, or of all stations on one of its links"),
            Self::NextHop => f.write_str("the node routes by it"),
            Self::Route(Some(device)) => write!(f, "the node has another route to it, by {device}"),
            Self::Route(None) => f.write_str("the node has another route to it"),
            Self::Within(net, Some(device)) => write!(f, "the node has a route to {net}, by {device}"),
            Self::Within(net, None) => write!(f, "the node has a route to {net}"),
            Self::Entered(port) => write!(f, "the bridge has a static entry for it at port {port}"),
            Self::Seen(port) => write!(f, "the bridge has seen it at port {port}"),
        }
    }
}

/// Why an address cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The requested address is in use elsewhere.
    #[error("{address} is taken: {holder}")]
    Taken {
        /// The address.
        address: Address,
        /// Its holder.
        holder: Holder,
    },
    /// A pool has leased an address that the node has.
    #[error(
        "address {0} of the pool is an address of the node, or of all stations on one of its links: leave it out of the \
         network's ranges (ipam.exclude)"
    )]
    OfNode(IpAddr),
    /// Another host on the link has the address.
    #[error("address {0} is taken: another host on the link has answered for it")]
    Duplicate(IpAddr),
}

impl AddressError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::Taken { holder, .. } if holder.may_pass() => code::TRY_AGAIN_LATER,
            Self::Taken { .. } => code::INVALID_CONFIG,
            // The pool leases others after it.
            Self::OfNode(_) | Self::Duplicate(_) => code::TRY_AGAIN_LATER,
        }
    }
}
