//! Several processes change one table at once.

use std::collections::BTreeSet;

use netattach::netlink::nat::Set;

use super::*;

/// Processes at a time.
const AT_ONCE: u16 = 12;

/// Returns the open ports of the node, from the table.
fn open(scene: &Scene) -> BTreeSet<u16> {
    let table = scene.table();
    let ports = table.elements().iter().filter(|it| it.element.set == Set::Ports4);
    ports.map(|it| u16::from_be_bytes([it.element.key[8], it.element.key[9]])).collect()
}

/// Rows: PMP-at-once.
#[test]
fn no_process_loses_what_another_has_added_or_removed() {
    let scene = Scene::new();
    let bridge = scene.add("bridge", &[scene.bridge(&json!({}))]);
    // Results of pods on that bridge, without the pods: `portmap` uses only addresses.
    let call = |number: u16| (format!("c{number}"), format!("10.1.0.{}/24", 10 + number));
    let run = |verb: &str, number: u16| {
        let (container, address) = call(number);
        let mut previous = bridge.result().clone();
        previous["ips"] = json!([{"address": address}]);
        let call = Call { container: &container, ..bridge.call() };
        let plugin = portmap(&[(8000 + number, 80)], &json!({}));
        let answer = scene.runtime.run(verb, call, &with_result(&plugin, &previous)).unwrap();
        assert_eq!(answer.exit, Some(0), "{verb} {container}: {answer:?}");
    };
    let all = |verbs: &[(&str, std::ops::Range<u16>)]| {
        std::thread::scope(|scope| {
            for (verb, numbers) in verbs {
                for number in numbers.clone() {
                    let run = &run;
                    scope.spawn(move || run(verb, number));
                }
            }
        });
    };
    let ports = |numbers: std::ops::Range<u16>| numbers.map(|number| 8000 + number).collect::<BTreeSet<_>>();
    let half = AT_ONCE / 2;
    all(&[("ADD", 0..AT_ONCE)]);
    assert_eq!(open(&scene), ports(0..AT_ONCE));
    // Some are removed while others are added, and other processes change other parts of the packet filter.
    std::thread::scope(|scope| {
        let node = scene.node();
        scope.spawn(move || {
            for number in 0..20 {
                let nft = |words: &[&str]| node.run(|| Command::new("nft").args(words).status().unwrap());
                let name = format!("other{number}");
                assert!(nft(&["add", "table", "inet", &name]).success());
                assert!(nft(&["delete", "table", "inet", &name]).success());
            }
        });
        all(&[("DEL", 0..half), ("ADD", AT_ONCE..AT_ONCE + half), ("CHECK", half..AT_ONCE)]);
    });
    assert_eq!(open(&scene), ports(half..AT_ONCE + half));
    // The device of 127.0.0.1 stays open while there is a port, and no longer.
    assert_eq!(scene.loopback_by("br0"), "2");
    all(&[("DEL", half..AT_ONCE + half)]);
    scene.assert_table_is_gone();
    assert_eq!(scene.loopback_by("br0"), "0");
}
