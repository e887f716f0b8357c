//! netattach is removed from a node that keeps working: in the order of docs/remove.md.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::{WIRE, executable, ip};
use netattach_tests::privilege::with_only;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Node, Pod};
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

/// The capabilities of the Job of deploy/uninstall.
const CAPABILITIES: CapabilitySet = CapabilitySet::NET_ADMIN.union(CapabilitySet::SYS_ADMIN);

/// A node whose agent writes its configuration for the runtime beside that of another plugin, with its executables installed
/// as the image installs them.
fn node() -> Node {
    let mut node = Node::new(&[]).unwrap();
    let storage = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
    node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
    for name in ["a", "b"] {
        node.write(name, &pod(name, &json!({}), &json!("storage"))).unwrap();
    }
    node.set("cniConf", json!({"dir": node.path("net.d")}));
    node.set("collectAfterSeconds", json!(1));
    fs::create_dir(node.path("net.d")).unwrap();
    fs::write(node.path("net.d/10-other.conflist"), r#"{"name": "other", "plugins": [{"type": "other"}]}"#)
        .unwrap();
    let mut install = Command::new(executable("netattach-cni").unwrap());
    install.arg("install").arg(node.path("cni-bin")).args(["--copy", "--also=loopback"]);
    assert!(install.status().unwrap().success());
    node
}

fn configured(node: &Node) -> Vec<String> {
    let names =
        fs::read_dir(node.path("net.d")).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// `netattachctl uninstall` on the node, with the capabilities of the Job.
fn uninstall(node: &Node, more: &[&str]) -> Output {
    let mut command = Command::new(executable("netattachctl").unwrap());
    command.arg("--socket").arg(node.socket()).args(["uninstall", "-o", "json", "--bpffs"]).arg(node.bpffs());
    for (option, name) in
        [("--state-dir", "state"), ("--cni-conf-dir", "net.d"), ("--cni-bin-dir", "cni-bin")]
    {
        command.arg(option).arg(node.path(name));
    }
    command.args(more);
    node.namespace.run(|| with_only(CAPABILITIES, || Ok(command.output()?))).unwrap()
}

fn removed(node: &Node, more: &[&str]) -> Value {
    let output = uninstall(node, more);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(node: &Node) -> (Option<i32>, String) {
    let output = uninstall(node, &[]);
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn the_runtime_goes_back_to_the_other_plugin_pods_end_and_nothing_but_what_is_named_stays() {
    let mut node = node();
    node.start().unwrap();
    assert!(eventually(PATIENCE, || configured(&node) == ["00-netattach.conflist", "10-other.conflist"]));
    let (a, b) = (Pod::new("a").unwrap(), Pod::new("b").unwrap());
    node.add(&a).success();
    node.add(&b).success();

    // The other plugin attaches new pods, and the agent keeps serving the attached ones.
    node.stop().unwrap();
    node.set("cniConf", json!({"dir": node.path("net.d"), "remove": true}));
    node.start().unwrap();
    assert!(eventually(PATIENCE, || configured(&node) == ["10-other.conflist"]));
    node.check(&a).success();
    let status = node.ctl(&["status"]).unwrap();
    let condition =
        status["ready"].as_array().unwrap().iter().find(|it| it["condition"] == "CNI configuration").unwrap();
    let path = node.path("net.d/00-netattach.conflist");
    let kept_away = format!("{} is kept away by cniConf.remove: new pods are not attached", path.display());
    assert_eq!((&condition["met"], &condition["detail"]), (&json!(true), &json!(kept_away)));

    // A file that is restored is removed again; another program's stays.
    fs::write(&path, r#"{"netattach.dev/managed": true, "plugins": [{"type": "netattach"}]}"#).unwrap();
    assert!(eventually(PATIENCE, || configured(&node) == ["10-other.conflist"]));

    // The runtime sends their DEL to the other plugin. It is enough that they are gone.
    drop(a);
    assert!(eventually(PATIENCE, || node.ctl(&["attachments"]).unwrap().as_array().unwrap().len() == 2));
    node.stop().unwrap();
    let (code, said) = refused(&node);
    assert!(
        code == Some(5) && said.contains("pods are attached") && said.contains("shop/b;"),
        "{code:?} {said}"
    );
    node.start().unwrap();
    drop(b);
    assert!(eventually(PATIENCE, || node.ctl(&["attachments"]).unwrap() == json!([])));
    node.stop().unwrap();

    let paths = |names: &[&str]| names.iter().map(|name| node.path(name)).collect::<Vec<PathBuf>>();
    let stays = |name: &str, why: &str| json!({"what": node.path(name), "why": why});
    let free = "no address is taken there, but networks of others may use it";
    let plugin = "it is netattach's plugin under a name that configurations of others use: containerd calls loopback for every pod";
    let forwarding = "other programs of the node may need it; who had it switched on is not known";
    let expected = |dry: bool| {
        json!({
            "bpffs": node.bpffs(), "removed": true, "forced": false, "dry_run": dry, "configurations": [],
            "tables": [], "routes": [], "devices": [], "host_links": [], "bridges": ["br0"], "bridges_in_use": [],
            "state": paths(&["state/journal", "run/netattach.sock.lock", "run/network-status"]),
            "executables": paths(&["cni-bin/netattach", "cni-bin/netattach-cni"]),
            "stays": [
                {"what": "net/ipv4/ip_forward", "why": forwarding},
                {"what": "net/ipv6/conf/all/forwarding", "why": forwarding},
                stays("leases/@kube-system/default", free),
                stays("leases/@shop/storage", free),
                stays("cni-bin/loopback", plugin),
            ],
        })
    };
    let before = Snapshot::take(&node, &[]).unwrap();
    assert_eq!(removed(&node, &["--dry-run"]), expected(true));
    assert_eq!(Snapshot::take(&node, &[]).unwrap(), before, "a dry run");
    assert_eq!(removed(&node, &[]), expected(false));
    for gone in
        [node.path("state"), node.path("run"), node.bpffs().to_owned(), node.path("cni-bin/netattach")]
    {
        assert!(!gone.exists(), "{}", gone.display());
    }
    assert!(ip(&node.namespace, &["link", "show", "br0"]).is_err());
    assert_eq!(configured(&node), ["10-other.conflist"]);
    // Once more is no error: a Job may be repeated.
    let again = removed(&node, &[]);
    for key in ["configurations", "bridges", "state", "executables"] {
        assert_eq!(again[key], json!([]), "{key}");
    }
}

/// The former file sorts first, so the runtime would read it, and `cniConf.remove` would leave it.
#[test]
fn a_file_under_another_name_takes_the_place_of_the_former_one() {
    let mut node = node();
    node.start().unwrap();
    assert!(eventually(PATIENCE, || configured(&node) == ["00-netattach.conflist", "10-other.conflist"]));
    let dir = node.path("net.d");
    let renamed = |remove: bool| json!({"dir": dir, "name": "01-netattach.conflist", "remove": remove});
    node.stop().unwrap();
    let former = fs::read(node.path("net.d/00-netattach.conflist")).unwrap();
    node.set("cniConf", renamed(false));
    node.start().unwrap();
    assert!(eventually(PATIENCE, || configured(&node) == ["01-netattach.conflist", "10-other.conflist"]));

    // The agent was killed before it removed the former file.
    node.stop().unwrap();
    fs::write(node.path("net.d/00-netattach.conflist"), former).unwrap();
    node.set("cniConf", renamed(true));
    node.start().unwrap();
    assert!(eventually(PATIENCE, || configured(&node) == ["10-other.conflist"]));
}

/// With `--force`, it removes the runtime's file first, and keeps the files that a reinstalled agent needs.
#[test]
fn under_attached_pods_it_keeps_their_records_and_a_new_agent_detaches_them() {
    let mut node = node();
    node.start().unwrap();
    assert!(eventually(PATIENCE, || configured(&node).len() == 2));
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    // Another program's agent, or one with another socket: any holder of the state's lock.
    let state = fs::File::open(node.path("state")).unwrap();
    node.stop().unwrap();
    rustix::fs::flock(&state, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let (code, said) = refused(&node);
    assert!(code == Some(5) && said.contains("an agent may run: stop it first"), "{code:?} {said}");
    drop(state);
    let shown = removed(&node, &["--force"]);
    assert_eq!(shown["configurations"], json!([node.path("net.d/00-netattach.conflist")]));
    assert_eq!(configured(&node), ["10-other.conflist"]);
    assert_eq!(shown["bridges_in_use"], json!(["br0"]));
    let why = "pods attached: 1; their records say how they are detached, which an agent that is installed again does";
    let stays = shown["stays"].as_array().unwrap();
    assert!(stays.contains(&json!({"what": node.path("state"), "why": why})), "{stays:?}");
    let held = "addresses taken there: 1";
    assert!(stays.contains(&json!({"what": node.path("leases/@shop/storage"), "why": held})), "{stays:?}");
    node.start().unwrap();
    node.check(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// A parent outlasts its macvlans: programs that no agent maintains would drop the frames of later macvlans of
/// others.
#[test]
fn under_attached_macvlans_it_takes_the_programs_off_their_parent() {
    let mut node = node();
    node.add_wire().unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &config)).unwrap();
    node.write("c", &pod("c", &json!({}), &json!("lan"))).unwrap();
    // Links of tcx go with their pins.
    node.set("attach", json!("clsact"));
    node.start().unwrap();
    let c = Pod::new("c").unwrap();
    node.add(&c).success();
    node.stop().unwrap();
    let judged = || {
        let mut tc = Command::new("tc");
        tc.args(["filter", "show", "dev", WIRE, "ingress"]);
        let output = node.namespace.run(|| tc.output()).unwrap();
        String::from_utf8(output.stdout).unwrap().contains("na_par_from")
    };
    assert!(judged());
    assert_eq!(removed(&node, &["--force", "--dry-run"])["devices"], json!([WIRE]));
    assert!(judged());
    assert_eq!(removed(&node, &["--force"])["devices"], json!([WIRE]));
    assert!(!judged());
    // An agent that is installed again judges them again.
    node.start().unwrap();
    node.check(&c).success();
    node.del(&c).success();
    Snapshot::take(&node, &[&c]).unwrap().assert_nothing_is_left();
}
