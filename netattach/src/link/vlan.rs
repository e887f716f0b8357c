//! `vlan`: a VLAN of a parent as an interface of the pod.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, and `vlanProto` as in
//! sriov-cni, for service tags. Policy is enforced on the interface in the pod, because on the parent its
//! frames may have the same addresses as frames of other VLANs.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Driver, PlanError, Request, Wanted, check_link_name, parent_for_mtu};
use crate::cni::json::null_is_default;
use crate::spec::{self, VlanTag};
use crate::step::{Configure, Step};

pub(super) struct Vlan;

/// The highest id of a VLAN (IEEE 802.1Q, 9.6: 4095 is reserved).
const MOST: i64 = 4094;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    master: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    vlan_id: i64,
    #[serde(default)]
    vlan_proto: Option<String>,
    #[serde(default)]
    mtu: Option<u32>,
}

impl Driver for Vlan {
    fn kind(&self) -> &'static str {
        "vlan"
    }

    fn is_judged(&self, _: &Map<String, Value>) -> bool {
        true
    }

    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted> {
        parent_for_mtu(config)
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse_on_parent(self)?;
        let config: Config = request.read()?;
        let Some(parent) = config.master.filter(|name| !name.is_empty()) else {
            let reason = "missing; name the interface whose VLAN it is".to_owned();
            return Err(PlanError::Value { key: "master", reason });
        };
        check_link_name("master", &parent)?;
        let id = u16::try_from(config.vlan_id).ok().filter(|_| config.vlan_id <= MOST);
        let id = id.ok_or_else(|| PlanError::Value {
            key: "vlanId",
            reason: format!("{} is not between 0 and {MOST}", config.vlan_id),
        })?;
        let mtu = request.mtu_on(Some(&parent), config.mtu)?;
        let mut steps = vec![Step::CreateLink(spec::Link::Vlan(spec::Vlan {
            pod_name: request.ifname.to_owned(),
            parent,
            tag: VlanTag { id, service: is_service(config.vlan_proto.as_deref())? },
            mtu,
            mac: request.mac()?,
            group: request.group,
            in_pod: request.is_in_pod()?,
        }))];
        let ipam = request.ipam()?;
        let addressed = ipam.is_some();
        steps.extend(ipam);
        let configure = Configure { dns: request.dns()?, ..Configure::default() };
        steps.extend(request.finish(addressed, configure)?);
        Ok(steps)
    }

    fn remains(&self, request: &Request<'_>) -> Vec<Step> {
        let made = spec::Vlan {
            pod_name: request.ifname.to_owned(),
            parent: String::new(),
            tag: VlanTag { id: 0, service: false },
            mtu: None,
            mac: None,
            group: request.group,
            in_pod: false,
        };
        request.link_remains(spec::Link::Vlan(made))
    }
}

pub(super) fn is_service(protocol: Option<&str>) -> Result<bool, PlanError> {
    match protocol.unwrap_or_default().to_ascii_lowercase().as_str() {
        "" | "802.1q" => Ok(false),
        "802.1ad" => Ok(true),
        other => {
            let reason = format!("{other:?} is neither 802.1q nor 802.1ad");
            Err(PlanError::Value { key: "vlanProto", reason })
        }
    }
}
