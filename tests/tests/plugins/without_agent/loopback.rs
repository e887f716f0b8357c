//! Devices of the node that packets of loopback addresses may leave by, and arrive on if no table drops them.

use netattach::nat::wish::Wish;
use netattach::nat::{Holder, Key, Nat};
use netattach::netlink::nat::Set;
use netattach::step::{LeasedAddress, Translate};

use super::*;

fn flush(scene: &Scene) {
    let flushed = scene.node().run(|| Command::new("nft").args(["flush", "ruleset"]).status().unwrap());
    assert!(flushed.success());
}

/// Sets `route_localnet` of a device.
fn set(scene: &Scene, device: &str, value: &str) {
    let setting = format!("/proc/sys/net/ipv4/conf/{device}/route_localnet");
    scene.node().run(|| std::fs::write(setting, value)).unwrap();
}

/// Rows: PMP-flushed.
#[test]
fn a_device_is_closed_though_somebody_has_removed_the_table() {
    let scene = Scene::new();
    let ports = portmap(&[(8080, 80)], &json!({}));
    let a = scene.add("a", &[scene.bridge(&json!({})), ports.clone()]);
    let bare = config("1.1.0", "portmap", &json!({}));
    // No ports, no result, no namespace.
    let gone = Call { netns: Path::new("/run/netns/nosuch"), ..a.call() };
    let mut none_valid = bare.clone();
    none_valid["cni.dev/valid-attachments"] = json!([]);
    for (verb, config) in [("DEL", &bare), ("GC", &none_valid)] {
        scene.runtime.add(a.call(), &with_result(&ports, &a.results[0])).unwrap();
        assert_eq!(scene.loopback_by("br0"), "2", "{verb}");
        flush(&scene);
        let answer = scene.runtime.run(verb, gone, config).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{verb} {answer:?}");
        assert_eq!(scene.loopback_by("br0"), "0", "{verb}");
    }
    // A setting of another process stays.
    set(&scene, "br0", "1");
    scene.runtime.run("DEL", gone, &bare).unwrap();
    assert_eq!(scene.loopback_by("br0"), "1");
}

/// Rows: PMP-router.
#[test]
fn a_pod_behind_a_router_opens_no_device() {
    let scene = Scene::new();
    let a = scene.add("a", &[scene.bridge(&json!({}))]);
    run(scene.node(), "route add default via 192.0.2.2");
    let mut elsewhere = a.result().clone();
    elsewhere["ips"] = json!([{"address": "203.0.113.7/32"}]);
    let ports = portmap(&[(8080, 80)], &json!({}));
    scene.runtime.add(a.call(), &with_result(&ports, &elsewhere)).unwrap();
    assert_eq!(scene.loopback_by("wire0"), "0");
    let sets: Vec<Set> = scene.table().elements().iter().map(|it| it.element.set).collect();
    assert!(sets.contains(&Set::Ports4) && !sets.contains(&Set::Devices), "{sets:?}");
    scene.runtime.after("CHECK", a.call(), &ports, &elsewhere).unwrap();
    scene.runtime.after("DEL", a.call(), &ports, &elsewhere).unwrap();
    scene.assert_table_is_gone();
}

/// Rows: PMP-check-loopback.
#[test]
fn check_misses_the_way_of_loopback() {
    let scene = Scene::new();
    let a = scene.add("a", &[scene.bridge(&json!({})), portmap(&[(8080, 80)], &json!({}))]);
    scene.check(&a);
    set(&scene, "br0", "0");
    let answer = scene.runtime.run("CHECK", a.call(), &with_result(&a.chain[1], a.result())).unwrap();
    let (_, msg) = refused(&answer);
    assert!(msg.ends_with("127.0.0.1 leads nowhere: ipv4/conf/br0/route_localnet is 0"), "{msg}");
}

/// Rows: PMP-beside-agent.
#[test]
fn a_device_stays_open_as_long_as_the_agent_or_an_executable_needs_it() {
    let scene = Scene::new();
    let a = scene.add("a", &[scene.bridge(&json!({}))]);
    let ports = portmap(&[(8080, 80)], &json!({}));
    let translate: Translate = serde_json::from_value(json!({
        "device": "br0", "bridged": true,
        "ports": [{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}]
    }))
    .unwrap();
    let leased = LeasedAddress { address: "10.1.0.99/24".parse().unwrap(), gateway: None };
    let wish = Wish::new(&translate, &[leased]).unwrap();
    let key = Key { container: "of the agent".to_owned(), ifname: "eth0".to_owned() };
    let holder = Holder { key: key.clone(), who: "of the agent".to_owned() };
    let agent = Nat::new("/nowhere");
    let by_agent = |work: &(dyn Fn() + Sync)| scene.node().run(work);
    let add = || scene.runtime.add(a.call(), &with_result(&ports, a.result())).unwrap();
    let del = || scene.runtime.after("DEL", a.call(), &ports, a.result()).unwrap();
    for executable_is_first in [true, false] {
        if executable_is_first {
            add();
        }
        by_agent(&|| agent.attach(&holder, wish.clone()).unwrap());
        if !executable_is_first {
            add();
        }
        assert_ne!(scene.loopback_by("br0"), "0");
        // The first to go leaves it to the other.
        if executable_is_first {
            del();
        } else {
            by_agent(&|| agent.detach(&key).unwrap());
        }
        assert_ne!(scene.loopback_by("br0"), "0", "{executable_is_first}");
        if executable_is_first {
            by_agent(&|| agent.detach(&key).unwrap());
        } else {
            del();
        }
        assert_eq!(scene.loopback_by("br0"), "0", "{executable_is_first}");
    }
    // Another process removes both tables. The agent opens again what a DEL then closes, with its table.
    add();
    by_agent(&|| agent.attach(&holder, wish.clone()).unwrap());
    flush(&scene);
    del();
    assert_eq!(scene.loopback_by("br0"), "0");
    by_agent(&|| assert!(agent.repair().unwrap()));
    assert_eq!(scene.loopback_by("br0"), "1");
    by_agent(&|| agent.detach(&key).unwrap());
    assert_eq!(scene.loopback_by("br0"), "0");
}
