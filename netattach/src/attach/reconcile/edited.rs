//! Finds records that other programs have edited, before an operation needs them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::SystemTime;

use crate::attach::AttachError;
use crate::attach::engine::Engine;
use crate::file_version::FileVersion;
use crate::journal::{JournalKey, Loaded};

/// The files of records that were unchanged when they were read last. Only files that have changed since are read
/// again.
#[derive(Debug, Default)]
pub struct WholeRecords(BTreeMap<JournalKey, FileVersion>);

/// The result of a check of all records.
#[derive(Debug, Default)]
pub struct Examined {
    /// The attached sandboxes whose record exists and is not as it was written.
    pub edited: Vec<JournalKey>,
    /// Whether each attached sandbox has a record.
    pub are_complete: bool,
}

impl Engine {
    /// Examines the records of attached sandboxes. Costs one `lstat` of the file of each, and reads the files that have
    /// changed.
    pub fn examine_records(&self, whole: &mut WholeRecords) -> Examined {
        let mut examined = Examined { edited: Vec::new(), are_complete: true };
        let all = self.registry().all();
        let mut found = 0;
        for attached in &all {
            let key = &attached.key;
            // Missing records are handled elsewhere, and a record that cannot be examined may be missing.
            let path = self.journal.path(key).ok();
            let looked = SystemTime::now();
            let Some(file) = path.and_then(|path| fs::symlink_metadata(path).ok()) else {
                examined.are_complete = false;
                whole.0.remove(key);
                continue;
            };
            let version = FileVersion::of(&file);
            if whole.0.get(key) == Some(&version) {
                found += 1;
                continue;
            }
            whole.0.remove(key);
            if !self.journal.can_read(key) {
                examined.edited.push(key.clone());
            } else if version.is_settled(looked) {
                whole.0.insert(key.clone(), version);
                found += 1;
            }
        }
        // The others are of sandboxes that have been detached.
        if whole.0.len() > found {
            let attached: BTreeSet<&JournalKey> = all.iter().map(|attached| &attached.key).collect();
            whole.0.retain(|key, _| attached.contains(key));
        }
        examined
    }

    /// Refuses the record of an attached sandbox that is not as it was written. `false`: there is no record.
    ///
    /// # Errors
    /// The problem of the record.
    pub(super) fn check_record(&self, key: &JournalKey) -> Result<bool, AttachError> {
        match self.journal.load(key)? {
            Loaded::Absent => Ok(false),
            Loaded::Torn { .. } => {
                Err(self.journal.emptied(key, "there is no plan any more".to_owned()).into())
            }
            Loaded::Whole(record) => Ok(record.check_whole().map(|()| true)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;

    #[test]
    fn records_that_were_edited_are_named_and_it_is_told_where_one_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let store = Store::open(directory.join("journal")).unwrap();
        let engine = rig::engine(directory, store, &crate::sync::Arc::default());
        for container in ["a", "b"] {
            let attached = rig::attached(container, &serde_json::json!(null));
            engine.journal.create(attached.key.clone(), attached.plan.clone()).unwrap();
            engine.registry.insert(attached);
        }
        let mut whole = WholeRecords::default();
        let mut look = || {
            let Examined { edited, are_complete } = engine.examine_records(&mut whole);
            (edited, are_complete)
        };
        assert_eq!(look(), (Vec::new(), true));
        let [a, b] = ["a", "b"].map(|container| engine.journal.path(&rig::key(container)).unwrap());
        let written = fs::read_to_string(&a).unwrap();
        fs::write(&a, written.replace("shop/net", "shop/ten")).unwrap();
        assert_eq!([look(), look()], [(); 2].map(|()| (vec![rig::key("a")], true)));
        fs::write(&a, written).unwrap();
        assert_eq!(look(), (Vec::new(), true));
        fs::remove_file(b).unwrap();
        assert_eq!(look(), (Vec::new(), false));
        engine.registry.remove(&rig::key("b"), &rig::attached("b", &serde_json::json!(null)).plan);
        assert_eq!(look(), (Vec::new(), true));
    }
}
