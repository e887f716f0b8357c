//! The looks at what every attachment on the node needs: the dataplane, the journal, descriptors.

use std::io;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use super::look::{Seen, not_available};
use super::{ALL_PINNED, Health};
use crate::descriptors;
use crate::durable::MAKE_ROOM;

/// An ADD needs some twenty descriptors; with fewer left than this, ADDs fail.
const FEWEST_DESCRIPTORS: u64 = 32;
/// The remedy for too few descriptors. The list of open files shows whether the limit is too low or
/// descriptors leak.
const RAISE_LIMIT: &str = "raise the limit of open files (LimitNOFILE of the unit, or of the container runtime's unit), and see \
                           what is open: ls -l /proc/PID/fd";
/// Bytes that a check writes into the journal's directory: more than any inode stores inline.
const PROBE: usize = 4096;

impl Health {
    pub(super) fn look_at_dataplane(&self) -> Seen {
        self.engine.check_dataplane().map(|()| ALL_PINNED.to_owned())
    }

    /// Checks that a record could be written, using an unnamed temporary file.
    pub(super) fn look_at_journal(&self) -> Seen {
        let directory = self.engine.journal_directory();
        let written = std::fs::OpenOptions::new()
            .write(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::TMPFILE.bits().cast_signed())
            .open(directory)
            .and_then(|mut file| file.write_all(&[0; PROBE]));
        match written {
            // The file system has no unnamed files; its problems appear when a record is written.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(directory.display().to_string()),
            Err(error) => {
                Err(not_available(format!("journal {}: {error}; {MAKE_ROOM}", directory.display())))
            }
            Ok(()) => Ok(directory.display().to_string()),
        }
    }

    pub(super) fn look_at_descriptors(&self) -> Seen {
        let (open, most) = descriptors::used()
            .map_err(|error| not_available(format!("descriptors cannot be counted: {error}")))?;
        let used = format!("{open} of {most} are open");
        if most.saturating_sub(open) < FEWEST_DESCRIPTORS {
            return Err(not_available(format!("descriptors: {used}; {RAISE_LIMIT}")));
        }
        Ok(used)
    }
}
