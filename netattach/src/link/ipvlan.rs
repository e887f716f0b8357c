//! `ipvlan`: an interface of the pod with the Ethernet address of its parent on the node; only the IP address
//! distinguishes it from its siblings.
//!
//! The keys are those of the plugin of the same name in containernetworking/plugins, `hostAccess` and
//! `bandwidth`. Policy is enforced on the interface in the pod: frames between siblings never reach the
//! parent, and on the parent all have the same address. In mode l3s, packets reach the pod at the node's
//! netfilter hook and pass no program on the interface (`drivers/net/ipvlan/ipvlan_l3s.c`): policy cannot be
//! enforced on such an interface, so it is refused to a pod that a policy selects.
//!
//! Like the reference plugin, a plain executable can follow another plugin, whose result then provides what
//! the configuration lacks: the parent, as the only interface, and the addresses.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Driver, PlanError, Request, Wanted, check_link_name, parent, parent_for_mtu};
use crate::budget;
use crate::cni::json::null_is_default;
use crate::cni::{CniResult, Version};
use crate::error_chain::Chain;
use crate::ipam::{self, Lease, LeasedAddress};
use crate::spec;
use crate::step::{Configure, Step};

pub(super) struct Ipvlan;

/// Name of the interface in the error about missing addresses.
const NEEDY: &str = "an ipvlan";

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

    fn lacks_alone(&self) -> Option<PlanError> {
        Some(PlanError::IpamMissing(NEEDY))
    }

    fn wants(&self, config: &Map<String, Value>) -> Vec<Wanted> {
        let is_named = config.get("master").and_then(Value::as_str).is_some_and(|name| !name.is_empty());
        match previous(config) {
            Ok(Some(before)) if !is_named => match &before.interfaces[..] {
                [one] if one.sandbox.is_none() => {
                    let mut with = config.clone();
                    with.insert("master".into(), json!(one.name));
                    parent_for_mtu(&with)
                }
                // A CHECK, or the result has no interface that could be a parent on the node.
                _ => Vec::new(),
            },
            _ => parent_for_mtu(config),
        }
    }

    fn plan(&self, request: &Request<'_>) -> Result<Vec<Step>, PlanError> {
        request.refuse_on_parent(self)?;
        if request.mac()?.is_some() {
            let reason = "an ipvlan has the address of its parent".to_owned();
            return Err(PlanError::Value { key: "mac", reason });
        }
        let config: Config = request.read()?;
        let in_pod = request.is_in_pod()?;
        let before = if request.recorded { None } else { previous(request.config)? };
        let before = before.map(|result| Before { own: own(&result, request.ifname), result });
        let parent = match (parent(config.master)?, &before) {
            (None, Some(before)) => before.parent(in_pod)?,
            (named, _) => named,
        };
        let ipam = match (request.ipam()?, &before) {
            (None, Some(before)) => before.lease()?,
            (ipam, _) => ipam,
        };
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
            in_pod,
        };
        // Packets reach an ipvlan only by its addresses. This is the last check, because a preceding plugin
        // may provide the addresses.
        let ipam = ipam.ok_or(PlanError::IpamMissing(NEEDY))?;
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

/// The result of the preceding plugins.
struct Before {
    result: CniResult,
    /// The position of the interface in its own result, which CHECK passes.
    own: Option<usize>,
}

/// The result of the preceding plugins, if the configuration has one.
fn previous(config: &Map<String, Value>) -> Result<Option<CniResult>, PlanError> {
    let Some(value) = config.get("prevResult").filter(|value| !value.is_null()) else { return Ok(None) };
    let version = config.get("cniVersion").and_then(Value::as_str).and_then(Version::exact);
    let read = CniResult::parse(value, version.unwrap_or(Version::LATEST));
    read.map(Some).map_err(|error| PlanError::Value { key: "prevResult", reason: error.msg })
}

fn own(result: &CniResult, ifname: &str) -> Option<usize> {
    result.interfaces.iter().position(|listed| listed.name == ifname && listed.sandbox.is_some())
}

impl Before {
    /// The parent, if the configuration names none; `None`: the parent is no longer known.
    fn parent(&self, in_pod: bool) -> Result<Option<String>, PlanError> {
        if self.own.is_some() {
            return Ok(None);
        }
        let missing =
            |what: String| PlanError::Value { key: "master", reason: format!("missing, and {what}") };
        let [one] = &self.result.interfaces[..] else {
            let count = self.result.interfaces.len();
            let what = format!("prevResult has {count} interfaces, where its only one would be the parent");
            return Err(missing(what));
        };
        if one.sandbox.is_some() != in_pod {
            let place = match in_pod {
                true => "of the node, and not of the pod as with linkInContainer",
                false => "of the pod, and not of the node as without linkInContainer",
            };
            return Err(missing(format!("the interface {:?} of prevResult is {place}", one.name)));
        }
        check_link_name("master", &one.name)?;
        Ok(Some(one.name.clone()))
    }

    /// The addresses, if the configuration names no address manager; `None`: there are no addresses.
    fn lease(&self) -> Result<Option<Step>, PlanError> {
        let CniResult { ips, routes, dns, .. } = &self.result;
        budget::ADDRESSES.check(ips.len())?;
        budget::RESULT_ROUTES.check(routes.len())?;
        // The preceding plugin may have assigned the addresses to the parent.
        let is_its = |at: Option<usize>| self.own.is_none() || at.is_none() || at == self.own;
        let its = ips.iter().filter(|ip| is_its(ip.interface));
        let addresses: Vec<LeasedAddress> =
            its.map(|ip| LeasedAddress { address: ip.address, gateway: ip.gateway }).collect();
        if addresses.is_empty() {
            return Ok(None);
        }
        let lease = Lease { addresses, routes: routes.clone(), dns: dns.clone(), server: None };
        match ipam::Config::given("ips", lease) {
            Ok(config) => Ok(Some(Step::Lease(config))),
            Err(error) => Err(PlanError::Value { key: "prevResult", reason: Chain(&error).to_string() }),
        }
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

#[cfg(test)]
mod tests {
    use super::super::tests::request;
    use super::*;
    use crate::cni::CniArgs;

    /// The parent and the lease that are planned without an agent, or the error.
    fn planned(keys: Value) -> Result<(Option<String>, Value), String> {
        let mut config = json!({"cniVersion": "1.0.0", "name": "net", "type": "ipvlan"});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let (config, args) = (config.as_object().unwrap(), CniArgs::parse("IP=10.9.0.9/24").unwrap());
        let steps = Ipvlan.plan(&Request { recorded: false, ..request(config, &args) });
        match &steps.map_err(|error| Chain(&error).to_string())?[..] {
            [Step::CreateLink(spec::Link::Ipvlan(made)), Step::Lease(lease), Step::Configure(_)] => {
                Ok((made.parent.clone(), serde_json::to_value(lease).unwrap()))
            }
            other => panic!("{other:?}"),
        }
    }

    fn result(interfaces: &Value, ips: &Value) -> Value {
        json!({
            "cniVersion": "1.0.0", "interfaces": interfaces, "ips": ips,
            "routes": [{"dst": "0.0.0.0/0"}], "dns": {"nameservers": ["10.1.0.53"]}
        })
    }

    fn leased(addresses: &Value) -> Value {
        json!({
            "ipam": "static", "addresses": addresses, "routes": [{"dst": "0.0.0.0/0"}],
            "dns": {"nameservers": ["10.1.0.53"]}
        })
    }

    /// Rows: IVL-chained.
    #[test]
    fn the_plugin_before_has_what_the_configuration_lacks() {
        let ips = json!([{"address": "10.1.0.7/24", "gateway": "10.1.0.1", "interface": 0}, {"address": "fd00::7/64"}]);
        let addresses = json!([{"address": "10.1.0.7/24", "gateway": "10.1.0.1"}, {"address": "fd00::7/64"}]);
        let before = result(&json!([{"name": "ens6"}]), &ips);
        let of = |parent: &str| Ok((Some(parent.to_owned()), leased(&addresses)));
        // `IP` of CNI_ARGS was meant for the plugin that provided the addresses.
        assert_eq!(planned(json!({"prevResult": before})), of("ens6"));
        assert_eq!(planned(json!({"prevResult": before, "master": "", "ipam": {}})), of("ens6"));
        assert_eq!(planned(json!({"prevResult": before, "master": "eth1"})), of("eth1"));
        let own = json!({"type": "static", "addresses": [{"address": "10.2.0.7/24"}]});
        let (parent, lease) = planned(json!({"prevResult": before, "ipam": own})).unwrap();
        assert_eq!(
            (parent.as_deref(), &lease["addresses"][0]["address"]),
            (Some("ens6"), &json!("10.2.0.7/24"))
        );
        let in_pod = result(&json!([{"name": "net0", "sandbox": "/run/netns/a"}]), &ips);
        assert_eq!(planned(json!({"prevResult": in_pod, "linkInContainer": true})), of("net0"));
    }

    /// Rows: IVL-chained.
    #[test]
    fn check_knows_the_interface_by_its_own_result() {
        let own = json!([{"name": "net1", "sandbox": "/run/netns/a"}, {"name": "other", "sandbox": "/run/netns/a"}]);
        let ips =
            json!([{"address": "10.1.0.7/24", "interface": 0}, {"address": "10.3.0.7/24", "interface": 1}]);
        let expected = leased(&json!([{"address": "10.1.0.7/24"}]));
        assert_eq!(planned(json!({"prevResult": result(&own, &ips)})), Ok((None, expected)));
    }

    /// Rows: IVL-chained.
    #[test]
    fn what_no_plugin_before_has_left_is_refused_by_its_key() {
        let ips = json!([{"address": "10.1.0.7/24"}]);
        let on_node = json!([{"name": "ens6"}]);
        let two = json!([{"name": "ens6"}, {"name": "ens7"}]);
        let in_pod = json!([{"name": "net0", "sandbox": "/run/netns/a"}]);
        let table = [
            (
                json!({"prevResult": result(&two, &ips)}),
                "key master: missing, and prevResult has 2 interfaces, where its only one would be the parent",
            ),
            (
                json!({"prevResult": result(&in_pod, &ips)}),
                "key master: missing, and the interface \"net0\" of prevResult is of the pod, and not of the node as without linkInContainer",
            ),
            (
                json!({"prevResult": result(&on_node, &ips), "linkInContainer": true}),
                "key master: missing, and the interface \"ens6\" of prevResult is of the node, and not of the pod as with linkInContainer",
            ),
            (
                json!({"prevResult": result(&on_node, &json!([]))}),
                "key ipam: missing, and an ipvlan needs addresses",
            ),
            (
                json!({"prevResult": result(&on_node, &json!([{"address": "224.0.0.1/24"}]))}),
                "key prevResult: ips[0]: 224.0.0.1 is not the address of one interface",
            ),
            (json!({"master": "ens6"}), "key ipam: missing, and an ipvlan needs addresses"),
        ];
        for (keys, expected) in table {
            assert_eq!(planned(keys), Err(expected.to_owned()));
        }
    }

    #[test]
    fn the_mtu_is_bounded_by_that_parent() {
        let wants = |keys: Value| Ipvlan.wants(keys.as_object().unwrap());
        let before = result(&json!([{"name": "ens6"}]), &json!([]));
        let own = result(&json!([{"name": "eth0", "sandbox": "/run/netns/a"}]), &json!([]));
        let of = |name: &str| vec![Wanted::Parent(Some(name.to_owned()))];
        assert_eq!(wants(json!({"mtu": 1400, "prevResult": before})), of("ens6"));
        assert_eq!(wants(json!({"mtu": 1400, "master": "eth1", "prevResult": before})), of("eth1"));
        assert_eq!(wants(json!({"mtu": 1400, "prevResult": own})), []);
        assert_eq!(wants(json!({"prevResult": before})), []);
    }
}
