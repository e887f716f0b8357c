//! Pods of one bridge that VLANs or port isolation separate: no frame passes between them, neither by the bridge nor
//! by the fast path, whatever the pods send.

use std::net::IpAddr;

use netattach::mac::Mac;
use netattach::netlink::Handle;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::ip;
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::bridges_filter_by_vlan;
use netattach_tests::traffic::{PATIENCE, SILENCE, eventually, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

const DEVICE: &str = "net1";
/// Bytes at the end of a frame by which it is known.
const TAIL: usize = 12;

/// Returns a node that uses the fast path wherever that is correct, with these networks on bridges and one pod for
/// each pair: name of the pod, and its network.
fn node(networks: &[(&str, Value)], pods: &[(&str, &str)]) -> (Node, Vec<Pod>) {
    let mut node = Node::new(&[]).unwrap();
    node.set("fastPath", json!("on"));
    for (name, keys) in networks {
        let mut config = json!({"cniVersion": "1.0.0", "type": "bridge", "preserveDefaultVlan": false});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        if let Some(first) = keys.get("ipam") {
            // Each network has its own addresses of the one subnet: any packet that leaks is answered.
            config["ipam"] = node.host_local(&["10.60.0.0/24"]);
            config["ipam"]["ranges"][0][0]["rangeStart"] = first.clone();
        }
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    for (name, network) in pods {
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(network))).unwrap();
    }
    node.start().unwrap();
    let add = |(name, _): &(&str, &str)| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    };
    let pods = pods.iter().map(add).collect();
    (node, pods)
}

/// Checks which pods reach which.
fn assert_reach(table: &[(&Pod, &str, bool)]) {
    let reaches = |(from, to, expected): &(&Pod, &str, bool)| {
        let patience = if *expected { PATIENCE } else { SILENCE };
        (
            from.name.clone(),
            (*to).to_owned(),
            ping(&from.namespace, to.parse::<IpAddr>().unwrap(), patience).unwrap(),
        )
    };
    let found: Vec<_> = table.iter().map(reaches).collect();
    let expected: Vec<_> =
        table.iter().map(|(from, to, expected)| (from.name.clone(), (*to).to_owned(), *expected)).collect();
    assert_eq!(found, expected);
}

fn row(node: &Node, pod: &Pod) -> Value {
    let rows = node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/{}", pod.name)]).unwrap();
    rows.as_array().unwrap().iter().find(|row| row["ifname"] == DEVICE).unwrap().clone()
}

fn assert_off(node: &Node, pods: &[Pod], reason: &str) {
    for pod in pods {
        node.check(pod).success();
        let mut told = (Value::Null, Value::Null);
        // The first check of it may be later.
        eventually(PATIENCE, || {
            let mut row = row(node, pod);
            told = (row["fast_path"]["state"].take(), row["enforcement"].take());
            told.0 == reason
        });
        assert_eq!(told, (json!(reason), json!("full")), "{}", pod.name);
    }
}

/// Changes by others are reverted; the port is down until then.
fn assert_put_back(node: &Node, pod: &Pod) {
    let row = row(node, pod);
    let port = row["host_interface"].as_str().unwrap();
    ip(&node.namespace, &["link", "set", port, "nomaster"]).unwrap();
    assert!(eventually(PATIENCE, || node.check(pod).json.is_null()));
}

fn end(node: &Node, pods: &[Pod]) {
    for pod in pods {
        node.del(pod).success();
    }
    let mut host = Handle::open_in(node.namespace.netns()).unwrap();
    for (bridge, ports) in host.own_bridges().unwrap() {
        assert_eq!(ports, 0, "{}", bridge.name);
        host.ensure_own_bridge_absent(&bridge).unwrap();
    }
    let pods: Vec<&Pod> = pods.iter().collect();
    Snapshot::take(node, &pods).unwrap().assert_nothing_is_left();
}

/// Rows: BRG-apart, BRG-portIsolation.
#[test]
fn no_frame_passes_between_isolated_ports_by_any_path() {
    let networks =
        [("apart", json!({"bridge": "br8", "portIsolation": true, "isGateway": true, "ipam": "10.60.0.10"}))];
    let (node, pods) = node(&networks, &[("apart1", "apart"), ("apart2", "apart")]);
    let table = [
        (&pods[0], "10.60.0.11", false),
        (&pods[0], "10.60.0.1", true),
        (&pods[1], "10.60.0.10", false),
        (&pods[1], "10.60.0.1", true),
    ];
    assert_reach(&table);
    assert_off(&node, &pods, "port-restricted");
    assert_put_back(&node, &pods[0]);
    assert_reach(&table);
    end(&node, &pods);
}

fn mac_of(pod: &Pod) -> Mac {
    Handle::open_in(pod.namespace.netns()).unwrap().link(DEVICE).unwrap().mac.unwrap()
}

/// A datagram of a pod to another, marked by its last byte.
fn frame(from: &Pod, to: &Pod, vlan: Option<u16>, mark: u8) -> Vec<u8> {
    let packet = Packet::between("10.60.0.10", "10.60.0.20").from_mac(mac_of(from));
    let packet = vlan.map_or(packet.clone(), |vlan| packet.tagged(vlan));
    let mut frame =
        packet.payload(17, &[[0, 9, 0, 9, 0, 20, 0, 0].as_slice(), &[mark; TAIL]].concat()).frame();
    frame[..6].copy_from_slice(&mac_of(to).0);
    frame
}

/// Runs where the kernel's bridges know VLANs.
///
/// Rows: BRG-apart.
#[test]
fn no_frame_passes_between_vlans_by_any_path() {
    if !bridges_filter_by_vlan("no_frame_passes_between_vlans") {
        return;
    }
    let networks = [
        ("red", json!({"bridge": "br7", "vlan": 100, "isGateway": true, "ipam": "10.60.0.10"})),
        ("blue", json!({"bridge": "br7", "vlan": 200, "ipam": "10.60.0.20"})),
        ("trunk", json!({"bridge": "br7", "vlanTrunk": [{"id": 100}, {"minID": 150, "maxID": 160}]})),
    ];
    let pods = [("red1", "red"), ("red2", "red"), ("blue1", "blue"), ("trunk1", "trunk")];
    let (node, pods) = node(&networks, &pods);
    let table = [
        (&pods[0], "10.60.0.11", true),
        (&pods[0], "10.60.0.20", false),
        (&pods[0], "10.60.0.1", true),
        (&pods[2], "10.60.0.10", false),
        (&pods[2], "10.60.0.1", false),
    ];
    assert_reach(&table);
    assert_off(&node, &pods, "vlan-filtering");

    let [red1, red2, blue1, trunk1] = &pods[..] else { panic!("four pods") };
    let [at_red2, at_blue1] = [red2, blue1].map(|pod| RawSocket::queued(&pod.namespace, DEVICE).unwrap());
    let [from_red1, from_trunk1] = [red1, trunk1].map(|pod| RawSocket::open(&pod.namespace, DEVICE).unwrap());
    for (socket, frame) in [
        // A tag of another VLAN, from a pod that may use none and from one that may use others.
        (&from_red1, frame(red1, blue1, Some(200), 1)),
        (&from_trunk1, frame(trunk1, blue1, Some(200), 2)),
        // A trunk's frames without a tag are in VLAN 1.
        (&from_trunk1, frame(trunk1, blue1, None, 3)),
        (&from_trunk1, frame(trunk1, red2, None, 4)),
        // The last has to arrive.
        (&from_trunk1, frame(trunk1, red2, Some(100), 5)),
    ] {
        socket.send(&frame).unwrap();
    }
    let marks = |frames: Vec<Vec<u8>>| -> Vec<u8> {
        let marked = frames.into_iter().filter(|frame| {
            frame.len() > TAIL
                && frame[frame.len() - TAIL..].iter().all(|byte| *byte == frame[frame.len() - 1])
        });
        marked.map(|frame| frame[frame.len() - 1]).filter(|mark| (1..=5).contains(mark)).collect()
    };
    assert_eq!(marks(at_red2.frames_until(&[5; TAIL], PATIENCE).unwrap()), [5]);
    assert_eq!(marks(at_blue1.frames().unwrap()), [0; 0]);

    assert_put_back(&node, red1);
    assert_reach(&table);
    end(&node, &pods);
}
