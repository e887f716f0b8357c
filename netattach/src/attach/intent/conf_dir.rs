//! A directory of CNI configurations, whose files are read one by one.
//!
//! Other programs write to this directory: it may contain thousands of files, or a file that cannot be read. So each
//! scan reads at most [`budget::CONF_FILES`] files and [`budget::CONF_BYTES`], and never waits for a file.

use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};

use super::IntentError;
use crate::cni::ConfigError;
use crate::cni::load::{self, Files};
use crate::{bounded, budget};

/// One scan of a directory.
#[derive(Debug)]
pub struct ConfDir {
    path: PathBuf,
    /// Names of files that may contain a configuration, in order.
    names: Vec<String>,
    /// Number of files and bytes that were read.
    read: Cell<(usize, usize)>,
}

impl ConfDir {
    /// Lists the directory. A directory that does not exist counts as empty.
    ///
    /// # Errors
    /// The directory cannot be listed, or has too many entries.
    pub fn list(path: &Path) -> io::Result<Self> {
        Ok(Self::of(path, entries(path)?))
    }

    /// Makes the directory from its entries, in order.
    pub fn of(path: &Path, mut names: Vec<String>) -> Self {
        names.retain(|name| load::is_candidate(name));
        Self { path: path.to_owned(), names, read: Cell::default() }
    }

    /// Makes a directory for reading only the folders of networks.
    pub(super) fn of_folders(path: &Path) -> Self {
        Self { path: path.to_owned(), names: Vec::new(), read: Cell::default() }
    }

    /// Keeps only the files whose names runtimes read before `name`.
    pub fn before(mut self, name: &str) -> Self {
        self.names.retain(|file| load::is_read_by_runtimes(file) && file.as_str() < name);
        self
    }
}

/// Like [`ConfDir::list`], with the error of an intent.
pub(super) fn list(path: &Path) -> Result<ConfDir, IntentError> {
    ConfDir::list(path).map_err(|source| IntentError::Read { path: path.to_owned(), source })
}

impl Files for ConfDir {
    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    fn content(&self, file: &str) -> Result<Option<Cow<'_, [u8]>>, ConfigError> {
        let (files, bytes) = self.read.get();
        budget::CONF_FILES.check(files + 1)?;
        self.read.set((files + 1, bytes));
        let content = match bounded::read(&self.path.join(file), budget::CONFIG.most) {
            Ok(content) => content,
            Err(error) if bounded::is_absent(&error) || error.kind() == io::ErrorKind::IsADirectory => {
                return Ok(None);
            }
            Err(error) => {
                if error.kind() == io::ErrorKind::FileTooLarge {
                    budget::CONFIG.check(budget::CONFIG.most + 1)?;
                }
                return Err(ConfigError::Unreadable(error.to_string()));
            }
        };
        budget::CONF_BYTES.check(bytes + content.len())?;
        self.read.set((files + 1, bytes + content.len()));
        Ok(Some(Cow::Owned(content)))
    }

    fn folder(&self, network: &str) -> Result<Vec<String>, ConfigError> {
        if network.contains('/') || matches!(network, "" | "." | "..") {
            return Ok(Vec::new());
        }
        match entries(&self.path.join(network)) {
            Ok(names) => Ok(names.iter().map(|name| format!("{network}/{name}")).collect()),
            Err(error) if bounded::is_absent(&error) => Ok(Vec::new()),
            Err(error) => Err(ConfigError::Unreadable(error.to_string())),
        }
    }
}

/// Returns the names in a directory, in order; none if it does not exist. Names that are not UTF-8 are left out.
///
/// # Errors
/// The directory cannot be listed, or has too many entries.
pub fn entries(path: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for (index, entry) in entries.enumerate() {
        budget::CONF_ENTRIES
            .check(index + 1)
            .map_err(|error| io::Error::new(io::ErrorKind::FileTooLarge, error))?;
        names.extend(entry?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode};

    use super::*;
    use crate::error_chain::Chain;

    fn first(path: &Path) -> Result<String, String> {
        load::first(&ConfDir::list(path).unwrap(), |_| true)
            .map(|found| found.file)
            .map_err(|error| Chain(&error).to_string())
    }

    fn network(name: &str) -> String {
        format!(r#"{{"name": "{name}", "plugins": [{{"type": "bridge"}}]}}"#)
    }

    #[test]
    fn what_is_no_configuration_is_passed_over_and_never_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        rustix::fs::mknodat(CWD, at("00-fifo.conf"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::fs::create_dir(at("01-directory.conflist")).unwrap();
        symlink("nowhere", at("02-dangling.conflist")).unwrap();
        symlink("/dev/zero", at("03-endless.conflist")).unwrap();
        std::fs::write(at("04-large.conflist"), vec![b' '; 16 << 20]).unwrap();
        let message = "no usable network configuration (unusable files: 00-fifo.conf, 03-endless.conflist, 04-large.conflist)";
        assert_eq!(first(directory.path()), Err(message.to_owned()));
        let unusable = load::unusable(&ConfDir::list(directory.path()).unwrap());
        let reasons: Vec<String> = unusable.iter().map(|it| Chain(&it.source).to_string()).collect();
        assert_eq!(
            reasons,
            [
                "cannot be read: is no regular file",
                "cannot be read: is no regular file",
                "network configuration: 262145 bytes, and at most 262144 are allowed"
            ]
        );
        std::fs::write(at("10.conflist"), network("a")).unwrap();
        assert_eq!(first(directory.path()), Ok("10.conflist".to_owned()));
    }

    /// The kubelet exchanges the files of a projected volume by renaming `..data`.
    #[test]
    fn links_that_are_exchanged_by_a_rename_are_followed_to_what_they_lead_to_now() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for (version, name) in [("..1", "old"), ("..2", "new")] {
            std::fs::create_dir(at(version)).unwrap();
            std::fs::write(at(version).join("10.conflist"), network(name)).unwrap();
        }
        symlink("..1", at("..data")).unwrap();
        symlink("..data/10.conflist", at("10.conflist")).unwrap();
        let name = || load::first(&ConfDir::list(directory.path()).unwrap(), |_| true).unwrap().list.name;
        assert_eq!(name(), "old");
        symlink("..2", at("..data_tmp")).unwrap();
        std::fs::rename(at("..data_tmp"), at("..data")).unwrap();
        assert_eq!(name(), "new");
    }

    #[test]
    fn a_directory_of_ten_thousand_files_costs_the_first_one_or_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..10_000 {
            std::fs::write(directory.path().join(format!("1-{number:05}.conf")), "{").unwrap();
        }
        let refused = first(directory.path()).unwrap_err();
        assert!(refused.ends_with("1-00007.conf and 9992 more)"), "{refused}");
        let listed = ConfDir::list(directory.path()).unwrap();
        let last = load::unusable(&listed).pop().unwrap();
        let exceeded = budget::CONF_FILES.check(budget::CONF_FILES.most + 1).unwrap_err();
        assert_eq!(Chain(&last.source).to_string(), exceeded.to_string());
        assert_eq!(listed.read.get(), (budget::CONF_FILES.most, budget::CONF_FILES.most));
        std::fs::write(directory.path().join("0.conflist"), network("a")).unwrap();
        let listed = ConfDir::list(directory.path()).unwrap();
        assert_eq!(load::first(&listed, |_| true).unwrap().file, "0.conflist");
        assert_eq!(listed.read.get().0, 1);
    }

    #[test]
    fn the_name_of_a_network_leads_to_no_other_directory() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("net.d");
        std::fs::create_dir_all(directory.path().join("other")).unwrap();
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(directory.path().join("other/1.conf"), r#"{"type": "stranger"}"#).unwrap();
        for name in ["../other", "..", ".", ""] {
            assert_eq!(ConfDir::of_folders(&inner).folder(name).unwrap(), Vec::<String>::new(), "{name}");
        }
        let found = ConfDir::of_folders(directory.path()).folder("other").unwrap();
        assert_eq!(found, ["other/1.conf"]);
    }
}
