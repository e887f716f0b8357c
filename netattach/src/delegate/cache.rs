//! libcni's directory of cached attachments, in the format that its readers know.
//!
//! A file is written under a temporary name and renamed, so that no reader sees an incomplete one. It is not synced:
//! netattach's own state is in the journal, and a record of an earlier boot is undone together with its files here. A
//! file that a power loss has left empty or torn is set aside when its attachment is read, so that no reader meets it
//! again.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::cni::cache::{self, CacheFormatError, Entry, Key};
use crate::{bounded, budget, durable};

/// libcni's default directory.
pub const DEFAULT_DIRECTORY: &str = "/var/lib/cni";

/// Prefix of the name of a file that is being written; no network name starts with it.
const TEMPORARY_PREFIX: &str = ".writing-";

/// Cached attachments below one directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultCache {
    directory: PathBuf,
}

/// An entry and the file it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Cached {
    /// The file.
    pub path: PathBuf,
    /// Its content.
    pub entry: Entry,
}

/// The entries of one container.
#[derive(Debug, Default)]
pub struct Listing {
    /// Its attachments, by file name.
    pub found: Vec<Cached>,
    /// Files that have the container in their name and cannot be read. They are left in place.
    pub unreadable: Vec<CacheError>,
}

/// The cache could not be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A part of the key is empty.
    #[error(
        "cache of network {:?}, container {:?}, interface {:?}: {part} is empty",
        key.network, key.container_id, key.ifname
    )]
    Key {
        /// The attachment.
        key: Key,
        /// The empty part.
        part: &'static str,
    },
    /// A file or the directory cannot be read.
    #[error("read cached attachment {path}")]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The content of a file is invalid.
    #[error("cached attachment {path}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: CacheFormatError,
    },
    /// A file cannot be written, moved or removed.
    #[error("write cached attachment {path}{}", durable::remedy(source))]
    Write {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl CacheError {
    /// The file that could not be used.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Key { .. } => None,
            Self::Read { path, .. } | Self::Format { path, .. } | Self::Write { path, .. } => Some(path),
        }
    }
}

impl ResultCache {
    /// The cache in `directory`, libcni's cache directory: files are in `results` below it.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// Writes an entry, replacing an earlier one.
    ///
    /// # Errors
    /// [`CacheError::Key`] or [`CacheError::Write`].
    pub fn write(&self, entry: &Entry) -> Result<(), CacheError> {
        let path = self.path(&entry.key)?;
        let temporary = temporary_of(&path);
        // Only the owner may read it: configurations may contain credentials.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(self.results());
        made.and_then(|()| remove_if_present(&temporary))
            .and_then(|()| {
                let mut file =
                    OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
                file.write_all(&entry.encode())?;
                crate::crash_point!("cache", "written");
                fs::rename(&temporary, &path)?;
                crate::crash_point!("cache", "named");
                Ok(())
            })
            .map_err(|source| {
                // All readers ignore a temporary file that cannot be removed now.
                let _ = fs::remove_file(&temporary);
                CacheError::Write { path, source }
            })
    }

    /// The entry of an attachment. `None` if there is none, if the file of that name belongs to another attachment, or
    /// if its content is unusable: then it is moved to `results-unreadable` beside it.
    ///
    /// # Errors
    /// [`CacheError::Key`], or the kernel's refusal.
    pub fn read(&self, key: &Key) -> Result<Option<Entry>, CacheError> {
        let path = self.path(key)?;
        match read(&path) {
            Ok(Some(entry)) if entry.key == *key => Ok(Some(entry)),
            Ok(_) => Ok(None),
            // A bare result is complete, and another program's.
            Err(CacheError::Format { source: CacheFormatError::Kind(_), .. }) => Ok(None),
            Err(error @ CacheError::Format { .. }) => {
                let aside = self.set_aside(&path)?;
                tracing::warn!(error = %crate::error_chain::Chain(&error), aside = %aside.display(), "set aside");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The result of an attachment, from a file of any age.
    ///
    /// # Errors
    /// [`CacheError`]; the file stays where it is.
    pub fn result(&self, key: &Key) -> Result<Option<crate::cni::Value>, CacheError> {
        let path = self.path(key)?;
        let Some(bytes) = bytes(&path)? else { return Ok(None) };
        cache::result(&bytes).map_err(|source| CacheError::Format { path, source })
    }

    /// Reads every attachment of a container, without changes. A missing directory counts as empty. Files of other
    /// kinds and of other containers are skipped.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self, container_id: &str) -> Result<Listing, CacheError> {
        let directory = self.results();
        let failed = |source| CacheError::Read { path: directory.clone(), source };
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Listing::default()),
            other => other.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            names.extend(name.into_string().ok().filter(|name| cache::may_be_of(name, container_id)));
        }
        names.sort();
        let mut listing = Listing::default();
        for name in names {
            let path = directory.join(name);
            match read(&path) {
                Ok(Some(entry)) if entry.key.container_id == container_id => {
                    listing.found.push(Cached { path, entry });
                }
                Ok(_) | Err(CacheError::Format { source: CacheFormatError::Kind(_), .. }) => {}
                Err(error) => listing.unreadable.push(error),
            }
        }
        Ok(listing)
    }

    /// Removes the entry of an attachment. A file of that name that belongs to another attachment stays.
    ///
    /// # Errors
    /// [`CacheError`]. A missing file counts as success.
    pub fn remove(&self, key: &Key) -> Result<(), CacheError> {
        let path = self.path(key)?;
        let failed = |source| CacheError::Write { path: path.clone(), source };
        // Left by a writer that was killed.
        remove_if_present(&temporary_of(&path)).map_err(failed)?;
        if self.read(key)?.is_some() {
            remove_if_present(&path).map_err(failed)?;
            crate::crash_point!("cache", "removed");
        }
        Ok(())
    }

    fn set_aside(&self, path: &Path) -> Result<PathBuf, CacheError> {
        let directory = self.directory.join("results-unreadable");
        let aside = directory.join(path.file_name().unwrap_or_default());
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .and_then(|()| fs::rename(path, &aside))
            .map_err(|source| CacheError::Write { path: path.to_owned(), source })?;
        Ok(aside)
    }

    fn results(&self) -> PathBuf {
        self.directory.join("results")
    }

    fn path(&self, key: &Key) -> Result<PathBuf, CacheError> {
        match key.missing() {
            Some(part) => Err(CacheError::Key { key: key.clone(), part }),
            None => Ok(self.results().join(key.file_name())),
        }
    }
}

fn read(path: &Path) -> Result<Option<Entry>, CacheError> {
    let Some(bytes) = bytes(path)? else { return Ok(None) };
    let read =
        Entry::decode(&bytes).map_err(|source| CacheError::Format { path: path.to_owned(), source })?;
    Ok(Some(read))
}

fn bytes(path: &Path) -> Result<Option<Vec<u8>>, CacheError> {
    match bounded::read(path, budget::CACHED.most) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if bounded::is_absent(&error) => Ok(None),
        Err(source) => Err(CacheError::Read { path: path.to_owned(), source }),
    }
}

/// The temporary path under which a file is written: one for each file, so that remains of a killed writer are found
/// again.
fn temporary_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{TEMPORARY_PREFIX}{name}"))
}

fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if !bounded::is_absent(&error) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use serde_json::json;
    use tempfile::TempDir;

    use super::*;
    use crate::cni::json::Map;

    fn cache() -> (TempDir, ResultCache) {
        let directory = tempfile::tempdir().unwrap();
        let cache = ResultCache::new(directory.path().join("cni"));
        (directory, cache)
    }

    fn entry(network: &str, container_id: &str, ifname: &str) -> Entry {
        Entry {
            key: Key { network: network.into(), container_id: container_id.into(), ifname: ifname.into() },
            config: b"{}".to_vec(),
            netns: None,
            args: Vec::new(),
            capability_args: Map::new(),
            result: Some(json!({"cniVersion": "1.0.0"})),
        }
    }

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(directory)
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_a_killed_writer_left_goes_with_the_next_write_or_the_attachment() {
        let (root, cache) = cache();
        let entry = entry("n", "c1", "eth0");
        let results = root.path().join("cni/results");
        cache.write(&entry).unwrap();
        fs::write(results.join(".writing-n-c1-eth0"), "{").unwrap();
        cache.write(&entry).unwrap();
        assert_eq!(names(&results), ["n-c1-eth0"]);
        fs::write(results.join(".writing-n-c1-eth0"), "{").unwrap();
        cache.remove(&entry.key).unwrap();
        assert_eq!(names(&results), [""; 0]);
    }

    /// Rows: CAC-01, CAC-02, CAC-11.
    #[test]
    fn an_entry_has_its_place_and_only_root_reads_it() {
        let (root, cache) = cache();
        let entry = entry("n", "c1", "eth0");
        cache.write(&entry).unwrap();
        cache.write(&entry).unwrap();
        let results = root.path().join("cni/results");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(names(&results), ["n-c1-eth0"]);
        assert_eq!((mode(&results), mode(&results.join("n-c1-eth0"))), (0o700, 0o600));
        assert_eq!(cache.read(&entry.key).unwrap(), Some(entry.clone()));
        assert_eq!(cache.result(&entry.key).unwrap(), entry.result);
        cache.remove(&entry.key).unwrap();
        cache.remove(&entry.key).unwrap();
        assert_eq!(names(&results), [""; 0]);
    }

    /// Rows: CAC-06.
    #[test]
    fn what_was_never_written_is_absent() {
        let (_root, cache) = cache();
        let key = entry("n", "c1", "eth0").key;
        assert_eq!(cache.read(&key).unwrap(), None);
        assert_eq!(cache.result(&key).unwrap(), None);
        assert!(cache.list("c1").unwrap().found.is_empty());
    }

    #[test]
    fn an_entry_of_all_bytes_that_there_may_be_is_read_and_one_more_is_not() {
        let (root, cache) = cache();
        let entry = entry("n", "c1", "eth0");
        let path = root.path().join("cni/results/n-c1-eth0");
        let most = budget::CACHED.most;
        cache.write(&entry).unwrap();
        let mut content = fs::read(&path).unwrap();
        content.resize(most, b' ');
        fs::write(&path, &content).unwrap();
        assert_eq!(cache.read(&entry.key).unwrap(), Some(entry.clone()));
        content.push(b' ');
        fs::write(&path, &content).unwrap();
        let refused = cache.read(&entry.key).unwrap_err();
        assert_eq!(
            crate::error_chain::Chain(&refused).to_string(),
            format!("read cached attachment {}: longer than {most} bytes", path.display())
        );
        assert_eq!(cache.list("c1").unwrap().unreadable.len(), 1);
        assert_eq!(fs::read(&path).unwrap(), content, "it is where it was");
    }

    /// Rows: CAC-05.
    #[test]
    fn an_attachment_without_a_full_name_is_refused_and_leaves_no_file() {
        for (network, container, ifname, part) in
            [("", "c1", "eth0", "networkName"), ("n", "", "eth0", "containerId"), ("n", "c1", "", "ifName")]
        {
            let (root, cache) = cache();
            let message = format!(
                "cache of network {network:?}, container {container:?}, interface {ifname:?}: {part} is empty"
            );
            assert_eq!(cache.write(&entry(network, container, ifname)).unwrap_err().to_string(), message);
            assert!(!root.path().join("cni").exists());
        }
    }

    /// Rows: CAC-08, CAC-09, CAC-10.
    #[test]
    fn a_containers_attachments_are_told_by_content_in_the_order_of_their_files() {
        let (root, cache) = cache();
        for entry in [
            entry("z", "b-c", "eth0"),
            entry("a", "b-c", "net1"),
            entry("a-b", "c", "eth0"),
            entry("a", "d", "b-c"),
        ] {
            cache.write(&entry).unwrap();
        }
        let results = root.path().join("cni/results");
        fs::write(results.join("empty-b-c-eth0"), "").unwrap();
        fs::write(results.join("torn-b-c-eth0"), "{").unwrap();
        fs::write(results.join("bare-b-c-eth0"), r#"{"cniVersion":"0.3.1"}"#).unwrap();
        fs::create_dir(results.join("folder-b-c-eth0")).unwrap();
        let listing = cache.list("b-c").unwrap();
        let found: Vec<String> = listing.found.iter().map(|cached| cached.entry.key.file_name()).collect();
        assert_eq!(found, ["a-b-c-net1", "z-b-c-eth0"]);
        let unreadable: Vec<PathBuf> = listing
            .unreadable
            .into_iter()
            .map(|error| match error {
                CacheError::Format { path, .. } | CacheError::Read { path, .. } => path,
                other => panic!("{other}"),
            })
            .collect();
        let expected = ["empty", "folder", "torn"].map(|name| results.join(format!("{name}-b-c-eth0")));
        assert_eq!(unreadable, expected);
    }

    /// Rows: CAC-11.
    #[test]
    fn what_a_loss_of_power_left_is_set_aside() {
        for content in ["", "{\"kind\":\"cniCach"] {
            let (root, cache) = cache();
            let key = entry("n", "c1", "eth0").key;
            let results = root.path().join("cni/results");
            fs::create_dir_all(&results).unwrap();
            fs::write(results.join("n-c1-eth0"), content).unwrap();
            assert_eq!(cache.read(&key).unwrap(), None);
            assert_eq!(names(&results), [""; 0]);
            let aside = root.path().join("cni/results-unreadable/n-c1-eth0");
            assert_eq!(fs::read_to_string(aside).unwrap(), content);
        }
    }

    /// Rows: CAC-10.
    #[test]
    fn a_file_about_another_attachment_is_neither_read_nor_removed() {
        let (root, cache) = cache();
        cache.write(&entry("a-b", "c", "eth0")).unwrap();
        let same_file = entry("a", "b-c", "eth0").key;
        assert_eq!(cache.read(&same_file).unwrap(), None);
        cache.remove(&same_file).unwrap();
        assert_eq!(names(&root.path().join("cni/results")), ["a-b-c-eth0"]);
    }
}
