//! The whole life cycle of an attachment, with results in the shape of every version.

use std::fs;

use netattach::netlink::RouteState;
use netattach::spec::{LinkMode, MacvlanMode};
use netattach_tests::runtime::{config, with_result};
use serde_json::{Value, json};

use super::{Rig, VERSIONS, addresses, mac_of, net, pairs, routes};

/// The attachment matches its result, and is deleted; a second DEL has no effect.
fn leaves(rig: &Rig, version: &str, config: &Value, result: &Value) {
    if version >= "0.4.0" {
        rig.after("CHECK", config, result);
    }
    for _ in 0..2 {
        rig.after("DEL", config, result);
        rig.assert_nothing_left(version);
    }
}

/// A result in the shape of `version`.
fn shaped(version: &str, interfaces: &[Value], ips: &[Value], routes: &[Value]) -> Value {
    let family = |address: &Value| if address.as_str().unwrap().contains(':') { "6" } else { "4" };
    match version {
        "0.1.0" | "0.2.0" => {
            let mut result = json!({"cniVersion": version, "dns": {}});
            for ip in ips {
                let family = family(&ip["address"]);
                let mut old = json!({"ip": ip["address"]});
                if let Some(gateway) = ip.get("gateway") {
                    old["gateway"] = gateway.clone();
                }
                let of_family = |route: &&Value| contains_colon(&route["dst"]) == (family == "6");
                // Of a route only these two.
                let keys = |route: &Value| {
                    let mut route = route.clone();
                    route.as_object_mut().unwrap().retain(|key, _| ["dst", "gw"].contains(&key.as_str()));
                    route
                };
                let own: Vec<_> = routes.iter().filter(of_family).map(keys).collect();
                if !own.is_empty() {
                    old["routes"] = json!(own);
                }
                result[format!("ip{family}")] = old;
            }
            result
        }
        "0.3.0" | "0.3.1" | "0.4.0" => {
            let interfaces: Vec<_> = interfaces
                .iter()
                .cloned()
                .map(|mut interface| {
                    interface.as_object_mut().unwrap().remove("mtu");
                    interface
                })
                .collect();
            let ips: Vec<_> = ips
                .iter()
                .cloned()
                .map(|mut ip| {
                    ip["version"] = json!(family(&ip["address"]));
                    ip
                })
                .collect();
            let mut result = json!({"cniVersion": version, "interfaces": interfaces, "ips": ips, "dns": {}});
            if !routes.is_empty() {
                result["routes"] = json!(routes);
            }
            result
        }
        _ => {
            let mut result = json!({"cniVersion": version, "interfaces": interfaces, "ips": ips});
            if !routes.is_empty() {
                result["routes"] = json!(routes);
            }
            result
        }
    }
}

fn contains_colon(value: &Value) -> bool {
    value.as_str().unwrap().contains(':')
}

#[test]
fn bridge_attaches_and_detaches_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "bridge");
        let result = rig.add(&config);

        let (mut node, mut inside) = (rig.node(), rig.inside());
        let (br0, eth0) = (node.link("br0").unwrap(), inside.link("eth0").unwrap());
        let (_, ports) = rig.links();
        let port = node.link(&ports[0]).unwrap();
        assert_eq!((port.controller, port.hairpin, port.up), (Some(br0.index), Some(false), true));
        assert_eq!(addresses(&mut inside, eth0.index), ["10.1.0.2/24", "fd00:1::2/64"]);
        assert_eq!(addresses(&mut node, br0.index), ["10.1.0.1/24", "fd00:1::1/64"]);
        let defaults = [("0.0.0.0/0", "10.1.0.1"), ("10.9.0.0/16", "10.1.0.1"), ("::/0", "fd00:1::1")];
        assert_eq!(routes(&mut inside, eth0.index), pairs(&defaults));
        assert_eq!(rig.reserved(), ["10.1.0.2", "fd00:1::2"]);
        let expected = shaped(
            version,
            &[
                json!({"name": "br0", "mac": mac_of(&br0), "mtu": 1500}),
                json!({"name": port.name, "mac": mac_of(&port), "mtu": 1500}),
                json!({"name": "eth0", "mac": mac_of(&eth0), "mtu": 1500, "sandbox": rig.pod.path()}),
            ],
            &[
                json!({"interface": 2, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}),
                json!({"interface": 2, "address": "fd00:1::2/64", "gateway": "fd00:1::1"}),
            ],
            &[
                json!({"dst": "10.9.0.0/16"}),
                json!({"dst": "0.0.0.0/0", "gw": "10.1.0.1"}),
                json!({"dst": "::/0", "gw": "fd00:1::1"}),
            ],
        );
        assert_eq!(result, expected, "{version}");
        leaves(&rig, version, &config, &result);
        assert!(rig.node().find_link("br0").unwrap().is_some(), "a bridge is shared and stays");
    }
}

#[test]
fn macvlan_attaches_and_detaches_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let mut config = rig.config(version, "macvlan");
        let route = json!({"dst": "10.9.0.0/16", "mtu": 1400, "advmss": 1360});
        config["ipam"]["routes"] = json!([route]);
        let result = rig.add(&config);
        let (mut node, mut inside) = (rig.node(), rig.inside());
        let (parent, eth0) = (node.link("uplink").unwrap(), inside.link("eth0").unwrap());
        assert_eq!(
            (eth0.kind.as_str(), eth0.link, eth0.mode, eth0.up),
            ("macvlan", Some(parent.index), Some(LinkMode::Macvlan(MacvlanMode::Bridge)), true)
        );
        assert_eq!(addresses(&mut inside, eth0.index), ["10.1.0.2/24", "fd00:1::2/64"]);
        let mut through = inside.routes().unwrap();
        through.retain(|route| route.gateway.is_some());
        let wanted = RouteState {
            destination: net("10.9.0.0/16"),
            gateway: Some("10.1.0.1".parse().unwrap()),
            interface: Some(eth0.index),
            priority: 0,
            table: u32::from(libc::RT_TABLE_MAIN),
            protocol: libc::RTPROT_STATIC,
            source: None,
            mtu: Some(1400),
            advmss: Some(1360),
        };
        assert_eq!(through, [wanted], "{version}");
        let expected = shaped(
            version,
            &[json!({"name": "eth0", "mac": mac_of(&eth0), "mtu": 1500, "sandbox": rig.pod.path()})],
            &[
                json!({"interface": 0, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}),
                json!({"interface": 0, "address": "fd00:1::2/64", "gateway": "fd00:1::1"}),
            ],
            &[route],
        );
        assert_eq!(result, expected, "{version}");
        leaves(&rig, version, &config, &result);
    }
}

/// Rows: VTH-keys.
#[test]
fn veth_attaches_and_detaches_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "veth");
        let result = rig.add(&config);
        let (mut node, mut inside) = (rig.node(), rig.inside());
        let eth0 = inside.link("eth0").unwrap();
        let host = node.link(&rig.links().1[0]).unwrap();
        assert_eq!(addresses(&mut inside, eth0.index), ["10.1.0.2/32", "fd00:1::2/128"]);
        assert_eq!(addresses(&mut node, host.index), ["169.254.1.1/32", "fe80::1/64"]);
        let everything = [
            ("0.0.0.0/0", "169.254.1.1"),
            ("10.1.0.0/24", "169.254.1.1"),
            ("10.9.0.0/16", "169.254.1.1"),
            ("::/0", "fe80::1"),
            ("fd00:1::/64", "fe80::1"),
        ];
        assert_eq!(routes(&mut inside, eth0.index), pairs(&everything));
        let to_pod = |address: &str| {
            let destination = net(address);
            rig.node()
                .routes()
                .unwrap()
                .iter()
                .any(|route| route.destination == destination && route.interface == Some(host.index))
        };
        assert!(to_pod("10.1.0.2/32") && to_pod("fd00:1::2/128"));
        let accept_ra = rig
            .runtime
            .node
            .run(|| fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{}/accept_ra", host.name)).unwrap());
        assert_eq!(accept_ra, "0\n");
        let expected = shaped(
            version,
            &[
                json!({"name": host.name, "mac": mac_of(&host), "mtu": 1500}),
                json!({"name": "eth0", "mac": mac_of(&eth0), "mtu": 1500, "sandbox": rig.pod.path()}),
            ],
            &[
                json!({"interface": 1, "address": "10.1.0.2/32", "gateway": "169.254.1.1"}),
                json!({"interface": 1, "address": "fd00:1::2/128", "gateway": "fe80::1"}),
            ],
            &[
                json!({"dst": "10.9.0.0/16"}),
                json!({"dst": "10.1.0.0/24", "gw": "169.254.1.1"}),
                json!({"dst": "0.0.0.0/0", "gw": "169.254.1.1"}),
                json!({"dst": "fd00:1::/64", "gw": "fe80::1"}),
                json!({"dst": "::/0", "gw": "fe80::1"}),
            ],
        );
        assert_eq!(result, expected, "{version}");
        leaves(&rig, version, &config, &result);
    }
}

/// Rows: LBK-up.
#[test]
fn loopback_comes_up_in_every_version_and_passes_results_on() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "loopback");
        let result = rig.add(&config);
        assert!(rig.inside().link("lo").unwrap().up);
        let expected = shaped(
            version,
            &[json!({"name": "lo", "mac": "00:00:00:00:00:00", "sandbox": rig.pod.path()})],
            &[
                json!({"interface": 0, "address": "127.0.0.1/8"}),
                json!({"interface": 0, "address": "::1/128"}),
            ],
            &[],
        );
        assert_eq!(result, expected, "{version}");
        leaves(&rig, version, &config, &result);
    }
    let rig = Rig::new();
    let config = rig.config("1.0.0", "loopback");
    let before = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": rig.pod.path()}]});
    assert_eq!(rig.add(&with_result(&config, &before)), before);
}

#[test]
fn host_local_reserves_checks_and_releases_in_every_version() {
    for version in VERSIONS {
        let rig = Rig::new();
        let config = rig.config(version, "host-local");
        let result = rig.add(&config);
        let ips = [
            json!({"address": "10.1.0.2/24", "gateway": "10.1.0.1"}),
            json!({"address": "fd00:1::2/64", "gateway": "fd00:1::1"}),
        ];
        let mut expected = shaped(version, &[], &ips, &[json!({"dst": "10.9.0.0/16"})]);
        if expected["interfaces"] == json!([]) {
            expected.as_object_mut().unwrap().remove("interfaces");
        }
        assert_eq!(result, expected, "{version}");
        assert_eq!(rig.reserved(), ["10.1.0.2", "fd00:1::2"]);
        // A second address for the same attachment is refused, and the first is kept.
        assert_eq!(rig.refusal("ADD", &config).0, 11);
        assert_eq!(rig.reserved(), ["10.1.0.2", "fd00:1::2"]);
        if version >= "0.4.0" {
            rig.after("CHECK", &config, &result);
            let mut other = result.clone();
            other["ips"][0]["address"] = json!("10.1.0.9/24");
            assert_eq!(rig.refusal("CHECK", &with_result(&config, &other)).0, 999);
        }
        rig.after("DEL", &config, &result);
        assert_eq!(rig.reserved(), [""; 0]);
        rig.after("DEL", &config, &result);
        if version >= "0.4.0" {
            assert_eq!(rig.refusal("CHECK", &with_result(&config, &result)).0, 999);
        }
    }
}

#[test]
fn layer_two_networks_have_no_form_in_the_oldest_versions_and_are_not_made() {
    let rig = Rig::new();
    for (kind, keys) in [("macvlan", json!({"master": "uplink"})), ("bridge", json!({"bridge": "br0"}))] {
        for version in ["0.1.0", "0.2.0"] {
            let said = rig.refusal("ADD", &config(version, kind, &keys));
            assert_eq!(said, (1, "cannot convert: no valid IP addresses".to_owned()));
            rig.assert_nothing_left(version);
            assert_eq!(rig.node().find_link("br0").unwrap(), None);
        }
        let l2 = config("0.3.0", kind, &keys);
        let result = rig.add(&l2);
        rig.after("DEL", &l2, &result);
    }
}
