//! The cache of directories: those used last stay open, each with the contents that were read. Contents are valid
//! while the directory's stamp is unchanged, which is compared under the directory's lock.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::directory::{Contents, Locked, Opened, Stamp};
use super::error::Error;
use crate::sync::{Arc, Mutex};

/// Maximum number of directories, of all pools, that are kept open and cached. Each takes a descriptor for itself, one
/// for its lock and one for each set of ranges.
const MOST_DIRECTORIES: usize = 64;

/// The most recently used directories.
#[derive(Debug, Default)]
pub(super) struct Directories {
    known: HashMap<PathBuf, (u64, Arc<Mutex<Known>>)>,
    uses: u64,
}

/// The reservations of a directory when it was last read.
#[derive(Debug, Default)]
pub(super) struct Known {
    opened: Option<Opened>,
    /// Present while `contents` is the directory's content at this stamp.
    stamp: Option<Stamp>,
    contents: Contents,
}

/// How a directory is known again after its contents have been used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// By a new mark.
    Mark,
    /// By the mark that it has: a check changes nothing, and an idle node need not write to the disk for it.
    Keep,
}

impl Known {
    /// Runs `act` with the directory locked and its contents known; `None` if there is no directory.
    pub(super) fn act<T>(
        &mut self,
        path: &Path,
        deadline: Instant,
        after: After,
        act: impl FnOnce(&Locked<'_>, &mut Contents) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let Self { opened, stamp, contents } = self;
        // Taken, not read: after any failure the next call reads the directory.
        let remembered = stamp.take();
        if let (Some(opened), Some(_)) = (&*opened, remembered) {
            let directory = opened.lock(deadline)?;
            // Other processes change the directory only under the lock.
            if Stamp::of(path) == remembered {
                contents.keeps_spares = true;
                let kept = remembered.filter(|_| after == After::Keep);
                return acted(&directory, stamp, kept, contents, act).map(Some);
            }
        }
        *opened = Opened::open(path)?;
        let Some(opened) = opened else { return Ok(None) };
        let directory = opened.lock(deadline)?;
        *contents = directory.read()?;
        acted(&directory, stamp, None, contents, act).map(Some)
    }
}

impl Directories {
    /// The cached state of a directory. If the cache is full, the least recently used directories that are not in use
    /// now are dropped: the files are authoritative.
    pub(super) fn of(&mut self, path: &Path) -> Arc<Mutex<Known>> {
        self.uses += 1;
        if let Some((used, known)) = self.known.get_mut(path) {
            *used = self.uses;
            return Arc::clone(known);
        }
        while self.known.len() >= MOST_DIRECTORIES {
            let unused = self.known.iter().filter(|(_, (_, known))| Arc::strong_count(known) == 1);
            let Some(oldest) = unused.min_by_key(|(_, (used, _))| *used).map(|(path, _)| path.clone()) else {
                break;
            };
            self.known.remove(&oldest);
        }
        let known = Arc::default();
        self.known.insert(path.to_owned(), (self.uses, Arc::clone(&known)));
        known
    }
}

/// Runs `act`, and marks the directory unless its state may be unknown afterwards. `kept`: the mark that it has, if
/// `act` changes nothing.
fn acted<T>(
    directory: &Locked<'_>,
    stamp: &mut Option<Stamp>,
    kept: Option<Stamp>,
    contents: &mut Contents,
    act: impl FnOnce(&Locked<'_>, &mut Contents) -> Result<T, Error>,
) -> Result<T, Error> {
    let result = act(directory, contents);
    // What could not be read now is read by the next call.
    if contents.unread.is_empty() && result.as_ref().err().is_none_or(Error::is_decision) {
        *stamp = kept.or_else(|| directory.mark());
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_directories_are_used_few_are_kept_open_and_none_in_use_is_forgotten() {
        let mut directories = Directories::default();
        let path = |number: usize| PathBuf::from(number.to_string());
        let in_use = directories.of(&path(0));
        for number in 1..10 * MOST_DIRECTORIES {
            directories.of(&path(number));
            directories.of(&path(1));
        }
        assert_eq!(directories.known.len(), MOST_DIRECTORIES);
        assert!(Arc::ptr_eq(&in_use, &directories.of(&path(0))), "in use");
        assert!(directories.known.contains_key(&path(1)), "used often");
        assert!(!directories.known.contains_key(&path(2)));
    }
}
