//! Reads files at paths chosen by others: whole files, without blocking and with a size limit.
//!
//! Such a path may be a FIFO, which blocks its reader forever, or an endless device. Therefore the file is
//! opened without blocking, only regular files are read, and only up to the limit.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// How a file is opened to be read.
const READING: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Reads a regular file of at most `most` bytes. Follows symbolic links.
///
/// # Errors
/// The file does not exist, is not a regular file, is too long, or cannot be read.
pub fn read(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    // The type is checked before opening: opening a device may have side effects.
    check_kind(FileType::from_raw_mode(rustix::fs::stat(path)?.st_mode))?;
    whole(rustix::fs::openat(CWD, path, READING, Mode::empty())?, most)
}

/// Reads UTF-8 text, as [`read`] does in a process with that root directory: symbolic links are resolved
/// within it.
///
/// # Errors
/// As [`read_text`], or the kernel has no `openat2` (Linux 5.6).
pub fn read_text_below(root: &Path, path: &Path, most: usize) -> io::Result<String> {
    let only_path = OFlags::PATH | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, root, only_path | OFlags::DIRECTORY, Mode::empty())?;
    let found = open_below(&root, path, only_path)?;
    check_kind(FileType::from_raw_mode(rustix::fs::fstat(found)?.st_mode))?;
    text(whole(open_below(&root, path, READING)?, most)?)
}

fn open_below(root: impl AsFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let mut times_left = 16;
    loop {
        match rustix::fs::openat2(&root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT) {
            // During any concurrent rename or mount the kernel cannot tell whether `..` has left the root.
            Err(Errno::AGAIN) if times_left > 0 => times_left -= 1,
            opened => return opened,
        }
    }
}

fn whole(file: OwnedFd, most: usize) -> io::Result<Vec<u8>> {
    // The file may have been replaced since `stat`.
    let stat = rustix::fs::fstat(&file)?;
    check_kind(FileType::from_raw_mode(stat.st_mode))?;
    // The file may grow while it is read.
    let mut content = Vec::with_capacity(usize::try_from(stat.st_size).unwrap_or(0).min(most) + 1);
    File::from(file).take(most as u64 + 1).read_to_end(&mut content)?;
    if content.len() > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {most} bytes")));
    }
    Ok(content)
}

/// Reads UTF-8 text, as [`read`].
///
/// # Errors
/// As [`read`], or the content is not UTF-8.
pub fn read_text(path: &Path, most: usize) -> io::Result<String> {
    text(read(path, most)?)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Whether the error means that the path names no file: it does not exist, or a part of the path or the
/// name rules it out. For callers that want to remove the file.
pub fn is_absent(error: &io::Error) -> bool {
    [Errno::NOENT, Errno::NOTDIR, Errno::NAMETOOLONG, Errno::LOOP]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn check_kind(kind: FileType) -> io::Result<()> {
    match kind {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Errno::ISDIR.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "is no regular file")),
    }
}

/// Pads a text with white space to a length: for tests of limits.
#[doc(hidden)]
pub fn padded(text: &str, bytes: usize) -> String {
    format!("{text}{}", " ".repeat(bytes - text.len()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn below_a_root_directory_links_stay_within_it() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        std::fs::create_dir_all(root.join("run")).unwrap();
        std::fs::write(directory.path().join("outside"), "outside").unwrap();
        std::fs::write(root.join("run/inside"), "inside").unwrap();
        symlink("/run/inside", root.join("absolute")).unwrap();
        symlink("../../run/inside", root.join("upwards")).unwrap();
        symlink(directory.path().join("outside"), root.join("escape")).unwrap();
        symlink("../outside", root.join("above")).unwrap();
        let read = |path: &str| read_text_below(&root, Path::new(path), 8).map_err(|error| error.kind());
        for path in ["/run/inside", "run/inside", "/absolute", "/upwards", "/../run/inside"] {
            assert_eq!(read(path).as_deref(), Ok("inside"), "{path}");
        }
        for path in ["/escape", "/above", "/../outside"] {
            assert_eq!(read(path), Err(io::ErrorKind::NotFound), "{path}");
        }
        assert_eq!(read("/run"), Err(io::ErrorKind::IsADirectory));
    }

    #[test]
    fn regular_files_are_read_up_to_the_bound_and_nothing_else_is() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let message = |name: &str| read(&at(name), 4).map_err(|error| error.to_string());
        std::fs::write(at("fits"), "1234").unwrap();
        std::fs::write(at("long"), "12345").unwrap();
        symlink("fits", at("link")).unwrap();
        symlink("loop", at("loop")).unwrap();
        symlink("/dev/zero", at("zeros")).unwrap();
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, mode, 0).unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        assert_eq!(message("fits"), Ok(b"1234".to_vec()));
        assert_eq!(message("link"), Ok(b"1234".to_vec()));
        assert_eq!(message("long"), Err("longer than 4 bytes".to_owned()));
        for name in ["fifo", "zeros"] {
            assert_eq!(message(name), Err("is no regular file".to_owned()), "{name}");
        }
        assert_eq!(message("directory"), Err("Is a directory (os error 21)".to_owned()));
        let nothing = ["absent", "fits/below", "loop", &"x".repeat(300)];
        for name in nothing {
            assert!(is_absent(&read(&at(name), 4).unwrap_err()), "{name}");
        }
        for name in ["fifo", "directory", "long"] {
            assert!(!is_absent(&read(&at(name), 4).unwrap_err()), "{name}");
        }
    }
}
