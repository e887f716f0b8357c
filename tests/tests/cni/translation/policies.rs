//! A client that uses a port of the node is judged by the pod's policies as if it had connected to the pod itself.

use netattach_tests::manifest::{NAMESPACE, namespace, network_policy, policy};

use super::*;

const PORTS: [u16; 2] = [8080, 80];

fn mapping() -> Value {
    json!([{"hostPort": PORTS[0], "containerPort": PORTS[1], "protocol": "tcp"}])
}

/// Rules that let in one pod or none.
fn only(app: &str) -> Value {
    json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": app}}}], "ports": [{"port": PORTS[1]}]}]
    })
}

#[test]
fn a_port_of_the_node_is_no_way_past_a_policy() {
    for links in BOTH {
        let mut scene = Scene::unstarted(links, &["web", "friend", "stranger"]);
        scene.node.set("networkPolicy", json!(true));
        scene.node.write(NAMESPACE, &namespace(NAMESPACE, &json!({}))).unwrap();
        scene.node.write("rules", &network_policy("rules", &only("friend"))).unwrap();
        scene.node.start().unwrap();
        let (web, addresses) = scene.add("web", &mapping());
        let (friend, _) = scene.add("friend", &json!([]));
        let (stranger, _) = scene.add("stranger", &json!([]));
        for family in [0, 1] {
            let _echo = Echo::serve(scene.pod(web), SocketAddr::new(addresses[family], PORTS[1])).unwrap();
            let by = at(NODE[family], PORTS[0]);
            let what = format!("{links:?}, {by}");
            assert!(connects(scene.pod(friend), by, PATIENCE), "{what}: a pod that is let in");
            assert!(!connects(scene.pod(stranger), by, SILENCE), "{what}: a pod that is not");
            assert!(!connects(&scene.outside, by, SILENCE), "{what}: from outside");
            // The standard excepts a pod's own node.
            assert!(connects(&scene.node.namespace, by, PATIENCE), "{what}: the node");
        }
        // A pod that may not send at all cannot send by a port of its node either.
        let rules = json!({"podSelector": {"matchLabels": {"app": "friend"}}, "policyTypes": ["Egress"], "egress": []});
        scene.node.write("out", &network_policy("out", &rules)).unwrap();
        let _echo = Echo::serve(scene.pod(web), SocketAddr::new(addresses[0], PORTS[1])).unwrap();
        let shut = || !connects(scene.pod(friend), at(NODE[0], PORTS[0]), SILENCE);
        assert!(eventually(PATIENCE, shut), "{links:?}");
        scene.end();
    }
}

/// Without `networkPolicy` devices judge, behind every translation.
#[test]
fn policies_of_other_networks_see_who_comes_by_a_port_of_the_node() {
    for links in BOTH {
        let mut scene = Scene::new(links, &["web"]);
        let (web, addresses) = scene.add("web", &mapping());
        let _echo = Echo::serve(scene.pod(web), SocketAddr::new(addresses[0], PORTS[1])).unwrap();
        let by = at(NODE[0], PORTS[0]);
        let rules = |from: &str| {
            let spec = json!({
                "podSelector": {}, "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"ipBlock": {"cidr": from}}], "ports": [{"port": PORTS[1]}]}]
            });
            scene.node.write("rules", &policy("rules", "kube-system/default", &spec)).unwrap();
        };
        rules("203.0.113.0/24");
        let shut = || !connects(&scene.outside, by, SILENCE);
        assert!(eventually(PATIENCE, shut), "{links:?}");
        rules("192.0.2.2/32");
        assert!(eventually(PATIENCE, || connects(&scene.outside, by, SILENCE)), "{links:?}");
        scene.end();
    }
}
