//! The source addresses that are seen outside.

use netattach_tests::manifest::NAMESPACE;

use super::*;

/// The list of exceptions is one for all attachments that follow the node's.
///
/// Rows: STC-masquerade.
#[test]
fn a_pod_takes_nobody_out_of_masquerade_by_the_length_of_an_address_that_it_asks_for() {
    // The first and the last address of each.
    type Net = [[u8; 4]; 2];
    const NEVER: [Net; 2] =
        [[[169, 254, 0, 0], [169, 254, 255, 255]], [[224, 0, 0, 0], [239, 255, 255, 255]]];
    let of_author: Net = [[10, 9, 0, 0], [10, 9, 0, 255]];
    let alone: Net = [[10, 8, 0, 7], [10, 8, 0, 7]];
    for (asked, own) in [("10.9.0.7/0", of_author), ("10.8.0.7/0", alone)] {
        let selection = json!([{"name": "chosen", "ips": [asked]}]);
        let mut node = Node::new(&[pod("a", &json!({}), &selection)]).unwrap();
        let chosen = json!({
            "cniVersion": "1.0.0", "type": "veth", "ipMasq": true, "nonMasqueradeBuiltin": true,
            "capabilities": {"ips": true}, "ipam": {"type": "static", "addresses": [{"address": "10.9.0.2/24"}]}
        });
        node.write("chosen", &network(NAMESPACE, "chosen", &chosen)).unwrap();
        node.start().unwrap();
        let excepted = |node: &Node| -> BTreeSet<Vec<u8>> {
            let elements = node.namespace.run(nat::all_elements).unwrap().into_iter();
            let prefixes = elements.filter(|element| element.set == Set::Prefixes4);
            // Behind the name of the list.
            prefixes.map(|it| [&it.key[8..], &it.end.unwrap_or(it.key.clone())[8..]].concat()).collect()
        };
        let expected: BTreeSet<Vec<u8>> = NEVER.into_iter().chain([own]).map(|net| net.concat()).collect();
        let a = Pod::new("a").unwrap();
        node.add(&a).success();
        assert_eq!(excepted(&node), expected, "{asked}");
        node.check(&a).success();
        // The next agent has them from the record.
        node.kill().unwrap();
        node.start().unwrap();
        assert_eq!(excepted(&node), expected, "{asked}");
        node.check(&a).success();
        node.del(&a).success();
        Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
    }
}

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
            // Clients from outside are not masqueraded, and neither are the replies to them.
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
