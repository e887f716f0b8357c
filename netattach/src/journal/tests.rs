//! Tests of records cut off at every byte, as left by a crash in the middle of a write, and of records of earlier
//! versions.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::files::OnDisk;
use super::format::{Verdict, head, judge};
use super::full_disk::{Disk, Takes};
use super::{Damage, JournalError, JournalKey, Loaded, Progress, Record, RecordState, Store};
use crate::error_chain::Chain;
use crate::ipam::{Pool, static_addresses};
use crate::moment::boot_id;
use crate::plan::Plan;
use crate::step::{LeasedAddress, Output, Outputs, Step, StepRef};
use crate::sync::Arc;
use crate::{cni, ipam, spec};

fn key() -> JournalKey {
    JournalKey { container_id: "c".to_owned(), ifname: "eth0".to_owned() }
}

/// A record with every kind of line except those of its end.
fn write_record(store: &Store) -> Record {
    let plan: Plan = serde_json::from_value(json!({
        "sandbox": {
            "container_id": "c", "ifname": "eth0", "netns": "/run/netns/c",
            "netns_id": {"device": 4, "inode": 4026532300_u64},
            "cni_args": "K8S_POD_NAME=cart\u{e4}", "cni_path": ["/opt/cni/bin"]
        },
        "attachments": []
    }))
    .unwrap();
    let mut record = store.create(key(), plan).unwrap();
    for step in 0..3 {
        record.begin(&[StepRef(0, step)]).unwrap();
        record
            .done(StepRef(0, step), Output::Delegate { result: json!({"text": "a\nb", "n": step}).into() })
            .unwrap();
    }
    record.begin(&[StepRef(0, 3)]).unwrap();
    record
}

/// The content of a record as text; `None` for a torn one.
fn state_of(loaded: Loaded) -> Option<String> {
    match loaded {
        Loaded::Absent => panic!("the file is there"),
        Loaded::Torn { .. } => None,
        Loaded::Whole(record) => {
            record.check_whole().unwrap();
            let Record { plan, planned, state, outputs, result, .. } = &*record;
            let begun: Vec<bool> = (0..4).map(|step| record.has_begun(StepRef(0, step))).collect();
            Some(format!("{plan:?} {planned:?} {state:?} {outputs:?} {result:?} {begun:?}"))
        }
    }
}

fn load(directory: &Path, bytes: &[u8]) -> Option<String> {
    fs::write(directory.join("c@eth0.jsonl"), bytes).unwrap();
    state_of(Store::open(directory).unwrap().load(&key()).unwrap())
}

#[test]
fn a_record_that_is_being_written_says_what_its_whole_lines_say_wherever_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    write_record(&Store::open(directory.path()).unwrap());
    let whole = fs::read(directory.path().join("c@eth0.jsonl")).unwrap();
    let ends: Vec<usize> = (1..=whole.len()).filter(|end| whole[end - 1] == b'\n').collect();
    assert_eq!(ends.len(), 9, "itself, plan, four beginnings, three ends");
    let mut different = Vec::new();
    for length in 0..=whole.len() {
        let complete = ends.iter().copied().rfind(|end| *end <= length).unwrap_or(0);
        let cut = load(directory.path(), &whole[..length]);
        assert_eq!(cut, load(directory.path(), &whole[..complete]), "{length}");
        if different.last() != Some(&cut) {
            different.push(cut);
        }
    }
    assert_eq!(different.len(), ends.len(), "each line after the first says something new");
    assert!(different[0].is_none(), "without a plan there is no record");
}

#[test]
fn an_attached_record_that_is_cut_off_is_damaged_and_stays_attached() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    write_record(&store).attached(json!({"cniVersion": "1.1.0"})).unwrap();
    let path = directory.path().join("c@eth0.jsonl");
    let whole = fs::read(&path).unwrap();
    let planned = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(1).unwrap().0;
    let head = whole.iter().position(|byte| *byte == b'\n').unwrap();
    for length in head..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let what = match store.load(&key()) {
            Ok(Loaded::Whole(record)) => {
                assert!(length > planned, "{length}");
                assert_eq!(record.state, RecordState::Attached, "{length}");
                record.check_whole().unwrap_err()
            }
            Ok(other) => panic!("{length}: {other:?}"),
            Err(error) => error,
        };
        let text = Chain(&what).to_string();
        assert!(text.starts_with(&format!("{} is damaged (line ", path.display())), "{text}");
    }
    fs::write(&path, &whole).unwrap();
    let Loaded::Whole(mut record) = store.load(&key()).unwrap() else { panic!("it is whole") };
    record.removing().unwrap();
    // A crash loses only the line that is being added.
    for length in whole.len()..fs::read(&path).unwrap().len() {
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length as u64).unwrap();
        let Loaded::Whole(record) = store.load(&key()).unwrap() else { panic!("{length}") };
        record.check_whole().unwrap();
    }
}

#[test]
fn a_record_that_was_cut_off_is_continued_where_its_last_whole_line_ends() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    write_record(&store);
    let path = directory.path().join("c@eth0.jsonl");
    let whole = fs::read(&path).unwrap();
    let planned = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(1).unwrap().0 + 1;
    fs::write(&path, &whole[..planned + 10]).unwrap();
    let Loaded::Whole(mut record) = store.load(&key()).unwrap() else { panic!("the plan is whole") };
    record.removing().unwrap();
    let Loaded::Whole(record) = store.load(&key()).unwrap() else { panic!("the plan is whole") };
    record.check_whole().unwrap();
    assert_eq!(record.state, RecordState::Removing);
    assert_eq!(fs::read(&path).unwrap().len(), planned + "[\"01234567\",\"removing\"]\n".len());
}

/// The record of `c` on that disk.
fn load_from(disk: &Disk, directory: &Path) -> Box<Record> {
    let store = Store::over(Arc::new(disk.clone()), directory.to_owned(), boot_id().unwrap()).unwrap();
    match store.load(&key()).unwrap() {
        Loaded::Whole(record) => record,
        other => panic!("{other:?}"),
    }
}

/// A start must not treat a sandbox as attached if its addresses may have been given to others since.
#[test]
fn a_record_that_no_line_fits_behind_is_marked_as_unfinished_where_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, path) = (directory.path(), directory.path().join("c@eth0.jsonl"));
    let mut record = write_record(&Store::open(directory).unwrap());
    let applying = fs::read(&path).unwrap();
    record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
    let attached = fs::read(&path).unwrap();
    let disk = Disk::at(directory);
    // Marking is impossible: the record stays as it was.
    for takes in [Takes::Removals, Takes::Nothing] {
        disk.takes(takes);
        let error = load_from(&disk, directory).removing().unwrap_err();
        assert!(matches!(error, JournalError::Write { .. }), "{takes:?}: {error}");
        assert_eq!(fs::read(&path).unwrap(), attached, "{takes:?}");
    }
    disk.takes(Takes::NoMore);
    let mut record = load_from(&disk, directory);
    record.removing().unwrap();
    assert_eq!(record.state, RecordState::Removing);
    assert_eq!(fs::read(&path).unwrap(), applying, "as it was before it was attached");
    let mut again = load_from(&disk, directory);
    again.check_whole().unwrap();
    assert_eq!((again.state, again.result.take()), (RecordState::Applying, None));
    assert!((0..4).all(|step| again.has_begun(StepRef(0, step))));
    assert!(again.removing().is_err(), "there is nothing to take back any more");
    // Once the disk has room, the record is written as usual.
    disk.takes(Takes::Everything);
    load_from(&disk, directory).removing().unwrap();
    let again = load_from(&disk, directory);
    again.check_whole().unwrap();
    assert_eq!(again.state, RecordState::Removing);
    // An agent that ends between the two writes has undone nothing yet.
    let length = head("c@eth0.jsonl", 2, None).len();
    fs::write(&path, [&applying[..length], &attached[length..]].concat()).unwrap();
    let again = load_from(&disk, directory);
    again.check_whole().unwrap();
    assert_eq!(again.state, RecordState::Attached);
}

/// Deferred lines, which are written together with the next one, are not part of that one.
#[test]
fn lines_that_were_written_with_the_last_one_stay_where_that_goes() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, path) = (directory.path(), directory.path().join("c@eth0.jsonl"));
    let disk = Disk::at(directory);
    let store = Store::over(Arc::new(disk.clone()), directory.to_owned(), boot_id().unwrap()).unwrap();
    let mut record = write_record(&store);
    record.done(StepRef(0, 3), Output::Nothing).unwrap();
    record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
    let attached = fs::read_to_string(&path).unwrap();
    let line = attached.lines().last().unwrap().len() + 1;
    disk.takes(Takes::NoMore);
    record.removing().unwrap();
    let left = fs::read_to_string(&path).unwrap();
    let length = head("c@eth0.jsonl", 2, None).len();
    assert_eq!(left[length..], attached[length..attached.len() - line]);
    let again = load_from(&disk, directory);
    again.check_whole().unwrap();
    assert_eq!((again.state, again.outputs.len()), (RecordState::Applying, 4));
}

/// Later progress is written again in the room of the removed line.
#[test]
fn what_was_written_behind_the_line_that_goes_stays_where_there_is_room() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, path) = (directory.path(), directory.path().join("c@eth0.jsonl"));
    let changed = Output::Delegate { result: json!({"text": "a\nb", "n": 7}).into() };
    let is_changed = |record: &Record| record.outputs.get(&StepRef(0, 1)) == Some(&changed);
    let mut record = write_record(&Store::open(directory).unwrap());
    record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
    record.amend(StepRef(0, 1), changed.clone()).unwrap();
    let written = fs::read(&path).unwrap();
    let disk = Disk::at(directory);
    // Read by its writer, and by another reader.
    for is_read in [false, true] {
        disk.takes(Takes::Everything);
        fs::write(&path, &written).unwrap();
        let mut record = if is_read {
            load_from(&disk, directory)
        } else {
            fs::remove_file(&path).unwrap();
            let store =
                Store::over(Arc::new(disk.clone()), directory.to_owned(), boot_id().unwrap()).unwrap();
            let mut record = write_record(&store);
            record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
            record.amend(StepRef(0, 1), changed.clone()).unwrap();
            Box::new(record)
        };
        assert!(is_changed(&record), "{is_read}");
        disk.takes(Takes::UpTo(fs::metadata(&path).unwrap().len()));
        record.removing().unwrap();
        let again = load_from(&disk, directory);
        again.check_whole().unwrap();
        assert_eq!((again.state, is_changed(&again)), (RecordState::Removing, true), "{is_read}");
    }
}

/// A bridge that the ADD of an attached pod created stays, as other pods may be about to use it.
#[test]
fn a_record_that_is_marked_where_it_is_may_be_that_of_an_attached_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let disk = Disk::at(directory);
    let store = Store::over(Arc::new(disk.clone()), directory.to_owned(), boot_id().unwrap()).unwrap();
    let mut plan: Plan = serde_json::from_value(json!({
        "sandbox": {
            "container_id": "c", "ifname": "eth0", "netns": "/run/netns/c",
            "netns_id": {"device": 4, "inode": 4026532300_u64}, "cni_args": "", "cni_path": []
        },
        "attachments": []
    }))
    .unwrap();
    let steps = vec![Step::RaiseLoopback, Step::EnsureForwarding];
    plan.attachments.push(crate::plan::fixtures::attachment("bridge", steps));
    let mut record = store.create(key(), plan).unwrap();
    record.begin(&[StepRef(0, 0)]).unwrap();
    record.done(StepRef(0, 0), Output::Nothing).unwrap();
    record.begin(&[StepRef(0, 1)]).unwrap();
    assert!(!load_from(&disk, directory).may_have_been_attached(), "an ADD that was cut off");
    record.done(StepRef(0, 1), Output::Nothing).unwrap();
    assert!(!record.may_have_been_attached(), "an ADD that fails at its end");
    record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
    disk.takes(Takes::NoMore);
    load_from(&disk, directory).removing().unwrap();
    let again = load_from(&disk, directory);
    assert_eq!((again.state, again.may_have_been_attached()), (RecordState::Applying, true));
}

/// Records in version 1: one of a pod with links of our own and one of a pod with other plugins.
#[test]
fn records_of_version_1_are_read_and_continued() {
    const BOOT: &str = "e2637ebe-17be-4d28-8243-abe9d6507768";
    for (text, steps) in [
        (include_str!("fixtures/version-1-own-plugins.jsonl"), 18),
        (include_str!("fixtures/version-1-other-plugins.jsonl"), 14),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let key = JournalKey { container_id: "c-a".to_owned(), ifname: "eth0".to_owned() };
        let path = directory.path().join("c-a@eth0.jsonl");
        fs::write(&path, text).unwrap();
        let boot = text.split("\"boot\":\"").nth(1).unwrap().split('"').next().unwrap();
        let files = Arc::new(OnDisk(directory.path().to_owned()));
        let store = Store::over(files, PathBuf::from(directory.path()), boot.to_owned()).unwrap();
        let load = || match store.load(&key).unwrap() {
            Loaded::Whole(record) => record,
            other => panic!("{other:?}"),
        };
        let mut record = load();
        record.check_whole().unwrap();
        assert_eq!(
            (record.state, record.outputs.len(), record.is_complete()),
            (RecordState::Attached, steps, true)
        );
        assert_eq!((record.planned.boot.as_str(), record.planned.since_boot), (boot, None));
        assert_eq!(record.result.as_ref().unwrap()["cniVersion"], "1.1.0");
        record.removing().unwrap();
        assert_eq!(load().state, RecordState::Removing);
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{text}\"removing\"\n"));
        // Without room for that line, the last one goes.
        fs::write(&path, text).unwrap();
        let disk = Disk::at(directory.path());
        disk.takes(Takes::NoMore);
        let full = Store::over(Arc::new(disk), directory.path().to_owned(), boot.to_owned()).unwrap();
        let Loaded::Whole(mut record) = full.load(&key).unwrap() else { panic!("it is whole") };
        record.removing().unwrap();
        let last = text.trim_end().rfind('\n').unwrap() + 1;
        assert_eq!(fs::read_to_string(&path).unwrap(), text[..last]);
        assert_eq!((load().state, load().outputs.len()), (RecordState::Applying, steps));
        // After another boot every step counts as begun.
        fs::write(&path, text.replace(boot, BOOT.trim_start_matches('e'))).unwrap();
        assert!(load().is_of_earlier_boot());
        // A damaged record is not taken for one that never began.
        for (from, to) in [("\"plan\":", "\"pla\":"), ("c-a\",\"ifname\"", "c-b\",\"ifname\"")] {
            fs::write(&path, text.replacen(from, to, 1)).unwrap();
            assert!(matches!(store.load(&key), Err(JournalError::Damaged { .. })), "{from}");
        }
    }
}

fn fixture_path(directory: &Path) -> PathBuf {
    directory.join("c-a@eth0.jsonl")
}

/// The record of a fixture, as the agent of its boot reads it.
fn fixture(directory: &Path, text: &str) -> Box<Record> {
    fs::write(fixture_path(directory), text).unwrap();
    let boot = text.split("\"boot\":\"").nth(1).unwrap().split('"').next().unwrap();
    let files = Arc::new(OnDisk(directory.to_owned()));
    let store = Store::over(files, PathBuf::from(directory), boot.to_owned()).unwrap();
    let key = JournalKey { container_id: "c-a".to_owned(), ifname: "eth0".to_owned() };
    match store.load(&key).unwrap() {
        Loaded::Whole(record) => record,
        other => panic!("{other:?}"),
    }
}

/// Records in version 2: the same pods' lines, each with its checksum. Later versions may write other lines; the
/// meaning of these must not change.
#[test]
fn records_of_version_2_are_read_and_continued() {
    let versions = [
        (
            include_str!("fixtures/version-1-own-plugins.jsonl"),
            include_str!("fixtures/version-2-own-plugins.jsonl"),
        ),
        (
            include_str!("fixtures/version-1-other-plugins.jsonl"),
            include_str!("fixtures/version-2-other-plugins.jsonl"),
        ),
    ];
    for (first, second) in versions {
        let directory = tempfile::tempdir().unwrap();
        let path = fixture_path(directory.path());
        let load = |text: &str| fixture(directory.path(), text);
        let was = load(first);
        let mut record = load(second);
        record.check_whole().unwrap();
        assert_eq!((&record.plan, &record.outputs), (&was.plan, &was.outputs));
        assert_eq!((&record.result, record.state), (&was.result, RecordState::Attached));
        assert_eq!((record.is_complete(), record.netns_cookie), (true, Some(4_294_967_321)));
        assert!(record.planned.since_boot.is_some());
        record.removing().unwrap();
        let continued = fs::read_to_string(&path).unwrap();
        assert!(continued.starts_with(second) && continued.ends_with(",\"removing\"]\n"), "{continued}");
        assert_eq!(load(&continued).state, RecordState::Removing);
    }
}

/// A record in version 3: of a pod with properties that version 2 cannot express, an ipvlan with addresses of
/// `static`. Later versions may write other lines; the meaning of these must not change.
#[test]
fn records_of_version_3_are_read_and_continued() {
    let text = include_str!("fixtures/version-3-own-plugins.jsonl");
    assert!(text.starts_with("{\"planned\":{\"version\":3},\"state\":\"attached\""), "{text}");
    let directory = tempfile::tempdir().unwrap();
    let mut record = fixture(directory.path(), text);
    record.check_whole().unwrap();
    assert_eq!(
        (record.state, record.is_complete(), record.netns_cookie),
        (RecordState::Attached, true, Some(4_294_967_321))
    );
    let ipvlan = spec::Ipvlan {
        pod_name: "net1".to_owned(),
        parent: Some("wire0".to_owned()),
        mode: spec::IpvlanMode::L2,
        mtu: None,
        group: record.plan.sandbox.link_group(),
        in_pod: false,
    };
    let gateway = "10.53.0.1".parse().ok();
    let fixed = static_addresses::Config {
        addresses: vec![
            LeasedAddress { address: "10.53.0.7/24".parse().unwrap(), gateway },
            LeasedAddress { address: "fd00:53::7/64".parse().unwrap(), gateway: None },
        ],
        own: None,
        routes: vec![cni::Route::new("10.60.0.0/16".parse().unwrap(), None)],
        dns: cni::Dns { nameservers: vec!["10.53.0.53".to_owned()], ..cni::Dns::default() },
    };
    let leased = Output::Lease {
        addresses: fixed.addresses.clone(),
        dns: fixed.dns.clone(),
        routes: fixed.routes.clone(),
        server: None,
    };
    assert_eq!(
        record.plan.attachments[1].steps[..2],
        [Step::CreateLink(spec::Link::Ipvlan(ipvlan)), Step::Lease(ipam::Config::Static(fixed))]
    );
    assert_eq!(record.outputs.get(&StepRef(1, 1)), Some(&leased));
    assert_eq!(record.result.as_ref().unwrap()["cniVersion"], "1.1.0");
    record.removing().unwrap();
    let continued = fs::read_to_string(fixture_path(directory.path())).unwrap();
    assert!(continued.starts_with(text) && continued.ends_with(",\"removing\"]\n"), "{continued}");
    assert_eq!(fixture(directory.path(), &continued).state, RecordState::Removing);
}

#[test]
fn no_path_is_made_of_a_name_that_leaves_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("x@eth0.jsonl"), "").unwrap();
    let store = Store::open(directory.path().join("a/b")).unwrap();
    for (container_id, ifname) in
        [("../../x", "eth0"), ("x", "../../eth0"), ("", "eth0"), (".", ""), ("a", "..")]
    {
        let key = JournalKey { container_id: container_id.to_owned(), ifname: ifname.to_owned() };
        assert!(matches!(store.load(&key), Err(JournalError::Key(_))), "{key:?}");
        assert!(matches!(store.discard(&key), Err(JournalError::Key(_))), "{key:?}");
    }
    assert!(directory.path().join("x@eth0.jsonl").exists());
}

/// The record of a plan with one step, and the content of its file.
fn record_of_lease(directory: &Path, lease: serde_json::Value) -> (Record, String) {
    record_of_steps(directory, json!([lease]))
}

fn record_of_steps(directory: &Path, steps: serde_json::Value) -> (Record, String) {
    let plan: Plan = serde_json::from_value(json!({
        "sandbox": {
            "container_id": "c", "ifname": "eth0", "netns": "/run/netns/c",
            "netns_id": {"device": 4, "inode": 4026532300_u64}, "cni_args": "", "cni_path": []
        },
        "attachments": [{
            "network": "shop/lan", "config_name": "lan", "default": true, "ifname": "eth0", "version": "1.0.0",
            "kind": "bridge", "steps": steps
        }]
    }))
    .unwrap();
    let mut record = Store::open(directory).unwrap().create(key(), plan).unwrap();
    record.attached(json!({"cniVersion": "1.0.0"})).unwrap();
    (record, fs::read_to_string(directory.join("c@eth0.jsonl")).unwrap())
}

#[test]
fn a_step_that_version_2_has_no_words_for_is_written_as_a_later_version() {
    let host_local = json!({
        "step": "lease", "network": "lan", "data_dir": "/leases", "sets": [], "exclude": [], "requested": [],
        "routes": [], "resolv_conf": null
    });
    let fixed = json!({
        "step": "lease", "ipam": "static", "addresses": [{"address": "10.1.0.7/24", "gateway": "10.1.0.1"}],
        "dns": {"nameservers": ["10.1.0.53"]}
    });
    let translate =
        json!({"step": "translate", "device": "br0", "bridged": true, "masquerade": ["10.0.0.0/8"]});
    let mut following = translate.clone();
    following["follows_node"] = true.into();
    let beside = json!({"step": "gateway", "bridge": "br0", "force": false, "beside": true});
    let mut masked = translate.clone();
    masked["senders"] = "all".into();
    let veth = |port: serde_json::Value| {
        json!({
            "step": "create-veth", "host_name": "na0", "pod_name": "eth0", "group": 1, "port": port,
        })
    };
    let vlans = json!({"native": 5, "keeps_default": false});
    let macvlan = |key: &str| json!({"step": "create-macvlan", "pod_name": "eth0", "mode": "bridge", "group": 1, key: true});
    let latest = [
        json!({"step": "configure", "style": "point-to-point", "default_route": false}),
        json!({"step": "configure", "style": "subnet", "default_route": false, "detect_duplicates": true}),
        json!({"step": "configure", "style": "subnet", "default_route": false, "down": true}),
        json!({"step": "gateway", "bridge": "br0", "force": false, "vlan": 5}),
        json!({"step": "ensure-bridge", "name": "br0", "promiscuous": false, "vlan_filtering": true}),
        veth(json!({"bridge": "br0", "hairpin": false, "isolated": true})),
        veth(json!({"bridge": "br0", "hairpin": false, "vlans": vlans})),
        macvlan("tap"),
        macvlan("in_pod"),
        json!({"step": "create-ipvlan", "pod_name": "eth0", "mode": "l2", "group": 1, "in_pod": true}),
        json!({"step": "create-vlan", "pod_name": "eth0", "parent": "eth1", "id": 5, "group": 1}),
        json!({"step": "create-dummy", "pod_name": "eth0", "group": 1}),
    ];
    let earlier = [(host_local, 2), (fixed, 3), (translate, 4), (following, 5), (beside, 5)];
    let later = [
        (json!({"step": "move-device"}), 7),
        (json!({"step": "protect-addresses"}), 8),
        (json!({"step": "choose-host-access"}), 8),
        (json!({"step": "choose-vrf", "name": "blue"}), 9),
        (json!({"step": "create-tap", "pod_name": "eth0", "group": 1, "access": {"owner": 0}}), 9),
        (
            json!({"step": "create-netkit", "host_name": "na0", "pod_name": "eth0", "group": 1,
                "ways": {"mode": "l2", "policy": "pass", "peer_policy": "drop"}}),
            9,
        ),
        (json!({"step": "join-vrf", "name": "blue", "table": 5}), 9),
        (json!({"step": "find-reach"}), 9),
        (masked, 9),
        (json!({"step": "take-made", "result": {"cniVersion": "1.0.0"}}), 10),
        (json!({"step": "claim-device", "pod_name": "eth0", "id": {"bus": "0000:03:02.1"}}), 7),
        (
            json!({"step": "claim-device", "pod_name": "eth0", "id": {"bus": "0000:03:02.1"},
                "switchdev": true}),
            10,
        ),
    ];
    for (lease, version) in earlier.into_iter().chain(latest.map(|step| (step, 6))).chain(later) {
        let directory = tempfile::tempdir().unwrap();
        let (written, text) = record_of_lease(directory.path(), lease.clone());
        let head = format!("{{\"planned\":{{\"version\":{version}}},\"state\":\"attached\"");
        assert!(text.starts_with(&head), "{text}");
        assert!(text.contains(&lease.to_string()), "{text}");
        let Loaded::Whole(mut record) = Store::open(directory.path()).unwrap().load(&key()).unwrap() else {
            panic!("{text}");
        };
        record.check_whole().unwrap();
        assert_eq!(
            (&record.plan, &record.result, record.state),
            (&written.plan, &written.result, RecordState::Attached)
        );
        record.removing().unwrap();
        assert!(Store::open(directory.path()).unwrap().load(&key()).map(state_of).unwrap().is_some());
        let continued = fs::read_to_string(directory.path().join("c@eth0.jsonl")).unwrap();
        assert!(continued.starts_with(&text) && continued.ends_with(",\"removing\"]\n"), "{continued}");
        // An agent that does not know version 10 leaves the record alone and reports it; this agent does the same with
        // version 11.
        let foreign = text.replacen(&format!("\"version\":{version}"), "\"version\":11", 1);
        assert_eq!(judge("c@eth0.jsonl", foreign.as_bytes()), Verdict::Foreign(11));
    }
}

#[test]
fn pods_on_ipvlans_that_the_node_reaches_are_of_a_later_version_than_those_on_macvlans() {
    let steps = |link: &str, mode: &str| {
        json!([
            {"step": format!("create-{link}"), "pod_name": "eth0", "mode": mode, "group": 1},
            {"step": "choose-host-access"}, {"step": "give-host-access"}
        ])
    };
    for (link, mode, version) in [("macvlan", "bridge", 8), ("ipvlan", "l2", 10)] {
        let directory = tempfile::tempdir().unwrap();
        let (_, text) = record_of_steps(directory.path(), steps(link, mode));
        assert!(text.starts_with(&format!("{{\"planned\":{{\"version\":{version}}}")), "{text}");
        // Version 10 begins as version 1 does.
        assert!(Store::open(directory.path()).unwrap().load(&key()).map(state_of).unwrap().is_some());
        let begun = head("c@eth0.jsonl", version, None);
        for length in 0..begun.len() {
            assert_eq!(
                judge("c@eth0.jsonl", &begun.as_bytes()[..length]),
                Verdict::Torn,
                "{version}: {length}"
            );
        }
    }
}

/// A flipped bit turns a 2 into a 0: that is damage, as the header has a checksum.
#[test]
fn a_record_of_before_the_first_version_is_told_from_damage_by_its_header() {
    let earlier = "{\"planned\":{\"version\":0,\"plan\":{}}}\n";
    assert_eq!(judge("c@eth0.jsonl", earlier.as_bytes()), Verdict::Foreign(0));
    let flipped = head("c@eth0.jsonl", 2, None).replacen("\"version\":2", "\"version\":0", 1);
    assert!(!matches!(judge("c@eth0.jsonl", flipped.as_bytes()), Verdict::Foreign(_)));
}

#[test]
fn of_many_problems_of_a_record_three_are_named() {
    let damage: Vec<Damage> = (1..6).map(|line| Damage { line, what: "x".to_owned() }).collect();
    let error = JournalError::damaged(Path::new("/j"), &damage);
    assert!(
        error.to_string().starts_with("/j is damaged (line 1: x; line 2: x; line 3: x; 2 more): "),
        "{error}"
    );
}

#[test]
fn irregular_files_in_the_journal_delay_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c@eth0.jsonl");
    let store = Store::open(directory.path()).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
    let message = |error: JournalError| Chain(&error).to_string();
    assert_eq!(
        message(store.load(&key()).unwrap_err()),
        format!("read {}: not a regular file", path.display())
    );
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(message(store.load(&key()).unwrap_err()).starts_with(&format!("read {}: ", path.display())));
}

#[test]
fn the_pools_that_are_known_are_those_of_the_file_also_where_its_name_may_not_survive_a_loss_of_power() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let pool = |number: u32| Pool::directory("/leases", &format!("net-{number:03}"));
    let line = |number| format!("{}\n", serde_json::to_string(&pool(number)).unwrap());
    fs::write(directory.join("pools.jsonl"), (0..100).map(line).collect::<String>()).unwrap();
    let disk = Disk::at(directory);
    let start = || Store::over(Arc::new(disk.clone()), directory.to_owned(), boot_id().unwrap()).unwrap();
    let store = start();
    disk.fails_to_sync(true);
    assert_eq!(store.keep_pools(|it| *it == pool(7)).unwrap(), 99);
    disk.fails_to_sync(false);
    assert_eq!((store.pools(), start().pools()), (vec![pool(7)], vec![pool(7)]));
    // A pool that was forgotten is recorded again when an address is leased from it.
    store.note_pool(pool(8)).unwrap();
    assert_eq!(start().pools(), [pool(7), pool(8)]);
}

#[test]
fn a_record_that_is_written_as_a_whole_takes_the_place_of_none_and_says_all_that_it_was_given() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let mut first = write_record(&store);
    let mut plan = (*first.plan).clone();
    let steps = vec![Step::RaiseLoopback, Step::EnsureForwarding];
    plan.attachments.push(crate::plan::fixtures::attachment("bridge", steps));
    let mut outputs = Outputs::default();
    outputs.insert(StepRef(0, 0), Output::Nothing);
    outputs.insert(StepRef(0, 1), Output::Delegate { result: json!({"text": "a"}).into() });
    let result = json!({"cniVersion": "1.1.0"});
    let write = |result: Option<serde_json::Value>| {
        let progress = Progress { netns_cookie: 7, outputs: &outputs, result };
        store.create_whole(key(), plan.clone(), progress)
    };
    let unfinished = directory.path().join("c@eth0.jsonl.new");
    let refused = write(Some(result.clone())).unwrap_err();
    assert!(matches!(&refused, JournalError::Exists(of) if *of == key()), "{refused}");
    assert!(!unfinished.exists());
    first.removing().unwrap();
    first.remove().unwrap();
    for (result, state) in [(Some(result), RecordState::Attached), (None, RecordState::Removing)] {
        // Left by an agent that has ended.
        fs::write(&unfinished, "{").unwrap();
        assert_eq!(store.keys().unwrap(), []);
        write(result.clone()).unwrap();
        assert!(!unfinished.exists());
        let Loaded::Whole(read) = store.load(&key()).unwrap() else { panic!("it is whole") };
        read.check_whole().unwrap();
        let said = (read.state, read.netns_cookie, &read.outputs, &*read.plan, &read.result);
        assert_eq!(said, (state, Some(7), &outputs, &plan, &result));
        read.remove().unwrap();
    }
}
