//! Waits for a lock that other processes hold (flock(2)), with a deadline: a blocking flock has none.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::sync;

/// The pause between two attempts: first and longest.
const SHORTEST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Locks a file until it is closed. Returns `false` if another process has held the lock for all of `patience`.
///
/// # Errors
/// The kernel refuses, for example for a file on a network filesystem without locks.
pub(crate) fn lock(file: impl AsFd, patience: Duration) -> io::Result<bool> {
    lock_until(file, Instant::now() + patience)
}

/// Like [`lock`], with a shared lock.
///
/// # Errors
/// As for [`lock`].
pub(crate) fn lock_shared(file: impl AsFd, patience: Duration) -> io::Result<bool> {
    lock_by(file, FlockOperation::NonBlockingLockShared, Instant::now() + patience)
}

/// Like [`lock`], until a deadline. Tries once if the deadline has passed.
///
/// # Errors
/// As for [`lock`].
pub(crate) fn lock_until(file: impl AsFd, deadline: Instant) -> io::Result<bool> {
    lock_by(file, FlockOperation::NonBlockingLockExclusive, deadline)
}

fn lock_by(file: impl AsFd, how: FlockOperation, deadline: Instant) -> io::Result<bool> {
    let mut pause = SHORTEST_PAUSE;
    loop {
        match flock(&file, how) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(false);
                }
                sync::pause(pause.min(left));
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_lock_is_waited_for_as_long_as_was_said_and_taken_when_it_is_free() {
        let directory = tempfile::tempdir().unwrap();
        let [first, second] = [(); 2].map(|()| File::open(directory.path()).unwrap());
        assert!(lock(&first, Duration::ZERO).unwrap());
        let since = Instant::now();
        assert!(!lock(&second, Duration::from_millis(50)).unwrap());
        assert!(since.elapsed() >= Duration::from_millis(50));
        let waiting = std::thread::spawn(move || lock(&second, Duration::from_secs(10)).unwrap());
        drop(first);
        assert!(waiting.join().unwrap());
    }
}
