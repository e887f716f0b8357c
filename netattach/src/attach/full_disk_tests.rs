//! Removals on a disk that accepts no more writes: their effect on the next start, and the holder of the address
//! until then.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde_json::{Map, json};

use super::rig::{self, Maps};
use super::{AttachError, Attached, Engine};
use crate::error_chain::Chain;
use crate::ipam::Pool;
use crate::journal::Store;
use crate::journal::full_disk::{Disk, Takes};
use crate::moment::{Moment, boot_id};
use crate::step::{Delegate, Output, Role, Step, StepRef};
use crate::sync::Arc;

/// The state that outlives an agent of a node with one pod, `a`, which has an address and the number 1.
struct Scene {
    directory: tempfile::TempDir,
    disk: Disk,
    maps: Arc<Maps>,
}

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let journal = directory.path().join("journal");
        fs::create_dir(&journal).unwrap();
        let scene = Self { directory, disk: Disk::at(&journal), maps: Arc::default() };
        let engine = scene.start();
        engine.journal.note_pool(Pool::directory(scene.path().join("pools"), "net")).unwrap();
        let plan = rig::plan(scene.path(), "a", 1);
        let mut record = engine.journal.create(rig::key("a"), plan.clone()).unwrap();
        record.begin(&[StepRef(0, 0)]).unwrap();
        record.done(StepRef(0, 0), rig::lease(&engine, &plan)).unwrap();
        record.begin(&[StepRef(0, 1)]).unwrap();
        scene.maps.enter(1);
        record.done(StepRef(0, 1), Output::Nothing).unwrap();
        record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
        scene
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn record(&self) -> PathBuf {
        self.path().join("journal/a@eth0.jsonl")
    }

    fn start(&self) -> Engine {
        let disk = Arc::new(self.disk.clone());
        let journal = Store::over(disk, self.path().join("journal"), boot_id().unwrap()).unwrap();
        rig::engine(self.path(), journal, &self.maps)
    }

    /// Returns an agent that has adopted the state.
    fn started(&self) -> Engine {
        let engine = self.start();
        assert_eq!(rig::failures(&rig::recover(&engine)), Vec::<String>::new());
        engine
    }

    /// Returns the holders of addresses, and the numbers in the dataplane.
    fn held(&self) -> (Vec<String>, Vec<u32>) {
        (rig::leased(self.path()).into_values().collect(), self.maps.numbers().into_iter().collect())
    }
}

fn of_a() -> (Vec<String>, Vec<u32>) {
    (vec!["a".to_owned()], vec![1])
}

fn nothing() -> (Vec<String>, Vec<u32>) {
    Default::default()
}

/// Returns the error of the DEL of `a`.
fn failure(engine: &Engine) -> String {
    Chain(&engine.del(&rig::request("DEL", "a")).unwrap_err()).to_string()
}

/// An agent is killed between the last inverse and the removal of the record.
#[test]
fn a_removal_on_a_full_disk_is_finished_by_the_next_start() {
    let scene = Scene::new();
    let engine = scene.started();
    assert_eq!(scene.held(), of_a());
    scene.disk.takes(Takes::NoMore);
    scene.disk.keeps_names(true);
    let failed = failure(&engine);
    assert!(failed.contains("everything is rolled back, but the record"), "{failed}");
    assert_eq!(scene.held(), nothing());
    // Leases that were released are not restored by the check for leases that other programs have removed.
    assert_eq!(engine.without_lease().unwrap(), []);
    assert_eq!(engine.take_leases_back(&rig::key("a")).unwrap(), [""; 0]);
    drop(engine);

    scene.disk.takes(Takes::Everything);
    scene.disk.keeps_names(false);
    let engine = scene.start();
    let recovery = engine.adopt().unwrap();
    assert_eq!((recovery.adopted, recovery.unfinished), (0, vec![rig::key("a")]));
    assert_eq!(scene.held(), nothing(), "its address may be another pod's");
    assert!(engine.finish(&rig::key("a")).unwrap());
    assert!(!scene.record().exists());
    assert_eq!(scene.held(), nothing());
}

#[test]
fn an_address_stays_taken_as_long_as_its_record_says_that_it_is_attached() {
    let scene = Scene::new();
    let engine = scene.started();
    scene.disk.takes(Takes::Nothing);
    for _ in 0..2 {
        let failed = failure(&engine);
        let said = format!(
            "everything is rolled back but its addresses, which stay taken: the record {} can be neither changed nor removed",
            scene.record().display()
        );
        assert!(failed.starts_with(&said), "{failed}");
        assert_eq!(scene.held(), (vec!["a".to_owned()], Vec::new()));
    }
    drop(engine);
    scene.disk.takes(Takes::Everything);
    let engine = scene.started();
    assert_eq!(scene.held(), of_a());
    engine.del(&rig::request("DEL", "a")).unwrap();
    assert_eq!(scene.held(), nothing());
    assert!(!scene.record().exists());
}

#[test]
fn a_record_that_can_be_removed_alone_goes_before_its_addresses() {
    let scene = Scene::new();
    let engine = scene.started();
    scene.disk.takes(Takes::Removals);
    engine.del(&rig::request("DEL", "a")).unwrap();
    assert!(!scene.record().exists());
    assert_eq!(scene.held(), nothing());
    assert!(engine.registry().is_empty());
}

/// Attaches `b`, whose address is from a plugin that does not exist: calling it fails the DEL with its name.
fn attach_by_another(scene: &Scene, engine: &Engine) {
    let mut plan = rig::plan(scene.path(), "b", 2);
    plan.attachments[0].steps.remove(0);
    let plugin = Delegate { plugin: "foreign".to_owned(), config: Map::new(), role: Role::Ipam };
    plan.attachments[0].steps.push(Step::Delegate(plugin));
    let mut record = engine.journal.create(rig::key("b"), plan).unwrap();
    record.begin(&[StepRef(0, 0), StepRef(0, 1)]).unwrap();
    record.done(StepRef(0, 0), Output::Nothing).unwrap();
    record.done(StepRef(0, 1), Output::Nothing).unwrap();
    record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
}

#[test]
fn addresses_of_another_plugin_stay_taken_as_long_as_their_record_says_that_they_are() {
    let scene = Scene::new();
    let engine = scene.started();
    attach_by_another(&scene, &engine);
    let failed = || engine.del(&rig::request("DEL", "b")).unwrap_err();
    scene.disk.takes(Takes::Nothing);
    assert!(matches!(failed(), AttachError::AddressesStay { plugins, .. } if plugins.is_empty()));
    // Its record is removed first.
    scene.disk.takes(Takes::Removals);
    let said = Chain(&failed()).to_string();
    assert!(said.contains("foreign"), "{said}");
    assert!(!engine.has_record(&rig::key("b")));
}

/// A DEL without a record succeeds, so the plugin would not be called again.
#[test]
fn a_record_that_went_before_addresses_which_another_plugin_keeps_is_there_for_the_next_del() {
    let scene = Scene::new();
    let engine = scene.started();
    attach_by_another(&scene, &engine);
    scene.disk.takes(Takes::UntilRemoval);
    for _ in 0..2 {
        let said = Chain(&engine.del(&rig::request("DEL", "b")).unwrap_err()).to_string();
        assert!(said.contains("foreign"), "{said}");
        assert!(engine.is_half_detached("b"));
    }
}

#[test]
fn what_other_plugins_have_released_is_said_where_the_record_says_that_it_is_in_use() {
    let path = PathBuf::from("/state/journal/a@eth0.jsonl");
    let said = |plugins: &[&str]| {
        let plugins = plugins.iter().map(|it| (*it).to_owned()).collect();
        let source = std::io::ErrorKind::ReadOnlyFilesystem.into();
        AttachError::AddressesStay { path: path.clone(), plugins, source }.to_string()
    };
    assert!(said(&[]).ends_with("repeat DEL when it can"));
    let released = "repeat DEL when it can, and before an agent starts: an address that bridge, sbr had given out may belong to another pod";
    assert!(said(&["bridge", "sbr"]).ends_with(released));
}

/// Otherwise the DEL would never be completed: a DEL without a record succeeds.
#[test]
fn a_record_that_is_lost_after_its_del_has_failed_is_written_anew_as_that_of_a_removal() {
    let scene = Scene::new();
    let engine = scene.started();
    scene.disk.keeps_names(true);
    failure(&engine);
    scene.disk.keeps_names(false);
    assert_eq!(engine.without_record().unwrap(), []);
    fs::remove_file(scene.record()).unwrap();
    assert_eq!(engine.without_record().unwrap(), [rig::key("a")]);
    assert!(engine.write_record_anew(&rig::key("a")).unwrap());
    assert!(engine.is_half_detached("a"), "its address may be another pod's");
    engine.del(&rig::request("DEL", "a")).unwrap();
    assert!(!scene.record().exists());
    assert!(engine.registry().is_empty());
    assert_eq!(engine.without_record().unwrap(), []);
}

/// The next check rewrites the record, and the runtime's DEL may come before that.
#[test]
fn a_del_of_a_sandbox_whose_record_was_removed_takes_back_what_is_known_of_it() {
    let scene = Scene::new();
    let engine = scene.started();
    let live = rig::attach_live(&engine, (scene.path(), "a"), ("net1", 2));
    scene.maps.enter(2);
    fs::remove_file(scene.record()).unwrap();
    fs::remove_file(scene.path().join("journal/a@net1.jsonl")).unwrap();
    assert_eq!(scene.held(), (vec!["a".to_owned(), "a".to_owned()], vec![1, 2]));
    engine.del(&rig::request("DEL", "a")).unwrap();
    assert_eq!((scene.held(), engine.registry().len()), (nothing(), 0), "{live:?}");
    assert!(!scene.record().exists());
}

/// No runtime sends its DEL: the agent collects the sandbox; without a record that would do nothing each time.
#[test]
fn a_sandbox_without_a_record_is_collected_by_what_is_known_of_it() {
    let scene = Scene::new();
    let engine = scene.started();
    fs::remove_file(scene.record()).unwrap();
    engine.registry().leaves(&rig::key("a"));
    engine.del_recorded(&rig::key("a")).unwrap();
    assert!(engine.registry().is_empty() && !scene.record().exists());
    assert_eq!(scene.held(), nothing());
}

/// Container ids may repeat. A DEL that was recorded while no agent ran may become due before the next check rewrites
/// the record, or after it.
#[test]
fn a_detach_request_for_an_earlier_container_of_the_id_is_told_by_what_memory_knows_of_the_later_one() {
    let now = || Moment::now(&boot_id().unwrap());
    let before = now();
    let scene = Scene::new();
    let engine = scene.started();
    let after = now();
    let since = || [&before, &after].map(|then| engine.attached_since(&rig::key("a"), Some(then)).unwrap());
    assert_eq!(since(), [true, false]);
    fs::remove_file(scene.record()).unwrap();
    assert_eq!(since(), [true, false], "there is no record");
    assert!(engine.write_record_anew(&rig::key("a")).unwrap());
    assert_eq!(since(), [true, false], "the record is younger");
    engine.registry().leaves(&rig::key("a"));
    fs::remove_file(scene.record()).unwrap();
    assert_eq!(since(), [false, false], "what has begun to go goes on");
}

/// Without the record, nothing is known of the other plugin. No later DEL would undo the rest, which is known.
#[test]
fn what_is_known_of_a_sandbox_is_taken_back_where_the_configuration_of_a_plugin_is_lost() {
    let scene = Scene::new();
    let engine = scene.started();
    let plugin = |role| Step::Delegate(Delegate { plugin: "foreign".to_owned(), config: Map::new(), role });
    let mut plan = rig::plan(scene.path(), "b", 2);
    plan.attachments[0].steps.insert(1, plugin(Role::Ipam));
    let mut odd = plan.attachments[0].clone();
    odd.ifname = "net1".to_owned();
    odd.steps = vec![plugin(Role::Plugin)];
    plan.attachments.push(odd);
    let leased = rig::lease(&engine, &plan);
    let others = [StepRef(0, 1), StepRef(0, 2), StepRef(1, 0)].map(|at| (at, Output::Nothing));
    let outputs = others.into_iter().chain([(StepRef(0, 0), leased)]).collect();
    scene.maps.enter(2);
    let attached = Attached { key: rig::key("b"), plan, outputs, netns_cookie: None, planned: None };
    engine.registry().insert(std::sync::Arc::new(attached));
    assert_eq!(scene.held(), (vec!["a".to_owned(), "b".to_owned()], vec![1, 2]));
    let lost = engine.write_record_anew(&rig::key("b")).unwrap_err();
    assert!(matches!(&lost, AttachError::RecordLost { container, .. } if container == "b"), "{lost}");
    engine.del(&rig::request("DEL", "b")).unwrap();
    assert_eq!((scene.held(), engine.registry().len()), (of_a(), 1));
    assert!(!engine.has_record(&rig::key("b")));
}

/// Another process holds the lock of its pool for longer than a DEL waits.
#[test]
fn an_address_that_cannot_be_given_back_after_its_record_is_when_there_is_a_record_again() {
    let scene = Scene::new();
    let engine = scene.started();
    let pool = scene.path().join("pools/net");
    let lock = File::open(pool.join("lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    scene.disk.takes(Takes::Removals);
    failure(&engine);
    drop(lock);
    assert!(!scene.record().exists());
    assert_eq!(scene.held(), (vec!["a".to_owned()], Vec::new()));
    // A DEL that is repeated meanwhile does not report that everything is released.
    failure(&engine);
    assert_eq!(scene.held(), (vec!["a".to_owned()], Vec::new()));
    scene.disk.takes(Takes::Everything);
    engine.del(&rig::request("DEL", "a")).unwrap();
    assert_eq!(scene.held(), nothing());
    assert!(engine.registry().is_empty());
}

/// An agent is killed during any of its writes. A record with only its plan would claim that nothing of a live
/// sandbox was begun.
#[test]
fn a_record_that_is_written_anew_is_there_with_all_of_it_or_as_somebody_has_removed_it() {
    let scene = Scene::new();
    let engine = scene.started();
    let unfinished = scene.path().join("journal/a@eth0.jsonl.new");
    let journal = || {
        let entries = fs::read_dir(scene.path().join("journal")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains('@')).collect::<Vec<_>>()
    };
    let anew = |is_leaving: bool| {
        fs::remove_file(scene.record()).unwrap();
        if is_leaving {
            engine.registry().leaves(&rig::key("a"));
        }
        assert!(engine.write_record_anew(&rig::key("a")).unwrap());
        assert_eq!((journal(), engine.is_half_detached("a")), (vec!["a@eth0.jsonl".to_owned()], is_leaving));
        fs::metadata(scene.record()).unwrap().len()
    };
    for is_leaving in [false, true] {
        let whole = anew(is_leaving);
        fs::remove_file(scene.record()).unwrap();
        for most in 0..whole {
            scene.disk.takes(Takes::UpTo(most));
            scene.disk.keeps_names(true);
            engine.write_record_anew(&rig::key("a")).unwrap_err();
            assert_eq!(journal(), ["a@eth0.jsonl.new"], "{most} of {whole} bytes");
            fs::remove_file(&unfinished).unwrap();
        }
        scene.disk.takes(Takes::Everything);
        scene.disk.keeps_names(false);
        fs::write(&unfinished, "{").unwrap();
        assert!(engine.write_record_anew(&rig::key("a")).unwrap());
        assert_eq!(journal(), ["a@eth0.jsonl"]);
    }
    // The next start ignores the leftover file.
    fs::rename(scene.record(), &unfinished).unwrap();
    drop(engine);
    scene.started();
    assert_eq!(journal(), [""; 0]);
}
