//! How a device was on the node that an executable moves into a pod: in a file, as without an agent there is no record. Nothing
//! else tells the DEL, a process of its own, the device's alias and other names, which do not go to the pod with it.

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

/// Of memory: what files say ends with the boot as well.
pub(super) const DIRECTORY: &str = "/run/cni/host-device";
/// How long another process may be at giving back what is left, see [`Left`].
const PATIENCE: Duration = Duration::from_secs(1);

/// The attachment that a device was taken for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Whose {
    /// The configuration's name, by which GC says which attachments there are.
    pub(super) network: String,
    pub(super) container: String,
    pub(super) ifname: String,
    /// Path of the sandbox's namespace.
    pub(super) netns: String,
    /// Its cookie. Absent: the kernel has none (before Linux 5.14).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cookie: Option<u64>,
}

/// What a file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Written {
    #[serde(flatten)]
    home: Home,
    /// Absent in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attachment: Option<Whose>,
}

/// The file for an interface of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeptHome {
    path: PathBuf,
    whose: Whose,
}

impl KeptHome {
    /// Of the node that is the calling thread's namespace. Several may have one directory, as where one runs in another. `cookie`:
    /// that of the sandbox's namespace, for who writes the file.
    ///
    /// # Errors
    /// The kernel does not say which namespace the node's is.
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

    /// `node`: the cookie of the node's namespace. Container and interface are parts of a name as they have been read.
    fn named(directory: &Path, node: u64, whose: Whose) -> Self {
        let Whose { container, ifname, .. } = &whose;
        // A container's id may be longer than a file's name, and either may have the character between them.
        let number = link_group(container, ifname);
        let container = container.get(..64).unwrap_or(container);
        let path = directory.join(format!("{}{container}_{ifname}_{number:08x}.json", prefix(node)));
        Self { path, whose }
    }

    /// Keeps how a device is, before it is changed.
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

    /// The attachment that has the device.
    pub(super) fn whose(&self) -> &Whose {
        &self.whose
    }

    /// How the device was. `None`: nobody has kept it, as the reference does not, or the file cannot be read; the device goes back
    /// without it.
    pub(super) fn read(&self) -> Option<Home> {
        Some(written(&self.path)?.home)
    }

    /// To be called once nothing is left to be given back. A file that stays goes with the boot.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What the names of the files of a node begin with.
fn prefix(node: u64) -> String {
    format!("{node}_")
}

fn written(path: &Path) -> Option<Written> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// What is kept of all devices of a node, and known whose: no other process gives them back meanwhile, but for a DEL.
#[derive(Debug)]
pub(super) struct Left {
    /// How each was, and its file.
    pub(super) devices: Vec<(KeptHome, Home)>,
    /// The directory, locked. `None`: there is none.
    _turn: Option<File>,
}

impl Left {
    /// Of the node that is the calling thread's namespace, with that cookie.
    ///
    /// # Errors
    /// The directory cannot be read, or another process has it locked for [`PATIENCE`].
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
            // Without its attachment it goes by a DEL alone, as does one that has gone meanwhile.
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
        // As an earlier version has written it, and as nobody has.
        let earlier = KeptHome::named(&path, 7, whose("eth1"));
        std::fs::write(&earlier.path, serde_json::to_string(&home()).unwrap()).unwrap();
        std::fs::write(path.join("7_torn.json"), "{").unwrap();
        assert_eq!(left(7), [(own, home())]);
        assert_eq!(earlier.read(), Some(home()));
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
        assert_eq!(read, [Some(home()), None, None]);
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
