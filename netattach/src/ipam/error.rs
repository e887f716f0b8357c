//! Errors of configuring, leasing, checking and releasing addresses.

use std::net::IpAddr;

use super::{Pool, dhcp, host_local, static_addresses};

/// A configuration cannot be used. Every variant names the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// An error of `host-local`.
    #[error(transparent)]
    HostLocal(#[from] host_local::ConfigError),
    /// An error of `static`.
    #[error(transparent)]
    Static(#[from] static_addresses::ConfigError),
    /// An error of `dhcp`.
    #[error(transparent)]
    Dhcp(#[from] dhcp::ConfigError),
}

/// A call of [`super::Leases`] failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of `host-local`.
    #[error(transparent)]
    HostLocal(#[from] host_local::Error),
    /// The name servers of `host-local` cannot be read.
    #[error(transparent)]
    ResolvConf(#[from] host_local::ReadResolvConfError),
    /// A route of a recorded configuration cannot be parsed.
    #[error("key ipam.routes")]
    Routes(#[source] serde_json::Error),
    /// An error of `static`.
    #[error(transparent)]
    Static(#[from] static_addresses::NotHeld),
    /// An error of `dhcp`.
    #[error(transparent)]
    Dhcp(#[from] dhcp::Error),
}

/// The consequence of an error for the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The same call may succeed later without intervention: the lock is held, all addresses are in use, or no server
    /// answers.
    TryLater,
    /// The configuration or the runtime requests an address that can never be leased.
    WrongRequest,
    /// A file could not be read or written.
    Io,
    /// A check failed: an expected address is not held.
    Other,
}

impl Error {
    /// Returns the consequence for the request.
    pub fn failure(&self) -> Failure {
        match self {
            Self::HostLocal(error) => error.failure(),
            Self::ResolvConf(_) => Failure::Io,
            Self::Routes(_) => Failure::WrongRequest,
            Self::Static(_) => Failure::Other,
            Self::Dhcp(error) => error.failure(),
        }
    }

    /// Whether the pool has no address to lease, as opposed to being inaccessible.
    pub fn is_without_address(&self) -> bool {
        matches!(self, Self::HostLocal(host_local::Error::Allocate { .. }))
    }

    /// Returns the pool without free addresses, and the requested address, if any.
    pub fn none_free(&self) -> Option<(Pool, Option<IpAddr>)> {
        match self {
            Self::HostLocal(error) => {
                let (pool, address) = error.none_free()?;
                Some((Pool::HostLocal(pool), address))
            }
            Self::ResolvConf(_) | Self::Routes(_) | Self::Static(_) | Self::Dhcp(_) => None,
        }
    }
}
