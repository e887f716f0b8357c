//! The agent goes and comes back; attached pods do not notice.
#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};

use aya::maps::MapInfo;
use aya::programs::ProgramInfo;
use netattach::bpf::sys;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, executable};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Conversation, Echo, PATIENCE, connect, exchange};
use netattach_tests::{Node, Pod};
use serde_json::json;

/// A node with pods `a` and `b`, each on the default network, a routed one and a macvlan one.
fn node() -> Node {
    let node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    for name in ["a", "b"] {
        node.write(name, &pod(name, &json!({}), &json!("storage, lan"))).unwrap();
    }
    node
}

/// Kernel ids of everything that is pinned, by path.
fn ids(snapshot: &Snapshot) -> BTreeMap<String, u32> {
    snapshot
        .pins
        .iter()
        .map(|path| {
            let id = if path.contains("/prog/") {
                ProgramInfo::from_pin(path).unwrap().id()
            } else if path.contains("/link/") {
                sys::link_info(sys::open_pin(path.as_ref()).unwrap().as_fd()).unwrap().id
            } else {
                MapInfo::from_pin(path).unwrap().id()
            };
            (path.clone(), id)
        })
        .collect()
}

#[test]
fn traffic_flows_on_while_the_agent_is_killed_and_restarted() {
    let mut node = node();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    let before = Snapshot::take(&node, &[&a, &b]).unwrap();
    let servers: Vec<Echo> = ["10.50.0.3:7", "[fd00:50::3]:7", "10.51.0.3:7", "10.52.0.3:7"]
        .map(|address| Echo::serve(&b.namespace, address.parse().unwrap()).unwrap())
        .into();
    let conversations: Vec<Conversation> =
        servers.iter().map(|server| Conversation::start(&a.namespace, server.address()).unwrap()).collect();
    let mut connection = connect(&a.namespace, servers[0].address(), PATIENCE).unwrap();
    for round in 0..5 {
        node.kill().unwrap();
        exchange(&mut connection, PATIENCE).unwrap();
        connect(&a.namespace, servers[2].address(), PATIENCE).unwrap();
        node.start().unwrap();
        assert_eq!(node.ctl(&["attachments"]).unwrap().as_array().unwrap().len(), 6, "round {round}");
    }
    node.stop().unwrap();
    node.start().unwrap();
    for (server, conversation) in servers.iter().zip(conversations) {
        let (sent, lost) = conversation.end();
        assert!(sent > 100, "{}: only {sent}", server.address());
        assert_eq!(lost, 0, "{} of {sent}", server.address());
    }
    let after = Snapshot::take(&node, &[&a, &b]).unwrap();
    assert_eq!(after, before);
    assert_eq!(ids(&after), ids(&before));
    node.check(&a).success();
    node.check(&b).success();
    node.del(&a).success();
    node.del(&b).success();
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
}

#[test]
fn programs_and_maps_are_those_of_the_agent_before() {
    let mut node = node();
    node.start().unwrap();
    let first = ids(&Snapshot::take(&node, &[]).unwrap());
    assert!(first.keys().any(|path| path.ends_with("prog/na_from_pod")), "{first:?}");
    node.kill().unwrap();
    node.start().unwrap();
    assert_eq!(ids(&Snapshot::take(&node, &[]).unwrap()), first);
}

#[test]
fn without_an_agent_add_fails_at_once_and_del_is_kept_until_it_is_back() {
    let mut node = node();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    node.kill().unwrap();
    let started = std::time::Instant::now();
    let late = Pod::new("late").unwrap();
    assert_eq!(node.add(&late).failure().0, 11);
    assert!(started.elapsed().as_secs_f64() < 1.0, "{:?}", started.elapsed());

    let (code, message) = node.del(&a).failure();
    assert_eq!(code, 11);
    assert!(message.starts_with("DEL is not done yet: it is recorded in "), "{message}");
    // A runtime repeats itself; one of the pods' namespaces goes meanwhile.
    assert_eq!(node.del(&a).failure().0, 11);
    let del_b = node.call("DEL", &b);
    drop(b);
    assert_eq!(del_b.run().failure().0, 11);
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 2);

    node.start().unwrap();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
    node.del(&a).success();
}

#[test]
fn a_second_agent_is_refused_and_the_first_goes_on() {
    let mut node = node();
    node.start().unwrap();
    let mut command = node.agent_command(&executable("netattachd").unwrap()).unwrap();
    let mut second = node.namespace.run(|| command.spawn()).unwrap();
    assert_eq!(second.wait().unwrap().code(), Some(1));
    let mut log = String::new();
    second.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.contains("is served by another process"), "{log}");
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn what_the_agent_writes_is_for_root_only() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let mode = |path| fs::metadata(node.path(path)).unwrap().permissions().mode() & 0o777;
    assert!(fs::metadata(node.socket()).unwrap().file_type().is_socket());
    assert_eq!(mode("run/netattach.sock"), 0o600);
    assert_eq!(mode("state/journal"), 0o700);
    assert_eq!(mode("state/journal/c-a@eth0.jsonl"), 0o600);
    node.del(&a).success();
}

#[test]
fn a_sandbox_that_cannot_be_taken_back_keeps_its_numbers_over_a_restart() {
    let mut node = node();
    let not_now = json!({"DEL": {"error": {"code": 11, "msg": "not now"}}});
    node.plugin("stubborn", &not_now).unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "stubborn"});
    node.write("stubborn", &network(NAMESPACE, "stubborn", &config)).unwrap();
    node.write("s", &pod("s", &json!({}), &json!("stubborn"))).unwrap();
    node.start().unwrap();
    let (s, a, b) = (Pod::new("s").unwrap(), Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&s).success();
    assert_eq!(node.del(&s).failure().0, 11, "the plugin's own");
    node.kill().unwrap();
    node.start().unwrap();
    node.add(&a).success();
    node.add(&b).success();
    let server = Echo::serve(&b.namespace, "10.50.0.4:7".parse().unwrap()).unwrap();
    connect(&a.namespace, server.address(), PATIENCE).unwrap();

    node.plugin("stubborn", &json!({})).unwrap();
    node.del(&s).success();
    connect(&a.namespace, server.address(), PATIENCE).unwrap();
    node.check(&a).success();
    node.del(&a).success();
    node.del(&b).success();
    Snapshot::take(&node, &[&s, &a, &b]).unwrap().assert_nothing_is_left();
}
