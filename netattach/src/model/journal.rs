//! Records of several sandboxes are written and removed concurrently; then an agent starts, or replaces one that died
//! in the middle.

use std::path::PathBuf;

use serde_json::json;

use super::disk::Disk;
use super::life::Life;
use super::spare::WithSpare;
use super::{explore, finds};
use crate::journal::files::Files;
use crate::journal::{JournalError, JournalKey, Loaded, Progress, RecordState, Store};
use crate::plan::Plan;
use crate::step::{Output, Outputs, StepRef};
use crate::sync::{Arc, thread};

fn key(container: &str) -> JournalKey {
    JournalKey { container_id: container.to_owned(), ifname: "eth0".to_owned() }
}

fn plan(container: &str) -> Plan {
    let sandbox = json!({
        "container_id": container, "ifname": "eth0", "netns": "/n", "netns_id": {"device": 4, "inode": 1},
        "cni_args": "", "cni_path": []
    });
    serde_json::from_value(json!({"sandbox": sandbox, "attachments": []})).unwrap()
}

fn store(files: impl Files + 'static) -> Store {
    Store::over(Arc::new(files), PathBuf::from("/journal"), "this boot".to_owned()).unwrap()
}

/// The journal operations of an ADD.
fn try_add(store: &Store, container: &str, says: &str) -> Result<(), JournalError> {
    let mut record = store.create(key(container), plan(container))?;
    record.begin(&[StepRef(0, 0)])?;
    record.done(StepRef(0, 0), Output::Nothing)?;
    record.attached(json!({"of": says}))
}

fn add(store: &Store, container: &str) {
    try_add(store, container, container).unwrap();
}

/// The journal operations of a DEL.
fn try_del(store: &Store, container: &str) -> Result<(), JournalError> {
    match store.load(&key(container))? {
        Loaded::Whole(mut record) => {
            record.removing()?;
            record.remove()
        }
        Loaded::Torn { .. } => store.discard(&key(container)),
        Loaded::Absent => Ok(()),
    }
}

fn del(store: &Store, container: &str) {
    let Loaded::Whole(_) = store.load(&key(container)).unwrap() else { panic!("{container} is lost") };
    try_del(store, container).unwrap();
}

/// The journal operations of a start: incomplete attachments and removals are undone.
fn recover(store: &Store) {
    for key in store.keys().unwrap() {
        match store.load(&key).unwrap() {
            Loaded::Whole(record) if record.state == RecordState::Attached => {}
            _ => try_del(store, &key.container_id).unwrap(),
        }
    }
}

/// The record of a container, if there is one.
fn state(store: &Store, container: &str) -> Option<(RecordState, String, Option<serde_json::Value>)> {
    match store.load(&key(container)).unwrap() {
        Loaded::Whole(record) => {
            Some((record.state, record.plan.sandbox.container_id.clone(), record.result))
        }
        Loaded::Torn { .. } => panic!("the record of {container} is empty"),
        Loaded::Absent => None,
    }
}

fn attached(container: &str, says: &str) -> Option<(RecordState, String, Option<serde_json::Value>)> {
    Some((RecordState::Attached, container.to_owned(), Some(json!({"of": says}))))
}

/// An ADD, its DEL, and then two ADDs concurrent with the DEL of a third container; then an agent starts.
fn adds_beside_a_del(disk: &Disk, files: impl Files + 'static) {
    let before = Arc::new(store(files));
    for container in ["a", "b"] {
        add(&before, container);
    }
    del(&before, "a");
    let beside = Arc::clone(&before);
    let dels = thread::spawn(move || del(&beside, "b"));
    for container in ["c", "d"] {
        add(&before, container);
    }
    dels.join().unwrap();

    let after = store(disk.clone());
    let lives = |container| attached(container, container);
    assert_eq!(["a", "b", "c", "d"].map(|it| state(&after, it)), [None, None, lives("c"), lives("d")]);
}

/// An agent dies at any step while it adds one container and removes another; the next agent recovers, and the runtime
/// repeats the requests that had no answer. The fault: the first agent continues beside the next, as if nothing locked
/// the directory.
fn an_end_between(goes_on: bool) {
    let (disk, life) = (Disk::default(), Life::default());
    let before = Arc::new(store(disk.of(&life)));
    for container in ["lives", "goes"] {
        add(&before, container);
    }
    let [one, other] = [(); 2].map(|()| Arc::clone(&before));
    let others = [
        thread::spawn(move || drop(try_del(&one, "goes"))),
        thread::spawn(move || drop(try_add(&other, "comes", "the first"))),
    ];
    // These may have reached any step.
    crate::sync::step();
    if !goes_on {
        life.end();
    }
    let next = store(disk.of(&Life::default()));
    recover(&next);
    assert_eq!(state(&next, "lives"), attached("lives", "lives"));
    for container in ["goes", "comes"] {
        try_del(&next, container).unwrap();
    }
    try_add(&next, "comes", "the second").unwrap();
    others.into_iter().for_each(|other| other.join().unwrap());
    let after = store(disk);
    recover(&after);
    let expected = [attached("lives", "lives"), None, attached("comes", "the second")];
    assert_eq!(["lives", "goes", "comes"].map(|it| state(&after, it)), expected);
}

/// An agent dies at any step while it rewrites the record of a live sandbox that another process has removed. The
/// fault: it writes the record like an ADD.
fn an_end_while_a_record_is_written_anew(as_of_an_add: bool) {
    let (disk, life) = (Disk::default(), Life::default());
    let before = Arc::new(store(disk.of(&life)));
    let writing = thread::spawn(move || {
        if as_of_an_add {
            return drop(try_add(&before, "lives", "lives"));
        }
        let outputs = Outputs::default();
        let progress = Progress { netns_cookie: 7, outputs: &outputs, result: Some(json!({"of": "lives"})) };
        drop(before.create_whole(key("lives"), plan("lives"), progress));
    });
    // It may have reached any step.
    crate::sync::step();
    life.end();
    let next = store(disk.of(&Life::default()));
    next.remove_unfinished().unwrap();
    let found = state(&next, "lives");
    assert!(found.is_none() || found == attached("lives", "lives"), "{found:?}");
    assert_eq!(next.keys().unwrap().len(), disk.list().unwrap().len(), "nothing else is left");
    writing.join().unwrap();
}

#[test]
fn a_record_that_is_written_anew_is_there_with_all_of_it_or_not_at_all() {
    explore(4_000, || an_end_while_a_record_is_written_anew(false));
}

#[test]
fn a_record_that_is_written_anew_as_by_an_add_is_found() {
    assert!(finds(4_000, || an_end_while_a_record_is_written_anew(true)));
}

#[test]
fn an_agent_that_ends_at_any_step_leaves_what_the_next_goes_on_with() {
    explore(4_000, || an_end_between(false));
}

#[test]
fn an_agent_that_goes_on_beside_the_next_is_found() {
    assert!(finds(4_000, || an_end_between(true)));
}

#[test]
fn a_del_beside_adds_leaves_their_records_whole() {
    explore(4_000, || {
        let disk = Disk::default();
        adds_beside_a_del(&disk, disk.clone());
    });
}

#[test]
fn a_spare_file_that_a_del_and_an_add_have_at_once_is_found() {
    assert!(finds(4_000, || {
        let disk = Disk::default();
        adds_beside_a_del(&disk, WithSpare::over(disk.clone()));
    }));
}
