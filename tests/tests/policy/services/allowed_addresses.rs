//! Addresses that pods share: the node's packet filter does not know their holder, so traffic of these addresses is
//! judged at the pods' devices.

use netattach_tests::traffic::datagram_from;

use super::*;

/// The addresses that the client and the server use, by family.
const SHARED: [[&str; 2]; 2] = [["10.50.0.100", "10.50.0.101"], ["fd00:50::100", "fd00:50::101"]];

/// The destinations of the client from its shared address.
const CALLED: [To; 6] = [
    To::Pod(SERVER, WEB_BEHIND),
    To::Remote(WEB_BEHIND),
    To::Service(1, WEB),
    To::Service(2, WEB),
    To::Node(NODE_PORT),
    To::Gateway(NODE_PORT),
];

/// Returns which of these are reached from the client's shared address, in each family.
fn called(scene: &Scene, expected: [bool; CALLED.len()]) -> [[bool; CALLED.len()]; 2] {
    [0, 1].map(|family| {
        let source: IpAddr = SHARED[family][0].parse().unwrap();
        let mut reached = [false; CALLED.len()];
        for ((to, expected), reached) in CALLED.iter().zip(expected).zip(&mut reached) {
            let patience = if expected { PATIENCE } else { SILENCE };
            *reached = datagram_from(&scene.client.namespace, source, to.address(family), patience).unwrap();
        }
        reached
    })
}

/// Whether the server's shared address is reached from another pod and from another node, in each family.
fn answers(scene: &Scene, expected: bool) -> [[bool; 2]; 2] {
    [0, 1].map(|family| {
        let to = SocketAddr::new(SHARED[family][1].parse().unwrap(), WEB_BEHIND);
        let patience = if expected { PATIENCE } else { SILENCE };
        [&scene.other.namespace, &scene.remote].map(|from| datagram(from, to, patience).unwrap())
    })
}

/// Rows: SVC-shared, SVC-node-ports.
#[test]
fn what_goes_from_or_to_an_address_that_pods_share_is_judged_at_the_pods() {
    let scene = Scene::sharing(Links::Bridge, &SHARED.concat());
    for family in [0, 1] {
        scene.restore(family, &kube_proxy(&scene.services(family)));
        for (pod, address) in [&scene.client, &scene.server].into_iter().zip(SHARED[family]) {
            let with_length = format!("{address}/{}", [24, 64][family]);
            let mut words = vec!["addr", "add", with_length.as_str(), "dev", "eth0"];
            words.extend((family == 1).then_some("nodad"));
            ip(&pod.namespace, &words).unwrap();
        }
    }
    let _echoes = SHARED.map(|[_, shared]| {
        let address = SocketAddr::new(shared.parse().unwrap(), WEB_BEHIND);
        Echo::serve(&scene.server.namespace, address).unwrap()
    });
    assert_eq!(called(&scene, [true; 6]), [[true; 6]; 2]);
    assert_eq!(answers(&scene, true), [[true; 2]; 2]);
    let only_the_server = json!({
        "podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"], "egress": [{"to": [app("server")]}]
    });
    scene.policy("client", &only_the_server);
    // The Service leads to the server, and so does the node's port, but that is visible only after the translation.
    let only_the_pod = [true, false, false, false, false, false];
    assert_eq!(called(&scene, only_the_pod), [only_the_pod; 2]);
    scene.policy(
        "server",
        &json!({"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"]}),
    );
    assert_eq!(answers(&scene, false), [[false; 2]; 2]);
    scene.end();
}
