//! For tests: a file that cannot be opened for the moment, though nothing is wrong with it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// A file that cannot be opened until this value is dropped. Whoever waits for nothing, such as the reader of
/// reservations, gets EAGAIN; others wait, so a test does not read the file meanwhile.
pub(crate) struct Withheld(File);

impl Withheld {
    /// Withholds the file by a lease of the kernel's, see `F_SETLEASE` in fcntl(2).
    ///
    /// # Panics
    /// The file cannot be opened, or is open elsewhere.
    pub(crate) fn new(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        // A child process that another test is just starting may have the file that its writer has closed.
        while let Err(error) = control(&file, libc::F_SETLEASE, libc::F_WRLCK) {
            assert!(error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline, "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The signal for the holder of a lease that another one waits for would end the process: it goes to nobody.
        control(&file, libc::F_SETOWN, 0).unwrap();
        Self(file)
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        // Not by closing alone, as such a child process may have this one, too.
        let _ = control(&self.0, libc::F_SETLEASE, libc::F_UNLCK);
    }
}

fn control(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<()> {
    // SAFETY: these commands take a number and touch no memory of the process.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
