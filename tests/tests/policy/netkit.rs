//! Netkits under policies. Runs if the kernel has the driver.

use std::net::SocketAddr;
use std::os::unix::fs::symlink;

use netattach::mac::Mac;
use netattach::netlink::Handle;
use netattach::spec::{LinkMode, NetkitMode, NetkitPolicy, NetkitWays};
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{executable, ip};
use netattach_tests::other_programs::{self, Verdict};
use netattach_tests::packet::Packet;
use netattach_tests::raw::RawSocket;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::tools::report_skipped;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// Whether the kernel has the driver; otherwise the test is reported as skipped.
fn has_driver(test: &str) -> bool {
    let found = ip(&Namespace::new().unwrap(), &["link", "add", "probe", "type", "netkit"]).is_ok();
    if !found {
        report_skipped(test, "the kernel has no netkit");
    }
    found
}

/// The pods of a node, in the order in which they are attached: the first has the address that ends in 2.
const PODS: [&str; 3] = ["server", "client", "stranger"];

/// Returns a node whose agent creates netkits of that mode, with its pods attached. The server accepts TCP to port 80
/// and datagrams to port 7, only from the client. Nothing gets into a pod by the network `shut`, which none has yet.
fn node_that_makes(mode: &str) -> (Node, [Pod; 3]) {
    let mut node = Node::new(&[]).unwrap();
    node.set("fastPath", json!("on"));
    let networks: [(&str, &str, &[&str]); 2] =
        [("kit", "pass", &["10.80.0.0/24", "fd00:80::/64"]), ("shut", "drop", &["10.82.0.0/24"])];
    for (name, policy, subnets) in networks {
        let ipam = node.host_local(subnets);
        let config =
            json!({"cniVersion": "1.0.0", "type": "netkit", "mode": mode, "policy": policy, "ipam": ipam});
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    for name in PODS {
        node.write(&format!("pod-{name}"), &pod(name, &json!({"app": name}), &json!("kit"))).unwrap();
    }
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [{"podSelector": {"matchLabels": {"app": "client"}}}],
            "ports": [{"port": 80}, {"protocol": "UDP", "port": 7}]
        }]
    });
    node.write("rules", &policy("rules", "kit", &rules)).unwrap();
    node.start().unwrap();
    let pods = PODS.map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    (node, pods)
}

fn end(node: &Node, pods: &[Pod; 3]) {
    for pod in pods {
        node.del(pod).success();
        node.del(pod).success();
    }
    Snapshot::take(node, &pods.each_ref()).unwrap().assert_nothing_is_left();
}

/// The row of a pod's interface in an output of `netattachctl`.
fn row(node: &Node, what: &str, (pod, ifname): (&str, &str)) -> Value {
    let rows = node.ctl(&[what, "--pod", &format!("{NAMESPACE}/{pod}")]).unwrap();
    rows.as_array().unwrap().iter().find(|row| row["ifname"] == ifname).unwrap().clone()
}

/// How many packets of a pod's netkit were dropped for a reason.
fn dropped(node: &Node, pod: &str, reason: &str) -> u64 {
    row(node, "stats", (pod, "net1"))["dropped"][reason].as_u64().unwrap_or(0)
}

/// Waits until a pod's interface has this state on the fast path.
#[track_caller]
fn await_fast_path(node: &Node, interface: (&str, &str), wanted: &str) {
    let mut last = Value::Null;
    let stands = || {
        last = row(node, "attachments", interface)["fast_path"]["state"].clone();
        last == wanted
    };
    assert!(eventually(PATIENCE, stands), "{interface:?}: {last}, not {wanted}");
}

/// Sends a frame, and returns once one of the pod's was dropped for that reason.
fn assert_dropped(node: &Node, pod: &str, socket: &RawSocket, (what, frame): (&str, &[u8]), reason: &str) {
    let before = dropped(node, pod, reason);
    socket.send(frame).unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let counted = || dropped(node, pod, reason) > before;
    assert!(eventually(PATIENCE, counted), "{what}: not dropped as {reason}");
}

/// Rows: NKT-agent, NKT-fastPath.
#[test]
fn a_policy_holds_on_the_agents_own_netkits_also_over_a_restart() {
    if !has_driver("a_policy_holds_on_the_agents_own_netkits_also_over_a_restart") {
        return;
    }
    for mode in ["l2", "l3"] {
        let (mut node, pods) = node_that_makes(mode);
        let [server, client, stranger] = &pods;
        let at = |address: &str, port| SocketAddr::new(address.parse().unwrap(), port);
        let addresses = ["10.80.0.2", "fd00:80::2"];
        let _served = addresses
            .map(|address| [80, 81].map(|port| Echo::serve(&server.namespace, at(address, port)).unwrap()));
        let assert_it_holds = |when: &str| {
            for address in addresses {
                let reaches =
                    |pod: &Pod, port, patience| connects(&pod.namespace, at(address, port), patience);
                assert!(reaches(client, 80, PATIENCE), "{mode}, {when}: {address}, the open port");
                assert!(!reaches(client, 81, SILENCE), "{mode}, {when}: {address}, the closed port");
                assert!(!reaches(stranger, 80, SILENCE), "{mode}, {when}: {address}, another pod");
            }
        };
        for name in PODS {
            await_fast_path(&node, (name, "net1"), "on");
        }
        assert_it_holds("attached");
        let fast = row(&node, "stats", ("server", "net1"))["fast"]["packets"].clone();
        assert!(fast.as_u64() > Some(0), "{mode}: no packet has taken the fast path: {fast}");
        // It would lead packets past the kernel's policy of the pair.
        let named = format!("{NAMESPACE}/stranger");
        node.ctl(&["attach", &named, "shut"]).unwrap();
        await_fast_path(&node, ("stranger", "net2"), "opted-out");
        node.ctl(&["detach", &named, "net2"]).unwrap();
        node.kill().unwrap();
        assert_it_holds("without an agent");
        node.start().unwrap();
        assert_it_holds("after a restart");
        for pod in &pods {
            await_fast_path(&node, (&pod.name, "net1"), "on");
            node.check(pod).success();
            let [level, end] = told(&node, &pod.name);
            assert_eq!(level, json!("full"), "{mode}");
            assert!(end.is_string(), "{mode}: {end}");
        }
        ip(&stranger.namespace, &["link", "set", "net1", "down"]).unwrap();
        assert_ne!(node.check(stranger).exit, 0, "{mode}");
        // A pair ends with either end.
        ip(&client.namespace, &["link", "delete", "net1"]).unwrap();
        assert_ne!(node.check(client).exit, 0, "{mode}");
        end(&node, &pods);
    }
}

/// The node handles a packet by the protocol that its socket has named, and the programs judge it by its ethertype.
/// Both must be the same; no frame with the right protocol is lost by that.
///
/// Rows: NKT-protocol.
#[test]
fn a_pod_cannot_name_another_protocol_than_its_frames_have() {
    if !has_driver("a_pod_cannot_name_another_protocol_than_its_frames_have") {
        return;
    }
    const IPV4: u16 = libc::ETH_P_IP as u16;
    const IPV6: u16 = libc::ETH_P_IPV6 as u16;
    const VLAN: u16 = libc::ETH_P_8021Q as u16;
    const EXPERIMENT: u16 = 0x88b5;
    /// The end of a frame, which routers leave unchanged: the whole datagram, whose ports distinguish the frames.
    const TAIL: usize = 12;
    for mode in ["l2", "l3"] {
        let (node, pods) = node_that_makes(mode);
        let [server, client, stranger] = &pods;
        let frame_of = |pod: &Pod, from: &str, to: &str, port, ethertype: u16| {
            let (own, next) = macs(&node, &pod.name);
            let mut frame = Packet::between(from, to).from_mac(own).udp(port, 7).frame();
            frame[..6].copy_from_slice(&next.0);
            frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
            frame
        };
        let from_stranger = |from, to, port, ethertype| frame_of(stranger, from, to, port, ethertype);
        let (to4, to6) = ("10.80.0.2", "fd00:80::2");
        let (friend4, friend6) = ("10.80.0.3", "fd00:80::3");
        let (own4, own6) = ("10.80.0.4", "fd00:80::4");
        // The protocol that the socket names, the frame, and the reason of the drop.
        let frames = [
            (
                "IPv4 of another as an experiment",
                IPV4,
                from_stranger(friend4, to4, 1001, EXPERIMENT),
                "malformed",
            ),
            (
                "IPv6 of another as an experiment",
                IPV6,
                from_stranger(friend6, to6, 1002, EXPERIMENT),
                "malformed",
            ),
            ("IPv4 of another as IPv6", IPV4, from_stranger(friend4, to4, 1003, IPV6), "malformed"),
            ("IPv4 of another as a VLAN's", IPV4, from_stranger(friend4, to4, 1004, VLAN), "malformed"),
            ("IPv4 of another as a length", IPV4, from_stranger(friend4, to4, 1005, 46), "malformed"),
            ("an experiment as IPv4", EXPERIMENT, from_stranger(own4, to4, 1006, IPV4), "malformed"),
            ("an experiment as IPv6", EXPERIMENT, from_stranger(own6, to6, 1007, IPV6), "malformed"),
            // The kernel takes the first bytes of the packet for a tag, and so do the programs.
            ("a VLAN's as IPv4", VLAN, from_stranger(friend4, to4, 1008, IPV4), "vlan-tagged"),
            ("IPv4 of another", IPV4, from_stranger(friend4, to4, 1009, IPV4), "source-ipv4"),
            ("IPv6 of another", IPV6, from_stranger(friend6, to6, 1010, IPV6), "source-ipv6"),
        ];
        let arrived = RawSocket::open(&server.namespace, "net1").unwrap();
        for (what, named, frame, reason) in &frames {
            let what = format!("{mode}: {what}");
            let past_the_queue = RawSocket::open_for(&stranger.namespace, "net1", *named).unwrap();
            let queued = RawSocket::queued_as(&stranger.namespace, "net1", *named).unwrap();
            for socket in [past_the_queue, queued] {
                assert_dropped(&node, "stranger", &socket, (&*what, &frame[..]), reason);
            }
        }
        // The same by a pod that may, with a name and without one.
        for (named, port) in [(IPV4, 2001), (libc::ETH_P_ALL as u16, 2002)] {
            let frame = frame_of(client, friend4, to4, port, IPV4);
            RawSocket::open_for(&client.namespace, "net1", named).unwrap().send(&frame).unwrap();
            let tail = &frame[frame.len() - TAIL..];
            let seen = arrived.frames_until(tail, PATIENCE).unwrap();
            assert!(seen.last().is_some_and(|last| last.ends_with(tail)), "{mode}: an honest frame is lost");
            let escaped = seen.iter().filter(|seen| {
                frames.iter().any(|(.., frame, _)| seen.ends_with(&frame[frame.len() - TAIL..]))
            });
            assert_eq!(escaped.count(), 0, "{mode}: a frame got through");
        }
        assert_eq!(dropped(&node, "client", "malformed"), 0, "{mode}");
        end(&node, &pods);
    }
}

/// The Ethernet addresses of a pod's netkit and of its end on the node: zeros in mode `l3`.
fn macs(node: &Node, pod: &str) -> (Mac, Mac) {
    let row = row(node, "attachments", (pod, "net1"));
    let host = row["host_interface"].as_str().unwrap();
    let own = row["mac"].as_str().map_or(Mac([0; 6]), |mac| mac.parse().unwrap());
    let next = Handle::open_in(node.namespace.netns()).unwrap().link(host).unwrap().mac;
    (own, next.unwrap_or(Mac([0; 6])))
}

/// Only the node's end can determine the policy of the pair, and changes by others there are noticed.
///
/// Rows: NKT-primary.
#[test]
fn what_others_do_at_the_nodes_end_of_a_netkit_is_seen_and_the_pod_can_do_none_of_it() {
    if !has_driver("what_others_do_at_the_nodes_end_of_a_netkit_is_seen") {
        return;
    }
    let (node, pods) = node_that_makes("l2");
    let [server, client, _] = &pods;
    let (in_pod, host) =
        (other_programs::index_of(&client.namespace, "net1").unwrap(), told(&node, "client"));
    let host = host[1].as_str().unwrap().to_owned();
    let on_node = other_programs::index_of(&node.namespace, &host).unwrap();
    // The pod.
    let program = other_programs::program(Verdict::Next).unwrap();
    let refused = other_programs::attach_netkit_peer(&client.namespace, in_pod, &program).unwrap_err();
    let error = refused.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
    assert_eq!(error, Some(libc::EACCES), "{refused:#}");
    let blocked =
        NetkitWays { policy: NetkitPolicy::Drop, peer_policy: NetkitPolicy::Drop, mode: NetkitMode::L2 };
    let mut inside = Handle::open_in(client.namespace.netns()).unwrap();
    inside.set_netkit_policies(in_pod, blocked).unwrap_err();
    node.check(client).success();
    // Other processes on the node.
    let mut outside = Handle::open_in(node.namespace.netns()).unwrap();
    outside.set_netkit_policies(on_node, blocked).unwrap();
    let made = LinkMode::Netkit(NetkitWays { mode: NetkitMode::L2, ..NetkitWays::default() });
    let are_back = || outside.link(&host).unwrap().mode == Some(made);
    assert!(eventually(PATIENCE, are_back), "the policies are not put back");
    node.check(client).success();
    let held = other_programs::attach_netkit_peer(&node.namespace, on_node, &program).unwrap();
    let level = |expected: &str| {
        let is_so = || {
            // It has all attachments looked at.
            node.whole_status().unwrap();
            told(&node, "client")[0] == expected
        };
        assert!(eventually(PATIENCE, is_so), "{:?}", told(&node, "client"));
    };
    level("advisory");
    drop(held);
    level("full");
    assert_eq!(told(&node, "server")[0], "full", "{}", server.name);
    end(&node, &pods);
}

/// Returns a node whose agent executes `netkit`, and has it judged; each pod has its own network: their name, the
/// mode, and the last byte of the address. `None`: the kernel has no driver.
fn node_that_executes(test: &str, pods: &[(&str, &str, u8)]) -> Option<Node> {
    if !has_driver(test) {
        return None;
    }
    let mut node = Node::new(&[]).unwrap();
    symlink(executable("netattach-cni").unwrap(), node.path("cni-bin").join("netkit")).unwrap();
    node.set("delegation", json!({"exec": ["netkit"], "enforce": "always"}));
    for (name, mode, host) in pods {
        let ipam = json!({"type": "static", "addresses": [{"address": format!("10.81.0.{host}/24")}]});
        let config =
            json!({"cniVersion": "1.0.0", "name": name, "type": "netkit", "mode": mode, "ipam": ipam});
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({"app": name}), &json!(name))).unwrap();
    }
    Some(node)
}

/// The level of a pod's netkit, and its end on the node.
fn told(node: &Node, pod: &str) -> [Value; 2] {
    let row = row(node, "attachments", (pod, "net1"));
    ["enforcement", "host_interface"].map(|key| row[key].clone())
}

/// The agent's handling of a netkit that it does not create itself: it has it created, judges it, and has it checked
/// and deleted, before and after a restart.
///
/// Rows: NKT-executed.
#[test]
fn a_policy_holds_on_a_netkit_that_is_executed_also_over_a_restart() {
    let test = "a_policy_holds_on_a_netkit_that_is_executed_also_over_a_restart";
    let names = ["server", "client", "stranger"];
    let pods = [(names[0], "l2", 2), (names[1], "l2", 3), (names[2], "l2", 4)];
    let Some(mut node) = node_that_executes(test, &pods) else { return };
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}], "ports": [{"port": 80}]}]
    });
    node.write("rules", &policy("rules", "server, client, stranger", &rules)).unwrap();
    node.start().unwrap();
    let [server, client, stranger] = names.map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    let at = |port| SocketAddr::new("10.81.0.2".parse().unwrap(), port);
    let _served = [80, 81].map(|port| Echo::serve(&server.namespace, at(port)).unwrap());
    let assert_it_holds = |when: &str| {
        assert!(connects(&client.namespace, at(80), PATIENCE), "{when}: the open port");
        assert!(!connects(&client.namespace, at(81), SILENCE), "{when}: the closed port");
        assert!(!connects(&stranger.namespace, at(80), SILENCE), "{when}: another pod");
    };
    assert_it_holds("attached");
    node.kill().unwrap();
    assert_it_holds("without an agent");
    node.start().unwrap();
    assert_it_holds("after a restart");
    assert_eq!(told(&node, "server"), [json!("full-unless-privileged"), Value::Null]);
    for pod in [&server, &client, &stranger] {
        node.check(pod).success();
    }
    // Through the queue: packets that bypass it are not seen by any program in a pod.
    let named = RawSocket::queued_as(&stranger.namespace, "net1", libc::ETH_P_IP as u16).unwrap();
    let mut frame = Packet::between("10.81.0.3", "10.81.0.2").udp(1001, 7).frame();
    frame[12..14].copy_from_slice(&0x88b5_u16.to_be_bytes());
    assert_dropped(&node, "stranger", &named, ("IPv4 as an experiment", &frame[..]), "malformed");
    // The executable checks the result of ADD, and the agent passes on its answer.
    ip(&stranger.namespace, &["link", "set", "net1", "down"]).unwrap();
    ip(&stranger.namespace, &["address", "flush", "dev", "net1"]).unwrap();
    assert_ne!(node.check(&stranger).exit, 0);
    for pod in [&server, &client, &stranger] {
        node.del(pod).success();
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&server, &client, &stranger]).unwrap().assert_nothing_is_left();
}

/// Programs of the pair see what the pod sends before the node's end does: another plugin's netkit is judged in the pod.
///
/// Rows: NKT-delegated.
#[test]
fn a_netkit_of_another_plugin_is_not_judged_at_its_other_end() {
    let test = "a_netkit_of_another_plugin_is_not_judged_at_its_other_end";
    let pods = [("two", "l2", 2), ("three", "l3", 2)];
    let Some(mut node) = node_that_executes(test, &pods) else { return };
    node.start().unwrap();
    for (name, level) in [("two", "full-unless-privileged"), ("three", "none")] {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        assert_eq!(told(&node, name), [json!(level), Value::Null], "{name}");
        node.del(&pod).success();
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}
