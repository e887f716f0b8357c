//! Networks, and address pools: how full they are, and the holders of their addresses.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::attachment::AttachmentName;

/// A network that is defined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// `namespace/definition`, or the name of a network of the node.
    pub network: String,
    /// Whether it is the default network.
    pub default: bool,
    /// The types of its plugins, in order.
    pub plugins: Vec<String>,
}

/// A pool of addresses that attachments share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// The networks that use this pool, sorted; empty if no definition names it any more.
    pub networks: Vec<String>,
    /// The directory of its reservations.
    pub directory: PathBuf,
    /// Its ranges, from the networks' configurations; empty if no definition names it any more.
    pub ranges: Vec<Range>,
    /// The allocated addresses, in order.
    pub holders: Vec<Holder>,
    /// How many more addresses are allocated, left out because the size of an answer is limited.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
    /// Why it could not be examined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A range of a pool. Counts saturate at the largest 64-bit number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Index of its range set: an attachment gets one address of each set.
    pub set: u64,
    /// First address.
    pub first: IpAddr,
    /// Last address.
    pub last: IpAddr,
    /// The gateway, which is never allocated.
    pub gateway: IpAddr,
    /// Number of allocatable addresses: without the gateway and excluded ones.
    pub size: u64,
    /// How many of `size` are allocated.
    pub used: u64,
    /// How many of `size` are free.
    pub free: u64,
    /// Number of contiguous runs of free addresses.
    pub free_runs: u64,
    /// First address of the longest run.
    pub longest_free: Option<IpAddr>,
    /// Length of the longest run.
    pub longest_free_size: u64,
}

/// An allocated address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The address.
    pub address: IpAddr,
    /// The attachment. If the agent does not know it, it has no pod and the network `-`.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// The container; empty if the reservation cannot be read.
    pub container_id: String,
}
