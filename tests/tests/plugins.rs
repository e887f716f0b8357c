//! The native plugins as CNI executables, on the kernel, as a container runtime runs them.

#![expect(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use ipnet::IpNet;
use netattach::link::spec::{Addressing, Bridge, MacvlanMode, Route, Veth};
use netattach::netlink::{Handle, LinkState};
use netattach_tests::Namespace;
use netattach_tests::runtime::{Call, Runtime, config, executable, with_result};
use serde_json::{Value, json};
use tempfile::TempDir;

const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
const PLUGINS: [&str; 5] = ["bridge", "loopback", "macvlan", "veth", "host-local"];
const MAC: &str = "02:00:00:00:00:07";

/// A node with the plugins installed and a parent for macvlans, and one pod.
struct Rig {
    runtime: Runtime,
    pod: Namespace,
    dir: TempDir,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let plugins = dir.path().join("plugins");
        fs::create_dir(&plugins).unwrap();
        let installed =
            Command::new(executable("netattach-cni").unwrap()).arg("install").arg(&plugins).output().unwrap();
        assert!(installed.status.success(), "{installed:?}");
        let runtime = Runtime { node: Namespace::new().unwrap(), plugins };
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

    /// A configuration of the kind that uses most of what the plugin has.
    fn config(&self, version: &str, kind: &str) -> Value {
        let ipam = self.ipam();
        let extra = match kind {
            "bridge" => json!({"bridge": "br0", "isDefaultGateway": true, "ipam": ipam}),
            "macvlan" => json!({"master": "uplink", "mode": "bridge", "ipam": ipam}),
            "veth" => json!({"isDefaultGateway": true, "ipam": ipam}),
            "host-local" => json!({"ipam": ipam}),
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

    /// Links of the pod and of the node, without those that are there from the start.
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
    Bridge { name: name.into(), mtu: None, promiscuous: false }
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// Without those that the kernel gives every interface.
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

/// A result in the shape of `version`.
fn shaped(version: &str, interfaces: &[Value], ips: &[Value], routes: &[Value]) -> Value {
    let family = |address: &Value| if address.as_str().unwrap().contains(':') { "6" } else { "4" };
    match version {
        "0.1.0" | "0.2.0" => {
            let mut result = json!({"cniVersion": version, "dns": {}});
            for ip in ips {
                let family = family(&ip["address"]);
                let mut old = json!({"ip": ip["address"]});
                if let Some(gateway) = ip.get("gateway") {
                    old["gateway"] = gateway.clone();
                }
                let own: Vec<_> =
                    routes.iter().filter(|route| contains_colon(&route["dst"]) == (family == "6")).collect();
                if !own.is_empty() {
                    old["routes"] = json!(own);
                }
                result[format!("ip{family}")] = old;
            }
            result
        }
        "0.3.0" | "0.3.1" | "0.4.0" => {
            let interfaces: Vec<_> = interfaces
                .iter()
                .cloned()
                .map(|mut interface| {
                    interface.as_object_mut().unwrap().remove("mtu");
                    interface
                })
                .collect();
            let ips: Vec<_> = ips
                .iter()
                .cloned()
                .map(|mut ip| {
                    ip["version"] = json!(family(&ip["address"]));
                    ip
                })
                .collect();
            let mut result = json!({"cniVersion": version, "interfaces": interfaces, "ips": ips, "dns": {}});
            if !routes.is_empty() {
                result["routes"] = json!(routes);
            }
            result
        }
        _ => {
            let mut result = json!({"cniVersion": version, "interfaces": interfaces, "ips": ips});
            if !routes.is_empty() {
                result["routes"] = json!(routes);
            }
            result
        }
    }
}

fn contains_colon(value: &Value) -> bool {
    value.as_str().unwrap().contains(':')
}

#[test]
fn bridge_attaches_and_detaches_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "bridge");
        let result = rig.add(&config);

        let (mut node, mut inside) = (rig.node(), rig.inside());
        let (br0, eth0) = (node.link("br0").unwrap(), inside.link("eth0").unwrap());
        let (_, ports) = rig.links();
        let port = node.link(&ports[0]).unwrap();
        assert_eq!((port.controller, port.hairpin, port.up), (Some(br0.index), Some(false), true));
        assert_eq!(addresses(&mut inside, eth0.index), ["10.1.0.2/24", "fd00:1::2/64"]);
        assert_eq!(addresses(&mut node, br0.index), ["10.1.0.1/24", "fd00:1::1/64"]);
        let defaults = [("0.0.0.0/0", "10.1.0.1"), ("10.9.0.0/16", "10.1.0.1"), ("::/0", "fd00:1::1")];
        assert_eq!(routes(&mut inside, eth0.index), pairs(&defaults));
        assert_eq!(rig.reserved(), ["10.1.0.2", "fd00:1::2"]);
        let expected = shaped(
            version,
            &[
                json!({"name": "br0", "mac": mac_of(&br0), "mtu": 1500}),
                json!({"name": port.name, "mac": mac_of(&port), "mtu": 1500}),
                json!({"name": "eth0", "mac": mac_of(&eth0), "mtu": 1500, "sandbox": rig.pod.path()}),
            ],
            &[
                json!({"interface": 2, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}),
                json!({"interface": 2, "address": "fd00:1::2/64", "gateway": "fd00:1::1"}),
            ],
            &[
                json!({"dst": "10.9.0.0/16"}),
                json!({"dst": "0.0.0.0/0", "gw": "10.1.0.1"}),
                json!({"dst": "::/0", "gw": "fd00:1::1"}),
            ],
        );
        assert_eq!(result, expected, "{version}");

        if version >= "0.4.0" {
            rig.after("CHECK", &config, &result);
        }
        rig.after("DEL", &config, &result);
        rig.assert_nothing_left(version);
        assert!(rig.node().find_link("br0").unwrap().is_some(), "a bridge is shared and stays");
        rig.after("DEL", &config, &result);
    }
}

#[test]
fn macvlan_attaches_and_detaches_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "macvlan");
        let result = rig.add(&config);
        let (mut node, mut inside) = (rig.node(), rig.inside());
        let (parent, eth0) = (node.link("uplink").unwrap(), inside.link("eth0").unwrap());
        assert_eq!(
            (eth0.kind.as_str(), eth0.link, eth0.macvlan_mode, eth0.up),
            ("macvlan", Some(parent.index), Some(MacvlanMode::Bridge), true)
        );
        assert_eq!(addresses(&mut inside, eth0.index), ["10.1.0.2/24", "fd00:1::2/64"]);
        assert_eq!(routes(&mut inside, eth0.index), pairs(&[("10.9.0.0/16", "10.1.0.1")]));
        let expected = shaped(
            version,
            &[json!({"name": "eth0", "mac": mac_of(&eth0), "mtu": 1500, "sandbox": rig.pod.path()})],
            &[
                json!({"interface": 0, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}),
                json!({"interface": 0, "address": "fd00:1::2/64", "gateway": "fd00:1::1"}),
            ],
            &[json!({"dst": "10.9.0.0/16"})],
        );
        assert_eq!(result, expected, "{version}");
        if version >= "0.4.0" {
            rig.after("CHECK", &config, &result);
        }
        rig.after("DEL", &config, &result);
        rig.assert_nothing_left(version);
        rig.after("DEL", &config, &result);
    }
}

#[test]
fn veth_attaches_and_detaches_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "veth");
        let result = rig.add(&config);
        let (mut node, mut inside) = (rig.node(), rig.inside());
        let eth0 = inside.link("eth0").unwrap();
        let host = node.link(&rig.links().1[0]).unwrap();
        assert_eq!(addresses(&mut inside, eth0.index), ["10.1.0.2/32", "fd00:1::2/128"]);
        assert_eq!(addresses(&mut node, host.index), ["169.254.1.1/32", "fe80::1/64"]);
        let everything = [
            ("0.0.0.0/0", "169.254.1.1"),
            ("10.1.0.0/24", "169.254.1.1"),
            ("10.9.0.0/16", "169.254.1.1"),
            ("::/0", "fe80::1"),
            ("fd00:1::/64", "fe80::1"),
        ];
        assert_eq!(routes(&mut inside, eth0.index), pairs(&everything));
        let to_pod = |address: &str| {
            let destination = net(address);
            rig.node()
                .routes()
                .unwrap()
                .iter()
                .any(|route| route.destination == destination && route.interface == Some(host.index))
        };
        assert!(to_pod("10.1.0.2/32") && to_pod("fd00:1::2/128"));
        let accept_ra = rig
            .runtime
            .node
            .run(|| fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{}/accept_ra", host.name)).unwrap());
        assert_eq!(accept_ra, "0\n");
        let expected = shaped(
            version,
            &[
                json!({"name": host.name, "mac": mac_of(&host), "mtu": 1500}),
                json!({"name": "eth0", "mac": mac_of(&eth0), "mtu": 1500, "sandbox": rig.pod.path()}),
            ],
            &[
                json!({"interface": 1, "address": "10.1.0.2/32", "gateway": "169.254.1.1"}),
                json!({"interface": 1, "address": "fd00:1::2/128", "gateway": "fe80::1"}),
            ],
            &[
                json!({"dst": "10.9.0.0/16"}),
                json!({"dst": "10.1.0.0/24", "gw": "169.254.1.1"}),
                json!({"dst": "0.0.0.0/0", "gw": "169.254.1.1"}),
                json!({"dst": "fd00:1::/64", "gw": "fe80::1"}),
                json!({"dst": "::/0", "gw": "fe80::1"}),
            ],
        );
        assert_eq!(result, expected, "{version}");
        if version >= "0.4.0" {
            rig.after("CHECK", &config, &result);
        }
        rig.after("DEL", &config, &result);
        rig.assert_nothing_left(version);
        rig.after("DEL", &config, &result);
    }
}

#[test]
fn loopback_comes_up_in_every_version_and_passes_results_on() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "loopback");
        let result = rig.add(&config);
        assert!(rig.inside().link("lo").unwrap().up);
        let expected = shaped(
            version,
            &[json!({"name": "lo", "mac": "00:00:00:00:00:00", "sandbox": rig.pod.path()})],
            &[
                json!({"interface": 0, "address": "127.0.0.1/8"}),
                json!({"interface": 0, "address": "::1/128"}),
            ],
            &[],
        );
        assert_eq!(result, expected, "{version}");
        if version >= "0.4.0" {
            rig.after("CHECK", &config, &result);
        }
        rig.after("DEL", &config, &result);
    }
    let rig = Rig::new();
    let config = rig.config("1.0.0", "loopback");
    let before = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": rig.pod.path()}]});
    assert_eq!(rig.add(&with_result(&config, &before)), before);
}

#[test]
fn host_local_reserves_checks_and_releases_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "host-local");
        let result = rig.add(&config);
        let ips = [
            json!({"address": "10.1.0.2/24", "gateway": "10.1.0.1"}),
            json!({"address": "fd00:1::2/64", "gateway": "fd00:1::1"}),
        ];
        let mut expected = shaped(version, &[], &ips, &[json!({"dst": "10.9.0.0/16"})]);
        if expected["interfaces"] == json!([]) {
            expected.as_object_mut().unwrap().remove("interfaces");
        }
        assert_eq!(result, expected, "{version}");
        assert_eq!(rig.reserved(), ["10.1.0.2", "fd00:1::2"]);
        // A second address for the same attachment is not given, and the first is not lost over it.
        assert_eq!(rig.refusal("ADD", &config).0, 999);
        assert_eq!(rig.reserved(), ["10.1.0.2", "fd00:1::2"]);
        if version >= "0.4.0" {
            rig.after("CHECK", &config, &result);
            let mut other = result.clone();
            other["ips"][0]["address"] = json!("10.1.0.9/24");
            assert_eq!(rig.refusal("CHECK", &with_result(&config, &other)).0, 999);
        }
        rig.after("DEL", &config, &result);
        assert_eq!(rig.reserved(), [""; 0]);
        rig.after("DEL", &config, &result);
        if version >= "0.4.0" {
            assert_eq!(rig.refusal("CHECK", &with_result(&config, &result)).0, 999);
        }
    }
}

/// Rows: GCC-07, REQ-11.
#[test]
fn gc_releases_what_is_not_in_use_and_nothing_without_a_list() {
    for kind in ["host-local", "bridge"] {
        let rig = Rig::new();
        let reserve = rig.config("1.1.0", "host-local");
        let call = |container| Call { container, ..rig.call() };
        for container in ["kept", "gone"] {
            rig.runtime.add(call(container), &reserve).unwrap();
        }
        // From before interfaces were recorded.
        let directory = rig.dir.path().join("net");
        fs::write(directory.join("10.1.0.77"), "kept").unwrap();
        fs::write(directory.join("10.1.0.78"), "gone").unwrap();
        let all = rig.reserved();
        let config = rig.config("1.1.0", kind);
        rig.alone("GC", &config);
        assert_eq!(rig.reserved(), all);
        let mut listed = config.clone();
        listed["cni.dev/valid-attachments"] = json!([{"containerID": "kept", "ifname": "eth0"}]);
        rig.alone("GC", &listed);
        assert_eq!(rig.reserved(), ["10.1.0.2", "10.1.0.77", "fd00:1::2"]);
        let mut none = config.clone();
        none["cni.dev/valid-attachments"] = json!([]);
        rig.alone("GC", &none);
        assert_eq!(rig.reserved(), [""; 0]);
    }
}

/// Rows: DEL-05, DEL-09.
#[test]
fn del_succeeds_when_there_is_nothing_to_delete() {
    let rig = Rig::new();
    let file = rig.dir.path().join("not-a-namespace");
    fs::write(&file, "").unwrap();
    for kind in PLUGINS {
        let config = rig.config("1.1.0", kind);
        for netns in [rig.pod.path(), Path::new(""), Path::new("/nonexistent/netns"), &file] {
            let answer = rig.runtime.run("DEL", Call { netns, ..rig.call() }, &config).unwrap();
            assert_eq!(
                (answer.exit, &answer.stdout),
                (Some(0), &Value::Null),
                "{kind} {netns:?}: {answer:?}"
            );
        }
    }
    rig.assert_nothing_left("nothing was there");
}

/// Rows: DEL-07.
#[test]
fn del_frees_addresses_when_the_namespace_the_parent_and_the_ranges_are_gone() {
    for kind in ["bridge", "macvlan", "veth"] {
        let rig = Rig::new();
        let config = rig.config("0.4.0", kind);
        rig.add(&config);
        let mut broken = config.clone();
        broken["ipam"]["ranges"] = json!([[{"subnet": "10.1.0.0/33"}]]);
        broken["mtu"] = json!("large");
        broken["master"] = json!("nosuchlink");
        let gone = Call { netns: Path::new("/nonexistent/netns"), ..rig.call() };
        let answer = rig.runtime.run("DEL", gone, &broken).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{kind}: {answer:?}");
        assert_eq!(rig.reserved(), [""; 0], "{kind}");
        assert_eq!(rig.links().1, [""; 0], "{kind}: the node's end goes without the namespace");
    }
}

#[test]
fn del_leaves_what_somebody_else_made() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "macvlan");
    let foreign = Veth {
        host_name: "theirs".into(),
        pod_name: "eth0".into(),
        mtu: None,
        mac: Some(MAC.parse().unwrap()),
        group: 0,
        port: None,
    };
    let mut inside = Handle::open_in(rig.pod.netns()).unwrap();
    rig.node().create_veth(&foreign, None, rig.pod.netns().as_fd(), &mut inside).unwrap();
    rig.alone("DEL", &config);
    let listed = |mac: &str| json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "mac": mac, "sandbox": rig.pod.path()}]});
    rig.after("DEL", &config, &listed("02:00:00:00:00:99"));
    assert_eq!(rig.links().0, ["eth0"]);
    // What the previous result lists was made for this attachment, by whatever had the plugin's name then.
    rig.after("DEL", &config, &listed(MAC));
    assert_eq!(rig.links().0, [""; 0]);
}

/// Rows: CHK-06.
#[test]
fn check_tells_what_is_missing() {
    type Harm = fn(&Rig);
    let table: [(&str, Harm, &str); 10] = [
        (
            "bridge",
            |rig| rig.inside().ensure_link_absent("eth0").unwrap(),
            "interface eth0 is gone from the pod",
        ),
        (
            "bridge",
            |rig| {
                let index = rig.inside().link("eth0").unwrap().index;
                rig.inside().ensure_address_absent(index, net("10.1.0.2/24")).unwrap();
            },
            "interface eth0 lacks address 10.1.0.2/24",
        ),
        ("bridge", |rig| rig.node().ensure_link_absent("br0").unwrap(), "bridge br0 is gone"),
        (
            "bridge",
            |rig| {
                let index = rig.node().link("br0").unwrap().index;
                rig.node().ensure_address_absent(index, net("10.1.0.1/24")).unwrap();
            },
            "bridge br0 lacks gateway address 10.1.0.1/24",
        ),
        (
            "bridge",
            |rig| fs::remove_file(rig.dir.path().join("net/10.1.0.2")).unwrap(),
            "address 10.1.0.2 is not reserved",
        ),
        (
            "macvlan",
            |rig| rig.inside().ensure_link_absent("eth0").unwrap(),
            "interface eth0 is gone from the pod",
        ),
        (
            "macvlan",
            |rig| {
                rig.inside().ensure_link_absent("eth0").unwrap();
                rig.inside().ensure_bridge(&bridge("eth0")).unwrap();
            },
            "interface eth0 is not the one that was made",
        ),
        (
            "macvlan",
            |rig| {
                let index = rig.inside().link("eth0").unwrap().index;
                rig.inside().ensure_address_absent(index, net("fd00:1::2/64")).unwrap();
            },
            "interface eth0 lacks address fd00:1::2/64",
        ),
        (
            "veth",
            |rig| {
                let index = rig.inside().link("eth0").unwrap().index;
                // The routes go with the last address of their family.
                rig.inside().ensure_address_absent(index, net("10.1.0.2/32")).unwrap();
                rig.inside().ensure_address(index, net("10.1.0.2/32")).unwrap();
            },
            "the route to 0.0.0.0/0 is gone",
        ),
        ("loopback", |rig| rig.runtime.node.run(|| ()), "lo is not up"),
    ];
    for (kind, harm, message) in table {
        let rig = Rig::new();
        let config = rig.config("1.0.0", kind);
        let result = if kind == "loopback" {
            // Never raised.
            json!({"cniVersion": "1.0.0", "interfaces": [{"name": "lo", "sandbox": rig.pod.path()}]})
        } else {
            rig.add(&config)
        };
        harm(&rig);
        let (_, said) = rig.refusal("CHECK", &with_result(&config, &result));
        assert!(said.contains(message), "{kind}: {said:?} instead of {message:?}");
    }
}

/// Rows: CHK-03.
#[test]
fn check_needs_the_result_and_the_interface_in_it() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "bridge");
    rig.add(&config);
    assert_eq!(
        rig.refusal("CHECK", &config),
        (7, "key prevResult: missing, and CHECK compares with it".to_owned())
    );
    let empty = json!({"cniVersion": "1.0.0"});
    assert_eq!(
        rig.refusal("CHECK", &with_result(&config, &empty)),
        (7, "key prevResult.interfaces: eth0 is not there with a sandbox".to_owned())
    );
}

/// Rows: ADD-06.
#[test]
fn a_name_that_the_pod_uses_is_refused_and_nothing_is_touched() {
    let rig = Rig::new();
    rig.inside().ensure_bridge(&bridge("eth0")).unwrap();
    for kind in ["bridge", "macvlan", "veth"] {
        let (code, message) = rig.refusal("ADD", &rig.config("1.0.0", kind));
        assert_eq!(code, 4, "{message}");
        assert!(message.ends_with("the pod has an interface named eth0 already"), "{message}");
        assert_eq!((rig.links(), rig.reserved()), ((vec!["eth0".into()], vec![]), vec![]), "{kind}");
    }
}

#[test]
fn a_name_that_the_node_uses_is_no_obstacle() {
    for kind in ["bridge", "macvlan", "veth"] {
        let rig = Rig::new();
        rig.node().ensure_bridge(&bridge("eth0")).unwrap();
        let config = rig.config("1.0.0", kind);
        let result = rig.add(&config);
        rig.after("CHECK", &config, &result);
        rig.after("DEL", &config, &result);
        assert_eq!(rig.links(), (vec![], vec!["eth0".to_owned()]), "{kind}");
    }
}

#[test]
fn what_the_node_does_not_have_is_refused() {
    let rig = Rig::new();
    let ipam = rig.ipam();
    let table = [
        (
            config("1.0.0", "macvlan", &json!({"master": "nosuchlink", "ipam": ipam})),
            "no link named nosuchlink",
        ),
        (
            config("1.0.0", "macvlan", &json!({"ipam": ipam})),
            "there is no default route whose interface could be used",
        ),
        (
            config("1.0.0", "macvlan", &json!({"master": "uplink", "mtu": 1501, "ipam": ipam})),
            "mtu 1501 is larger than 1500, the MTU of the parent",
        ),
    ];
    for (config, message) in table {
        let (code, said) = rig.refusal("ADD", &config);
        assert_eq!(code, 7, "{said}");
        assert!(said.ends_with(message), "{said}");
        rig.assert_nothing_left(message);
    }
    rig.node()
        .create_veth(
            &Veth {
                host_name: "br0".into(),
                pod_name: "other".into(),
                mtu: None,
                mac: None,
                group: 0,
                port: None,
            },
            None,
            rig.pod.netns().as_fd(),
            &mut Handle::open_in(rig.pod.netns()).unwrap(),
        )
        .unwrap();
    let (code, said) = rig.refusal("ADD", &rig.config("1.0.0", "bridge"));
    assert_eq!(code, 7);
    assert!(said.ends_with("link br0 exists and is a veth, not a bridge"), "{said}");
}

#[test]
fn a_macvlan_without_master_sits_on_the_default_routes_interface() {
    let rig = Rig::new();
    let index = rig.node().link("uplink").unwrap().index;
    let addressing = Addressing {
        addresses: vec![net("192.0.2.2/24")],
        routes: vec![Route::via(net("0.0.0.0/0"), "192.0.2.1".parse().unwrap())],
        ..Addressing::default()
    };
    rig.node().configure(index, &addressing).unwrap();
    rig.add(&config("1.0.0", "macvlan", &json!({"mtu": 1400, "mac": MAC})));
    let made = rig.inside().link("eth0").unwrap();
    assert_eq!((made.link, made.mtu, made.mac), (Some(index), 1400, Some(MAC.parse().unwrap())));
}

#[test]
fn a_macvlan_has_the_mode_that_was_asked_for() {
    use MacvlanMode::{Bridge, Passthru, Private, Vepa};
    for (word, mode) in [("bridge", Bridge), ("private", Private), ("vepa", Vepa), ("passthru", Passthru)] {
        let rig = Rig::new();
        let config = config("1.0.0", "macvlan", &json!({"master": "uplink", "mode": word}));
        let result = rig.add(&config);
        assert_eq!(rig.inside().link("eth0").unwrap().macvlan_mode, Some(mode));
        rig.after("CHECK", &config, &result);
        let mut other = config.clone();
        other["mode"] = json!(if word == "vepa" { "private" } else { "vepa" });
        let (_, said) = rig.refusal("CHECK", &with_result(&other, &result));
        assert!(said.ends_with("interface eth0 has another macvlan mode"), "{said}");
    }
}

#[test]
fn another_address_on_the_bridge_is_in_the_way_unless_forced() {
    let rig = Rig::new();
    let br0 = rig.node().ensure_bridge(&bridge("br0")).unwrap().link.index;
    for address in ["10.2.0.1/24", "fd00:1::5/48", "fd00:2::1/64"] {
        rig.node().ensure_address(br0, net(address)).unwrap();
    }
    let mut config = rig.config("1.0.0", "bridge");
    let (code, said) = rig.refusal("ADD", &config);
    assert_eq!(code, 7);
    let message =
        "bridge br0 has the address 10.2.0.1/24 and 10.1.0.1/24 is needed; forceAddress would replace it";
    assert!(said.ends_with(message), "{said}");
    rig.assert_nothing_left("after a conflict");
    assert_eq!(addresses(&mut rig.node(), br0), ["10.2.0.1/24", "fd00:2::1/64", "fd00:1::5/48"]);

    config["forceAddress"] = json!(true);
    rig.add(&config);
    assert_eq!(addresses(&mut rig.node(), br0), ["10.1.0.1/24", "fd00:1::1/64", "fd00:2::1/64"]);
}

#[test]
fn hairpin_and_promiscuous_mode_are_really_set() {
    let rig = Rig::new();
    rig.add(&config("1.0.0", "bridge", &json!({"bridge": "br0", "hairpinMode": true})));
    let port = rig.node().link(&rig.links().1[0]).unwrap();
    assert_eq!(port.hairpin, Some(true));
    assert!(!rig.node().link("br0").unwrap().promiscuous);

    let second = Namespace::new().unwrap();
    let call = Call { container: "c2", netns: second.path(), ..rig.call() };
    let promiscuous = config("1.0.0", "bridge", &json!({"bridge": "br0", "promiscMode": true}));
    let result = rig.runtime.add(call, &promiscuous).unwrap();
    assert!(rig.node().link("br0").unwrap().promiscuous);
    rig.runtime.after("CHECK", call, &promiscuous, &result).unwrap();
}

#[test]
fn mtu_and_ethernet_address_are_those_asked_for() {
    let rig = Rig::new();
    let keys = json!({
        "bridge": "br0", "mtu": 1400, "mac": "02:00:00:00:00:01", "args": {"cni": {"mac": "02:00:00:00:00:03"}},
    });
    let config = config("1.0.0", "bridge", &keys);
    let call = Call { args: "IgnoreUnknown=1;K8S_POD_NAME=x;MAC=02:00:00:00:00:02", ..rig.call() };
    let result = rig.runtime.add(call, &config).unwrap();
    let made = rig.inside().link("eth0").unwrap();
    assert_eq!((mac_of(&made).as_str(), made.mtu), ("02:00:00:00:00:03", 1400));
    assert_eq!(rig.node().link("br0").unwrap().mtu, 1400);
    assert_eq!(result["interfaces"][2]["mac"], json!("02:00:00:00:00:03"));
}

#[test]
fn dns_comes_from_the_configuration_only_if_it_says_something() {
    let rig = Rig::new();
    let resolv_conf = rig.dir.path().join("resolv.conf");
    fs::write(&resolv_conf, "nameserver 10.0.0.53\nsearch a.example b.example\n").unwrap();
    for (dns, expected) in [
        (json!({}), json!({"nameservers": ["10.0.0.53"], "search": ["a.example", "b.example"]})),
        (json!({"domain": "c.example"}), json!({"domain": "c.example"})),
    ] {
        let mut config = rig.config("1.0.0", "macvlan");
        config["ipam"]["resolvConf"] = json!(resolv_conf);
        config["dns"] = dns;
        let result = rig.add(&config);
        assert_eq!(result["dns"], expected);
        rig.after("DEL", &config, &result);
    }
}

#[test]
fn layer_two_networks_have_no_form_in_the_oldest_versions_and_are_not_made() {
    let rig = Rig::new();
    for (kind, keys) in [("macvlan", json!({"master": "uplink"})), ("bridge", json!({"bridge": "br0"}))] {
        for version in ["0.1.0", "0.2.0"] {
            let said = rig.refusal("ADD", &config(version, kind, &keys));
            assert_eq!(said, (1, "cannot convert: no valid IP addresses".to_owned()));
            rig.assert_nothing_left(version);
            assert_eq!(rig.node().find_link("br0").unwrap(), None);
        }
        let l2 = config("0.3.0", kind, &keys);
        let result = rig.add(&l2);
        rig.after("DEL", &l2, &result);
    }
}

#[test]
fn a_failed_add_leaves_nothing() {
    for kind in ["bridge", "macvlan", "veth"] {
        let rig = Rig::new();
        let mut full = rig.config("1.0.0", kind);
        full["ipam"] = json!({"type": "host-local", "dataDir": rig.dir.path(), "subnet": "10.1.0.0/30"});
        let other = Call { container: "c0", ..rig.call() };
        let mut pool = full.clone();
        pool["type"] = json!("host-local");
        rig.runtime.add(other, &pool).unwrap();
        let (code, said) = rig.refusal("ADD", &full);
        assert_eq!(code, 11, "{said}");
        assert!(said.contains("no address is available in range set 0 (10.1.0.1-10.1.0.2)"), "{said}");
        assert_eq!((rig.links(), rig.reserved()), ((vec![], vec![]), vec!["10.1.0.2".into()]), "{kind}");

        if kind == "veth" {
            // All its routes go through the node: there is none that could not be installed.
            continue;
        }
        let mut unroutable = rig.config("1.0.0", kind);
        unroutable["ipam"]["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "192.0.2.1"}]);
        let (code, said) = rig.refusal("ADD", &unroutable);
        assert_eq!(code, 999, "{said}");
        assert!(said.contains("configure the pod's interface: RTM_NEWROUTE"), "{said}");
        assert_eq!((rig.links(), rig.reserved()), ((vec![], vec![]), vec!["10.1.0.2".into()]), "{kind}");
    }
}

/// An address management plugin that follows a script, in the directory of the plugins.
fn install_ipam(rig: &Rig, script: &Value) -> PathBuf {
    let path = rig.runtime.plugins.join("ipam-of-others");
    if !path.exists() {
        symlink(env!("CARGO_BIN_EXE_fake-plugin"), &path).unwrap();
    }
    fs::write(rig.runtime.plugins.join("ipam-of-others.json"), script.to_string()).unwrap();
    rig.runtime.plugins.join("ipam-of-others.json.calls")
}

/// The verbs that the plugin saw, with what it read.
fn calls(record: &Path) -> Vec<(String, Value)> {
    let text = fs::read_to_string(record).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .map(|call| (call["env"]["CNI_COMMAND"].as_str().unwrap().to_owned(), call["stdin"].clone()))
        .collect()
}

/// Rows: STA-03.
#[test]
fn an_address_plugin_of_others_is_asked_with_what_came_in() {
    let rig = Rig::new();
    let result = json!({
        "cniVersion": "1.0.0", "ips": [{"address": "10.7.0.9/24"}], "routes": [{"dst": "10.8.0.0/16", "gw": "10.7.0.1"}],
        "dns": {"nameservers": ["10.7.0.53"]},
    });
    let record = install_ipam(&rig, &json!({"ADD": {"result": result}}));
    let keys = json!({"bridge": "br0", "isGateway": true, "ipam": {"type": "ipam-of-others", "x": [1]}});
    let config = config("1.1.0", "bridge", &keys);
    let call = Call { args: "GATEWAY=10.7.0.1", ..rig.call() };
    let result = rig.runtime.add(call, &config).unwrap();
    assert_eq!(
        (&result["ips"], &result["routes"], &result["dns"]),
        (
            &json!([{"interface": 2, "address": "10.7.0.9/24", "gateway": "10.7.0.1"}]),
            &json!([{"dst": "10.8.0.0/16", "gw": "10.7.0.1"}]),
            &json!({"nameservers": ["10.7.0.53"]}),
        )
    );
    let index = rig.inside().link("eth0").unwrap().index;
    assert_eq!(addresses(&mut rig.inside(), index), ["10.7.0.9/24"]);
    assert_eq!(routes(&mut rig.inside(), index), pairs(&[("10.8.0.0/16", "10.7.0.1")]));
    let after = with_result(&config, &result);
    rig.runtime.after("CHECK", call, &config, &result).unwrap();
    rig.runtime.after("DEL", call, &config, &result).unwrap();
    rig.alone("STATUS", &config);
    let mut gc = config.clone();
    gc["cni.dev/valid-attachments"] = json!([]);
    rig.alone("GC", &gc);
    let expected = [("ADD", &config), ("CHECK", &after), ("DEL", &after), ("STATUS", &config), ("GC", &gc)];
    assert_eq!(calls(&record), expected.map(|(verb, stdin)| (verb.to_owned(), stdin.clone())));
    rig.assert_nothing_left("after DEL");
}

/// Rows: ADD-08.
#[test]
fn an_address_plugin_of_others_that_fails_or_gives_nothing_is_taken_back() {
    for (script, code, message) in [
        (
            json!({"ADD": {"error": {"code": 11, "msg": "pool is busy"}}}),
            11,
            "plugin \"ipam-of-others\" failed (ADD): pool is busy",
        ),
        (json!({}), 999, "IPAM plugin ipam-of-others returned missing IP config"),
    ] {
        let rig = Rig::new();
        let record = install_ipam(&rig, &script);
        let config =
            config("1.0.0", "macvlan", &json!({"master": "uplink", "ipam": {"type": "ipam-of-others"}}));
        let (found, said) = rig.refusal("ADD", &config);
        assert_eq!(found, code, "{said}");
        assert!(said.contains(message), "{said}");
        assert_eq!(calls(&record).into_iter().map(|(verb, _)| verb).collect::<Vec<_>>(), ["ADD", "DEL"]);
        rig.assert_nothing_left(message);
    }
}

/// Rows: ENV-29, ENV-30.
#[test]
fn the_nodes_own_namespace_is_refused_before_anything_is_done() {
    let rig = Rig::new();
    let own = Call { netns: rig.runtime.node.path(), ..rig.call() };
    let before = rig.node().links().unwrap();
    for kind in ["bridge", "macvlan", "veth", "loopback"] {
        let config = rig.config("1.0.0", kind);
        for verb in ["ADD", "DEL"] {
            let (code, said) = rig.runtime.refusal(verb, own, &config).unwrap();
            assert_eq!(code, 8, "{kind} {verb}: {said}");
            assert!(said.ends_with("is the node's own network namespace, not a container's"), "{said}");
        }
    }
    assert_eq!((rig.node().links().unwrap(), rig.reserved()), (before, vec![]));
    // CHECK compares with the result, and with nothing else.
    let config = rig.config("1.0.0", "macvlan");
    let mut result = rig.add(&config);
    result["interfaces"][0]["sandbox"] = json!(rig.runtime.node.path());
    let (code, said) = rig.runtime.refusal("CHECK", own, &with_result(&config, &result)).unwrap();
    assert_eq!((code, said.ends_with("interface eth0 is gone from the pod")), (999, true), "{said}");
    rig.after("DEL", &config, &result);
    // The rest of a DEL is done all the same.
    let pool = rig.config("1.0.0", "host-local");
    rig.add(&pool);
    assert_eq!(rig.runtime.refusal("DEL", own, &rig.config("1.0.0", "macvlan")).unwrap().0, 8);
    assert_eq!(rig.reserved(), [""; 0]);
}

/// Rows: ENV-27.
#[test]
fn malformed_requests_get_their_code_and_name_the_key() {
    let rig = Rig::new();
    let l2 = json!({"master": "uplink"});
    let table = [
        (config("1.0.0", "macvlan", &json!({"mode": "x"})), rig.call(), 7, "key mode: "),
        (
            config("1.0.0", "macvlan", &json!({"linkInContainer": true})),
            rig.call(),
            2,
            "key linkInContainer: true ",
        ),
        (config("9.0.0", "macvlan", &l2), rig.call(), 1, "incompatible CNI versions"),
        (
            config("1.0.0", "macvlan", &json!({"name": ".."})),
            rig.call(),
            7,
            "invalid characters found in network name",
        ),
        (
            config("1.0.0", "macvlan", &l2),
            Call { ifname: "..", ..rig.call() },
            4,
            "interface name is . or ..",
        ),
        (
            config("1.0.0", "macvlan", &l2),
            Call { args: "FOO=1", ..rig.call() },
            4,
            "ARGS: unknown args [\"FOO=1\"]",
        ),
        (
            config("1.0.0", "macvlan", &l2),
            Call { netns: Path::new("/nonexistent"), ..rig.call() },
            8,
            "network namespace /nonexistent does not exist",
        ),
        (
            config("1.0.0", "macvlan", &l2),
            Call { netns: Path::new("/etc/passwd"), ..rig.call() },
            8,
            "/etc/passwd is not a network namespace",
        ),
        (
            with_result(&config("1.0.0", "macvlan", &l2), &json!({"cniVersion": "1.0.0"})),
            rig.call(),
            7,
            "key prevResult: macvlan makes an interface and can only be the first plugin of a list",
        ),
    ];
    for (config, call, code, message) in table {
        let (found, said) = rig.runtime.refusal("ADD", call, &config).unwrap();
        assert_eq!(found, code, "{said}");
        assert!(said.starts_with(message), "{said:?} instead of {message:?}");
        rig.assert_nothing_left(message);
    }
}

/// Rows: STA-06, ENV-21.
#[test]
fn status_tells_whether_an_add_could_be_served() {
    let rig = Rig::new();
    for kind in PLUGINS {
        rig.alone("STATUS", &rig.config("1.1.0", kind));
    }
    let (code, said) = rig.refusal("STATUS", &config("1.1.0", "macvlan", &json!({"master": "nosuchlink"})));
    assert_eq!((code, said.as_str()), (50, "no link named nosuchlink"));
    assert_eq!(rig.refusal("STATUS", &config("1.1.0", "macvlan", &json!({"mode": "x"}))).0, 7);
    let mut full = rig.config("1.1.0", "host-local");
    full["ipam"]["ranges"] = json!([[{"subnet": "10.1.0.0/30"}]]);
    rig.add(&full);
    for kind in ["host-local", "macvlan"] {
        full["type"] = json!(kind);
        let (code, said) = rig.refusal("STATUS", &full);
        assert_eq!(code, 50);
        assert!(said.ends_with("no address is available in range set 0 (10.1.0.1-10.1.0.2)"), "{said}");
    }
    let by_runtime = json!({"capabilities": {"ipRanges": true}, "ipam": {"type": "host-local"}});
    rig.alone("STATUS", &config("1.1.0", "host-local", &by_runtime));
    assert_eq!(rig.refusal("STATUS", &rig.config("1.0.0", "bridge")).0, 1);
}

/// Rows: VER-13.
#[test]
fn each_name_says_what_it_is_and_which_versions_it_speaks() {
    let rig = Rig::new();
    for kind in PLUGINS {
        let answer = rig.runtime.run("VERSION", rig.call(), &config("1.0.0", kind, &json!({}))).unwrap();
        let expected = json!({"cniVersion": "1.1.0", "supportedVersions": VERSIONS});
        assert_eq!((answer.exit, answer.stdout), (Some(0), expected));
        let about = rig.runtime.run("", rig.call(), &config("1.0.0", kind, &json!({}))).unwrap();
        let expected = format!(
            "{kind} of netattach {}\nCNI protocol versions supported: {}\n",
            env!("CARGO_PKG_VERSION"),
            VERSIONS.join(", ")
        );
        assert_eq!((about.exit, about.stdout, about.stderr), (Some(0), Value::Null, expected));
        let unknown = rig.refusal("FOO", &config("1.0.0", kind, &json!({})));
        assert_eq!(unknown, (4, "unknown CNI_COMMAND: FOO".to_owned()));
    }
}

#[test]
fn pods_that_arrive_together_share_a_new_bridge() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "bridge");
    let pods: Vec<Namespace> = (0..12).map(|_| Namespace::new().unwrap()).collect();
    let ids: Vec<String> = (0..12).map(|number| format!("c{number}")).collect();
    let results: Vec<Result<Value>> = std::thread::scope(|scope| {
        let started: Vec<_> = pods
            .iter()
            .zip(&ids)
            .map(|(pod, container)| {
                let (runtime, config) = (&rig.runtime, &config);
                scope.spawn(move || {
                    runtime.add(Call { container, ifname: "eth0", netns: pod.path(), args: "" }, config)
                })
            })
            .collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let results: Vec<Value> = results.into_iter().map(Result::unwrap).collect();
    let br0 = rig.node().link("br0").unwrap();
    let ports = rig.node().links().unwrap().iter().filter(|link| link.controller == Some(br0.index)).count();
    assert_eq!((ports, rig.reserved().len()), (12, 24));
    for ((pod, container), result) in pods.iter().zip(&ids).zip(&results) {
        let call = Call { container, ifname: "eth0", netns: pod.path(), args: "" };
        rig.runtime.after("CHECK", call, &config, result).unwrap();
        rig.runtime.after("DEL", call, &config, result).unwrap();
    }
    rig.assert_nothing_left("after all DELs");
}

#[test]
fn the_executable_explains_itself_and_installs_its_names() {
    let executable = executable("netattach-cni").unwrap();
    let help = Command::new(&executable).output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(help.status.success() && PLUGINS.iter().all(|name| text.contains(name)), "{text}");
    assert!(!Command::new(&executable).arg("remove").output().unwrap().status.success());

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("bridge"), "theirs").unwrap();
    let install =
        |more: &[&str]| Command::new(&executable).arg("install").arg(dir.path()).args(more).output().unwrap();
    let refused = install(&[]);
    assert!(!refused.status.success());
    let message = format!(
        "netattach-cni: {} would be overwritten; --force replaces what is there\n",
        dir.path().join("bridge").display()
    );
    assert_eq!(String::from_utf8(refused.stderr).unwrap(), message);
    assert!(install(&["--force"]).status.success());
    for name in PLUGINS {
        let started = Command::new(dir.path().join(name)).env_clear().output().unwrap();
        let about = String::from_utf8(started.stderr).unwrap();
        assert!(about.starts_with(&format!("{name} of netattach")), "{about}");
    }
}
