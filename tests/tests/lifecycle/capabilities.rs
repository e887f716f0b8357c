//! The agent's capabilities in `deploy`: each is needed, which is shown by what fails without it, and together they
//! are sufficient, for networks with only built-in plugins and for executed plugins.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{WIRE, executable};
use netattach_tests::node_root::{NodeRoot, OwnMounts, with_own_mounts};
use netattach_tests::privilege::with_only;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, connects, ping};
use netattach_tests::{Node, Pod, tools};
use rustix::thread::CapabilitySet;
use serde::Deserialize;
use serde_json::{Value, json};

/// Every capability that a manifest names, and the failure without it.
const KNOWN: [(&str, CapabilitySet, &str); 4] = [
    ("NET_ADMIN", CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN (to make links, addresses, routes and filters)"),
    (
        "SYS_ADMIN",
        CapabilitySet::SYS_ADMIN,
        "CAP_SYS_ADMIN (to enter the network namespaces of pods and to load BPF programs)",
    ),
    (
        "SYS_CHROOT",
        CapabilitySet::SYS_CHROOT,
        "CAP_SYS_CHROOT (to start plugins in the root directory that delegation.root names)",
    ),
    ("NET_RAW", CapabilitySet::NET_RAW, ""),
];

pub(crate) fn deploy(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file);
    let text = fs::read_to_string(path).unwrap();
    Value::deserialize(serde_norway::Deserializer::from_str(&text)).unwrap()
}

/// Returns the capabilities of the base.
pub(crate) fn for_built_in_plugins() -> Vec<String> {
    let set = deploy("base/daemonset.yaml");
    let added = &set["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"];
    serde_json::from_value(added.clone()).unwrap()
}

/// Returns the additional capabilities of the component.
pub(crate) fn for_executed_plugins() -> Vec<String> {
    let component = deploy("components/executed-plugins/kustomization.yaml");
    let patch = component["patches"][0]["patch"].as_str().unwrap();
    let changes = Value::deserialize(serde_norway::Deserializer::from_str(patch)).unwrap();
    let changes = changes.as_array().unwrap().iter();
    let added = changes.filter(|change| change["path"].as_str().unwrap().ends_with("/capabilities/add/-"));
    added.map(|change| change["value"].as_str().unwrap().to_owned()).collect()
}

fn set(names: &[String]) -> CapabilitySet {
    let one = |name: &String| KNOWN.iter().find(|(known, ..)| known == name).unwrap().1;
    names.iter().map(one).fold(CapabilitySet::empty(), CapabilitySet::union)
}

/// The one line of an agent that does not start.
fn refused(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let log = String::from_utf8(output.stderr).unwrap();
    let [line] = log.lines().collect::<Vec<_>>()[..] else { panic!("more than a line:\n{log}") };
    line.split_once("netattach::agent::run: ").unwrap().1.to_owned()
}

/// Checks for each of these that an agent with only the others names the missing one.
fn each_is_named(node: &Node, names: &[String]) {
    let agent = executable("netattachd").unwrap();
    let all = set(names);
    for (name, capability, what) in KNOWN.iter().filter(|(name, ..)| names.iter().any(|it| it == name)) {
        if what.is_empty() {
            continue;
        }
        let command = node.agent_command(&agent).unwrap();
        let line = node.namespace.run(|| with_only(all - *capability, || Ok(refused(command)))).unwrap();
        let expected = format!(
            "this process (user id 0) lacks {what}: run netattachd as root, or in a container with these capabilities"
        );
        assert_eq!(line, expected, "{name}");
    }
}

/// Defines networks of the built-in plugins besides the default one, which is a bridge: each kind of link, and all
/// chained plugins.
fn built_in(node: &Node) {
    let list = |name: &str, plugins: Value| {
        let list = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
        node.write(name, &network(NAMESPACE, name, &list)).unwrap();
    };
    list("routed", json!([{"type": "veth", "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])}]));
    // The node and the outside host have the first ones.
    let range = json!([{"subnet": "192.0.2.0/24", "rangeStart": "192.0.2.20"}]);
    let ipam = json!({"type": "host-local", "dataDir": node.path("leases"), "ranges": [range]});
    list("lan", json!([{"type": "macvlan", "master": WIRE, "hostAccess": true, "ipam": ipam}]));
    let ipam = node.host_local(&["10.53.0.0/24", "fd00:53::/64"]);
    list(
        "web",
        json!([
            {"type": "bridge", "bridge": "web0", "isGateway": true, "ipam": ipam},
            {"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}, "txQLen": 500, "allmulti": true},
            {"type": "sbr"},
            {"type": "portmap", "capabilities": {"portMappings": true}},
            {"type": "bandwidth", "ingressRate": 100_000_000, "egressRate": 100_000_000}
        ]),
    );
    let rules = json!({
        "podSelector": {}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": 80}]}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.9.0.0/16"]}}]}]
    });
    node.write("only", &policy("only", "routed, lan, web", &rules)).unwrap();
}

/// An existing pod keeps working while an agent that lacks one does not start.
#[test]
fn built_in_plugins_need_what_the_base_gives_and_no_more() {
    let given = for_built_in_plugins();
    assert_eq!(given, ["NET_ADMIN", "SYS_ADMIN"]);
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let selection = json!([{"name": "routed"}, {"name": "lan"}, {"name": "web", "portMappings": ports}]);
    let mut node = Node::new(&[pod("a", &json!({}), &selection)]).unwrap();
    built_in(&node);
    // The node has an address on the parent of macvlans.
    let outside = node.add_outside().unwrap();
    each_is_named(&node, &given);
    let pod = Pod::new("a").unwrap();
    let netns = pod.namespace.bind(&node.path("netns")).unwrap();
    with_only(set(&given), || node.start()).unwrap();
    let call = |node: &Node, verb| {
        node.call(verb, &pod).with("CNI_NETNS", &netns.path().display().to_string()).run()
    };
    call(&node, "ADD").success();
    let rows = node.ctl(&["attachments"]).unwrap();
    let shown = rows.as_array().unwrap().iter().map(|row| {
        let level = row["enforcement"].as_str().unwrap();
        (row["ifname"].as_str().unwrap(), json!([row["kind"], level.starts_with("full"), row["state"]]))
    });
    let kinds = [("eth0", "bridge"), ("net1", "veth"), ("net2", "macvlan"), ("net3", "bridge")];
    let expected = kinds.map(|(interface, kind)| (interface, json!([kind, true, "attached"])));
    assert_eq!(shown.collect::<BTreeMap<_, _>>(), BTreeMap::from(expected));
    let _echo = Echo::serve(&pod.namespace, "10.53.0.2:80".parse().unwrap()).unwrap();
    assert!(connects(&outside, "192.0.2.1:8080".parse().unwrap(), PATIENCE), "a port of the node");
    node.stop().unwrap();
    each_is_named(&node, &given);
    assert!(ping(&pod.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
    with_only(set(&given), || node.start()).unwrap();
    for verb in ["CHECK", "DEL"] {
        call(&node, verb).success();
    }
    Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
}

/// `bridge`, `host-local` and `portmap` of the reference plugins, which need a loader, start iptables and open their
/// own namespace by their process: in a root directory like the node's, which has a separate `/proc` and is the only
/// one with them.
#[test]
fn executed_plugins_need_what_the_component_gives_and_no_more() {
    const TEST: &str = "executed_plugins_need_what_the_component_gives_and_no_more";
    let names = ["bridge", "host-local", "portmap"];
    let Some(reference) = tools::directory(TEST, "NETATTACH_REFERENCE_PLUGINS", &names) else { return };
    let more = for_executed_plugins();
    assert_eq!(more, ["SYS_CHROOT", "NET_RAW"]);
    let given = [for_built_in_plugins(), more].concat();
    with_own_mounts(|mounts| in_the_nodes_root(mounts, &reference, &given));
    legacy_iptables_needs_raw_sockets(&given);
}

fn in_the_nodes_root(mounts: &OwnMounts, reference: &Path, given: &[String]) {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    let pod = Pod::new("a").unwrap();
    let netns = pod.namespace.bind(&node.path("netns")).unwrap();
    let directory = node.path("cni-bin");
    let below = directory.strip_prefix("/").unwrap();
    let root = NodeRoot::mount(mounts, &[below.to_str().unwrap()]).unwrap();
    for name in ["bridge", "host-local", "portmap"] {
        fs::copy(reference.join(name), root.path().join(below).join(name)).unwrap();
    }
    node.set("delegation", json!({"exec": ["bridge", "host-local", "portmap"], "root": root.path()}));
    let list = json!({
        "cniVersion": "1.0.0", "name": "default",
        "plugins": [
            {"type": "bridge", "bridge": "br0", "isDefaultGateway": true, "ipam": node.host_local(&["10.50.0.0/24"])},
            {"type": "portmap", "capabilities": {"portMappings": true}, "snat": false}
        ]
    });
    let file = node.path("default.conflist");
    fs::write(&file, list.to_string()).unwrap();
    node.set("defaultNetwork", json!(file));
    each_is_named(&node, given);

    with_only(set(given), || node.start()).unwrap();
    let outside = node.add_outside().unwrap();
    let call = |verb| {
        let mut call = node.call(verb, &pod).with("CNI_NETNS", &netns.path().display().to_string());
        let mut config: Value = serde_json::from_str(&call.stdin).unwrap();
        config["runtimeConfig"] =
            json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]});
        call.stdin = config.to_string();
        call.run()
    };
    call("ADD").success();
    let _echo = Echo::serve(&pod.namespace, "10.50.0.2:80".parse().unwrap()).unwrap();
    let opened = connects(&outside, "192.0.2.1:8080".parse().unwrap(), PATIENCE);
    assert!(opened, "a port of the node that iptables opened, which is not in an image");
    call("CHECK").success();
    call("DEL").success();
    Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
}

/// `iptables` of many nodes is this one; it opens a raw socket to speak to the kernel.
fn legacy_iptables_needs_raw_sockets(given: &[String]) {
    let node = netattach_tests::Namespace::new().unwrap();
    let asked = |kept: CapabilitySet| {
        let ask = || Ok(Command::new("iptables-legacy").args(["-t", "nat", "-S"]).output()?);
        let output = node.run(|| with_only(kept, ask)).unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let refused = |said: &str| said.contains("Permission denied (you must be root)");
    assert!(refused(&asked(set(given) - CapabilitySet::NET_RAW)));
    let said = asked(set(given));
    assert!(!refused(&said), "{said}");
}
