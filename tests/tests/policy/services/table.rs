//! The table in the node's packet filter: installed before the first packet, restored when removed, deleted with the
//! setting.

use super::*;
use netattach::netlink::{guard_exists, remove_guard};

fn stands(scene: &Scene) -> bool {
    scene.guard_is_whole()
}

const DENIED: [(&str, To, bool); 2] =
    [("client", To::Service(3, WEB), false), ("client", To::Service(1, WEB), true)];

fn only_the_server() -> Value {
    json!({
        "podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"], "egress": [{"to": [app("server")]}]
    })
}

/// Rows: SVC-table.
#[test]
fn the_table_is_put_back_when_somebody_removes_it_or_makes_it_dormant() {
    let scene = Scene::new(Links::Bridge);
    scene.policy("client", &only_the_server());
    scene.expect(&DENIED);
    let dormant = || {
        let words = ["add", "table", "inet", "netattach", "{ flags dormant; }"];
        let made = scene.node.namespace.run(|| Command::new("nft").args(words).output()).unwrap();
        assert!(made.status.success(), "{made:?}");
    };
    let removed = || scene.node.namespace.run(remove_guard).unwrap();
    for spoil in [&removed as &dyn Fn(), &dormant] {
        spoil();
        assert!(!stands(&scene));
        assert!(eventually(PATIENCE, || stands(&scene)));
        // Until devices leave packets to the table again, they judge them untranslated.
        let service = To::Service(1, WEB).address(0);
        assert!(eventually(PATIENCE, || datagram(&scene.client.namespace, service, SILENCE).unwrap()));
        scene.expect(&DENIED);
    }
    let back = scene.node.ctl(&["status"]).unwrap()["programs_put_back"].clone();
    assert_eq!(back, json!(2));
    scene.end();
}

/// Rows: SVC-table-fought.
#[test]
fn a_table_that_somebody_removes_again_and_again_is_put_back_rarely_and_told_of() {
    let scene = Scene::new(Links::Bridge);
    scene.policy("client", &only_the_server());
    scene.expect(&DENIED);
    let remove = || scene.node.namespace.run(remove_guard).unwrap();
    for time in 1..=5 {
        remove();
        assert!(eventually(PATIENCE, || stands(&scene)), "{time}");
    }
    remove();
    let told = "another program removes or changes it again and again: it was put back 5 times, and from now on is once a minute";
    let is_told = || scene.node.whole_status().unwrap().to_string().contains(told);
    assert!(eventually(PATIENCE, is_told), "{:#}", scene.node.whole_status().unwrap());
    assert!(!stands(&scene));
    // A packet that is not judged after the translation does not pass before it.
    scene.expect(&[("client", To::Service(3, WEB), false), ("client", To::Service(1, WEB), false)]);
}

#[test]
fn a_killed_agents_table_goes_on_and_its_successor_takes_it_over() {
    let mut scene = Scene::new(Links::Routed);
    scene.policy("client", &only_the_server());
    scene.node.kill().unwrap();
    scene.expect(&DENIED);
    scene.node.start().unwrap();
    assert!(stands(&scene));
    scene.expect(&DENIED);
    scene.end();
}

/// Rows: SVC-table-other.
#[test]
fn a_table_of_that_name_that_is_anothers_stays_and_nothing_is_left_to_it() {
    let mut scene = Scene::new(Links::Bridge);
    scene.policy("client", &only_the_server());
    scene.expect(&DENIED);
    let nft = |namespace: &Namespace, words: &[&str]| {
        let output = namespace.run(|| Command::new("nft").args(words).output()).unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    scene.node.kill().unwrap();
    nft(&scene.node.namespace, &["delete", "table", "inet", "netattach"]);
    nft(&scene.node.namespace, &["add", "table", "inet", "netattach", "{ comment \"mine\"; }"]);
    scene.node.start().unwrap();
    let told = "a table of that name is another agent's or another program's (mine)";
    let is_told = || scene.node.whole_status().unwrap().to_string().contains(told);
    assert!(eventually(PATIENCE, is_told), "{:#}", scene.node.whole_status().unwrap());
    scene.expect(&[("client", To::Service(3, WEB), false), ("client", To::Service(1, WEB), false)]);
    assert!(nft(&scene.node.namespace, &["list", "table", "inet", "netattach"]).contains("mine"));
    nft(&scene.node.namespace, &["delete", "table", "inet", "netattach"]);
    assert!(eventually(PATIENCE, || stands(&scene)));
    let service = To::Service(1, WEB).address(0);
    assert!(eventually(PATIENCE, || datagram(&scene.client.namespace, service, SILENCE).unwrap()));
    scene.expect(&DENIED);
    scene.end();
}

#[test]
fn without_the_setting_there_is_no_table_and_devices_judge() {
    let mut scene = Scene::new(Links::Bridge);
    scene.policy("client", &only_the_server());
    scene.expect(&DENIED);
    scene.node.kill().unwrap();
    scene.node.set("networkPolicy", json!(false));
    scene.node.start().unwrap();
    assert!(!scene.node.namespace.run(guard_exists).unwrap());
    scene.expect(&[("client", To::Service(3, WEB), true), ("client", To::Service(1, WEB), true)]);
    scene.end();
}

/// When a bridge gets another address, frames for the node by that address are recognised.
#[test]
fn the_node_is_where_its_bridge_is() {
    let scene = Scene::new(Links::Bridge);
    scene.policy("client", &only_the_server());
    scene.expect(&DENIED);
    ip(&scene.node.namespace, &["link", "set", "br0", "address", "02:00:00:00:77:77"]).unwrap();
    for pod in [&scene.client, &scene.server, &scene.other] {
        ip(&pod.namespace, &["neigh", "flush", "all"]).unwrap();
    }
    // Changes of links are gathered for a moment.
    let reached =
        |family| datagram(&scene.client.namespace, To::Service(1, WEB).address(family), SILENCE).unwrap();
    assert!([0, 1].into_iter().all(|family| eventually(PATIENCE, || reached(family))));
    scene.expect(&DENIED);
    scene.end();
}
