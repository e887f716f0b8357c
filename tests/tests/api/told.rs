//! Problems of an agent's access to the cluster: one line of the log, a condition and a finding of `doctor`, each
//! with the remedy, while existing pods keep working.

use std::fs;
use std::process::Command;

use netattach_tests::api_server::{Fault, Options, Verb, When};
use netattach_tests::node::executable;
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use serde_json::{Value, json};

use crate::rig::{NODE, Rig};

/// Returns the result of `doctor` for a check, with the settings of the rig's agent: state, detail and remedy.
fn doctor(rig: &Rig, check: &str) -> Vec<[String; 3]> {
    let settings = rig.node.path("doctor.yaml");
    let cluster = json!({"enabled": true, "kubeconfig": rig.node.path("kubeconfig"), "nodeName": NODE});
    let text = json!({"kubernetes": cluster, "stateDir": rig.node.path("state"), "bpffs": rig.node.bpffs()});
    fs::write(&settings, text.to_string()).unwrap();
    let mut ctl = Command::new(executable("netattachctl").unwrap());
    ctl.arg("--socket").arg(rig.node.socket()).args(["doctor", "-o", "json", "--config"]).arg(&settings);
    let output = rig.node.namespace.run(|| ctl.output()).unwrap();
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let of_check = checks.iter().filter(|it| it["check"] == check);
    let text = |it: &Value, key: &str| it[key].as_str().unwrap_or_default().to_owned();
    of_check.map(|it| ["state", "detail", "remedy"].map(|key| text(it, key))).collect()
}

/// Returns the log lines that have these texts. The log is written concurrently with the agent's answers: waits for
/// that many lines.
fn lines(rig: &Rig, texts: &[&str], least: usize) -> Vec<String> {
    let mut lines = Vec::new();
    eventually(PATIENCE, || {
        let log = rig.node.log_so_far();
        lines = log
            .lines()
            .filter(|line| texts.iter().all(|text| line.contains(text)))
            .map(str::to_owned)
            .collect();
        lines.len() >= least
    });
    lines
}

/// Checks for the finding of `doctor` with this text; it contains the remedies of the agent's conditions.
fn is_found(rig: &Rig, text: &str) {
    let found = doctor(rig, "objects");
    assert!(found.iter().any(|[_, detail, _]| detail.contains(text)), "{found:#?}");
}

/// The remedy of `doctor` for missing rights.
const RIGHTS: &str = "apply deploy/base/rbac.yaml with the components that the settings need (evict, startup-taint), or add these \
                      rules to the ClusterRole of the agent's service account";

#[test]
fn a_right_that_is_missing_is_told_with_the_rule_that_gives_it() {
    let mut rig = Rig::new(&Options::default());
    rig.server.deny(&[("patch", "pods/status")]);
    rig.start();
    let rule = r#"the agent may not patch them; its ClusterRole lacks the rule {apiGroups: [""], resources: ["pods/status"], verbs: ["patch"]}"#;
    rig.await_trouble("access to pods/status", PATIENCE, rule);
    // Texts are quoted in the log.
    let said = lines(&rig, &["rights are missing"], 1);
    let [line] = &said[..] else { panic!("{said:#?}") };
    assert!(line.contains(" WARN ") && line.contains(&format!("problem={rule:?}")), "{line}");
    is_found(&rig, rule);
    let found = format!("access to pods/status: {rule}");
    assert_eq!(doctor(&rig, "cluster access"), [["failed", &found, RIGHTS].map(str::to_owned)]);
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.node.check(&pod).success();
}

/// An agent that cannot read a kind decides nothing: new pods wait, and existing ones keep working.
#[test]
fn a_right_to_read_that_is_missing_is_told_with_its_rule_and_pods_that_are_there_go_on() {
    const KIND: &str = "network-attachment-definitions";
    let mut rig = Rig::started();
    let known = rig.pod("known");
    rig.add(&known).success();
    rig.published("known");
    rig.node.stop().unwrap();
    rig.server.deny(&[("list", KIND), ("watch", KIND)]);
    for verb in [Verb::List, Verb::Watch] {
        rig.server.faults().always(When::on(verb, KIND), Fault::Answer(403));
    }
    rig.node.start_serving().unwrap();
    let rule = r#"the agent may not list, watch them; its ClusterRole lacks the rule {apiGroups: ["k8s.cni.cncf.io"], resources: ["network-attachment-definitions"], verbs: ["list", "watch"]}"#;
    let object = format!("access to {KIND}");
    rig.await_trouble(&object, PATIENCE, rule);
    let said = lines(&rig, &["rights are missing"], 1);
    let [line] = &said[..] else { panic!("{said:#?}") };
    assert!(line.contains(" WARN ") && line.contains(&format!("problem={rule:?}")), "{line}");
    is_found(&rig, rule);
    let found = format!("{object}: {rule}");
    assert_eq!(doctor(&rig, "cluster access"), [["failed", &found, RIGHTS].map(str::to_owned)]);
    let mut unmet = Vec::new();
    let is_unmet = eventually(PATIENCE, || {
        unmet = doctor(&rig, "readiness");
        let of_source = |[state, detail, _]: &[String; 3]| {
            state == "failed" && detail.starts_with("source: ") && detail.contains("403 forbidden")
        };
        unmet.iter().any(of_source)
    });
    assert!(is_unmet, "{unmet:#?}");
    let new = rig.pod("new");
    let (code, message) = rig.add(&new).failure();
    assert!(code == 11 && message.contains("403 forbidden"), "{code}: {message}");
    assert!(ping(&known.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());

    // The next refusal makes it check its rights again.
    rig.server.deny(&[]);
    assert!(eventually(PATIENCE * 4, || rig.trouble(&object).is_none()));
    rig.server.faults().clear();
    let mut last = String::new();
    let is_attached = eventually(PATIENCE * 3, || {
        let outcome = rig.add(&new);
        last = outcome.json.to_string();
        outcome.exit == 0
    });
    assert!(is_attached, "{last}");
    for pod in [&known, &new] {
        rig.node.check(pod).success();
        rig.del(pod).success();
    }
}

#[test]
fn a_token_that_has_expired_is_told_with_what_to_renew() {
    let (rig, token, known) = Rig::with_an_expired_token();
    let remedy = "401 Unauthorized; it does not accept the agent's token or certificate: renew the one that the kubeconfig names \
                  (in a pod the kubelet does)";
    for kind in ["pods of this node", "namespaces", "network-attachment-definitions", "multi-networkpolicies"]
    {
        rig.await_trouble(kind, PATIENCE * 2, remedy);
    }
    // One line for all of them, however often it is tried.
    let said = lines(&rig, &[remedy, "not followed; it will be tried again"], 1);
    let [line] = &said[..] else { panic!("{said:#?}") };
    assert!(line.contains(" WARN ") && line.contains("kind=\"every kind\""), "{line}");
    is_found(&rig, remedy);
    let [[state, detail, what_to_do]] = &doctor(&rig, "cluster access")[..] else { panic!("one finding") };
    assert!(state == "failed" && detail.contains("401 Unauthorized"), "{detail}");
    assert!(what_to_do.ends_with("and that the token or certificate is valid"), "{what_to_do}");
    let unmet = doctor(&rig, "readiness").into_iter().filter(|[state, ..]| state == "failed");
    let unmet: Vec<String> = unmet.map(|[_, detail, _]| detail).collect();
    let [server] = &unmet[..] else { panic!("{unmet:#?}") };
    assert!(server.starts_with("API server: ") && server.contains(remedy), "{server}");
    rig.add(&known).success();
    rig.node.check(&known).success();

    fs::write(&token, "renewed").unwrap();
    assert!(eventually(PATIENCE * 2, || rig.trouble("pods of this node").is_none()));
    rig.published("known");
}

#[test]
fn definitions_that_are_missing_or_old_are_told_with_what_to_apply_and_pods_that_are_there_go_on() {
    let mut rig = Rig::started();
    let known = rig.pod("known");
    rig.add(&known).success();
    rig.published("known");
    rig.server.serve("network-attachment-definitions", None, false).unwrap();
    rig.server.serve("multi-networkpolicies", Some("v1beta2"), false).unwrap();
    let missing = "the API server does not serve this kind: apply its definition, of deploy/base/crds";
    let old = "the API server serves v1beta1 alone, and may cut a policy's endPort off, so that of a range of ports its first one is \
               left: apply its definition, of deploy/base/crds";
    // The agent that has read them before, and one that is started without.
    for is_new in [false, true] {
        if is_new {
            rig.node.stop().unwrap();
            rig.node.start().unwrap();
        }
        for (kind, problem) in [("network-attachment-definitions", missing), ("multi-networkpolicies", old)] {
            rig.await_trouble(kind, PATIENCE, problem);
            let said = lines(&rig, &[problem], 1);
            let [line] = &said[..] else { panic!("{kind}: {said:#?}") };
            assert!(line.contains(" WARN ") && line.contains(kind), "{line}");
            is_found(&rig, &format!("{kind}: {problem}"));
        }
        rig.node.check(&known).success();
        assert!(ping(&known.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap(), "{is_new}");
    }
    rig.del(&known).success();
    // Applied: the agent asks again, of a kind that is there by its version when it lists the next time.
    rig.server.serve("network-attachment-definitions", None, true).unwrap();
    let is_there = || rig.trouble("network-attachment-definitions").is_none();
    assert!(eventually(PATIENCE * 3, is_there));
    let pod = rig.pod("a");
    rig.add(&pod).success();
    rig.node.check(&pod).success();
}
