//! `netkit`: a routed link between the pod and the node like that of `veth`, by a netkit pair: the pod's
//! packets enter the node's namespace without a queue in between.
//!
//! Keys: those of `veth`; `mode` (`l2`, `l3`), `policy` and `peerPolicy` (`pass`, `drop`) with the names and
//! defaults of the kernel. There is no reference plugin.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::veth::routed_link;
use super::{Driver, PlanError, Request, Wanted, check_mtu};
use crate::cni::json::null_is_default;
use crate::spec::{self, NetkitMode, NetkitPolicy, NetkitWays};
use crate::step::{Configure, Protect, Step, Style};

pub(super) struct Netkit;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    mtu: Option<u32>,
    #[serde(default)]
    mode: Option<String>,
    #[serde(default)]
    policy: Option<String>,
    #[serde(default)]
    peer_policy: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    is_default_gateway: bool,
}

impl Driver for Netkit {
    fn kind(&self) -> &'static str {
        "netkit"
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
        let ways = NetkitWays {
            mode: mode(config.mode.as_deref())?,
            policy: policy("policy", config.policy.as_deref())?,
            peer_policy: policy("peerPolicy", config.peer_policy.as_deref())?,
        };
        let mac = request.mac()?;
        if mac.is_some() && ways.mode == NetkitMode::L3 {
            let reason = "a netkit in mode l3 has no Ethernet address; use mode l2".to_owned();
            return Err(PlanError::Value { key: "mac", reason });
        }
        let made = spec::Netkit {
            host_name: request.host_name(),
            pod_name: request.ifname.to_owned(),
            mtu: check_mtu(config.mtu)?,
            mac,
            group: request.group,
            ways,
        };
        let configure = Configure {
            style: Style::Routed,
            default_route: config.is_default_gateway,
            dns: request.dns()?,
            ..Configure::default()
        };
        let steps = routed_link(self, request, ("a netkit", spec::Link::Netkit(made)), configure)?;
        let redirected = |step| match step {
            // Packets that are redirected into the pod's end bypass the policy.
            Step::Protect(protect) if ways.policy == NetkitPolicy::Drop => {
                Step::Protect(Protect { fast_path: false, ..protect })
            }
            other => other,
        };
        Ok(steps.into_iter().map(redirected).collect())
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        let made = spec::Netkit {
            host_name: request.host_name(),
            pod_name: request.ifname.to_owned(),
            mtu: None,
            mac: None,
            group: request.group,
            ways: NetkitWays::default(),
        };
        request.translated_remains(spec::Link::Netkit(made))
    }
}

fn mode(name: Option<&str>) -> Result<NetkitMode, PlanError> {
    match name.unwrap_or_default() {
        "" => Ok(NetkitMode::default()),
        "l2" => Ok(NetkitMode::L2),
        "l3" => Ok(NetkitMode::L3),
        other => Err(PlanError::Value { key: "mode", reason: format!("{other:?} is not one of l2, l3") }),
    }
}

/// Parses the kernel's name of a policy, or the equivalent name of iproute2.
fn policy(key: &'static str, name: Option<&str>) -> Result<NetkitPolicy, PlanError> {
    match name.unwrap_or_default() {
        "" | "pass" | "forward" => Ok(NetkitPolicy::Pass),
        "drop" | "blackhole" => Ok(NetkitPolicy::Drop),
        other => Err(PlanError::Value { key, reason: format!("{other:?} is not one of pass, drop") }),
    }
}
