//! Limits by the chained plugin `bandwidth` after the reference's bridge, in an agent: its programs enforce them, and
//! no executable of that name is needed.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, stretched};
use netattach_tests::{Namespace, Node, Pod, tools};
use serde_json::{Value, json};

/// Bits per second, and the bytes that take a second at it.
const RATE: u64 = 8_000_000;
const BYTES: usize = 1_000_000;

const PLUGINS: [&str; 2] = ["bridge", "host-local"];

/// A node on which the reference's bridge makes the interface of the network `web`.
fn limited(test: &str, extra: &Value) -> Option<Node> {
    let reference = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &PLUGINS)?;
    let selection = json!([{
        "name": "web", "bandwidth": {"ingressRate": RATE, "egressRate": RATE, "ingressBurst": 400_000, "egressBurst": 400_000}
    }]);
    let mut node = Node::new(&[pod("a", &json!({}), &selection)]).unwrap();
    let bridge = json!({
        "type": "bridge", "bridge": "web0", "isGateway": true, "ipam": node.host_local(&["10.60.0.0/24"])
    });
    let bandwidth = json!({"type": "bandwidth", "capabilities": {"bandwidth": true}});
    let list = json!({"cniVersion": "1.0.0", "name": "web", "plugins": [bridge, bandwidth]});
    let mut manifest = network(NAMESPACE, "web", &list);
    if let Some(annotations) = extra.as_object() {
        manifest["metadata"]["annotations"] = json!(annotations);
    }
    node.write("web", &manifest).unwrap();
    for plugin in PLUGINS {
        symlink(reference.join(plugin), node.path("cni-bin").join(plugin)).unwrap();
    }
    node.set("delegation", json!({"exec": ["bridge"]}));
    Some(node)
}

/// Returns how long it takes until all bytes have arrived from one namespace in another.
fn transfer(from: &Namespace, to: &Namespace, address: &str) -> Duration {
    let address: SocketAddr = address.parse().unwrap();
    let listener = to.run(|| TcpListener::bind(address).unwrap());
    std::thread::scope(|scope| {
        let received = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let begun = Instant::now();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            assert_eq!(all.len(), BYTES);
            begun.elapsed()
        });
        let mut stream = from.run(|| TcpStream::connect_timeout(&address, stretched(PATIENCE)).unwrap());
        stream.write_all(&vec![7; BYTES]).unwrap();
        drop(stream);
        received.join().unwrap()
    })
}

/// Rows: BWD-delegated.
#[test]
fn behind_an_interface_of_another_plugin_the_agent_holds_the_limit() {
    let test = "behind_an_interface_of_another_plugin_the_agent_holds_the_limit";
    let Some(mut node) = limited(test, &json!({})) else { return };
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let to_pod = transfer(&node.namespace, &a.namespace, "10.60.0.2:80");
    let from_pod = transfer(&a.namespace, &node.namespace, "10.60.0.1:80");
    for took in [to_pod, from_pod] {
        assert!(took > Duration::from_millis(700), "{took:?}");
    }
    let kinds: Vec<String> = Handle::open_in(node.namespace.netns())
        .unwrap()
        .links()
        .unwrap()
        .into_iter()
        .map(|it| it.kind)
        .collect();
    assert!(!kinds.contains(&"ifb".to_owned()), "{kinds:?}");
    node.check(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: BWD-never.
#[test]
fn where_the_agent_leaves_interfaces_alone_the_executable_is_needed() {
    let test = "where_the_agent_leaves_interfaces_alone_the_executable_is_needed";
    let Some(mut node) = limited(test, &json!({"netattach.dev/enforce": "never"})) else { return };
    node.start().unwrap();
    let (_, told) = node.add(&Pod::new("a").unwrap()).failure();
    assert!(told.contains("bandwidth"), "{told}");
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}
