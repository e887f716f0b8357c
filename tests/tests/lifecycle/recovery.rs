//! Recovery after an agent was killed, and requests that came while none ran: the next agent serves at once and
//! finishes that work in the background.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread::{JoinHandle, spawn};
use std::time::Instant;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::executable;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Node, Outcome, Pod};
use serde_json::{Value, json};

/// A node with a network of the scripted plugin `odd`, that many pods on it, and the pod `plain`.
fn node(script: &Value, count: usize) -> (Node, Vec<Pod>) {
    let mut node = Node::new(&[pod("plain", &json!({}), &Value::Null)]).unwrap();
    node.set("delegation", json!({"timeoutSeconds": 600}));
    node.plugin("odd", script).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.1.0", "type": "odd"}))).unwrap();
    let pods = (0..count).map(|number| {
        let name = format!("odd-{number}");
        node.write(&name, &pod(&name, &json!({}), &json!("odd"))).unwrap();
        Pod::new(&name).unwrap()
    });
    let pods = pods.collect();
    (node, pods)
}

/// Every call of the scripted plugin with that verb.
fn calls(node: &Node, verb: &str) -> Vec<Value> {
    let text = fs::read_to_string(node.path("calls")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|call| call["env"]["CNI_COMMAND"] == verb).collect()
}

fn hanging(verb: &str) -> Value {
    json!({verb: {"sleepMs": 300_000}})
}

#[test]
fn an_agent_serves_while_what_hangs_is_taken_back_and_hears_a_signal_meanwhile() {
    const COUNT: usize = 12;
    let (mut node, pods) = node(&json!({}), COUNT);
    node.start().unwrap();
    let plain = Pod::new("plain").unwrap();
    for pod in pods.iter().chain([&plain]) {
        node.add(pod).success();
    }
    node.plugin("odd", &hanging("DEL")).unwrap();
    // All but one are in the middle of their DEL; the last one's DEL waits for an agent.
    let (late, begun) = pods.split_last().unwrap();
    let dels: Vec<_> = begun.iter().map(|pod| node.call("DEL", pod)).collect();
    let dels: Vec<_> = dels.into_iter().map(|call| spawn(move || call.run())).collect();
    assert!(eventually(PATIENCE, || calls(&node, "DEL").len() == COUNT - 1));
    node.kill().unwrap();
    dels.into_iter().for_each(|del| drop(del.join().unwrap().success()));
    node.del(late).success();

    node.take_calls().unwrap();
    node.start_serving().unwrap();
    assert!(
        eventually(PATIENCE, || calls(&node, "DEL").len() == COUNT),
        "all at once, the one that waited too"
    );
    node.check(&plain).success();
    node.del(&plain).success();
    node.add(&plain).success();
    node.gc("pods", Some(&[&plain]));
    let status = node.ctl(&["status"]).unwrap();
    assert_eq!(status["troubles"][0]["object"], "plugin odd of network odd", "{status:#}");
    let shown = &status["troubles"].as_array().unwrap().last().unwrap()["problem"];
    assert_eq!(shown, &format!("their unfinished operations on {COUNT} containers are being finished"));
    // A request for one of these pods waits for that pod's recovery.
    let again = node.call("ADD", &pods[0]);
    let again = spawn(move || again.run());
    node.check(&plain).success();
    assert!(!again.is_finished());
    // The first signal ends recovery, the second ends serving.
    let agent = rustix::process::Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
    rustix::process::kill_process(agent, rustix::process::Signal::TERM).unwrap();
    assert!(eventually(PATIENCE, || !node.socket().exists()));
    node.stop().unwrap();
    assert_eq!(again.join().unwrap().failure().0, 11);

    node.plugin("odd", &json!({})).unwrap();
    node.start().unwrap();
    node.del(&plain).success();
    // Its DEL came before the interrupted ADD.
    node.add(&pods[0]).success();
    node.del(&pods[0]).success();
    let mut all: Vec<&Pod> = pods.iter().collect();
    all.push(&plain);
    Snapshot::take(&node, &all).unwrap().assert_nothing_is_left();
}

#[test]
fn a_signal_is_heard_while_nothing_but_what_hangs_is_left() {
    let (mut node, pods) = node(&hanging("DEL"), 1);
    node.start().unwrap();
    node.add(&pods[0]).success();
    let del = node.call("DEL", &pods[0]);
    let del = spawn(move || del.run());
    assert!(eventually(PATIENCE, || calls(&node, "DEL").len() == 1));
    node.kill().unwrap();
    del.join().unwrap();
    node.start_serving().unwrap();
    assert!(eventually(PATIENCE, || calls(&node, "DEL").len() == 2));
    node.stop().unwrap();
    let pid = calls(&node, "DEL")[1]["pid"].as_u64().unwrap();
    // Whoever takes over its children may be slow to ask how they ended.
    let has_ended = || !Path::new(&format!("/proc/{pid}")).exists();
    assert!(eventually(PATIENCE, has_ended), "its plugin has ended with it");
    node.plugin("odd", &json!({})).unwrap();
    node.start().unwrap();
    Snapshot::take(&node, &[&pods[0]]).unwrap().assert_nothing_is_left();
}

/// Successors request the resources that `before` has on `lan`; `others` has none of them.
fn successors() -> (Node, [Pod; 4]) {
    let (mut node, _) = node(&json!({}), 0);
    let lan = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br-lan", "capabilities": {"mac": true, "ips": true},
                     "ipam": node.host_local(&["10.58.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
    let ips = json!({"name": "lan", "ips": ["10.58.0.9"]});
    let mac = json!({"name": "lan", "mac": "02:00:00:00:58:09"});
    let both = json!({"name": "lan", "ips": ["10.58.0.9"], "mac": "02:00:00:00:58:09"});
    let selections = [json!([both, {"name": "odd"}]), json!([ips]), json!([mac]), Value::Null];
    let pods = ["before", "same-ip", "same-mac", "others"];
    let pods: Vec<Pod> = pods
        .into_iter()
        .zip(selections)
        .map(|(name, selection)| {
            let selection = if selection.is_null() { selection } else { json!(selection.to_string()) };
            node.write(name, &pod(name, &json!({}), &selection)).unwrap();
            Pod::new(name).unwrap()
        })
        .collect();
    node.start().unwrap();
    node.add(&pods[0]).success();
    let Ok(pods) = pods.try_into() else { panic!("four") };
    (node, pods)
}

/// The ADDs that ask for the resources of `before`, while it is being rolled back and its plugin hangs.
fn begin_successors(node: &Node, pods: &[Pod; 4]) -> Vec<JoinHandle<Outcome>> {
    let [_, ip, mac, others] = pods;
    let begun = [ip, mac].map(|pod| node.call("ADD", pod)).map(|call| spawn(move || call.run()));
    // Other requests are served as usual.
    for _ in 0..2 {
        node.add(others).success();
        node.del(others).success();
    }
    assert!(begun.iter().all(|add| !add.is_finished()));
    begun.into()
}

#[test]
fn an_add_waits_for_an_address_that_is_being_taken_back() {
    let (mut node, pods) = successors();
    let [before, ip, mac, _] = &pods;
    // First during a DEL, then in the leftovers of a killed agent.
    for is_left_over in [false, true] {
        node.plugin("odd", &json!({"DEL": {"sleepMs": if is_left_over { 300_000 } else { 6000 }}})).unwrap();
        node.take_calls().unwrap();
        let del = node.call("DEL", before);
        let del = spawn(move || del.run());
        assert!(eventually(PATIENCE, || calls(&node, "DEL").len() == 1));
        let del = if is_left_over {
            node.kill().unwrap();
            del.join().unwrap().success();
            node.plugin("odd", &json!({"DEL": {"sleepMs": 6000}})).unwrap();
            node.start_serving().unwrap();
            assert!(eventually(PATIENCE, || calls(&node, "DEL").len() == 2));
            None
        } else {
            Some(del)
        };
        for add in begin_successors(&node, &pods) {
            add.join().unwrap().success();
        }
        if let Some(del) = del {
            del.join().unwrap().success();
        }
        for pod in [ip, mac] {
            node.del(pod).success();
        }
        if !is_left_over {
            node.plugin("odd", &json!({})).unwrap();
            node.add(before).success();
        }
    }
    node.stop().unwrap();
    let all: Vec<&Pod> = pods.iter().collect();
    Snapshot::take(&node, &all).unwrap().assert_nothing_is_left();
}

#[test]
fn an_add_waits_no_longer_than_for_a_pool_for_an_address_that_does_not_become_free() {
    let (mut node, pods) = successors();
    node.plugin("odd", &hanging("DEL")).unwrap();
    let del = node.call("DEL", &pods[0]);
    let del = spawn(move || del.run());
    assert!(eventually(PATIENCE, || calls(&node, "DEL").len() == 1));
    let began = Instant::now();
    let outcomes: Vec<(u64, String)> =
        begin_successors(&node, &pods).into_iter().map(|add| add.join().unwrap().failure()).collect();
    let waited = began.elapsed().as_secs();
    assert!((10..30).contains(&waited), "{waited} s");
    let [(ip, of_ip), (mac, of_mac)] = outcomes.as_slice() else { panic!("{outcomes:?}") };
    assert_eq!((*ip, *mac), (11, 11));
    let held = "requested address 10.58.0.9 is not available in range set 0 (10.58.0.1-10.58.0.254): interface net1 of \
                container c-before holds it";
    assert!(of_ip.contains(held), "{of_ip}");
    let taken =
        "MAC address 02:00:00:00:58:09 is taken: pod shop/before, container c-before, interface net1 has it";
    assert!(of_mac.contains(taken), "{of_mac}");
    node.plugin("odd", &json!({})).unwrap();
    node.kill().unwrap();
    del.join().unwrap();
    node.start().unwrap();
    for pod in &pods[1..3] {
        node.add(pod).success();
        node.del(pod).success();
    }
}

#[test]
fn an_add_waits_for_an_address_of_a_del_that_came_while_no_agent_ran() {
    let (mut node, pods) = successors();
    let [before, ip, mac, _] = &pods;
    node.kill().unwrap();
    node.del(before).success();
    // Its addresses stay taken until it is carried out.
    node.plugin("odd", &json!({"DEL": {"sleepMs": 6000}})).unwrap();
    node.take_calls().unwrap();
    node.start_serving().unwrap();
    assert!(eventually(PATIENCE, || calls(&node, "DEL").len() == 1));
    for add in begin_successors(&node, &pods) {
        add.join().unwrap().success();
    }
    for pod in [ip, mac] {
        node.del(pod).success();
    }
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 0);
    node.stop().unwrap();
    let all: Vec<&Pod> = pods.iter().collect();
    Snapshot::take(&node, &all).unwrap().assert_nothing_is_left();
}

#[test]
fn a_del_that_came_while_no_agent_ran_and_fails_is_shown_and_stays() {
    let (mut node, pods) = node(&json!({}), 1);
    node.start().unwrap();
    node.add(&pods[0]).success();
    node.kill().unwrap();
    node.del(&pods[0]).success();
    node.plugin("odd", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    node.start().unwrap();
    let status = node.ctl(&["status"]).unwrap();
    let trouble =
        status["troubles"].as_array().unwrap().iter().find(|it| it["object"] == "container c-odd-0");
    let problem = trouble.unwrap_or_else(|| panic!("{status:#}"))["problem"].as_str().unwrap().to_owned();
    let expected = "its DEL came while no agent answered, and has failed 1 times; it is tried again: ";
    assert!(problem.starts_with(expected) && problem.contains("not now"), "{problem}");
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 1);
    node.plugin("odd", &json!({})).unwrap();
    node.kill().unwrap();
    node.start().unwrap();
    assert_eq!(fs::read_dir(node.path("state/pending")).unwrap().count(), 0);
    Snapshot::take(&node, &[&pods[0]]).unwrap().assert_nothing_is_left();
}

/// The plugin makes its link after a sleep: after the DEL of the next agent, if it lived that long.
#[test]
fn a_plugin_does_not_outlive_the_agent_that_had_called_it() {
    let script = json!({"ADD": {"sleepMs": 300_000, "holdMs": 300_000, "link": "dummy"}});
    let (mut node, pods) = node(&script, 1);
    node.start().unwrap();
    let add = node.call("ADD", &pods[0]);
    let add = spawn(move || add.run());
    let recorded = || fs::read_to_string(node.path("calls")).unwrap_or_default();
    assert!(eventually(PATIENCE, || recorded().contains("\"held\"")));
    let called: Vec<Value> = recorded().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let plugin = called.iter().find_map(|call| call["pid"].as_u64()).unwrap();
    let child = called.iter().find_map(|call| call["held"].as_u64()).unwrap();
    let lives = |pid: u64| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    node.kill().unwrap();
    assert_eq!(add.join().unwrap().failure().0, 11);
    assert!(lives(plugin) && lives(child), "a kill reaches the agent alone");

    node.start().unwrap();
    assert!(!lives(plugin), "it has ended before its DEL");
    assert!(eventually(PATIENCE, || !lives(child)), "and what it had started");
    assert_eq!(calls(&node, "DEL").len(), 1);
    Snapshot::take(&node, &[&pods[0]]).unwrap().assert_nothing_is_left();
    node.plugin("odd", &json!({})).unwrap();
    node.add(&pods[0]).success();
    node.del(&pods[0]).success();
}

/// Descriptors of the running agent.
fn open_files(node: &Node) -> usize {
    fs::read_dir(format!("/proc/{}/fd", node.agent_pid())).unwrap().count()
}

#[test]
fn pools_that_were_used_once_keep_no_descriptors() {
    const NETWORKS: usize = 120;
    const AT_ONCE: usize = 6;
    // 64 directories are kept open, of four descriptors each; a few more are open during work.
    const MOST: usize = 64 * 4 + 16;
    let mut node = Node::new(&[]).unwrap();
    for number in 0..NETWORKS {
        let subnets = [format!("10.60.{number}.0/24"), format!("fd00:60:{number}::/64")];
        let ipam = node.host_local(&subnets.each_ref().map(String::as_str));
        let name = format!("n{number}");
        node.write(
            &name,
            &network(NAMESPACE, &name, &json!({"cniVersion": "1.0.0", "type": "veth", "ipam": ipam})),
        )
        .unwrap();
    }
    let pods: Vec<Pod> = (0..NETWORKS / AT_ONCE)
        .map(|of| {
            let networks: Vec<String> = (0..AT_ONCE).map(|at| format!("n{}", of * AT_ONCE + at)).collect();
            let name = format!("p{of}");
            node.write(&name, &pod(&name, &json!({}), &json!(networks.join(", ")))).unwrap();
            Pod::new(&name).unwrap()
        })
        .collect();
    // Started like by service managers, with a soft limit below the hard one.
    let agent = node.path("netattachd");
    let script =
        format!("#!/bin/sh\nulimit -Sn 1024\nexec {} \"$@\"\n", executable("netattachd").unwrap().display());
    fs::write(&agent, script).unwrap();
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).unwrap();
    node.start_as(&agent, &[]).unwrap();
    let before = open_files(&node);
    for pod in &pods {
        node.add(pod).success();
        node.del(pod).success();
    }
    let open = open_files(&node);
    assert!(open <= before + MOST, "{open} are open, {before} were before");
    let limits = fs::read_to_string(format!("/proc/{}/limits", node.agent_pid())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let limits: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert_eq!(limits, [limits[1].min(65_536), limits[1]], "as far as it may be raised");
    assert!(limits[0] > 1024, "the machine allows no more: {limits:?}");
}
