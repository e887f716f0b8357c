//! Finds records that other programs have edited, before an operation needs them.

use std::collections::BTreeMap;
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

impl Engine {
    /// Returns the attached sandboxes whose record exists and is not as it was written. Costs one `lstat` of the file
    /// of each, and reads the files that have changed.
    pub fn with_edited_record(&self, whole: &mut WholeRecords) -> Vec<JournalKey> {
        let (mut now, mut edited) = (BTreeMap::new(), Vec::new());
        for attached in self.registry().all() {
            let key = &attached.key;
            // Missing records are handled elsewhere, and a record that cannot be examined may be missing.
            let path = self.journal.path(key).ok();
            let Some(file) = path.and_then(|path| fs::symlink_metadata(path).ok()) else { continue };
            let version = FileVersion::of(&file);
            let is_known = whole.0.get(key).is_some_and(|known| *known == version);
            if !is_known && !self.journal.can_read(key) {
                edited.push(key.clone());
            } else if is_known || version.is_settled(SystemTime::now()) {
                now.insert(key.clone(), version);
            }
        }
        whole.0 = now;
        edited
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
