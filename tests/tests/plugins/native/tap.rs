//! `tap`: which processes may open it, its frames, its bridge in the pod.

use std::path::Path;

use netattach::spec::{LinkMode, TapAccess};
use netattach_tests::node::ip;
use netattach_tests::runtime::{Call, config, with_result};
use netattach_tests::tap::TapEnd;
use netattach_tests::traffic::PATIENCE;
use serde_json::{Value, json};

use super::{MAC, Rig, addresses, mac_of};

const ARP: [u8; 2] = [0x08, 0x06];

/// Rows: TAP-keys, TAP-mac, TAP-open.
#[test]
fn a_tap_is_what_was_asked_for_and_stays_without_a_process() {
    let cases = [
        (json!({}), TapAccess::default()),
        (json!({"owner": 1000}), TapAccess { owner: Some(1000), ..TapAccess::default() }),
        (
            json!({"owner": 0, "group": 107, "multiQueue": true}),
            TapAccess { owner: Some(0), group: Some(107), multi_queue: true },
        ),
    ];
    for (keys, access) in cases {
        let rig = Rig::new();
        let mut keys = keys;
        keys["mtu"] = json!(1400);
        keys["mac"] = json!(MAC);
        keys["ipam"] = rig.ipam();
        let tap = config("1.0.0", "tap", &keys);
        let result = rig.add(&tap);
        let mut inside = rig.inside();
        let made = inside.link("eth0").unwrap();
        let expected = ("tun", Some(LinkMode::Tap(access)), 1400, true);
        assert_eq!((made.kind.as_str(), made.mode, made.mtu, made.up), expected);
        assert_eq!(mac_of(&made), MAC, "the reference loses it where owner and group are set");
        assert_eq!(addresses(&mut inside, made.index), ["10.1.0.2/24", "fd00:1::2/64"]);
        rig.after("CHECK", &tap, &result);
        {
            let process = TapEnd::open(&rig.pod, "eth0", access.multi_queue).unwrap();
            // An ARP request for the pod's address, as a virtual machine would send it.
            let mut frame = [[0xff; 6].as_slice(), &[2, 0, 0, 0, 0, 9], &ARP].concat();
            frame.extend([
                0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9, 10, 1, 0, 9, 0, 0, 0, 0, 0, 0, 10, 1, 0, 2,
            ]);
            process.send(&frame).unwrap();
            let answer = process.receive(PATIENCE, |frame| frame[12..14] == ARP && frame[21] == 2).unwrap();
            let answer = answer.expect("an answer");
            assert_eq!(
                (&answer[22..28], &answer[28..32]),
                ([2, 0, 0, 0, 0, 7].as_slice(), [10, 1, 0, 2].as_slice())
            );
        }
        rig.after("CHECK", &tap, &result);
        let mut other = tap.clone();
        other["owner"] = json!(77);
        let (_, said) = rig.refusal("CHECK", &with_result(&other, &result));
        assert!(said.ends_with("interface eth0 has another owner, group or number of queues"), "{said}");
        for _ in 0..2 {
            rig.after("DEL", &tap, &result);
            rig.assert_nothing_left("after DEL");
        }
    }
}

/// Rows: TAP-bridge, TAP-rollback.
#[test]
fn a_tap_is_a_port_of_a_bridge_of_its_pod() {
    let rig = Rig::new();
    let tap = config("1.0.0", "tap", &json!({"bridge": "inner"}));
    let (code, said) = rig.refusal("ADD", &tap);
    assert_eq!(code, 7, "{said}");
    assert!(said.ends_with("no link named inner"), "{said}");
    rig.assert_nothing_left("the reference leaves the tap");
    ip(&rig.pod, &["link", "add", "inner", "type", "veth", "peer", "name", "other"]).unwrap();
    let (code, said) = rig.refusal("ADD", &tap);
    assert_eq!(code, 7, "{said}");
    assert!(said.ends_with("link inner exists and is a veth, not a bridge"), "{said}");
    ip(&rig.pod, &["link", "del", "inner"]).unwrap();
    rig.assert_nothing_left("what is no bridge");
    ip(&rig.pod, &["link", "add", "inner", "up", "type", "bridge"]).unwrap();
    let result = rig.add(&tap);
    let mut inside = rig.inside();
    let bridge = inside.link("inner").unwrap().index;
    assert_eq!(inside.link("eth0").unwrap().controller, Some(bridge));
    rig.after("CHECK", &tap, &result);
    ip(&rig.pod, &["link", "set", "eth0", "nomaster"]).unwrap();
    let (_, said) = rig.refusal("CHECK", &with_result(&tap, &result));
    assert!(said.ends_with("interface eth0 is not a port of bridge inner of the pod"), "{said}");
    rig.after("DEL", &tap, &result);
    assert_eq!(rig.links().0, ["inner"]);
}

/// Rows: TAP-refused.
#[test]
fn what_no_tap_can_have_is_refused_by_its_key() {
    let rig = Rig::new();
    let table = [
        (json!({"selinuxContext": "system_u:system_r:container_t:s0"}), 2, "key selinuxContext: "),
        (json!({"fastPath": true}), 2, "key fastPath: "),
        (json!({"bridge": "a/b"}), 7, "key bridge: "),
        (json!({"owner": -1}), 7, "key owner: "),
        (json!({"owner": "root"}), 7, "key owner: "),
        (json!({"group": 4_294_967_295_u32}), 7, "key group: "),
        (json!({"multiQueue": 4}), 7, "key multiQueue: "),
        (json!({"mac": "x"}), 7, "key mac: "),
    ];
    for (keys, code, message) in table {
        let (found, said) = rig.refusal("ADD", &config("1.0.0", "tap", &keys));
        assert_eq!(found, code, "{said}");
        assert!(said.starts_with(message), "{said:?} instead of {message:?}");
        rig.assert_nothing_left(message);
    }
    // The kernel has its own maximum MTU; the unfinished link is removed.
    let (_, said) = rig.refusal("ADD", &config("1.0.0", "tap", &json!({"mtu": 65535})));
    assert!(said.contains("RTM_"), "{said}");
    rig.assert_nothing_left("too large");
    ip(&rig.pod, &["link", "add", "eth0", "type", "veth", "peer", "name", "other"]).unwrap();
    let (code, said) = rig.refusal("ADD", &config("1.0.0", "tap", &json!({})));
    assert_eq!(code, 4, "{said}");
    assert_eq!(rig.links().0.len(), 2);
}

/// Rows: TAP-del.
#[test]
fn a_taps_del_needs_nothing_and_finds_what_the_reference_made() {
    let rig = Rig::new();
    let tap = rig.config("0.4.0", "tap");
    rig.add(&tap);
    let mut broken = tap.clone();
    broken["ipam"]["ranges"] = json!([[{"subnet": "10.1.0.0/33"}]]);
    broken["mtu"] = json!("large");
    broken["selinuxContext"] = json!("a");
    let gone = Call { netns: Path::new("/nonexistent/netns"), ..rig.call() };
    let answer = rig.runtime.run("DEL", gone, &broken).unwrap();
    assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    assert_eq!(rig.reserved(), [""; 0]);
    assert_eq!(rig.runtime.run("DEL", rig.call(), &broken).unwrap().exit, Some(0));
    rig.assert_nothing_left("with a configuration that ADD refuses");
    // Created by another process, in no group of ours.
    ip(&rig.pod, &["tuntap", "add", "dev", "eth0", "mode", "tap"]).unwrap();
    let mac = mac_of(&rig.inside().link("eth0").unwrap());
    let tap = config("1.0.0", "tap", &json!({}));
    rig.alone("DEL", &tap);
    assert_eq!(rig.links().0, ["eth0"], "nobody says whose it is");
    let listed = json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "mac": mac, "sandbox": rig.pod.path()}]});
    rig.after("DEL", &tap, &listed);
    rig.assert_nothing_left("what the result lists");
}
