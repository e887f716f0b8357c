//! Queries of the agent to a real containerd, and of containerd to the agent: the list of sandboxes, their namespaces
//! and the configurations in use (`runtimeSocket`), and STATUS while a plugin or the agent is slow.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use netattach::cri::{CriError, PodSandbox, network_namespace, ready_sandboxes};
use netattach_tests::Node;
use netattach_tests::machine::Machine;
use netattach_tests::machine::containerd::{Containerd, SOCKET, Version};
use netattach_tests::manifest::network;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::containers::{CART, DB, SLEEP, node};

fn containerd(test: &str, node: Node, version: Version) -> Option<Containerd> {
    let mut machine = Machine::new(test, node).unwrap()?;
    machine.node.start().unwrap();
    machine.network(version.configurations(), "pods", version.cni()).unwrap();
    Some(Containerd::start(machine, version).unwrap())
}

/// The containers that are attached.
fn attached(node: &Node) -> Vec<String> {
    let rows = node.ctl(&["attachments"]).unwrap();
    let ids = rows.as_array().unwrap().iter().map(|row| row["container_id"].as_str().unwrap().to_owned());
    let mut ids: Vec<String> = ids.collect();
    ids.dedup();
    ids
}

/// The runtime's disk is lost, and its earlier containers continue without it: it never sends their DEL. A pod that
/// it creates afterwards is listed, and stays.
fn what_a_runtime_has_lost_is_detached(test: &str, version: Version) {
    let mut node = node();
    node.set("collectAfterSeconds", json!(1));
    node.set("runtimeSocket", json!(SOCKET));
    let Some(mut containerd) = containerd(test, node, version) else { return };
    let mut cri = containerd.cri().unwrap();
    let lost = [DB, CART].map(|pod| cri.run_pod(pod, &SLEEP).unwrap().id);
    containerd.restart_wiped().unwrap();
    let mut cri = containerd.cri().unwrap();
    let kept = cri.run_pod(DB, &SLEEP).unwrap();
    let node = &containerd.machine.node;
    assert!(eventually(PATIENCE, || attached(node) == [&*kept.id]), "{:?}, lost: {lost:?}", attached(node));
    let status = || node.ctl(&["status"]).unwrap();
    assert!(eventually(PATIENCE, || status()["collected"] == 2), "{:#}", status());
    assert_eq!(status()["troubles"], json!([]));
    let (_, seen) = cri.exec(&kept, &["ip", "-o", "link", "show", "dev", "net1"]).unwrap();
    assert!(seen.contains("net1"), "{seen}");
    cri.stop_sandbox(&kept.id).unwrap();
    cri.remove_sandbox(&kept.id).unwrap();
    Snapshot::take(node, &[]).unwrap().assert_nothing_is_left();
}

#[test]
fn what_containerd_1_6_has_lost_is_detached() {
    what_a_runtime_has_lost_is_detached("what_containerd_1_6_has_lost_is_detached", Version::V1_6);
}

#[test]
fn what_containerd_2_has_lost_is_detached() {
    what_a_runtime_has_lost_is_detached("what_containerd_2_has_lost_is_detached", Version::V2);
}

/// A question of the agent's to the runtime.
fn asked<T>(question: impl Future<Output = Result<T, CriError>>) -> Result<T, CriError> {
    let executor = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    executor.block_on(question)
}

/// The ready sandboxes and their namespaces, by which pods without their networks are found (`repair: attach`); and
/// whether the runtime reads only netattach's own file, and that directory.
#[test]
fn containerd_2_says_where_its_sandboxes_are_and_what_it_reads() {
    let (test, version) = ("containerd_2_says_where_its_sandboxes_are_and_what_it_reads", Version::V2);
    let directory = version.configurations();
    let mut node = node();
    node.set("runtimeSocket", json!(SOCKET));
    node.set("cniConf", json!({"dir": directory}));
    let Some(mut containerd) = containerd(test, node, version) else { return };
    let mut cri = containerd.cri().unwrap();
    let [db, cart] = [DB, CART].map(|pod| cri.run_sandbox(pod).unwrap());
    cri.stop_sandbox(&cart).unwrap();
    let socket = Path::new(SOCKET);
    let ready = asked(ready_sandboxes(socket)).unwrap();
    let [namespace, name, uid] = [DB.namespace, DB.name, DB.uid].map(str::to_owned);
    assert_eq!(ready, [PodSandbox { id: db.clone(), namespace, name, uid }]);
    let calls = containerd.machine.take_calls().unwrap();
    let added = calls.iter().find(|call| call["env"]["CNI_CONTAINERID"] == db.as_str()).unwrap();
    let path = asked(network_namespace(socket, &db)).unwrap();
    assert_eq!(added["env"]["CNI_NETNS"], json!(path));
    let unknown = asked(network_namespace(socket, "no-such-sandbox")).unwrap_err();
    assert!(matches!(unknown, CriError::Refused { .. }), "{unknown}");

    let says = |node: &Node, words: &str| {
        let mut rows = Vec::new();
        let as_expected = eventually(PATIENCE, || {
            let status = node.whole_status().unwrap();
            let of_file = |row: &&Value| row["object"] == "CNI configuration";
            let all = status["troubles"].as_array().unwrap().iter().filter(of_file);
            rows = all.map(|row| row["problem"].as_str().unwrap().to_owned()).collect();
            let conditions = status["ready"].as_array().unwrap();
            let condition = conditions.iter().find(|it| it["condition"] == "CNI configuration").unwrap();
            let is_met = condition["met"] == true;
            match words {
                "" => rows.is_empty() && is_met,
                words => rows.len() == 1 && rows[0].contains(words) && !is_met,
            }
        });
        assert!(as_expected, "{words}: {rows:?}");
    };
    says(&containerd.machine.node, "");
    // Its own file, and that of the other test's network: both call netattach.
    containerd.restart_reading(directory, 2).unwrap();
    says(&containerd.machine.node, "the runtime calls netattach 2 times for each pod, by ");
    containerd.restart_reading("/etc/cni/elsewhere", 1).unwrap();
    let elsewhere = format!(
        "the runtime reads CNI configurations from /etc/cni/elsewhere, and netattach writes its own to {directory}: no pod starts"
    );
    says(&containerd.machine.node, &elsewhere);
    containerd.restart_reading(directory, 1).unwrap();
    says(&containerd.machine.node, "");
    let mut cri = containerd.cri().unwrap();
    for sandbox in [db, cart] {
        cri.stop_sandbox(&sandbox).unwrap();
        cri.remove_sandbox(&sandbox).unwrap();
    }
    Snapshot::take(&containerd.machine.node, &[]).unwrap().assert_nothing_is_left();
}

/// A runtime passes a plugin only values that its configuration declares. The agent's own declares `portMappings` for
/// every default network, so that a port that no plugin would open fails the pod.
fn a_host_port_that_nothing_opens_reaches_the_agent(test: &str, version: Version) {
    let mut node = node();
    node.set("cniConf", json!({"dir": version.configurations()}));
    let Some(mut machine) = Machine::new(test, node).unwrap() else { return };
    machine.node.start().unwrap();
    let file = Path::new(version.configurations()).join("00-netattach.conflist");
    assert!(eventually(PATIENCE, || file.exists()), "{} is not written", file.display());
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    // The capabilities that the default network declares, and the one that it does not.
    assert_eq!(written["plugins"][0]["capabilities"], json!({"mac": true, "portMappings": true}));
    let containerd = Containerd::start(machine, version).unwrap();
    let mut cri = containerd.cri().unwrap();
    let refused = cri.run_sandbox_with_port(DB, Some((8080, 80))).unwrap_err().to_string();
    let said = "hostPort 8080 asked for, but no plugin of network default declares the capability portMappings: nothing \
                would open it (unsupportedPortMappings)";
    assert!(refused.contains(said), "{refused}");
    let plain = cri.run_sandbox(CART).unwrap();
    cri.stop_sandbox(&plain).unwrap();
    cri.remove_sandbox(&plain).unwrap();
    Snapshot::take(&containerd.machine.node, &[]).unwrap().assert_nothing_is_left();
}

#[test]
fn a_host_port_that_nothing_opens_fails_a_pod_of_containerd_1_6() {
    let test = "a_host_port_that_nothing_opens_fails_a_pod_of_containerd_1_6";
    a_host_port_that_nothing_opens_reaches_the_agent(test, Version::V1_6);
}

#[test]
fn a_host_port_that_nothing_opens_fails_a_pod_of_containerd_2() {
    let test = "a_host_port_that_nothing_opens_fails_a_pod_of_containerd_2";
    a_host_port_that_nothing_opens_reaches_the_agent(test, Version::V2);
}

/// One slow answer is not a broken node: STATUS returns the result of the last check. An agent that does not answer
/// at all is one, as long as that lasts.
#[test]
fn containerd_2_is_told_that_the_node_is_ready_while_a_plugin_is_slow() {
    let test = "containerd_2_is_told_that_the_node_is_ready_while_a_plugin_is_slow";
    let node = Node::new(&[]).unwrap();
    let mut bridge = node.default_config();
    bridge.as_object_mut().unwrap().remove("cniVersion");
    let list = json!({"cniVersion": "1.1.0", "plugins": [bridge, {"type": "slow"}]});
    node.write("default", &network("kube-system", "default", &list)).unwrap();
    node.plugin("slow", &json!({})).unwrap();
    let Some(containerd) = containerd(test, node, Version::V2) else { return };
    let mut cri = containerd.cri().unwrap();
    let mut ready = Default::default();
    let is_ready = eventually(PATIENCE, || {
        ready = cri.network_ready().unwrap();
        ready.0
    });
    assert!(is_ready, "{ready:?}");

    // Within the time that a plugin has.
    let node = &containerd.machine.node;
    node.plugin("slow", &json!({"STATUS": {"sleepMs": 4000}})).unwrap();
    let mut process = PathBuf::new();
    let is_asked = eventually(PATIENCE, || {
        // Without a query, the next check may be half a minute away.
        assert_eq!(cri.network_ready().unwrap(), (true, String::new()));
        let calls = node.take_calls().unwrap();
        let Some(slow) = calls.iter().rfind(|call| call["plugin"] == "slow") else { return false };
        process = format!("/proc/{}", slow["pid"]).into();
        // A check that was requested just before is not slow, and has ended by then.
        std::thread::sleep(Duration::from_millis(500));
        // And it is still asked when the runtime has had its answer.
        process.exists() && cri.network_ready().unwrap() == (true, String::new()) && process.exists()
    });
    assert!(is_asked, "the plugin is not asked, or each answer waited for it");
    node.plugin("slow", &json!({})).unwrap();

    let agent = Pid::from_raw(node.agent_pid().try_into().unwrap()).unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    let (ready, why) = cri.network_ready().unwrap();
    kill_process(agent, Signal::CONT).unwrap();
    assert!(!ready && why.contains("did not answer within"), "{why}");
    let mut ready = Default::default();
    let is_ready = eventually(PATIENCE, || {
        ready = cri.network_ready().unwrap();
        ready.0
    });
    assert!(is_ready, "{ready:?}");
}
