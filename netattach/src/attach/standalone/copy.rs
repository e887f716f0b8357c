//! Copies the executables that a container runtime calls to a node: from the agent's image into the node's directory
//! of CNI executables.
//!
//! A copy is written to a temporary file, synced, tested, and renamed: at every moment, also after a power failure, a
//! call finds either the previous or the new executable, complete. The previous one is kept as `.NAME.before`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::conflist;
use crate::{durable, flock};

/// A byte string that every netattach executable contains, see `built`.
pub const MARK: &[u8] = b"netattach-commit";

/// How long another installer may hold the lock: it copies and tests about a dozen executables.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a copy may take to answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// The executables in a runtime's directory whose names belong to netattach.
pub const NAMES: [&str; 2] = ["netattach", "netattach-cni"];

/// Returns the name under which the previous executable is kept.
pub fn before(name: &str) -> String {
    format!(".{name}.before")
}

/// Returns the temporary name of a copy.
pub fn fresh(name: &str) -> String {
    format!(".{name}.new")
}

/// The outcome for one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// There was no file with that name.
    Made,
    /// The file existed with the same content.
    Was,
    /// The file had another content, which is kept under [`before`].
    Replaced,
    /// The file belongs to another program and is left alone.
    Left,
}

/// Whether a file of another program with that name is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The name belongs to netattach: the file is replaced.
    Netattach,
    /// The name is a plugin's that other projects use too: their executable is kept.
    Anybody,
}

/// Why an executable could not be copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The executable cannot be read.
    #[error("read {path}")]
    Read {
        /// The executable's path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another installer has the directory locked.
    #[error("another process has locked {0} for more than {patience} s; find them with: fuser {0}", patience = PATIENCE.as_secs())]
    Locked(PathBuf),
    /// A directory has its name.
    #[error("{0} is a directory")]
    Directory(PathBuf),
    /// The copy cannot be written or put into place.
    #[error(
        "write {path}: the directory has to be writable, with room for the executables twice{}",
        durable::not_allowed(source)
    )]
    Write {
        /// The path of the copy.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another program has written the configuration of that name.
    #[error(
        "{0} belongs to another program: remove it, or have the agent write a file of another name (cniConf.name)"
    )]
    Foreign(PathBuf),
    /// The copy cannot be executed on the node; the previous file is unchanged.
    #[error("{path} does not run on this node: {problem}")]
    DoesNotRun {
        /// The copy.
        path: PathBuf,
        /// The test, and its outcome.
        problem: String,
    },
}

/// Copies the executables, both from the directory of `executable`, which is `netattach-cni`, to `directory`; also
/// copies `executable` under the names of the plugins `also`, unless another program has them. Then writes the
/// configuration with which a runtime calls them into `conf_dir`, if given: last, because a runtime may call at once.
/// Concurrent installers wait.
///
/// # Errors
/// See [`CopyError`]. Finished copies stay; another call continues from there.
pub fn copy_all(
    executable: &Path,
    directory: &Path,
    also: &[&str],
    conf_dir: Option<&Path>,
) -> Result<Vec<(PathBuf, Copied)>, CopyError> {
    let _lock = locked(directory, PATIENCE)?;
    let own = NAMES.map(|name| (name, executable.with_file_name(name), Owner::Netattach));
    let own = own.into_iter().map(|(name, from, owner)| match name {
        "netattach-cni" => (name, executable.to_owned(), owner),
        _ => (name, from, owner),
    });
    let others = also.iter().map(|name| (*name, executable.to_owned(), Owner::Anybody));
    let mut copied = Vec::new();
    for (name, from, owner) in own.chain(others) {
        copied.push((directory.join(name), copy(&from, directory, name, owner)?));
        crate::crash_point!("install", name);
    }
    if let Some(conf_dir) = conf_dir {
        copied.push(conflist::write(conf_dir)?);
    }
    Ok(copied)
}

/// Locks the directory until the file is closed.
fn locked(directory: &Path, patience: Duration) -> Result<fs::File, CopyError> {
    let failed = |source| CopyError::Write { path: directory.to_owned(), source };
    let lock = fs::File::open(directory).map_err(failed)?;
    match flock::lock(&lock, patience).map_err(failed)? {
        true => Ok(lock),
        false => Err(CopyError::Locked(directory.to_owned())),
    }
}

/// Copies an executable to `directory` under `name`.
///
/// # Errors
/// See [`CopyError`]; the previous file with that name is unchanged then.
pub fn copy(executable: &Path, directory: &Path, name: &str, owner: Owner) -> Result<Copied, CopyError> {
    let content =
        fs::read(executable).map_err(|source| CopyError::Read { path: executable.to_owned(), source })?;
    let target = directory.join(name);
    let failed = |source| CopyError::Write { path: target.clone(), source };
    let found = match fs::symlink_metadata(&target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(failed(source)),
        Ok(metadata) if metadata.is_dir() => return Err(CopyError::Directory(target)),
        // A symlink may lead to a file that another program replaces.
        Ok(metadata) => {
            Some(if metadata.is_file() { fs::read(&target).map_err(failed)? } else { Vec::new() })
        }
    };
    match &found {
        Some(found) if *found == content => return Ok(Copied::Was),
        Some(found) if owner == Owner::Anybody && !is_ours(found) => return Ok(Copied::Left),
        _ => {}
    }
    // Tested before the rename: the file that is renamed below is the one that was tested.
    let tried = directory.join(fresh(name));
    durable::write_new(&tried, &content, 0o755).map_err(|source| {
        // A full disk should not keep the incomplete copy either.
        let _ = fs::remove_file(&tried);
        failed(source)
    })?;
    crate::crash_point!("install", "written");
    let placed = try_version(&tried, ANSWER_PATIENCE).and_then(|()| {
        if found.is_some() {
            keep(directory, name).map_err(failed)?;
        }
        fs::rename(&tried, &target).and_then(|()| durable::sync_directory(directory)).map_err(failed)
    });
    placed.inspect_err(|_| {
        // The returned error matters more than a leftover copy, which the next one overwrites.
        let _ = fs::remove_file(&tried);
    })?;
    Ok(if found.is_some() { Copied::Replaced } else { Copied::Made })
}

/// Whether an executable, or the target of a symlink, is one of netattach. `false` if the file does not exist.
///
/// # Errors
/// The file cannot be read.
pub fn is_netattach(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(is_ours(&fs::read(path)?)),
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_ours(content: &[u8]) -> bool {
    memchr::memmem::find(content, MARK).is_some()
}

/// Keeps the current file under its backup name, in place of an earlier backup: at every moment a file has the name.
fn keep(directory: &Path, name: &str) -> io::Result<()> {
    let second = directory.join(format!(".{name}.kept"));
    let absent = |removed: io::Result<()>| match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    absent(fs::remove_file(&second))?;
    fs::hard_link(directory.join(name), &second)?;
    crate::crash_point!("install", "linked");
    fs::rename(&second, directory.join(before(name)))?;
    // If an earlier call that ended after this point had kept the file already, the rename has left both names.
    absent(fs::remove_file(&second))?;
    crate::crash_point!("install", "kept");
    Ok(())
}

/// How often a copy is started again while another process still has it open for writing.
const BUSY_TRIES: u32 = 100;
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// Asks the copy which CNI versions it supports, as a runtime does.
fn try_version(path: &Path, patience: Duration) -> Result<(), CopyError> {
    let not_running = |problem: String| CopyError::DoesNotRun { path: path.to_owned(), problem };
    let mut command = Command::new(path);
    // `netattach-cni` acts as the plugin by whose name it is started.
    std::os::unix::process::CommandExt::arg0(&mut command, "loopback");
    command.env_clear().env("CNI_COMMAND", "VERSION").stdin(Stdio::null());
    let mut tries = 0;
    let answer = loop {
        match answer_within(&mut command, patience) {
            // A child process that another thread has just forked has the file open for writing until it executes its
            // program.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && tries < BUSY_TRIES => {
                tries += 1;
                std::thread::sleep(BUSY_PAUSE);
            }
            answer => break answer,
        }
    };
    let answer = answer.map_err(|error| not_running(error.to_string()))?;
    let text = String::from_utf8_lossy(&answer.stdout);
    if answer.status.success() && text.contains("supportedVersions") {
        return Ok(());
    }
    Err(not_running(format!("VERSION: {}, {:?}", answer.status, text.chars().take(200).collect::<String>())))
}

/// Runs a command that prints little; kills a command that takes longer than `patience`.
fn answer_within(command: &mut Command, patience: Duration) -> io::Result<Output> {
    const PAUSE: Duration = Duration::from_millis(1);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let end = Instant::now() + patience;
    while child.try_wait()?.is_none() {
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {patience:?}")));
        }
        std::thread::sleep(PAUSE);
    }
    child.wait_with_output()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;
    use crate::error_chain::Chain;

    /// An executable that answers VERSION, in another version each.
    fn program(directory: &Path, version: u32) -> PathBuf {
        let path = directory.join(format!("program-{version}"));
        let mark = String::from_utf8_lossy(MARK);
        fs::write(&path, format!("#!/bin/sh\n# {mark} {version}\necho '{{\"supportedVersions\": []}}'\n"))
            .unwrap();
        path
    }

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_copy_is_made_once_and_the_one_before_a_new_one_is_kept() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let copied =
            |version| copy(&program(from.path(), version), to.path(), "netattach", Owner::Netattach).unwrap();
        assert_eq!(copied(1), Copied::Made);
        let metadata = fs::metadata(to.path().join("netattach")).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o755);
        assert_eq!(copied(1), Copied::Was);
        assert_eq!(fs::metadata(to.path().join("netattach")).unwrap().ino(), metadata.ino());
        assert_eq!((copied(2), copied(3)), (Copied::Replaced, Copied::Replaced));
        assert_eq!(names(to.path()), [".netattach.before", "netattach"]);
        let content = |name: &str| fs::read_to_string(to.path().join(name)).unwrap();
        assert!(content(".netattach.before").contains(" 2\n") && content("netattach").contains(" 3\n"));
    }

    #[test]
    fn what_does_not_run_takes_no_name() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let good = program(from.path(), 1);
        copy(&good, to.path(), "netattach", Owner::Netattach).unwrap();
        for (content, problem) in [
            ("#!/bin/sh\nexit 1\n", "VERSION: exit status: 1"),
            ("#!/no/such/shell\n", "No such file or directory"),
            ("\u{1}\u{2}", "Exec format error"),
        ] {
            let bad = from.path().join("bad");
            fs::write(&bad, content).unwrap();
            let error = copy(&bad, to.path(), "netattach", Owner::Netattach).unwrap_err();
            assert!(Chain(&error).to_string().contains(problem), "{}", Chain(&error));
            assert_eq!(names(to.path()), ["netattach"]);
            assert_eq!(fs::read(to.path().join("netattach")).unwrap(), fs::read(&good).unwrap());
        }
    }

    #[test]
    fn neither_a_copy_that_does_not_answer_nor_another_installer_is_waited_for_without_end() {
        let brief = Duration::from_millis(50);
        let directory = tempfile::tempdir().unwrap();
        let hangs = directory.path().join("hangs");
        fs::write(&hangs, "#!/bin/sh\nexec sleep 600\n").unwrap();
        fs::set_permissions(&hangs, fs::Permissions::from_mode(0o755)).unwrap();
        let error = try_version(&hangs, brief).unwrap_err();
        let expected = format!("{} does not run on this node: no answer within 50ms", hangs.display());
        assert_eq!(Chain(&error).to_string(), expected);

        let first = locked(directory.path(), brief).unwrap();
        let error = locked(directory.path(), brief).unwrap_err();
        let expected = format!(
            "another process has locked {0} for more than 60 s; find them with: fuser {0}",
            directory.path().display()
        );
        assert_eq!(Chain(&error).to_string(), expected);
        drop(first);
        locked(directory.path(), brief).unwrap();
    }

    #[test]
    fn a_plugin_of_others_stays_and_a_link_to_it_too() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let ours = program(from.path(), 1);
        fs::write(to.path().join("loopback"), "theirs").unwrap();
        symlink("loopback", to.path().join("linked")).unwrap();
        for name in ["loopback", "linked"] {
            assert_eq!(copy(&ours, to.path(), name, Owner::Anybody).unwrap(), Copied::Left);
        }
        assert_eq!(fs::read(to.path().join("loopback")).unwrap(), b"theirs");
        // An earlier one of our own is replaced.
        assert_eq!(copy(&ours, to.path(), "new", Owner::Anybody).unwrap(), Copied::Made);
        assert_eq!(
            copy(&program(from.path(), 2), to.path(), "new", Owner::Anybody).unwrap(),
            Copied::Replaced
        );
    }

    #[test]
    fn a_directory_and_a_place_that_is_not_there_are_named() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let ours = program(from.path(), 1);
        fs::create_dir(to.path().join("netattach")).unwrap();
        let error = copy(&ours, to.path(), "netattach", Owner::Netattach).unwrap_err();
        assert!(matches!(error, CopyError::Directory(_)), "{error}");
        let error = copy(&ours, &to.path().join("absent"), "netattach", Owner::Netattach).unwrap_err();
        assert!(Chain(&error).to_string().contains("No such file or directory"), "{}", Chain(&error));
    }
}
