//! The same configurations with the reference plugins and with ours: result, kernel (links, addresses, routes, rules,
//! sysctls) and lease files agree, except where a row of `deviations` has the difference and its reason.
//!
//! The reference plugins are those of containernetworking/plugins in the directory that
//! `NETATTACH_REFERENCE_PLUGINS` names.

pub(super) mod deviations;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use netattach::netlink::Handle;
use netattach::spec::{Addressing, Bridge, Route};
use netattach_tests::node::{WIRE, executable};
use netattach_tests::runtime::{Call, Runtime, config, version_of, with_result};
use netattach_tests::settings::{rules, sysctls};
use netattach_tests::snapshot::{Link, Network, Snapshot};
use netattach_tests::{Namespace, Node, Pod, manifest, tools};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use deviations::*;

fn pools() -> Value {
    json!({
        "type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]],
        "routes": [{"dst": "10.9.0.0/16"}],
    })
}

fn one_pool() -> Value {
    json!({
        "type": "host-local", "subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "gateway": "10.1.0.9",
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.77"}],
    })
}

/// Rows: BRG-portIsolation, BRG-disableContainerInterface, BRG-closed.
/// Rows: BRG-bridge, BRG-isGateway, BRG-isDefaultGateway, BRG-hairpinMode, BRG-promiscMode, BRG-mtu, BRG-mac.
/// Rows: BRG-dns.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn bridge_agrees_with_the_reference() {
    let with = |extra: Value| {
        let mut keys = json!({"bridge": "br0", "ipam": pools()});
        keys.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        keys
    };
    let fixed =
        json!({"type": "static", "addresses": [{"address": "10.1.0.7/24"}, {"address": "fd00:1::7/64"}]});
    let arg = "IgnoreUnknown=1;MAC=02:00:00:00:00:08";
    let usual = &[MTU_OF_BRIDGE, PORT_HAS_NO_ADDRESS, DETECTION_BY_ADDRESS, NEIGHBOURS_HEAR_OF_IPV6][..];
    let closed = &[
        MTU_OF_BRIDGE,
        PORT_HAS_NO_ADDRESS,
        DETECTION_BY_ADDRESS,
        NEIGHBOURS_HEAR_OF_IPV6,
        CLOSED_BRIDGE,
    ][..];
    let detecting = &[MTU_OF_BRIDGE, PORT_HAS_NO_ADDRESS, NEIGHBOURS_HEAR_OF_IPV6, CLOSED_BRIDGE][..];
    let l2 = &[MTU_OF_BRIDGE, NO_RESULT_NO_BRIDGE, CHECK_OF_L2, L2_PORT_HAS_NO_ADDRESS, L2_CLOSED_BRIDGE][..];
    agree(
        "bridge_agrees_with_the_reference",
        "bridge",
        &[
            (json!({"bridge": "br0"}), "", l2),
            (with(json!({})), "", closed),
            (with(json!({"isGateway": true})), "", usual),
            (with(json!({"isDefaultGateway": true, "mtu": 1400, "hairpinMode": true})), "", usual),
            (with(json!({"isDefaultGateway": true, "ipam": fixed})), "", usual),
            (with(json!({"promiscMode": true, "dns": {"nameservers": ["10.0.0.53"]}})), "", closed),
            (with(json!({"args": {"cni": {"mac": "02:00:00:00:00:07"}}})), arg, closed),
            (with(json!({"runtimeConfig": {"mac": "02:00:00:00:00:07"}})), arg, closed),
            (with(json!({"hairpinMode": true, "promiscMode": true})), "", &[CODE_OF_CONFIG]),
            (with(json!({"portIsolation": true, "enabledad": true})), "", detecting),
            (json!({"bridge": "br0", "disableContainerInterface": true}), "", l2),
            (with(json!({"disableContainerInterface": true})), "", &[CODE_OF_CONFIG]),
            (with(json!({"vlan": 4095})), "", &[CODE_OF_CONFIG, DEL_OF_CONFIG]),
            (with(json!({"vlanTrunk": [{"minID": 9, "maxID": 7}]})), "", &[CODE_OF_CONFIG, DEL_OF_CONFIG]),
            (with(json!({"vlanTrunk": [{"minID": 9}]})), "", &[CODE_OF_CONFIG, DEL_OF_CONFIG]),
            (with(json!({"vlanTrunk": [{"id": 0}]})), "", &[CODE_OF_CONFIG, DEL_OF_CONFIG]),
        ],
    );
}

/// Rows: PTP-link, PTP-mtu, PTP-dns, PTP-ipam.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn ptp_agrees_with_the_reference() {
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.77"}]);
    let fixed = json!({
        "type": "static", "routes": routes,
        "addresses": [
            {"address": "10.1.0.7/24", "gateway": "10.1.0.9"}, {"address": "fd00:1::7/64", "gateway": "fd00:1::9"},
        ],
    });
    let v4 = &[MTU_OF_PAIR, NEIGHBOURS_HEAR_OF_IPV4][..];
    let usual = &[MTU_OF_PAIR, NEIGHBOURS_HEAR_OF_IPV4, NEIGHBOURS_HEAR_OF_IPV6][..];
    agree(
        "ptp_agrees_with_the_reference",
        "ptp",
        &[
            (json!({"ipam": pools()}), "", usual),
            (json!({"mtu": 1400, "dns": {"nameservers": ["10.0.0.53"]}, "ipam": one_pool()}), "", v4),
            (json!({"ipam": fixed}), "", usual),
            (json!({"ipam": {"type": ""}}), "", &[CODE_OF_CONFIG, DEL_OF_CONFIG]),
        ],
    );
}

/// Rows: MVL-master, MVL-mode, MVL-mtu, MVL-mac, MVL-bcqueuelen.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn macvlan_agrees_with_the_reference() {
    let arg = "IgnoreUnknown=1;MAC=02:00:00:00:00:08";
    let l2 = &[MTU_OF_MACVLAN, NO_RESULT_NO_LINK][..];
    let usual = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6][..];
    agree(
        "macvlan_agrees_with_the_reference",
        "macvlan",
        &[
            (json!({"master": "uplink"}), "", l2),
            (json!({"master": "uplink", "mode": "vepa", "mac": "02:00:00:00:00:07"}), "", l2),
            (json!({"master": "uplink", "mode": "passthru"}), "", l2),
            (json!({"ipam": one_pool()}), "", usual),
            (json!({"master": "uplink", "mode": "private", "mtu": 1400, "ipam": one_pool()}), "", usual),
            (json!({"master": "uplink", "bcqueuelen": 5, "ipam": one_pool()}), arg, usual),
            (json!({"master": "nosuchlink", "ipam": one_pool()}), "", &[CODE_OF_CONFIG]),
            (json!({"master": "uplink", "mtu": 1501, "ipam": one_pool()}), "", &[CODE_OF_CONFIG]),
            (json!({"master": "uplink", "mode": "x", "ipam": one_pool()}), "", &[CODE_OF_CONFIG]),
            (
                json!({"master": "lo", "linkInContainer": true, "mtu": 65537, "ipam": one_pool()}),
                "",
                &[CODE_OF_CONFIG],
            ),
        ],
    );
}

/// Rows: TAP-reference.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn tap_agrees_with_the_reference() {
    let arg = "IgnoreUnknown=1;MAC=02:00:00:00:00:08";
    let l2 = &[MTU_OF_MACVLAN, NO_RESULT_NO_LINK][..];
    let usual = &[MTU_OF_MACVLAN][..];
    agree(
        "tap_agrees_with_the_reference",
        "tap",
        &[
            (json!({}), "", l2),
            (json!({"owner": 1000, "multiQueue": true}), "", l2),
            (json!({"owner": 0, "group": 0}), "", l2),
            (json!({"mac": "02:00:00:00:00:07", "mtu": 1400, "group": 107, "ipam": one_pool()}), "", usual),
            (
                json!({"ipam": pools(), "dns": {"nameservers": ["10.0.0.53"]}}),
                arg,
                &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6],
            ),
            (json!({"owner": "x", "ipam": one_pool()}), "", &[CODE_OF_CONFIG, DEL_OF_CONFIG]),
        ],
    );
}

/// Links without a driver in many kernels. Runs if the kernel has all drivers.
///
/// Rows: VLN-keys, DMY-keys, IVL-keys, IVL-chained, BRG-vlan, BRG-vlanTrunk, BRG-preserveDefaultVlan, BRG-vlan-gateway.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn drivers_that_few_kernels_have_agree_with_the_reference() {
    let test = "drivers_that_few_kernels_have_agree_with_the_reference";
    if !["dummy", "vlan", "ipvlan"].into_iter().all(tools::has_driver) {
        return tools::report_skipped(test, "the kernel has not all of dummy, vlan and ipvlan");
    }
    let usual = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV4][..];
    let port = &[MTU_OF_BRIDGE, PORT_HAS_NO_ADDRESS, DETECTION_BY_ADDRESS, CLOSED_BRIDGE][..];
    // The bridge itself has no addresses: they are on the device of the VLAN.
    let gateway = &[
        CLOSED_BRIDGE,
        MTU_OF_BRIDGE,
        MTU_OF_GATEWAY,
        PORT_HAS_NO_ADDRESS,
        PORT_OF_GATEWAY,
        DETECTION_BY_ADDRESS,
        NO_LINK_LOCAL,
    ][..];
    let few = &["0.4.0", "1.0.0", "1.1.0"][..];
    let with = |extra: Value| {
        let mut keys = json!({"bridge": "br0", "ipam": one_pool()});
        keys.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        keys
    };
    let trunk = json!([{"id": 5}, {"minID": 7, "maxID": 9}]);
    agree_in(
        few,
        test,
        "bridge",
        &[
            (with(json!({"vlan": 100, "isGateway": true})), "", gateway),
            (with(json!({"vlan": 100, "preserveDefaultVlan": false, "vlanTrunk": trunk})), "", port),
            (with(json!({"vlan": 100, "preserveDefaultVlan": true})), "", port),
            (with(json!({"vlanTrunk": trunk})), "", port),
        ],
    );
    agree_in(few, test, "dummy", &[(json!({"ipam": one_pool()}), "", usual)]);
    agree_in(
        few,
        test,
        "ipvlan",
        &[(
            json!({"master": "uplink", "mode": "l3", "ipam": one_pool()}),
            "",
            &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6],
        )],
    );
    for &version in few {
        let before = json!({
            "cniVersion": version, "interfaces": [{"name": "uplink"}], "dns": {},
            "ips": [{"version": "4", "address": "10.1.0.7/24", "gateway": "10.1.0.9", "interface": 0}],
            "routes": [{"dst": "10.9.0.0/16", "gw": "10.1.0.77"}],
        });
        let chained = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6, CHECK_WITHOUT_MASTER][..];
        agree_in(&[version], test, "ipvlan", &[(json!({"prevResult": before}), "", chained)]);
    }
    agree_in(
        few,
        test,
        "vlan",
        &[
            (json!({"master": "uplink", "vlanId": 5, "mtu": 1400, "ipam": one_pool()}), "", usual),
            (
                json!({"master": "uplink", "vlanId": 5, "mtu": 1501, "ipam": one_pool()}),
                "",
                &[CODE_OF_CONFIG, DEL_OF_CONFIG],
            ),
        ],
    );
}

/// Rows: LBK-up.
#[test]
fn loopback_agrees_with_the_reference() {
    let [oldest, middle] = LO_IN_ITS_VERSION;
    agree(
        "loopback_agrees_with_the_reference",
        "loopback",
        &[(json!({}), "", &[LO_STAYS_UP, oldest, middle])],
    );
}

/// Rows: HLC-ranges, HLC-ips, HLC-routes, HLC-dataDir.
#[test]
fn host_local_agrees_with_the_reference() {
    let ranges = json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.5"}], [{"subnet": "fd00:1::/64"}]]);
    let routes = json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "10.8.0.0/16"}]);
    let pool = json!({"type": "host-local", "ranges": ranges, "routes": routes});
    agree(
        "host_local_agrees_with_the_reference",
        "host-local",
        &[
            (json!({"ipam": pool}), "", &[]),
            (json!({"ipam": pool}), "IP=10.1.0.99", &[]),
            (json!({"ipam": pool, "runtimeConfig": {"ips": ["fd00:1::99/64"]}}), "", &[]),
            (json!({"ipam": pool, "args": {"cni": {"ips": ["10.1.0.98"]}}}), "IP=fd00:1::98", &[]),
        ],
    );
}

/// Rows: STC-addresses, STC-asked-for, STC-refused.
#[test]
fn static_agrees_with_the_reference() {
    let own = json!({
        "type": "static",
        "addresses": [{"address": "10.1.0.7/24", "gateway": "10.1.0.1"}, {"address": "fd00:1::7/64"}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "10.8.0.0/16"}],
        "dns": {"nameservers": ["10.1.0.53"], "search": ["a.example"]},
    });
    let ips = |ips: &[&str]| json!({"ipam": own, "runtimeConfig": {"ips": ips}});
    let without = json!({"type": "static", "addresses": []});
    let args = "IP=10.2.0.7/24,10.3.0.7/24;GATEWAY=10.2.0.1";
    agree(
        "static_agrees_with_the_reference",
        "static",
        &[
            (json!({"ipam": own}), "", &[]),
            (json!({"ipam": without}), "IP=10.2.0.7/24;GATEWAY=10.2.0.1", &[]),
            (json!({"ipam": own}), args, &[ONE_PER_FAMILY]),
            (json!({"ipam": own, "args": {"cni": {"ips": ["10.4.0.7/24"]}}}), "IP=fd00:2::7/64", &[]),
            (ips(&["10.5.0.7/24", "fd00:5::7/64"]), "", &[]),
            (ips(&["10.5.0.7"]), "", &[CODE_OF_CONFIG]),
            (json!({"ipam": {"type": "static", "addresses": [{"address": "x"}]}}), "", &[CODE_OF_CONFIG]),
            (json!({"ipam": own}), "GATEWAY=10.1.0.9", &GATEWAY_OF_ALL[..]),
        ],
    );
}

/// Links with static addresses, through both.
#[test]
fn interfaces_with_static_addresses_agree_with_the_reference() {
    let ipam = json!({
        "type": "static", "routes": [{"dst": "10.9.0.0/16"}, {"dst": "10.8.0.0/16", "gw": "10.1.0.77"}],
        "addresses": [{"address": "10.1.0.7/24", "gateway": "10.1.0.9"}, {"address": "fd00:1::7/64"}],
    });
    let test = "interfaces_with_static_addresses_agree_with_the_reference";
    let keys = json!({"bridge": "br0", "isGateway": true, "ipam": ipam});
    let of_bridge = &[MTU_OF_BRIDGE, PORT_HAS_NO_ADDRESS, DETECTION_BY_ADDRESS, NEIGHBOURS_HEAR_OF_IPV6][..];
    agree(test, "bridge", &[(keys, "", of_bridge)]);
    agree(test, "macvlan", &[(json!({"master": "uplink", "ipam": ipam}), "", &[MTU_OF_MACVLAN])]);
}

/// Rows: PTP-each-other.
#[test]
fn each_detaches_what_the_other_attached() {
    let test = "each_detaches_what_the_other_attached";
    let Some(reference) = reference_plugins(test, &USUAL) else { return };
    for (kind, keys) in [
        ("bridge", json!({"bridge": "br0", "isGateway": true, "ipam": pools()})),
        ("macvlan", json!({"master": "uplink", "ipam": pools()})),
        ("ptp", json!({"ipam": pools()})),
        ("tap", json!({"owner": 1000, "ipam": pools()})),
    ] {
        for attached_by_us in [true, false] {
            let mut rig = Rig::new(Some(&reference));
            let theirs = reference.clone();
            let ours = rig.install();
            let (first, second) = if attached_by_us { (ours, theirs) } else { (theirs, ours) };
            let config = rig.config(kind, "1.0.0", &keys);
            rig.runtime.plugins = first;
            let result = rig.runtime.add(rig.call(""), &config).unwrap();
            rig.runtime.plugins = second;
            rig.runtime.after("CHECK", rig.call(""), &config, &result).unwrap();
            rig.runtime.after("DEL", rig.call(""), &config, &result).unwrap();
            let left = rig.snapshot();
            assert_eq!(left["pod"].as_object().unwrap().keys().collect::<Vec<_>>(), ["lo"], "{kind}");
            assert_eq!(left["node"].get("the node's end"), None, "{kind}");
            let files: Vec<_> = left["files"].as_object().unwrap().keys().cloned().collect();
            assert!(files.iter().all(|name| name.starts_with("last_reserved_ip.")), "{kind} {files:?}");
        }
    }
}

/// Rows: EXE-17.
#[test]
fn the_agent_attaches_alike_with_the_built_in_and_with_the_executed_plugin() {
    let test = "the_agent_attaches_alike_with_the_built_in_and_with_the_executed_plugin";
    let Some(reference) = reference_plugins(test, &USUAL) else { return };
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let ours = by_agent(&reference, version, &json!([]));
        let theirs = by_agent(&reference, version, &json!(["bridge", "macvlan", "host-local"]));
        let mut found = Vec::new();
        differences("", &ours, &theirs, &mut found);
        assert!(found.is_empty(), "{version}\nat, ours, theirs: {found:#?}");
    }
}

/// The results, links and leftovers of a pod with a bridge and a macvlan on a node where the types in `exec` are
/// executed.
fn by_agent(reference: &Path, version: &str, exec: &Value) -> Value {
    let mut node = Node::new(&[manifest::pod("x", &json!({}), &json!("lan"))]).unwrap();
    node.add_wire().unwrap();
    let mut default = node.default_config();
    default["cniVersion"] = json!(version);
    let mut lan = json!({"cniVersion": version, "type": "macvlan", "master": WIRE});
    lan["ipam"] = node.host_local(&["10.52.0.0/24"]);
    node.write("default", &manifest::network("kube-system", "default", &default)).unwrap();
    node.write("lan", &manifest::network(manifest::NAMESPACE, "lan", &lan)).unwrap();
    for plugin in ["bridge", "macvlan", "host-local"] {
        symlink(reference.join(plugin), node.path("cni-bin").join(plugin)).unwrap();
    }
    node.set("delegation", json!({"exec": exec}));
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    let result = node.add(&x).success();
    // The reference plugin names the node's end so.
    let is_executed = result["interfaces"][1]["name"].as_str().unwrap().starts_with("veth");
    assert_eq!(is_executed, *exec != json!([]));
    if version >= "0.4.0" {
        node.check(&x).success();
    }
    let attached = Snapshot::take(&node, &[&x]).unwrap();
    node.del(&x).success();
    let detached = Snapshot::take(&node, &[&x]).unwrap();
    detached.assert_nothing_is_left();
    let addresses = |network: &Network| -> Value {
        let of = |link: &Link| {
            json!({"kind": link.kind, "mtu": link.mtu, "up": link.up,
            "addresses": link.addresses.iter().map(ToString::to_string).collect::<Vec<_>>()})
        };
        network.links.iter().map(|(name, link)| (name.clone(), of(link))).collect::<Map<_, _>>().into()
    };
    let pod = &attached.pods[&x.container];
    let leases: Map<String, Value> = attached
        .files
        .iter()
        .filter(|(path, _)| path.starts_with("leases"))
        .map(|(path, content)| (path.clone(), json!(content)))
        .collect();
    json!({
        "result": anonymous(&result, &x),
        "pod": addresses(pod),
        "routes": pod.routes,
        "bridge": addresses(&attached.node)["br0"],
        "leases": leases,
        "bridge after DEL": addresses(&detached.node)["br0"],
    })
}

/// The result without values that differ each time, and without the MTU, which only we fill in.
fn anonymous(result: &Value, pod: &Pod) -> Value {
    let mut result = result.clone();
    for interface in result["interfaces"].as_array_mut().unwrap() {
        let in_pod = interface.get("sandbox").is_some_and(|sandbox| *sandbox == json!(pod.namespace.path()));
        let name =
            if in_pod || interface["name"] == "br0" { interface["name"].clone() } else { json!("veth") };
        *interface = json!({"name": name, "in pod": in_pod, "has a MAC": interface["mac"].is_string()});
    }
    result
}

/// Runs each row's configuration in every version through both, and finds exactly the row's deviations.
fn agree(test: &str, kind: &str, rows: &[(Value, &str, &[Deviation])]) {
    agree_in(&VERSIONS, test, kind, rows);
}

/// The same in these versions.
fn agree_in(versions: &[&str], test: &str, kind: &str, rows: &[(Value, &str, &[Deviation])]) {
    let Some(reference) = reference_plugins(test, &[kind, "host-local"]) else { return };
    for (keys, args, deviations) in rows {
        for &version in versions {
            let mut ours = Rig::new(None);
            ours.runtime.plugins = ours.install();
            let theirs = Rig::new(Some(&reference));
            let sides = [ours, theirs].map(|rig| rig.attach(kind, version, keys, args));
            let what = format!("{kind} {version} {keys} {args:?}");
            assert_differ_as_meant(&what, version, sides.each_ref(), deviations);
        }
    }
}

/// Checks that two states, ours and the reference's, differ where the deviations in that version say, and nowhere else.
pub(super) fn assert_differ_as_meant(
    what: &str,
    version: &str,
    [ours, theirs]: [&Value; 2],
    deviations: &[Deviation],
) {
    let mut found = Vec::new();
    differences("", ours, theirs, &mut found);
    let meant = deviations.iter().filter(|deviation| deviation.versions.contains(&version));
    let mut meant: Vec<&str> = meant.flat_map(|deviation| deviation.at).copied().collect();
    meant.sort_unstable();
    let mut at: Vec<&str> = found.iter().map(|(at, ..)| at.as_str()).collect();
    at.sort_unstable();
    assert_eq!(at, meant, "{what}\nat, ours, theirs: {found:#?}");
}

/// A node with an uplink and a default route, and one pod.
struct Rig {
    runtime: Runtime,
    pod: Namespace,
    dir: TempDir,
}

impl Rig {
    /// With the plugins of a directory.
    fn new(plugins: Option<&Path>) -> Self {
        let rig = Self {
            runtime: Runtime {
                node: Namespace::new().unwrap(),
                plugins: plugins.map(Path::to_owned).unwrap_or_default(),
            },
            pod: Namespace::new().unwrap(),
            dir: tempfile::tempdir().unwrap(),
        };
        // Otherwise those of the machine's first namespace apply, which one side may set.
        let default = |setting: &str| format!("/proc/sys/net/ipv4/conf/default/{setting}");
        let set = |setting: &str| rig.runtime.node.run(|| fs::write(default(setting), "0")).unwrap();
        ["arp_ignore", "rp_filter"].into_iter().for_each(set);
        let mut node = rig.node();
        let uplink = Bridge { name: "uplink".into(), ..Bridge::default() };
        let index = node.ensure_bridge(&uplink).unwrap().link.index;
        let addressing = Addressing {
            addresses: vec!["192.0.2.2/24".parse().unwrap()],
            routes: vec![Route::via("0.0.0.0/0".parse().unwrap(), "192.0.2.1".parse().unwrap())],
            ..Addressing::default()
        };
        node.configure(index, &addressing).unwrap();
        rig
    }

    fn node(&self) -> Handle {
        Handle::open_in(self.runtime.node.netns()).unwrap()
    }

    /// A directory with our plugins.
    fn install(&self) -> PathBuf {
        let directory = self.dir.path().join("plugins");
        fs::create_dir(&directory).unwrap();
        let netattach_cni = executable("netattach-cni").unwrap();
        let installed = Command::new(netattach_cni).arg("install").arg(&directory).output().unwrap();
        assert!(installed.status.success(), "{installed:?}");
        directory
    }

    fn call<'a>(&'a self, args: &'a str) -> Call<'a> {
        Call { container: "c1", ifname: "eth0", netns: self.pod.path(), args }
    }

    fn config(&self, kind: &str, version: &str, keys: &Value) -> Value {
        let mut config = config(version, kind, keys);
        if config["ipam"]["type"] == json!("host-local") {
            config["ipam"]["dataDir"] = json!(self.dir.path());
        }
        config
    }

    /// Everything observable of ADD, CHECK and DEL of one attachment.
    fn attach(&self, kind: &str, version: &str, keys: &Value, args: &str) -> Value {
        let config = self.config(kind, version, keys);
        let call = self.call(args);
        let added = self.runtime.run("ADD", call, &config).unwrap();
        let attached = self.snapshot();
        // A runtime has no result to pass on if ADD failed.
        let later = match added.exit {
            Some(0) if version >= "0.4.0" => with_result(&config, &added.stdout),
            _ => config.clone(),
        };
        let is_attached = added.exit == Some(0);
        let mut seen = json!({
            "ADD": {"exit": added.exit, "result": self.normal(&added.stdout)},
            "attached": attached,
        });
        if is_attached && version_of(&config) >= "0.4.0" {
            seen["CHECK"] = json!(self.runtime.run("CHECK", call, &later).unwrap().exit);
        }
        seen["DEL"] = json!(self.runtime.run("DEL", call, &later).unwrap().exit);
        seen["detached"] = self.snapshot();
        seen
    }

    /// The result without values that differ each time.
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

    /// Links with addresses, routes and sysctls of pod and node, their rules, and the reservations.
    fn snapshot(&self) -> Value {
        let (pod, node) = (&self.pod, &self.runtime.node);
        let of_all = |namespace| json!(sysctls(namespace, "all").unwrap());
        json!({
            "pod": links(pod), "node": links(node), "files": self.files(),
            "rules": {"pod": rules(pod).unwrap(), "node": rules(node).unwrap()},
            "sysctls of all": {"pod": of_all(pod), "node": of_all(node)},
        })
    }

    fn files(&self) -> Value {
        let entries = fs::read_dir(self.dir.path().join("net"));
        let files: Map<String, Value> = entries
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap())
            // Only shows that the directory was read.
            .filter(|entry| entry.file_name() != "lock")
            .map(|entry| {
                let content = fs::read_to_string(entry.path()).unwrap();
                (entry.file_name().into_string().unwrap(), json!(content))
            })
            .collect();
        Value::Object(files)
    }
}

/// Every link by its name; a node's ends of veths, whose names do not matter, by their kind.
fn links(namespace: &Namespace) -> Value {
    let mut handle = Handle::open_in(namespace.netns()).unwrap();
    let all = handle.links().unwrap();
    let routes = handle.routes().unwrap();
    let vlans = handle.port_vlans().unwrap();
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
        // Names of the ends in a bridge do not matter.
        let here = handle.find_end_here(link).unwrap().filter(|end| end.name.starts_with("br0."));
        let name = match (link.kind.as_str(), here) {
            ("veth", Some(device)) => format!("the port of {}", device.name),
            ("veth", None) if link.name != "eth0" && !link.name.starts_with("br0.") => {
                "the node's end".into()
            }
            _ => link.name.clone(),
        };
        let vlans: Vec<String> = vlans
            .get(&link.index)
            .into_iter()
            .flatten()
            .map(|(id, how)| format!("{id} {} {}", how.pvid, how.untagged))
            .collect();
        shown.insert(
            name,
            json!({
                "kind": link.kind, "up": link.up, "mtu": link.mtu, "promiscuous": link.promiscuous,
                "controller": name_of(link.controller), "hairpin": link.hairpin,
                "isolated": link.isolated, "vlans": vlans,
                "mode": link.mode.map(|mode| format!("{mode:?}")),
                "addresses": addresses, "routes": through,
                "sysctls": sysctls(namespace, &link.name).unwrap(),
            }),
        );
    }
    Value::Object(shown)
}

/// The paths at which two documents differ, with both values.
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

/// The reference plugins that most tests of this file need.
const USUAL: [&str; 7] = ["bridge", "macvlan", "ptp", "tap", "loopback", "host-local", "static"];

fn reference_plugins(test: &str, names: &[&str]) -> Option<PathBuf> {
    tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", names)
}
