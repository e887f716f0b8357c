//! Finds the executable of a plugin.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

use super::DelegateError;

/// Returns the first regular file named `plugin` in the directories of `search`. These paths, and the result, are
/// relative to the root directory that plugins are started in. Symbolic links are followed. The executable bit is not
/// checked: starting the file reports the problem.
pub(super) fn plugin(
    plugin: &str,
    search: &[PathBuf],
    root: Option<&Path>,
) -> Result<PathBuf, DelegateError> {
    if plugin.is_empty() {
        return Err(DelegateError::NoType);
    }
    if plugin.contains(['/', '\0']) || plugin == "." || plugin == ".." {
        return Err(DelegateError::InvalidType { plugin: plugin.to_owned() });
    }
    if search.is_empty() {
        return Err(DelegateError::NoSearchPath { plugin: plugin.to_owned() });
    }
    let mut other = Vec::new();
    for directory in search {
        let path = directory.join(plugin);
        match is_file(&path, root) {
            Some(true) => return Ok(path),
            Some(false) => other.push(path),
            None => {}
        }
    }
    Err(DelegateError::NotFound { plugin: plugin.to_owned(), search: search.to_vec(), not_files: other })
}

/// Whether a path leads to a regular file; `None` if it leads to nothing.
pub(super) fn is_file(path: &Path, root: Option<&Path>) -> Option<bool> {
    let found = match root {
        None => std::fs::metadata(path),
        Some(root) => metadata_below(root, path),
    };
    found.ok().map(|found| found.is_file())
}

/// Returns the metadata that a process with that root directory sees at a path: symlinks are resolved within the
/// root.
fn metadata_below(root: &Path, path: &Path) -> io::Result<Metadata> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = openat(CWD, root, flags | OFlags::DIRECTORY, Mode::empty())?;
    let mut times_left = 16;
    loop {
        match openat2(&root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT) {
            // During any concurrent rename or mount the kernel cannot tell whether `..` has left the root.
            Err(Errno::AGAIN) if times_left > 0 => times_left -= 1,
            found => return File::from(found?).metadata(),
        }
    }
}

/// `CNI_PATH` for the plugin: the directories joined by colons.
pub(super) fn join(search: &[PathBuf]) -> OsString {
    let mut joined = OsString::new();
    for (index, directory) in search.iter().enumerate() {
        if index > 0 {
            joined.push(":");
        }
        joined.push(directory);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: EXE-01, EXE-02, EXE-03.
    #[test]
    fn a_name_that_is_no_file_name_is_refused() {
        let search = [PathBuf::from("/nowhere")];
        assert!(matches!(plugin("", &search, None), Err(DelegateError::NoType)));
        for name in ["a/b", "/bin/sh", "../sh", "..", ".", "a\0"] {
            assert!(
                matches!(plugin(name, &search, None), Err(DelegateError::InvalidType { .. })),
                "{name:?}"
            );
        }
        assert!(matches!(plugin("a", &[], None), Err(DelegateError::NoSearchPath { .. })));
    }

    /// Rows: EXE-04.
    #[test]
    fn the_first_regular_file_in_the_search_path_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| root.path().join(name));
        for directory in [&a, &b, &c] {
            std::fs::create_dir(directory).unwrap();
        }
        std::fs::create_dir(a.join("p")).unwrap();
        std::fs::write(c.join("p"), "").unwrap();
        std::os::unix::fs::symlink(c.join("p"), b.join("p")).unwrap();
        assert_eq!(plugin("p", &[a.clone(), b.clone(), c.clone()], None).unwrap(), b.join("p"));

        let error = plugin("p", std::slice::from_ref(&a), None).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("failed to find plugin \"p\" in path [{0}] ({0}/p is not a regular file)", a.display())
        );
        let error = plugin("q", &[a.clone(), b.clone()], None).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("failed to find plugin \"q\" in path [{} {}]", a.display(), b.display())
        );
    }

    #[test]
    fn plugins_are_those_of_the_root_directory_that_they_are_started_in() {
        let root = tempfile::tempdir().unwrap();
        let inside = |path: &str| root.path().join(path.trim_start_matches('/'));
        for directory in ["/usr/libexec/cni", "/var/lib/k3s/1/bin", "/var/lib/k3s/cni"] {
            std::fs::create_dir_all(inside(directory)).unwrap();
        }
        std::fs::write(inside("/usr/libexec/cni/p"), "").unwrap();
        std::fs::write(inside("/var/lib/k3s/1/bin/cni"), "").unwrap();
        for (target, link) in [
            ("/var/lib/k3s/1", "/var/lib/k3s/current"),
            ("/var/lib/k3s/current/bin/cni", "/var/lib/k3s/cni/flannel"),
            ("../../../../../../../../usr/libexec/cni/p", "/var/lib/k3s/cni/up"),
            ("/bin/sh", "/usr/libexec/cni/outside"),
        ] {
            std::os::unix::fs::symlink(target, inside(link)).unwrap();
        }
        let search = ["/usr/libexec/cni", "/var/lib/k3s/cni"].map(PathBuf::from);
        let found = |name| plugin(name, &search, Some(root.path())).map_err(|error| error.to_string());
        assert_eq!(found("p"), Ok("/usr/libexec/cni/p".into()));
        assert_eq!(found("flannel"), Ok("/var/lib/k3s/cni/flannel".into()));
        assert_eq!(found("up"), Ok("/var/lib/k3s/cni/up".into()));
        let missing = "failed to find plugin \"outside\" in path [/usr/libexec/cni /var/lib/k3s/cni]";
        assert_eq!(found("outside"), Err(missing.to_owned()));
        // One of this process's own root directory is not what would be started.
        assert!(plugin("sh", &["/bin".into()], Some(root.path())).is_err());
        assert_eq!(is_file(Path::new("/usr"), Some(root.path())), Some(false));
    }

    /// Rows: REQ-22.
    #[test]
    fn the_search_path_is_joined_by_colons() {
        assert_eq!(join(&["/a".into(), "/b".into()]), "/a:/b");
        assert_eq!(join(&[]), "");
    }
}
