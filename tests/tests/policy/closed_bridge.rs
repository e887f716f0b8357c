//! Addresses of its node that a pod reaches through a bridge of the agent.

use std::net::{SocketAddr, UdpSocket};

use netattach::mac::Mac;
use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::settings::{Sysctls, sysctls};
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, datagram, eventually};
use netattach_tests::{Node, Pod};
use serde_json::json;

/// The node's addresses on another link, by family; a host on the bridge that the pod uses as its router; a gateway
/// there.
const NODE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
const ROUTER: [&str; 2] = ["10.70.0.200", "fd00:70::200"];
const GATEWAY: [&str; 2] = ["10.71.0.1", "fd00:71::1"];
/// The port on which the node listens.
const PORT: u16 = 7007;

/// Whether a datagram of the pod's gets to an address of the node; whether it is answered does not matter.
fn arrives(node: &Node, pod: &Pod, to: &str) -> bool {
    let to = SocketAddr::new(to.parse().unwrap(), PORT);
    // Between a bridge that is gone and the one made again, the node does not have the address.
    let Ok(receiver) = node.namespace.run(|| UdpSocket::bind(to)) else { return false };
    receiver.set_read_timeout(Some(SILENCE)).unwrap();
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let sender = pod.namespace.run(|| UdpSocket::bind(any)).unwrap();
    for _ in 0..3 {
        // An address that is not answered for cannot be reached, as the kernel may report.
        let _ = sender.send_to(b"node", to);
    }
    receiver.recv(&mut [0; 16]).is_ok()
}

/// Makes the pod send to these addresses by the Ethernet address of a bridge.
fn lead(pod: &Pod, to: [&str; 2], bridge: Mac) {
    for (to, router) in to.into_iter().zip(ROUTER) {
        let words = format!("neigh replace {router} lladdr {bridge} dev net1");
        ip(&pod.namespace, &words.split(' ').collect::<Vec<_>>()).unwrap();
        ip(&pod.namespace, &["route", "replace", to, "via", router, "dev", "net1"]).unwrap();
    }
}

/// Returns the settings of the bridge without a gateway, given those of one with a gateway.
fn closed(of_gateway: &Sysctls) -> Sysctls {
    let mut closed = of_gateway.clone();
    for (setting, value) in [("ipv4.arp_ignore", "1"), ("ipv4.rp_filter", "1"), ("ipv6.disable_ipv6", "1")] {
        closed.insert(setting.to_owned(), value.to_owned());
    }
    closed
}

/// Rows: BRG-closed.
#[test]
fn the_node_is_on_no_bridge_of_its_own_but_as_a_gateway() {
    let mut node = Node::new(&[]).unwrap();
    let _outside = node.add_outside().unwrap();
    ip(&node.namespace, &["addr", "add", &format!("{}/64", NODE[1]), "dev", WIRE, "nodad"]).unwrap();
    // The machine's own settings may be strict, and would separate a pod of one subnet from a gateway of the other
    // too.
    for device in ["all", "default"] {
        let setting = format!("/proc/sys/net/ipv4/conf/{device}/rp_filter");
        node.namespace.run(|| std::fs::write(setting, "0")).unwrap();
    }
    let on_bridge = |subnets: &[&str], gateway: bool| {
        let (name, ipam) = ("br1", node.host_local(subnets));
        json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": name, "isGateway": gateway, "ipam": ipam})
    };
    let lan = on_bridge(&["10.70.0.0/24", "fd00:70::/64"], false);
    let routed = on_bridge(&["10.71.0.0/24", "fd00:71::/64"], true);
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("routed", &network(NAMESPACE, "routed", &routed)).unwrap();
    for (name, of) in [("a", "lan"), ("b", "lan"), ("c", "routed")] {
        node.write(name, &pod(name, &json!({}), &json!(of))).unwrap();
    }
    node.start().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    node.add(&b).success();
    let of_gateway = sysctls(&node.namespace, "br0").unwrap();
    let settings = || sysctls(&node.namespace, "br1").unwrap_or_default();
    assert_eq!(settings(), closed(&of_gateway));

    let bridge = || Handle::open_in(node.namespace.netns()).unwrap().find_link("br1").unwrap();
    let addresses = |index| Handle::open_in(node.namespace.netns()).unwrap().addresses(index).unwrap();
    let made = bridge().unwrap();
    assert_eq!(addresses(made.index), []);
    let to_pod = |network: &str| SocketAddr::new(format!("{network}3").parse().unwrap(), PORT);
    let reaches_the_other = || {
        ["10.70.0.", "fd00:70::"].map(|network| {
            let _echo = Echo::serve(&b.namespace, to_pod(network)).unwrap();
            datagram(&a.namespace, to_pod(network), PATIENCE).unwrap()
        })
    };
    assert_eq!(reaches_the_other(), [true; 2]);
    // As its own neighbour, and through a router.
    lead(&a, NODE, made.mac.unwrap());
    assert_eq!(NODE.map(|to| arrives(&node, &a, to)), [false; 2]);
    ip(&a.namespace, &["route", "replace", NODE[0], "dev", "net1"]).unwrap();
    assert!(!arrives(&node, &a, NODE[0]));
    let mut inside = Handle::open_in(a.namespace.netns()).unwrap();
    let index = inside.link("net1").unwrap().index;
    assert_eq!(inside.neighbour(index, NODE[0].parse().unwrap()).unwrap(), None, "nobody answers for it");

    // A bridge that is recreated has the same settings.
    ip(&node.namespace, &["link", "del", "br1"]).unwrap();
    let is_again = || bridge().is_some_and(|link| link.up) && settings() == closed(&of_gateway);
    assert!(eventually(PATIENCE, is_again), "{:?}", settings());
    assert!(eventually(PATIENCE, || reaches_the_other() == [true; 2]));

    // With the first gateway it has the kernel's default settings.
    node.add(&c).success();
    assert_eq!(settings(), of_gateway);
    lead(&a, NODE, bridge().unwrap().mac.unwrap());
    assert_eq!(GATEWAY.map(|to| arrives(&node, &c, to)), [true; 2]);
    assert_eq!(NODE.map(|to| arrives(&node, &a, to)), [true; 2]);

    // And so it is made again.
    ip(&node.namespace, &["link", "del", "br1"]).unwrap();
    assert!(eventually(PATIENCE, || GATEWAY.map(|to| arrives(&node, &c, to)) == [true; 2]));
    assert_eq!(settings(), of_gateway);
    for pod in [&a, &b, &c] {
        node.del(pod).success();
    }
}

/// The address is set by its administrator, or by another plugin with a gateway there.
///
/// Rows: BRG-closed.
#[test]
fn an_address_that_a_closed_bridge_gets_is_answered_for_and_opens_it_where_it_is_a_gateway() {
    let mut node = Node::new(&[]).unwrap();
    let on_bridge = |subnet: &str, gateway: bool| {
        let ipam = node.host_local(&[subnet]);
        json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "isGateway": gateway, "ipam": ipam})
    };
    let (lan, routed) = (on_bridge("10.70.0.0/24", false), on_bridge("10.71.0.0/24", true));
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("routed", &network(NAMESPACE, "routed", &routed)).unwrap();
    for (name, of) in [("a", "lan"), ("c", "routed")] {
        node.write(name, &pod(name, &json!({}), &json!(of))).unwrap();
    }
    node.start().unwrap();
    let [a, c] = ["a", "c"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    let of_gateway = sysctls(&node.namespace, "br0").unwrap();
    let settings = || sysctls(&node.namespace, "br1").unwrap();
    let address = |what: &str, address: &str| {
        ip(&node.namespace, &["addr", what, address, "dev", "br1"]).unwrap();
    };
    address("add", "10.70.0.1/24");
    assert!(arrives(&node, &a, "10.70.0.1"));
    address("del", "10.70.0.1/24");
    address("add", "10.71.0.1/24");
    assert_eq!(settings(), closed(&of_gateway));
    node.add(&c).success();
    assert_eq!(settings(), of_gateway);
    assert!(arrives(&node, &c, "10.71.0.1"));
    for pod in [&a, &c] {
        node.del(pod).success();
    }
}
