//! The parts that are read of a pod of another node, and their memory.

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

fn lan(name: &str) -> Place {
    Place::Network(NetworkRef::new("shop", name))
}

/// The bytes that the C library allocates: one word of overhead, in units of 16.
fn chunk(bytes: usize) -> usize {
    (bytes + 8).next_multiple_of(16).max(32)
}

#[test]
fn a_pod_of_another_node_takes_as_much_as_is_said() {
    let status = json!([
        {"name": "shop/lan", "ips": ["10.0.0.9"]},
        {"name": "shop/wan", "ips": ["10.1.0.9"]},
    ]);
    let name = ObjectName::new("shop", "x".repeat(40));
    let status = status.to_string();
    let written = Written { uid: Some(UUID), status: Some(&status), ..Written::default() };
    let pod = RemotePod::read(&name, written, &mut Interner::default());
    let value = chunk(2 * size_of::<usize>() + size_of::<RemotePod>());
    let own = chunk(pod.own.len());
    let in_the_map = size_of::<Arc<RemotePod>>();
    assert_eq!((value, own, in_the_map), (48, 80, 8), "as the type's description says");
}

#[test]
fn pods_of_a_workload_share_what_they_have_in_common() {
    let mut interner = Interner::default();
    let mut read = |name: &str, app: &str, lan: &str, ports: Option<&str>| {
        let labels = Labels::from([("app".to_owned(), app.to_owned())]);
        let status = json!([{"name": lan, "ips": ["10.0.0.9"]}]).to_string();
        let written = Written { uid: Some(name), labels, status: Some(&status), ports, beyond: None };
        RemotePod::read(&ObjectName::new("shop", name), written, &mut interner)
    };
    let (one, other) = ("0f8fad5b-d9cb-469f-a165-000000000001", "0f8fad5b-d9cb-469f-a165-000000000002");
    let first = read(one, "db", "lan", None);
    assert_eq!(read(other, "db", "lan", None).kind(), first.kind());
    let different = [
        read(other, "web", "lan", None),
        read(other, "db", "wan", None),
        read(other, "db", "lan", Some(r#"{"TCP/sql":[1]}"#)),
        read(other, "db", "lan", Some("[")),
    ];
    assert!(different.iter().all(|pod| pod.kind() != first.kind()));
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
    let wan = Place::Network(NetworkRef::new("other", "wan"));
    let claims: Vec<(&Place, String)> =
        pod.claims().map(|(place, address)| (place, address.to_string())).collect();
    let address = |place, text: &str| (place, text.to_owned());
    assert_eq!(
        claims,
        [
            address(&wan, "192.0.2.1"),
            address(&lan("lan"), "10.0.0.9"),
            address(&lan("lan"), "fd00::9"),
            address(&lan("short"), "10.1.0.9"),
            address(&Place::Default, "10.9.0.9"),
            address(&Place::Default, "192.0.2.1"),
        ]
    );
    assert_eq!(
        pod.ports(),
        [
            port(Some("http"), PortProtocol::Tcp, 8080),
            port(Some("http"), PortProtocol::Tcp, 80),
            port(Some("dns"), PortProtocol::Udp, 53),
        ]
    );
    assert_eq!((pod.namespace(), pod.name(), pod.unreadable()), ("shop", "db-0", None));
    assert_eq!(*pod.labels(), Labels::from([("app".to_owned(), "db".to_owned())]));
    assert!(pod.has_uid(Some(UUID)));
    assert_eq!(read(None, None).claims().count(), 0);
    assert_eq!(read(Some(" "), None).unreadable(), None);
}

#[test]
fn one_that_cannot_be_read_says_why() {
    let why = |status: &str, ports: Option<&str>| read(Some(status), ports).unreadable().map(str::to_owned);
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
    assert_eq!(read(Some(&status(64)), None).claims().count(), 64);
    assert_eq!(
        why(&status(65), None).unwrap(),
        "addresses in its status: 65 addresses, and at most 64 are read of a pod that is attached elsewhere"
    );
    assert_eq!(why(&" ".repeat(64 << 10), None), None);
    assert_eq!(
        why(&" ".repeat((64 << 10) + 1), None).unwrap(),
        "network-status annotation: 65537 bytes, and at most 65536 are read of a pod that is attached elsewhere"
    );
    let ports = |count: usize| json!({"TCP/http": (1..=count).collect::<Vec<_>>()}).to_string();
    assert_eq!(why("[]", Some(&ports(256))), None);
    let name = |length: usize| "a".repeat(length);
    let [longest, longer] = [15, 16].map(|length| {
        let key = format!("TCP/{}", name(length));
        read(None, Some(&json!({key: [7], "UDP/dns": [53]}).to_string()))
    });
    let dns = port(Some("dns"), PortProtocol::Udp, 53);
    assert_eq!(longest.ports(), [port(Some(&name(15)), PortProtocol::Tcp, 7), dns.clone()]);
    assert_eq!((longer.ports(), longer.unreadable()), (&[dns][..], None), "no policy can name the other one");
    assert_eq!(
        why("[]", Some(&ports(257))).unwrap(),
        "ports: 257 ports, and at most 256 are read of a pod that is attached elsewhere"
    );
    assert!(
        why("[]", Some(&" ".repeat((16 << 10) + 1))).unwrap().starts_with("annotation of ports: 16385 b")
    );
}

/// The pod that holds an address is no peer, but no other pod gets its address.
#[test]
fn addresses_count_as_claimed_even_where_the_rest_cannot_be_read() {
    let name = ObjectName::new("shop", "db-0");
    let labels = Labels::from([("app".to_owned(), "x".repeat(16 << 10))]);
    let status = Some(r#"[{"name": "shop/lan", "ips": ["10.0.0.9"]}]"#);
    let pod =
        RemotePod::read(&name, Written { labels, status, ..Written::default() }, &mut Interner::default());
    assert_eq!(
        pod.unreadable(),
        Some("labels: 16387 bytes, and at most 16384 are read of a pod that is attached elsewhere")
    );
    let claims: Vec<_> = pod.claims().collect();
    assert_eq!((pod.labels().len(), claims), (0, vec![(&lan("lan"), "10.0.0.9".parse().unwrap())]));
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
    // Whatever the number, other pods can be read.
    for (length, expected) in [(4, Some(PORTS_OF_REMOTE_POD)), (14, Some(PORTS_OF_REMOTE_POD)), (15, None)] {
        let many = (1..2000).map(|number| {
            let name = format!("p{number:0>length$}");
            port(Some(&name), PortProtocol::Sctp, number)
        });
        let text = ports_annotation(&many.collect::<Vec<_>>());
        assert_eq!(text.map(|text| super::ports(Some(&text)).unwrap().len()), expected, "{length}");
    }
}

#[test]
fn a_pod_has_the_identity_that_was_written_and_no_other() {
    let texts =
        [UUID, "", "uid-db", "0F8FAD5B-d9cb-469f-a165-70867728950e", "0f8fad5bd9cb469fa16570867728950e-"];
    let uids: Vec<Option<&str>> = texts.into_iter().map(Some).chain([None]).collect();
    for uid in &uids {
        let written = Written { uid: *uid, ..Written::default() };
        let pod = RemotePod::read(&ObjectName::new("shop", "db-0"), written, &mut Interner::default());
        let has: Vec<&Option<&str>> = uids.iter().filter(|uid| pod.has_uid(**uid)).collect();
        assert_eq!(has, [uid]);
        assert_eq!(pod.own.uuid().is_some(), *uid == Some(UUID));
    }
}
