//! Behaviour that all kinds of interfaces share: addresses by other plugins, Ethernet address, DNS, refused keys.

use super::*;

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

/// Rows: MVL-macvtap, BRG-fastPath, LBK-refused.
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
        ("loopback", "fastPath", json!(true)),
        ("loopback", "bandwidth", json!({"ingressRate": 1_000_000})),
        ("loopback", "sourceCheck", json!("mac")),
        ("loopback", "allowedAddresses", json!(["10.1.0.9"])),
        ("loopback", "vlans", json!([5])),
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
            json!({"bridge": "br\u{f7ff}"}),
            "key bridge: \"br\\u{f7ff}\": interface name contains characters between U+F780 and U+F7FF",
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
        (
            "macvlan",
            json!({"mode": "passthru", "mac": MAC}),
            "key mac: a macvlan in mode passthru has the address of its parent",
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
