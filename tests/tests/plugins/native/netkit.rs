//! `netkit`: a routed link in either mode. Runs if the kernel has the driver.

use netattach::spec::{LinkMode, NetkitMode, NetkitPolicy, NetkitWays};
use netattach_tests::Namespace;
use netattach_tests::node::ip;
use netattach_tests::runtime::{config, with_result};
use netattach_tests::tools::report_skipped;
use netattach_tests::traffic::{PATIENCE, SILENCE, ping};
use serde_json::{Value, json};

use super::{MAC, Rig, addresses, mac_of, pairs, routes};

const NO_DRIVER: &str = "the kernel has no netkit";

fn has_driver() -> bool {
    ip(&Namespace::new().unwrap(), &["link", "add", "probe", "type", "netkit"]).is_ok()
}

fn netkit(rig: &Rig, keys: &Value) -> Value {
    let mut all = json!({"isDefaultGateway": true, "ipam": rig.ipam()});
    all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    config("1.0.0", "netkit", &all)
}

/// Rows: NKT-modes, NKT-check, NKT-del.
#[test]
fn a_netkit_is_routed_in_either_mode() {
    if !has_driver() {
        return report_skipped("a_netkit_is_routed_in_either_mode", NO_DRIVER);
    }
    let cases = [
        (json!({}), NetkitMode::L3, 1500),
        (json!({"mode": "l3", "mtu": 1400}), NetkitMode::L3, 1400),
        (json!({"mode": "l2", "mac": MAC, "policy": "pass"}), NetkitMode::L2, 1500),
    ];
    for (keys, mode, mtu) in cases {
        let rig = Rig::new();
        let netkit = netkit(&rig, &keys);
        let result = rig.add(&netkit);
        let (mut node, mut inside) = (rig.node(), rig.inside());
        let pod = inside.link("eth0").unwrap();
        let host = node.link(&rig.links().1[0]).unwrap();
        let ways = LinkMode::Netkit(NetkitWays { mode, ..NetkitWays::default() });
        for link in [&pod, &host] {
            let found = (link.kind.as_str(), link.mode, link.mtu, link.up);
            assert_eq!(found, ("netkit", Some(ways), mtu, true), "{keys} {}", link.name);
        }
        let address = if mode == NetkitMode::L2 { MAC } else { "00:00:00:00:00:00" };
        assert_eq!(mac_of(&pod), address);
        assert_eq!(addresses(&mut inside, pod.index), ["10.1.0.2/32", "fd00:1::2/128"]);
        assert_eq!(addresses(&mut node, host.index), ["169.254.1.1/32", "fe80::1/64"]);
        let everything = [
            ("0.0.0.0/0", "169.254.1.1"),
            ("10.1.0.0/24", "169.254.1.1"),
            ("10.9.0.0/16", "169.254.1.1"),
            ("::/0", "fe80::1"),
            ("fd00:1::/64", "fe80::1"),
        ];
        assert_eq!(routes(&mut inside, pod.index), pairs(&everything));
        ip(&rig.runtime.node, &["addr", "add", "fd00:99::1/64", "dev", "uplink", "nodad"]).unwrap();
        for address in ["10.1.0.2", "fd00:1::2"] {
            let answers = ping(&rig.runtime.node, address.parse().unwrap(), PATIENCE).unwrap();
            assert!(answers, "{keys} {address} {:?}", inside.addresses(pod.index).unwrap());
        }
        rig.after("CHECK", &netkit, &result);
        let mut other = netkit.clone();
        other["mode"] = json!(if mode == NetkitMode::L2 { "l3" } else { "l2" });
        other.as_object_mut().unwrap().remove("mac");
        let (_, said) = rig.refusal("CHECK", &with_result(&other, &result));
        assert!(said.ends_with("interface eth0 has another netkit mode or policy"), "{said}");
        for _ in 0..2 {
            rig.after("DEL", &netkit, &result);
            rig.assert_nothing_left("after DEL");
        }
    }
}

/// Without a netkit program the policy is all that decides.
///
/// Rows: NKT-policy.
#[test]
fn a_netkits_policies_drop_what_they_are_for() {
    if !has_driver() {
        return report_skipped("a_netkits_policies_drop_what_they_are_for", NO_DRIVER);
    }
    let (pass, drop) = (NetkitPolicy::Pass, NetkitPolicy::Drop);
    for (policy, peer, policies) in [("drop", "pass", (drop, pass)), ("forward", "blackhole", (pass, drop))] {
        let rig = Rig::new();
        let netkit = netkit(&rig, &json!({"policy": policy, "peerPolicy": peer}));
        let result = rig.add(&netkit);
        let ways = NetkitWays { mode: NetkitMode::L3, policy: policies.0, peer_policy: policies.1 };
        let host = rig.links().1[0].clone();
        let modes = [rig.inside().link("eth0").unwrap().mode, rig.node().link(&host).unwrap().mode];
        assert_eq!(modes, [Some(LinkMode::Netkit(ways)); 2]);
        rig.after("CHECK", &netkit, &result);
        assert!(!ping(&rig.runtime.node, "10.1.0.2".parse().unwrap(), SILENCE).unwrap(), "{policy} {peer}");
        rig.after("DEL", &netkit, &result);
    }
}

/// Rows: NKT-del.
#[test]
fn a_netkit_goes_without_its_namespace_and_a_leftover_is_replaced() {
    if !has_driver() {
        return report_skipped("a_netkit_goes_without_its_namespace", NO_DRIVER);
    }
    let rig = Rig::new();
    let netkit = netkit(&rig, &json!({}));
    rig.add(&netkit);
    let end = rig.links().1[0].clone();
    rig.alone("DEL", &netkit);
    rig.assert_nothing_left("without a result");
    ip(&rig.runtime.node, &["link", "add", &end, "type", "netkit"]).unwrap();
    let result = rig.add(&netkit);
    let gone = netattach_tests::runtime::Call { netns: "/nonexistent/netns".as_ref(), ..rig.call() };
    let answer = rig.runtime.run("DEL", gone, &with_result(&netkit, &result)).unwrap();
    assert_eq!(answer.exit, Some(0), "{answer:?}");
    assert!(!rig.links().1.contains(&end));
    assert_eq!(rig.reserved(), [""; 0]);
}
