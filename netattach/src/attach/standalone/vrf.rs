//! The chained plugin `vrf`. It keeps no state: DEL identifies what to undo by the VRF's name.

use super::chained;
use crate::attach::apply::routing::vrf;
use crate::cni::{self, CniError, Command, json};
use crate::link;
use crate::spec::Vrf;

pub(super) struct VrfPlugin<'a> {
    pub(super) request: &'a cni::Request,
}

impl VrfPlugin<'_> {
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
        let result = chained::previous(request, link::vrf::KIND)?;
        let (netns, mut pod) = chained::sandbox(request)?;
        // Two processes that choose tables at once would take the same.
        let _turn = chained::lock(&netns)?;
        let chosen = vrf::choose(&mut pod, &request.ifname, &asked).map_err(chained::cannot)?;
        if let Err(error) = vrf::join(&mut pod, &chosen) {
            // The caller gets the first error; the DEL that follows retries.
            let _ = vrf::leave(&mut pod, &request.ifname, vrf::By::Record(&chosen));
            return Err(chained::cannot(error));
        }
        Ok(json::pretty(&result.to_value(request.version)?))
    }

    fn check(&self) -> Result<(), CniError> {
        let request = self.request;
        let asked = self.asked()?;
        chained::previous(request, link::vrf::KIND)?;
        let (_, mut pod) = chained::sandbox(request)?;
        let wanted = (asked.name.as_str(), asked.table);
        let difference = vrf::difference(&mut pod, &request.ifname, wanted, &[]).map_err(chained::cannot)?;
        chained::checked(request, difference)
    }

    /// A namespace that is gone has no VRFs left. As with the reference plugin, a VRF without ports is deleted,
    /// whoever created it.
    fn del(&self) -> Result<(), CniError> {
        let request = self.request;
        if chained::is_gone(request)? {
            return Ok(());
        }
        // If ADD would have refused the configuration, it has left nothing.
        let Ok(asked) = self.asked() else { return Ok(()) };
        let (netns, mut pod) = chained::sandbox(request)?;
        if chained::is_anothers(request, &mut pod).map_err(chained::cannot)? {
            return Ok(());
        }
        // Another ADD may be about to join a VRF that has no ports yet. A process of the pod that holds the lock does
        // not prevent DEL.
        let _turn = chained::lock(&netns).ok();
        vrf::leave(&mut pod, &request.ifname, vrf::By::Name(&asked.name)).map_err(chained::cannot)
    }

    fn asked(&self) -> Result<Vrf, CniError> {
        Ok(link::vrf::parse(&chained::request(self.request))?)
    }
}
