//! Restart and upgrade of an agent with many attachments: all are adopted, none is attached again, and no packet is
//! lost.
//!
//! How long it takes is printed:
//! `NETATTACH_RESTART_ATTACHMENTS=1000 cargo test --release -p netattach-tests --test lifecycle -- restart_many --nocapture`.

use std::time::{Duration, Instant};

use aya::maps::{Array, Map, MapData};
use netattach_common::{Config, LAYOUT_VERSION};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::traffic::{Conversation, Echo};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Interfaces of each pod: one on the default network and three on a routed one.
const INTERFACES: usize = 4;
/// Upper bound on a busy machine; the figure itself is printed.
const BOUND: Duration = Duration::from_secs(60);

pub(crate) fn attachments() -> usize {
    std::env::var("NETATTACH_RESTART_ATTACHMENTS").map_or(200, |number| number.parse().unwrap())
}

/// A node with that many attachments, made by ADD.
pub(crate) fn node(count: usize) -> (Node, Vec<Pod>) {
    let mut node = Node::new(&[]).unwrap();
    node.set("maxAttachments", json!(8192));
    let routed = |third: usize| node.host_local(&[&format!("10.{}.0.0/16", 60 + third)]);
    for third in 1..INTERFACES {
        let config = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": routed(third)});
        node.write(&format!("routed-{third}"), &network(NAMESPACE, &format!("routed-{third}"), &config))
            .unwrap();
    }
    let pods: Vec<Pod> =
        (0..count / INTERFACES).map(|number| Pod::new(&format!("p{number}")).unwrap()).collect();
    for one in &pods {
        let wanted = json!("routed-1, routed-2, routed-3");
        node.write(&one.name, &pod(&one.name, &json!({}), &wanted)).unwrap();
    }
    node.start().unwrap();
    for one in &pods {
        node.add(one).success();
    }
    (node, pods)
}

/// The node's ends of all interfaces.
pub(crate) fn links(node: &Node) -> Vec<Value> {
    let attachments = node.ctl(&["attachments"]).unwrap();
    attachments.as_array().unwrap().iter().map(|row| row["host_interface"].clone()).collect()
}

#[test]
#[allow(clippy::print_stdout, reason = "the time is for people to read")]
fn many_attachments_are_adopted_at_once_and_their_programs_exchanged_without_a_loss() {
    let count = attachments();
    let (mut node, pods) = node(count);
    let before = links(&node);
    assert_eq!(before.len(), count);
    let echo = Echo::serve(&pods[1].namespace, "10.61.0.3:7".parse().unwrap()).unwrap();
    let conversation = Conversation::start(&pods[0].namespace, echo.address()).unwrap();

    for what in ["restart", "upgrade: other programs", "upgrade: another layout"] {
        node.kill().unwrap();
        let version = node.bpffs().join(format!("v{LAYOUT_VERSION}"));
        match what {
            "upgrade: other programs" => {
                // As if an agent with another object had run here.
                let data = MapData::from_pin(version.join("na_cfg")).unwrap();
                let mut map: Array<_, Config> = Map::from_map_data(data).unwrap().try_into().unwrap();
                let memory = map.get(&0, 0).unwrap();
                map.set(0, Config { object_tag: memory.object_tag ^ 1, ..memory }, 0).unwrap();
            }
            "upgrade: another layout" => {
                std::fs::rename(&version, node.bpffs().join(format!("v{}", LAYOUT_VERSION - 1))).unwrap();
            }
            _ => {}
        }
        let started = Instant::now();
        node.start().unwrap();
        let took = started.elapsed();
        println!("{count} attachments, {what}: serving after {} ms", took.as_millis());
        assert!(took < BOUND, "{what}: {took:?}");
        assert_eq!(links(&node), before, "{what}");
    }
    let (sent, lost) = conversation.end();
    println!("{sent} datagrams exchanged meanwhile, {lost} lost");
    assert_eq!(lost, 0, "of {sent}");
    for one in [&pods[0], &pods[pods.len() - 1]] {
        node.check(one).success();
    }
    for one in &pods {
        node.del(one).success();
    }
    assert_eq!(links(&node), Vec::<Value>::new());
}
