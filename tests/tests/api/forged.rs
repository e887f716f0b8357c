//! The published status of a pod that other clients change, and the claims of a pod's author in it.

use std::net::SocketAddr;
use std::time::Duration;

use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::traffic::{Echo, PATIENCE, connects, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

use crate::rig::{LABEL, NODE, Rig, STATUS, object};

fn metadata(rig: &Rig, name: &str) -> Value {
    rig.server.get("pods", NAMESPACE, name).unwrap()["metadata"].take()
}

#[test]
fn a_status_that_another_changes_is_put_back_until_its_pod_ends() {
    let rig = Rig::started();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    let whole = rig.published("a");
    let is_put_back = |name: &str, whole: &Value, spoiled: &Value| {
        rig.server.patch("pods", NAMESPACE, name, spoiled).unwrap();
        let is_whole = || {
            let metadata = metadata(&rig, name);
            let text = metadata["annotations"][STATUS].as_str().unwrap_or("null").to_owned();
            let label = metadata["labels"].get(LABEL);
            serde_json::from_str::<Value>(&text).unwrap() == *whole && label == Some(&json!(""))
        };
        assert!(eventually(PATIENCE, is_whole), "{spoiled}");
    };
    let emptied = json!({"metadata": {"annotations": {STATUS: "[]"}}});
    is_put_back("a", &whole, &emptied);
    // Immediately after the write: the watch's state is no longer taken for an older one.
    is_put_back("a", &whole, &json!({"metadata": {"labels": {LABEL: null}}}));
    // As if it were on the default network alone: agents of other nodes would not look for it.
    is_put_back("a", &whole, &json!({"metadata": {"labels": {LABEL: "default"}}}));
    // The pod is terminating: its status is not written any more.
    rig.server.begin_deletion("pods", NAMESPACE, "a").unwrap();
    rig.settle("b");
    let mark = rig.server.mark();
    rig.server.patch("pods", NAMESPACE, "a", &json!({"metadata": {"annotations": {STATUS: null}}})).unwrap();
    // A check that finds the next pod's status changed has seen this one's.
    is_put_back("b", &rig.published("b"), &emptied);
    assert_eq!(rig.writes(mark, "a"), []);
}

/// The address of a pod on `lan-a`.
fn address(node: &Node, name: &str) -> SocketAddr {
    let rows = node.ctl(&["attachments"]).unwrap();
    let is_it = |row: &&Value| row["pod"]["name"] == name && row["network"] == "shop/lan-a";
    let row = rows.as_array().unwrap().iter().find(is_it).unwrap_or_else(|| panic!("{rows:#}")).clone();
    let address = row["addresses"][0].as_str().unwrap().split('/').next().unwrap().to_owned();
    SocketAddr::new(address.parse().unwrap(), 8080)
}

#[test]
fn what_pods_claim_never_lets_in_an_address_that_they_do_not_have() {
    let rig = Rig::started();
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}]
    });
    rig.server.create(&manifest::policy("only-friends", "lan-a, lan-b", &spec)).unwrap();
    let labelled = |name: &str, app: &str, node: &str, claims: Option<&str>| {
        let mut pod = object(name, node);
        pod["metadata"]["labels"] = json!({"app": app});
        if let Some(address) = claims {
            pod["metadata"]["labels"][LABEL] = json!("");
            pod["metadata"]["annotations"][STATUS] =
                json!(json!([{"name": "shop/lan-a", "interface": "net1", "ips": [address]}]).to_string());
        }
        rig.server.create(&pod).unwrap();
        Pod::new(name).unwrap()
    };
    let (web, stranger) = (labelled("web", "web", NODE, None), labelled("stranger", "other", NODE, None));
    let friend = labelled("friend", "friend", NODE, None);
    for pod in [&web, &stranger, &friend] {
        rig.add(pod).success();
        rig.published(&pod.name);
    }
    let server = Echo::serve(&web.namespace, address(&rig.node, "web")).unwrap();
    let reaches = |pod: &Pod, patience| connects(&pod.namespace, server.address(), patience);
    assert!(reaches(&friend, PATIENCE));
    assert!(!reaches(&stranger, Duration::from_millis(500)));

    // A friend of this node and one of another node claim the stranger's address.
    let of_stranger = address(&rig.node, "stranger").ip().to_string();
    let claim = json!([{"name": "shop/lan-a", "interface": "net1", "ips": [of_stranger]}]).to_string();
    rig.server
        .patch("pods", NAMESPACE, "friend", &json!({"metadata": {"annotations": {STATUS: claim}}}))
        .unwrap();
    labelled("remote-friend", "friend", "another", Some(&of_stranger));
    // So does a pod whose status is too large to be read, and has no effect.
    labelled("remote-large", "friend", "another", None);
    let large = json!([{"name": "shop/lan-a", "interface": "net1", "ips": [of_stranger]}]).to_string();
    let large =
        json!({"metadata": {"labels": {LABEL: ""}, "annotations": {STATUS: large + &" ".repeat(1 << 20)}}});
    rig.server.patch("pods", NAMESPACE, "remote-large", &large).unwrap();
    // And one that claims it as its own on the policy's other network.
    labelled("remote-across", "friend", "another", None);
    let across = json!([{"name": "shop/lan-b", "interface": "net2", "ips": [of_stranger]}]).to_string();
    let across = json!({"metadata": {"labels": {LABEL: ""}, "annotations": {STATUS: across}}});
    rig.server.patch("pods", NAMESPACE, "remote-across", &across).unwrap();
    // A claim for an address that no pod has here counts: the other node's agent is responsible for it.
    labelled("remote", "friend", "another", Some("10.61.0.200"));
    rig.settle("settled");
    assert!(!reaches(&stranger, Duration::from_secs(1)), "a claim let it in");
    assert!(reaches(&friend, PATIENCE), "its own address still counts");
}
