//! The addresses of an attachment: those of loopback, and those that are leased, which are claimed on the node before any
//! route leads to them.

use std::net::IpAddr;

use super::{Executor, owner};
use crate::attach::StepError;
use crate::attach::occupied::{Address, ROUTED, Routed, check_ip_is_free, segment};
use crate::ipam::{self, Asked, Lease, Lessee};
use crate::plan::{AttachmentPlan, result};
use crate::step::{LeasedAddress, Output, Step, StepRef};
use crate::waits::{self, Resource};

impl Executor<'_> {
    pub(super) fn loopback(&mut self) -> Result<Output, StepError> {
        let link = self.pod.link("lo")?;
        self.pod.ensure_up(link.index)?;
        Ok(Output::Loopback { addresses: self.pod.addresses(link.index)? })
    }

    pub(super) fn lease(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        config: &ipam::Config,
    ) -> Result<Output, StepError> {
        let owner = owner(self.sandbox, attachment);
        let lessee = Lessee { owner: &owner, netns: Some(self.netns) };
        let resource = waits::of_lease(attachment, config);
        let (node, mut failed): (_, Option<StepError>) = (self.node, None);
        let mut before_probe =
            |address| failed = failed.take().or_else(|| self.admit_probe(at, attachment, address).err());
        let output = lease(&node.leases, config, lessee, resource.as_ref(), &mut before_probe);
        if let Some(error) = failed {
            return Err(error);
        }
        let output = output?;
        if let Output::Lease { addresses, .. } = &output {
            let addresses = addresses.iter().map(|leased| leased.address.addr());
            let asked = config.asked_elsewhere();
            self.occupy(at, attachment, addresses, config.is_chosen().then_some(&asked))?;
        }
        Ok(output)
    }

    /// Has programs that are there before an address is let the question pass whether another host has it: it is asked in the
    /// pod's name.
    fn admit_probe(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        address: IpAddr,
    ) -> Result<(), StepError> {
        let protected = attachment.protect().filter(|_| attachment.steps.contains(&Step::ProtectAddresses));
        let (Some(protect), Some(enforcer)) = (protected, &self.node.enforcer) else { return Ok(()) };
        let address = LeasedAddress { address: address.into(), gateway: None };
        let leased = result::Leased { addresses: vec![address], ..result::Leased::default() };
        let guarded = self.enforced(at, attachment, protect, &leased)?;
        let loaded = enforcer.attach(&[guarded], &mut self.host, &mut self.pod);
        loaded.map_err(|failed| StepError::from(*failed.source))
    }

    /// Claims the IP addresses for the attachment, before any route leads to them: nobody may have chosen one that a pool gives, and no
    /// attachment of the node may have one that was chosen. A pool answers for the addresses it gives beyond that; all others must
    /// not be in use elsewhere, those that are `asked` for least of all; `None`: it is a pool.
    pub(super) fn occupy(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        addresses: impl Iterator<Item = IpAddr>,
        asked: Option<&Asked>,
    ) -> Result<(), StepError> {
        let outputs = self.progress.outputs().of(at.0);
        let segment = segment(attachment, outputs);
        let is_routed = segment == Some(ROUTED) || attachment.steps.contains(&Step::ChooseHostAccess);
        let of_node = result::ends(outputs).and_then(|ends| ends.host).filter(|_| segment == Some(ROUTED));
        for ip in addresses {
            let claimed = segment.map_or(Ok(()), |segment| {
                self.node.occupied.claim(segment, Address::Ip(ip), self.sandbox, attachment)
            });
            // A pool knows of no address that somebody has asked for on another network of the segment.
            claimed?;
            let Some(asked) = asked else { continue };
            let routed = match &of_node {
                Some(own) if asked.may_be(ip) => Routed::Asked(own.index),
                _ if is_routed => Routed::Named,
                _ => Routed::No,
            };
            check_ip_is_free(&mut self.host, ip, routed)?;
        }
        Ok(())
    }
}

/// Leases addresses, with the name servers and routes that come with them. `resource`: what that may wait for.
pub(in crate::attach) fn lease(
    leases: &ipam::Leases,
    config: &ipam::Config,
    lessee: Lessee<'_>,
    resource: Option<&Resource>,
    before_probe: &mut dyn FnMut(IpAddr),
) -> Result<Output, StepError> {
    let leased = waits::at_any(resource, || leases.lease(config, lessee, before_probe));
    let Lease { addresses, routes, dns, server } = leased?;
    Ok(Output::Lease { addresses, dns, routes, server })
}
