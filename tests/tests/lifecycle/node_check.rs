//! `netattachd --check` on this machine: the features that an agent needs exist, and are reported as missing without
//! the rights to them.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use netattach_tests::Node;
use netattach_tests::node::executable;
use netattach_tests::privilege::with_only;
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{CapabilitySet, UnshareFlags, unshare_unsafe};
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

/// Returns the names of existing and of missing features, among the needed ones.
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
    // The capabilities in docs/install.md.
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

/// The command of the first container of the agent's pod on each node.
#[test]
fn a_bpf_file_system_is_mounted_where_there_is_none() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let daemon = executable("netattachd").unwrap();
    let mount = |path: &std::path::Path| {
        let output = Command::new(&daemon).arg("--mount-bpffs").arg(path).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    // On a thread with its own mount namespace, so that nothing is left on this machine whatever happens.
    let run = || {
        // SAFETY: neither memory nor descriptors are unshared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        let (first, said_first) = mount(&path);
        let kind = rustix::fs::statfs(&path).unwrap().f_type as u64;
        let options = std::fs::read_to_string("/proc/thread-self/mounts").unwrap();
        let options =
            options.lines().find(|line| line.split(' ').nth(1) == path.to_str()).unwrap().to_owned();
        let (second, said_second) = mount(&path);
        assert_eq!((first, kind, second), (0, 0xcafe_4a11, 0), "{said_first}{said_second}");
        assert!(said_first.contains("BPF file system mounted"), "{said_first}");
        assert!(said_second.contains("there is a BPF file system already"), "{said_second}");
        assert!(options.contains("rw,nosuid,nodev,noexec,") && options.contains("mode=700"), "{options}");
        let (third, said) = mount(&path.join("absent"));
        assert_eq!(third, 1, "{said}");
        assert!(said.contains("mount on") && said.contains("absent: No such file or directory"), "{said}");
    };
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    assert_ne!(rustix::fs::statfs(directory.path()).unwrap().f_type as u64, 0xcafe_4a11);
}
