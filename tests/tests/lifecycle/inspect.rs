//! What an operator asks a node: lists, pools, flows with names, pictures, checks, an archive. The real executables.

use std::fs;
use std::process::Command;

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::executable;
use netattach_tests::traffic::{PATIENCE, connects, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Exit code and standard output.
fn asked(node: &Node, words: &[&str]) -> (i32, String) {
    let mut command = Command::new(executable("netattachctl").unwrap());
    let output = command.arg("--socket").arg(node.socket()).args(words).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

/// `shop/a` and `shop/b` on `storage`, `shop/b` isolated but for port 80.
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

    let settings = node.path("doctor.yaml");
    let text = format!(
        "source: {}\nstateDir: {}\nbpffs: {}\n",
        node.path("source").display(),
        node.path("state").display(),
        node.bpffs().display()
    );
    fs::write(&settings, text).unwrap();
    let settings = settings.to_str().unwrap();
    let checked = |node: &Node| -> Value {
        serde_json::from_str(&asked(node, &["doctor", "--config", settings, "-o", "json"]).1).unwrap()
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
    let words = ["sysdump", "--file", archive.to_str().unwrap(), "--config", settings, "-o", "json"];
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
            "ingress to b from nobody: a to b stopped",
            "ingress to b from nobody: b to a let through",
            "ingress to b from a: a to b let through",
            "ingress to b from a: b to a let through",
            "egress from b to nobody: a to b let through",
            "egress from b to nobody: b to a stopped",
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
