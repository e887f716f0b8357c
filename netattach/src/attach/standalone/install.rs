//! Installs the plugins' names in a directory of CNI executables.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::copy::is_netattach;
use super::has_state_elsewhere;

/// The outcome for one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Installed {
    /// The name is a new link to the executable.
    Made,
    /// The name was a link to the executable already.
    Was,
    /// Another file of that name was replaced.
    Replaced,
    /// Another program has the name, and keeps it: only that one can detach the pods that it has attached.
    Left,
}

/// Why the names could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// A path cannot be resolved.
    #[error("find {path}")]
    Find {
        /// The directory or the executable.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Files of other programs have the names; nothing was changed.
    #[error("{} would be overwritten; --force replaces it", list(.0))]
    Foreign(Vec<PathBuf>),
    /// A name belongs to a directory.
    #[error("{path} is a directory")]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// A name could not be examined.
    #[error("look at {path}")]
    Look {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A link could not be made.
    #[error("make link {path}")]
    Link {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Makes each of `names` in `directory` a link to `executable`; relative when it is in the same directory, so
/// that the directory can be mounted elsewhere. Running executables and concurrent callers never see a name
/// missing.
///
/// A name whose program keeps state of pods (`sriov`: the former settings of their VFs) is left to the other program
/// that has it.
///
/// # Errors
/// [`InstallError::Foreign`] if another file has one of the other names, or another version of netattach any, and
/// `force` is not set.
pub fn install<'n>(
    directory: &Path,
    executable: &Path,
    names: impl Iterator<Item = &'n str>,
    force: bool,
) -> Result<Vec<(&'n str, Installed)>, InstallError> {
    let find = |path: &Path| {
        fs::canonicalize(path).map_err(|source| InstallError::Find { path: path.to_owned(), source })
    };
    let (directory, executable) = (find(directory)?, find(executable)?);
    let target = match executable.strip_prefix(&directory) {
        Ok(beside) if beside.components().count() == 1 => beside.to_owned(),
        _ => executable.clone(),
    };
    let mut found = Vec::new();
    for name in names {
        let path = directory.join(name);
        let is = look(&path, &executable)?;
        let is_left = is == Found::Foreign && has_state_elsewhere(name) && is_of_others(&path)?;
        found.push((name, if is_left { Found::Left } else { is }));
    }
    let foreign: Vec<_> = found
        .iter()
        .filter(|(_, found)| *found == Found::Foreign)
        .map(|(name, _)| directory.join(name))
        .collect();
    if !foreign.is_empty() && !force {
        return Err(InstallError::Foreign(foreign));
    }
    let mut installed = Vec::new();
    for (name, found) in found {
        let path = directory.join(name);
        let became = match found {
            Found::Ours => Installed::Was,
            Found::Nothing => Installed::Made,
            Found::Foreign => Installed::Replaced,
            Found::Left => Installed::Left,
        };
        if matches!(became, Installed::Made | Installed::Replaced) {
            link(&directory, name, &target).map_err(|source| InstallError::Link { path, source })?;
        }
        installed.push((name, became));
    }
    Ok(installed)
}

#[derive(PartialEq)]
enum Found {
    Nothing,
    Ours,
    Foreign,
    /// Foreign, and not to be replaced.
    Left,
}

fn look(path: &Path, executable: &Path) -> Result<Found, InstallError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
        Err(source) => Err(InstallError::Look { path: path.to_owned(), source }),
        Ok(metadata) if metadata.is_dir() => Err(InstallError::Directory { path: path.to_owned() }),
        Ok(_) => {
            let is_ours = fs::canonicalize(path).is_ok_and(|resolved| resolved == executable);
            Ok(if is_ours { Found::Ours } else { Found::Foreign })
        }
    }
}

/// Whether a file, or what a link leads to, is another program's. Another version of netattach reads the same state,
/// and a link that leads nowhere is no program.
fn is_of_others(path: &Path) -> Result<bool, InstallError> {
    let is_of_others = || -> io::Result<bool> { Ok(path.try_exists()? && !is_netattach(path)?) };
    is_of_others().map_err(|source| InstallError::Look { path: path.to_owned(), source })
}

fn link(directory: &Path, name: &str, target: &Path) -> io::Result<()> {
    let fresh = directory.join(format!(".{name}.netattach-{}", std::process::id()));
    symlink(target, &fresh)?;
    fs::rename(&fresh, directory.join(name)).inspect_err(|_| {
        // The returned error matters more than a leftover temporary link.
        let _ = fs::remove_file(&fresh);
    })
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::copy::MARK;
    use super::*;

    fn executable(directory: &Path) -> PathBuf {
        let path = directory.join("netattach-cni");
        fs::write(&path, "").unwrap();
        path
    }

    fn run(directory: &Path, executable: &Path, force: bool) -> Result<Vec<Installed>, InstallError> {
        let names = ["bridge", "host-local"];
        let installed = install(directory, executable, names.into_iter(), force)?;
        Ok(installed.into_iter().map(|(_, became)| became).collect())
    }

    #[test]
    fn links_beside_the_executable_are_relative_and_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let executable = executable(dir.path());
        assert_eq!(run(dir.path(), &executable, false).unwrap(), [Installed::Made; 2]);
        assert_eq!(fs::read_link(dir.path().join("bridge")).unwrap(), Path::new("netattach-cni"));
        assert_eq!(run(dir.path(), &executable, false).unwrap(), [Installed::Was; 2]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn links_elsewhere_name_the_whole_path() {
        let (home, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let executable = executable(home.path());
        run(dir.path(), &executable, false).unwrap();
        let target = fs::read_link(dir.path().join("host-local")).unwrap();
        assert_eq!(target, fs::canonicalize(executable).unwrap());
    }

    #[test]
    fn foreign_files_are_replaced_only_by_force_and_otherwise_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let executable = executable(dir.path());
        let theirs = dir.path().join("host-local");
        fs::write(&theirs, "theirs").unwrap();
        let error = run(dir.path(), &executable, false).unwrap_err();
        assert!(matches!(&error, InstallError::Foreign(paths) if paths.len() == 1), "{error}");
        assert!(!dir.path().join("bridge").exists());
        assert_eq!(fs::read(&theirs).unwrap(), b"theirs");
        assert_eq!(run(dir.path(), &executable, true).unwrap(), [Installed::Made, Installed::Replaced]);
        assert_eq!(fs::canonicalize(theirs).unwrap(), fs::canonicalize(executable).unwrap());
    }

    #[test]
    fn sriov_cni_keeps_its_name_whatever_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let executable = executable(dir.path());
        let names = ["bridge", "sriov"];
        let run = |force| {
            let installed = install(dir.path(), &executable, names.into_iter(), force).unwrap();
            installed.into_iter().map(|(_, became)| became).collect::<Vec<_>>()
        };
        let theirs = dir.path().join("sriov");
        fs::write(&theirs, "theirs").unwrap();
        assert_eq!(run(false), [Installed::Made, Installed::Left]);
        assert_eq!(run(true), [Installed::Was, Installed::Left]);
        assert_eq!(fs::read(&theirs).unwrap(), b"theirs");
        fs::remove_file(&theirs).unwrap();
        assert_eq!(run(false), [Installed::Was, Installed::Made]);
        assert_eq!(run(true), [Installed::Was; 2]);
    }

    /// It reads the same records. Otherwise the name would stay with a version that is removed some day.
    #[test]
    fn a_sriov_of_another_version_of_netattach_is_replaced_like_the_other_names() {
        let (dir, before) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let executable = executable(dir.path());
        let earlier = before.path().join("netattach-cni");
        let theirs = dir.path().join("sriov");
        for is_there in [true, false] {
            fs::write(&earlier, MARK).unwrap();
            symlink(&earlier, &theirs).unwrap();
            if !is_there {
                fs::remove_file(&earlier).unwrap();
            }
            let run = |force| install(dir.path(), &executable, ["sriov"].into_iter(), force);
            assert!(matches!(run(false), Err(InstallError::Foreign(_))));
            assert_eq!(run(true).unwrap(), [("sriov", Installed::Replaced)]);
            assert_eq!(fs::read_link(&theirs).unwrap(), Path::new("netattach-cni"));
            fs::remove_file(&theirs).unwrap();
        }
    }

    #[test]
    fn a_directory_is_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let executable = executable(dir.path());
        fs::create_dir(dir.path().join("bridge")).unwrap();
        assert!(matches!(run(dir.path(), &executable, true), Err(InstallError::Directory { .. })));
    }
}
