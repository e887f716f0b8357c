//! netattach after another plugin in the runtime's list (`defaultNetwork: chained`): the interface of that plugin is
//! the pod's default network, and stays unchanged.

use std::net::IpAddr;
use std::path::PathBuf;

use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, annotated, network, network_policy, pod};
use netattach_tests::node::WIRE;
use netattach_tests::runtime::{self, with_result};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, SILENCE, eventually, ping};
use netattach_tests::{Node, Outcome, Pod, tools};
use serde_json::{Value, json};

const PLUGINS: [&str; 4] = ["bridge", "ptp", "macvlan", "host-local"];
/// Name of the runtime's list.
const LIST: &str = "cbr0";

/// A runtime whose list has a plugin of the reference before netattach.
struct Chain {
    node: Node,
    plugins: PathBuf,
    /// The first plugin, and netattach.
    entries: [Value; 2],
}

impl Chain {
    /// Returns a node with the network `lan` besides the runtime's; `None`: the reference's plugins are missing.
    fn new(test: &str, kind: &str, version: &str) -> Option<Self> {
        let plugins = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &PLUGINS)?;
        let mut node = Node::new(&[pod("a", &json!({}), &json!("lan"))]).unwrap();
        node.add_wire().unwrap();
        let lan = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.52.0.0/24"])});
        node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
        node.set("defaultNetwork", json!("chained"));
        node.set("repeatedAdd", json!("return"));
        let first = json!({
            "cniVersion": version, "name": LIST, "type": kind, "bridge": "cni7", "isGateway": true, "master": WIRE,
            "ipam": node.host_local(&["10.79.0.0/24"])
        });
        let mut own = node.cni_config(version);
        own["name"] = json!(LIST);
        Some(Self { node, plugins, entries: [first, own] })
    }

    /// Calls the first plugin.
    fn first(&self, verb: &str, pod: &Pod, result: Option<&Value>) -> Value {
        let config = result.map_or(self.entries[0].clone(), |result| with_result(&self.entries[0], result));
        let netns = pod.namespace.path();
        let call = runtime::Call { container: &pod.container, ifname: "eth0", netns, args: "" };
        let answer = runtime::run(&self.node.namespace, &self.plugins, verb, call, &config).unwrap();
        assert_eq!(answer.exit, Some(0), "{answer:?}");
        answer.stdout
    }

    /// Calls netattach with that result.
    fn own(&self, verb: &str, pod: &Pod, result: &Value) -> Outcome {
        self.node.call(verb, pod).stdin(with_result(&self.entries[1], result)).run()
    }

    fn row(&self, ifname: &str) -> Value {
        let rows = self.node.ctl(&["attachments"]).unwrap();
        let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == ifname);
        row.unwrap_or_else(|| panic!("{rows:#}")).clone()
    }

    fn has_eth0(&self, pod: &Pod) -> bool {
        Handle::open_in(pod.namespace.netns()).unwrap().find_link("eth0").unwrap().is_some()
    }
}

/// Rows: CHN-runtime, CHN-runtime-verbs.
#[test]
fn the_networks_of_the_annotation_are_attached_beside_what_was_made_before() {
    let test = "the_networks_of_the_annotation_are_attached_beside_what_was_made_before";
    for (kind, version) in [("bridge", "0.4.0"), ("ptp", "1.0.0"), ("macvlan", "1.0.0")] {
        let Some(mut chain) = Chain::new(test, kind, version) else { return };
        chain.node.start().unwrap();
        let a = Pod::new("a").unwrap();
        let made = chain.first("ADD", &a, None);
        let before = Snapshot::take(&chain.node, &[&a]).unwrap();
        assert_eq!(chain.own("ADD", &a, &made).success(), made, "{kind}");
        chain.node.await_status(&a);
        let status = chain.node.status(&a).unwrap();
        let shown = |at: usize| {
            let entry = &status[at];
            [&entry["name"], &entry["interface"], &entry["default"], &entry["ips"]].map(Value::clone)
        };
        assert_eq!(shown(0), [json!(LIST), json!("eth0"), json!(true), json!(["10.79.0.2"])], "{kind}");
        assert_eq!(shown(1), [json!("shop/lan"), json!("net1"), json!(false), json!(["10.52.0.2"])]);
        let found = chain.row("eth0");
        assert_eq!(
            (&found["kind"], &found["programs_wait"]),
            (&json!("exec:chained"), &json!(true)),
            "{found:#}"
        );
        let attached = Snapshot::take(&chain.node, &[&a]).unwrap();

        // The other verbs, and the next agent.
        assert_eq!(chain.own("CHECK", &a, &made).success(), Value::Null);
        assert_eq!(chain.own("ADD", &a, &made).success(), made, "repeated");
        let (code, told) = chain.own("ADD", &a, &json!({"cniVersion": version})).failure();
        assert_eq!(code, 4, "{told}");
        assert!(told.contains("eth0 (cbr0) has another way to take the interface"), "{told}");
        let gc = |in_use: &[&Pod]| assert_eq!(chain.node.gc(LIST, Some(in_use)).success(), Value::Null);
        gc(&[&a]);
        let status = chain.node.call("STATUS", &a).stdin(chain.node.cni_config("1.1.0")).run();
        assert_eq!(status.success(), Value::Null);
        chain.node.kill().unwrap();
        chain.node.start().unwrap();
        assert_eq!(chain.own("CHECK", &a, &made).success(), Value::Null, "after a restart");
        assert_eq!(Snapshot::take(&chain.node, &[&a]).unwrap(), attached, "{kind}");

        // DEL reaches the last plugin first, and may be repeated.
        for _ in 0..2 {
            assert_eq!(chain.own("DEL", &a, &made).success(), Value::Null);
            assert_eq!(Snapshot::take(&chain.node, &[&a]).unwrap(), before, "{kind}");
        }
        // Another ADD, which GC removes.
        assert_eq!(chain.own("ADD", &a, &made).success(), made, "{kind}");
        let gone = chain.node.gc(LIST, Some(&[]));
        assert_eq!(gone.success(), Value::Null);
        assert!(chain.has_eth0(&a), "{kind}");
        assert_eq!(Snapshot::take(&chain.node, &[&a]).unwrap(), before, "{kind}");

        // A change is found.
        assert_eq!(chain.own("ADD", &a, &made).success(), made);
        chain.first("DEL", &a, Some(&made));
        let (code, told) = chain.own("CHECK", &a, &made).failure();
        assert!(told.contains("interface eth0 is gone from the pod"), "{code} {told}");
        assert_eq!(chain.own("DEL", &a, &made).success(), Value::Null);
        Snapshot::take(&chain.node, &[&a]).unwrap().assert_nothing_is_left();
    }
}

/// Rows: CHN-runtime-policy.
#[test]
fn policies_hold_on_what_was_made_before() {
    let Some(mut chain) = Chain::new("policies_hold_on_what_was_made_before", "bridge", "1.0.0") else {
        return;
    };
    chain.node.set("networkPolicy", json!(true));
    chain.node.start().unwrap();
    // A pod's own node may always connect, whatever the policies: the test uses another pod.
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    let [made, of_b] = [&a, &b].map(|pod| chain.first("ADD", pod, None));
    chain.own("ADD", &a, &made).success();
    let other: IpAddr = "10.79.0.3".parse().unwrap();
    assert_eq!(of_b["ips"][0]["address"], format!("{other}/24"));
    assert!(ping(&a.namespace, other, PATIENCE).unwrap());
    let nothing = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    chain.node.write("nothing", &network_policy("nothing", &nothing)).unwrap();
    assert!(eventually(PATIENCE, || !ping(&a.namespace, other, SILENCE).unwrap()));
    let found = chain.row("eth0");
    assert_eq!((&found["enforcement"], found.get("programs_wait")), (&json!("full"), None), "{found:#}");
    chain.node.remove("nothing").unwrap();
    assert!(eventually(PATIENCE, || ping(&a.namespace, other, SILENCE).unwrap()));
    chain.own("DEL", &a, &made).success();

    // The keys of the runtime's entry.
    chain.entries[1]["sourceCheck"] = json!("mac");
    chain.own("ADD", &a, &made).success();
    let found = chain.row("eth0");
    let shown = (&found["enforcement"], &found["enforcement_detail"], found.get("programs_wait"));
    assert_eq!(shown, (&json!("full"), &json!("the pod may send from any IP address"), None), "{found:#}");
    chain.own("CHECK", &a, &made).success();
    chain.own("DEL", &a, &made).success();
    chain.first("DEL", &a, Some(&made));
    chain.first("DEL", &b, Some(&of_b));
    Snapshot::take(&chain.node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: CHN-runtime-refused.
#[test]
fn one_of_the_two_makes_the_default_network() {
    let mut node = Node::new(&[
        pod("a", &json!({}), &json!(null)),
        annotated(pod("chooses", &json!({}), &json!(null)), "v1.multus-cni.io/default-network", "default"),
    ])
    .unwrap();
    let refused = |node: &Node, pod: &str, config: &Value| {
        node.call("ADD", &Pod::new(pod).unwrap()).stdin(config).run().failure()
    };
    let result = json!({"cniVersion": "1.0.0"});
    let with = with_result(&node.cni_config("1.0.0"), &result);
    node.start().unwrap();
    let twice = "key prevResult: a plugin before netattach in the runtime's list has made the pod's interface, and \
                 defaultNetwork names a network that netattach would attach as well: set defaultNetwork to chained, or let \
                 netattach be the first plugin of the list";
    assert_eq!(refused(&node, "a", &with), (7, twice.to_owned()));
    node.kill().unwrap();

    node.set("defaultNetwork", json!("chained"));
    node.start().unwrap();
    let missing = "key prevResult: missing, and defaultNetwork is chained: netattach comes behind the plugin that makes the \
                   pod's interface, in the runtime's list; where it is to be the first, defaultNetwork names the network";
    assert_eq!(refused(&node, "a", &node.cni_config("1.0.0")), (7, missing.to_owned()));
    let chosen = "pod shop/chooses: annotation v1.multus-cni.io/default-network: defaultNetwork is chained, so a plugin before \
                  netattach has made the pod's interface already";
    assert_eq!(refused(&node, "chooses", &with), (7, chosen.to_owned()));
    let other = with_result(&node.cni_config("1.0.0"), &json!({"cniVersion": "0.2.0"}));
    let (code, told) = refused(&node, "a", &other);
    assert_eq!((code, told.starts_with("key prevResult: could not parse prevResult")), (6, true), "{told}");
    let mut ports = with;
    ports["capabilities"] = json!({"portMappings": true});
    ports["runtimeConfig"] = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80}]});
    let lost = "attach eth0 (pods): key capabilities.portMappings: asked for, and not supported by netattach's own netattach \
                plugin";
    assert_eq!(refused(&node, "a", &ports), (2, lost.to_owned()));
    let ready = node.whole_status().unwrap()["ready"].clone();
    let network =
        ready.as_array().unwrap().iter().find(|it| it["condition"] == "default network").unwrap().clone();
    assert_eq!((&network["met"], &network["detail"]), (&json!(true), &json!("chained")));
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}
