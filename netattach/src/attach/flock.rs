//! Waits for a lock that other processes hold (flock(2)), for a while: a blocking flock has no deadline.

use std::fs::{File, TryLockError};
use std::io;
use std::time::{Duration, Instant};

/// Between two looks at it.
const PAUSE: Duration = Duration::from_millis(5);

/// Locks a file; it stays locked until it is closed. Returns false if somebody has held the lock for all of `patience`.
pub(super) fn lock(file: &File, patience: Duration) -> io::Result<bool> {
    lock_by(|| file.try_lock(), patience)
}

/// As [`lock`], with a lock that several may hold at once, and nobody who has one alone.
pub(super) fn lock_shared(file: &File, patience: Duration) -> io::Result<bool> {
    lock_by(|| file.try_lock_shared(), patience)
}

fn lock_by(try_lock: impl Fn() -> Result<(), TryLockError>, patience: Duration) -> io::Result<bool> {
    let end = Instant::now() + patience;
    loop {
        match try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}
