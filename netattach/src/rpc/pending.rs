//! DEL requests that came while no agent answered, recorded as files until an agent carries them out.
//!
//! The CNI executable [`record`]s the request and only then tries the agent once more. The agent therefore first
//! listens, then reads the directory and carries out the recorded requests, and only then serves: a request is either
//! sent or found, whichever of the two came first, and none overtakes a later ADD. A request may be carried out twice;
//! DEL allows that. One that is older ([`Pending::recorded`]) than the attachment it names was meant for an earlier
//! attachment, of a runtime that reuses container ids. Their order is determined by the boot and the time since then:
//! the wall clock may have been set meanwhile.
//!
//! The file name is derived from the content, so that a runtime that repeats a request does not add files.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::message::CniCall;
use crate::durable;
use crate::moment::{Moment, boot_id};

const SUFFIX: &str = ".del.json";
const TEMPORARY_PREFIX: &str = ".writing-";

/// A temporary file of this age has lost its writer, which needs milliseconds.
const STRAY_AGE: Duration = Duration::from_secs(600);

/// A recorded request.
#[derive(Debug)]
pub struct Pending {
    /// Its file, for [`remove`].
    pub path: PathBuf,
    /// When it was last recorded; `None` for one of an earlier version, or one that cannot be read.
    pub recorded: Option<Moment>,
    /// The request; or why the file is invalid, in which case there is nothing to carry out.
    pub call: Result<CniCall, UnreadableError>,
}

/// The content of a file. Earlier versions wrote only the request.
#[derive(Serialize, Deserialize)]
struct Recorded {
    #[serde(flatten)]
    call: CniCall,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    recorded: Option<Moment>,
}

/// The directory of requests, or one of its files, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PendingError {
    /// The request could not be made durable.
    #[error("record the DEL request in {directory}")]
    Record {
        /// The directory.
        directory: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The directory cannot be read.
    #[error("read the recorded DEL requests in {directory}")]
    List {
        /// The directory.
        directory: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A completed request cannot be removed.
    #[error("remove the recorded DEL request {path}")]
    Remove {
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A file in the directory of requests is invalid.
#[derive(Debug, thiserror::Error)]
pub enum UnreadableError {
    /// The file cannot be read.
    #[error("read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The content is not a request.
    #[error("{path} is not a recorded DEL request")]
    Parse {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
}

/// Makes a request durable and returns its file.
///
/// # Errors
/// When any step failed: the request must then be considered not recorded.
pub fn record(state_dir: &Path, call: &CniCall) -> Result<PathBuf, PendingError> {
    let directory = directory(state_dir);
    match write(&directory, call) {
        Ok(path) => Ok(path),
        Err(source) => Err(PendingError::Record { directory, source }),
    }
}

/// The recorded requests, oldest first. Files of other kinds are skipped; a missing directory means no requests.
///
/// # Errors
/// When the directory cannot be read.
pub fn list(state_dir: &Path) -> Result<Vec<Pending>, PendingError> {
    let directory = directory(state_dir);
    let failed = |source| PendingError::List { directory: directory.clone(), source };
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        // A file that has disappeared is ignored.
        let Ok(written) = entry.metadata().and_then(|metadata| metadata.modified()) else { continue };
        match entry.file_name().to_str() {
            Some(name) if name.ends_with(SUFFIX) => found.push((written, entry.path())),
            Some(name) if name.starts_with(TEMPORARY_PREFIX) => sweep(&entry.path(), written),
            _ => {}
        }
    }
    found.sort();
    let read = |(_, path): (SystemTime, PathBuf)| match read(&path) {
        Ok(Recorded { call, recorded }) => Pending { path, recorded, call: Ok(call) },
        Err(error) => Pending { path, recorded: None, call: Err(error) },
    };
    Ok(found.into_iter().map(read).collect())
}

/// Removes a request that was carried out, or that cannot be carried out. Succeeds if it is already gone.
///
/// # Errors
/// When the file cannot be removed, or its removal not be made durable.
pub fn remove(path: &Path) -> Result<(), PendingError> {
    let failed = |source| PendingError::Remove { path: path.to_owned(), source };
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => {
            crate::crash_point!("pending", "removed");
            path.parent().map_or(Ok(()), durable::sync_directory).map_err(failed)
        }
    }
}

fn directory(state_dir: &Path) -> PathBuf {
    state_dir.join("pending")
}

fn write(directory: &Path, call: &CniCall) -> io::Result<PathBuf> {
    let name = format!("{:x}", Sha256::digest(serde_json::to_vec(call)?));
    let recorded = Some(Moment::now(&boot_id()?));
    let content = serde_json::to_vec(&Recorded { call: call.clone(), recorded })?;
    // Only for the owner: configurations may contain credentials.
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let path = directory.join(format!("{name}{SUFFIX}"));
    // Removed later if it is left behind.
    let temporary = format!("{TEMPORARY_PREFIX}{}-{name}", std::process::id());
    durable::replace(&path, &temporary, &content, 0o600)?;
    Ok(path)
}

fn read(path: &Path) -> Result<Recorded, UnreadableError> {
    let failed = |source| UnreadableError::Read { path: path.to_owned(), source };
    let mut content = Vec::new();
    // Does not wait for the other end of a FIFO.
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(failed(io::Error::other("not a regular file")));
    }
    file.read_to_end(&mut content).map_err(failed)?;
    serde_json::from_slice(&content)
        .map_err(|source| UnreadableError::Parse { path: path.to_owned(), source })
}

fn sweep(path: &Path, written: SystemTime) {
    if written.elapsed().is_ok_and(|age| age > STRAY_AGE) {
        // The next start retries.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn call(container_id: &str) -> CniCall {
        CniCall {
            env: [("CNI_CONTAINERID".to_owned(), container_id.to_owned())].into(),
            stdin: "{\"name\":\"net\"}".to_owned(),
        }
    }

    fn calls(state_dir: &Path) -> Vec<CniCall> {
        list(state_dir).unwrap().into_iter().map(|pending| pending.call.unwrap()).collect()
    }

    #[test]
    fn requests_are_kept_once_in_order_and_until_removed() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("state");
        assert_eq!(calls(&state_dir), []);
        let paths = ["b", "a", "c"].map(|id| record(&state_dir, &call(id)).unwrap());
        for (age, path) in [30, 20, 10].into_iter().zip(&paths) {
            let then = SystemTime::now() - Duration::from_secs(age);
            File::open(path).unwrap().set_modified(then).unwrap();
        }
        let recorded = || list(&state_dir).unwrap()[2].recorded.clone().unwrap();
        let before = recorded();
        assert_eq!(record(&state_dir, &call("c")).unwrap(), paths[2]);
        assert_eq!(before.boot, recorded().boot);
        assert!(recorded().since_boot > before.since_boot, "repeated, it is newer");
        assert_eq!(calls(&state_dir), [call("b"), call("a"), call("c")]);
        assert_eq!(fs::metadata(&paths[0]).unwrap().permissions().mode() & 0o777, 0o600);

        remove(&paths[1]).unwrap();
        remove(&paths[1]).unwrap();
        assert_eq!(calls(&state_dir), [call("b"), call("c")]);
    }

    #[test]
    fn torn_and_foreign_files_do_not_hide_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = record(dir.path(), &call("a")).unwrap();
        let pending = path.parent().unwrap();
        let torn = pending.join("0.del.json");
        fs::write(&torn, "{\"env\":{},").unwrap();
        File::open(&torn).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        fs::write(pending.join("README"), "by hand").unwrap();
        fs::write(pending.join(".writing-1-x"), "being written").unwrap();
        fs::write(pending.join(".writing-2-x"), "abandoned").unwrap();
        File::open(pending.join(".writing-2-x")).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();

        let [first, second] = <[Pending; 2]>::try_from(list(dir.path()).unwrap()).unwrap();
        assert_eq!(
            first.call.unwrap_err().to_string(),
            format!("{} is not a recorded DEL request", torn.display())
        );
        assert_eq!((&second.path, second.call.unwrap()), (&path, call("a")));
        assert!(pending.join(".writing-1-x").exists());
        assert!(!pending.join(".writing-2-x").exists());
    }
}
