//! The chained plugin `firewall`. Its only state is the rules, whose comments identify their owner.

use super::chained;
use crate::cni::{self, CniError, Command, code, json};
use crate::firewall::{self, FirewallError, Owner};
use crate::link::firewall::{KIND, parse};
use crate::step::Admit;

pub(super) struct FirewallPlugin<'a> {
    pub(super) request: &'a cni::Request,
}

impl FirewallPlugin<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        let done = |()| String::new();
        match self.request.command {
            Command::Add => self.add(),
            Command::Check => self.check().map(done),
            Command::Del => firewall::dismiss(&self.note()).map_err(failed).map(done),
            Command::Gc => self.gc().map(done),
            Command::Status => self.status().map(done),
            Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<String, CniError> {
        let asked = self.asked()?;
        let result = chained::previous(self.request, KIND)?;
        let admitted = firewall::admitted(&asked, &result).map_err(failed)?;
        firewall::check_effect(&asked).map_err(failed)?;
        firewall::admit(&self.note(), &admitted).map_err(failed)?;
        Ok(json::pretty(&result.to_value(self.request.version)?))
    }

    fn check(&self) -> Result<(), CniError> {
        let asked = self.asked()?;
        let admitted = firewall::admitted(&asked, &chained::previous(self.request, KIND)?).map_err(failed)?;
        chained::checked(self.request, firewall::difference(&self.note(), &admitted).map_err(failed)?)
    }

    fn gc(&self) -> Result<(), CniError> {
        let Some(valid) = &self.request.valid_attachments else { return Ok(()) };
        firewall::collect(&Owner::executables(), &self.request.name, &chained::pairs(valid)).map_err(failed)
    }

    fn status(&self) -> Result<(), CniError> {
        self.asked()?;
        firewall::check_possible().map_err(|error| CniError::from_chain(code::NOT_AVAILABLE, &error))
    }

    fn note(&self) -> String {
        let cni::Request { name, container_id, ifname, .. } = self.request;
        Owner::executables().note(name, container_id, ifname)
    }

    fn asked(&self) -> Result<Admit, CniError> {
        Ok(parse(&chained::request(self.request))?)
    }
}

fn failed(error: FirewallError) -> CniError {
    chained::cannot(error.into())
}
