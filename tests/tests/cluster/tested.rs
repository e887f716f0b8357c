//! `kubectl netattach test` of an agent in a cluster: pods and policies with the rights of the user, and no
//! leftovers.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use netattach_tests::cluster::site::{NODE, Site};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::rig::PODS;

/// Returns the objects of tests in the API.
fn made(site: &Site) -> Vec<String> {
    let words = ["get", "pods,multi-networkpolicies", "--all-namespaces", "--selector=netattach.dev/test"];
    let listed = site.kubectl.run(&[&words[..], &["--output=name"]].concat()).unwrap();
    listed.lines().map(str::to_owned).collect()
}

/// On a node with an agent and the definition `default/lan`.
pub(crate) fn policies_are_tried(site: &Site) {
    let line = format!("kubectl netattach test --node {NODE} --network default/lan");
    let ended = site.kubectl.ask(&format!("{line} -o json"), site.directory()).unwrap();
    let outcomes: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
    let rows = outcomes.as_array().unwrap_or_else(|| panic!("{ended:#?}"));
    assert!(rows.iter().all(|row| row["passed"] == true) && ended.success, "{ended:#?}");
    let on_lan = rows.iter().filter(|row| row["network"] == "default/lan");
    let expected = [
        "IPv4 a to b",
        "IPv4 b to a",
        "policy: no ingress to b: a to b stopped",
        "policy: no ingress to b: b to a let through",
        "policy: ingress to b from a: a to b let through",
        "policy: ingress to b from a: b to a let through",
        "policy: no egress from b: a to b let through",
        "policy: no egress from b: b to a stopped",
    ];
    assert_eq!(on_lan.map(|row| row["what"].as_str().unwrap()).collect::<Vec<_>>(), expected);
    assert_eq!((made(site), ended.stderr.as_str()), (Vec::new(), ""));
    assert_eq!(site.ctl(&["attachments"]), json!([]));
    // No kubelet has started one of the pods.
    let events = site.get("/api/v1/namespaces/kube-system/events");
    let events = events["items"].as_array().unwrap().iter();
    let of_tests = events.filter(|it| {
        let about = it["involvedObject"]["name"].as_str().unwrap();
        about.starts_with("netattachctl-test-") && it["reason"] != "FailedMount"
    });
    let events: Vec<_> = of_tests.map(|it| (&it["reason"], &it["message"])).collect();
    assert!(events.is_empty(), "{events:#?}");

    goes_when_interrupted(site, &line);
    without_rights(site, &line);
}

/// With the leftovers of a killed test.
fn goes_when_interrupted(site: &Site, line: &str) {
    let old = json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": "kube-system", "name": "netattachctl-test-1700000000-1",
            "labels": {"netattach.dev/test": "policy"}
        },
        "spec": {"podSelector": {"matchLabels": {"netattach.dev/test": "none"}}}
    });
    site.admin.create(&old).unwrap();
    let mut command =
        site.kubectl.shell(&format!("exec {}", line.replace("kubectl netattach", "kubectl-netattach")));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = site.cluster().outside().run(|| command.spawn()).unwrap();
    // Pods, then a policy.
    let is_under_way = || {
        let made = made(site);
        made.len() == 3 && !made.iter().any(|name| name.ends_with("-1700000000-1"))
    };
    assert!(site.eventually(is_under_way), "{:?}", made(site));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.into_raw(), 130 << 8, "{ended:?}");
    assert_eq!(made(site), [""; 0]);
    // The test in the agent's pod continues to its end.
    let none = || site.ctl(&["attachments"]) == json!([]);
    assert!(site.eventually(none), "{:#}", site.ctl(&["attachments"]));
}

/// A user who may only read pods and run commands in them.
fn without_rights(site: &Site, line: &str) {
    let rules = json!([{"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]}]);
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "exec"},
        "rules": rules
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "exec"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "exec"},
        "subjects": [{"kind": "ServiceAccount", "namespace": "kube-system", "name": "netattach"}]
    });
    site.admin.create(&role).unwrap();
    site.admin.create(&binding).unwrap();
    let config = site.cluster().agent_config(site.directory()).unwrap();
    let line = format!("{line} -o json --kubeconfig {}", config.display());
    let ended = site.kubectl.ask(&line, site.directory()).unwrap();
    let outcomes: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
    let rows = outcomes.as_array().unwrap_or_else(|| panic!("{ended:#?}"));
    assert!(rows.iter().all(|row| row["passed"] == true) && ended.success, "{ended:#?}");
    assert!(!rows.iter().any(|row| row["what"].as_str().unwrap().starts_with("policy")), "{rows:#?}");
    let said = "policies: not tested, as you may not create pods, delete pods, create multi-networkpolicies, \
                delete multi-networkpolicies in namespace kube-system\n";
    assert_eq!((ended.stderr.as_str(), made(site)), (said, Vec::new()));
    assert_eq!(site.get(PODS)["items"], json!([]));
    for path in ["clusterroles", "clusterrolebindings"] {
        site.admin.delete(&format!("/apis/rbac.authorization.k8s.io/v1/{path}/exec")).unwrap();
    }
}
