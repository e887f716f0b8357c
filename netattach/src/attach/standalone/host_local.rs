//! `host-local` as the address management plugin of somebody else's interface.

use std::net::IpAddr;

use crate::attach::apply::lease;
use crate::attach::available::{lease_error, not_available, step_error, waits_for_ranges};
use crate::cni::{self, CniError, CniResult, Command, code, json};
use crate::ipam::host_local::{Config, Error, Leases, Owner};
use crate::report::Chain;
use crate::step::{LeasedAddress, Output};

pub(super) struct Pool<'a> {
    pub(super) request: &'a cni::Request,
    pub(super) leases: Leases,
}

impl Pool<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        let done = |()| String::new();
        match self.request.command {
            Command::Add => Ok(json::pretty(&self.add()?)),
            Command::Del => self.del().map(done),
            Command::Check => self.check().map(done),
            Command::Gc => self.gc().map(done),
            Command::Status => self.status().map(done),
            // Answered before a plugin is chosen.
            Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<cni::Value, CniError> {
        self.request.args.refuse_unknown(&["IP"])?;
        let config = self.config()?;
        let brought = lease(&self.leases, &config, &self.owner());
        let Output::Lease { addresses, dns, routes } = brought.map_err(step_error)? else {
            return Err(CniError::new(code::INTERNAL, "a lease brought no addresses"));
        };
        let ips = addresses.into_iter().map(|LeasedAddress { address, gateway }| cni::IpConfig {
            interface: None,
            address,
            gateway,
        });
        let result = CniResult { ips: ips.collect(), routes, dns, ..CniResult::default() };
        result.to_value(self.request.version).inspect_err(|_| {
            // DEL, which follows, tries again.
            let _ = self.leases.release(&config.data_dir, &config.network, &self.owner());
        })
    }

    fn del(&self) -> Result<(), CniError> {
        let Some(pool) = Config::for_release(&self.request.config) else { return Ok(()) };
        let released = self.leases.release(&pool.data_dir, &pool.network, &self.owner());
        released.map(drop).map_err(lease_error)
    }

    /// Every address of `prevResult` that this pool gives is reserved for the attachment.
    fn check(&self) -> Result<(), CniError> {
        let config = self.config()?;
        let given: Vec<IpAddr> = self
            .request
            .prev_result()?
            .into_iter()
            .flat_map(|last| last.ips)
            .map(|ip| ip.address.addr())
            .filter(|address| config.sets.iter().any(|set| set.range_of(*address).is_some()))
            .collect();
        let held = self.leases.check(&config.data_dir, &config.network, &self.owner(), &given);
        held.map_err(lease_error)
    }

    fn gc(&self) -> Result<(), CniError> {
        let (Some(in_use), Some(pool)) =
            (&self.request.valid_attachments, Config::for_release(&self.request.config))
        else {
            return Ok(());
        };
        let in_use: Vec<Owner> = in_use.iter().map(Owner::from).collect();
        let released = self.leases.retain(&pool.data_dir, &pool.network, &in_use);
        released.map(drop).map_err(lease_error)
    }

    fn status(&self) -> Result<(), CniError> {
        if waits_for_ranges(&self.request.config) {
            return Ok(());
        }
        self.leases.check_room(&self.config()?).map_err(|error| match error {
            Error::Allocate { .. } => not_available(&Chain(&error)),
            error => lease_error(error),
        })
    }

    fn config(&self) -> Result<Config, CniError> {
        Config::parse(&self.request.config, self.request.args.get("IP"))
            .map_err(|error| CniError::from_chain(code::INVALID_CONFIG, &error))
    }

    fn owner(&self) -> Owner {
        Owner { container_id: self.request.container_id.clone(), ifname: self.request.ifname.clone() }
    }
}
