//! The unknowns that a snapshot reports.

use serde_json::json;
use serde_json::value::RawValue;

use super::super::client::Ask;
use super::super::resource::ALWAYS;
use super::*;
use crate::npwg::NetworkRef;

fn publish(view: &View) -> Option<Unknown> {
    view.publish_now(&mut Vec::new(), &mut LogShare::default());
    locked(&view.followed).published.then(|| view.snapshot().unknown)
}

/// Returns a view in which all kinds that are always followed have been read, except the last one, the policies.
fn all_but_policies() -> (View, &'static Resource) {
    let [pods, namespaces, definitions, policies] = ALWAYS;
    let view = View::new(ALWAYS);
    for resource in [pods, namespaces, definitions] {
        view.complete(resource, resource.paths[0]);
    }
    (view, policies)
}

#[test]
fn that_a_server_does_not_know_policies_is_for_sure_once_it_has_said_so_again() {
    let (view, policies) = all_but_policies();
    let doubtful = Some(Unknown { kinds: true, ..Unknown::default() });
    let some_time_passes = || {
        let mut followed = locked(&view.followed);
        let unserved = &mut followed.of(policies).unserved;
        *unserved = unserved.and_then(|since| since.checked_sub(DOUBT));
    };
    assert_eq!(publish(&view), None);
    view.unserved(policies);
    assert_eq!(publish(&view), doubtful);
    let first = *view.changes().borrow();
    view.unserved(policies);
    assert_eq!(publish(&view), doubtful, "that is too soon");
    some_time_passes();
    assert_eq!(publish(&view), doubtful, "it has not said so again");
    // The server may have been restarted.
    view.failing(policies, &Ask::get("/p").ended());
    view.unserved(policies);
    assert_eq!(publish(&view), doubtful, "that is too soon after it was away");
    some_time_passes();
    view.unserved(policies);
    assert_eq!(publish(&view), Some(Unknown::default()));
    assert_eq!(*view.changes().borrow(), first + 1, "nothing else has changed, and readers are told");
    // The kind is defined meanwhile.
    let (view, policies) = all_but_policies();
    view.unserved(policies);
    view.complete(policies, policies.paths[0]);
    assert_eq!(publish(&view), Some(Unknown::default()));
}

#[test]
fn pods_of_other_nodes_are_unknown_until_all_of_them_have_been_read_once() {
    let raw = |json: serde_json::Value| RawValue::from_string(json.to_string()).unwrap();
    let pod = raw(json!({"metadata": {"namespace": "shop", "name": "a", "uid": "1"}}));
    let from = json!([{"from": [{"podSelector": {}}]}]);
    let policy = raw(json!({
        "metadata": {
            "namespace": "shop",
            "name": "p",
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": "net-a"},
        },
        "spec": {"podSelector": {}, "ingress": from},
    }));
    let (view, policies) = all_but_policies();
    view.change(|cache| {
        cache.put(Kind::Pod, &pod);
        cache.put(Kind::MultiNetworkPolicy, &policy);
    });
    view.complete(policies, policies.paths[0]);
    assert_eq!(publish(&view), None, "it waits for them, for a moment");
    assert_eq!(*view.wants_remote().borrow(), Want::Now);
    locked(&view.followed).wanted = Instant::now().checked_sub(PEERS_PATIENCE);
    assert_eq!(publish(&view), Some(Unknown { remote_pods: true, ..Unknown::default() }));
    view.complete(&REMOTE_PODS, REMOTE_PODS.paths[0]);
    assert_eq!(publish(&view), Some(Unknown::default()));
    view.change(|cache| cache.remove(Kind::Pod, &pod));
    assert_eq!(publish(&view), Some(Unknown::default()));
    assert_eq!(*view.wants_remote().borrow(), Want::Not);
}

#[test]
fn pods_on_the_default_network_alone_are_waited_for_once_a_policy_for_it_needs_them() {
    let raw = |json: serde_json::Value| RawValue::from_string(json.to_string()).unwrap();
    let policy = |name: &str, network: &str| {
        let annotations = json!({"k8s.v1.cni.cncf.io/policy-for": network});
        let from = json!([{"from": [{"podSelector": {}}]}]);
        raw(json!({"metadata": {"namespace": "shop", "name": name, "annotations": annotations},
                   "spec": {"podSelector": {}, "ingress": from}}))
    };
    let (view, policies) = all_but_policies();
    view.change(|cache| {
        cache.leave_out_default(Some(NetworkRef::new("kube-system", "default")));
        cache.put(Kind::Pod, &raw(json!({"metadata": {"namespace": "shop", "name": "a", "uid": "1"}})));
        cache.put(Kind::MultiNetworkPolicy, &policy("p", "lan"));
    });
    view.complete(policies, policies.paths[0]);
    view.begins(&REMOTE_PODS, false);
    view.complete(&REMOTE_PODS, REMOTE_PODS.paths[0]);
    assert_eq!(publish(&view), Some(Unknown::default()));
    assert!(!*view.wants_more_remote().borrow());

    let version = *view.changes().borrow();
    view.change(|cache| cache.put(Kind::MultiNetworkPolicy, &policy("q", "kube-system/default")));
    publish(&view);
    assert_eq!(*view.changes().borrow(), version, "it waits for them, for a moment");
    assert!(*view.wants_more_remote().borrow());
    view.begins(&REMOTE_PODS, true);
    publish(&view);
    assert_eq!(*view.changes().borrow(), version, "they are not all read yet");
    view.complete(&REMOTE_PODS, REMOTE_PODS.paths[0]);
    assert_eq!(publish(&view), Some(Unknown::default()));
    assert_eq!(*view.changes().borrow(), version + 1);
    // They stay when they are not needed any more.
    view.change(|cache| cache.remove(Kind::MultiNetworkPolicy, &policy("q", "")));
    assert_eq!(publish(&view), Some(Unknown::default()));
    assert!(!*view.wants_more_remote().borrow());
}
