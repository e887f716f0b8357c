//! Sandboxes that no runtime asks to detach: the agent finds them by itself, and leaves live pods alone.

use std::fs;
use std::time::Duration;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::WIRE;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Several looks, of one second each.
const LOOKS: Duration = Duration::from_secs(5);

/// A node with the pods `a` and `b` on the default network and a macvlan one, whose agent collects after a second.
fn node() -> Node {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    for name in ["a", "b"] {
        node.write(name, &pod(name, &json!({}), &json!("lan"))).unwrap();
    }
    node.set("collectAfterSeconds", json!(1));
    node
}

fn attachments(node: &Node) -> usize {
    node.ctl(&["attachments"]).unwrap().as_array().unwrap().len()
}

#[test]
fn a_sandbox_whose_namespace_is_gone_is_detached_and_a_live_one_is_not() {
    let mut node = node();
    node.start().unwrap();
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();
    std::thread::sleep(LOOKS);
    assert_eq!(attachments(&node), 4, "both live");
    drop(b);
    assert!(eventually(PATIENCE, || attachments(&node) == 2), "one is gone");
    assert!(eventually(PATIENCE, || node.ctl(&["status"]).unwrap()["collected"] == json!(1)));
    std::thread::sleep(LOOKS);
    node.check(&a).success();
    assert!(!node.path("run/network-status").join(NAMESPACE).join("b.json").exists());
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_sandbox_whose_path_is_gone_lives_on_while_a_process_is_in_it() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let file = node.path("netns-of-a");
    a.namespace.bind(&file).unwrap();
    let call = |verb: &str| node.call(verb, &a).with("CNI_NETNS", &file.to_string_lossy()).run();
    call("ADD").success();
    rustix::mount::unmount(&file, rustix::mount::UnmountFlags::DETACH).unwrap();
    std::thread::sleep(LOOKS);
    assert_eq!(attachments(&node), 2);
    call("DEL").success();
}

#[test]
fn a_sandbox_that_ended_while_no_agent_ran_is_detached_and_one_that_cannot_be_is_shown() {
    let mut node = node();
    node.plugin("odd", &json!({})).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.0.0", "type": "odd"}))).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("lan, odd"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.kill().unwrap();
    node.plugin("odd", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    drop(a);
    node.start().unwrap();
    let problem = || {
        let status = node.ctl(&["status"]).unwrap();
        let troubles = status["troubles"].as_array().unwrap().clone();
        let of_a = troubles.into_iter().find(|trouble: &Value| trouble["object"] == "container c-a");
        of_a.map(|trouble| trouble["problem"].as_str().unwrap().to_owned()).unwrap_or_default()
    };
    assert!(eventually(PATIENCE, || problem().contains("not now")), "{}", problem());
    assert!(fs::read_dir(node.path("state/journal")).unwrap().count() > 0);
    node.plugin("odd", &json!({})).unwrap();
    assert!(
        eventually(PATIENCE, || node.ctl(&["status"]).unwrap()["collected"] == json!(1)),
        "{}",
        problem()
    );
    assert_eq!(problem(), "");
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_runtime_that_does_not_answer_is_shown_and_nothing_is_detached() {
    let mut node = node();
    let socket = node.path("runtime.sock");
    node.set("runtimeSocket", json!(socket));
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let shown = || {
        let status = node.ctl(&["status"]).unwrap();
        let object = format!("runtime {}", socket.display());
        status["troubles"].as_array().unwrap().iter().any(|trouble| trouble["object"] == json!(object))
    };
    assert!(eventually(PATIENCE, shown));
    std::thread::sleep(LOOKS);
    node.check(&a).success();
    node.del(&a).success();
}
