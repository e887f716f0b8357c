//! IPAM plugins, called for the interface of another plugin.

use std::net::IpAddr;

use crate::attach::apply::lease;
use crate::attach::status_verb::{lease_error, no_room, step_error};
use crate::cni::{self, CniError, CniResult, Command, code, json};
use crate::ipam::{self, Config, InUse, Kind, LeasedAddress, Leases, Lessee, Owner, Patience};
use crate::step::Output;

/// A call of the IPAM plugin of one kind.
pub(super) struct Addresses<'a> {
    pub(super) kind: Kind,
    pub(super) request: &'a cni::Request,
    pub(super) leases: Leases,
}

impl Addresses<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        let done = |()| String::new();
        match self.request.command {
            Command::Add => Ok(json::pretty(&self.add()?)),
            Command::Del => self.del().map(done),
            Command::Check => self.check().map(done),
            Command::Gc => self.gc().map(done),
            Command::Status => self.status().map(done),
            // VERSION is answered before a plugin is chosen.
            Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<cni::Value, CniError> {
        self.request.args.refuse_unknown(self.kind.args())?;
        let config = self.config()?;
        let output = self.on_behalf(|lessee| lease(&self.leases, &config, lessee, None, &mut |_| ()));
        let Output::Lease { addresses, dns, routes, server: _ } = output.map_err(step_error)? else {
            return Err(CniError::new(code::INTERNAL, "the lease has no addresses"));
        };
        let ips = addresses.into_iter().map(|LeasedAddress { address, gateway }| cni::IpConfig {
            interface: None,
            address,
            gateway,
        });
        let result = CniResult { ips: ips.collect(), routes, dns, ..CniResult::default() };
        result.to_value(self.request.version).inspect_err(|_| {
            // The DEL that follows tries the release again.
            let _ = self.on_behalf(|lessee| self.leases.release(&config, lessee, &[]));
        })
    }

    fn del(&self) -> Result<(), CniError> {
        let Some(config) = self.kind.remains(&self.request.config) else { return Ok(()) };
        // What cannot be read of `prevResult` keeps no container from ending.
        let given = self.given().unwrap_or_default();
        self.on_behalf(|lessee| self.leases.release(&config, lessee, &given)).map_err(lease_error)
    }

    /// Verifies that every address of `prevResult` that this plugin may have given is held for the attachment.
    fn check(&self) -> Result<(), CniError> {
        let config = self.config()?;
        let mut given = self.given()?;
        given.retain(|address| config.may_give(*address));
        self.on_behalf(|lessee| self.leases.check(&config, lessee, &given)).map_err(lease_error)
    }

    /// The addresses of `prevResult`.
    fn given(&self) -> Result<Vec<IpAddr>, CniError> {
        let last = self.request.prev_result()?;
        Ok(last.into_iter().flat_map(|last| last.ips).map(|ip| ip.address.addr()).collect())
    }

    fn gc(&self) -> Result<(), CniError> {
        let pool = self.kind.remains(&self.request.config).and_then(|config| config.pool());
        let (Some(in_use), Some(pool)) = (&self.request.valid_attachments, pool) else { return Ok(()) };
        self.leases.collect(&pool, &InUse::from(in_use.as_slice())).map_err(lease_error)
    }

    fn status(&self) -> Result<(), CniError> {
        if ipam::is_completed_at_add(&self.request.config) {
            return Ok(());
        }
        self.leases.room(&self.config()?, Patience::Operation).map_err(no_room)
    }

    fn config(&self) -> Result<Config, CniError> {
        self.kind
            .parse(&self.request.config, &self.request.args)
            .map_err(|error| CniError::from_chain(code::INVALID_CONFIG, &error))
    }

    fn on_behalf<T>(&self, call: impl FnOnce(Lessee<'_>) -> T) -> T {
        let owner =
            Owner { container_id: self.request.container_id.clone(), ifname: self.request.ifname.clone() };
        // The plugin that makes the interface opens the namespace; no kind that is called here sends packets from it.
        call(Lessee { owner: &owner, netns: None })
    }
}
