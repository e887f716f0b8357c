//! Translation by nftables alone, as in kube-proxy's mode `nftables`: written by netlink, since the machine may lack
//! the program.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::{NETFILTER, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::translations::Service;
use super::*;

const NESTED: u16 = 0x8000;
const NEW_TABLE: u16 = 0;
const TABLE: &[u8] = b"kube-proxy\0";

/// Translates incoming packets and packets of the node to these Services, and to their ports of the node.
fn translate(scene: &Scene, family: usize) {
    let services = scene.services(family);
    scene.node.namespace.run(|| transact(family, &services)).unwrap();
}

fn transact(family: usize, services: &[Service]) -> io::Result<()> {
    const NEW_CHAIN: u16 = 3;
    const NEW_RULE: u16 = 6;
    // `NFPROTO_IPV4`, `NFPROTO_IPV6`.
    let number = [2u8, 10][family];
    let mut messages = vec![message(NEW_TABLE, number, &attribute(1, TABLE))];
    // Prerouting and output, at the priority of translation.
    for (chain, hook) in [(&b"nat-prerouting\0"[..], 0u32), (b"nat-output\0", 3)] {
        let hook = [attribute(1, &hook.to_be_bytes()), attribute(2, &(-100i32).to_be_bytes())].concat();
        let table = attribute(1, TABLE);
        let made = [table.clone(), attribute(3, chain), attribute(4 | NESTED, &hook), attribute(7, b"nat\0")];
        messages.push(message(NEW_CHAIN, number, &made.concat()));
        for service in services {
            for protocol in [6, 17] {
                let mut ends = vec![(service.address, service.port)];
                ends.extend(service.external.map(|address| (address, service.port)));
                for port in [service.node_port, service.host_port].into_iter().flatten() {
                    ends.extend(
                        [NODES, PODS].map(|nodes| (format!("{}1", nodes[family]).parse().unwrap(), port)),
                    );
                }
                for (address, port) in ends {
                    let expressions = rule(number, protocol, address, port, service.backend);
                    let rule = [table.clone(), attribute(2, chain), attribute(4 | NESTED, &expressions)];
                    messages.push(message(NEW_RULE, number, &rule.concat()));
                }
            }
        }
    }
    send(&messages).map(drop)
}

/// Replaces the agent's table with one that only its owner can change or remove; it is removed when this is dropped.
fn occupy(scene: &Scene) -> OwnedFd {
    const DELETE_TABLE: u16 = 2;
    /// `NFPROTO_INET`.
    const BOTH: u8 = 1;
    /// `NFT_TABLE_F_OWNER`.
    const OWNED: u32 = 2;
    let table = attribute(1, b"netattach\0");
    let owned = [table.clone(), attribute(2, &OWNED.to_be_bytes())].concat();
    let messages = [message(DELETE_TABLE, BOTH, &table), message(NEW_TABLE, BOTH, &owned)];
    scene.node.namespace.run(|| send(&messages)).unwrap()
}

/// `meta l4proto PROTOCOL ip daddr ADDRESS th dport PORT dnat to BACKEND`
fn rule(family: u8, protocol: u8, address: IpAddr, port: u16, to: SocketAddr) -> Vec<u8> {
    let number = |kind, value: u32| attribute(kind, &value.to_be_bytes());
    let value = |bytes: &[u8]| attribute(1, bytes);
    let (at, length) = if address.is_ipv4() { (16, 4) } else { (24, 16) };
    let compare = |bytes: &[u8]| {
        expression(b"cmp\0", &[number(1, 1), number(2, 0), attribute(3 | NESTED, &value(bytes))].concat())
    };
    let load = |base, offset, length| {
        let read = [number(1, 1), number(2, base), number(3, offset), number(4, length)];
        expression(b"payload\0", &read.concat())
    };
    let set = |register, bytes: &[u8]| {
        expression(b"immediate\0", &[number(1, register), attribute(2 | NESTED, &value(bytes))].concat())
    };
    let translation = [number(1, 1), number(2, family.into()), number(3, 1), number(5, 2)];
    [
        expression(b"meta\0", &[number(1, 1), number(2, 16)].concat()),
        compare(&[protocol]),
        load(1, at, length),
        compare(&octets(address)),
        load(2, 2, 2),
        compare(&port.to_be_bytes()),
        set(1, &octets(to.ip())),
        set(2, &to.port().to_be_bytes()),
        expression(b"nat\0", &translation.concat()),
    ]
    .concat()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}

fn expression(name: &[u8], data: &[u8]) -> Vec<u8> {
    attribute(1 | NESTED, &[attribute(1, name), attribute(2 | NESTED, data)].concat())
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = ((4 + value.len()) as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// A message to the nftables subsystem: create, append, acknowledge.
fn message(kind: u16, family: u8, attributes: &[u8]) -> Vec<u8> {
    envelope(10 << 8 | kind, 0x1 | 0x4 | 0x400 | 0x800, [family, 0, 0, 0], attributes)
}

fn envelope(kind: u16, flags: u16, general: [u8; 4], attributes: &[u8]) -> Vec<u8> {
    let mut bytes = ((20 + attributes.len()) as u32).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend(general);
    bytes.extend(attributes);
    bytes
}

/// The socket owns tables with the owner flag.
fn send(messages: &[Vec<u8>]) -> io::Result<OwnedFd> {
    let socket: OwnedFd = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::NONBLOCK,
        Some(NETFILTER),
    )?;
    let batch =
        [envelope(0x10, 1, [0, 0, 0, 10], &[]), messages.concat(), envelope(0x11, 1, [0, 0, 0, 10], &[])];
    rustix::net::sendto(&socket, &batch.concat(), SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = match rustix::net::recv(&socket, &mut buffer, RecvFlags::empty()) {
            Ok((length, _)) => length,
            Err(rustix::io::Errno::AGAIN) => return Ok(socket),
            Err(error) => return Err(error.into()),
        };
        let mut rest = &buffer[..length];
        while rest.len() >= 20 {
            let code = i32::from_ne_bytes(rest[16..20].try_into().unwrap());
            if code != 0 {
                return Err(io::Error::from_raw_os_error(-code));
            }
            let next = u32::from_ne_bytes(rest[..4].try_into().unwrap()).next_multiple_of(4) as usize;
            rest = rest.get(next..).unwrap_or_default();
        }
    }
}

/// Rows: SVC-egress, SVC-node-ports, SVC-answers.
#[test]
fn what_nftables_translates_is_judged_by_where_it_goes() {
    for links in [Links::Bridge, Links::Routed] {
        let scene = Scene::untranslated(links);
        for family in [0, 1] {
            translate(&scene, family);
        }
        scene.await_stack();
        scene.policy("deny", &json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}));
        scene.policy("out", &json!({
            "podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"],
            "egress": [{"to": [app("server"), {"namespaceSelector": {"matchLabels": {"ns": "elsewhere"}}}], "ports": both(WEB_BEHIND)}]
        }));
        scene.policy(
            "in",
            &json!({
                "podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
                "ingress": [{"from": [app("client")]}]
            }),
        );
        scene.expect(&[
            ("client", To::Service(1, WEB), true),
            ("client", To::Service(2, WEB), true),
            ("client", To::Node(NODE_PORT), true),
            ("client", To::Node(HOST_PORT), true),
            ("client", To::External(WEB), true),
            ("client", To::Service(1, ADMIN), false),
            ("client", To::Service(2, ADMIN), false),
            ("client", To::Service(3, WEB), false),
            ("other", To::Service(1, WEB), false),
            ("other", To::Node(NODE_PORT), false),
            ("remote", To::Node(NODE_PORT), false),
            ("node", To::Service(1, WEB), true),
        ]);
        scene.end();
    }
}

/// Without the table, policies are not applied again after the translation: traffic to the node is not exempt from
/// them, as its ports could lead to other pods.
#[test]
fn while_the_table_cannot_be_there_no_port_of_the_node_leads_an_isolated_pod_elsewhere() {
    let scene = Scene::new(Links::Bridge);
    scene.policy(
        "client",
        &json!({"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"]}),
    );
    let led = [
        ("client", To::Node(NODE_PORT), false),
        ("client", To::Gateway(NODE_PORT), false),
        ("client", To::Service(1, WEB), false),
        ("other", To::Node(NODE_PORT), true),
    ];
    scene.expect(&led);
    let missing = || {
        scene.node.ctl(&["status"]).unwrap().to_string().contains("the table netattach cannot be put back")
    };
    assert!(!missing());
    let occupied = occupy(&scene);
    assert!(eventually(PATIENCE, missing), "{:#}", scene.node.ctl(&["status"]).unwrap());
    scene.expect(&led);
    drop(occupied);
    assert!(eventually(PATIENCE, || scene.guard_is_whole()));
    assert!(eventually(PATIENCE, || !missing()));
    scene.expect(&led);
    scene.end();
}
