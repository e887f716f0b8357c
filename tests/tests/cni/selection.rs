//! Network selection of pods: how it reaches other plugins and the status.

use std::fs;
use std::time::{Duration, Instant};

use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::node::ip;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Every capability of the standard, and the path of device information.
const CAPABILITIES: [&str; 6] =
    ["ips", "mac", "portMappings", "bandwidth", "infinibandGUID", "CNIDeviceInfoFile"];

/// A started node with pods that have these annotations: `chain` is a network of two scripted plugins, of which `first`
/// declares every capability and `second` none; `bare` has `second` alone and declares no `ips`; `flat` is a built-in
/// type.
fn node(pods: &[(&str, Value)]) -> Node {
    let mut node = Node::new(&[]).unwrap();
    add_networks(&node);
    for (name, networks) in pods {
        node.write(&format!("pod-{name}"), &pod(name, &json!({}), networks)).unwrap();
    }
    node.start().unwrap();
    node
}

fn add_networks(node: &Node) {
    let declared: Value = CAPABILITIES.iter().map(|name| ((*name).to_owned(), json!(true))).collect();
    let chain = json!({"cniVersion": "1.0.0", "name": "chain", "plugins": [
        {"type": "first", "capabilities": declared, "args": {"cni": {"kept": 1, "won": "network"}, "other": 2}},
        {"type": "second"}
    ]});
    let bare = json!({"cniVersion": "1.0.0", "type": "second", "capabilities": {"ips": false}});
    let flat = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "br1",
        "ipam": node.host_local(&["10.53.0.0/24"])});
    for (name, config) in [("chain", chain), ("bare", bare), ("flat", flat)] {
        node.write(name, &network(NAMESPACE, name, &config)).unwrap();
    }
    node.plugin("first", &json!({})).unwrap();
    node.plugin("second", &json!({})).unwrap();
}

/// The standard input of the plugins of an ADD, in order.
fn read_by_plugins(node: &Node) -> Vec<Value> {
    node.take_calls().unwrap().into_iter().map(|call| call["stdin"].clone()).collect()
}

/// Rows: NPWG-4.1.2.1.3.2-ips-runtimeconfig, NPWG-4.1.2.1.4-mac-valid, NPWG-4.1.2.1.7-pm-shape.
/// Rows: NPWG-4.1.2.1.8-bw-shape, NPWG-4.1.2.1.10-guid-valid, NPWG-4.1.2.1.6-args-pass.
/// Rows: NPWG-4.1.2.1.6-args-priority, NPWG-4.1.2.1.6-args-every-plugin, NPWG-4.1.2.1.11-claim-pass.
/// Rows: DI-5-capability-only, DI-4.2-every-attachment, DI-4.2-mkdir, NPWG-4.1.2.1.5-ifname.
#[test]
fn every_key_reaches_the_plugins_that_take_it() {
    let asked = json!([{
        "name": "chain", "interface": "eth9", "ips": ["10.2.2.42/24", "2001:db8::5"], "mac": "02:00:00:00:00:09",
        "infiniband-guid": "c2:11:22:33:44:55:66:77",
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 1000, "ingressBurst": 2000, "egressRate": 3000, "egressBurst": 4000},
        "cni-args": {"won": "pod", "list": [1, {"deep": true}], "text": "x"}
    }, {"name": "chain", "ipam-claim-reference": "vm.disk", "deviceID": "0000:03:02.1"}]);
    let node = node(&[("a", asked)]);
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let calls = node.take_calls().unwrap();
    let names: Vec<&str> = calls.iter().filter_map(|call| call["env"]["CNI_IFNAME"].as_str()).collect();
    assert_eq!(names, ["eth9", "eth9", "net2", "net2"]);
    let read: Vec<Value> = calls.iter().map(|call| call["stdin"].clone()).collect();
    let file = |ifname: &str| json!(node.path("devinfo/cni").join(format!("{NAMESPACE}-chain-c-a_{ifname}")));
    let expected = json!({
        "ips": ["10.2.2.42/24", "2001:db8::5"], "mac": "02:00:00:00:00:09",
        "infinibandGUID": "c2:11:22:33:44:55:66:77",
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 1000, "ingressBurst": 2000, "egressRate": 3000, "egressBurst": 4000},
        "CNIDeviceInfoFile": file("eth9")
    });
    assert_eq!(read[0]["runtimeConfig"], expected);
    assert_eq!(read[1].get("runtimeConfig"), None);
    let arguments = json!({"kept": 1, "won": "pod", "list": [1, {"deep": true}], "text": "x"});
    assert_eq!(read[0]["args"], json!({"cni": arguments, "other": 2}));
    let arguments = json!({"won": "pod", "list": [1, {"deep": true}], "text": "x"});
    assert_eq!(read[1]["args"], json!({"cni": arguments}));

    let second = json!({"CNIDeviceInfoFile": file("net2")});
    assert_eq!(read[2]["runtimeConfig"], second);
    for (position, config) in read[2..].iter().enumerate() {
        assert_eq!(config["deviceID"], "0000:03:02.1", "{position}");
        assert_eq!(config["pciBusID"], "0000:03:02.1", "{position}");
        assert_eq!(config["args"]["cni"]["dev.netattach.ipam-claim-reference"], "vm.disk", "{position}");
    }
    assert!(node.path("devinfo/cni").is_dir());
    assert_eq!(node.del(&a).success(), Value::Null);
}

/// Rows: NPWG-4.1.2.1.3.2-ips-no-capability, NPWG-4.1.2.1.4.2-mac-no-capability, NPWG-4.1.2.1.7-pm-no-capability.
/// Rows: NPWG-4.1.2.1.8-bw-no-capability, NPWG-4.1.2.1.10-guid-no-capability.
#[test]
fn what_no_plugin_takes_fails_before_any_plugin_runs() {
    let rows = [
        (json!({"ips": ["10.0.0.1"]}), "ips"),
        (json!({"mac": "02:00:00:00:00:01"}), "mac"),
        (json!({"portMappings": [{"hostPort": 1, "containerPort": 1}]}), "portMappings"),
        (json!({"bandwidth": {"ingressRate": 1}}), "bandwidth"),
        (json!({"infiniband-guid": "c2:11:22:33:44:55:66:77"}), "infinibandGUID"),
    ];
    let names: Vec<String> = (0..rows.len()).map(|number| format!("p{number}")).collect();
    let pods: Vec<(&str, Value)> = names
        .iter()
        .zip(&rows)
        .map(|(name, (keys, _))| {
            let mut second = keys.clone();
            second["name"] = json!("bare");
            (name.as_str(), json!([{"name": "chain"}, second]))
        })
        .collect();
    let node = node(&pods);
    for (name, (_, capability)) in names.iter().zip(&rows) {
        let refused = node.call("ADD", &Pod::new(name).unwrap()).run().failure();
        let said = format!(
            "attach net2 (shop/bare): {capability} asked for, but no plugin of network bare declares that capability"
        );
        assert_eq!(refused, (7, said));
    }
    assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new());
}

/// Rows: NPWG-4.1.2.1.3-ips-plugin-may-refuse.
#[test]
fn a_plugin_that_refuses_an_address_fails_the_pod_in_its_own_words() {
    let node = node(&[("a", json!([{"name": "chain", "ips": ["10.0.0.1"]}]))]);
    node.plugin("first", &json!({"ADD": {"error": {"code": 101, "msg": "10.0.0.1 needs a prefix length"}}}))
        .unwrap();
    let (_, said) = node.call("ADD", &Pod::new("a").unwrap()).run().failure();
    assert!(said.contains("10.0.0.1 needs a prefix length"), "{said}");
}

/// Rows: DI-4.2-copy, DI-4.2-every-attachment, DI-4.2-del, DI-6-status, NPWG-5.3.7-device-info.
#[test]
fn device_information_goes_from_the_device_plugin_or_a_plugin_to_the_status() {
    let node = node(&[("a", json!([{"name": "sriov", "deviceID": "0000:03:02.1"}, {"name": "chain"}]))]);
    let mut sriov = network(NAMESPACE, "sriov", &json!({"cniVersion": "1.0.0", "type": "second"}));
    sriov["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": "example.com/vf"});
    node.write("sriov", &sriov).unwrap();
    let vf = json!({"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:03:02.1"}});
    fs::create_dir_all(node.path("devinfo/dp")).unwrap();
    fs::write(node.path("devinfo/dp/example.com-vf-0000:03:02.1-device.json"), vf.to_string()).unwrap();
    let socket =
        json!({"type": "vhost-user", "version": "1.1.0", "vhost-user": {"mode": "client", "path": "/s"}});
    node.plugin("first", &json!({"deviceInfo": socket})).unwrap();

    let a = Pod::new("a").unwrap();
    let mut added = node.call("ADD", &a).run();
    // The definition may not have been read yet.
    for _ in 0..100 {
        if added.exit == 0 || !added.json["msg"].as_str().unwrap_or_default().contains("is not defined") {
            break;
        }
        added = node.call("ADD", &a).run();
    }
    added.success();
    node.await_status(&a);
    let status = node.status(&a).unwrap();
    assert_eq!((&status[1]["device-info"], &status[2]["device-info"]), (&vf, &socket));
    let copy = node.path("devinfo/cni").join(format!("{NAMESPACE}-sriov-c-a_net1"));
    assert_eq!(fs::read_to_string(copy).unwrap(), vf.to_string());
    assert_eq!(read_by_plugins(&node)[0].get("runtimeConfig"), None);
    assert_eq!(node.del(&a).success(), Value::Null);
    assert_eq!(fs::read_dir(node.path("devinfo/cni")).unwrap().count(), 0);
}

/// Attaching without the device would break the promise made to the pod.
#[test]
fn a_network_that_needs_a_device_is_not_attached_without_one() {
    let mut sriov = network(NAMESPACE, "sriov", &json!({"cniVersion": "1.0.0", "type": "second"}));
    sriov["metadata"]["annotations"] = json!({"k8s.v1.cni.cncf.io/resourceName": "example.com/vf"});
    let mut node = Node::new(&[sriov, pod("a", &json!({}), &json!("sriov"))]).unwrap();
    add_networks(&node);
    node.start().unwrap();
    let expected = format!(
        "network shop/sriov: the kubelet's socket {} does not exist (podResourcesSocket), so the devices of the pod are unknown",
        node.path("kubelet.sock").display()
    );
    assert_eq!(node.call("ADD", &Pod::new("a").unwrap()).run().failure(), (11, expected));
    assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new());
}

/// Rows: NPWG-4.1.2.1.11-claim-unsupported, NPWG-4.1.2.1-reserved-keys.
#[test]
fn what_is_tolerated_is_said_in_the_status() {
    let asked = json!([{"name": "flat", "ipam-claim-reference": "c", "interfaceRequest": "if0", "vlan": 5}]);
    let node = node(&[("a", asked)]);
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let status = node.status(&a).unwrap();
    assert_eq!(status[1]["interface"], "if0");
    let expected = json!([
        "ipam-claim-reference \"c\" has no effect: host-local keeps no claims",
        "networks annotation element 0: unknown key \"vlan\" is ignored",
        "networks annotation element 0: key \"interfaceRequest\" is read as \"interface\""
    ]);
    assert_eq!(status[1]["dev.netattach.warnings"], expected);
    assert_eq!(status[0].get("dev.netattach.warnings"), None);
}

/// The key may be misspelt. A different letter case is not reported.
#[test]
fn a_key_that_no_plugin_of_ours_has_is_said_in_the_status() {
    let mut node = Node::new(&[pod("a", &json!({}), &json!("odd"))]).unwrap();
    let odd = json!({
        "cniVersion": "1.0.0", "type": "bridge", "BRIDGE": "br1", "isGatway": true, "_comment": "x",
        "ipam": node.host_local(&["10.77.0.0/24"])
    });
    node.write("odd", &network(NAMESPACE, "odd", &odd)).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let status = node.status(&a).unwrap();
    let said = "key isGatway: without effect, netattach's own bridge plugin has no such key";
    assert_eq!(status[1]["dev.netattach.warnings"], json!([said]));
    assert_eq!(status[0].get("dev.netattach.warnings"), None);
    assert!(Snapshot::take(&node, &[&a]).unwrap().node.links.contains_key("br1"));
}

/// Rows: NPWG-4.1-key-exact, NPWG-4-additional-only, NPWG-5-may-publish, NPWG-5.2-default-entry.
#[test]
fn an_invalid_annotation_fails_the_pod_or_is_ignored_by_setting() {
    for mode in ["fail", "ignore"] {
        let mut other = pod("other", &json!({}), &Value::Null);
        other["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network"] = json!("chain");
        let bad = pod("bad", &json!({}), &json!([{"name": "chain"}, {"name": "chain", "ips": []}]));
        let mut node = Node::new(&[other, bad]).unwrap();
        add_networks(&node);
        node.set("invalidAnnotation", json!(mode));
        node.start().unwrap();
        let (other, bad) = (Pod::new("other").unwrap(), Pod::new("bad").unwrap());
        node.add(&other).success();
        assert_eq!(node.status(&other).unwrap().as_array().unwrap().len(), 1);
        let reason = "networks annotation element 1: ips is [], but must be a list of at least one address";
        if mode == "fail" {
            let said = format!("pod shop/bad: annotation k8s.v1.cni.cncf.io/networks: {reason}");
            assert_eq!(node.call("ADD", &bad).run().failure(), (7, said));
        } else {
            node.add(&bad).success();
            let status = node.status(&bad).unwrap();
            let entries = status.as_array().unwrap();
            let shown: Vec<_> =
                entries.iter().map(|entry| (&entry["interface"], &entry["default"])).collect();
            assert_eq!(shown, [(&json!("eth0"), &json!(true))]);
            let said = format!("invalid annotation k8s.v1.cni.cncf.io/networks ignored: {reason}");
            assert_eq!(entries[0]["dev.netattach.warnings"], json!([said]));
        }
        assert_eq!(node.take_calls().unwrap(), Vec::<Value>::new());
    }
}

/// Rows: NPWG-4.2-twice, NPWG-4.2.1-tuple-unique, NPWG-4.2.1-tuple-stable, NPWG-4.2.1-containerid.
/// Rows: NPWG-5.1.1-no-result.
#[test]
fn a_network_twice_is_two_attachments_and_detached_as_it_was_attached() {
    let node =
        node(&[("a", json!([{"name": "bare"}, {"name": "bare", "interface": "net3"}, {"name": "bare"}]))]);
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let tuples = |calls: Vec<Value>| -> Vec<(String, String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let one = |call: &Value| {
            (
                text(&call["env"]["CNI_CONTAINERID"]),
                text(&call["stdin"]["name"]),
                text(&call["env"]["CNI_IFNAME"]),
            )
        };
        calls.iter().map(one).collect()
    };
    let added = tuples(node.take_calls().unwrap());
    let expected =
        ["net1", "net3", "net4"].map(|ifname| ("c-a".to_owned(), "bare".to_owned(), ifname.to_owned()));
    assert_eq!(added, expected);
    let status = node.status(&a).unwrap();
    let minimal =
        |ifname: &str| json!({"name": "shop/bare", "interface": ifname, "default": false, "dns": {}});
    assert_eq!(status.as_array().unwrap()[1..], ["net1", "net3", "net4"].map(minimal));
    node.write("pod-a", &pod("a", &json!({}), &json!("chain"))).unwrap();
    node.remove("bare").unwrap();
    assert_eq!(node.del(&a).success(), Value::Null);
    let mut detached = tuples(node.take_calls().unwrap());
    detached.reverse();
    assert_eq!(detached, expected);
}

/// Rows: NPWG-4.1.2.1.5-ifname-dup.
#[test]
fn an_interface_that_is_there_already_fails_the_pod() {
    let node = node(&[("a", json!([{"name": "flat", "interface": "dummy7"}]))]);
    let a = Pod::new("a").unwrap();
    ip(&a.namespace, &["link", "add", "dummy7", "type", "veth", "peer", "name", "dummy8"]).unwrap();
    let (_, said) = node.call("ADD", &a).run().failure();
    assert!(said.contains("the pod has an interface named dummy7 already"), "{said}");
}

/// Rows: NPWG-6.1.2-block-until-ready.
#[test]
fn a_pod_whose_manifest_comes_after_the_add_is_attached_and_one_without_is_to_be_tried_again() {
    const LATE: Duration = Duration::from_millis(200);
    const WAIT: Duration = Duration::from_secs(2);
    let mut node = Node::new(&[]).unwrap();
    node.set("podWaitSeconds", json!(WAIT.as_secs()));
    node.start().unwrap();
    let (late, never) = (Pod::new("late").unwrap(), Pod::new("never").unwrap());
    let (added, written) = std::thread::scope(|scope| {
        let written = scope.spawn(|| {
            std::thread::sleep(LATE);
            let began = Instant::now();
            node.write("late", &pod("late", &json!({}), &Value::Null)).unwrap();
            began
        });
        let added = node.add(&late);
        (added, written.join().unwrap())
    });
    assert!(written.elapsed() < WAIT, "the ADD went on when the manifest was there");
    added.success();
    let began = Instant::now();
    let unknown = "pod shop/never is not known yet";
    assert_eq!(node.add(&never).failure(), (11, unknown.to_owned()));
    assert!(began.elapsed() >= WAIT, "{:?}", began.elapsed());
    for pod in [&late, &never] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&late, &never]).unwrap().assert_nothing_is_left();
}
