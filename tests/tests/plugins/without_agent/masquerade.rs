//! `ipMasq` of `bridge` and `ptp` as plain executables.

use netattach_tests::traffic::SILENCE;
use netattach_tests::traffic::connects;

use super::*;

/// Rows: PTP-ipMasq, BRG-ipMasq-executable.
#[test]
fn who_is_not_on_the_network_sees_the_nodes_address() {
    for kind in ["bridge", "ptp"] {
        let scene = Scene::new();
        let keys = json!({"ipMasq": true, "nonMasqueradeCIDRs": ["198.51.100.0/24"]});
        let plugin = |keys: &Value| scene.routed(kind, keys);
        run(&scene.outside, "addr add 198.51.100.7/32 dev lo");
        run(scene.node(), "route add 198.51.100.7 via 192.0.2.2");
        let a = scene.add("a", &[plugin(&keys)]);
        let plain = scene.add("b", &[plugin(&json!({}))]);
        let by = |pod: &Attached, to: &str| seen(&scene.outside, at(to, 80), &pod.namespace, at(to, 80));
        let addresses = a.addresses();
        for family in [0, 1] {
            assert_eq!(by(&a, OUTSIDE[family]), Some(NODE[family].parse().unwrap()), "{kind}");
            assert_eq!(by(&plain, OUTSIDE[family]), Some(plain.addresses()[family]), "{kind}");
        }
        assert_eq!(by(&a, "198.51.100.7"), Some(addresses[0]), "{kind}");
        scene.check(&a);
        // Neighbours see each other.
        let neighbour = SocketAddr::new(addresses[0], 80);
        assert_eq!(
            seen(&a.namespace, neighbour, &plain.namespace, neighbour),
            Some(plain.addresses()[0]),
            "{kind}"
        );
        let status = scene.runtime.run("STATUS", a.call(), &plugin(&keys)).unwrap();
        assert_eq!(status.exit, Some(0), "{status:?}");
        // GC of attachments that are there leaves them; the DEL of another one does too.
        let mut valid = plugin(&keys);
        valid["cni.dev/valid-attachments"] = json!([{"containerID": "a", "ifname": "eth0"}]);
        let gc = scene.runtime.run("GC", a.call(), &valid).unwrap();
        assert_eq!(gc.exit, Some(0), "{gc:?}");
        scene.del(&plain);
        scene.check(&a);
        // DEL without a result and without valid keys.
        let mut broken = plugin(&json!({"ipMasq": true, "mtu": 7}));
        broken["ipam"]["ranges"] = json!([]);
        for _ in 0..2 {
            let answer = scene.runtime.run("DEL", a.call(), &broken).unwrap();
            assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{kind} {answer:?}");
        }
        scene.assert_table_is_gone();
    }
}

/// Rows: BRG-masquerade-rollback.
#[test]
fn an_add_that_fails_leaves_nothing_in_the_packet_filter() {
    let scene = Scene::new();
    let ports = json!([{"hostPort": 8080, "containerPort": 80}]);
    let keys = json!({"ipMasq": true, "capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": ports}});
    let plugin = scene.bridge(&keys);
    let a = scene.add("a", std::slice::from_ref(&plugin));
    scene.check(&a);
    let before: Vec<_> = scene.table().elements().to_vec();
    let b = Namespace::new().unwrap();
    let call = Call { container: "b", ifname: "eth0", netns: b.path(), args: "" };
    let (code, msg) = scene.runtime.refusal("ADD", call, &plugin).unwrap();
    assert!(code == 11 && msg.ends_with("is taken: container a, interface eth0 has it"), "{code} {msg}");
    assert_eq!(scene.table().elements(), before);
    assert!(!connects(&scene.outside, at(NODE[0], 8081), SILENCE));
    scene.del(&a);
    scene.assert_table_is_gone();
}
