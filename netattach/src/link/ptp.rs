//! `ptp`: a point-to-point link between the pod and the node, over which the pod's subnet is reached through its gateway.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins. The link is that of
//! `veth`; the pod has its addresses with the prefix lengths of their subnets, and the node's end has their
//! gateways. A lease without a gateway gets one as in `veth`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::veth::{routed_link, veth};
use super::{Driver, PlanError, Request, Wanted};
use crate::step::{Configure, Step, Style};

pub(super) struct Ptp;

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    mtu: Option<u32>,
}

impl Driver for Ptp {
    fn kind(&self) -> &'static str {
        "ptp"
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
        let configure = Configure { style: Style::PointToPoint, dns: request.dns()?, ..Configure::default() };
        let made = veth(request, config.mtu)?;
        routed_link(self, request, ("a routed veth", made), configure)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        request.veth_remains()
    }
}
