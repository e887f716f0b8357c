//! The behaviour of a real kube-apiserver that the agent relies on (1.20, older than any supported version).

use std::sync::Arc;

use anyhow::Result;
use netattach_tests::cluster::{Client, Cluster};
use serde_json::{Value, json};

const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const LABEL: &str = "netattach.io/attached";

/// A namespace of a test's own, with clients.
struct Rig {
    _cluster: Arc<Cluster>,
    admin: Client,
    agent: Client,
    pods: String,
}

impl Rig {
    fn new(namespace: &str) -> Result<Option<Self>> {
        let Some(cluster) = Cluster::shared(namespace)? else { return Ok(None) };
        let (admin, agent) = (cluster.admin()?, cluster.agent()?);
        admin.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}))?;
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        Ok(Some(Self { _cluster: cluster, admin, agent, pods }))
    }

    fn pod(&self, name: &str) -> Result<Value> {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": "node-a", "containers": [{"name": "main", "image": "example.com/x"}]}
        });
        self.admin.post(&self.pods, &pod)?.expect(201)
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.pods)
    }

    fn status(&self, name: &str) -> String {
        format!("{}/{name}/status", self.pods)
    }
}

/// Type, name and labels of an event.
fn seen(event: &Value) -> (String, String, Value) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &event["object"]["metadata"];
    (text(&event["type"]), text(&metadata["name"]), metadata["labels"].clone())
}

#[test]
fn a_patch_of_the_status_sets_labels_and_annotations_and_nothing_of_the_specification() {
    let Some(rig) = Rig::new("status-patch").unwrap() else { return };
    let made = rig.pod("a").unwrap();
    let patch = json!({
        "metadata": {
            "uid": made["metadata"]["uid"],
            "labels": {LABEL: "true"}, "annotations": {STATUS: "[]"}
        },
        "spec": {"nodeName": "node-b"},
        "status": {"phase": "Running"}
    });
    let patched = rig.agent.merge(&rig.status("a"), &patch).unwrap().expect(200).unwrap();
    let stored = rig.admin.get(&rig.path("a")).unwrap().expect(200).unwrap();
    assert_eq!(patched["metadata"]["resourceVersion"], stored["metadata"]["resourceVersion"]);
    assert_eq!(stored["metadata"]["labels"], json!({LABEL: "true"}));
    assert_eq!(stored["metadata"]["annotations"], json!({STATUS: "[]"}));
    assert_eq!(
        (&stored["spec"]["nodeName"], &stored["status"]["phase"]),
        (&json!("node-a"), &json!("Running"))
    );
}

/// 422 and not 409: for the server this is a change of a field that cannot change, no conflict.
#[test]
fn a_patch_for_another_pod_of_the_same_name_is_refused() {
    let Some(rig) = Rig::new("status-uid").unwrap() else { return };
    rig.pod("a").unwrap();
    let patch = json!({
        "metadata": {"uid": "4b3a0d0e-0000-4000-8000-000000000000", "annotations": {STATUS: "[]"}}
    });
    let reply = rig.agent.merge(&rig.status("a"), &patch).unwrap();
    assert_eq!((reply.status, &reply.body["reason"]), (422, &json!("Invalid")), "{}", reply.body);
    assert_eq!(reply.body["details"]["causes"][0]["field"], "metadata.uid");
    let stored = rig.admin.get(&rig.path("a")).unwrap().expect(200).unwrap();
    assert_eq!(stored["metadata"]["annotations"], Value::Null);
    let gone = rig.agent.merge(&rig.status("b"), &patch).unwrap();
    assert_eq!((gone.status, &gone.body["reason"]), (404, &json!("NotFound")));
}

#[test]
fn a_pod_that_loses_the_label_is_deleted_for_a_watch_of_metadata() {
    let Some(rig) = Rig::new("metadata-watch").unwrap() else { return };
    for name in ["a", "b"] {
        rig.pod(name).unwrap();
    }
    let label = |value: Value| json!({"metadata": {"labels": {LABEL: value}}});
    rig.agent.merge(&rig.status("a"), &label(json!("true"))).unwrap().expect(200).unwrap();
    let query = format!("{}?labelSelector={LABEL}", rig.pods);
    let list = rig.agent.get_as(&query, METADATA_LIST).unwrap().expect(200).unwrap();
    assert_eq!(list["kind"], "PartialObjectMetadataList");
    let [item] = list["items"].as_array().unwrap().as_slice() else { panic!("one pod: {list}") };
    assert_eq!((&item["metadata"]["name"], &item["spec"]), (&json!("a"), &Value::Null), "{item}");

    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    let mut watch =
        rig.agent.watch_as(&format!("{query}&watch=true&resourceVersion={version}"), METADATA).unwrap();
    rig.agent.merge(&rig.status("b"), &label(json!("true"))).unwrap().expect(200).unwrap();
    rig.agent.merge(&rig.status("a"), &label(Value::Null)).unwrap().expect(200).unwrap();
    rig.admin.delete(&rig.path("b")).unwrap().expect(200).unwrap();
    let mut events = Vec::new();
    while events.iter().map(seen).all(|(kind, name, _)| (kind.as_str(), name.as_str()) != ("DELETED", "b")) {
        let event = watch.event().unwrap();
        // A pod of a node is marked before it is deleted.
        if event["object"]["metadata"]["deletionTimestamp"].is_null() || event["type"] == "DELETED" {
            events.push(event);
        }
    }
    let labels = json!({LABEL: "true"});
    let all: Vec<_> = events.iter().map(seen).collect();
    assert_eq!(
        all,
        [
            ("ADDED".to_owned(), "b".to_owned(), labels.clone()),
            // Its state while it had the label.
            ("DELETED".to_owned(), "a".to_owned(), labels.clone()),
            ("DELETED".to_owned(), "b".to_owned(), labels),
        ]
    );
    assert!(events.iter().all(|event| event["object"]["kind"] == "PartialObjectMetadata"), "{events:?}");
}

/// The reason why lists are paged: docs/decisions/0036. The tests' own server answers the same, and as later ones do.
#[test]
fn a_list_is_not_streamed_by_a_server_that_cannot() {
    let Some(rig) = Rig::new("streamed").unwrap() else { return };
    let query =
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let reply = rig.agent.get(&format!("{}?{query}", rig.pods)).unwrap();
    let said = "ListOptions.meta.k8s.io \"\" is invalid: [resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for \
                watch, resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided]";
    assert_eq!((reply.status, &reply.body["message"]), (422, &json!(said)), "{}", reply.body);
}

/// How the pods of a node are listed where there are many on all nodes: docs/decisions/0036.
#[test]
fn a_list_may_name_a_version_that_it_does_not_precede_and_one_of_the_future_is_refused() {
    let Some(rig) = Rig::new("not-older").unwrap() else { return };
    rig.pod("a").unwrap();
    let newest = rig.agent.get_as("/api/v1/pods?limit=1", METADATA_LIST).unwrap().expect(200).unwrap();
    let version: u64 = newest["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
    // The cache of pods has a version once a pod has changed since.
    rig.pod("b").unwrap();
    let query =
        |version: u64| format!("{}?fieldSelector=spec.nodeName=node-a&resourceVersion={version}", rig.pods);
    let list = rig.agent.get(&query(version)).unwrap().expect(200).unwrap();
    let names: Vec<&Value> =
        list["items"].as_array().unwrap().iter().map(|item| &item["metadata"]["name"]).collect();
    assert!(names.contains(&&json!("a")), "{names:?}");
    let listed: u64 = list["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
    assert!(listed >= version, "{listed} {version}");
    let future = rig.agent.get(&query(version + 1_000_000)).unwrap();
    let said = future.body["message"].as_str().unwrap_or_default();
    assert!(future.status == 504 && said.contains("Too large resource version"), "{}", future.body);
}

#[test]
fn a_list_comes_in_pages_of_one_moment() {
    let Some(rig) = Rig::new("pages").unwrap() else { return };
    for name in ["a", "b", "c", "d", "e"] {
        rig.pod(name).unwrap();
    }
    let mut names = Vec::new();
    let mut versions = Vec::new();
    let mut token = String::new();
    loop {
        let query = format!("{}?limit=2&fieldSelector=spec.nodeName=node-a&continue={token}", rig.pods);
        let page = rig.agent.get(&query).unwrap().expect(200).unwrap();
        let items = page["items"].as_array().unwrap();
        names.push(items.iter().map(|item| item["metadata"]["name"].clone()).collect::<Value>());
        versions.push(page["metadata"]["resourceVersion"].clone());
        // An object that is deleted meanwhile is still in the following pages.
        let _ = rig.admin.delete(&rig.path("e"));
        match page["metadata"]["continue"].as_str() {
            Some(next) if !next.is_empty() => next.clone_into(&mut token),
            _ => break,
        }
    }
    assert_eq!(names, [json!(["a", "b"]), json!(["c", "d"]), json!(["e"])]);
    assert!(versions.iter().all(|version| version == &versions[0]), "{versions:?}");
}

/// A server sends a bookmark two seconds before it ends a watch, if anything of the kind has changed since the watch
/// began.
#[test]
fn a_watch_has_a_bookmark_before_its_time_is_over() {
    let Some(rig) = Rig::new("bookmarks").unwrap() else { return };
    let list = rig.agent.get(&rig.pods).unwrap().expect(200).unwrap();
    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    let query = format!(
        "{}?watch=true&allowWatchBookmarks=true&timeoutSeconds=4&resourceVersion={version}",
        rig.pods
    );
    let mut watch = rig.agent.watch_as(&query, "application/json").unwrap();
    let made = rig.pod("a").unwrap();
    let (added, bookmark) = (watch.event().unwrap(), watch.event().unwrap());
    assert_eq!(
        (&added["type"], &added["object"]["metadata"]["uid"]),
        (&json!("ADDED"), &made["metadata"]["uid"])
    );
    assert_eq!((&bookmark["type"], &bookmark["object"]["kind"]), (&json!("BOOKMARK"), &json!("Pod")));
    let number =
        |object: &Value| object["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap();
    assert!(number(&bookmark["object"]) >= number(&made), "{bookmark}");
    // More events may follow while others change pods.
    let end = loop {
        match watch.event() {
            Ok(event) => assert_eq!(event["type"], "BOOKMARK", "{event}"),
            Err(end) => break end,
        }
    };
    assert_eq!(end.to_string(), "the watch has ended");
}

#[test]
fn what_is_not_served_is_not_found() {
    let Some(rig) = Rig::new("not-served").unwrap() else { return };
    for path in ["/apis/k8s.cni.cncf.io/v1beta3/multi-networkpolicies", "/apis/example.com/v1/things"] {
        for query in ["", "?limit=500", "?watch=true"] {
            assert_eq!(rig.admin.get(&format!("{path}{query}")).unwrap().status, 404, "{path}{query}");
        }
    }
}

/// The rights of `deploy/base/rbac.yaml`, and rights that it does not grant.
#[test]
fn the_agent_may_do_its_work_and_nothing_else() {
    let Some(rig) = Rig::new("rights").unwrap() else { return };
    rig.pod("a").unwrap();
    rig.admin
        .create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-rights"}}))
        .unwrap();
    let nothing = json!({"metadata": {}});
    let status = |reply: Result<netattach_tests::cluster::Reply>| reply.unwrap().status;
    for path in [
        "/api/v1/pods",
        "/api/v1/namespaces",
        "/api/v1/nodes",
        "/apis/networking.k8s.io/v1/networkpolicies",
        "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions",
        "/apis/k8s.cni.cncf.io/v1beta1/multi-networkpolicies",
        "/apis/k8s.cni.cncf.io/v1beta2/multi-networkpolicies",
    ] {
        assert_eq!(status(rig.agent.get(path)), 200, "{path}");
    }
    assert_eq!(status(rig.agent.merge(&rig.status("a"), &nothing)), 200);
    let event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": {"name": "a.1", "namespace": "rights"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "netattach.io/agent",
        "reportingInstance": "node-a", "action": "Attach", "reason": "AttachFailed", "type": "Warning",
        "regarding": {"apiVersion": "v1", "kind": "Pod", "namespace": "rights", "name": "a"}, "note": "why"
    });
    rig.agent.create(&event).unwrap();

    assert_eq!(status(rig.agent.merge(&rig.path("a"), &nothing)), 403);
    assert_eq!(status(rig.agent.get("/api/v1/nodes/node-rights")), 403);
    assert_eq!(status(rig.agent.merge("/api/v1/nodes/node-rights", &nothing)), 403);
    assert_eq!(status(rig.agent.merge("/api/v1/nodes/node-rights/status", &nothing)), 403);
    let eviction = json!({
        "apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"namespace": "rights", "name": "a"}
    });
    assert_eq!(status(rig.agent.post(&format!("{}/eviction", rig.path("a")), &eviction)), 403);
    assert_eq!(status(rig.agent.delete(&rig.path("a"))), 403);
    for path in ["/api/v1/secrets", "/api/v1/configmaps"] {
        assert_eq!(status(rig.agent.get(path)), 403, "{path}");
    }
}

/// The definitions of `deploy/base/crds`: no field of a policy is dropped, and an invalid policy is refused.
#[test]
fn definitions_keep_every_key_of_a_policy() {
    let Some(rig) = Rig::new("definitions").unwrap() else { return };
    let selector = json!({
        "matchLabels": {"app": "web"},
        "matchExpressions": [{"key": "tier", "operator": "In", "values": ["a", "b"]}]
    });
    let peers = json!([
        {"podSelector": selector, "namespaceSelector": selector},
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
    ]);
    let ports = json!([{"protocol": "TCP", "port": 80, "endPort": 90}, {"protocol": "UDP", "port": "dns"}]);
    let spec = json!({
        "podSelector": selector, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": ports, "from": peers}], "egress": [{"ports": ports, "to": peers}]
    });
    for version in ["v1beta1", "v1beta2"] {
        let policy = json!({
            "apiVersion": format!("k8s.cni.cncf.io/{version}"), "kind": "MultiNetworkPolicy",
            "metadata": {"namespace": "definitions", "name": version}, "spec": spec
        });
        rig.admin.create(&policy).unwrap();
    }
    for (stored, asked) in [("v1beta1", "v1beta2"), ("v1beta2", "v1beta1")] {
        let path =
            format!("/apis/k8s.cni.cncf.io/{asked}/namespaces/definitions/multi-networkpolicies/{stored}");
        assert_eq!(rig.admin.get(&path).unwrap().expect(200).unwrap()["spec"], spec, "{path}");
    }
    let definitions = "/apis/k8s.cni.cncf.io/v1/namespaces/definitions/network-attachment-definitions";
    let wrong = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": "a"}, "spec": {"config": {"type": "bridge"}}
    });
    assert_eq!(rig.admin.post(definitions, &wrong).unwrap().status, 422);
}
