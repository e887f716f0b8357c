//! The ValidatingAdmissionPolicies of `deploy`: every write of an agent passes them, and other writes with a stolen
//! token do not. Rigs apply them to every request, so all tests of this suite check the first part.

use netattach_tests::Pod;
use netattach_tests::admission::{Policies, Refusal, Review};
use netattach_tests::api_server::{Options, Request, Verb};
use netattach_tests::manifest::NAMESPACE;
use netattach_tests::traffic::{PATIENCE, eventually};
use serde_json::{Value, json};

use crate::rig::{LABEL, NODE, Rig, object};

const TAINT: &str = "netattach.dev/agent-not-ready";
const EXTRA: &str = "authentication.kubernetes.io/node-name";

const OTHERS_POD: &str = "an agent of netattach writes the status of pods of its own node only";
const OTHERS_STATUS: &str = "an agent of netattach writes annotations and a label only";
const OTHERS_ANNOTATION: &str = "an agent of netattach writes the annotations k8s.v1.cni.cncf.io/network-status and netattach.dev/ports only";
const OTHERS_LABEL: &str = "an agent of netattach writes the label netattach.dev/networks only";
const FINALIZERS: &str = "an agent of netattach writes no finalizers";
const OTHERS_NODE: &str = "an agent of netattach writes its own node only";
const OF_NODE: &str = "an agent of netattach writes taints only";
const OTHERS_TAINT: &str = "an agent of netattach removes taints whose keys begin with netattach.dev/ only";
const OTHERS_NAME: &str = "an agent of netattach writes events in its own name only";
const OTHERS_EVENT: &str = "an agent of netattach counts in events of netattach only";

/// Returns the writes of an agent: a pod's networks, their end, the taint, an event, and that event once more after a
/// restart.
fn recorded() -> Vec<Review> {
    let mut rig = Rig::new(&Options::default());
    let taint = |key: &str| json!({"key": key, "effect": "NoSchedule"});
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": {"zone": "a"}},
        "spec": {"taints": [taint("other"), taint(TAINT)], "podCIDRs": ["10.9.0.0/24"]}
    });
    rig.server.create(&node).unwrap();
    rig.node.set("kubernetes", json!({"startupTaint": TAINT}));
    rig.start();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.published("a");
    rig.del(&pod).success();
    let labelled =
        || rig.server.get("pods", NAMESPACE, "a").unwrap()["metadata"]["labels"].get(LABEL).is_some();
    assert!(eventually(PATIENCE, || !labelled()));
    let mut wrong = object("b", NODE);
    wrong["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("nowhere");
    rig.server.create(&wrong).unwrap();
    let sandbox = Pod::new("b").unwrap();
    rig.add(&sandbox).failure();
    let told = |verb: Verb| {
        move |requests: &[Request]| {
            requests.iter().any(|one| one.verb == verb && one.resource == "events" && one.answer.is_some())
        }
    };
    assert!(rig.server.wait_for(0, told(Verb::Create)));
    let untainted = |requests: &[Request]| {
        requests
            .iter()
            .any(|one| one.verb == Verb::Patch && one.resource == "nodes" && one.answer == Some(200))
    };
    assert!(rig.server.wait_for(0, untainted));
    let refused = rig.add(&sandbox).failure();
    rig.node.stop().unwrap();
    rig.start();
    // Before it has read everything it refuses every pod, for another reason.
    assert!(eventually(PATIENCE, || rig.add(&sandbox).failure() == refused));
    assert!(rig.server.wait_for(0, told(Verb::Patch)));
    rig.server.reviews()
}

/// The node's name in the token.
fn claim(review: &mut Review, node: &str) {
    review.user["extra"][EXTRA] = json!([node]);
}

fn edited(review: &Review, edit: impl FnOnce(&mut Review)) -> Review {
    let mut review = review.clone();
    edit(&mut review);
    review
}

/// A change of both forms of the object.
fn both(review: &mut Review, mut edit: impl FnMut(&mut Value)) {
    edit(&mut review.object);
    edit(&mut review.old);
}

fn owner() -> Value {
    json!([{"apiVersion": "v1", "kind": "Namespace", "name": "x", "uid": "0"}])
}

#[test]
fn an_agent_passes_the_admission_policies_and_a_stolen_token_writes_nothing_else() {
    let policies = Policies::of_deploy().unwrap();
    let recorded = recorded();
    for review in &recorded {
        assert_eq!(policies.judge(review), Ok(()), "{review:#?}");
        assert_eq!(policies.about(review).len(), 1, "a policy binds what an agent writes: {review:#?}");
    }
    let find = |operation: &str, resource: &str| {
        let wanted = |one: &&Review| one.operation == operation && one.resource == resource;
        recorded.iter().find(wanted).unwrap_or_else(|| panic!("no {operation} of {resource}: {recorded:#?}"))
    };
    let (attached, node) = (find("UPDATE", "pods/status"), find("UPDATE", "nodes"));
    let (told, counted) = (find("CREATE", "events"), find("UPDATE", "events"));
    let of_pod = |edit: &dyn Fn(&mut Review)| edited(attached, edit);
    let of_node = |edit: &dyn Fn(&mut Review)| edited(node, edit);

    let table: Vec<(&str, Review, &str)> = vec![
        (
            "a pod of another node",
            of_pod(&|it| both(it, |pod| pod["spec"]["nodeName"] = json!("node-2"))),
            OTHERS_POD,
        ),
        (
            "a pod that no node has",
            of_pod(&|it| both(it, |pod| drop(pod["spec"].as_object_mut().unwrap().remove("nodeName")))),
            OTHERS_POD,
        ),
        (
            "a pod that is said to be of this node",
            of_pod(&|it| it.old["spec"]["nodeName"] = json!("node-2")),
            OTHERS_POD,
        ),
        ("the token of another node", of_pod(&|it| claim(it, "node-2")), OTHERS_POD),
        ("a token that names no node", of_pod(&|it| it.user["extra"] = json!({})), OTHERS_POD),
        (
            "a token that names the empty node",
            of_pod(&|it| {
                claim(it, "");
                both(it, |pod| pod["spec"]["nodeName"] = json!(""));
            }),
            OTHERS_POD,
        ),
        (
            "the phase of a pod",
            of_pod(&|it| it.object["status"]["phase"] = json!("Succeeded")),
            OTHERS_STATUS,
        ),
        (
            "a condition of a pod",
            of_pod(&|it| it.object["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}])),
            OTHERS_STATUS,
        ),
        (
            "another annotation",
            of_pod(&|it| it.object["metadata"]["annotations"]["example.com/x"] = json!("y")),
            OTHERS_ANNOTATION,
        ),
        (
            "the networks that a pod selects",
            of_pod(&|it| {
                it.object["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("other")
            }),
            OTHERS_ANNOTATION,
        ),
        (
            "an annotation that goes",
            of_pod(&|it| {
                let annotations = it.object["metadata"]["annotations"].as_object_mut().unwrap();
                annotations.remove("k8s.v1.cni.cncf.io/networks");
            }),
            OTHERS_ANNOTATION,
        ),
        (
            "a label by which policies select",
            of_pod(&|it| it.object["metadata"]["labels"]["app"] = json!("db")),
            OTHERS_LABEL,
        ),
        (
            "a label that changes",
            of_pod(&|it| {
                it.old["metadata"]["labels"] = json!({"app": "web"});
                it.object["metadata"]["labels"] = json!({"app": "db"});
            }),
            OTHERS_LABEL,
        ),
        (
            "a label that goes",
            of_pod(&|it| it.old["metadata"]["labels"] = json!({"app": "web"})),
            OTHERS_LABEL,
        ),
        (
            "a finalizer, with which a pod would never go",
            of_pod(&|it| it.object["metadata"]["finalizers"] = json!(["example.com/stay"])),
            FINALIZERS,
        ),
        (
            "another node",
            of_node(&|it| both(it, |node| node["metadata"]["name"] = json!("node-2"))),
            OTHERS_NODE,
        ),
        ("a node, with no node in the token", of_node(&|it| it.user["extra"] = json!({})), OTHERS_NODE),
        (
            "a label of the node",
            of_node(&|it| {
                it.object["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = json!("")
            }),
            OF_NODE,
        ),
        (
            "an annotation of the node",
            of_node(&|it| it.object["metadata"]["annotations"] = json!({"example.com/x": "y"})),
            OF_NODE,
        ),
        (
            "a finalizer of the node",
            of_node(&|it| it.object["metadata"]["finalizers"] = json!(["example.com/stay"])),
            OF_NODE,
        ),
        (
            "an owner of the node, with whom it would be deleted",
            of_node(&|it| it.object["metadata"]["ownerReferences"] = owner()),
            OF_NODE,
        ),
        (
            "an owner of the node who goes",
            of_node(&|it| it.old["metadata"]["ownerReferences"] = owner()),
            OF_NODE,
        ),
        ("a cordon", of_node(&|it| it.object["spec"]["unschedulable"] = json!(true)), OF_NODE),
        ("the end of a cordon", of_node(&|it| it.old["spec"]["unschedulable"] = json!(true)), OF_NODE),
        ("a podCIDR", of_node(&|it| it.object["spec"]["podCIDRs"] = json!(["10.8.0.0/24"])), OF_NODE),
        ("a provider", of_node(&|it| it.object["spec"]["providerID"] = json!("x")), OF_NODE),
        (
            "a taint",
            of_node(&|it| {
                let taint = json!({"key": "netattach.dev/x", "effect": "NoExecute"});
                it.object["spec"]["taints"].as_array_mut().unwrap().push(taint);
            }),
            OTHERS_TAINT,
        ),
        ("another's taint", of_node(&|it| it.object["spec"]["taints"] = json!([])), OTHERS_TAINT),
        (
            "another effect of another's taint",
            of_node(&|it| it.object["spec"]["taints"][0]["effect"] = json!("PreferNoSchedule")),
            OTHERS_TAINT,
        ),
        (
            "an event in the kubelet's name",
            edited(told, |it| it.object["reportingController"] = json!("kubelet")),
            OTHERS_NAME,
        ),
        (
            "an event in another node's name",
            edited(told, |it| it.object["reportingInstance"] = json!("node-2")),
            OTHERS_NAME,
        ),
        (
            "an event of the kubelet",
            edited(counted, |it| it.old["reportingController"] = json!("kubelet")),
            OTHERS_EVENT,
        ),
        (
            "other words in an event",
            edited(counted, |it| it.object["note"] = json!("all is well")),
            OTHERS_EVENT,
        ),
    ];
    for (what, review, message) in table {
        let Err(Refusal { code, message: said }) = policies.judge(&review) else {
            panic!("{what} is admitted: {review:#?}")
        };
        assert!(said.ends_with(&format!("denied request: {message}")), "{what}: {said}");
        assert_eq!(code, 403, "{what}");
        // The policies do not apply to other users.
        let kubelet = edited(&review, |it| it.user["username"] = json!("system:node:node-1"));
        assert_eq!(policies.judge(&kubelet), Ok(()), "{what}");
    }
    // A failing expression refuses.
    let nobody = of_pod(&|it| drop(it.user.as_object_mut().unwrap().remove("extra")));
    assert_eq!(policies.judge(&nobody).unwrap_err().code, 422);
}

/// Before Kubernetes 1.30 a token names no node. Then the policies refuse every write, which an operator has to
/// learn.
#[test]
fn writes_that_the_policies_refuse_are_told_and_pods_go_on() {
    let mut rig = Rig::new(&Options::default());
    let user = json!({"username": "system:serviceaccount:kube-system:netattach", "extra": {}});
    rig.server.admit_by(Policies::of_deploy().unwrap(), user);
    rig.start();
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.await_trouble("network-status", PATIENCE * 2, OTHERS_POD);
    rig.del(&pod).success();
    // An expression that fails, as of a server that sends no claims at all, is answered with 422.
    let user = json!({"username": "system:serviceaccount:kube-system:netattach"});
    rig.server.admit_by(Policies::of_deploy().unwrap(), user);
    let pod = rig.pod("b");
    rig.add(&pod).success();
    rig.await_trouble("network-status", PATIENCE * 2, "expression evaluation failed");
}

/// The chart uses the namespace of its release instead; the rest is the same, which `cluster::chart` compares.
#[test]
fn policies_that_are_no_cel_are_not_read() {
    let text = "kind: ValidatingAdmissionPolicy\nmetadata: {name: x}\nspec:\n  failurePolicy: Fail\n  matchConstraints: {resourceRules: []}\n  matchConditions: [{name: a, expression: 'a ='}]\n  validations: []\n";
    let error = format!("{:#}", Policies::read(text).unwrap_err());
    assert!(error.starts_with("x: a =: "), "{error}");
}
