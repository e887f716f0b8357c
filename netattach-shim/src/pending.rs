//! DEL requests that arrived while no agent answered, recorded as files until an agent carries them out.
//!
//! The CNI executable [`record`]s the request, calls the agent once more, and then reports success: the
//! addresses and devices of the sandbox stay allocated until an agent has carried the request out. The
//! agent first listens, then reads the directory and carries out the recorded requests, and only then
//! serves. Whichever comes first, a request is either sent to the agent or found in the directory, and no
//! recorded request overtakes a later ADD. While it serves, the agent lists the directory again from time
//! to time.
//!
//! A request may be carried out twice; DEL allows that. A request that is older ([`Request::recorded`])
//! than the attachment that it names belongs to an earlier attachment, of a runtime that reuses container
//! ids. The order is determined by the boot and the time since that boot, as the wall clock may have been
//! set in between.
//!
//! There is one file for each container and interface, so a runtime that repeats a request does not add
//! files.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::budget::{self, Exceeded};
use crate::message::CniCall;
use crate::moment::{Moment, boot_id};
use crate::{bounded, durable};

const SUFFIX: &str = ".del.json";
const TEMPORARY_PREFIX: &str = ".writing-";

/// Age at which a temporary file is considered abandoned by its writer, which needs milliseconds.
const STRAY_AGE: Duration = Duration::from_secs(600);

/// A recorded request as listed, without its content.
#[derive(Debug)]
pub struct Pending {
    /// Its file, for [`read`] and [`remove`].
    pub path: PathBuf,
    /// Its container; or why the file cannot be used now.
    pub container: Result<String, UnreadableError>,
}

/// The content of a file. Earlier versions wrote only `call`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The call.
    #[serde(flatten)]
    pub call: CniCall,
    /// When the request was last recorded; `None` if an earlier version recorded it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<Moment>,
}

/// The directory of requests, or one of its files, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PendingError {
    /// The request could not be made durable.
    #[error("record the DEL request in {directory}{}", durable::remedy(source))]
    Record {
        /// The directory.
        directory: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Too many requests wait already.
    #[error("record the DEL request in {directory}")]
    Full {
        /// The directory.
        directory: PathBuf,
        /// The bound.
        source: Exceeded,
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

/// A file in the directory of requests cannot be used.
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

impl UnreadableError {
    /// Whether the content is invalid, so that the file will never be a request.
    pub fn is_no_request(&self) -> bool {
        matches!(self, Self::Parse { .. })
    }

    /// Whether the file no longer exists: another operation has carried the request out.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Records a request durably and returns its file. Replaces an earlier request for the same container and
/// interface.
///
/// # Errors
/// When any step failed, or [`budget::WAITING_DELS`] other requests wait: the caller must then consider the
/// request not recorded.
pub fn record(state_dir: &Path, call: &CniCall) -> Result<PathBuf, PendingError> {
    let directory = directory(state_dir);
    let failed = |source| PendingError::Record { directory: directory.clone(), source };
    make_directory(state_dir, &directory).map_err(failed)?;
    let name = file_name(call);
    let path = directory.join(&name);
    if !path.exists() {
        let waiting = count(&directory).map_err(failed)?;
        budget::WAITING_DELS
            .check(waiting + 1)
            .map_err(|source| PendingError::Full { directory: directory.clone(), source })?;
    }
    write(&path, &name, call).map_err(failed)?;
    Ok(path)
}

/// Lists the recorded requests, oldest first. Other files are skipped; a missing directory means no
/// requests.
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
        // A file that another process has removed meanwhile is skipped.
        let Ok(written) = entry.metadata().and_then(|metadata| metadata.modified()) else { continue };
        match entry.file_name().to_str() {
            Some(name) if name.ends_with(SUFFIX) => found.push((written, entry.path())),
            Some(name) if name.starts_with(TEMPORARY_PREFIX) => sweep(&entry.path(), written),
            _ => {}
        }
    }
    found.sort();
    let known = std::mem::take(&mut *KNOWN.lock().unwrap_or_else(PoisonError::into_inner));
    let (found, known) = with_containers(found, known);
    *KNOWN.lock().unwrap_or_else(PoisonError::into_inner) = known;
    Ok(found)
}

/// The container of each file that the last [`list`] has read, with the modification time of the file.
/// Thousands of requests may wait, and an agent lists them every half minute, so unchanged files are not
/// read again.
static KNOWN: Mutex<Containers> = Mutex::new(Containers::new());

type Containers = BTreeMap<PathBuf, (SystemTime, String)>;

/// Returns the listed files with their containers, and the new content of the cache `known`. Reads only
/// files that are not cached with their present modification time.
fn with_containers(found: Vec<(SystemTime, PathBuf)>, mut known: Containers) -> (Vec<Pending>, Containers) {
    let mut now = Containers::new();
    let of_file = |(written, path): (SystemTime, PathBuf)| {
        // A file is only ever replaced as a whole, by a request of the same container.
        let same = known.remove(&path).filter(|(then, _)| *then == written);
        let container = match same {
            Some((_, container)) => Ok(container),
            None => read(&path).map(|request| variable(&request.call, "CNI_CONTAINERID").to_owned()),
        };
        if let Ok(container) = &container {
            now.insert(path.clone(), (written, container.clone()));
        }
        Pending { path, container }
    };
    let found = found.into_iter().map(of_file).collect();
    (found, now)
}

/// Reads a recorded request as it is now: a newer one may have replaced it since [`list`].
///
/// # Errors
/// The file no longer exists, cannot be read, or is no request.
pub fn read(path: &Path) -> Result<Request, UnreadableError> {
    let content = bounded::read(path, budget::WAITING_DEL.most)
        .map_err(|source| UnreadableError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&content)
        .map_err(|source| UnreadableError::Parse { path: path.to_owned(), source })
}

/// Removes a request that was carried out, or that cannot be. Succeeds if the file no longer exists.
///
/// # Errors
/// When the file cannot be removed, or the removal cannot be made durable.
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

fn variable<'c>(call: &'c CniCall, name: &str) -> &'c str {
    call.variable(name).unwrap_or_default()
}

/// The file name for a container and an interface: a hash, as the identifiers may be too long for a file
/// name.
fn file_name(call: &CniCall) -> String {
    // Neither contains a zero byte: environment variables cannot.
    let key = [variable(call, "CNI_CONTAINERID"), variable(call, "CNI_IFNAME")].join("\0");
    format!("{:x}{SUFFIX}", Sha256::digest(key))
}

/// Creates the directory, durably, for the owner only: configurations may contain credentials.
fn make_directory(state_dir: &Path, directory: &Path) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    durable::sync_directory(state_dir)
}

fn count(directory: &Path) -> io::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(directory)? {
        count += usize::from(entry?.file_name().to_str().is_some_and(|name| name.ends_with(SUFFIX)));
    }
    Ok(count)
}

fn write(path: &Path, name: &str, call: &CniCall) -> io::Result<()> {
    let recorded = Some(Moment::now(&boot_id()?));
    let content = serde_json::to_vec(&Request { call: call.clone(), recorded })?;
    budget::WAITING_DEL.check(content.len()).map_err(io::Error::other)?;
    // If the process dies here, `sweep` removes the temporary file later.
    let temporary = format!("{TEMPORARY_PREFIX}{}-{name}", std::process::id());
    durable::replace(path, &temporary, &content, 0o600)
}

fn sweep(path: &Path, written: SystemTime) {
    if written.elapsed().is_ok_and(|age| age > STRAY_AGE) {
        // The next call of `list` retries.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn call(container_id: &str) -> CniCall {
        let env = [("CNI_CONTAINERID", container_id), ("CNI_IFNAME", "eth0"), ("CNI_ARGS", "A=1;B=2")];
        CniCall {
            env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            stdin: "{\"name\":\"net\"}".to_owned(),
        }
    }

    fn calls(state_dir: &Path) -> Vec<CniCall> {
        list(state_dir).unwrap().into_iter().map(|pending| read(&pending.path).unwrap().call).collect()
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
        let recorded = || read(&paths[2]).unwrap().recorded.unwrap();
        let before = recorded();
        // Some runtimes give the arguments in another order each time.
        let mut again = call("c");
        again.env.insert("CNI_ARGS".into(), "B=2;A=1".into());
        assert_eq!(record(&state_dir, &again).unwrap(), paths[2]);
        assert_eq!(before.boot, recorded().boot);
        assert!(recorded().since_boot > before.since_boot, "repeated, it is newer");
        assert_eq!(calls(&state_dir), [call("b"), call("a"), again.clone()]);
        let containers = list(&state_dir).unwrap().into_iter().map(|pending| pending.container.unwrap());
        assert_eq!(containers.collect::<Vec<_>>(), ["b", "a", "c"]);
        assert_eq!(fs::metadata(&paths[0]).unwrap().permissions().mode() & 0o777, 0o600);

        remove(&paths[1]).unwrap();
        remove(&paths[1]).unwrap();
        assert_eq!(calls(&state_dir), [call("b"), again]);
        assert!(read(&paths[1]).unwrap_err().is_gone());
    }

    #[test]
    fn files_that_are_known_as_they_are_are_not_read_again_and_those_that_are_gone_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|id| record(dir.path(), &call(id)).unwrap());
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let look = |found: &[(u64, &PathBuf)], known| {
            let found = found.iter().map(|(written, path)| (at(*written), (*path).clone())).collect();
            let (found, known) = with_containers(found, known);
            let containers: Vec<Option<String>> = found.into_iter().map(|it| it.container.ok()).collect();
            (containers, known)
        };
        let is = |ids: &[&str]| ids.iter().map(|id| Some((*id).to_owned())).collect::<Vec<_>>();
        let (found, known) = look(&[(1, &a), (1, &b)], Containers::new());
        assert_eq!(found, is(&["a", "b"]));
        fs::write(&a, "no request").unwrap();
        let (found, known) = look(&[(1, &a)], known);
        assert_eq!((found, known.len()), (is(&["a"]), 1));
        // Written anew.
        let (found, known) = look(&[(2, &a), (1, &b)], known);
        assert_eq!(found, [None, Some("b".to_owned())]);
        assert_eq!(known, Containers::from([(b, (at(1), "b".to_owned()))]));
    }

    #[test]
    fn each_interface_of_a_container_has_its_request() {
        let dir = tempfile::tempdir().unwrap();
        let mut other = call("a");
        other.env.insert("CNI_IFNAME".into(), "eth1".into());
        assert_ne!(record(dir.path(), &call("a")).unwrap(), record(dir.path(), &other).unwrap());
    }

    #[test]
    fn no_more_requests_than_the_bound_are_recorded_but_those_that_wait_may_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        record(dir.path(), &call("first")).unwrap();
        for number in 1..budget::WAITING_DELS.most {
            fs::write(dir.path().join(format!("pending/{number}{SUFFIX}")), "").unwrap();
        }
        record(dir.path(), &call("first")).unwrap();
        let refused = record(dir.path(), &call("one more")).unwrap_err();
        assert_eq!(
            crate::error_chain::Chain(&refused).to_string(),
            format!(
                "record the DEL request in {}/pending: DELs that wait for an agent: 4097 requests, and at most 4096 are allowed",
                dir.path().display()
            )
        );
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
        let error = first.container.unwrap_err();
        assert_eq!(error.to_string(), format!("{} is not a recorded DEL request", torn.display()));
        assert!(error.is_no_request());
        assert_eq!((&second.path, second.container.unwrap()), (&path, "a".to_owned()));
        assert!(pending.join(".writing-1-x").exists());
        assert!(!pending.join(".writing-2-x").exists());
    }
}
