//! Leases that the agent renews: of containers without a record, and those that cannot be extended.

use std::collections::BTreeSet;

use super::{AttachError, Engine};
use crate::error_chain::{Chain, clipped};
use crate::ipam::{self, dhcp};

impl Engine {
    /// Gives back the leases of `dhcp` whose containers have no record of any kind: a power failure took the record with it.
    /// Called once, before anything is attached.
    ///
    /// # Errors
    /// The journal cannot be listed. A lease that cannot be given back is named in the log, and tried at the next start.
    pub fn give_back_unknown_leases(&self) -> Result<(), AttachError> {
        let Some(leases) = self.node().leases.dhcp() else { return Ok(()) };
        let known: BTreeSet<String> = self.journal.keys()?.into_iter().map(|key| key.container_id).collect();
        match leases.retain(|container| known.contains(container)) {
            Ok(unknown) => {
                for owner in unknown {
                    tracing::warn!(%owner, "lease by dhcp without a record of its container: given back");
                }
            }
            Err(error) => {
                let error = AttachError::TornLease(ipam::Error::Dhcp(error));
                tracing::error!(error = %Chain(&error), "lease by dhcp not given back");
            }
        }
        Ok(())
    }

    /// The attachments whose leases could not be extended or are lost, each with what is the matter.
    pub fn troubled_leases(&self) -> impl Iterator<Item = (String, String)> {
        let troubles = self.node().leases.dhcp().map(dhcp::Leases::troubles).unwrap_or_default();
        troubles.into_iter().map(|dhcp::Trouble { owner, network, problem }| {
            let whose = self.describe(&owner.container_id);
            (format!("interface {} (network {network}) of {whose}", owner.ifname), clipped(problem))
        })
    }
}
