//! The programs of a parent: by filters, by links, and a change from one to the other.

use std::collections::BTreeSet;
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use netattach::netlink::{Filter, Handle};
use netattach::spec::TcHook;
use netattach_tests::manifest::policy;
use netattach_tests::node::DEFAULT_NETWORK;
use netattach_tests::other_programs::{
    Verdict, attach_filter, attach_tcx, index_of, program, tc, tcx_programs,
};
use netattach_tests::traffic::Conversation;
use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// The programs on a parent, at ingress and at egress, in the order in which packets meet them.
#[derive(Debug, PartialEq, Eq)]
struct Running {
    filters: [Vec<String>; 2],
    links: [Vec<String>; 2],
}

impl Running {
    fn on(node: &Node, device: &str) -> Self {
        let index = index_of(&node.namespace, device).unwrap();
        let mut host = Handle::open_in(node.namespace.netns()).unwrap();
        let filters = [TcHook::Ingress, TcHook::Egress].map(|hook| {
            let found = host.find_filters(index, hook).unwrap();
            found.into_iter().filter_map(|filter| filter.name).collect()
        });
        let links = [TcHook::Ingress, TcHook::Egress]
            .map(|direction| tcx_programs(&node.namespace, index, direction).unwrap());
        Self { filters, links }
    }

    /// The expected state in that mode.
    fn by(attach: &str) -> Self {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let none = [Vec::new(), Vec::new()];
        match attach {
            "clsact" => {
                Self { filters: [names(&["na_par_from", "na_par_to"]), names(&["na_par_from"])], links: none }
            }
            _ => Self {
                filters: none,
                links: [names(&["na_par_in_from", "na_par_in_to"]), names(&["na_par_out"])],
            },
        }
    }
}

impl Scene {
    fn by(attach: &str) -> Self {
        Self::with(&[("attach", attach)], "bridge", &policies())
    }

    /// Checks that the programs are attached as expected in that mode, and none of the other mode's.
    fn assert_runs(&self, attach: &str) {
        assert_eq!(Running::on(&self.node, WIRE), Running::by(attach), "{attach}");
        assert_eq!(has_clsact(&self.node), attach == "clsact", "{attach}");
    }

    /// Removes the receivers' program from the parent, and in mode clsact the others with it.
    fn take_off(&self, attach: &str) {
        if attach == "clsact" {
            tc(&self.node.namespace, &format!("qdisc del dev {WIRE} clsact")).unwrap();
        } else {
            let index = index_of(&self.node.namespace, WIRE).unwrap();
            fs::remove_file(self.node.bpffs().join(format!("link/{index}_na_par_in_to"))).unwrap();
        }
    }

    fn rename(&self, from: &str, to: &str) {
        ip(&self.node.namespace, &["link", "set", from, "name", to]).unwrap();
    }
}

#[test]
fn the_programs_come_with_the_first_and_go_with_the_last_whoever_dies_meanwhile() {
    for attach in ["clsact", "tcx"] {
        let mut scene = Scene::by(attach);
        scene.assert_runs(attach);
        scene.node.kill().unwrap();
        assert!(!connects(scene.namespace(OTHER), at(SERVER, 80), SILENCE), "{attach}");
        scene.take_off(attach);
        scene.node.start().unwrap();
        scene.assert_runs(attach);
        for pod in &scene.pods {
            scene.node.check(pod).success();
        }
        assert_policies_hold(&scene);
        scene.node.kill().unwrap();
        scene.node.start().unwrap();
        scene.node.del(&scene.pods[0]).success();
        scene.node.del(&scene.pods[1]).success();
        scene.assert_runs(attach);
        scene.end();
    }
}

#[test]
fn what_somebody_takes_off_a_parent_is_put_back_in_its_place() {
    for attach in ["clsact", "tcx"] {
        let scene = Scene::by(attach);
        scene.take_off(attach);
        let put_back = || {
            let status = scene.node.ctl(&["status"]).unwrap();
            status["programs_put_back"] == json!(1) && Running::on(&scene.node, WIRE) == Running::by(attach)
        };
        assert!(eventually(PATIENCE * 2, put_back), "{attach}: {:?}", Running::on(&scene.node, WIRE));
        assert!(!connects(scene.namespace(OTHER), at(SERVER, 80), SILENCE), "{attach}");
        scene.end();
    }
}

/// A foreign `ingress` has the handle of `clsact`, and the kernel would run programs for sent packets where packets
/// are received. It stays; once it is removed, the next pod's ADD attaches all programs.
#[test]
fn a_parent_whose_programs_could_not_be_attached_gets_them_with_the_next_pod() {
    let scene = Scene::by("clsact");
    let Scene { node, pods, .. } = &scene;
    for pod in pods {
        node.del(pod).success();
    }
    let before = Snapshot::take(node, &[&pods[0]]).unwrap();
    tc(&node.namespace, &format!("qdisc add dev {WIRE} ingress")).unwrap();
    let (_, message) = node.add(&pods[0]).failure();
    let why = format!("{WIRE} has the queueing discipline \"ingress\" where egress programs need \"clsact\"");
    assert!(message.contains(&why), "{message}");
    let after = Snapshot::take(node, &[&pods[0]]).unwrap();
    assert_eq!((&after.pods, &after.dataplane), (&before.pods, &before.dataplane));
    assert_eq!(Running::on(node, WIRE).filters, [const { Vec::<String>::new() }; 2]);
    tc(&node.namespace, &format!("qdisc del dev {WIRE} ingress")).unwrap();
    for pod in pods {
        node.add(pod).success();
    }
    scene.assert_runs("clsact");
    scene.end();
}

/// Datagrams without a pause; whether any was ever answered.
struct Flood {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<(u64, u64)>,
}

impl Flood {
    fn start(from: &Namespace, to: SocketAddr) -> Self {
        let socket = from.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        socket.connect(to).unwrap();
        // The agent does not replace a program twice between two datagrams, and other processes get the processor.
        socket.set_read_timeout(Some(Duration::from_micros(200))).unwrap();
        let ending = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&ending);
        let thread = thread::spawn(move || {
            let (mut sent, mut answered) = (0, 0);
            while !over.load(Ordering::SeqCst) {
                sent += u64::from(socket.send(b"flood").is_ok());
                answered += u64::from(socket.recv(&mut [0; 16]).is_ok());
            }
            (sent, answered)
        });
        Self { ending, thread }
    }

    /// Returns how many datagrams were sent, and how many were answered.
    fn end(self) -> (u64, u64) {
        self.ending.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

#[test]
fn parents_change_over_from_one_mode_to_the_other_and_judge_all_the_while() {
    const OPEN: u16 = 80;
    const CLOSED: u16 = 81;
    let open = json!({
        "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "UDP", "port": OPEN}]}]
    });
    let mut scene = Scene::with(&[("attach", "clsact")], "bridge", &[("open", policy("open", "lan", &open))]);
    let _servers = [OPEN, CLOSED].map(|port| Echo::serve(scene.namespace(SERVER), at(SERVER, port)).unwrap());
    let floods = [CLIENT, OUTSIDE].map(|host| Flood::start(scene.namespace(host), at(SERVER, CLOSED)));
    let conversation = Conversation::start(scene.namespace(CLIENT), at(SERVER, OPEN)).unwrap();
    for attach in ["tcx", "clsact", "tcx", "clsact"] {
        scene.node.kill().unwrap();
        scene.node.set("attach", json!(attach));
        scene.node.start().unwrap();
        scene.assert_runs(attach);
        scene.node.check(&scene.pods[0]).success();
    }
    let (sent, lost) = conversation.end();
    assert!(sent > 10 && lost == 0, "{lost} of {sent} lost");
    for flood in floods {
        let (sent, answered) = flood.end();
        assert!(sent > 10 && answered == 0, "{answered} of {sent} passed");
    }
    scene.end();
}

/// A device in use that gets its first clsact stops for a moment. With tcx it gets none, and loses no packet.
#[test]
fn a_parent_in_use_is_not_stopped() {
    let scene = Scene::with(&[("attach", "tcx")], "bridge", &[]);
    for pod in &scene.pods {
        scene.node.del(pod).success();
    }
    ip(&scene.node.namespace, &["addr", "add", "10.52.0.1/24", "dev", WIRE]).unwrap();
    let far = Echo::serve(&scene.outside, at(OUTSIDE, 80)).unwrap();
    let conversation = Conversation::start(&scene.node.namespace, far.address()).unwrap();
    for _ in 0..5 {
        scene.node.add(&scene.pods[0]).success();
        scene.assert_runs("tcx");
        scene.node.del(&scene.pods[0]).success();
        assert!(!has_clsact(&scene.node));
    }
    let (sent, lost) = conversation.end();
    assert!(sent > 10 && lost == 0, "{lost} of {sent} lost");
    drop(far);
    scene.end();
}

#[test]
fn a_parent_is_the_same_by_another_name() {
    let mut scene = Scene::by("tcx");
    scene.rename(WIRE, "wire7");
    assert_eq!(Running::on(&scene.node, "wire7"), Running::by("tcx"));
    scene.node.kill().unwrap();
    scene.node.start().unwrap();
    assert_eq!(Running::on(&scene.node, "wire7"), Running::by("tcx"));
    assert_policies_hold(&scene);
    scene.rename("wire7", WIRE);
    scene.end();
}

#[test]
fn links_go_with_a_parent_that_is_gone() {
    let mut scene = Scene::by("tcx");
    let links = |scene: &Scene| -> BTreeSet<String> {
        let pins = Snapshot::take(&scene.node, &[]).unwrap().pins;
        pins.into_iter().filter(|pin| pin.contains("/link/")).collect()
    };
    assert_eq!(links(&scene).iter().filter(|pin| pin.contains("na_par_")).count(), 3);
    scene.node.kill().unwrap();
    ip(&scene.node.namespace, &["link", "del", WIRE]).unwrap();
    scene.node.start().unwrap();
    for pod in &scene.pods {
        scene.node.del(pod).success();
    }
    assert_eq!(links(&scene), BTreeSet::new());
    Snapshot::take(&scene.node, &scene.pods.each_ref()).unwrap().assert_nothing_is_left();
}

/// Programs of others that pass everything, like those of a cluster's primary network on the node's card.
#[test]
fn programs_of_others_on_a_parent_let_nothing_pass_by_ours() {
    let scene = Scene::by("clsact");
    let Scene { node, pods, .. } = &scene;
    let index = index_of(&node.namespace, WIRE).unwrap();
    let pass = || {
        let both = [true, false];
        both.map(|ingress| {
            attach_tcx(&node.namespace, index, ingress, &program(Verdict::Pass).unwrap()).unwrap()
        })
    };
    let ours_first = || {
        let Running { filters, links } = Running::on(node, WIRE);
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let expected =
            [names(&["na_par_in_from", "na_par_in_to", "foreign"]), names(&["na_par_out", "foreign"])];
        filters.iter().all(Vec::is_empty) && links == expected
    };
    // They are attached while there are pods.
    let links = pass();
    let put_back = || node.ctl(&["status"]).unwrap()["programs_put_back"] == json!(1) && ours_first();
    assert!(eventually(PATIENCE * 4, put_back), "{:?}", Running::on(node, WIRE));
    assert_policies_hold(&scene);
    for pod in pods {
        node.check(pod).success();
    }
    // They are there before the first pod.
    for pod in pods {
        node.del(pod).success();
    }
    assert_eq!(Running::on(node, WIRE).links, [(); 2].map(|()| vec!["foreign".to_owned()]));
    for pod in pods {
        node.add(pod).success();
    }
    assert!(ours_first(), "{:?}", Running::on(node, WIRE));
    drop(links);
    assert!(!has_clsact(node));
    scene.end();
}

/// A filter of others, of BPF or of classic BPF, that is placed before ours.
#[test]
fn filters_that_others_put_before_those_of_a_parent_come_behind_them() {
    let scene = Scene::by("clsact");
    let Scene { node, .. } = &scene;
    // Both exist when the agent checks: it would place ours before the first while the second is attached.
    let agent = Pid::from_raw(node.agent_pid().cast_signed()).unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    attach_filter(&node.namespace, WIRE, true, 1, Verdict::Pass).unwrap();
    let added = node.namespace.run(|| {
        let place = ["filter", "add", "dev", WIRE, "egress", "prio", "1", "handle", "1"];
        let pass = ["bpf", "bytecode", "1,6 0 0 4294967295", "flowid", "1:1"];
        Command::new("tc").args(place).args(pass).status().unwrap()
    });
    assert!(added.success());
    let index = index_of(&node.namespace, WIRE).unwrap();
    let ours = || {
        [TcHook::Ingress, TcHook::Egress].map(|hook| {
            let mut host = Handle::open_in(node.namespace.netns()).unwrap();
            let found = host.find_filters(index, hook).unwrap();
            let is_ours = |name: String| name.starts_with("na_par_");
            found.into_iter().map(|it| it.name.is_some_and(is_ours)).collect::<Vec<_>>()
        })
    };
    assert_eq!(ours().map(|it| it[0]), [false, false], "{:?}", ours());
    kill_process(agent, Signal::CONT).unwrap();
    let put_back = || {
        let asked = node.ctl(&["status"]).unwrap();
        asked["programs_put_back"] == json!(1) && ours() == [vec![true, true, false], vec![true, false]]
    };
    assert!(eventually(PATIENCE * 4, put_back), "{:?}", ours());
    assert_policies_hold(&scene);
    tc(&node.namespace, &format!("filter del dev {WIRE} ingress prio 1 handle 1 bpf")).unwrap();
    tc(&node.namespace, &format!("filter del dev {WIRE} egress prio 1 handle 1 bpf")).unwrap();
    scene.end();
}

/// The state after an agent was killed while it moved its filters before those of others: every packet would be
/// judged twice.
#[test]
fn a_filter_that_was_to_stand_in_for_ours_goes() {
    let scene = Scene::by("clsact");
    let Scene { node, .. } = &scene;
    let index = index_of(&node.namespace, WIRE).unwrap();
    let program = program(Verdict::Next).unwrap();
    let (hook, handle) = (TcHook::Ingress, 0xee61_0001);
    let spare = Filter { hook, handle, class: 0, name: "na_par_from", program: program.as_fd() };
    let mut host = Handle::open_in(node.namespace.netns()).unwrap();
    host.ensure_filters(index, &[spare]).unwrap();
    let is_gone = || {
        let asked = node.ctl(&["status"]).unwrap();
        asked["programs_put_back"] == json!(1) && Running::on(node, WIRE) == Running::by("clsact")
    };
    assert!(eventually(PATIENCE * 4, is_gone), "{:?}", Running::on(node, WIRE));
    // Removed with the last pod, whichever agent left it.
    host.ensure_filters(index, &[spare]).unwrap();
    scene.end();
}

/// Others' filters on a parent stay, and so does the queueing discipline that holds them.
#[test]
fn filters_of_others_on_the_parent_stay() {
    for attach in ["clsact", "tcx"] {
        let mut node = Node::new(&[]).unwrap();
        node.set("attach", json!(attach));
        node.add_wire().unwrap();
        let lan = json!({"cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
        node.write("lan", &network(NAMESPACE, "lan", &lan)).unwrap();
        node.write("server", &pod("server", &json!({"app": "server"}), &json!("lan"))).unwrap();
        let deny = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
        node.write("policy", &policy("deny", &format!("{DEFAULT_NETWORK}, {NAMESPACE}/lan"), &deny)).unwrap();
        node.start().unwrap();
        let shown = || {
            let words = ["filter", "show", "dev", WIRE, "ingress"];
            let output = node.namespace.run(|| Command::new("tc").args(words).output().unwrap());
            String::from_utf8(output.stdout).unwrap()
        };
        tc(&node.namespace, &format!("qdisc add dev {WIRE} clsact")).unwrap();
        let pass = ["bpf", "bytecode", "1,6 0 0 4294967295", "flowid", "1:1"];
        let added = node.namespace.run(|| {
            let place = ["filter", "add", "dev", WIRE, "ingress", "prio", "1", "handle", "1"];
            Command::new("tc").args(place).args(pass).status().unwrap()
        });
        assert!(added.success());
        let before = shown();
        let server = Pod::new("server").unwrap();
        node.add(&server).success();
        let ours = ["na_par_from", "na_par_to"].map(|name| shown().contains(name));
        assert_eq!(ours, [attach == "clsact"; 2]);
        node.del(&server).success();
        assert_eq!(shown(), before);
        assert!(has_clsact(&node));
    }
}
