//! Watches directories of CNI configurations for files that are created, removed or changed.
//!
//! An event only shows that something has changed; the check that follows reads the directory. Directories
//! that do not exist yet, or whose file system reports no events, are covered by the periodic checks.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use crate::sync::{Mutex, locked};

/// Changes within this time are handled together: other programs write a file in several steps, and may
/// write many.
const TOGETHER: Duration = Duration::from_millis(100);

/// Size of one read of events, in bytes: some hundred events.
const BUFFER: usize = 8 << 10;

/// A watch of some directories.
pub(in crate::agent) struct ConfWatch {
    events: AsyncFd<Events>,
    watched: Mutex<BTreeMap<PathBuf, i32>>,
}

struct Events(OwnedFd);

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl ConfWatch {
    /// Starts without any directory. Must be called in the async runtime.
    ///
    /// # Errors
    /// The user's limit of inotify instances is reached, or the kernel has no memory.
    pub(in crate::agent) fn open() -> io::Result<Self> {
        let events = Events(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?);
        // SAFETY: the descriptor is the value's own, which stays open and the same until this value is dropped.
        let events = unsafe { AsyncFd::register(events) }?;
        Ok(Self { events, watched: Mutex::default() })
    }

    /// Watches those of these directories that exist now, and no others.
    pub(in crate::agent) fn set(&self, directories: &[PathBuf]) {
        let fd = &self.events.get_ref().0;
        let wanted = WatchFlags::CREATE
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR;
        // The same directory has the same watch number; a new directory at its path has another.
        let now: BTreeMap<PathBuf, i32> = directories
            .iter()
            .filter_map(|path| Some((path.clone(), inotify::add_watch(fd, path, wanted).ok()?)))
            .collect();
        let mut watched = locked(&self.watched);
        for number in watched.values().filter(|number| !now.values().any(|other| other == *number)) {
            // Fails if the directory is gone, as the kernel has then removed the watch already.
            let _ = inotify::remove_watch(fd, *number);
        }
        *watched = now;
    }

    /// Waits until something has changed in a watched directory.
    ///
    /// # Errors
    /// The kernel's events cannot be read.
    pub(in crate::agent) async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.events.readable().await?;
            tokio::time::sleep(TOGETHER).await;
            let mut buffer = [0; BUFFER];
            let mut some = false;
            // The kernel queues a bounded number of events; later ones are read in the next round.
            for _ in 0..64 {
                match rustix::io::read(&self.events.get_ref().0, &mut buffer) {
                    Ok(read) => some |= read > 0,
                    Err(Errno::AGAIN) => {
                        ready.clear_ready();
                        break;
                    }
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if some {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    /// Whether the watch notices a change; called only if the change is certain to raise an event.
    async fn noticed(watch: &ConfWatch, change: impl FnOnce()) {
        change();
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.expect("noticed").unwrap();
    }

    #[tokio::test]
    async fn files_that_come_go_and_change_are_noticed_also_in_a_directory_that_has_been_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("net.d"), directory.path().join("net.old"));
        std::fs::create_dir(&path).unwrap();
        let watch = ConfWatch::open().unwrap();
        let wanted = [path.clone(), directory.path().join("missing")];
        watch.set(&wanted);
        let file = path.join("10.conf");
        noticed(&watch, || std::fs::write(&file, "{").unwrap()).await;
        noticed(&watch, || std::fs::write(&file, "{}").unwrap()).await;
        noticed(&watch, || std::fs::rename(&file, path.join("10.conf.bak")).unwrap()).await;
        noticed(&watch, || symlink("x", path.join("..data_tmp")).unwrap()).await;
        noticed(&watch, || std::fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap()).await;
        noticed(&watch, || std::fs::remove_file(path.join("10.conf.bak")).unwrap()).await;

        std::fs::rename(&path, &other).unwrap();
        std::fs::create_dir(&path).unwrap();
        watch.set(&wanted);
        assert_eq!(locked(&watch.watched).keys().collect::<Vec<&PathBuf>>(), [&path]);
        noticed(&watch, || std::fs::write(&file, "{").unwrap()).await;
        // Events of the old directory no longer matter: the next notice is of the new one.
        let is_watched = |path: &Path| {
            let fd = &watch.events.get_ref().0;
            let number = inotify::add_watch(fd, path, WatchFlags::CREATE | WatchFlags::MASK_ADD).unwrap();
            locked(&watch.watched).values().any(|other| *other == number)
        };
        assert_eq!((is_watched(&path), is_watched(&other)), (true, false));
    }
}
