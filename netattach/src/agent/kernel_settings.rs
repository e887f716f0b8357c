//! Kernel settings in a container: a runtime gives it `/proc/sys` as a read-only mount, whatever its capabilities. The agent
//! sets `net` of its own node and of pods, so it makes its own mount writable; the node's is another one.

use std::fs::OpenOptions;
use std::io;

use rustix::mount::{MountFlags, mount_remount};

/// A file that the agent writes, in every kernel.
const SETTING: &str = "/proc/sys/net/ipv4/ip_forward";
/// What a runtime mounts.
const MOUNT: &str = "/proc/sys";

/// Kernel settings cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "{SETTING} cannot be written: run netattachd as root, or in a container that is not confined by AppArmor (appArmorProfile: \
     Unconfined), so that it may make its /proc/sys writable"
)]
pub struct Unwritable(#[source] io::Error);

/// Makes sure that kernel settings can be written; whether the mount had to be changed for that.
///
/// # Errors
/// They cannot.
pub(super) fn make_writable() -> Result<bool, Unwritable> {
    match open() {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            mount_remount(MOUNT, flags, "").map_err(|errno| Unwritable(errno.into()))?;
            open().map_err(Unwritable).map(|()| true)
        }
        Err(error) => Err(Unwritable(error)),
    }
}

fn open() -> io::Result<()> {
    OpenOptions::new().write(true).open(SETTING).map(drop)
}
