//! Files that are written completely or not at all, also after a loss of power.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Advice for a file system that is full or read-only.
pub const MAKE_ROOM: &str = "make room there, or mount it writable";

/// Advice for a directory that this process may not write to. In an agent's pod that includes root, which
/// has no `CAP_DAC_OVERRIDE` there.
pub const MAKE_OWN: &str = "its directory has to be root's (chown root), as an agent's pod has no CAP_DAC_OVERRIDE, and SELinux has to let it";

/// Returns [`MAKE_ROOM`] or [`MAKE_OWN`] if the error has that cause, to be appended to a message; empty
/// for any other error.
pub fn remedy(error: &io::Error) -> String {
    use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    match error.kind() {
        QuotaExceeded | ReadOnlyFilesystem | StorageFull => format!(": {MAKE_ROOM}"),
        _ => not_allowed(error),
    }
}

/// Returns [`MAKE_OWN`] if permission was denied; empty for any other error.
pub fn not_allowed(error: &io::Error) -> String {
    let is_refused = error.raw_os_error() == Some(rustix::io::Errno::ACCESS.raw_os_error());
    if is_refused { format!(": {MAKE_OWN}") } else { String::new() }
}

/// Atomically replaces the file at `path` by `content` with permissions `mode`: writes `temporary` in the
/// same directory, syncs it, renames it, and syncs the directory. Readers see the old file or the new one.
/// If the temporary file cannot be removed after a failure, it stays; the next call with the same name
/// overwrites it.
///
/// # Errors
/// The system's error. Only a failure of the last sync leaves the new file at `path`.
pub fn replace(path: &Path, temporary: &str, content: &[u8], mode: u32) -> io::Result<()> {
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

/// Writes a new file with exactly these permissions and syncs it. First removes a file of that name, left
/// by a writer that was killed.
///
/// # Errors
/// The system's error.
pub fn write_new(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    // Independent of the caller's umask.
    file.set_permissions(PermissionsExt::from_mode(mode))?;
    file.write_all(content)?;
    file.sync_all()
}

fn write(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Makes creations, renames and removals in a directory durable.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn what_an_operator_can_do_about_a_failure_is_said_with_it() {
        let of = |errno: Errno| remedy(&errno.into());
        assert_eq!(of(Errno::NOSPC), format!(": {MAKE_ROOM}"));
        assert_eq!(of(Errno::ROFS), format!(": {MAKE_ROOM}"));
        assert_eq!(of(Errno::ACCESS), format!(": {MAKE_OWN}"));
        assert_eq!(of(Errno::NOENT), "");
        assert_eq!(not_allowed(&Errno::ACCESS.into()), format!(": {MAKE_OWN}"));
        assert_eq!(not_allowed(&Errno::NOSPC.into()), "");
    }
}
