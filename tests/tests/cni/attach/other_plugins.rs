//! Other plugins, alone, in chains and beside the built-in ones, and the rollback when they fail.

use std::fs;

use netattach_tests::Pod;
use netattach_tests::manifest::{network, pod};
use netattach_tests::plugin_calls::verbs;
use netattach_tests::snapshot::{Network, Snapshot};
use serde_json::{Value, json};

use super::{link_names, network_of, node, normalised};

#[test]
fn an_external_plugin_makes_an_attachment() {
    let mut node = node();
    let result = json!({
        "cniVersion": "0.4.0",
        "interfaces": [{"name": "x9", "mac": "02:00:00:00:00:09", "sandbox": "/some/where"}],
        "ips": [{"version": "4", "interface": 0, "address": "192.0.2.9/24"}]
    });
    node.plugin("other", &json!({"ADD": {"result": result}})).unwrap();
    let config =
        json!({"cniVersion": "0.4.0", "type": "other", "colour": "blue", "capabilities": {"mac": true}});
    network_of(&node, "odd", &config);
    let selection = json!([{"name": "odd", "mac": "02:00:00:00:00:09", "cni-args": {"shade": "dark"}}]);
    node.write("x", &pod("x", &json!({}), &selection)).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.check(&x).success();
    let status = fs::read_to_string(node.path("run/network-status/shop/x.json")).unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    let expected = json!({"name": "shop/odd", "interface": "net1", "ips": ["192.0.2.9"],
        "mac": "02:00:00:00:00:09", "default": false, "dns": {}});
    assert_eq!(status[1]["ips"], expected["ips"]);
    node.call("DEL", &x).with("CNI_NETNS", "").run().success();

    let calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["ADD other net1", "CHECK other net1", "DEL other net1"]);
    let given = json!({
        "cniVersion": "0.4.0", "name": "odd", "type": "other", "colour": "blue", "capabilities": {"mac": true},
        "runtimeConfig": {"mac": "02:00:00:00:00:09"}, "args": {"cni": {"shade": "dark"}}
    });
    let without_previous = |value: &Value| {
        let mut value = value.clone();
        value.as_object_mut().unwrap().remove("prevResult");
        value.as_object_mut().unwrap().remove("capabilities");
        value
    };
    for call in &calls {
        assert_eq!(
            without_previous(&call["stdin"]),
            without_previous(&given),
            "{}",
            call["env"]["CNI_COMMAND"]
        );
        assert_eq!(call["env"]["CNI_CONTAINERID"], json!("c-x"));
    }
    let path = json!(x.namespace.path());
    let netns: Vec<&Value> = calls.iter().map(|call| &call["env"]["CNI_NETNS"]).collect();
    assert_eq!(netns[..2], [&path, &path]);
    assert_eq!(calls[0]["stdin"].get("prevResult"), None);
    assert_eq!(calls[1]["stdin"]["prevResult"]["ips"], result["ips"]);
    assert_eq!(calls[2]["stdin"]["prevResult"]["ips"], result["ips"]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

#[test]
fn an_external_plugin_is_chained_after_a_native_one() {
    let mut node = node();
    node.plugin("tuner", &json!({})).unwrap();
    let config = json!({
        "cniVersion": "1.0.0", "name": "chained",
        "plugins": [
            {"type": "bridge", "bridge": "br1", "ipam": node.host_local(&["10.53.0.0/24"])},
            {"type": "tuner", "sysctl": {"net.core.somaxconn": "500"}}
        ]
    });
    network_of(&node, "chained", &config);
    node.write("x", &pod("x", &json!({}), &json!("chained"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    node.del(&x).success();
    let calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["ADD tuner net1", "DEL tuner net1"]);
    let expected = json!({
        "cniVersion": "1.0.0",
        "interfaces": [
            {"name": "br1", "mac": "MAC", "mtu": 1500},
            {"name": "HOST", "mac": "MAC", "mtu": 1500},
            {"name": "net1", "mac": "MAC", "mtu": 1500, "sandbox": "POD"}
        ],
        "ips": [{"interface": 2, "address": "10.53.0.2/24", "gateway": "10.53.0.1"}]
    });
    for call in &calls {
        let previous = normalised(call["stdin"]["prevResult"].clone(), &x);
        assert_eq!(previous, expected, "{}", call["env"]["CNI_COMMAND"]);
        assert_eq!(call["stdin"]["sysctl"], json!({"net.core.somaxconn": "500"}));
        assert_eq!(call["stdin"]["name"], json!("chained"));
    }
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

#[test]
fn an_external_ipam_plugin_gives_the_addresses_of_a_native_interface() {
    let mut node = node();
    let result = json!({
        "cniVersion": "1.0.0", "ips": [{"address": "10.54.0.7/24", "gateway": "10.54.0.1"}],
        "routes": [{"dst": "10.99.0.0/16"}], "dns": {"nameservers": ["10.54.0.53"]}
    });
    node.plugin("pool", &json!({"ADD": {"result": result}})).unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br2", "ipam": {"type": "pool", "size": 7}});
    network_of(&node, "pooled", &config);
    node.write("x", &pod("x", &json!({}), &json!("pooled"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    let seen = Network::of(&x.namespace).unwrap();
    let addresses: Vec<String> = seen.links["net1"].addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.54.0.7/24"]);
    assert!(seen.routes.contains("10.99.0.0/16 via 10.54.0.1 dev net1"), "{:?}", seen.routes);
    node.check(&x).success();
    node.del(&x).success();
    let calls = node.take_calls().unwrap();
    // The interface's type stays: an IPAM plugin gets the whole configuration.
    assert_eq!(verbs(&calls), ["ADD bridge net1", "CHECK bridge net1", "DEL bridge net1"]);
    assert_eq!(calls[0]["stdin"]["ipam"], json!({"type": "pool", "size": 7}));
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: NPWG-7.2-add-fail-fast, NPWG-7.2-del-attempted-only, ADD-02, ADD-03, ADD-04, ENV-22.
#[test]
fn a_failing_attachment_takes_back_the_ones_before_it_in_reverse() {
    let mut node = node();
    node.plugin("one", &json!({})).unwrap();
    node.plugin("two", &json!({"ADD": {"error": {"code": 123, "msg": "no more", "details": "of these"}}}))
        .unwrap();
    node.plugin("three", &json!({})).unwrap();
    for name in ["one", "two", "three"] {
        network_of(&node, name, &json!({"cniVersion": "1.0.0", "type": name}));
    }
    node.write("x", &pod("x", &json!({}), &json!("one, lan, two, three"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    let before = Snapshot::take(&node, &[&x]).unwrap();
    let (code, message) = node.add(&x).failure();
    assert_eq!(code, 123);
    assert_eq!(message, "attach net3 (shop/two): plugin \"two\" failed (ADD): no more: of these");
    assert_eq!(
        verbs(&node.take_calls().unwrap()),
        ["ADD one net1", "ADD two net3", "DEL two net3", "DEL one net1"]
    );
    let after = Snapshot::take(&node, &[&x]).unwrap();
    after.assert_nothing_is_left();
    assert_eq!(after.pods, before.pods);
    node.del(&x).success();
    assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new(), "there is nothing left to roll back");
}

/// Rows: NPWG-6.2-order, NPWG-7.3-serial, NPWG-7.2-add-default-fails.
/// Rows: NPWG-7.2-del-all, NPWG-7.2-del-final-error, DEL-03.
#[test]
fn attachments_come_in_order_and_every_one_is_taken_back_whatever_becomes_of_the_others() {
    let mut node = node();
    for name in ["first", "one", "two", "three"] {
        // Calls that overlapped would be recorded out of order.
        node.plugin(name, &json!({"ADD": {"sleepMs": 20}})).unwrap();
    }
    node.plugin("two", &json!({"DEL": {"error": {"code": 100, "msg": "not this one"}}})).unwrap();
    for name in ["one", "two", "three"] {
        network_of(&node, name, &json!({"cniVersion": "1.0.0", "type": name}));
    }
    let default = json!({"cniVersion": "1.0.0", "type": "first"});
    node.write("default", &network("kube-system", "default", &default)).unwrap();
    node.write("x", &pod("x", &json!({}), &json!("one, two, three"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    let message = "detach net2 (shop/two): plugin \"two\" failed (DEL): not this one";
    assert_eq!(node.del(&x).failure(), (100, message.to_owned()));
    let added = ["ADD first eth0", "ADD one net1", "ADD two net2", "ADD three net3"];
    let deleted = ["DEL three net3", "DEL two net2", "DEL one net1", "DEL first eth0"];
    assert_eq!(verbs(&node.take_calls().unwrap()), [added, deleted].concat());
    node.plugin("two", &json!({})).unwrap();
    node.del(&x).success();
    node.take_calls().unwrap();

    node.plugin("first", &json!({"ADD": {"error": {"code": 101, "msg": "no"}}})).unwrap();
    assert_eq!(node.add(&x).failure().0, 101);
    assert_eq!(verbs(&node.take_calls().unwrap()), ["ADD first eth0", "DEL first eth0"]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: DEL-03, DEL-04, NPWG-7.2-del-final-error.
#[test]
fn a_plugin_whose_del_fails_keeps_the_record_and_is_asked_again() {
    let mut node = node();
    node.plugin("one", &json!({"DEL": {"error": {"code": 11, "msg": "not now"}}})).unwrap();
    network_of(&node, "one", &json!({"cniVersion": "1.0.0", "type": "one"}));
    node.write("x", &pod("x", &json!({}), &json!("lan, one"))).unwrap();
    node.start().unwrap();
    let x = Pod::new("x").unwrap();
    node.add(&x).success();
    let (_, message) = node.del(&x).failure();
    assert!(message.contains("not now"), "{message}");
    assert_eq!(link_names(&x), ["lo"], "the rest is rolled back all the same");
    assert!(node.path("state/journal/c-x@eth0.jsonl").exists());
    node.plugin("one", &json!({})).unwrap();
    node.del(&x).success();
    assert_eq!(verbs(&node.take_calls().unwrap()), ["ADD one net2", "DEL one net2", "DEL one net2"]);
    Snapshot::take(&node, &[&x]).unwrap().assert_nothing_is_left();
}

/// Rows: EXE-17.
#[test]
fn a_type_listed_under_delegation_exec_is_executed() {
    let mut node = node();
    node.plugin("macvlan", &json!({})).unwrap();
    node.set("delegation", json!({"exec": ["macvlan"]}));
    node.start().unwrap();
    let b = Pod::new("b").unwrap();
    node.add(&b).success();
    assert_eq!(link_names(&b), ["eth0", "lo", "net1"]);
    node.del(&b).success();
    assert_eq!(verbs(&node.take_calls().unwrap()), ["ADD macvlan lan7", "DEL macvlan lan7"]);
    Snapshot::take(&node, &[&b]).unwrap().assert_nothing_is_left();
}
