//! How packets reach a pod and leave it: forwarding, routes and translation on the node, and the routes of the pod
//! itself.

use std::net::IpAddr;

use ipnet::IpNet;

use super::links::check_has_v6;
use super::plugins::PluginError;
use super::routing::{RoutingError, cluster_routes, move_default_routes, route_by_source, vrf};
use super::{Executor, host_access, on_parent, own_link, owner, translation};
use crate::attach::StepError;
use crate::attach::addresses::occupied::{NodeLink, ROUTED};
use crate::plan::{AttachmentPlan, addressing, result, routing};
use crate::step::{Output, StepRef, Translate};

impl Executor<'_> {
    pub(super) fn forwarding(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
    ) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        if leased.addresses.iter().any(|leased| leased.address.addr().is_ipv4()) {
            self.node.forwarding.v4.ensure("1")?;
        }
        if leased.addresses.iter().any(|leased| leased.address.addr().is_ipv6()) {
            self.node.forwarding.v6.ensure("1")?;
        }
        Ok(Output::Nothing)
    }

    pub(super) fn route_to_pod(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
    ) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        let (host, _) = self.link(at)?;
        let host = host.ok_or(StepError::Missing("an end on the node"))?;
        let wanted = addressing::host_side(routing::style(attachment), &leased.addresses);
        check_has_v6(host.mtu, &wanted.addresses)?;
        let of = owner(self.sandbox, attachment);
        let mut gateways = Vec::new();
        for gateway in wanted.addresses.iter().map(IpNet::addr) {
            // The gateway of every routed link is no address of any attachment. The node has another one since the
            // network's first attachment; the kernel is asked only where an attachment has it all the same.
            let is_given = addressing::is_link_gateway(gateway)
                || (self.node.occupied.is_held_by_another(None, gateway, &of)
                    && self.host.is_own_address(gateway)?);
            if !is_given {
                gateways.push(gateway);
            }
        }
        let link = NodeLink { name: host.name, segment: ROUTED, vlan: None };
        self.give_gateways(attachment, &gateways, &link, |own| {
            Ok(own.host.configure(host.index, &wanted)?)
        })?;
        Ok(Output::Nothing)
    }

    pub(super) fn translate(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        translate: &Translate,
    ) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        let translate = result::translation(translate, self.progress.outputs().of(at.0));
        translation::attach(self.node, (self.sandbox, attachment), &translate, &leased.addresses)?;
        Ok(Output::Nothing)
    }

    pub(super) fn find_reach(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
    ) -> Result<Output, StepError> {
        let leased = self.leased(at, attachment)?;
        let addresses: Vec<IpAddr> = leased.addresses.iter().map(|leased| leased.address.addr()).collect();
        let device = translation::reach(&mut self.host, &addresses)?;
        Ok(Output::Reach { device })
    }

    pub(super) fn move_default_routes(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        gateways: &[IpAddr],
        keep: Option<&[IpNet]>,
    ) -> Result<Output, StepError> {
        let cluster = match keep {
            Some(_) => cluster_routes::look(&mut self.pod, &self.sandbox.ifname)?,
            None => None,
        };
        let leased = self.leased(at, attachment)?;
        let own = routing::own_configuration(attachment).map(|own| (own, leased.addresses.as_slice()));
        let wanted = routing::default_routes(gateways, own).map_err(RoutingError::from)?;
        let link = self.pod.link(&attachment.ifname)?;
        let routes = move_default_routes(&mut self.pod, link.index, &wanted)?;
        if routes.is_empty() {
            let (ifname, network) = (&attachment.ifname, &attachment.network);
            tracing::warn!(
                ifname,
                %network,
                "default-route is empty and the network has no gateway; the default routes stay"
            );
        }
        let kept = match &cluster {
            Some(side) => cluster_routes::keep(&mut self.pod, side, &routes, keep.unwrap_or_default())?,
            None => None,
        };
        Ok(Output::DefaultRoutes { routes, kept })
    }

    pub(super) fn route_by_source(&mut self, attachment: &AttachmentPlan) -> Result<Output, StepError> {
        let interfaces = routing::by_source(self.plan, self.progress.outputs())
            .map_err(|source| PluginError::Result { plugin: attachment.kind.clone(), source })?;
        route_by_source(&mut self.pod, &interfaces)?;
        Ok(Output::SourceRouting { interfaces })
    }

    pub(super) fn join_vrf(&mut self, at: StepRef) -> Result<Output, StepError> {
        let outputs = self.progress.outputs().of(at.0);
        let chosen = outputs.iter().find_map(|output| match output {
            Output::Vrf(chosen) => Some(chosen),
            _ => None,
        });
        vrf::join(&mut self.pod, chosen.ok_or(StepError::Missing("a VRF"))?)?;
        // The pod's end was set down and up.
        if let Some(host) = result::ends(outputs).and_then(|ends| ends.host)
            && !self.host.await_carrier(host.index)?
        {
            tracing::warn!(device = host.name, "no carrier yet in the VRF; the first packets may be lost");
        }
        Ok(Output::Nothing)
    }

    pub(super) fn give_host_access(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
    ) -> Result<Output, StepError> {
        let outputs = self.progress.outputs().of(at.0);
        let parent = on_parent(outputs)?;
        let chosen = outputs.iter().find_map(|output| match output {
            Output::HostAccess(chosen) => Some(chosen),
            _ => None,
        });
        let chosen = chosen.ok_or(StepError::Missing("a way from the node"))?;
        let made = result::ends(outputs).ok_or(StepError::Missing("a link"))?.pod;
        let parent = self.host.link_by_index(parent.device.index)?;
        let on = (own_link(attachment)?, &parent, &made);
        host_access::give(self.node, (&mut self.host, &mut self.pod), on, chosen)?;
        Ok(Output::Nothing)
    }
}
