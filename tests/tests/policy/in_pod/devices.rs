//! Devices of the node that netattach itself gives to pods.

use super::*;

/// Rows: HDV-level, HDV-owner.
#[test]
fn a_device_that_the_agent_takes_is_judged_in_the_pod_is_one_pods_and_goes_back() {
    let test = "a_device_that_the_agent_takes";
    let settings = [("delegation", json!({"exec": []}))];
    let Some(mut scene) = Scene::new(test, &settings, &[("policy", only_the_client())]) else { return };
    let served = scene.serve();
    assert_eq!(scene.links().len(), 4);
    let row = scene.row("server");
    let told = ["kind", "enforcement", "host_interface"].map(|key| row[key].clone());
    assert_eq!(told, [json!("host-device"), json!("full-unless-privileged"), Value::Null], "{row:#}");
    // Without an end on the node there is no fast path to be on.
    assert_eq!(row.get("fast_path"), None, "{row:#}");
    let holds = |scene: &Scene| {
        connects(&scene.client.namespace, at(SERVER, 80)[0], PATIENCE)
            && !connects(&scene.client.namespace, at(SERVER, 81)[0], SILENCE)
            && !connects(&scene.wires.beyond, at(SERVER, 80)[0], SILENCE)
            && connects(&scene.wires.beyond, at(CLIENT, 80)[0], PATIENCE)
    };
    assert!(holds(&scene));

    // Another pod asks for the device of the first, which its pod has renamed meanwhile; then the agent is killed.
    scene.node.write("other", &pod("other", &json!({"app": "other"}), &json!("wire-server"))).unwrap();
    let other = Pod::new("other").unwrap();
    for _ in 0..2 {
        let (code, told) = scene.node.add(&other).failure();
        assert_eq!(code, 11, "{told}");
        assert!(told.contains("device server is taken: pod shop/server, container "), "{told}");
        scene.node.kill().unwrap();
        scene.node.start().unwrap();
        assert!(holds(&scene));
    }
    for pod in [&scene.server, &scene.client] {
        scene.node.check(pod).success();
    }
    drop(served);
    ip(&scene.server.namespace, &["link", "set", "net1", "down"]).unwrap();
    ip(&scene.server.namespace, &["link", "set", "net1", "name", "mine"]).unwrap();
    scene.node.del(&scene.server).success();
    // What is back is the next one's.
    scene.node.add(&other).success();
    scene.node.del(&scene.server).success();
    scene.node.check(&other).success();
    scene.node.del(&other).success();
    scene.end();
}

/// Rows: SRV-not-there.
#[test]
fn a_function_that_the_node_does_not_have_yet_is_to_be_tried_again() {
    const ABSENT: &str = "0000:7f:1f.7";
    let mut node = Node::new(&[]).unwrap();
    for kind in ["sriov", "host-device"] {
        node.write(kind, &network(NAMESPACE, kind, &json!({"cniVersion": "1.0.0", "type": kind}))).unwrap();
        let selection = json!([{"name": kind, "deviceID": ABSENT}]);
        node.write(&format!("pod-{kind}"), &pod(&format!("of-{kind}"), &json!({}), &selection)).unwrap();
    }
    node.start().unwrap();
    for kind in ["sriov", "host-device"] {
        let pod = Pod::new(&format!("of-{kind}")).unwrap();
        let (code, told) = node.add(&pod).failure();
        let expected = format!("there is no device {ABSENT} on a bus of this node");
        assert_eq!((code, told.ends_with(&expected)), (11, true), "{told}");
        Snapshot::take(&node, &[&pod]).unwrap().assert_nothing_is_left();
    }
}
