//! GET and lists.

use serde_json::{Value, json};

use super::{names, pod, rig};

#[test]
fn an_object_is_read_with_the_type_of_the_version_that_is_asked_for() {
    let (server, client) = rig();
    let policy = json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {"namespace": "shop", "name": "deny", "uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"podSelector": {}}
    });
    server.create(&policy).unwrap();
    let path =
        |version: &str| format!("/apis/k8s.cni.cncf.io/{version}/namespaces/shop/multi-networkpolicies/deny");
    let expected = |version: &str| {
        json!({
            "apiVersion": format!("k8s.cni.cncf.io/{version}"), "kind": "MultiNetworkPolicy",
            "metadata": {
                "namespace": "shop", "name": "deny", "uid": "u1",
                "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1, "resourceVersion": "1001"
            },
            "spec": {"podSelector": {}}
        })
    };
    assert_eq!(client.read(&path("v1beta1")), (200, expected("v1beta1")));
    assert_eq!(client.read(&path("v1beta2")), (200, expected("v1beta2")));
    let (code, status) = client.read("/api/v1/namespaces/shop/pods/none");
    assert_eq!(
        (code, status),
        (
            404,
            json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "pods \"none\" not found", "reason": "NotFound",
                "details": {"name": "none", "kind": "pods"}, "code": 404
            })
        )
    );
}

#[test]
fn what_is_not_served_is_a_404_in_plain_text() {
    let (server, client) = rig();
    server.serve("multi-networkpolicies", Some("v1beta2"), false).unwrap();
    let missing = client.get("/apis/k8s.cni.cncf.io/v1beta2/multi-networkpolicies").unwrap();
    assert_eq!((missing.code, missing.text().unwrap()), (404, "404 page not found\n".to_owned()));
    assert_eq!(client.read("/apis/k8s.cni.cncf.io/v1beta1/multi-networkpolicies").0, 200);
    assert_eq!(client.get("/apis/example.org/v1/things").unwrap().code, 404);
    assert_eq!(client.get("/api/v1/pods/web/exec").unwrap().code, 404);
    let groups = client.read("/apis").1;
    let found = groups["groups"].as_array().unwrap().iter().find(|group| group["name"] == "k8s.cni.cncf.io");
    assert_eq!(
        found.unwrap()["versions"],
        json!([
            {"groupVersion": "k8s.cni.cncf.io/v1", "version": "v1"},
            {"groupVersion": "k8s.cni.cncf.io/v1beta1", "version": "v1beta1"}
        ])
    );
    assert_eq!(client.get("/apis/k8s.cni.cncf.io/v1beta2").unwrap().code, 404);
    server.serve("multi-networkpolicies", Some("v1beta2"), true).unwrap();
    assert_eq!(client.read("/apis/k8s.cni.cncf.io/v1beta2/multi-networkpolicies").0, 200);
}

#[test]
fn selectors_select() {
    let (server, client) = rig();
    for (name, node, app) in [("a", "n1", "web"), ("b", "n2", "web"), ("c", "n1", "db")] {
        server.create(&pod(name, node, app)).unwrap();
    }
    server
        .patch("pods", "shop", "c", &json!({"metadata": {"labels": {"netattach.dev/networks": ""}}}))
        .unwrap();
    for (query, expected) in [
        ("", vec!["a", "b", "c"]),
        ("fieldSelector=spec.nodeName%3Dn1", vec!["a", "c"]),
        ("fieldSelector=spec.nodeName!=n1", vec!["b"]),
        ("fieldSelector=metadata.name%3Db", vec!["b"]),
        ("fieldSelector=metadata.name%3Db,spec.nodeName=n1", vec![]),
        ("labelSelector=app", vec!["a", "b", "c"]),
        ("labelSelector=app%3Dweb", vec!["a", "b"]),
        ("labelSelector=app!%3Dweb", vec!["c"]),
        ("labelSelector=app+in+(web,db),app+notin+(db)", vec!["a", "b"]),
        ("labelSelector=netattach.dev%2Fnetworks", vec!["c"]),
        ("labelSelector=!netattach.dev/networks", vec!["a", "b"]),
        ("labelSelector=app=web&fieldSelector=spec.nodeName=n2", vec!["b"]),
    ] {
        let (code, list) = client.read(&format!("/api/v1/pods?{query}"));
        assert_eq!((code, names(&list)), (200, expected), "{query}");
    }
    assert_eq!(names(&client.read("/api/v1/namespaces/other/pods").1), Vec::<&str>::new());
    for bad in ["fieldSelector=spec.none=1", "labelSelector=a%20b", "labelSelector=app in web", "limit=x"] {
        assert_eq!(client.read(&format!("/api/v1/pods?{}", bad.replace(' ', "+"))).0, 400, "{bad}");
    }
}

#[test]
fn items_of_built_in_kinds_have_no_type_those_of_custom_ones_have() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let network = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": "shop", "name": "lan"}, "spec": {"config": "{}"}
    });
    server.create(&network).unwrap();
    let pods = client.read("/api/v1/pods").1;
    assert_eq!((&pods["kind"], &pods["apiVersion"]), (&json!("PodList"), &json!("v1")));
    assert_eq!((&pods["items"][0]["kind"], &pods["items"][0]["apiVersion"]), (&Value::Null, &Value::Null));
    let networks = client.read("/apis/k8s.cni.cncf.io/v1/network-attachment-definitions").1;
    assert_eq!(networks["kind"], "NetworkAttachmentDefinitionList");
    assert_eq!(networks["items"][0]["kind"], "NetworkAttachmentDefinition");
    assert_eq!(networks["items"][0]["apiVersion"], "k8s.cni.cncf.io/v1");
}

#[test]
fn metadata_alone_where_it_is_asked_for() {
    let (server, client) = rig();
    server.create(&pod("a", "n1", "web")).unwrap();
    let accept = [("accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")];
    let (_, list) = client.send("GET", "/api/v1/pods", &accept, "").unwrap().json();
    assert_eq!(
        (&list["kind"], &list["apiVersion"]),
        (&json!("PartialObjectMetadataList"), &json!("meta.k8s.io/v1"))
    );
    let item = list["items"][0].as_object().unwrap();
    assert_eq!(item.keys().collect::<Vec<_>>(), ["kind", "apiVersion", "metadata"]);
    assert_eq!(
        (&item["kind"], &item["metadata"]["labels"]),
        (&json!("PartialObjectMetadata"), &json!({"app": "web"}))
    );
}

#[test]
fn pages_are_of_one_version() {
    let (server, client) = rig();
    for number in 0..7 {
        server.create(&pod(&format!("p{number}"), "n1", "web")).unwrap();
    }
    let (_, first) = client.read("/api/v1/pods?limit=3");
    assert_eq!(names(&first), ["p0", "p1", "p2"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 4);
    // Changes between two pages are not in the second.
    server.delete("pods", "shop", "p3").unwrap();
    server.create(&pod("p33", "n1", "web")).unwrap();
    server.patch("pods", "shop", "p4", &json!({"metadata": {"labels": {"app": "changed"}}})).unwrap();
    let token = |list: &Value| list["metadata"]["continue"].as_str().unwrap().to_owned();
    let (_, second) = client.read(&format!("/api/v1/pods?limit=3&continue={}", token(&first)));
    assert_eq!(names(&second), ["p3", "p4", "p5"]);
    assert_eq!(second["items"][1]["metadata"]["labels"]["app"], "web");
    assert_eq!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    // A page that is too late gets a token for the present objects.
    server.compact();
    let (code, status) = client.read(&format!("/api/v1/pods?limit=3&continue={}", token(&first)));
    assert_eq!((code, &status["reason"]), (410, &json!("Expired")));
    let (code, rest) = client.read(&format!("/api/v1/pods?continue={}", token(&status)));
    assert_eq!((code, names(&rest)), (200, vec!["p33", "p4", "p5", "p6"]));
    assert_eq!(rest["metadata"]["continue"], Value::Null);
    assert_eq!(client.read("/api/v1/pods?continue=nonsense").0, 400);
}

#[test]
fn a_list_at_version_0_is_whole_and_one_of_the_future_is_refused() {
    let (server, client) = rig();
    for number in 0..4 {
        server.create(&pod(&format!("p{number}"), "n1", "web")).unwrap();
    }
    assert_eq!(names(&client.read("/api/v1/pods?limit=1&resourceVersion=0").1).len(), 4);
    assert_eq!(names(&client.read("/api/v1/pods?resourceVersion=1001&resourceVersionMatch=Exact").1), ["p0"]);
    let (code, status) = client.read("/api/v1/pods?resourceVersion=99999");
    assert_eq!((code, &status["reason"]), (504, &json!("Timeout")));
    server.compact();
    assert_eq!(client.read("/api/v1/pods?resourceVersion=1001&resourceVersionMatch=Exact").0, 410);
}

#[test]
fn anything_can_stand_in_an_objects_place() {
    let (server, client) = rig();
    let strange = json!({"metadata": {"name": "x", "namespace": "shop", "labels": ["a"]}, "spec": 7});
    server.put_as_is("pods", "shop", "x", strange).unwrap();
    server.create(&pod("y", "n1", "web")).unwrap();
    let list = client.read("/api/v1/pods").1;
    assert_eq!(
        list["items"][0],
        json!({"metadata": {"name": "x", "namespace": "shop", "labels": ["a"], "resourceVersion": "1001"}, "spec": 7})
    );
    assert_eq!(names(&client.read("/api/v1/pods?labelSelector=app").1), ["y"]);
}
