//! Another primary network as the default network: each product's configuration in the runtime's directory, one after
//! the other, and the input of its plugins.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;

use netattach_tests::manifest::pod;
use netattach_tests::plugin_calls::verbs;
use netattach_tests::primaries::{PRIMARIES, Primary};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually};
use netattach_tests::{Call, Node, Pod, tools};
use serde_json::{Map, Value, json};

/// Returns a node whose runtime has one directory of configurations, from which the default network is taken and into
/// which the agent writes its own.
fn node(pods: &[&str]) -> Node {
    let pods: Vec<Value> = pods.iter().map(|name| pod(name, &json!({}), &json!(null))).collect();
    let mut node = Node::new(&pods).unwrap();
    fs::create_dir(node.path("net.d")).unwrap();
    node.set("defaultNetwork", json!(node.path("net.d")));
    node.set("cniConf", json!({"dir": node.path("net.d")}));
    node
}

/// Replaces a file, like the products: written under another name and renamed.
fn install(node: &Node, file: &str, text: &str) {
    let temporary = node.path("net.d/.tmp");
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, node.path("net.d").join(file)).unwrap();
}

/// The name of the default network once the node is ready with it.
fn ready_with(node: &Node) -> Option<String> {
    let status = node.whole_status().unwrap();
    let ready = status["ready"].as_array().unwrap().clone();
    let of = |name: &str| ready.iter().find(|it| it["condition"] == name).cloned().unwrap();
    let (network, file) = (of("default network"), of("CNI configuration"));
    (network["met"] == true && file["met"] == true).then(|| network["detail"].as_str().unwrap().to_owned())
}

fn own(node: &Node) -> Option<Value> {
    let text = fs::read(node.path("net.d/00-netattach.conflist")).ok()?;
    Some(serde_json::from_slice(&text).expect("never half written"))
}

/// Waits until the agent has taken a network over; returns its own configuration for the runtime.
fn await_network(node: &Node, primary: &Primary) -> Value {
    let mut wanted: Map<String, Value> =
        primary.capabilities.iter().map(|it| ((*it).to_owned(), true.into())).collect();
    wanted.insert("portMappings".to_owned(), true.into());
    let is_there = || {
        let declared = own(node).map(|conf| conf["plugins"][0]["capabilities"].clone());
        declared == Some(Value::Object(wanted.clone()))
            && ready_with(node).as_deref() == Some(primary.network)
    };
    assert!(eventually(PATIENCE, is_there), "{}: {:?} {:?}", primary.network, own(node), ready_with(node));
    own(node).unwrap()
}

/// A runtime's call by our configuration in its directory, in the newest version that this offers.
fn call(node: &Node, verb: &str, pod: &Pod, conf: &Value, wishes: &Value) -> Call {
    let mut plugin = conf["plugins"][0].clone();
    plugin["name"] = conf["name"].clone();
    plugin["cniVersion"] = conf["cniVersions"].as_array().unwrap().last().unwrap().clone();
    plugin.as_object_mut().unwrap().remove("capabilities");
    if wishes.as_object().is_some_and(|wishes| !wishes.is_empty()) {
        plugin["runtimeConfig"] = wishes.clone();
    }
    node.call(verb, pod).stdin(plugin)
}

/// Returns the capabilities that a kubelet's runtime passes to every network; each gets those that it declares.
fn wishes(primary: &Primary) -> Value {
    let all = json!({
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 8000, "ingressBurst": 80000}
    });
    let declared =
        all.as_object().unwrap().iter().filter(|(key, _)| primary.capabilities.contains(&key.as_str()));
    Value::Object(declared.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// Returns the output of the first plugin of a network, in the network's version.
fn printed(primary: &Primary, number: usize) -> Value {
    let mut result = json!({
        "cniVersion": primary.version,
        "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:09", "sandbox": "/x"}],
        "ips": [{"interface": 0, "address": format!("10.244.0.{}/24", number + 2), "gateway": "10.244.0.1"}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.244.0.1"}],
        "dns": {"nameservers": ["10.96.0.10"], "search": ["svc.cluster.local"]}
    });
    if primary.version.starts_with('0') {
        result["ips"][0]["version"] = json!("4");
    }
    result
}

fn of_pod<'a>(calls: &'a [Value], verb: &str, pod: &Pod) -> Vec<&'a Value> {
    let is_it = |call: &&Value| {
        call["env"]["CNI_COMMAND"] == verb && call["env"]["CNI_CONTAINERID"] == pod.container.as_str()
    };
    calls.iter().filter(is_it).map(|call| &call["stdin"]).collect()
}

/// One agent, whose primary network is another product's after each pod: the configuration of each is read, its
/// plugins get the required input, the runtime gets their output, and the pod of the previous one is detached by the
/// plugins that attached it.
#[test]
fn the_network_of_each_product_is_the_default_network_and_pods_end_with_the_one_they_began_with() {
    let names: Vec<String> = (0..PRIMARIES.len()).map(|number| format!("p{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut node = node(&names);
    // Including those that the agent would implement itself: this test is about the input of plugins.
    node.set("delegation", json!({"exec": ["portmap", "bandwidth"]}));
    for plugin in PRIMARIES.iter().flat_map(|it| it.plugins) {
        node.plugin(plugin, &json!({})).unwrap();
    }
    node.start().unwrap();
    let mut before: Option<(Pod, Primary, Value)> = None;
    let (mut status, mut old) = (BTreeSet::new(), None::<&str>);
    for (number, primary) in PRIMARIES.iter().enumerate() {
        let result = printed(primary, number);
        node.plugin(primary.plugins[0], &json!({"ADD": {"result": result}})).unwrap();
        install(&node, primary.file, primary.text);
        if let Some(old) = old.replace(primary.file) {
            fs::remove_file(node.path("net.d").join(old)).unwrap();
        }
        let conf = await_network(&node, primary);
        node.take_calls().unwrap();
        let pod = Pod::new(names[number]).unwrap();
        if !primary.capabilities.contains(&"portMappings") {
            let port = json!({"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": "tcp"}]});
            assert_eq!(call(&node, "ADD", &pod, &conf, &port).run().failure().0, 7, "{}", primary.network);
        }
        let told = call(&node, "ADD", &pod, &conf, &wishes(primary)).run().success();
        let newest = json!({
            "cniVersion": "1.1.0", "interfaces": result["interfaces"],
            "ips": [{"interface": 0, "address": result["ips"][0]["address"], "gateway": "10.244.0.1"}],
            "routes": result["routes"], "dns": result["dns"],
        });
        assert_eq!(told, newest, "{}", primary.network);
        node.await_status(&pod);
        call(&node, "CHECK", &pod, &conf, &wishes(primary)).run().success();
        let calls = node.take_calls().unwrap();
        // Everything of the file, the capabilities that it declares, and the result of the previous plugin.
        let expected = primary.plugins.iter().enumerate().map(|(index, _)| {
            let mut config = primary.config(index);
            let declared = config["capabilities"].as_object().cloned().unwrap_or_default();
            let wishes = wishes(primary);
            let given = declared.keys().filter_map(|key| Some((key.clone(), wishes.get(key)?.clone())));
            let given: Map<String, Value> = given.collect();
            if !given.is_empty() {
                config["runtimeConfig"] = Value::Object(given);
            }
            config
        });
        let expected: Vec<Value> = expected.collect();
        let mut added = expected.clone();
        added.iter_mut().skip(1).for_each(|config| config["prevResult"] = result.clone());
        assert_eq!(of_pod(&calls, "ADD", &pod), added.iter().collect::<Vec<_>>(), "{}", primary.network);
        let mut ended = expected.clone();
        ended.iter_mut().for_each(|config| config["prevResult"] = result.clone());
        // CHECK is of 0.4.0, and a list may refuse it.
        let is_checked = primary.version >= "0.4.0" && primary.network != "aws-cni";
        let checked: Vec<&Value> = ended.iter().filter(|_| is_checked).collect();
        assert_eq!(of_pod(&calls, "CHECK", &pod), checked, "{}", primary.network);
        // `prevResult` is given to DEL from 0.4.0 on.
        if primary.version < "0.4.0" {
            ended = expected;
        }
        ended.reverse();
        if let Some((pod, primary, ended)) = before.replace((pod, *primary, Value::Array(ended))) {
            call(&node, "DEL", &pod, &conf, &json!({})).run().success();
            let calls = node.take_calls().unwrap();
            let asked = of_pod(&calls, "DEL", &pod);
            assert_eq!(asked, ended.as_array().unwrap().iter().collect::<Vec<_>>(), "{}", primary.network);
            Snapshot::take(&node, &[&pod]).unwrap();
        }
        status
            .extend(verbs(&calls).into_iter().filter(|it| it.starts_with("STATUS") || it.starts_with("GC")));
        if primary.network == "ovn-kubernetes" {
            node.gc("netattach", Some(&[&before.as_ref().unwrap().0])).success();
            let asked = || verbs(&node.take_calls().unwrap());
            let mut all = Vec::new();
            assert!(eventually(PATIENCE, || {
                all.extend(asked());
                all.iter().any(|it| it.starts_with("STATUS"))
            }));
            status.extend(all);
        }
    }
    let (last, _, _) = before.unwrap();
    node.del(&last).success();
    Snapshot::take(&node, &[&last]).unwrap().assert_nothing_is_left();
    let asked: Vec<&str> = status.iter().map(String::as_str).collect();
    assert_eq!(asked, ["GC ovn-k8s-cni-overlay ", "STATUS ovn-k8s-cni-overlay "], "only who speaks 1.1.0");
}

/// The parts of flannel and calico that matter here: bridge or routed veth, host-local, and the chained plugins, all
/// of them from the reference.
#[test]
fn a_port_of_the_node_leads_to_a_pod_of_flannel_and_of_calico_with_the_chained_plugins_that_they_bring() {
    leads_to_their_pods(
        "a_port_of_the_node_leads_to_a_pod_of_flannel_and_of_calico_with_the_chained_plugins_that_they_bring",
        &["portmap", "bandwidth"],
    );
}

/// The same if those two are not installed.
///
/// Rows: PMP-delegated, BWD-delegated.
#[test]
fn a_port_of_the_node_leads_to_a_pod_of_flannel_and_of_calico_without_their_chained_plugins() {
    leads_to_their_pods(
        "a_port_of_the_node_leads_to_a_pod_of_flannel_and_of_calico_without_their_chained_plugins",
        &[],
    );
}

fn leads_to_their_pods(test: &str, chained: &[&str]) {
    let needed: Vec<&str> = ["bridge", "ptp", "host-local"].iter().chain(chained).copied().collect();
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &needed) else { return };
    let mut node = node(&["flannel", "calico"]);
    node.set("delegation", json!({ "exec": chained }));
    for plugin in chained {
        symlink(reference.join(plugin), node.path("cni-bin").join(plugin)).unwrap();
    }
    // The delegates search their IPAM plugin in the runtime's CNI_PATH.
    symlink(reference.join("host-local"), node.path("cni-bin/host-local")).unwrap();
    let bridge = json!({
        "type": "bridge", "bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
        "ipam": node.host_local(&["10.244.1.0/24"])
    });
    let routed = json!({"type": "ptp", "ipam": {
        "type": "host-local", "dataDir": node.path("leases"), "ranges": [[{"subnet": "10.245.1.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}]
    }});
    node.plugin("flannel", &json!({"exec": reference.join("bridge"), "with": bridge})).unwrap();
    node.plugin("calico", &json!({"exec": reference.join("ptp"), "with": routed})).unwrap();
    let outside = node.add_outside().unwrap();
    let published = "192.0.2.1:8080".parse().unwrap();
    node.start().unwrap();
    for (name, network, address) in
        [("flannel", "cbr0", "10.244.1.2:80"), ("calico", "k8s-pod-network", "10.245.1.2:80")]
    {
        let primary = Primary::named(network);
        // Newer releases of both write 1.0.0, which has CHECK.
        install(&node, "10-primary.conflist", &primary.text.replace("0.3.1", "1.0.0"));
        let conf = await_network(&node, &primary);
        let pod = Pod::new(name).unwrap();
        let path = node.path("cni-bin").to_string_lossy().into_owned();
        let call = |verb: &str| call(&node, verb, &pod, &conf, &wishes(&primary)).with("CNI_PATH", &path);
        let told = call("ADD").run().success();
        assert_eq!(told["ips"][0]["address"], json!(address.replace(":80", "/24")), "{name}: {told:#}");
        node.await_status(&pod);
        {
            let _echo = Echo::serve(&pod.namespace, address.parse().unwrap()).unwrap();
            assert!(connects(&outside, published, PATIENCE), "{name}");
        }
        call("CHECK").run().success();
        call("DEL").run().success();
        assert!(!connects(&outside, published, SILENCE), "{name}");
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}
