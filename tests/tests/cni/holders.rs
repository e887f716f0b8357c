//! An ADD that needs a resource of a container that is being detached, or whose DEL has failed, reports that, and
//! does not delay others.

use std::thread::spawn;

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::snapshot::Network;
use netattach_tests::tools::bridges_filter_by_vlan;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Node, Pod};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// The process of the plugin that was called last.
fn last_call(node: &Node) -> Option<Pid> {
    let calls = std::fs::read_to_string(node.path("calls")).ok()?;
    let last: Value = serde_json::from_str(calls.lines().rfind(|line| line.contains("\"DEL\""))?).ok()?;
    Pid::from_raw(i32::try_from(last["pid"].as_i64()?).ok()?)
}

#[test]
fn an_add_that_waits_for_what_a_leaving_container_holds_keeps_no_other_waiting_and_names_it() {
    let mut node = Node::new(&[]).unwrap();
    node.set("parallelAdds", json!(1));
    node.set("delegation", json!({"timeoutSeconds": 600}));
    node.plugin("odd", &json!({"DEL": {"sleepMs": 300_000}})).unwrap();
    let lan = json!({
        "cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "capabilities": {"ips": true},
        "ipam": {"type": "static"}
    });
    let odd = json!({"cniVersion": "1.0.0", "type": "odd"});
    for (name, config) in [("lan", lan), ("odd", odd)] {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    let address = json!({"name": "lan", "ips": ["10.71.0.5/24"]});
    node.write("leaver", &pod("leaver", &json!({}), &json!([address, {"name": "odd"}]))).unwrap();
    node.write("heir", &pod("heir", &json!({}), &json!([address]))).unwrap();
    node.write("other", &pod("other", &json!({}), &Value::Null)).unwrap();
    // It asks for the address of the leaver, a pod of another namespace.
    let foreign = json!({"name": "lan", "namespace": NAMESPACE, "ips": ["10.71.0.5/24"]});
    let mut stranger = pod("stranger", &json!({}), &json!([foreign]));
    stranger["metadata"]["namespace"] = json!("evil");
    node.write("stranger", &stranger).unwrap();
    node.start().unwrap();
    let [leaver, heir, other, stranger] =
        ["leaver", "heir", "other", "stranger"].map(|name| Pod::new(name).unwrap());
    let refused_stranger = |node: &Node| {
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=evil;K8S_POD_NAME=stranger";
        node.call("ADD", &stranger).with("CNI_ARGS", args).run().failure().1
    };
    node.add(&leaver).success();

    // The DEL hangs at the other network, so the address is still taken.
    let del = node.call("DEL", &leaver);
    let del = spawn(move || del.run());
    assert!(eventually(PATIENCE, || last_call(&node).is_some()), "DEL of the plugin");
    let add = node.call("ADD", &heir);
    let add = spawn(move || add.run());
    let who = format!("pod {NAMESPACE}/leaver (container c-leaver)");
    let rows = || node.whole_status().unwrap()["troubles"].as_array().unwrap().clone();
    let is_told = |row: &Value| {
        let problem = row["problem"].as_str().unwrap();
        row["object"] == *who
            && problem.starts_with("its detaching has taken ")
            && problem.ends_with(" s so far, and 1 ADDs wait for an address, port or device that it holds")
    };
    assert!(eventually(PATIENCE, || rows().iter().any(is_told)), "{:#?}", rows());
    // The place of the one ADD at a time.
    node.call("ADD", &other).run().success();
    assert!(!add.is_finished(), "it is still waiting");
    let (_, message) = add.join().unwrap().failure();
    assert!(message.contains("address 10.71.0.5 is taken"), "{message}");
    let (_, held) = message.split_once(&format!("held by {who}, whose detaching has taken ")).unwrap();
    let seconds: u64 = held.strip_suffix(" s so far").unwrap().parse().unwrap();
    assert!(seconds >= 9, "it has waited: {message}");
    assert!(eventually(PATIENCE, || !rows().iter().any(is_told)), "nobody waits any more: {:#?}", rows());

    let message = refused_stranger(&node);
    let unnamed = "held by another container of the node, whose detaching has taken ";
    assert!(message.contains(unnamed) && !message.contains("leaver"), "{message}");

    // The DEL fails, so the container is not being detached; it is not waited for.
    kill_process(last_call(&node).unwrap(), Signal::KILL).unwrap();
    assert_ne!(del.join().unwrap().exit, 0);
    let (_, message) = node.call("ADD", &heir).run().failure();
    let half =
        format!("held by {who}, which is half detached: its last DEL has failed, and is to be repeated");
    assert!(message.ends_with(&half), "{message}");
    let message = refused_stranger(&node);
    let unnamed = half.replace(&who, "another container of the node");
    assert!(message.ends_with(&unnamed) && !message.contains("leaver"), "{message}");

    node.plugin("odd", &json!({})).unwrap();
    node.del(&leaver).success();
    node.add(&heir).success();
    // A container that stays is named by the error itself.
    node.write("late", &pod("late", &json!({}), &json!([address]))).unwrap();
    let late = Pod::new("late").unwrap();
    let mut message = String::new();
    let is_refused = eventually(PATIENCE, || {
        let outcome = node.call("ADD", &late).run();
        message = outcome.failure().1;
        message.contains("is taken: pod shop/heir, container c-heir, interface net1 has it")
    });
    assert!(is_refused && !message.contains("held by"), "{message}");
}

/// A pool knows only addresses that it has leased itself.
#[test]
fn an_address_that_a_pod_has_chosen_before_a_pool_gives_it_is_given_to_nobody_else() {
    let mut node = Node::new(&[]).unwrap();
    let bridge = |ipam: Value| json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br1", "capabilities": {"ips": true}, "ipam": ipam});
    let pool = bridge(node.host_local(&["10.71.0.0/24"]));
    for (name, config) in [("free", bridge(json!({"type": "static"}))), ("pool", pool)] {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    // The first one that the pool leases, after its gateway.
    let asks = json!([{"name": "free", "ips": ["10.71.0.2/24"]}]);
    node.write("chooser", &pod("chooser", &json!({}), &asks)).unwrap();
    node.write("next", &pod("next", &json!({}), &json!("pool"))).unwrap();
    node.start().unwrap();
    let [chooser, next] = ["chooser", "next"].map(|name| Pod::new(name).unwrap());
    node.add(&chooser).success();
    node.add(&next).success();
    let leased = |last: u8| node.path(&format!("leases/@shop/pool/10.71.0.{last}")).exists();
    assert_eq!([leased(2), leased(3)], [false, true], "what is passed over is given back");
    let rows = node.ctl(&["attachments", "--pod", "shop/next"]).unwrap();
    let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap();
    assert_eq!(row["addresses"], json!(["10.71.0.3/24"]));
    for pod in [&chooser, &next] {
        node.del(pod).success();
    }
}

/// The gateway of a bridge's VLAN is on a device of its own, by which the node reaches the bridge's port in that VLAN.
#[test]
fn the_node_gets_no_gateway_that_a_pod_has_which_it_reaches_by_a_bridges_vlan() {
    if !bridges_filter_by_vlan("the_node_gets_no_gateway_that_a_pod_has_which_it_reaches_by_a_bridges_vlan") {
        return;
    }
    let mut node = Node::new(&[]).unwrap();
    let leases = node.path("leases");
    let bridge = |name: &str, vlan: Option<u16>, gateway: Option<&str>| {
        let mut range = json!({"subnet": "10.71.0.0/24", "rangeStart": "10.71.0.7"});
        if let Some(gateway) = gateway {
            range["gateway"] = json!(gateway);
        }
        let mut config = json!({
            "cniVersion": "1.0.0", "type": "bridge", "bridge": name, "isGateway": gateway.is_some(),
            "ipam": {"type": "host-local", "dataDir": leases, "ranges": [[range]]}
        });
        if let Some(vlan) = vlan {
            config["vlan"] = json!(vlan);
        }
        config
    };
    for (name, config) in [
        ("open", bridge("br1", Some(5), Some("10.71.0.1"))),
        ("quiet", bridge("br1", Some(5), None)),
        ("gateway", bridge("x0", None, Some("10.71.0.7"))),
    ] {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    let [open, quiet, gateway] = ["open", "quiet", "gateway"].map(|name| Pod::new(name).unwrap());
    // The node keeps the gateway of the VLAN when this one is gone.
    node.add(&open).success();
    node.del(&open).success();
    node.add(&quiet).success();
    let (code, message) = node.add(&gateway).failure();
    let holder = "address 10.71.0.7 is taken: pod shop/quiet, container c-quiet, interface net1 has it";
    assert!(code == 11 && message.contains(holder), "{code} {message}");
    node.del(&quiet).success();
    node.add(&gateway).success();
    node.del(&gateway).success();
}

/// A definition's author cannot take the address of another pod by a pool or as a gateway.
#[test]
fn an_address_of_a_pool_is_given_by_no_other_pool_of_the_bridge_and_to_the_node_by_no_gateway() {
    let mut node = Node::new(&[]).unwrap();
    let bridge = |name: &str, ipam: &Value| {
        let common = json!({"cniVersion": "1.0.0", "type": "bridge", "isGateway": true});
        let mut config = common.as_object().unwrap().clone();
        config.extend([("bridge".to_owned(), json!(name)), ("ipam".to_owned(), ipam.clone())]);
        Value::Object(config)
    };
    let leases = node.path("leases");
    let pool = |range: Value| json!({"type": "host-local", "dataDir": leases, "ranges": [[range]]});
    let wide = pool(json!({"subnet": "10.71.0.0/24"}));
    let narrow = json!({"subnet": "10.71.0.0/24", "rangeStart": "10.71.0.2", "rangeEnd": "10.71.0.2"});
    let gateway = json!({"subnet": "10.71.0.0/24", "gateway": "10.71.0.2", "rangeStart": "10.71.0.100"});
    for (name, config) in [
        ("first", bridge("br1", &wide)),
        ("second", bridge("br1", &wide)),
        ("narrow", bridge("br1", &pool(narrow))),
        ("gateway", bridge("x0", &pool(gateway))),
    ] {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), &json!(name))).unwrap();
    }
    node.start().unwrap();
    let [first, second, narrow, gateway] =
        ["first", "second", "narrow", "gateway"].map(|name| Pod::new(name).unwrap());
    node.add(&first).success();
    let addresses = |node: &Node, pod: &str| {
        let rows = node.ctl(&["attachments", "--pod", pod]).unwrap();
        let row = rows.as_array().unwrap().iter().find(|row| row["ifname"] == "net1").unwrap();
        row["addresses"].clone()
    };
    assert_eq!(addresses(&node, "shop/first"), json!(["10.71.0.2/24"]));
    let refused = |node: &Node, pod: &Pod| {
        let (code, message) = node.add(pod).failure();
        let holder = "address 10.71.0.2 is taken: pod shop/first, container c-first, interface net1 has it";
        assert!(code == 11 && message.contains(holder), "{code} {message}");
    };
    // A later agent knows it too.
    for _ in 0..2 {
        refused(&node, &narrow);
        refused(&node, &gateway);
        let links = Network::of(&node.namespace).unwrap().links;
        assert!(!format!("{links:?}").contains("10.71.0.2/24"), "{links:?}");
        node.stop().unwrap();
        node.start().unwrap();
    }
    node.add(&second).success();
    assert_eq!(addresses(&node, "shop/second"), json!(["10.71.0.3/24"]));
    node.del(&second).success();
    node.del(&first).success();
    node.add(&narrow).success();
    node.del(&narrow).success();
    // Now the node may have it, and from then on the pool passes over it, although no pod is there.
    node.add(&gateway).success();
    node.del(&gateway).success();
    let (code, message) = node.add(&narrow).failure();
    let of_node = "address 10.71.0.2 of the pool is an address of the node";
    assert!(code == 11 && message.contains(of_node), "{code} {message}");
}
