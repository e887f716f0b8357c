//! POST, PATCH and DELETE.

use netattach_tests::api_server::{ApiServer, ForeignUid, Options};
use serde_json::{Value, json};

use super::{names, pod, rig};
use crate::client::Client;

#[test]
fn a_new_object_gets_what_the_server_gives() {
    let (_server, client) = rig();
    let (code, made) = client.post("/api/v1/namespaces/shop/pods", &pod("a", "n1", "web"));
    assert_eq!(code, 201);
    let metadata = &made["metadata"];
    assert_eq!(metadata["uid"].as_str().unwrap().len(), 36);
    assert_eq!((&metadata["resourceVersion"], &metadata["generation"]), (&json!("1001"), &json!(1)));
    assert_eq!(metadata["creationTimestamp"].as_str().unwrap().len(), "2026-01-01T00:00:00Z".len());
    assert_eq!(made["status"], json!({"phase": "Pending"}));
    let (code, status) = client.post("/api/v1/namespaces/shop/pods", &pod("a", "n1", "web"));
    assert_eq!((code, &status["reason"]), (409, &json!("AlreadyExists")));
    let generated =
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "web-"}, "spec": {}});
    let (code, made) = client.post("/api/v1/namespaces/shop/pods", &generated);
    assert_eq!((code, made["metadata"]["name"].as_str().unwrap().len()), (201, "web-".len() + 5));
}

#[test]
fn a_patch_of_the_status_takes_labels_annotations_and_status_only() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let patch = json!({
        "metadata": {"uid": "uid-a", "labels": {"netattach.dev/networks": ""}, "annotations": {"x": "1", "y": "2"}},
        "spec": {"nodeName": "elsewhere"}, "status": {"podIP": "10.0.0.1"}
    });
    let (code, after) = client.patch("/api/v1/namespaces/shop/pods/a/status", &patch);
    assert_eq!(code, 200);
    assert_eq!(after["metadata"]["labels"], json!({"app": "web", "netattach.dev/networks": ""}));
    assert_eq!(after["metadata"]["annotations"], json!({"x": "1", "y": "2"}));
    assert_eq!(after["spec"]["nodeName"], "n1");
    assert_eq!(after["status"], json!({"phase": "Running", "podIP": "10.0.0.1"}));
    // null removes; a patch of the object itself leaves the status alone.
    let patch = json!({"metadata": {"annotations": {"x": null}}, "status": {"phase": "Failed"}});
    let (_, after) = client.patch("/api/v1/namespaces/shop/pods/a", &patch);
    assert_eq!(after["metadata"]["annotations"], json!({"y": "2"}));
    assert_eq!(after["status"]["phase"], "Running");
    // A write without a change makes no version.
    let (_, again) = client.patch("/api/v1/namespaces/shop/pods/a", &patch);
    assert_eq!(again, after);
}

#[test]
fn a_patch_holds_for_the_object_that_it_names() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let path = "/api/v1/namespaces/shop/pods/a/status";
    let foreign = json!({"metadata": {"uid": "another", "annotations": {"x": "1"}}});
    let (code, status) = client.patch(path, &foreign);
    assert_eq!((code, &status["reason"]), (422, &json!("Invalid")));
    assert_eq!(
        status["message"],
        "Pod \"a\" is invalid: metadata.uid: Invalid value: \"another\": field is immutable"
    );
    let stale = json!({"metadata": {"resourceVersion": "7", "annotations": {"x": "1"}}});
    let (code, status) = client.patch(path, &stale);
    assert_eq!((code, &status["reason"]), (409, &json!("Conflict")));
    assert_eq!(client.patch("/api/v1/namespaces/shop/pods/b/status", &foreign).0, 404);
    assert_eq!(server.get("pods", "shop", "a").unwrap()["metadata"]["annotations"], Value::Null);
    // Other servers answer with 409.
    let options = Options { foreign_uid: ForeignUid::Conflict, ..Options::default() };
    let server = ApiServer::start(&options).unwrap();
    server.create(&pod("a", "n1", "web")).unwrap();
    assert_eq!(Client::of(&server).patch(path, &foreign).0, 409);
}

#[test]
fn other_patches_are_refused() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let send = |media_type: &str, body: &str| {
        let kind = [("content-type", media_type)];
        client.send("PATCH", "/api/v1/namespaces/shop/pods/a", &kind, body).unwrap().code
    };
    assert_eq!(send("application/json", "{}"), 415);
    assert_eq!(send("application/merge-patch+json", "{"), 400);
    assert_eq!(send("application/merge-patch+json; charset=utf-8", "{}"), 200);
    assert_eq!(client.send("DELETE", "/api/v1/pods", &[], "").unwrap().code, 405);
}

#[test]
fn a_pod_on_a_node_ends_in_two_steps() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let path = "/api/v1/namespaces/shop/pods/a";
    let delete = |query: &str, body: &str| {
        let kind = [("content-type", "application/json")];
        client.send("DELETE", &format!("{path}{query}"), &kind, body).unwrap().json()
    };
    let (code, ending) = delete("", "");
    assert_eq!((code, &ending["metadata"]["deletionGracePeriodSeconds"]), (200, &json!(30)));
    assert!(ending["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(names(&client.read("/api/v1/pods").1), ["a"]);
    let foreign = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": "another"}}).to_string();
    assert_eq!(delete("", &foreign).0, 409);
    let (code, gone) = delete("?gracePeriodSeconds=0", "");
    assert_eq!((code, &gone["status"]), (200, &json!("Success")));
    assert_eq!(client.read(path).0, 404);
    // Eviction is a deletion.
    server.create(&pod("b", "n1", "web")).unwrap();
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "b"}});
    assert_eq!(client.post("/api/v1/namespaces/shop/pods/b/eviction", &eviction).0, 201);
    assert!(server.get("pods", "shop", "b").unwrap()["metadata"]["deletionTimestamp"].is_string());
}

#[test]
fn events_and_nodes_are_objects_too() {
    let (server, client) = rig();
    let event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "web.1"},
        "reason": "AttachFailed", "note": "no address is free"
    });
    let events = "/apis/events.k8s.io/v1/namespaces/shop/events";
    assert_eq!(client.post(events, &event).0, 201);
    let series = json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:00Z"}});
    assert_eq!(client.patch(&format!("{events}/web.1"), &series).1["series"]["count"], 2);
    server.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {"taints": [{"key": "x"}]}})).unwrap();
    let (code, node) = client.patch("/api/v1/nodes/n1", &json!({"spec": {"taints": null}}));
    assert_eq!((code, &node["spec"]), (200, &json!({})));
}
