//! Attachment of the programs: by clsact or tcx, beside other agents' programs, and after their removal.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use netattach::netlink::{Filter, Handle};
use netattach::spec::TcHook;
use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::other_programs::{
    Verdict, attach_filter, attach_tcx, index_of, program, tc, tcx_programs,
};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Conversation, Echo, PATIENCE, SILENCE, datagram, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// The port that the policy allows, and one that it denies.
const OPEN: u16 = 80;
const CLOSED: u16 = 81;

/// A pod reachable on one port over its routed network, and another pod.
struct Scene {
    node: Node,
    server: Pod,
    client: Pod,
    _echoes: [Echo; 2],
}

impl Scene {
    fn new(attach: &str) -> Self {
        let mut node = Node::new(&[]).unwrap();
        node.set("attach", json!(attach));
        let config =
            json!({"cniVersion": "1.0.0", "type": "veth", "ipam": node.host_local(&["10.51.0.0/24"])});
        node.write("storage", &network(NAMESPACE, "storage", &config)).unwrap();
        for name in ["server", "client"] {
            node.write(name, &pod(name, &json!({"app": name}), &json!("storage"))).unwrap();
        }
        let rules = json!({
            "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"protocol": "UDP", "port": OPEN}]}]
        });
        node.write("rules", &policy("rules", "storage", &rules)).unwrap();
        node.start().unwrap();
        let [server, client] = ["server", "client"].map(|name| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        });
        let echoes = [OPEN, CLOSED].map(|port| Echo::serve(&server.namespace, at(port)).unwrap());
        Self { node, server, client, _echoes: echoes }
    }

    /// The output of netattachctl for a pod's routed interface.
    fn routed(&self, pod: &Pod) -> Value {
        let attachments = self.node.ctl(&["attachments", "--pod", &format!("{NAMESPACE}/{}", pod.name)]);
        let of = |row: &&Value| row["ifname"] == json!("net1");
        attachments.unwrap().as_array().unwrap().iter().find(of).unwrap().clone()
    }

    /// The node's end of a pod's routed interface.
    fn device(&self, pod: &Pod) -> String {
        self.routed(pod)["host_interface"].as_str().unwrap().to_owned()
    }

    /// Waits until the server's interface has this state on the fast path, where packets bypass the hooks of the
    /// receiver's device.
    fn await_fast_path(&self, wanted: &str) {
        let mut last = Value::Null;
        let stands = || {
            last = self.routed(&self.server)["fast_path"]["state"].clone();
            last == json!(wanted)
        };
        assert!(eventually(PATIENCE * 4, stands), "{last}, not {wanted}");
    }

    fn open_port_answers(&self) -> bool {
        datagram(&self.client.namespace, at(OPEN), PATIENCE).unwrap()
    }

    fn closed_port_answers(&self) -> bool {
        datagram(&self.client.namespace, at(CLOSED), SILENCE).unwrap()
    }

    /// Checks that the policy is enforced: allowed traffic arrives, and no other.
    fn assert_judged(&self, what: &str) {
        assert!(self.open_port_answers(), "{what}: the open port");
        assert!(!self.closed_port_answers(), "{what}: the closed port");
    }

    /// Whether the programs on the server's end run in that mode, and in no other.
    fn runs_by(&self, mode: &str) -> bool {
        let index = index_of(&self.node.namespace, &self.device(&self.server)).unwrap();
        let mut host = Handle::open_in(self.node.namespace.netns()).unwrap();
        let is_ours = |name: &str| name.starts_with("na_");
        let hooks = [TcHook::Ingress, TcHook::Egress];
        let filters = hooks.map(|hook| {
            let found = host.find_filters(index, hook).unwrap();
            found.iter().filter_map(|it| it.name.as_deref()).any(is_ours)
        });
        let links = hooks.map(|hook| {
            let found = tcx_programs(&self.node.namespace, index, hook).unwrap();
            found.first().is_some_and(|name| is_ours(name))
        });
        (filters, links) == ([mode == "clsact"; 2], [mode == "tcx"; 2])
    }

    fn mode(&self) -> Value {
        self.node.ctl(&["status"]).unwrap()["attach_mode"].clone()
    }

    fn end(self) {
        for pod in [&self.server, &self.client] {
            self.node.del(pod).success();
        }
        let after = Snapshot::take(&self.node, &[&self.server, &self.client]).unwrap();
        after.assert_nothing_is_left();
        assert!(!after.pins.iter().any(|pin| pin.contains("/link/")), "{:?}", after.pins);
    }
}

fn at(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 51, 0, 2], port))
}

#[test]
fn attachments_by_tcx_are_attached_checked_adopted_and_taken_back() {
    let mut scene = Scene::new("tcx");
    assert_eq!(scene.mode(), json!("tcx"));
    scene.assert_judged("attached");
    for pod in [&scene.server, &scene.client] {
        scene.node.check(pod).success();
    }
    let device = index_of(&scene.node.namespace, &scene.device(&scene.server)).unwrap();
    let pin = |hook: &str| scene.node.bpffs().join("link").join(format!("{device}_{hook}"));
    let pins = ["na_from_pod", "na_to_pod"].map(pin);
    assert!(pins.iter().all(|pin| pin.exists()), "{pins:?}");

    // Adding and removing a qdisc does not affect a link.
    let name = scene.device(&scene.server);
    tc(&scene.node.namespace, &format!("qdisc add dev {name} clsact")).unwrap();
    tc(&scene.node.namespace, &format!("qdisc del dev {name} clsact")).unwrap();
    scene.assert_judged("after a qdisc");

    scene.node.kill().unwrap();
    scene.assert_judged("without an agent");
    // A link that is pinned under the name of another device, which is gone.
    let gone = scene.node.bpffs().join("link/4000000_na_to_pod");
    std::fs::rename(&pins[1], &gone).unwrap();
    scene.node.start().unwrap();
    assert_eq!((gone.exists(), pins[1].exists()), (false, true));
    scene.assert_judged("adopted");
    scene.node.check(&scene.server).success();
    assert_eq!(scene.node.ctl(&["status"]).unwrap()["programs_put_back"], json!(0), "it ran all the while");
    let log = scene.node.stop().unwrap();
    let troubles: Vec<&str> = log.lines().filter(|line| !line.contains(" INFO ")).collect();
    assert_eq!(troubles, [""; 0], "{log}");
    scene.node.start().unwrap();
    scene.end();
}

#[test]
fn a_link_that_is_taken_away_is_put_back() {
    let scene = Scene::new("tcx");
    let device = index_of(&scene.node.namespace, &scene.device(&scene.server)).unwrap();
    std::fs::remove_file(scene.node.bpffs().join(format!("link/{device}_na_to_pod"))).unwrap();
    let put_back = || scene.node.ctl(&["status"]).is_ok_and(|status| status["programs_put_back"] == json!(1));
    assert!(eventually(PATIENCE * 4, put_back));
    scene.assert_judged("put back");
    scene.node.check(&scene.server).success();
    scene.end();
}

#[test]
fn attached_pods_change_over_from_one_mode_to_the_other_without_a_loss() {
    let mut scene = Scene::new("clsact");
    let conversation = Conversation::start(&scene.client.namespace, at(OPEN)).unwrap();
    for mode in ["tcx", "clsact", "tcx", "auto"] {
        scene.node.kill().unwrap();
        scene.node.set("attach", json!(mode));
        scene.node.start().unwrap();
        assert_eq!(scene.mode(), json!(if mode == "auto" { "clsact" } else { mode }));
        scene.assert_judged(mode);
        scene.node.check(&scene.server).success();
        let links = scene.node.bpffs().join("link");
        let count = std::fs::read_dir(links).map_or(0, Iterator::count);
        // Two hooks of two interfaces of two pods.
        assert_eq!(count, if mode == "tcx" { 8 } else { 0 });
    }
    let (sent, lost) = conversation.end();
    assert!(sent > 10 && lost == 0, "{lost} of {sent} lost");
    scene.end();
}

/// In both modes: other agents' programs behind ours run for packets that pass, and change nothing for dropped ones.
#[test]
fn programs_of_others_run_after_ours_and_neither_cuts_the_other_out() {
    for mode in ["clsact", "tcx"] {
        let scene = Scene::new(mode);
        let (name, namespace) = (scene.device(&scene.server), &scene.node.namespace);
        let index = index_of(namespace, &name).unwrap();
        let filtered = |verdict| {
            // The first filter creates the qdisc if ours does not need one; otherwise it exists already.
            let _ = tc(namespace, &format!("qdisc add dev {name} clsact"));
            attach_filter(namespace, &name, false, 2, verdict).unwrap();
            scene.await_fast_path("programs");
        };
        scene.await_fast_path("on");
        for verdict in [Verdict::Next, Verdict::Pass] {
            filtered(verdict);
            scene.assert_judged(&format!("{mode}: a filter that says {verdict:?}"));
            tc(namespace, &format!("filter del dev {name} egress prio 2")).unwrap();
        }
        filtered(Verdict::Drop);
        assert!(!datagram(&scene.client.namespace, at(OPEN), SILENCE).unwrap(), "{mode}: it does not run");
        tc(namespace, &format!("filter del dev {name} egress prio 2")).unwrap();

        for verdict in [Verdict::Next, Verdict::Drop] {
            let link = attach_tcx(namespace, index, false, &program(verdict).unwrap()).unwrap();
            scene.await_fast_path("programs");
            if verdict == Verdict::Next {
                scene.assert_judged(&format!("{mode}: a tcx program that says {verdict:?}"));
            } else {
                let passes = datagram(&scene.client.namespace, at(OPEN), SILENCE).unwrap();
                assert!(!passes, "{mode}: a tcx program that drops does not run");
            }
            drop(link);
            scene.await_fast_path("on");
        }
        scene.assert_judged(mode);

        // The kernel runs tcx programs before filters, and one that returns "pass" ends the chain. In this case ours
        // also run by tcx, and come first.
        let link = attach_tcx(namespace, index, false, &program(Verdict::Pass).unwrap()).unwrap();
        scene.await_fast_path("programs");
        assert!(eventually(PATIENCE * 4, || scene.runs_by("tcx")), "{mode}");
        scene.assert_judged(&format!("{mode}: a tcx program that says Pass"));
        scene.node.check(&scene.server).success();
        drop(link);
        scene.await_fast_path("on");
        scene.assert_judged(mode);
        assert!(scene.runs_by("tcx"), "{mode}: it changes back");
        scene.end();
    }
}

/// A filter that is placed before ours decides first: ours are placed before it again, and it stays.
#[test]
fn filters_that_others_put_before_ours_come_behind_them() {
    let scene = Scene::new("clsact");
    let (name, namespace) = (scene.device(&scene.server), &scene.node.namespace);
    attach_filter(namespace, &name, false, 1, Verdict::Pass).unwrap();
    let index = index_of(namespace, &name).unwrap();
    let order = || {
        let mut host = Handle::open_in(namespace.netns()).unwrap();
        let found = host.find_filters(index, TcHook::Egress).unwrap();
        found.into_iter().map(|it| it.name.is_some_and(|name| name == "na_to_pod")).collect::<Vec<_>>()
    };
    let put_back = || {
        let asked = scene.node.ctl(&["status"]).unwrap();
        asked["programs_put_back"] == json!(1) && order() == [true, false]
    };
    assert!(eventually(PATIENCE * 4, put_back), "{:?}", order());
    scene.assert_judged("before it again");
    scene.node.check(&scene.server).success();
    scene.end();
}

/// If another process repeatedly places its filter before ours, the agent does not react at every check.
#[test]
fn filters_that_come_before_ours_again_and_again_are_answered_rarely_and_told() {
    let scene = Scene::new("clsact");
    let (name, namespace) = (scene.device(&scene.server), &scene.node.namespace);
    let index = index_of(namespace, &name).unwrap();
    let ours_first = || {
        let mut host = Handle::open_in(namespace.netns()).unwrap();
        let found = host.find_filters(index, TcHook::Egress).unwrap();
        found.first().is_some_and(|it| it.name.as_deref() == Some("na_to_pod"))
    };
    let put_back = || scene.node.ctl(&["status"]).unwrap()["programs_put_back"].clone();
    let go_first = || {
        attach_filter(namespace, &name, false, 1, Verdict::Next).unwrap();
        assert!(!ours_first());
        // The kernel notifies about removed filters, and the agent checks their device.
        attach_filter(namespace, &name, false, 9, Verdict::Next).unwrap();
        tc(namespace, &format!("filter del dev {name} egress pref 9")).unwrap();
    };
    for times in 1..=5 {
        go_first();
        assert!(eventually(PATIENCE * 4, || put_back() == json!(times) && ours_first()), "{times}");
        assert_eq!(scene.routed(&scene.server)["enforcement"], json!("full"), "{times}");
    }
    go_first();
    let told = || scene.routed(&scene.server)["enforcement"] == json!("advisory");
    assert!(eventually(PATIENCE * 4, told), "{}", scene.routed(&scene.server));
    assert_eq!((put_back(), ours_first()), (json!(5), false));
    let why = format!(
        "another's filter comes before program na_to_pod on device {name}: ours were put before it 5 times, and from now on \
         are once a minute"
    );
    assert_eq!(scene.routed(&scene.server)["enforcement_detail"], json!(why));
    assert_eq!(scene.routed(&scene.client)["enforcement"], json!("full"), "others are as they were");
    let status = scene.node.ctl(&["status"]).unwrap().to_string();
    assert!(status.contains(&why), "{status}");
    // Without the rival's filter no program is missing, but the rival may return soon.
    tc(namespace, &format!("filter del dev {name} egress")).unwrap();
    assert!(eventually(PATIENCE * 4, || put_back() == json!(6)));
    let detail = || scene.routed(&scene.server)["enforcement_detail"].clone();
    let contested =
        || detail().as_str().is_some_and(|it| it.starts_with("another program puts its filter before"));
    assert!(eventually(PATIENCE * 4, contested), "{}", detail());
    scene.assert_judged("put back");
    scene.node.check(&scene.server).success();
    scene.end();
}

/// The state of a node's end after an agent was killed while it moved its filters before those of others; the next
/// agent may attach in either mode.
#[test]
fn a_filter_that_was_to_stand_in_for_ours_goes_at_the_next_start() {
    for mode in ["tcx", "clsact"] {
        let mut scene = Scene::new("clsact");
        let index = index_of(&scene.node.namespace, &scene.device(&scene.server)).unwrap();
        scene.node.kill().unwrap();
        let mut host = Handle::open_in(scene.node.namespace.netns()).unwrap();
        let program = program(Verdict::Next).unwrap();
        let hooks = [(TcHook::Ingress, "na_from_pod"), (TcHook::Egress, "na_to_pod")];
        let spares = hooks.map(|(hook, name)| Filter {
            hook,
            handle: 0x8000_0001,
            class: 0,
            name,
            program: program.as_fd(),
        });
        host.ensure_filters(index, &spares).unwrap();
        host.ensure_filters_absent(index, &hooks.map(|(hook, _)| (hook, 1)), false).unwrap();
        scene.node.set("attach", json!(mode));
        scene.node.start().unwrap();
        let left = hooks.map(|(hook, _)| {
            let found = host.find_filters(index, hook).unwrap();
            found.into_iter().map(|it| it.handle).collect::<Vec<_>>()
        });
        let expected = if mode == "tcx" { [vec![], vec![]] } else { [vec![1], vec![1]] };
        assert_eq!(left, expected, "{mode}");
        scene.assert_judged(mode);
        scene.node.check(&scene.server).success();
        assert_eq!(scene.node.ctl(&["status"]).unwrap()["programs_put_back"], json!(0), "{mode}");
        scene.end();
    }
}

/// Without them packets are not judged, so they are reattached as often as they are removed.
#[test]
fn programs_that_somebody_takes_off_again_and_again_are_put_back_and_that_is_told() {
    let scene = Scene::new("clsact");
    let name = scene.device(&scene.server);
    let put_back = || scene.node.ctl(&["status"]).unwrap()["programs_put_back"].clone();
    for times in 1..=6 {
        tc(&scene.node.namespace, &format!("filter del dev {name} egress")).unwrap();
        assert!(eventually(PATIENCE * 4, || put_back() == json!(times)), "{times}");
        let level = if times > 5 { "advisory" } else { "full" };
        assert_eq!(scene.routed(&scene.server)["enforcement"], json!(level), "{times}");
    }
    let why = "another program takes its programs off again and again: they were put back 5 times and more, and are each time";
    assert_eq!(scene.routed(&scene.server)["enforcement_detail"], json!(why));
    assert_eq!(scene.routed(&scene.client)["enforcement"], json!("full"), "others are as they were");
    scene.assert_judged("after all");
    scene.end();
}

#[test]
fn programs_that_somebody_takes_off_are_put_back_counted_and_told() {
    let mut scene = Scene::new("clsact");
    let name = scene.device(&scene.server);
    let put_back = |count: u32| {
        eventually(PATIENCE, || {
            scene.node.ctl(&["status"]).is_ok_and(|status| status["programs_put_back"] == json!(count))
        })
    };
    tc(&scene.node.namespace, &format!("qdisc del dev {name} clsact")).unwrap();
    assert!(put_back(1));
    scene.assert_judged("without its qdisc");
    tc(&scene.node.namespace, &format!("filter del dev {name} egress")).unwrap();
    assert!(put_back(2));
    scene.assert_judged("without its filter");
    // Foreign devices are left alone.
    tc(&scene.node.namespace, "qdisc add dev lo clsact").unwrap();
    tc(&scene.node.namespace, "qdisc del dev lo clsact").unwrap();
    scene.node.check(&scene.server).success();
    assert!(put_back(2));
    let log = scene.node.kill().unwrap();
    let told = format!("put back device=\"{name}\" attachment=\"shop/server net1 on shop/storage\"");
    assert_eq!(log.matches(&told).count(), 2, "{log}");
    scene.node.start().unwrap();
    scene.end();
}
