//! Queries of an operator to a node: lists, pools, flows with names, pictures, checks, an archive. The real
//! executables.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{executable, ip};
use netattach_tests::traffic::{PATIENCE, connects, eventually};
use netattach_tests::{Node, Pod};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Exit code and standard output.
fn asked(node: &Node, words: &[&str]) -> (i32, String) {
    let mut command = Command::new(executable("netattachctl").unwrap());
    let output = command.arg("--socket").arg(node.socket()).args(words).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

/// `shop/a` and `shop/b` on `storage`, `shop/b` isolated except for port 80.
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

fn address(node: &Node, pod: &Pod) -> String {
    node.status(pod).unwrap()[1]["ips"][0].as_str().unwrap().to_owned()
}

#[test]
fn lists_are_chosen_by_labels_namespace_and_container_and_pools_know_their_holders() {
    let (node, [a, b]) = scene();
    let names = |words: &[&str]| asked(&node, &[&["attachments", "-o", "name"], words].concat());
    let all = "shop/a/eth0\nshop/a/net1\nshop/b/eth0\nshop/b/net1\n";
    assert_eq!(names(&[]), (0, all.to_owned()));
    assert_eq!(names(&["-n", "shop"]), (0, all.to_owned()));
    assert_eq!(names(&["-l", "app=b"]), (0, "shop/b/eth0\nshop/b/net1\n".to_owned()));
    assert_eq!(names(&["-l", "app notin (b),app"]), (0, "shop/a/eth0\nshop/a/net1\n".to_owned()));
    assert_eq!(names(&["-l", "app=c"]).0, 3);
    assert_eq!(names(&["-n", "ops"]).0, 3);
    let rows = node.ctl(&["attachments", "--pod", "shop/a", "--network", "storage"]).unwrap();
    let id = rows[0]["container_id"].as_str().unwrap();
    assert_eq!(names(&["--container-id", id]), (0, "shop/a/eth0\nshop/a/net1\n".to_owned()));

    let pools = node.ctl(&["pools", "--network", "storage"]).unwrap();
    let range = &pools[0]["ranges"][0];
    let numbers = ["size", "used", "free", "free_runs"].map(|key| range[key].as_u64().unwrap());
    assert_eq!(numbers, [253, 2, 251, 1], "{pools:#}");
    let holders: Vec<[&str; 2]> = pools[0]["holders"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| [it["address"].as_str().unwrap(), it["pod"]["name"].as_str().unwrap()])
        .collect();
    let (of_a, of_b) = (address(&node, &a), address(&node, &b));
    assert_eq!(holders, [[of_a.as_str(), "a"], [of_b.as_str(), "b"]]);
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

#[test]
fn flows_name_both_ends_and_what_decided() {
    let (node, [a, b]) = scene();
    let to = address(&node, &b);
    assert!(!connects(&a.namespace, format!("{to}:81").parse().unwrap(), PATIENCE / 20));
    let words = [
        "flows",
        "--verdict",
        "dropped",
        "--port",
        "81",
        "--from",
        "shop/a",
        "--to",
        "shop/b",
        "--since",
        "1h",
    ];
    assert!(eventually(PATIENCE, || asked(&node, &words).1.contains(":81 (shop/b)")));
    let (_, text) = asked(&node, &words);
    let line = text.lines().next().unwrap();
    assert!(line.contains("dropped ingress-port (shop/web) tcp") && line.contains(" (shop/a) > "), "{line}");
    assert_eq!(asked(&node, &[&words[..], &["--last", "1"]].concat()).1.lines().count(), 1);
    let (_, nothing) = asked(&node, &["flows", "--port", "81", "--from", "shop/b"]);
    assert!(nothing.starts_with("No records."), "{nothing}");
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

#[test]
fn pictures_checks_and_an_archive_are_made_of_what_is_there() {
    let (node, [a, b]) = scene();
    let (code, text) = asked(&node, &["graph", "--network", "storage"]);
    assert_eq!(code, 0);
    assert!(
        text.contains("shop/storage (veth)\n")
            && text.contains("shop/b net1")
            && text.contains("ingress by shop/web"),
        "{text}"
    );
    let (_, svg) = asked(&node, &["graph", "--picture", "svg"]);
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
    let (code, top) = asked(&node, &["top", "--interval", "100ms", "-o", "name"]);
    assert_eq!((code, top.lines().count()), (0, 4), "{top}");
    assert_eq!(asked(&node, &["status", "--wait", "--for", "journal,dataplane", "--timeout", "10s"]).0, 0);

    let settings = settings_of_doctor(&node);
    let checked = |node: &Node| -> Value {
        serde_json::from_str(&asked(node, &["doctor", "--config", &settings, "-o", "json"]).1).unwrap()
    };
    let state = |checks: &Value, name: &str| -> Vec<String> {
        let checks = checks.as_array().unwrap().iter().filter(|check| check["check"] == name);
        checks.map(|check| check["state"].as_str().unwrap().to_owned()).collect()
    };
    let checks = checked(&node);
    for name in ["agent", "bpf file system", "pins", "journal"] {
        assert_eq!(state(&checks, name), ["ok"], "{name}: {checks:#}");
    }
    assert!(state(&checks, "readiness").iter().all(|state| state == "ok"), "{checks:#}");
    assert_eq!(state(&checks, "leases"), [""; 0], "{checks:#}");

    let archive = node.path("dump.tar.gz");
    let words = ["sysdump", "--file", archive.to_str().unwrap(), "--config", &settings, "-o", "json"];
    let (code, written) = asked(&node, &words);
    assert_eq!(code, 0, "{written}");
    let written: Value = serde_json::from_str(&written).unwrap();
    let left_out = written["left_out"].as_array().unwrap();
    assert!(!left_out.iter().any(|it| it.as_str().unwrap().starts_with("agent/")), "{written:#}");
    assert!(fs::metadata(&archive).unwrap().len() > 1000);
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

/// Writes a file with the settings for `doctor`.
pub(crate) fn settings_of_doctor(node: &Node) -> String {
    let settings = node.path("doctor.yaml");
    let text = format!(
        "source: {}\nrunDir: {}\nstateDir: {}\nbpffs: {}\n",
        node.path("source").display(),
        node.path("run").display(),
        node.path("state").display(),
        node.bpffs().display()
    );
    fs::write(&settings, text).unwrap();
    settings.to_str().unwrap().to_owned()
}

/// The two ends of a terminal: the first reads what is written to the second.
fn terminal() -> (File, OwnedFd) {
    let (mut outer, mut inner) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: the two descriptors are written to, and nothing is read through the other pointers, which may be null.
    let made = unsafe { libc::openpty(&raw mut outer, &raw mut inner, none, none.cast(), none.cast()) };
    assert_eq!(made, 0);
    // SAFETY: both were made above and belong to nobody else.
    unsafe { (File::from_raw_fd(outer), OwnedFd::from_raw_fd(inner)) }
}

#[test]
fn top_goes_on_in_a_terminal_until_it_is_interrupted() {
    const CLEAR: &str = "\x1b[2J\x1b[H";
    let (node, [a, b]) = scene();
    let (mut screen, inner) = terminal();
    let mut command = Command::new(executable("netattachctl").unwrap());
    command.arg("--socket").arg(node.socket()).args(["top", "--interval", "100ms", "--network", "storage"]);
    // SAFETY: between fork and exec only a system call is made. A shell has what it starts in the background ignore the signal.
    unsafe {
        command.pre_exec(|| match libc::signal(libc::SIGINT, libc::SIG_DFL) {
            libc::SIG_ERR => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut child = command.stdin(Stdio::null()).stdout(inner).stderr(Stdio::null()).spawn().unwrap();
    // Its end of the terminal is the last one.
    drop(command);
    let shown = Arc::new(Mutex::new(String::new()));
    let reader = std::thread::spawn({
        let shown = Arc::clone(&shown);
        move || {
            let mut buffer = [0; 4096];
            // The last end of a terminal that is closed is an error for the other.
            while let Ok(length @ 1..) = screen.read(&mut buffer) {
                shown.lock().unwrap().push_str(std::str::from_utf8(&buffer[..length]).unwrap());
            }
        }
    });
    let frames = || shown.lock().unwrap().matches(CLEAR).count();
    // The third one has begun: two are whole.
    assert!(eventually(PATIENCE, || frames() > 2), "{:?}", shown.lock().unwrap());
    assert_eq!(child.try_wait().unwrap(), None, "it goes on");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::INT.as_raw()));
    reader.join().unwrap();

    let text = shown.lock().unwrap().replace("\r\n", "\n");
    let mut frames = text.split(CLEAR);
    assert_eq!(frames.next(), Some(""));
    for frame in frames.take(2) {
        let lines: Vec<Vec<&str>> = frame.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][1..], ["every", "100ms,", "per", "second;", "Ctrl-C", "ends"], "{frame}");
        assert_eq!((lines[1].len(), lines.len()), (0, 5), "{frame}");
        assert_eq!(lines[2][..4], ["POD", "NETWORK", "INTERFACE", "IN-BIT/S"], "{frame}");
        let mut rows: Vec<[&str; 3]> = lines[3..].iter().map(|line| [line[0], line[1], line[2]]).collect();
        rows.sort_unstable();
        let expected = ["shop/a", "shop/b"].map(|pod| [pod, "shop/storage", "net1"]);
        assert_eq!(rows, expected, "{frame}");
    }
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

#[test]
fn status_waits_for_an_agent_that_is_still_to_come_and_no_longer_than_it_may() {
    let mut node = Node::new(&[]).unwrap();
    // No agent answers, and none starts.
    let began = Instant::now();
    assert_eq!(asked(&node, &["status", "--wait", "--timeout", "1s"]), (4, String::new()));
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());

    let mut waiting = Command::new(executable("netattachctl").unwrap());
    waiting.arg("--socket").arg(node.socket()).args(["status", "--wait", "--timeout", "60s"]);
    let mut waiting = waiting.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(waiting.try_wait().unwrap(), None, "it waits");
    node.start().unwrap();
    let output = waiting.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{text}");
    assert!(text.starts_with("netattachd ") && text.lines().next().unwrap().contains(": ready, "), "{text}");

    // An agent that answers and does not become ready.
    node.remove("default").unwrap();
    let unready = || asked(&node, &["status"]).0 == 1;
    assert!(eventually(PATIENCE, unready));
    let (code, text) = asked(&node, &["status", "--wait", "--timeout", "1s"]);
    assert_eq!((code, text.contains(": not ready, ")), (1, true), "{text}");
}

/// Runs `doctor` on the node, in a mount namespace with the node's `/sys`: returns its findings of these names, with
/// their remedies.
fn found_on_the_node(node: &Node, settings: &str, names: &[&str]) -> Vec<Value> {
    const SCRIPT: &str = "mount -t sysfs sysfs /sys && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", SCRIPT, "sh"]).arg(executable("netattachctl").unwrap());
    command.arg("--socket").arg(node.socket()).args(["doctor", "-o", "json", "--config", settings]);
    let output = node.namespace.run(|| command.output()).unwrap();
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    checks.into_iter().filter(|it| names.iter().any(|name| it["check"] == *name)).collect()
}

#[test]
fn the_doctor_finds_what_is_left_over() {
    const LINK: &str = "na0123456789abc";
    const ADDRESS: &str = "10.51.0.77";
    let (mut node, [a, b]) = scene();
    let settings = settings_of_doctor(&node);
    let found =
        |node: &Node| found_on_the_node(node, &settings, &["journal", "namespaces", "links", "leases"]);
    let journal = node.path("state/journal");
    let ok = |records: usize| json!({"check": "journal", "state": "ok", "detail": format!("{records} records in {}", journal.display())});
    let warning = |check: &str, detail: String, remedy: &str| json!({"check": check, "state": "warning", "detail": detail, "remedy": remedy});
    assert_eq!(found(&node), [ok(2)], "an agent's own things are none of these");

    let pools = node.ctl(&["pools", "--network", "storage"]).unwrap();
    let pool = Path::new(pools[0]["directory"].as_str().unwrap());
    let rows = node.ctl(&["attachments", "--pod", "shop/b"]).unwrap();
    let host_end = |row: &Value| row["host_interface"].as_str().unwrap().to_owned();
    let of_b: Vec<String> = rows.as_array().unwrap().iter().map(host_end).collect();
    // Leftovers of an agent, and objects of others with its names. No agent runs that would correct them.
    node.kill().unwrap();
    let lease = pool.join(ADDRESS);
    fs::write(&lease, "gone\r\neth0").unwrap();
    ip(&node.namespace, &["link", "add", LINK, "type", "bridge"]).unwrap();
    let record = journal.join("c-b@eth0.jsonl");
    let whole = fs::read(&record).unwrap();
    let mut damaged = whole.clone();
    let second_line = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    damaged[second_line + 60] ^= 1;
    fs::write(&record, &damaged).unwrap();
    let Pod { namespace, .. } = a;
    drop(namespace);

    let links = |detail: &str, names: &[&str], remedy: &str| {
        let mut names = names.to_vec();
        names.sort_unstable();
        warning("links", format!("{detail}: {}", names.join(", ")), remedy)
    };
    let others = [
        warning(
            "namespaces",
            "attached sandboxes whose namespace is gone: c-a (pod shop/a)".to_owned(),
            "a running agent detaches them within minutes (collectAfterSeconds); start it",
        ),
        warning(
            "leases",
            format!(
                "{}: addresses of containers without a record: {ADDRESS} of interface eth0 of container gone",
                pool.display()
            ),
            "a runtime that sends GC releases them, and containerd sends none; else, if no other plugin uses the directory, \
             remove the files of these addresses in it",
        ),
    ];
    let [gone, lease_of_gone] = &others;

    // A record that cannot be read may be that of a live pod, whose links are not to be removed.
    let all = found(&node);
    let damage = all[0]["detail"].as_str().unwrap().to_owned();
    let begins = format!("records that cannot be read: c-b ({} is damaged (line 2: ", record.display());
    assert!(damage.starts_with(&begins), "{damage}");
    let remedy = "put each file back as it was; else remove by hand what is left of the container (links, addresses), then the \
                  file, and have the DEL repeated: until then its pod cannot be deleted (docs/troubleshooting.md)";
    let of_b: Vec<&str> = of_b.iter().map(String::as_str).collect();
    let unclear = links(
        "links of netattach's without a record, or of one that cannot be read",
        &[&of_b[..], &[LINK]].concat(),
        "leave them until every record can be read: live pods may have them",
    );
    assert_eq!(all, [warning("journal", damage, remedy), gone.clone(), unclear, lease_of_gone.clone()]);

    // Its plan is whole, so its DEL succeeds.
    let mut damaged = whole.clone();
    let in_last_line = whole.len() - 4;
    damaged[in_last_line] ^= 1;
    fs::write(&record, &damaged).unwrap();
    let detail = format!("records with a damaged line behind their plan: c-b ({})", record.display());
    let remedy = "put each file back as it was, or delete its pod, which runs on meanwhile: DEL rolls back all that the plan \
                  names (docs/failure-and-restart.md)";
    let unclear = links(
        "links of netattach's without a record, or of one that cannot be read",
        &[LINK],
        "leave them until every record can be read: live pods may have them",
    );
    let expected = [warning("journal", detail, remedy), gone.clone(), unclear, lease_of_gone.clone()];
    assert_eq!(found(&node), expected);

    fs::write(&record, &whole).unwrap();
    let stray = links(
        "links of netattach's without a record",
        &[LINK],
        "if another agent with another stateDir runs here, nothing; else remove them with ip link delete",
    );
    assert_eq!(found(&node), [ok(2), gone.clone(), stray, lease_of_gone.clone()]);

    // As the remedies describe.
    ip(&node.namespace, &["link", "delete", LINK]).unwrap();
    fs::remove_file(&lease).unwrap();
    node.set("collectAfterSeconds", json!(1));
    node.start().unwrap();
    let is_collected = || node.ctl(&["attachments"]).unwrap().as_array().unwrap().len() == 2;
    assert!(eventually(PATIENCE, is_collected), "{:#}", node.ctl(&["attachments"]).unwrap());
    assert_eq!(found(&node), [ok(1)]);
    node.del(&b).success();
}

#[test]
fn without_an_agent_the_doctor_still_answers() {
    let (mut node, [a, b]) = scene();
    node.kill().unwrap();
    let settings = node.path("doctor.yaml");
    let text =
        format!("source: /\nstateDir: {}\nbpffs: {}\n", node.path("state").display(), node.bpffs().display());
    fs::write(&settings, text).unwrap();
    let (code, text) = asked(&node, &["doctor", "--config", settings.to_str().unwrap()]);
    assert_eq!(code, 1);
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
    assert!(line("agent").contains("FAILED"), "{text}");
    assert!(line("journal").contains("ok") && line("journal").contains("2 records"), "{text}");
    assert!(text.contains("remedy: start netattachd"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    node.start().unwrap();
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}

#[test]
fn two_sandboxes_of_the_test_reach_each_other_and_nothing_is_left_of_them() {
    let (node, [a, b]) = scene();
    let settings = node.path("test.yaml").display().to_string();
    std::fs::write(&settings, json!({"source": node.path("source")}).to_string()).unwrap();
    let (code, text) =
        asked(&node, &["test", "--network", "shop/storage", "--config", &settings, "-o", "json"]);
    let outcomes: Value = serde_json::from_str(&text).unwrap();
    let rows: Vec<[&str; 2]> = outcomes
        .as_array()
        .unwrap()
        .iter()
        .map(|it| [it["network"].as_str().unwrap(), it["what"].as_str().unwrap()])
        .collect();
    let storage = [["shop/storage", "IPv4 a to b"], ["shop/storage", "IPv4 b to a"]];
    assert!(storage.iter().all(|row| rows.contains(row)), "{outcomes:#}");
    assert!(outcomes.as_array().unwrap().iter().all(|it| it["passed"] == true) && code == 0, "{outcomes:#}");
    let policies: Vec<&str> = rows
        .iter()
        .filter(|row| row[0] == "shop/storage")
        .filter_map(|row| row[1].strip_prefix("policy: "))
        .collect();
    assert_eq!(
        policies,
        [
            "no ingress to b: a to b stopped",
            "no ingress to b: b to a let through",
            "ingress to b from a: a to b let through",
            "ingress to b from a: b to a let through",
            "no egress from b: a to b let through",
            "no egress from b: b to a stopped",
        ]
    );
    let manifests = || -> Vec<String> {
        let names = std::fs::read_dir(node.path("source")).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name.contains("test")).collect()
    };
    assert_eq!(manifests(), [""; 0]);
    let (_, left) = asked(&node, &["attachments", "-o", "name"]);
    assert_eq!(left, "shop/a/eth0\nshop/a/net1\nshop/b/eth0\nshop/b/net1\n");
    assert_eq!(asked(&node, &["test", "--network", "shop/nope"]).0, 3);
    for pod in [&a, &b] {
        node.del(pod).success();
    }
}
