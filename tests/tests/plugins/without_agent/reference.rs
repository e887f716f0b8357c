//! The same chains with the plugins of containernetworking/plugins and with ours: results in every version,
//! reachability and the source addresses that the pod sees, or others see of it, rates; and each implementation's DEL
//! after the other's ADD.

use std::os::unix::fs::symlink;

use netattach::netlink::Handle;
use netattach_tests::settings::Settings;
use netattach_tests::tools;
use netattach_tests::traffic::{Echo, SILENCE, connects};

use super::*;

const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A scene whose chained plugin is the reference's, or ours; the interface is made by our own bridge in both.
pub(super) fn scene(reference: Option<&Path>, plugin: &str) -> Scene {
    let scene = Scene::new();
    if let Some(reference) = reference {
        let path = scene.runtime.plugins.join(plugin);
        std::fs::remove_file(&path).unwrap();
        symlink(reference.join(plugin), path).unwrap();
    }
    scene
}

/// The same configuration in another version.
pub(super) fn in_version(version: &str, config: &Value) -> Value {
    let mut config = config.clone();
    config["cniVersion"] = json!(version);
    config
}

/// The answers of a plugin, and rules and sysctls of node and pod after ADD and after DEL.
#[derive(Debug, PartialEq)]
pub(super) struct Verbs {
    answers: Vec<(Option<i32>, Value)>,
    attached: [Settings; 2],
    detached: [Settings; 2],
}

/// The sysctl that lets loopback addresses leave by a device. Ours sets a distinctive value, by which it is
/// recognized, and resets it with the last port; the reference leaves it set: `loopback` tests that.
const LOOPBACK: &str = "ipv4.route_localnet";

fn settings(scene: &Scene, pod: &Attached) -> [Settings; 2] {
    [scene.node(), &pod.namespace].map(|namespace| {
        let mut found = Settings::of(namespace).unwrap().without(LOOPBACK);
        // Intermediate devices, whose names are each implementation's own.
        found.sysctls = found
            .sysctls
            .into_iter()
            .map(|(name, its)| (if name.starts_with("bwp") { "bwp".to_owned() } else { name }, its))
            .collect();
        found
    })
}

/// Runs ADD, CHECK and DEL in a version: exit codes and the result, without values that differ between runs.
pub(super) fn verbs(scene: &Scene, version: &str, chained: &Value) -> Verbs {
    let bridge = in_version(version, &scene.bridge(&json!({})));
    let pod = scene.add("a", &[bridge]);
    let chained = in_version(version, chained);
    let ask = |verb: &str, previous: &Value| {
        let answer = scene.runtime.run(verb, pod.call(), &with_result(&chained, previous)).unwrap();
        (answer.exit, answer.stdout)
    };
    let mut answers = vec![ask("ADD", pod.result())];
    let result = answers[0].1.clone();
    let attached = settings(scene, &pod);
    if ["0.4.0", "1.0.0", "1.1.0"].contains(&version) {
        answers.push(ask("CHECK", &result));
    }
    answers.extend([ask("DEL", &result), ask("DEL", &result)]);
    let detached = settings(scene, &pod);
    scene.del(&pod);
    // Ethernet addresses, the path of the namespace and the name of an intermediate device.
    for (_, answer) in &mut answers {
        let interfaces = answer.get_mut("interfaces").and_then(Value::as_array_mut);
        for interface in interfaces.into_iter().flatten() {
            let own = interface["name"].as_str().unwrap().starts_with("bwp");
            for key in ["mac", "sandbox", "name"] {
                if interface.get(key).is_some_and(|value| value != "") && (own || key != "name") {
                    interface[key] = json!("of each run");
                }
            }
            interface.as_object_mut().unwrap().retain(|key, value| key != "sandbox" || value != "");
        }
    }
    Verbs { answers, attached, detached }
}

/// Returns which clients reach the pod by its port, with the source addresses that the pod sees: outside, the node,
/// 127.0.0.1, a neighbour.
fn reached(scene: &Scene, chained: &Value) -> Vec<Option<IpAddr>> {
    // With their own addresses the node and the pod itself get no answers.
    let patience = if chained["snat"] == false { SILENCE } else { PATIENCE };
    let chained = in_version("1.0.0", chained);
    let bridge = in_version("1.0.0", &scene.bridge(&json!({"hairpinMode": true})));
    let pod = scene.add("a", &[bridge, chained]);
    let served = (&pod.namespace, at(POD[0], 80));
    let by = |patience, from: &Namespace, to: &str| seen_within(patience, served, (from, at(to, 8080)));
    let mut found = vec![by(PATIENCE, &scene.outside, NODE[0]), by(PATIENCE, scene.node(), NODE[0])];
    found.push(by(patience, scene.node(), "127.0.0.1"));
    found.push(by(patience, &pod.namespace, NODE[0]));
    found.push(seen(&pod.namespace, at(POD[1], 80), &scene.outside, at(NODE[1], 8080)));
    scene.del(&pod);
    assert!(!connects(&scene.outside, at(NODE[0], 8080), SILENCE));
    found
}

/// Rows: PMP-reference.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn portmap_agrees_with_the_reference() {
    let test = "portmap_agrees_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["portmap"]) else { return };
    let (theirs, ours) = (scene(Some(&reference), "portmap"), scene(None, "portmap"));
    for version in VERSIONS {
        for keys in [
            json!({}),
            json!({"runtimeConfig": {}}),
            json!({"masqAll": true, "backend": "nftables"}),
            json!({"snat": false}),
        ] {
            let chained = portmap(&[(8080, 80)], &keys);
            assert_eq!(
                verbs(&ours, version, &chained),
                verbs(&theirs, version, &chained),
                "{version} {keys}"
            );
        }
    }
    for keys in [
        json!({"backend": "iptables"}),
        json!({"backend": "iptables", "masqAll": true}),
        json!({"backend": "iptables", "markMasqBit": 5}),
        json!({"backend": "iptables", "snat": false}),
    ] {
        let chained = portmap(&[(8080, 80)], &keys);
        let (their, our) = (scene(Some(&reference), "portmap"), scene(None, "portmap"));
        assert_eq!(reached(&our, &chained), reached(&their, &chained), "{keys}");
    }
}

/// Returns the addresses that others see of a pod with these keys: outside, by family, and a neighbour; and those that
/// are seen outside of a pod without them that has the same addresses afterwards; and how the first one's DEL ends.
fn seen_of(scene: &Scene, kind: &str, keys: &Value) -> (Vec<Option<IpAddr>>, Option<i32>) {
    let outside = |pod: &Attached| {
        [0, 1].map(|family: usize| {
            let server = at(OUTSIDE[family], 80);
            seen(&scene.outside, server, &pod.namespace, server)
        })
    };
    let a = scene.add("a", &[scene.routed(kind, keys)]);
    let neighbour = scene.add("b", &[scene.routed(kind, &json!({}))]);
    let mut found = outside(&a).to_vec();
    let server = SocketAddr::new(neighbour.addresses()[0], 80);
    found.push(seen(&neighbour.namespace, server, &a.namespace, server));
    scene.check(&a);
    let del = scene.runtime.run("DEL", a.call(), &with_result(&a.chain[0], a.result())).unwrap();
    let [v4, v6] = a.addresses();
    let mut next = scene.routed(kind, &json!({}));
    next["ipam"]["ranges"] = json!([
        [{"subnet": "10.1.0.0/24", "rangeStart": v4, "rangeEnd": v4}],
        [{"subnet": "fd00:1::/64", "rangeStart": v6, "rangeEnd": v6}],
    ]);
    let next = scene.add("c", &[next]);
    assert_eq!(next.addresses(), [v4, v6]);
    found.extend(outside(&next));
    scene.del(&next);
    scene.del(&neighbour);
    (found, del.exit)
}

/// Rows: BRG-ipMasq-reference, PTP-ipMasq, DIF-del-nftables.
#[test]
fn masquerade_agrees_with_the_reference() {
    let test = "masquerade_agrees_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["bridge", "ptp"]) else {
        return;
    };
    for kind in ["bridge", "ptp"] {
        for keys in [
            json!({"ipMasq": true}),
            json!({"ipMasq": true, "ipMasqBackend": "iptables"}),
            json!({"ipMasq": true, "ipMasqBackend": "nftables"}),
        ] {
            let (their, our) = (scene(Some(&reference), kind), scene(None, kind));
            let (theirs, failed) = seen_of(&their, kind, &keys);
            let node: [Option<IpAddr>; 2] = NODE.map(|address| address.parse().ok());
            assert_eq!(theirs[..2], node, "{kind} {keys}");
            assert_eq!(seen_of(&our, kind, &keys), (theirs, Some(0)), "{kind} {keys}");
            // It has taken back what it made, and fails for want of chains of iptables.
            let fails = keys["ipMasqBackend"] == "nftables";
            assert_eq!(failed, Some(i32::from(fails)), "{kind} {keys}");
        }
    }
}

/// Rows: BWD-reference, BWD-each-other.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn bandwidth_agrees_with_the_reference() {
    let test = "bandwidth_agrees_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["bandwidth"]) else {
        return;
    };
    let (theirs, ours) = (scene(Some(&reference), "bandwidth"), scene(None, "bandwidth"));
    let both = json!({
        "ingressRate": 8_000_000, "ingressBurst": 400_000, "egressRate": 16_000_000, "egressBurst": 800_000
    });
    let by_pod = json!({"runtimeConfig": {"bandwidth": both}});
    let one = json!({"ingressRate": 8_000_000, "ingressBurst": 400_000});
    for version in VERSIONS.into_iter().filter(|version| !["0.1.0", "0.2.0"].contains(version)) {
        for keys in [&json!({}), &both, &by_pod, &one] {
            let chained = config(version, "bandwidth", keys);
            assert_eq!(
                verbs(&ours, version, &chained),
                verbs(&theirs, version, &chained),
                "{version} {keys}"
            );
        }
    }
    // The rates of the two queues, and that the other one's DEL leaves no device.
    let rates = |added: &Scene, removed: &Scene| {
        let chained = config("1.0.0", "bandwidth", &both);
        let pod = added.add("a", &[in_version("1.0.0", &added.bridge(&json!({})))]);
        added.runtime.add(pod.call(), &with_result(&chained, pod.result())).unwrap();
        let mut host = Handle::open_in(added.node().netns()).unwrap();
        let mut found = Vec::new();
        for link in host.links().unwrap() {
            if let Some((rate, _)) = host.find_pace(link.index).unwrap() {
                found.push((link.kind, rate));
            }
        }
        found.sort();
        let other = Runtime {
            node: Namespace::at(added.node().path()).unwrap(),
            plugins: removed.runtime.plugins.clone(),
        };
        let call = pod.call();
        let answer = other.run("DEL", call, &with_result(&chained, pod.result())).unwrap();
        let left = host.links().unwrap().into_iter().filter(|link| link.kind == "ifb").count();
        added.del(&pod);
        (found, answer.exit, left)
    };
    let expected = vec![("ifb".to_owned(), 2_000_000), ("veth".to_owned(), 1_000_000)];
    assert_eq!(rates(&ours, &ours), (expected.clone(), Some(0), 0));
    assert_eq!(rates(&theirs, &ours), (expected, Some(0), 0));
}

/// Rows: PMP-beside-reference.
#[test]
fn ports_of_the_reference_and_ours_do_not_disturb_each_other() {
    let test = "ports_of_the_reference_and_ours_do_not_disturb_each_other";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["portmap"]) else { return };
    let ours = scene(None, "portmap");
    let a = ours.add("a", &[ours.bridge(&json!({})), portmap(&[(8080, 80)], &json!({}))]);
    let theirs = Runtime { node: Namespace::at(ours.node().path()).unwrap(), plugins: reference };
    let b = ours.add("b", &[ours.bridge(&json!({}))]);
    let chained = in_version("1.0.0", &portmap(&[(8081, 80)], &json!({"backend": "iptables"})));
    let result = in_version("1.0.0", b.result());
    theirs.add(b.call(), &with_result(&chained, &result)).unwrap();
    let _echoes =
        [&a, &b].map(|pod| Echo::serve(&pod.namespace, SocketAddr::new(pod.addresses()[0], 80)).unwrap());
    for port in [8080, 8081] {
        assert!(connects(&ours.outside, at(NODE[0], port), PATIENCE), "{port}");
    }
    theirs.after("DEL", b.call(), &chained, &result).unwrap();
    assert!(!connects(&ours.outside, at(NODE[0], 8081), SILENCE));
    assert!(connects(&ours.outside, at(NODE[0], 8080), PATIENCE));
    ours.del(&a);
}
