//! Deaths on demand, for tests of crash safety.
//!
//! `NETATTACH_CRASH_AT=N` ends the process when the N-th point (from 0) of its life is reached;
//! `NETATTACH_CRASH_LOG=FILE` appends the name of every point to a file, so that a test can count them.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

static REACHED: AtomicUsize = AtomicUsize::new(0);

/// Called at every point.
pub fn reached(point: &str) {
    let number = REACHED.fetch_add(1, Ordering::SeqCst);
    if let Some(path) = std::env::var_os("NETATTACH_CRASH_LOG")
        && let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path)
    {
        let _ = writeln!(file, "{number} {point}");
    }
    if std::env::var("NETATTACH_CRASH_AT").ok().and_then(|text| text.parse().ok()) == Some(number) {
        // The kernel's own end of a process: no destructor, no flush.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
