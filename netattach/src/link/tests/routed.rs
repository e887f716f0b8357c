//! Links with an end on the node that are routed: veth, ptp, netkit.

use super::*;

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
    // The same without an agent.
    assert!(plan("ptp", json!({"ipMasq": true, "ipam": pool()})).contains(&Step::Translate(masquerade)));
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
    // The pod's packets meet this policy before they are redirected.
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
