//! Carries out what steps and questions ask of address management: to each kind its own.

use std::net::IpAddr;

use serde_json::Value;

use super::host_local;
use super::{Config, Error, Lease, LeasedAddress, Lessee, Owner, Pool};
use crate::cni;

/// The address management of this node. What each call may do stands at the head of [`super`].
#[derive(Debug, Default)]
pub struct Leases {
    host_local: host_local::Leases,
}

impl Leases {
    /// Leases what the configuration asks for: all of it or nothing.
    ///
    /// # Errors
    /// Why no address is given. Nothing is held then, but for what a release clears.
    pub fn lease(&self, config: &Config, lessee: Lessee<'_>) -> Result<Lease, Error> {
        match config {
            Config::HostLocal(config) => {
                // Steps that can fail come before the reservation.
                let dns = config.resolv_conf.as_deref().map(host_local::read_resolv_conf).transpose()?;
                let route = |route: &_| serde_json::from_value(Value::Object(Clone::clone(route)));
                let routes: Result<Vec<cni::Route>, _> = config.routes.iter().map(route).collect();
                let routes = routes.map_err(Error::Routes)?;
                let reserved = self.host_local.allocate(config, lessee.owner)?.addresses.into_iter();
                let addresses = reserved.map(|(address, gateway)| LeasedAddress { address, gateway });
                Ok(Lease { addresses: addresses.collect(), routes, dns: dns.unwrap_or_default() })
            }
            Config::Static(config) => Ok(config.lease()),
        }
    }

    /// Verifies that the lessee holds each of these addresses; any at all where there are none.
    ///
    /// # Errors
    /// It does not, or that could not be seen.
    pub fn check(&self, config: &Config, lessee: Lessee<'_>, addresses: &[IpAddr]) -> Result<(), Error> {
        match config {
            Config::HostLocal(config) => {
                Ok(self.host_local.check(&config.data_dir, &config.network, lessee.owner, addresses)?)
            }
            Config::Static(config) => Ok(config.check(lessee.owner, addresses)?),
        }
    }

    /// Releases all that the lessee holds of the configuration's pool.
    ///
    /// # Errors
    /// Something could not be released.
    pub fn release(&self, config: &Config, lessee: Lessee<'_>) -> Result<(), Error> {
        match config {
            Config::HostLocal(config) => {
                self.host_local.release(&config.data_dir, &config.network, lessee.owner)?;
                Ok(())
            }
            Config::Static(_) => Ok(()),
        }
    }

    /// Releases every address of a pool that no owner in `in_use` holds.
    ///
    /// # Errors
    /// Something could not be released.
    pub fn collect(&self, pool: &Pool, in_use: &[Owner]) -> Result<(), Error> {
        match pool {
            Pool::HostLocal(pool) => {
                self.host_local.retain(&pool.data_dir, &pool.network, in_use)?;
                Ok(())
            }
        }
    }

    /// Verifies that a lease without wishes could be given now.
    ///
    /// # Errors
    /// [`Error::is_without_address`] where not; or that could not be seen.
    pub fn room(&self, config: &Config) -> Result<(), Error> {
        match config {
            Config::HostLocal(config) => Ok(self.host_local.check_room(config)?),
            Config::Static(_) => Ok(()),
        }
    }

    /// The addresses that a container holds by any interface but those in `keep`.
    ///
    /// # Errors
    /// They could not be looked at.
    pub fn held(&self, pool: &Pool, container_id: &str, keep: &[String]) -> Result<Vec<IpAddr>, Error> {
        match pool {
            Pool::HostLocal(pool) => {
                Ok(self.host_local.held(&pool.data_dir, &pool.network, container_id, keep)?)
            }
        }
    }

    /// Releases what a container holds by any interface but those in `keep`.
    ///
    /// # Errors
    /// Something could not be released.
    pub fn release_container(&self, pool: &Pool, container_id: &str, keep: &[String]) -> Result<(), Error> {
        match pool {
            Pool::HostLocal(pool) => {
                self.host_local.release_container(&pool.data_dir, &pool.network, container_id, keep)?;
                Ok(())
            }
        }
    }
}
