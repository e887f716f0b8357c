//! The cases of the end-to-end suite of Kubernetes 1.20 for NetworkPolicy (`test/e2e/network/network_policy.go`), by
//! their names. As in that suite, clients reach servers by Services. The server's Service is number 1; a pod of
//! another namespace and node has number 2.

use super::*;

const SERVER_WEB: To = To::Service(1, WEB);
const SERVER_ADMIN: To = To::Service(1, ADMIN);
const REMOTE_WEB: To = To::Service(2, WEB);
const REMOTE_ADMIN: To = To::Service(2, ADMIN);

fn on(name: &str, direction: &str, rules: Value) -> Value {
    let mut spec = json!({"podSelector": {"matchLabels": {"app": name}}, "policyTypes": [direction]});
    spec[direction.to_lowercase()] = rules;
    spec
}

fn elsewhere() -> Value {
    json!({"namespaceSelector": {"matchLabels": {"ns": "elsewhere"}}})
}

/// Runs a case on the node that all cases share: each begins and ends without a policy.
fn case(name: &str, scene: &Scene, run: impl FnOnce(&Scene)) {
    scene.expect(&[("client", SERVER_WEB, true)]);
    eprintln!("{name}");
    run(scene);
    for file in std::fs::read_dir(scene.node.path("source")).unwrap() {
        let file = file.unwrap().path();
        let stem = file.file_stem().unwrap().to_string_lossy().into_owned();
        if stem.starts_with("policy-") {
            scene.node.remove(&stem).unwrap();
        }
    }
    scene.settle();
}

/// Rows: V1-default-deny-ingress, V1-default-deny-all, V1-allow-within-namespace, V1-allow-one-namespace.
/// Rows: V1-pod-match-expressions, V1-namespace-match-expressions, V1-pod-or-namespace, V1-pod-and-namespace.
/// Rows: V1-pod-in-other-namespace, V1-ports, V1-stacked-overlapping, V1-allow-all.
/// Rows: V1-named-port, V1-namespace-and-named-port, V1-ingress-allow-all-wins.
#[test]
fn ingress_cases_of_the_kubernetes_suite_hold_for_services() {
    let scene = Scene::new(Links::Bridge);
    case("should support a 'default-deny-ingress' policy", &scene, |scene| {
        scene.policy("a", &json!({"podSelector": {}, "ingress": []}));
        scene.expect(&[
            ("client", SERVER_WEB, false),
            ("other", SERVER_WEB, false),
            ("client", REMOTE_WEB, true),
        ]);
    });
    case("should support a 'default-deny-all' policy", &scene, |scene| {
        scene.policy(
            "a",
            &json!({"podSelector": {}, "policyTypes": ["Egress", "Ingress"], "ingress": [], "egress": []}),
        );
        scene.expect(&[
            ("client", SERVER_WEB, false),
            ("client", REMOTE_WEB, false),
            ("remote", To::Pod(SERVER, WEB_BEHIND), false),
        ]);
    });
    case(
        "should enforce policy to allow traffic from pods within server namespace based on PodSelector",
        &scene,
        |scene| {
            scene.policy("a", &on("server", "Ingress", json!([{"from": [app("client")]}])));
            scene.expect(&[("client", SERVER_WEB, true), ("other", SERVER_WEB, false)]);
        },
    );
    case(
        "should enforce policy to allow traffic only from a different namespace, based on NamespaceSelector",
        &scene,
        |scene| {
            scene.policy("a", &on("server", "Ingress", json!([{"from": [elsewhere()]}])));
            scene.expect(&[("client", SERVER_WEB, false), ("remote", To::Pod(SERVER, WEB_BEHIND), true)]);
        },
    );
    case("should enforce policy based on PodSelector with MatchExpressions", &scene, |scene| {
        let of = json!({"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["client"]}]}});
        scene.policy("a", &on("server", "Ingress", json!([{"from": [of]}])));
        scene.expect(&[("client", SERVER_WEB, true), ("other", SERVER_WEB, false)]);
    });
    case("should enforce policy based on NamespaceSelector with MatchExpressions", &scene, |scene| {
        let of = json!({"namespaceSelector": {"matchExpressions": [{"key": "ns", "operator": "In", "values": ["elsewhere"]}]}});
        scene.policy("a", &on("server", "Ingress", json!([{"from": [of]}])));
        scene.expect(&[("client", SERVER_WEB, false), ("remote", To::Pod(SERVER, WEB_BEHIND), true)]);
    });
    case("should enforce policy based on PodSelector or NamespaceSelector", &scene, |scene| {
        scene.policy("a", &on("server", "Ingress", json!([{"from": [app("client"), elsewhere()]}])));
        scene.expect(&[
            ("client", SERVER_WEB, true),
            ("other", SERVER_WEB, false),
            ("remote", To::Pod(SERVER, WEB_BEHIND), true),
        ]);
    });
    case("should enforce policy based on PodSelector and NamespaceSelector", &scene, |scene| {
        let mut of = elsewhere();
        of["podSelector"] = json!({"matchLabels": {"app": "client"}});
        scene.policy("a", &on("server", "Ingress", json!([{"from": [of]}])));
        scene.expect(&[("client", SERVER_WEB, false), ("remote", To::Pod(SERVER, WEB_BEHIND), false)]);
    });
    case(
        "should enforce policy to allow traffic only from a pod in a different namespace based on PodSelector and NamespaceSelector",
        &scene,
        |scene| {
            let mut of = elsewhere();
            of["podSelector"] = json!({"matchLabels": {"app": "remote"}});
            scene.policy("a", &on("server", "Ingress", json!([{"from": [of]}])));
            scene.expect(&[("client", SERVER_WEB, false), ("remote", To::Pod(SERVER, WEB_BEHIND), true)]);
        },
    );
    case("should enforce policy based on Ports", &scene, |scene| {
        scene.policy("a", &on("server", "Ingress", json!([{"ports": both(ADMIN_BEHIND)}])));
        scene.expect(&[("client", SERVER_WEB, false), ("client", SERVER_ADMIN, true)]);
    });
    case("should enforce multiple, stacked policies with overlapping podSelectors", &scene, |scene| {
        scene.policy("a", &on("server", "Ingress", json!([{"ports": both(WEB_BEHIND)}])));
        scene.expect(&[("client", SERVER_WEB, true), ("client", SERVER_ADMIN, false)]);
        scene.policy("b", &on("server", "Ingress", json!([{"ports": both(ADMIN_BEHIND)}])));
        scene.expect(&[("client", SERVER_WEB, true), ("client", SERVER_ADMIN, true)]);
    });
    case("should support allow-all policy", &scene, |scene| {
        scene.policy("a", &json!({"podSelector": {}, "ingress": [{}]}));
        scene.expect(&[("client", SERVER_WEB, true), ("client", SERVER_ADMIN, true)]);
    });
    case("should allow ingress access on one named port", &scene, |scene| {
        let web = json!([{"ports": [{"port": "web"}, {"port": "web", "protocol": "UDP"}]}]);
        scene.policy("a", &on("server", "Ingress", web));
        scene.expect(&[("client", SERVER_WEB, true), ("client", SERVER_ADMIN, false)]);
    });
    case("should allow ingress access from namespace on one named port", &scene, |scene| {
        let web =
            json!([{"from": [elsewhere()], "ports": [{"port": "web"}, {"port": "web", "protocol": "UDP"}]}]);
        scene.policy("a", &on("server", "Ingress", web));
        scene.expect(&[
            ("client", SERVER_WEB, false),
            ("remote", To::Pod(SERVER, WEB_BEHIND), true),
            ("remote", To::Pod(SERVER, ADMIN_BEHIND), false),
        ]);
    });
    case(
        "should enforce multiple ingress policies with ingress allow-all policy taking precedence",
        &scene,
        |scene| {
            scene.policy("a", &on("server", "Ingress", json!([{"ports": both(ADMIN_BEHIND)}])));
            scene.expect(&[("client", SERVER_WEB, false), ("client", SERVER_ADMIN, true)]);
            scene.policy("b", &json!({"podSelector": {}, "ingress": [{}]}));
            scene.expect(&[("client", SERVER_WEB, true), ("client", SERVER_ADMIN, true)]);
        },
    );
    scene.end();
}

/// Rows: V1-egress-named-port, V1-egress-other-namespace, V1-egress-allow-all-wins, V1-egress-cidr.
/// Rows: V1-except-clause, V1-cidr-and-except, V1-independent-directions.
#[test]
fn egress_cases_of_the_kubernetes_suite_hold_for_services() {
    let scene = Scene::new(Links::Bridge);
    case("should allow egress access on one named port", &scene, |scene| {
        let web =
            json!([{"to": [app("server")], "ports": [{"port": "web"}, {"port": "web", "protocol": "UDP"}]}]);
        scene.policy("a", &on("client", "Egress", web));
        scene.expect(&[
            ("client", SERVER_WEB, true),
            ("client", SERVER_ADMIN, false),
            ("client", To::Service(3, WEB), false),
        ]);
    });
    case(
        "should enforce egress policy allowing traffic to a server in a different namespace based on PodSelector and NamespaceSelector",
        &scene,
        |scene| {
            let mut to = elsewhere();
            to["podSelector"] = json!({"matchLabels": {"app": "remote"}});
            scene.policy("a", &on("client", "Egress", json!([{"to": [to]}])));
            scene.expect(&[
                ("client", REMOTE_WEB, true),
                ("client", REMOTE_ADMIN, true),
                ("client", SERVER_WEB, false),
            ]);
        },
    );
    case(
        "should enforce multiple egress policies with egress allow-all policy taking precedence",
        &scene,
        |scene| {
            scene.policy("a", &on("client", "Egress", json!([{"ports": both(WEB_BEHIND)}])));
            scene.expect(&[("client", SERVER_WEB, true), ("client", SERVER_ADMIN, false)]);
            scene.policy("b", &on("client", "Egress", json!([{}])));
            scene.expect(&[("client", SERVER_WEB, true), ("client", SERVER_ADMIN, true)]);
        },
    );
    case("should allow egress access to server in CIDR block", &scene, |scene| {
        let blocks = [0, 1].map(|family| json!({"ipBlock": {"cidr": format!("{}/{}", pod_at(family, SERVER, 0).ip(), [32, 128][family])}}));
        scene.policy("a", &on("client", "Egress", json!([{"to": blocks}])));
        scene.expect(&[
            ("client", SERVER_WEB, true),
            ("client", To::Service(3, WEB), false),
            ("client", REMOTE_WEB, false),
        ]);
    });
    case("should enforce except clause while egress access to server in CIDR block", &scene, |scene| {
        let blocks = [0, 1].map(|family| {
            let (net, bits) = (format!("{}0", PODS[family]), [24, 64][family]);
            let except = format!("{}/{}", pod_at(family, SERVER, 0).ip(), [32, 128][family]);
            json!({"ipBlock": {"cidr": format!("{net}/{bits}"), "except": [except]}})
        });
        scene.policy("a", &on("client", "Egress", json!([{"to": blocks}])));
        scene.expect(&[("client", SERVER_WEB, false), ("client", To::Service(3, WEB), true)]);
    });
    case(
        "should ensure an IP overlapping both IPBlock.CIDR and IPBlock.Except is allowed",
        &scene,
        |scene| {
            let block = |family: usize, except: bool| {
                let server = pod_at(family, SERVER, 0).ip();
                let bits = [32, 128][family];
                let net = format!("{}0/{}", PODS[family], [24, 64][family]);
                if except {
                    json!({"ipBlock": {"cidr": net, "except": [format!("{server}/{bits}")]}})
                } else {
                    json!({"ipBlock": {"cidr": format!("{server}/{bits}")}})
                }
            };
            scene.policy("a", &on("client", "Egress", json!([{"to": [block(0, true), block(1, true)]}])));
            scene.expect(&[("client", SERVER_WEB, false)]);
            scene.policy("b", &on("client", "Egress", json!([{"to": [block(0, false), block(1, false)]}])));
            scene.expect(&[("client", SERVER_WEB, true)]);
        },
    );
    case(
        "should enforce policies to check ingress and egress policies can be controlled independently based on PodSelector",
        &scene,
        |scene| {
            scene.policy("a", &on("client", "Egress", json!([{"to": [app("server")]}])));
            scene.policy("b", &on("client", "Ingress", json!([{"from": [app("nobody")]}])));
            scene.expect(&[
                ("client", SERVER_WEB, true),
                ("other", To::Pod(CLIENT, WEB_BEHIND), false),
                ("remote", To::Pod(CLIENT, WEB_BEHIND), false),
            ]);
            scene.policy("b", &on("client", "Ingress", json!([{}])));
            scene.expect(&[
                ("client", SERVER_WEB, true),
                ("other", To::Pod(CLIENT, WEB_BEHIND), true),
                ("remote", To::Pod(CLIENT, WEB_BEHIND), true),
            ]);
        },
    );
    scene.end();
}

/// Rows: V1-updated-policy, V1-updated-namespace-labels, V1-updated-pod-labels, V1-ends-after-deletion.
/// Rows: V1-sctp-is-not-tcp, V1-sctp-isolates.
#[test]
fn changing_cases_of_the_kubernetes_suite_hold_for_services() {
    let scene = Scene::new(Links::Routed);
    case("should enforce updated policy", &scene, |scene| {
        scene.policy("a", &on("server", "Ingress", json!([{"from": [app("client")]}])));
        scene.expect(&[("client", SERVER_WEB, true), ("other", SERVER_WEB, false)]);
        scene.policy("a", &on("server", "Ingress", json!([{"from": [app("other")]}])));
        scene.expect(&[("client", SERVER_WEB, false), ("other", SERVER_WEB, true)]);
    });
    case("should allow ingress access from updated namespace", &scene, |scene| {
        let of = json!({"namespaceSelector": {"matchLabels": {"ns": "updated"}}});
        scene.policy("a", &on("server", "Ingress", json!([{"from": [of]}])));
        scene.expect(&[("remote", To::Pod(SERVER, WEB_BEHIND), false)]);
        scene.node.write("elsewhere", &namespace("elsewhere", &json!({"ns": "updated"}))).unwrap();
        scene.settle();
        scene.expect(&[("remote", To::Pod(SERVER, WEB_BEHIND), true)]);
        scene.node.write("elsewhere", &namespace("elsewhere", &json!({"ns": "elsewhere"}))).unwrap();
    });
    case("should allow ingress access from updated pod", &scene, |scene| {
        scene.policy("a", &on("server", "Ingress", json!([{"from": [app("updated"), app("client")]}])));
        scene.expect(&[("other", SERVER_WEB, false)]);
        scene.node.write("pod-other", &labelled("other", "updated")).unwrap();
        scene.settle();
        scene.expect(&[("other", SERVER_WEB, true)]);
    });
    case("should deny ingress access to updated pod", &scene, |scene| {
        scene.policy("a", &on("other", "Ingress", json!([])));
        scene.expect(&[("client", To::Service(3, WEB), true)]);
        scene.node.write("pod-other", &labelled("other", "other")).unwrap();
        scene.settle();
        scene.expect(&[("client", To::Service(3, WEB), false)]);
    });
    case("should stop enforcing policies after they are deleted", &scene, |scene| {
        scene.policy("a", &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
        scene.expect(&[("client", SERVER_WEB, false), ("client", REMOTE_WEB, false)]);
        scene.no_policy("a");
        scene.expect(&[("client", SERVER_WEB, true), ("client", REMOTE_WEB, true)]);
    });
    case("should not allow access by TCP when a policy specifies only SCTP", &scene, |scene| {
        scene.policy(
            "a",
            &on("server", "Ingress", json!([{"ports": [{"protocol": "SCTP", "port": WEB_BEHIND}]}])),
        );
        scene.expect(&[("client", SERVER_WEB, false), ("client", To::Pod(SERVER, WEB_BEHIND), false)]);
    });
    scene.end();
}
