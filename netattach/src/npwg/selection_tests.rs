//! Rows of the standard, the short form of Multus, and properties of the annotation parser.

use proptest::prelude::*;
use serde_json::json;

use super::super::element::is_gateway;
use super::*;

fn parse(annotation: &str) -> Result<Parsed, SelectionError> {
    parse_networks(annotation, "shop")
}

fn selections(annotation: &str) -> Vec<Selection> {
    parse(annotation).unwrap().selections
}

fn plain(namespace: &str, name: &str) -> Selection {
    Selection::of(NetworkRef::new(namespace, name))
}

/// Returns the only selection of an element `{"name": "a"}`, overridden by `keys`.
fn element(keys: Value) -> Result<Selection, SelectionError> {
    let mut element = json!({"name": "a"});
    for (key, value) in keys.as_object().unwrap() {
        element[key.as_str()] = value.clone();
    }
    parse(&json!([element]).to_string()).map(|mut parsed| parsed.selections.remove(0))
}

fn error(annotation: &str) -> String {
    parse(annotation).unwrap_err().to_string()
}

/// Rows: NPWG-4.1-absent, NPWG-4.1.1-local, NPWG-4.1.1-namespaced, NPWG-4.1.1-list-order.
/// Rows: NPWG-4.1.1-space, NPWG-4.2-twice, EXT-short-ifname.
#[test]
fn the_short_form_is_read() {
    let named = |interface: &str| Selection { interface: Some(interface.to_owned()), ..plain("ns", "net") };
    let table: &[(&str, &str, Vec<Selection>)] = &[
        ("NPWG-4.1-absent", "", vec![]),
        ("only blanks", " \n", vec![]),
        ("NPWG-4.1.1-local", "net-a", vec![plain("shop", "net-a")]),
        ("NPWG-4.1.1-namespaced", "other/net-c", vec![plain("other", "net-c")]),
        (
            "NPWG-4.1.1-list-order",
            "net-b,net-a,other/net-c",
            vec![plain("shop", "net-b"), plain("shop", "net-a"), plain("other", "net-c")],
        ),
        ("NPWG-4.1.1-space", " net-a , net-b\n", vec![plain("shop", "net-a"), plain("shop", "net-b")]),
        ("NPWG-4.2-twice", "net-a,net-a", vec![plain("shop", "net-a"), plain("shop", "net-a")]),
        ("EXT-short-ifname", "ns/net@if0", vec![named("if0")]),
        ("EXT-short-ifname blanks", "ns / net @ eth0.100", vec![named("eth0.100")]),
        ("a name that JSON would not take as a list", "null", vec![plain("shop", "null")]),
    ];
    for (row, annotation, expected) in table {
        assert_eq!(selections(annotation), *expected, "{row}");
    }
}

/// Rows: NPWG-4.1.1-malformed, EXT-short-ifname-limits.
#[test]
fn a_malformed_short_form_is_refused_with_its_item() {
    let table = [
        ("a/b/c", 0, "a/b/c"),
        ("a@b@c", 0, "a@b@c"),
        (",", 0, ""),
        ("net-a,", 1, ""),
        ("net-a,,net-b", 1, ""),
        ("/a", 0, "/a"),
        ("a/", 0, "a/"),
        ("a@", 0, "a@"),
        ("-a", 0, "-a"),
        ("a-", 0, "a-"),
        ("A", 0, "A"),
        ("a_b", 0, "a_b"),
        ("a b", 0, "a b"),
        ("a.b", 0, "a.b"),
        ("net@sixteen-bytes-xx", 0, "net@sixteen-bytes-xx"),
        ("net@a b", 0, "net@a b"),
        ("net@a/b", 0, "net@a/b"),
    ];
    for (annotation, position, item) in table {
        let refused = parse(annotation).unwrap_err();
        assert!(
            matches!(&refused, SelectionError::ShortForm { index, text } if *index == position && text == item),
            "{annotation}: {refused}"
        );
    }
}

/// Rows: NPWG-4.1-both-formats, NPWG-4.1.2-json-list.
#[test]
fn both_forms_say_the_same() {
    let json = json!([
        {"name": "net-a"},
        {"name": "net-b", "namespace": ""},
        {"name": "net-c", "namespace": "other", "interface": "if0"},
    ]);
    assert_eq!(selections(&json.to_string()), selections("net-a,net-b,other/net-c@if0"));
}

/// Rows: NPWG-4.1.2-json-malformed, NPWG-4.1.2.1.1-name-required.
#[test]
fn malformed_json_is_refused() {
    let table = [
        (r#"[{"name":"a""#, "read networks annotation as json"),
        (r#"{"name":"a"}"#, "networks annotation is an object, not a json list"),
        (r#""net-a""#, "networks annotation is a string, not a json list"),
        ("[null]", "networks annotation element 0 is null, not an object"),
        (r#"[{"name":"a"},1]"#, "networks annotation element 1 is a number, not an object"),
        (r#"[{"namespace":"x"}]"#, "networks annotation element 0 has no name"),
        (r#"[{"name":""}]"#, "networks annotation element 0 has no name"),
        (r#"[{"name":null}]"#, "networks annotation element 0 has no name"),
    ];
    for (annotation, expected) in table {
        assert_eq!(error(annotation), expected, "{annotation}");
    }
    assert_eq!(selections("[]"), []);
}

#[test]
fn nesting_deeper_than_a_parser_should_follow_is_refused() {
    assert_eq!(error(&"[".repeat(60_000)), "read networks annotation as json");
}

/// Rows: NPWG-4.1.2.1.2-ns-other, NPWG-4.1.2.1.3-ips-valid, NPWG-4.1.2.1.3-ips-prefix.
#[test]
fn every_key_is_read() {
    let all = element(json!({
        "namespace": "other",
        "interface": "eth9",
        "ips": ["10.2.2.42/24", "10.2.2.43", "2001:db8::5/64", "2001:db8::6"],
        "mac": "02:23:45:67:89:AB",
        "infiniband-guid": "c2:11:22:33:44:55:66:77",
        "cni-args": {"one": 1, "list": [true, null], "deep": {"er": "x"}},
        "portMappings": [
            {"hostPort": 8080, "containerPort": 80},
            {"hostPort": 53, "containerPort": 5353, "protocol": "UdP", "hostIP": "192.0.2.1"},
            {"hostPort": 1, "containerPort": 65535, "protocol": "SCTP", "hostIP": ""},
        ],
        "bandwidth": {"ingressRate": 1000, "ingressBurst": 2000, "egressRate": 3000},
        "default-route": ["10.2.2.1", "2001:db8::1"],
        "deviceID": "0000:03:02.1",
    }));
    let mapping = |host_port, container_port, protocol, host_ip: Option<&str>| PortMapping {
        host_port,
        container_port,
        protocol,
        host_ip: host_ip.map(|ip| ip.parse().unwrap()),
    };
    assert_eq!(
        all.unwrap(),
        Selection {
            network: NetworkRef::new("other", "a"),
            interface: Some("eth9".to_owned()),
            ips: ["10.2.2.42/24", "10.2.2.43", "2001:db8::5/64", "2001:db8::6"]
                .map(|ip| ip.parse().unwrap())
                .to_vec(),
            mac: Some(Mac([2, 0x23, 0x45, 0x67, 0x89, 0xab])),
            infiniband_guid: Some(Guid([0xc2, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77])),
            cni_args: json!({"one": 1, "list": [true, null], "deep": {"er": "x"}}).as_object().cloned(),
            port_mappings: vec![
                mapping(8080, 80, PortProtocol::Tcp, None),
                mapping(53, 5353, PortProtocol::Udp, Some("192.0.2.1")),
                mapping(1, 65535, PortProtocol::Sctp, None),
            ],
            bandwidth: Some(Bandwidth {
                ingress_rate: Some(1000),
                ingress_burst: Some(2000),
                egress_rate: Some(3000),
                egress_burst: None,
            }),
            default_route: Some(vec!["10.2.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()]),
            ipam_claim_reference: None,
            device_id: Some("0000:03:02.1".to_owned()),
        }
    );
}

/// Rows: NPWG-4.1.2.1.2-ns-missing-empty.
#[test]
fn absent_null_and_empty_mean_the_same_where_the_standard_says_so() {
    assert_eq!(
        element(json!({"namespace": "", "interface": "", "deviceID": ""})).unwrap(),
        plain("shop", "a")
    );
    assert_eq!(
        element(
            json!({"namespace": null, "ips": null, "mac": null, "cni-args": null, "default-route": null})
        )
        .unwrap(),
        plain("shop", "a")
    );
    let empty_route = element(json!({"default-route": []})).unwrap();
    assert_eq!(empty_route, Selection { default_route: Some(Vec::new()), ..plain("shop", "a") });
}

/// Rows: NPWG-4.1.2.1.3-ips-empty, NPWG-4.1.2.1.3-ips-invalid, NPWG-4.1.2.1.4-mac-invalid.
/// Rows: NPWG-4.1.2.1.4-mac-20byte, NPWG-4.1.2.1.5-ifname-invalid, NPWG-4.1.2.1.6-args-bad-type.
/// Rows: NPWG-4.1.2.1.7-pm-range, NPWG-4.1.2.1.7-pm-proto-case, NPWG-4.1.2.1.8-bw-zero-or-empty.
/// Rows: NPWG-4.1.2.1.9-dr-invalid, NPWG-4.1.2.1.10-guid-invalid.
#[test]
fn values_that_the_standard_rules_out_are_refused_by_key() {
    let table = [
        ("NPWG-3.3-name-invalid", json!({"name": "a_b"}), r#"name is "a_b""#),
        ("NPWG-3.3-name-invalid", json!({"name": 1}), "name is 1"),
        ("NPWG-3.3-name-invalid", json!({"namespace": "A"}), r#"namespace is "A""#),
        ("NPWG-4.1.2.1.3-ips-empty", json!({"ips": []}), "ips is []"),
        ("NPWG-4.1.2.1.3-ips-invalid", json!({"ips": ["10.0.0.1", "300.1.1.1"]}), r#"ips[1] is "300.1.1.1""#),
        ("NPWG-4.1.2.1.3-ips-invalid", json!({"ips": ["10.0.0.1/33"]}), r#"ips[0] is "10.0.0.1/33""#),
        ("NPWG-4.1.2.1.3-ips-invalid", json!({"ips": ["10.0.0.1/"]}), r#"ips[0] is "10.0.0.1/""#),
        ("NPWG-4.1.2.1.3-ips-invalid", json!({"ips": ["10.0.0.1/+8"]}), r#"ips[0] is "10.0.0.1/+8""#),
        ("NPWG-4.1.2.1.3-ips-invalid", json!({"ips": ["::1/129"]}), r#"ips[0] is "::1/129""#),
        ("NPWG-4.1.2.1.3-ips-invalid", json!({"ips": [1]}), "ips[0] is 1"),
        ("NPWG-4.1.2.1.3-ips-invalid", json!({"ips": "10.0.0.1"}), r#"ips is "10.0.0.1""#),
        ("NPWG-4.1.2.1.4-mac-invalid", json!({"mac": "zz:00:00:00:00:01"}), r#"mac is "zz:00:00:00:00:01""#),
        ("NPWG-4.1.2.1.4-mac-invalid", json!({"mac": "02:00:00:00:01"}), r#"mac is "02:00:00:00:01""#),
        (
            "NPWG-4.1.2.1.4-mac-invalid",
            json!({"mac": "02:00:00:00:00:00:00:01"}),
            r#"mac is "02:00:00:00:00:00:00:01""#,
        ),
        ("NPWG-4.1.2.1.4-mac-invalid", json!({"mac": ""}), r#"mac is """#),
        ("NPWG-4.1.2.1.4-mac-invalid", json!({"mac": 7}), "mac is 7"),
        (
            "a group address is no interface's own",
            json!({"mac": "01:00:5e:00:00:01"}),
            r#"mac is "01:00:5e:00:00:01""#,
        ),
        ("nor is the null address", json!({"mac": "00:00:00:00:00:00"}), r#"mac is "00:00:00:00:00:00""#),
        (
            "NPWG-4.1.2.1.4-mac-20byte",
            json!({"mac": "80:00:02:08:fe:80:00:00:00:00:00:00:00:02:c9:03:00:17:81:91"}),
            r#"mac is "80:00:02:08:fe:80:00:00:00:00:00:00:00:02:c9:03:00:17:81:91""#,
        ),
        (
            "NPWG-4.1.2.1.5-ifname-invalid",
            json!({"interface": "sixteen-bytes-xx"}),
            r#"interface is "sixteen-bytes-xx""#,
        ),
        ("NPWG-4.1.2.1.5-ifname-invalid", json!({"interface": "a/b"}), r#"interface is "a/b""#),
        ("NPWG-4.1.2.1.5-ifname-invalid", json!({"interface": "a b"}), r#"interface is "a b""#),
        ("NPWG-4.1.2.1.5-ifname-invalid", json!({"interface": "."}), r#"interface is ".""#),
        ("NPWG-4.1.2.1.5-ifname-invalid", json!({"interface": ".."}), r#"interface is "..""#),
        ("NPWG-4.1.2.1.5-ifname-invalid", json!({"interface": 5}), "interface is 5"),
        ("NPWG-4.1.2.1.6-args-bad-type", json!({"cni-args": "x"}), r#"cni-args is "x""#),
        ("NPWG-4.1.2.1.6-args-bad-type", json!({"cni-args": []}), "cni-args is []"),
        ("NPWG-4.1.2.1.7-pm-range", json!({"portMappings": []}), "portMappings is []"),
        ("NPWG-4.1.2.1.7-pm-range", json!({"portMappings": [null]}), "portMappings[0] is null"),
        (
            "NPWG-4.1.2.1.7-pm-range",
            json!({"portMappings": [{"hostPort": 0, "containerPort": 80}]}),
            "portMappings[0].hostPort is 0",
        ),
        (
            "NPWG-4.1.2.1.7-pm-range",
            json!({"portMappings": [{"hostPort": 1, "containerPort": 65536}]}),
            "portMappings[0].containerPort is 65536",
        ),
        (
            "NPWG-4.1.2.1.7-pm-range",
            json!({"portMappings": [{"hostPort": -1, "containerPort": 1}]}),
            "portMappings[0].hostPort is -1",
        ),
        (
            "NPWG-4.1.2.1.7-pm-proto-case",
            json!({"portMappings": [{"hostPort": 1, "containerPort": 1, "protocol": "icmp"}]}),
            r#"portMappings[0].protocol is "icmp""#,
        ),
        (
            "host address",
            json!({"portMappings": [{"hostPort": 1, "containerPort": 1, "hostIP": "here"}]}),
            r#"portMappings[0].hostIP is "here""#,
        ),
        ("NPWG-4.1.2.1.8-bw-zero-or-empty", json!({"bandwidth": {}}), "bandwidth is {}"),
        ("NPWG-4.1.2.1.8-bw-zero-or-empty", json!({"bandwidth": 5}), "bandwidth is 5"),
        (
            "NPWG-4.1.2.1.8-bw-zero-or-empty",
            json!({"bandwidth": {"ingressRate": 0}}),
            "bandwidth.ingressRate is 0",
        ),
        (
            "NPWG-4.1.2.1.8-bw-zero-or-empty",
            json!({"bandwidth": {"egressRate": 1.5}}),
            "bandwidth.egressRate is 1.5",
        ),
        (
            "NPWG-4.1.2.1.8-bw-zero-or-empty",
            json!({"bandwidth": {"egressRate": "1M"}}),
            r#"bandwidth.egressRate is "1M""#,
        ),
        (
            "NPWG-4.1.2.1.9-dr-invalid",
            json!({"default-route": ["10.0.0.1", "up"]}),
            r#"default-route[1] is "up""#,
        ),
        (
            "NPWG-4.1.2.1.9-dr-invalid",
            json!({"default-route": ["224.0.0.1"]}),
            r#"default-route[0] is "224.0.0.1""#,
        ),
        (
            "NPWG-4.1.2.1.9-dr-invalid",
            json!({"default-route": ["10.0.0.1", "10.0.0.1"]}),
            r#"default-route[1] is "10.0.0.1""#,
        ),
        (
            "NPWG-4.1.2.1.9-dr-invalid",
            json!({"default-route": ["10.0.0.1/24"]}),
            r#"default-route[0] is "10.0.0.1/24""#,
        ),
        ("NPWG-4.1.2.1.9-dr-invalid", json!({"default-route": "10.0.0.1"}), r#"default-route is "10.0.0.1""#),
        (
            "NPWG-4.1.2.1.10-guid-invalid",
            json!({"infiniband-guid": "02:00:00:00:00:01"}),
            r#"infiniband-guid is "02:00:00:00:00:01""#,
        ),
        ("NPWG-4.1.2.1.10-guid-invalid", json!({"infiniband-guid": "x"}), r#"infiniband-guid is "x""#),
        ("claim name", json!({"ipam-claim-reference": ""}), r#"ipam-claim-reference is """#),
        ("device", json!({"deviceID": 3}), "deviceID is 3"),
    ];
    for (row, keys, message) in table {
        let text = element(keys).unwrap_err().to_string();
        let expected = format!("networks annotation element 0: {message}, but must be ");
        assert!(text.starts_with(&expected), "{row}: {text}");
    }
}

/// Rows: NPWG-4.1.2.1.7-pm-range, NPWG-4.1.2.1.8-bw-burst-needs-rate, NPWG-4.1.2.1.11-claim-plus-ips.
#[test]
fn missing_and_exclusive_keys_are_named() {
    let table = [
        (
            "NPWG-4.1.2.1.7-pm-range",
            json!({"portMappings": [{"containerPort": 80}]}),
            "networks annotation element 0: portMappings[0].hostPort is missing",
        ),
        (
            "NPWG-4.1.2.1.7-pm-range",
            json!({"portMappings": [{"hostPort": 80}]}),
            "networks annotation element 0: portMappings[0].containerPort is missing",
        ),
        (
            "NPWG-4.1.2.1.8-bw-burst-needs-rate",
            json!({"bandwidth": {"ingressBurst": 1, "egressRate": 1}}),
            "networks annotation element 0: bandwidth.ingressRate is missing",
        ),
        (
            "NPWG-4.1.2.1.8-bw-burst-needs-rate",
            json!({"bandwidth": {"egressBurst": 1}}),
            "networks annotation element 0: bandwidth.egressRate is missing",
        ),
        (
            "NPWG-4.1.2.1.11-claim-plus-ips",
            json!({"ipam-claim-reference": "c", "ips": ["10.0.0.1"]}),
            "networks annotation element 0: ipam-claim-reference and ips exclude each other",
        ),
        (
            "one key twice",
            json!({"mac": "02:00:00:00:00:01", "MAC": "02:00:00:00:00:02"}),
            "networks annotation element 0: mac and MAC exclude each other",
        ),
    ];
    for (row, keys, expected) in table {
        assert_eq!(element(keys).unwrap_err().to_string(), expected, "{row}");
    }
}

/// Rows: NPWG-4.1.2.1.9-dr-two-elements.
#[test]
fn the_default_route_moves_once() {
    // An empty list; lists of different families.
    for (first, second) in [(json!(["10.0.0.1"]), json!([])), (json!(["10.0.0.1"]), json!(["2001:db8::1"]))] {
        let annotation = json!([{"name": "a", "default-route": first}, {"name": "b"}, {"name": "c", "default-route": second}]);
        assert_eq!(
            error(&annotation.to_string()),
            "networks annotation elements 0 and 2 both have default-route"
        );
    }
    let two = element(json!({"default-route": ["2001:db8::1", "2001:db8::2"]})).unwrap();
    assert_eq!(two.default_route.unwrap().len(), 2);
}

/// Rows: NPWG-4.1.2.1-foreign-key-tolerated, NPWG-4.1.2.1-reserved-keys.
#[test]
fn odd_keys_are_warned_about_and_private_keys_are_not() {
    let parsed = parse(
        r#"[{"name":"a"},{"name":"b","org.example.x":1,"vlan":5,"MAC":"02:00:00:00:00:01","ip\u017f":["10.0.0.7"],
            "interfaceRequest":"if0","portMappings":[{"hostPort":1,"containerPort":2,"ipp":"x"}]}]"#,
    )
    .unwrap();
    assert_eq!(
        parsed.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            r#"networks annotation element 1: unknown key "vlan" is ignored"#,
            r#"networks annotation element 1: key "MAC" is read as "mac""#,
            "networks annotation element 1: key \"ip\u{17f}\" is read as \"ips\"",
            r#"networks annotation element 1: key "interfaceRequest" is read as "interface""#,
            r#"networks annotation element 1: unknown key "portMappings[0].ipp" is ignored"#,
        ]
    );
    assert_eq!(parsed.selections[1].mac, Some(Mac([2, 0, 0, 0, 0, 1])));
    let ip = RequestedIp { address: IpAddr::from([10, 0, 0, 7]), prefix: None };
    assert_eq!(parsed.selections[1].ips, [ip]);
    assert_eq!(parsed.selections[1].interface.as_deref(), Some("if0"));
}
/// Rows: NPWG-3.3-name-len.
#[test]
fn a_long_label_is_only_warned_about() {
    // NPWG-3.3-name-len
    let long = "a".repeat(64);
    let expected = vec![SelectionWarning::LongName { index: 0, name: long.clone() }];
    assert_eq!(parse(&long).unwrap().warnings, expected);
    assert_eq!(parse(&json!([{"name": long}]).to_string()).unwrap().warnings, expected);
    assert_eq!(parse(&"a".repeat(63)).unwrap().warnings, []);
}

/// Rows: NPWG-8.1-secondary-only.
#[test]
fn a_claim_or_the_default_route_is_not_for_the_default_network() {
    for key in ["ipam-claim-reference", "default-route"] {
        let value = if key == "default-route" { json!([]) } else { json!("c") };
        let text = json!([{"name": "a", key: value}]).to_string();
        let expected = format!("{key} is for additional networks, not for the default network");
        assert_eq!(parse_default_network(&text, "kube-system").unwrap_err().to_string(), expected);
    }
    let allowed = r#"[{"name": "a", "mac": "02:00:00:00:00:01", "deviceID": "x"}]"#;
    assert_eq!(parse_default_network(allowed, "kube-system").unwrap().selections.len(), 1);
}

#[test]
fn the_name_of_a_claim_joins_the_arguments() {
    let keys = json!({"cni-args": {"a": [1]}, "ipam-claim-reference": "vm.disk"});
    let expected = json!({"a": [1], "dev.netattach.ipam-claim-reference": "vm.disk"});
    assert_eq!(Value::Object(element(keys).unwrap().arguments()), expected);
    assert_eq!(element(json!({})).unwrap().arguments(), Map::new());
}

fn any_json() -> impl Strategy<Value = Value> {
    let keys = prop_oneof![
        "[a-z.]{0,6}",
        prop::sample::select(vec![
            "name",
            "namespace",
            "interface",
            "ips",
            "mac",
            "infiniband-guid",
            "cni-args",
            "portMappings",
            "bandwidth",
            "default-route",
            "ipam-claim-reference",
            "deviceID",
            "hostPort",
            "containerPort",
            "protocol",
            "hostIP",
            "ingressRate",
            "egressBurst",
            "MAC",
        ])
        .prop_map(str::to_owned),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        prop::sample::select(vec!["a", "eth0", "10.0.0.1", "10.0.0.1/24", "02:00:00:00:00:01", "tcp", ""])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((keys.clone(), inner), 0..8)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

prop_compose! {
    fn any_address()(v6 in any::<bool>(), low in any::<u32>(), high in any::<u128>()) -> IpAddr {
        if v6 { IpAddr::from(high.to_be_bytes()) } else { IpAddr::from(low.to_be_bytes()) }
    }
}

prop_compose! {
    fn any_requested_ip()(address in any_address(), bits in prop::option::of(0_u8..=128)) -> RequestedIp {
        RequestedIp { address, prefix: bits.map(|bits| if address.is_ipv4() { bits / 4 } else { bits }) }
    }
}

prop_compose! {
    fn any_port_mapping()(
        host_port in 1_u16.., container_port in 1_u16..,
        protocol in prop::sample::select(vec![PortProtocol::Tcp, PortProtocol::Udp, PortProtocol::Sctp]),
        host_ip in prop::option::of(any_address()),
    ) -> PortMapping {
        PortMapping { host_port, container_port, protocol, host_ip }
    }
}

prop_compose! {
    fn any_bandwidth()(rate in 1_u64.., other in prop::option::of(1_u64..), burst in prop::option::of(1_u64..))
        -> Bandwidth
    {
        Bandwidth {
            ingress_rate: Some(rate),
            ingress_burst: burst,
            egress_rate: other,
            egress_burst: other.and(burst),
        }
    }
}

prop_compose! {
    fn any_selection()(
        names in ("[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", "[a-z0-9]([-a-z0-9.]{0,1}[a-z0-9])?"),
        interface in prop::option::of("[a-z][a-zA-Z0-9._-]{0,14}".prop_filter("reserved", |n| is_interface_name(n))),
        ips in prop::collection::vec(any_requested_ip(), 0..4),
        mac in prop::option::of(any::<[u8; 5]>()),
        guid in prop::option::of(any::<[u8; 8]>()),
        cni_args in prop::option::of(prop::collection::vec(("[a-z]{1,4}", any::<Option<i32>>()), 0..3)),
        port_mappings in prop::collection::vec(any_port_mapping(), 0..3),
        bandwidth in prop::option::of(any_bandwidth()),
        default_route in prop::option::of(prop::collection::btree_set(any_address().prop_filter("host", is_gateway), 0..3)),
        claim in prop::option::of("[a-z]{1,5}"),
        device_id in prop::option::of("[0-9a-f:.]{1,12}"),
    ) -> Selection {
        Selection {
            network: NetworkRef::new(names.0, names.1),
            interface,
            ipam_claim_reference: claim.filter(|_| ips.is_empty()),
            ips,
            mac: mac.map(|[a, b, c, d, e]| Mac([2, a, b, c, d, e])),
            infiniband_guid: guid.map(Guid),
            cni_args: cni_args.map(|args| args.into_iter().map(|(key, value)| (key, json!(value))).collect()),
            port_mappings,
            bandwidth,
            default_route: default_route.map(|gateways| gateways.into_iter().collect()),
            device_id,
        }
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in any::<String>()) {
        let _ = parse(&text);
    }

    #[test]
    fn no_text_of_the_grammars_own_characters_makes_the_parser_panic(text in r#"[\[\]{}",:@/ a-c0-2.\\-]{0,60}"#) {
        let _ = parse(&text);
    }

    #[test]
    fn no_json_makes_the_parser_panic(elements in prop::collection::vec(any_json(), 0..5)) {
        let _ = parse(&Value::from(elements).to_string());
    }

    #[test]
    fn printed_selections_are_read_back(
        mut selections in prop::collection::vec(any_selection(), 0..4),
    ) {
        for selection in selections.iter_mut().skip(1) {
            selection.default_route = None;
        }
        let text = serde_json::to_string(&selections).unwrap();
        let parsed = parse(&text).unwrap();
        prop_assert_eq!(&parsed.selections, &selections);
        let devices = selections.iter().enumerate().filter(|(_, selection)| selection.device_id.is_some());
        let expected: Vec<_> =
            devices.map(|(index, _)| SelectionWarning::NotOfTheStandard { index, key: "deviceID" }).collect();
        prop_assert_eq!(parsed.warnings, expected);
        prop_assert_eq!(serde_json::from_str::<Vec<Selection>>(&text).unwrap(), selections);
    }
}
