//! Makes kernel settings writable in a container: a runtime mounts `/proc/sys` read-only there, whatever
//! the capabilities. The agent sets `net` settings of its node and of pods, so it remounts its own mount
//! writable; the node's mount is another one.

use std::fs::OpenOptions;
use std::io;

use rustix::mount::{MountFlags, mount_remount};

/// A setting that exists in every kernel and that the agent writes.
const SETTING: &str = "/proc/sys/net/ipv4/ip_forward";
/// The mount that a runtime makes read-only.
const MOUNT: &str = "/proc/sys";

/// Kernel settings cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "{SETTING} cannot be written: run netattachd as root, or in a container that is not confined by AppArmor (appArmorProfile: \
     Unconfined), so that it may make its /proc/sys writable"
)]
pub struct Unwritable(#[source] io::Error);

/// Ensures that kernel settings can be written. Returns whether the mount had to be changed for that.
///
/// # Errors
/// The settings cannot be written.
pub(in crate::agent) fn make_writable() -> Result<bool, Unwritable> {
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
