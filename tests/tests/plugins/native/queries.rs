//! CHECK, STATUS, VERSION, and the executable's help.

use std::fs;
use std::process::Command;

use netattach::netlink::Handle;
use netattach_tests::node::{executable, ip};
use netattach_tests::runtime::{config, with_result};
use netattach_tests::tools::{bridges_filter_by_vlan, has_driver, report_skipped};
use serde_json::{Value, json};

use super::{PLUGINS, Rig, VERSIONS, bridge, net};

/// A plugin, its keys besides the usual ones, what is done to its attachment, and what CHECK says then.
type Row = (&'static str, Value, fn(&Rig), &'static str);

/// Rows: CHK-06.
#[test]
fn check_tells_what_is_missing() {
    let table: [Row; 20] = [
        (
            "bridge",
            Value::Null,
            |rig| rig.inside().ensure_link_absent("eth0").unwrap(),
            "interface eth0 is gone from the pod",
        ),
        (
            "bridge",
            Value::Null,
            |rig| without_address(rig.inside(), "eth0", "10.1.0.2/24"),
            "interface eth0 lacks address 10.1.0.2/24",
        ),
        ("bridge", Value::Null, |rig| rig.node().ensure_link_absent("br0").unwrap(), "bridge br0 is gone"),
        (
            "bridge",
            Value::Null,
            |rig| without_address(rig.node(), "br0", "10.1.0.1/24"),
            "bridge br0 lacks gateway address 10.1.0.1/24",
        ),
        (
            "bridge",
            Value::Null,
            |rig| fs::remove_file(rig.dir.path().join("net/10.1.0.2")).unwrap(),
            "address 10.1.0.2 is not reserved",
        ),
        (
            "bridge",
            json!({"hairpinMode": true}),
            |rig| on_node(rig, &["link", "set", &end(rig), "type", "bridge_slave", "hairpin", "off"]),
            " is not in hairpin mode",
        ),
        (
            "bridge",
            json!({"promiscMode": true}),
            |rig| on_node(rig, &["link", "set", "br0", "promisc", "off"]),
            "bridge br0 is not in promiscuous mode",
        ),
        (
            "macvlan",
            Value::Null,
            |rig| rig.inside().ensure_link_absent("eth0").unwrap(),
            "interface eth0 is gone from the pod",
        ),
        (
            "macvlan",
            Value::Null,
            |rig| {
                rig.inside().ensure_link_absent("eth0").unwrap();
                rig.inside().ensure_bridge(&bridge("eth0")).unwrap();
            },
            "interface eth0 is not the interface that ADD created",
        ),
        (
            "macvlan",
            Value::Null,
            |rig| without_address(rig.inside(), "eth0", "fd00:1::2/64"),
            "interface eth0 lacks address fd00:1::2/64",
        ),
        (
            "macvlan",
            Value::Null,
            |rig| in_pod(rig, &["link", "set", "eth0", "type", "macvlan", "mode", "private"]),
            "interface eth0 has another macvlan mode",
        ),
        ("macvlan", Value::Null, without_parent, NOT_ON_PARENT),
        ("macvtap", Value::Null, without_parent, NOT_ON_PARENT),
        (
            "ptp",
            Value::Null,
            |rig| without_address(rig.node(), &end(rig), "10.1.0.1/32"),
            " of the node lacks address 10.1.0.1/32",
        ),
        (
            "ptp",
            Value::Null,
            |rig| on_node(rig, &["route", "del", "10.1.0.2"]),
            "the node's route to 10.1.0.2/32 is gone",
        ),
        (
            "ptp",
            Value::Null,
            |rig| on_node(rig, &["link", "set", &end(rig), "name", "moved"]),
            " is gone from the node",
        ),
        (
            "ptp",
            Value::Null,
            |rig| {
                let end = end(rig);
                on_node(rig, &["link", "set", &end, "name", "moved"]);
                on_node(rig, &["link", "add", &end, "up", "type", "veth", "peer", "name", "far"]);
            },
            " is not the other end of the pod's interface",
        ),
        (
            "veth",
            Value::Null,
            |rig| {
                let index = rig.inside().link("eth0").unwrap().index;
                // The routes go with the last address of their family.
                rig.inside().ensure_address_absent(index, net("10.1.0.2/32")).unwrap();
                rig.inside().ensure_address(index, net("10.1.0.2/32")).unwrap();
            },
            "the route to 0.0.0.0/0 is gone",
        ),
        (
            "veth",
            Value::Null,
            |rig| without_address(rig.node(), &end(rig), "fe80::1/64"),
            " of the node lacks address fe80::1/64",
        ),
        ("loopback", Value::Null, |rig| rig.runtime.node.run(|| ()), "lo is not up"),
    ];
    assert_told(table);
}

/// Rows: CHK-06.
#[test]
fn check_tells_what_is_missing_where_few_kernels_have_the_drivers() {
    let test = "check_tells_what_is_missing_where_few_kernels_have_the_drivers";
    let table: [Row; 6] = [
        ("vlan", Value::Null, without_parent, NOT_ON_PARENT),
        (
            "vlan",
            Value::Null,
            |rig| {
                rig.inside().ensure_link_absent("eth0").unwrap();
                let (link, pod) = (["link", "add", "link", "uplink", "name", "eth0"], rig.pod.task());
                on_node(rig, &[&link[..], &["netns", &pod, "type", "vlan", "id", "6"]].concat());
                in_pod(rig, &["link", "set", "eth0", "up"]);
            },
            "interface eth0 has another VLAN tag",
        ),
        ("ipvlan", Value::Null, without_parent, NOT_ON_PARENT),
        (
            "ipvlan",
            Value::Null,
            |rig| in_pod(rig, &["link", "set", "eth0", "type", "ipvlan", "mode", "l3"]),
            "interface eth0 has another ipvlan mode",
        ),
        (
            "bridge",
            json!({"vlan": 5}),
            |rig| on_node(rig, &["link", "set", "br0", "type", "bridge", "vlan_filtering", "0"]),
            "bridge br0 does not filter by VLAN",
        ),
        (
            "bridge",
            json!({"vlan": 5}),
            |rig| rig.node().ensure_link_absent("br0.5").unwrap(),
            "device br0.5, which has the gateways, is gone or down",
        ),
    ];
    let lacking: Vec<&str> = ["vlan", "ipvlan"].into_iter().filter(|kind| !has_driver(kind)).collect();
    if !lacking.is_empty() {
        report_skipped(test, &format!("the kernel has no {}", lacking.join(" and no ")));
    }
    let filters = bridges_filter_by_vlan(test);
    let can_be = |(kind, ..): &Row| if *kind == "bridge" { filters } else { !lacking.contains(kind) };
    assert_told(table.into_iter().filter(can_be));
}

fn assert_told(table: impl IntoIterator<Item = Row>) {
    for (kind, keys, harm, message) in table {
        let rig = Rig::new();
        let mut config = rig.config("1.0.0", kind);
        if let (Some(config), Some(keys)) = (config.as_object_mut(), keys.as_object()) {
            config.extend(keys.clone());
        }
        let result = if kind == "loopback" {
            // Never set up.
            json!({"cniVersion": "1.0.0", "interfaces": [{"name": "lo", "sandbox": rig.pod.path()}]})
        } else {
            let result = rig.add(&config);
            rig.after("CHECK", &config, &result);
            result
        };
        harm(&rig);
        let (_, said) = rig.refusal("CHECK", &with_result(&config, &result));
        assert!(said.contains(message), "{kind} {keys}: {said:?} instead of {message:?}");
    }
}

/// The node's end of the pod's link.
fn end(rig: &Rig) -> String {
    rig.links().1[0].clone()
}

fn on_node(rig: &Rig, words: &[&str]) {
    ip(&rig.runtime.node, words).unwrap();
}

fn in_pod(rig: &Rig, words: &[&str]) {
    ip(&rig.pod, words).unwrap();
}

fn without_address(mut namespace: Handle, link: &str, address: &str) {
    let index = namespace.link(link).unwrap().index;
    namespace.ensure_address_absent(index, net(address)).unwrap();
}

const NOT_ON_PARENT: &str = "interface eth0 is not on uplink";

/// Another link is called like the parent now.
fn without_parent(rig: &Rig) {
    on_node(rig, &["link", "set", "uplink", "name", "former"]);
    rig.node().ensure_bridge(&bridge("uplink")).unwrap();
}

/// Rows: CHK-03.
#[test]
fn check_needs_the_result_and_the_interface_in_it() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "bridge");
    rig.add(&config);
    assert_eq!(rig.refusal("CHECK", &config), (7, "key prevResult: missing, but CHECK needs it".to_owned()));
    let empty = json!({"cniVersion": "1.0.0"});
    assert_eq!(
        rig.refusal("CHECK", &with_result(&config, &empty)),
        (7, "key prevResult.interfaces: has no eth0 with a sandbox".to_owned())
    );
}

#[test]
fn check_of_loopback_needs_no_result() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "loopback");
    assert!(rig.refusal("CHECK", &config).1.contains("lo is not up"));
    rig.add(&config);
    rig.alone("CHECK", &config);
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
        let problem = "no address is available in range set 0 (10.1.0.1-10.1.0.2); where an agent runs, \
                       netattachctl pools --holders shows who has them";
        assert!(said.ends_with(problem), "{said}");
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
        "netattach-cni: {} would be overwritten; --force replaces it\n",
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
