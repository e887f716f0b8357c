//! Merges the objects of a directory's files: of two objects with the same name the first counts, by the path of its
//! file, and in a file by its document.
//!
//! It is updated file by file, and the result does not depend on the order of the updates.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file_version::FileVersion;
use crate::objects::{Objects, Origin, Problem};
use crate::source::read::manifest::{Key, Object};
use crate::source::read::merge;

/// The contents of one file.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Objects with the index of their document, in order.
    pub(super) objects: Vec<(Option<usize>, Object)>,
    pub(super) problems: Vec<Problem>,
    /// The version of the file that was read, if any later change is sure to be visible in it.
    pub(super) version: Option<FileVersion>,
}

/// Files and positions in them, in order. Most objects have one, so it should be small.
type Places = Vec<(Arc<Path>, usize)>;

/// The merged contents of all files; see the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    files: BTreeMap<PathBuf, Contents>,
    /// The files that contain an object, and its position in each; never empty.
    givers: BTreeMap<Key, Places>,
    /// Names that several objects have.
    contested: BTreeSet<Key>,
    /// Files with problems.
    failing: BTreeSet<PathBuf>,
    /// The winning objects, without problems.
    objects: Objects,
}

impl Catalogue {
    /// The files.
    pub(super) fn files(&self) -> &BTreeMap<PathBuf, Contents> {
        &self.files
    }

    /// Replaces the contents of a file; `None`: it has none any more.
    pub(super) fn put(&mut self, path: &Path, now: Option<Contents>) {
        let before = self.files.remove(path).unwrap_or_default();
        let mut concerned = BTreeMap::new();
        for (position, (_, object)) in before.objects.into_iter().enumerate() {
            let key = object.key();
            if let Some(givers) = self.givers.get_mut(&key)
                && let Ok(at) = givers.binary_search_by(|(of, at)| (&**of, *at).cmp(&(path, position)))
            {
                givers.remove(at);
            }
            concerned.insert(key, object);
        }
        self.failing.remove(path);
        if let Some(now) = now {
            let shared: Arc<Path> = path.into();
            for (position, (_, object)) in now.objects.iter().enumerate() {
                let key = object.key();
                // Not doubled at once: most objects are in one file only.
                let givers = self.givers.entry(key.clone()).or_insert_with(|| Vec::with_capacity(1));
                let place = (Arc::clone(&shared), position);
                if let Err(at) = givers.binary_search(&place) {
                    givers.insert(at, place);
                }
                concerned.insert(key, object.clone());
            }
            if !now.problems.is_empty() {
                self.failing.insert(path.to_owned());
            }
            self.files.insert(path.to_owned(), now);
        }
        for (key, object) in concerned {
            self.decide(key, &object);
        }
    }

    /// Ensures that the first object of a name counts, and no other. `alike`: any object of that name.
    fn decide(&mut self, key: Key, alike: &Object) {
        let Some(givers) = self.givers.get(&key).filter(|givers| !givers.is_empty()) else {
            self.givers.remove(&key);
            self.contested.remove(&key);
            merge::remove(&mut self.objects, &alike.key());
            return;
        };
        let first =
            givers.first().and_then(|(path, position)| self.files.get(&**path)?.objects.get(*position));
        if let Some((_, first)) = first {
            merge::insert(&mut self.objects, first);
        }
        if givers.len() > 1 {
            self.contested.insert(key);
        } else {
            self.contested.remove(&key);
        }
    }

    /// All objects, with the problems in the order of the files.
    pub(super) fn objects(&self) -> Objects {
        let mut problems: BTreeMap<&Path, Vec<Problem>> = BTreeMap::new();
        for path in &self.failing {
            let of_file = self.files.get(path).map(|contents| contents.problems.clone());
            problems.insert(path, of_file.unwrap_or_default());
        }
        for (path, _, problem) in self.not_counting() {
            problems.entry(path).or_default().push(problem);
        }
        Objects { problems: problems.into_values().flatten().collect(), ..self.objects.clone() }
    }

    /// The objects hidden by an earlier one of the same name, in order of position.
    fn not_counting(&self) -> BTreeSet<(&Path, usize, Problem)> {
        let mut found = BTreeSet::new();
        for key in &self.contested {
            let mut givers = self.givers.get(key).into_iter().flatten();
            let Some((origin, _)) = givers.next() else { continue };
            for (path, position) in givers {
                let contents = self.files.get(&**path);
                let document =
                    contents.and_then(|contents| contents.objects.get(*position)).and_then(|(it, _)| *it);
                let message = format!("{key} is in {} already", origin.display());
                let origin = Origin::File { path: path.to_path_buf(), document };
                found.insert((&**path, *position, Problem { origin, message }));
            }
        }
        found
    }
}
