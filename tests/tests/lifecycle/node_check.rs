//! `netattachd --check` on this machine: what an agent needs is there, and is missed without the rights to it.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use netattach_tests::Node;
use netattach_tests::node::executable;
use netattach_tests::privilege::with_only;
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

/// Exit code and report, and the directory of pins that it has used.
fn checked(node: &Node, kept: CapabilitySet, more: &[&str]) -> (i32, Value, PathBuf) {
    let mut command = Command::new(executable("netattachd").unwrap());
    command.args(["--check", "--output", "json", "--bpffs"]).arg(node.bpffs()).args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = node.namespace.run(|| with_only(kept, || Ok(command.spawn()?))).unwrap();
    let pins = node.bpffs().with_file_name(format!("netattach-check-{}", child.id()));
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    (output.status.code().unwrap(), report, pins)
}

/// The links of a node, as `ip` shows them.
fn links(node: &Node) -> String {
    let output = node.namespace.run(|| Command::new("ip").args(["-o", "link"]).output()).unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Names of what is there and of what is not, among what is needed.
fn needed(report: &Value) -> (Vec<&str>, Vec<&str>) {
    let rows = report["checks"].as_array().unwrap().iter().filter(|row| row["needed"] == true);
    let (there, lacking): (Vec<_>, Vec<_>) = rows.partition(|row| row["state"] == "ok");
    (names(&there), names(&lacking))
}

fn names<'r>(rows: &[&'r Value]) -> Vec<&'r str> {
    rows.iter().map(|row| row["what"].as_str().unwrap()).collect()
}

#[test]
fn a_node_that_will_do_is_told_so_and_nothing_is_left_on_it() {
    let node = Node::new(&[]).unwrap();
    let before = links(&node);
    // Those that docs/install.md gives it.
    let kept = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
    let (exit, report, pins) = checked(&node, kept, &["--default-network", "builtin"]);
    let (there, lacking) = needed(&report);
    assert_eq!((exit, &report["ok"], lacking), (0, &json!(true), vec![]), "{report:#}");
    for name in
        ["BPF file system", "netattach's programs", "veth", "nftables with xt_bpf", "nftables with nat"]
    {
        assert!(there.contains(&name), "{name}: {report:#}");
    }
    assert_eq!((pins.exists(), links(&node)), (false, before));
}

#[test]
fn without_its_rights_an_agent_would_lack_what_they_give() {
    let node = Node::new(&[]).unwrap();
    let (exit, report, _) = checked(&node, CapabilitySet::NET_ADMIN, &[]);
    let (_, lacking) = needed(&report);
    assert_eq!((exit, &report["ok"]), (1, &json!(false)));
    for name in ["privileges", "netattach's programs", "network namespaces"] {
        assert!(lacking.contains(&name), "{name}: {report:#}");
    }
    let privileges = &report["checks"][0];
    assert_eq!(privileges["state"], "missing");
    assert!(privileges["detail"].as_str().unwrap().contains("lacks CAP_SYS_ADMIN"), "{privileges}");
    assert!(!privileges["remedy"].as_str().unwrap().is_empty());
}
