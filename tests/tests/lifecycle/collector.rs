//! Sandboxes that no runtime asks to detach: the agent finds them by itself, and leaves live pods alone.

use std::fs;
use std::process::Command;
use std::time::Duration;

use netattach::netns::Netns;
use netattach_tests::cri::{Cri, Sandbox};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::record::rewritten;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

/// Several checks, one a second.
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
    let log = node.stop().unwrap();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("detached without a DEL")).collect();
    let of_b = "pod=\"shop/b\" container=\"c-b\" networks=\"kube-system/default,shop/lan\" \
                addresses=\"10.50.0.3/24,fd00:50::3/64,10.52.0.3/24\" ms=";
    assert!(
        matches!(told[..], [line] if line.contains(of_b) && line.ends_with(" why=\"its namespace is gone\"")),
        "{log}"
    );
}

/// The pod `a`, attached by a path that is then gone.
fn without_path(node: &Node) -> Pod {
    let a = Pod::new("a").unwrap();
    let file = node.path("netns-of-a");
    let bound = a.namespace.bind(&file).unwrap();
    node.call("ADD", &a).with("CNI_NETNS", &file.to_string_lossy()).run().success();
    drop(bound);
    a
}

/// Removes the node's end of the pod's link, and the pod's with it: its remaining objects are not visible on the
/// node.
fn cut_off(node: &Node) {
    let rows = node.ctl(&["attachments"]).unwrap();
    let device = rows.as_array().unwrap().iter().find_map(|row| row["host_interface"].as_str()).unwrap();
    ip(&node.namespace, &["link", "del", device]).unwrap();
}

#[test]
fn a_sandbox_whose_path_is_gone_lives_on_while_a_link_or_a_process_is_in_it() {
    for has_link in [true, false] {
        let mut node = node();
        node.start().unwrap();
        let a = without_path(&node);
        // Open, the namespace lives on without a process in it.
        let open = Namespace::at(a.namespace.path()).unwrap();
        let process = if has_link {
            drop(a);
            None
        } else {
            cut_off(&node);
            Some(a)
        };
        std::thread::sleep(LOOKS);
        assert_eq!(attachments(&node), 2, "link: {has_link}");
        drop((open, process));
        assert!(eventually(PATIENCE, || attachments(&node) == 0), "it has ended, link: {has_link}");
        Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
    }
}

/// The kernel reuses the number of a deleted namespace: a process in the other namespace does not delay the
/// collection.
#[test]
fn a_sandbox_that_has_ended_is_detached_although_another_namespace_has_its_number() {
    let mut node = node();
    node.start().unwrap();
    let a = without_path(&node);
    cut_off(&node);
    node.kill().unwrap();
    let record = node.path("state/journal/c-a@eth0.jsonl");
    let text = fs::read_to_string(&record).unwrap();
    let cookie = a.namespace.run(|| Netns::current().unwrap()).cookie().unwrap().unwrap();
    let [own, ended] = [cookie, cookie - 1].map(|cookie| format!("{{\"namespace\":{cookie}}}"));
    assert_eq!(text.matches(&own).count(), 1, "{text}");
    fs::write(&record, rewritten("c-a@eth0.jsonl", &text, |line| line.replace(&own, &ended))).unwrap();
    node.start().unwrap();
    assert!(eventually(PATIENCE, || attachments(&node) == 0));
    let look = Snapshot::take(&node, &[&a]).unwrap();
    assert_eq!(look.pods["c-a"].links.keys().collect::<Vec<_>>(), ["lo", "net1"], "it is the other's");
    assert_eq!((look.files, look.dataplane), Default::default());
}

/// Its DEL has failed, the runtime does not repeat it, and the next agent's try fails too.
#[test]
fn a_sandbox_that_is_half_detached_and_gone_is_detached_as_soon_as_it_can_be() {
    let mut node = node();
    node.plugin("odd", &json!({})).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.0.0", "type": "odd"}))).unwrap();
    node.write("a", &pod("a", &json!({}), &json!("lan, odd"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.plugin("odd", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    node.del(&a).failure();
    node.kill().unwrap();
    drop(a);
    node.start().unwrap();
    let told = "it is half detached, and its namespace is gone, and detaching it has failed ";
    let failed = |node: &Node| problem(node).strip_prefix(told).is_some_and(|rest| !rest.starts_with("1 "));
    assert!(eventually(PATIENCE, || failed(&node)), "{}", problem(&node));
    assert!(problem(&node).contains("not now"), "{}", problem(&node));
    node.plugin("odd", &json!({})).unwrap();
    let is_collected = || node.ctl(&["status"]).unwrap()["collected"] == json!(1);
    assert!(eventually(PATIENCE, is_collected), "{}", problem(&node));
    assert_eq!(problem(&node), "");
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
    let log = node.stop().unwrap();
    assert_eq!(log.matches("not detached; it is tried again").count(), 1, "{log}");
}

/// It was attached while its sandbox was live, and could not be detached with it: no runtime knows it separately.
#[test]
fn an_interface_that_outlives_its_sandbox_is_detached_as_soon_as_it_can_be() {
    let mut node = node();
    node.plugin("odd", &json!({})).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.0.0", "type": "odd"}))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.ctl(&["attach", "shop/a", "odd"]).unwrap();
    node.plugin("odd", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    node.del(&a).failure();
    drop(a);
    assert!(eventually(PATIENCE, || problem(&node).contains("not now")), "{}", problem(&node));
    node.plugin("odd", &json!({})).unwrap();
    let is_collected = || node.ctl(&["status"]).unwrap()["collected"] == json!(1);
    assert!(eventually(PATIENCE, is_collected), "{}", problem(&node));
    assert_eq!(problem(&node), "");
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}

/// The namespace of a process can be determined without its record.
#[test]
fn a_record_that_was_damaged_keeps_no_other_sandbox_from_being_looked_for() {
    let mut node = node();
    node.start().unwrap();
    let a = without_path(&node);
    cut_off(&node);
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    let record = node.path("state/journal/c-a@eth0.jsonl");
    let whole = fs::read(&record).unwrap();
    let mut harmed = whole.clone();
    let plan = harmed.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    harmed[plan + 60] ^= 1;
    fs::write(&record, harmed).unwrap();
    drop(b);
    assert!(eventually(PATIENCE, || attachments(&node) == 2), "one is gone");
    std::thread::sleep(LOOKS);
    assert_eq!(attachments(&node), 2, "the other is lived in");
    fs::write(&record, whole).unwrap();
    drop(a);
    assert!(eventually(PATIENCE, || attachments(&node) == 0));
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}

/// Returns the agent's condition about the container of pod `a`; empty if there is none.
fn problem(node: &Node) -> String {
    let status = node.ctl(&["status"]).unwrap();
    let troubles = status["troubles"].as_array().unwrap().clone();
    let of_a = troubles.into_iter().find(|trouble: &Value| trouble["object"] == "container c-a");
    of_a.map(|trouble| trouble["problem"].as_str().unwrap().to_owned()).unwrap_or_default()
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
    assert!(eventually(PATIENCE, || problem(&node).contains("not now")), "{}", problem(&node));
    assert!(fs::read_dir(node.path("state/journal")).unwrap().count() > 0);
    node.plugin("odd", &json!({})).unwrap();
    assert!(
        eventually(PATIENCE, || node.ctl(&["status"]).unwrap()["collected"] == json!(1)),
        "{}",
        problem(&node)
    );
    assert_eq!(problem(&node), "");
    Snapshot::take(&node, &[]).unwrap().assert_nothing_is_left();
}

/// The socket of another runtime, or of one that has lost its state: a pod with processes is not detached.
#[test]
fn a_runtime_that_lists_no_attached_pod_is_not_believed_while_processes_are_in_the_sandbox() {
    let mut node = node();
    let socket = node.path("runtime.sock");
    node.set("runtimeSocket", json!(socket));
    let runtime = Cri::serve(&socket).unwrap();
    node.start().unwrap();
    let [a, b] = ["a", "b"].map(|name| Pod::new(name).unwrap());
    node.add(&a).success();
    let mut process = a.namespace.run(|| Command::new("sleep").arg("600").spawn()).unwrap();
    let stays =
        "the runtime does not list it, and it stays attached: the runtime lists no attached pod at all";
    assert!(eventually(PATIENCE, || problem(&node).starts_with(stays)), "{}", problem(&node));
    std::thread::sleep(LOOKS);
    node.check(&a).success();

    // It is the pods' runtime after all, and has forgotten one of them.
    node.add(&b).success();
    *runtime.sandboxes() = vec![Sandbox {
        id: b.container.clone(),
        namespace: NAMESPACE.to_owned(),
        name: b.name.clone(),
        uid: "uid-b".to_owned(),
        netns: b.namespace.path().to_owned(),
    }];
    let is_collected = || node.ctl(&["status"]).unwrap()["collected"] == json!(1);
    assert!(eventually(PATIENCE, is_collected), "{}", problem(&node));
    assert_eq!((attachments(&node), problem(&node)), (2, String::new()));
    node.check(&b).success();
    process.kill().unwrap();
    process.wait().unwrap();
    for pod in [&a, &b] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &b]).unwrap().assert_nothing_is_left();
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
