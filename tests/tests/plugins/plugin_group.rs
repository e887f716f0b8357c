//! The control group of executed plugins. Memory limits need a machine whose memory is accounted by control groups of
//! version 2: `cargo xtask vm` runs these tests in one.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use netattach::cni::Command;
use netattach::delegate::{Call, Caller, Delegate, DelegateError, PluginGroup};
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node_root::{NodeRoot, OwnMounts, with_own_mounts};
use netattach_tests::privilege::with_only;
use netattach_tests::tools::report_skipped;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Bound, Node, Pod};
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

use super::delegate::call;

/// Returns the mount point of control groups of version 2.
fn hierarchy() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        (kind.split(' ').next() == Some("cgroup2")).then(|| PathBuf::from(place.split(' ').nth(4).unwrap()))
    })
}

/// A group of this test; removed when this is dropped.
struct Group(PathBuf);

impl Group {
    fn new(hierarchy: &Path, name: &str) -> Self {
        let path = hierarchy.join(format!("netattach-test-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn processes(&self) -> String {
        fs::read_to_string(self.0.join("cgroup.procs")).unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // From the inside out; a killed process may remain for a moment.
        let inner = ["agent", "plugins"].map(|name| self.0.join(name));
        eventually(PATIENCE, || {
            inner.iter().chain([&self.0]).for_each(|path| drop(fs::remove_dir(path)));
            !self.0.exists()
        });
    }
}

#[test]
fn a_plugin_in_the_group_of_plugins_is_called_as_one_without_it() {
    let test = "a_plugin_in_the_group_of_plugins_is_called_as_one_without_it";
    let Some(hierarchy) = hierarchy() else {
        return report_skipped(test, "there are no control groups of version 2");
    };
    let group = Group::new(&hierarchy, "calls");
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    symlink(env!("CARGO_BIN_EXE_fake-plugin"), path("fake")).unwrap();
    let of = |group: Option<Arc<PluginGroup>>| Delegate {
        search: vec![directory.path().to_owned()],
        timeout: Duration::from_secs(60),
        caller: Caller::Agent { name: "of the test".to_owned(), group },
        root: None,
        watcher: None,
    };
    let own = Arc::new(PluginGroup::existing(group.0.clone(), 64 << 20).unwrap());
    let (without, within) = (of(None), of(Some(own)));
    let records = || -> Vec<Value> {
        let text = fs::read_to_string(path("fake.json.calls")).unwrap();
        fs::remove_file(path("fake.json.calls")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };

    // The same environment, standard input and answer.
    fs::write(path("fake.json"), json!({"tellGroup": true, "stderr": "a word"}).to_string()).unwrap();
    let answers = [&without, &within].map(|delegate| {
        let answer = delegate.run(&call(Command::Add)).unwrap();
        let [mut called, told] = <[Value; 2]>::try_from(records()).unwrap();
        called["pid"].take();
        let groups = told["group"].as_str().unwrap().to_owned();
        let line = groups.lines().find(|line| line.starts_with("0::")).unwrap().to_owned();
        (answer, called, line)
    });
    let [(answer, called, elsewhere), (same_answer, same_call, there)] = answers;
    assert_eq!((answer, called), (same_answer, same_call));
    let name = group.0.file_name().unwrap().to_str().unwrap();
    assert!(there.ends_with(name) && !elsewhere.ends_with(name), "{there}, {elsewhere}");

    // The same failures.
    let failures: [(Value, Command); 3] = [
        (json!({"error": {"code": 7, "msg": "no", "details": "at all"}}), Command::Add),
        (json!({"exit": 3}), Command::Del),
        (json!({"abort": true}), Command::Check),
    ];
    for (script, command) in failures {
        fs::write(path("fake.json"), script.to_string()).unwrap();
        let [one, other] = [&without, &within].map(|it| it.run(&call(command)).unwrap_err().to_string());
        assert_eq!(one, other);
    }
    let broken = path("broken");
    fs::write(&broken, "no program").unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
    let errors = [&without, &within].map(|it| {
        let error = it.run(&Call { plugin_type: "broken", ..call(Command::Add) }).unwrap_err();
        let DelegateError::Spawn { source, .. } = error else { panic!("{error}") };
        source.raw_os_error()
    });
    assert_eq!(errors[0], errors[1]);

    // Its child processes end with it at its timeout.
    fs::write(path("fake.json"), json!({"holdMs": 60_000, "sleepMs": 60_000}).to_string()).unwrap();
    let impatient = Delegate { timeout: Duration::from_millis(300), ..within };
    let error = impatient.run(&call(Command::Add)).unwrap_err();
    assert!(matches!(error, DelegateError::TimedOut { .. }), "{error}");
    assert!(eventually(PATIENCE, || group.processes().is_empty()), "{}", group.processes());
}

#[test]
fn an_agent_that_was_given_no_group_says_so_where_one_is_asked_for_and_pods_go_on() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.set("delegation", json!({"memoryLimitMiB": 64}));
    // The tests' own group is no agent's.
    node.start().unwrap();
    let status = node.ctl(&["status"]).unwrap();
    let troubles = status["troubles"].as_array().unwrap();
    let told = troubles.iter().find(|row| row["object"] == "control group of executed plugins");
    let problem = told.unwrap_or_else(|| panic!("{status:#}"))["problem"].as_str().unwrap();
    assert!(
        problem
            .starts_with("they run in that of the agent, so one that takes all its memory ends the agent: ")
    );
    assert!(problem.ends_with("; or set delegation.memoryLimitMiB: 0"), "{problem}");
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.del(&a).success();
}

#[test]
fn a_plugin_in_the_nodes_root_directory_is_in_the_group_too() {
    let Some(hierarchy) = hierarchy() else {
        let test = "a_plugin_in_the_nodes_root_directory_is_in_the_group_too";
        return report_skipped(test, "there are no control groups of version 2");
    };
    let group = Group::new(&hierarchy, "root");
    with_own_mounts(|mounts| {
        let directory = tempfile::tempdir().unwrap();
        symlink(env!("CARGO_BIN_EXE_fake-plugin"), directory.path().join("fake")).unwrap();
        let script = json!({"tellGroup": true, "record": "/mnt/netattach-calls"});
        fs::write(directory.path().join("fake.json"), script.to_string()).unwrap();
        let root = NodeRoot::mount(mounts, &["mnt"]).unwrap();
        let own = Arc::new(PluginGroup::existing(group.0.clone(), 64 << 20).unwrap());
        let delegate = Delegate {
            search: vec![directory.path().to_owned()],
            timeout: Duration::from_secs(60),
            caller: Caller::Agent { name: "of the test".to_owned(), group: Some(own) },
            root: Some(root.path().to_owned()),
            watcher: None,
        };
        delegate.run(&call(Command::Add)).unwrap();
        // Its path `/mnt` is that of its root directory.
        let record = fs::read_to_string(root.path().join("mnt/netattach-calls")).unwrap();
        let told: Value = serde_json::from_str(record.lines().last().unwrap()).unwrap();
        let name = group.0.file_name().unwrap().to_str().unwrap();
        let line = told["group"].as_str().unwrap().lines().find(|line| line.starts_with("0::")).unwrap();
        assert!(line.ends_with(name), "{told}");
        assert!(!Path::new("/mnt/netattach-calls").exists());
    });
}

#[test]
fn a_plugin_that_eats_memory_ends_alone_and_the_agent_and_its_successor_go_on() {
    eats_memory("a_plugin_that_eats_memory_ends_alone_and_the_agent_and_its_successor_go_on", None);
}

/// With the settings and the capabilities of a DaemonSet for executed plugins (`lifecycle::capabilities`).
#[test]
fn a_plugin_that_eats_memory_in_the_nodes_root_directory_ends_alone_too() {
    let test = "a_plugin_that_eats_memory_in_the_nodes_root_directory_ends_alone_too";
    with_own_mounts(|mounts| eats_memory(test, Some(mounts)));
}

fn eats_memory(test: &str, in_root: Option<&OwnMounts>) {
    let hierarchy = hierarchy().filter(|path| {
        fs::read_to_string(path.join("cgroup.controllers")).is_ok_and(|text| text.contains("memory"))
    });
    let Some(hierarchy) = hierarchy else {
        return report_skipped(test, "memory is not counted by control groups of version 2");
    };
    fs::write(hierarchy.join("cgroup.subtree_control"), "+memory").unwrap();
    let group = Group::new(&hierarchy, if in_root.is_some() { "agent-in-root" } else { "agent" });
    let greedy = json!({"cniVersion": "1.0.0", "type": "greedy"});
    let modest = json!({"cniVersion": "1.0.0", "type": "modest"});
    let mut node = Node::new(&[
        network(NAMESPACE, "greedy", &greedy),
        network(NAMESPACE, "modest", &modest),
        pod("a", &json!({}), &json!("greedy")),
        pod("b", &json!({}), &json!("modest")),
    ])
    .unwrap();
    node.plugin("greedy", &json!({"ADD": {"eatMiB": 200}})).unwrap();
    node.plugin("modest", &json!({})).unwrap();
    let mut given = CapabilitySet::all();
    let mut settings = json!({"memoryLimitMiB": 64});
    let scratch = tempfile::tempdir().unwrap();
    let root = in_root.map(|mounts| NodeRoot::mount(mounts, &["mnt"]).unwrap());
    if let Some(root) = &root {
        settings["root"] = json!(root.path());
        given = CapabilitySet::NET_ADMIN
            | CapabilitySet::SYS_ADMIN
            | CapabilitySet::SYS_CHROOT
            | CapabilitySet::NET_RAW;
    }
    node.set("delegation", settings);
    node.set_group(&group.0);
    with_only(given, || node.start()).unwrap();
    let number = |name: &str| fs::read_to_string(group.0.join(name)).unwrap().trim().to_owned();
    assert_eq!(number("agent/cgroup.procs"), node.agent_pid().to_string());
    assert_eq!(number("plugins/memory.max"), (64 << 20).to_string());
    assert_eq!(group.processes(), "");

    // An agent with few capabilities opens no namespace by a process that has more.
    let [a, b] = ["a", "b"].map(|name| {
        let pod = Pod::new(name).unwrap();
        let netns = pod.namespace.bind(&scratch.path().join(name)).unwrap();
        (pod, netns)
    });
    let call = |node: &Node, verb: &str, (pod, netns): &(Pod, Bound)| {
        node.call(verb, pod).with("CNI_NETNS", &netns.path().display().to_string()).run()
    };
    let (code, message) = call(&node, "ADD", &a).failure();
    let said = "was killed by the kernel: plugins took more than 64 MiB of memory together; see delegation.memoryLimitMiB";
    assert!(code == 11 && message.contains(said), "{code}: {message}");
    assert_eq!(number("agent/cgroup.procs"), node.agent_pid().to_string(), "the agent goes on");
    call(&node, "ADD", &b).success();

    // The next agent finds itself in the leaf of the one before.
    node.kill().unwrap();
    node.set_group(&group.0.join("agent"));
    with_only(given, || node.start()).unwrap();
    assert_eq!(number("agent/cgroup.procs"), node.agent_pid().to_string());
    call(&node, "ADD", &a).failure();
    call(&node, "DEL", &b).success();
    node.stop().unwrap();
}
