//! Programs in pods outlive agents and layouts, and end with their attachment.

use netattach_tests::other_programs::{Verdict, attach_tcx, index_of, program};

use super::*;

/// Most programs that the kernel runs at one place of a device.
const MOST_PROGRAMS: usize = 64;
/// Two sweeps of policies, and time for their work: less than a check of all attachments takes.
const SWEPT: Duration = Duration::from_secs(12);

/// Rows: C91.
#[test]
fn programs_in_pods_go_on_without_an_agent_and_are_taken_over_by_the_next() {
    let test = "programs_in_pods_go_on_without_an_agent";
    let Some(mut scene) = Scene::new(test, &[], &[("policy", only_the_client())]) else { return };
    let served = scene.serve_behind_the_policy();
    let before = scene.links();
    assert_eq!(before.len(), 2);
    let holds = |scene: &Scene| {
        assert!(connects(&scene.client.namespace, at(SERVER, 80)[0], PATIENCE));
        assert!(!connects(&scene.wires.beyond, at(SERVER, 80)[0], SILENCE));
    };
    holds(&scene);
    scene.node.kill().unwrap();
    holds(&scene);
    // A policy that selects a pod while no agent runs.
    let nothing = json!({"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Ingress"]});
    scene.node.write("later", &policy("later", BOTH, &nothing)).unwrap();
    scene.node.start().unwrap();
    holds(&scene);
    let after = scene.links();
    assert_eq!(after.len(), 4, "{after:?}");
    assert!(before.iter().all(|link| after.iter().any(|other| other == link)), "{before:?} {after:?}");
    assert!(!connects(&scene.wires.beyond, at(CLIENT, 80)[0], SILENCE));
    for pod in [&scene.server, &scene.client] {
        scene.node.check(pod).success();
    }
    drop(served);
    scene.end();
}

/// Rows: C92.
#[test]
fn programs_in_pods_of_another_layout_are_replaced_in_their_links() {
    let test = "programs_in_pods_of_another_layout";
    let Some(mut scene) = Scene::new(test, &[], &[("policy", only_the_client())]) else { return };
    let served = scene.serve_behind_the_policy();
    let (before, programs) = (scene.links(), programs(&scene.node));
    let conversation = Conversation::start(&scene.client.namespace, at(SERVER, 80)[0]).unwrap();
    scene.node.kill().unwrap();
    let pins = |version: u32| scene.node.bpffs().join(format!("v{version}"));
    let older = pins(LAYOUT_VERSION - 1);
    std::fs::rename(pins(LAYOUT_VERSION), &older).unwrap();
    scene.node.start().unwrap();
    let (sent, lost) = conversation.end();
    assert!(sent > 10 && lost == 0, "{lost} of {sent} lost");
    assert!(!older.exists());
    assert_eq!(scene.links(), before);
    assert!(self::programs(&scene.node).is_disjoint(&programs));
    scene.assert_reach_by_v4("beyond to server 80", false);
    scene.assert_reach_by_v4("client to server 80", true);
    drop(served);
    scene.end();
}

/// Kernel ids of the programs that links on devices in pods run.
fn programs(node: &Node) -> BTreeSet<u32> {
    let id = |pin: &String| {
        let link = sys::open_pin(&node.bpffs().join("link").join(pin)).unwrap();
        sys::link_info(link.as_fd()).unwrap().program_id
    };
    links(node).keys().map(id).collect()
}

#[test]
fn programs_that_could_not_be_attached_when_a_policy_came_are_at_the_next_sweep() {
    let test = "programs_that_could_not_be_attached";
    let Some(scene) = Scene::new(test, &[], &[]) else { return };
    let mut full = Vec::new();
    for pod in [&scene.server, &scene.client] {
        let device = index_of(&pod.namespace, "net1").unwrap();
        // In addition to existing programs, as many as there is room for.
        let attach = |_| attach_tcx(&pod.namespace, device, true, &program(Verdict::Next).unwrap()).ok();
        full.extend((0..MOST_PROGRAMS).map_while(attach));
    }
    let nobody = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    scene.node.write("policy", &policy("all", BOTH, &nobody)).unwrap();
    let are_selected = || {
        let report = scene.node.ctl(&["policy"]).unwrap();
        let rows = report["attachments"].as_array().unwrap().iter();
        rows.filter(|row| row["ingress"].is_u64()).count() == 2
    };
    assert!(eventually(PATIENCE, are_selected));
    // Until they were to be attached.
    std::thread::sleep(Duration::from_secs(1));
    assert!(scene.links().len() < 4, "{:?}", scene.links());
    drop(full);
    assert!(eventually(SWEPT, || scene.links().len() == 4), "{:?}", scene.links());
    scene.end();
}

/// Rows: DEL-07.
#[test]
fn a_pod_that_is_gone_leaves_no_link_and_no_pin() {
    let test = "a_pod_that_is_gone_leaves_no_link_and_no_pin";
    let Some(mut scene) = Scene::new(test, &[], &[("policy", only_the_client())]) else { return };
    assert_eq!(scene.links().len(), 2);
    // The kernel returns the namespace's devices to the node.
    let gone = std::mem::replace(&mut scene.server.namespace, Namespace::new().unwrap());
    let del = scene.node.call("DEL", &scene.server).with("CNI_NETNS", &gone.path().to_string_lossy());
    drop(gone);
    del.run().success();
    assert_eq!(scene.links(), BTreeMap::new());
    scene.node.del(&scene.client).success();
    assert_eq!(scene.links(), BTreeMap::new());
    let _ = ip(&scene.node.namespace, &["link", "del", "client"]);
    drop(scene.wires);
    let snapshot = Snapshot::take(&scene.node, &[&scene.client]).unwrap();
    assert_eq!((snapshot.files, snapshot.dataplane), (BTreeMap::new(), Default::default()));
}

#[test]
fn a_device_that_the_pod_has_lost_keeps_it_from_nothing() {
    let test = "a_device_that_the_pod_has_lost_keeps_it_from_nothing";
    let Some(scene) = Scene::new(test, &[], &[("policy", only_the_client())]) else { return };
    assert_eq!(scene.links().len(), 2);
    ip(&scene.server.namespace, &["link", "del", "net1"]).unwrap();
    let (_, told) = scene.node.check(&scene.server).failure();
    assert_eq!(told, "net1 (shop/wire-server): interface net1 is gone from the pod");
    for pod in [&scene.server, &scene.client] {
        scene.node.del(pod).success();
    }
    assert_eq!(scene.links(), BTreeMap::new());
    ip(&scene.node.namespace, &["link", "del", "client"]).unwrap();
    Snapshot::take(&scene.node, &[&scene.server, &scene.client]).unwrap().assert_nothing_is_left();
}

#[test]
fn filters_in_the_pod_are_advisory_and_put_back_when_the_pod_takes_them_off() {
    let test = "filters_in_the_pod_are_advisory";
    let settings = [("attach", json!("clsact"))];
    let Some(mut scene) = Scene::new(test, &settings, &[("policy", only_the_client())]) else { return };
    let served = scene.serve_behind_the_policy();
    let row = scene.row("server");
    let why = "programs are filters in the pod, where a process with CAP_NET_ADMIN can remove them; links need Linux 6.6";
    assert_eq!((&row["enforcement"], &row["enforcement_detail"]), (&json!("advisory"), &json!(why)));
    assert_eq!(scene.links(), BTreeMap::new());
    let conditions = scene.node.ctl(&["policy"]).unwrap()["conditions"].clone();
    let problem =
        format!("selects net1 of shop/server on shop/wire-server, where enforcement is advisory ({why})");
    assert_eq!(conditions, json!([{"object": "multi-networkpolicy shop/server", "problem": problem}]));
    let holds = |scene: &Scene| {
        connects(&scene.client.namespace, at(SERVER, 80)[0], PATIENCE)
            && !connects(&scene.wires.beyond, at(SERVER, 80)[0], SILENCE)
    };
    assert!(holds(&scene));
    tc(&scene.server.namespace, "qdisc del dev net1 clsact").unwrap();
    // The agent polls: it gets no notification from a pod's namespace.
    assert!(eventually(FOUND_BY_LOOKING, || scene.node.check(&scene.server).exit == 0), "put back");
    assert!(holds(&scene));

    // With links, the policies of the same pods are enforced by those, and the filters are removed.
    scene.node.kill().unwrap();
    scene.node.set("attach", json!("tcx"));
    scene.node.start().unwrap();
    assert_eq!(scene.links().len(), 2);
    let programs = Snapshot::take(&scene.node, &[&scene.server]).unwrap();
    let programs = &programs.pods[&scene.server.container].links["net1"].programs;
    assert_eq!(programs.len(), 0, "{programs:?}");
    assert!(holds(&scene));
    drop(served);
    scene.end();
}
