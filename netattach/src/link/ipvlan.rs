//! `ipvlan`: an interface of the pod with the Ethernet address of its parent on the node; only the IP address
//! distinguishes it from its siblings.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, `hostAccess` and `bandwidth`. Policy is
//! enforced on the interface in the pod: frames between siblings never reach the parent, and on the parent all have the
//! same address. In mode l3s, packets reach the pod at the node's netfilter hook and pass no program on the interface
//! (`drivers/net/ipvlan/ipvlan_l3s.c`): policy cannot be enforced on such an interface, and a pod that a policy selects is
//! refused it.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Driver, PlanError, Request, Wanted, parent, parent_for_mtu};
use crate::cni::json::null_is_default;
use crate::spec;
use crate::step::{Configure, Step};

pub(super) struct Ipvlan;

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    master: Option<String>,
    #[serde(default)]
    mode: Option<String>,
    #[serde(default)]
    mtu: Option<u32>,
    #[serde(default, rename = "hostAccess", deserialize_with = "null_is_default")]
    host_access: bool,
}

impl Driver for Ipvlan {
    fn kind(&self) -> &'static str {
        "ipvlan"
    }

    fn is_judged(&self, config: &Map<String, Value>) -> bool {
        config.get("mode").and_then(Value::as_str) != Some("l3s")
    }

    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted> {
        parent_for_mtu(config)
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse_on_parent(self)?;
        if request.mac()?.is_some() {
            let reason = "an ipvlan has the address of its parent".to_owned();
            return Err(PlanError::Value { key: "mac", reason });
        }
        let config: Config = request.read()?;
        let parent = parent(config.master)?;
        // Only its addresses lead to it.
        let ipam = request.ipam()?.ok_or(PlanError::IpamMissing("an ipvlan"))?;
        let mtu = request.mtu_on(parent.as_deref(), config.mtu)?;
        let mode = mode(config.mode.as_deref())?;
        let apart =
            (mode != spec::IpvlanMode::L2).then_some("needs mode l2: the node enters Ethernet addresses");
        let host_access = request.host_access(config.host_access, apart, true)?;
        let ipvlan = spec::Ipvlan {
            pod_name: request.ifname.to_owned(),
            parent,
            mode,
            mtu,
            group: request.group,
            in_pod: request.is_in_pod()?,
        };
        let mut steps = vec![Step::CreateLink(spec::Link::Ipvlan(ipvlan)), ipam];
        let configure = Configure { dns: request.dns()?, ..Configure::default() };
        steps.extend(request.finish(true, configure)?);
        steps.extend(host_access);
        Ok(steps)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        let made = spec::Ipvlan {
            pod_name: request.ifname.to_owned(),
            parent: None,
            mode: spec::IpvlanMode::default(),
            mtu: None,
            group: request.group,
            in_pod: false,
        };
        request.link_remains(spec::Link::Ipvlan(made))
    }
}

fn mode(name: Option<&str>) -> Result<spec::IpvlanMode, PlanError> {
    Ok(match name.unwrap_or_default() {
        "" | "l2" => spec::IpvlanMode::L2,
        "l3" => spec::IpvlanMode::L3,
        "l3s" => spec::IpvlanMode::L3s,
        other => {
            let reason = format!("{other:?} is not one of l2, l3, l3s");
            return Err(PlanError::Value { key: "mode", reason });
        }
    })
}
