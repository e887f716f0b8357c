//! Watches.

use serde_json::{Value, json};

use netattach_tests::api_server::{ApiServer, Options};

use super::{names, pod, rig};
use crate::client::Client;

/// The version that a list has now.
fn version(client: &Client) -> String {
    client.read("/api/v1/pods?limit=1").1["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

#[test]
fn a_watch_tells_what_happened_since_its_version() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let from = version(&client);
    server.create(&pod("b", "n1", "web")).unwrap();
    let mut watch = client.get(&format!("/api/v1/pods?watch=true&resourceVersion={from}")).unwrap();
    assert_eq!(watch.told(), "ADDED b");
    server.patch("pods", "shop", "a", &json!({"status": {"phase": "Failed"}})).unwrap();
    assert_eq!(watch.told(), "MODIFIED a");
    server.delete("pods", "shop", "a").unwrap();
    let (kind, last) = watch.event().unwrap().unwrap();
    assert_eq!((kind.as_str(), &last["status"]["phase"]), ("DELETED", &json!("Failed")));
    // Its version is that of the deletion, from which a watch continues.
    assert_eq!(last["metadata"]["resourceVersion"], json!(version(&client)));
}

#[test]
fn a_watch_without_a_version_begins_with_what_is_there() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    for query in ["watch=1", "watch=true&resourceVersion=0"] {
        let mut watch = client.get(&format!("/api/v1/namespaces/shop/pods?{query}")).unwrap();
        assert_eq!(watch.told(), "ADDED a", "{query}");
    }
}

#[test]
fn an_object_that_begins_or_ceases_to_match_is_added_or_deleted() {
    let (server, client) = rig();
    let path = format!(
        "/api/v1/pods?watch=true&labelSelector=app%3Dweb&fieldSelector=spec.nodeName%3Dn1&resourceVersion={}",
        version(&client)
    );
    let mut watch = client.get(&path).unwrap();
    server.create(&pod("other", "n2", "web")).unwrap();
    server.create(&pod("a", "n1", "db")).unwrap();
    let relabel = |app: &str| {
        server.patch("pods", "shop", "a", &json!({"metadata": {"labels": {"app": app}}})).unwrap();
    };
    relabel("web");
    assert_eq!(watch.told(), "ADDED a");
    relabel("web");
    assert_eq!(watch.told(), "MODIFIED a");
    relabel("db");
    let (kind, last) = watch.event().unwrap().unwrap();
    // Its last matching state, at the version of the change.
    assert_eq!((kind.as_str(), &last["metadata"]["labels"]), ("DELETED", &json!({"app": "web"})));
    assert_eq!(last["metadata"]["resourceVersion"], json!(version(&client)));
}

#[test]
fn bookmarks_say_where_a_watch_is() {
    let (server, client) = rig();
    let from = version(&client);
    let mut watch = client
        .get(&format!(
            "/api/v1/pods?watch=true&allowWatchBookmarks=true&timeoutSeconds=2&resourceVersion={from}"
        ))
        .unwrap();
    // A change that this watch does not report.
    server.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})).unwrap();
    let mut seen = Vec::new();
    while let Some(event) = watch.event().unwrap() {
        seen.push(event);
    }
    assert!(seen.len() >= 2, "{seen:?}");
    for (kind, object) in seen {
        assert_eq!(kind, "BOOKMARK");
        assert_eq!(
            object,
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"resourceVersion": version(&client), "creationTimestamp": null},
                "spec": {"containers": null}, "status": {}
            })
        );
    }
}

#[test]
fn a_version_that_is_too_old_is_an_error_event() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let from = version(&client);
    let mut running = client.get(&format!("/api/v1/pods?watch=true&resourceVersion={from}")).unwrap();
    // Only an event shows that it has begun: the header of its answer comes before.
    server.create(&pod("b", "n1", "web")).unwrap();
    assert_eq!(running.told(), "ADDED b");
    server.compact();
    let mut watch = client.get(&format!("/api/v1/pods?watch=true&resourceVersion={from}")).unwrap();
    assert_eq!(watch.code, 200);
    let (kind, status) = watch.event().unwrap().unwrap();
    assert_eq!(
        (kind.as_str(), status),
        (
            "ERROR",
            json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "too old resource version: 1001 (1003)", "reason": "Expired", "code": 410
            })
        )
    );
    assert_eq!(watch.event().unwrap(), None);
    // A watch that runs is not hit.
    server.delete("pods", "shop", "a").unwrap();
    assert_eq!(running.told(), "DELETED a");
}

#[test]
fn a_list_is_streamed_by_servers_that_can() {
    let path = "/api/v1/pods?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
                &allowWatchBookmarks=true&resourceVersion=";
    let of = |minor: u32| {
        let server = ApiServer::start(&Options { minor, ..Options::default() }).unwrap();
        server.create(&pod("a", "n1", "web")).unwrap();
        let client = Client::of(&server);
        assert_eq!(client.read("/version").1["gitVersion"], format!("v1.{minor}.0"));
        (server, client)
    };
    for minor in [32, 34] {
        let (_server, client) = of(minor);
        let mut watch = client.get(path).unwrap();
        assert_eq!(watch.told(), "ADDED a", "1.{minor}");
        let (kind, object) = watch.event().unwrap().unwrap();
        assert_eq!(
            (kind.as_str(), &object["metadata"]["annotations"]),
            ("BOOKMARK", &json!({"k8s.io/initial-events-end": "true"})),
            "1.{minor}"
        );
    }
    // `cluster::server` has the answer of a real server of 1.20.
    let gate = "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
    let unknown = "[resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch, resourceVersionMatch: Forbidden: \
                   resourceVersionMatch is forbidden unless resourceVersion is provided]";
    for (minor, why) in [(33, gate), (31, gate), (27, gate), (26, unknown), (20, unknown)] {
        let (_server, client) = of(minor);
        let (code, status) = client.read(path);
        let said = format!("ListOptions.meta.k8s.io \"\" is invalid: {why}");
        assert_eq!(
            (code, &status["reason"], &status["message"]),
            (422, &json!("Invalid"), &json!(said)),
            "1.{minor}"
        );
    }
    // A server that knows neither parameter ignores them: the present objects, and no such bookmark.
    let (_server, client) = of(18);
    let mut watch = client.hurried().get(path).unwrap();
    assert_eq!(watch.told(), "ADDED a");
    assert_eq!(watch.event().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn held_watches_tell_later() {
    let (server, client) = rig();
    let mut watch = client.hurried().get("/api/v1/pods?watch=true").unwrap();
    server.create(&pod("a", "n1", "web")).unwrap();
    assert_eq!(watch.told(), "ADDED a");
    server.faults().hold_watches("pods");
    server.create(&pod("b", "n1", "web")).unwrap();
    assert_eq!(watch.event().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(names(&client.read("/api/v1/pods").1), ["a", "b"]);
    server.faults().release_watches("pods");
    assert_eq!(watch.told(), "ADDED b");
}

#[test]
fn watches_of_a_kind_that_is_no_longer_served_end() {
    let (server, client) = rig();
    let path = "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions?watch=true";
    let mut watch = client.get(path).unwrap();
    server.serve("network-attachment-definitions", None, false).unwrap();
    assert_eq!(watch.told(), "the end");
    assert_eq!(client.get(path).unwrap().code, 404);
}

#[test]
fn metadata_alone_is_watched() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let accept = [("accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1")];
    let mut watch = client.send("GET", "/api/v1/pods?watch=true", &accept, "").unwrap();
    let (_, object) = watch.event().unwrap().unwrap();
    assert_eq!((&object["kind"], &object["spec"]), (&json!("PartialObjectMetadata"), &Value::Null));
}
