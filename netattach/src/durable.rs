//! Files that are there whole or not at all, also after a loss of power.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Puts `content` in place of the file at `path`, whose permissions are `mode` then: written to `temporary` beside it,
/// synced, renamed, and the directory synced. Readers see the old file or the new one. A temporary file that cannot
/// be removed after a failure stays; the next call of the same name overwrites it.
///
/// # Errors
/// What the system said. Only the last sync can fail with the new file in place.
pub(crate) fn replace(path: &Path, temporary: &str, content: &[u8], mode: u32) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let temporary = directory.join(temporary);
    let written = write(&temporary, content, mode).and_then(|()| {
        crate::crash_point!("replace", "written");
        fs::rename(&temporary, path)
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    sync_directory(directory)
}

fn write(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Makes what was created, renamed or removed in a directory survive a loss of power.
pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
