//! Crashes on request, for tests of crash safety.
//!
//! `NETATTACH_CRASH_DIR` names a directory. The name of every point that is reached is appended to the file
//! `log` in that directory. When the content of the file `at` there changes, the log is truncated and
//! points are counted from 0, and the process is killed at the point whose number the file holds. So a test
//! enumerates the points of one operation, regardless of the agent's earlier work. If the word `panic`
//! follows the number, the process panics there instead.

use std::cell::Cell;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The content of `at` and the points since then. One lock for all threads: numbers and lines of the log are in one
/// order.
static COUNTED: Mutex<(Option<usize>, usize)> = Mutex::new((None, 0));

thread_local! {
    static COUNTS: Cell<bool> = const { Cell::new(true) };
}

/// Runs background work that is concurrent with operations: a point of it between two points of an operation would make
/// the numbers of the later ones random.
pub fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let counted = COUNTS.replace(false);
    let done = work();
    COUNTS.set(counted);
    done
}

/// Called at every point.
pub fn reached(point: &str) {
    if !COUNTS.get() {
        return;
    }
    let Some(directory) = std::env::var_os("NETATTACH_CRASH_DIR") else { return };
    let directory = Path::new(&directory);
    let mut counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let wanted = std::fs::read_to_string(directory.join("at")).unwrap_or_default();
    let (number, how) = wanted.split_once(' ').unwrap_or((wanted.as_str(), ""));
    let at: Option<usize> = number.parse().ok();
    let begins = counted.0 != at;
    if begins {
        *counted = (at, 0);
    }
    let mut log = OpenOptions::new();
    log.create(true).write(true).truncate(begins).append(!begins);
    if let Ok(mut log) = log.open(directory.join("log")) {
        // A test that misses a line fails.
        let _ = writeln!(log, "{point}");
    }
    if at == Some(counted.1) {
        assert_ne!(how, "panic", "at {point}");
        // Killed by the kernel: no destructor, no flush.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
    counted.1 += 1;
}
