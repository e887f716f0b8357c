//! A representor as the node's end of a device in a pod, simulated by a veth: its other end on the node stands for
//! the representor. No emulated card has VFs with both representors and packets, so the record of an attachment marks
//! it as one: from there on, the agent handles it like a VF's.

use std::fs;

use netattach::netlink::{Filter, Handle};
use netattach::spec::TcHook;
use netattach_tests::other_programs::{Verdict, program};
use netattach_tests::record::rewritten;
use netattach_tests::traffic::datagram;

use super::*;

const DEVICE: &str = "vf0";
const REPRESENTOR: &str = "rep0";
const ADDRESS: &str = "10.60.0.2";
/// The version of records with representors.
const VERSION: &str = "\"version\":10";

struct Scene {
    node: Node,
    server: Pod,
}

impl Scene {
    /// Returns a pod with the device, on whose other end the agent knows a representor that was down and had an MTU
    /// of 1400 when it took the device.
    fn new() -> Self {
        let mut node = Node::new(&[]).unwrap();
        ip(&node.namespace, &["link", "add", DEVICE, "type", "veth", "peer", "name", REPRESENTOR]).unwrap();
        let ipam = json!({"type": "static", "addresses": [{"address": format!("{ADDRESS}/24")}]});
        let keys = json!({"cniVersion": "1.0.0", "type": "host-device", "device": DEVICE, "ipam": ipam});
        node.write("vf", &network(NAMESPACE, "vf", &keys)).unwrap();
        node.write("server", &pod("server", &json!({"app": "server"}), &json!("vf"))).unwrap();
        let rules = json!({
            "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"protocol": "UDP", "port": 80}]}]
        });
        node.write("policy", &policy("only-80", "vf", &rules)).unwrap();
        // Programs in the pod can be removed in this mode; the record has to show that.
        node.set("attach", json!("clsact"));
        node.start().unwrap();
        let server = Pod::new("server").unwrap();
        node.add(&server).success();
        node.kill().unwrap();
        tc(&server.namespace, "qdisc del dev net1 clsact").unwrap();
        ip(&node.namespace, &["link", "set", REPRESENTOR, "up"]).unwrap();
        ip(&node.namespace, &["address", "add", "10.60.0.1/24", "dev", REPRESENTOR]).unwrap();
        let scene = Self { node, server };
        scene.tell_of_representor();
        scene
    }

    fn tell_of_representor(&self) {
        let name = format!("{}@eth0.jsonl", self.server.container);
        let path = self.node.path("state/journal").join(&name);
        let text = fs::read_to_string(&path).unwrap().replace("\"version\":7", VERSION);
        let link = Handle::open_in(self.node.namespace.netns()).unwrap().link(REPRESENTOR).unwrap();
        let device = json!({
            "name": REPRESENTOR, "index": link.index, "mac": link.mac.unwrap().to_string(), "mtu": link.mtu
        });
        let claimed = json!({"device": device, "mtu": 1400, "up": false}).to_string();
        let id = format!("\"id\":{{\"name\":\"{DEVICE}\"}}");
        let edited = rewritten(&name, &text, |line| {
            if line.contains("\"output\":\"claimed\"") {
                return format!("{},\"representor\":{claimed}}}]}}", line.strip_suffix("}]}").unwrap());
            }
            line.replace(&id, &format!("{id},\"switchdev\":true"))
        });
        assert_eq!(
            [VERSION, "\"representor\":", "\"switchdev\":true"].map(|it| edited.matches(it).count()),
            [2, 1, 1]
        );
        fs::write(&path, edited).unwrap();
    }

    /// The filters on the representor, by hook: their programs' names and the kernel's ids of these.
    fn filters(&self) -> [Vec<(String, u32)>; 2] {
        let mut node = Handle::open_in(self.node.namespace.netns()).unwrap();
        let index = node.link(REPRESENTOR).unwrap().index;
        [TcHook::Ingress, TcHook::Egress].map(|hook| {
            let found = node.find_filters(index, hook).unwrap().into_iter();
            found.filter_map(|filter| Some((filter.name?, filter.program_id?))).collect()
        })
    }

    /// Moves the device back to the node, like the kernel when a pod has ended.
    fn bring_home(&self) {
        let node = self.node.namespace.task();
        let words = ["link", "set", "net1", "netns", &node, "name", DEVICE];
        ip(&self.server.namespace, &words).unwrap();
    }

    /// The names of the programs on the representor, and in the pod, by hook.
    fn programs(&self) -> [Vec<String>; 4] {
        let named = |namespace: &Namespace, device: &str, hook| {
            let mut handle = Handle::open_in(namespace.netns()).unwrap();
            let index = handle.link(device).unwrap().index;
            let found = handle.find_filters(index, hook).unwrap();
            found.into_iter().filter_map(|filter| filter.name).collect()
        };
        let (node, pod) = (&self.node.namespace, &self.server.namespace);
        [
            named(node, REPRESENTOR, TcHook::Ingress),
            named(node, REPRESENTOR, TcHook::Egress),
            named(pod, "net1", TcHook::Ingress),
            named(pod, "net1", TcHook::Egress),
        ]
    }
}

/// Rows: SRV-switchdev.
#[test]
fn a_policy_holds_on_a_representor_and_nothing_of_it_stays_there() {
    let mut scene = Scene::new();
    let served = |port: u16| {
        Echo::serve(&scene.server.namespace, format!("{ADDRESS}:{port}").parse().unwrap()).unwrap()
    };
    let [open, closed] = [80, 81].map(served);
    scene.node.start().unwrap();
    for _ in 0..2 {
        let [from_pod, to_pod, nothing, neither] = scene.programs();
        assert_eq!([from_pod.len(), to_pod.len(), nothing.len(), neither.len()], [1, 1, 0, 0]);
        assert!(datagram(&scene.node.namespace, open.address(), PATIENCE).unwrap());
        assert!(!datagram(&scene.node.namespace, closed.address(), SILENCE).unwrap());
        let row = row(&scene.node, "server");
        let told = ["enforcement", "host_interface"].map(|key| row[key].clone());
        assert_eq!(told, [json!("full"), json!(REPRESENTOR)], "{row:#}");
        scene.node.check(&scene.server).success();
        // The next agent adopts the state.
        scene.node.kill().unwrap();
        scene.node.start().unwrap();
    }
    // If programs of others were taken for ours, they would be missing here.
    tc(&scene.node.namespace, &format!("qdisc del dev {REPRESENTOR} clsact")).unwrap();
    assert!(eventually(PATIENCE, || scene.programs()[0].len() == 1), "they are put back");
    scene.node.del(&scene.server).success();
    let mut node = Handle::open_in(scene.node.namespace.netns()).unwrap();
    let after = node.link(REPRESENTOR).unwrap();
    assert_eq!((after.up, after.mtu), (false, 1400), "as it was before the device was taken");
    for hook in [TcHook::Ingress, TcHook::Egress] {
        assert_eq!(node.find_filters(after.index, hook).unwrap(), []);
    }
    // The qdisc stays, as it is not known who created it.
    tc(&scene.node.namespace, &format!("qdisc del dev {REPRESENTOR} clsact")).unwrap();
    assert!(node.find_link(DEVICE).unwrap().is_some());
    // It belongs to the card: the next pod finds it.
    scene.node.add(&scene.server).success();
    scene.node.del(&scene.server).success();
}

/// An agent that starts adopts existing programs: running ones are not attached again, and missing ones are
/// reattached before it serves.
///
/// Rows: SRV-switchdev.
#[test]
fn the_next_agent_takes_over_the_programs_of_a_representor() {
    let mut scene = Scene::new();
    let served = |port: u16| {
        Echo::serve(&scene.server.namespace, format!("{ADDRESS}:{port}").parse().unwrap()).unwrap()
    };
    let [open, closed] = [80, 81].map(served);
    scene.node.start().unwrap();
    let before = scene.filters();
    assert_eq!(before.each_ref().map(Vec::len), [1, 1]);
    scene.node.kill().unwrap();
    // They hold without an agent.
    assert!(datagram(&scene.node.namespace, open.address(), PATIENCE).unwrap());
    assert!(!datagram(&scene.node.namespace, closed.address(), SILENCE).unwrap());
    scene.node.start().unwrap();
    assert_eq!(scene.filters(), before);
    scene.node.check(&scene.server).success();
    // Another process removes them meanwhile.
    scene.node.kill().unwrap();
    tc(&scene.node.namespace, &format!("qdisc del dev {REPRESENTOR} clsact")).unwrap();
    assert!(datagram(&scene.node.namespace, closed.address(), PATIENCE).unwrap(), "nothing judges");
    scene.node.start().unwrap();
    let names = |filters: [Vec<(String, u32)>; 2]| -> [Vec<String>; 2] {
        filters.map(|hook| hook.into_iter().map(|(name, _)| name).collect())
    };
    let expected = names(before);
    assert_eq!(names(scene.filters()), expected);
    assert!(datagram(&scene.node.namespace, open.address(), PATIENCE).unwrap());
    assert!(!datagram(&scene.node.namespace, closed.address(), SILENCE).unwrap());
    let row = row(&scene.node, "server");
    assert_eq!(
        ["enforcement", "host_interface"].map(|key| row[key].clone()),
        [json!("full"), json!(REPRESENTOR)]
    );
    // It restores the properties that an adopted device had before the first agent.
    scene.node.del(&scene.server).success();
    let after = Handle::open_in(scene.node.namespace.netns()).unwrap().link(REPRESENTOR).unwrap();
    assert_eq!((after.up, after.mtu), (false, 1400));
    assert_eq!(scene.filters(), [Vec::new(), Vec::new()]);
}

/// The programs would drop packets of the next holder of the VF.
///
/// Rows: SRV-stray.
#[test]
fn programs_on_a_representor_go_with_a_record_that_is_lost() {
    let mut scene = Scene::new();
    scene.node.start().unwrap();
    scene.node.kill().unwrap();
    let record = format!("state/journal/{}@eth0.jsonl", scene.server.container);
    fs::remove_file(scene.node.path(&record)).unwrap();
    let filters = scene.filters();
    assert_eq!(filters.each_ref().map(Vec::len), [1, 1]);
    // The end of a veth is deleted with its pod, and passes no packets. A representor shows no other end, like one
    // whose VF is on the node.
    scene.node.start().unwrap();
    assert_eq!(scene.filters(), filters);
    scene.node.kill().unwrap();
    scene.bring_home();
    scene.node.start().unwrap();
    assert_eq!(scene.filters(), [Vec::new(), Vec::new()]);
}

/// Rows: SRV-stray.
#[test]
fn uninstall_takes_programs_off_a_representor() {
    let mut scene = Scene::new();
    scene.node.start().unwrap();
    scene.node.stop().unwrap();
    scene.bring_home();
    let [bpffs, state, conf] =
        [scene.node.bpffs().to_owned(), scene.node.path("state"), scene.node.path("net.d")]
            .map(|path| path.to_string_lossy().into_owned());
    let words = ["uninstall", "--force", "--bpffs", &bpffs, "--state-dir", &state, "--cni-conf-dir", &conf];
    let uninstalled =
        |more: &[&str]| scene.node.namespace.run(|| scene.node.ctl(&[&words[..], more].concat())).unwrap();
    assert_eq!(uninstalled(&["--dry-run"])["devices"], json!([REPRESENTOR]));
    assert_eq!(scene.filters().map(|hook| hook.len()), [1, 1]);
    assert_eq!(uninstalled(&[])["devices"], json!([REPRESENTOR]));
    assert_eq!(scene.filters(), [Vec::new(), Vec::new()]);
}

/// The kernel gives the first filter of a priority the handle that ours have on nodes' ends.
#[test]
fn a_filter_of_others_with_the_number_of_ours_is_told_of_and_stays() {
    let mut scene = Scene::new();
    let mut node = Handle::open_in(scene.node.namespace.netns()).unwrap();
    let index = node.link(REPRESENTOR).unwrap().index;
    let program = program(Verdict::Next).unwrap();
    let other =
        Filter { hook: TcHook::Ingress, handle: 1, class: 0, name: "other", program: program.as_fd() };
    node.ensure_filters(index, &[other]).unwrap();
    let mut names = || {
        let found = node.find_filters(index, TcHook::Ingress).unwrap();
        found.into_iter().filter_map(|filter| filter.name).collect::<Vec<_>>()
    };
    scene.node.start().unwrap();
    let told = "has priority 1 and handle 0x1";
    let is_told = || scene.node.whole_status().unwrap().to_string().contains(told);
    assert!(eventually(PATIENCE, is_told), "{:#}", scene.node.whole_status().unwrap());
    assert_eq!(names(), ["other"]);
    scene.node.del(&scene.server).success();
    assert_eq!(names(), ["other"]);
}

/// Rows: SRV-switchdev.
#[test]
fn a_representor_that_is_gone_is_reported_until_its_pod_is_detached() {
    let mut scene = Scene::new();
    scene.node.start().unwrap();
    ip(&scene.node.namespace, &["link", "del", REPRESENTOR]).unwrap();
    let lost = "the representor of its VF is gone: the card's mode was changed, its driver reloaded, or its VFs recreated";
    let is_told = || scene.node.whole_status().unwrap().to_string().contains(lost);
    assert!(eventually(PATIENCE, is_told), "{:#}", scene.node.whole_status().unwrap());
    assert_ne!(scene.node.check(&scene.server).exit, 0);
    scene.node.del(&scene.server).success();
    assert!(eventually(PATIENCE, || !is_told()));
}
