//! The native plugins as CNI executables, on the kernel, as a container runtime runs them.
//!
//! `bridge_keys` tests keys of `bridge`, `host_device` that plugin, `versions` ADD to DEL in every version, `node`
//! existing state on the node, `ipam` other IPAM plugins, `removal` DEL and GC, `tap`, `netkit` and `sriov` those
//! plugins, `queries` the read-only verbs.

mod bridge_keys;
mod host_device;
mod ipam;
mod netkit;
mod node;
mod queries;
mod removal;
mod sriov;
mod tap;
mod versions;

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;

use ipnet::IpNet;
use netattach::netlink::{Handle, LinkState};
use netattach::spec::Bridge;
use netattach_tests::Namespace;
use netattach_tests::node::executable;
use netattach_tests::runtime::{Call, Runtime, config};
use serde_json::{Value, json};
use tempfile::TempDir;

const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
const PLUGINS: [&str; 15] = [
    "bridge",
    "dummy",
    "host-device",
    "ipvlan",
    "loopback",
    "macvlan",
    "macvtap",
    "netkit",
    "ptp",
    "sriov",
    "tap",
    "veth",
    "vlan",
    "host-local",
    "static",
];
const MAC: &str = "02:00:00:00:00:07";

/// A node with the plugins installed and a parent for macvlans, and one pod.
struct Rig {
    runtime: Runtime,
    pod: Namespace,
    dir: TempDir,
}

/// Links the plugins in a directory below `dir`; returns it.
fn installed(dir: &TempDir) -> PathBuf {
    let plugins = dir.path().join("plugins");
    fs::create_dir(&plugins).unwrap();
    let installed =
        Command::new(executable("netattach-cni").unwrap()).arg("install").arg(&plugins).output().unwrap();
    assert!(installed.status.success(), "{installed:?}");
    plugins
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Runtime { node: Namespace::new().unwrap(), plugins: installed(&dir) };
        let rig = Self { runtime, pod: Namespace::new().unwrap(), dir };
        rig.node().ensure_bridge(&bridge("uplink")).unwrap();
        rig
    }

    fn node(&self) -> Handle {
        Handle::open_in(self.runtime.node.netns()).unwrap()
    }

    fn inside(&self) -> Handle {
        Handle::open_in(self.pod.netns()).unwrap()
    }

    fn call(&self) -> Call<'_> {
        Call { container: "c1", ifname: "eth0", netns: self.pod.path(), args: "" }
    }

    fn ipam(&self) -> Value {
        json!({
            "type": "host-local", "dataDir": self.dir.path(),
            "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]],
            "routes": [{"dst": "10.9.0.0/16"}],
        })
    }

    /// A configuration of the kind that uses most of the plugin's features.
    fn config(&self, version: &str, kind: &str) -> Value {
        let ipam = self.ipam();
        let extra = match kind {
            "bridge" => json!({"bridge": "br0", "isDefaultGateway": true, "ipam": ipam}),
            "macvlan" => json!({"master": "uplink", "mode": "bridge", "ipam": ipam}),
            "macvtap" => json!({"master": "uplink", "ipam": ipam}),
            "vlan" => json!({"master": "uplink", "vlanId": 5, "ipam": ipam}),
            "dummy" | "tap" => json!({"ipam": ipam}),
            "host-device" => json!({"device": "card0", "ipam": ipam}),
            "ipvlan" => json!({"master": "uplink", "ipam": ipam}),
            "ptp" => json!({"ipam": ipam}),
            "veth" | "netkit" => json!({"isDefaultGateway": true, "ipam": ipam}),
            "host-local" => json!({"ipam": ipam}),
            "static" => json!({"ipam": {"type": "static", "addresses": [{"address": "10.1.0.7/24"}]}}),
            _ => json!({}),
        };
        config(version, kind, &extra)
    }

    /// Addresses that are reserved.
    fn reserved(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir.path().join("net")) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut addresses: Vec<_> = names.filter(|name| name.parse::<IpAddr>().is_ok()).collect();
        addresses.sort();
        addresses
    }

    /// Links of the pod and of the node, without the initial ones.
    fn links(&self) -> (Vec<String>, Vec<String>) {
        let names = |mut handle: Handle| -> Vec<String> {
            let links = handle.links().unwrap().into_iter().map(|link| link.name);
            links.filter(|name| !["lo", "uplink", "br0"].contains(&name.as_str())).collect()
        };
        (names(self.inside()), names(self.node()))
    }

    fn assert_nothing_left(&self, when: &str) {
        assert_eq!((self.links(), self.reserved()), ((vec![], vec![]), vec![]), "{when}");
    }

    fn refusal(&self, verb: &str, config: &Value) -> (u64, String) {
        self.runtime.refusal(verb, self.call(), config).unwrap()
    }

    fn add(&self, config: &Value) -> Value {
        self.runtime.add(self.call(), config).unwrap()
    }

    fn after(&self, verb: &str, config: &Value, result: &Value) {
        self.runtime.after(verb, self.call(), config, result).unwrap();
    }

    /// A verb without a `prevResult`.
    fn alone(&self, verb: &str, config: &Value) {
        let answer = self.runtime.run(verb, self.call(), config).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{verb} {config}: {answer:?}");
    }
}

fn bridge(name: &str) -> Bridge {
    Bridge { name: name.into(), ..Bridge::default() }
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// Without the addresses that the kernel assigns to every interface.
fn addresses(handle: &mut Handle, index: u32) -> Vec<String> {
    let all = handle.addresses(index).unwrap().into_iter().map(|address| address.to_string());
    all.filter(|address| !address.starts_with("fe80:") || address == "fe80::1/64").collect()
}

/// Destination and next hop of the routes through an interface, without the kernel's own.
fn routes(handle: &mut Handle, index: u32) -> Vec<(String, String)> {
    let mut found: Vec<_> = handle
        .routes()
        .unwrap()
        .into_iter()
        .filter(|route| route.interface == Some(index))
        .filter_map(|route| Some((route.destination.to_string(), route.gateway?.to_string())))
        .collect();
    found.sort();
    found
}

fn pairs(rows: &[(&str, &str)]) -> Vec<(String, String)> {
    rows.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

fn mac_of(link: &LinkState) -> String {
    link.mac.unwrap().to_string()
}
