//! Leases on disk: one file for each, so that they survive restarts and kills of the agent.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Error;
use super::config::Config;
use super::terms::{Server, Terms};
use crate::error_chain::Chain;
use crate::ipam::Owner;
use crate::mac::Mac;
use crate::netns::NetnsId;
use crate::{bounded, durable};

/// The version that is written, and the only one that is read.
const VERSION: u32 = 1;
/// Longest file, in bytes: names, and a configuration within its budget.
const LONGEST: usize = 64 << 10;
const ENDING: &str = ".json";
/// Suffix of the temporary name of a record.
const TEMPORARY: &str = ".new";
/// Most unreadable files that are reported; the log contains all.
const UNREADABLE: usize = 100;

/// A lease, or an address that a server was about to be asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    /// `CNI_CONTAINERID`.
    container_id: String,
    /// Name of the interface in the pod.
    ifname: String,
    pub(super) config: Config,
    pub(super) mac: Mac,
    /// Index of the interface in the pod.
    pub(super) index: u32,
    /// The pod's namespace, by path and id.
    pub(super) netns: PathBuf,
    pub(super) netns_id: NetnsId,
    /// The cookie of that namespace, which no other one has in this boot; absent if the kernel has none, and in
    /// records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) netns_cookie: Option<u64>,
    /// The boot of the node from which the times of [`Terms`] count.
    pub(super) boot: String,
    /// The address, and the server that was asked for it.
    pub(super) address: Ipv4Addr,
    pub(super) server: Server,
    /// Absent until the server has leased the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) terms: Option<Terms>,
    /// The reason why the address must not be used any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lost: Option<String>,
    /// Whether the address has been removed from the pod's interface since.
    #[serde(default)]
    pub(super) is_taken: bool,
}

/// The interface that a lease is for.
pub(super) struct Interface {
    pub(super) mac: Mac,
    pub(super) index: u32,
    pub(super) netns: PathBuf,
    pub(super) netns_id: NetnsId,
    pub(super) netns_cookie: Option<u64>,
}

impl Record {
    /// Makes the record of an address that is about to be requested.
    pub(super) fn new(
        owner: &Owner,
        config: &Config,
        interface: &Interface,
        boot: &str,
        (address, server): (Ipv4Addr, Server),
    ) -> Self {
        let Interface { mac, index, netns, netns_id, netns_cookie } = interface;
        Self {
            version: VERSION,
            container_id: owner.container_id.clone(),
            ifname: owner.ifname.clone(),
            config: config.clone(),
            mac: *mac,
            index: *index,
            netns: netns.clone(),
            netns_id: *netns_id,
            netns_cookie: *netns_cookie,
            boot: boot.to_owned(),
            address,
            server,
            terms: None,
            lost: None,
            is_taken: false,
        }
    }

    pub(super) fn owner(&self) -> Owner {
        Owner { container_id: self.container_id.clone(), ifname: self.ifname.clone() }
    }

    /// Returns the terms while the address may be used; only in the boot that their times refer to.
    pub(super) fn in_force(&self, boot: &str) -> Option<&Terms> {
        self.terms.as_ref().filter(|_| self.lost.is_none() && self.boot == boot)
    }

    /// Returns the reason why the address must be removed from the pod, which still has it.
    pub(super) fn is_to_be_taken(&self, boot: &str) -> Option<&str> {
        self.lost.as_deref().filter(|_| !self.is_taken && self.boot == boot)
    }
}

/// The content of a directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) records: Vec<Record>,
    /// Unreadable files, each with the reason; at most [`UNREADABLE`].
    pub(super) unreadable: Vec<(PathBuf, String)>,
}

/// A directory of records, created with the first one.
#[derive(Debug)]
pub(super) struct Directory(PathBuf);

impl Directory {
    /// Opens the directory, and reads its records. An unreadable file is reported and kept: its lease expires.
    pub(super) fn open(path: &Path) -> Result<(Self, Found), Error> {
        let failed = |source| Error::Read { path: path.to_owned(), source };
        let mut found = Found::default();
        let entries = match fs::read_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok((Self(path.to_owned()), found));
            }
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            // Anything else is the temporary file of a writer that was killed: see `Directory::tidy`.
            if !name.as_encoded_bytes().ends_with(ENDING.as_bytes()) {
                continue;
            }
            match read(&entry.path()) {
                Ok(record) => found.records.push(record),
                Err(error) => {
                    tracing::warn!(
                        file = %entry.path().display(), error = %Chain(&error),
                        "lease by dhcp cannot be read: it is neither renewed nor given back"
                    );
                    if found.unreadable.len() < UNREADABLE {
                        found.unreadable.push((entry.path(), error.to_string()));
                    }
                }
            }
        }
        Ok((Self(path.to_owned()), found))
    }

    /// Removes temporary files of writers that were killed. Must not run concurrently with a writer.
    pub(super) fn tidy(&self) {
        // A missing directory has none, and a file that cannot be removed does no harm.
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.file_name().as_encoded_bytes().ends_with(TEMPORARY.as_bytes()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Writes a record durably.
    pub(super) fn write(&self, record: &Record) -> Result<(), Error> {
        let path = self.path(&record.owner());
        let write = || {
            let content = serde_json::to_vec(record)?;
            fs::create_dir_all(&self.0)?;
            durable::replace(&path, &(name(&record.owner()) + TEMPORARY), &content, 0o600)
        };
        write().map_err(|source| Error::Write { path: path.clone(), source })
    }

    /// Removes a record durably; succeeds if it does not exist.
    pub(super) fn remove(&self, owner: &Owner) -> Result<(), Error> {
        let path = self.path(owner);
        let remove = || match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => durable::sync_directory(&self.0),
        };
        remove().map_err(|source| Error::Write { path: path.clone(), source })
    }

    /// Returns the path of an owner's lease file, whether or not it exists.
    pub(super) fn path(&self, owner: &Owner) -> PathBuf {
        self.0.join(name(owner) + ENDING)
    }
}

/// Returns the file's name without its suffix, as a digest: a container id may be too long for a file name.
fn name(owner: &Owner) -> String {
    let digest =
        Sha256::new().chain_update(&owner.container_id).chain_update([0]).chain_update(&owner.ifname);
    digest.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path) -> io::Result<Record> {
    let content = bounded::read(path, LONGEST)?;
    #[derive(Deserialize)]
    struct Header {
        version: u32,
    }
    let Header { version } = serde_json::from_slice(&content)?;
    if version != VERSION {
        let unknown = format!("version {version}, and this agent reads version {VERSION}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, unknown));
    }
    Ok(serde_json::from_slice(&content)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record() -> Record {
        let owner = Owner { container_id: "c".repeat(250), ifname: "net1".into() };
        let config = json!({
            "network": "lan", "broadcast": true, "wanted": [1, 3], "provided": [[12, "pod"]], "priority": 7,
        });
        let config = serde_json::from_value(config).unwrap();
        let interface = Interface {
            mac: Mac([2; 6]),
            index: 3,
            netns: "/run/netns/pod".into(),
            netns_id: NetnsId { device: 4, inode: 5 },
            netns_cookie: Some(7),
        };
        let server = Server { address: [10, 1, 0, 1].into(), mac: Mac([2, 0, 0, 0, 0, 1]) };
        Record::new(&owner, &config, &interface, "boot", ([10, 1, 0, 7].into(), server))
    }

    fn terms(record: &Record) -> Terms {
        Terms {
            address: record.address,
            prefix: 24,
            server: record.server,
            since: 1000,
            seconds: 60,
            renew: 30_000,
            rebind: 50_000,
        }
    }

    #[test]
    fn a_record_is_there_again_until_it_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("dhcp");
        let (directory, found) = Directory::open(&path).unwrap();
        assert_eq!(found, Found::default());
        let mut record = record();
        directory.write(&record).unwrap();
        record.terms = Some(terms(&record));
        directory.write(&record).unwrap();
        let (directory, found) = Directory::open(&path).unwrap();
        assert_eq!((found.records.as_slice(), found.unreadable), (std::slice::from_ref(&record), Vec::new()));
        for _ in 0..2 {
            directory.remove(&record.owner()).unwrap();
        }
        assert_eq!(Directory::open(&path).unwrap().1, Found::default());
    }

    #[test]
    fn only_terms_of_this_boot_that_are_not_lost_are_in_force() {
        let asked = record();
        let given = Record { terms: Some(terms(&asked)), ..asked.clone() };
        assert_eq!(given.in_force("boot"), Some(&terms(&asked)));
        assert_eq!(given.in_force("another"), None);
        let lost = Record { lost: Some("refused".into()), ..given };
        assert_eq!((lost.in_force("boot"), lost.is_to_be_taken("boot")), (None, Some("refused")));
        assert_eq!(Record { is_taken: true, ..lost }.is_to_be_taken("boot"), None);
        assert_eq!(asked.in_force("boot"), None);
    }

    /// A disk may have lost the end of it, or all of it.
    #[test]
    fn a_record_that_is_cut_off_anywhere_is_none_and_named() {
        let root = tempfile::tempdir().unwrap();
        let (directory, _) = Directory::open(root.path()).unwrap();
        let mut record = record();
        record.terms = Some(terms(&record));
        directory.write(&record).unwrap();
        let path = directory.path(&record.owner());
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let found = Directory::open(root.path()).unwrap().1;
            let named: Vec<_> = found.unreadable.iter().map(|(path, _)| path).collect();
            assert_eq!((found.records.as_slice(), named), (&[][..], vec![&path]), "{length}");
        }
        directory.write(&record).unwrap();
        assert_eq!(Directory::open(root.path()).unwrap().1.records, [record]);
    }

    #[test]
    fn what_cannot_be_read_is_left_and_named() {
        let root = tempfile::tempdir().unwrap();
        for (name, content) in [("a.json", "{"), ("b.json", r#"{"version":2}"#), ("c.json.new", "")] {
            fs::write(root.path().join(name), content).unwrap();
        }
        let (directory, mut found) = Directory::open(root.path()).unwrap();
        found.unreadable.sort();
        let named: Vec<_> =
            found.unreadable.iter().map(|(path, _)| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!((found.records, named), (Vec::new(), vec!["a.json", "b.json"]));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 3);
        directory.tidy();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2, "no writer comes back to the third");
        let newer = read(&root.path().join("b.json")).unwrap_err();
        assert_eq!(newer.to_string(), "version 2, and this agent reads version 1");
    }
}
