//! Records cut off at every byte, as a death in the middle of a write leaves them.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::{Key, Loaded, Record, State, Store};
use crate::plan::{Output, Plan, StepRef};

fn key() -> Key {
    Key { container_id: "c".to_owned(), ifname: "eth0".to_owned() }
}

/// A record that has seen every kind of line.
fn write_record(store: &Store) {
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
        record.begin(StepRef(0, step)).unwrap();
        record
            .done(StepRef(0, step), Output::Delegate { result: json!({"text": "a\nb", "n": step}) })
            .unwrap();
    }
    record.begin(StepRef(0, 3)).unwrap();
    record.attached(json!({"cniVersion": "1.1.0"})).unwrap();
    record.removing().unwrap();
}

/// All that a record says; `None` for a torn one.
fn said(loaded: Loaded) -> Option<String> {
    match loaded {
        Loaded::Absent => panic!("the file is there"),
        Loaded::Torn => None,
        Loaded::Whole(record) => {
            let Record { plan, planned, state, outputs, result, .. } = &*record;
            let begun: Vec<bool> = (0..4).map(|step| record.has_begun(StepRef(0, step))).collect();
            Some(format!("{plan:?} {planned:?} {state:?} {outputs:?} {result:?} {begun:?}"))
        }
    }
}

fn load(directory: &Path, bytes: &[u8]) -> (Option<String>, Vec<u8>) {
    fs::write(directory.join("c@eth0.jsonl"), bytes).unwrap();
    let store = Store::open(directory).unwrap();
    (said(store.load(&key()).unwrap()), fs::read(directory.join("c@eth0.jsonl")).unwrap())
}

#[test]
fn a_record_cut_off_at_any_byte_says_what_its_whole_lines_say() {
    let directory = tempfile::tempdir().unwrap();
    write_record(&Store::open(directory.path()).unwrap());
    let whole = fs::read(directory.path().join("c@eth0.jsonl")).unwrap();
    let ends: Vec<usize> = (1..=whole.len()).filter(|end| whole[end - 1] == b'\n').collect();
    assert_eq!(ends.len(), 10, "plan, four beginnings, three ends, attached, removing");
    let mut different = Vec::new();
    for length in 0..=whole.len() {
        let complete = ends.iter().copied().rfind(|end| *end <= length).unwrap_or(0);
        let (cut, left) = load(directory.path(), &whole[..length]);
        assert_eq!(
            (&cut, &left[..]),
            (&load(directory.path(), &whole[..complete]).0, &whole[..complete]),
            "{length}"
        );
        if different.last() != Some(&cut) {
            different.push(cut);
        }
    }
    assert_eq!(different.len(), ends.len() + 1, "each line says something new");
    assert!(different[0].is_none(), "without a plan there is no record");
}

#[test]
fn a_record_that_was_cut_off_is_continued_where_its_last_whole_line_ends() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    write_record(&store);
    let path = directory.path().join("c@eth0.jsonl");
    let whole = fs::read(&path).unwrap();
    let planned = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    fs::write(&path, &whole[..planned + 5]).unwrap();
    let Loaded::Whole(mut record) = store.load(&key()).unwrap() else { panic!("the plan is whole") };
    record.removing().unwrap();
    let Loaded::Whole(record) = store.load(&key()).unwrap() else { panic!("the plan is whole") };
    assert_eq!(record.state, State::Removing);
    assert_eq!(fs::read(&path).unwrap().len(), planned + "\"removing\"\n".len());
}
