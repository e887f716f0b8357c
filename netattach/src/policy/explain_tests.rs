//! The explanations of flows, for each way in which tables can decide.

use std::collections::BTreeMap;
use std::sync::Arc;

use netattach_common::PolicyIds;

use super::*;
use crate::npwg::NetworkRef;
use crate::objects::interner::Interner;
use crate::objects::policy::PolicyName;
use crate::objects::remote::{RemotePod, Written};
use crate::policy::desired::EndpointPolicy;
use crate::policy::diff::DENY_ALL;
use crate::policy::lookup::Traffic;

fn endpoint(id: u32, name: &str, network: &str, address: &str) -> Endpoint {
    Endpoint {
        id,
        pod: ObjectName::new("shop", name),
        uid: None,
        at: Arc::new(BTreeSet::from([Place::Network(NetworkRef::new("shop", network))])),
        addresses: vec![address.parse().unwrap()],
        dhcp: None,
        ethertypes: if name == "db" { vec![0x88b6] } else { Vec::new() },
    }
}

/// Returns the paths of that flow on a node whose default network has no definition.
fn legs(node: NodeRules, from: End, to: End, traffic: Asked) -> Vec<(Option<String>, bool, Leg, Leg)> {
    let paths = paths(node, &Restrictions::default(), from, to, traffic);
    assert!(paths.iter().all(|path| !path.translated), "no end is on a default network");
    paths.into_iter().map(|path| (path.network.clone(), path.passes(), path.egress, path.ingress)).collect()
}

/// `db` has a policy: TCP 80 from 10.0.0.0/24 without 10.0.0.9. `full` has one that does not fit, `old` an unknown
/// one.
fn paths(node: NodeRules, restrictions: &Restrictions, from: End, to: End, traffic: Asked) -> Vec<Path> {
    let class = NOTHING + 1;
    let compiled = CompiledPolicy {
        peers: BTreeMap::from([
            ("10.0.0.0/24".parse().unwrap(), class),
            ("10.0.0.9/32".parse().unwrap(), NOTHING),
        ]),
        ports: BTreeMap::from([(
            PortPrefix { class, traffic: Traffic::Ports { protocol: 6, port: 80, bits: 16 } },
            1,
        )]),
        rules: BTreeMap::from([(1, "shop/p ingress[0]".into())]),
    };
    let to_the_node = CompiledPolicy {
        peers: BTreeMap::from([("192.0.2.1/32".parse().unwrap(), class)]),
        ports: BTreeMap::from([(PortPrefix { class, traffic: Traffic::Any }, 1)]),
        rules: BTreeMap::from([(1, Origin::OfNode("the pod's own node"))]),
    };
    let selected = Arc::new(EndpointPolicy {
        policies: ["other", "p"].map(|name| PolicyName::multi(ObjectName::new("shop", name))).into(),
        ingress_by: vec![PolicyName::multi(ObjectName::new("shop", "p"))],
        egress_by: vec![PolicyName::multi(ObjectName::new("shop", "other"))],
        ..EndpointPolicy::default()
    });
    let ingress = |ingress| PolicyIds { ingress, egress: 0 };
    let routed = [("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.6", 6)];
    let view = View {
        objects: &with_pods_of_other_nodes(),
        endpoints: &[
            endpoint(1, "web", "lan", "10.0.0.1"),
            endpoint(2, "db", "lan", "10.0.0.2"),
            endpoint(3, "db", "other", "10.9.0.2"),
            endpoint(4, "full", "lan", "10.0.0.4"),
            endpoint(5, "old", "lan", "10.0.0.5"),
            endpoint(6, "routed", "lan", "10.0.0.6"),
            endpoint(8, "unrouted", "lan", "10.0.0.8"),
        ],
        limited: &BTreeMap::new(),
        programmed: &Programmed {
            policies: BTreeMap::from([(7, Arc::new(compiled)), (8, Arc::new(to_the_node))]),
            endpoints: BTreeMap::from([
                (2, ingress(7)),
                (4, ingress(DENY_ALL)),
                (5, ingress(3)),
                (6, PolicyIds { ingress: 8, egress: 8 }),
                (8, PolicyIds { ingress: 8, egress: 8 }),
            ]),
            last_id: 8,
        },
        desired: &Desired {
            endpoints: BTreeMap::from([(2, selected.clone()), (4, selected)]),
            ..Desired::default()
        },
        node,
        behind_translation: true,
        routed: &routed.map(|(address, id)| (address.parse().unwrap(), id)).into(),
        restrictions,
    };
    explain(&view, &Question { from, to, traffic })
}

/// `far`, and `forger`, which claims the address of `db` as well as one of its own.
fn with_pods_of_other_nodes() -> Objects {
    let mut objects = Objects::default();
    for (name, status) in [
        (
            "far",
            r#"[{"name": "shop/lan", "ips": ["10.0.0.201"]}, {"name": "shop/none", "ips": ["10.7.0.1"]}]"#,
        ),
        ("forger", r#"[{"name": "shop/lan", "ips": ["10.0.0.2", "10.0.0.202"]}]"#),
    ] {
        let written = Written { status: Some(status), ..Written::default() };
        let pod = RemotePod::read(&ObjectName::new("shop", name), written, &mut Interner::default());
        objects.remote_pods.insert(pod.into()).unwrap();
    }
    objects
}

fn pod(name: &str) -> End {
    End::Pod(ObjectName::new("shop", name))
}

fn at(address: &str) -> End {
    End::Address(address.parse().unwrap())
}

const WEB: Asked = Asked { protocol: 6, port: Some(80), form: Form::Opening };
const SSH: Asked = Asked { port: Some(22), ..WEB };
const PING: Asked = Asked { protocol: 1, port: None, ..WEB };

#[test]
fn each_end_reports_what_decided() {
    let lan = Some("shop/lan".to_owned());
    let allowed = Leg::Allowed {
        policy: 7,
        peer: "10.0.0.0/24".parse().unwrap(),
        class: NOTHING + 1,
        rule: 1,
        by: "shop/p ingress[0]".to_owned(),
    };
    let selected_by = vec!["shop/p".to_owned()];
    let denied = |missing| Leg::Denied { policy: 7, selected_by: selected_by.clone(), missing };
    let open = || Leg::NotIsolated;
    let other_port = || denied(Missing::Port(vec!["shop/p ingress[0] (tcp/80)".to_owned()]));
    let cases = [
        (pod("web"), pod("db"), WEB, (lan.clone(), true, open(), allowed)),
        (pod("web"), pod("db"), SSH, (lan.clone(), false, open(), other_port())),
        (pod("web"), pod("db"), PING, (lan.clone(), false, open(), other_port())),
        (at("10.1.0.1"), at("10.0.0.2"), WEB, (None, false, Leg::NotHere, denied(Missing::Peer))),
        (
            at("10.0.0.9"),
            at("10.0.0.2"),
            WEB,
            (None, false, Leg::NotHere, denied(Missing::Excepted("10.0.0.9/32".parse().unwrap()))),
        ),
        (pod("db"), at("192.0.2.1"), WEB, (None, true, open(), Leg::NotHere)),
        (
            pod("web"),
            pod("full"),
            WEB,
            (lan.clone(), false, open(), Leg::OverCapacity { selected_by: selected_by.clone() }),
        ),
        (pod("web"), pod("old"), WEB, (lan, false, open(), Leg::Unknown { policy: 3 })),
    ];
    for (from, to, traffic, expected) in cases {
        let found = legs(NodeRules::default(), from.clone(), to.clone(), traffic);
        assert_eq!(found.first(), Some(&expected), "{from:?} {to:?} {traffic}");
    }
}

#[test]
fn pods_of_other_nodes_are_ends_by_what_is_theirs() {
    let lan = Some("shop/lan".to_owned());
    for from in [pod("far"), at("10.0.0.201"), pod("forger")] {
        let found = legs(NodeRules::default(), from.clone(), pod("db"), SSH);
        let denied = Leg::Denied {
            policy: 7,
            selected_by: vec!["shop/p".to_owned()],
            missing: Missing::Port(vec!["shop/p ingress[0] (tcp/80)".to_owned()]),
        };
        assert_eq!(found, [(lan.clone(), false, Leg::NotHere, denied)], "{from:?}");
    }
    let found = legs(NodeRules::default(), at("10.0.0.2"), pod("far"), WEB);
    assert_eq!(found, [(lan, true, Leg::NotIsolated, Leg::NotHere)]);
}

#[test]
fn packets_without_a_flow_are_explained_as_the_programs_judge_them() {
    let of = |form| Asked { form, ..WEB };
    let not_ip = Leg::NotIp { selected_by: vec!["shop/p".to_owned()] };
    let strict = NodeRules { strict_connections: true, ..NodeRules::default() };
    let other_port = || Missing::Port(vec!["shop/p ingress[0] (tcp/80)".to_owned()]);
    for (node, traffic, passes, expected) in [
        (NodeRules::default(), of(Form::Link), true, Leg::KeepsLink),
        (strict, of(Form::Segment), false, Leg::Midstream),
        (NodeRules::default(), of(Form::Ethertype(0x88b6)), true, Leg::Named),
        (NodeRules::default(), of(Form::Ethertype(0x88b5)), false, not_ip),
    ] {
        let [(_, found, _, ingress)] = &legs(node, pod("web"), pod("db"), traffic)[..] else {
            panic!("{traffic}")
        };
        assert_eq!((*found, ingress), (passes, &expected), "{traffic}");
    }
    let one = |traffic| legs(NodeRules::default(), pod("web"), pod("db"), traffic).remove(0);
    assert_eq!(one(of(Form::Segment)), one(WEB));
    let fragment = one(of(Form::Fragment));
    let denied = Leg::Denied { policy: 7, selected_by: vec!["shop/p".to_owned()], missing: other_port() };
    assert_eq!((fragment.1, fragment.3), (false, denied), "its port is not known");
    assert_eq!(one(of(Form::Ethertype(0x88cc))).2, Leg::Infrastructure);
}

#[test]
fn settings_count_and_ends_that_do_not_meet_have_no_path() {
    let node = NodeRules { accept_icmp: true, ..NodeRules::default() };
    let found = legs(node, pod("web"), pod("db"), PING);
    assert_eq!(found, [(Some("shop/lan".to_owned()), true, Leg::NotIsolated, Leg::AcceptedIcmp)]);
    assert_eq!(legs(node, pod("web"), at("fd00::1"), PING), []);
    assert_eq!(legs(node, pod("web"), at("10.9.0.2"), WEB), []);
    assert_eq!(legs(node, at("192.0.2.1"), at("192.0.2.2"), WEB), []);
    assert_eq!(legs(node, pod("nobody"), pod("db"), WEB), []);
}

#[test]
fn the_node_may_translate_what_comes_from_its_default_network_by_whichever_attachment() {
    let translated = |restrictions: &Restrictions| -> Vec<(IpAddr, bool)> {
        let paths = paths(NodeRules::default(), restrictions, pod("db"), at("10.96.0.1"), WEB);
        paths.into_iter().map(|path| (path.from.address, path.translated)).collect()
    };
    let [lan, other]: [IpAddr; 2] = ["10.0.0.2", "10.9.0.2"].map(|address| address.parse().unwrap());
    assert_eq!(translated(&Restrictions::default()), [(lan, false), (other, false)]);
    let default_network = Some(NetworkRef::new("shop", "lan"));
    let restrictions = Restrictions { default_network, ..Restrictions::default() };
    assert_eq!(translated(&restrictions), [(lan, true), (other, false)]);
}

/// What a pod sends to its node is denied at its device where the node's packet filter does not judge it again.
#[test]
fn the_node_is_excepted_from_egress_by_addresses_that_it_judges_again() {
    let class = NOTHING + 1;
    let peer = "192.0.2.1/32".parse().unwrap();
    let allowed = || Leg::Allowed { policy: 8, peer, class, rule: 1, by: "the pod's own node".to_owned() };
    let denied = Leg::Denied { policy: 8, selected_by: Vec::new(), missing: Missing::Peer };
    let one = |from, to| legs(NodeRules::default(), from, to, WEB).remove(0);
    assert_eq!(one(pod("routed"), at("192.0.2.1")), (None, true, allowed(), Leg::NotHere));
    assert_eq!(one(pod("unrouted"), at("192.0.2.1")), (None, false, denied, Leg::NotHere));
    for to in ["routed", "unrouted"] {
        assert_eq!(one(at("192.0.2.1"), pod(to)), (None, true, Leg::NotHere, allowed()), "{to}");
    }
}
