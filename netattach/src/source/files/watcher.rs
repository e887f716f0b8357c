//! Changes below a directory, as the kernel tells of them.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};

use super::tree::is_manifest;

/// What a follower of a directory is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Signal {
    /// Something was created, written or removed.
    Changed(Touched),
    /// Something whole was put into its place.
    Renamed(Touched),
    Stop,
}

/// What may be another than it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Touched {
    /// What these names stand for; they are relative to the directory.
    Names(BTreeSet<PathBuf>),
    /// Nobody knows what.
    Anything,
}

impl Touched {
    /// Takes in what else there is.
    pub(super) fn add(&mut self, other: Self) {
        match (&mut *self, other) {
            (Self::Names(names), Self::Names(more)) => names.extend(more),
            _ => *self = Self::Anything,
        }
    }
}

/// A running watch; ends when dropped.
pub(super) struct Watched {
    _watcher: RecommendedWatcher,
    /// Of the directory that is watched, which a path may cease to lead to.
    pub(super) identity: (u64, u64),
}

impl Watched {
    pub(super) fn start(directory: &Path, signals: mpsc::Sender<Signal>) -> notify::Result<Self> {
        // The directory itself may be a link, which the watcher would no more follow than those below it.
        let target = fs::canonicalize(directory).map_err(notify::Error::io)?;
        let identity = identity(&target).map_err(notify::Error::io)?;
        let root = target.clone();
        let on_event = move |event: notify::Result<notify::Event>| {
            let signal = match event {
                Ok(event) => signal_of(&event, &root),
                Err(_) => Some(Signal::Changed(Touched::Anything)),
            };
            if let Some(signal) = signal {
                // Fails only when the source is being dropped.
                let _ = signals.send(signal);
            }
        };
        let config = notify::Config::default().with_follow_symlinks(false);
        let mut watcher = RecommendedWatcher::new(on_event, config)?;
        watcher.watch(&target, RecursiveMode::Recursive)?;
        Ok(Self { _watcher: watcher, identity })
    }
}

/// What an event tells. Reading the directory makes events of its own, which must not cause the next reading. A manifest that
/// is renamed away may be about to be written anew, as some editors do.
pub(super) fn signal_of(event: &notify::Event, root: &Path) -> Option<Signal> {
    let touched = || touched(event, root);
    match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => Some(Signal::Changed(touched())),
        EventKind::Access(_) => None,
        EventKind::Modify(ModifyKind::Name(RenameMode::To | RenameMode::Both)) => {
            Some(Signal::Renamed(touched()))
        }
        EventKind::Modify(ModifyKind::Name(RenameMode::From))
            if !event.paths.iter().any(|path| is_manifest(path)) =>
        {
            Some(Signal::Renamed(touched()))
        }
        _ => Some(Signal::Changed(touched())),
    }
}

/// An event without a name is about the directory itself, or about a queue that ran over.
fn touched(event: &notify::Event, root: &Path) -> Touched {
    let name = |path: &PathBuf| {
        let name = path.strip_prefix(root).ok()?;
        (name != Path::new("")).then(|| name.to_owned())
    };
    let names: Option<BTreeSet<PathBuf>> = event.paths.iter().map(name).collect();
    match names.filter(|names| !names.is_empty() && !event.need_rescan()) {
        Some(names) => Touched::Names(names),
        None => Touched::Anything,
    }
}

/// Device and inode of a directory.
pub(super) fn identity(directory: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(directory).map(|metadata| (metadata.dev(), metadata.ino()))
}
