//! Cleanup by DEL, by GC and after a failed ADD.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use netattach::netlink::Handle;
use netattach::spec::Veth;
use netattach_tests::Namespace;
use netattach_tests::node::ip;
use netattach_tests::runtime::Call;
use netattach_tests::tools::has_driver;
use serde_json::{Value, json};

use super::{MAC, PLUGINS, Rig};

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
        // A lease from before interfaces were recorded.
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

/// Rows: DEL-07, PTP-del.
#[test]
fn del_frees_addresses_when_the_namespace_the_parent_and_the_ranges_are_gone() {
    let few = ["ipvlan", "vlan", "dummy"].into_iter().filter(|kind| has_driver(kind));
    for kind in ["bridge", "macvlan", "macvtap", "ptp", "veth", "tap"].into_iter().chain(few) {
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

/// The path now leads to another container's namespace, which has an interface of that name, and here of that
/// address.
///
/// Rows: IVL-late-del, HDV-late-del.
#[test]
fn a_late_del_leaves_the_link_alone_of_the_container_that_has_the_namespaces_path_now() {
    let kinds = ["ipvlan", "vlan"].into_iter().filter(|kind| has_driver(kind)).chain(["host-device"]);
    for kind in ["veth", "dummy"].into_iter().filter(|kind| has_driver(kind)).chain(kinds) {
        let rig = Rig::new();
        let other = Namespace::new().unwrap();
        for card in ["card5", "card6"].into_iter().filter(|_| kind == "host-device") {
            let far = format!("{card}-far");
            let pair = ["link", "add", card, "address", MAC, "type", "veth", "peer", "name", &far];
            ip(&rig.runtime.node, &pair).unwrap();
        }
        let configs = [5, 6].map(|id| {
            let mut config = rig.config("1.0.0", kind);
            match kind {
                // All of a parent have its address.
                "ipvlan" => {}
                "vlan" => config["vlanId"] = json!(id),
                "host-device" => config["device"] = json!(format!("card{id}")),
                _ => config["mac"] = json!(MAC),
            }
            config
        });
        let of_other = Call { container: "c2", netns: other.path(), ..rig.call() };
        let late = rig.add(&configs[0]);
        let result = rig.runtime.add(of_other, &configs[1]).unwrap();
        let own = |result: &Value| {
            let interfaces = result["interfaces"].as_array().unwrap();
            interfaces.iter().find(|it| it["name"] == "eth0").unwrap()["mac"].clone()
        };
        assert_eq!(own(&late), own(&result), "{kind}");
        let is_there = || Handle::open_in(other.netns()).unwrap().find_link("eth0").unwrap().is_some();
        let path_of_other = Call { netns: other.path(), ..rig.call() };
        rig.runtime.after("DEL", path_of_other, &configs[0], &late).unwrap();
        assert!(is_there(), "{kind}");
        if kind == "host-device" {
            // Since Linux 5.14 it is known that the path is not that of the ADD, and the device goes back from there.
            // Before, it stays in its pod, whose own DEL may follow.
            let is_known = other.netns().cookie().unwrap().is_some();
            let found = [rig.node().find_link("card5"), rig.inside().find_link("eth0")];
            assert_eq!(found.map(|link| link.unwrap().is_some()), [is_known, !is_known]);
        }
        rig.runtime.after("DEL", of_other, &configs[1], &result).unwrap();
        assert!(!is_there(), "{kind}");
        if kind == "host-device" {
            rig.after("DEL", &configs[0], &late);
            let back = ["card5", "card6"].map(|card| rig.node().link(card).unwrap().group);
            assert_eq!(back, [0, 0]);
        }
    }
}

#[test]
fn del_leaves_what_somebody_else_made() {
    let rig = Rig::new();
    let config = rig.config("1.0.0", "veth");
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
    // A plugin of another name creates another kind.
    rig.after("DEL", &rig.config("1.0.0", "macvlan"), &listed(MAC));
    assert_eq!(rig.links().0, ["eth0"]);
    // The interfaces in the previous result belong to this attachment, whichever plugin of that name made them.
    rig.after("DEL", &config, &listed(MAC));
    assert_eq!(rig.links().0, [""; 0]);
    // So do those with an IP address of it: a `tuning` may have changed the Ethernet address for a while.
    rig.node().create_veth(&foreign, None, rig.pod.netns().as_fd(), &mut inside).unwrap();
    let index = inside.link("eth0").unwrap().index;
    inside.ensure_address(index, "10.1.0.2/24".parse().unwrap()).unwrap();
    let tuned = |address: &str| {
        let mut result = listed("02:00:00:00:00:99");
        result["ips"] = json!([{"interface": 0, "address": address}]);
        result
    };
    rig.after("DEL", &config, &tuned("10.9.0.2/24"));
    assert_eq!(rig.links().0, ["eth0"]);
    rig.after("DEL", &config, &tuned("10.1.0.2/24"));
    assert_eq!(rig.links().0, [""; 0]);
}

#[test]
fn a_failed_add_leaves_nothing() {
    let few = ["ipvlan", "vlan", "dummy", "netkit"].into_iter().filter(|kind| has_driver(kind));
    for kind in ["bridge", "macvlan", "macvtap", "ptp", "tap", "veth"].into_iter().chain(few) {
        let rig = Rig::new();
        let mut full = rig.config("1.0.0", kind);
        full["ipam"] = json!({"type": "host-local", "dataDir": rig.dir.path(), "subnet": "10.1.0.0/30"});
        let other = Call { container: "c0", ..rig.call() };
        let mut pool = full.clone();
        pool["type"] = json!("host-local");
        rig.runtime.add(other, &pool).unwrap();
        let mut late = rig.config("1.0.0", kind);
        let of_late = match kind {
            // All routes of a routed link go through the node's end: none of them can fail to install.
            "ptp" | "veth" | "netkit" => {
                late["mtu"] = json!(1000);
                "mtu 1000 is below 1280, which IPv6 needs"
            }
            _ => {
                late["ipam"]["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "192.0.2.1"}]);
                "configure the pod's interface: RTM_NEWROUTE"
            }
        };
        let of_full = "no address is available in range set 0 (10.1.0.1-10.1.0.2)";
        for (config, refused, message) in [(&full, 11, of_full), (&late, 7, of_late)] {
            let (code, said) = rig.refusal("ADD", config);
            assert!(code == refused && said.contains(message), "{kind}: {code}: {said}");
            let left = ((vec![], vec![]), vec!["10.1.0.2".to_owned()]);
            assert_eq!((rig.links(), rig.reserved()), left, "{kind}: {message}");
        }
    }
}

/// If several processes create a bridge or find it, only one gets an address.
///
/// Rows: BRG-at-once.
#[test]
fn an_add_that_fails_leaves_the_bridge_that_another_process_is_about_to_use() {
    let rig = Rig::new();
    let pods: Vec<Namespace> = (0..8).map(|_| Namespace::new().unwrap()).collect();
    let containers: Vec<String> = (0..pods.len()).map(|number| format!("c{number}")).collect();
    for round in 0..5 {
        let mut config = rig.config("1.0.0", "bridge");
        config["bridge"] = json!(format!("bridge{round}"));
        config["ipam"] = json!({"type": "host-local", "dataDir": rig.dir.path(), "subnet": "10.1.0.0/30"});
        let add = |(container, pod): (&String, &Namespace)| {
            let call = Call { container, netns: pod.path(), ..rig.call() };
            rig.runtime.run("ADD", call, &config).unwrap()
        };
        let add = &add;
        let answers: Vec<_> = std::thread::scope(|scope| {
            let adds: Vec<_> = containers.iter().zip(&pods).map(|of| scope.spawn(move || add(of))).collect();
            adds.into_iter().map(|add| add.join().unwrap()).collect()
        });
        let mut added = answers.iter().zip(containers.iter().zip(&pods));
        let (answer, (container, pod)) = added.find(|(answer, _)| answer.exit == Some(0)).unwrap();
        let call = Call { container, netns: pod.path(), ..rig.call() };
        for verb in ["CHECK", "DEL"] {
            rig.runtime.after(verb, call, &config, &answer.stdout).unwrap();
        }
    }
}
