//! The unit for systemd in `deploy/systemd`: no test runs it, as that needs a machine that systemd has started. It is
//! parsed, and compared with the manifests of an agent.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use netattach_tests::guide::example;
use netattach_tests::node::executable;
use netattach_tests::tools::report_skipped;
use serde_json::Value;

use crate::capabilities::{for_built_in_plugins, for_executed_plugins};

const UNIT: &str = include_str!("../../../deploy/systemd/netattach.service");
const PAGE: &str = include_str!("../../../docs/image.md");
const CONFIG: &str = include_str!("../../../deploy/systemd/config.yaml");
const PROGRAM: &str = "/usr/local/bin/netattachd";

/// Settings of the manifests that the unit lacks.
const ONLY_IN_PODS: [(&str, &str); 1] =
    [("SYS_CHROOT", "on the node itself plugins are in the root directory that they belong to")];
/// Settings of the unit that the manifests lack.
const ONLY_IN_THE_UNIT: [(&str, &str); 3] = [
    (
        "SYS_PTRACE",
        "opens /proc/PID/ns/net of another user's process, by which some runtimes name a namespace: in a pod, which does not \
         see the node's processes, there is none",
    ),
    (
        "DAC_OVERRIDE",
        "executed plugins write below directories of others, as they do under a runtime; a pod has the mounts that it names",
    ),
    (
        "SYS_MODULE",
        "iptables, which executed plugins start, loads modules itself; a pod has no modules to load",
    ),
];
/// Settings that the unit must not have, with the reasons.
const NOT_SET: [(&str, &str); 5] = [
    ("ProtectKernelTunables", "the agent sets net.*"),
    ("ProtectKernelModules", "making a link loads its module"),
    (
        "ProtectControlGroups",
        "it would mount read-only what Delegate gives, and executed plugins have their group in it",
    ),
    ("PrivateNetwork", "the agent's links are those of the node"),
    ("PrivateUsers", "a namespace of a pod belongs to the node's users"),
];

/// Returns the unit's value of a key. Does not handle lists that continue on another line.
fn value(key: &str) -> Option<&'static str> {
    let mut found = UNIT.lines().filter_map(|line| line.split_once('=')).filter(|(name, _)| *name == key);
    let value = found.next().map(|(_, value)| value);
    assert_eq!(found.next(), None, "{key} twice");
    value
}

#[test]
fn the_unit_leaves_the_agent_the_capabilities_of_the_manifests_but_for_those_with_a_reason() {
    let listed = value("CapabilityBoundingSet").unwrap().split(' ');
    let unit: BTreeSet<String> = listed.map(|name| name.strip_prefix("CAP_").unwrap().to_owned()).collect();
    let manifests: BTreeSet<String> =
        for_built_in_plugins().into_iter().chain(for_executed_plugins()).collect();
    let named = |reasons: &[(&str, &str)]| reasons.iter().map(|(name, _)| (*name).to_owned()).collect();
    let differences: [BTreeSet<String>; 2] = [&manifests - &unit, &unit - &manifests];
    assert_eq!(differences, [named(&ONLY_IN_PODS), named(&ONLY_IN_THE_UNIT)]);
}

#[test]
fn the_unit_sets_nothing_that_an_agent_cannot_live_with() {
    for (key, why) in NOT_SET {
        assert_eq!(value(key), None, "{key}: {why}");
    }
    assert_eq!(value("Delegate"), Some("yes"));
    // Entering namespaces of pods; no other kind is entered or made.
    assert_eq!(value("RestrictNamespaces"), Some("net"));
}

/// Without these files the agent ends, and systemd starts it again for ever.
#[test]
fn the_page_makes_each_file_that_the_installed_settings_name() {
    let settings: Value = serde_norway::from_str(CONFIG).unwrap();
    let kubeconfig = settings["kubernetes"]["kubeconfig"].as_str().unwrap();
    let written = example(PAGE, "yaml", &format!("# {kubeconfig}")).unwrap();
    let written: Value = serde_norway::from_str(&written).unwrap();
    let (cluster, user) = (&written["clusters"][0], &written["users"][0]);
    let context = &written["contexts"][0];
    assert_eq!(written["current-context"], context["name"]);
    let of_context = &context["context"];
    assert_eq!((&of_context["cluster"], &of_context["user"]), (&cluster["name"], &user["name"]));
    let commands = example(PAGE, "text", kubeconfig).unwrap();
    for file in [&cluster["cluster"]["certificate-authority"], &user["user"]["tokenFile"]] {
        let file = file.as_str().unwrap();
        assert!(commands.lines().any(|line| line.ends_with(&format!(" {file}"))), "{file}: {commands}");
    }
    let start = PAGE.find("systemctl enable --now netattach").unwrap();
    assert!(PAGE.find(&format!("# {kubeconfig}")).unwrap() < start, "the service starts behind it");
}

/// systemd's own check of it: unknown keys, unreadable values, missing programs.
#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("netattach.service");
    let program = executable("netattachd").unwrap();
    assert_eq!(value("ExecStart").unwrap().split(' ').next(), Some(PROGRAM));
    fs::write(&unit, UNIT.replace(PROGRAM, program.to_str().unwrap())).unwrap();
    let verify = |unit: &Path| {
        let mut analyze = Command::new("systemd-analyze");
        analyze.env("LC_ALL", "C").args(["verify", "--man=no", "--recursive-errors=no"]).arg(unit);
        analyze.output()
    };
    let Ok(output) = verify(&unit) else {
        return report_skipped("systemd_finds_nothing_wrong_with_the_unit", "systemd-analyze is not here");
    };
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.success(), said.as_str()), (true, ""));
    // The check is effective.
    let wrong =
        UNIT.replace("LockPersonality=yes", "LockPersonality=perhaps").replace(PROGRAM, "/nonexistent");
    fs::write(&unit, wrong).unwrap();
    let said = String::from_utf8(verify(&unit).unwrap().stderr).unwrap();
    assert!(said.contains("perhaps") && said.contains("/nonexistent"), "{said}");
}
