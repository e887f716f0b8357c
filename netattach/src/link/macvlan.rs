//! `macvlan`: an interface of the pod with an address of its own on a parent of the node.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, and `bandwidth`. Policy is
//! enforced on the parent, except for a macvlan that takes the whole parent over.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Driver, PlanError, Request, Wanted, parent, parent_for_mtu};
use crate::spec;
use crate::step::{Configure, Step, Style};

pub(super) struct Macvlan;

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    master: Option<String>,
    #[serde(default)]
    mode: Option<String>,
    #[serde(default)]
    mtu: Option<u32>,
    #[serde(default)]
    bcqueuelen: Option<u32>,
}

impl Driver for Macvlan {
    fn kind(&self) -> &'static str {
        "macvlan"
    }

    /// A macvlan in mode passthru takes over the parent's own address: on the parent, its frames cannot be
    /// distinguished from the node's.
    fn is_judged(&self, config: &Map<String, Value>) -> bool {
        config.get("mode").and_then(Value::as_str) != Some("passthru")
    }

    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted> {
        parent_for_mtu(config)
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse_on_parent(self)?;
        let config: Config = request.read()?;
        let parent = parent(config.master)?;
        let mtu = request.mtu_on(parent.as_deref(), config.mtu)?;
        let mut steps = vec![Step::CreateLink(spec::Link::Macvlan(spec::Macvlan {
            pod_name: request.ifname.to_owned(),
            parent,
            mode: mode(config.mode.as_deref())?,
            mtu,
            mac: request.mac()?,
            group: request.group,
            broadcast_queue: config.bcqueuelen.filter(|length| *length != 0),
        }))];
        let ipam = request.ipam()?;
        let addressed = ipam.is_some();
        steps.extend(ipam);
        let configure =
            Configure { style: Style::Subnet, default_route: false, dns: request.dns()?, v4_alone: false };
        steps.extend(request.finish(addressed, configure)?);
        Ok(steps)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        let made = spec::Macvlan {
            pod_name: request.ifname.to_owned(),
            parent: None,
            mode: spec::MacvlanMode::default(),
            mtu: None,
            mac: None,
            group: request.group,
            broadcast_queue: None,
        };
        std::iter::once(Step::CreateLink(spec::Link::Macvlan(made))).chain(request.ipam_remains()).collect()
    }
}

fn mode(name: Option<&str>) -> Result<spec::MacvlanMode, PlanError> {
    Ok(match name.unwrap_or_default() {
        "" | "bridge" => spec::MacvlanMode::Bridge,
        "private" => spec::MacvlanMode::Private,
        "vepa" => spec::MacvlanMode::Vepa,
        "passthru" => spec::MacvlanMode::Passthru,
        other => {
            let reason = format!("{other:?} is not one of bridge, private, vepa, passthru");
            return Err(PlanError::Value { key: "mode", reason });
        }
    })
}
