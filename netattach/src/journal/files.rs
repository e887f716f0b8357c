//! The directory operations that the journal needs. Implemented by the file system, and by memory under the model
//! checker.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use crate::durable;

/// Operations on a directory of records.
pub(crate) trait Files: fmt::Debug + Send + Sync {
    /// Creates an empty file that only its owner can access.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] where the name is taken.
    fn create(&self, name: &str) -> io::Result<Box<dyn Appended>>;
    /// Opens an existing file.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] where there is none.
    fn open(&self, name: &str) -> io::Result<Box<dyn Appended>>;
    /// Removes the name; succeeds if it does not exist.
    ///
    /// # Errors
    /// The system's error.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Gives a file another name: at any moment the file has one of the two names, or briefly both.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if the new name is taken.
    fn give_name(&self, from: &str, name: &str) -> io::Result<()>;
    /// Renames a file and replaces the file with the new name; a power failure leaves one of the two.
    ///
    /// # Errors
    /// The system's error.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Returns all names, in any order.
    ///
    /// # Errors
    /// The system's error.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Makes created and removed names survive a power failure.
    ///
    /// # Errors
    /// The system's error.
    fn sync(&self) -> io::Result<()>;
}

/// An open file.
pub(crate) trait Appended: fmt::Debug + Send {
    /// Reads the whole file.
    ///
    /// # Errors
    /// The system's error.
    fn read(&mut self) -> io::Result<Vec<u8>>;
    /// Returns the file's length in bytes.
    ///
    /// # Errors
    /// The system's error.
    fn length(&self) -> io::Result<u64>;
    /// Writes the bytes at this offset; they survive the death of the process at once.
    ///
    /// # Errors
    /// The system's error; part of it may have been written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Truncates the file.
    ///
    /// # Errors
    /// The system's error.
    fn cut(&mut self, length: u64) -> io::Result<()>;
    /// Opens a second handle to the same open file, for another thread.
    ///
    /// # Errors
    /// The system's error.
    fn again(&self) -> io::Result<Box<dyn Appended>>;
    /// Makes written bytes survive a power failure.
    ///
    /// # Errors
    /// The system's error.
    fn sync(&mut self) -> io::Result<()>;
}

/// A directory of the file system.
#[derive(Debug)]
pub(super) struct OnDisk(pub(super) PathBuf);

impl OnDisk {
    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Files for OnDisk {
    fn create(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        let mut options = OpenOptions::new();
        Ok(Box::new(options.read(true).write(true).create_new(true).mode(0o600).open(self.at(name))?))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Appended>> {
        let open = |write| {
            // The flags avoid waiting for the other end of a FIFO and following a link out of the directory.
            let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
            OpenOptions::new().read(true).write(write).custom_flags(flags).open(self.at(name))
        };
        let file = match open(true) {
            // A file that cannot be written can still be read, so that its sandbox can be removed nevertheless.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => open(false)?,
            other => other?,
        };
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        Ok(Box::new(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.at(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn give_name(&self, from: &str, name: &str) -> io::Result<()> {
        // `rename` would replace a file with the new name.
        std::fs::hard_link(self.at(from), self.at(name))?;
        // The file has its new name. The next start removes a remaining old name.
        let _ = std::fs::remove_file(self.at(from));
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.at(from), self.at(to))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.0)? {
            names.extend(entry?.file_name().to_str().map(str::to_owned));
        }
        Ok(names)
    }

    fn sync(&self) -> io::Result<()> {
        durable::sync_directory(&self.0)
    }
}

impl Appended for File {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn again(&self) -> io::Result<Box<dyn Appended>> {
        Ok(Box::new(self.try_clone()?))
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}
