//! The attachment that has the pod's default routes, and the interface by which traffic leaves: kernel, result,
//! status, CHECK, traffic.
//! CHECK, traffic.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::symlink;

use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, executable, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connect, datagram, datagram_from};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Returns a node whose default network brings default routes of both families, with these pods. `flat` and `gateway`
/// are bridges, of which `gateway` brings default routes; `routed` and `routed-gateway` are routed veths, of which
/// the latter brings them; `foreign` and `foreign-gateway` are of an executed plugin, the latter with a default
/// route.
fn node(pods: &[(&str, Value)]) -> Node {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    node.set("delegation", json!({"exec": ["macvlan"]}));
    symlink(executable("netattach-cni").unwrap(), node.path("cni-bin").join("macvlan")).unwrap();
    symlink(executable("netattach-cni").unwrap(), node.path("cni-bin").join("host-local")).unwrap();
    let flat = json!({"type": "bridge", "bridge": "br1", "isGateway": true,
        "ipam": node.host_local(&["10.53.0.0/24", "fd00:53::/64"])});
    let gateway = json!({"type": "bridge", "bridge": "br2", "isDefaultGateway": true,
        "ipam": node.host_local(&["10.54.0.0/24", "fd00:54::/64"])});
    let routed = json!({"type": "veth", "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])});
    let mut routed_gateway = routed.clone();
    routed_gateway["ipam"] = node.host_local(&["10.56.0.0/24", "fd00:56::/64"]);
    routed_gateway["isDefaultGateway"] = json!(true);
    let foreign = json!({"type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    let mut foreign_gateway =
        json!({"type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.55.0.0/24"])});
    foreign_gateway["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0", "gw": "10.55.0.1"}]);
    for (name, mut config) in [
        ("flat", flat),
        ("gateway", gateway),
        ("routed", routed),
        ("routed-gateway", routed_gateway),
        ("foreign", foreign),
        ("foreign-gateway", foreign_gateway),
    ] {
        config["cniVersion"] = json!("1.0.0");
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    for (name, networks) in pods {
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), networks)).unwrap();
    }
    node.start().unwrap();
    node
}

/// The default routes of a pod, `FAMILY via GATEWAY dev INTERFACE METRIC`.
fn default_routes(pod: &Pod) -> Vec<String> {
    let mut handle = Handle::open_in(pod.namespace.netns()).unwrap();
    let links = handle.links().unwrap();
    let mut routes = handle.routes().unwrap();
    routes.retain(|route| route.destination.prefix_len() == 0);
    routes.sort_by_key(|route| (route.destination, route.priority));
    let name = |index| links.iter().find(|link| Some(link.index) == index).unwrap().name.clone();
    let shown = routes.iter().map(|route| {
        let family = if route.destination.addr().is_ipv4() { "v4" } else { "v6" };
        format!("{family} via {} dev {} {}", route.gateway.unwrap(), name(route.interface), route.priority)
    });
    shown.collect()
}

/// Rows: NPWG-4.1.2.1.9-dr-moves, NPWG-4.1.2.1.9-dr-v6, NPWG-4.1.2.1.9-dr-empty, NPWG-4.1.2.1.9-dr-multi-gw.
/// Rows: NPWG-5.3.6.4-default-route, NPWG-4.1.2.1.9-dr-dual.
#[test]
fn the_default_routes_are_where_the_pod_asks_for_them() {
    const V4: &str = "v4 via 10.50.0.1 dev eth0 0";
    const V6: &str = "v6 via fd00:50::1 dev eth0 1024";
    struct Row {
        networks: Value,
        routes: &'static [&'static str],
        status: Value,
        result: Value,
    }
    let both = || json!([{"dst": "0.0.0.0/0", "gw": "10.50.0.1"}, {"dst": "::/0", "gw": "fd00:50::1"}]);
    let only = |family: usize| json!([both()[family]]);
    let rows = [
        Row { networks: json!([{"name": "flat"}]), routes: &[V4, V6], status: Value::Null, result: both() },
        Row {
            networks: json!([{"name": "flat"}, {"name": "flat", "default-route": ["10.53.0.1"]}]),
            routes: &["v4 via 10.53.0.1 dev net2 0", V6],
            status: json!(["10.53.0.1"]),
            result: only(1),
        },
        Row {
            networks: json!([{"name": "flat", "default-route": ["fd00:53::1"]}]),
            routes: &[V4, "v6 via fd00:53::1 dev net1 1024"],
            status: json!(["fd00:53::1"]),
            result: only(0),
        },
        Row {
            networks: json!([{"name": "flat", "default-route":
                ["10.53.0.1", "fd00:53::1", "10.53.0.254", "fd00:53::fe"]}, {"name": "gateway"}]),
            routes: &[
                "v4 via 10.53.0.1 dev net1 0",
                "v4 via 10.53.0.254 dev net1 1",
                "v6 via fd00:53::1 dev net1 1024",
                "v6 via fd00:53::fe dev net1 1025",
            ],
            status: json!(["10.53.0.1", "10.53.0.254", "fd00:53::1", "fd00:53::fe"]),
            result: Value::Null,
        },
        Row {
            networks: json!([{"name": "gateway", "default-route": []}]),
            routes: &["v4 via 10.54.0.1 dev net1 0", "v6 via fd00:54::1 dev net1 1024"],
            status: json!(["10.54.0.1", "fd00:54::1"]),
            result: Value::Null,
        },
        // It has no gateway of its own to keep, so no other default route has to be removed.
        Row {
            networks: json!([{"name": "flat", "default-route": []}]),
            routes: &[V4, V6],
            status: json!([]),
            result: both(),
        },
        // It replaces the gateway assigned by the attachment's own IPAM.
        Row {
            networks: json!([{"name": "gateway", "default-route": ["10.54.0.9"]}]),
            routes: &["v4 via 10.54.0.9 dev net1 0", V6, "v6 via fd00:54::1 dev net1 1024"],
            status: json!(["10.54.0.9"]),
            result: only(1),
        },
        Row {
            networks: json!([{"name": "routed", "default-route": ["10.51.0.1", "fe80::1"]}]),
            routes: &["v4 via 169.254.1.1 dev net1 0", "v6 via fe80::1 dev net1 1024"],
            status: json!(["169.254.1.1", "fe80::1"]),
            result: Value::Null,
        },
        // Gateways that the link leads to by its routes alone.
        Row {
            networks: json!([{"name": "routed-gateway", "default-route": []}]),
            routes: &["v4 via 169.254.1.1 dev net1 0", "v6 via fe80::1 dev net1 1024"],
            status: json!(["169.254.1.1", "fe80::1"]),
            result: Value::Null,
        },
        Row {
            networks: json!([{"name": "foreign", "default-route": ["10.52.0.9"]}]),
            routes: &["v4 via 10.52.0.9 dev net1 0", V6],
            status: json!(["10.52.0.9"]),
            result: only(1),
        },
        Row {
            networks: json!([{"name": "foreign-gateway"}, {"name": "flat", "default-route": ["10.53.0.1"]}]),
            routes: &["v4 via 10.53.0.1 dev net2 0", V6],
            status: json!(["10.53.0.1"]),
            result: only(1),
        },
        Row {
            networks: json!([{"name": "foreign-gateway", "default-route": []}]),
            routes: &["v4 via 10.55.0.1 dev net1 0", V6],
            status: json!(["10.55.0.1"]),
            result: only(1),
        },
    ];
    let names: Vec<String> = (0..rows.len()).map(|number| format!("p{number}")).collect();
    let pods: Vec<(&str, Value)> =
        names.iter().zip(&rows).map(|(name, row)| (name.as_str(), row.networks.clone())).collect();
    let node = node(&pods);
    for (name, row) in names.iter().zip(&rows) {
        let pod = Pod::new(name).unwrap();
        let result = node.add(&pod).success();
        assert_eq!(default_routes(&pod), row.routes, "{}", row.networks);
        assert_eq!(result.get("routes").unwrap_or(&Value::Null), &row.result, "{}", row.networks);
        let status = node.status(&pod).unwrap();
        let told = status.as_array().unwrap().iter().find_map(|entry| entry.get("default-route"));
        assert_eq!(told.unwrap_or(&Value::Null), &row.status, "{status}");
        assert_eq!(node.check(&pod).success(), Value::Null, "{}", row.networks);
        assert_eq!(node.del(&pod).success(), Value::Null);
    }
}

#[test]
fn a_default_route_that_was_moved_is_checked() {
    let node = node(&[("a", json!([{"name": "foreign", "default-route": ["10.52.0.9"]}]))]);
    let pod = Pod::new("a").unwrap();
    node.add(&pod).success();
    ip(&pod.namespace, &["route", "del", "default", "dev", "net1"]).unwrap();
    let said = "net1 (shop/foreign): the default route through 10.52.0.9 of net1 is gone";
    assert_eq!(node.check(&pod).failure(), (999, said.to_owned()));
    assert_eq!(node.del(&pod).success(), Value::Null);
}

#[test]
fn a_gateway_that_the_link_does_not_lead_to_is_refused_and_everything_is_taken_back() {
    let rows = [
        (
            json!([{"name": "flat", "default-route": ["10.99.0.1"]}]),
            "attach net1 (shop/flat): move the pod's default route here: default-route: gateway 10.99.0.1 is not \
             reachable on the attachment's link",
        ),
        (
            json!([{"name": "flat", "default-route": ["fd00:99::1"]}]),
            "attach net1 (shop/flat): move the pod's default route here: default-route: gateway fd00:99::1 is not \
             reachable on the attachment's link",
        ),
        (
            json!([{"name": "routed", "default-route": ["10.51.0.9"]}]),
            "attach net1 (shop/routed): move the pod's default route here: default-route: 10.51.0.9 is not a gateway \
             of this routed link, whose only one is 169.254.1.1",
        ),
    ];
    let names = ["p0", "p1", "p2"];
    let pods: Vec<(&str, Value)> =
        names.iter().zip(&rows).map(|(name, row)| (*name, row.0.clone())).collect();
    let node = node(&pods);
    for (name, (_, said)) in names.iter().zip(&rows) {
        let pod = Pod::new(name).unwrap();
        let (code, message) = node.call("ADD", &pod).run().failure();
        assert!(code == 7 && message.starts_with(said), "{code} {message}");
        let snapshot = Snapshot::take(&node, &[&pod]).unwrap();
        assert_eq!(snapshot.pods[&pod.container].links.keys().collect::<Vec<_>>(), ["lo"]);
        assert!(
            !snapshot.files.keys().any(|path| path.contains(&pod.container)),
            "{:?}",
            snapshot.files.keys()
        );
    }
}

/// Two attachments to one network have routes to the same destinations: without source rules all traffic would leave by
/// the first, and packets with the second's address would be dropped as spoofed.
#[test]
fn traffic_leaves_by_the_interface_whose_address_it_has() {
    let node = node(&[
        ("a", json!([{"name": "routed"}, {"name": "routed"}, {"name": "flat"}, {"name": "flat"}])),
        ("b", json!([{"name": "routed"}, {"name": "flat"}])),
        ("c", json!([{"name": "gateway"}])),
    ]);
    let (a, b, c) = (Pod::new("a").unwrap(), Pod::new("b").unwrap(), Pod::new("c").unwrap());
    let before = Snapshot::take(&node, &[&a]).unwrap();
    for pod in [&a, &b, &c] {
        node.add(pod).success();
    }
    let addresses = |pod: &Pod, ifname: &str| addresses_of(&node, pod, ifname);
    for (theirs, ours) in [("net1", ["net1", "net2"]), ("net2", ["net3", "net4"])] {
        for (family, to) in addresses(&b, theirs).into_iter().enumerate() {
            let echo = Echo::serve(&b.namespace, SocketAddr::new(to, 7)).unwrap();
            for ifname in ours {
                let from = addresses(&a, ifname)[family];
                let heard = datagram_from(&a.namespace, from, echo.address(), PATIENCE).unwrap();
                assert!(heard, "{ifname} from {from} to {to}");
            }
            assert!(datagram(&a.namespace, echo.address(), PATIENCE).unwrap(), "any address to {to}");
        }
    }
    // Two default routes are no different: each address has the one of its own interface.
    let outside: [IpAddr; 2] = ["10.50.0.1".parse().unwrap(), "10.54.0.1".parse().unwrap()];
    for (ifname, gateway) in ["eth0", "net1"].into_iter().zip(outside) {
        ip(&node.namespace, &["addr", "replace", "192.0.2.1/32", "dev", "br0"]).unwrap();
        let echo = Echo::serve(&node.namespace, SocketAddr::new("192.0.2.1".parse().unwrap(), 7)).unwrap();
        let from = addresses(&c, ifname)[0];
        assert!(datagram_from(&c.namespace, from, echo.address(), PATIENCE).unwrap(), "{from} by {gateway}");
    }
    assert_eq!(node.check(&a).success(), Value::Null);
    ip(&a.namespace, &["rule", "del", "from", &addresses(&a, "net2")[0].to_string()]).unwrap();
    let (_, said) = node.check(&a).failure();
    let expected = format!("the rule that keeps {} to net2 is gone", addresses(&a, "net2")[0]);
    assert!(said.ends_with(&expected), "{said}");
    let to = SocketAddr::new(addresses(&b, "net1")[0], 7);
    let echo = Echo::serve(&b.namespace, to).unwrap();
    assert!(!datagram_from(&a.namespace, addresses(&a, "net2")[0], echo.address(), SILENCE).unwrap());
    drop(echo);
    for pod in [&a, &b, &c] {
        assert_eq!(node.del(pod).success(), Value::Null);
    }
    assert_eq!(Snapshot::take(&node, &[&a]).unwrap().pods, before.pods);
}

/// Interfaces that lead to different places need no rules, and get none.
#[test]
fn without_a_shared_destination_there_are_no_rules() {
    let node = node(&[("a", json!([{"name": "routed"}, {"name": "flat"}]))]);
    let pod = Pod::new("a").unwrap();
    node.add(&pod).success();
    assert_eq!(Handle::open_in(pod.namespace.netns()).unwrap().rules().unwrap(), []);
    assert_eq!(node.del(&pod).success(), Value::Null);
}

/// With `keepClusterRoutes`, packets of a pod to the cluster's ranges and replies from its first interface's
/// addresses stay on that interface; everything else leaves by the interface that has the default route, and so do
/// replies from that one's addresses, although a range of the cluster is in its subnet.
///
/// Rows: RTE-keepClusterRoutes.
#[test]
fn the_cluster_stays_on_its_interface_when_the_default_route_moves() {
    const SERVICES: [&str; 2] = ["10.96.0.10", "fd00:96::10"];
    const OUTSIDE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
    /// The node's, in the subnet of the second interface.
    const BESIDE: &str = "10.53.0.200";
    let mut node = Node::new(&[]).unwrap();
    node.set("keepClusterRoutes", json!(true));
    node.set("clusterCIDRs", json!(["10.96.0.0/12", "fd00:96::/112", format!("{BESIDE}/32")]));
    let config = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "isGateway": true,
        "ipam": node.host_local(&["10.53.0.0/24", "fd00:53::/64"])});
    node.write("flat", &network(NAMESPACE, "flat", &config)).unwrap();
    let networks = json!([{"name": "flat", "default-route": ["10.53.0.1", "fd00:53::1"]}]);
    node.write("pod-a", &pod("a", &json!({}), &networks)).unwrap();
    node.start().unwrap();
    node.namespace.loopback_up().unwrap();
    for address in SERVICES.iter().chain(&OUTSIDE) {
        let prefix = if address.contains(':') { 128 } else { 32 };
        ip(&node.namespace, &["addr", "add", &format!("{address}/{prefix}"), "dev", "lo"]).unwrap();
    }
    let pod = Pod::new("a").unwrap();
    let before = Snapshot::take(&node, &[&pod]).unwrap();
    let result = node.add(&pod).success();
    assert_eq!(
        result["routes"],
        json!([
            {"dst": "10.53.0.200/32", "gw": "10.50.0.1"}, {"dst": "10.96.0.0/12", "gw": "10.50.0.1"},
            {"dst": "fd00:96::/112", "gw": "fd00:50::1"},
        ])
    );
    assert_eq!(default_routes(&pod), ["v4 via 10.53.0.1 dev net1 0", "v6 via fd00:53::1 dev net1 1024"]);
    let first = addresses_of(&node, &pod, "eth0");
    let second = addresses_of(&node, &pod, "net1");
    for family in 0..2 {
        for (to, from) in [(SERVICES[family], first[family]), (OUTSIDE[family], second[family])] {
            let to = SocketAddr::new(to.parse().unwrap(), 7);
            let _echo = Echo::serve(&node.namespace, to).unwrap();
            let stream = connect(&pod.namespace, to, PATIENCE).unwrap();
            assert_eq!(stream.local_addr().unwrap().ip(), from, "to {to}");
        }
        // The node is outside of all ranges here, like a client of the pod that uses a NodePort.
        let echo = Echo::serve(&pod.namespace, SocketAddr::new(first[family], 7)).unwrap();
        let client = OUTSIDE[family].parse().unwrap();
        assert!(datagram_from(&node.namespace, client, echo.address(), PATIENCE).unwrap(), "{client}");
    }
    ip(&node.namespace, &["addr", "add", &format!("{BESIDE}/32"), "dev", "br1"]).unwrap();
    let echo = Echo::serve(&pod.namespace, SocketAddr::new(second[0], 7)).unwrap();
    assert!(datagram_from(&node.namespace, BESIDE.parse().unwrap(), echo.address(), PATIENCE).unwrap());
    drop(echo);
    assert_eq!(node.check(&pod).success(), Value::Null);

    ip(&pod.namespace, &["rule", "del", "from", &first[0].to_string()]).unwrap();
    let (_, said) = node.check(&pod).failure();
    assert!(said.ends_with(&format!("the rule that keeps {} to eth0 is gone", first[0])), "{said}");
    let echo = Echo::serve(&pod.namespace, SocketAddr::new(first[0], 7)).unwrap();
    let client = OUTSIDE[0].parse().unwrap();
    assert!(!datagram_from(&node.namespace, client, echo.address(), SILENCE).unwrap());
    ip(&pod.namespace, &["route", "del", "10.96.0.0/12"]).unwrap();
    let (_, said) = node.check(&pod).failure();
    assert!(said.ends_with("the route to 10.96.0.0/12 of the cluster by eth0 is gone"), "{said}");
    drop(echo);
    assert_eq!(node.del(&pod).success(), Value::Null);
    assert_eq!(Snapshot::take(&node, &[&pod]).unwrap().pods, before.pods);
}

/// The addresses of one of a pod's interfaces, as its status has them.
fn addresses_of(node: &Node, pod: &Pod, ifname: &str) -> Vec<IpAddr> {
    let entries = node.status(pod).unwrap();
    let entry =
        entries.as_array().unwrap().iter().find(|entry| entry["interface"] == ifname).unwrap().clone();
    serde_json::from_value(entry["ips"].clone()).unwrap()
}
