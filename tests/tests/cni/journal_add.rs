//! The record of an ADD decides what its CHECK and DEL do; an ADD that cannot write its record fails.

use std::fs;

use netattach::cni::cache::Key;
use netattach::delegate::ResultCache;
use netattach_tests::manifest::{NAMESPACE, network, pod};
use netattach_tests::plugin_calls::verbs;
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// A started node with a network `chain` whose second plugin is scripted, and a pod `a` that has it.
fn node() -> Node {
    let mut node = Node::new(&[pod("a", &json!({}), &json!("chain"))]).unwrap();
    node.write("chain", &network(NAMESPACE, "chain", &chain(&node, 1))).unwrap();
    node.plugin("scripted", &json!({})).unwrap();
    node.start().unwrap();
    node
}

fn chain(node: &Node, key: u32) -> Value {
    let veth = json!({"type": "veth", "ipam": node.host_local(&["10.52.0.0/24"])});
    json!({"cniVersion": "1.0.0", "name": "chain", "plugins": [veth, {"type": "scripted", "key": key}]})
}

/// Rows: ADD-05.
#[test]
fn an_add_that_cannot_be_remembered_fails_and_leaves_nothing() {
    let node = node();
    let a = Pod::new("a").unwrap();
    for (directory, said) in [("state/journal", "journal"), ("cni-cache/results", "write to libcni's cache")]
    {
        let (path, aside) = (node.path(directory), node.path("aside"));
        let present = fs::rename(&path, &aside).is_ok();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        let (code, message) = node.add(&a).failure();
        assert_eq!((code, message.contains(said)), (5, true), "{directory}: {message}");
        fs::remove_file(&path).unwrap();
        if present {
            fs::rename(&aside, &path).unwrap();
        }
        Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
    }
    node.add(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: DEL-11, DEL-12.
#[test]
fn del_has_the_configuration_of_the_add_which_the_cache_shows() {
    let node = node();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let mut added = node.take_calls().unwrap().remove(0)["stdin"].take();
    let key = Key { network: "chain".into(), container_id: a.container.clone(), ifname: "net1".into() };
    let shown = ResultCache::new(node.path("cni-cache")).read(&key).unwrap().unwrap();
    let shown = shown.network().unwrap().plugins[1].raw().clone();
    assert_eq!(Value::Object(shown), json!({"type": "scripted", "key": 1}));

    node.write("chain", &network(NAMESPACE, "chain", &chain(&node, 2))).unwrap();
    node.remove("manifest-00").unwrap();
    let gone = || node.ctl(&["status"]).unwrap()["ready"].to_string().contains("0 pods");
    assert!(eventually(PATIENCE, gone));
    node.del(&a).success();
    let mut calls = node.take_calls().unwrap();
    assert_eq!(verbs(&calls), ["DEL scripted net1"]);
    // Each plugin got the result at that time.
    let mut deleted = calls.remove(0)["stdin"].take();
    for stdin in [&mut added, &mut deleted] {
        assert!(stdin.as_object_mut().unwrap().remove("prevResult").is_some());
    }
    assert_eq!(deleted, added);
    assert_eq!(added["key"], 1);
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: DEL-10.
#[test]
fn a_del_whose_executable_is_gone_says_so_and_is_done_when_it_is_back() {
    let node = node();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let (path, aside) = (node.path("cni-bin/scripted"), node.path("aside"));
    fs::rename(&path, &aside).unwrap();
    let (code, message) = node.del(&a).failure();
    let said = format!(
        "detach net1 (shop/chain): failed to find plugin \"scripted\" in path [/nonexistent/cni-bin {}]",
        node.path("cni-bin").display()
    );
    assert_eq!((code, message), (7, said));
    fs::rename(&aside, &path).unwrap();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: CHK-04.
#[test]
fn check_of_a_record_that_cannot_be_read_names_it() {
    let node = node();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    let path = node.path("state/journal/c-a@eth0.jsonl");
    let record = fs::read_to_string(&path).unwrap();
    fs::write(&path, record.replacen("\"version\":2", "\"version\":99", 1)).unwrap();
    let (code, message) = node.check(&a).failure();
    assert_eq!((code, message.contains(&path.display().to_string())), (999, true), "{message}");
    fs::write(&path, record).unwrap();
    node.check(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Rows: IDN-10.
#[test]
fn plugins_see_only_identifiers_that_were_checked() {
    let node = node();
    let a = Pod::new("a").unwrap();
    for verb in ["ADD", "CHECK", "DEL"] {
        for (name, value) in [("CNI_CONTAINERID", "../c-a"), ("CNI_IFNAME", "a/b"), ("CNI_IFNAME", "..")] {
            node.call(verb, &a).with(name, value).run().failure();
        }
    }
    let mut unnamed = chain(&node, 1);
    unnamed["name"] = json!("../chain");
    node.write("chain", &network(NAMESPACE, "chain", &unnamed)).unwrap();
    let refused = || {
        let (code, message) = match node.add(&a) {
            added if added.exit == 0 => {
                node.del(&a).success();
                node.take_calls().unwrap();
                return false;
            }
            refused => refused.failure(),
        };
        code == 7 && message.contains("invalid characters found in network name")
    };
    assert!(eventually(PATIENCE, refused));
    assert_eq!(verbs(&node.take_calls().unwrap()), [""; 0]);
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
