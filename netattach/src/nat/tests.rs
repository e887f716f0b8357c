//! Translations as elements, and the holders of ports. Without a kernel.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

use super::*;
use crate::budget;
use crate::npwg::selection::PortProtocol;
use crate::step::{LeasedAddress, Translate};

fn leased(addresses: &[&str]) -> Vec<LeasedAddress> {
    addresses.iter().map(|net| LeasedAddress { address: net.parse().unwrap(), gateway: None }).collect()
}

fn translate(value: Value) -> Translate {
    serde_json::from_value(value).unwrap()
}

fn ports(bridged: bool, ports: Value) -> Translate {
    translate(json!({"device": "br0", "bridged": bridged, "ports": ports}))
}

const BOTH: [&str; 2] = ["10.1.0.2/24", "fd00::2/64"];

/// Elements of a set as text: key, end, value, in hexadecimal digits without padding of lists.
fn shown(wish: &Wish, set: Set) -> Vec<String> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let of_set = wish.elements.iter().filter(|element| element.set == set);
    of_set
        .map(|element| {
            let end = element.end.as_deref().map(|end| format!("-{}", hex(&end[8..]))).unwrap_or_default();
            let key = match set {
                Set::Prefixes4 | Set::Prefixes6 => &element.key[8..],
                _ => &element.key[..],
            };
            let value = match set {
                Set::Ports4 | Set::Ports6 => format!("={}", hex(&element.value)),
                _ => String::new(),
            };
            format!("{}{end}{value}", hex(key))
        })
        .collect()
}

#[test]
fn there_is_nothing_to_look_after_while_no_attachment_wants_anything() {
    let nat = Nat::new("/state");
    assert!(nat.has_nothing());
    let key = Key { container: "a".to_owned(), ifname: "eth0".to_owned() };
    nat.guard(&Holder { key, who: "pod shop/a".to_owned() }, "br0");
    assert!(!nat.has_nothing());
}

#[test]
fn a_port_of_every_address_is_opened_in_both_families_and_for_loopback() {
    let asked = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let wish = Wish::new(&ports(true, asked), &leased(&BOTH)).unwrap();
    assert_eq!(shown(&wish, Set::Ports4), ["00000000060000001f900000=0a01000200500000"]);
    let v6 = format!("{:032x}060000001f900000=fd00{:028x}00500000", 0, 2);
    assert_eq!(shown(&wish, Set::Ports6), [v6]);
    assert_eq!(shown(&wish, Set::Mapped4), ["0a01000206000000005000001f900000"]);
    // The pod would answer a sender in its own subnet directly, past the node.
    assert_eq!(shown(&wish, Set::Prefixes4), ["0a010000-0a0100ff"]);
    assert_eq!(shown(&wish, Set::Masquerade4), Vec::<String>::new());
    assert_eq!(wish.opened.as_deref(), Some("br0"));
    assert_eq!(shown(&wish, Set::Devices), ["62723000000000000000000000000000"]);
}

/// The list that the port's element names selects the senders that are masqueraded; without a list 127.0.0.1
/// gets no answer.
#[test]
fn who_comes_with_the_nodes_address_is_as_asked_for() {
    let of = |senders: &str, device: &str| {
        let asked = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
        let step = json!({"device": device, "bridged": true, "ports": asked, "senders": senders});
        let wish = Wish::new(&translate(step), &leased(&BOTH)).unwrap();
        let lists = [shown(&wish, Set::Prefixes4), shown(&wish, Set::Prefixes6)].concat();
        (shown(&wish, Set::Mapped4).len(), lists, wish.opened)
    };
    let (zeros, ones) = ("0".repeat(32), "f".repeat(32));
    let all = vec!["00000000-ffffffff".to_owned(), format!("{zeros}-{ones}")];
    let near = vec!["0a010000-0a0100ff".to_owned(), format!("fd00{0:028}-fd00{0:012}{1}", 0, "f".repeat(16))];
    assert_eq!(of("near", "br0"), (1, near, Some("br0".to_owned())));
    assert_eq!(of("all", "br0"), (1, all.clone(), Some("br0".to_owned())));
    assert_eq!(of("none", "br0"), (0, Vec::new(), None));
    // No device leads to the pod.
    assert_eq!(of("all", ""), (1, all, None));
}

#[test]
fn a_port_of_one_address_is_opened_there_alone() {
    let asked = json!([{"hostPort": 53, "containerPort": 5353, "protocol": "udp", "hostIP": "192.0.2.1"}]);
    let wish = Wish::new(&ports(false, asked), &leased(&BOTH)).unwrap();
    assert_eq!(shown(&wish, Set::Ports4), ["c00002011100000000350000=0a01000214e90000"]);
    assert_eq!(shown(&wish, Set::Ports6), Vec::<String>::new());
    // On a routed link, only the pod itself would be answered past the node.
    assert_eq!(shown(&wish, Set::Prefixes4), ["0a010002-0a010002"]);
    assert_eq!((wish.opened.as_deref(), shown(&wish, Set::Devices)), (None, vec![]));
    // Loopback alone.
    let asked = json!([{"hostPort": 53, "containerPort": 53, "protocol": "udp", "hostIP": "127.0.0.1"}]);
    let wish = Wish::new(&ports(false, asked), &leased(&BOTH)).unwrap();
    assert_eq!(wish.opened.as_deref(), Some("br0"));
}

#[test]
fn a_port_without_an_address_to_lead_to_is_refused() {
    let refused = |at: &str, addresses: &[&str]| {
        let asked = json!([{"hostPort": 80, "containerPort": 80, "protocol": "tcp", "hostIP": at}]);
        Wish::new(&ports(true, asked), &leased(addresses)).unwrap_err().to_string()
    };
    assert_eq!(
        refused("::", &["10.1.0.2/24"]),
        "hostPort 80 of :: asked for, but the attachment has no IPv6 address"
    );
    assert_eq!(
        refused("0.0.0.0", &["fd00::2/64"]),
        "hostPort 80 of 0.0.0.0 asked for, but the attachment has no IPv4 address"
    );
    let asked = json!([{"hostPort": 80, "containerPort": 80, "protocol": "tcp"}]);
    let error = Wish::new(&ports(true, asked), &[]).unwrap_err().to_string();
    assert_eq!(error, "hostPort 80 of the node asked for, but the attachment has no IP address");
}

#[test]
fn masquerade_excepts_the_own_subnet_groups_the_link_and_what_is_listed() {
    let asked = json!({
        "device": "br0", "bridged": true,
        "masquerade": ["10.1.0.0/16", "10.1.7.0/24", "192.0.2.0/25", "192.0.2.128/25", "fd00:1::/32"]
    });
    let wish = Wish::new(&translate(asked), &leased(&BOTH)).unwrap();
    assert_eq!(shown(&wish, Set::Masquerade4), ["0a010002"]);
    // Ranges of one list do not overlap: the kernel would refuse them.
    assert_eq!(
        shown(&wish, Set::Prefixes4),
        ["0a010000-0a01ffff", "a9fe0000-a9feffff", "c0000200-c00002ff", "e0000000-efffffff"]
    );
    assert_eq!(shown(&wish, Set::Prefixes6).len(), 4);
    // Attachments of one network share the list.
    let other =
        Wish::new(&translate(json!({"device": "br0", "bridged": true, "masquerade": []})), &leased(&BOTH));
    let alike = Wish::new(
        &translate(json!({"device": "br1", "bridged": true, "masquerade": []})),
        &leased(&["10.1.0.9/24", "fd00::9/64"]),
    );
    let lists = |wish: &Wish| -> Vec<Element> {
        let of = |element: &&Element| matches!(element.set, Set::Prefixes4 | Set::Prefixes6);
        wish.elements.iter().filter(of).cloned().collect()
    };
    assert_eq!(lists(&other.unwrap()), lists(&alike.unwrap()));
}

/// Where an address of it is known, a port of the other family is that of a pod of which nothing is known.
#[test]
fn ports_are_an_attachments_own_by_their_numbers_alone_only_where_no_address_of_it_is_known() {
    let asked = ports(true, json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]));
    let stranger = Wish::new(&asked, &leased(&BOTH)).unwrap();
    let sets = |addresses: &[&str]| -> BTreeSet<Set> {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let its = Left { translate: &asked, addresses }.among(&stranger.elements);
        its.into_iter().map(|element| element.set).collect()
    };
    let [v4, v6] = [[Set::Ports4, Set::Mapped4], [Set::Ports6, Set::Mapped6]].map(BTreeSet::from);
    assert_eq!(sets(&["10.1.0.9"]), BTreeSet::new());
    assert_eq!(sets(&["10.1.0.2"]), v4);
    assert_eq!(sets(&["fd00::2"]), v6);
    assert_eq!(sets(&[]), v4.union(&v6).copied().collect());
}

fn holder(container: &str) -> Holder {
    let key = Key { container: container.to_owned(), ifname: "eth0".to_owned() };
    Holder { key, who: format!("container {container}, interface eth0") }
}

#[test]
fn a_port_has_one_holder_whatever_the_addresses_it_is_asked_for() {
    let wanted = |port: u16, protocol: &str, at: Option<&str>| {
        let mut one = json!({"hostPort": port, "containerPort": 80, "protocol": protocol});
        if let Some(at) = at {
            one["hostIP"] = at.into();
        }
        Wish::new(&ports(true, json!([one])), &leased(&BOTH)).unwrap()
    };
    let mut held = Ports::default();
    let mut claim = |container: &str, wish: &Wish| {
        held.claim(&wish.ports, &holder(container)).map_err(|taken| NatError::PortTaken(taken).to_string())
    };
    claim("a", &wanted(80, "tcp", Some("192.0.2.1"))).unwrap();
    // A repeated claim is no conflict, nor is another protocol, port or address.
    claim("a", &wanted(80, "tcp", Some("192.0.2.1"))).unwrap();
    claim("b", &wanted(80, "udp", None)).unwrap();
    claim("b", &wanted(81, "tcp", None)).unwrap();
    claim("b", &wanted(80, "tcp", Some("192.0.2.2"))).unwrap();
    claim("b", &wanted(80, "tcp", Some("::"))).unwrap();
    assert_eq!(
        claim("c", &wanted(80, "tcp", None)).unwrap_err(),
        "hostPort 80/tcp of 192.0.2.1 is taken: container a, interface eth0 has it"
            .replace(" of 192.0.2.1", " (IPv4)")
    );
    assert_eq!(
        claim("c", &wanted(80, "tcp", Some("192.0.2.1"))).unwrap_err(),
        "hostPort 80/tcp of 192.0.2.1 is taken: container a, interface eth0 has it"
    );
    held.release(&wanted(80, "tcp", Some("192.0.2.1")).ports, &holder("a").key);
    let gone = wanted(80, "tcp", Some("192.0.2.1"));
    held.claim(&gone.ports, &holder("c")).unwrap();
}

/// Returns that many ports of the node from `first` on, all of one pod.
fn held(first: usize, count: usize) -> Vec<HostPort> {
    let port = |number: usize| HostPort {
        protocol: PortProtocol::Udp,
        at: (Ipv4Addr::UNSPECIFIED, u16::try_from(number).unwrap()).into(),
        to: ([10, 1, 0, 2], 80).into(),
    };
    (first..first + count).map(port).collect()
}

#[test]
fn neither_a_pod_nor_a_node_has_more_ports_than_the_bounds() {
    let (of_pod, of_node) = (budget::HOST_PORTS_OF_POD, budget::HOST_PORTS);
    let mut ports = Ports::default();
    let mut first = 1;
    while first + of_pod.most <= of_node.most {
        let holder = holder(&first.to_string());
        assert_eq!(ports.check_room(&held(first, of_pod.most), &holder.key), Ok(()), "{first}");
        ports.claim(&held(first, of_pod.most), &holder).unwrap();
        first += of_pod.most;
    }
    let left = of_node.most + 1 - first;
    ports.claim(&held(first, left / 2), &holder("half")).unwrap();
    let (first, left) = (first + left / 2, left - left / 2);
    // The bound counts a pod's interfaces together, and its own ports are not counted twice.
    let own = holder("1").key;
    let other = Key { ifname: "eth1".to_owned(), ..own.clone() };
    let refused =
        |key: &Key, count: usize| NatError::from(ports.check_room(&held(first, count), key).unwrap_err());
    assert_eq!(ports.check_room(&held(1, of_pod.most), &own), Ok(()));
    assert_eq!(ports.check_room(&[], &other), Ok(()));
    assert_eq!(
        refused(&other, 1).to_string(),
        "ports of the node that lead to one pod: 1025 ports, and at most 1024 are allowed"
    );
    let late = holder("late").key;
    assert_eq!(ports.check_room(&held(first, left), &late), Ok(()));
    let many = refused(&late, left + 1);
    assert!(matches!(many, NatError::ManyPorts(_)), "{many:?}");
    assert_eq!(
        many.to_string(),
        "ports of the node that lead to pods: 8193 ports, and at most 8192 are allowed"
    );
}

#[test]
fn a_reserved_port_is_nobodys_whatever_the_address() {
    let reserved = Reserved { own: Some(10475), set: [10250].into() };
    let found = |port: u16, protocol: &str, at: Option<&str>| {
        let mut one = json!({"hostPort": port, "containerPort": 80, "protocol": protocol});
        if let Some(at) = at {
            one["hostIP"] = at.into();
        }
        let free = json!({"hostPort": 80, "containerPort": 80, "protocol": "tcp"});
        let wish = Wish::new(&ports(true, json!([free, one])), &leased(&BOTH)).unwrap();
        let nat = Nat::new("/nowhere").reserving(reserved.clone());
        let (port, why) = nat.reserved.find(&wish.ports)?;
        Some(NatError::PortReserved { port: Box::new(port), why }.to_string())
    };
    let agent = "for netattachd, which listens there (setting metrics.listen)";
    let setting = "by the setting reservedHostPorts";
    let table = [
        (10475, "tcp", None, Some(format!("hostPort 10475/tcp (IPv4) is reserved {agent}"))),
        (
            10475,
            "tcp",
            Some("192.0.2.1"),
            Some(format!("hostPort 10475/tcp of 192.0.2.1 is reserved {agent}")),
        ),
        (10475, "udp", None, None),
        (10250, "udp", Some("::"), Some(format!("hostPort 10250/udp (IPv6) is reserved {setting}"))),
        (10251, "tcp", None, None),
    ];
    for (port, protocol, at, expected) in table {
        assert_eq!(found(port, protocol, at), expected, "{port}/{protocol} of {at:?}");
    }
}

#[test]
fn only_the_last_who_wants_an_element_takes_it_along() {
    let mut state = State::default();
    let masquerade = translate(json!({"device": "br0", "bridged": true, "masquerade": []}));
    let wish = |address: &str| Wish::new(&masquerade, &leased(&[address])).unwrap();
    let (first, second) = (wish("10.1.0.2/24"), wish("10.1.0.3/24"));
    let sets = |elements: Vec<Element>| elements.iter().map(|element| element.set).collect::<Vec<_>>();
    // Three prefixes and a source; then a source alone.
    let list = [Set::Prefixes4; 3];
    assert_eq!(sets(state.count(&first).new), [&[Set::Masquerade4][..], &list].concat());
    assert_eq!(sets(state.count(&second).new), [Set::Masquerade4]);
    assert_eq!(sets(state.uncount(&first).gone), [Set::Masquerade4]);
    assert_eq!(sets(state.uncount(&second).gone), [&[Set::Masquerade4][..], &list].concat());
    assert!(state.users.is_empty());
}

#[test]
fn one_address_is_not_masqueraded_in_two_ways() {
    let mut state = State::default();
    let wish = |except: &[&str], address: &str| {
        let asked = json!({"device": "br0", "bridged": true, "masquerade": except});
        Wish::new(&translate(asked), &leased(&[address])).unwrap()
    };
    state.count(&wish(&[], "10.1.0.2/24"));
    assert_eq!(state.ambiguous(&wish(&[], "10.1.0.2/24")), None);
    assert_eq!(state.ambiguous(&wish(&["10.0.0.0/8"], "10.1.0.3/24")), None);
    assert_eq!(state.ambiguous(&wish(&["10.0.0.0/8"], "10.1.0.2/24")), Some("10.1.0.2".parse().unwrap()));
    state.count(&wish(&[], "fd00::2/64"));
    assert_eq!(state.ambiguous(&wish(&[], "fd00::2/80")), Some("fd00::2".parse().unwrap()));
}

/// The cost of an attachment is the number of elements that are written, however many other attachments
/// exist.
#[test]
fn an_attachment_writes_as_much_beside_three_hundred_others_as_alone() {
    // For each family: a port, its target, and a source; on a routed link also the pod as a list of its own.
    for (bridged, each) in [(true, 6), (false, 8)] {
        let mut state = State::default();
        let mut written = Vec::new();
        for number in 0..=300_u16 {
            let asked = json!({
                "device": "br0", "bridged": bridged, "masquerade": [], "follows_node": true,
                "ports": [{"hostPort": 1000 + number, "containerPort": 80, "protocol": "tcp"}]
            });
            let host = number + 2;
            let addresses = [format!("10.1.{}.{}/16", host / 256, host % 256), format!("fd00::{host:x}/64")];
            let wish =
                Wish::new(&translate(asked), &leased(&addresses.each_ref().map(String::as_str))).unwrap();
            let Changes { gone, new } = state.count(&wish);
            assert_eq!(gone, []);
            assert_eq!(state.ambiguous(&wish), None);
            written.push(new.len());
        }
        // The first attachment adds the elements that all share: lists, and the device.
        assert!(written[0] > each, "{written:?}");
        assert_eq!(written[1..], [each; 300]);
    }
}

#[test]
fn exceptions_of_the_node_change_for_attachments_that_are_there() {
    let mut state = State::default();
    let asked = json!({"device": "br0", "bridged": true, "masquerade": [], "follows_node": true});
    let wish = |address: &str| Wish::new(&translate(asked.clone()), &leased(&[address])).unwrap();
    let nets = |texts: &[&str]| Some(texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>());
    let prefixes = |elements: &[Element]| {
        let of = elements.iter().filter(|element| element.set == Set::Prefixes4).cloned().collect();
        exceptions::nets_of(&of).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    state.exceptions.give(nets(&["10.1.0.0/24", "10.2.0.0/24"]));
    let first = state.count(&wish("10.1.0.2/24"));
    assert_eq!(prefixes(&first.new), ["10.1.0.0/24", "10.2.0.0/24", "169.254.0.0/16", "224.0.0.0/4"]);
    assert_eq!(state.count(&wish("10.1.0.3/24")).new.len(), 1);
    state.exceptions.give(nets(&["10.1.0.0/24", "10.3.0.0/24"]));
    let Changes { gone, new } = state.settle();
    assert_eq!((prefixes(&gone), prefixes(&new)), (vec!["10.2.0.0/24".into()], vec!["10.3.0.0/24".into()]));
    // The table has to contain that list and both sources.
    let wanted: Vec<Element> = state.users.keys().cloned().collect();
    assert_eq!(prefixes(&wanted), ["10.1.0.0/24", "10.3.0.0/24", "169.254.0.0/16", "224.0.0.0/4"]);
    assert_eq!(wanted.len(), 6);
    // An address has one list: that of the node, or one of a configuration.
    let fixed = json!({"device": "br0", "bridged": true, "masquerade": []});
    let other = Wish::new(&translate(fixed), &leased(&["10.1.0.2/24"])).unwrap();
    assert_eq!(state.ambiguous(&other), Some("10.1.0.2".parse().unwrap()));
    state.uncount(&wish("10.1.0.2/24"));
    state.uncount(&wish("10.1.0.3/24"));
    assert_eq!(state.users, BTreeMap::new());
}
