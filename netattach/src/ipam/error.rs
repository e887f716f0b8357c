//! Why an address could not be configured, leased, found or released.

use std::net::IpAddr;

use super::{Pool, host_local, static_addresses};

/// Why a configuration cannot be used. Every variant names the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Of `host-local`.
    #[error(transparent)]
    HostLocal(#[from] host_local::ConfigError),
    /// Of `static`.
    #[error(transparent)]
    Static(#[from] static_addresses::ConfigError),
}

/// Why a call of the [`super::Leases`] failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Of `host-local`.
    #[error(transparent)]
    HostLocal(#[from] host_local::Error),
    /// The name servers of `host-local` cannot be read.
    #[error(transparent)]
    ResolvConf(#[from] host_local::ReadResolvConfError),
    /// A route of a configuration that a record keeps cannot be read.
    #[error("key ipam.routes")]
    Routes(#[source] serde_json::Error),
    /// Of `static`.
    #[error(transparent)]
    Static(#[from] static_addresses::NotHeld),
}

/// The consequence of a failure for the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The same call may succeed later with nothing repaired: the lock, or the last address, is taken.
    TryLater,
    /// The configuration or the runtime asks for an address that can never be given.
    WrongRequest,
    /// Something could not be read or written.
    Io,
    /// The answer is no: what should be held is not.
    Other,
}

impl Error {
    /// The consequence for the request.
    pub fn failure(&self) -> Failure {
        match self {
            Self::HostLocal(error) => error.failure(),
            Self::ResolvConf(_) => Failure::Io,
            Self::Routes(_) => Failure::WrongRequest,
            Self::Static(_) => Failure::Other,
        }
    }

    /// Whether the pool was asked and gives no address: not that it could not be asked.
    pub fn is_without_address(&self) -> bool {
        matches!(self, Self::HostLocal(host_local::Error::Allocate { .. }))
    }

    /// The pool in which there is no address for now, and the address that was asked for, if one was.
    pub fn none_free(&self) -> Option<(Pool, Option<IpAddr>)> {
        match self {
            Self::HostLocal(error) => {
                let (pool, address) = error.none_free()?;
                Some((Pool::HostLocal(pool), address))
            }
            Self::ResolvConf(_) | Self::Routes(_) | Self::Static(_) => None,
        }
    }
}
