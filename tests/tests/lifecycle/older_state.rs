//! An older agent's state: journal and pins of versions that are converted, or that no agent reads any more.

use std::fs;
use std::process::Command;

use netattach_common::LAYOUT_VERSION;
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::executable;
use netattach_tests::record::first_version;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Conversation, Echo, PATIENCE, SILENCE, datagram, eventually, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

use crate::inspect::settings_of_doctor;

/// Pods on a routed link, of which `b` and `c` take datagrams at one port alone.
fn node() -> Node {
    let mut node = Node::new(&[]).unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    for (name, app) in [("a", "client"), ("b", "server"), ("c", "server"), ("d", "client")] {
        node.write(name, &pod(name, &json!({"app": app}), &json!("storage"))).unwrap();
    }
    let rules = json!({
        "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "UDP", "port": 80}]}]
    });
    node.write("only-80", &policy("only-80", "storage", &rules)).unwrap();
    node.start().unwrap();
    node
}

/// Returns the result of `doctor` for a check.
fn doctor(node: &Node, check: &str) -> Vec<Value> {
    let settings = settings_of_doctor(node);
    let mut ctl = Command::new(executable("netattachctl").unwrap());
    ctl.arg("--socket").arg(node.socket()).args(["doctor", "-o", "json", "--config"]).arg(&settings);
    let output = node.namespace.run(|| ctl.output()).unwrap();
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    checks.into_iter().filter(|it| it["check"] == check).collect()
}

fn troubles(node: &Node) -> Vec<Value> {
    let of_record = |it: &&Value| it["problem"].as_str().unwrap().contains("its record is not taken over");
    node.whole_status().unwrap()["troubles"].as_array().unwrap().iter().filter(of_record).cloned().collect()
}

/// The first version of records is read; one before it never existed, and is named wherever an operator looks. In
/// both cases the pods keep working under their policies.
#[test]
fn an_older_agents_state_from_two_versions_ago_is_taken_over_or_named_with_the_remedy() {
    let mut node = node();
    let [a, b, c] = ["a", "b", "c"].map(|name| Pod::new(name).unwrap());
    for one in [&a, &b, &c] {
        node.add(one).success();
    }
    let address = |pod: &Pod, port: u16| {
        let ip = node.status(pod).unwrap()[1]["ips"][0].as_str().unwrap().to_owned();
        format!("{ip}:{port}").parse().unwrap()
    };
    let open = [&b, &c].map(|pod| Echo::serve(&pod.namespace, address(pod, 80)).unwrap());
    let closed = [&b, &c].map(|pod| Echo::serve(&pod.namespace, address(pod, 81)).unwrap());
    let gateway = "10.50.0.1".parse().unwrap();
    let judged = |what: &str| {
        for (open, closed) in open.iter().zip(&closed) {
            assert!(datagram(&a.namespace, open.address(), PATIENCE).unwrap(), "{what}: {}", open.address());
            assert!(
                !datagram(&a.namespace, closed.address(), SILENCE).unwrap(),
                "{what}: {}",
                closed.address()
            );
        }
        for pod in [&a, &b, &c] {
            assert!(ping(&pod.namespace, gateway, PATIENCE).unwrap(), "{what}: {}", pod.name);
        }
    };
    let conversations =
        open.each_ref().map(|server| Conversation::start(&a.namespace, server.address()).unwrap());
    judged("before");

    node.kill().unwrap();
    let record = |pod: &Pod| node.path("state/journal").join(format!("{}@eth0.jsonl", pod.container));
    let [of_b, of_c] = [&b, &c].map(record);
    let [whole_b, whole_c] = [&of_b, &of_c].map(|path| fs::read_to_string(path).unwrap());
    let before_the_first =
        first_version(&whole_b).replacen("{\"planned\":{\"version\":1", "{\"planned\":{\"version\":0", 1);
    fs::write(&of_b, &before_the_first).unwrap();
    fs::write(&of_c, first_version(&whole_c)).unwrap();
    let older = node.bpffs().join(format!("v{}", LAYOUT_VERSION - 2));
    fs::rename(node.bpffs().join(format!("v{LAYOUT_VERSION}")), &older).unwrap();
    judged("without an agent");
    node.start().unwrap();

    let named = format!(
        "{} is of journal version 0, which this agent does not know; run the agent that wrote it until the pod has ended, or \
         give up what it names: stop the agent, delete the file, start the agent, and remove the links and leases of the \
         container by hand (docs/troubleshooting.md)",
        of_b.display()
    );
    let log = node.log_so_far();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(&named)).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("ERROR"), "{}", lines[0]);
    let problem = format!("its record is not taken over: journal: {named}");
    assert_eq!(
        troubles(&node),
        [json!({"object": format!("container {}", b.container), "problem": problem})]
    );
    let expected = json!({
        "check": "journal", "state": "warning",
        "detail": format!("records of other versions: {} (version 0)", of_b.display()),
        "remedy": "run the agent that wrote them until their pods have ended, or remove each together with its container \
                   (docs/upgrade.md)"
    });
    assert_eq!(doctor(&node, "journal"), std::slice::from_ref(&expected));
    // The node serves, its pods keep working, and the pins that one of them may need stay.
    judged("taken over");
    assert!(older.exists());
    let d = Pod::new("d").unwrap();
    node.add(&d).success();
    node.check(&d).success();
    node.del(&d).success();
    for pod in [&a, &c] {
        node.check(pod).success();
    }
    for _ in 0..2 {
        let (code, message) = node.del(&b).failure();
        assert!(message.contains(&named), "{code}: {message}");
    }
    judged("after a DEL");
    for conversation in conversations {
        let (sent, lost) = conversation.end();
        assert!(sent > 10 && lost == 0, "{lost} of {sent} are lost");
    }
    node.del(&c).success();
    assert_eq!(fs::read_to_string(&of_b).unwrap(), before_the_first);
    drop((open, closed));

    // Without an agent, doctor reports the same.
    node.stop().unwrap();
    assert_eq!(doctor(&node, "journal"), [expected]);
    // The way out: the agent that wrote it, here this one with the record as it was.
    fs::write(&of_b, whole_b).unwrap();
    node.start().unwrap();
    assert!(troubles(&node).is_empty() && !older.exists());
    for pod in [&a, &b] {
        node.check(pod).success();
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&a, &b, &c, &d]).unwrap().assert_nothing_is_left();
}

/// The other way out: the record is removed with its container, and is no longer reported as soon as it is gone.
#[test]
fn a_record_that_no_agent_reads_is_removed_with_its_container_and_ceases_to_be_a_trouble() {
    let mut node = node();
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    node.kill().unwrap();
    let path = node.path("state/journal").join(format!("{}@eth0.jsonl", b.container));
    let text = first_version(&fs::read_to_string(&path).unwrap());
    fs::write(&path, text.replacen("\"version\":1", "\"version\":0", 1)).unwrap();
    node.start().unwrap();
    assert_eq!(troubles(&node).len(), 1);
    fs::remove_file(&path).unwrap();
    assert!(eventually(PATIENCE, || troubles(&node).is_empty()));
    node.del(&b).success();
}
