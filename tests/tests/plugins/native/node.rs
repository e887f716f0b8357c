//! Existing state of node and pod, and requests about it.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use netattach::netlink::Handle;
use netattach::spec::{Addressing, LinkMode, MacvlanMode, Route, Veth};
use netattach_tests::Namespace;
use netattach_tests::runtime::{Call, config, with_result};
use netattach_tests::tools::{has_driver, report_skipped};
use serde_json::{Value, json};

use super::{MAC, Rig, addresses, bridge, mac_of, net};

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

/// Rows: VLN-mac.
#[test]
fn a_vlan_gets_no_ethernet_address_of_another_device_than_its_parent() {
    if !has_driver("vlan") {
        return report_skipped("a_vlan_gets_no_ethernet_address_of_another_device", "the kernel has no vlan");
    }
    let rig = Rig::new();
    rig.node().ensure_bridge(&bridge("br0")).unwrap();
    let of = |name: &str| mac_of(&rig.node().link(name).unwrap());
    let mut config = rig.config("1.0.0", "vlan");
    config["mac"] = json!(of("br0"));
    let (code, message) = rig.refusal("ADD", &config);
    let expected = format!("MAC address {} is taken: the node's device br0 has it", of("br0"));
    assert!(code == 7 && message.ends_with(&expected), "{code}: {message}");
    rig.assert_nothing_left("refused");
    // It would have that without asking.
    config["mac"] = json!(of("uplink"));
    let result = rig.add(&config);
    rig.after("DEL", &config, &result);
    rig.assert_nothing_left("after DEL");
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
            "there is no default route whose interface could be used; name the interface by the key master",
        ),
        (
            config("1.0.0", "macvlan", &json!({"master": "uplink", "mtu": 1501, "ipam": ipam})),
            "key mtu: 1501 is larger than 1500, the MTU of the parent uplink",
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

/// Rows: MVL-master.
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

/// Rows: MVL-mode.
#[test]
fn a_macvlan_has_the_mode_that_was_asked_for() {
    use MacvlanMode::{Bridge, Passthru, Private, Vepa};
    for (word, mode) in [("bridge", Bridge), ("private", Private), ("vepa", Vepa), ("passthru", Passthru)] {
        let rig = Rig::new();
        let config = config("1.0.0", "macvlan", &json!({"master": "uplink", "mode": word}));
        let result = rig.add(&config);
        assert_eq!(rig.inside().link("eth0").unwrap().mode, Some(LinkMode::Macvlan(mode)));
        rig.after("CHECK", &config, &result);
        let mut other = config.clone();
        other["mode"] = json!(if word == "vepa" { "private" } else { "vepa" });
        let (_, said) = rig.refusal("CHECK", &with_result(&other, &result));
        assert!(said.ends_with("interface eth0 has another macvlan mode"), "{said}");
    }
}

/// Rows: MVL-bcqueuelen.
#[test]
fn a_macvlan_has_the_queue_that_was_asked_for_or_the_kernels() {
    for (asked, length) in [(json!(5), 5), (json!(0), 1000), (Value::Null, 1000)] {
        let rig = Rig::new();
        let config = config("1.0.0", "macvlan", &json!({"master": "uplink", "bcqueuelen": asked}));
        rig.add(&config);
        let words = ["-d", "-j", "link", "show", "eth0"];
        let shown = rig.pod.run(|| Command::new("ip").args(words).output()).unwrap();
        let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!(shown[0]["linkinfo"]["info_data"]["bcqueuelen"], length, "{config}: {shown}");
    }
}

/// Rows: MVL-macvtap.
#[test]
fn a_macvtap_has_the_mode_that_was_asked_for_and_its_device() {
    for (word, mode) in [
        ("bridge", MacvlanMode::Bridge),
        ("private", MacvlanMode::Private),
        ("vepa", MacvlanMode::Vepa),
        ("passthru", MacvlanMode::Passthru),
    ] {
        let rig = Rig::new();
        let keys = json!({"master": "uplink", "mode": word, "mtu": 1400, "ipam": rig.ipam()});
        let config = config("1.0.0", "macvtap", &keys);
        let result = rig.add(&config);
        let made = rig.inside().link("eth0").unwrap();
        let expected = ("macvtap", Some(LinkMode::Macvlan(mode)), 1400, true);
        assert_eq!((made.kind.as_str(), made.mode, made.mtu, made.up), expected);
        rig.after("CHECK", &config, &result);
        rig.after("DEL", &config, &result);
        rig.assert_nothing_left(word);
    }
}

/// Rows: MVL-linkInContainer.
#[test]
fn a_link_on_an_interface_of_the_pod_needs_nothing_of_the_node() {
    for kind in ["macvlan", "macvtap"].into_iter().chain(has_driver("ipvlan").then_some("ipvlan")) {
        let rig = Rig::new();
        let outer = config("1.0.0", "bridge", &json!({"bridge": "br0"}));
        let call = Call { ifname: "net0", ..rig.call() };
        let outer_result = rig.runtime.add(call, &outer).unwrap();
        let keys = |master: &str| {
            let ipam = json!({"type": "static", "addresses": [{"address": "10.1.0.7/24"}]});
            config("1.0.0", kind, &json!({"master": master, "linkInContainer": true, "ipam": ipam}))
        };
        let (code, message) = rig.refusal("ADD", &keys("uplink"));
        assert_eq!(code, 7);
        assert!(message.ends_with("no link named uplink"), "{message}");
        let result = rig.add(&keys("net0"));
        let mut inside = rig.inside();
        let (parent, made) = (inside.link("net0").unwrap(), inside.link("eth0").unwrap());
        assert_eq!((made.kind.as_str(), made.link), (kind, Some(parent.index)));
        rig.after("CHECK", &keys("net0"), &result);
        rig.after("DEL", &keys("net0"), &result);
        assert_eq!(rig.links().0, ["net0"]);
        rig.runtime.after("DEL", call, &outer, &outer_result).unwrap();
        rig.assert_nothing_left(kind);
    }
}

/// Runs if the kernel lacks them; `policy::vlan` and `policy::ipvlan` test them if it has them.
#[test]
fn a_kernel_without_a_driver_is_named_and_nothing_is_left() {
    for kind in ["vlan", "dummy", "ipvlan", "netkit"] {
        if has_driver(kind) {
            continue;
        }
        let rig = Rig::new();
        let (code, message) = rig.refusal("ADD", &rig.config("1.0.0", kind));
        assert_eq!(code, 50, "{message}");
        let expected = format!("the kernel of this node has no driver for links of kind {kind}");
        assert!(message.contains(&expected), "{message}");
        rig.assert_nothing_left(kind);
    }
}

/// Rows: BRG-forceAddress.
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

/// Rows: BRG-hairpinMode, BRG-promiscMode.
#[test]
fn hairpin_and_promiscuous_mode_are_really_set() {
    let rig = Rig::new();
    let hairpin = config("1.0.0", "bridge", &json!({"bridge": "br0", "hairpinMode": true}));
    let of_first = rig.add(&hairpin);
    let port = rig.node().link(&rig.links().1[0]).unwrap();
    assert_eq!(port.hairpin, Some(true));
    assert!(!rig.node().link("br0").unwrap().promiscuous);

    let second = Namespace::new().unwrap();
    let call = Call { container: "c2", netns: second.path(), ..rig.call() };
    let promiscuous = config("1.0.0", "bridge", &json!({"bridge": "br0", "promiscMode": true}));
    let result = rig.runtime.add(call, &promiscuous).unwrap();
    assert!(rig.node().link("br0").unwrap().promiscuous);
    rig.runtime.after("CHECK", call, &promiscuous, &result).unwrap();
    // The bridge is shared: the first pod's network, which does not ask for the mode, has no say in it.
    rig.after("CHECK", &hairpin, &of_first);
}

/// Rows: BRG-mtu, BRG-mac.
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
    // Chained plugins would change the node's own interface, settings and routes.
    let own = Call { ifname: "uplink", ..own };
    let data = rig.dir.path().join("tuning");
    std::fs::create_dir(&data).unwrap();
    let kept = data.join("c1_uplink.json");
    std::fs::write(&kept, json!({"mac": MAC, "mtu": 1400}).to_string()).unwrap();
    let of_uplink = json!({
        "cniVersion": "1.0.0", "interfaces": [{"name": "uplink", "sandbox": rig.runtime.node.path()}],
        "ips": [{"interface": 0, "address": "10.1.0.2/24"}]
    });
    let tuning = json!({"mac": MAC, "mtu": 1300, "sysctl": {"net.core.somaxconn": "77"}, "dataDir": data});
    for (kind, keys) in [("tuning", tuning), ("sbr", json!({})), ("vrf", json!({"vrfname": "blue"}))] {
        let config = with_result(&config("1.0.0", kind, &keys), &of_uplink);
        for verb in ["ADD", "CHECK"] {
            let (code, said) = rig.runtime.refusal(verb, own, &config).unwrap();
            assert_eq!(code, 8, "{kind} {verb}: {said}");
            assert!(said.ends_with("is the node's own network namespace, not a container's"), "{said}");
        }
        // They have left nothing, and the runtime must still call the plugins before them.
        assert_eq!(rig.runtime.run("DEL", own, &config).unwrap().exit, Some(0), "{kind}");
    }
    assert!(kept.exists(), "nothing was given back");
    let setting = rig.runtime.node.run(|| std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap());
    assert_ne!(setting.trim_end(), "77");
    let rules = rig.runtime.node.run(|| Command::new("ip").args(["rule"]).output().unwrap());
    assert!(!String::from_utf8_lossy(&rules.stdout).contains("10.1.0.2"), "{rules:?}");
    let own = Call { ifname: "eth0", ..own };
    assert_eq!((rig.node().links().unwrap(), rig.reserved()), (before, vec![]));
    // CHECK compares with the result only.
    let config = rig.config("1.0.0", "macvlan");
    let mut result = rig.add(&config);
    result["interfaces"][0]["sandbox"] = json!(rig.runtime.node.path());
    let (code, said) = rig.runtime.refusal("CHECK", own, &with_result(&config, &result)).unwrap();
    assert_eq!((code, said.ends_with("interface eth0 is gone from the pod")), (999, true), "{said}");
    rig.after("DEL", &config, &result);
    // The rest of a DEL is still carried out.
    let pool = rig.config("1.0.0", "host-local");
    rig.add(&pool);
    assert_eq!(rig.runtime.refusal("DEL", own, &rig.config("1.0.0", "macvlan")).unwrap().0, 8);
    assert_eq!(rig.reserved(), [""; 0]);
}

/// Like the plugins in Go.
#[test]
fn keys_in_another_letter_case_are_read() {
    let rig = Rig::new();
    let keys = json!({"Master": "uplink", "mODE": "private", "MTU": 1400});
    let config = config("1.0.0", "macvlan", &keys);
    let result = rig.add(&config);
    let made = rig.inside().link("eth0").unwrap();
    assert_eq!((made.mode, made.mtu), (Some(LinkMode::Macvlan(MacvlanMode::Private)), 1400));
    rig.after("CHECK", &config, &result);
    rig.after("DEL", &config, &result);
}

/// Rows: ENV-27.
#[test]
fn malformed_requests_get_their_code_and_name_the_key() {
    let rig = Rig::new();
    let l2 = json!({"master": "uplink"});
    // As containerd writes them.
    let rate = json!({"IngressRate": 1_000_000, "IngressBurst": 80_000});
    let ports = json!([{"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""}]);
    let table = [
        (config("1.0.0", "macvlan", &json!({"mode": "x"})), rig.call(), 7, "key mode: "),
        (
            config("1.0.0", "macvlan", &json!({"linkInContainer": true})),
            rig.call(),
            7,
            "attach eth0 (net): create macvlan eth0 in the pod: there is no default route",
        ),
        (
            config("1.0.0", "macvtap", &json!({"master": "uplink", "bcqueuelen": 5})),
            rig.call(),
            2,
            "key bcqueuelen: 5 ",
        ),
        (
            config("1.0.0", "macvlan", &json!({"master": "uplink", "runtimeConfig": {"bandwidth": rate}})),
            rig.call(),
            7,
            "key bandwidth: needs the dataplane, which only netattachd has; chain the plugin bandwidth",
        ),
        (
            config(
                "1.0.0",
                "macvlan",
                &json!({"master": "uplink", "runtimeConfig": {"portMappings": ports}}),
            ),
            rig.call(),
            2,
            "key capabilities.portMappings: asked for, and not supported by netattach's own macvlan plugin",
        ),
        (
            config(
                "1.0.0",
                "ptp",
                &json!({"ipam": rig.ipam(), "ipMasq": true, "nonMasqueradeBuiltin": true}),
            ),
            rig.call(),
            7,
            "key nonMasqueradeBuiltin: needs netattachd, which keeps the list",
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
