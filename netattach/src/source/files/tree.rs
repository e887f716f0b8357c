//! A directory of manifests as of the last pass.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::catalogue::{Catalogue, Contents};
use super::documents::{json_documents, yaml_documents, yaml_objects};
use super::watcher::Touched;
use crate::error_chain::Chain;
use crate::file_version::FileVersion;
use crate::objects::{Objects, Origin, Problem};
use crate::source::read::manifest::{self, Key, ManifestError, Object};
use crate::source::read::policies::policy;
use crate::{bounded, budget};

/// The contents of the directory's files when they were last read.
#[derive(Debug)]
pub(super) struct Tree {
    directory: PathBuf,
    catalogue: Catalogue,
    /// Manifests that are links, or files with several names: the kernel reports their changes under other names.
    links: BTreeSet<PathBuf>,
    /// Directories that could not be listed.
    unlisted: Vec<Problem>,
}

/// The entries below a directory.
#[derive(Default)]
struct Listed {
    files: BTreeSet<PathBuf>,
    links: BTreeSet<PathBuf>,
    failed: Vec<(PathBuf, io::Error)>,
}

impl Tree {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self { directory, catalogue: Catalogue::default(), links: BTreeSet::new(), unlisted: Vec::new() }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The objects of the files.
    pub(super) fn objects(&self) -> Objects {
        let mut objects = self.catalogue.objects();
        objects.problems.splice(..0, self.unlisted.iter().cloned());
        objects
    }

    /// Updates the known contents after changes.
    ///
    /// # Errors
    /// The directory itself cannot be listed: everything stays unchanged, with a problem.
    pub(super) fn read(&mut self, touched: &Touched) -> io::Result<()> {
        match touched {
            Touched::Names(names) if self.unlisted.is_empty() && self.are_files(names) => {
                self.read_some(names);
                Ok(())
            }
            _ => self.read_all(),
        }
    }

    /// Whether the names belong to files in directories that have no other name that may be a manifest, or to
    /// nothing.
    fn are_files(&self, names: &BTreeSet<PathBuf>) -> bool {
        let is_directory = |path: &Path| fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir());
        names.iter().all(|name| {
            let path = self.directory.join(name);
            let below = |known: &Path| known != path && known.starts_with(&path);
            let was_directory = || {
                let mut files =
                    self.catalogue.files().range(path.clone()..).map(|(known, _)| known.as_path());
                let mut links = self.links.range(path.clone()..).map(PathBuf::as_path);
                files.find(|known| *known != path).is_some_and(below)
                    || links.find(|known| *known != path).is_some_and(below)
            };
            let is_file = match fs::symlink_metadata(&path) {
                Ok(metadata) => !metadata.is_dir() && metadata.nlink() < 2,
                Err(_) => true,
            };
            let mut parents = path.ancestors().skip(1).take_while(|parent| *parent != self.directory);
            is_file && !was_directory() && parents.all(is_directory)
        })
    }

    /// Reads the files of these names, and the targets of links.
    fn read_some(&mut self, names: &BTreeSet<PathBuf>) {
        let named = names.iter().filter(|name| !is_hidden(name) && is_manifest(name));
        let named: BTreeSet<PathBuf> = named.map(|name| self.directory.join(name)).collect();
        for path in named.union(&self.links.clone()) {
            if path.is_dir() {
                self.catalogue.put(path, None);
            } else {
                self.read_file(path);
            }
            self.note_link(path);
        }
    }

    fn note_link(&mut self, path: &Path) {
        match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_symlink() || metadata.nlink() > 1 => {
                self.links.insert(path.to_owned());
            }
            _ => {
                self.links.remove(path);
            }
        }
    }

    /// Lists the directory, and rereads every file that may have changed.
    fn read_all(&mut self) -> io::Result<()> {
        self.unlisted.clear();
        let mut listed = Listed::default();
        if let Err(error) = listed.add(&self.directory) {
            self.unlisted.push(whole_file(&self.directory, format!("list directory: {error}")));
            return Err(error);
        }
        let Listed { files, links, failed } = listed;
        let is_kept = |path: &Path| failed.iter().any(|(directory, _)| path.starts_with(directory));
        let known = self.catalogue.files().keys();
        let gone: Vec<PathBuf> =
            known.filter(|path| !files.contains(*path) && !is_kept(path)).cloned().collect();
        for path in gone {
            self.catalogue.put(&path, None);
        }
        self.links = links;
        for path in files {
            self.read_file(&path);
            self.note_link(&path);
        }
        for (directory, error) in failed {
            self.unlisted.push(whole_file(&directory, format!("list directory: {error}")));
        }
        Ok(())
    }

    fn read_file(&mut self, path: &Path) {
        let before = self.catalogue.files().get(path);
        match read_file(path, before) {
            Read::AsItWas => {}
            Read::Gone => self.catalogue.put(path, None),
            Read::Now(contents) => self.catalogue.put(path, Some(contents)),
        }
    }

    #[cfg(test)]
    pub(super) fn files(&self) -> &BTreeMap<PathBuf, Contents> {
        self.catalogue.files()
    }
}

impl Listed {
    /// Collects the manifests below a directory.
    ///
    /// # Errors
    /// The directory itself cannot be listed; subdirectories that cannot are recorded.
    fn add(&mut self, directory: &Path) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if is_hidden(Path::new(&entry.file_name())) {
                continue;
            }
            let (path, kind) = (entry.path(), entry.file_type()?);
            if kind.is_dir() {
                match self.add(&path) {
                    Err(error) if is_absence(&error) => {}
                    Err(error) => self.failed.push((path, error)),
                    Ok(()) => {}
                }
            } else if is_manifest(&path) {
                if kind.is_symlink() {
                    self.links.insert(path.clone());
                }
                if !kind.is_symlink() || !path.is_dir() {
                    self.files.insert(path);
                }
            }
        }
        Ok(())
    }
}

/// Whether the error means that the name does not exist: a part of the path is gone, or is no longer a directory.
fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Whether a component of the path begins with a dot.
fn is_hidden(name: &Path) -> bool {
    name.iter().any(|part| part.as_encoded_bytes().starts_with(b"."))
}

/// Whether a file of that name is a manifest.
pub(super) fn is_manifest(path: &Path) -> bool {
    matches!(extension(path), "yaml" | "yml" | "json")
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

/// The result of reading a file.
pub(super) enum Read {
    AsItWas,
    Gone,
    Now(Contents),
}

/// Reads one file, given its previous contents.
pub(super) fn read_file(path: &Path, before: Option<&Contents>) -> Read {
    // Before the file is read, which may take longer than a version takes to settle: what is written meanwhile counts as later.
    let begun = SystemTime::now();
    let version = fs::metadata(path).ok().map(|metadata| FileVersion::of(&metadata));
    if version.is_some() && before.is_some_and(|before| before.version == version) {
        return Read::AsItWas;
    }
    let before = before.map_or(&[][..], |before| before.objects.as_slice());
    let (mut now, mut isolating) = (Contents::default(), Vec::new());
    match bounded::read_text(path, budget::MANIFEST.most) {
        Err(error) if is_absence(&error) => return Read::Gone,
        Err(error) => now.problems.push(whole_file(path, format!("read file: {error}"))),
        Ok(text) if text.trim().is_empty() => {
            // Usually a file between being truncated and being written.
            if !before.is_empty() {
                now.problems.push(whole_file(path, "is empty; remove it to remove its objects".to_owned()));
            }
        }
        Ok(text) => {
            (now, isolating) = parse(path, &text);
            drop(text);
            keep_unchanged(&mut now, before);
        }
    }
    if now.problems.is_empty() {
        now.version = version.filter(|version| version.is_settled(begun));
    } else {
        let given: BTreeSet<Key> = now.objects.iter().map(|(_, object)| object.key()).collect();
        let kept = before.iter().filter(|(_, object)| !given.contains(&object.key()));
        now.objects.extend(kept.cloned());
        let known: BTreeSet<Key> = now.objects.iter().map(|(_, object)| object.key()).collect();
        now.objects.extend(isolating.into_iter().filter(|(_, object)| !known.contains(&object.key())));
    }
    Read::Now(now)
}

/// Replaces each object that is unchanged by the known value: readers find changes by comparing addresses.
fn keep_unchanged(now: &mut Contents, before: &[(Option<usize>, Object)]) {
    let known: BTreeMap<Key, &Object> = before.iter().map(|(_, object)| (object.key(), object)).collect();
    for (_, object) in &mut now.objects {
        if let Some(same) = known.get(&object.key()).filter(|known| **known == object) {
            *object = (*same).clone();
        }
    }
}

/// The objects of a text, and the substitutes for policies that cannot be read.
fn parse(path: &Path, text: &str) -> (Contents, Vec<(Option<usize>, Object)>) {
    let (mut contents, mut isolating) = (Contents::default(), Vec::new());
    let (mut found, mut entries) = (0, 0);
    let mut take = |index, objects: Vec<Result<Object, ManifestError>>| {
        for object in objects {
            found += 1;
            match object {
                _ if found > budget::OBJECTS.most || entries > budget::ENTRIES.most => {}
                Ok(object) => {
                    entries += object.entries();
                    contents.objects.push((Some(index), object));
                }
                Err(error) => {
                    isolating.extend(error.isolating().map(|object| (Some(index), object)));
                    contents.problems.push(Problem {
                        origin: Origin::File { path: path.to_owned(), document: Some(index) },
                        message: Chain(&error).to_string(),
                    });
                }
            }
        }
    };
    if extension(path) == "json" {
        match policy(text) {
            Some(policy) => take(0, vec![Ok(policy)]),
            None => json_documents(text).enumerate().for_each(|(index, document)| {
                take(index, document.map_or_else(|error| vec![Err(error)], manifest::objects));
            }),
        }
    } else {
        for (index, document) in yaml_documents(text).enumerate() {
            take(index, yaml_objects(document));
        }
    }
    if let Err(error) = budget::OBJECTS.check(found).and_then(|()| budget::ENTRIES.check(entries)) {
        // None of it is used: the effect of the missing objects is unknown.
        contents = Contents::default();
        contents.problems.push(whole_file(path, error.to_string()));
        isolating.clear();
    }
    (contents, isolating)
}

fn whole_file(path: &Path, message: String) -> Problem {
    Problem { origin: Origin::File { path: path.to_owned(), document: None }, message }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
