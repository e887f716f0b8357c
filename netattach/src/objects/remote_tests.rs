//! What is read of a pod of another node, and what it takes.

use serde_json::json;

use super::*;

const UUID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

fn read(status: Option<&str>, ports: Option<&str>) -> RemotePod {
    let labels = Labels::from([("app".to_owned(), "db".to_owned())]);
    let written = Written { uid: Some(UUID), labels, status, ports, beyond: None };
    RemotePod::read(&ObjectName::new("shop", "db-0"), written, &mut Interner::default())
}

fn port(name: Option<&str>, protocol: PortProtocol, port: u16) -> ContainerPort {
    ContainerPort { name: name.map(str::to_owned), protocol, port }
}

fn lan(name: &str) -> Arc<Place> {
    Arc::new(Place::Network(NetworkRef::new("shop", name)))
}

#[test]
fn a_pod_of_another_node_takes_at_most_300_bytes() {
    // What the C library takes for so many bytes: its own word, in units of 16.
    let chunk = |bytes: usize| (bytes + 8).next_multiple_of(16).max(32);
    let value = chunk(2 * size_of::<usize>() + size_of::<RemotePod>());
    let name = chunk(40);
    let addresses = chunk(2 * size_of::<(Arc<Place>, IpAddr)>());
    let in_the_map = size_of::<Arc<RemotePod>>();
    assert_eq!((value, name, addresses, in_the_map), (144, 48, 80, 8), "as the type's description says");
    assert!(matches!(Uid::new(UUID), Uid::Uuid(_)), "no memory of its own");
}

#[test]
fn its_addresses_are_those_of_its_status() {
    let status = json!([
        {"name": "cbr0", "default": true, "ips": ["10.9.0.9"]},
        {"name": "other/wan", "default": true, "ips": ["192.0.2.1"]},
        {"name": "shop/lan", "interface": "net1", "ips": ["fd00::9", "10.0.0.9/24", "10.0.0.9"]},
        {"name": "short", "ips": ["10.1.0.9"]},
        {"name": "shop/none"},
    ]);
    let pod = read(Some(&status.to_string()), Some(r#"{"TCP/http":[8080,0,80],"UDP/dns":[53]}"#));
    let wan = Arc::new(Place::Network(NetworkRef::new("other", "wan")));
    let address = |place: &Arc<Place>, text: &str| (Arc::clone(place), text.parse().unwrap());
    let expected = RemotePod {
        namespace: "shop".into(),
        name: "db-0".into(),
        uid: Some(Uid::new(UUID)),
        labels: Arc::new(Labels::from([("app".to_owned(), "db".to_owned())])),
        addresses: [
            address(&wan, "192.0.2.1"),
            address(&lan("lan"), "10.0.0.9"),
            address(&lan("lan"), "fd00::9"),
            address(&lan("short"), "10.1.0.9"),
            address(&Arc::new(Place::Default), "10.9.0.9"),
            address(&Arc::new(Place::Default), "192.0.2.1"),
        ]
        .into(),
        ports: [
            port(Some("http"), PortProtocol::Tcp, 8080),
            port(Some("http"), PortProtocol::Tcp, 80),
            port(Some("dns"), PortProtocol::Udp, 53),
        ]
        .into(),
        unreadable: None,
    };
    assert_eq!(pod, expected);
    assert_eq!(read(None, None).addresses, [].into());
    assert_eq!(read(Some(" "), None).unreadable, None);
}

#[test]
fn one_that_cannot_be_read_says_why() {
    let why = |status: &str, ports: Option<&str>| read(Some(status), ports).unreadable.map(String::from);
    assert!(why("[", None).unwrap().starts_with("read network-status annotation: EOF"));
    assert!(why("[]", Some("[]")).unwrap().starts_with("read annotation netattach.dev/ports: invalid type"));
    for key in ["http", "ICMP/http", "TCP/"] {
        let expected = format!("annotation netattach.dev/ports: {key:?} is not of the form PROTOCOL/name");
        assert_eq!(why("[]", Some(&json!({key: [1]}).to_string())), Some(expected));
    }
    let status = |addresses: usize| {
        let ips: Vec<String> = (0..addresses).map(|number| format!("10.0.0.{number}")).collect();
        json!([{"name": "shop/lan", "ips": ips}]).to_string()
    };
    assert_eq!(read(Some(&status(64)), None).addresses.len(), 64);
    assert_eq!(
        why(&status(65), None).unwrap(),
        "addresses in its status: 65 addresses, and at most 64 are read of a pod of another node"
    );
    assert_eq!(why(&" ".repeat(64 << 10), None), None);
    assert_eq!(
        why(&" ".repeat((64 << 10) + 1), None).unwrap(),
        "network-status annotation: 65537 bytes, and at most 65536 are read of a pod of another node"
    );
    let ports = |count: usize| json!({"TCP/http": (1..=count).collect::<Vec<_>>()}).to_string();
    assert_eq!(why("[]", Some(&ports(256))), None);
    assert_eq!(
        why("[]", Some(&ports(257))).unwrap(),
        "ports: 257 ports, and at most 256 are read of a pod of another node"
    );
    assert!(
        why("[]", Some(&" ".repeat((16 << 10) + 1))).unwrap().starts_with("annotation of ports: 16385 b")
    );
}

/// The pod that holds an address is no peer, but nobody else gets its address.
#[test]
fn addresses_count_as_claimed_even_where_the_rest_cannot_be_read() {
    let name = ObjectName::new("shop", "db-0");
    let labels = Labels::from([("app".to_owned(), "x".repeat(16 << 10))]);
    let status = Some(r#"[{"name": "shop/lan", "ips": ["10.0.0.9"]}]"#);
    let pod =
        RemotePod::read(&name, Written { labels, status, ..Written::default() }, &mut Interner::default());
    assert_eq!(
        pod.unreadable.as_deref(),
        Some("labels: 16387 bytes, and at most 16384 are read of a pod of another node")
    );
    assert_eq!((pod.labels.len(), &*pod.addresses), (0, &[(lan("lan"), "10.0.0.9".parse().unwrap())][..]));
}

#[test]
fn ports_are_read_as_they_are_written() {
    let ports = [
        port(Some("http"), PortProtocol::Tcp, 8080),
        port(None, PortProtocol::Tcp, 9),
        port(Some("http"), PortProtocol::Tcp, 80),
        port(Some("http"), PortProtocol::Udp, 80),
        port(Some("http"), PortProtocol::Tcp, 80),
        port(Some("s"), PortProtocol::Sctp, 7),
    ];
    let text = ports_annotation(&ports).unwrap();
    assert_eq!(text, r#"{"SCTP/s":[7],"TCP/http":[80,8080],"UDP/http":[80]}"#);
    let mut expected = vec![ports[2].clone(), ports[0].clone(), ports[3].clone(), ports[5].clone()];
    let mut found = super::ports(Some(&text)).unwrap();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
    assert_eq!(ports_annotation(&[]), None);
    assert_eq!(ports_annotation(&ports[1..2]), None);
    // However many, others can read it.
    for length in [1, 15, 500] {
        let many = (1..2000).map(|number| {
            let name = format!("{number:0>length$}");
            port(Some(&name), PortProtocol::Sctp, number)
        });
        let text = ports_annotation(&many.collect::<Vec<_>>()).unwrap();
        assert!(!super::ports(Some(&text)).unwrap().is_empty());
    }
}

#[test]
fn identities_are_printed_as_they_were_written() {
    for text in
        [UUID, "", "uid-db", "0F8FAD5B-d9cb-469f-a165-70867728950e", "0f8fad5bd9cb469fa16570867728950e-"]
    {
        assert_eq!(Uid::new(text).to_string(), text);
        assert_eq!(matches!(Uid::new(text), Uid::Uuid(_)), text == UUID);
    }
}
