//! The chained plugin `firewall` as an executable, on a node whose chain FORWARD drops.

use netattach_tests::tools;
use netattach_tests::traffic::{Echo, SILENCE, connects};

use super::*;

const PROGRAMS: [&str; 2] = ["iptables", "ip6tables"];

/// `firewall` with these keys.
fn firewall(keys: &Value) -> Value {
    config("1.1.0", "firewall", keys)
}

/// Returns the output of a program on the node.
fn said(scene: &Scene, program: &str, line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = scene.node().run(|| Command::new(program).args(words).output().unwrap());
    assert!(output.status.success(), "{program} {line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a scene whose node forwards nothing.
fn dropping() -> Scene {
    dropping_in(Scene::new())
}

fn dropping_in(scene: Scene) -> Scene {
    for program in PROGRAMS {
        said(&scene, program, "-P FORWARD DROP");
    }
    scene
}

/// Returns the rules of a chain, as `iptables` prints them, without comments.
fn chain(scene: &Scene, program: &str, chain: &str) -> Vec<String> {
    let lines = said(scene, program, &format!("-S {chain}"));
    lines.lines().filter(|line| line.starts_with("-A ")).map(without_comment).collect()
}

fn without_comment(line: &str) -> String {
    match line.split_once(" -m comment --comment ") {
        Some((before, behind)) => {
            let behind = match behind.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"').unwrap().1,
                None => behind.split_once(' ').map_or("", |(_, rest)| rest).trim_end(),
            };
            format!("{before} {}", behind.trim_start())
        }
        None => line.to_owned(),
    }
}

/// The rule that every implementation leaves.
const ADMIN: &str = "-A CNI-FORWARD -j CNI-ADMIN";

/// Rows: FWL-executable, FWL-late-del.
#[test]
fn pods_get_out_past_a_chain_that_drops() {
    let scene = dropping();
    let outside: Vec<Echo> =
        OUTSIDE.iter().map(|address| Echo::serve(&scene.outside, at(address, 7)).unwrap()).collect();
    let bridge = scene.bridge(&json!({}));
    let without = scene.add("b", std::slice::from_ref(&bridge));
    let a = scene.add("a", &[bridge.clone(), firewall(&json!({}))]);
    let [interface, passed] = &a.results[..] else { panic!("{:?}", a.results) };
    assert_eq!(interface, passed);
    for (number, echo) in outside.iter().enumerate() {
        assert!(connects(&a.namespace, echo.address(), PATIENCE), "{}", OUTSIDE[number]);
        assert!(!connects(&without.namespace, echo.address(), SILENCE), "{}", OUTSIDE[number]);
        // Only replies to the pod's own connections reach it.
        let _served = Echo::serve(&a.namespace, SocketAddr::new(a.addresses()[number], 80)).unwrap();
        assert!(!connects(&scene.outside, SocketAddr::new(a.addresses()[number], 80), SILENCE));
    }
    scene.check(&a);
    // Again, and for a container that has the addresses now, as in the case of a late DEL.
    let again = scene.runtime.add(a.call(), &with_result(&a.chain[1], interface)).unwrap();
    assert_eq!(&again, passed);
    let rules = chain(&scene, "iptables", "CNI-FORWARD");
    assert_eq!(rules.len(), 3, "{rules:?}");
    let late = Call { container: "late", ..a.call() };
    scene.runtime.add(late, &with_result(&a.chain[1], interface)).unwrap();
    scene.runtime.after("DEL", late, &a.chain[1], interface).unwrap();
    scene.check(&a);
    assert!(connects(&a.namespace, outside[0].address(), PATIENCE));
    // Without a result, keys or a namespace.
    let gone = Call { netns: Path::new(""), ..a.call() };
    for _ in 0..2 {
        let answer = scene.runtime.run("DEL", gone, &firewall(&json!({}))).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    }
    for (program, echo) in PROGRAMS.into_iter().zip(&outside) {
        assert!(!connects(&a.namespace, echo.address(), SILENCE), "{program}");
        assert_eq!(chain(&scene, program, "CNI-FORWARD"), [ADMIN]);
    }
}

/// Rows: FWL-iptables.
#[test]
fn iptables_lists_saves_and_restores_the_rules() {
    let scene = dropping();
    let a = scene.add("a", &[scene.bridge(&json!({})), firewall(&json!({"ingressPolicy": "isolated"}))]);
    for (program, bits) in PROGRAMS.into_iter().zip([32, 128]) {
        let address = a.addresses()[usize::from(bits == 128)];
        let whose = "-m comment --comment \"netattach-cni net a eth0 isolated:br0\"";
        let saved = said(&scene, &format!("{program}-save"), "-t filter");
        for line in [
            format!(
                "-A CNI-FORWARD -d {address}/{bits} {whose} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
            ),
            format!("-A CNI-FORWARD -s {address}/{bits} {whose} -j ACCEPT"),
        ] {
            let same = |found: &str| sorted_words(found) == sorted_words(&line);
            assert!(saved.lines().any(same), "{line}\n{saved}");
        }
        // The extension `comment` in place of user data, and other numbers of rules.
        let restore = format!("{program}-save | {program}-restore");
        let restored = scene.node().run(|| Command::new("sh").args(["-c", &restore]).output().unwrap());
        assert!(restored.status.success() && restored.stderr.is_empty(), "{restored:?}");
        said(&scene, program, "-L -v -n");
    }
    scene.check(&a);
    scene.del(&a);
    for program in PROGRAMS {
        assert_eq!(chain(&scene, program, "CNI-FORWARD"), [ADMIN]);
        assert_eq!(chain(&scene, program, "CNI-ISOLATION-STAGE-1"), [""; 0]);
        assert_eq!(chain(&scene, program, "CNI-ISOLATION-STAGE-2"), [""; 0]);
    }
}

/// `iptables` puts the comment before or behind other extensions, by its version.
fn sorted_words(line: &str) -> Vec<&str> {
    let mut words: Vec<&str> = line.split(' ').collect();
    words.sort_unstable();
    words
}

/// Rows: FWL-backend, FWL-refused, FWL-firewalld.
#[test]
fn what_firewall_cannot_carry_out_is_refused_by_its_key() {
    let scene = Scene::new();
    let a = scene.add("a", &[scene.bridge(&json!({}))]);
    let refusal = |keys: Value| {
        scene.runtime.refusal("ADD", a.call(), &with_result(&firewall(&keys), a.result())).unwrap()
    };
    let (code, msg) = refusal(json!({"backend": "firewalld", "firewalldZone": "trusted"}));
    assert!(code == 2 && msg.starts_with("key backend: \"firewalld\" is not supported"), "{code} {msg}");
    for (keys, told) in [
        (json!({"backend": "ebtables"}), "key backend: \"ebtables\" is neither iptables nor firewalld"),
        (json!({"ingressPolicy": "no"}), "key ingressPolicy: \"no\" is none of open, same-bridge, isolated"),
        (
            json!({"iptablesAdminChainName": "FORWARD"}),
            "key iptablesAdminChainName: FORWARD is no chain of the administrator's own",
        ),
    ] {
        assert_eq!(refusal(keys), (7, told.to_owned()));
    }
    let alone = scene.runtime.refusal("ADD", a.call(), &firewall(&json!({}))).unwrap();
    assert_eq!(alone, (7, "key prevResult: missing, and firewall can only follow another plugin".to_owned()));
    let mut inside = a.result().clone();
    inside["interfaces"].as_array_mut().unwrap().retain(|listed| listed["sandbox"].is_string());
    for listed in inside["ips"].as_array_mut().unwrap() {
        listed["interface"] = json!(0);
    }
    let closed = with_result(&firewall(&json!({"ingressPolicy": "same-bridge"})), &inside);
    let (code, msg) = scene.runtime.refusal("ADD", a.call(), &closed).unwrap();
    assert!(code == 7 && msg.starts_with("key ingressPolicy: same-bridge is for bridges"), "{code} {msg}");
    // Beside firewalld only if the configuration says so.
    said(&scene, "nft", "add table inet firewalld");
    let (code, msg) = refusal(json!({}));
    assert!(code == 7 && msg.starts_with("key backend: firewalld filters on this node"), "{code} {msg}");
    assert!(!listing(scene.node()).contains("CNI-FORWARD"));
    let named = with_result(&firewall(&json!({"backend": "iptables"})), a.result());
    assert_eq!(&scene.runtime.add(a.call(), &named).unwrap(), a.result());
}

/// Rows: FWL-check, FWL-gc, FWL-status.
#[test]
fn check_gc_and_status_look_at_the_rules() {
    let scene = dropping();
    let chained = [scene.bridge(&json!({})), firewall(&json!({}))];
    let (a, b) = (scene.add("a", &chained), scene.add("b", &chained));
    let gc = |config: &Value, valid: Value| {
        let mut config = config.clone();
        config["cni.dev/valid-attachments"] = valid;
        let answer = scene.runtime.run("GC", a.call(), &config).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    };
    let plugin = &chained[1];
    gc(&firewall(&json!({"name": "other"})), json!([]));
    gc(plugin, json!([{"containerID": "a", "ifname": "eth0"}, {"containerID": "b", "ifname": "eth0"}]));
    scene.check(&a);
    gc(plugin, json!([{"containerID": "b", "ifname": "eth0"}]));
    scene.check(&b);
    let lost = |attached: &Attached| {
        let config = with_result(plugin, attached.result());
        scene.runtime.refusal("CHECK", attached.call(), &config).unwrap().1
    };
    let established = "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT";
    let expected =
        format!("table ip filter lacks a rule: -A CNI-FORWARD -d {}/32 {established}", a.addresses()[0]);
    assert!(lost(&a).ends_with(&expected), "{}", lost(&a));
    // Another process removes the jumps to the rules: the next ADD restores them.
    said(&scene, "iptables", "-F FORWARD");
    assert!(lost(&b).ends_with("table ip filter lacks a rule: -A FORWARD -j CNI-FORWARD"), "{}", lost(&b));
    let c = scene.add("c", &chained);
    scene.check(&b);
    scene.check(&c);
    let answer = scene.runtime.run("STATUS", a.call(), plugin).unwrap();
    assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    let odd = firewall(&json!({"backend": "firewalld"}));
    assert_eq!(scene.runtime.refusal("STATUS", a.call(), &odd).unwrap().0, 2);
    gc(plugin, json!([]));
    assert_eq!(chain(&scene, "iptables", "CNI-FORWARD"), [ADMIN]);
}

/// Rows: FWL-admin.
#[test]
fn the_administrators_chain_is_asked_first() {
    let scene = dropping();
    let _echo = Echo::serve(&scene.outside, at(OUTSIDE[0], 7)).unwrap();
    let keys = json!({"iptablesAdminChainName": "MINE"});
    let a = scene.add("a", &[scene.bridge(&json!({})), firewall(&keys)]);
    let b = scene.add("b", &[scene.bridge(&json!({})), firewall(&json!({}))]);
    assert!(connects(&a.namespace, at(OUTSIDE[0], 7), PATIENCE));
    said(&scene, "iptables", &format!("-A MINE -d {} -j DROP", OUTSIDE[0]));
    assert!(!connects(&a.namespace, at(OUTSIDE[0], 7), SILENCE));
    // It is asked for no other pod's packets, and after the chain that is.
    assert!(connects(&b.namespace, at(OUTSIDE[0], 7), PATIENCE));
    let rules = chain(&scene, "iptables", "CNI-FORWARD");
    assert_eq!((rules[0].as_str(), rules[1].ends_with(" -j MINE")), (ADMIN, true), "{rules:?}");
    scene.check(&a);
    scene.check(&b);
    scene.del(&a);
    scene.del(&b);
    assert_eq!(chain(&scene, "iptables", "CNI-FORWARD"), [ADMIN]);
    // It is the administrator's.
    assert_eq!(chain(&scene, "iptables", "MINE"), [format!("-A MINE -d {}/32 -j DROP", OUTSIDE[0])]);
}

/// Returns which of two bridges' pods reach each other: of the other bridge, and of the same one.
fn reached(scene: &Scene, policy: &str) -> (bool, bool) {
    let keys = json!({"ingressPolicy": policy});
    let other = json!({
        "bridge": "br1", "ipam": {
            "type": "host-local", "dataDir": scene.dir.path(), "ranges": [[{"subnet": "10.1.1.0/24"}]]
        }, "name": "other"
    });
    let plugin = |name: &str| {
        let mut plugin = firewall(&keys);
        plugin["name"] = json!(name);
        plugin
    };
    let own = [scene.bridge(&json!({})), plugin("net")];
    let (a, neighbour) = (scene.add("a", &own), scene.add("n", &own));
    let b = scene.add("b", &[scene.bridge(&other), plugin("other")]);
    let address = |pod: &Attached| {
        let text = pod.result()["ips"][0]["address"].as_str().unwrap();
        at(text.split('/').next().unwrap(), 80)
    };
    let _echoes = [&neighbour, &b].map(|pod| Echo::serve(&pod.namespace, address(pod)).unwrap());
    let patience = |expected: bool| if expected { PATIENCE } else { SILENCE };
    let found = (
        connects(&a.namespace, address(&b), patience(policy == "open")),
        connects(&a.namespace, address(&neighbour), patience(policy != "isolated")),
    );
    scene.check(&a);
    for pod in [&a, &neighbour, &b] {
        scene.del(pod);
    }
    found
}

/// Rows: FWL-ingressPolicy.
#[test]
fn a_closed_bridge_hears_nothing_of_other_bridges() {
    let scene = Scene::new();
    // Bridges show their frames to iptables here, as on nodes with Docker or kube-proxy.
    let shown = ["iptables", "ip6tables"].map(|name| format!("/proc/sys/net/bridge/bridge-nf-call-{name}"));
    scene.node().run(|| shown.iter().for_each(|path| std::fs::write(path, "1").unwrap()));
    for (policy, expected) in [
        ("open", (true, true)),
        ("same-bridge", (false, true)),
        ("isolated", (false, false)),
        ("open", (true, true)),
    ] {
        assert_eq!(reached(&scene, policy), expected, "{policy}");
    }
}

/// Returns both tables after ADDs, without comments, sorted.
fn saved(scene: &Scene) -> Vec<String> {
    let mut all = Vec::new();
    for program in PROGRAMS {
        let lines = said(scene, &format!("{program}-save"), "-t filter");
        let rules = lines.lines().filter(|line| line.starts_with("-A ")).map(without_comment);
        let mut rules: Vec<String> = rules.filter(|line| !line.ends_with("-j RETURN")).collect();
        // Sorted by chain; in FORWARD the order matters.
        rules.sort_by_key(|line| (!line.starts_with("-A FORWARD")).then(|| line.clone()));
        all.extend(rules);
    }
    all
}

/// Rows: FWL-reference.
/// Rows: SYS-rules, SYS-sysctls.
#[test]
fn the_rules_are_those_of_the_reference() {
    let test = "the_rules_are_those_of_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["firewall"]) else {
        return;
    };
    for keys in [
        json!({"backend": "iptables"}),
        json!({"backend": "iptables", "ingressPolicy": "same-bridge"}),
        json!({"backend": "iptables", "ingressPolicy": "isolated"}),
        json!({"backend": "iptables", "iptablesAdminChainName": "CNI-ADMIN"}),
    ] {
        let rules = [true, false].map(|theirs| {
            let scene = super::reference::scene(theirs.then_some(&*reference), "firewall");
            let mut chained = firewall(&keys);
            chained["cniVersion"] = json!("1.0.0");
            let bridge = super::reference::in_version("1.0.0", &scene.bridge(&json!({})));
            let pods = ["a", "b"].map(|container| scene.add(container, &[bridge.clone(), chained.clone()]));
            for pod in &pods {
                assert_eq!(pod.results[0], pod.results[1]);
            }
            saved(&scene)
        });
        let [theirs, ours] = rules;
        assert_eq!(ours, theirs, "{keys}");
    }
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let verbs = [true, false].map(|theirs| {
            let scene = super::reference::scene(theirs.then_some(&*reference), "firewall");
            super::reference::verbs(&scene, version, &firewall(&json!({"backend": "iptables"})))
        });
        let [theirs, ours] = verbs;
        assert_eq!(ours, theirs, "{version}");
    }
}

/// For the definition's own pods it is the same with the reference, which asks it for all others as well.
///
/// Rows: FWL-admin.
#[test]
fn the_administrators_chain_is_asked_as_by_the_reference() {
    let test = "the_administrators_chain_is_asked_as_by_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["firewall"]) else {
        return;
    };
    for theirs in [true, false] {
        let scene = dropping_in(super::reference::scene(theirs.then_some(&*reference), "firewall"));
        let _echo = Echo::serve(&scene.outside, at(OUTSIDE[0], 7)).unwrap();
        let keys = json!({"backend": "iptables", "iptablesAdminChainName": "MINE"});
        let chained = super::reference::in_version("1.0.0", &firewall(&keys));
        let bridge = super::reference::in_version("1.0.0", &scene.bridge(&json!({})));
        let a = scene.add("a", &[bridge, chained]);
        let passes = connects(&a.namespace, at(OUTSIDE[0], 7), PATIENCE);
        said(&scene, "iptables", &format!("-A MINE -d {} -j DROP", OUTSIDE[0]));
        let is_dropped = !connects(&a.namespace, at(OUTSIDE[0], 7), SILENCE);
        scene.check(&a);
        scene.del(&a);
        let left = chain(&scene, "iptables", "MINE");
        let rule = format!("-A MINE -d {}/32 -j DROP", OUTSIDE[0]);
        assert_eq!((passes, is_dropped, left), (true, true, vec![rule]), "theirs: {theirs}");
    }
}

/// Rows: FWL-beside-reference.
#[test]
fn the_reference_and_ours_share_their_chains() {
    let test = "the_reference_and_ours_share_their_chains";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["firewall"]) else {
        return;
    };
    let scene = dropping();
    let theirs = Runtime { node: Namespace::at(scene.node().path()).unwrap(), plugins: reference };
    let _echo = Echo::serve(&scene.outside, at(OUTSIDE[0], 7)).unwrap();
    let keys = json!({"backend": "iptables", "ingressPolicy": "same-bridge"});
    let chained = super::reference::in_version("1.0.0", &firewall(&keys));
    let a = scene.add("a", &[scene.bridge(&json!({})), firewall(&keys)]);
    let b = scene.add("b", &[super::reference::in_version("1.0.0", &scene.bridge(&json!({})))]);
    theirs.add(b.call(), &with_result(&chained, b.result())).unwrap();
    let c = scene.add("c", &[scene.bridge(&json!({})), firewall(&keys)]);
    // Neither adds the jumps to the chains again.
    let forward = ["-A FORWARD -j CNI-ISOLATION-STAGE-1", "-A FORWARD -j CNI-FORWARD"];
    assert_eq!(chain(&scene, "iptables", "FORWARD"), forward);
    let admins = chain(&scene, "iptables", "CNI-FORWARD").into_iter().filter(|line| line == ADMIN);
    assert_eq!(admins.count(), 1);
    theirs.after("CHECK", b.call(), &chained, b.result()).unwrap();
    theirs.after("DEL", b.call(), &chained, b.result()).unwrap();
    assert!(!connects(&b.namespace, at(OUTSIDE[0], 7), SILENCE));
    for pod in [&a, &c] {
        scene.check(pod);
        assert!(connects(&pod.namespace, at(OUTSIDE[0], 7), PATIENCE));
        scene.del(pod);
    }
}

/// Rows: FWL-at-once.
#[test]
fn no_process_loses_anothers_rules() {
    let scene = dropping();
    let bridge = scene.add("bridge", &[scene.bridge(&json!({}))]);
    let run = |verb: &str, number: u8| {
        let container = format!("c{number}");
        let mut previous = bridge.result().clone();
        previous["ips"] = json!([{"address": format!("10.1.0.{}/24", 10 + number)}]);
        let call = Call { container: &container, ..bridge.call() };
        let answer = scene.runtime.run(verb, call, &with_result(&firewall(&json!({})), &previous)).unwrap();
        assert_eq!(answer.exit, Some(0), "{verb} {container}: {answer:?}");
    };
    let all = |verbs: &[(&str, std::ops::Range<u8>)]| {
        std::thread::scope(|scope| {
            for (verb, numbers) in verbs {
                for number in numbers.clone() {
                    let run = &run;
                    scope.spawn(move || run(verb, number));
                }
            }
        });
    };
    all(&[("ADD", 0..8)]);
    // Some are removed while others are added, and other processes call iptables.
    std::thread::scope(|scope| {
        let scene = &scene;
        scope.spawn(move || {
            for _ in 0..10 {
                said(scene, "iptables", "-w 10 -A INPUT -p tcp --dport 1 -j ACCEPT");
            }
        });
        all(&[("DEL", 0..4), ("ADD", 8..12), ("CHECK", 4..8)]);
    });
    assert_eq!(chain(&scene, "iptables", "CNI-FORWARD").len(), 1 + 2 * 8);
    assert_eq!(chain(&scene, "iptables", "INPUT").len(), 10);
    all(&[("DEL", 4..12)]);
    assert_eq!(chain(&scene, "iptables", "CNI-FORWARD"), [ADMIN]);
}
