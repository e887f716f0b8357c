//! Pods that Multus attached are detached by netattach, from the caches of Multus and libcni.
//!
//! The pods are made as Multus makes them: the reference plugins of containernetworking/plugins are executed, and
//! both caches are written.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use netattach_tests::node::{WIRE, ip};
use netattach_tests::runtime::{Call, run, with_result};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Node, Pod, tools};
use serde_json::{Value, json};

const SIGKILL: i32 = 9;
const ARGS: &str = "IgnoreUnknown=true;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=old";
const PLUGINS: [&str; 4] = ["bridge", "macvlan", "tuning", "host-local"];

/// A node whose pod `old` was attached by Multus: a bridge as default network, then a list of macvlan and tuning with a
/// requested address, then a plugin that netattach does not know.
struct Scene {
    node: Node,
    pod: Pod,
    plugins: PathBuf,
    before: Snapshot,
}

/// A delegate: name, interface in the pod, configuration, capability arguments.
type Delegate = (&'static str, &'static str, Value, Value);

impl Scene {
    fn new(test: &str) -> Option<Self> {
        let reference = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &PLUGINS)?;
        let mut node = Node::new(&[]).unwrap();
        node.add_wire().unwrap();
        ip(&node.namespace, &["link", "add", "br9", "address", "02:00:00:00:00:09", "up", "type", "bridge"])
            .unwrap();
        node.plugin("other", &json!({"result": {"cniVersion": "1.0.0", "interfaces": [], "odd": [1]}}))
            .unwrap();
        for name in PLUGINS {
            std::os::unix::fs::symlink(reference.join(name), node.path("cni-bin").join(name)).unwrap();
        }
        node.set("multusStateDir", json!(node.path("multus")));
        node.start().unwrap();
        let pod = Pod::new("old").unwrap();
        let before = Snapshot::take(&node, &[&pod]).unwrap();
        let plugins = node.path("cni-bin");
        Some(Self { node, pod, plugins, before })
    }

    fn delegates(&self) -> [Delegate; 3] {
        [
            (
                "",
                "eth0",
                json!({"cniVersion": "0.3.1", "name": "cbr", "type": "bridge", "bridge": "br9",
                    "ipam": self.node.host_local(&["10.60.0.0/24"])}),
                json!({}),
            ),
            (
                "shop/lan",
                "net1",
                json!({"cniVersion": "1.0.0", "name": "lan", "plugins": [
                    {"type": "macvlan", "master": WIRE, "capabilities": {"ips": true},
                        "ipam": self.node.host_local(&["10.61.0.0/24"])},
                    {"type": "tuning", "dataDir": self.node.path("run/tuning"), "mtu": 1400},
                ]}),
                json!({"ips": ["10.61.0.7/24"]}),
            ),
            ("shop/odd", "odd0", json!({"cniVersion": "1.0.0", "name": "odd", "type": "other"}), json!({})),
        ]
    }

    /// The steps of Multus for ADD.
    fn attach(&self) {
        let mut scratch = Vec::new();
        for (index, (name, ifname, config, asked)) in self.delegates().into_iter().enumerate() {
            let result = self.add(ifname, &config, &asked);
            self.remember(ifname, &config, &asked, &result);
            let generated = index == 0 || ifname == format!("net{index}");
            scratch.push(json!({
                "Conf": {"name": config["name"], "ipam": {}, "dns": {}}, "ConfList": {"plugins": config["plugins"]},
                "Name": name, "IsFilterV4Gateway": false, "IsFilterV6Gateway": false,
                "ifnameRequest": if generated { "" } else { ifname },
                "ipRequest": asked.get("ips"), "Bytes": STANDARD.encode(config.to_string()),
            }));
        }
        fs::write(self.scratch(), json!(scratch).to_string()).unwrap();
        self.node.take_calls().unwrap();
    }

    fn add(&self, ifname: &str, config: &Value, asked: &Value) -> Value {
        let alone = [config.clone()];
        let plugins = config["plugins"].as_array().map_or(&alone[..], Vec::as_slice);
        let mut result = Value::Null;
        for plugin in plugins {
            let mut stdin = plugin.clone();
            stdin["name"] = config["name"].clone();
            stdin["cniVersion"] = config["cniVersion"].clone();
            if plugin.get("capabilities").is_some() {
                stdin["runtimeConfig"] = asked.clone();
            }
            if !result.is_null() {
                stdin = with_result(&stdin, &result);
            }
            let netns = self.pod.namespace.path();
            let call = Call { container: &self.pod.container, ifname, netns, args: ARGS };
            let answer = run(&self.node.namespace, &self.plugins, "ADD", call, &stdin).unwrap();
            assert_eq!(answer.exit, Some(0), "{answer:?}");
            result = answer.stdout;
        }
        result
    }

    /// The steps of libcni after ADD.
    fn remember(&self, ifname: &str, config: &Value, asked: &Value, result: &Value) {
        let results = self.node.path("multus/results");
        fs::create_dir_all(&results).unwrap();
        let (network, container) = (config["name"].as_str().unwrap(), &self.pod.container);
        let args: Vec<[&str; 2]> =
            ARGS.split(';').map(|pair| pair.split_once('=').unwrap()).map(|(k, v)| [k, v]).collect();
        let cached = json!({
            "kind": "cniCacheV1", "containerId": container, "config": STANDARD.encode(config.to_string()),
            "ifName": ifname, "networkName": network, "netns": self.pod.namespace.path(),
            "cniArgs": args, "capabilityArgs": asked, "result": result,
        });
        fs::write(results.join(format!("{network}-{container}-{ifname}")), cached.to_string()).unwrap();
    }

    fn scratch(&self) -> PathBuf {
        self.node.path("multus").join(&self.pod.container)
    }

    /// The cache files of Multus and libcni, by name.
    fn remembered(&self) -> BTreeSet<String> {
        let directory = self.node.path("multus");
        let files = [directory.clone(), directory.join("results")].into_iter().flat_map(|directory| {
            let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
            entries.filter(|entry| entry.path().is_file()).collect::<Vec<_>>()
        });
        files.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    fn assert_as_before(&self, what: &str) {
        assert_eq!(Snapshot::take(&self.node, &[&self.pod]).unwrap(), self.before, "{what}");
        assert_eq!(self.remembered(), BTreeSet::new(), "{what}");
    }

    fn calls(&self) -> Vec<Value> {
        self.node.take_calls().unwrap()
    }
}

#[test]
fn a_pod_of_multus_is_taken_back_in_process_or_by_its_plugins() {
    let test = "a_pod_of_multus_is_taken_back_in_process_or_by_its_plugins";
    let Some(mut scene) = Scene::new(test) else { return };
    for exec in [json!([]), json!(["bridge", "macvlan", "host-local"])] {
        scene.node.stop().unwrap();
        scene.node.set("delegation", json!({"exec": exec}));
        scene.node.start().unwrap();
        scene.attach();
        let attached = Snapshot::take(&scene.node, &[&scene.pod]).unwrap();
        let links: Vec<&String> = attached.pods[&scene.pod.container].links.keys().collect();
        assert_eq!(links, ["eth0", "lo", "net1"]);
        assert_eq!(scene.remembered().len(), 4);

        scene.node.del(&scene.pod).success();
        let calls = scene.calls();
        let shown: Vec<[&Value; 5]> = calls
            .iter()
            .map(|call| {
                let env = &call["env"];
                [
                    &env["CNI_COMMAND"],
                    &env["CNI_IFNAME"],
                    &env["CNI_ARGS"],
                    &env["CNI_CONTAINERID"],
                    &call["stdin"],
                ]
            })
            .collect();
        let stdin = json!({
            "cniVersion": "1.0.0", "name": "odd", "type": "other",
            "prevResult": {"cniVersion": "1.0.0", "interfaces": [], "odd": [1]},
        });
        assert_eq!(
            shown,
            [[&json!("DEL"), &json!("odd0"), &json!(ARGS), &json!(scene.pod.container), &stdin]]
        );
        scene.assert_as_before(&exec.to_string());
        scene.node.del(&scene.pod).success();
        assert_eq!(scene.calls(), [] as [Value; 0]);
    }
}

#[test]
fn addresses_are_free_when_the_namespace_is_gone() {
    let Some(scene) = Scene::new("addresses_are_free_when_the_namespace_is_gone") else { return };
    scene.attach();
    for name in ["eth0", "net1"] {
        // The kernel would take them along with the namespace.
        ip(&scene.pod.namespace, &["link", "del", name]).unwrap();
    }
    scene.node.call("DEL", &scene.pod).with("CNI_NETNS", "/nonexistent").run().success();
    scene.assert_as_before("gone");
}

#[test]
fn results_alone_are_enough() {
    let Some(scene) = Scene::new("results_alone_are_enough") else { return };
    scene.attach();
    fs::remove_file(scene.scratch()).unwrap();
    scene.node.del(&scene.pod).success();
    assert_eq!(scene.calls().len(), 1);
    scene.assert_as_before("without the list");
}

#[test]
fn what_cannot_be_read_or_fails_is_kept_until_it_can_be_carried_out() {
    let test = "what_cannot_be_read_or_fails_is_kept_until_it_can_be_carried_out";
    let Some(scene) = Scene::new(test) else { return };
    scene.attach();
    let attached = Snapshot::take(&scene.node, &[&scene.pod]).unwrap();
    let whole = fs::read(scene.scratch()).unwrap();
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs::write(scene.scratch(), &whole[..length]).unwrap();
        let (code, message) = scene.node.del(&scene.pod).failure();
        assert_eq!(code, 6, "{message}");
        let path = scene.scratch().display().to_string();
        assert!(message.starts_with(&format!("{path}, in which Multus recorded the container")), "{message}");
        assert_eq!(fs::read(scene.scratch()).unwrap(), &whole[..length]);
    }
    assert_eq!(Snapshot::take(&scene.node, &[&scene.pod]).unwrap(), attached);
    fs::write(scene.scratch(), &whole).unwrap();

    scene.node.plugin("other", &json!({"DEL": {"error": {"code": 100, "msg": "not now"}}})).unwrap();
    let (_, message) = scene.node.del(&scene.pod).failure();
    assert!(message.contains("odd0 (shop/odd)") && message.contains("not now"), "{message}");
    assert_eq!(scene.remembered().len(), 4);
    scene.node.plugin("other", &json!({})).unwrap();
    scene.node.del(&scene.pod).success();
    scene.assert_as_before("at last");
}

#[test]
fn a_result_that_power_was_lost_on_is_set_aside_and_the_plugin_asked_without_it() {
    let test = "a_result_that_power_was_lost_on_is_set_aside_and_the_plugin_asked_without_it";
    let Some(scene) = Scene::new(test) else { return };
    scene.attach();
    let result = scene.node.path("multus/results").join(format!("odd-{}-odd0", scene.pod.container));
    fs::write(&result, "").unwrap();
    scene.node.del(&scene.pod).success();
    let calls = scene.calls();
    assert_eq!(calls[0]["stdin"], json!({"cniVersion": "1.0.0", "name": "odd", "type": "other"}));
    scene.assert_as_before("set aside");
}

#[test]
fn an_agent_killed_at_any_point_loses_nothing() {
    let Some(mut scene) = Scene::new("an_agent_killed_at_any_point_loses_nothing") else { return };
    let agent = Path::new(env!("CARGO_BIN_EXE_crash-agent"));
    scene.node.stop().unwrap();
    scene.node.start_with_points(agent).unwrap();
    // The points of the agent's start do not count.
    scene.node.arm(usize::MAX).unwrap();
    scene.attach();
    scene.node.del(&scene.pod).success();
    scene.assert_as_before("no crash");
    let points = scene.node.points();
    assert!(points.len() > 8, "{points:?}");
    for (point, what) in points.iter().enumerate() {
        scene.node.stop().unwrap();
        scene.node.disarm().unwrap();
        scene.node.start_with_points(agent).unwrap();
        scene.node.arm(point).unwrap();
        scene.attach();
        assert_eq!(scene.node.del(&scene.pod).exit, 0, "{what}: recorded");
        let (status, text) = scene.node.wait_for_end().unwrap();
        assert_eq!(status.signal(), Some(SIGKILL), "{what}: {text}");
        // The shim has kept the DEL; the agent carries it out before it serves.
        scene.node.start().unwrap();
        scene.assert_as_before(what);
    }
}
