//! Dispatches the calls of steps and requests to the kinds of IPAM.

use std::net::IpAddr;
use std::path::PathBuf;

use serde_json::Value;

use super::{
    Config, Error, Held, InUse, Lacking, Lease, LeasedAddress, Lessee, Owner, Patience, Pool, PoolUse, Survey,
};
use super::{dhcp, host_local};
use crate::cni;

/// The IPAM of this node. The documentation of [`super`] says what each call may do.
#[derive(Debug, Default)]
pub struct Leases {
    host_local: host_local::Leases,
    /// Present only in an agent, which alone renews leases.
    dhcp: Option<dhcp::Leases>,
    /// The node's root directory, if this process has another one.
    root: Option<PathBuf>,
}

impl Leases {
    /// Makes the IPAM of an agent, which renews leases.
    pub fn renewing(dhcp: dhcp::Leases) -> Self {
        Self { dhcp: Some(dhcp), ..Self::default() }
    }

    /// The same with the node's root directory, if this process has another one: files of name servers are
    /// the node's. Pools are where their paths lead in this process.
    #[must_use]
    pub fn with_root(self, root: Option<PathBuf>) -> Self {
        Self { root, ..self }
    }

    /// Returns the leases of `dhcp`, if this process keeps them.
    pub fn dhcp(&self) -> Option<&dhcp::Leases> {
        self.dhcp.as_ref()
    }

    fn kept(&self) -> Result<&dhcp::Leases, dhcp::Error> {
        self.dhcp.as_ref().ok_or(dhcp::Error::NoAgent)
    }

    /// Leases the addresses that the configuration requests: all of them or none. Calls `before_probe` with an
    /// address before the probe on the pod's link for another host with that address.
    ///
    /// # Errors
    /// No address can be leased. Then nothing is held except what a release removes.
    pub fn lease(
        &self,
        config: &Config,
        lessee: Lessee<'_>,
        before_probe: &mut dyn FnMut(IpAddr),
    ) -> Result<Lease, Error> {
        match config {
            Config::HostLocal(config) => {
                // Steps that may fail come before the reservation.
                let dns = config.resolv_conf.as_deref();
                let dns =
                    dns.map(|path| host_local::read_resolv_conf(path, self.root.as_deref())).transpose()?;
                let route = |route: &_| serde_json::from_value(Value::Object(Clone::clone(route)));
                let routes: Result<Vec<cni::Route>, _> = config.routes.iter().map(route).collect();
                let routes = routes.map_err(Error::Routes)?;
                let reserved = self.host_local.allocate(config, lessee.owner)?.addresses.into_iter();
                let addresses = reserved.map(|(address, gateway)| LeasedAddress { address, gateway });
                Ok(Lease {
                    addresses: addresses.collect(),
                    routes,
                    dns: dns.unwrap_or_default(),
                    server: None,
                })
            }
            Config::Static(config) => Ok(config.lease()),
            Config::Dhcp(config) => Ok(self.kept()?.lease(config, lessee, before_probe)?),
        }
    }

    /// Verifies that the lessee holds each of these addresses; if the list is empty, that it holds any at all.
    ///
    /// # Errors
    /// The lessee does not, or this could not be determined.
    pub fn check(&self, config: &Config, lessee: Lessee<'_>, addresses: &[IpAddr]) -> Result<(), Error> {
        match config {
            Config::HostLocal(config) => {
                Ok(self.host_local.check(&config.data_dir, &config.network, lessee.owner, addresses)?)
            }
            Config::Static(config) => Ok(config.check(lessee.owner, addresses)?),
            Config::Dhcp(_) => Ok(self.kept()?.check(lessee.owner, addresses)?),
        }
    }

    /// Verifies that the lease of an ADD is still in force when the ADD is about to answer. Only a DHCP server may
    /// have withdrawn a lease.
    ///
    /// # Errors
    /// The lease is lost: its address must not be used.
    pub fn check_in_force(&self, config: &Config, owner: &Owner) -> Result<(), Error> {
        match config {
            Config::HostLocal(_) | Config::Static(_) => Ok(()),
            Config::Dhcp(_) => Ok(self.kept()?.check_in_force(owner)?),
        }
    }

    /// Returns the addresses that an owner has by its configuration or from a server, for a record that may have lost
    /// them. Those of a pool are found in the pool: [`Leases::holders`].
    pub fn given(&self, config: &Config, owner: &Owner) -> Vec<IpAddr> {
        match config {
            Config::HostLocal(_) => Vec::new(),
            Config::Static(config) => config.lease().addresses.iter().map(|it| it.address.addr()).collect(),
            Config::Dhcp(_) => {
                let address = self.dhcp.as_ref().and_then(|dhcp| dhcp.address(owner));
                address.map(IpAddr::from).into_iter().collect()
            }
        }
    }

    /// Returns an address from a DHCP server that a container holds for any interface except those in `keep`.
    pub fn held_by_server(&self, container_id: &str, keep: &[String]) -> Option<IpAddr> {
        self.dhcp.as_ref()?.held_by(container_id, keep).map(IpAddr::from)
    }

    /// Releases a container's DHCP leases for any interface except those in `keep`.
    ///
    /// # Errors
    /// A lease could not be released; all were tried.
    pub fn release_to_servers(&self, container_id: &str, keep: &[String]) -> Result<(), Error> {
        Ok(self.dhcp.as_ref().map_or(Ok(()), |dhcp| dhcp.release_container(container_id, keep))?)
    }

    /// Finds those owners in `holders` that do not hold each of their addresses in the pool, or any address if they
    /// list none. For periodic checks: fails if another process holds the pool's lock, and is repeated later.
    ///
    /// # Errors
    /// The pool could not be read, or another process holds its lock.
    pub fn lacking(&self, pool: &Pool, holders: &[(Owner, Vec<IpAddr>)]) -> Result<Lacking, Error> {
        match pool {
            Pool::HostLocal(pool) => Ok(self.host_local.lacking(&pool.data_dir, &pool.network, holders)?),
        }
    }

    /// Leases again those addresses of the lessee that another program has removed, and returns them. Those whose
    /// leases cannot be read now stay as they are.
    ///
    /// # Errors
    /// Another owner has an address now, or it could not be leased.
    pub fn restore(
        &self,
        config: &Config,
        lessee: Lessee<'_>,
        addresses: &[IpAddr],
    ) -> Result<Vec<IpAddr>, Error> {
        match config {
            Config::HostLocal(config) => {
                Ok(self.host_local.restore(&config.data_dir, &config.network, lessee.owner, addresses)?)
            }
            // Such leases are stored nowhere, or only a server can grant them.
            Config::Static(_) | Config::Dhcp(_) => Ok(Vec::new()),
        }
    }

    /// Releases all addresses that the lessee holds in the configuration's pool. `recorded`: the addresses that it was
    /// given; empty if they are not known.
    ///
    /// # Errors
    /// An address could not be released, or may be the lessee's and cannot be read; all others are released.
    pub fn release(&self, config: &Config, lessee: Lessee<'_>, recorded: &[IpAddr]) -> Result<(), Error> {
        match config {
            Config::HostLocal(config) => {
                self.host_local.release(config, lessee.owner, recorded)?;
                Ok(())
            }
            Config::Static(_) => Ok(()),
            // Without an agent nothing was leased.
            Config::Dhcp(_) => Ok(self.dhcp.as_ref().map_or(Ok(()), |dhcp| dhcp.release(lessee.owner))?),
        }
    }

    /// Releases every address of a pool whose owner is not in `in_use`.
    ///
    /// # Errors
    /// An address could not be released.
    pub fn collect(&self, pool: &Pool, in_use: &InUse) -> Result<(), Error> {
        match pool {
            Pool::HostLocal(pool) => {
                self.host_local.retain(&pool.data_dir, &pool.network, in_use)?;
                Ok(())
            }
        }
    }

    /// Verifies that a lease without requested addresses would succeed now.
    ///
    /// # Errors
    /// [`Error::is_without_address`] if it would not; another error if this could not be determined.
    pub fn room(&self, config: &Config, patience: Patience) -> Result<(), Error> {
        match config {
            Config::HostLocal(config) => Ok(self.host_local.check_room(config, patience)?),
            Config::Static(_) => Ok(()),
            // The free addresses of a server are unknown before a request.
            Config::Dhcp(_) => Ok(self.kept().map(drop)?),
        }
    }

    /// Returns the number of all and of leased addresses of the configuration's pool. Empty if the configuration has
    /// no pool. For periodic checks, like [`Leases::lacking`].
    ///
    /// # Errors
    /// The pool could not be read, or another process holds its lock.
    pub fn usage(&self, config: &Config) -> Result<Vec<PoolUse>, Error> {
        match config {
            Config::HostLocal(config) => Ok(self.host_local.usage(config)?),
            Config::Static(_) | Config::Dhcp(_) => Ok(Vec::new()),
        }
    }

    /// Returns the use of the configuration's pool; `None` if the configuration has no pool. For a check of many
    /// pools: fails if another process holds the pool's lock.
    ///
    /// # Errors
    /// The pool could not be read, or another process holds its lock.
    pub fn survey(&self, config: &Config) -> Result<Option<Survey>, Error> {
        match config {
            Config::HostLocal(config) => Ok(Some(self.host_local.survey(config)?)),
            Config::Static(_) | Config::Dhcp(_) => Ok(None),
        }
    }

    /// Returns the leased addresses of a pool without a configuration.
    ///
    /// # Errors
    /// The pool could not be read, or another process holds its lock for longer than `patience`.
    pub fn holders(&self, pool: &Pool, patience: Patience) -> Result<Vec<Held>, Error> {
        match pool {
            Pool::HostLocal(pool) => Ok(self.host_local.holders(&pool.data_dir, &pool.network, patience)?),
        }
    }

    /// The addresses that a container holds for any interface except those in `keep`.
    ///
    /// # Errors
    /// The pool could not be read.
    pub fn held(&self, pool: &Pool, container_id: &str, keep: &[String]) -> Result<Vec<IpAddr>, Error> {
        match pool {
            Pool::HostLocal(pool) => {
                Ok(self.host_local.held(&pool.data_dir, &pool.network, container_id, keep)?)
            }
        }
    }

    /// Releases the addresses that a container holds for any interface except those in `keep`.
    ///
    /// # Errors
    /// An address could not be released.
    pub fn release_container(&self, pool: &Pool, container_id: &str, keep: &[String]) -> Result<(), Error> {
        match pool {
            Pool::HostLocal(pool) => {
                self.host_local.release_container(&pool.data_dir, &pool.network, container_id, keep)?;
                Ok(())
            }
        }
    }
}
