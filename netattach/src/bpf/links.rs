//! The programs on devices by tcx (Linux 6.6) and XDP: one link for each program of a device, pinned by the device's
//! index, and those on devices in pods by the attachment's number.
//!
//! The pins are beside the directory of a layout, not in it, because a link outlives the programs and maps
//! that it runs. A link whose device is gone reports index 0, and is removed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use netattach_common::Side;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::BpfError;
use super::pin;
use super::program_table::{Entry, Program};
use super::sys::{self, LinkInfo, XdpMode};

/// Prefix of the pins of links on devices in pods: an attachment's number follows.
const IN_POD: &str = "pod";

/// netattach's programs that may share a hook of a device, in the order in which packets meet them: an
/// uplink's program passes on no packet that a parent's program would drop.
const IN_ORDER: [Program; 3] = [Program::Entry(Entry::InFrom), Program::Entry(Entry::InTo), Program::Uplink];

/// Where a link runs one of netattach's programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkPlace {
    /// On a device of the node, by its index.
    Node {
        /// Index of the device.
        ifindex: u32,
        /// The program.
        program: Program,
    },
    /// XDP on a device of the node, in its driver or in the kernel.
    Xdp {
        /// Index of the device.
        ifindex: u32,
        /// In which of the two it runs.
        mode: XdpMode,
    },
    /// On the device of an attachment in its pod.
    Pod {
        /// Number of the attachment.
        attachment: u32,
        /// Index of the device in the pod.
        ifindex: u32,
        /// For packets that the pod sends, or receives.
        side: Side,
    },
}

impl LinkPlace {
    /// The program that the link runs.
    pub fn program(self) -> Program {
        match self {
            Self::Node { program, .. } => program,
            Self::Xdp { .. } => Program::Xdp,
            Self::Pod { side, .. } => Program::InPod(side),
        }
    }

    pub(super) fn ifindex(self) -> u32 {
        match self {
            Self::Node { ifindex, .. } | Self::Xdp { ifindex, .. } | Self::Pod { ifindex, .. } => ifindex,
        }
    }

    /// The device, for a message. The calling thread must be in the network namespace of the device.
    pub(super) fn in_words(self) -> String {
        let index = self.ifindex();
        let device = match device_name(index) {
            Ok(name) => format!("device {} (index {index})", name.escape_debug()),
            Err(_) => format!("device {index}"),
        };
        match self {
            Self::Node { .. } | Self::Xdp { .. } => device,
            Self::Pod { attachment, .. } => format!("{device} in the pod of attachment {attachment}"),
        }
    }

    fn pin(self) -> String {
        let name = self.program().name();
        match self {
            Self::Node { ifindex, .. } => format!("{ifindex}_{name}"),
            Self::Xdp { ifindex, mode } => format!("{ifindex}_{}", xdp_name(mode)),
            Self::Pod { attachment, .. } => format!("{IN_POD}{attachment}_{name}"),
        }
    }
}

/// Name of a device in the calling thread's network namespace.
fn device_name(index: u32) -> rustix::io::Result<String> {
    let any = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::netdevice::index_to_name(any, index)
}

/// Every mode of the XDP program.
const XDP_MODES: [XdpMode; 2] = [XdpMode::Native, XdpMode::Generic];

/// Name of the pin of an XDP link: the kernel does not report a link's mode.
fn xdp_name(mode: XdpMode) -> &'static str {
    match mode {
        XdpMode::Native => "na_xdp_native",
        XdpMode::Generic => "na_xdp_generic",
    }
}

/// The pinned links below one root.
#[derive(Debug, Clone)]
pub(super) struct Links {
    directory: PathBuf,
}

impl Links {
    pub(super) fn new(root: &Path) -> Self {
        Self { directory: root.join(pin::LINKS) }
    }

    /// Runs the program there, before other programs, but after netattach's programs that come first
    /// ([`IN_ORDER`]). A program of an earlier object is replaced in one step: no packet passes in between.
    /// The calling thread must be in the device's namespace.
    pub(super) fn ensure(&self, place: LinkPlace, program: BorrowedFd<'_>) -> Result<(), BpfError> {
        let (path, ifindex, name) = (self.path(place), place.ifindex(), place.program().name());
        let failed = |source| BpfError::AttachLink { program: name, device: place.in_words(), source };
        if let Some((link, info)) = open(&path)? {
            if info.ifindex == ifindex {
                return sys::link_update(link.as_fd(), program).map_err(failed);
            }
            // The pin belongs to a device that is gone.
            remove(&path)?;
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
            .map_err(|source| BpfError::PinTree { action: "create", path: self.directory.clone(), source })?;
        // Until the link is pinned it belongs to this process: if the process is killed here, nothing
        // remains.
        let link = match place {
            LinkPlace::Xdp { mode, .. } => sys::xdp_attach(program, ifindex, mode),
            _ => {
                let predecessor = self.predecessor(place)?;
                let after = predecessor.as_ref().map(AsFd::as_fd);
                sys::tcx_attach(program, ifindex, place.program().tc_hook(), after)
            }
        };
        let link = match link {
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists
                    && self.take_over(place, program, &path)? =>
            {
                return Ok(());
            }
            link => link.map_err(failed)?,
        };
        sys::pin(link.as_fd(), &path).map_err(|source| BpfError::PinTree {
            action: "pin a link at",
            path,
            source,
        })?;
        crate::crash_point!("link", name);
        Ok(())
    }

    /// Renames the pin of a link whose program already runs on the device, but whose pin names another
    /// device. A hook accepts a program only once, and detaching it would let packets pass. Returns `false`
    /// if there is no such link.
    fn take_over(&self, place: LinkPlace, program: BorrowedFd<'_>, path: &Path) -> Result<bool, BpfError> {
        // The index of a device in a pod is meaningless without the pod.
        let LinkPlace::Node { ifindex, .. } = place else { return Ok(false) };
        let wanted = program_id(program, path)?;
        for (index, name) in self.pinned("")? {
            let other = self.directory.join(format!("{index}_{name}"));
            let found = open(&other)?;
            if found.is_some_and(|(_, info)| (info.ifindex, info.program_id) == (ifindex, wanted)) {
                let failed = |source| BpfError::PinTree { action: "rename", path: other.clone(), source };
                fs::rename(&other, path).map_err(failed)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the last of netattach's links on the same hook that packets meet before that place.
    fn predecessor(&self, place: LinkPlace) -> Result<Option<OwnedFd>, BpfError> {
        let LinkPlace::Node { ifindex, program } = place else { return Ok(None) };
        let rank = IN_ORDER.iter().position(|one| *one == program).unwrap_or(0);
        for program in IN_ORDER[..rank].iter().rev() {
            let found = open(&self.path(LinkPlace::Node { ifindex, program: *program }))?;
            if let Some((link, _)) = found.filter(|(_, info)| info.ifindex == ifindex) {
                return Ok(Some(link));
            }
        }
        Ok(None)
    }

    /// Returns the link at that place.
    pub(super) fn find(&self, place: LinkPlace) -> Result<Option<LinkInfo>, BpfError> {
        let found = open(&self.path(place))?.map(|(_, info)| info);
        Ok(found.filter(|info| info.ifindex == place.ifindex()))
    }

    /// Removes the link. Idempotent. On a device that still exists this takes a grace period.
    pub(super) fn remove(&self, place: LinkPlace) -> Result<(), BpfError> {
        remove(&self.path(place))
    }

    /// The devices for which links of these programs are pinned, whether or not the devices still exist.
    pub(super) fn devices_with(&self, programs: &[Program]) -> Result<BTreeSet<u32>, BpfError> {
        let is_one = |name: &str| programs.iter().any(|program| program.name() == name);
        let pinned = self.pinned("")?;
        Ok(pinned.into_iter().filter(|(_, name)| is_one(name)).map(|(index, _)| index).collect())
    }

    /// The devices for which links of the XDP program are pinned, with its mode.
    pub(super) fn xdp_devices(&self) -> Result<BTreeSet<(u32, XdpMode)>, BpfError> {
        let mode = |name: &str| XDP_MODES.into_iter().find(|mode| xdp_name(*mode) == name);
        Ok(self.pinned("")?.into_iter().filter_map(|(index, name)| Some((index, mode(&name)?))).collect())
    }

    /// The attachments for whose devices in pods links are pinned.
    pub(super) fn attachments(&self) -> Result<BTreeSet<u32>, BpfError> {
        Ok(self.pinned(IN_POD)?.into_iter().map(|(attachment, _)| attachment).collect())
    }

    /// The pinned links with this prefix: the number that follows it, and the name of the program.
    fn pinned(&self, prefix: &str) -> Result<Vec<(u32, String)>, BpfError> {
        let failed = |source| BpfError::PinTree { action: "list", path: self.directory.clone(), source };
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut pinned = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_string_lossy();
            // A pin without a number is not netattach's.
            pinned.extend(name.split_once('_').and_then(|(first, program)| {
                Some((first.strip_prefix(prefix)?.parse::<u32>().ok()?, program.to_owned()))
            }));
        }
        Ok(pinned)
    }

    fn path(&self, place: LinkPlace) -> PathBuf {
        self.directory.join(place.pin())
    }
}

/// The kernel's id of a program that a link may run.
fn program_id(program: BorrowedFd<'_>, link: &Path) -> Result<u32, BpfError> {
    sys::program_id(program).map_err(|source| BpfError::PinTree {
        action: "compare the program of",
        path: link.to_path_buf(),
        source,
    })
}

fn open(path: &Path) -> Result<Option<(OwnedFd, LinkInfo)>, BpfError> {
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

/// Detaches the link from its device, then removes the pin: the kernel releases a link without a pin only
/// later, and a device accepts a program only once.
fn remove(path: &Path) -> Result<(), BpfError> {
    let failed = |source| BpfError::PinTree { action: "remove", path: path.to_path_buf(), source };
    let Some((link, info)) = open(path)? else { return Ok(()) };
    if info.ifindex != 0 {
        sys::link_detach(link.as_fd()).map_err(failed)?;
    }
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(failed(source)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_device_and_whose_it_is() {
        let xdp = |ifindex| LinkPlace::Xdp { ifindex, mode: XdpMode::Native }.in_words();
        assert_eq!(xdp(1), "device lo (index 1)");
        assert_eq!(xdp(i32::MAX as u32), "device 2147483647", "it is gone");
        let in_pod = LinkPlace::Pod { attachment: 7, ifindex: 1, side: Side::FromPod };
        assert_eq!(in_pod.in_words(), "device lo (index 1) in the pod of attachment 7");
    }
}
