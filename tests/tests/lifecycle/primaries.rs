//! Another primary network in the runtime's directory: it is installed late, changes, is removed; it renames
//! netattach's file; a file of another plugin is before it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::process::Command;

use netattach_tests::manifest::pod;
use netattach_tests::node::executable;
use netattach_tests::primaries::{MULTUS, Primary};
use netattach_tests::traffic::{PATIENCE, eventually};
use netattach_tests::{Call, Node, Pod};
use rustix::fs::{CWD, FileType, Mode};
use serde_json::{Value, json};

const OWN: &str = "00-netattach.conflist";
const CONF: &str = "CNI configuration";
const DEFAULT: &str = "default network";

/// Returns a node whose runtime has one directory of configurations, `net.d`, which does not exist yet.
fn node() -> Node {
    let mut node = Node::new(&[pod("a", &json!({}), &json!(null))]).unwrap();
    node.set("defaultNetwork", json!(node.path("net.d")));
    node.set("cniConf", json!({"dir": node.path("net.d")}));
    // A plugin that the agent implements itself would not be called.
    node.set("delegation", json!({"exec": ["portmap"]}));
    for plugin in ["flannel", "portmap", "cilium-cni"] {
        node.plugin(plugin, &json!({"ADD": {"result": {"cniVersion": "0.3.1"}}})).unwrap();
    }
    node
}

fn at(node: &Node, file: &str) -> PathBuf {
    node.path("net.d").join(file)
}

/// Writes the file of a primary network, like the products: under another name, and then renamed.
fn install(node: &Node, network: &str) -> PathBuf {
    let primary = Primary::named(network);
    fs::create_dir_all(node.path("net.d")).unwrap();
    fs::write(node.path("net.d/.tmp"), primary.text).unwrap();
    fs::rename(node.path("net.d/.tmp"), at(node, primary.file)).unwrap();
    at(node, primary.file)
}

/// A node that is ready with flannel.
fn with_flannel(settings: &Value) -> Node {
    let mut node = node();
    let mut conf = json!({"dir": node.path("net.d")});
    conf.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    node.set("cniConf", conf);
    install(&node, "cbr0");
    node.start().unwrap();
    await_condition(&node, CONF, true, OWN);
    node
}

fn condition(node: &Node, name: &str) -> (bool, String) {
    let status = node.whole_status().unwrap();
    let found =
        status["ready"].as_array().unwrap().iter().find(|it| it["condition"] == name).unwrap().clone();
    (found["met"].as_bool().unwrap(), found["detail"].as_str().unwrap().to_owned())
}

fn await_condition(node: &Node, name: &str, met: bool, text: &str) {
    let mut last = None;
    let is_it = || {
        let (is_met, detail) = condition(node, name);
        let is_it = is_met == met && detail.contains(text);
        last = Some((is_met, detail));
        is_it
    };
    assert!(eventually(PATIENCE, is_it), "{name} {met} {text}: {last:?}");
}

/// The rows of the status about the runtime's configuration.
fn rows(node: &Node) -> Vec<String> {
    let status = node.whole_status().unwrap();
    let rows = status["troubles"].as_array().unwrap().iter().filter(|row| row["object"] == CONF);
    rows.map(|row| row["problem"].as_str().unwrap().to_owned()).collect()
}

fn await_row(node: &Node, text: &str) {
    let mut last = Vec::new();
    let is_there = || {
        last = rows(node);
        last.iter().any(|row| row.contains(text))
    };
    assert!(eventually(PATIENCE, is_there), "{text}: {last:?}");
}

/// A runtime's call by the first file of its directory.
fn call(node: &Node, verb: &str, pod: &Pod) -> Call {
    let text = fs::read(at(node, OWN)).unwrap();
    let conf: Value = serde_json::from_slice(&text).unwrap();
    let mut plugin = conf["plugins"][0].clone();
    plugin["name"] = conf["name"].clone();
    plugin["cniVersion"] = conf["cniVersion"].clone();
    plugin.as_object_mut().unwrap().remove("capabilities");
    node.call(verb, pod).stdin(plugin)
}

fn await_own(node: &Node) -> u64 {
    assert!(eventually(PATIENCE, || at(node, OWN).exists()), "{:?}", rows(node));
    fs::metadata(at(node, OWN)).unwrap().ino()
}

#[test]
fn a_primary_network_that_comes_late_is_taken_when_it_comes_and_pods_outlive_its_end() {
    let mut node = node();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    let (code, message) = node.add(&a).failure();
    let missing = format!("{}: No such file or directory (os error 2)", node.path("net.d").display());
    assert_eq!(code, 11);
    assert!(
        message.starts_with("the node's default network is not ready: read ") && message.ends_with(&missing)
    );
    await_condition(&node, DEFAULT, false, &missing);
    node.del(&a).success();

    let file = install(&node, "cbr0");
    await_own(&node);
    await_condition(&node, CONF, true, OWN);
    assert_eq!(condition(&node, DEFAULT), (true, "cbr0".to_owned()));
    call(&node, "ADD", &a).run().success();
    node.await_status(&a);

    // Cilium replaces it, and with `cni.exclusive` renames netattach's file.
    install(&node, "cilium");
    await_condition(&node, DEFAULT, true, "cilium");
    fs::remove_file(at(&node, "05-cilium.conflist")).unwrap();
    fs::remove_file(&file).unwrap();
    let gone = "only configurations that call a multi-network plugin: 00-netattach.conflist";
    await_condition(&node, DEFAULT, false, gone);
    assert!(at(&node, OWN).exists(), "the runtime would take another plugin's");
    // The pod is there still, and ends as it began.
    node.take_calls().unwrap();
    call(&node, "DEL", &a).run().success();
    let calls = node.take_calls().unwrap();
    let ended: Vec<&Value> = calls.iter().map(|call| &call["stdin"]["type"]).collect();
    assert_eq!(ended, [&json!("portmap"), &json!("flannel")]);
    let (code, message) = call(&node, "ADD", &a).run().failure();
    assert_eq!((code, message.contains(gone)), (11, true), "{message}");
}

#[test]
fn a_file_that_was_put_away_is_written_again_and_who_has_it_is_left_in_peace() {
    let node = with_flannel(&json!({}));
    let before = await_own(&node);
    let content = fs::read(at(&node, OWN)).unwrap();
    let away = at(&node, "00-netattach.conflist.cilium_bak");
    fs::rename(at(&node, OWN), &away).unwrap();
    let again = await_own(&node);
    assert_ne!(again, before);
    let looks_like = "was renamed to 00-netattach.conflist.cilium_bak, as Cilium does with the configurations of others: set its \
                      cni.exclusive to false; it was written again";
    await_row(&node, looks_like);
    await_condition(&node, CONF, true, OWN);
    assert_eq!(fs::metadata(&away).unwrap().ino(), before, "it is theirs now");

    fs::remove_file(at(&node, OWN)).unwrap();
    await_own(&node);
    await_row(&node, "was removed by another program; it was written again");

    let changed =
        String::from_utf8(content.clone()).unwrap().replace("agentWaitSeconds", "agentWaitsSeconds");
    fs::write(at(&node, OWN), changed).unwrap();
    await_row(&node, "was changed by another program; it was written again");
    assert!(eventually(PATIENCE, || fs::read(at(&node, OWN)).is_ok_and(|it| it == content)));

    // Another program's file with our name is left alone.
    let theirs = r#"{"cniVersion": "1.0.0", "name": "theirs", "type": "x"}"#;
    fs::write(at(&node, OWN), theirs).unwrap();
    await_condition(&node, CONF, false, "was not written by netattach");
    assert_eq!(fs::read_to_string(at(&node, OWN)).unwrap(), theirs);
}

#[test]
fn who_fights_for_the_directory_wins_after_a_few_times_and_is_named() {
    let node = with_flannel(&json!({}));
    // The first file, and the five that follow.
    for _ in 0..6 {
        await_own(&node);
        fs::rename(at(&node, OWN), at(&node, "00-netattach.conflist.cilium_bak")).unwrap();
    }
    let fight =
        "set its cni.exclusive to false; it was written again 5 times within 10 minutes, to no effect";
    await_condition(&node, CONF, false, fight);
    await_row(&node, fight);
    assert!(!at(&node, OWN).exists());
}

#[test]
fn a_file_that_is_only_to_be_reported_comes_back_with_the_next_agent() {
    let mut node = with_flannel(&json!({"repair": "report"}));
    fs::rename(at(&node, OWN), at(&node, "00-netattach.conflist.old")).unwrap();
    let reported = "was renamed to 00-netattach.conflist.old, as Multus does with the one that it calls: run it without \
                    --rename-conf-file; cniConf.repair is report, so it is written again at the next start only";
    await_condition(&node, CONF, false, reported);
    await_row(&node, reported);
    assert!(!at(&node, OWN).exists());
    node.stop().unwrap();
    node.start().unwrap();
    await_own(&node);
}

fn doctor_names_what_is_in_front(node: &Node) {
    let settings = node.path("doctor.yaml");
    let text = json!({"source": node.path("source"), "cniConf": {"dir": node.path("net.d")}});
    fs::write(&settings, text.to_string()).unwrap();
    let mut ctl = Command::new(executable("netattachctl").unwrap());
    ctl.arg("--socket").arg(node.socket()).args(["doctor", "-o", "json", "--config"]).arg(&settings);
    let output = node.namespace.run(|| ctl.output()).unwrap();
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let of_order: Vec<&Value> = checks.iter().filter(|it| it["check"] == CONF).collect();
    let expected = json!({
        "check": CONF, "state": "failed",
        "detail": format!(
            "a runtime uses {}, which calls multus-shim, before {OWN} of netattach",
            at(node, MULTUS.0).display()
        ),
        "remedy": format!(
            "remove or rename {}, or choose a cniConf.name that sorts before it (docs/primary-networks.md)",
            MULTUS.0
        )
    });
    assert_eq!(of_order, [&expected]);
}

#[test]
fn a_file_in_front_of_ours_is_named_with_what_helps_until_it_is_gone_and_pods_that_are_there_go_on() {
    let node = with_flannel(&json!({}));
    let a = Pod::new("a").unwrap();
    call(&node, "ADD", &a).run().success();
    node.await_status(&a);
    let multus = at(&node, MULTUS.0);
    fs::write(&multus, MULTUS.1).unwrap();
    let in_the_way = "sorts before 00-netattach.conflist, so the runtime calls Multus in the place of netattach: remove Multus and \
                      its file, or give cniConf.name a name that sorts before it";
    await_condition(&node, CONF, false, in_the_way);
    await_row(&node, in_the_way);
    // Each component that checks it logs it once.
    let log = node.log_so_far();
    let told = log.lines().filter(|line| line.contains(in_the_way));
    let told: Vec<&str> = told.filter_map(|line| Some(line.split_once(" WARN ")?.1)).collect();
    let distinct: BTreeSet<&&str> = told.iter().collect();
    assert!(!told.is_empty() && distinct.len() == told.len(), "{log}");
    doctor_names_what_is_in_front(&node);
    // The default network is not taken from it.
    assert_eq!(condition(&node, DEFAULT), (true, "cbr0".to_owned()));
    // This network's version of the specification has no CHECK.
    assert_eq!(node.ctl(&["attachments"]).unwrap()[0]["state"], "attached");
    fs::write(&multus, "{").unwrap();
    await_condition(
        &node,
        CONF,
        false,
        "cannot be used, so some runtimes, such as containerd, call no plugin at all",
    );
    fs::write(&multus, r#"{"cniVersion": "0.4.0", "name": "other", "type": "flannel"}"#).unwrap();
    await_condition(&node, CONF, false, "so the runtime calls flannel in the place of netattach");
    assert!(multus.exists() && at(&node, OWN).exists(), "nothing of others is touched");
    call(&node, "DEL", &a).run().success();
    fs::remove_file(&multus).unwrap();
    await_condition(&node, CONF, true, OWN);
    assert_eq!(rows(&node), Vec::<String>::new());
}

#[test]
fn netattachs_own_file_is_no_default_network_and_neither_is_multus() {
    let mut node = node();
    fs::create_dir(node.path("net.d")).unwrap();
    let own = json!({"cniVersion": "1.0.0", "name": "own", "plugins": [{"type": "netattach"}]});
    fs::write(at(&node, "own.conf"), own.to_string()).unwrap();
    node.set("defaultNetwork", json!(at(&node, "own.conf")));
    node.start().unwrap();
    let refused = "network own: plugin type netattach is netattach itself";
    await_condition(&node, DEFAULT, false, refused);
    let a = Pod::new("a").unwrap();
    assert_eq!(node.add(&a).failure(), (11, format!("the node's default network is not ready: {refused}")));
    fs::write(at(&node, "own.conf"), MULTUS.1).unwrap();
    await_condition(
        &node,
        DEFAULT,
        false,
        "network multus-cni-network calls Multus, which attaches the pod's other networks too",
    );
    assert_eq!(node.add(&a).failure().0, 11);
}

/// The directory has the layout of a projected volume, with files that others may leave there.
#[test]
fn a_directory_of_links_that_are_exchanged_and_of_files_that_block_is_read_as_it_is_now() {
    let mut node = node();
    fs::create_dir(node.path("net.d")).unwrap();
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::mknodat(CWD, at(&node, "01-fifo.conf"), FileType::Fifo, mode, 0).unwrap();
    fs::write(at(&node, "02-large.conflist"), vec![b' '; 16 << 20]).unwrap();
    for (version, network) in [("..1", "cbr0"), ("..2", "cilium")] {
        fs::create_dir(at(&node, version)).unwrap();
        fs::write(at(&node, version).join("10.conflist"), Primary::named(network).text).unwrap();
    }
    symlink("..1", at(&node, "..data")).unwrap();
    symlink("..data/10.conflist", at(&node, "10.conflist")).unwrap();
    node.start().unwrap();
    await_condition(&node, DEFAULT, true, "cbr0");
    symlink("..2", at(&node, "..data_tmp")).unwrap();
    fs::rename(at(&node, "..data_tmp"), at(&node, "..data")).unwrap();
    await_condition(&node, DEFAULT, true, "cilium");
    let shown = || {
        let status = node.whole_status().unwrap();
        let rows = status["source"].as_array().unwrap().clone();
        let of = |file: &str| rows.iter().any(|row| row["object"] == at(&node, file).to_str().unwrap());
        of("01-fifo.conf") && of("02-large.conflist")
    };
    assert!(eventually(PATIENCE, shown));
    call(&node, "ADD", &Pod::new("a").unwrap()).run().success();
}
