//! The chained plugin `portmap`. Its only state is the elements of the table, which identify their owner.

use std::net::IpAddr;

use super::chained;
use crate::attach::apply::translation;
use crate::attach::{AttachError, StepError};
use crate::cni::{self, CniError, CniResult, Command, code, json};
use crate::link::portmap::{self, KIND};
use crate::nat::NatError;
use crate::nat::wish::Wish;
use crate::nat::without_agent::{self, Plugin, Whose};
use crate::netlink::Handle;
use crate::step::{LeasedAddress, Translate};

pub(super) struct Portmap<'a> {
    pub(super) request: &'a cni::Request,
}

impl Portmap<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        let done = |()| String::new();
        match self.request.command {
            Command::Add => self.add(),
            Command::Check => self.check().map(done),
            Command::Del => without_agent::detach(&self.whose()).map_err(failed).map(done),
            Command::Gc => self.gc().map(done),
            Command::Status => self.status().map(done),
            Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<String, CniError> {
        let asked = self.asked()?;
        let result = chained::previous(self.request, KIND)?;
        if !asked.ports.is_empty() {
            let wish = self.wish(asked, &result)?;
            if let Err(error) = without_agent::attach(&self.whose(), &wish) {
                // Removes elements that were added before a device failed to open. The caller gets the first error.
                let _ = without_agent::detach(&self.whose());
                return Err(failed(error));
            }
        }
        Ok(json::pretty(&result.to_value(self.request.version)?))
    }

    fn check(&self) -> Result<(), CniError> {
        let asked = self.asked()?;
        let result = chained::previous(self.request, KIND)?;
        if asked.ports.is_empty() {
            return Ok(());
        }
        let wish = self.wish(asked, &result)?;
        chained::checked(self.request, without_agent::difference(&self.whose(), &wish).map_err(failed)?)
    }

    fn gc(&self) -> Result<(), CniError> {
        let Some(valid) = &self.request.valid_attachments else { return Ok(()) };
        chained::collect(Plugin::Portmap, &self.request.name, valid)
    }

    fn status(&self) -> Result<(), CniError> {
        self.asked()?;
        without_agent::check_possible()
            .map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &StepError::from(error)))
    }

    /// Returns the elements that the result's interface needs in the table.
    fn wish(&self, asked: Translate, result: &CniResult) -> Result<Wish, CniError> {
        let ifname = &self.request.ifname;
        let leased: Vec<LeasedAddress> = crate::plan::by_source::addresses(result, ifname)
            .into_iter()
            .map(|(address, gateway)| LeasedAddress { address, gateway })
            .collect();
        let addresses: Vec<IpAddr> = leased.iter().map(|leased| leased.address.addr()).collect();
        let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
        let device = translation::reach(&mut host, &addresses).map_err(chained::cannot)?;
        Wish::new(&Translate { device, ..asked }, &leased).map_err(|error| failed(error.into()))
    }

    fn whose(&self) -> Whose<'_> {
        let cni::Request { name, container_id, ifname, .. } = self.request;
        Whose { plugin: Plugin::Portmap, network: name, container: container_id, ifname }
    }

    fn asked(&self) -> Result<Translate, CniError> {
        Ok(portmap::parse(&chained::request(self.request))?)
    }
}

fn failed(error: NatError) -> CniError {
    chained::cannot(error.into())
}
