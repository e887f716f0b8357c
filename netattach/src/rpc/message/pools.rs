//! Networks; pools of addresses: how full they are, and who holds what.

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
    /// The networks whose attachments get addresses of it, sorted; empty if no definition names it any more.
    pub networks: Vec<String>,
    /// The directory of its reservations.
    pub directory: PathBuf,
    /// Its ranges, as the networks' configurations say; empty if no definition names it any more.
    pub ranges: Vec<Range>,
    /// The addresses that are held, in order.
    pub holders: Vec<Holder>,
    /// How many more are held: an answer has a largest size.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
    /// Why it could not be examined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A range of a pool. Counts that are larger than a number of 64 bits are the largest such number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Position of its set: an attachment gets one address of each.
    pub set: u64,
    /// First address.
    pub first: IpAddr,
    /// Last address.
    pub last: IpAddr,
    /// The gateway, which is never given.
    pub gateway: IpAddr,
    /// Addresses that can be given: without gateway and excluded ones.
    pub size: u64,
    /// Those of them that are held.
    pub used: u64,
    /// Those of them that are free.
    pub free: u64,
    /// In how many pieces the free ones lie.
    pub free_runs: u64,
    /// First address of the longest piece.
    pub longest_free: Option<IpAddr>,
    /// Its length.
    pub longest_free_size: u64,
}

/// An address that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The address.
    pub address: IpAddr,
    /// The attachment. One that the agent does not know has no pod, and `-` as its network.
    #[serde(flatten)]
    pub name: AttachmentName,
    /// The container; empty if the reservation cannot be read.
    pub container_id: String,
}
