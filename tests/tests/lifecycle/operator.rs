//! An operator's mistakes: wrong arguments, rights or settings, and the error messages. The real executables.

use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::executable;
use netattach_tests::privilege::with_only;
use netattach_tests::traffic::{PATIENCE, connect, connects, eventually};
use netattach_tests::{Node, Pod};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

/// An unprivileged user (nobody).
const SOMEBODY: u32 = 65_534;

fn ctl(node: &Node) -> Command {
    let mut command = Command::new(executable("netattachctl").unwrap());
    command.arg("--socket").arg(node.socket());
    command
}

/// Exit code, standard output and standard error.
fn ended(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr).trim_end().to_owned())
}

fn asked(node: &Node, words: &[&str]) -> (i32, String, String) {
    ended(ctl(node).args(words).output().unwrap())
}

/// `shop/a` and `shop/b` on `storage`, `shop/b` isolated.
fn scene() -> (Node, [Pod; 2]) {
    let mut node = Node::new(&[]).unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    for name in ["a", "b"] {
        node.write(name, &pod(name, &json!({"app": name}), &json!("storage"))).unwrap();
    }
    let web = json!({"podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress"],
                     "ingress": [{"ports": [{"protocol": "TCP", "port": 80}]}]});
    node.write("web", &policy("web", "storage", &web)).unwrap();
    node.start().unwrap();
    let pods = ["a", "b"].map(|name| {
        let pod = Pod::new(name).unwrap();
        node.add(&pod).success();
        pod
    });
    (node, pods)
}

#[test]
fn what_is_not_there_is_said_with_what_there_is_and_a_code_of_its_own() {
    let (node, [a, b]) = scene();
    let attached = "pod nope/nope is not attached on this node; attached pods: shop/a, shop/b";
    let unknown = "pod nope/nope is not attached on this node and is in no manifest; netattachctl attachments lists what is \
                   attached (code 3)";
    let no_sandbox = "pod nope/nope is not attached on this node; netattachctl attachments lists what is attached (code 3)";
    let number = node.ctl(&["policy", "--pod", "shop/b"]).unwrap()["attachments"][1]["ingress"].clone();
    let no_policy =
        |name: &str| format!("there is no policy {name} in the maps; the maps have {number}, of shop/web");
    let cases: [(&[&str], String); 13] = [
        (&["attachments", "--pod", "nope/nope"], attached.into()),
        (&["stats", "--pod", "nope/nope"], attached.into()),
        (&["flows", "--pod", "nope/nope"], attached.into()),
        (&["policy", "--pod", "nope/nope"], attached.into()),
        (
            &["attachments", "--network", "wan"],
            "no pod of this node is attached to network wan; attached networks: kube-system/default, shop/storage".into(),
        ),
        (&["policy", "dump", "nope/nope"], no_policy("nope/nope")),
        (&["policy", "dump", "4000000000"], no_policy("4000000000")),
        (&["explain", "nope/nope", "shop/b", "80"], unknown.into()),
        (&["detach", "nope/nope", "net1"], no_sandbox.into()),
        (&["attach", "nope/nope", "storage"], no_sandbox.into()),
        (
            &["attach", "shop/a", "nosuch"],
            "network shop/nosuch is not defined; namespace shop has storage (code 7)".into(),
        ),
        (
            &["attach", "shop/a", "elsewhere/lan"],
            "network elsewhere/lan is not defined; namespace elsewhere has no network (code 7)".into(),
        ),
        (
            &["detach", "shop/a", "nosuch0"],
            "pod shop/a has no interface nosuch0 that was attached while it was live; it has none (code 3)".into(),
        ),
    ];
    for (words, message) in cases {
        let expected = format!("netattachctl: {message}");
        assert_eq!(asked(&node, words), (3, String::new(), expected.clone()), "{words:?}");
        let (code, shown, told) = asked(&node, &[words, &["-o", "json"]].concat());
        assert!(shown.is_empty() || serde_json::from_str::<Value>(&shown).is_ok(), "{words:?} {shown}");
        assert_eq!((code, told), (3, expected), "{words:?}");
    }
    for words in [
        &["flows", "--reason", "nonsense"][..],
        &["flows", "--reason", "timeout", "--verdict", "dropped"],
        &["policy", "dump", "nope"],
        &["explain", "a", "b", "80"],
        &["explain", "shop/a", "shop/b", "0"],
        &["stats", "--network", ""],
        &["detach", "shop/a", ""],
        &["stats", "--pod", "a"],
        &["nonsense"],
    ] {
        assert_eq!(asked(&node, words).0, 2, "{words:?}");
    }
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

#[test]
fn a_drop_has_one_time_whenever_it_is_asked_for() {
    let (node, [a, b]) = scene();
    let to = node.status(&b).unwrap()[1]["ips"][0].as_str().unwrap().to_owned();
    assert!(!connects(&a.namespace, format!("{to}:81").parse().unwrap(), PATIENCE / 20));
    let drops = || asked(&node, &["flows", "--verdict", "dropped", "--reason", "ingress-port"]).1;
    assert!(eventually(PATIENCE, || drops().contains(":81")));
    let told = drops();
    let first = told.lines().next().unwrap().to_owned();
    for _ in 0..50 {
        assert_eq!(drops().lines().next().unwrap(), first);
    }
    let time = first.split(' ').next().unwrap();
    assert!(time.len() == 24 && time.starts_with("20") && time.ends_with('Z'), "RFC 3339: {time}");
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

/// Returns what `uninstall` removes, and what it reports as kept, except settings of the machine that the tests run
/// on.
fn found(node: &Node, words: &[&str]) -> (Value, Vec<Value>) {
    let mut found = node.ctl(words).unwrap();
    let stays = found.as_object_mut().unwrap().remove("stays").unwrap();
    let stays = stays.as_array().unwrap().iter().map(|it| it["what"].clone());
    let stays = stays.filter(|what| !what.as_str().unwrap().starts_with("net/")).collect();
    (found, stays)
}

#[test]
fn pins_under_attached_pods_stay_unless_they_are_to_go_all_the_same() {
    let (mut node, [a, b]) = scene();
    let bpffs = node.bpffs().display().to_string();
    let state = node.path("state").display().to_string();
    let conf = node.path("net.d").display().to_string();
    let uninstall = ["uninstall", "--bpffs", &bpffs, "--state-dir", &state, "--cni-conf-dir", &conf];
    let served = format!(
        "netattachctl: an agent serves {}: have it detach its pods (cniConf.remove, docs/remove.md), then stop it",
        node.socket().display()
    );
    assert_eq!(asked(&node, &[&uninstall[..], &["--force"]].concat()), (5, String::new(), served));
    node.stop().unwrap();
    let attached = |who: &str| {
        format!(
            "netattachctl: pods are attached, and their devices would keep programs that no agent maintains: {who}; detach them first, \
             by an agent with cniConf.remove (docs/remove.md), or give --force"
        )
    };
    assert_eq!(asked(&node, &uninstall), (5, String::new(), attached("shop/a, shop/b")));
    // Records elsewhere, or lost: attachments are found in the maps too.
    let elsewhere = ["uninstall", "--bpffs", &bpffs, "--state-dir", "/nonexistent"];
    let who = format!("4 attachments in the maps at {bpffs}, of which /nonexistent has no record");
    assert_eq!(asked(&node, &elsewhere), (5, String::new(), attached(&who)));
    assert!(node.bpffs().exists());
    // Naming the directory above would remove the pins of others.
    let above = node.bpffs().parent().unwrap().display().to_string();
    let words = ["uninstall", "--force", "--bpffs", &above, "--state-dir", &state, "--cni-conf-dir", &conf];
    let (code, _, said) = asked(&node, &words);
    assert!(code == 1 && said.contains("which is not netattach's: name the directory"), "{said}");
    assert!(node.bpffs().exists());

    node.start().unwrap();
    node.del(&a).success();
    node.stop().unwrap();
    assert_eq!(asked(&node, &uninstall), (5, String::new(), attached("shop/b")));
    node.start().unwrap();
    node.del(&b).success();
    node.stop().unwrap();
    // The tests' own namespace has no objects of netattach.
    let outcome = |removed: bool, forced: bool, state: &[PathBuf]| {
        json!({
            "bpffs": bpffs, "removed": removed, "forced": forced, "dry_run": false, "configurations": [],
            "tables": [], "routes": [], "devices": [], "host_links": [], "bridges": [], "bridges_in_use": [], "state": state,
            "executables": []
        })
    };
    let pools = ["@kube-system/default", "@shop/storage"].map(|name| json!(node.path("leases").join(name)));
    let kept = pools.to_vec();
    let state_files =
        ["state/journal", "run/netattach.sock.lock", "run/network-status"].map(|name| node.path(name));
    assert_eq!(found(&node, &uninstall), (outcome(true, false, &state_files), kept));
    assert!(!node.path("state").exists() && !node.path("run").exists());
    assert_eq!(found(&node, &uninstall), (outcome(false, false, &[]), Vec::new()));

    // Links on devices have a directory of their own there.
    node.set("attach", json!("tcx"));
    node.start().unwrap();
    node.add(&a).success();
    node.stop().unwrap();
    assert!(node.bpffs().join("link").exists());
    let shown = found(&node, &[&uninstall[..], &["--force"]].concat());
    let run_files = ["run/netattach.sock.lock", "run/network-status"].map(|name| node.path(name));
    // The records stay, so that an agent can still detach the pod.
    assert_eq!(shown.0, outcome(true, true, &run_files));
    assert!(shown.1.contains(&json!(node.path("state"))), "{:?}", shown.1);
    assert!(!node.bpffs().exists());
    node.start().unwrap();
    node.del(&a).success();
}

#[test]
fn words_that_make_no_command_are_refused_and_none_is_passed_over() {
    use std::os::unix::ffi::OsStrExt;
    let directory = tempfile::tempdir().unwrap();
    let odd = std::ffi::OsStr::from_bytes(b"\xff");
    let install = |words: &[&std::ffi::OsStr]| {
        Command::new(executable("netattach-cni").unwrap())
            .arg("install")
            .args(words)
            .output()
            .unwrap()
            .status
            .code()
    };
    let there = directory.path().join(odd);
    std::fs::create_dir(&there).unwrap();
    assert_eq!(install(&[directory.path().as_os_str(), odd]), Some(2));
    assert_eq!(install(&[directory.path().as_os_str(), "--forse".as_ref()]), Some(2));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "nothing was linked");
    assert_eq!(install(&[there.as_os_str()]), Some(0));
    assert!(there.join("bridge").exists());
    for words in [&[odd][..], &["status".as_ref(), odd], &["stats".as_ref(), "--pod".as_ref(), odd]] {
        let output = Command::new(executable("netattachctl").unwrap()).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
    }
}

#[test]
fn who_may_not_ask_is_told_so() {
    let mut node = Node::new(&[]).unwrap();
    node.start().unwrap();
    let socket = node.socket().display().to_string();
    for words in [&["status"][..], &["attachments"], &["uninstall"]] {
        let output = ctl(&node).args(words).uid(SOMEBODY).gid(SOMEBODY).output().unwrap();
        let said = format!(
            "netattachctl: only root may talk to the agent at {socket}: run this as root: Permission denied (os error 13)"
        );
        assert_eq!(ended(output), (4, String::new(), said), "{words:?}");
    }
}

/// The only log line of an agent that does not start.
fn refused_to_start(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let log = String::from_utf8(output.stderr).unwrap();
    let [line] = log.lines().collect::<Vec<_>>()[..] else { panic!("more than a line:\n{log}") };
    line.split_once("netattach::agent::run: ").unwrap().1.to_owned()
}

#[test]
fn an_agent_without_the_capabilities_that_it_needs_names_them_in_a_line() {
    // `capabilities` proves that those of the manifests are sufficient.
    let node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    // A container's root has not all of them.
    let all = rustix::thread::capabilities(None).unwrap().permitted;
    let admin = "CAP_SYS_ADMIN (to enter the network namespaces of pods and to load BPF programs)";
    let net = "CAP_NET_ADMIN (to make links, addresses, routes and filters)";
    let lacks = |user: u32, what: &str| {
        format!(
            "this process (user id {user}) lacks {what}: run netattachd as root, or in a container with these capabilities"
        )
    };
    let agent = executable("netattachd").unwrap();
    let attempts = [
        (all - CapabilitySet::SYS_ADMIN, admin.to_owned()),
        (all - CapabilitySet::SYS_ADMIN - CapabilitySet::PERFMON, admin.to_owned()),
        (all - CapabilitySet::NET_ADMIN, net.to_owned()),
        (CapabilitySet::empty(), format!("{admin}, {net}")),
    ];
    for (kept, what) in attempts {
        let command = node.agent_command(&agent).unwrap();
        let line = node.namespace.run(|| with_only(kept, || Ok(refused_to_start(command)))).unwrap();
        assert_eq!(line, lacks(0, &what));
    }
    let mut command = node.agent_command(&agent).unwrap();
    std::fs::set_permissions(node.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    command.uid(SOMEBODY).gid(SOMEBODY);
    assert_eq!(refused_to_start(command), lacks(SOMEBODY, &format!("{admin}, {net}")));
}

#[test]
fn settings_that_cannot_be_meant_are_refused_by_name_in_a_line() {
    let node = Node::new(&[]).unwrap();
    let agent = executable("netattachd").unwrap();
    let with = |variable: &str| {
        let mut command = node.agent_command(&agent).unwrap();
        command.env("NETATTACH_LOG", variable);
        refused_to_start(command)
    };
    let form = with("foo=bar=baz");
    let start = "NETATTACH_LOG=\"foo=bar=baz\" is not LEVEL or MODULE=LEVEL, several separated by commas: ";
    assert!(form.starts_with(start), "{form}");
    assert!(with("inf").starts_with("NETATTACH_LOG: \"inf\" would log nothing: give a level ("));

    let dotted = node.bpffs().with_file_name("netattach.test").join("x");
    let mut command = node.agent_command(&agent).unwrap();
    command.arg("--bpffs").arg(&dotted);
    // The option is given twice; clap refuses that.
    let twice = command.output().unwrap();
    assert_eq!(twice.status.code(), Some(2));
    let mut command = Command::new(&agent);
    command.arg("--source").arg(node.path("source")).arg("--run-dir").arg(node.path("run"));
    command.arg("--state-dir").arg(node.path("state")).arg("--bpffs").arg(&dotted);
    assert_eq!(
        node.namespace.run(|| refused_to_start(command)),
        format!(
            "set up the dataplane: {}: names on a BPF filesystem have no dots (the kernel keeps them for itself), and \
             \"netattach.test\" has one",
            dotted.display()
        )
    );
}

/// Stops all threads of a process, which end what they do in the kernel first.
fn suspend(process: Pid) {
    kill_process(process, Signal::STOP).unwrap();
    let tasks = format!("/proc/{}/task", process.as_raw_nonzero());
    let is_stopped = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    };
    let are_stopped = || fs::read_dir(&tasks).unwrap().all(|task| is_stopped(task.unwrap()));
    assert!(eventually(PATIENCE, are_stopped), "{process:?} goes on");
}

#[test]
fn signals_end_the_agent_with_a_line_or_do_nothing_with_a_line() {
    let mut node = Node::new(&[]).unwrap();
    let nothing = [Signal::HUP, Signal::USR1, Signal::USR2, Signal::PIPE];
    // One; and both at once, of which the agent is told in either order: the other one does not wait for work in progress.
    let ends: [(&[Signal], &[&str]); 2] =
        [(&[Signal::QUIT], &["SIGQUIT"]), (&[Signal::TERM, Signal::QUIT], &["SIGTERM", "SIGQUIT"])];
    for (ending, told) in ends {
        node.start().unwrap();
        let pid = Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
        nothing.iter().for_each(|signal| kill_process(pid, *signal).unwrap());
        // An agent that is told to end reads no other signal any more.
        let told_of = || node.log_so_far().matches(" signal=\"").count();
        assert!(eventually(PATIENCE, || told_of() == 3), "{}", node.log_so_far());
        suspend(pid);
        ending.iter().for_each(|signal| kill_process(pid, *signal).unwrap());
        kill_process(pid, Signal::CONT).unwrap();
        let (status, log) = node.wait_for_end().unwrap();
        assert!(status.success(), "{status} {log}");
        let mut lines: Vec<String> = log
            .lines()
            .filter_map(|line| line.split_once(" signal=\""))
            .filter_map(|(said, name)| Some(format!("{name} {}", said.split_once("netattach::agent::")?.1)))
            .collect();
        lines.sort();
        let ignored = "run::signals: ignored: changed manifests are read automatically; restart netattachd to read its settings, attachments keep working";
        let mut endings =
            told.iter().map(|name| format!("{name}\" run: shutting down; attachments keep working"));
        let ending = endings.find(|ending| lines.contains(ending)).expect(&log);
        let reloaded = "run::reload: reloaded: objects are read again; the settings have not changed";
        let mut expected = ["SIGUSR1", "SIGUSR2"].map(|name| format!("{name}\" {ignored}")).to_vec();
        expected.push(format!("SIGHUP\" {reloaded}"));
        expected.push(ending);
        expected.sort();
        assert_eq!(lines, expected, "{log}");
    }
}

#[test]
fn sighup_names_changed_settings_and_says_why_broken_ones_cannot_be_used() {
    let mut node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.set("parallelAdds", json!(8));
    node.start().unwrap();
    let config = node.path("netattachd.yaml");
    let used = fs::read_to_string(&config).unwrap();
    let pid = Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
    let mut expected = Vec::new();
    let mut says = |written: &str, said: &str| {
        fs::write(&config, written).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        expected.push(format!("reloaded: objects are read again; {said} signal=\"SIGHUP\""));
        let told = || -> Vec<String> {
            let log = node.log_so_far();
            let lines = log.lines().filter_map(|line| line.split_once(" netattach::agent::run::reload: "));
            lines.map(|(_, told)| told.to_owned()).collect()
        };
        assert!(eventually(PATIENCE, || told() == expected), "{:#?}\n{expected:#?}", told());
    };
    let changed = used.replace("\"parallelAdds\":8", "\"parallelAdds\":9");
    assert_ne!(changed, used);
    says(
        &changed,
        "these settings have changed and need a restart of netattachd, which attachments survive: parallelAdds from 8 to 9",
    );
    // The message of an agent that is started with them.
    let broken = used.replace("\"parallelAdds\":8", "\"parallelAdds\":\"many\"");
    fs::write(&config, &broken).unwrap();
    let refused =
        Command::new(executable("netattachd").unwrap()).arg("--config").arg(&config).output().unwrap();
    let refused = String::from_utf8(refused.stderr).unwrap();
    let (_, why) = refused.trim_end().split_once("netattach::agent::run: ").unwrap();
    assert!(why.contains("parallelAdds"), "{why}");
    says(
        &broken,
        &format!("the changed settings cannot be used, and netattachd would not start with them: {why}"),
    );
    says(&used, "the settings have not changed");
    // The agent continues with its present settings.
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    node.del(&a).success();
}

#[test]
fn an_agent_whose_log_nobody_reads_goes_on() {
    let node = Node::new(&[pod("a", &json!({}), &Value::Null)]).unwrap();
    node.write("b", &pod("b", &json!({}), &json!("nowhere"))).unwrap();
    let mut agent = node.agent_command(&executable("netattachd").unwrap()).unwrap();
    let mut child = node.namespace.run(|| agent.spawn()).unwrap();
    assert!(eventually(PATIENCE, || ctl(&node).arg("status").output().unwrap().status.success()));
    drop(child.stderr.take());
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    // Logged, and then answered.
    for _ in 0..3 {
        assert!(node.add(&b).failure().1.contains("shop/nowhere is not defined"));
    }
    node.add(&a).success();
    node.del(&a).success();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_trouble_is_one_line_when_it_begins_and_a_failed_request_is_one_that_says_whose_it_was() {
    let mut node = Node::new(&[]).unwrap();
    let define = |node: &Node, name: &str, parent: &str| {
        let config = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": parent});
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    };
    define(&node, "lan", "nowhere0");
    node.write("a", &pod("a", &json!({}), &json!("lan"))).unwrap();
    node.start().unwrap();
    let row = |name: &str, parent: &str| json!({"object": format!("network shop/{name}"), "problem": format!("no link named {parent}")});
    let mut told = Value::Null;
    let mut await_troubles = |expected: Value| {
        let shown = || {
            told = node.ctl(&["status"]).unwrap()["troubles"].clone();
            told == expected
        };
        assert!(eventually(PATIENCE, shown), "{told:#}");
    };
    await_troubles(json!([row("lan", "nowhere0")]));
    let a = Pod::new("a").unwrap();
    node.add(&a).failure();
    // By a check that has found the first one again.
    define(&node, "wan", "nowhere1");
    await_troubles(json!([row("lan", "nowhere0"), row("wan", "nowhere1")]));
    let log = node.stop().unwrap();
    let told = log.lines().filter_map(|line| line.split_once(" WARN ")).map(|(_, told)| told);
    let without_time = |line: &str| match line.split_once(" ms=").map(|(to, rest)| (to, rest.split_once(' ')))
    {
        Some((to, Some((_, rest)))) => format!("{to} ms=MS {rest}"),
        _ => line.to_owned(),
    };
    let lines: Vec<String> = told.map(without_time).collect();
    let begins = |name: &str, parent: &str| {
        format!(
            "netattach::agent::health: network cannot be attached object=\"network shop/{name}\" problem=\"no link named {parent}\""
        )
    };
    let failed = "netattach::agent::request::request_log: failed verb=\"ADD\" pod=\"shop/a\" container=\"c-a\" \
                  ifname=\"eth0\" \
                  networks=\"kube-system/default,shop/lan\" addresses=\"\" ms=MS code=7 \
                  msg=\"attach net1 (shop/lan): create macvlan net1 on nowhere0: no link named nowhere0\" details=\"\"";
    assert_eq!(lines, [begins("lan", "nowhere0"), failed.to_owned(), begins("wan", "nowhere1")], "{log}");
}

#[test]
fn an_agent_that_hangs_is_told_from_one_that_is_not_there_and_a_closed_pipe_is_no_error() {
    let (node, [a, b]) = scene();
    // A reader that closes the pipe early.
    let mut child = ctl(&node)
        .args(["attachments", "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(0), ""));

    // A follower ends with its reader, at the next line.
    let mut follower = ctl(&node).args(["flows", "--follow"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(follower.stdout.take());
    let to = node.status(&b).unwrap()[1]["ips"][0].as_str().unwrap().to_owned();
    let ended = eventually(PATIENCE, || {
        drop(connect(&a.namespace, format!("{to}:80").parse().unwrap(), PATIENCE / 50));
        follower.try_wait().unwrap().is_some()
    });
    let status = follower.try_wait().unwrap();
    if !ended {
        follower.kill().unwrap();
    }
    assert_eq!(status.map(|status| (status.code(), status.signal())), Some((Some(0), None)));

    let agent = Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
    suspend(agent);
    let hangs = asked(&node, &["attachments"]);
    kill_process(agent, Signal::CONT).unwrap();
    let said = format!("netattachctl: the agent at {} did not answer within 10s", node.socket().display());
    assert_eq!(hangs, (4, String::new(), said));
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

/// The agent runs and has no answer: a script gets an exit code, and a user a message.
#[test]
fn what_has_no_answer_is_not_shown_as_an_empty_one() {
    let (node, [a, b]) = scene();
    let ends = "netattachctl: neither end is an enforced attachment of this node, or the ends share no network and address family";
    let explain = ["explain", "192.0.2.1", "192.0.2.2", "80"];
    assert_eq!(asked(&node, &explain), (3, String::new(), ends.to_owned()));
    let none = "No records. Drops are recorded, and flows of attachments that a policy isolates; netattachctl stats counts other traffic.\n";
    let flows = ["flows", "--pod", "shop/a", "--reason", "displaced"];
    assert_eq!(asked(&node, &flows), (0, none.to_owned(), String::new()));
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}
