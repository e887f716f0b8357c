//! How a device was on the node that an executable moves into a pod: in a file, as without an agent there is no record. Nothing
//! else tells the DEL, a process of its own, the device's alias and other names, which do not go to the pod with it.

use std::path::{Path, PathBuf};

use crate::attach::AttachError;
use crate::cni::{self, CniError};
use crate::durable;
use crate::journal::JournalError;
use crate::netlink::Handle;
use crate::plan::link_group;
use crate::step::Home;

/// Of memory: what files say ends with the boot as well.
const DIRECTORY: &str = "/run/cni/host-device";

/// The file for an interface of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeptHome(PathBuf);

impl KeptHome {
    /// Of the node that is the calling thread's namespace. Several may have one directory, as where one runs in another.
    ///
    /// # Errors
    /// The kernel does not say which namespace that is.
    pub(super) fn of(request: &cni::Request) -> Result<Self, CniError> {
        let node = Handle::open().map_err(|error| AttachError::Open(error.into()))?.netns_cookie();
        Ok(Self::named(Path::new(DIRECTORY), node, (&request.container_id, &request.ifname)))
    }

    /// `node`: the cookie of the node's namespace. Container and interface are parts of a name as they have been read.
    fn named(directory: &Path, node: u64, (container, ifname): (&str, &str)) -> Self {
        // A container's id may be longer than a file's name, and either may have the character between them.
        let whose = link_group(container, ifname);
        let container = container.get(..64).unwrap_or(container);
        Self(directory.join(format!("{node}_{container}_{ifname}_{whose:08x}.json")))
    }

    /// Keeps how a device is, before it is changed.
    ///
    /// # Errors
    /// [`JournalError::Write`]: the file could not be written.
    pub(super) fn write(&self, home: &Home) -> Result<(), JournalError> {
        let Self(path) = self;
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            durable::replace(path, &format!(".{name}.new"), serde_json::to_string(home)?.as_bytes(), 0o600)
        };
        write().map_err(|source| JournalError::Write { path: path.clone(), source })
    }

    /// How the device was. `None`: nobody has kept it, as the reference does not, or the file cannot be read; the device goes back
    /// without it.
    pub(super) fn read(&self) -> Option<Home> {
        serde_json::from_slice(&std::fs::read(&self.0).ok()?).ok()
    }

    /// To be called once nothing is left to be given back. A file that stays goes with the boot.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.0);
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
        let of = |node, ifname| KeptHome::named(&directory.path().join("kept"), node, ("c1", ifname));
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
        let mut memory =
            Memory { kept: Some(KeptHome::named(&file, 7, ("c1", "eth0"))), ..Memory::default() };
        let refused = memory.done(StepRef(0, 0), claimed(Some(home())));
        assert!(matches!(refused, Err(JournalError::Write { .. })), "{refused:?}");
        assert!(!memory.outputs().contains_key(&StepRef(0, 0)) && memory.home().is_none());
    }
}
