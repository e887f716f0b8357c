//! Finds unusable definitions among those whose configuration is on disk.
//!
//! Configurations may be large and definitions many, so they are read again only after the definitions or
//! the files have changed, and at most once a second. Changes of pods, which are the most frequent, do not
//! count.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::bounded;
use crate::file_version::FileVersion;
use crate::npwg::NetworkRef;
use crate::objects::{Definition, Identity, Shared};

/// Shortest time between two reads.
pub(super) const LEAST_INTERVAL: Duration = Duration::from_secs(1);

/// The state at the last read.
#[derive(Debug, Default)]
pub(super) struct DiskLook {
    /// Time of the last read; `None` before the first.
    taken: Option<Instant>,
    definitions: Identity<NetworkRef, Arc<Definition>>,
    /// `None`: the files may change without a change of their versions.
    files: Option<Versions>,
}

/// The versions of the files in a directory and in its subdirectories.
pub(super) type Versions = BTreeMap<PathBuf, FileVersion>;

impl DiskLook {
    /// Returns the result of `read` on the configurations; `None` if it would be the same as at the last look, or if
    /// that was less than [`LEAST_INTERVAL`] ago. `versions` returns the current versions of the files.
    pub(in crate::agent) fn look<T>(
        &mut self,
        now: Instant,
        definitions: &Shared<NetworkRef, Arc<Definition>>,
        versions: impl FnOnce() -> Option<Versions>,
        read: impl FnOnce() -> T,
    ) -> Option<T> {
        if self.taken.is_some_and(|taken| now.saturating_duration_since(taken) < LEAST_INTERVAL) {
            return None;
        }
        self.taken = Some(now);
        // Taken before the files are read, so that the next check notices changes made meanwhile.
        let files = versions();
        if files.is_some() && files == self.files && self.definitions.is_of(definitions) {
            return None;
        }
        self.files = files;
        self.definitions = definitions.identity();
        Some(read())
    }
}

/// The versions of a directory's files; `None` if a later change might not show in them, or if they cannot be read.
pub(in crate::agent) fn versions(directory: &Path, now: SystemTime) -> Option<Versions> {
    let mut found = Versions::new();
    collect(directory, true, &mut found).ok()?;
    found.values().all(|version| version.is_settled(now)).then_some(found)
}

fn collect(directory: &Path, with_directories: bool, found: &mut Versions) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let path = entry?.path();
        let metadata = match std::fs::metadata(&path) {
            Err(error) if bounded::is_absent(&error) => continue,
            other => other?,
        };
        if metadata.is_dir() && with_directories {
            collect(&path, false, found)?;
        }
        found.insert(path, FileVersion::of(&metadata));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn definitions(names: &[&str]) -> Shared<NetworkRef, Arc<Definition>> {
        let definition = |name: &&str| {
            let (namespace, name, annotations) = ("shop".to_owned(), (*name).to_owned(), BTreeMap::new());
            let reference = NetworkRef::new("shop", &name);
            (reference, Arc::new(Definition { namespace, name, config: None, annotations, allowed: None }))
        };
        names.iter().map(definition).collect()
    }

    /// Number of times that the configurations are read by checks at these times, in tenths of a second.
    fn reads(
        look: &mut DiskLook,
        began: Instant,
        looks: &[(u32, &Shared<NetworkRef, Arc<Definition>>)],
        files: Option<&Path>,
    ) -> Vec<u32> {
        let mut read_at = Vec::new();
        for (tenths, definitions) in looks {
            let versions = || versions(files?, SystemTime::now() + Duration::from_secs(60));
            read_at.extend(look.look(began + SECOND / 10 * *tenths, definitions, versions, || *tenths));
        }
        read_at
    }

    #[test]
    fn configurations_are_read_when_definitions_or_files_have_changed_and_at_most_once_a_second() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::create_dir(path.join("net")).unwrap();
        let (began, mut look) = (Instant::now(), DiskLook::default());
        let (one, other) = (definitions(&["a"]), definitions(&["a"]));
        // Another snapshot with the same map: only pods have changed.
        let same = one.clone();
        let looks = [(0, &one), (5, &same), (9, &other), (10, &same), (20, &one), (30, &other), (40, &other)];
        assert_eq!(reads(&mut look, began, &looks, Some(path)), [0, 30]);
        std::fs::write(path.join("net/10.conf"), "{}").unwrap();
        assert_eq!(reads(&mut look, began, &[(45, &other), (50, &other), (60, &other)], Some(path)), [50]);
        std::fs::write(path.join("net/10.conf"), "{ }").unwrap();
        assert_eq!(reads(&mut look, began, &[(70, &other), (80, &other)], Some(path)), [70]);
        assert_eq!(reads(&mut look, began, &[(90, &other), (100, &other)], None), [90, 100], "not known");
    }

    #[test]
    fn files_that_have_just_changed_have_no_version() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(versions(&path.join("missing"), SystemTime::now()), Some(Versions::new()));
        std::fs::write(path.join("10.conf"), "{}").unwrap();
        assert_eq!(versions(path, SystemTime::now()), None);
        let later = SystemTime::now() + Duration::from_secs(60);
        let found = versions(path, later).unwrap();
        assert_eq!(found.into_keys().collect::<Vec<_>>(), [path.join("10.conf")]);
    }
}
