//! Configurations, with the exact steps or errors that result. This file contains the common helpers.

mod bridge;
mod each_key;
mod every_kind;
mod in_pod;
mod left_behind;
mod on_parent;
mod routed;

use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::step::Style;

const GROUP: u32 = 77;
static NOTHING_KNOWN: Facts = Facts { parents: BTreeMap::new(), on_bus: BTreeMap::new(), gathered: false };
const MAC: &str = "02:00:00:00:00:07";

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// A request for `net1` without facts from the kernel.
pub(super) fn request<'a>(config: &'a Map<String, Value>, cni_args: &'a CniArgs) -> Request<'a> {
    Request {
        container_id: "c1",
        ifname: "net1",
        config,
        group: GROUP,
        cni_args,
        exec: &[],
        protect: None,
        facts: &NOTHING_KNOWN,
        recorded: true,
    }
}

fn plan_with(kind: &str, config: &Value, cni_args: &str) -> Result<Vec<Step>, PlanError> {
    let mut whole = object(json!({"cniVersion": "1.1.0", "name": "net", "type": kind}));
    whole.extend(object(config.clone()));
    driver(kind).unwrap().plan(&request(&whole, &CniArgs::parse(cni_args).unwrap()))
}

fn plan(kind: &str, config: Value) -> Vec<Step> {
    plan_with(kind, &config, "").unwrap_or_else(|error| panic!("{config}: {}", Chain(&error)))
}

fn refusal(kind: &str, config: &Value, cni_args: &str) -> (u32, String) {
    let error = CniError::from(plan_with(kind, config, cni_args).expect_err(&config.to_string()));
    (error.code, error.msg)
}

fn pool() -> Value {
    json!({"type": "host-local", "subnet": "10.1.0.0/24"})
}

fn lease(kind: &str) -> Step {
    let config = object(json!({"cniVersion": "1.1.0", "name": "net", "type": kind, "ipam": pool()}));
    Step::Lease(ipam::Kind::HostLocal.parse(&config, &CniArgs::default()).unwrap())
}

fn veth(port: Option<spec::BridgePort>) -> spec::Veth {
    spec::Veth {
        // SHA-256 of "c1", NUL, "net1".
        host_name: "naca4978b4555a3".into(),
        pod_name: "net1".into(),
        mtu: None,
        mac: None,
        group: GROUP,
        port,
    }
}

fn port(bridge: &str) -> spec::BridgePort {
    spec::BridgePort { bridge: bridge.into(), ..spec::BridgePort::default() }
}

fn bridge(name: &str) -> spec::Bridge {
    spec::Bridge { name: name.into(), ..spec::Bridge::default() }
}

fn macvlan() -> spec::Macvlan {
    spec::Macvlan {
        pod_name: "net1".into(),
        parent: None,
        mode: spec::MacvlanMode::Bridge,
        mtu: None,
        mac: None,
        group: GROUP,
        broadcast_queue: None,
        tap: false,
        in_pod: false,
    }
}

fn configure(style: Style, default_route: bool) -> Step {
    Step::Configure(Configure { style, default_route, ..Configure::default() })
}

/// A reader who believes that no plugin takes a device would name one device in the definition for all its
/// pods.
#[test]
fn the_pages_name_the_built_in_plugins_that_take_a_device() {
    let taking = DRIVERS.iter().filter(|driver| driver.takes_device());
    let names: Vec<String> = taking.map(|driver| format!("`{}`", driver.kind())).collect();
    let said = format!("Of the built-in plugins {} take one, and no other does", names.join(" and "));
    for page in [include_str!("../../../docs/configuration.md"), include_str!("../../../docs/limits.md")] {
        assert!(page.split_whitespace().collect::<Vec<_>>().join(" ").contains(&said), "{said}");
    }
}
