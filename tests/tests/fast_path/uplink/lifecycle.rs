//! The uplink programs are attached with the first attachment that needs them, and removed with the last.

use netattach_tests::other_programs::{Verdict, attach_filter, index_of, tc};
use netattach_tests::traffic::Conversation;

use super::*;

fn scene(attach: &str) -> Scene {
    let scene = Scene::new(&[("attach", json!(attach))], |config| config);
    scene.node("ip", &format!("link set {WIRE} master br0"));
    scene.outside(&format!("addr add 10.50.0.200/24 dev {FAR}"));
    scene.await_standing("on");
    assert!(scene.answers(0));
    scene
}

#[test]
fn an_agent_that_comes_back_takes_the_program_over_without_a_loss() {
    for mode in ["clsact", "tcx"] {
        let mut scene = scene(mode);
        let conversation = Conversation::start(&scene.outside, scene.addresses[0]).unwrap();
        for _ in 0..2 {
            scene.node.kill().unwrap();
            assert!(scene.answers(0), "without an agent");
            scene.node.start().unwrap();
            scene.await_standing("on");
            assert!(eventually(PATIENCE, || scene.exchange(0).received > 0), "{mode}");
        }
        assert_eq!(scene.runs_by(), [mode == "clsact", mode == "tcx"]);
        let (sent, lost) = conversation.end();
        assert!(sent > 10 && lost == 0, "{mode}: {lost} of {sent} lost");
        scene.end();
    }
}

#[test]
fn an_agent_that_comes_back_in_another_mode_changes_over() {
    let mut scene = scene("clsact");
    assert_eq!(scene.runs_by(), [true, false]);
    for (mode, by) in [("tcx", [false, true]), ("clsact", [true, false]), ("auto", [false, true])] {
        scene.node.kill().unwrap();
        scene.node.set("attach", json!(mode));
        scene.node.start().unwrap();
        assert!(eventually(NOTICED, || scene.runs_by() == by), "{mode}: {:?}", scene.runs_by());
        scene.await_standing("on");
        assert!(eventually(PATIENCE, || scene.exchange(0).received > 0), "{mode}");
    }
    scene.end();
}

#[test]
fn an_agent_that_does_not_want_it_takes_it_off() {
    for mode in ["clsact", "tcx"] {
        let mut scene = scene(mode);
        assert_eq!(scene.runs_by(), [mode == "clsact", mode == "tcx"]);
        scene.node.kill().unwrap();
        assert_eq!(scene.runs_by(), [mode == "clsact", mode == "tcx"], "it outlives the agent");
        scene.node.set("fastPath", json!("off"));
        scene.node.start().unwrap();
        assert!(eventually(NOTICED, || scene.runs_by() == [false, false]), "{mode}");
        assert_eq!(scene.exchange(0), STACK);
        scene.end();
    }
}

#[test]
fn a_queueing_discipline_of_somebody_else_stays() {
    let scene = Scene::new(&[("attach", json!("clsact"))], |config| config);
    tc(&scene.node.namespace, &format!("qdisc add dev {WIRE} clsact")).unwrap();
    scene.node("ip", &format!("link set {WIRE} master br0"));
    scene.outside(&format!("addr add 10.50.0.200/24 dev {FAR}"));
    scene.await_standing("on");
    scene.node.del(&scene.server).success();
    assert_eq!(scene.runs_by(), [false, false]);
    tc(&scene.node.namespace, &format!("qdisc del dev {WIRE} clsact")).unwrap();
}

#[test]
fn a_filter_that_came_while_no_pod_was_there_keeps_the_next_one_off() {
    let scene = scene("tcx");
    scene.node.del(&scene.server).success();
    scene.await_standing("");
    tc(&scene.node.namespace, &format!("qdisc add dev {WIRE} clsact")).unwrap();
    attach_filter(&scene.node.namespace, WIRE, true, 2, Verdict::Next).unwrap();
    // Until the agent has been notified.
    std::thread::sleep(Duration::from_secs(3));
    let successor = Pod::new("server").unwrap();
    scene.node.add(&successor).success();
    scene.await_standing("programs");
    tc(&scene.node.namespace, &format!("qdisc del dev {WIRE} clsact")).unwrap();
    scene.await_standing("on");
    scene.node.del(&successor).success();
    scene.end();
}

#[test]
fn a_wire_that_goes_and_comes_back_is_found_again() {
    let scene = scene("tcx");
    let index = index_of(&scene.node.namespace, WIRE).unwrap();
    scene.node("ip", &format!("link del {WIRE}"));
    scene.await_standing("");
    let pin = scene.node.bpffs().join("link").join(format!("{index}_na_wire"));
    assert!(eventually(NOTICED, || !pin.exists()));
    let task = scene.outside.task();
    scene.node("ip", &format!("link add {WIRE} up master br0 type veth peer name {FAR} netns {task}"));
    scene.outside(&format!("link set {FAR} up"));
    scene.outside(&format!("addr add 10.50.0.200/24 dev {FAR}"));
    scene.await_standing("on");
    assert!(eventually(PATIENCE, || scene.answers(0) && scene.exchange(0).received > 0));
    scene.end();
}
