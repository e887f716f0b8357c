//! `macspoofchk` of the executable `bridge`: the node's packet filter drops packets of a pod with another Ethernet
//! address.

use netattach::netlink::Handle;
use netattach::netlink::senders::{self, TABLE};
use netattach_tests::privilege::without_nftables;
use netattach_tests::tools;
use netattach_tests::traffic::{Echo, SILENCE, connects};

use super::*;

/// An Ethernet address that no pod has.
const FORGED: &str = "02:00:00:00:00:99";

fn checked(scene: &Scene) -> Value {
    scene.bridge(&json!({"macspoofchk": true}))
}

/// Returns the Ethernet address of a pod.
fn given(attached: &Attached) -> String {
    let interfaces = attached.result()["interfaces"].as_array().unwrap();
    let inside = interfaces.iter().find(|listed| listed["sandbox"].is_string()).unwrap();
    inside["mac"].as_str().unwrap().to_owned()
}

fn send_by(attached: &Attached, mac: &str) {
    run(&attached.namespace, &format!("link set eth0 address {mac}"));
}

/// Returns the allowed senders by port, from the table: by the comments' last two words.
fn restricted(scene: &Scene) -> Vec<(String, Option<String>)> {
    let view = scene.node().run(|| senders::view().unwrap());
    let shown = view.elements().iter().map(|element| {
        let whose = element.note.split(' ').skip(2).collect::<Vec<_>>().join(" ");
        (whose, element.sender.map(|mac| mac.to_string()))
    });
    let mut shown: Vec<_> = shown.collect();
    shown.sort();
    shown
}

fn own(attached: &Attached) -> [(String, Option<String>); 2] {
    let whose = format!("{} eth0", attached.container);
    [(whose.clone(), None), (whose, Some(given(attached)))]
}

fn assert_nothing_is_left(scene: &Scene) {
    let listed = listing(scene.node());
    assert!(!listed.contains(TABLE), "{listed}");
}

/// Rows: BRG-macspoofchk-executable.
#[test]
fn a_pod_sends_by_its_own_ethernet_address_alone() {
    let scene = Scene::new();
    let (a, b) = (scene.add("a", &[checked(&scene)]), scene.add("b", &[scene.bridge(&json!({}))]));
    let echo = Echo::serve(scene.node(), at(GATEWAY[0], 7)).unwrap();
    assert!(connects(&a.namespace, echo.address(), PATIENCE));
    assert!(connects(&b.namespace, echo.address(), PATIENCE));
    let usual = given(&a);
    send_by(&a, FORGED);
    send_by(&b, "02:00:00:00:00:98");
    assert!(!connects(&a.namespace, echo.address(), SILENCE));
    // A changed address alone does not prevent connections: nothing checks the one of `b`.
    assert!(connects(&b.namespace, echo.address(), PATIENCE));
    send_by(&a, &usual);
    assert!(connects(&a.namespace, echo.address(), PATIENCE));
    assert_eq!(restricted(&scene), own(&a));
    // `nft` lists the table, and existing elements are not created again.
    assert!(listing(scene.node()).contains("iifname . ether saddr != @senders drop"));
    scene.check(&a);
    let taken = scene.runtime.refusal("ADD", a.call(), &a.chain[0]).unwrap();
    assert!(taken.1.contains("eth0"), "{taken:?}");
    assert_eq!(restricted(&scene), own(&a), "the ADD that failed took nothing back");
    scene.del(&a);
    scene.del(&b);
    assert_nothing_is_left(&scene);
}

/// Rows: BRG-macspoofchk-executable.
#[test]
fn del_takes_the_sender_back_whatever_is_gone() {
    let scene = Scene::new();
    let bridge = checked(&scene);
    // The link, the namespace, the key.
    let (a, b, c) = (
        scene.add("a", std::slice::from_ref(&bridge)),
        scene.add("b", std::slice::from_ref(&bridge)),
        scene.add("c", &[bridge]),
    );
    run(&a.namespace, "link del eth0");
    scene.del(&a);
    let without_namespace = Call { netns: Path::new(""), ..b.call() };
    for _ in 0..2 {
        let answer = scene.runtime.run("DEL", without_namespace, &b.chain[0]).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    }
    assert_eq!(restricted(&scene), own(&c));
    let answer = scene.runtime.run("DEL", c.call(), &scene.bridge(&json!({}))).unwrap();
    assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    assert_nothing_is_left(&scene);
}

/// Rows: BRG-macspoofchk-executable.
#[test]
fn check_gc_and_status_look_at_the_sender() {
    let scene = Scene::new();
    let (a, b) = (scene.add("a", &[checked(&scene)]), scene.add("b", &[checked(&scene)]));
    let gc = |config: &Value, valid: Value| {
        let mut config = config.clone();
        config["cni.dev/valid-attachments"] = valid;
        let answer = scene.runtime.run("GC", a.call(), &config).unwrap();
        assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    };
    let both = json!([{"containerID": "a", "ifname": "eth0"}, {"containerID": "b", "ifname": "eth0"}]);
    gc(&scene.bridge(&json!({"name": "other"})), json!([]));
    gc(&a.chain[0], both);
    assert_eq!(restricted(&scene), [own(&a), own(&b)].concat());
    // Also by a configuration that has lost the key.
    gc(&scene.bridge(&json!({})), json!([{"containerID": "b", "ifname": "eth0"}]));
    assert_eq!(restricted(&scene), own(&b));
    let lost = |attached: &Attached| {
        let config = with_result(&attached.chain[0], attached.result());
        scene.runtime.refusal("CHECK", attached.call(), &config).unwrap().1
    };
    assert!(lost(&a).contains("table bridge netattach-cni lacks port na"), "{}", lost(&a));
    scene.check(&b);
    // Another process removes the rule: the next ADD creates it again, with the existing elements.
    let nft = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let output = scene.node().run(|| Command::new("nft").args(words).output().unwrap());
        assert!(output.status.success(), "{line}: {output:?}");
    };
    nft("flush chain bridge netattach-cni prerouting");
    assert!(lost(&b).ends_with("table bridge netattach-cni lacks its chain or its rule"), "{}", lost(&b));
    let c = scene.add("c", &[checked(&scene)]);
    scene.check(&b);
    scene.check(&c);
    assert_eq!(restricted(&scene), [own(&b), own(&c)].concat());
    let answer = scene.runtime.run("STATUS", a.call(), &a.chain[0]).unwrap();
    assert_eq!((answer.exit, &answer.stdout), (Some(0), &Value::Null), "{answer:?}");
    gc(&a.chain[0], json!([]));
    assert_nothing_is_left(&scene);
}

/// Rows: BRG-macspoofchk-executable.
#[test]
fn a_kernel_without_the_packet_filter_is_named_before_anything_is_made() {
    let scene = Scene::new();
    let namespace = Namespace::new().unwrap();
    let call = Call { container: "a", ifname: "eth0", netns: namespace.path(), args: "" };
    let bridge = checked(&scene);
    let links = || {
        let links = Handle::open_in(scene.node().netns()).unwrap().links().unwrap();
        links.into_iter().map(|link| link.name).collect::<Vec<_>>()
    };
    let before = links();
    for verb in ["ADD", "STATUS"] {
        let (code, told) = without_nftables(|| scene.runtime.refusal(verb, call, &bridge)).unwrap();
        let why = "key macspoofchk: without an agent it needs the packet filter of bridges (nftables";
        assert!(code == 50 && told.contains(why), "{verb}: {code} {told}");
        assert_eq!(links(), before, "{verb}");
    }
    let gone = without_nftables(|| scene.runtime.run("DEL", call, &bridge)).unwrap();
    assert_eq!((gone.exit, &gone.stdout), (Some(0), &Value::Null), "{gone:?}");
    assert_eq!(links(), before);
}

/// Rows: BRG-macspoofchk-executable.
#[test]
fn the_same_senders_are_heard_with_the_reference() {
    let test = "the_same_senders_are_heard_with_the_reference";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["bridge"]) else { return };
    for (theirs, checks) in [(true, true), (true, false), (false, true), (false, false)] {
        let scene = reference::scene(theirs.then_some(&*reference), "bridge");
        let a = scene.add("a", &[scene.bridge(&json!({"macspoofchk": checks}))]);
        let echo = Echo::serve(scene.node(), at(GATEWAY[0], 7)).unwrap();
        let own = given(&a);
        for (mac, is_heard) in [(own.as_str(), true), (FORGED, !checks), (own.as_str(), true)] {
            send_by(&a, mac);
            let patience = if is_heard { PATIENCE } else { SILENCE };
            let found = connects(&a.namespace, echo.address(), patience);
            assert_eq!(found, is_heard, "theirs: {theirs}, macspoofchk: {checks}, {mac}");
        }
        scene.del(&a);
    }
}

/// Rows: BRG-macspoofchk-each-other.
#[test]
fn what_the_reference_restricts_is_taken_back_by_us() {
    let test = "what_the_reference_restricts_is_taken_back_by_us";
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["bridge"]) else { return };
    let (theirs, ours) = (reference::scene(Some(&reference), "bridge"), Scene::new());
    let (a, b) = (theirs.add("a", &[checked(&theirs)]), theirs.add("b", &[checked(&theirs)]));
    assert!(listing(theirs.node()).contains("cni-br-iface-a-eth0-mac"));
    // Ours, on their node; a namespace that is gone leaves the rules there if the reference is asked.
    for (pod, netns) in [(&a, a.namespace.path()), (&b, Path::new(""))] {
        let node = Namespace::at(theirs.node().path()).unwrap();
        let own = Runtime { node, plugins: ours.runtime.plugins.clone() };
        let call = Call { netns, ..pod.call() };
        own.after("DEL", call, &pod.chain[0], pod.result()).unwrap();
        let chain = format!("cni-br-iface-{}-", pod.container);
        let listed = listing(theirs.node());
        assert!(
            !listed.contains(&chain) && !listed.contains(&format!("macspoofchk-{}", pod.container)),
            "{listed}"
        );
    }
}
