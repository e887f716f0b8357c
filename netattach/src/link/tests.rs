//! Configurations, with the exact steps or errors that result.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::plan::undo::{Inverse, inverse};
use crate::plan::{AttachmentPlan, Sandbox, fixtures};
use crate::step::{HookKind, Style};

const GROUP: u32 = 77;
static NOTHING_KNOWN: Facts = Facts { parents: BTreeMap::new(), on_bus: BTreeMap::new(), gathered: false };
const MAC: &str = "02:00:00:00:00:07";

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// A request for `net1` that nothing in the kernel has been looked up for.
pub(super) fn request<'a>(config: &'a Map<String, Value>, cni_args: &'a CniArgs) -> Request<'a> {
    Request {
        container_id: "c1",
        ifname: "net1",
        config,
        group: GROUP,
        cni_args,
        exec: &[],
        protect: None,
        facts: &NOTHING_KNOWN,
        recorded: true,
    }
}

fn plan_with(kind: &str, config: &Value, cni_args: &str) -> Result<Vec<Step>, PlanError> {
    let mut whole = object(json!({"cniVersion": "1.1.0", "name": "net", "type": kind}));
    whole.extend(object(config.clone()));
    driver(kind).unwrap().plan(&request(&whole, &CniArgs::parse(cni_args).unwrap()))
}

fn plan(kind: &str, config: Value) -> Vec<Step> {
    plan_with(kind, &config, "").unwrap_or_else(|error| panic!("{config}: {}", Chain(&error)))
}

fn refusal(kind: &str, config: &Value, cni_args: &str) -> (u32, String) {
    let error = CniError::from(plan_with(kind, config, cni_args).expect_err(&config.to_string()));
    (error.code, error.msg)
}

fn pool() -> Value {
    json!({"type": "host-local", "subnet": "10.1.0.0/24"})
}

fn lease(kind: &str) -> Step {
    let config = object(json!({"cniVersion": "1.1.0", "name": "net", "type": kind, "ipam": pool()}));
    Step::Lease(ipam::Kind::HostLocal.parse(&config, &CniArgs::default()).unwrap())
}

fn veth(port: Option<spec::BridgePort>) -> spec::Veth {
    spec::Veth {
        // SHA-256 of "c1", NUL, "net1".
        host_name: "naca4978b4555a3".into(),
        pod_name: "net1".into(),
        mtu: None,
        mac: None,
        group: GROUP,
        port,
    }
}

fn port(bridge: &str) -> spec::BridgePort {
    spec::BridgePort { bridge: bridge.into(), ..spec::BridgePort::default() }
}

fn bridge(name: &str) -> spec::Bridge {
    spec::Bridge { name: name.into(), ..spec::Bridge::default() }
}

fn macvlan() -> spec::Macvlan {
    spec::Macvlan {
        pod_name: "net1".into(),
        parent: None,
        mode: spec::MacvlanMode::Bridge,
        mtu: None,
        mac: None,
        group: GROUP,
        broadcast_queue: None,
        tap: false,
        in_pod: false,
    }
}

fn configure(style: Style, default_route: bool) -> Step {
    Step::Configure(Configure { style, default_route, ..Configure::default() })
}

/// Rows: BRG-bridge.
#[test]
fn a_bridge_without_any_key_is_a_port_of_cni0_without_addresses() {
    let expected = [
        Step::EnsureBridge(bridge("cni0")),
        Step::CreateLink(spec::Link::Veth(veth(Some(port("cni0"))))),
        configure(Style::Subnet, false),
    ];
    assert_eq!(plan("bridge", json!({})), expected);
    // Without addresses it is nobody's gateway, and nothing is translated.
    let gateway = json!({"isGateway": true, "isDefaultGateway": true, "ipMasq": true, "ipam": {}});
    assert_eq!(plan("bridge", gateway), expected);
    let harmless = json!({
        "bridge": "", "mtu": 0, "isGateway": null, "ipMasq": false, "vlan": 0, "vlanTrunk": [], "ipam": {},
        "preserveDefaultVlan": false, "macspoofchk": false, "enabledad": false, "portIsolation": false,
        "disableContainerInterface": false, "dns": {}, "mac": "", "unknown": {"key": 1},
    });
    assert_eq!(plan("bridge", harmless), expected);
}

/// Rows: BRG-bridge, BRG-isGateway, BRG-forceAddress.
#[test]
fn every_key_of_a_bridge_reaches_its_step() {
    let config = json!({
        "bridge": "br7", "isGateway": true, "forceAddress": true, "mtu": 1400, "hairpinMode": true, "mac": MAC,
        "ipam": pool(), "dns": {"nameservers": ["10.1.0.2"]},
    });
    let dns = Dns { nameservers: vec!["10.1.0.2".into()], ..Dns::default() };
    let expected = [
        Step::EnsureBridge(spec::Bridge { mtu: Some(1400), ..bridge("br7") }),
        Step::CreateLink(spec::Link::Veth(spec::Veth {
            mtu: Some(1400),
            mac: Some(MAC.parse().unwrap()),
            ..veth(Some(spec::BridgePort { hairpin: true, ..port("br7") }))
        })),
        lease("bridge"),
        Step::Gateway { bridge: "br7".into(), force: true, beside: false, vlan: None },
        Step::EnsureForwarding,
        Step::Configure(Configure { dns: Some(dns), v4_alone: true, ..Configure::default() }),
    ];
    assert_eq!(plan("bridge", config), expected);
    let promiscuous = plan("bridge", json!({"promiscMode": true}));
    assert_eq!(promiscuous[0], Step::EnsureBridge(spec::Bridge { promiscuous: true, ..bridge("cni0") }));
}

/// Rows: BRG-linkLocal.
#[test]
fn a_default_gateway_is_a_gateway() {
    let expected = |v4_alone| {
        [
            Step::EnsureBridge(bridge("cni0")),
            Step::CreateLink(spec::Link::Veth(veth(Some(port("cni0"))))),
            lease("bridge"),
            Step::Gateway { bridge: "cni0".into(), force: false, beside: false, vlan: None },
            Step::EnsureForwarding,
            Step::Configure(Configure { default_route: true, v4_alone, ..Configure::default() }),
        ]
    };
    assert_eq!(plan("bridge", json!({"isDefaultGateway": true, "ipam": pool()})), expected(true));
    let link_local = json!({"isDefaultGateway": true, "linkLocal": true, "ipam": pool()});
    assert_eq!(plan("bridge", link_local), expected(false));
}

#[test]
fn addresses_from_another_plugin_come_where_our_own_would() {
    let config = json!({"ipam": {"type": "whereabouts", "addresses": [{"address": "10.1.0.7/24"}]}});
    let mut whole = object(json!({"cniVersion": "1.1.0", "name": "net", "type": "macvlan"}));
    whole.extend(object(config.clone()));
    let expected = [
        Step::CreateLink(spec::Link::Macvlan(macvlan())),
        Step::Delegate(Delegate { plugin: "whereabouts".into(), config: whole, role: Role::Ipam }),
        configure(Style::Subnet, false),
    ];
    assert_eq!(plan("macvlan", config), expected);
}

/// On a parent with programs, what is asked of the network by the pod's interface passes only once its address is known.
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
    // By the reference's daemon: where it is asked for, and without an agent.
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
fn an_address_plugin_under_delegation_exec_is_executed() {
    let config = object(json!({"name": "net", "type": "macvlan", "ipam": pool()}));
    let (args, exec) = (CniArgs::default(), ["host-local".to_owned()]);
    let request = Request { exec: &exec, ..request(&config, &args) };
    let delegate = Delegate { plugin: "host-local".into(), config: config.clone(), role: Role::Ipam };
    let driver = driver("macvlan").unwrap();
    assert_eq!(driver.plan(&request).unwrap()[1], Step::Delegate(delegate.clone()));
    assert_eq!(driver.remains(&request)[1], Step::Delegate(delegate));
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
        // The addresses are given back last, and not while the node's routes lead to them.
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
        let config =
            json!({"master": "eth1", "mode": word, "mtu": 1400, "mac": MAC, "bcqueuelen": 5, "ipam": pool()});
        let expected = [
            Step::CreateLink(spec::Link::Macvlan(spec::Macvlan {
                parent: Some("eth1".into()),
                mode,
                mtu: Some(1400),
                mac: Some(MAC.parse().unwrap()),
                broadcast_queue: Some(5),
                ..macvlan()
            })),
            lease("macvlan"),
            configure(Style::Subnet, false),
        ];
        assert_eq!(plan("macvlan", config), expected);
    }
}

/// Rows: VTH-keys.
#[test]
fn a_routed_veth_is_reached_through_the_node() {
    let expected = |default_route| {
        [
            Step::CreateLink(spec::Link::Veth(spec::Veth { mtu: Some(9000), ..veth(None) })),
            lease("veth"),
            Step::EnsureForwarding,
            Step::RouteToPod,
            configure(Style::Routed, default_route),
        ]
    };
    assert_eq!(plan("veth", json!({"mtu": 9000, "ipam": pool()})), expected(false));
    let default = json!({"mtu": 9000, "isDefaultGateway": true, "ipMasq": false, "ipam": pool()});
    assert_eq!(plan("veth", default), expected(true));
}

#[test]
fn a_point_to_point_link_is_a_routed_veth_with_its_subnets_gateway() {
    let made = |mtu| Step::CreateLink(spec::Link::Veth(spec::Veth { mtu, ..veth(None) }));
    let end = |dns| Configure { style: Style::PointToPoint, dns, ..Configure::default() };
    let config = json!({"mtu": 9000, "dns": {"nameservers": []}, "isDefaultGateway": true, "ipam": pool()});
    let expected = [
        made(Some(9000)),
        lease("ptp"),
        Step::EnsureForwarding,
        Step::RouteToPod,
        Step::Configure(end(Some(Dns::default()))),
    ];
    assert_eq!(plan("ptp", config), expected);
    let (code, message) = refusal("ptp", &json!({}), "");
    assert_eq!((code, message.as_str()), (7, "key ipam: missing, and a routed veth needs addresses"));
}

fn ids(first: u16, last: u16) -> (u16, u16) {
    (first, last)
}

#[test]
fn vlans_of_a_bridge_are_those_of_its_port_and_of_its_gateway() {
    let made = |config: Value| match plan("bridge", config).as_slice() {
        [Step::EnsureBridge(bridge), Step::CreateLink(spec::Link::Veth(veth)), rest @ ..] => {
            let gateway = rest.iter().find_map(|step| match step {
                Step::Gateway { vlan, .. } => Some(*vlan),
                _ => None,
            });
            (bridge.vlan_filtering, veth.port.clone().unwrap().vlans, gateway)
        }
        other => panic!("{other:?}"),
    };
    let vlans = |native, tagged: &[(u16, u16)], keeps_default| {
        Some(spec::PortVlans { native, tagged: tagged.to_vec(), keeps_default })
    };
    let gateway = json!({"vlan": 100, "isGateway": true, "ipam": pool()});
    assert_eq!(made(gateway), (true, vlans(Some(100), &[], false), Some(Some(100))));
    let trunk = json!([{"id": 9}, {"minID": 5, "maxID": 7, "id": 8}, null, {"id": 20}, {}]);
    let expected = (true, vlans(Some(1), &[ids(5, 9), ids(20, 20)], true), None);
    assert_eq!(made(json!({"vlanTrunk": trunk, "preserveDefaultVlan": true})), expected);
    let both = json!({"vlan": 6, "vlanTrunk": [{"minID": 5, "maxID": 7}], "preserveDefaultVlan": false});
    assert_eq!(made(both), (true, vlans(Some(6), &[ids(5, 5), ids(7, 7)], false), None));
    let trunk_alone = json!({"vlanTrunk": [{"id": 6}], "isGateway": true, "ipam": pool()});
    assert_eq!(made(trunk_alone).2, Some(None), "the bridge's own");
    assert_eq!(made(json!({"preserveDefaultVlan": false, "vlanTrunk": null})), (false, None, None));
}

/// Rows: BRG-vlanTrunk.
#[test]
fn vlans_that_are_none_are_refused_by_name() {
    let table = [
        (json!({"vlan": 4095}), "key vlan: 4095 is not a VLAN id from 1 to 4094, nor 0 for none"),
        (json!({"vlan": -1}), "key vlan: -1 is not a VLAN id from 1 to 4094, nor 0 for none"),
        (json!({"vlanTrunk": [{"id": 0}]}), "key vlanTrunk: element 0: id 0 is not a VLAN id from 1 to 4094"),
        (
            json!({"vlanTrunk": [{"id": 1}, {"minID": 0, "maxID": 9}]}),
            "key vlanTrunk: element 1: minID 0 is not a VLAN id from 1 to 4094",
        ),
        (
            json!({"vlanTrunk": [{"minID": 1, "maxID": 4095}]}),
            "key vlanTrunk: element 0: maxID 4095 is not a VLAN id from 1 to 4094",
        ),
        (
            json!({"vlanTrunk": [{"minID": 9, "maxID": 7}]}),
            "key vlanTrunk: element 0: minID 9 is greater than maxID 7",
        ),
        (json!({"vlanTrunk": [{"minID": 9}]}), "key vlanTrunk: element 0: minID needs maxID"),
        (json!({"vlanTrunk": [{"maxID": 9}]}), "key vlanTrunk: element 0: maxID needs minID"),
        (
            json!({"bridge": "abcdefghijklm", "vlan": 100, "isGateway": true, "ipam": pool()}),
            "key bridge: \"abcdefghijklm\" is too long for a gateway: the device of its VLAN would be abcdefghijklm.100, and a name has 15 bytes",
        ),
        (
            json!({"disableContainerInterface": true, "ipam": pool()}),
            "key disableContainerInterface: an interface that stays down has no use for ipam",
        ),
    ];
    for (config, expected) in table {
        assert_eq!(refusal("bridge", &config, ""), (7, expected.to_owned()));
    }
}

#[test]
fn isolation_duplicates_and_a_disabled_interface_reach_their_steps() {
    let steps = plan("bridge", json!({"portIsolation": true, "enabledad": true}));
    let isolated = spec::BridgePort { isolated: true, ..port("cni0") };
    let expected = [
        Step::EnsureBridge(bridge("cni0")),
        Step::CreateLink(spec::Link::Veth(veth(Some(isolated)))),
        Step::Configure(Configure { detect_duplicates: true, ..Configure::default() }),
    ];
    assert_eq!(steps, expected);
    let down = plan("bridge", json!({"disableContainerInterface": true}));
    let expected = Step::Configure(Configure { down: true, ..Configure::default() });
    assert_eq!(down.last(), Some(&expected));
}

/// Rows: PTP-ipMasq.
#[test]
fn masquerade_of_a_point_to_point_link_is_by_its_end_on_the_node() {
    let args = CniArgs::default();
    let protect = Protect::verified();
    let whole = object(json!({"name": "net", "type": "ptp", "ipMasq": true, "ipam": pool()}));
    let request = Request { protect: Some(&protect), ..request(&whole, &args) };
    let steps = driver("ptp").unwrap().plan(&request).unwrap();
    let masquerade = crate::step::Translate {
        device: "naca4978b4555a3".into(),
        bridged: false,
        masquerade: Some(Vec::new()),
        ..crate::step::Translate::default()
    };
    assert!(steps.contains(&Step::Translate(masquerade.clone())), "{steps:?}");
    // Without an agent too.
    assert!(plan("ptp", json!({"ipMasq": true, "ipam": pool()})).contains(&Step::Translate(masquerade)));
}

/// Rows: VLN-vlanProto, DMY-keys.
#[test]
fn a_vlan_and_a_dummy_are_made_in_the_pod() {
    let tag = |id, service| spec::VlanTag { id, service };
    let made = |parent: &str, tag| spec::Vlan {
        pod_name: "net1".into(),
        parent: parent.into(),
        tag,
        mtu: None,
        mac: None,
        group: GROUP,
        in_pod: false,
    };
    let vlan = |made: spec::Vlan| Step::CreateLink(spec::Link::Vlan(made));
    let expected = [vlan(made("eth1", tag(5, false))), lease("vlan"), configure(Style::Subnet, false)];
    assert_eq!(plan("vlan", json!({"master": "eth1", "vlanId": 5, "ipam": pool()})), expected);
    let outer = plan("vlan", json!({"master": "eth1", "vlanId": 6, "vlanProto": "802.1AD"}));
    assert_eq!(outer, [vlan(made("eth1", tag(6, true))), configure(Style::Subnet, false)]);
    let inside = plan("vlan", json!({"master": "eth0", "vlanId": 7, "linkInContainer": true}));
    assert_eq!(inside[0], vlan(spec::Vlan { in_pod: true, ..made("eth0", tag(7, false)) }));
    for (config, expected) in [
        (json!({"vlanId": 5}), "key master: missing; name the interface whose VLAN it is"),
        (json!({"master": "eth1", "vlanId": 4095}), "key vlanId: 4095 is not between 0 and 4094"),
        (json!({"master": "eth1", "vlanId": -1}), "key vlanId: -1 is not between 0 and 4094"),
        (
            json!({"master": "eth1", "vlanProto": "qinq"}),
            "key vlanProto: \"qinq\" is neither 802.1q nor 802.1ad",
        ),
        (
            json!({"master": "net1", "vlanId": 5, "linkInContainer": true}),
            "key master: \"net1\" is the interface that is to be made",
        ),
    ] {
        assert_eq!(refusal("vlan", &config, ""), (7, expected.to_owned()));
    }
    let dummy = spec::Dummy {
        pod_name: "net1".into(),
        mtu: Some(1400),
        mac: Some(MAC.parse().unwrap()),
        group: GROUP,
    };
    let expected =
        [Step::CreateLink(spec::Link::Dummy(dummy)), lease("dummy"), configure(Style::Subnet, false)];
    assert_eq!(plan("dummy", json!({"mtu": 1400, "mac": MAC, "ipam": pool()})), expected);
    assert_eq!(
        refusal("dummy", &json!({}), ""),
        (7, "key ipam: missing, and a dummy needs addresses".into())
    );
}

#[test]
fn a_tap_is_made_in_the_pod_and_a_bridges_port_sends_for_others() {
    let tap = |access, bridge: Option<&str>| spec::Tap {
        pod_name: "net1".into(),
        mtu: None,
        mac: None,
        group: GROUP,
        access,
        bridge: bridge.map(Into::into),
    };
    let all = spec::TapAccess { owner: Some(0), group: Some(107), multi_queue: true };
    let full = spec::Tap { mtu: Some(1400), mac: Some(MAC.parse().unwrap()), ..tap(all, Some("br0")) };
    let made = |tap| Step::CreateLink(spec::Link::Tap(tap));
    let keys = json!({"mtu": 1400, "mac": MAC, "owner": 0, "group": 107, "multiQueue": true, "bridge": "br0",
        "selinuxContext": "", "ipam": pool()});
    assert_eq!(plan("tap", keys), [made(full), lease("tap"), configure(Style::Subnet, false)]);
    let none = json!({"mtu": 0, "owner": null, "group": null, "multiQueue": null, "bridge": "", "mac": ""});
    let expected = [made(tap(spec::TapAccess::default(), None)), configure(Style::Subnet, false)];
    assert_eq!(plan("tap", none), expected);
    for (config, expected) in [
        (json!({"bridge": "net1"}), "key bridge: \"net1\" is the interface that is to be made"),
        (
            json!({"bridge": "br0", "sourceCheck": "full"}),
            "key sourceCheck: without effect: the tap is a bridge's port, which sends for others",
        ),
        (
            json!({"bridge": "br0", "sourceCheck": "mac"}),
            "key sourceCheck: without effect: the tap is a bridge's port, which sends for others",
        ),
        (
            json!({"bridge": "br0", "allowedAddresses": ["10.1.0.9"]}),
            "key allowedAddresses: without effect: the tap is a bridge's port, which sends for others",
        ),
        (json!({"owner": u32::MAX}), "key owner: 4294967295 is nobody's number"),
        (json!({"group": u32::MAX}), "key group: 4294967295 is nobody's number"),
        (json!({"mtu": 60}), "key mtu: 60 is not between 68 and 65535"),
    ] {
        assert_eq!(refusal("tap", &config, ""), (7, expected.to_owned()));
    }
    let checked = |keys: Value| {
        let protect = Protect::verified();
        let (mut config, args) = (object(keys), CniArgs::default());
        config.insert("name".into(), "net".into());
        let steps =
            driver("tap").unwrap().plan(&Request { protect: Some(&protect), ..request(&config, &args) });
        steps.unwrap().into_iter().find_map(|step| match step {
            Step::Protect(protect) => Some((protect.check_mac, protect.check_addresses, protect.fast_path)),
            _ => None,
        })
    };
    assert_eq!(checked(json!({"ipam": pool()})), Some((true, true, true)));
    assert_eq!(checked(json!({"ipam": pool(), "bridge": "br0"})), Some((false, false, true)));
    let off = json!({"ipam": pool(), "bridge": "br0", "sourceCheck": "off", "allowedAddresses": []});
    assert_eq!(checked(off), Some((false, false, false)));
}

#[test]
fn a_netkit_that_drops_what_goes_to_its_pod_is_not_on_the_fast_path() {
    let on_fast_path = |keys: Value| {
        let (protect, args) = (Protect::verified(), CniArgs::default());
        let mut config = object(keys);
        config.extend(object(json!({"name": "net", "ipam": pool()})));
        let steps =
            driver("netkit").unwrap().plan(&Request { protect: Some(&protect), ..request(&config, &args) });
        steps.unwrap().into_iter().find_map(|step| match step {
            Step::Protect(protect) => Some(protect.fast_path),
            _ => None,
        })
    };
    assert_eq!(on_fast_path(json!({})), Some(true));
    assert_eq!(on_fast_path(json!({"policy": "drop"})), Some(false));
    // What the pod sends has met this one before it is redirected.
    assert_eq!(on_fast_path(json!({"peerPolicy": "drop"})), Some(true));
}

#[test]
fn a_netkit_is_routed_and_has_the_kernels_defaults() {
    let netkit = |ways| spec::Netkit {
        host_name: host_name("c1", "net1"),
        pod_name: "net1".into(),
        mtu: None,
        mac: None,
        group: GROUP,
        ways,
    };
    let steps = |made, style| {
        let create = Step::CreateLink(spec::Link::Netkit(made));
        vec![
            create,
            lease("netkit"),
            Step::EnsureForwarding,
            Step::RouteToPod,
            configure(Style::Routed, style),
        ]
    };
    let usual = spec::NetkitWays {
        mode: spec::NetkitMode::L3,
        policy: spec::NetkitPolicy::Pass,
        peer_policy: spec::NetkitPolicy::Pass,
    };
    assert_eq!(plan("netkit", json!({"ipam": pool()})), steps(netkit(usual), false));
    let ways = spec::NetkitWays {
        mode: spec::NetkitMode::L2,
        policy: spec::NetkitPolicy::Drop,
        peer_policy: spec::NetkitPolicy::Drop,
    };
    let full = spec::Netkit { mtu: Some(1400), mac: Some(MAC.parse().unwrap()), ..netkit(ways) };
    let keys = json!({"mode": "l2", "policy": "drop", "peerPolicy": "blackhole", "mtu": 1400, "mac": MAC,
        "isDefaultGateway": true, "ipam": pool()});
    assert_eq!(plan("netkit", keys), steps(full, true));
    for (config, expected) in [
        (json!({}), "key ipam: missing, and a netkit needs addresses"),
        (json!({"mode": "l4", "ipam": pool()}), "key mode: \"l4\" is not one of l2, l3"),
        (json!({"policy": "next", "ipam": pool()}), "key policy: \"next\" is not one of pass, drop"),
        (json!({"peerPolicy": "x", "ipam": pool()}), "key peerPolicy: \"x\" is not one of pass, drop"),
        (
            json!({"mac": MAC, "ipam": pool()}),
            "key mac: a netkit in mode l3 has no Ethernet address; use mode l2",
        ),
    ] {
        assert_eq!(refusal("netkit", &config, ""), (7, expected.to_owned()));
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

#[test]
fn loopback_is_raised_whatever_the_configuration_says() {
    assert_eq!(plan("loopback", json!({"ipam": 7, "mtu": "x"})), [Step::RaiseLoopback]);
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

/// Rows: BRG-macspoofchk.
#[test]
fn with_a_dataplane_an_attachment_is_protected_before_it_is_configured() {
    let protect = Protect::verified();
    let args = CniArgs::default();
    for (config, check_addresses) in
        [(json!({}), false), (json!({"ipam": pool(), "macspoofchk": true}), true)]
    {
        let mut whole = object(json!({"name": "net", "type": "bridge"}));
        whole.extend(object(config));
        let request = Request { protect: Some(&protect), ..request(&whole, &args) };
        let steps = driver("bridge").unwrap().plan(&request).unwrap();
        let (last, before) = steps.split_last().unwrap();
        assert_eq!(*last, configure(Style::Subnet, false));
        assert_eq!(before.last(), Some(&Step::Protect(Protect { check_addresses, ..protect.clone() })));
    }
}

/// Rows: BRG-macspoofchk.
#[test]
fn without_an_agent_the_sender_is_restricted_where_that_is_asked_for_before_the_interface_comes_up() {
    let args = CniArgs::default();
    let plain = |config: Value| {
        let mut whole = object(json!({"name": "net", "type": "bridge"}));
        whole.extend(object(config));
        let driver = driver("bridge").unwrap();
        let request = Request { recorded: false, ..request(&whole, &args) };
        (driver.plan(&request).unwrap(), driver.remains(&request))
    };
    let (steps, _) = plain(json!({"macspoofchk": true}));
    let link = Step::CreateLink(spec::Link::Veth(veth(Some(port("cni0")))));
    let bridge = Step::EnsureBridge(bridge("cni0"));
    assert_eq!(steps, [bridge, link, Step::RestrictSender, configure(Style::Subnet, false)]);
    let (steps, _) = plain(json!({"macspoofchk": true, "ipam": {"type": "dhcp"}}));
    assert!(
        matches!(&steps[2..], [Step::RestrictSender, asks, Step::Configure(_)] if asks.asks_the_network()),
        "it comes up to be asked for its address: {steps:?}"
    );
    for config in [json!({}), json!({"macspoofchk": false}), json!({"macspoofchk": null})] {
        let (steps, remains) = plain(config);
        assert!(!steps.contains(&Step::RestrictSender), "{steps:?}");
        assert!(remains.contains(&Step::RestrictSender), "{remains:?}");
    }
}

/// Rows: REQ-17.
#[test]
fn the_last_of_four_places_gives_the_ethernet_address() {
    let of = |last: u8| Mac([2, 0, 0, 0, 0, last]);
    let all = json!({
        "mac": of(1), "args": {"cni": {"mac": of(3)}}, "runtimeConfig": {"mac": of(4)},
    });
    let (no_runtime, mut only_file) = (
        json!({"mac": of(1), "args": {"cni": {"mac": of(3)}}, "runtimeConfig": {}}),
        json!({"mac": of(1), "args": {"cni": {}}, "runtimeConfig": {"mac": ""}}),
    );
    let chosen = |config: &Value, cni_args: &str| match &plan_with("macvlan", config, cni_args).unwrap()[0] {
        Step::CreateLink(spec::Link::Macvlan(macvlan)) => macvlan.mac,
        other => panic!("{other:?}"),
    };
    let arg = format!("IgnoreUnknown=1;MAC={}", of(2));
    assert_eq!(chosen(&all, &arg), Some(of(4)));
    assert_eq!(chosen(&no_runtime, &arg), Some(of(3)));
    assert_eq!(chosen(&only_file, &arg), Some(of(2)));
    assert_eq!(chosen(&only_file, ""), Some(of(1)));
    only_file["mac"] = Value::Null;
    assert_eq!(chosen(&only_file, ""), None);
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

#[test]
fn dns_of_the_configuration_counts_when_a_member_is_set() {
    let dns_of = |dns: Value| match plan("macvlan", json!({"dns": dns})).pop() {
        Some(Step::Configure(configure)) => configure.dns,
        other => panic!("{other:?}"),
    };
    for unset in [json!(null), json!({}), json!({"domain": ""}), json!({"search": null, "x": 1})] {
        assert_eq!(dns_of(unset.clone()), None, "{unset}");
    }
    assert_eq!(dns_of(json!({"search": []})), Some(Dns::default()));
    let dns = Dns { domain: Some("example.org".into()), options: vec!["ndots:2".into()], ..Dns::default() };
    assert_eq!(dns_of(json!({"domain": "example.org", "options": ["ndots:2"]})), Some(dns));
}

#[test]
fn each_list_of_dns_has_as_many_entries_as_there_may_be_and_no_more() {
    let most = budget::DNS.most;
    for key in ["nameservers", "search", "options"] {
        let config = |count: usize| json!({"dns": {key: vec!["a"; count]}});
        let steps = plan("macvlan", config(most));
        let Some(Step::Configure(Configure { dns: Some(dns), .. })) = steps.last() else {
            panic!("{steps:?}")
        };
        let lists = [("nameservers", &dns.nameservers), ("search", &dns.search), ("options", &dns.options)];
        for (name, list) in lists {
            assert_eq!(*list, if name == key { vec!["a"; most] } else { vec![] }, "{key}: {name}");
        }
        let refused = format!("dns: {} entries, and at most {most} are allowed", most + 1);
        assert_eq!(refusal("macvlan", &config(most + 1), ""), (code::INVALID_CONFIG, refused));
    }
}

/// Rows: MVL-macvtap, BRG-fastPath.
#[test]
fn what_is_not_carried_out_is_refused_with_key_and_value() {
    let own = |kind: &str, key: &str, value: &str| {
        let message = format!(
            "key {key}: {value} is not supported by netattach's own {kind} plugin; an agent executes another one that is listed under delegation.exec"
        );
        (code::UNSUPPORTED_FIELD, message)
    };
    for (kind, key, value) in [
        ("macvtap", "bcqueuelen", json!(5)),
        ("dummy", "fastPath", json!(true)),
        ("tap", "fastPath", json!(true)),
        ("tap", "selinuxContext", json!("a:b:c:d")),
        ("ipvlan", "fastPath", json!(true)),
    ] {
        let mut config = json!({"ipam": pool()});
        config[key] = value.clone();
        assert_eq!(refusal(kind, &config, ""), own(kind, key, &value.to_string()));
    }
}

/// Rows: BRG-macspoofchk.
#[test]
fn what_means_nothing_is_refused_with_its_key() {
    let table = [
        (
            "bridge",
            json!({"hairpinMode": true, "promiscMode": true}),
            "key hairpinMode: cannot set hairpin mode and promiscuous mode at the same time",
        ),
        ("bridge", json!({"bridge": 7}), "key bridge: invalid type: integer `7`, expected a string"),
        (
            "bridge",
            json!({"bridge": "a/b"}),
            "key bridge: \"a/b\": interface name contains / or : or white space",
        ),
        (
            "bridge",
            json!({"isGateway": "yes"}),
            "key isGateway: invalid type: string \"yes\", expected a boolean",
        ),
        (
            "bridge",
            json!({"macspoofchk": true}),
            "key macspoofchk: true needs the dataplane, which this agent is without",
        ),
        ("bridge", json!({"mtu": 67}), "key mtu: 67 is not between 68 and 65535"),
        ("macvlan", json!({"mtu": 65536}), "key mtu: 65536 is not between 68 and 65535"),
        ("veth", json!({"mtu": -1, "ipam": pool()}), "key mtu: invalid value: integer `-1`, expected u32"),
        (
            "macvlan",
            json!({"mode": "VEPA"}),
            "key mode: \"VEPA\" is not one of bridge, private, vepa, passthru",
        ),
        ("macvlan", json!({"master": ["eth1"]}), "key master: invalid type: sequence, expected a string"),
        ("macvlan", json!({"bcqueuelen": "9"}), "key bcqueuelen: invalid type: string \"9\", expected u32"),
        ("veth", json!({}), "key ipam: missing, and a routed veth needs addresses"),
        ("ipvlan", json!({}), "key ipam: missing, and an ipvlan needs addresses"),
        (
            "ipvlan",
            json!({"mode": "bridge", "ipam": pool()}),
            "key mode: \"bridge\" is not one of l2, l3, l3s",
        ),
        ("ipvlan", json!({"mac": MAC, "ipam": pool()}), "key mac: an ipvlan has the address of its parent"),
        ("ipvlan", json!({"mtu": 67, "ipam": pool()}), "key mtu: 67 is not between 68 and 65535"),
        (
            "macvlan",
            json!({"ipam": {"subnet": "10.1.0.0/24"}}),
            "key ipam.type: missing; name the address management plugin, such as host-local",
        ),
        (
            "macvlan",
            json!({"ipam": {"type": "host-local"}}),
            "key ipam: no ranges: one of ipam.subnet, ipam.ranges, runtimeConfig.ipRanges is needed",
        ),
        (
            "macvlan",
            json!({"dns": {"search": "example.org"}}),
            "key dns.search: invalid type: string \"example.org\", expected a sequence",
        ),
        (
            "macvlan",
            json!({"mac": "01:00:00:00:00:01"}),
            "key mac: \"01:00:00:00:00:01\" is not a unicast Ethernet address such as 02:00:00:00:00:01",
        ),
        (
            "bridge",
            json!({"runtimeConfig": {"mac": "00:00:00:00:00:00"}}),
            "key runtimeConfig.mac: \"00:00:00:00:00:00\" is not a unicast Ethernet address such as 02:00:00:00:00:01",
        ),
        (
            "bridge",
            json!({"args": {"cni": {"mac": 7}}}),
            "key args.cni.mac: 7 is not a unicast Ethernet address such as 02:00:00:00:00:01",
        ),
    ];
    for (kind, config, message) in table {
        assert_eq!(refusal(kind, &config, ""), (code::INVALID_CONFIG, message.to_owned()), "{kind} {config}");
    }
    let (code, message) = refusal("veth", &json!({"ipam": pool()}), "MAC=x");
    assert_eq!(
        (code, message.as_str()),
        (7, "key MAC in CNI_ARGS: \"x\" is not a unicast Ethernet address such as 02:00:00:00:00:01")
    );
}

#[test]
fn every_kind_has_a_driver_and_no_other_name_has() {
    let expected = [
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
    ];
    assert_eq!(kinds().collect::<Vec<_>>(), expected);
    assert!(kinds().all(|kind| driver(kind).is_some_and(|driver| driver.kind() == kind)));
    assert!(["", "host-local", "tun", "Bridge"].iter().all(|name| driver(name).is_none()));
}

#[test]
fn names_on_the_node_differ_by_container_and_interface_and_fit() {
    let names = [("c1", "net1"), ("c1", "net2"), ("c2", "net1"), ("c1n", "et1")].map(|(id, ifname)| {
        let name = host_name(id, ifname);
        assert_eq!(name.len(), 15);
        name
    });
    assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
}

/// A configuration of a driver in which each key is absent, valid, or wrong.
fn configuration() -> impl Strategy<Value = (&'static str, Map<String, Value>)> {
    let values = [
        ("bridge", vec![json!("br0"), json!(""), json!(7)]),
        ("isGateway", vec![json!(true), json!(false), json!("x")]),
        ("isDefaultGateway", vec![json!(true), json!(null)]),
        ("hairpinMode", vec![json!(true)]),
        ("promiscMode", vec![json!(true)]),
        ("mtu", vec![json!(1400), json!(0), json!(7), json!("x")]),
        ("master", vec![json!("eth0"), json!("")]),
        ("mode", vec![json!("vepa"), json!("x")]),
        ("mac", vec![json!(MAC), json!("x")]),
        ("vlan", vec![json!(0), json!(7)]),
        ("ipMasq", vec![json!(true)]),
        (
            "ipam",
            vec![
                pool(),
                json!({"type": "host-local", "dataDir": "/run/leases", "subnet": "10.1.0.0/24"}),
                json!({"type": "host-local", "subnet": "10.1.0.0/31"}),
                json!({"type": "host-local"}),
                json!({"type": "static", "addresses": [{"address": "10.1.0.7/24"}]}),
                json!({"type": "static"}),
                json!({"type": "dhcp"}),
                json!({"type": ""}),
                json!({}),
                json!(7),
            ],
        ),
    ];
    let keys: Vec<_> = values
        .into_iter()
        .map(|(key, values)| {
            prop::option::of(prop::sample::select(values))
                .prop_map(move |value| value.map(|value| (key.to_owned(), value)))
        })
        .collect();
    (prop::sample::select(kinds().collect::<Vec<_>>()), keys).prop_map(|(kind, keys)| {
        let mut config = object(json!({"cniVersion": "1.1.0", "name": "net", "type": kind}));
        config.extend(keys.into_iter().flatten());
        (kind, config)
    })
}

/// Whether a step leaves something that belongs to the attachment and does not disappear with its link.
fn leaves_its_own(step: &Step) -> bool {
    match step {
        Step::Lease(config) => config.is_kept(),
        Step::CreateLink(_)
        | Step::ClaimDevice(_)
        | Step::Delegate(_)
        | Step::Remember(_)
        | Step::Protect(_)
        | Step::Translate(_)
        | Step::Admit(_)
        | Step::RestrictSender
        | Step::PrepareDeviceInfo(_)
        | Step::NoteProperties(_)
        | Step::ChooseTables(_)
        | Step::ChooseVrf(_)
        | Step::ChooseHostAccess
        | Step::RouteBySource => true,
        Step::TakeMade(_)
        | Step::EnsureBridge(_)
        | Step::ProtectAddresses
        | Step::GiveHostAccess
        | Step::SetDevice(_)
        | Step::MoveDevice
        | Step::RaiseLoopback
        | Step::FindReach
        | Step::FindDevice
        | Step::Gateway { .. }
        | Step::EnsureForwarding
        | Step::RouteToPod
        | Step::Configure(_)
        | Step::Tune(_)
        | Step::UseTables(_)
        | Step::JoinVrf(_)
        | Step::ReadDeviceInfo(_)
        | Step::MoveDefaultRoutes { .. } => false,
    }
}

/// Whether whoever keeps no record takes it back whether or not there was anything: it cannot be told from the configuration.
fn is_asked_for_anyway(step: &Step) -> bool {
    matches!(step, Step::Translate(_) | Step::RestrictSender)
}

/// The inverses of the steps, with only the part of a lease's configuration that releasing reads.
fn inverses(sandbox: &Sandbox, attachment: &AttachmentPlan) -> Vec<String> {
    let steps = attachment.steps.iter().filter(|step| !is_asked_for_anyway(step));
    let inverses = steps.filter_map(|step| inverse(sandbox, attachment, step, None));
    let text = |inverse| match inverse {
        Inverse::Release { config, owner } => format!("release {:?} of {owner}", config.pool()),
        other => format!("{other:?}"),
    };
    inverses.map(text).collect()
}

proptest! {
    #[test]
    fn what_a_plan_leaves_behind_is_taken_back_with_and_without_a_record((kind, config) in configuration()) {
        let args = CniArgs::default();
        let protect = Protect::verified();
        let (driver, sandbox) = (driver(kind).unwrap(), Sandbox { ifname: "net1".into(), ..fixtures::sandbox("c1") });
        // DEL can derive the remains from any configuration.
        let remains = fixtures::attachment(kind, driver.remains(&request(&config, &args)));

        if let Ok(steps) = driver.plan(&request(&config, &args)) {
            let planned = fixtures::attachment(kind, steps);
            prop_assert_eq!(inverses(&sandbox, &planned), inverses(&sandbox, &remains));
            for step in planned.steps.iter().filter(|step| is_asked_for_anyway(step)) {
                let same = |other: &Step| std::mem::discriminant(other) == std::mem::discriminant(step);
                prop_assert!(remains.steps.iter().any(same), "{step:?}");
            }
        }
        if let Ok(steps) = driver.plan(&Request { protect: Some(&protect), ..request(&config, &args) }) {
            let planned = fixtures::attachment(kind, steps);
            for step in &planned.steps {
                prop_assert_eq!(inverse(&sandbox, &planned, step, None).is_some(), leaves_its_own(step));
            }
        }
    }
}
