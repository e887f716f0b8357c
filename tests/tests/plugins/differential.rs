//! The same configurations with the reference plugins and with ours: result, kernel (links, addresses, routes, rules,
//! sysctls) and lease files agree, except where a row of `deviations` has the difference and its reason. The node's
//! packet filter is compared by its effect: see `without_agent::reference`.
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
use netattach_tests::node::{WIRE, executable, ip};
use netattach_tests::runtime::{Call, Runtime, config, version_of, with_result};
use netattach_tests::settings::{rules, sysctls};
use netattach_tests::snapshot::{Link, Network, Snapshot};
use netattach_tests::sriov::Cards;
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

/// An interface of the pod, as the parent of another one or a bridge for one.
const OF_POD: &[Before] = &[(Place::Pod, "link add net0 type bridge"), (Place::Pod, "link set net0 up")];

/// Rows: BRG-portIsolation, BRG-disableContainerInterface, BRG-closed.
/// Rows: BRG-bridge, BRG-isGateway, BRG-isDefaultGateway, BRG-hairpinMode, BRG-promiscMode, BRG-mtu, BRG-mac.
/// Rows: BRG-dns, BRG-forceAddress.
/// Rows: SYS-rules, SYS-sysctls.
/// Rows: DIF-mtu, DIF-form, DIF-codes, DIF-del, DIF-check-l2, DIF-group, DIF-queue, DIF-port, DIF-dad, DIF-notify.
/// Rows: DIF-others-bridge, DIF-left, DIF-spare.
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
    let test = "bridge_agrees_with_the_reference";
    agree(
        test,
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
            (with(json!({})), arg, closed),
            (json!({"isGateway": true, "ipam": pools()}), "", usual),
            (with(json!({"isGateway": true, "ipMasq": true})), "", usual),
            (with(json!({"macspoofchk": true})), "", closed),
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
    // Those of IPv4 and that of the same IPv6 subnet are in the way.
    let before = [
        (Place::Node, "link add br0 type bridge"),
        (Place::Node, "link set br0 up"),
        (Place::Node, "addr add 10.1.0.254/24 dev br0"),
        (Place::Node, "addr add 198.51.100.1/24 dev br0"),
        (Place::Node, "addr add fd00:1::99/64 dev br0 nodad"),
        (Place::Node, "addr add fd00:2::99/64 dev br0 nodad"),
    ];
    let forced = &[
        MTU_OF_BRIDGE,
        PORT_HAS_NO_ADDRESS,
        DETECTION_BY_ADDRESS,
        NEIGHBOURS_HEAR_OF_IPV6,
        BRIDGE_OF_OTHERS,
    ][..];
    let rows = [
        (with(json!({"isGateway": true, "forceAddress": true})), "", forced),
        (with(json!({"isGateway": true})), "", &[LINKS_ARE_LEFT, FILES_ARE_KEPT, BRIDGE_OF_OTHERS][..]),
    ];
    Comparison { before: &before, ..Comparison::new(test, "bridge") }.of(&rows);
}

/// Rows: PTP-link, PTP-mtu, PTP-dns, PTP-ipam.
/// Rows: SYS-rules, SYS-sysctls.
/// Rows: DIF-mtu, DIF-codes, DIF-del, DIF-group, DIF-queue, DIF-scope, DIF-notify.
#[test]
fn ptp_agrees_with_the_reference() {
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.77"}]);
    let fixed = json!({
        "type": "static", "routes": routes,
        "addresses": [
            {"address": "10.1.0.7/24", "gateway": "10.1.0.9"}, {"address": "fd00:1::7/64", "gateway": "fd00:1::9"},
        ],
    });
    let v4 = &[MTU_OF_PAIR, NEIGHBOURS_HEAR_OF_IPV4, SCOPE_OF_POD][..];
    let usual = &[MTU_OF_PAIR, NEIGHBOURS_HEAR_OF_IPV4, NEIGHBOURS_HEAR_OF_IPV6, SCOPE_OF_POD][..];
    agree(
        "ptp_agrees_with_the_reference",
        "ptp",
        &[
            (json!({"ipam": pools()}), "", usual),
            (json!({"mtu": 1400, "dns": {"nameservers": ["10.0.0.53"]}, "ipam": one_pool()}), "", v4),
            (json!({"ipam": fixed}), "", usual),
            (json!({"ipMasq": true, "ipam": pools()}), "", usual),
            (json!({"ipam": {"type": ""}}), "", &[CODE_OF_CONFIG, DEL_OF_CONFIG]),
        ],
    );
}

/// Rows: MVL-master, MVL-mode, MVL-mtu, MVL-mac, MVL-bcqueuelen, MVL-linkInContainer.
/// Rows: SYS-rules, SYS-sysctls.
/// Rows: DIF-mtu, DIF-form, DIF-codes, DIF-group, DIF-notify, DIF-route-mtu, DIF-route-members, DIF-check-table.
#[test]
fn macvlan_agrees_with_the_reference() {
    let arg = "IgnoreUnknown=1;MAC=02:00:00:00:00:08";
    let l2 = &[MTU_OF_MACVLAN, NO_RESULT_NO_LINK][..];
    let usual = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6][..];
    let routed = json!({
        "type": "host-local", "subnet": "10.1.0.0/24",
        "routes": [
            {"dst": "10.8.0.0/16", "table": 77},
            {"dst": "10.9.0.0/16", "mtu": 1400, "advmss": 1300, "priority": 7},
            {"dst": "10.10.0.0/16", "gw": "10.1.0.77", "scope": 0},
        ],
    });
    let of_routes =
        &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6, MTU_OF_ROUTE, MEMBERS_OF_ROUTE, CHECK_OF_TABLE][..];
    let test = "macvlan_agrees_with_the_reference";
    agree(
        test,
        "macvlan",
        &[
            (json!({"master": "uplink"}), "", l2),
            (json!({"master": "uplink", "mode": "vepa", "mac": "02:00:00:00:00:07"}), "", l2),
            (json!({"master": "uplink", "mode": "passthru"}), "", l2),
            (json!({"ipam": one_pool()}), "", usual),
            (json!({"master": "uplink", "mode": "private", "mtu": 1400, "ipam": one_pool()}), "", usual),
            (json!({"master": "uplink", "bcqueuelen": 5, "ipam": one_pool()}), arg, usual),
            (json!({"master": "uplink", "ipam": routed}), "", of_routes),
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
    let keys = json!({"master": "net0", "linkInContainer": true, "ipam": one_pool()});
    Comparison { before: OF_POD, ..Comparison::new(test, "macvlan") }.of(&[(keys, "", usual)]);
}

/// Rows: TAP-reference, TAP-bridge, TAP-rollback.
/// Rows: SYS-rules, SYS-sysctls.
/// Rows: DIF-mtu, DIF-form, DIF-codes, DIF-del, DIF-group, DIF-notify, DIF-left.
#[test]
fn tap_agrees_with_the_reference() {
    let arg = "IgnoreUnknown=1;MAC=02:00:00:00:00:08";
    let l2 = &[MTU_OF_MACVLAN, NO_RESULT_NO_LINK][..];
    let usual = &[MTU_OF_MACVLAN][..];
    let test = "tap_agrees_with_the_reference";
    agree(
        test,
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
            (json!({"bridge": "net0"}), "", &[LINK_IS_LEFT]),
        ],
    );
    let rows = [
        (json!({"bridge": "net0"}), "", l2),
        (json!({"bridge": "net0", "mac": "02:00:00:00:00:07", "ipam": one_pool()}), "", usual),
    ];
    Comparison { before: OF_POD, ..Comparison::new(test, "tap") }.of(&rows);
}

/// Rows: HDV-keys, HDV-order, HDV-twice.
/// Rows: SYS-rules, SYS-sysctls.
/// Rows: DIF-mtu, DIF-form, DIF-codes, DIF-del, DIF-group, DIF-notify.
#[test]
fn host_device_agrees_with_the_reference() {
    let mac = "02:00:00:00:00:07";
    let before = [
        (Place::Node, "link add card0 address 02:00:00:00:00:07 type veth peer name card1"),
        (Place::Node, "link set card1 up"),
    ];
    let l2 = &[MTU_OF_MACVLAN, NO_RESULT_NO_DEVICE][..];
    let v4 = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV4][..];
    let usual = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV4, NEIGHBOURS_HEAR_OF_IPV6][..];
    let not_there = &[CODE_OF_DEVICE, DEL_OF_DEVICE][..];
    let refused = &[CODE_OF_CONFIG, DEL_OF_CONFIG][..];
    let rows = [
        (json!({"device": "card0", "ipam": pools()}), "", usual),
        (json!({"device": "card0"}), "", l2),
        (json!({"hwaddr": mac, "ipam": one_pool()}), "", v4),
        (json!({"hwaddr": mac}), "", l2),
        // The first of several counts.
        (json!({"device": "card0", "hwaddr": "02:00:00:00:00:99", "ipam": one_pool()}), "", v4),
        (
            json!({"hwaddr": mac, "pciBusID": "", "kernelpath": "/sys/devices/none", "ipam": one_pool()}),
            "",
            v4,
        ),
        (json!({"device": "nosuch"}), "", not_there),
        (json!({"hwaddr": "02:00:00:00:00:99", "ipam": one_pool()}), "", not_there),
        (json!({"kernelpath": "/sys/devices/none"}), "", not_there),
        (json!({"pciBusID": "ffff:ff:1f.7"}), "", not_there),
        (json!({"runtimeConfig": {"deviceID": "ffff:ff:1f.7"}, "ipam": one_pool()}), "", not_there),
        (json!({"hwaddr": "x"}), "", refused),
        (json!({"kernelpath": "/proc/self"}), "", refused),
        (json!({}), "", refused),
    ];
    let test = "host_device_agrees_with_the_reference";
    Comparison { before: &before, ..Comparison::new(test, "host-device") }.of(&rows);
}

/// Only what has a bus is found by it. Runs where tests may change a card.
///
/// Rows: HDV-keys, HDV-order, HDV-pci.
/// Rows: DIF-mtu, DIF-group, DIF-notify, DIF-pci.
#[test]
fn host_device_by_its_bus_agrees_with_the_reference() {
    let test = "host_device_by_its_bus_agrees_with_the_reference";
    let Some(cards) = Cards::take(test).unwrap() else { return };
    let vfs = cards.make_vfs(1).unwrap();
    let address = &vfs[0].address;
    let path = fs::canonicalize(Path::new("/sys/bus/pci/devices").join(address)).unwrap();
    let by_path = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV4][..];
    let by_address = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV4, PCI_ADDRESS][..];
    let rows = [
        (json!({"pciBusID": address, "ipam": one_pool()}), "", by_address),
        (json!({"kernelpath": path, "ipam": one_pool()}), "", by_path),
        // What the runtime says goes over the configuration.
        (
            json!({"runtimeConfig": {"deviceID": address}, "pciBusID": "ffff:ff:1f.7", "ipam": one_pool()}),
            "",
            by_address,
        ),
    ];
    let comparison = Comparison::new(test, "host-device");
    Comparison { versions: &["1.1.0"], card: Some(vfs[0].device.as_str()), ..comparison }.of(&rows);
}

/// Links without a driver in many kernels. Runs if the kernel has all drivers.
///
/// Rows: VLN-keys, DMY-keys, IVL-keys, IVL-chained, BRG-vlan, BRG-vlanTrunk, BRG-preserveDefaultVlan, BRG-vlan-gateway.
/// Rows: SYS-rules, SYS-sysctls, MVL-linkInContainer.
/// Rows: DIF-mtu, DIF-codes, DIF-del, DIF-check-master, DIF-group, DIF-queue, DIF-port, DIF-dad, DIF-link-local.
/// Rows: DIF-notify.
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
    // An emulated machine is slow: one row of each plugin is run in every version, the others in these.
    let few = &["0.4.0", "1.1.0"][..];
    let with = |extra: Value| {
        let mut keys = json!({"bridge": "br0", "ipam": one_pool()});
        keys.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        keys
    };
    let trunk = json!([{"id": 5}, {"minID": 7, "maxID": 9}]);
    agree(test, "bridge", &[(with(json!({"vlan": 100, "isGateway": true})), "", gateway)]);
    Comparison { versions: few, ..Comparison::new(test, "bridge") }.of(&[
        (with(json!({"vlan": 100, "preserveDefaultVlan": false, "vlanTrunk": trunk})), "", port),
        (with(json!({"vlan": 100, "preserveDefaultVlan": true})), "", port),
        (with(json!({"vlanTrunk": trunk})), "", port),
    ]);
    agree(test, "dummy", &[(json!({"ipam": one_pool()}), "", usual)]);
    let ipvlan = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6][..];
    agree(test, "ipvlan", &[(json!({"master": "uplink", "mode": "l3", "ipam": one_pool()}), "", ipvlan)]);
    Comparison { versions: few, before: OF_POD, ..Comparison::new(test, "ipvlan") }.of(&[
        (json!({"master": "uplink", "mode": "l2", "mtu": 1400, "ipam": one_pool()}), "", ipvlan),
        (json!({"master": "uplink", "mode": "l3s", "ipam": one_pool()}), "", ipvlan),
        (json!({"ipam": one_pool()}), "", &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6, CHECK_WITHOUT_MASTER]),
        (json!({"master": "net0", "linkInContainer": true, "ipam": one_pool()}), "", ipvlan),
        (json!({"master": "uplink", "mode": "x", "ipam": one_pool()}), "", &[CODE_OF_CONFIG]),
    ]);
    for &version in &VERSIONS[2..] {
        let before = json!({
            "cniVersion": version, "interfaces": [{"name": "uplink"}], "dns": {},
            "ips": [{"version": "4", "address": "10.1.0.7/24", "gateway": "10.1.0.9", "interface": 0}],
            "routes": [{"dst": "10.9.0.0/16", "gw": "10.1.0.77"}],
        });
        let chained = &[MTU_OF_MACVLAN, NEIGHBOURS_HEAR_OF_IPV6, CHECK_WITHOUT_MASTER][..];
        let comparison = Comparison { versions: &[version], ..Comparison::new(test, "ipvlan") };
        comparison.of(&[(json!({"prevResult": before}), "", chained)]);
    }
    agree(
        test,
        "vlan",
        &[(json!({"master": "uplink", "vlanId": 5, "mtu": 1400, "ipam": one_pool()}), "", usual)],
    );
    Comparison { versions: few, before: OF_POD, ..Comparison::new(test, "vlan") }.of(&[
        (json!({"master": "uplink", "vlanId": 0, "ipam": one_pool()}), "", usual),
        (json!({"master": "net0", "linkInContainer": true, "vlanId": 5, "ipam": one_pool()}), "", usual),
        (
            json!({"master": "uplink", "vlanId": 5, "mtu": 1501, "ipam": one_pool()}),
            "",
            &[CODE_OF_CONFIG, DEL_OF_CONFIG],
        ),
    ]);
}

/// Rows: LBK-up, DIF-lo-up, DIF-lo-version.
#[test]
fn loopback_agrees_with_the_reference() {
    let [oldest, middle] = LO_IN_ITS_VERSION;
    agree(
        "loopback_agrees_with_the_reference",
        "loopback",
        &[(json!({}), "", &[LO_STAYS_UP, oldest, middle])],
    );
}

/// Rows: HLC-ranges, HLC-ips, HLC-routes, HLC-dataDir, HLC-ipRanges, HLC-resolvConf.
#[test]
fn host_local_agrees_with_the_reference() {
    let ranges = json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.5"}], [{"subnet": "fd00:1::/64"}]]);
    let routes = json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "10.8.0.0/16"}]);
    let pool = json!({"type": "host-local", "ranges": ranges, "routes": routes});
    let directory = tempfile::tempdir().unwrap();
    let resolver = directory.path().join("resolv.conf");
    let lines = "# nobody\nnameserver 10.1.0.53\nnameserver fd00:1::53\ndomain b.example\n\n\
                 search a.example c.example\noptions ndots:2 edns0\n; nothing\n";
    fs::write(&resolver, lines).unwrap();
    let resolving = json!({"type": "host-local", "subnet": "10.1.0.0/24", "resolvConf": resolver});
    let v6 = json!({"type": "host-local", "ranges": [[{"subnet": "fd00:1::/64"}]]});
    let asked = json!([[{"subnet": "10.7.0.0/24", "rangeStart": "10.7.0.20", "rangeEnd": "10.7.0.30"}]]);
    agree(
        "host_local_agrees_with_the_reference",
        "host-local",
        &[
            (json!({"ipam": pool}), "", &[]),
            (json!({"ipam": pool}), "IP=10.1.0.99", &[]),
            (json!({"ipam": pool, "runtimeConfig": {"ips": ["fd00:1::99/64"]}}), "", &[]),
            (json!({"ipam": pool, "args": {"cni": {"ips": ["10.1.0.98"]}}}), "IP=fd00:1::98", &[]),
            (json!({"ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}), "", &[]),
            (json!({"ipam": one_pool()}), "", &[]),
            (json!({"ipam": resolving}), "", &[]),
            (json!({"ipam": v6, "runtimeConfig": {"ipRanges": asked}}), "", &[]),
            (json!({"ipam": {"type": "host-local"}, "runtimeConfig": {"ipRanges": asked}}), "", &[]),
        ],
    );
}

/// Rows: STC-addresses, STC-asked-for, STC-refused, DIF-codes, DIF-gateway.
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
        for (attached_by_us, version) in [true, false].into_iter().flat_map(|us| VERSIONS.map(|it| (us, it)))
        {
            let mut rig = Rig::new();
            let theirs = reference.clone();
            let ours = rig.install();
            let (first, second) = if attached_by_us { (ours, theirs) } else { (theirs, ours) };
            let config = rig.config(kind, version, &keys);
            rig.runtime.plugins = first;
            let result = rig.runtime.add(rig.call(""), &config).unwrap();
            rig.runtime.plugins = second;
            let later = later(&config, &result);
            let verbs = if version >= "0.4.0" { &["CHECK", "DEL"][..] } else { &["DEL"] };
            for verb in verbs {
                let answer = rig.runtime.run(verb, rig.call(""), &later).unwrap();
                assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{kind} {version} {verb}");
            }
            let left = rig.snapshot();
            let mut links: Vec<_> = left["pod"].as_object().unwrap().keys().collect();
            links.sort();
            // Without a result nothing says that a link of the reference is this container's: the path may lead to
            // another's namespace. It ends with its own.
            let stays = !attached_by_us && version < "0.4.0";
            let expected = if stays { &["eth0", "lo"][..] } else { &["lo"] };
            assert_eq!(links, expected, "{kind} {version}");
            if !stays {
                assert_eq!(left["node"].get("the node's end"), None, "{kind} {version}");
            }
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
fn agree(test: &str, kind: &str, rows: &[Row<'_>]) {
    Comparison::new(test, kind).of(rows);
}

/// Keys of a configuration, `CNI_ARGS`, and the differences that are meant.
type Row<'a> = (Value, &'a str, &'a [Deviation]);

/// A command of `ip` for what has to be there before an ADD, and where it is run.
type Before = (Place, &'static str);

#[derive(Clone, Copy)]
enum Place {
    Node,
    Pod,
}

/// A plugin that both have.
#[derive(Clone, Copy)]
struct Comparison<'a> {
    test: &'a str,
    kind: &'a str,
    versions: &'a [&'a str],
    before: &'a [Before],
    /// The node is this machine, where of all links only this one is looked at.
    card: Option<&'a str>,
}

impl<'a> Comparison<'a> {
    fn new(test: &'a str, kind: &'a str) -> Self {
        Self { test, kind, versions: &VERSIONS, before: &[], card: None }
    }

    /// Runs each row's configuration through both, and finds exactly the row's deviations.
    fn of(&self, rows: &[Row<'_>]) {
        let Self { test, kind, .. } = *self;
        let Some(reference) = reference_plugins(test, &[kind, "host-local"]) else { return };
        for (keys, args, deviations) in rows {
            for &version in self.versions {
                let mut ours = self.rig();
                ours.runtime.plugins = ours.install();
                let mut theirs = self.rig();
                theirs.runtime.plugins.clone_from(&reference);
                let (ours, theirs) =
                    (ours.attach(kind, version, keys, args), theirs.attach(kind, version, keys, args));
                let what = format!("{kind} {version} {keys} {args:?}");
                assert_differ_as_meant(&what, version, [&ours, &theirs], deviations);
            }
        }
    }

    fn rig(&self) -> Rig {
        let rig = match self.card {
            Some(card) => Rig::on_this_machine(card),
            None => Rig::new(),
        };
        for (place, line) in self.before {
            let namespace = match place {
                Place::Node => &rig.runtime.node,
                Place::Pod => &rig.pod,
            };
            ip(namespace, &line.split(' ').collect::<Vec<_>>()).unwrap();
        }
        rig
    }
}

/// The configuration of a verb after ADD: a runtime has no result to pass on if that failed, and passes none before
/// 0.4.0.
fn later(config: &Value, result: &Value) -> Value {
    let is_result = result.is_object() && result.get("code").is_none();
    if is_result && version_of(config) >= "0.4.0" { with_result(config, result) } else { config.clone() }
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
    let of_links = OF_EVERY_LINK.iter().flat_map(|deviation| deviation.at).copied();
    meant.extend(of_links.filter(|at| ours.pointer(at).and(theirs.pointer(at)).is_some()));
    meant.sort_unstable();
    let mut at: Vec<&str> = found.iter().map(|(at, ..)| at.as_str()).collect();
    at.sort_unstable();
    assert_eq!(at, meant, "{what}\nat, ours, theirs: {found:#?}");
    for Deviation { row, .. } in deviations.iter().chain(&OF_EVERY_LINK) {
        assert!(ROWS.contains(&format!("id = \"{row}\"")), "{row} has no reason for users");
    }
}

/// A node with an uplink and a default route, and one pod.
struct Rig {
    runtime: Runtime,
    pod: Namespace,
    dir: TempDir,
    /// The only link of the node that is looked at.
    card: Option<String>,
}

impl Rig {
    /// Without plugins.
    fn new() -> Self {
        let rig = Self::of(Namespace::new().unwrap(), None);
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

    /// A node that is this machine, with its card of that name.
    fn on_this_machine(card: &str) -> Self {
        Self::of(Namespace::of_this_process().unwrap(), Some(card.to_owned()))
    }

    fn of(node: Namespace, card: Option<String>) -> Self {
        let (pod, dir) = (Namespace::new().unwrap(), tempfile::tempdir().unwrap());
        Self { runtime: Runtime { node, plugins: PathBuf::new() }, pod, dir, card }
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
        let later = later(&config, &added.stdout);
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
            let is_bridge = ["br0", "cni0"].contains(&interface["name"].as_str().unwrap_or_default());
            if interface.get("sandbox").is_none() && !is_bridge {
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
            "pod": links(pod, None), "node": links(node, self.card.as_deref()), "files": self.files(),
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

/// Every link by its name, or only that of this name; a node's ends of veths, whose names do not matter, by their
/// kind.
fn links(namespace: &Namespace, only: Option<&str>) -> Value {
    let mut handle = Handle::open_in(namespace.netns()).unwrap();
    let all = handle.links().unwrap();
    let vlans = handle.port_vlans().unwrap();
    let name_of = |index: Option<u32>| {
        all.iter().find(|link| Some(link.index) == index).map_or("none", |link| link.name.as_str())
    };
    let mut shown = Map::new();
    for link in all.iter().filter(|link| only.is_none_or(|only| link.name == only)) {
        let is_automatic = |text: &String| text.starts_with("fe80:");
        let mut addresses: Vec<String> =
            handle.addresses(link.index).unwrap().iter().map(ToString::to_string).collect();
        addresses.retain(|address| !is_automatic(address));
        // Names of the ends in a bridge do not matter, nor those of other veths of the node.
        let here = handle.find_end_here(link).unwrap().filter(|end| end.name.starts_with("br0."));
        let is_named = ["eth0", "card0", "card1"].contains(&link.name.as_str());
        let name = match (link.kind.as_str(), here) {
            ("veth", Some(device)) => format!("the port of {}", device.name),
            ("veth", None) if !is_named && !link.name.starts_with("br0.") => "the node's end".into(),
            _ => link.name.clone(),
        };
        let vlans: Vec<String> = vlans
            .get(&link.index)
            .into_iter()
            .flatten()
            .map(|(id, how)| format!("{id} {} {}", how.pvid, how.untagged))
            .collect();
        let properties = handle.properties(&link.name).unwrap();
        let is_macvlan = link.kind == "macvlan";
        shown.insert(
            name,
            json!({
                "kind": link.kind, "up": link.up, "mtu": link.mtu, "promiscuous": link.promiscuous,
                "allmulti": properties.allmulti, "txqlen": properties.queue, "group": link.group,
                "controller": name_of(link.controller), "hairpin": link.hairpin,
                "isolated": link.isolated, "vlans": vlans,
                "mode": link.mode.map(|mode| format!("{mode:?}")),
                "bcqueuelen": is_macvlan.then(|| broadcast_queue(namespace, &link.name)),
                "addresses": addresses, "routes": routes(&mut handle, link.index),
                "sysctls": sysctls(namespace, &link.name).unwrap(),
            }),
        );
    }
    Value::Object(shown)
}

/// The routes of all tables that lead over a link, without the kernel's own of link-local addresses.
fn routes(handle: &mut Handle, index: u32) -> Vec<Value> {
    let mut found = handle.routes_of_all_tables_by(index).unwrap();
    found.retain(|route| {
        let to = route.destination.to_string();
        !to.starts_with("fe80:") && !to.starts_with("ff00:")
    });
    found.sort_by_key(|route| (route.destination, route.table, route.gateway, route.priority));
    let shown = |route: &Route| {
        json!({
            "to": route.destination.to_string(), "via": route.gateway, "metric": route.priority,
            "table": route.table, "source": route.source, "scope": route.scope, "mtu": route.mtu,
            "advmss": route.advmss,
        })
    };
    found.iter().map(shown).collect()
}

/// The length of the queue for broadcasts that a macvlan has asked its parent for.
fn broadcast_queue(namespace: &Namespace, name: &str) -> Value {
    let show = || Command::new("ip").args(["-details", "-json", "link", "show", "dev", name]).output();
    let output = namespace.run(show).unwrap();
    assert!(output.status.success(), "{output:?}");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let queue = told[0]["linkinfo"]["info_data"]["bcqueuelen"].clone();
    assert!(queue.is_u64(), "{told}");
    queue
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
