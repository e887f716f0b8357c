//! How each feature of a policy object is read, by the rows of the conformance list.

use serde_json::json;

use super::*;
use crate::objects::policy::Inference;

fn policy_for(annotation: Option<&str>, spec: Value) -> Policy {
    let annotations = annotation
        .map(|networks| (POLICY_FOR_ANNOTATION.to_owned(), networks.to_owned()))
        .into_iter()
        .collect();
    read(ObjectName::new("shop", "p"), &annotations, &spec).unwrap()
}

fn policy(spec: Value) -> Policy {
    policy_for(Some("net-a"), spec)
}

fn said(policy: &Policy) -> Vec<String> {
    let line = |problem: &Problem| format!("{:?} {problem}", problem.severity);
    policy.problems.iter().map(line).collect()
}

/// The peers of one ingress rule, with its findings.
fn peers(from: Value) -> (Peers, Vec<String>) {
    let policy = policy(json!({"podSelector": {}, "ingress": [{"from": from}]}));
    (policy.ingress[0].peers.clone(), said(&policy))
}

/// The ports of one ingress rule, with its findings.
fn ports(ports: Value) -> (Ports, Vec<String>) {
    let policy = policy(json!({"podSelector": {}, "ingress": [{"ports": ports}]}));
    (policy.ingress[0].ports.clone(), said(&policy))
}

fn block(net: &str, except: &[&str]) -> Peer {
    Peer::Block { net: net.parse().unwrap(), except: except.iter().map(|cut| cut.parse().unwrap()).collect() }
}

/// Rows: C03, C04, C06.
#[test]
fn the_annotation_names_the_networks() {
    let table: &[(&str, &str, &[&str])] = &[
        ("C03", " net-a ,\tother/net-b\n", &["other/net-b", "shop/net-a"]),
        ("C03", "other / net-b", &["other/net-b"]),
        ("C04", "net-a", &["shop/net-a"]),
        ("C05", "other/net-a", &["other/net-a"]),
        ("C06", "net-a,,net-a,", &["shop/net-a"]),
    ];
    for (row, annotation, expected) in table {
        let policy = policy_for(Some(annotation), json!({"podSelector": {}, "ingress": [{}]}));
        let names: Vec<String> = policy.networks.iter().map(ToString::to_string).collect();
        assert_eq!(names, *expected, "{row}");
        assert_eq!(said(&policy), Vec::<String>::new(), "{row}");
    }
}

/// Rows: C02.
#[test]
fn a_policy_for_no_network_selects_nothing_and_says_so() {
    let none = "Warning metadata.annotations[k8s.v1.cni.cncf.io/policy-for]: names no network, so the policy selects nothing";
    for annotation in [None, Some(""), Some(" , ")] {
        let policy = policy_for(annotation, json!({"podSelector": {}, "ingress": [{}]}));
        assert_eq!((policy.networks.len(), said(&policy)), (0, vec![none.to_owned()]));
    }
    let odd = policy_for(Some("a/b/c"), json!({"podSelector": {}, "ingress": [{}]}));
    assert_eq!(
        said(&odd),
        [
            r#"Error metadata.annotations[k8s.v1.cni.cncf.io/policy-for]: "a/b/c" is not of the form [namespace/]name and is left out"#,
            none,
        ]
    );
}

/// Rows: C22, C23, C24, C25, C26, C27, C28.
#[test]
fn policy_types_say_what_is_isolated() {
    const INFERRED: &str =
        "Warning spec.policyTypes: missing, and rules alone do not say whether ingress is isolated";
    let both = (true, true);
    // Row, policyTypes, rules, isolated (ingress, egress) by presence, and as NetworkPolicy v1 defines it.
    let table = [
        ("C22", json!(["Ingress", "Egress"]), json!({}), both, both, vec![]),
        (
            "C22",
            json!(["egress"]),
            json!({}),
            (false, true),
            (false, true),
            vec![r#"Warning spec.policyTypes[0]: "egress" is read as "Egress""#],
        ),
        (
            "an unknown type",
            json!(["Egres"]),
            json!({}),
            both,
            both,
            vec![
                r#"Error spec.policyTypes[0]: "Egres" is neither Ingress nor Egress: both directions are isolated"#,
            ],
        ),
        ("C23", json!(null), json!({"ingress": [{}]}), (true, false), (true, false), vec![]),
        ("both kinds of rules", json!(null), json!({"ingress": [{}], "egress": [{}]}), both, both, vec![]),
        ("C24", json!(null), json!({"egress": [{}]}), (false, true), both, vec![INFERRED]),
        ("C25", json!([]), json!({}), (false, false), (true, false), vec![INFERRED]),
        ("C26", json!(["Ingress"]), json!({}), (true, false), (true, false), vec![]),
        ("C27", json!(["Egress"]), json!({"egress": []}), (false, true), (false, true), vec![]),
        (
            "C28",
            json!(["Ingress"]),
            json!({"egress": [{}]}),
            (true, false),
            (true, false),
            vec!["Warning spec.egress: Egress is not among the policy types: these rules are ignored"],
        ),
    ];
    for (row, types, mut spec, presence, v1, expected) in table {
        spec["podSelector"] = json!({});
        spec["policyTypes"] = types;
        let policy = policy(spec);
        let isolated = |inference| {
            (policy.isolates(Direction::Ingress, inference), policy.isolates(Direction::Egress, inference))
        };
        assert_eq!((isolated(Inference::Presence), isolated(Inference::V1)), (presence, v1), "{row}");
        assert_eq!(said(&policy), expected, "{row}");
    }
}

/// Rows: C40, C52, C55, C56, C57.
#[test]
fn peers_are_read() {
    let shop = |pods: Selector| Peer::Pods { namespaces: None, pods };
    let web: Selector = serde_json::from_value::<labels::Written>(json!({"matchLabels": {"app": "web"}}))
        .unwrap()
        .try_into()
        .unwrap();
    let everywhere = |pods: Selector| Peer::Pods { namespaces: Some(Selector::default()), pods };
    let web_label = json!({"matchLabels": {"app": "web"}});
    let table = [
        ("C40", json!(null), Peers::Any, vec![]),
        ("C40", json!([]), Peers::Any, vec![]),
        ("C42", json!([{"podSelector": web_label}]), Peers::Of(vec![shop(web.clone())]), vec![]),
        (
            "C43, C44",
            json!([{"namespaceSelector": {}}]),
            Peers::Of(vec![everywhere(Selector::default())]),
            vec![],
        ),
        (
            "C45",
            json!([{"namespaceSelector": {}, "podSelector": web_label}]),
            Peers::Of(vec![everywhere(web.clone())]),
            vec![],
        ),
        (
            "C46",
            json!([{"namespaceSelector": {}}, {"podSelector": web_label}]),
            Peers::Of(vec![everywhere(Selector::default()), shop(web)]),
            vec![],
        ),
        (
            "C52",
            json!([{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}, {"ipBlock": {"cidr": "2001:db8::/32"}}]),
            Peers::Of(vec![block("10.0.0.0/8", &["10.1.0.0/16"]), block("2001:db8::/32", &[])]),
            vec![],
        ),
        (
            "C52",
            json!([{"ipBlock": {"cidr": "192.168.1.1/24", "except": ["192.168.1.129/25"]}}]),
            Peers::Of(vec![block("192.168.1.0/24", &["192.168.1.128/25"])]),
            vec![
                "Warning spec.ingress[0].from[0].ipBlock.cidr: 192.168.1.1/24 has host bits and is read as 192.168.1.0/24",
                "Warning spec.ingress[0].from[0].ipBlock.except[0]: 192.168.1.129/25 has host bits and is read as 192.168.1.128/25",
            ],
        ),
        (
            "C55",
            json!([{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/8", "10.1.0.0/16", "2001:db8::/32"]}}]),
            Peers::Of(vec![block("10.0.0.0/8", &["10.1.0.0/16"])]),
            vec![
                "Error spec.ingress[0].from[0].ipBlock.except[0]: 11.0.0.0/8 is outside the block and is left out",
                "Error spec.ingress[0].from[0].ipBlock.except[2]: 2001:db8::/32 is outside the block and is left out",
            ],
        ),
        (
            "an exception that leaves nothing",
            json!([{"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.0.0.0/8"]}}]),
            Peers::Of(vec![block("10.1.0.0/16", &["10.0.0.0/8"])]),
            vec![
                "Warning spec.ingress[0].from[0].ipBlock.except[0]: 10.0.0.0/8 covers the whole block: matches nothing",
            ],
        ),
        (
            "C56",
            json!([{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]),
            Peers::Of(vec![block("10.0.0.0/8", &[])]),
            vec!["Warning spec.ingress[0].from[0]: has selectors beside ipBlock: only the block counts"],
        ),
        (
            "C57",
            json!([{}]),
            Peers::Of(vec![]),
            vec!["Warning spec.ingress[0].from[0]: has neither ipBlock nor a selector: matches nothing"],
        ),
        (
            "an unreadable block does not open the rule",
            json!([{"ipBlock": {"cidr": "10.0.0.1"}}]),
            Peers::Of(vec![]),
            vec![
                r#"Error spec.ingress[0].from[0].ipBlock.cidr: "10.0.0.1" is not an address block such as 10.0.0.0/8: matches nothing"#,
            ],
        ),
        (
            "nor does an address that some read in octal",
            json!([{"ipBlock": {"cidr": "10.0.0.010/32"}}]),
            Peers::Of(vec![]),
            vec![
                r#"Error spec.ingress[0].from[0].ipBlock.cidr: "10.0.0.010/32" is not an address block such as 10.0.0.0/8: matches nothing"#,
            ],
        ),
        (
            "nor such an exception",
            json!([{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.010.0.0/16"]}}]),
            Peers::Of(vec![]),
            vec![
                r#"Error spec.ingress[0].from[0].ipBlock.except[0]: "10.010.0.0/16" is not an address block such as 10.0.0.0/8: matches nothing"#,
            ],
        ),
        (
            "nor does an unreadable exception widen its block",
            json!([{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["x"]}}]),
            Peers::Of(vec![]),
            vec![
                r#"Error spec.ingress[0].from[0].ipBlock.except[0]: "x" is not an address block such as 10.0.0.0/8: matches nothing"#,
            ],
        ),
        (
            "nor does an unknown key drop a condition",
            json!([{"podSelector": {}, "nameSpaceSelector": {}}, {"podSelector": {"matchLabel": {}}}]),
            Peers::Of(vec![]),
            vec![
                r#"Error spec.ingress[0].from[0]: unknown key "nameSpaceSelector": matches nothing"#,
                r#"Error spec.ingress[0].from[1].podSelector: unknown key "matchLabel": matches nothing"#,
            ],
        ),
    ];
    for (row, from, expected, lines) in table {
        let (read, said) = peers(from);
        assert_eq!(read, expected, "{row}");
        assert_eq!(said, lines, "{row}");
    }
}

/// Rows: C66, C67, C68, C69, C70, C76.
#[test]
fn ports_are_read() {
    use PortProtocol::{Sctp, Tcp, Udp};
    let range = |protocol, first, last| PortTerm::Range { protocol, first, last };
    let one = |term| Ports::Of(vec![term]);
    let nothing = || Ports::Of(Vec::new());
    let wrong = |text: &str| vec![format!("Error spec.ingress[0].ports[0]: {text}: matches nothing")];
    let bad_port = |port: &str| {
        wrong(&format!("port {port} is neither a number from 1 to 65535 nor the name of a container port"))
    };
    let bad_end = |end: &str| wrong(&format!("endPort {end} needs a port number not above it"));
    let named = |name: &str| one(PortTerm::Named { protocol: Tcp, name: name.to_owned() });
    let table = [
        ("C65", json!(null), Ports::Any, vec![]),
        ("C65", json!([]), Ports::Any, vec![]),
        ("C66", json!([{"port": 80}]), one(range(Tcp, 80, 80)), vec![]),
        ("C66", json!([{}]), one(PortTerm::Protocol(Tcp)), vec![]),
        ("C67", json!([{"protocol": "UDP"}]), one(PortTerm::Protocol(Udp)), vec![]),
        ("C68", json!([{"protocol": "TCP", "port": 65535}]), one(range(Tcp, 65535, 65535)), vec![]),
        ("C68", json!([{"port": 0}]), nothing(), bad_port("0")),
        ("C68", json!([{"port": 65536}]), nothing(), bad_port("65536")),
        ("C68", json!([{"port": "80"}]), nothing(), bad_port(r#""80""#)),
        ("C69", json!([{"port": 80, "endPort": 90}]), one(range(Tcp, 80, 90)), vec![]),
        ("C69", json!([{"port": 80, "endPort": 80}]), one(range(Tcp, 80, 80)), vec![]),
        ("C70", json!([{"endPort": 90}]), nothing(), bad_end("90")),
        ("C70", json!([{"port": "http", "endPort": 90}]), nothing(), bad_end("90")),
        ("C70", json!([{"port": 80, "endPort": 79}]), nothing(), bad_end("79")),
        ("C70", json!([{"port": 80, "endPort": 65536}]), nothing(), bad_end("65536")),
        ("C71", json!([{"port": "http-2"}]), named("http-2"), vec![]),
        ("C72", json!([{"protocol": "SCTP", "port": 7}]), one(range(Sctp, 7, 7)), vec![]),
        (
            "C72",
            json!([{"protocol": "udp", "port": 7}]),
            one(range(Udp, 7, 7)),
            vec![r#"Warning spec.ingress[0].ports[0]: "udp" is read as "UDP""#.to_owned()],
        ),
        (
            "C76",
            json!([{"protocol": "ICMP"}, {"port": 80}]),
            one(range(Tcp, 80, 80)),
            wrong(r#"protocol "ICMP" is not TCP, UDP or SCTP"#),
        ),
        ("a misspelt key", json!([{"prot": 80}]), nothing(), wrong(r#"unknown key "prot""#)),
    ];
    for (row, written, expected, lines) in table {
        assert_eq!(ports(written), (expected, lines), "{row}");
    }
}

#[test]
fn a_rule_with_an_unknown_key_matches_nothing() {
    for (written, key) in [(json!({"form": []}), "form"), (json!({"to": [], "ports": []}), "to")] {
        let policy = policy(json!({"podSelector": {}, "ingress": [written]}));
        assert_eq!(policy.ingress, [Rule { peers: Peers::Of(vec![]), ports: Ports::Of(vec![]) }]);
        assert_eq!(said(&policy), [format!("Error spec.ingress[0]: unknown key {key:?}: matches nothing")]);
    }
}

#[test]
fn an_unreadable_pod_selector_isolates_and_allows_nothing() {
    let policy = policy(json!({
        "podSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]},
        "ingress": [{}],
        "egress": [{}],
        "color": "red",
    }));
    assert_eq!((policy.pods, policy.ingress, policy.egress), (Selector::default(), vec![], vec![]));
    assert_eq!(policy.directions, Directions::Listed { ingress: true, egress: true });
    assert_eq!(
        policy.problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            r#"spec: unknown key "color", and no policyTypes: both directions are isolated"#,
            r#"spec.podSelector: operator of "a" is "Is", but must be In, NotIn, Exists or DoesNotExist: every pod of the namespace is isolated and no rule of this policy applies"#,
        ]
    );
}

/// An unknown key may have been `egress`: without policy types the isolated directions are unknown.
#[test]
fn an_unknown_key_of_the_specification_isolates_both_directions_unless_policy_types_say_which() {
    let inferred = policy(json!({"podSelector": {}, "ingres": [{}]}));
    assert_eq!(inferred.directions, Directions::Listed { ingress: true, egress: true });
    let listed = policy(json!({"podSelector": {}, "ingres": [{}], "policyTypes": ["Ingress"]}));
    assert_eq!(listed.directions, Directions::Listed { ingress: true, egress: false });
    assert_eq!(said(&listed), [r#"Warning spec: unknown key "ingres" is ignored"#]);
}

#[test]
fn a_policy_takes_as_many_rules_peers_ports_and_networks_as_its_budget_has() {
    let block = json!({"ipBlock": {"cidr": "10.0.0.0/8"}});
    let cut =
        |number: usize| json!({"ipBlock": {"cidr": "10.0.0.0/8", "except": vec!["10.1.0.0/16"; number]}});
    let rules = |ingress: usize, egress: usize| json!({"ingress": vec![json!({}); ingress], "egress": vec![json!({}); egress]});
    let of = |key: &str, items: Vec<Value>| json!({"ingress": [{key: items}], "egress": [{}]});
    let port = json!({"port": 80});
    let table = [
        (rules(RULES - 1, 1), rules(RULES, 1), Excess::Rules),
        (rules(1, RULES - 1), rules(0, RULES + 1), Excess::Rules),
        (of("from", vec![block.clone(); PEERS]), of("from", vec![block; PEERS + 1]), Excess::Peers),
        (of("from", vec![cut(PEERS - 1)]), of("from", vec![cut(PEERS)]), Excess::Peers),
        (of("ports", vec![port.clone(); PORTS]), of("ports", vec![port; PORTS + 1]), Excess::Ports),
    ];
    for (mut within, mut beyond, excess) in table {
        for spec in [&mut within, &mut beyond] {
            spec["podSelector"] = json!({"matchLabels": {"app": "web"}});
        }
        let (within, beyond) = (policy(within), policy(beyond));
        assert_eq!(
            within.problems.iter().find(|it| matches!(it.finding, Finding::Excess(_))),
            None,
            "{excess}"
        );
        assert!(!within.egress.is_empty());
        let expected =
            format!("spec: {excess}: the pods that it selects are isolated and none of its rules applies");
        assert_eq!(beyond.problems.last().unwrap().to_string(), expected);
        assert_eq!((beyond.ingress.len(), beyond.egress.len()), (0, 0));
        assert_eq!(beyond.pods, within.pods, "whom it selects");
        assert_eq!(beyond.directions, Directions::Listed { ingress: true, egress: true });
    }
    let on = |number| policy_for(Some(&names(number)), json!({"podSelector": {}, "ingress": [{}]}));
    let within = on(NETWORKS);
    assert_eq!(
        (within.networks.len(), within.all_networks, within.ingress.len(), said(&within)),
        (NETWORKS, false, 1, vec![])
    );
    // As many as an annotation can have: none of them is kept.
    for number in [NETWORKS + 1, 62_000] {
        let beyond = on(number);
        assert_eq!((beyond.networks.len(), beyond.all_networks, beyond.ingress.len()), (0, true, 0));
        assert_eq!(
            said(&beyond),
            [
                "Error spec: is for more than 256 networks, which counts as for all: the pods that it selects are isolated and none of its rules applies"
            ]
        );
    }
}

/// The names of networks, separated by commas.
fn names(number: usize) -> String {
    (0..number).map(|it| format!("n{it}")).collect::<Vec<_>>().join(",")
}

#[test]
fn a_policy_for_more_networks_than_its_budget_has_isolates_on_every_one_whatever_else_is_wrong_with_it() {
    let annotations = [(POLICY_FOR_ANNOTATION.to_owned(), names(NETWORKS + 1))].into();
    let policy = unreadable_multi(ObjectName::new("shop", "p"), &annotations);
    let both = Directions::Listed { ingress: true, egress: true };
    assert_eq!((policy.networks.len(), policy.all_networks, policy.directions), (0, true, both));
}

#[test]
fn findings_beyond_the_budget_are_counted() {
    let wrong =
        |number: usize| policy(json!({"podSelector": {}, "ingress": vec![json!({"form": []}); number]}));
    assert_eq!(wrong(FINDINGS).problems.len(), FINDINGS);
    let more = wrong(FINDINGS + 7);
    assert_eq!(more.problems.len(), FINDINGS + 1);
    assert_eq!(more.problems[FINDINGS].to_string(), "spec: 7 more findings are not listed");
    let long = policy(json!({"podSelector": {}, "ingress": [{"x".repeat(1000): 1}]}));
    assert!(long.problems[0].to_string().len() < 400, "{}", long.problems[0]);
}

#[test]
fn more_policy_types_than_there_can_be_isolate_both_directions() {
    let types = |number: usize| policy(json!({"podSelector": {}, "policyTypes": vec!["Ingress"; number]}));
    assert_eq!(types(MOST_TYPES).directions, Directions::Listed { ingress: true, egress: false });
    assert_eq!(types(MOST_TYPES + 1).directions, Directions::Listed { ingress: true, egress: true });
}

#[test]
fn what_the_api_server_would_refuse_is_refused() {
    let specs = [
        json!(null),
        json!({}),
        json!({"podSelector": {}, "ingress": {}}),
        json!({"podSelector": {}, "ingress": [null]}),
    ];
    for spec in specs {
        let error = read(ObjectName::new("shop", "p"), &BTreeMap::new(), &spec).unwrap_err();
        assert_eq!(error.to_string(), "read spec of shop/p", "{spec}");
    }
}
