//! Records of several sandboxes, written and removed beside each other, and an agent that starts afterwards.

use std::path::PathBuf;

use serde_json::json;

use super::disk::Disk;
use super::spare::WithSpare;
use super::{explore, finds};
use crate::journal::files::Files;
use crate::journal::{Key, Loaded, State, Store};
use crate::plan::{Output, Plan, StepRef};
use crate::sync::{Arc, thread};

fn key(container: &str) -> Key {
    Key { container_id: container.to_owned(), ifname: "eth0".to_owned() }
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

/// As an ADD does it.
fn add(store: &Store, container: &str) {
    let mut record = store.create(key(container), plan(container)).unwrap();
    record.begin(StepRef(0, 0)).unwrap();
    record.done(StepRef(0, 0), Output::Nothing).unwrap();
    record.attached(json!({"of": container})).unwrap();
}

/// As a DEL does it.
fn del(store: &Store, container: &str) {
    let Loaded::Whole(mut record) = store.load(&key(container)).unwrap() else {
        panic!("{container} is lost")
    };
    record.removing().unwrap();
    record.remove().unwrap();
}

/// An ADD, its DEL, and then two ADDs beside the DEL of a third container; then an agent starts.
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
    let said = |container| match after.load(&key(container)).unwrap() {
        Loaded::Whole(record) => Some((record.state, record.plan.sandbox.container_id, record.result)),
        Loaded::Torn { .. } => panic!("the record of {container} is empty"),
        Loaded::Absent => None,
    };
    let lives =
        |container: &str| Some((State::Attached, container.to_owned(), Some(json!({"of": container}))));
    assert_eq!(["a", "b", "c", "d"].map(said), [None, None, lives("c"), lives("d")]);
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
