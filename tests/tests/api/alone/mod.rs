//! netattach alone in a cluster: the agent's own network, and definitions that take their range from the node.
//!
//! In `changes` nodes join and leave, a node's range changes, and the node is cleaned up.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use netattach_tests::api_server::{ApiServer, Credential, Options, TOKEN};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::{executable, ip};
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually, ping, stretched};
use netattach_tests::{Call, Namespace, Node, Outcome, Pod};
use serde_json::{Value, json};

mod changes;

/// Nodes on one link, with a host that is not a node, and is their router.
struct Rig {
    nodes: Vec<Node>,
    server: ApiServer,
    host: Namespace,
}

const HOST: &str = "192.0.2.254";
/// The host by family, and the first node.
const HOSTS: [&str; 2] = [HOST, "2001:db8::fe"];
const FIRST_NODE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

impl Rig {
    /// A cluster of that many nodes; their agents are not started.
    fn new(count: usize) -> Self {
        let host = Namespace::new().unwrap();
        host.loopback_up().unwrap();
        ip(&host, &["link", "add", "lan", "up", "mtu", "1400", "type", "bridge"]).unwrap();
        for address in ["192.0.2.254/24", "2001:db8::fe/64"] {
            ip(&host, &["address", "add", address, "dev", "lan", "nodad"]).unwrap();
        }
        let nodes: Vec<Node> = (1..=count).map(|number| connected(&host, number)).collect();
        let mut server = ApiServer::start_in(&Options::default(), &nodes[0].namespace).unwrap();
        nodes[1..].iter().for_each(|node| server.listen_in(&node.namespace).unwrap());
        server.create(&manifest::namespace(NAMESPACE, &json!({}))).unwrap();
        let mut rig = Self { nodes, server, host };
        for number in 1..=count {
            let node = &mut rig.nodes[number - 1];
            let file = node.path("kubeconfig");
            let kubeconfig = rig.server.kubeconfig(&file, &Credential::Token(TOKEN)).unwrap();
            node.join(kubeconfig, &name(number)).unwrap();
            node.set("defaultNetwork", json!("builtin"));
            node.set("builtin", json!({"dataDir": node.path("leases")}));
        }
        rig
    }

    /// Makes the object of a node.
    fn register(&self, number: usize, ranges: &[&str]) {
        let mut object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name(number)},
            "status": {"addresses": [
                {"type": "InternalIP", "address": format!("192.0.2.{number}")},
                {"type": "InternalIP", "address": format!("2001:db8::{number}")}
            ]}
        });
        if let Some(first) = ranges.first() {
            object["spec"] = json!({"podCIDR": first, "podCIDRs": ranges});
        }
        self.server.apply(&object).unwrap();
    }

    /// A pod of a node, on the server; returns its sandbox.
    fn pod(&self, number: usize, pod: &str, labels: &Value) -> Pod {
        let mut object = manifest::pod(pod, labels, &Value::Null);
        object["metadata"]["uid"] = json!(format!("uid-{pod}"));
        object["spec"]["nodeName"] = json!(name(number));
        self.server.create(&object).unwrap();
        Pod::new(pod).unwrap()
    }

    fn call(&self, verb: &str, number: usize, pod: &Pod) -> Call {
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={NAMESPACE};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID=uid-{}",
            pod.name, pod.container, pod.name
        );
        self.nodes[number - 1].call(verb, pod).with("CNI_ARGS", &args)
    }

    /// A pod that is attached, and its addresses.
    fn attached(&self, number: usize, name: &str, labels: &Value) -> (Pod, Vec<IpAddr>) {
        let pod = self.pod(number, name, labels);
        let result = self.call("ADD", number, &pod).run().success();
        (pod, addresses(&result))
    }

    /// Returns a node's routes to the pods of other nodes.
    fn routes(&self, number: usize) -> Vec<String> {
        let of = |family: &str| {
            let words = [family, "route", "show", "proto", "110"];
            let shown =
                self.nodes[number - 1].namespace.run(|| Command::new("ip").args(words).output()).unwrap();
            let text = String::from_utf8(shown.stdout).unwrap();
            text.lines()
                .map(|line| line.split_whitespace().take(5).collect::<Vec<_>>().join(" "))
                .collect::<Vec<_>>()
        };
        [of("-4"), of("-6")].concat()
    }

    /// Returns the output of `netattachctl status`, which fails while the node is not ready.
    fn status(&self, number: usize) -> Value {
        let mut command = Command::new(executable("netattachctl").unwrap());
        command.arg("--socket").arg(self.nodes[number - 1].socket()).args(["status", "-o", "json"]);
        serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
    }

    fn condition(&self, number: usize) -> (bool, String) {
        let status = self.status(number);
        let conditions = status["ready"].as_array().unwrap();
        let row = conditions.iter().find(|row| row["condition"] == "default network").unwrap();
        (row["met"].as_bool().unwrap(), row["detail"].as_str().unwrap().to_owned())
    }

    fn trouble(&self, number: usize, object: &str) -> Option<String> {
        let status = self.status(number);
        let row = status["source"].as_array().unwrap().iter().find(|row| row["object"] == object)?;
        Some(row["problem"].as_str().unwrap().to_owned())
    }

    fn await_trouble(&self, number: usize, object: &str, text: &str) {
        let mut said = None;
        let is_said = || {
            said = self.trouble(number, object);
            said.as_ref().is_some_and(|said| said.contains(text))
        };
        assert!(eventually(PATIENCE, is_said), "{object}: {said:?}");
    }
}

fn name(number: usize) -> String {
    format!("node-{number}")
}

/// A node that is connected to the host's segment.
fn connected(host: &Namespace, number: usize) -> Node {
    let node = Node::new(&[]).unwrap();
    node.namespace.loopback_up().unwrap();
    let port = format!("port{number}");
    let inside = |words: &[&str]| ip(&node.namespace, words).unwrap();
    inside(&["link", "add", "eth0", "mtu", "1400", "type", "veth", "peer", "name", &port, "mtu", "1400"]);
    inside(&["link", "set", &port, "netns", &host.task()]);
    ip(host, &["link", "set", &port, "master", "lan", "up"]).unwrap();
    inside(&["address", "add", &format!("192.0.2.{number}/24"), "dev", "eth0"]);
    inside(&["address", "add", &format!("2001:db8::{number}/64"), "dev", "eth0", "nodad"]);
    inside(&["link", "set", "eth0", "up"]);
    inside(&["route", "add", "default", "via", HOST]);
    node
}

fn addresses(result: &Value) -> Vec<IpAddr> {
    let ips = result["ips"].as_array().unwrap();
    let address = |ip: &Value| ip["address"].as_str().unwrap().split_once('/').unwrap().0.parse().unwrap();
    ips.iter().map(address).collect()
}

fn at(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address, port)
}

/// The address that a server sees a client by.
fn seen_as(client: &Namespace, server: &Namespace, address: SocketAddr) -> IpAddr {
    let listener = server.run(|| TcpListener::bind(address)).unwrap();
    let _stream = client.run(|| TcpStream::connect_timeout(&address, stretched(PATIENCE))).unwrap();
    listener.accept().unwrap().1.ip()
}

/// Repeats an ADD until it succeeds.
fn add_eventually(rig: &Rig, number: usize, pod: &Pod) -> Value {
    let mut last = Outcome { exit: 1, json: Value::Null };
    let attached = eventually(PATIENCE, || {
        last = rig.call("ADD", number, pod).run();
        last.exit == 0
    });
    assert!(attached, "{last:?}");
    last.json
}

#[test]
fn the_range_is_waited_for() {
    let mut rig = Rig::new(1);
    rig.nodes[0].start_serving().unwrap();
    let first = rig.pod(1, "first", &json!({}));
    let refused = |why: &str| {
        let said = || rig.call("ADD", 1, &first).run().failure();
        let is_said = eventually(PATIENCE, || said().1.contains(why));
        assert!(is_said, "{:?}", said());
        assert_eq!(said().0, 11);
        assert!(eventually(PATIENCE, || rig.condition(1).1.contains(why)), "{:?}", rig.condition(1));
        assert!(!rig.condition(1).0);
        let status = rig.nodes[0].call("STATUS", &first).without("CNI_NETNS").without("CNI_IFNAME");
        let status = status.without("CNI_CONTAINERID").stdin(rig.nodes[0].cni_config("1.1.0"));
        assert!(eventually(PATIENCE, || status.run().failure().1.contains(why)), "{:?}", status.run());
        assert_eq!(status.run().failure().0, 50);
    };
    refused("defaultNetwork builtin: node node-1: its object is not known");
    rig.register(1, &[]);
    refused(
        "node node-1 has no podCIDRs: kube-controller-manager gives them to nodes with --allocate-node-cidrs",
    );
    rig.register(1, &["10.244.1.0/24", "fd00:1::/64"]);
    let result = add_eventually(&rig, 1, &first);
    let ips = json!([
        {"address": "10.244.1.2/24", "gateway": "10.244.1.1", "interface": 2},
        {"address": "fd00:1::2/64", "gateway": "fd00:1::1", "interface": 2}
    ]);
    assert_eq!(result["ips"], ips);
    assert!(ping(&first.namespace, "10.244.1.1".parse().unwrap(), PATIENCE).unwrap());
    let shown =
        first.namespace.run(|| Command::new("ip").args(["-o", "link", "show", "eth0"]).output()).unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains(" mtu 1400 "), "the uplink's: {shown:?}");
    assert!(eventually(PATIENCE, || rig.condition(1) == (true, "builtin".into())), "{:?}", rig.condition(1));
    rig.call("DEL", 1, &first).run().success();
}

fn check_config(rig: &Rig, result: &Value) -> Value {
    let mut config = rig.nodes[0].cni_config("1.0.0");
    config["prevResult"] = result.clone();
    config
}

#[test]
fn pods_of_two_nodes_reach_each_other_and_the_world() {
    let mut rig = Rig::new(2);
    rig.register(1, &["10.244.1.0/24", "fd00:1::/64"]);
    rig.register(2, &["10.244.2.0/24", "fd00:2::/64"]);
    for node in &mut rig.nodes {
        node.start().unwrap();
    }
    let to_second = ["10.244.2.0/24 via 192.0.2.2 dev eth0", "fd00:2::/64 via 2001:db8::2 dev eth0"];
    assert!(eventually(PATIENCE, || rig.routes(1) == to_second), "{:?}", rig.routes(1));
    assert!(eventually(PATIENCE, || rig.routes(2).len() == 2), "{:?}", rig.routes(2));
    let (a, own) = rig.attached(1, "a", &json!({}));
    let (b, other) = rig.attached(2, "b", &json!({"app": "db"}));
    for (own, other) in own.iter().zip(&other) {
        assert_eq!(seen_as(&a.namespace, &b.namespace, at(*other, 8000)), *own, "no masquerade between pods");
    }
    // Outside, the host has no route to pods.
    for (family, host) in HOSTS.into_iter().enumerate() {
        let outside = seen_as(&a.namespace, &rig.host, at(host.parse().unwrap(), 8000));
        assert_eq!(outside, FIRST_NODE[family].parse::<IpAddr>().unwrap());
    }

    // No other component enforces NetworkPolicies here.
    let _echo = Echo::serve(&b.namespace, at(other[0], 5432)).unwrap();
    assert!(connects(&a.namespace, at(other[0], 5432), PATIENCE));
    let spec = json!({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"]});
    rig.server.create(&manifest::network_policy("db", &spec)).unwrap();
    assert!(eventually(PATIENCE, || !connects(&a.namespace, at(other[0], 5432), SILENCE)));
    rig.server.delete("networkpolicies", NAMESPACE, "db").unwrap();
    assert!(eventually(PATIENCE, || connects(&a.namespace, at(other[0], 5432), SILENCE)));

    // A route that another process removes is restored; that of a removed node is not.
    ip(&rig.nodes[0].namespace, &["route", "del", "10.244.2.0/24"]).unwrap();
    assert!(eventually(PATIENCE, || rig.routes(1) == to_second), "{:?}", rig.routes(1));
    rig.server.delete("nodes", "", "node-2").unwrap();
    assert!(eventually(PATIENCE, || rig.routes(1).is_empty()), "{:?}", rig.routes(1));
    rig.call("DEL", 1, &a).run().success();
    rig.call("DEL", 2, &b).run().success();
}

#[test]
fn a_port_of_the_node_leads_to_its_pod() {
    let mut rig = Rig::new(1);
    rig.register(1, &["10.244.1.0/24", "fd00:1::/64"]);
    rig.nodes[0].start().unwrap();
    let web = rig.pod(1, "web", &json!({}));
    let mut config = rig.nodes[0].cni_config("1.0.0");
    config["runtimeConfig"] = json!({
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 100_000_000, "ingressBurst": 10_000_000}
    });
    let result = rig.call("ADD", 1, &web).stdin(&config).run().success();
    let echoes: Vec<Echo> =
        addresses(&result).iter().map(|own| Echo::serve(&web.namespace, at(*own, 80)).unwrap()).collect();
    let published = FIRST_NODE.map(|node| at(node.parse().unwrap(), 8080));
    for published in published {
        assert!(connects(&rig.host, published, PATIENCE), "{published}");
    }
    rig.call("DEL", 1, &web).run().success();
    for published in published {
        assert!(!connects(&rig.host, published, SILENCE), "{published}");
    }
    drop(echoes);
}

#[test]
fn a_node_that_no_route_leads_to_is_reported_and_routed_links_need_no_bridge() {
    let mut rig = Rig::new(1);
    rig.register(1, &["10.244.1.0/24"]);
    rig.register(2, &["10.244.1.128/25"]);
    let far = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "far"}, "spec": {"podCIDR": "10.244.7.0/24"},
        "status": {"addresses": [{"type": "InternalIP", "address": "203.0.113.7"}]}
    });
    rig.server.create(&far).unwrap();
    let settings = json!({"dataDir": rig.nodes[0].path("leases"), "mode": "routed"});
    rig.nodes[0].set("builtin", settings);
    rig.nodes[0].start().unwrap();
    rig.await_trouble(1, "node far", "its address 203.0.113.7 is on no link of this node");
    rig.await_trouble(
        1,
        "node node-2",
        "its podCIDR 10.244.1.128/25 overlaps with 10.244.1.0/24 of this node",
    );
    assert_eq!(rig.routes(1), [""; 0]);
    let (a, of_a) = rig.attached(1, "a", &json!({}));
    let (b, of_b) = rig.attached(1, "b", &json!({}));
    assert!(ping(&a.namespace, of_b[0], PATIENCE).unwrap());
    // A changed range fails no ADD here.
    rig.register(1, &["10.244.9.0/24"]);
    rig.await_trouble(1, "network builtin", "2 attached pods have addresses of 10.244.1.0/24");
    let (c, of_c) = rig.attached(1, "c", &json!({}));
    assert_eq!(of_c, ["10.244.9.2".parse::<IpAddr>().unwrap()]);
    assert!(ping(&c.namespace, of_a[0], PATIENCE).unwrap());
    let outside = seen_as(&c.namespace, &rig.host, at(HOST.parse().unwrap(), 8000));
    assert_eq!(outside, "192.0.2.1".parse::<IpAddr>().unwrap());
    for pod in [&a, &b, &c] {
        rig.call("DEL", 1, pod).run().success();
    }
}

#[test]
fn a_definition_takes_its_range_from_the_node() {
    let mut rig = Rig::new(1);
    rig.register(1, &[]);
    rig.nodes[0].set("defaultNetwork", json!("kube-system/default"));
    let network = |rig: &Rig, name: &str, subnet: &str| {
        let config = json!({
            "cniVersion": "1.0.0", "type": "bridge", "bridge": "br7",
            "ipam": {"type": "host-local", "dataDir": rig.nodes[0].path("leases"), "subnet": subnet}
        });
        let namespace = if name == "default" { "kube-system" } else { NAMESPACE };
        rig.server.apply(&manifest::network(namespace, name, &config)).unwrap();
    };
    network(&rig, "default", "usePodCidr");
    network(&rig, "other", "usePodCidr");
    rig.nodes[0].start_serving().unwrap();
    let object = "network-attachment-definition kube-system/default";
    rig.await_trouble(1, object, "node node-1 has no podCIDRs");
    rig.register(1, &["10.244.1.0/24"]);
    assert!(eventually(PATIENCE, || rig.trouble(1, object).is_none()), "{:?}", rig.trouble(1, object));
    let a = rig.pod(1, "a", &json!({}));
    assert_eq!(add_eventually(&rig, 1, &a)["ips"][0]["address"], "10.244.1.2/24");
    // Live pods keep theirs.
    rig.register(1, &["10.244.9.0/24"]);
    let b = rig.pod(1, "b", &json!({}));
    let in_new_range = |rig: &Rig| {
        let result = rig.call("ADD", 1, &b).run().success();
        let is_new = result["ips"][0]["address"] == "10.244.9.2/24";
        if !is_new {
            rig.call("DEL", 1, &b).run().success();
        }
        is_new
    };
    assert!(eventually(PATIENCE, || in_new_range(&rig)));

    let mut both = manifest::pod("both", &json!({}), &json!("other"));
    both["metadata"]["uid"] = json!("uid-both");
    both["spec"]["nodeName"] = json!(name(1));
    rig.server.create(&both).unwrap();
    let both = Pod::new("both").unwrap();
    let (code, message) = rig.call("ADD", 1, &both).run().failure();
    assert!(code == 7 && message.starts_with("network shop/other: usePodCidr is for"), "{code} {message}");

    // The same range on every node is reported if there are several nodes.
    network(&rig, "default", "10.9.0.0/24");
    assert_eq!(rig.trouble(1, object), None);
    rig.register(2, &[]);
    rig.nodes[0].kill().unwrap();
    rig.nodes[0].start().unwrap();
    rig.await_trouble(1, object, "pods of two nodes get the same addresses");
    for pod in [&a, &b] {
        rig.call("DEL", 1, pod).run().success();
    }
}
