//! Tests of the boot that has torn a record: the leases released for a record of an earlier boot may belong to a live
//! pod if the record is of this boot.

use std::fs;
use std::path::{Path, PathBuf};

use super::full_disk::{Disk, Takes};
use super::{JournalError, JournalKey, Loaded, Store};
use crate::moment::boot_id;
use crate::plan::{Plan, fixtures};
use crate::sync::Arc;

const BEFORE: &str = "00000000-0000-0000-0000-000000000000";

fn key(container: &str) -> JournalKey {
    JournalKey { container_id: container.to_owned(), ifname: "eth0".to_owned() }
}

/// A directory that was opened last in the boot [`BEFORE`], which has torn the records of `a` and `b`.
struct Scene {
    directory: tempfile::TempDir,
    disk: Disk,
}

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let scene = Self { disk: Disk::at(directory.path()), directory };
        fs::write(scene.boot(), BEFORE).unwrap();
        scene.tear("a");
        scene.tear("b");
        scene
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn boot(&self) -> PathBuf {
        self.path().join("boot")
    }

    /// Returns the lines of the boot file below the current boot; `None` without a file.
    fn noted(&self) -> Option<String> {
        let text = fs::read_to_string(self.boot()).ok()?;
        let below = text.strip_prefix(&boot_id().unwrap());
        Some(below.unwrap_or_else(|| panic!("{text} is another boot's")).to_owned())
    }

    fn record(&self, container: &str) -> PathBuf {
        self.path().join(format!("{container}@eth0.jsonl"))
    }

    fn tear(&self, container: &str) {
        fs::write(self.record(container), "").unwrap();
    }

    fn open(&self) -> Store {
        let disk = Arc::new(self.disk.clone());
        Store::over(disk, self.path().to_owned(), boot_id().unwrap()).unwrap()
    }

    /// Returns a store that an agent has taken over, and whether it could note that.
    fn started(&self) -> (Store, Result<(), JournalError>) {
        let store = self.open();
        let torn: Vec<JournalKey> =
            store.keys().unwrap().into_iter().filter(|key| is_of_earlier_boot(&store, key)).collect();
        store.keep_torn(&torn);
        let noted = store.note_boot();
        (store, noted)
    }

    /// Writes a record in this boot, and tears it afterwards.
    fn torn_in_this_boot(&self, store: &Store, container: &str) {
        let sandbox = fixtures::sandbox(container);
        let plan = Plan { sandbox, attachments: Vec::new(), dynamic: None };
        drop(store.create(key(container), plan).unwrap());
        self.tear(container);
    }
}

fn is_of_earlier_boot(store: &Store, key: &JournalKey) -> bool {
    match store.load(key).unwrap() {
        Loaded::Torn { earlier_boot } => earlier_boot,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_record_that_is_torn_in_this_boot_is_none_of_an_earlier_one_whatever_is_left_of_that() {
    let scene = Scene::new();
    let (store, noted) = scene.started();
    noted.unwrap();
    assert_eq!(scene.noted().as_deref(), Some("\na@eth0.jsonl\nb@eth0.jsonl\n"));
    scene.torn_in_this_boot(&store, "new");
    // The same for a later record of the same name.
    store.discard(&key("a")).unwrap();
    scene.torn_in_this_boot(&store, "a");
    assert_eq!(scene.noted().as_deref(), Some("\nb@eth0.jsonl\n"));
    let (next, noted) = scene.started();
    noted.unwrap();
    for store in [store, next] {
        assert_eq!(["a", "b", "new"].map(|of| is_of_earlier_boot(&store, &key(of))), [false, true, false]);
    }
    let (next, _) = scene.started();
    next.discard(&key("b")).unwrap();
    assert_eq!(scene.noted().as_deref(), Some(""), "as the version before notes it");
}

#[test]
fn on_a_full_disk_the_boot_is_noted_in_the_room_of_the_one_before() {
    let scene = Scene::new();
    for container in ["a", "b"] {
        fs::remove_file(scene.record(container)).unwrap();
    }
    scene.disk.takes(Takes::NoMore);
    let (_, noted) = scene.started();
    noted.unwrap();
    assert_eq!(scene.noted().as_deref(), Some(""));
}

#[test]
fn where_the_boot_cannot_be_noted_nothing_is_concluded_of_it() {
    let scene = Scene::new();
    // There is no room for the names.
    scene.disk.takes(Takes::NoMore);
    let (store, noted) = scene.started();
    assert!(matches!(noted, Err(JournalError::Write { path, .. }) if path == scene.boot()));
    assert!(!scene.boot().exists());
    scene.disk.takes(Takes::Everything);
    scene.torn_in_this_boot(&store, "new");
    let next = scene.open();
    assert_eq!(["a", "b", "new"].map(|of| is_of_earlier_boot(&next, &key(of))), [false; 3]);
    // The agent was killed while it noted the first boot of a directory.
    fs::write(scene.boot(), "").unwrap();
    let next = scene.open();
    assert_eq!(["a", "b", "new"].map(|of| is_of_earlier_boot(&next, &key(of))), [false; 3]);
    // The disk has space now.
    store.note_boot().unwrap();
    assert_eq!(scene.noted().as_deref(), Some("\na@eth0.jsonl\nb@eth0.jsonl\n"));
}

#[test]
fn no_record_is_made_while_the_next_start_would_take_it_for_one_of_an_earlier_boot() {
    let scene = Scene::new();
    // The file can neither be written nor removed.
    scene.disk.takes(Takes::NoMore);
    scene.disk.keeps_names(true);
    let (store, noted) = scene.started();
    assert!(noted.is_err());
    assert_eq!(fs::read_to_string(scene.boot()).unwrap(), BEFORE);
    let plan = Plan { sandbox: fixtures::sandbox("new"), attachments: Vec::new(), dynamic: None };
    let refused = store.create(key("new"), plan).unwrap_err();
    assert!(matches!(&refused, JournalError::Write { path, .. } if *path == scene.boot()), "{refused}");
    assert!(!scene.record("new").exists());
    scene.disk.takes(Takes::Everything);
    scene.torn_in_this_boot(&store, "new");
    assert_eq!(scene.noted().as_deref(), Some("\na@eth0.jsonl\nb@eth0.jsonl\n"));
    assert!(!is_of_earlier_boot(&scene.open(), &key("new")));
}

/// An agent that was killed before it truncated the file leaves names of records that do not exist any more.
#[test]
fn what_is_left_of_a_longer_list_names_no_other_record() {
    let scene = Scene::new();
    let whole = format!("{}\nb@eth0.jsonl\n", boot_id().unwrap());
    fs::write(scene.boot(), format!("{whole}eth0.jsonl\n")).unwrap();
    let (store, noted) = scene.started();
    noted.unwrap();
    assert_eq!(fs::read_to_string(scene.boot()).unwrap(), whole);
    assert_eq!(["a", "b"].map(|of| is_of_earlier_boot(&store, &key(of))), [false, true]);
}
