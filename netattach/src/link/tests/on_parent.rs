//! Links on a parent: macvlan, macvtap, ipvlan, vlan.

use super::*;
use crate::plan::fixtures;
use crate::plan::undo::{Inverse, inverse};
use crate::step::HookKind;

/// On a parent with programs, address requests by the pod's interface pass only once its Ethernet address is known.
#[test]
fn a_macvlan_is_protected_before_its_address_is_asked_for() {
    let protect = Protect::verified();
    let names = |config: Value, exec: &[String], recorded| -> Vec<String> {
        let mut whole = object(json!({"name": "net", "type": "macvlan"}));
        whole.extend(object(config));
        let args = CniArgs::default();
        let request = Request { protect: Some(&protect), exec, recorded, ..request(&whole, &args) };
        let steps = driver("macvlan").unwrap().plan(&request).unwrap();
        steps.iter().skip(1).map(Step::describe).collect()
    };
    let own = |config: &Value| names(config.clone(), &[], true);
    let (protect, configure) = ("load policy and counters", "configure the pod's interface");
    let asking = json!({"ipam": {"type": "dhcp"}});
    let lease = "lease an address by DHCP in network net";
    assert_eq!(own(&asking), [protect, lease, "load its addresses", configure]);
    // By the daemon of the reference plugin: if requested, and without an agent.
    let executed = [protect, "run plugin dhcp", "load its addresses", configure];
    let by_daemon = json!({"ipam": {"type": "dhcp", "daemonSocketPath": "/run/cni/dhcp.sock"}});
    assert_eq!(own(&by_daemon), executed);
    assert_eq!(names(asking.clone(), &["dhcp".to_owned()], true), executed);
    assert_eq!(names(asking.clone(), &[], false), executed);
    assert_eq!(own(&json!({"ipam": {"type": "other"}}))[1], "run plugin other");
    let mut in_pod = asking;
    in_pod["linkInContainer"] = true.into();
    assert_eq!(own(&in_pod), [lease, protect, configure]);
    assert_eq!(own(&json!({"ipam": pool()})).last_chunk::<2>().unwrap(), &[protect, configure]);
}

#[test]
fn the_node_reaches_what_is_on_its_parent_where_that_can_be() {
    let of = |kind: &str, keys: Value| {
        let mut config = json!({"master": "eth1", "hostAccess": true, "ipam": pool()});
        config.as_object_mut().unwrap().extend(object(keys));
        plan_with(kind, &config, "").map_err(|error| error.to_string())
    };
    let access = [Step::ChooseHostAccess, Step::GiveHostAccess];
    for kind in ["macvlan", "macvtap", "ipvlan"] {
        let steps = of(kind, json!({})).unwrap();
        assert_eq!(steps.last_chunk(), Some(&access), "{kind}");
        assert!(matches!(steps[steps.len() - 3], Step::Configure(_)));
        for absent in [json!(false), json!(null)] {
            let without = of(kind, json!({"hostAccess": absent})).unwrap();
            assert_eq!(without, steps[..steps.len() - 2]);
        }
        // The addresses are released last, not while the node's routes lead to them.
        let (sandbox, planned) = (fixtures::sandbox("c"), fixtures::attachment(kind, steps));
        let inverses = planned.steps.iter().rev().filter_map(|step| inverse(&sandbox, &planned, step, None));
        let inverses: Vec<Inverse<'_>> = inverses.collect();
        let at = |is: fn(&Inverse<'_>) -> bool| inverses.iter().position(is).unwrap();
        let forgotten = at(|it| matches!(it, Inverse::ForgetHostAccess(_)));
        let released = at(|it| matches!(it, Inverse::Release { .. }));
        assert!(forgotten < released && inverses[released].needs(&inverses[forgotten]));
        assert_eq!(inverses.iter().filter(|it| it.needs(&inverses[forgotten])).count(), 1);
        assert!(!inverses.iter().any(|it| it.needs(&inverses[released])));
    }
    for (kind, keys, reason) in [
        ("macvlan", json!({"mode": "private"}), "needs mode bridge: the others keep it apart"),
        ("macvlan", json!({"mode": "vepa"}), "needs mode bridge: the others keep it apart"),
        ("macvlan", json!({"mode": "passthru"}), "needs mode bridge: the others keep it apart"),
        ("ipvlan", json!({"mode": "l3"}), "needs mode l2: the node enters Ethernet addresses"),
        ("ipvlan", json!({"mode": "l3s"}), "needs mode l2: the node enters Ethernet addresses"),
        ("ipvlan", json!({"linkInContainer": true}), "not with linkInContainer: the parent is the pod's"),
        ("macvlan", json!({"linkInContainer": true}), "not with linkInContainer: the parent is the pod's"),
        ("macvlan", json!({"ipam": {}}), "needs ipam: the node's routes lead to addresses"),
    ] {
        assert_eq!(of(kind, keys), Err(format!("key hostAccess: {reason}")));
    }
    let (config, args) =
        (object(json!({"name": "net", "hostAccess": true, "ipam": pool()})), CniArgs::default());
    let plain = Request { recorded: false, ..request(&config, &args) };
    let refused = driver("macvlan").unwrap().plan(&plain).unwrap_err().to_string();
    assert_eq!(refused, "key hostAccess: needs netattachd, which takes back what is made on the node");
}

#[test]
fn a_macvlan_without_any_key_sits_on_the_default_route_in_bridge_mode() {
    let expected = [Step::CreateLink(spec::Link::Macvlan(macvlan())), configure(Style::Subnet, false)];
    assert_eq!(plan("macvlan", json!({})), expected);
    let harmless = json!({"master": "", "mode": "", "mtu": 0, "bcqueuelen": 0, "linkInContainer": false});
    assert_eq!(plan("macvlan", harmless), expected);
    let absent = json!({"master": null, "mode": null, "mtu": null, "bcqueuelen": null, "linkInContainer": null, "linkLocal": null});
    assert_eq!(plan("macvlan", absent), expected);
}

/// Rows: MVL-mode, MVL-mtu, MVL-mac, MVL-bcqueuelen.
#[test]
fn every_key_of_a_macvlan_reaches_its_step() {
    use spec::MacvlanMode::{Bridge, Passthru, Private, Vepa};
    for (word, mode) in [("bridge", Bridge), ("private", Private), ("vepa", Vepa), ("passthru", Passthru)] {
        let mut config =
            json!({"master": "eth1", "mode": word, "mtu": 1400, "bcqueuelen": 5, "ipam": pool()});
        // A macvlan in mode passthru has the address of its parent.
        let mac = (mode != Passthru).then_some(MAC);
        config.as_object_mut().unwrap().extend(mac.map(|mac| ("mac".to_owned(), json!(mac))));
        let expected = [
            Step::CreateLink(spec::Link::Macvlan(spec::Macvlan {
                parent: Some("eth1".into()),
                mode,
                mtu: Some(1400),
                mac: mac.map(|mac| mac.parse().unwrap()),
                broadcast_queue: Some(5),
                ..macvlan()
            })),
            lease("macvlan"),
            configure(Style::Subnet, false),
        ];
        assert_eq!(plan("macvlan", config), expected);
    }
}

/// Rows: MVL-linkInContainer.
#[test]
fn a_parent_in_the_pod_is_not_looked_for_on_the_node() {
    let config = json!({"master": "eth0", "linkInContainer": true, "mtu": 9000, "ipam": pool()});
    for kind in ["macvlan", "macvtap", "ipvlan", "vlan"] {
        assert_eq!(driver(kind).unwrap().wants(&object(config.clone())), []);
        let [Step::CreateLink(link), ..] = &plan(kind, config.clone())[..] else { panic!("{kind}") };
        assert_eq!((link.tie(), link.sharing(), link.kind()), (spec::Tie::InPod, None, kind));
        assert_eq!(HookKind::of_link(link), HookKind::Pod);
    }
    let passthru = object(json!({"mode": "passthru", "linkInContainer": true}));
    assert!(driver("macvlan").unwrap().is_judged(&passthru), "it is judged in the pod");
}

/// Rows: MVL-linkLocal.
#[test]
fn a_macvlan_without_ipv6_has_no_link_local_address_where_its_sources_are_verified() {
    let args = CniArgs::default();
    let v4_alone = |config: Value, protect: Option<&Protect>| {
        let mut whole = object(json!({"name": "net", "type": "macvlan"}));
        whole.extend(object(config));
        match driver("macvlan").unwrap().plan(&Request { protect, ..request(&whole, &args) }).unwrap().pop() {
            Some(Step::Configure(configure)) => configure.v4_alone,
            other => panic!("{other:?}"),
        }
    };
    let protect = Protect::verified();
    assert!(v4_alone(json!({"ipam": pool()}), Some(&protect)));
    assert!(!v4_alone(json!({"ipam": pool(), "linkLocal": true}), Some(&protect)));
    assert!(!v4_alone(json!({"ipam": pool(), "mode": "passthru"}), Some(&protect)));
    assert!(!v4_alone(json!({}), Some(&protect)));
    assert!(!v4_alone(json!({"ipam": pool()}), None));
}

#[test]
fn an_ipvlan_is_made_before_its_addresses_are_leased() {
    let made = |parent: Option<&str>, mode, mtu| {
        let pod_name = "net1".to_owned();
        let ipvlan = spec::Ipvlan {
            pod_name,
            parent: parent.map(str::to_owned),
            mode,
            mtu,
            group: GROUP,
            in_pod: false,
        };
        Step::CreateLink(spec::Link::Ipvlan(ipvlan))
    };
    let end = [lease("ipvlan"), configure(Style::Subnet, false)];
    let steps = plan("ipvlan", json!({"ipam": pool()}));
    assert_eq!(steps, [&[made(None, spec::IpvlanMode::L2, None)], &end[..]].concat());
    for (mode, expected) in
        [("l2", spec::IpvlanMode::L2), ("l3", spec::IpvlanMode::L3), ("l3s", spec::IpvlanMode::L3s)]
    {
        let steps = plan("ipvlan", json!({"master": "eth1", "mode": mode, "mtu": 1400, "ipam": pool()}));
        assert_eq!(steps[0], made(Some("eth1"), expected, Some(1400)));
        let judged = driver("ipvlan").unwrap().is_judged(&object(json!({"mode": mode})));
        assert_eq!(judged, mode != "l3s", "{mode}");
    }
    let written = json!({"step": "create-ipvlan", "pod_name": "net1", "mode": "l2", "group": GROUP});
    assert_eq!(serde_json::to_value(&steps[0]).unwrap(), written);
    assert_eq!(serde_json::from_value::<Step>(written).unwrap(), steps[0]);
}

#[test]
fn a_parents_mtu_is_asked_for_where_it_matters_and_is_the_most() {
    let args = CniArgs::default();
    for (kind, master) in [("macvlan", Some("eth1")), ("macvlan", None), ("ipvlan", Some("eth1"))] {
        let whole =
            object(json!({"name": "net", "type": kind, "master": master, "mtu": 1400, "ipam": pool()}));
        let driver = driver(kind).unwrap();
        let wanted = [Wanted::Parent(master.map(str::to_owned))];
        assert_eq!(driver.wants(&whole), wanted);
        let plan = |mtu| {
            let parent = Parent { name: "eth1".into(), mtu };
            let parents = [(master.map(str::to_owned), parent)].into();
            let facts = Facts { parents, ..Facts::default() };
            driver.plan(&Request { facts: &facts, ..request(&whole, &args) }).map(drop)
        };
        plan(1400).unwrap();
        let error = plan(1399).unwrap_err().to_string();
        assert_eq!(error, "key mtu: 1400 is larger than 1399, the MTU of the parent eth1");
        assert_eq!(driver.wants(&object(json!({"master": "eth1"}))), []);
    }
}
