//! Publishes the `network-status` of attached pods as files, with the content that the pod's annotation has in a
//! cluster.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::{Mark, Publish, PublishError, Published};
use crate::durable;
use crate::file_version::FileVersion;
use crate::npwg::StatusEntry;
use crate::npwg::status;
use crate::plan::PodRef;

/// A directory with one file per attached pod: `<namespace>/<name>.json`, replaced as a whole.
#[derive(Debug, Clone)]
pub struct StatusFiles {
    directory: PathBuf,
}

impl StatusFiles {
    /// Files below `directory`.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// The pod's file; `None` for names that are invalid for a pod and unsafe in a path.
    fn path(&self, pod: &PodRef) -> Option<PathBuf> {
        let plain = |name: &str| !name.is_empty() && !name.contains('/') && name != "." && name != "..";
        let name = &pod.name;
        let named = plain(&name.namespace) && plain(&name.name);
        named.then(|| Path::new(&self.directory).join(&name.namespace).join(format!("{}.json", name.name)))
    }
}

impl Publish for StatusFiles {
    fn publish(&self, pod: &PodRef, entries: &[StatusEntry]) -> Result<(), PublishError> {
        let Some(path) = self.path(pod) else { return Ok(()) };
        let text = status::render(entries);
        // After a restart most files are up to date, and writing takes most of the time.
        if std::fs::read(&path).is_ok_and(|published| published == text.as_bytes()) {
            return Ok(());
        }
        let write = || {
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            let temporary = path.with_extension("tmp");
            std::fs::write(&temporary, &text)?;
            crate::crash_point!("status", "written");
            std::fs::rename(&temporary, &path)?;
            crate::crash_point!("status", "published");
            Ok(())
        };
        write().map_err(|source| failed(&path, source))
    }

    fn published(&self, pod: &PodRef, entries: &[StatusEntry]) -> Published {
        let Some(path) = self.path(pod) else { return Published::Unknown };
        let text = status::render(entries);
        match std::fs::read(path) {
            Ok(published) if published == text.as_bytes() => Published::Same,
            _ => Published::Drifted,
        }
    }

    fn mark(&self, pod: &PodRef) -> Option<Mark> {
        let version = FileVersion::of(&std::fs::metadata(self.path(pod)?).ok()?);
        version.is_settled(SystemTime::now()).then_some(Mark(version))
    }

    fn withdraw(&self, pod: &PodRef) -> Result<(), PublishError> {
        let Some(path) = self.path(pod) else { return Ok(()) };
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(failed(&path, source)),
            _ => {
                crate::crash_point!("status", "withdrawn");
                // Succeeds if it was the namespace's last pod, fails otherwise.
                let _ = path.parent().map(std::fs::remove_dir);
                Ok(())
            }
        }
    }

    fn withdraw_others(&self, attached: Option<&BTreeSet<PodRef>>) -> Result<(), PublishError> {
        let Some(attached) = attached else { return Ok(()) };
        let known: BTreeSet<PathBuf> = attached.iter().filter_map(|pod| self.path(pod)).collect();
        let mut withdrawn = Ok(());
        for namespace in entries_of(&self.directory)? {
            match entries_of(&namespace) {
                Ok(files) => {
                    for file in files.iter().filter(|file| !known.contains(*file)) {
                        let removed = std::fs::remove_file(file).map_err(|source| failed(file, source));
                        withdrawn = withdrawn.and(removed);
                    }
                }
                Err(error) => withdrawn = withdrawn.and(Err(error)),
            }
            // Fails while a file is left.
            let _ = std::fs::remove_dir(&namespace);
        }
        withdrawn
    }
}

fn failed(path: &Path, source: io::Error) -> PublishError {
    let place = format!("{}{}", path.display(), durable::remedy(&source));
    PublishError { place, is_gone: false, source: Box::new(source) }
}

/// The entries of a directory; empty if it does not exist.
fn entries_of(directory: &Path) -> Result<Vec<PathBuf>, PublishError> {
    let failed = |source| failed(directory, source);
    match std::fs::read_dir(directory) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(error) => Err(failed(error)),
        Ok(entries) => entries.map(|entry| Ok(entry.map_err(failed)?.path())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::objects::ObjectName;

    #[test]
    fn a_status_has_a_mark_once_a_change_is_sure_to_give_it_another() {
        let directory = tempfile::tempdir().unwrap();
        let files = StatusFiles::new(directory.path());
        let pod = PodRef { name: ObjectName { namespace: "shop".into(), name: "a".into() }, uid: None };
        assert_eq!(files.mark(&pod), None, "there is none");
        files.publish(&pod, &[]).unwrap();
        assert_eq!(files.mark(&pod), None, "it was written just now");
        let deadline = Instant::now() + Duration::from_secs(20);
        let mark = loop {
            assert!(Instant::now() < deadline);
            match files.mark(&pod) {
                Some(mark) => break mark,
                None => thread::sleep(Duration::from_millis(100)),
            }
        };
        assert_eq!(files.published(&pod, &[]), Published::Same);
        assert_eq!(files.mark(&pod), Some(mark));
        std::fs::write(files.path(&pod).unwrap(), "[{}]").unwrap();
        assert_eq!((files.mark(&pod), files.published(&pod, &[])), (None, Published::Drifted));
    }

    #[test]
    fn statuses_of_pods_that_are_not_attached_go_once_all_that_are_attached_are_known() {
        let directory = tempfile::tempdir().unwrap();
        let files = StatusFiles::new(directory.path());
        let [known, other] =
            ["known", "other"].map(|name| PodRef { name: ObjectName::new("shop", name), uid: None });
        for pod in [&known, &other] {
            files.publish(pod, &[]).unwrap();
        }
        let there = || [&known, &other].map(|pod| files.path(pod).unwrap().exists());
        files.withdraw_others(None).unwrap();
        assert_eq!(there(), [true, true]);
        files.withdraw_others(Some(&BTreeSet::from([known.clone()]))).unwrap();
        assert_eq!(there(), [true, false]);
    }

    #[test]
    fn what_cannot_be_withdrawn_keeps_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let files = StatusFiles::new(directory.path());
        let path =
            |name: &str| files.path(&PodRef { name: ObjectName::new("shop", name), uid: None }).unwrap();
        // Whatever the order in which they are listed, some come before some others.
        for number in 0..8 {
            // No file.
            std::fs::create_dir_all(path(&format!("no-{number}"))).unwrap();
            std::fs::write(path(&format!("old-{number}")), "[]").unwrap();
        }
        files.withdraw_others(Some(&BTreeSet::new())).unwrap_err();
        let left = entries_of(&directory.path().join("shop")).unwrap();
        assert!(left.len() == 8 && left.iter().all(|path| path.is_dir()), "{left:?}");
    }
}
