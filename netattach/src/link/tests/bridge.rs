//! Ports of a bridge.

use super::*;

/// Rows: BRG-bridge.
#[test]
fn a_bridge_without_any_key_is_a_port_of_cni0_without_addresses() {
    let expected = [
        Step::EnsureBridge(bridge("cni0")),
        Step::CreateLink(spec::Link::Veth(veth(Some(port("cni0"))))),
        configure(Style::Subnet, false),
    ];
    assert_eq!(plan("bridge", json!({})), expected);
    // Without addresses the bridge is no gateway, and nothing is translated.
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

/// Rows: BRG-chosen.
#[test]
fn behind_a_gateway_a_pod_chooses_in_the_subnets_of_the_author_alone() {
    let own = || json!([{"address": "10.1.0.7/24", "gateway": "10.1.0.254"}]);
    let asked = |own: Value, ips: &[&str]| {
        let ipam = json!({"type": "static", "addresses": own});
        json!({"ipam": ipam, "runtimeConfig": {"ips": ips}})
    };
    let with = |key: &str, mut config: Value| {
        config[key] = json!(true);
        config
    };
    let steps = plan("bridge", with("isGateway", asked(own(), &["10.1.0.8/24"])));
    let leased = steps.iter().find_map(|step| match step {
        Step::Lease(ipam::Config::Static(config)) => Some(config.addresses.clone()),
        _ => None,
    });
    let gateway = Some([10, 1, 0, 254].into());
    let expected = ipam::LeasedAddress { address: "10.1.0.8/24".parse().unwrap(), gateway };
    assert_eq!(leased, Some(vec![expected]));
    let gateways = Step::Gateway { bridge: "cni0".into(), force: false, beside: false, vlan: None };
    assert!(steps.contains(&gateways));

    let elsewhere = ["192.168.1.77/25"];
    let why = "192.168.1.77/25 is asked for, and no address of ipam.addresses is in that subnet: the pod would choose an address \
         and a route of the node; ipam.addresses names the subnets that pods may choose in";
    for key in ["isGateway", "isDefaultGateway"] {
        for own in [own(), json!([])] {
            let refused = refusal("bridge", &with(key, asked(own, &elsewhere)), "");
            assert_eq!(refused, (7, format!("key {key}: {why}")));
        }
    }
    let by_args = with("isGateway", asked(own(), &[]));
    assert_eq!(refusal("bridge", &by_args, "IP=192.168.1.77/25"), (7, format!("key isGateway: {why}")));
    let is_gateways = refusal("bridge", &with("isGateway", asked(own(), &["10.1.0.254/24"])), "");
    let told = "key isGateway: 10.1.0.254 is asked for, but is the gateway's address, which is the node's";
    assert_eq!(is_gateways, (7, told.to_owned()));
    // Without a gateway no address of the node is chosen.
    assert!(!plan("bridge", asked(json!([]), &elsewhere)).contains(&gateways));

    // The same plugin, executed, has no other addresses and gets no gateway.
    let (args, exec) = (CniArgs::default(), ["static".to_owned()]);
    let executed = |own: Value, ips: &[&str]| {
        let mut whole = object(json!({"cniVersion": "1.1.0", "name": "net", "type": "bridge"}));
        whole.extend(object(with("isGateway", asked(own, ips))));
        let planned = driver("bridge").unwrap().plan(&Request { exec: &exec, ..request(&whole, &args) });
        planned
            .map(|steps| steps.iter().any(|step| matches!(step, Step::Delegate(_))))
            .map_err(|error| CniError::from(error).msg)
    };
    let first = || json!([{"address": "10.1.0.7/24", "gateway": "10.1.0.1"}]);
    assert_eq!(executed(own(), &[]), Ok(true));
    assert_eq!(executed(first(), &["10.1.0.8/24"]), Ok(true));
    assert_eq!(executed(own(), &elsewhere), Err(format!("key isGateway: {why}")));
    for address in ["10.1.0.1/24", "10.1.0.8/24"] {
        let told = format!(
            "key isGateway: {address} is asked for, and the executed plugin cannot be told its gateway, 10.1.0.254: have the agent \
             carry static out, or have ipam.addresses name the first address of the subnet as the gateway"
        );
        assert_eq!(executed(own(), &[address]), Err(told));
    }
    let told = "key isGateway: 10.1.0.1 is asked for, but is the gateway's address, which is the node's";
    assert_eq!(executed(first(), &["10.1.0.1/24"]), Err(told.to_owned()));
}

/// The agent requests addresses itself or executes a plugin: if its settings say so, if a daemon's socket is named, and
/// without a record.
///
/// Rows: BRG-chosen-by-server.
#[test]
fn no_server_chooses_a_gateway_of_the_node() {
    let (args, exec) = (CniArgs::default(), ["dhcp".to_owned()]);
    let daemon = json!({"type": "dhcp", "daemonSocketPath": "/run/cni/dhcp.sock"});
    let own = json!({"type": "dhcp"});
    let told =
        "with dhcp a server on the network says who the gateway is, and would choose an address for the node";
    let ways: [(&Value, &[String], bool); 4] =
        [(&own, &[], true), (&daemon, &[], true), (&own, &exec, true), (&own, &[], false)];
    for (ipam, exec, recorded) in ways {
        let planned = |keys: Value| {
            let mut whole =
                object(json!({"cniVersion": "1.1.0", "name": "net", "type": "bridge", "ipam": ipam}));
            whole.extend(object(keys));
            let planned =
                driver("bridge").unwrap().plan(&Request { exec, recorded, ..request(&whole, &args) });
            planned.map(|steps| steps.iter().any(Step::asks_the_network)).map_err(|error| {
                let error = CniError::from(error);
                (error.code, error.msg)
            })
        };
        assert_eq!(planned(json!({})), Ok(true), "{ipam} {exec:?} {recorded}");
        for key in ["isGateway", "isDefaultGateway"] {
            let refused = Err((7, format!("key {key}: {told}")));
            assert_eq!(planned(json!({key: true})), refused, "{ipam} {exec:?} {recorded}");
        }
    }
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
