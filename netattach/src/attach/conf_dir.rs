//! Reads the files of a directory of CNI configurations.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::intent::IntentError;
use crate::cni::load::{self, Directory};
use crate::{bounded, budget};

/// The files that may hold a CNI configuration, including those in a network's own folder. A missing directory counts
/// as empty.
pub(super) fn read(path: &Path) -> Result<Directory, IntentError> {
    files(path).map_err(|source| IntentError::Read { path: path.to_owned(), source })
}

fn files(path: &Path) -> io::Result<Directory> {
    let mut files = BTreeMap::new();
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(files),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // A symbolic link counts as the file it leads to: configuration is often linked into place.
        let kind = match std::fs::metadata(entry.path()) {
            // Removed meanwhile, or a dangling link.
            Err(error) if bounded::is_absent(&error) => continue,
            other => other?,
        };
        if kind.is_dir() {
            for inner in std::fs::read_dir(entry.path())? {
                let inner = inner?;
                let Ok(file) = inner.file_name().into_string() else { continue };
                if file.ends_with(".conf") && inner.path().is_file() {
                    files.insert(format!("{name}/{file}"), whole(&inner.path())?);
                }
            }
        } else if kind.is_file() && load::is_candidate(&name) {
            files.insert(name, whole(&entry.path())?);
        }
    }
    Ok(files)
}

/// Reads at most one byte more than a configuration may have: enough for the parser to refuse that file, without
/// failing the others.
fn whole(path: &Path) -> io::Result<Vec<u8>> {
    match bounded::read(path, budget::CONFIG.most) {
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => Ok(vec![b' '; budget::CONFIG.most + 1]),
        other => other,
    }
}
