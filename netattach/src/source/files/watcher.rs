//! Reports changes below a directory by the kernel's events.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};

use super::tree::is_manifest;

/// A signal to a follower of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Signal {
    /// Something was created, written or removed.
    Changed(Touched),
    /// A complete file was renamed into place.
    Renamed(Touched),
    Stop,
}

/// The names that may have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Touched {
    /// These names; they are relative to the directory.
    Names(BTreeSet<PathBuf>),
    /// Unknown: everything may have changed.
    Anything,
}

impl Touched {
    /// Adds the names of another signal.
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
    /// Identity of the watched directory, to which its path may cease to lead.
    pub(super) identity: (u64, u64),
}

impl Watched {
    pub(super) fn start(directory: &Path, signals: mpsc::Sender<Signal>) -> notify::Result<Self> {
        // The directory itself may be a link, which the watcher does not follow either.
        let target = fs::canonicalize(directory).map_err(notify::Error::io)?;
        let identity = identity(&target).map_err(notify::Error::io)?;
        let root = target.clone();
        let on_event = move |event: notify::Result<notify::Event>| {
            let signal = match event {
                Ok(event) => signal_of(&event, &root),
                Err(_) => Some(Signal::Changed(Touched::Anything)),
            };
            if let Some(signal) = signal {
                // Fails only while the source is being dropped.
                let _ = signals.send(signal);
            }
        };
        let config = notify::Config::default().with_follow_symlinks(false);
        let mut watcher = RecommendedWatcher::new(on_event, config)?;
        watcher.watch(&target, RecursiveMode::Recursive)?;
        Ok(Self { _watcher: watcher, identity })
    }
}

/// The signal of an event. Reading the directory causes events of its own, which must not trigger another read. A
/// manifest that is renamed away may be about to be rewritten, as some editors do.
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

/// An event without a name is about the directory itself, or about a queue that overflowed.
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
