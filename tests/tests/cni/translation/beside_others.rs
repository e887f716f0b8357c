//! The table beside other programs: its output by `nft`, and a second agent in the node's namespace.

use std::process::Command;

use super::*;

/// Returns the output of `nft`.
fn nft(namespace: &Namespace, words: &[&str]) -> String {
    let shown = namespace.run(|| Command::new("nft").args(words).output()).unwrap();
    assert!(shown.status.success(), "nft {words:?}: {}", String::from_utf8_lossy(&shown.stderr));
    String::from_utf8(shown.stdout).unwrap()
}

/// The objects of a kind in a listing as JSON, without numbers that differ between two tables.
fn of_kind(listed: &Value, kind: &str) -> Vec<Value> {
    let objects = listed["nftables"].as_array().unwrap().iter().filter_map(|object| object.get(kind));
    objects
        .map(|object| {
            let mut object = object.clone();
            object.as_object_mut().unwrap().remove("handle");
            object
        })
        .collect()
}

#[test]
fn nft_lists_the_table_as_the_documents_have_it() {
    let mut scene = Scene::new(Links::Bridge, &["web"]);
    let ports = json!([
        {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
        {"hostPort": 9999, "containerPort": 99, "protocol": "sctp", "hostIP": NODE[0]}
    ]);
    scene.add("web", &ports);
    let node = &scene.node.namespace;
    let listed: Value =
        serde_json::from_str(&nft(node, &["-j", "list", "table", "inet", "netattach-nat"])).unwrap();
    let chains: Vec<(String, String, String, i64)> = of_kind(&listed, "chain")
        .iter()
        .map(|it| {
            let text = |key: &str| it[key].as_str().unwrap().to_owned();
            (text("name"), text("type"), text("hook"), it["prio"].as_i64().unwrap())
        })
        .collect();
    let chain = |name: &str, kind: &str, hook: &str, priority| {
        (name.to_owned(), kind.to_owned(), hook.to_owned(), priority)
    };
    assert_eq!(
        chains,
        [
            chain("loopback", "filter", "prerouting", -310),
            chain("prerouting", "nat", "prerouting", -90),
            chain("output", "nat", "output", -90),
            chain("postrouting", "nat", "postrouting", 110),
        ]
    );
    let text = nft(node, &["list", "table", "inet", "netattach-nat"]);
    // The table has no element that `nft` does not understand, and the machine's set-up is printed completely.
    let errors = node.run(|| Command::new("nft").args(["list", "ruleset"]).output()).unwrap();
    assert_eq!(String::from_utf8_lossy(&errors.stderr), "");
    let rules = of_kind(&listed, "rule").len();
    assert_eq!((rules, of_kind(&listed, "set").len(), of_kind(&listed, "map").len()), (15, 3, 6), "{text}");
    let state = std::fs::canonicalize(scene.node.path("state")).unwrap();
    for line in [
        &format!("comment \"netattach, state in {}\"", state.display()),
        "0.0.0.0 . tcp . 8080 : 10.50.0.2 . 80",
        "192.0.2.1 . sctp . 9999 : 10.50.0.2 . 99",
        "ip daddr 127.0.0.0/8 iifname @devices drop",
        "dnat ip to ip daddr . meta l4proto . th dport map @ports4",
        "ip daddr != @prefixes4 masquerade",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    scene.end();
}

#[test]
fn pods_are_detached_while_the_table_is_anothers() {
    let mut scene = Scene::new(Links::Bridge, &["web", "two"]);
    scene.add("web", &json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]));
    scene.add("two", &json!([]));
    scene.node.kill().unwrap();
    nft(&scene.node.namespace, &["delete", "table", "inet", "netattach-nat"]);
    nft(&scene.node.namespace, &["add", "table", "inet", "netattach-nat", "{ comment \"mine\"; }"]);
    scene.node.start().unwrap();
    // While another pod still wants something of it.
    scene.node.del(&scene.pods[0]).success();
    let is_told = || scene.node.whole_status().unwrap().to_string().contains("is another agent's (mine)");
    assert!(eventually(PATIENCE, is_told), "{:#}", scene.node.whole_status().unwrap());
    scene.node.del(&scene.pods[1]).success();
    assert!(nft(&scene.node.namespace, &["list", "table", "inet", "netattach-nat"]).contains("mine"));
    nft(&scene.node.namespace, &["delete", "table", "inet", "netattach-nat"]);
    scene.end();
}

/// Each of them would otherwise replace the other's table when it starts.
#[test]
fn one_agent_of_a_namespace_translates_and_the_other_says_who_does() {
    let mut scene = Scene::new(Links::Bridge, &["web"]);
    scene.add("web", &json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]));
    let whole = scene.elements();
    let namespace = Namespace::at(scene.node.namespace.path()).unwrap();
    let mut other = Node::within(namespace, &[pod("other", &json!({}), &Value::Null)]).unwrap();
    let mut config = other.default_config();
    config["ipMasq"] = json!(true);
    config["bridge"] = json!("br1");
    config["ipam"] = other.host_local(&["10.51.0.0/24", "fd00:51::/64"]);
    other.write("default", &network("kube-system", "default", &config)).unwrap();
    // It leaves the table alone while it needs none.
    other.start().unwrap();
    assert_eq!(scene.elements(), whole);
    let late = Pod::new("other").unwrap();
    let (code, message) = other.add(&late).failure();
    let state = std::fs::canonicalize(scene.node.path("state")).unwrap();
    let whose = format!(
        "is another agent's (netattach, state in {}): only one agent per network namespace",
        state.display()
    );
    assert!(code == 999 && message.contains(&whose), "{code} {message}");
    assert_eq!(scene.elements(), whole);
    // The table is removed with the last attachment that needs it.
    let first = scene.pods.remove(0);
    scene.node.del(&first).success();
    other.add(&late).success();
    let pod = Pod::new("web").unwrap();
    let (_, message) = scene.ask(&pod, &json!([])).failure();
    assert!(message.contains("is another agent's"), "{message}");
    other.del(&late).success();
    other.stop().unwrap();
    scene.add("web", &json!([]));
    scene.end();
}
