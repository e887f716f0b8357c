//! The programs on devices by tcx (Linux 6.6): one link for each program of a device, pinned by the device's index.
//!
//! The pins are beside the directory of a layout, not in it: a link outlives the programs and maps that it runs. One
//! whose device is gone says so, and is swept.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use netattach_common::Hook;

use super::BpfError;
use super::pin::Program;
use super::sys::{self, LinkInfo};

/// The programs of a device that is one attachment's.
const ON_DEVICE: [Program; 2] = [Program::At(Hook::FromPod), Program::At(Hook::ToPod)];

/// The pinned links below one root.
#[derive(Debug, Clone)]
pub(super) struct Links {
    directory: PathBuf,
}

impl Links {
    pub(super) fn new(root: &Path) -> Self {
        Self { directory: root.join("link") }
    }

    /// The program runs on the device, before what is there already. One that runs there is replaced
    /// in one step: no packet passes between the two.
    pub(super) fn ensure(
        &self,
        ifindex: u32,
        which: Program,
        program: BorrowedFd<'_>,
    ) -> Result<(), BpfError> {
        let path = self.path(ifindex, which);
        let failed = |source| BpfError::AttachLink { program: which.name(), ifindex, source };
        if let Some((link, info)) = open(&path)? {
            if info.ifindex == ifindex {
                return sys::link_update(link.as_fd(), program).map_err(failed);
            }
            // Of a device that is gone.
            remove(&path)?;
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
            .map_err(|source| BpfError::PinTree { action: "create", path: self.directory.clone(), source })?;
        // Until it is pinned the link lives in this process: one that is killed here leaves nothing.
        let link = sys::tcx_attach(program, ifindex, which.hook()).map_err(failed)?;
        sys::pin(link.as_fd(), &path).map_err(|source| BpfError::PinTree {
            action: "pin a link at",
            path,
            source,
        })?;
        crate::crash_point!("link", which.name());
        Ok(())
    }

    /// Whether that program runs on the device.
    pub(super) fn runs(
        &self,
        ifindex: u32,
        which: Program,
        program: BorrowedFd<'_>,
    ) -> Result<Running, BpfError> {
        let path = self.path(ifindex, which);
        let Some((_, info)) = open(&path)?.filter(|(_, info)| info.ifindex == ifindex) else {
            return Ok(Running::Nothing);
        };
        let wanted = sys::program_id(program).map_err(|source| BpfError::PinTree {
            action: "compare the program of",
            path,
            source,
        })?;
        Ok(if info.program_id == wanted { Running::This } else { Running::Another })
    }

    /// Nothing of ours runs on an attachment's device. One without links is fine. On a device that is still there each link
    /// takes a grace period.
    pub(super) fn remove(&self, ifindex: u32) -> Result<(), BpfError> {
        ON_DEVICE.into_iter().try_for_each(|which| self.remove_one(ifindex, which))
    }

    /// That program does not run on the device. Idempotent.
    pub(super) fn remove_one(&self, ifindex: u32, which: Program) -> Result<(), BpfError> {
        remove(&self.path(ifindex, which))
    }

    /// The attachments' devices that links are pinned for, whether they are still there or not.
    pub(super) fn devices(&self) -> Result<BTreeSet<u32>, BpfError> {
        let pinned = self.pinned()?;
        let is_devices = |name: &str| ON_DEVICE.iter().any(|which| which.name() == name);
        Ok(pinned.into_iter().filter(|(_, name)| is_devices(name)).map(|(index, _)| index).collect())
    }

    /// The devices that links of that program are pinned for, whether they are still there or not.
    pub(super) fn devices_with(&self, which: Program) -> Result<BTreeSet<u32>, BpfError> {
        let pinned = self.pinned()?;
        Ok(pinned.into_iter().filter(|(_, name)| name == which.name()).map(|(index, _)| index).collect())
    }

    /// The pinned links: index of the device and name of the program.
    fn pinned(&self) -> Result<Vec<(u32, String)>, BpfError> {
        let failed = |source| BpfError::PinTree { action: "list", path: self.directory.clone(), source };
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut pinned = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            // Whatever has no number is not ours.
            pinned.extend(
                name.to_string_lossy()
                    .split_once('_')
                    .and_then(|(index, program)| Some((index.parse::<u32>().ok()?, program.to_owned()))),
            );
        }
        Ok(pinned)
    }

    fn path(&self, ifindex: u32, which: Program) -> PathBuf {
        self.directory.join(format!("{ifindex}_{}", which.name()))
    }
}

/// What runs on a hook of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Running {
    /// The program that was asked for.
    This,
    /// Another program of ours: an earlier one.
    Another,
    /// Nothing of ours.
    Nothing,
}

fn open(path: &Path) -> Result<Option<(std::os::fd::OwnedFd, LinkInfo)>, BpfError> {
    let failed = |source| BpfError::PinTree { action: "open the link", path: path.to_path_buf(), source };
    match sys::open_pin(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
        Ok(link) => {
            let info = sys::link_info(link.as_fd()).map_err(failed)?;
            Ok(Some((link, info)))
        }
    }
}

fn remove(path: &Path) -> Result<(), BpfError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(BpfError::PinTree { action: "remove", path: path.to_path_buf(), source })
        }
        _ => Ok(()),
    }
}
