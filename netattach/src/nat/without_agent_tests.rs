//! Changes that processes make to the shared table. Without a kernel.

use serde_json::{Value, json};

use super::*;
use crate::step::{LeasedAddress, Translate};

fn whose(plugin: Plugin, container: &'static str) -> Whose<'static> {
    Whose { plugin, network: "pods", container, ifname: "eth0" }
}

/// Returns the translation that an attachment with that address on `br0` requests.
fn wish(address: &str, keys: &Value) -> Wish {
    let mut step = json!({"device": "br0", "bridged": true});
    step.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let translate: Translate = serde_json::from_value(step).unwrap();
    Wish::new(&translate, &[LeasedAddress { address: address.parse().unwrap(), gateway: None }]).unwrap()
}

fn port(number: u16) -> Value {
    json!({"ports": [{"hostPort": number, "containerPort": 80, "protocol": "tcp"}]})
}

/// The table after a change.
fn changed(table: &[Noted], change: &Change) -> Vec<Noted> {
    let kept = table.iter().filter(|it| !change.gone.contains(it));
    let mut after: Vec<Noted> = kept.chain(&change.new).cloned().collect();
    after.sort();
    after
}

fn with(table: &[Noted], whose: &Whose<'_>, wish: &Wish) -> Vec<Noted> {
    changed(table, &attached(table, whose, wish).unwrap())
}

/// The comments of a set's elements.
fn notes(table: &[Noted], set: Set) -> Vec<&str> {
    table.iter().filter(|it| it.element.set == set).map(|it| it.note.as_str()).collect()
}

#[test]
fn each_element_says_whose_it_is_and_the_last_port_takes_the_device_along() {
    let (a, b) = (whose(Plugin::Portmap, "a"), whose(Plugin::Portmap, "b"));
    let one = with(&[], &a, &wish("10.1.0.2/24", &port(8080)));
    assert_eq!(notes(&one, Set::Ports4), ["portmap pods a eth0 br0"]);
    assert_eq!(notes(&one, Set::Mapped4), ["portmap pods a eth0"]);
    assert_eq!(notes(&one, Set::Devices), [""]);
    // Again: nothing changes.
    assert_eq!(attached(&one, &a, &wish("10.1.0.2/24", &port(8080))).unwrap().new, []);
    let two = with(&one, &b, &wish("10.1.0.3/24", &port(8081)));
    assert_eq!(two.len(), 2 * one.len() - 1, "the device is shared: {two:?}");
    let of = |whose: &Whose<'_>| {
        let own = whose.note();
        move |note: &Note<'_>| note.is_of(&own)
    };
    let first = detached(&two, of(&a));
    assert_eq!((first.closed.len(), first.new.len()), (0, 0));
    let left = changed(&two, &first);
    assert_eq!(left, with(&[], &b, &wish("10.1.0.3/24", &port(8081))));
    let last = detached(&left, of(&b));
    assert_eq!(last.closed, ["br0".to_owned()].into());
    assert_eq!(changed(&left, &last), []);
    // A DEL without an ADD.
    assert_eq!(detached(&left, of(&a)), Change { opened: ["br0".to_owned()].into(), ..Change::default() });
}

#[test]
fn no_container_has_more_ports_than_the_bound_and_none_counts_twice() {
    let most = crate::budget::HOST_PORTS_OF_POD.most;
    let ports = |numbers: std::ops::Range<usize>| {
        let port = |number| json!({"hostPort": number, "containerPort": 80, "protocol": "tcp"});
        wish("10.1.0.2/24", &json!({"ports": numbers.map(port).collect::<Value>()}))
    };
    let (a, b) = (whose(Plugin::Portmap, "a"), whose(Plugin::Portmap, "b"));
    let table = with(&[], &a, &ports(1..most + 1));
    assert_eq!(attached(&table, &a, &ports(1..most + 1)).unwrap().new, []);
    let of_link = attached(&table, &whose(Plugin::Link, "a"), &ports(most + 1..most + 2)).unwrap_err();
    assert_eq!(
        of_link.to_string(),
        format!("ports of the node that lead to one pod: {} ports, and at most {most} are allowed", most + 1)
    );
    let other = json!({"ports": [{"hostPort": most + 1, "containerPort": 80, "protocol": "tcp"}]});
    assert!(attached(&table, &b, &wish("10.1.0.3/24", &other)).is_ok());
}

#[test]
fn a_port_has_one_holder_and_plugins_of_one_attachment_are_no_others() {
    let (a, b) = (whose(Plugin::Portmap, "a"), whose(Plugin::Portmap, "b"));
    let table = with(&[], &a, &wish("10.1.0.2/24", &port(8080)));
    let at_one = json!({"ports": [
        {"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "192.0.2.1"}
    ]});
    for other in [port(8080), at_one] {
        let taken = attached(&table, &b, &wish("10.1.0.3/24", &other)).unwrap_err();
        let told = taken.to_string();
        assert!(told.ends_with("is taken: container a, interface eth0 has it"), "{told}");
    }
    let udp = json!({"ports": [{"hostPort": 8080, "containerPort": 80, "protocol": "udp"}]});
    assert!(attached(&table, &b, &wish("10.1.0.3/24", &udp)).is_ok());
    // The interface's plugin asks for the same: there is one element, which belongs to the plugin that came
    // first.
    let link = whose(Plugin::Link, "a");
    let both = with(&table, &link, &wish("10.1.0.2/24", &port(8080)));
    assert_eq!(notes(&both, Set::Ports4), ["portmap pods a eth0 br0"]);
    // Another port replaces the former one.
    let moved = with(&table, &a, &wish("10.1.0.2/24", &port(8081)));
    assert_eq!(moved, with(&[], &a, &wish("10.1.0.2/24", &port(8081))));
}

#[test]
fn an_address_of_another_is_refused_and_only_the_same_container_replaces_what_it_had() {
    let masquerade = wish("10.1.0.2/24", &json!({"masquerade": []}));
    let a = whose(Plugin::Link, "a");
    let table = with(&[], &a, &masquerade);
    let other_network = Whose { network: "others", ..a };
    let told = "another attachment also has address 10.1.0.2, which is translated for it: container a, interface eth0";
    for other in
        [other_network, whose(Plugin::Link, "b"), Whose { network: "others", ..whose(Plugin::Link, "b") }]
    {
        let taken = attached(&table, &other, &masquerade).unwrap_err();
        assert_eq!(taken.to_string(), told, "{other:?}");
    }
    // This holds for ports too, whatever port of the node the other attachment has.
    let mapped = with(&[], &whose(Plugin::Portmap, "a"), &wish("10.1.0.2/24", &port(8080)));
    let kept: Vec<Noted> = mapped.into_iter().filter(|it| it.element.set == Set::Mapped4).collect();
    let port_of_b = attached(&kept, &whose(Plugin::Portmap, "b"), &wish("10.1.0.2/24", &port(8080)));
    assert_eq!(port_of_b.unwrap_err().to_string(), told);
    // The same container by another interface: a late DEL of the former interface leaves the element alone.
    let moved = Whose { ifname: "eth1", ..a };
    let both = with(&table, &moved, &masquerade);
    assert_eq!(notes(&both, Set::Masquerade4), ["link pods a eth1"]);
    let own = a.note();
    let left = changed(&both, &detached(&both, |note| note.is_of(&own)));
    assert_eq!(left, with(&[], &moved, &masquerade));
}

#[test]
fn lists_are_named_for_whoever_has_them() {
    let masquerade = wish("10.1.0.2/24", &json!({"masquerade": ["10.0.0.0/8"]}));
    let lists = |whose: &Whose<'_>| -> BTreeSet<Vec<u8>> {
        let table = with(&[], whose, &masquerade);
        let keys = table.iter().filter(|it| it.element.set == Set::Prefixes4);
        let lists: BTreeSet<Vec<u8>> = keys.map(|it| it.element.key[..8].to_vec()).collect();
        let named: Vec<Vec<u8>> = table
            .iter()
            .filter(|it| it.element.set == Set::Masquerade4)
            .map(|it| it.element.value[4..].to_vec())
            .collect();
        assert!(lists.len() == 1 && named.iter().all(|name| lists.contains(name)), "{table:?}");
        lists
    };
    assert_ne!(lists(&whose(Plugin::Link, "a")), lists(&whose(Plugin::Link, "b")));
}

#[test]
fn long_names_fit_a_comment_and_stay_apart() {
    let (network, container) = ("n".repeat(200), "c".repeat(200));
    let device = "d".repeat(15);
    let of = |container: &str| {
        Whose { plugin: Plugin::Portmap, network: &network, container, ifname: "i23456789012345" }.note()
    };
    let note = of(&container);
    assert!(format!("{note} {device}").len() <= nat::MOST_NOTE, "{note}");
    assert_ne!(note, of(&format!("{container}c")));
    assert_eq!(of(&"c".repeat(64)).split(' ').nth(2), Some("c".repeat(64).as_str()));
}

#[test]
fn ports_are_read_from_elements() {
    for address in ["10.1.0.2/24", "fd00::2/64"] {
        let wanted = wish(address, &port(8080));
        let read: Vec<HostPort> = wanted.elements.iter().filter_map(HostPort::of).collect();
        assert_eq!(read, wanted.ports);
    }
}

proptest::proptest! {
    #[test]
    fn any_comment_is_read_without_panic(note in ".{0,140}", key in proptest::collection::vec(0_u8.., 0..40)) {
        let element = Element { set: Set::Ports4, key: key.clone(), end: None, value: key };
        let noted = Noted { element, note };
        let change = detached(std::slice::from_ref(&noted), |_| true);
        proptest::prop_assert!(change.gone.len() <= 1);
        HostPort::of(&noted.element);
        wish::device_named(&Element { set: Set::Devices, ..noted.element.clone() });
        wish::with_own_lists(&Element { set: Set::Prefixes4, ..noted.element }, "whose");
    }
}
