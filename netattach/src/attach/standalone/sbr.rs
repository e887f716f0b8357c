//! The chained plugin `sbr`. It keeps no state: DEL removes the rules for the interface's addresses.

use std::net::IpAddr;

use super::chained;
use crate::attach::StepError;
use crate::attach::apply::routing::by_source;
use crate::cni::{self, CniError, CniResult, Command, json};
use crate::link;
use crate::netlink::Handle;
use crate::plan;
use crate::spec::BySource;

pub(super) struct Sbr<'a> {
    pub(super) request: &'a cni::Request,
}

impl Sbr<'_> {
    pub(super) fn answer(&self) -> Result<String, CniError> {
        match self.request.command {
            Command::Add => self.add(),
            Command::Check => self.check().map(|()| String::new()),
            Command::Del => self.del().map(|()| String::new()),
            Command::Gc | Command::Status | Command::Version => Ok(String::new()),
        }
    }

    fn add(&self) -> Result<String, CniError> {
        let request = self.request;
        let asked = self.asked()?;
        let result = self.previous()?.ok_or_else(|| chained::missing(link::sbr::KIND))?;
        let (netns, mut pod) = chained::sandbox(request)?;
        // The reference plugin locks the namespace in the same way: two processes that choose tables at once would
        // take the same.
        let _turn = chained::lock(&netns)?;
        let chosen =
            by_source::choose(&mut pod, &request.ifname, &asked, &result).map_err(chained::cannot)?;
        if let Err(error) = by_source::apply(&mut pod, &chosen) {
            // Without its rules the interface is unchanged except for routes, which end with it. The caller gets the
            // first error.
            let _ = pod.ensure_source_rules_absent(&chosen.rules());
            return Err(chained::cannot(error));
        }
        Ok(json::pretty(&result.to_value(request.version)?))
    }

    fn check(&self) -> Result<(), CniError> {
        let request = self.request;
        let asked = self.asked()?;
        let result = self.previous()?.ok_or_else(|| chained::missing(link::sbr::KIND))?;
        let (_, mut pod) = chained::sandbox(request)?;
        let addresses = plan::by_source::addresses(&result, &request.ifname);
        let missing = by_source::missing(&mut pod, &request.ifname, &asked, &addresses);
        chained::checked(request, missing.map_err(chained::cannot)?)
    }

    /// A namespace that is gone has no rules left.
    fn del(&self) -> Result<(), CniError> {
        let request = self.request;
        if chained::is_gone(request)? {
            return Ok(());
        }
        let (_, mut pod) = chained::sandbox(request)?;
        self.forget(&mut pod).map_err(chained::cannot)
    }

    fn forget(&self, pod: &mut Handle) -> Result<(), StepError> {
        let request = self.request;
        if chained::is_anothers(request, pod)? {
            return Ok(());
        }
        // If ADD would have refused the configuration, it has left nothing, so any guess of the addresses is
        // harmless.
        let asked = self.asked().unwrap_or_default();
        let result = self.previous().ok().flatten();
        let had = result.map(|result| plan::by_source::addresses(&result, &request.ifname));
        let mut sources: Vec<IpAddr> =
            had.unwrap_or_default().into_iter().map(|(address, _)| address.addr()).collect();
        if sources.is_empty() {
            sources = by_source::sources_of(pod, &request.ifname)?;
        }
        by_source::forget(pod, &asked, &sources)
    }

    fn previous(&self) -> Result<Option<CniResult>, CniError> {
        self.request.prev_result()
    }

    fn asked(&self) -> Result<BySource, CniError> {
        Ok(link::sbr::parse(&chained::request(self.request))?)
    }
}
