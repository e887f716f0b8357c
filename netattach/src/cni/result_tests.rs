//! Tests of [`super`] and of `convert`: conversion from and to every version.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn full() -> CniResult {
    CniResult {
        interfaces: vec![
            Interface { name: "br0".into(), mac: Some("02:00:00:00:00:01".into()), ..Interface::default() },
            Interface {
                name: "eth0".into(),
                mac: Some("02:00:00:00:00:02".into()),
                mtu: Some(1400),
                sandbox: Some("/run/netns/a".into()),
                socket_path: Some("/s".into()),
                pci_id: Some("0000:00:01.0".into()),
            },
        ],
        ips: vec![
            IpConfig {
                interface: Some(1),
                address: "10.1.2.3/24".parse().unwrap(),
                gateway: Some("10.1.2.1".parse().unwrap()),
            },
            IpConfig { interface: Some(0), address: "fd00::3/64".parse().unwrap(), gateway: None },
            IpConfig::new("10.9.9.9/32".parse().unwrap()),
        ],
        routes: vec![
            Route {
                table: Some(0),
                scope: Some(253),
                mtu: Some(1300),
                advmss: Some(1200),
                priority: Some(7),
                ..Route::new("10.1.2.3/8".parse().unwrap(), Some("10.1.2.1".parse().unwrap()))
            },
            Route::new("::/0".parse().unwrap(), None),
        ],
        dns: Dns { nameservers: vec!["10.1.2.1".into()], domain: Some("a.b".into()), ..Dns::default() },
    }
}

fn routes() -> Value {
    json!([
        {"dst": "10.1.2.3/8", "gw": "10.1.2.1", "mtu": 1300, "advmss": 1200, "priority": 7, "table": 0, "scope": 253},
        {"dst": "::/0"},
    ])
}

fn newest(version: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [
            {"name": "br0", "mac": "02:00:00:00:00:01"},
            {"name": "eth0", "mac": "02:00:00:00:00:02", "mtu": 1400, "sandbox": "/run/netns/a",
             "socketPath": "/s", "pciID": "0000:00:01.0"},
        ],
        "ips": [
            {"interface": 1, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
            {"interface": 0, "address": "fd00::3/64"},
            {"address": "10.9.9.9/32"},
        ],
        "routes": routes(),
        "dns": {"nameservers": ["10.1.2.1"], "domain": "a.b"},
    })
}

fn middle(version: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [
            {"name": "br0", "mac": "02:00:00:00:00:01"},
            {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/run/netns/a"},
        ],
        "ips": [
            {"version": "4", "interface": 1, "address": "10.1.2.3/24", "gateway": "10.1.2.1"},
            {"version": "6", "interface": 0, "address": "fd00::3/64"},
            {"version": "4", "address": "10.9.9.9/32"},
        ],
        "routes": routes(),
        "dns": {"nameservers": ["10.1.2.1"], "domain": "a.b"},
    })
}

fn oldest(version: &str) -> Value {
    json!({
        "cniVersion": version,
        "ip4": {"ip": "10.1.2.3/24", "gateway": "10.1.2.1", "routes": [{"dst": "10.1.2.3/8", "gw": "10.1.2.1"}]},
        "ip6": {"ip": "fd00::3/64", "routes": [{"dst": "::/0"}]},
        "dns": {"nameservers": ["10.1.2.1"], "domain": "a.b"},
    })
}

fn shape(version: Version) -> Value {
    match version {
        Version::V0_1_0 | Version::V0_2_0 => oldest(version.as_str()),
        Version::V0_3_0 | Version::V0_3_1 | Version::V0_4_0 => middle(version.as_str()),
        Version::V1_0_0 | Version::V1_1_0 => newest(version.as_str()),
    }
}

/// Rows: CNV-01, CNV-02, CNV-04, CNV-07, CNV-10, RES-01, RES-03, RES-04, VER-27, VER-28, VER-30, VER-31.
#[test]
fn the_newest_result_is_written_in_the_shape_of_each_version() {
    for version in Version::ALL {
        assert_eq!(full().to_value(version).unwrap(), shape(version), "{version}");
    }
}

/// Rows: CNV-01, CNV-02, CNV-03, CNV-04, CNV-05, CNV-06, CNV-07.
#[test]
fn every_pair_of_versions_converts_as_the_poorer_of_the_two() {
    // The result holds the members that both formats have.
    for from in Version::ALL {
        for to in Version::ALL {
            let read = CniResult::parse(&shape(from), Version::LATEST).unwrap();
            let converted = read.to_value(to).unwrap();
            let via = CniResult::parse(&full().to_value(from).unwrap(), from).unwrap().to_value(to).unwrap();
            assert_eq!(converted, via, "{from} to {to}");
            assert_eq!(converted["cniVersion"], json!(to.as_str()));
            let again = CniResult::parse(&converted, to).unwrap();
            assert_eq!(again.to_value(to).unwrap(), converted, "{from} to {to} and back");
        }
    }
}

/// Rows: CNV-06.
#[test]
fn the_oldest_shape_becomes_addresses_without_interface() {
    let read = CniResult::parse(&oldest("0.2.0"), Version::LATEST).unwrap();
    let expected = CniResult {
        interfaces: vec![],
        ips: vec![
            IpConfig { interface: None, ..full().ips[0].clone() },
            IpConfig { interface: None, ..full().ips[1].clone() },
        ],
        routes: full().routes.iter().map(|route| Route::new(route.dst, route.gw)).collect(),
        dns: full().dns,
    };
    assert_eq!(read, expected);
}

/// Rows: CNV-03, CNV-11.
#[test]
fn what_the_middle_shape_cannot_hold_is_gone_after_a_round_trip() {
    let middle = full().to_value(Version::V0_4_0).unwrap();
    let back = CniResult::parse(&middle, Version::V0_4_0).unwrap();
    let mut expected = full();
    expected.interfaces[1].mtu = None;
    expected.interfaces[1].socket_path = None;
    expected.interfaces[1].pci_id = None;
    assert_eq!(back, expected);
}

/// Rows: CNV-05.
#[test]
fn a_result_without_addresses_has_no_oldest_shape() {
    let link_only = CniResult { ips: vec![], ..full() };
    for version in [Version::V0_1_0, Version::V0_2_0] {
        let error = link_only.to_value(version).unwrap_err();
        assert_eq!((error.code, error.msg.as_str()), (1, "cannot convert: no valid IP addresses"));
    }
}

/// Rows: CNV-04.
#[test]
fn routes_of_a_family_without_address_are_dropped_by_the_oldest_shape() {
    let only4 = CniResult { ips: vec![full().ips[0].clone()], ..full() };
    let value = only4.to_value(Version::V0_2_0).unwrap();
    assert_eq!(value.get("ip6"), None);
    assert_eq!(value["ip4"]["routes"], json!([{"dst": "10.1.2.3/8", "gw": "10.1.2.1"}]));
}

/// Rows: RES-02.
#[test]
fn an_empty_result_is_a_version_and_in_older_shapes_dns() {
    let empty = CniResult::default();
    assert_eq!(empty.to_value(Version::V1_1_0).unwrap(), json!({"cniVersion": "1.1.0"}));
    assert_eq!(empty.to_value(Version::V0_3_1).unwrap(), json!({"cniVersion": "0.3.1", "dns": {}}));
}

/// Rows: RES-09, RES-11, RES-08.
#[test]
fn the_version_of_a_result_is_its_own_or_the_assumed_one() {
    let ip4 = json!({"ip": "10.0.0.2/24"});
    let one = CniResult { ips: vec![IpConfig::new("10.0.0.2/24".parse().unwrap())], ..CniResult::default() };
    for value in
        [json!({"ip4": ip4}), json!({"cniVersion": "", "ip4": ip4}), json!({"cniVersion": null, "ip4": ip4})]
    {
        assert_eq!(CniResult::parse(&value, Version::V0_2_0), Ok(one.clone()));
    }
    let value = json!({"cniVersion": "0.1.0", "ip4": ip4});
    assert_eq!(CniResult::parse(&value, Version::V1_0_0), Ok(one));
    assert_eq!(CniResult::parse(&Value::Null, Version::V1_0_0), Ok(CniResult::default()));
}

/// Rows: RES-10, RES-05.
#[test]
fn what_cannot_be_decoded_is_named() {
    for (value, msg) in [
        (json!({"cniVersion": "9.0.0"}), "unsupported CNI result version \"9.0.0\""),
        (json!({"cniVersion": 1}), "CNI result: key cniVersion: expected a string, found a number"),
        (json!("x"), "CNI result is a string, not an object"),
        (
            json!({"ips": [{"address": "10.0.0.1"}]}),
            "CNI result: key ips[0].address: \"10.0.0.1\" is not an address with a prefix length",
        ),
        (
            json!({"ips": [{"address": "10.0.0.010/24"}]}),
            "CNI result: key ips[0].address: \"10.0.0.010/24\" is not an address with a prefix length",
        ),
        (json!({"ips": [{}]}), "CNI result: key ips[0]: missing field `address`"),
        (
            json!({"routes": [{"dst": "0/0"}]}),
            "CNI result: key routes[0].dst: \"0/0\" is not an address with a prefix length",
        ),
        (
            json!({"routes": [{"dst": "010.0.0.0/8"}]}),
            "CNI result: key routes[0].dst: \"010.0.0.0/8\" is not an address with a prefix length",
        ),
        (
            json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.010/24"}}),
            "CNI result: key ip4.ip: \"10.0.0.010/24\" is not an address with a prefix length",
        ),
        (
            json!({"ips": [{"address": "10.0.0.1/8", "gateway": "10.0.0.010"}]}),
            "CNI result: key ips[0].gateway: \"10.0.0.010\" is not an IP address",
        ),
        (
            json!({"ips": [{"address": "10.0.0.1/8", "gateway": "x"}]}),
            "CNI result: key ips[0].gateway: \"x\" is not an IP address",
        ),
        (json!({"interfaces": {}}), "CNI result: key interfaces: invalid type: map, expected a sequence"),
    ] {
        assert_eq!(CniResult::parse(&value, Version::V1_0_0), Err(CniError::new(6, msg)));
    }
}

/// Rows: RES-07.
#[test]
fn empty_forms_that_go_prints_are_accepted() {
    let value = json!({
        "interfaces": null, "routes": null, "dns": null,
        "ips": [{"address": "10.0.0.1/8", "gateway": "", "interface": -1}, {"address": "10.0.0.2/8", "gateway": null}],
    });
    let ips = ["10.0.0.1/8", "10.0.0.2/8"].map(|text| IpConfig::new(text.parse().unwrap())).to_vec();
    let expected = CniResult { ips, ..CniResult::default() };
    assert_eq!(CniResult::parse(&value, Version::V1_0_0), Ok(expected));
    let value = json!({"interfaces": [{"name": "a", "mac": "", "sandbox": "", "mtu": 0}]});
    let expected = Interface { name: "a".into(), ..Interface::default() };
    assert_eq!(CniResult::parse(&value, Version::V1_1_0).unwrap().interfaces, [expected]);
}

#[test]
fn an_address_finds_its_interface_only_if_there_is_one() {
    let result = full();
    assert_eq!(result.interface_of(&result.ips[0]), Some(&result.interfaces[1]));
    assert_eq!(result.interface_of(&result.ips[2]), None);
    assert_eq!(result.interface_of(&IpConfig { interface: Some(9), ..result.ips[0].clone() }), None);
}

fn any_net() -> impl Strategy<Value = IpNet> {
    (any::<IpAddr>(), 0..=128_u8).prop_map(|(addr, prefix)| {
        let most = if addr.is_ipv4() { 32 } else { 128 };
        IpNet::new(addr, prefix.min(most)).unwrap()
    })
}

fn any_result() -> impl Strategy<Value = CniResult> {
    let text = || prop::option::of("[a-z0-9:./]{1,12}");
    let number = || prop::option::of(1..=u32::MAX);
    let interface = ("[a-z0-9]{0,15}", text(), number(), text(), text(), text()).prop_map(
        |(name, mac, mtu, sandbox, socket_path, pci_id)| Interface {
            name,
            mac,
            mtu,
            sandbox,
            socket_path,
            pci_id,
        },
    );
    let ip = (prop::option::of(0..4_usize), any_net(), any::<Option<IpAddr>>())
        .prop_map(|(interface, address, gateway)| IpConfig { interface, address, gateway });
    let route = (
        any_net(),
        any::<Option<IpAddr>>(),
        number(),
        number(),
        number(),
        any::<Option<u32>>(),
        any::<Option<u32>>(),
    )
        .prop_map(|(dst, gw, mtu, advmss, priority, table, scope)| Route {
            dst,
            gw,
            mtu,
            advmss,
            priority,
            table,
            scope,
        });
    let words = || prop::collection::vec("[a-z.]{1,8}", 0..3);
    let dns = (words(), text(), words(), words()).prop_map(|(nameservers, domain, search, options)| Dns {
        nameservers,
        domain,
        search,
        options,
    });
    let list = |size| 0..size;
    (
        prop::collection::vec(interface, list(4_usize)),
        prop::collection::vec(ip, list(4)),
        prop::collection::vec(route, list(4)),
        dns,
    )
        .prop_map(|(interfaces, ips, routes, dns)| CniResult { interfaces, ips, routes, dns })
}

proptest! {
    /// Rows: CNV-01.
    #[test]
    fn the_newest_shapes_lose_nothing(result in any_result()) {
        for version in [Version::V1_0_0, Version::V1_1_0] {
            let value = result.to_value(version).unwrap();
            prop_assert_eq!(&CniResult::parse(&value, version).unwrap(), &result);
        }
    }

    /// Rows: CNV-02, CNV-03.
    #[test]
    fn the_middle_shapes_lose_three_members_of_an_interface(result in any_result()) {
        let mut expected = result.clone();
        for interface in &mut expected.interfaces {
            *interface = Interface { mtu: None, socket_path: None, pci_id: None, ..interface.clone() };
        }
        for version in [Version::V0_3_0, Version::V0_3_1, Version::V0_4_0] {
            let value = result.to_value(version).unwrap();
            prop_assert_eq!(&CniResult::parse(&value, version).unwrap(), &expected);
        }
    }

    /// Rows: CNV-04, CNV-05, CNV-06.
    #[test]
    fn the_oldest_shapes_are_stable_after_the_first_loss(result in any_result()) {
        for version in [Version::V0_1_0, Version::V0_2_0] {
            match result.to_value(version) {
                Ok(value) => {
                    let once = CniResult::parse(&value, version).unwrap();
                    prop_assert_eq!(once.to_value(version).unwrap(), value);
                }
                Err(_) => prop_assert!(result.ips.is_empty()),
            }
        }
    }

    #[test]
    fn any_document_is_read_or_refused(
        value in super::arbitrary::document(&[
            "cniVersion", "interfaces", "ips", "routes", "dns", "ip4", "ip6", "ip", "address", "dst", "gw",
            "gateway", "interface", "name", "mtu", "nameservers",
        ]),
    ) {
        for assumed in Version::ALL {
            if let Ok(result) = CniResult::parse(&value, assumed) {
                for version in Version::ALL {
                    let _ = result.to_value(version);
                }
            }
        }
    }
}
