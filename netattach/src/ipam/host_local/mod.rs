//! `host-local`: addresses of one node, each reserved by a file.
//!
//! [`Config::parse`] reads the configuration, [`allocator`] chooses addresses (both pure), [`Leases`] maintains the
//! directory that the Go plugin of the same name also uses: each of the two may release, check and continue
//! reservations of the other. The keys, the order of addresses and the files are those of
//! `containernetworking/plugins`, `plugins/ipam/host-local`; `ipam.exclude` is our addition.
//!
//! A process that lives for one call uses [`allocate`], [`release`] and [`check`]; a longer-lived one keeps a
//! [`Leases`], which caches the contents of each directory.
//!
//! In the order of one allocation: `config` with its `range`s and `resolv_conf`, `store`, `cache`, `directory` with its
//! `files`, [`allocator`]; `error` if it fails. `usage` counts addresses, `survey` reports the use of a pool.

pub mod allocator;
mod cache;
mod config;
mod directory;
mod error;
mod files;
pub mod range;
mod resolv_conf;
mod store;
mod survey;
mod usage;
#[cfg(test)]
pub(crate) mod withheld;

use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Owner;

pub use config::{Config, ConfigError, DEFAULT_DATA_DIR, Pool, separate};
pub use error::Error;
pub use resolv_conf::{ReadResolvConfError, read as read_resolv_conf};
pub use store::{LOCK_DEADLINE, Leases};

/// The addresses leased by one ADD.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// One per range set, in the order of the sets: the address with the prefix length of its range's subnet,
    /// and the gateway of that range.
    pub addresses: Vec<(IpNet, Option<IpAddr>)>,
}

/// Reserves one address per range set: all of them or none.
///
/// # Errors
/// See [`Leases::allocate`].
pub fn allocate(config: &Config, owner: &Owner) -> Result<Lease, Error> {
    Leases::default().allocate(config, owner)
}

/// Removes every reservation of `owner` and returns their number. An unknown owner has none, which is success. Needs
/// no valid configuration, only the directory of the network.
///
/// # Errors
/// See [`Leases::release`].
pub fn release(data_dir: &Path, network: &str, owner: &Owner) -> Result<usize, Error> {
    Leases::default().release(&Config::without_ranges(data_dir.to_owned(), network), owner, &[])
}

/// Verifies that `owner` holds each address of `expected`; if `expected` is empty, that it holds any at all.
///
/// # Errors
/// See [`Leases::check`].
pub fn check(data_dir: &Path, network: &str, owner: &Owner, expected: &[IpAddr]) -> Result<(), Error> {
    Leases::default().check(data_dir, network, owner, expected)
}

/// The content of the files that reserve addresses for an owner: id, CR LF, interface, no newline at the end.
fn file_content(owner: &Owner) -> String {
    format!("{}\r\n{}", owner.container_id.trim(), owner.ifname)
}
