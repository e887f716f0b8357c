//! `macvlan`: an interface of the pod with an address of its own on a parent of the node.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins. Policy on a macvlan has to
//! be enforced on the parent; this version does not do so and reports the attachment as not enforced.

use serde::Deserialize;
use serde_json::json;

use super::{Driver, PlanError, Request, check_mtu, spec};
use crate::plan::{Configure, Step, Style};

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

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse(
            self.kind(),
            &[("linkInContainer", json!(false)), ("bandwidth", json!({})), ("fastPath", json!(false))],
        )?;
        let config: Config = request.read()?;
        let mut steps = vec![Step::CreateMacvlan(spec::Macvlan {
            pod_name: request.ifname.to_owned(),
            parent: config.master.filter(|name| !name.is_empty()),
            mode: mode(config.mode.as_deref())?,
            mtu: check_mtu(config.mtu)?,
            mac: request.mac()?,
            group: request.group,
            broadcast_queue: config.bcqueuelen.filter(|length| *length != 0),
        })];
        steps.extend(request.ipam()?);
        let configure = Configure { style: Style::Subnet, default_route: false, dns: request.dns()? };
        steps.push(Step::Configure(configure));
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
        std::iter::once(Step::CreateMacvlan(made)).chain(request.ipam_remains()).collect()
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
