//! Destinations that the node translates.

use super::*;

/// The client may only reach the server's first port.
fn only_web_of_the_server() -> Value {
    json!({
        "podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"],
        "egress": [{"to": [app("server")], "ports": both(WEB_BEHIND)}]
    })
}

/// The client may not send anything.
fn nothing_from_the_client() -> Value {
    json!({"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"]})
}

const EVERYTHING: [To; 9] = [
    To::Service(1, WEB),
    To::Service(1, ADMIN),
    To::Service(2, WEB),
    To::Service(3, WEB),
    To::Node(NODE_PORT),
    To::Node(HOST_PORT),
    To::Gateway(NODE_PORT),
    To::External(WEB),
    To::Remote(WEB_BEHIND),
];

fn a_services_rules_hold_behind_it(links: Links) {
    let scene = Scene::new(links);
    // The gateway of a routed link is no address of the node.
    let all = || EVERYTHING.iter().filter(|to| links == Links::Bridge || **to != To::Gateway(NODE_PORT));
    let attempts = |from: &'static str, passing: &dyn Fn(&To) -> bool| -> Vec<(&str, To, bool)> {
        all().map(|to| (from, *to, passing(to))).collect()
    };
    scene.expect(&attempts("client", &|_| true));
    scene.policy("client", &only_web_of_the_server());
    let web = [
        To::Service(1, WEB),
        To::Node(NODE_PORT),
        To::Node(HOST_PORT),
        To::Gateway(NODE_PORT),
        To::External(WEB),
    ];
    scene.expect(&attempts("client", &|to| web.contains(to)));
    // A bridge does not send a frame back by its ingress port.
    scene.expect(&attempts("other", &|to| links == Links::Routed || *to != To::Service(3, WEB)));
    scene.expect(&[
        ("client", To::Pod(SERVER, WEB_BEHIND), true),
        ("client", To::Pod(SERVER, ADMIN_BEHIND), false),
        ("client", To::Pod(OTHER, WEB_BEHIND), false),
    ]);
    scene.policy("client", &nothing_from_the_client());
    scene.expect(&attempts("client", &|_| false));
    scene.end();
}

/// Rows: SVC-egress, SVC-node-ports.
#[test]
fn what_a_bridged_pod_sends_to_a_service_is_judged_by_where_it_goes() {
    a_services_rules_hold_behind_it(Links::Bridge);
}

/// Rows: SVC-egress, SVC-node-ports.
#[test]
fn what_a_routed_pod_sends_to_a_service_is_judged_by_where_it_goes() {
    a_services_rules_hold_behind_it(Links::Routed);
}

/// A pod that selects the default network once more may send by the second attachment the same as by the first.
///
/// Rows: SVC-egress.
#[test]
fn a_second_attachment_to_the_default_network_is_judged_as_the_first() {
    let scene = Scene::new(Links::Bridge);
    let object = pod("twice", &json!({"app": "twice"}), &json!("kube-system/default"));
    scene.node.write("pod-twice", &object).unwrap();
    scene.settle();
    let twice = Pod::new("twice").unwrap();
    scene.node.add(&twice).success();
    scene.node.await_status(&twice);
    let second = scene.node.status(&twice).unwrap()[1].take();
    assert_eq!((&second["name"], &second["interface"]), (&json!("kube-system/default"), &json!("net1")));
    let expect = |attempts: &[(To, bool)]| {
        for (to, expected) in attempts.iter().copied() {
            for family in [0, 1] {
                let source = second["ips"][family].as_str().unwrap().parse().unwrap();
                let patience = if expected { PATIENCE } else { SILENCE };
                let passed = datagram_from(&twice.namespace, source, to.address(family), patience).unwrap();
                assert_eq!(passed, expected, "{to:?} {family}\n{}", scene.flows());
            }
        }
    };
    let all = |passing: &[To]| {
        [
            To::Pod(SERVER, WEB_BEHIND),
            To::Pod(SERVER, ADMIN_BEHIND),
            To::Pod(OTHER, WEB_BEHIND),
            To::Service(1, WEB),
            To::Service(1, ADMIN),
            To::Service(2, WEB),
        ]
        .map(|to| (to, passing.contains(&to)))
    };
    expect(&all(&[]).map(|(to, _)| (to, true)));
    let mut policy = only_web_of_the_server();
    policy["podSelector"] = app("twice")["podSelector"].take();
    scene.policy("twice", &policy);
    expect(&all(&[To::Pod(SERVER, WEB_BEHIND), To::Service(1, WEB)]));
    policy["egress"] = json!([]);
    scene.policy("twice", &policy);
    expect(&all(&[]));
    scene.node.del(&twice).success();
    scene.end();
}

/// Both directions of all pods are isolated: answers pass, and come from the address that was called.
fn answers_pass_both_ways(links: Links) {
    let scene = Scene::new(links);
    scene.policy("deny", &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
    scene.expect(&[("client", To::Service(1, WEB), false), ("client", To::Service(2, WEB), false)]);
    scene.policy(
        "out",
        &json!({
            "podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"],
            "egress": [{"to": [app("server"), {"namespaceSelector": {"matchLabels": {"ns": "elsewhere"}}}]}]
        }),
    );
    scene.expect(&[("client", To::Service(1, WEB), false), ("client", To::Service(2, WEB), true)]);
    scene.policy(
        "in",
        &json!({
            "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
            "ingress": [{"from": [app("client")], "ports": both(WEB_BEHIND)}]
        }),
    );
    scene.expect(&[
        ("client", To::Service(1, WEB), true),
        ("client", To::Service(1, ADMIN), false),
        ("client", To::Service(3, WEB), false),
        ("other", To::Service(1, WEB), false),
        ("remote", To::Pod(SERVER, WEB_BEHIND), false),
        ("remote", To::Pod(CLIENT, WEB_BEHIND), false),
    ]);
    scene.end();
}

/// Rows: SVC-answers.
#[test]
fn answers_of_a_service_pass_between_bridged_pods_that_are_isolated_both_ways() {
    answers_pass_both_ways(Links::Bridge);
}

/// Rows: SVC-answers.
#[test]
fn answers_of_a_service_pass_between_routed_pods_that_are_isolated_both_ways() {
    answers_pass_both_ways(Links::Routed);
}

/// A client that comes by a port of the node is judged by its own address, not as the node that masquerades it.
/// Rows: SVC-masquerade.
#[test]
fn a_masquerade_of_the_node_lets_nobody_in() {
    for links in [Links::Bridge, Links::Routed] {
        let scene = Scene::new(links);
        let by_the_node = [
            ("remote", To::Node(NODE_PORT)),
            ("remote", To::Node(HOST_PORT)),
            ("other", To::Node(NODE_PORT)),
        ];
        scene.expect(&by_the_node.map(|(from, to)| (from, to, true)));
        scene.policy(
            "server",
            &json!({
                "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
                "ingress": [{"from": [app("client")], "ports": both(WEB_BEHIND)}]
            }),
        );
        scene.expect(&by_the_node.map(|(from, to)| (from, to, false)));
        scene.expect(&[("client", To::Node(NODE_PORT), true)]);
        // The node itself always reaches its pods.
        scene.expect(&[("node", To::Service(1, WEB), true), ("node", To::Pod(SERVER, ADMIN_BEHIND), true)]);
        scene.end();
    }
}

/// Rows: SVC-node-ports.
#[test]
fn the_node_itself_is_reached_and_reaches_its_pods() {
    for links in [Links::Bridge, Links::Routed] {
        let scene = Scene::new(links);
        scene.policy("deny", &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
        let _own =
            [0, 1].map(|family| Echo::serve(&scene.node.namespace, To::Node(4000).address(family)).unwrap());
        scene.expect(&[
            ("client", To::Node(4000), true),
            ("node", To::Pod(SERVER, WEB_BEHIND), true),
            ("node", To::Service(1, WEB), true),
            ("client", To::Node(NODE_PORT), false),
        ]);
        scene.end();
    }
}

/// A pod that reaches itself through a Service is not isolated from itself.
#[test]
fn a_pod_reaches_itself_by_its_own_service() {
    let scene = Scene::new(Links::Routed);
    scene.policy("deny", &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
    scene.expect(&[("server", To::Service(1, WEB), true), ("server", To::Service(3, WEB), false)]);
    scene.end();
}

#[test]
fn a_revocation_ends_connections_that_were_opened_by_a_service() {
    use netattach_tests::traffic::{connect, exchange};
    for links in [Links::Bridge, Links::Routed] {
        let scene = Scene::new(links);
        scene.policy("client", &only_web_of_the_server());
        for family in [0, 1] {
            let mut open =
                connect(&scene.client.namespace, To::Service(1, WEB).address(family), PATIENCE).unwrap();
            scene.policy("client", &nothing_from_the_client());
            assert!(exchange(&mut open, SILENCE).is_err(), "{links:?} {family}");
            scene.policy("client", &only_web_of_the_server());
            exchange(&mut open, PATIENCE).unwrap();
        }
        scene.end();
    }
}

/// A drop is recorded with the translated destination, and `explain` states that this is what policies are applied to.
#[test]
fn a_drop_behind_the_translation_is_told_by_where_it_went() {
    let scene = Scene::new(Links::Bridge);
    scene.policy("client", &only_web_of_the_server());
    scene.expect(&[("client", To::Service(1, ADMIN), false)]);
    let told = || {
        let flows = scene.flows();
        flows.lines().any(|line| line.contains("egress-port") && line.contains(&ADMIN_BEHIND.to_string()))
    };
    assert!(eventually(PATIENCE, told), "{}", scene.flows());
    let stats = scene.node.ctl(&["stats", "--pod", &format!("{NAMESPACE}/client")]).unwrap();
    assert!(stats[0]["dropped"]["egress-port"].as_u64().unwrap() > 0, "{stats:#}");
    let pod = format!("{NAMESPACE}/client");
    let paths = scene.node.ctl(&["explain", &pod, "10.96.0.1", "80"]).unwrap();
    assert_eq!(paths[0]["translated"], json!(true), "{paths:#}");
    scene.end();
}
