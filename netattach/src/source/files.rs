//! A directory of manifests, read at start and watched.
//!
//! Every `.yaml`, `.yml` and `.json` file below the directory counts, in lexical order of the paths; names that
//! begin with a dot do not (editors' files, and the hidden directories of a mounted ConfigMap), nor do links
//! that lead to a directory.
//!
//! A file that is being written must never take a policy out of force. Therefore nothing is read before the
//! directory has been quiet for a moment; and while a file cannot be read, is empty or has a document that
//! fails, whatever it gave before and does not give now stays as it was. Only a writer that stops for longer in
//! the middle of a document that happens to be complete there can be misread; renaming over the file avoids it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use serde_json::Value;
use tokio::sync::watch;

use super::Source;
use super::manifest::{self, Key, ManifestError, Object};
use super::objects::{Objects, Problem};
use super::version::Version;
use crate::policy::model::PolicyKind;
use crate::report::Chain;

/// Largest file that is read, in bytes: several times what an API server would take in one request.
const LARGEST_FILE: u64 = 16 << 20;

/// How changes are awaited.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// How long the directory must be quiet before it is read.
    pub quiet: Duration,
    /// The same when files were only renamed into their places: then each is whole, and there is only the next one to
    /// wait for.
    pub renamed: Duration,
    /// How long a directory that is never quiet can put reading off.
    pub patience: Duration,
    /// How often a directory that has vanished is looked for.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(50),
            renamed: Duration::from_millis(2),
            patience: Duration::from_millis(500),
            retry: Duration::from_secs(1),
        }
    }
}

/// Why a directory cannot be the source. Only at start: later the last snapshot stands.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The directory cannot be read.
    #[error("read manifest directory {}", path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The directory cannot be watched.
    #[error("watch manifest directory {}", path.display())]
    Watch {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: notify::Error,
    },
    /// The thread that watches cannot be started.
    #[error("start the thread that watches manifests")]
    Thread(#[source] io::Error),
}

/// The source on a directory. Dropping it ends the watch.
#[derive(Debug)]
pub struct Files {
    published: Arc<Published>,
    signals: mpsc::Sender<Signal>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Published {
    snapshot: RwLock<Arc<Objects>>,
    /// Microseconds.
    reading: AtomicU64,
    version: watch::Sender<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signal {
    /// Something was created, written or removed.
    Changed,
    /// Something whole was put into its place.
    Renamed,
    Stop,
}

impl Files {
    /// Reads a directory and watches it from then on.
    ///
    /// # Errors
    /// The directory cannot be read or watched. Unreadable files in it are no error but problems of the snapshot.
    pub fn open(directory: impl Into<PathBuf>, timing: Timing) -> Result<Self, FilesError> {
        let directory = directory.into();
        let (signals, received) = mpsc::channel();
        // Watched before it is read, so that no change falls between the two.
        let watched = Watched::start(&directory, signals.clone())
            .map_err(|source| FilesError::Watch { path: directory.clone(), source })?;
        let mut tree = Tree::new(directory.clone());
        tree.read().map_err(|source| FilesError::Read { path: directory, source })?;
        let published = Arc::new(Published {
            snapshot: RwLock::new(Arc::new(tree.objects())),
            reading: AtomicU64::new(0),
            version: watch::Sender::new(0),
        });
        let follower = Follower {
            tree,
            watched: Some(watched),
            timing,
            signals: signals.clone(),
            published: Arc::clone(&published),
        };
        let thread = thread::Builder::new()
            .name("manifests".to_owned())
            .spawn(move || follower.run(&received))
            .map_err(FilesError::Thread)?;
        Ok(Self { published, signals, thread: Some(thread) })
    }
}

impl Source for Files {
    fn snapshot(&self) -> Arc<Objects> {
        Arc::clone(&self.published.snapshot.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.published.version.subscribe()
    }

    fn reading(&self) -> Duration {
        Duration::from_micros(self.published.reading.load(Ordering::Relaxed))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Both fail only when the thread has ended already.
        let _ = self.signals.send(Signal::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread that reads the directory again when it has changed.
struct Follower {
    tree: Tree,
    /// `None` while the directory is away.
    watched: Option<Watched>,
    timing: Timing,
    signals: mpsc::Sender<Signal>,
    published: Arc<Published>,
}

impl Follower {
    fn run(mut self, received: &mpsc::Receiver<Signal>) {
        while self.await_change(received) {
            let began = Instant::now();
            self.watch_again_if_replaced();
            if let Err(error) = self.tree.read() {
                tracing::warn!(directory = %self.tree.directory.display(), %error, "read manifests");
            }
            self.publish(began);
        }
    }

    /// Returns when the directory has changed and become quiet, or when it is time to look for it again; false
    /// when the source is dropped.
    fn await_change(&self, received: &mpsc::Receiver<Signal>) -> bool {
        let first = match &self.watched {
            Some(_) => received.recv().map_err(|_| RecvTimeoutError::Disconnected),
            None => received.recv_timeout(self.timing.retry),
        };
        let first = match first {
            Ok(signal @ (Signal::Changed | Signal::Renamed)) => signal,
            Err(RecvTimeoutError::Timeout) => return true,
            Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
        };
        let mut quiet = self.quiet_after(first);
        let deadline = Instant::now() + self.timing.patience;
        while Instant::now() < deadline {
            match received.recv_timeout(quiet) {
                Ok(signal @ (Signal::Changed | Signal::Renamed)) => {
                    quiet = quiet.max(self.quiet_after(signal))
                }
                Err(RecvTimeoutError::Timeout) => return true,
                Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        true
    }

    fn quiet_after(&self, signal: Signal) -> Duration {
        match signal {
            Signal::Renamed => self.timing.renamed,
            Signal::Changed | Signal::Stop => self.timing.quiet,
        }
    }

    /// A watch follows the directory it was set on, not the path: one that was moved away or removed and made
    /// again needs a new watch.
    fn watch_again_if_replaced(&mut self) {
        let now = identity(&self.tree.directory).ok();
        if now.is_some() && self.watched.as_ref().map(|watched| watched.identity) == now {
            return;
        }
        self.watched = None;
        match Watched::start(&self.tree.directory, self.signals.clone()) {
            Ok(watched) => self.watched = Some(watched),
            Err(error) => {
                tracing::debug!(directory = %self.tree.directory.display(), %error, "watch manifests");
            }
        }
    }

    fn publish(&self, began: Instant) {
        let objects = self.tree.objects();
        let mut snapshot = self.published.snapshot.write().unwrap_or_else(PoisonError::into_inner);
        if **snapshot == objects {
            return;
        }
        for problem in objects.problems.iter().filter(|problem| !snapshot.problems.contains(problem)) {
            tracing::warn!(%problem, "manifest not in force");
        }
        *snapshot = Arc::new(objects);
        drop(snapshot);
        let reading = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.published.reading.store(reading, Ordering::Relaxed);
        self.published.version.send_modify(|version| *version += 1);
    }
}

/// A running watch; ends when dropped.
struct Watched {
    _watcher: RecommendedWatcher,
    identity: (u64, u64),
}

impl Watched {
    fn start(directory: &Path, signals: mpsc::Sender<Signal>) -> notify::Result<Self> {
        let on_event = move |event: notify::Result<notify::Event>| {
            if let Some(signal) = event.as_ref().map_or(Some(Signal::Changed), signal_of) {
                // Fails only when the source is being dropped.
                let _ = signals.send(signal);
            }
        };
        let config = notify::Config::default().with_follow_symlinks(false);
        let mut watcher = RecommendedWatcher::new(on_event, config)?;
        // The directory itself may be a link, which the watcher would no more follow than those below it.
        let target = fs::canonicalize(directory).map_err(notify::Error::io)?;
        let identity = identity(&target).map_err(notify::Error::io)?;
        watcher.watch(&target, RecursiveMode::Recursive)?;
        Ok(Self { _watcher: watcher, identity })
    }
}

/// What an event tells. Reading the directory makes events of its own, which must not cause the next reading. A manifest that
/// is renamed away may be about to be written anew, as some editors do.
fn signal_of(event: &notify::Event) -> Option<Signal> {
    let is_manifest = |path: &PathBuf| matches!(extension(path), "yaml" | "yml" | "json");
    match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => Some(Signal::Changed),
        EventKind::Access(_) => None,
        EventKind::Modify(ModifyKind::Name(RenameMode::To | RenameMode::Both)) => Some(Signal::Renamed),
        EventKind::Modify(ModifyKind::Name(RenameMode::From)) if !event.paths.iter().any(is_manifest) => {
            Some(Signal::Renamed)
        }
        _ => Some(Signal::Changed),
    }
}

/// Device and inode of a directory.
fn identity(directory: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(directory).map(|metadata| (metadata.dev(), metadata.ino()))
}

/// What the files of the directory gave when they were last read.
#[derive(Debug)]
struct Tree {
    directory: PathBuf,
    files: BTreeMap<PathBuf, Contents>,
    /// Directories that could not be listed.
    unlisted: Vec<Problem>,
}

/// What one file gives.
#[derive(Debug, Default)]
struct Contents {
    objects: Vec<(Option<usize>, Object)>,
    problems: Vec<Problem>,
    /// The file as it was when this was read, if a later change is sure to show in it.
    version: Option<Version>,
}

impl Tree {
    fn new(directory: PathBuf) -> Self {
        Self { directory, files: BTreeMap::new(), unlisted: Vec::new() }
    }

    /// Reads every file again.
    ///
    /// # Errors
    /// The directory itself cannot be listed: everything stays as it was, with a problem.
    fn read(&mut self) -> io::Result<()> {
        self.unlisted.clear();
        let mut paths = BTreeSet::new();
        let mut unlisted = Vec::new();
        if let Err(error) = list(&self.directory, &mut paths, &mut unlisted) {
            self.unlisted.push(whole_file(&self.directory, format!("list directory: {error}")));
            return Err(error);
        }
        let mut before = std::mem::take(&mut self.files);
        for path in paths {
            let old = before.remove(&path).unwrap_or_default();
            if let Some(contents) = read_file(&path, old) {
                self.files.insert(path, contents);
            }
        }
        for (directory, error) in unlisted {
            self.unlisted.push(whole_file(&directory, format!("list directory: {error}")));
            let (kept, rest) = before.into_iter().partition(|(path, _)| path.starts_with(&directory));
            before = rest;
            self.files.extend::<BTreeMap<_, _>>(kept);
        }
        Ok(())
    }

    /// Puts the files together; of two objects with one name the first counts.
    fn objects(&self) -> Objects {
        let mut objects = Objects { problems: self.unlisted.clone(), ..Objects::default() };
        let mut origins: BTreeMap<Key, &Path> = BTreeMap::new();
        for (path, contents) in &self.files {
            objects.problems.extend(contents.problems.iter().cloned());
            for (document, object) in &contents.objects {
                let key = object.key();
                if let Some(origin) = origins.get(&key) {
                    let message = format!("{key} is in {} already", origin.display());
                    objects.problems.push(Problem { file: path.clone(), document: *document, message });
                    continue;
                }
                origins.insert(key, path);
                insert(&mut objects, object.clone());
            }
        }
        objects
    }
}

fn insert(objects: &mut Objects, object: Object) {
    match object {
        Object::Pod(pod) => {
            objects.pods.insert(pod.name.clone(), pod);
        }
        Object::Namespace { name, labels } => {
            objects.namespaces.insert(name, labels);
        }
        Object::Definition(definition) => {
            objects.definitions.insert(definition.reference(), definition);
        }
        Object::Policy(policy) => {
            let policies = match policy.name.kind {
                PolicyKind::Multi => &mut objects.policies,
                PolicyKind::Network => &mut objects.network_policies,
            };
            policies.insert(policy.name.object.clone(), policy);
        }
    }
}

/// Collects the manifest files below a directory; sub-directories that cannot be listed go to `unlisted`.
fn list(
    directory: &Path,
    paths: &mut BTreeSet<PathBuf>,
    unlisted: &mut Vec<(PathBuf, io::Error)>,
) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            match list(&path, paths, unlisted) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => unlisted.push((path, error)),
                Ok(()) => {}
            }
        } else if matches!(extension(&path), "yaml" | "yml" | "json") && !path.is_dir() {
            paths.insert(path);
        }
    }
    Ok(())
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

/// Reads one file, given what it held before. `None`: it is gone.
fn read_file(path: &Path, before: Contents) -> Option<Contents> {
    let version = fs::metadata(path).ok().map(|metadata| Version::of(&metadata));
    if version.is_some() && before.version == version {
        return Some(before);
    }
    let mut now = Contents::default();
    match read_text(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => now.problems.push(whole_file(path, format!("read file: {error}"))),
        Ok(text) if text.trim().is_empty() => {
            // Most often a file between being truncated and being written.
            if !before.objects.is_empty() {
                now.problems.push(whole_file(path, "is empty; remove it to remove its objects".to_owned()));
            }
        }
        Ok(text) => {
            now = parse(path, &text);
            keep_unchanged(&mut now, &before);
        }
    }
    if now.problems.is_empty() {
        now.version = version.filter(|version| version.is_settled(SystemTime::now()));
    } else {
        let given: BTreeSet<Key> = now.objects.iter().map(|(_, object)| object.key()).collect();
        now.objects.extend(before.objects.into_iter().filter(|(_, object)| !given.contains(&object.key())));
    }
    Some(now)
}

/// Puts the value that is known already in the place of each object that says the same: whoever looks for changes
/// compares addresses.
fn keep_unchanged(now: &mut Contents, before: &Contents) {
    let known: BTreeMap<Key, &Object> =
        before.objects.iter().map(|(_, object)| (object.key(), object)).collect();
    for (_, object) in &mut now.objects {
        if let Some(same) = known.get(&object.key()).filter(|known| **known == object) {
            *object = (*same).clone();
        }
    }
}

fn read_text(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > LARGEST_FILE {
        return Err(io::Error::from(io::ErrorKind::FileTooLarge));
    }
    fs::read_to_string(path)
}

fn parse(path: &Path, text: &str) -> Contents {
    let mut contents = Contents::default();
    let mut take = |index, objects: Vec<Result<Object, ManifestError>>| {
        for object in objects {
            match object {
                Ok(object) => contents.objects.push((Some(index), object)),
                Err(error) => contents.problems.push(Problem {
                    file: path.to_owned(),
                    document: Some(index),
                    message: Chain(&error).to_string(),
                }),
            }
        }
    };
    let read = |document: Result<Value, ManifestError>| match document {
        Ok(value) => manifest::objects(&value),
        Err(error) => vec![Err(error)],
    };
    if extension(path) == "json" {
        match manifest::policy(text) {
            Some(policy) => take(0, vec![Ok(policy)]),
            None => manifest::json_documents(text).enumerate().for_each(|(index, it)| take(index, read(it))),
        }
    } else {
        for (index, document) in manifest::yaml_documents(text).enumerate() {
            match manifest::yaml_policy(document) {
                Some(policy) => take(index, vec![Ok(policy)]),
                None => take(index, read(manifest::yaml(document))),
            }
        }
    }
    contents
}

fn whole_file(path: &Path, message: String) -> Problem {
    Problem { file: path.to_owned(), document: None, message }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
