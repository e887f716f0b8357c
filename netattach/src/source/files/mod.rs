//! A directory of manifests, read at start and watched.
//!
//! Every `.yaml`, `.yml` and `.json` file below the directory is read, in lexical order of the paths; names that begin
//! with a dot are ignored (editors' files, and the hidden directories of a mounted ConfigMap), and so are links to
//! directories.
//!
//! A partly written file must never take a policy out of force. Therefore files are read only after the directory has
//! been quiet for a moment; and while a file cannot be read, is empty or has an invalid document, its previous
//! objects that the file lacks now stay in force. Only a writer that pauses for longer in the middle of a document
//! that happens to be complete there can be misread; renaming over the file avoids it.
//!
//! Only the files reported by the kernel are examined, and the targets of links. All files are examined at start, when
//! names of directories are concerned, when the kernel lost events, and once a minute: filesystems written by other
//! hosts report no events, nor are writes reported that used another name of the file which existed only between two
//! passes.
//!
//! `watcher` reports the changed files, `tree` reads them if their version differs (`crate::file_version`), by way of
//! `documents` (and `plain_yaml`, the fast parser, and `yaml_list`), and `catalogue` merges the contents of all files.

mod catalogue;
pub(in crate::source) mod documents;
mod plain_yaml;
mod tree;
mod watcher;
mod yaml_list;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::error_chain::Chain;
use crate::objects::{Objects, Problem};
use crate::pace;
use crate::source::files::tree::Tree;
use crate::source::files::watcher::{Signal, Touched, Watched, identity};
use crate::source::{NotSynced, PodFuture, Source, WantedPod, follow};

/// Timing of the watch.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// How long the directory must be quiet before it is read.
    pub quiet: Duration,
    /// The same when files were only renamed into place: each is complete then, and only further renames are waited
    /// for.
    pub renamed: Duration,
    /// How long a directory that is never quiet can delay reading.
    pub patience: Duration,
    /// How often a missing directory is looked for.
    pub retry: Duration,
    /// Longest time that the kernel's events are relied on without a full pass, if a pass is little work ([`pace`]):
    /// not every filesystem reports every change.
    pub trust: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(50),
            renamed: Duration::from_millis(2),
            patience: Duration::from_millis(500),
            retry: Duration::from_secs(1),
            trust: Duration::from_secs(60),
        }
    }
}

/// Why a directory cannot be the source. Only at start: later the last snapshot remains valid.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The directory cannot be read.
    #[error("read manifest directory {}", path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory cannot be watched.
    #[error("watch manifest directory {}", path.display())]
    Watch {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: notify::Error,
    },
    /// The watch thread cannot be started.
    #[error("start the thread that watches manifests")]
    Thread(#[source] io::Error),
}

/// A source that reads a directory. Dropping it ends the watch.
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
    /// The condition that prevents newer snapshots at present, and since when.
    standing: Mutex<Option<(Instant, Standing)>>,
}

/// Why the snapshot may be out of date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// A read is in progress.
    Reading,
    /// The directory is missing.
    Away,
}

/// How long reading may take, or the directory be missing, before it is reported.
const PATIENCE: Duration = Duration::from_secs(10);

impl Files {
    /// Reads a directory and watches it from then on.
    ///
    /// # Errors
    /// The directory cannot be read or watched. Unreadable files in it are problems of the snapshot, not errors.
    pub fn open(directory: impl Into<PathBuf>, timing: Timing) -> Result<Self, FilesError> {
        let directory = directory.into();
        let (signals, received) = mpsc::channel();
        // The watch starts before the first read, so that no change is lost between the two.
        let watched = Watched::start(&directory, signals.clone())
            .map_err(|source| FilesError::Watch { path: directory.clone(), source })?;
        let mut tree = Tree::new(directory.clone());
        let (read, worked) = pace::measured("manifests", || tree.read(&Touched::Anything));
        read.map_err(|source| FilesError::Read { path: directory, source })?;
        let objects = tree.objects();
        tell(&objects, &[]);
        let published = Arc::new(Published {
            snapshot: RwLock::new(Arc::new(objects)),
            reading: AtomicU64::new(0),
            version: watch::Sender::new(0),
            standing: Mutex::new(None),
        });
        let follower = Follower {
            tree,
            watched: Some(watched),
            away: None,
            looked: Instant::now(),
            worked,
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

/// Logs problems that were not logged before.
fn tell(objects: &Objects, before: &[Problem]) {
    for problem in objects.problems.iter().filter(|problem| !before.contains(problem)) {
        tracing::warn!(%problem, "manifest not in force");
    }
}

impl Source for Files {
    fn snapshot(&self) -> Arc<Objects> {
        Arc::clone(&self.published.snapshot.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.published.version.subscribe()
    }

    fn synced(&self) -> Result<(), NotSynced> {
        self.standing().map_err(NotSynced::Stale)
    }

    fn reread(&self) {
        // Fails only when the thread has ended, which `synced` reports.
        let _ = self.signals.send(Signal::Changed(Touched::Anything));
    }

    fn pod<'a>(&'a self, wanted: &'a WantedPod, deadline: Instant) -> PodFuture<'a> {
        if wanted.find(&self.snapshot()).is_none() {
            // Not every filesystem reports every change. Fails only when the thread has ended; then the pod never
            // appears.
            let _ = self.signals.send(Signal::Changed(Touched::Anything));
        }
        Box::pin(follow(self, wanted, deadline))
    }

    fn reading(&self) -> Duration {
        Duration::from_micros(self.published.reading.load(Ordering::Relaxed))
    }
}

impl Files {
    /// Whether changes are followed.
    fn standing(&self) -> Result<(), String> {
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Err(
                "manifests are not followed any more: the thread has ended, and the log has why".to_owned()
            );
        }
        let (since, what) = match *self.published.standing.lock().unwrap_or_else(PoisonError::into_inner) {
            Some((since, what)) if since.elapsed() > PATIENCE => (since.elapsed().as_secs(), what),
            _ => return Ok(()),
        };
        Err(match what {
            Standing::Reading => format!("manifests are still being read after {since} s"),
            Standing::Away => format!("the directory of manifests has been away for {since} s"),
        })
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Both fail only if the thread has already ended.
        let _ = self.signals.send(Signal::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread that rereads the directory after changes.
struct Follower {
    tree: Tree,
    /// `None` while the directory is missing.
    watched: Option<Watched>,
    /// Since when it is missing.
    away: Option<Instant>,
    /// Time of the last full pass.
    looked: Instant,
    /// For how long a processor has worked for it.
    worked: Duration,
    timing: Timing,
    signals: mpsc::Sender<Signal>,
    published: Arc<Published>,
}

impl Follower {
    fn run(mut self, received: &mpsc::Receiver<Signal>) {
        while let Some(mut touched) = self.await_change(received) {
            let began = Instant::now();
            self.stands(Some((began, Standing::Reading)));
            if self.watch_again_if_replaced() {
                touched = Touched::Anything;
            }
            let (read, worked) = pace::measured("manifests", || self.tree.read(&touched));
            if touched == Touched::Anything {
                (self.looked, self.worked) = (began, worked);
            }
            if let Err(error) = read {
                tracing::warn!(directory = %self.tree.directory().display(), error = %Chain(&error), "read manifests");
            }
            self.publish(began);
            if self.watched.is_some() {
                self.away = None;
            } else {
                self.away.get_or_insert(began);
            }
            self.stands(self.away.map(|since| (since, Standing::Away)));
        }
    }

    fn stands(&self, standing: Option<(Instant, Standing)>) {
        *self.published.standing.lock().unwrap_or_else(PoisonError::into_inner) = standing;
    }

    /// Returns when the directory has changed and become quiet, or when a full pass is due; `None` when the source is
    /// dropped.
    fn await_change(&self, received: &mpsc::Receiver<Signal>) -> Option<Touched> {
        let idle = match &self.watched {
            Some(_) => pace::pause(self.timing.trust, self.worked).saturating_sub(self.looked.elapsed()),
            None => self.timing.retry,
        };
        let (mut quiet, mut touched) = match received.recv_timeout(idle) {
            Ok(signal) => self.understood(signal)?,
            Err(RecvTimeoutError::Timeout) => return Some(Touched::Anything),
            Err(RecvTimeoutError::Disconnected) => return None,
        };
        let deadline = Instant::now() + self.timing.patience;
        while Instant::now() < deadline {
            match received.recv_timeout(quiet) {
                Ok(signal) => {
                    let (longer, more) = self.understood(signal)?;
                    quiet = quiet.max(longer);
                    touched.add(more);
                }
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        Some(touched)
    }

    /// How long the directory must be quiet after a signal, and what changed; `None`: stop.
    fn understood(&self, signal: Signal) -> Option<(Duration, Touched)> {
        match signal {
            Signal::Renamed(touched) => Some((self.timing.renamed, touched)),
            Signal::Changed(touched) => Some((self.timing.quiet, touched)),
            Signal::Stop => None,
        }
    }

    /// A watch follows the directory it was set on, not the path: if that was moved away, or removed and recreated, a
    /// new watch is needed. Returns whether it was set.
    fn watch_again_if_replaced(&mut self) -> bool {
        let now = identity(self.tree.directory()).ok();
        if now.is_some() && self.watched.as_ref().map(|watched| watched.identity) == now {
            return false;
        }
        self.watched = None;
        match Watched::start(self.tree.directory(), self.signals.clone()) {
            Ok(watched) => self.watched = Some(watched),
            Err(error) => {
                tracing::debug!(
                    directory = %self.tree.directory().display(), error = %Chain(&error),
                    "watch manifests"
                );
            }
        }
        true
    }

    fn publish(&self, began: Instant) {
        let objects = self.tree.objects();
        let mut snapshot = self.published.snapshot.write().unwrap_or_else(PoisonError::into_inner);
        if **snapshot == objects {
            return;
        }
        tell(&objects, &snapshot.problems);
        *snapshot = Arc::new(objects);
        drop(snapshot);
        let reading = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.published.reading.store(reading, Ordering::Relaxed);
        self.published.version.send_modify(|version| *version += 1);
    }
}

#[cfg(test)]
mod tests;
