//! Whose address is seen outside.

use super::*;

#[test]
fn pods_have_the_nodes_address_outside_but_for_what_is_excepted() {
    for links in BOTH {
        let mut scene = Scene::new(links, &["a", "b"]);
        let (a, addresses) = scene.add("a", &json!([]));
        let (b, others) = scene.add("b", &json!([]));
        for family in [0, 1] {
            let (pod, outside) = (scene.pod(a), &scene.outside);
            let look = |to: &str| seen(outside, at(to, 7000), pod, at(to, 7000));
            let what = format!("{links:?}, {}", NODE[family]);
            assert_eq!(look(OUTSIDE[family]), NODE[family].parse().ok(), "{what}");
            assert_eq!(look(EXCEPTED[family]), Some(addresses[family]), "{what}: excepted");
            // Neither to another pod, nor to the node itself.
            let sibling = SocketAddr::new(others[family], 7000);
            assert_eq!(seen(scene.pod(b), sibling, pod, sibling), Some(addresses[family]), "{what}: pod");
            let node = at(NODE[family], 7000);
            let by_node = seen(&scene.node.namespace, node, pod, node);
            assert_eq!(by_node, Some(addresses[family]), "{what}: node");
            // Who comes from outside is not masqueraded, nor what answers him.
            let own = SocketAddr::new(addresses[family], 7000);
            assert_eq!(seen(pod, own, outside, own), OUTSIDE[family].parse().ok(), "{what}: from outside");
        }
        scene.node.check(&scene.pods[a]).success();
        scene.end();
    }
}

#[test]
fn a_detached_pod_leaves_no_element_with_or_without_its_namespace() {
    let mut scene = Scene::new(Links::Bridge, &["a", "b"]);
    scene.add("a", &json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]));
    let one = scene.elements();
    scene.add("b", &json!([{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}]));
    assert!(scene.elements().is_superset(&one) && scene.elements() != one);
    let mut gone = scene.pods.remove(1);
    let call = scene.node.call("DEL", &gone);
    gone.namespace = Namespace::new().unwrap();
    call.run().success();
    assert_eq!(scene.elements(), one);
    scene.end();
}
