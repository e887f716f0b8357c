//! Upgrade from the agent that landed last to this one, and the way back: journals, pins, and requests of one's
//! executable to the other's agent. The executables of that agent are those of `cargo xtask setup --previous`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use netattach_tests::guide::example;
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{WIRE, executable};
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{
    Conversation, Echo, PATIENCE, SILENCE, connect, datagram, eventually, exchange,
};
use netattach_tests::{Node, Pod, tools};
use serde_json::{Value, json};

use crate::stand_by::{AROUND, coming};

/// Pods, each with its interfaces: 200 attachments.
const PODS: usize = 50;
const INTERFACES: usize = 4;
/// Pods that stay while agents change and others are created.
const STAYING: usize = 4;

/// The two sorts of executables.
struct Versions {
    previous: PathBuf,
}

impl Versions {
    fn found(test: &str) -> Option<Self> {
        let previous = tools::directory(test, "NETATTACH_PREVIOUS", &["netattachd", "netattach"])?;
        Some(Self { previous })
    }

    fn start_previous(&self, node: &mut Node) {
        node.start_as(&self.agent(), &[]).unwrap();
    }

    fn agent(&self) -> PathBuf {
        self.previous.join("netattachd")
    }

    fn shim(&self) -> PathBuf {
        self.previous.join("netattach")
    }
}

/// Returns a node whose pods each have a port of a bridge, two routed links and a macvlan. Pods with an odd number
/// are isolated.
fn node() -> Node {
    let mut node = Node::new(&[]).unwrap();
    node.set("maxAttachments", json!(1024));
    node.add_wire().unwrap();
    for (name, third) in [("storage", 51), ("backup", 53)] {
        let ipam = node.host_local(&[&format!("10.{third}.0.0/24"), &format!("fd00:{third}::/64")]);
        let config = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": ipam});
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    node.write("only", &only(80)).unwrap();
    node
}

fn only(port: u16) -> Value {
    let rules = json!({
        "podSelector": {"matchLabels": {"side": "odd"}}, "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": {"side": "even"}}}], "ports": [{"protocol": "UDP", "port": 7}]},
            {"from": [{"podSelector": {"matchLabels": {"side": "even"}}}], "ports": [{"protocol": "TCP", "port": 7}]},
            {"ports": [{"protocol": "UDP", "port": port}]},
        ]
    });
    policy("only", "storage, lan", &rules)
}

fn new_pod(node: &Node, number: usize) -> Pod {
    let name = format!("p{number:03}");
    let side = if number % 2 == 1 { "odd" } else { "even" };
    node.write(&name, &pod(&name, &json!({"side": side}), &json!("storage, lan, backup"))).unwrap();
    Pod::new(&name).unwrap()
}

/// Returns the row of each attachment, by pod and interface.
fn attached(node: &Node) -> BTreeMap<(String, String), Value> {
    let rows = node.ctl(&["attachments"]).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let shown = rows.as_array().unwrap().iter();
    shown
        .map(|row| {
            let keys = ["network", "kind", "addresses", "mac", "host_interface", "state"];
            // The ways in which pods can bypass the programs differ by version; that packets are judged does not.
            let is_judged = json!(row["enforcement"] != "none");
            let told = keys.iter().map(|key| row[*key].clone()).chain([is_judged]).collect();
            ((text(&row["pod"]["name"]), text(&row["ifname"])), Value::Array(told))
        })
        .collect()
}

/// Both ways with traffic on each kind of link that never pauses: nothing is lost, each agent continues with the
/// other's state, and in the end, when both have detached pods of either, nothing is left.
#[test]
fn the_agent_that_landed_last_is_replaced_and_comes_back_under_traffic_and_each_detaches_what_the_other_made()
{
    let test = "the_agent_that_landed_last_is_replaced_and_comes_back_under_traffic_and_each_detaches_what_the_other_made";
    let Some(versions) = Versions::found(test) else { return };
    let mut node = node();
    versions.start_previous(&mut node);
    let mut pods: Vec<Pod> = (0..PODS).map(|number| new_pod(&node, number)).collect();
    for (number, one) in pods.iter().enumerate() {
        // Either executable asks the agent.
        let outcome =
            if number % 2 == 0 { node.call("ADD", one).run_by(&versions.shim()) } else { node.add(one) };
        outcome.success();
    }
    let before = attached(&node);
    assert_eq!(before.len(), PODS * INTERFACES);
    // Two of them talk all the time.
    let talkers: Vec<Pod> = pods.drain(..2).collect();
    let (a, b) = (&talkers[0].namespace, &talkers[1].namespace);
    let at = |address: &str, port: u16| format!("{address}:{port}").parse().unwrap();
    let addresses = ["10.50.0.3", "[fd00:50::3]", "10.51.0.3", "[fd00:51::3]", "10.52.0.3", "10.53.0.3"];
    let servers = addresses.map(|address| Echo::serve(b, at(address, 7)).unwrap());
    let ports = [80, 81].map(|port| Echo::serve(b, at("10.51.0.3", port)).unwrap());
    let conversations = servers.each_ref().map(|server| Conversation::start(a, server.address()).unwrap());
    let mut connections = servers.each_ref().map(|server| connect(a, server.address(), PATIENCE).unwrap());
    let open = |port: usize, wanted: bool, what: &str| {
        let address = ports[port].address();
        assert!(
            eventually(PATIENCE, || datagram(a, address, SILENCE).unwrap() == wanted),
            "{what}: {address} is to be {}",
            if wanted { "open" } else { "closed" }
        );
    };
    open(0, true, "before");
    open(1, false, "before");

    // Up, down after a kill, up again: each agent adopts the other's state.
    let mut gone: Vec<Pod> = Vec::new();
    for (round, upgrade) in [true, false, true].into_iter().enumerate() {
        let what = format!("round {round}");
        if round == 1 {
            node.kill().unwrap()
        } else {
            node.stop().unwrap()
        };
        // A DEL that comes meanwhile waits for the next agent, whichever it is.
        let waiting = pods.pop().unwrap();
        let shim = if upgrade { versions.shim() } else { executable_here() };
        node.call("DEL", &waiting).run_by(&shim).success();
        gone.push(waiting);
        if upgrade {
            node.start().unwrap()
        } else {
            versions.start_previous(&mut node)
        }
        assert!(eventually(PATIENCE, || attached(&node).len() == (pods.len() + 2) * INTERFACES), "{what}");
        let shown = attached(&node);
        for (key, was) in
            before.iter().filter(|(key, _)| talkers.iter().chain(&pods).any(|pod| pod.name == key.0))
        {
            assert_eq!(shown.get(key), Some(was), "{what}: {key:?}");
        }
        talkers.iter().chain(&pods).for_each(|one| drop(node.check(one).success()));
        for stream in &mut connections {
            exchange(stream, PATIENCE).unwrap();
        }
        // A change of the policies reaches the packet programs that the other agent has loaded.
        let to = if upgrade { 81 } else { 80 };
        node.write("only", &only(to)).unwrap();
        open(1, upgrade, &what);
        open(0, !upgrade, &what);
        // One of the oldest, after those with traffic, and the newest.
        for one in [pods.remove(4), pods.pop().unwrap()] {
            node.del(&one).success();
            gone.push(one);
        }
        for number in 0..3 {
            let one = new_pod(&node, 100 + round * 10 + number);
            node.add(&one).success();
            pods.push(one);
        }
        assert_eq!(attached(&node).len(), (pods.len() + 2) * INTERFACES, "{what}");
    }
    for (address, conversation) in addresses.iter().zip(conversations) {
        let (sent, lost) = conversation.end();
        assert!(sent > 100 && lost == 0, "{address}: {lost} of {sent} are lost");
    }
    drop((connections, servers, ports));
    pods.extend(talkers);

    // This agent detaches one half of all, of which each agent has made some; the other the rest.
    let (by_this, by_previous): (Vec<_>, Vec<_>) =
        pods.into_iter().enumerate().partition(|(number, _)| number % 2 == 0);
    for (_, one) in &by_this {
        node.del(one).success();
    }
    node.stop().unwrap();
    versions.start_previous(&mut node);
    for (_, one) in &by_previous {
        node.call("DEL", one).run_by(&versions.shim()).success();
    }
    // Taken while the pins are those of this agent: the test reads them with this agent's programs.
    node.stop().unwrap();
    node.start().unwrap();
    let all = by_this.iter().chain(&by_previous).map(|(_, pod)| pod).chain(&gone);
    Snapshot::take(&node, &all.collect::<Vec<_>>()).unwrap().assert_nothing_is_left();
}

/// The CNI executable under test.
fn executable_here() -> PathBuf {
    executable("netattach").unwrap()
}

/// Like a rollout by default: the next agent stands by before the running one is ended, both ways. Pods are created
/// all the time, by the executable that belongs to the next agent, as that is installed first: none fails, and
/// existing attachments stay unchanged.
#[test]
fn the_agent_that_landed_last_and_this_one_stand_by_for_each_other_while_pods_come_and_none_fails() {
    let test =
        "the_agent_that_landed_last_and_this_one_stand_by_for_each_other_while_pods_come_and_none_fails";
    let Some(versions) = Versions::found(test) else { return };
    let mut node = node();
    versions.start_previous(&mut node);
    let pods: Vec<Pod> = (0..STAYING).map(|number| new_pod(&node, number)).collect();
    for one in &pods {
        node.call("ADD", one).run_by(&versions.shim()).success();
    }
    let before = attached(&node);
    assert_eq!(before.len(), STAYING * INTERFACES);
    let echo = Echo::serve(&pods[1].namespace, "10.51.0.3:7".parse().unwrap()).unwrap();
    let conversation = Conversation::start(&pods[0].namespace, echo.address()).unwrap();
    let comers: Vec<Pod> = (STAYING..STAYING + 3).map(|number| new_pod(&node, number)).collect();
    for (round, upgrade) in [true, false, true].into_iter().enumerate() {
        let (agent, shim) = if upgrade {
            (executable("netattachd").unwrap(), executable_here())
        } else {
            (versions.agent(), versions.shim())
        };
        node.stand_by_as(&agent).unwrap();
        let coming = coming(&node, &shim, &comers);
        coming.go_on(AROUND);
        node.hand_over(Node::stop).unwrap();
        coming.go_on(AROUND);
        coming.end();
        // The next agent carries out a DEL that came while no agent listened.
        let same = eventually(PATIENCE, || attached(&node) == before);
        assert!(same, "round {round}: {:#?}, and before {before:#?}", attached(&node));
        pods.iter().for_each(|one| drop(node.check(one).success()));
    }
    let (sent, lost) = conversation.end();
    assert!(sent > 100 && lost == 0, "{lost} of {sent} are lost");
    drop(echo);
    pods.iter().for_each(|one| drop(node.del(one).success()));
    let all = pods.iter().chain(&comers);
    Snapshot::take(&node, &all.collect::<Vec<_>>()).unwrap().assert_nothing_is_left();
}

/// A record that only a later agent can read: an agent names it with the remedy, and does not change it.
#[test]
fn the_previous_agent_names_a_record_of_a_later_version_and_the_way_out() {
    let test = "the_previous_agent_names_a_record_of_a_later_version_and_the_way_out";
    let Some(versions) = Versions::found(test) else { return };
    let mut node = node();
    node.start().unwrap();
    let one = new_pod(&node, 0);
    node.add(&one).success();
    node.stop().unwrap();
    let record = node.path("state/journal").join(format!("{}@eth0.jsonl", one.container));
    let text = fs::read_to_string(&record).unwrap();
    let later = text.replacen("\"version\":2", "\"version\":99", 1);
    assert_ne!(later, text);
    fs::write(&record, &later).unwrap();
    // The page has a command that lists such records before a downgrade.
    let other = record.with_file_name("c-other@eth0.jsonl");
    fs::write(&other, &text).unwrap();
    let state = node.path("state").display().to_string();
    let command = example(include_str!("../../../docs/upgrade.md"), "text", "grep -El").unwrap();
    assert!(command.contains(" /var/lib/netattach/journal/"), "{command}");
    let listed = Command::new("bash").arg("-c").arg(command.replace("/var/lib/netattach", &state)).output();
    let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
    assert_eq!(listed, format!("{}\n", record.display()));
    fs::remove_file(other).unwrap();
    let links = |node: &Node| [&node.namespace, &one.namespace].map(|it| Network::of(it).unwrap());
    let before = links(&node);
    versions.start_previous(&mut node);
    let (code, message) = node.del(&one).failure();
    let expected = format!(
        "{} is of journal version 99, which this agent does not know; run the agent that wrote it",
        record.display()
    );
    assert!(message.contains(&expected), "{code}: {message}");
    assert_eq!(links(&node), before);
    // The way out: the agent that wrote it.
    node.stop().unwrap();
    fs::write(&record, text).unwrap();
    node.start().unwrap();
    node.del(&one).success();
    Snapshot::take(&node, &[&one]).unwrap().assert_nothing_is_left();
    assert!(!Path::new(&record).exists());
}
