//! Finds the executable of a plugin.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::DelegateError;

/// The first regular file named `plugin` in the directories of `search`; symbolic links are followed. The executable
/// bit is not checked: starting the file reports the problem.
pub(super) fn plugin(plugin: &str, search: &[PathBuf]) -> Result<PathBuf, DelegateError> {
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
        if path.is_file() {
            return Ok(path);
        }
        if Path::exists(&path) {
            other.push(path);
        }
    }
    Err(DelegateError::NotFound { plugin: plugin.to_owned(), search: search.to_vec(), not_files: other })
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
        assert!(matches!(plugin("", &search), Err(DelegateError::NoType)));
        for name in ["a/b", "/bin/sh", "../sh", "..", ".", "a\0"] {
            assert!(matches!(plugin(name, &search), Err(DelegateError::InvalidType { .. })), "{name:?}");
        }
        assert!(matches!(plugin("a", &[]), Err(DelegateError::NoSearchPath { .. })));
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
        assert_eq!(plugin("p", &[a.clone(), b.clone(), c.clone()]).unwrap(), b.join("p"));

        let error = plugin("p", std::slice::from_ref(&a)).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("failed to find plugin \"p\" in path [{0}] ({0}/p is not a regular file)", a.display())
        );
        let error = plugin("q", &[a.clone(), b.clone()]).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("failed to find plugin \"q\" in path [{} {}]", a.display(), b.display())
        );
    }

    /// Rows: REQ-22.
    #[test]
    fn the_search_path_is_joined_by_colons() {
        assert_eq!(join(&["/a".into(), "/b".into()]), "/a:/b");
        assert_eq!(join(&[]), "");
    }
}
