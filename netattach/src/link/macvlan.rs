//! `macvlan`: an interface of the pod with an Ethernet address of its own on a parent of the node; and
//! `macvtap`, the same for a process that reads and writes frames by a character device.
//!
//! The keys are those of the plugin `macvlan` in containernetworking/plugins, `hostAccess` and `bandwidth`.
//! Policy is enforced on the parent, except for a macvlan in mode passthru; with a parent in the pod, on the
//! interface itself.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Driver, PlanError, Request, Wanted, parent, parent_for_mtu};
use crate::cni::json::null_is_default;
use crate::spec;
use crate::step::{Configure, Step};

pub(super) struct Macvlan {
    /// Whether the driver creates macvtaps.
    tap: bool,
}

pub(super) static MACVLAN: Macvlan = Macvlan { tap: false };
pub(super) static MACVTAP: Macvlan = Macvlan { tap: true };

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
    #[serde(default, rename = "linkLocal", deserialize_with = "null_is_default")]
    link_local: bool,
    #[serde(default, rename = "hostAccess", deserialize_with = "null_is_default")]
    host_access: bool,
}

impl Driver for Macvlan {
    fn kind(&self) -> &'static str {
        if self.tap { "macvtap" } else { "macvlan" }
    }

    /// A macvlan in mode passthru takes over the parent's own address: on the parent, its frames cannot be
    /// distinguished from the node's.
    fn is_judged(&self, config: &Map<String, Value>) -> bool {
        let in_pod = config.get("linkInContainer").and_then(Value::as_bool) == Some(true);
        in_pod || config.get("mode").and_then(Value::as_str) != Some("passthru")
    }

    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted> {
        parent_for_mtu(config)
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse_on_parent(self)?;
        if self.tap {
            request.refuse(self.kind(), &[("bcqueuelen", json!(0))])?;
        }
        let config: Config = request.read()?;
        let parent = parent(config.master)?;
        let mtu = request.mtu_on(parent.as_deref(), config.mtu)?;
        let in_pod = request.is_in_pod()?;
        let mode = mode(config.mode.as_deref())?;
        let mac = request.mac()?;
        if mode == spec::MacvlanMode::Passthru && mac.is_some() {
            let reason = "a macvlan in mode passthru has the address of its parent".to_owned();
            return Err(PlanError::Value { key: "mac", reason });
        }
        let link = spec::Link::Macvlan(spec::Macvlan {
            pod_name: request.ifname.to_owned(),
            parent,
            mode,
            mtu,
            mac,
            group: request.group,
            broadcast_queue: config.bcqueuelen.filter(|length| *length != 0),
            tap: self.tap,
            in_pod,
        });
        let ipam = request.ipam()?;
        let addressed = ipam.is_some();
        let is_checked =
            request.protect.is_some_and(|protect| protect.check_addresses) && self.is_judged(request.config);
        let configure = Configure {
            dns: request.dns()?,
            // IPv6 would be of no use: a pod may send only from addresses of its lease, so not from one that
            // it generates from a router advertisement. And the packets that a new pod sends from its
            // link-local address would reach all macvlans of the parent.
            v4_alone: addressed && is_checked && !config.link_local,
            ..Configure::default()
        };
        let apart =
            (mode != spec::MacvlanMode::Bridge).then_some("needs mode bridge: the others keep it apart");
        let host_access = request.host_access(config.host_access, apart, addressed)?;
        let protect = request.protection(addressed)?;
        let mut steps = vec![Step::CreateLink(link)];
        // An executed address manager may send requests by the interface, too.
        let may_ask = |step: &Step| step.asks_the_network() || matches!(step, Step::Delegate(_));
        match (ipam, protect) {
            // While the address is being requested, the parent passes the pod's frames only if they come from
            // a known Ethernet address.
            (Some(asks), Some(protect)) if !in_pod && may_ask(&asks) => {
                steps.extend([protect, asks, Step::ProtectAddresses]);
            }
            (ipam, protect) => steps.extend(ipam.into_iter().chain(protect)),
        }
        steps.push(Step::Configure(configure));
        steps.extend(host_access);
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
            tap: self.tap,
            in_pod: false,
        };
        request.link_remains(spec::Link::Macvlan(made))
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
