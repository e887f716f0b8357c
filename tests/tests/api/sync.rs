//! The first sync, kinds that are not served, objects that cannot be read.

use std::time::Duration;

use netattach_tests::api_server::{Fault, Options, Request, Verb, When};
use netattach_tests::manifest::{NAMESPACE, network, policy};
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Outcome, Pod};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig, calls, object, timed};

/// An agent with a server that withholds required objects: ADD is answered with code 11 within a second, with the
/// reason.
fn refused_until_synced(spoil: impl FnOnce(&mut Rig), why: &str, mend: impl FnOnce(&mut Rig)) {
    let mut rig = Rig::new(&Options::default());
    let pod = rig.pod("a");
    spoil(&mut rig);
    rig.node.start_serving().unwrap();
    let mut said = String::new();
    let mut quickest = Duration::MAX;
    let is_said = eventually(PATIENCE, || {
        let (took, outcome) = timed(&rig.call("ADD", &pod));
        quickest = quickest.min(took);
        let (code, message) = outcome.failure();
        assert_eq!(code, 11, "{message}");
        said = message;
        said.contains(why) && quickest < Duration::from_secs(1)
    });
    assert_eq!(rig.status().failure().0, 50);
    assert!(is_said, "{why} is not said: {said}, or not within a second: {quickest:?}");
    mend(&mut rig);
    let mut last = Outcome { exit: 1, json: json!(null) };
    let attached = eventually(PATIENCE, || {
        last = rig.add(&pod);
        last.exit == 0
    });
    assert!(attached, "{last:?}");
}

#[test]
fn an_add_before_the_first_sync_fails_at_once_when_the_server_is_overloaded() {
    refused_until_synced(
        |rig| {
            rig.server.faults().always(When::on(Verb::List, "pods"), Fault::Answer(503));
        },
        "pods of this node: GET /api/v1/pods: 503 ",
        |rig| rig.server.faults().clear(),
    );
}

#[test]
fn an_add_before_the_first_sync_fails_at_once_when_the_server_is_away() {
    refused_until_synced(
        |rig| rig.server.stop(),
        "namespaces: GET /api/v1/namespaces: ",
        |rig| {
            rig.server.start_again().unwrap();
        },
    );
}

#[test]
fn an_add_before_the_first_sync_fails_at_once_when_the_token_is_refused() {
    refused_until_synced(
        |rig| rig.server.accept_tokens(&[]),
        "401 Unauthorized",
        |rig| {
            rig.server.accept_tokens(&[netattach_tests::api_server::TOKEN]);
        },
    );
}

#[test]
fn an_add_before_the_first_sync_fails_at_once_when_the_certificate_is_not_trusted() {
    refused_until_synced(
        |rig| rig.server.foreign_certificate().unwrap(),
        "certificate",
        |rig| {
            rig.server.own_certificate().unwrap();
        },
    );
}

#[test]
fn an_add_before_the_first_sync_fails_at_once_when_the_server_does_not_answer() {
    refused_until_synced(
        |rig| {
            rig.server.faults().times(1, When::on(Verb::List, "pods"), Fault::Delay(Duration::from_secs(8)));
        },
        "pods of this node are being read",
        |_| {},
    );
}

fn create_definition(rig: &Rig, number: usize) {
    let config = json!({"cniVersion": "1.0.0", "type": "bridge"});
    rig.server.create(&network(NAMESPACE, &format!("n{number}"), &config)).unwrap();
}

#[test]
fn a_page_that_an_overloaded_server_refuses_is_asked_for_again_in_its_place() {
    let mut rig = Rig::new(&Options::default());
    (0..210).for_each(|number| create_definition(&rig, number));
    let kind = "network-attachment-definitions";
    // The first page arrives.
    rig.server.faults().times(1, When::on(Verb::List, kind), Fault::Delay(Duration::ZERO));
    rig.server.faults().times(2, When::on(Verb::List, kind), Fault::AnswerRetryAfter(503, 1));
    rig.start();
    let requests = rig.server.requests();
    let lists: Vec<_> =
        requests.iter().filter(|one| one.verb == Verb::List && one.resource == kind).collect();
    let answers: Vec<_> = lists.iter().map(|one| one.answer).collect();
    assert_eq!(answers, [200, 503, 503, 200, 200].map(Some));
    let positions: Vec<_> = lists.iter().map(|one| one.query.get("continue")).collect();
    let (second, third) = (positions[1], positions[4]);
    assert!(second.is_some() && third.is_some() && second != third);
    assert_eq!(positions, [None, second, second, second, third]);
    assert!(lists[2].at - lists[1].at >= Duration::from_secs(1), "it asked for a pause");
}

#[test]
fn lists_come_in_pages_and_watches_begin_where_they_end() {
    let mut rig = Rig::new(&Options::default());
    for number in 0..210 {
        rig.server.create(&object(&format!("p{number}"), NODE)).unwrap();
        create_definition(&rig, number);
    }
    rig.start();
    let requests = rig.server.requests();
    let of = |resource: &'static str| {
        requests.iter().filter(move |one| one.verb == Verb::List && one.resource == resource).map(|one| {
            let limit = one.query.get("limit").map(String::as_str);
            (one.query.get("fieldSelector").map(String::as_str), limit, one.query.contains_key("continue"))
        })
    };
    let page = |goes_on: bool| (None, Some("100"), goes_on);
    let pages: Vec<_> = of("network-attachment-definitions").collect();
    assert_eq!(pages, [page(false), page(true), page(true)]);
    // The pods of one node are requested at once: older servers search the pods of all nodes for each page. Before, any one
    // says how many there are.
    let at_once: Vec<_> = of("pods").collect();
    assert_eq!(at_once, [(None, Some("1"), false), (Some("spec.nodeName=node-1"), None, false)]);
    let of_pods = |verb: Verb| requests.iter().filter(move |one| one.verb == verb && one.resource == "pods");
    let watch = of_pods(Verb::Watch).next().unwrap();
    assert_eq!(watch.query["fieldSelector"], "spec.nodeName=node-1");
    assert_eq!(watch.query["allowWatchBookmarks"], "true");
    // 423 objects on the server, whose versions begin at 1000.
    assert_eq!(watch.query["resourceVersion"], "1423");
    let pod = Pod::new("p200").unwrap();
    rig.add(&pod).success();
}

/// Blocks need no pods, nor do policies that can select no pod of this node.
#[test]
fn pods_of_other_nodes_are_followed_once_a_policy_for_pods_of_this_node_has_pods_as_peers() {
    let rig = Rig::started();
    let are_others = |one: &Request| one.resource == "pods" && one.query.contains_key("labelSelector");
    let policy = |name: &str, peer: Value| {
        let spec = json!({"podSelector": {}, "ingress": [{"from": [peer]}]});
        rig.server.create(&policy(name, "lan-a", &spec)).unwrap();
    };
    policy("blocks", json!({"ipBlock": {"cidr": "10.61.0.0/24"}}));
    let source = || rig.node.whole_status().unwrap()["ready"][0]["detail"].clone();
    assert!(eventually(PATIENCE, || source().as_str().unwrap().contains("1 policy")), "{}", source());
    policy("pods", json!({"podSelector": {"matchLabels": {"app": "friend"}}}));
    assert!(eventually(PATIENCE, || source().as_str().unwrap().contains("2 policies")), "{}", source());
    assert!(!rig.server.requests().iter().any(are_others));
    let mark = rig.server.mark();
    rig.pod("a");
    assert!(rig.server.wait_for(mark, |requests| requests.iter().any(are_others)));
}

#[test]
fn the_older_version_of_policies_is_followed_where_the_newer_one_is_not_served() {
    let mut rig = Rig::new(&Options::default());
    rig.server.serve("multi-networkpolicies", Some("v1beta2"), false).unwrap();
    rig.start();
    let requests = rig.server.requests();
    let watched =
        requests.iter().find(|one| one.verb == Verb::Watch && one.resource == "multi-networkpolicies");
    assert_eq!(watched.unwrap().api_version, "k8s.cni.cncf.io/v1beta1");
}

/// The definition of the kind gets a version while the agent runs: its watch continues, and the next one is of the
/// newer version.
#[test]
fn the_newer_version_of_policies_is_followed_once_it_is_served() {
    let mut rig = Rig::new(&Options::default());
    rig.node.set("kubernetes", json!({"watchSeconds": 1}));
    rig.server.serve("multi-networkpolicies", Some("v1beta2"), false).unwrap();
    rig.start();
    let kind = "multi-networkpolicies";
    rig.await_trouble(kind, PATIENCE, "serves v1beta1 alone");
    let mark = rig.server.mark();
    rig.server.serve(kind, Some("v1beta2"), true).unwrap();
    let is_newer = |one: &Request| {
        one.verb == Verb::Watch && one.resource == kind && one.api_version == "k8s.cni.cncf.io/v1beta2"
    };
    assert!(rig.server.wait_for(mark, |requests| requests.iter().any(is_newer)));
    assert!(eventually(PATIENCE, || rig.trouble(kind).is_none()), "{:?}", rig.trouble(kind));
}

#[test]
fn kinds_that_are_not_served_are_asked_for_again() {
    let mut rig = Rig::new(&Options::default());
    for resource in ["multi-networkpolicies", "network-attachment-definitions"] {
        rig.server.serve(resource, None, false).unwrap();
    }
    rig.node.start().unwrap();
    let without = Pod::new("plain").unwrap();
    let mut plain = object("plain", NODE);
    plain["metadata"]["annotations"] = json!({});
    rig.server.create(&plain).unwrap();
    let attached = eventually(PATIENCE, || rig.add(&without).exit == 0);
    assert!(attached, "{:?}", rig.add(&without));
    let unserved =
        Some("the API server does not serve this kind: apply its definition, of deploy/base/crds".to_owned());
    for resource in ["multi-networkpolicies", "network-attachment-definitions"] {
        assert_eq!(rig.trouble(resource), unserved, "{resource}");
        rig.server.serve(resource, None, true).unwrap();
    }
    let mark = rig.server.mark();
    // They are asked for every 30 s.
    assert!(eventually(Duration::from_secs(60), || rig.trouble("network-attachment-definitions").is_none()));
    rig.await_watch(mark, "network-attachment-definitions");
    let pod = rig.pod("a");
    rig.add(&pod).success();
}

/// The first of several servers is starting, and does not have the kind yet: pods that the policies isolate stay
/// isolated.
#[test]
fn a_kind_that_a_server_does_not_know_for_a_moment_is_not_taken_for_none() {
    let mut rig = Rig::new(&Options::default());
    rig.server
        .create(&json!({
            "apiVersion": "k8s.cni.cncf.io/v1beta2", "kind": "MultiNetworkPolicy",
            "metadata": {"namespace": NAMESPACE, "name": "closed"}, "spec": {"podSelector": {}},
        }))
        .unwrap();
    // Both versions, twice.
    let unknown = When::on(Verb::List, "multi-networkpolicies");
    let fault = rig.server.faults().times(4, unknown, Fault::Answer(404));
    rig.node.start().unwrap();
    let source = || rig.node.whole_status().unwrap()["ready"][0].clone();
    assert!(eventually(PATIENCE, || source()["met"] == true), "{}", source());
    assert!(source()["detail"].as_str().unwrap().contains("1 policy"), "{}", source());
    assert_eq!(rig.server.faults().hits(fault), 4);
}

#[test]
fn an_object_that_cannot_be_read_is_a_problem_of_its_own() {
    let rig = Rig::started();
    let strange = [
        ("pods", "labels", json!({"labels": ["x"]}), json!({"nodeName": NODE, "containers": []})),
        ("pods", "spec", json!({"labels": {}}), json!({"nodeName": NODE, "containers": 7})),
        ("network-attachment-definitions", "config", json!({}), json!({"config": "{"})),
        ("multi-networkpolicies", "policy", json!({}), json!({"podSelector": "everything"})),
        ("namespaces", "labels", json!({"labels": 3}), json!({})),
    ];
    for (resource, name, metadata, spec) in strange {
        let mut object = json!({"metadata": metadata, "spec": spec});
        object["metadata"]["name"] = json!(name);
        let namespace = if resource == "namespaces" { "" } else { NAMESPACE };
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = json!(namespace);
        }
        rig.server.put_as_is(resource, namespace, name, object).unwrap();
    }
    let mut large = object("large", NODE);
    large["metadata"]["annotations"]["example.com/large"] = json!("x".repeat(1 << 20));
    rig.server.create(&large).unwrap();
    let mark = rig.server.mark();
    let (large, good) = (Pod::new("large").unwrap(), rig.pod("good"));
    let (code, message) = rig.add(&large).failure();
    assert_eq!(code, 11, "{message}");
    rig.add(&good).success();
    rig.published("good");
    assert!(
        !calls(&rig.server.requests_since(mark)).iter().any(|(verb, _)| *verb == Verb::List),
        "no stream died"
    );
    let status = rig.node.ctl(&["status"]).unwrap();
    let mut objects: Vec<&str> =
        status["source"].as_array().unwrap().iter().map(|row| row["object"].as_str().unwrap()).collect();
    objects.sort_unstable();
    assert_eq!(
        objects,
        [
            "multi-networkpolicy shop/policy",
            "namespace labels",
            "network-attachment-definition shop/config",
            "pod shop/labels",
            "pod shop/large",
            "pod shop/spec",
        ]
    );
    // They are gone with their objects.
    rig.server.delete("pods", NAMESPACE, "labels").unwrap();
    rig.server.delete("network-attachment-definitions", NAMESPACE, "config").unwrap();
    assert!(eventually(PATIENCE, || {
        let status = rig.node.ctl(&["status"]).unwrap();
        let gone = ["pod shop/labels", "network-attachment-definition shop/config"];
        status["source"].as_array().unwrap().iter().all(|row| !gone.iter().any(|gone| row["object"] == *gone))
    }));
}
