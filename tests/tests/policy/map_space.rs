//! Policies that do not fit into the maps in addition to those in force: on the default maps, the smallest of which
//! is that of IPv6 hosts.

use std::net::IpAddr;

use netattach_tests::manifest::{pod, policy};
use netattach_tests::node::DEFAULT_NETWORK;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, SILENCE, eventually, ping};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// More than half of the table of IPv6 hosts (65,536), and more than all of it.
const MOST: usize = 40_000;
const TOO_MANY: usize = 70_000;

/// Pods of the node, in the order in which they are attached: their addresses end in 2, 3, ...
const PODS: [&str; 4] = ["server", "client", "other", "stranger"];

struct Scene {
    node: Node,
    pods: Vec<Pod>,
}

impl Scene {
    fn new(settings: &[(&str, Value)], policies: &[(&str, Value)]) -> Self {
        let mut node = Node::new(&[]).unwrap();
        for (key, value) in settings {
            node.set(key, value.clone());
        }
        for name in PODS {
            node.write(name, &pod(name, &json!({"app": name}), &Value::Null)).unwrap();
        }
        for (name, policy) in policies {
            node.write(name, policy).unwrap();
        }
        node.start().unwrap();
        let attach = |name: &&str| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        };
        let pods = PODS.iter().map(attach).collect();
        Self { node, pods }
    }

    fn pod(&self, name: &str) -> &Pod {
        self.pods.iter().find(|pod| pod.name == name).unwrap()
    }

    /// Whether an echo request of one pod is answered by another.
    fn reaches(&self, from: &str, to: &str) -> bool {
        ping(&self.pod(from).namespace, address(to), SILENCE).unwrap()
    }

    /// Waits until exactly these reach a pod.
    fn await_reach(&self, to: &str, expected: &[&str]) {
        let mut found = Vec::new();
        let is_so = eventually(PATIENCE, || {
            let others = PODS.into_iter().filter(|from| *from != to);
            found = others.filter(|from| self.reaches(from, to)).collect();
            found == expected
        });
        assert!(is_so, "{found:?} reach {to} in place of {expected:?}: {:#}", self.conditions());
    }

    fn conditions(&self) -> Value {
        self.node.ctl(&["policy"]).unwrap()["conditions"].clone()
    }

    /// The number of a pod's ingress policy.
    fn number(&self, pod: &str) -> Value {
        let report = self.node.ctl(&["policy"]).unwrap();
        let rows = report["attachments"].as_array().unwrap().iter();
        rows.filter(|row| row["pod"]["name"] == pod).map(|row| row["ingress"].clone()).next().unwrap()
    }

    fn end(mut self) {
        for pod in &self.pods {
            self.node.del(pod).success();
        }
        let pods: Vec<&Pod> = self.pods.iter().collect();
        Snapshot::take(&self.node, &pods).unwrap().assert_nothing_is_left();
        self.node.stop().unwrap();
    }
}

fn address(pod: &str) -> IpAddr {
    let number = PODS.iter().position(|name| *name == pod).unwrap() + 2;
    format!("fd00:50::{number}").parse().unwrap()
}

/// A policy that allows one pod, and as many hosts elsewhere.
fn large(name: &str, selected: &str, allowed: &str, hosts: usize) -> Value {
    let hosts = (0..hosts).map(|host| format!("2001:db8::{:x}:{:x}/128", host >> 12, host & 0xfff));
    let hosts = hosts.chain([format!("{}/128", address(allowed))]);
    let peers: Vec<Value> = hosts.map(|cidr| json!({"ipBlock": {"cidr": cidr}})).collect();
    let spec = json!({
        "podSelector": {"matchLabels": {"app": selected}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers}]
    });
    policy(name, DEFAULT_NETWORK, &spec)
}

#[test]
fn a_policy_of_more_than_half_a_table_is_changed_and_what_it_revokes_is_revoked() {
    let scene = Scene::new(&[], &[("large", large("large", "server", "client", MOST))]);
    scene.await_reach("server", &["client"]);
    for allowed in ["other", "client", "other"] {
        scene.node.write("large", &large("large", "server", allowed, MOST)).unwrap();
        scene.await_reach("server", &[allowed]);
        assert_eq!(scene.conditions(), json!([]));
    }
    scene.end();
}

#[test]
fn a_pod_whose_policy_cannot_be_held_is_isolated_until_there_is_room() {
    let mut scene = Scene::new(&[], &[]);
    scene.await_reach("server", &["client", "other", "stranger"]);
    scene.node.write("first", &large("first", "server", "client", MOST)).unwrap();
    scene.await_reach("server", &["client"]);
    // It was open to everyone before.
    scene.node.write("second", &large("second", "other", "client", MOST)).unwrap();
    scene.await_reach("other", &[]);
    assert!(scene.reaches("client", "server"), "whose policy is held goes on");
    let then = "does not fit into the kernel's tables: its attachments are isolated, until it does";
    let problem =
        format!("{then}: map na_peer6 has room for {} more entries, 40001 are needed", 65_536 - 40_001);
    assert_eq!(
        scene.conditions(),
        json!([{"object": "multi-networkpolicy shop/second", "problem": problem}])
    );
    // Without another change of it: it takes the room that the first policy releases.
    scene.node.remove("first").unwrap();
    scene.await_reach("other", &["client"]);
    scene.await_reach("server", &["client", "other", "stranger"]);
    assert_eq!(scene.conditions(), json!([]));
    // The pod under it is detached, which frees its room.
    scene.node.write("first", &large("first", "server", "client", MOST)).unwrap();
    scene.await_reach("server", &[]);
    scene.node.del(scene.pod("other")).success();
    let mut found = Vec::new();
    let is_so = eventually(PATIENCE, || {
        found = ["client", "stranger"].into_iter().filter(|from| scene.reaches(from, "server")).collect();
        found == ["client"]
    });
    assert!(is_so, "{found:?}");
    for pod in &scene.pods {
        scene.node.del(pod).success();
    }
    let log = scene.node.stop().unwrap();
    assert!(log.contains("policy not in force") && log.contains("shop/second"), "{log}");
}

#[test]
fn a_policy_larger_than_a_table_isolates_and_a_smaller_one_in_its_place_is_in_force() {
    let scene = Scene::new(&[], &[("small", large("small", "server", "client", 1))]);
    scene.await_reach("server", &["client"]);
    scene.node.write("small", &large("small", "server", "client", TOO_MANY)).unwrap();
    scene.await_reach("server", &[]);
    assert_eq!(scene.conditions().as_array().unwrap().len(), 1);
    scene.node.write("small", &large("small", "server", "client", 2)).unwrap();
    scene.await_reach("server", &["client"]);
    scene.end();
}

#[test]
fn with_keep_an_isolated_pod_stays_under_what_isolates_it_and_an_open_one_is_isolated() {
    let settings = [("onOverflow", json!("keep"))];
    let scene = Scene::new(&settings, &[("large", large("large", "server", "client", MOST))]);
    scene.await_reach("server", &["client"]);
    scene.node.write("large", &large("large", "server", "other", MOST)).unwrap();
    scene.node.write("second", &large("second", "other", "client", MOST)).unwrap();
    scene.await_reach("other", &[]);
    scene.await_reach("server", &["client"]);
    assert_eq!(scene.conditions().as_array().unwrap().len(), 2);
    scene.end();
}

#[test]
fn a_restart_takes_over_what_is_in_the_maps_and_carries_out_what_has_changed_meanwhile() {
    let mut scene = Scene::new(&[], &[("large", large("large", "server", "client", MOST))]);
    scene.await_reach("server", &["client"]);
    let number = scene.number("server");
    scene.node.kill().unwrap();
    scene.node.start().unwrap();
    assert_eq!(scene.number("server"), number, "not written anew");
    assert!(scene.reaches("client", "server"));
    scene.node.kill().unwrap();
    scene.node.write("large", &large("large", "server", "other", MOST)).unwrap();
    scene.node.start().unwrap();
    scene.await_reach("server", &["other"]);
    scene.node.kill().unwrap();
    scene.node.write("second", &large("second", "other", "client", MOST)).unwrap();
    scene.node.start().unwrap();
    scene.await_reach("server", &["other"]);
    scene.await_reach("other", &[]);
    scene.end();
}

/// A peer allowed by neither the old nor the new policy never gets through, and the next agent completes the change.
#[test]
fn an_agent_killed_at_any_point_of_an_exchange_leaves_nobody_open() {
    let mut scene = Scene::new(&[], &[("large", large("large", "server", "client", MOST))]);
    scene.await_reach("server", &["client"]);
    let mut points = Vec::new();
    for (point, allowed) in ["other", "client"].into_iter().cycle().enumerate() {
        scene.node.kill().unwrap();
        let agent = env!("CARGO_BIN_EXE_crash-agent");
        scene.node.start_with_points(agent.as_ref()).unwrap();
        scene.node.arm(point).unwrap();
        scene.node.write("large", &large("large", "server", allowed, MOST)).unwrap();
        let (mut died, mut done) = (false, false);
        let ended = eventually(PATIENCE, || {
            done = scene.reaches(allowed, "server");
            // Answered only when no exchange is in progress.
            died = scene.node.ctl(&["policy"]).is_err();
            died || done
        });
        assert!(ended, "point {point}: the agent neither dies nor carries the change out");
        assert!(!scene.reaches("stranger", "server"), "point {point}");
        scene.node.disarm().unwrap();
        if !died {
            break;
        }
        points.extend(scene.node.points().pop());
        scene.node.wait_for_end().unwrap();
        scene.node.start().unwrap();
        scene.await_reach("server", &[allowed]);
        assert_eq!(scene.conditions(), json!([]), "point {point}");
    }
    let of = |name: &str| points.iter().filter(|point| *point == name).count();
    // Isolated, the old policy removed in batches, the new one written in batches, and put in force.
    let found = ["map:\"na_policy\"", "unmap:\"na_peer6\"", "map:\"na_peer6\""].map(of);
    assert!(found[0] >= 2 && found[1] >= 5 && found[2] >= 5, "{points:?}");
    scene.end();
}

/// More rules than a policy may have (`docs/budgets.md`).
#[test]
fn a_policy_beyond_the_budget_of_rules_is_refused_by_name_and_isolates_whom_it_selects() {
    const RULES: usize = 100_000;
    let rules = |number: usize| {
        let spec = json!({
            "podSelector": {"matchLabels": {"app": "server"}},
            "policyTypes": ["Ingress"],
            "ingress": vec![json!({"ports": [{"port": 80}]}); number - 1].into_iter().chain([json!({})]).collect::<Vec<_>>()
        });
        policy("many", DEFAULT_NETWORK, &spec)
    };
    let mut scene = Scene::new(&[], &[]);
    let everyone = ["client", "other", "stranger"];
    scene.await_reach("server", &everyone);
    scene.node.write("many", &rules(RULES + 1)).unwrap();
    scene.await_reach("server", &[]);
    let problem = format!(
        "spec: has more than {RULES} rules: the pods that it selects are isolated and none of its rules applies"
    );
    let expected = json!([{"object": "multi-networkpolicy shop/many", "problem": problem}]);
    assert_eq!(scene.conditions(), expected);
    assert_eq!(scene.node.ctl(&["status"]).unwrap()["source"], expected);
    assert!(scene.reaches("client", "other"), "whom it does not select is as it was");
    scene.node.write("many", &rules(RULES)).unwrap();
    scene.await_reach("server", &everyone);
    assert_eq!(scene.conditions(), json!([]));
    for pod in &scene.pods {
        scene.node.del(pod).success();
    }
    let log = scene.node.stop().unwrap();
    assert!(log.contains("not in force as written") && log.contains("shop/many"), "{log}");
}

/// A policy that cannot be read isolates its pods, if no earlier version is known.
#[test]
fn a_policy_that_cannot_be_read_isolates_from_the_start() {
    let odd = policy("odd", DEFAULT_NETWORK, &json!({"podSelector": {}, "ingress": 7}));
    let scene = Scene::new(&[], &[("odd", odd)]);
    scene.await_reach("server", &[]);
    scene.node.remove("odd").unwrap();
    scene.await_reach("server", &["client", "other", "stranger"]);
    scene.end();
}
