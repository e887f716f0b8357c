//! The former state of a device that an executable moves into a pod: stored in a file, because without an agent there
//! is no record. DEL, a separate process, has no other source for the device's alias and alternative names, which are
//! not moved with it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::attach::AttachError;
use crate::cni::{self, CniError};
use crate::durable;
use crate::flock;
use crate::journal::JournalError;
use crate::netlink::Handle;
use crate::plan::link_group;
use crate::step::Home;

/// A directory in memory: the state is obsolete after the boot as well.
pub(super) const DIRECTORY: &str = "/run/cni/host-device";
/// How long another process may hold the lock while it gives devices back, see [`Left`].
const PATIENCE: Duration = Duration::from_secs(1);

/// The attachment that a device was taken for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Whose {
    /// The configuration's name, by which GC identifies attachments.
    pub(super) network: String,
    pub(super) container: String,
    pub(super) ifname: String,
    /// Path of the sandbox's namespace.
    pub(super) netns: String,
    /// The cookie of that namespace. Absent: the kernel has none (before Linux 5.14).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cookie: Option<u64>,
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    /// The device's former state.
    #[serde(flatten)]
    pub(super) home: Home,
    /// The attachment that it belongs to, with the namespace of its ADD. Absent in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) attachment: Option<Whose>,
}

/// The file for an interface of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeptHome {
    path: PathBuf,
    whose: Whose,
}

impl KeptHome {
    /// Returns the file for the request's attachment on the node whose namespace is the calling thread's. Several
    /// nodes may share one directory, for example if one runs within another. `cookie`: that of the sandbox's
    /// namespace, needed for writing.
    ///
    /// # Errors
    /// The kernel does not report the cookie of the node's namespace.
    pub(super) fn of(request: &cni::Request, cookie: Option<u64>) -> Result<Self, CniError> {
        let node = Handle::open().map_err(|error| AttachError::Open(error.into()))?.netns_cookie();
        let whose = Whose {
            network: request.name.clone(),
            container: request.container_id.clone(),
            ifname: request.ifname.clone(),
            netns: request.netns.clone().unwrap_or_default(),
            cookie,
        };
        Ok(Self::named(Path::new(DIRECTORY), node, whose))
    }

    /// `node`: the cookie of the node's namespace. Container id and interface name are valid parts of a file name.
    pub(super) fn named(directory: &Path, node: u64, whose: Whose) -> Self {
        let Whose { container, ifname, .. } = &whose;
        // A container id may be longer than a file name, and both names may contain the separator.
        let number = link_group(container, ifname);
        let container = container.get(..64).unwrap_or(container);
        let path = directory.join(format!("{}{container}_{ifname}_{number:08x}.json", prefix(node)));
        Self { path, whose }
    }

    /// Stores a device's state before any change.
    ///
    /// # Errors
    /// [`JournalError::Write`]: the file could not be written.
    pub(super) fn write(&self, home: &Home) -> Result<(), JournalError> {
        let Self { path, whose } = self;
        let written = Written { home: home.clone(), attachment: Some(whose.clone()) };
        let write = || -> io::Result<()> {
            std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            durable::replace(
                path,
                &format!(".{name}.new"),
                serde_json::to_string(&written)?.as_bytes(),
                0o600,
            )
        };
        write().map_err(|source| JournalError::Write { path: path.clone(), source })
    }

    /// Returns the attachment that holds the device.
    pub(super) fn whose(&self) -> &Whose {
        &self.whose
    }

    /// Returns what is stored. `None`: nothing, as by the reference plugin, or the file cannot be read; the device is
    /// then given back without its former state.
    pub(super) fn read(&self) -> Option<Written> {
        written(&self.path)
    }

    /// Removes the file once the device has been given back. A file that stays is lost with the boot.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns the prefix of the names of a node's files.
fn prefix(node: u64) -> String {
    format!("{node}_")
}

fn written(path: &Path) -> Option<Written> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// The stored states of all devices of a node with a known attachment. While this exists, no other process gives
/// these devices back, except by a DEL.
#[derive(Debug)]
pub(super) struct Left {
    /// The state of each device, and its file.
    pub(super) devices: Vec<(KeptHome, Home)>,
    /// The directory, locked. `None`: the directory does not exist.
    _turn: Option<File>,
}

impl Left {
    /// Reads the states of the node whose namespace, with that cookie, is the calling thread's.
    ///
    /// # Errors
    /// The directory cannot be read, or another process has locked it for [`PATIENCE`].
    pub(super) fn of_node(node: u64) -> io::Result<Self> {
        Self::of(Path::new(DIRECTORY), node)
    }

    fn of(directory: &Path, node: u64) -> io::Result<Self> {
        let turn = match File::open(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self { devices: Vec::new(), _turn: None });
            }
            turn => turn?,
        };
        if !flock::lock(&turn, PATIENCE)? {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "another process has it locked"));
        }
        let mut devices = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if !name.starts_with(&prefix(node)) || !name.ends_with(".json") {
                continue;
            }
            // A file without an attachment is used by a DEL alone; a file that was removed meanwhile is skipped.
            if let Some(Written { home, attachment: Some(whose) }) = written(&path) {
                devices.push((KeptHome { path, whose }, home));
            }
        }
        Ok(Self { devices, _turn: Some(turn) })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Memory;
    use super::*;
    use crate::attach::Progress;
    use crate::step::{Claim, Output, StepRef};

    fn home() -> Home {
        let written = json!({
            "name": "card", "index": 4, "mtu": 1500, "up": true,
            "alias": "of rack 7", "other_names": ["enp3s0"],
        });
        serde_json::from_value(written).unwrap()
    }

    fn whose(ifname: &str) -> Whose {
        let [network, container, netns] = ["net", "c1", "/run/netns/c1"].map(str::to_owned);
        Whose { network, container, ifname: ifname.to_owned(), netns, cookie: Some(9) }
    }

    #[test]
    fn what_is_left_is_that_of_the_node_of_which_it_is_known_whose_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kept");
        let left = |node| Left::of(&path, node).unwrap().devices;
        assert_eq!(left(7), []);
        let own = KeptHome::named(&path, 7, whose("eth0"));
        own.write(&home()).unwrap();
        KeptHome::named(&path, 77, whose("eth0")).write(&home()).unwrap();
        // As an earlier version has written it, and malformed.
        let earlier = KeptHome::named(&path, 7, whose("eth1"));
        std::fs::write(&earlier.path, serde_json::to_string(&home()).unwrap()).unwrap();
        std::fs::write(path.join("7_torn.json"), "{").unwrap();
        let stored = [Some(whose("eth0")), None].map(|attachment| Some(Written { home: home(), attachment }));
        assert_eq!([own.read(), earlier.read()], stored);
        assert_eq!(left(7), [(own, home())]);
        // One at a time.
        let first = Left::of(&path, 7).unwrap();
        assert_eq!(Left::of(&path, 7).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(first);
        assert_eq!(left(8), []);
    }

    fn claimed(home: Option<Home>) -> Output {
        Output::Claimed(Box::new(Claim {
            device: "card".to_owned(),
            generation: 1,
            home,
            settings: None,
            physical: None,
            representor: None,
            is_back: false,
        }))
    }

    #[test]
    fn what_an_add_has_claimed_is_what_a_del_reads_until_all_is_given_back() {
        let directory = tempfile::tempdir().unwrap();
        let of = |node, ifname| KeptHome::named(&directory.path().join("kept"), node, whose(ifname));
        let memory = |ifname| Memory { kept: Some(of(7, ifname)), ..Memory::default() };
        let mut add = memory("eth0");
        add.done(StepRef(0, 0), claimed(Some(home()))).unwrap();
        assert_eq!(add.home(), Some(&home()));
        let read = [of(7, "eth0"), of(7, "eth1"), of(8, "eth0")].map(|it| it.read());
        let stored = Written { home: home(), attachment: Some(whose("eth0")) };
        assert_eq!(read, [Some(stored), None, None]);
        // A process drives it: nothing of it is moved.
        let mut driven = memory("eth1");
        driven.done(StepRef(0, 0), claimed(None)).unwrap();
        assert_eq!(of(7, "eth1").read(), None);
        // One that has claimed nothing, as its pod has the interface already, does not forget that of the first.
        memory("eth0").forget();
        assert!(of(7, "eth0").read().is_some());
        add.forget();
        assert_eq!(of(7, "eth0").read(), None);
    }

    #[test]
    fn a_device_that_cannot_be_kept_is_not_taken() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("kept");
        std::fs::write(&file, "").unwrap();
        let mut memory = Memory { kept: Some(KeptHome::named(&file, 7, whose("eth0"))), ..Memory::default() };
        let refused = memory.done(StepRef(0, 0), claimed(Some(home())));
        assert!(matches!(refused, Err(JournalError::Write { .. })), "{refused:?}");
        assert!(!memory.outputs().contains_key(&StepRef(0, 0)) && memory.home().is_none());
    }
}
