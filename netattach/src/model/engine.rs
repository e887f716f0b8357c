//! Runs ADD, DEL, CHECK and GC of several containers concurrently on one engine, then starts an agent. At the end the
//! registry's numbers, the journal's records and the pool's addresses must agree.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::{explore, finds};
use crate::attach::rig::{self, Maps};
use crate::attach::{AttachError, Collected, Engine, Registry};
use crate::cni::{AttachmentId, Version};
use crate::ipam::Pool;
use crate::journal::{JournalError, Store};
use crate::netns::{Netns, NetnsError};
use crate::npwg::{NetworkName, NetworkRef};
use crate::plan::resolve::Numbers;
use crate::step::{Step, StepRef};
use crate::sync::{Arc, thread};

/// The parts of a node that outlive its agent.
struct Scene {
    directory: tempfile::TempDir,
    disk: Disk,
    maps: Arc<Maps>,
}

impl Scene {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), disk: Disk::default(), maps: Arc::default() }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn start(&self) -> Arc<Engine> {
        let journal = Arc::new(self.disk.clone());
        let journal = Store::over(journal, PathBuf::from("/journal"), "this boot".to_owned()).unwrap();
        journal.note_pool(Pool::directory(self.path().join("pools"), "net")).unwrap();
        let engine = rig::engine(self.path(), journal, &self.maps);
        assert_eq!(rig::failures(&rig::recover(&engine)), Vec::<String>::new());
        Arc::new(engine)
    }

    /// Asserts that a new agent knows exactly these containers, each with one address and a number of its own, which is in the
    /// maps already.
    fn assert_attached(&self, containers: &[&str]) {
        let in_maps = self.maps.numbers();
        let engine = self.start();
        let mut numbers = BTreeMap::new();
        for attached in engine.registry().all() {
            for (at, _, step) in attached.plan.steps() {
                if let Step::Protect(protect) = step {
                    assert_eq!(at, StepRef(0, 1));
                    assert_eq!(numbers.insert(protect.id, attached.key.container_id.clone()), None);
                }
            }
        }
        let mut known: Vec<&str> = numbers.values().map(String::as_str).collect();
        known.sort_unstable();
        assert_eq!(known, containers, "who is attached");
        let numbers: BTreeSet<u32> = numbers.keys().copied().collect();
        assert_eq!([in_maps, self.maps.numbers()], [numbers.clone(), numbers], "numbers in the maps");
        let mut holders: Vec<String> = rig::leased(self.path()).into_values().collect();
        holders.sort_unstable();
        assert_eq!(holders, containers, "who holds an address");
    }
}

/// The part of ADD after planning.
fn add(engine: &Engine, directory: &Path, container: &str) {
    let mut numbers = engine.registry().reserve();
    let id = numbers.attachment().unwrap();
    numbers.network(&NetworkName::Definition(NetworkRef::new("shop", "net")));
    let plan = rig::plan(directory, container, id);
    engine
        .carry_out(rig::key(container), plan, numbers, &Netns::current().unwrap(), Version::LATEST)
        .unwrap();
}

fn del(engine: &Engine, container: &str) {
    engine.del(&rig::request("DEL", container)).unwrap();
}

/// The work of GC for a runtime that has these containers in use. Stale containers are removed one after another.
fn gc(engine: &Engine, in_use: &[&str]) {
    let id =
        |container: &&str| AttachmentId { container_id: (*container).to_owned(), ifname: "eth0".to_owned() };
    let valid = Some(in_use.iter().map(id).collect());
    let request = crate::cni::Request { valid_attachments: valid, ..rig::request("GC", "") };
    let mut collected = Collected::default();
    let census = engine.census(&request, &mut collected).unwrap();
    for stale in census.stale.values() {
        collected.add(engine.collect(stale));
    }
    for holder in engine.holders(&census, &[]) {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        engine.release_others(&request, &census, &holder, &HashSet::new(), until).unwrap();
    }
    collected.outcome().unwrap();
}

#[test]
fn operations_beside_each_other_leave_one_mind() {
    explore(300, || {
        let scene = Scene::new();
        let engine = scene.start();
        for container in ["a", "b", "gone"] {
            add(&engine, scene.path(), container);
        }
        let directory = scene.path().to_owned();
        let [one, other, third] = [(); 3].map(|()| Arc::clone(&engine));
        let first = thread::spawn(move || {
            del(&one, "a");
            add(&one, &directory, "a");
        });
        let second = thread::spawn(move || del(&other, "b"));
        // The runtime's view: containers that are being added or removed are in use.
        let collector = thread::spawn(move || gc(&third, &["a", "b", "c", "d"]));
        add(&engine, scene.path(), "c");
        // CHECK fails as the namespace of `c` is not there; the test only needs it to run concurrently.
        let checked = engine.check(&rig::request("CHECK", "c"));
        assert!(matches!(checked, Err(AttachError::Netns(NetnsError::Gone { .. }))), "{checked:?}");
        del(&engine, "c");
        add(&engine, scene.path(), "d");
        [first, second, collector].into_iter().for_each(|beside| beside.join().unwrap());
        scene.assert_attached(&["a", "d"]);
    });
}

/// A record that cannot be removed keeps its numbers until it can.
fn a_record_stays(frees_numbers: bool) {
    let scene = Scene::new();
    let engine = scene.start();
    add(&engine, scene.path(), "a");
    let plan = engine.registry().all()[0].plan.clone();
    scene.disk.keep_names(true);
    let failed = engine.del(&rig::request("DEL", "a"));
    assert!(matches!(failed, Err(AttachError::Journal(JournalError::Remove { .. }))), "{failed:?}");
    if frees_numbers {
        // The fault: numbers were once freed before the record was gone.
        engine.registry().remove(&rig::key("a"), &plan);
    }
    // Numbers are assigned in ascending order: the first one is next.
    while engine.registry().reserve().attachment().unwrap() + 1 < rig::LIMIT {}
    scene.disk.keep_names(false);
    let (beside, directory) = (Arc::clone(&engine), scene.path().to_owned());
    let next = thread::spawn(move || add(&beside, &directory, "b"));
    del(&engine, "a");
    next.join().unwrap();
    scene.assert_attached(&["b"]);
}

#[test]
fn a_repeated_del_takes_no_other_pod_out_of_the_maps() {
    explore(300, || a_record_stays(false));
}

#[test]
fn numbers_that_are_free_before_their_record_is_gone_are_found() {
    assert!(finds(300, || a_record_stays(true)));
}

/// Three threads take and return numbers, with one lock acquisition each or, as the fault, with two.
fn numbers(in_two_steps: bool) {
    // As many numbers as threads, so that they wrap around.
    let registry = Arc::new(Registry::new(4));
    let held = Arc::new(crate::sync::Mutex::new(BTreeSet::new()));
    let take = move |registry: &Registry, held: &crate::sync::Mutex<BTreeSet<u32>>| {
        // The number of a pod whose ADD fails.
        let given_back = registry.reserve().attachment();
        assert!(given_back.is_ok());
        let mut reserved = registry.reserve();
        let id = reserved.attachment().unwrap();
        if in_two_steps {
            drop(reserved);
            registry.hold_numbers([id]);
        } else {
            reserved.network(&NetworkName::Definition(NetworkRef::new("shop", "net")));
            reserved.keep();
        }
        assert!(crate::sync::locked(held).insert(id), "{id} is given out twice");
    };
    let others = [1, 2].map(|_| {
        let (registry, held) = (Arc::clone(&registry), Arc::clone(&held));
        thread::spawn(move || take(&registry, &held))
    });
    take(&registry, &held);
    others.into_iter().for_each(|other| other.join().unwrap());
    assert_eq!(*crate::sync::locked(&held), BTreeSet::from([1, 2, 3]));
}

#[test]
fn a_number_is_given_out_once() {
    explore(2_000, || numbers(false));
}

#[test]
fn a_number_that_is_looked_for_and_taken_in_two_steps_is_found() {
    assert!(finds(2_000, || numbers(true)));
}
