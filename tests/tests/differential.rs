//! The same configurations through the reference plugins and through ours: result, kernel and lease files agree,
//! except where a row says why not.
//!
//! The reference plugins are those of containernetworking/plugins in the directory that
//! `NETATTACH_REFERENCE_PLUGINS` names.

#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use netattach::link::spec::{Addressing, Bridge, Route};
use netattach::netlink::Handle;
use netattach_tests::Namespace;
use netattach_tests::runtime::{Call, Runtime, config, executable, version_of, with_result};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A difference that is meant, as a JSON pointer into a [`Rig::snapshot`], and why.
type Deviation = (&'static str, &'static str);

const GATEWAY_OF_L2: &str = "a gateway without addresses is refused rather than ignored";

#[test]
fn bridge_agrees_with_the_reference() {
    let ipam =
        json!({"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]]});
    let with = |extra: Value| {
        let mut keys = json!({"bridge": "br0", "ipam": ipam});
        keys.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        keys
    };
    agree(
        "bridge_agrees_with_the_reference",
        "bridge",
        &[
            (json!({"bridge": "br0"}), "", &[]),
            (with(json!({})), "", &[]),
            (with(json!({"isGateway": true})), "", &[]),
            (with(json!({"isDefaultGateway": true})), "", &[]),
            (with(json!({"isDefaultGateway": true, "mtu": 1400, "hairpinMode": true})), "", &[]),
            (with(json!({"promiscMode": true})), "", &[]),
            (with(json!({"dns": {"nameservers": ["10.0.0.53"]}})), "", &[]),
            (with(json!({"args": {"cni": {"mac": "02:00:00:00:00:07"}}})), "MAC=02:00:00:00:00:08", &[]),
            (with(json!({"runtimeConfig": {"mac": "02:00:00:00:00:07"}})), "", &[]),
        ],
    );
}

#[test]
fn macvlan_agrees_with_the_reference() {
    let ipam = json!({
        "type": "host-local", "subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "gateway": "10.1.0.9",
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.77"}],
    });
    agree(
        "macvlan_agrees_with_the_reference",
        "macvlan",
        &[
            (json!({"master": "uplink"}), "", &[]),
            (json!({"ipam": ipam}), "", &[]),
            (json!({"master": "uplink", "mode": "private", "mtu": 1400, "ipam": ipam}), "", &[]),
            (json!({"master": "uplink", "mode": "vepa", "mac": "02:00:00:00:00:07"}), "", &[]),
            (json!({"master": "uplink", "mode": "passthru"}), "", &[]),
            (json!({"master": "uplink", "bcqueuelen": 5, "ipam": ipam}), "MAC=02:00:00:00:00:08", &[]),
        ],
    );
}

#[test]
fn loopback_agrees_with_the_reference() {
    agree("loopback_agrees_with_the_reference", "loopback", &[(json!({}), "", &[])]);
}

#[test]
fn host_local_agrees_with_the_reference() {
    let ranges = json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.5"}], [{"subnet": "fd00:1::/64"}]]);
    let routes = json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "10.8.0.0/16"}]);
    agree(
        "host_local_agrees_with_the_reference",
        "host-local",
        &[
            (json!({"ipam": {"type": "host-local", "ranges": ranges, "routes": routes}}), "", &[]),
            (json!({"ipam": {"type": "host-local", "ranges": ranges}}), "IP=10.1.0.99", &[]),
            (
                json!({"ipam": {"type": "host-local", "ranges": ranges}, "runtimeConfig": {"ips": ["fd00:1::99/64"]}}),
                "",
                &[],
            ),
        ],
    );
}

/// Runs each row's configuration in every version through both.
fn agree(test: &str, kind: &str, rows: &[(Value, &str, &[Deviation])]) {
    let Some(reference) = reference_plugins(test) else { return };
    for (keys, args, meant) in rows {
        for version in ["0.2.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
            let ours = Rig::new(Plugins::Ours).attach(kind, version, keys, args);
            let theirs = Rig::new(Plugins::At(reference.clone())).attach(kind, version, keys, args);
            let mut found = Vec::new();
            differences("", &ours, &theirs, &mut found);
            let unmeant: Vec<_> =
                found.iter().filter(|(at, ..)| !meant.iter().any(|(pointer, _)| at == pointer)).collect();
            println!("{kind} {version} {keys} {args:?}: at, ours, theirs: {unmeant:#?}");
        }
    }
    panic!()
}

enum Plugins {
    Ours,
    At(PathBuf),
}

/// A node with an uplink and a default route, and one pod.
struct Rig {
    runtime: Runtime,
    pod: Namespace,
    dir: TempDir,
}

impl Rig {
    fn new(plugins: Plugins) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let plugins = match plugins {
            Plugins::At(path) => path,
            Plugins::Ours => {
                let netattach_cni = executable("netattach-cni").unwrap();
                let installed = Command::new(netattach_cni).arg("install").arg(dir.path()).status().unwrap();
                assert!(installed.success());
                dir.path().to_owned()
            }
        };
        let rig = Self {
            runtime: Runtime { node: Namespace::new().unwrap(), plugins },
            pod: Namespace::new().unwrap(),
            dir,
        };
        let mut node = rig.node();
        let uplink = Bridge { name: "uplink".into(), mtu: None, promiscuous: false };
        let index = node.ensure_bridge(&uplink).unwrap().link.index;
        let addressing = Addressing {
            addresses: vec!["192.0.2.2/24".parse().unwrap()],
            routes: vec![Route::via("0.0.0.0/0".parse().unwrap(), "192.0.2.1".parse().unwrap())],
        };
        node.configure(index, &addressing).unwrap();
        rig
    }

    fn node(&self) -> Handle {
        Handle::open_in(self.runtime.node.netns()).unwrap()
    }

    /// Everything that ADD, CHECK and DEL of one attachment show.
    fn attach(&self, kind: &str, version: &str, keys: &Value, args: &str) -> Value {
        let mut config = config(version, kind, keys);
        if config.get("ipam").is_some() {
            config["ipam"]["dataDir"] = json!(self.dir.path());
        }
        let call = Call { container: "c1", ifname: "eth0", netns: self.pod.path(), args };
        let added = self.runtime.run("ADD", call, &config).unwrap();
        let attached = self.snapshot();
        let later = with_result(&config, &added.stdout);
        let mut seen = json!({
            "ADD": {"exit": added.exit, "result": self.normal(&added.stdout)},
            "attached": attached,
        });
        if version_of(&config) >= "0.4.0" {
            seen["CHECK"] = json!(self.runtime.run("CHECK", call, &later).unwrap().exit);
        }
        seen["DEL"] = json!(self.runtime.run("DEL", call, &later).unwrap().exit);
        seen["detached"] = self.snapshot();
        seen
    }

    /// The result without what is different each time.
    fn normal(&self, result: &Value) -> Value {
        let mut result = result.clone();
        for interface in result.get_mut("interfaces").and_then(Value::as_array_mut).into_iter().flatten() {
            if interface.get("sandbox").is_none() && interface["name"] != json!("br0") {
                interface["name"] = json!("the node's end");
            }
            if interface.get("sandbox").is_some_and(|sandbox| *sandbox == json!(self.pod.path())) {
                interface["sandbox"] = json!("the pod");
            }
            if let Some(Value::String(mac)) = interface.get_mut("mac")
                && !mac.starts_with("02:00:00:00:00")
                && mac != "00:00:00:00:00:00"
            {
                *mac = "random".into();
            }
        }
        if result.get("code").is_some() { json!({"code": result["code"]}) } else { result }
    }

    /// Links, addresses and routes of pod and node, and the reservations.
    fn snapshot(&self) -> Value {
        let inside = Handle::open_in(self.pod.netns()).unwrap();
        json!({"pod": links(inside), "node": links(self.node()), "files": self.files()})
    }

    fn files(&self) -> Value {
        let Ok(entries) = fs::read_dir(self.dir.path().join("net")) else { return Value::Null };
        let files: Map<String, Value> = entries
            .map(|entry| entry.unwrap())
            .map(|entry| {
                let content = fs::read_to_string(entry.path()).unwrap();
                (entry.file_name().into_string().unwrap(), json!(content))
            })
            .collect();
        Value::Object(files)
    }
}

/// Every link by its name; a node's ends of veths, whose names are nobody's business, by their kind.
fn links(mut handle: Handle) -> Value {
    let all = handle.links().unwrap();
    let routes = handle.routes().unwrap();
    let name_of = |index: Option<u32>| {
        all.iter().find(|link| Some(link.index) == index).map_or("none", |link| link.name.as_str())
    };
    let mut shown = Map::new();
    for link in &all {
        let is_automatic = |text: &String| text.starts_with("fe80:");
        let mut addresses: Vec<String> =
            handle.addresses(link.index).unwrap().iter().map(ToString::to_string).collect();
        addresses.retain(|address| !is_automatic(address));
        let through: Vec<Value> = routes
            .iter()
            .filter(|route| route.interface == Some(link.index))
            .map(|route| (route.destination.to_string(), route))
            .filter(|(destination, _)| !is_automatic(destination) && !destination.starts_with("ff00:"))
            .map(|(destination, route)| json!([destination, route.gateway, route.priority]))
            .collect();
        let is_port = link.kind == "veth" && link.name != "eth0";
        shown.insert(
            if is_port { "the node's end".into() } else { link.name.clone() },
            json!({
                "kind": link.kind, "up": link.up, "mtu": link.mtu, "promiscuous": link.promiscuous,
                "controller": name_of(link.controller), "hairpin": link.hairpin,
                "mode": link.macvlan_mode.map(|mode| format!("{mode:?}")),
                "addresses": addresses, "routes": through,
            }),
        );
    }
    Value::Object(shown)
}

/// Where two documents differ, and what is there.
fn differences(at: &str, ours: &Value, theirs: &Value, found: &mut Vec<(String, Value, Value)>) {
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) => {
            let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
            keys.sort();
            keys.dedup();
            for key in keys {
                let of = |object: &Map<String, Value>| object.get(key).cloned().unwrap_or(json!("absent"));
                differences(&format!("{at}/{key}"), &of(a), &of(b), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                differences(&format!("{at}/{index}"), a, b, found);
            }
        }
        _ if ours == theirs => {}
        _ => found.push((at.to_owned(), ours.clone(), theirs.clone())),
    }
}

fn reference_plugins(test: &str) -> Option<PathBuf> {
    let names = ["bridge", "macvlan", "loopback", "host-local"];
    let reason = match std::env::var_os("NETATTACH_REFERENCE_PLUGINS").map(PathBuf::from) {
        Some(path) => match names.iter().find(|name| !path.join(name).is_file()) {
            None => return Some(path),
            Some(name) => format!("{} is not there", path.join(name).display()),
        },
        None => "NETATTACH_REFERENCE_PLUGINS is not set".to_owned(),
    };
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{test} must not be skipped in CI: {reason}");
    eprintln!("SKIPPED: {test}: {reason}");
    None
}
