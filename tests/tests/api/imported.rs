//! The output of `netattachctl import --write` for a configuration of Multus, used by an agent of a cluster.

use std::fs;
use std::process::Command;

use netattach_tests::api_server::Options;
use netattach_tests::node::executable;
use netattach_tests::traffic::{PATIENCE, eventually, ping};
use serde_json::{Map, Value, json};

use crate::rig::Rig;

/// As in docs/migrate-from-multus.md: the delegate's file is copied to the node, and its path there is in the
/// settings.
#[test]
fn an_agent_in_a_cluster_serves_with_the_settings_and_the_delegate_that_import_has_written() {
    let mut rig = Rig::new(&Options::default());
    let node = &mut rig.node;
    let mut delegate = node.default_config();
    delegate["name"] = json!("cbr0");
    let multus = json!({
        "cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus", "logLevel": "error",
        "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig", "namespaceIsolation": true,
        "binDir": node.path("cni-bin"), "confDir": node.path("cni-conf"), "cniDir": node.path("multus"),
        "delegates": [delegate],
    });
    let daemon = json!({"cniConfigDir": node.path("net.d"), "socketDir": "/run/multus"});
    let [conf, daemon_config] =
        [("00-multus.conf", multus), ("daemon-config.json", daemon)].map(|(name, it)| {
            fs::write(node.path(name), it.to_string()).unwrap();
            node.path(name)
        });
    let mine = node.path("mine");
    let mut import = Command::new(executable("netattachctl").unwrap());
    import.arg("import").arg("--conf").arg(conf).arg("--daemon-config").arg(daemon_config);
    let output = import.arg("--write").arg(&mine).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut settings: Map<String, Value> =
        serde_json::from_slice(&fs::read(mine.join("config.yaml")).unwrap()).unwrap();
    let of_the_node = node.path("default-network.conf");
    fs::rename(mine.join("default-network.conf"), &of_the_node).unwrap();
    let written = settings.insert("defaultNetwork".to_owned(), json!(of_the_node));
    assert_eq!(written, Some(json!(mine.join("default-network.conf"))));
    assert_eq!(settings["kubernetes"], json!({"enabled": true}));
    for (key, value) in settings {
        node.set(&key, value);
    }

    rig.start();
    let own = rig.node.path("net.d/00-netattach.conflist");
    assert!(eventually(PATIENCE, || own.exists()), "{:?}", rig.unmet());
    assert!(eventually(PATIENCE, || rig.unmet().is_empty()), "{:?}", rig.unmet());
    let pod = rig.pod("a");
    rig.add(&pod).success();
    let status = rig.published("a");
    let networks: Vec<[&str; 2]> = status
        .as_array()
        .unwrap()
        .iter()
        .map(|it| ["name", "interface"].map(|key| it[key].as_str().unwrap_or_default()))
        .collect();
    assert_eq!(networks, [["cbr0", "eth0"], ["shop/lan-a", "net1"], ["shop/lan-b", "net2"]]);
    assert!(ping(&pod.namespace, "10.50.0.1".parse().unwrap(), PATIENCE).unwrap());
    rig.node.check(&pod).success();
    rig.del(&pod).success();
}
