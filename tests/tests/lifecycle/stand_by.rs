//! The next agent is started while the previous one serves, stands by, and replaces it: pods are attached all the
//! time, and none of them waits long.
//!
//! The longest wait is printed: `cargo test -p netattach-tests --test lifecycle -- stand_by --nocapture`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use netattach_tests::coming::Coming;
use netattach_tests::manifest::pod;
use netattach_tests::node::{MAX_ATTACHMENTS, executable};
use netattach_tests::snapshot::{Network, Snapshot};
use netattach_tests::traffic::{Conversation, Echo, eventually};
use netattach_tests::{Node, Pod};
use serde_json::json;

use crate::restart_many::{self, attachments, links};

/// Pods that are created and deleted while the agents change.
const COMING: usize = 3;
/// ADDs of these before and after a change.
pub(crate) const AROUND: usize = 2 * COMING;
/// The documented limit is 2 s, which `cargo xtask bench restart --check` checks; a machine that runs tests is busy.
const BOUND: Duration = Duration::from_secs(20);

fn comers(node: &Node) -> Vec<Pod> {
    let names = (0..COMING).map(|number| format!("coming-{number}"));
    names
        .map(|name| {
            node.write(&name, &pod(&name, &json!({}), &json!("routed-1"))).unwrap();
            Pod::new(&name).unwrap()
        })
        .collect()
}

/// Starts their ADDs and DELs by that executable.
pub(crate) fn coming(node: &Node, executable: &Path, comers: &[Pod]) -> Coming {
    let calls = comers.iter().map(|pod| (node.call("ADD", pod), node.call("DEL", pod)));
    Coming::start(executable, calls.collect())
}

#[test]
#[allow(clippy::print_stdout, reason = "the wait is for people to read")]
fn agents_change_while_pods_come_and_none_of_these_fails_or_waits_long() {
    let count = attachments();
    let (mut node, pods) = restart_many::node(count);
    let before = links(&node);
    let echo = Echo::serve(&pods[1].namespace, "10.61.0.3:7".parse().unwrap()).unwrap();
    let conversation = Conversation::start(&pods[0].namespace, echo.address()).unwrap();
    let comers = comers(&node);
    for round in 0..3 {
        node.stand_by().unwrap();
        let coming = coming(&node, &executable("netattach").unwrap(), &comers);
        coming.go_on(AROUND);
        node.hand_over(Node::stop).unwrap();
        coming.go_on(AROUND);
        let came = coming.end();
        println!("{count} attachments: {} ADDs, the longest took {} ms", came.adds, came.longest.as_millis());
        assert!(came.longest < BOUND, "{round}: {came:?}");
        // The next agent carries out a DEL that came while no agent listened.
        let done = eventually(BOUND, || links(&node) == before);
        assert!(done, "{round}: {:?}", links(&node));
    }
    // The one that dies is followed in the same way.
    node.stand_by().unwrap();
    node.hand_over(Node::kill).unwrap();
    assert_eq!(links(&node), before);
    let (sent, lost) = conversation.end();
    assert!(sent > 100 && lost == 0, "{lost} of {sent} are lost");
    for one in &pods {
        node.check(one).success();
        node.del(one).success();
    }
    let all = pods.iter().chain(&comers);
    Snapshot::take(&node, &all.collect::<Vec<_>>()).unwrap().assert_nothing_is_left();
}

/// Every file of the node, when it was written, and every pin.
fn files(node: &Node) -> BTreeSet<(PathBuf, Option<SystemTime>)> {
    fn list(directory: &Path, found: &mut BTreeSet<(PathBuf, Option<SystemTime>)>) {
        let written = fs::metadata(directory).and_then(|metadata| metadata.modified()).ok();
        found.insert((directory.to_owned(), written));
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            list(&entry.path(), found);
        }
    }
    let mut found = BTreeSet::new();
    for directory in ["run", "state", "leases", "cni-conf"].map(|name| node.path(name)) {
        list(&directory, &mut found);
    }
    list(node.bpffs(), &mut found);
    found
}

#[test]
fn an_agent_that_stands_by_changes_nothing_and_a_signal_ends_it() {
    let mut node = Node::new(&[]).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.write("a", &pod("a", &json!({}), &json!(""))).unwrap();
    node.add(&a).success();
    let (first, before) = (node.agent_pid(), (files(&node), Network::of(&node.namespace).unwrap()));
    node.stand_by().unwrap();
    assert_eq!((files(&node), Network::of(&node.namespace).unwrap()), before);
    let log = node.dismiss().unwrap();
    assert!(log.contains("shutting down; attachments keep working"), "{log}");
    assert_eq!((files(&node), Network::of(&node.namespace).unwrap()), before);
    assert_eq!(node.agent_pid(), first);
    node.check(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}

/// Returns the output of an agent that fails to stand by. `bpffs`: its directory of pins.
fn refused(node: &Node, seconds: u64, bpffs: &Path) -> String {
    let first = node.agent_command(&executable("netattachd").unwrap()).unwrap();
    let mut words: Vec<OsString> = first.get_args().map(ToOwned::to_owned).collect();
    let at = words.iter().position(|word| word == "--bpffs").unwrap();
    words[at + 1] = bpffs.into();
    let mut second = Command::new(first.get_program());
    second.args(words).arg(format!("--stand-by={seconds}")).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut second = node.namespace.run(|| second.spawn()).unwrap();
    let mut log = String::new();
    second.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert_eq!(second.wait().unwrap().code(), Some(1), "{log}");
    log
}

#[test]
fn an_agent_that_could_not_serve_does_not_stand_by_and_two_of_them_are_noticed() {
    let mut node = Node::new(&[]).unwrap();
    node.start().unwrap();
    // Set up twice by mistake.
    let said = refused(&node, 1, node.bpffs());
    let expected =
        "stood by for 1 s, but the other agent goes on; is netattach set up twice on this node?: socket ";
    assert!(said.contains(" standing by until ") && said.contains(expected), "{said}");
    // A number of attachments that differs from that of the maps.
    node.set("maxAttachments", json!(128));
    let said = refused(&node, 60, node.bpffs());
    assert!(
        !said.contains(" standing by until ") && said.contains("has capacity 64, this agent needs 128"),
        "{said}"
    );
    // Pins that cannot be.
    let elsewhere = node.path("no-bpffs");
    let said = refused(&node, 60, &elsewhere);
    assert!(!said.contains(" standing by until ") && said.contains("is not on a BPF filesystem"), "{said}");
    assert!(!elsewhere.exists());
    node.set("maxAttachments", json!(MAX_ATTACHMENTS));
    let a = Pod::new("a").unwrap();
    node.write("a", &pod("a", &json!({}), &json!(""))).unwrap();
    node.add(&a).success();
    node.del(&a).success();
    Snapshot::take(&node, &[&a]).unwrap().assert_nothing_is_left();
}
