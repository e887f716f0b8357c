//! `tap`: an interface of the pod whose frames are exchanged with a process in the pod, such as a virtual
//! machine.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins. `selinuxContext` is
//! refused: a device gets the label of the thread that creates it, and the agent's threads do not change
//! their label.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Driver, PlanError, Request, Wanted, check_link_name, check_mtu, sources};
use crate::cni::json::null_is_default;
use crate::spec;
use crate::step::{Configure, Protect, Step};

pub(super) struct Tap;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    mtu: Option<u32>,
    #[serde(default, deserialize_with = "null_is_default")]
    multi_queue: bool,
    #[serde(default)]
    owner: Option<u32>,
    #[serde(default)]
    group: Option<u32>,
    #[serde(default)]
    bridge: Option<String>,
}

impl Driver for Tap {
    fn kind(&self) -> &'static str {
        "tap"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        true
    }

    fn wants(&self, _: &Map<String, Value>) -> Vec<Wanted> {
        Vec::new()
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse(self.kind(), &[("selinuxContext", json!(""))])?;
        let config: Config = request.read()?;
        let bridge = config.bridge.filter(|name| !name.is_empty());
        if let Some(name) = &bridge {
            check_link_name("bridge", name)?;
            if name == request.ifname {
                let reason = format!("{name:?} is the interface that is to be made");
                return Err(PlanError::Value { key: "bridge", reason });
            }
        }
        if bridge.is_some() {
            request.refuse(self.kind(), &[("fastPath", json!(false))])?;
            sources::refuse_on_port(request)?;
        } else {
            request.refuse_on_parent(self)?;
        }
        // For the kernel the largest number means no user or group.
        for (key, id) in [("owner", config.owner), ("group", config.group)] {
            if id == Some(u32::MAX) {
                let reason = format!("{} is nobody's number", u32::MAX);
                return Err(PlanError::Value { key, reason });
            }
        }
        let is_port = bridge.is_some();
        let made = spec::Tap {
            pod_name: request.ifname.to_owned(),
            mtu: check_mtu(config.mtu)?,
            mac: request.mac()?,
            group: request.group,
            access: spec::TapAccess {
                owner: config.owner,
                group: config.group,
                multi_queue: config.multi_queue,
            },
            bridge,
        };
        let ipam = request.ipam()?;
        let addressed = ipam.is_some();
        let mut steps = vec![Step::CreateLink(spec::Link::Tap(made))];
        steps.extend(ipam);
        let configure = Configure { dns: request.dns()?, ..Configure::default() };
        steps.extend(request.finish(addressed, configure)?.map(|step| match step {
            // A bridge in the pod sends frames from its other ports by this interface.
            Step::Protect(protect) if is_port => {
                Step::Protect(Protect { check_mac: false, check_addresses: false, ..protect })
            }
            other => other,
        }));
        Ok(steps)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        let made = spec::Tap {
            pod_name: request.ifname.to_owned(),
            mtu: None,
            mac: None,
            group: request.group,
            access: spec::TapAccess::default(),
            bridge: None,
        };
        request.link_remains(spec::Link::Tap(made))
    }
}
