//! The addresses of an attachment: those of loopback, and leased addresses, which are claimed on the node before any
//! route leads to them.

use std::net::IpAddr;

use super::{Executor, owner};
use crate::attach::StepError;
use crate::attach::addresses::holder::{Address, AddressError};
use crate::attach::addresses::in_use::{Routed, check_ip_is_free};
use crate::attach::addresses::occupied::{NodeLink, ROUTED, segment};
use crate::attach::addresses::of_node;
use crate::ipam::{self, Asked, Lease, Lessee};
use crate::netlink;
use crate::plan::{AttachmentPlan, result};
use crate::step::{LeasedAddress, Output, Step, StepRef};
use crate::waits::{self, Resource};

/// How many addresses of a pool one ADD skips because another attachment has chosen them or has them from another pool,
/// or because the node has them. A pool leases its addresses in turn, so the next ADD begins after the skipped ones.
const PASSED_OVER: usize = 8;

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
        let asked = config.is_chosen().then(|| config.asked_elsewhere());
        let mut left = if asked.is_none() { PASSED_OVER } else { 0 };
        loop {
            let output = self.lease_once(at, attachment, config, lessee)?;
            let Output::Lease { addresses, .. } = &output else { return Ok(output) };
            let addresses: Vec<IpAddr> = addresses.iter().map(|leased| leased.address.addr()).collect();
            match self.occupy(at, attachment, addresses.iter().copied(), asked.as_ref()) {
                Err(StepError::Address(_)) if left > 0 => left -= 1,
                occupied => return occupied.map(|()| output),
            }
            if let Some(segment) = segment(attachment, self.progress.outputs().of(at.0)) {
                addresses.iter().for_each(|ip| self.node.occupied.release_address(segment, *ip, &owner));
            }
            waits::at_any(resource.as_ref(), || self.node.leases.release(config, lessee, &addresses))?;
        }
    }

    /// Leases the next addresses of a configuration, without checking whether another attachment has them.
    fn lease_once(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        config: &ipam::Config,
        lessee: Lessee<'_>,
    ) -> Result<Output, StepError> {
        let resource = waits::of_lease(attachment, config);
        let (node, mut failed): (_, Option<StepError>) = (self.node, None);
        let mut before_probe =
            |address| failed = failed.take().or_else(|| self.admit_probe(at, attachment, address).err());
        let output = lease(&node.leases, config, lessee, resource.as_ref(), &mut before_probe);
        failed.map_or(output, Err)
    }

    /// Makes programs that are attached before the address is leased pass the probe for another host with that
    /// address, which is sent on the pod's interface.
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

    /// Claims the IP addresses for the attachment, before any route leads to them: no attachment on the same link may
    /// have them, unless the same pool has leased them, nor the node. Beyond that, a pool is responsible for its
    /// addresses; all others must not be in use elsewhere, and requested ones (`asked`) are checked most strictly;
    /// `None`: a pool leases the addresses. The node is asked after the claim: an address that the node is getting
    /// meanwhile is either claimed as a gateway's, or already one of its addresses, although perhaps without a route.
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
            claimed?;
            let Some(asked) = asked else {
                if segment.is_some() && of_node::has_leased(&mut self.host, ip)? {
                    return Err(AddressError::OfNode(ip).into());
                }
                continue;
            };
            let routed = match &of_node {
                Some(own) if asked.may_be(ip) => Routed::Asked(own.index),
                _ if is_routed => Routed::Named,
                _ => Routed::No,
            };
            check_ip_is_free(&mut self.host, ip, routed)?;
        }
        Ok(())
    }

    /// Gives the node gateway addresses by `give`. They are claimed meanwhile: no attachment may have one of them on
    /// that link, or where the node routes to it. The kernel is asked by which device it does only where an attachment
    /// has the address at all.
    pub(super) fn give_gateways(
        &mut self,
        attachment: &AttachmentPlan,
        gateways: &[IpAddr],
        link: &NodeLink,
        give: impl FnOnce(&mut Self) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let of = owner(self.sandbox, attachment);
        let claimed = gateways.iter().try_for_each(|ip| -> Result<(), StepError> {
            let is_held = self.node.occupied.is_held_by_another(None, *ip, &of);
            let leads = if is_held { self.leads_to(*ip)? } else { None };
            self.node.occupied.claim_gateway(*ip, link, leads, (self.sandbox, attachment))
        });
        let given = claimed.and_then(|()| give(self));
        self.node.occupied.release_gateways(&of);
        given
    }

    /// Returns the device on whose link the node reaches an address, other than by a default route. For the device of a
    /// bridge's VLAN ([`super::bridges::ensure_vlan_device`]) that is the bridge.
    fn leads_to(&mut self, ip: IpAddr) -> Result<Option<u32>, StepError> {
        let route = self.host.matching_route(ip)?;
        let route = route.filter(|route| route.destination.prefix_len() > 0);
        let Some(index) = route.and_then(|route| route.interface) else { return Ok(None) };
        let device = match self.host.link_by_index(index) {
            Err(netlink::Error::NoSuchLink(_)) => return Ok(None),
            device => device?,
        };
        let near = self.host.find_end_here(&device)?;
        Ok(Some(near.and_then(|near| near.controller).unwrap_or(index)))
    }
}

/// Leases addresses, with their name servers and routes. `resource`: what the call may wait for.
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
