//! `hostAccess`: a node and the pods with macvlans or ipvlans on one of its parents reach each other, under policy.
//!
//! `cargo xtask vm` runs these in the virtual machine whose kernel has the driver of ipvlan.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use netattach::netlink::{Handle, LinkState, RouteState};
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::report_skipped;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually, ping};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

use super::ipvlan::has_driver;

/// The node's addresses on the parent, those of the first pod, and those of a host beyond.
const OF_NODE: [&str; 2] = ["10.52.0.1", "fd00:52::1"];
const OF_POD: [&str; 2] = ["10.52.0.20", "fd00:52::20"];
const BEYOND: [&str; 2] = ["10.52.0.9", "fd00:52::9"];

/// Two pods on a parent on which the node has addresses, and a host beyond it.
struct Scene {
    node: Node,
    pods: [Pod; 2],
    beyond: Namespace,
}

impl Scene {
    fn new(kind: &str, manifests: &[(&str, Value)]) -> Self {
        let mut node = Node::new(&[]).unwrap();
        node.add_wire().unwrap();
        let beyond = Namespace::new().unwrap();
        ip(&node.namespace, &["link", "set", "wire1", "netns", &beyond.task()]).unwrap();
        ip(&beyond, &["link", "set", "wire1", "up"]).unwrap();
        for (namespace, device, addresses) in [(&node.namespace, WIRE, OF_NODE), (&beyond, "wire1", BEYOND)] {
            for (address, length) in addresses.into_iter().zip([24, 64]) {
                let address = format!("{address}/{length}");
                ip(namespace, &["addr", "add", &address, "dev", device, "nodad"]).unwrap();
            }
        }
        let ranges = json!([
            [{"subnet": "10.52.0.0/24", "rangeStart": OF_POD[0]}],
            [{"subnet": "fd00:52::/64", "rangeStart": OF_POD[1]}]
        ]);
        let ipam = json!({"type": "host-local", "dataDir": node.path("leases"), "ranges": ranges});
        let lan =
            json!({"cniVersion": "1.0.0", "type": kind, "master": WIRE, "hostAccess": true, "ipam": ipam});
        node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
        for name in ["a", "b"] {
            node.write(name, &pod(name, &json!({"app": name}), &json!("lan"))).unwrap();
        }
        for (name, manifest) in manifests {
            node.write(name, manifest).unwrap();
        }
        node.start().unwrap();
        Self { node, pods: ["a", "b"].map(|name| Pod::new(name).unwrap()), beyond }
    }

    fn host_links(&self) -> Vec<LinkState> {
        let links = Handle::open_in(self.node.namespace.netns()).unwrap().links().unwrap();
        links.into_iter().filter(|link| link.name.starts_with("nahst")).collect()
    }

    /// Returns which of these addresses of the first pod, and of the node's, answer the other.
    fn reached(&self, of_pod: [&str; 2]) -> [bool; 4] {
        let [from_node, to_node] = [(&self.node.namespace, of_pod), (&self.pods[0].namespace, OF_NODE)]
            .map(|(from, to)| to.map(|to| ping(from, to.parse().unwrap(), PATIENCE).unwrap()));
        [from_node[0], from_node[1], to_node[0], to_node[1]]
    }

    fn end(self) {
        for pod in &self.pods {
            self.node.del(pod).success();
        }
        assert_eq!(self.host_links(), []);
        Snapshot::take(&self.node, &self.pods.each_ref()).unwrap().assert_nothing_is_left();
    }
}

/// Returns the neighbours of a namespace on a device.
fn neighbours(namespace: &Namespace, device: &str) -> String {
    let shown = namespace.run(|| Command::new("ip").args(["neigh", "show", "dev", device]).output()).unwrap();
    String::from_utf8(shown.stdout).unwrap()
}

/// Checks conditions that separate node and pod, and do not appear in links and routes.
fn is_missed_by_check(scene: &Scene, kind: &str, own: &LinkState) {
    let (node, pod) = (&scene.node.namespace, &scene.pods[0]);
    let missed = |expected: &str| {
        let (_, said) = scene.node.check(pod).failure();
        assert!(said.ends_with(expected), "{kind}: {said}");
    };
    let mac = own.mac.unwrap().to_string();
    let of_pod =
        Handle::open_in(pod.namespace.netns()).unwrap().link("net1").unwrap().mac.unwrap().to_string();
    let enter = |namespace: &Namespace, device: &str, address: &str, mac: &str| {
        let words = ["neigh", "replace", address, "lladdr", mac, "dev", device, "nud", "permanent"];
        ip(namespace, &words).unwrap();
    };
    let wrong = "02:00:00:00:99:99";
    for (to_node, to_pod) in OF_NODE.into_iter().zip(OF_POD) {
        enter(&pod.namespace, "net1", to_node, wrong);
        missed(&format!("the pod does not know the node's address {to_node} as {mac}"));
        enter(&pod.namespace, "net1", to_node, &mac);
        enter(node, &own.name, to_pod, wrong);
        missed(&format!("the node does not know the pod's address {to_pod} as {of_pod}"));
        enter(node, &own.name, to_pod, &of_pod);
        scene.node.check(pod).success();
    }
    if kind != "ipvlan" {
        return;
    }
    // All ipvlans follow their parent, and the kernel forgets the permanent entries.
    ip(node, &["link", "set", WIRE, "address", wrong]).unwrap();
    assert!(!scene.node.check(pod).failure().1.is_empty());
    ip(node, &["link", "set", WIRE, "address", &mac]).unwrap();
    missed(&format!("the node does not know the pod's address {} as {of_pod}", OF_POD[0]));
    for (to_node, to_pod) in OF_NODE.into_iter().zip(OF_POD) {
        enter(&pod.namespace, "net1", to_node, &mac);
        enter(node, &own.name, to_pod, &of_pod);
    }
    let filter = |value: &str| {
        let of = |device: &str| format!("/proc/sys/net/ipv4/conf/{device}/rp_filter");
        node.run(|| fs::write(of("all"), "0").and_then(|()| fs::write(of(WIRE), value))).unwrap();
    };
    filter("1");
    missed(&format!("the node drops what the pod sends to it: rp_filter is 1 for {WIRE}"));
    filter("0");
    scene.node.check(pod).success();
}

fn holds(kind: &str) {
    let mut scene = Scene::new(kind, &[]);
    for pod in &scene.pods {
        scene.node.add(pod).success();
    }
    let [own] = scene.host_links().try_into().unwrap();
    let of_node = if kind == "ipvlan" { kind } else { "macvlan" };
    assert_eq!((own.kind.as_str(), own.up, own.own), (of_node, true, true), "{kind}");
    assert_eq!(scene.reached(OF_POD), [true; 4], "{kind}");
    // Other hosts reach node and pods as before, and do not learn the node's link.
    for to in OF_NODE.iter().chain(&OF_POD) {
        assert!(ping(&scene.beyond, to.parse().unwrap(), PATIENCE).unwrap(), "{kind}: {to}");
    }
    let mac = own.mac.unwrap().to_string();
    let seen = neighbours(&scene.beyond, "wire1");
    // Ipvlans have their parent's address, by which all hosts know them.
    let is_shown = seen.contains(&mac) == (kind == "ipvlan");
    assert!(OF_NODE.iter().all(|it| seen.contains(it)) && is_shown, "{mac}: {seen}");
    // It lasts through a restart, stays for the other pod, and is looked at.
    let log = scene.node.kill().unwrap();
    assert!(!log.contains("not announced"), "{kind}: {log}");
    scene.node.start().unwrap();
    scene.node.del(&scene.pods[1]).success();
    assert_eq!(scene.host_links(), std::slice::from_ref(&own));
    assert_eq!(scene.reached(OF_POD), [true; 4], "{kind}, after a restart");
    scene.node.check(&scene.pods[0]).success();
    is_missed_by_check(&scene, kind, &own);
    ip(&scene.node.namespace, &["route", "del", OF_POD[0], "dev", &own.name]).unwrap();
    let (_, said) = scene.node.check(&scene.pods[0]).failure();
    assert!(said.ends_with(&format!("the node's route to {} is gone", OF_POD[0])), "{said}");
    ip(&scene.node.namespace, &["link", "del", &own.name]).unwrap();
    let (_, said) = scene.node.check(&scene.pods[0]).failure();
    assert!(
        said.ends_with(&format!("link {}, by which the node reaches the pod, is gone or down", own.name)),
        "{said}"
    );
    // The next pod's ADD restores it, with the address that the first one knows.
    scene.node.add(&scene.pods[1]).success();
    let [again] = scene.host_links().try_into().unwrap();
    assert_eq!((&again.name, again.mac), (&own.name, own.mac));
    scene.end();
}

/// Rows: MVL-hostAccess.
#[test]
fn a_node_and_its_pods_on_macvlans_reach_each_other() {
    for kind in ["macvlan", "macvtap"] {
        holds(kind);
    }
}

/// Rows: IVL-hostAccess.
#[test]
fn a_node_and_its_pods_on_ipvlans_reach_each_other() {
    if !has_driver() {
        return report_skipped("a_node_and_its_pods_on_ipvlans", "the kernel has no ipvlan");
    }
    holds("ipvlan");
}

/// Rows: IVL-hostAccess-refused.
#[test]
fn a_node_that_would_drop_what_its_pods_on_ipvlans_send_to_it_is_told() {
    if !has_driver() {
        return report_skipped("a_node_that_would_drop", "the kernel has no ipvlan");
    }
    let scene = Scene::new("ipvlan", &[]);
    let filter = |of: &str, value: &str| {
        let file = format!("/proc/sys/net/ipv4/conf/{of}/rp_filter");
        scene.node.namespace.run(|| fs::write(file, value)).unwrap();
    };
    filter("all", "0");
    filter(WIRE, "1");
    let (code, said) = scene.node.add(&scene.pods[0]).failure();
    let expected = format!(
        "key hostAccess: the node drops what pods on ipvlans send to it (rp_filter is 1); set net.ipv4.conf.{WIRE}.rp_filter to 2"
    );
    assert_eq!((code, said.ends_with(&expected)), (7, true), "{said}");
    assert_eq!(scene.host_links(), []);
    filter("all", "1");
    filter(WIRE, "2");
    scene.node.add(&scene.pods[0]).success();
    // The pool continues after the addresses that the refused ADD has released.
    assert_eq!(scene.reached(["10.52.0.21", "fd00:52::21"]), [true; 4]);
    scene.end();
}

/// Rows: MVL-hostAccess-policy.
#[test]
fn a_node_reaches_a_pod_as_far_as_its_policy_lets_it_and_a_pod_its_node() {
    policies_hold("macvlan");
}

/// Rows: IVL-hostAccess.
#[test]
fn a_node_reaches_a_pod_on_an_ipvlan_as_far_as_its_policy_lets_it_and_such_a_pod_its_node() {
    if !has_driver() {
        return report_skipped("a_node_reaches_a_pod_on_an_ipvlan", "the kernel has no ipvlan");
    }
    policies_hold("ipvlan");
}

/// Checks which of node, pods and the outside host connect, by both families, as the policies of [`policies_hold`]
/// require.
fn assert_judged(scene: &Scene) {
    let (node, [a, b]) = (&scene.node.namespace, scene.pods.each_ref().map(|pod| &pod.namespace));
    for (of_pod, of_node) in OF_POD.into_iter().zip(OF_NODE) {
        for (from, at, host, port, passes) in [
            (node, a, of_pod, 80, true),
            (node, a, of_pod, 81, false),
            (&scene.beyond, a, of_pod, 80, false),
            (b, a, of_pod, 80, false),
            (b, node, of_node, 80, true),
            (b, node, of_node, 81, false),
            (a, node, of_node, 81, true),
        ] {
            let server = Echo::serve(at, SocketAddr::new(host.parse().unwrap(), port)).unwrap();
            let patience = if passes { PATIENCE } else { SILENCE };
            assert_eq!(connects(from, server.address(), patience), passes, "{}", server.address());
        }
    }
}

fn policies_hold(kind: &str) {
    let of_node = OF_NODE.map(|address| {
        let length = if address.contains(':') { 128 } else { 32 };
        json!({"ipBlock": {"cidr": format!("{address}/{length}")}})
    });
    let ports = json!([{"protocol": "TCP", "port": 80}]);
    let ingress = json!({
        "podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress"],
        "ingress": [{"from": of_node, "ports": ports}]
    });
    let egress = json!({
        "podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Egress"],
        "egress": [{"to": of_node, "ports": ports}]
    });
    let policies = [("to-a", policy("to-a", "lan", &ingress)), ("from-b", policy("from-b", "lan", &egress))];
    let mut scene = Scene::new(kind, &policies);
    for pod in &scene.pods {
        scene.node.add(pod).success();
    }
    assert_judged(&scene);
    scene.node.kill().unwrap();
    scene.node.start().unwrap();
    assert_judged(&scene);
    let b = &scene.pods[1].namespace;
    // Broadcasts of the pod do not bypass its policy on the way to the node.
    let [own] = scene.host_links().try_into().unwrap();
    let heard = RawSocket::open_for(&scene.node.namespace, &own.name, libc::ETH_P_IP as u16).unwrap();
    let mac = Handle::open_in(b.netns()).unwrap().link("net1").unwrap().mac.unwrap();
    let mut frame = Packet::between("10.52.0.21", "10.52.0.255").from_mac(mac).udp(1000, 81).frame();
    frame[..6].fill(0xff);
    RawSocket::open(b, "net1").unwrap().send(&frame).unwrap();
    let rows = || scene.node.ctl(&["stats", "--pod", "shop/b", "--network", "shop/lan"]).unwrap();
    let dropped = || rows()[0]["dropped"].as_object().unwrap().contains_key("egress-peer");
    assert!(eventually(PATIENCE, dropped), "{}", rows());
    assert_eq!(heard.frames().unwrap(), Vec::<Vec<u8>>::new());
    scene.end();
}

/// Rows: MVL-hostAccess-refused.
#[test]
fn without_an_address_of_the_node_beside_the_pod_the_pod_is_refused_and_nothing_is_left() {
    let scene = Scene::new("macvlan", &[]);
    ip(&scene.node.namespace, &["addr", "flush", "dev", WIRE, "scope", "global"]).unwrap();
    // It may be about to get one; an address elsewhere is another matter.
    let (code, said) = scene.node.add(&scene.pods[0]).failure();
    let expected = format!("key hostAccess: {WIRE} has no address of the node yet");
    assert_eq!((code, said.ends_with(&expected)), (11, true), "{said}");
    ip(&scene.node.namespace, &["addr", "add", "192.0.2.1/24", "dev", WIRE]).unwrap();
    let (code, said) = scene.node.add(&scene.pods[0]).failure();
    let expected = format!("key hostAccess: {WIRE} has no address of the node in a subnet of the pod");
    assert_eq!((code, said.ends_with(&expected)), (7, true), "{said}");
    // An existing host link is reused by further pods.
    let kinds: BTreeSet<String> = scene.host_links().into_iter().map(|link| link.kind).collect();
    assert_eq!(kinds, BTreeSet::new());
    scene.end();
}

/// The address of the node's link follows from the parent's, which every pod on it sees.
///
/// Rows: MVL-hostAccess-mac.
#[test]
fn no_pod_is_given_the_address_of_the_nodes_link_and_one_that_has_taken_it_is_told_of() {
    let plain =
        json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "capabilities": {"mac": true}});
    let manifests = [
        ("plain", network(NAMESPACE, "plain", &plain)),
        ("quiet", pod("quiet", &json!({}), &json!("plain"))),
        ("greedy", pod("greedy", &json!({}), &json!("plain"))),
    ];
    let scene = Scene::new("macvlan", &manifests);
    scene.node.add(&scene.pods[0]).success();
    let own = scene.host_links().remove(0);
    scene.node.del(&scene.pods[0]).success();
    assert_eq!(scene.host_links(), []);

    let mac = own.mac.unwrap().to_string();
    let asked = json!([{"name": "plain", "mac": mac}]);
    scene.node.write("greedy", &pod("greedy", &json!({}), &asked)).unwrap();
    let greedy = Pod::new("greedy").unwrap();
    let told = format!("MAC address {mac} is taken: the node's device {} has it", own.name);
    let mut last = (0, String::new());
    let is_refused = || {
        let added = scene.node.add(&greedy);
        match added.exit {
            // The agent has not read the change yet.
            0 => drop(scene.node.del(&greedy).success()),
            _ => last = added.failure(),
        }
        last.1.ends_with(&told)
    };
    assert!(eventually(PATIENCE, is_refused), "{told}");
    assert_eq!(last.0, 7, "{}", last.1);

    // A pod with that permission takes it all the same.
    let quiet = Pod::new("quiet").unwrap();
    scene.node.add(&quiet).success();
    for words in ["link set net1 down", &format!("link set net1 address {mac}"), "link set net1 up"] {
        ip(&quiet.namespace, &words.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let (code, said) = scene.node.add(&scene.pods[1]).failure();
    let told = format!("MAC address {mac} is taken: a macvlan on {WIRE} has it");
    assert!(code == 11 && said.ends_with(&told), "{code}: {said}");
    assert_eq!(scene.host_links(), []);
    scene.node.del(&quiet).success();
    scene.node.add(&scene.pods[1]).success();
    scene.end();
}

/// Rows: MVL-hostAccess-others.
#[test]
fn a_pod_that_chooses_its_addresses_takes_no_traffic_of_the_node_for_others() {
    let of_router = "10.52.0.30";
    // The first has a different location, whatever subnet the pod claims; the others are beside the node.
    let wishes = [
        ("far", json!(["10.244.1.5/0"])),
        ("far6", json!(["2001:db8::5/0"])),
        ("held", json!(["10.52.0.77/24"])),
        ("held6", json!(["fd00:52::77/64"])),
        ("last-resort", json!(["10.52.0.78/24"])),
        ("router", json!([format!("{of_router}/24")])),
        ("free", json!(["10.52.0.79/24", "fd00:52::79/64"])),
    ];
    let chosen = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "hostAccess": true,
        "capabilities": {"ips": true}, "ipam": {"type": "static"}});
    let manifests: Vec<(&str, Value)> = wishes
        .iter()
        .map(|(name, ips)| (*name, pod(name, &json!({}), &json!([{"name": "chosen", "ips": ips}]))))
        .chain([("chosen", network(NAMESPACE, "chosen", &chosen))])
        .collect();
    let scene = Scene::new("macvlan", &manifests);
    let node = &scene.node.namespace;
    // Pods of another plugin are behind another device, as with routed veths.
    ip(node, &["link", "add", "others", "up", "type", "veth", "peer", "name", "others1"]).unwrap();
    for victim in ["10.244.1.5", "10.52.0.77", "2001:db8::5", "fd00:52::77"] {
        ip(node, &["route", "add", victim, "dev", "others"]).unwrap();
    }
    ip(node, &["route", "add", "10.52.0.78", "dev", "others", "metric", "500"]).unwrap();
    ip(node, &["route", "add", "192.0.2.0/24", "via", of_router, "dev", WIRE]).unwrap();
    // Routes that the kernel creates are added and removed with the bridge of the pods' default network.
    let routes = || -> Vec<RouteState> {
        let all = Handle::open_in(node.netns()).unwrap().routes().unwrap();
        all.into_iter().filter(|route| route.protocol != libc::RTPROT_KERNEL).collect()
    };
    let before = routes();
    let apart = format!("key hostAccess: {WIRE} has no address of the node in a subnet of the pod");
    let held =
        |address: &str| format!("address {address} is taken: the node has another route to it, by others");
    for (name, expected) in [
        ("far", (7, apart.clone())),
        ("far6", (7, apart)),
        ("held", (11, held("10.52.0.77"))),
        ("held6", (11, held("fd00:52::77"))),
        ("last-resort", (11, held("10.52.0.78"))),
        ("router", (7, format!("address {of_router} is taken: the node routes by it"))),
    ] {
        let (code, said) = scene.node.add(&Pod::new(name).unwrap()).failure();
        assert!(code == expected.0 && said.ends_with(&expected.1), "{name}: {code} {said}");
        assert_eq!(routes(), before, "{name}");
        assert_eq!(scene.host_links(), [], "{name}");
    }
    let free = Pod::new("free").unwrap();
    scene.node.add(&free).success();
    for address in ["10.52.0.79", "fd00:52::79"] {
        assert!(ping(node, address.parse().unwrap(), PATIENCE).unwrap(), "{address}");
    }
    scene.node.del(&free).success();
    assert_eq!(routes(), before);
    ip(node, &["link", "del", "others"]).unwrap();
    scene.end();
}
