//! `veth`: a routed point-to-point link between the pod and the node.
//!
//! The pod has host addresses (/32, /128) and one gateway per family. The gateway's address is the same on
//! all nodes and belongs to the node's end of the link, so the kernel itself answers the pod's neighbour
//! lookups: no proxy ARP, no shared broadcast domain. The node has a host route per address.
//!
//! Keys: `mtu`, `mac`, `isDefaultGateway` (the pod's default routes go this way; otherwise only the subnets
//! of its addresses and the routes of `ipam` do), `ipam` (required), `ipMasq` and `nonMasqueradeCIDRs` as in
//! `bridge`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::translation::Reach;
use super::{Driver, PlanError, Request, Wanted, check_mtu, sources};
use crate::cni::json::null_is_default;
use crate::spec;
use crate::step::{Configure, Step, Style};

pub(super) struct Veth;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    mtu: Option<u32>,
    #[serde(default, deserialize_with = "null_is_default")]
    is_default_gateway: bool,
}

impl Driver for Veth {
    fn kind(&self) -> &'static str {
        "veth"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        true
    }

    fn maps_ports(&self) -> bool {
        true
    }

    fn wants(&self, _: &Map<String, Value>) -> Vec<Wanted> {
        Vec::new()
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        let config: Config = request.read()?;
        let configure = Configure {
            style: Style::Routed,
            default_route: config.is_default_gateway,
            dns: request.dns()?,
            ..Configure::default()
        };
        let made = veth(request, config.mtu)?;
        routed_link(self, request, ("a routed veth", made), configure)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        request.veth_remains()
    }
}

/// A veth for a routed link.
pub(super) fn veth(request: &Request<'_>, mtu: Option<u32>) -> Result<spec::Link, PlanError> {
    Ok(spec::Link::Veth(spec::Veth {
        host_name: request.host_name(),
        pod_name: request.ifname.to_owned(),
        mtu: check_mtu(mtu)?,
        mac: request.mac()?,
        group: request.group,
        port: None,
    }))
}

/// The steps of a routed link; `name` is its name in errors.
pub(super) fn routed_link(
    driver: &dyn Driver,
    request: &Request<'_>,
    (name, link): (&'static str, spec::Link),
    configure: Configure,
) -> Result<Vec<Step>, PlanError> {
    sources::refuse_vlans(request, driver)?;
    let ipam = request.ipam()?.ok_or(PlanError::IpamMissing(name))?;
    let reach = Reach { device: request.host_name(), bridged: false, routed: true, addressed: true };
    let translation = request.translation(reach)?;
    let mut steps = vec![Step::CreateLink(link), ipam, Step::EnsureForwarding, Step::RouteToPod];
    steps.extend(translation);
    steps.extend(request.finish(true, configure)?);
    Ok(steps)
}
