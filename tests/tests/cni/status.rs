//! STATUS by the real executable and the real agent: whether an ADD could be served, answered in time despite any
//! failure.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::ip;
use netattach_tests::other_programs::tc;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Call, Node, Outcome, Pod};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::{Value, json};

/// Time limit of a STATUS.
const LIMIT: Duration = Duration::from_millis(100);

fn question(node: &Node) -> Call {
    let env = [("CNI_COMMAND", "STATUS"), ("CNI_PATH", "/nonexistent/cni-bin")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    Call { env, stdin: node.cni_config("1.1.0").to_string() }
}

fn status(node: &Node) -> Outcome {
    question(node).run()
}

/// Repeats STATUS until it returns this code (0: success) and the message without details has the text.
fn await_status(node: &Node, code: u64, text: &str) {
    let mut last = Value::Null;
    let is_it = || {
        last = status(node).json;
        let msg = last["msg"].as_str().unwrap_or_default();
        last["code"].as_u64().unwrap_or(0) == code && msg.contains(text)
    };
    assert!(eventually(PATIENCE, is_it), "{code} {text} does not come: {last:#}");
}

/// Whether an answer comes within that time on an idle machine: other tests run at the same time.
fn answers_within(node: &Node, limit: Duration) -> bool {
    eventually(PATIENCE, || {
        let start = Instant::now();
        status(node);
        start.elapsed() < limit
    })
}

fn define_default(node: &Node, keys: &Value) {
    let mut config = node.default_config();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    node.write("default", &network("kube-system", "default", &config)).unwrap();
}

/// Rows: CNI-STATUS-own, STA-04, STA-06, ENV-25.
#[test]
fn a_default_network_that_cannot_be_attached_is_told_and_other_verbs_are_served() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.start().unwrap();
    assert_eq!(status(&node), Outcome { exit: 0, json: Value::Null });
    let a = Pod::new("a").unwrap();
    node.add(&a).success();

    node.remove("default").unwrap();
    await_status(&node, 50, "network kube-system/default is not defined");
    node.check(&a).success();
    node.del(&a).success();
    define_default(&node, &json!({"mtu": "x"}));
    await_status(&node, 50, "key mtu: ");
    define_default(&node, &json!({"type": "not-installed"}));
    await_status(&node, 50, "failed to find plugin \"not-installed\" in path [/nonexistent/cni-bin ");
    define_default(&node, &json!({"type": "macvlan", "master": "nowhere0"}));
    await_status(&node, 50, "no link named nowhere0");
    define_default(&node, &json!({}));
    await_status(&node, 0, "");
}

/// The problem of an object in the agent's status, if any.
fn trouble(node: &Node, object: &str) -> Option<String> {
    let status = node.ctl(&["status"]).unwrap();
    let troubles = status["troubles"].as_array().unwrap();
    let found = troubles.iter().find(|row| row["object"] == object)?;
    Some(found["problem"].as_str().unwrap().to_owned())
}

/// A node without a free address is full, not broken: if it were reported as not ready, its pods would be evicted.
///
/// Rows: CNI-STATUS-own, STA-06.
#[test]
fn a_pool_without_an_address_left_is_shown_until_one_is_free_and_fails_no_status() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    define_default(&node, &json!({"ipam": node.host_local(&["10.50.0.0/30"])}));
    node.start().unwrap();
    status(&node).success();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let full = || {
        let problem = trouble(&node, "network kube-system/default");
        problem.is_some_and(|problem| problem.contains("no address is available in range set"))
    };
    assert!(eventually(PATIENCE, full));
    status(&node).success();
    node.del(&a).success();
    assert!(eventually(PATIENCE, || trouble(&node, "network kube-system/default").is_none()));
    status(&node).success();
}

#[test]
fn a_network_whose_plugin_is_missing_is_shown_by_name_and_fails_no_status() {
    let mut node = Node::new(&[]).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.1.0", "type": "elsewhere"})))
        .unwrap();
    node.start().unwrap();
    let shown = || {
        trouble(&node, "network shop/odd")
            .is_some_and(|it| it.contains("failed to find plugin \"elsewhere\""))
    };
    assert!(eventually(PATIENCE, shown));
    status(&node).success();
    node.plugin("elsewhere", &json!({})).unwrap();
    assert!(eventually(PATIENCE, || trouble(&node, "network shop/odd").is_none()));
}

/// Rows: CNI-STATUS-own, STA-06.
#[test]
fn what_would_fail_every_add_fails_status_until_it_is_mended() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.start().unwrap();
    await_status(&node, 0, "");

    let journal = node.path("state/journal");
    fs::rename(&journal, node.path("state/elsewhere")).unwrap();
    await_status(&node, 50, &format!("journal {}: No such file or directory", journal.display()));
    fs::rename(node.path("state/elsewhere"), &journal).unwrap();
    await_status(&node, 0, "");

    let agent = Pid::from_raw(node.agent_pid().cast_signed());
    let limit = rustix::process::getrlimit(Resource::Nofile).maximum;
    let limited = |soft: u64| Rlimit { current: Some(soft), maximum: limit };
    let open = fs::read_dir(format!("/proc/{}/fd", node.agent_pid())).unwrap().count() as u64;
    let before = prlimit(agent, Resource::Nofile, limited(open + 16)).unwrap();
    await_status(
        &node,
        50,
        "are open; raise the limit of open files (LimitNOFILE of the unit, or of the container runtime's unit)",
    );
    prlimit(agent, Resource::Nofile, before).unwrap();
    await_status(&node, 0, "");

    fs::rename(node.path("source"), node.path("away")).unwrap();
    await_status(&node, 50, "source: the directory of manifests has been away for 1");
    fs::rename(node.path("away"), node.path("source")).unwrap();
    await_status(&node, 0, "");
}

/// Many requests wait for a hanging plugin: the agent is busy, but healthy.
#[test]
fn an_agent_that_many_wait_for_is_not_called_broken_and_shows_what_they_wait_for() {
    let mut node = Node::new(&[]).unwrap();
    node.plugin("odd", &json!({"ADD": {"sleepMs": 300_000}})).unwrap();
    node.write("odd", &network(NAMESPACE, "odd", &json!({"cniVersion": "1.1.0", "type": "odd"}))).unwrap();
    let pods: Vec<Pod> = (0..20)
        .map(|number| {
            let name = format!("odd-{number}");
            node.write(&name, &pod(&name, &json!({}), &json!("odd"))).unwrap();
            Pod::new(&name).unwrap()
        })
        .collect();
    node.start().unwrap();
    let calls: Vec<_> = pods.iter().map(|pod| node.call("ADD", pod)).collect();
    let begun: Vec<_> = calls.into_iter().map(|call| std::thread::spawn(move || call.run())).collect();
    let shown = || {
        status(&node).success();
        trouble(&node, "plugin odd of network odd").is_some_and(|it| it.contains(" more wait for it"))
    };
    assert!(eventually(PATIENCE, shown));
    node.kill().unwrap();
    node.start().unwrap();
    begun.into_iter().for_each(|call| drop(call.join().unwrap()));
}

/// Rows: CNI-STATUS-own, STA-06.
#[test]
fn a_dataplane_that_has_lost_something_is_a_matter_of_the_pods_that_are_there() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    status(&node).success();
    let attachments = node.ctl(&["attachments"]).unwrap();
    let device = attachments[0]["host_interface"].as_str().unwrap();
    // Another qdisc in the place of clsact keeps the agent from restoring its programs. The agent is stopped meanwhile:
    // it would be faster.
    let agent = Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    tc(&node.namespace, &format!("qdisc del dev {device} clsact")).unwrap();
    tc(&node.namespace, &format!("qdisc add dev {device} ingress")).unwrap();
    kill_process(agent, Signal::CONT).unwrap();
    let shown = || trouble(&node, "shop/a eth0").is_some_and(|it| it.starts_with("program na_"));
    assert!(eventually(PATIENCE, shown));
    assert!(node.check(&a).failure().1.contains("is not attached on device"));
    // The damage concerns one pod, and keeps no other from being attached.
    status(&node).success();
    tc(&node.namespace, &format!("qdisc del dev {device} ingress")).unwrap();
    assert!(eventually(PATIENCE, || trouble(&node, "shop/a eth0").is_none()));
    node.check(&a).success();
    node.del(&a).success();
    await_status(&node, 0, "");

    let version = fs::read_dir(node.bpffs()).unwrap().next().unwrap().unwrap().path();
    let gone: PathBuf = version.join("na_policy");
    fs::remove_file(&gone).unwrap();
    await_status(&node, 51, &format!("dataplane: pin {} is gone", gone.display()));
}

/// Rows: CNI-STATUS-delegates, STA-02, STA-05, REQ-12, REQ-23.
#[test]
fn what_the_default_networks_plugin_answers_is_passed_on_and_no_other_plugin_is_asked() {
    let mut node = Node::new(&[]).unwrap();
    let plugins = json!([{"type": "one", "colour": "blue"}, {"type": "two"}]);
    let list = json!({"cniVersion": "1.1.0", "name": "default", "plugins": plugins});
    node.write("default", &network("kube-system", "default", &list)).unwrap();
    let error =
        |code: u32, msg: &str| json!({"STATUS": {"error": {"code": code, "msg": msg, "details": "why"}}});
    node.plugin("one", &json!({})).unwrap();
    node.plugin("two", &error(51, "half of it")).unwrap();
    node.plugin("three", &error(50, "not to be asked")).unwrap();
    node.write("three", &network(NAMESPACE, "three", &json!({"cniVersion": "1.1.0", "type": "three"})))
        .unwrap();
    node.start().unwrap();
    await_status(&node, 51, "half of it");
    let details = status(&node).json["details"].as_str().unwrap().to_owned();
    let start = "why; STATUS of plugin \"two\" for network kube-system/default; seen ";
    assert!(details.starts_with(start) && details.ends_with(" s ago"), "{details}");
    let calls = node.take_calls().unwrap();
    let expected = json!({"cniVersion": "1.1.0", "name": "default", "type": "one", "colour": "blue"});
    assert_eq!(calls[0]["stdin"], expected);
    for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
        assert_eq!(calls[0]["env"][name], json!(""), "{name}");
    }
    assert!(calls.iter().all(|call| call["stdin"]["type"] != json!("three")));
    node.plugin("one", &error(50, "none of it")).unwrap();
    await_status(&node, 50, "none of it");
    node.plugin("one", &json!({})).unwrap();
    node.plugin("two", &json!({})).unwrap();
    await_status(&node, 0, "");
}

/// Rows: STA-01, VER-25.
#[test]
fn the_plugins_of_a_network_that_is_too_old_are_not_asked() {
    let mut node = Node::new(&[]).unwrap();
    node.plugin("one", &json!({"STATUS": {"error": {"code": 50, "msg": "no"}}})).unwrap();
    define_default(&node, &json!({"cniVersion": "1.0.0", "type": "one"}));
    node.start().unwrap();
    status(&node).success();
    assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new());
}

/// Rows: STA-03.
#[test]
fn the_address_plugin_of_the_default_network_is_asked() {
    let mut node = Node::new(&[]).unwrap();
    node.plugin("pool", &json!({"STATUS": {"error": {"code": 50, "msg": "empty"}}})).unwrap();
    define_default(&node, &json!({"cniVersion": "1.1.0", "ipam": {"type": "pool"}}));
    node.start().unwrap();
    await_status(&node, 50, "empty");
}

/// Rows: CNI-STATUS-own, STA-05.
#[test]
fn the_answer_is_there_in_time_whatever_hangs() {
    let mut node = Node::new(&[]).unwrap();
    node.plugin("slow", &json!({"STATUS": {"sleepMs": 60_000}})).unwrap();
    define_default(&node, &json!({"cniVersion": "1.1.0", "type": "slow"}));
    node.start().unwrap();
    let refused = status(&node).json;
    assert_eq!(refused["msg"], json!("state of the default network's plugins is not known yet"));
    assert!(answers_within(&node, LIMIT));
    // It is asked twice, for 5 s each.
    let mut last = Value::Null;
    let is_told = eventually(PATIENCE * 2, || {
        last = status(&node).json;
        last["code"] == 50
            && last["msg"].as_str().is_some_and(|it| {
                it.contains("plugin \"slow\" (STATUS) did not end within 5s and was killed")
            })
    });
    assert!(is_told, "{last:#}");

    let agent = rustix::process::Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
    rustix::process::kill_process(agent, rustix::process::Signal::STOP).unwrap();
    let in_time = answers_within(&node, Duration::from_secs(6));
    let (code, message) = status(&node).failure();
    rustix::process::kill_process(agent, rustix::process::Signal::CONT).unwrap();
    assert!(in_time);
    assert_eq!(code, 50, "{message}");

    node.kill().unwrap();
    assert!(answers_within(&node, LIMIT));
    assert_eq!(status(&node).failure().0, 50);
}

/// A plugin that does not answer in time is called once more before the node is reported as broken.
///
/// Rows: STA-06.
#[test]
fn one_slow_answer_of_a_plugin_is_no_broken_node() {
    // Longer than a plugin has.
    const OBSERVED: Duration = Duration::from_secs(8);
    let mut node = Node::new(&[]).unwrap();
    node.plugin("slow", &json!({})).unwrap();
    define_default(&node, &json!({"cniVersion": "1.1.0", "type": "slow"}));
    node.start().unwrap();
    await_status(&node, 0, "");
    node.plugin("slow", &json!({"STATUS": {"sleepMs": 60_000}})).unwrap();
    let mut process = PathBuf::new();
    let is_asked = eventually(PATIENCE, || {
        // Makes the agent call the plugin.
        status(&node).success();
        let calls = node.take_calls().unwrap();
        let Some(call) = calls.last() else { return false };
        process = format!("/proc/{}", call["pid"]).into();
        // A check that was requested just before is not slow, and has ended by then.
        std::thread::sleep(Duration::from_millis(500));
        process.exists()
    });
    assert!(is_asked, "the plugin is not asked");
    node.plugin("slow", &json!({})).unwrap();
    let began = Instant::now();
    while began.elapsed() < OBSERVED {
        status(&node).success();
        std::thread::sleep(Duration::from_millis(250));
    }
    assert!(!process.exists(), "it was too slow");
}

/// A very busy node schedules the agent late, and is no broken node: if it were reported as one, its pods would be
/// evicted.
///
/// Rows: STA-06.
#[test]
fn an_agent_that_answers_after_seconds_is_waited_for() {
    const LATE: Duration = Duration::from_secs(2);
    let mut node = Node::new(&[]).unwrap();
    node.start().unwrap();
    await_status(&node, 0, "");
    let agent = Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    let asked = question(&node);
    let asked = std::thread::spawn(move || asked.run());
    std::thread::sleep(LATE);
    let is_waiting = !asked.is_finished();
    kill_process(agent, Signal::CONT).unwrap();
    asked.join().unwrap().success();
    assert!(is_waiting, "who answered?");
}

#[test]
fn a_pod_whose_device_has_gone_is_not_taken_for_an_unprotected_one() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    ip(&a.namespace, &["link", "del", "eth0"]).unwrap();
    // The third answer is from a check after the second.
    for _ in 0..3 {
        status(&node).success();
        std::thread::sleep(Duration::from_millis(1100));
    }
    node.del(&a).success();
}
