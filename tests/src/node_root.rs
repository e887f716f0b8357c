//! The root directory of a node, mounted on one in it as the agent's container has it by `delegation.root`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// A thread has mounts of its own.
#[derive(Debug)]
pub struct OwnMounts(());

/// Runs `work` on a thread that has mounts of its own, which end with it.
pub fn with_own_mounts(work: impl FnOnce(&OwnMounts) + Send) {
    let entered = || {
        // SAFETY: of the state that threads share only mounts, working directory and umask are unshared; no memory and no
        // descriptor table is.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.expect("make a mount namespace");
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .expect("keep mounts to oneself");
        work(&OwnMounts(()));
    };
    if let Err(panic) = std::thread::scope(|scope| scope.spawn(entered).join()) {
        std::panic::resume_unwind(panic);
    }
}

/// The machine's root directory once more. It is no directory of a node or a test, which are removed with all that is in them:
/// removed while this is mounted, they would take the machine's files along.
#[derive(Debug)]
pub struct NodeRoot {
    directory: tempfile::TempDir,
}

impl NodeRoot {
    /// Mounts it with all that is mounted in it by now, and in it a `/proc` of its own and an empty file system on each
    /// directory of `empty`.
    ///
    /// # Errors
    /// The kernel refuses a mount.
    pub fn mount(_: &OwnMounts, empty: &[&str]) -> Result<Self> {
        let mut directory = tempfile::Builder::new().prefix("netattach-root-").tempdir()?;
        // It is removed below, and only when it is empty.
        directory.disable_cleanup(true);
        let root = Self { directory };
        mount_bind_recursive("/", root.directory.path()).context("mount the root directory once more")?;
        for (kind, name) in [("proc", "proc")].into_iter().chain(empty.iter().map(|name| ("tmpfs", *name))) {
            let path = root.directory.path().join(name);
            mount(kind, &path, kind, MountFlags::empty(), None)
                .with_context(|| format!("mount {}", path.display()))?;
        }
        Ok(root)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for NodeRoot {
    fn drop(&mut self) {
        // Without a mount it is an empty directory; with one, this fails.
        let _ = unmount(self.directory.path(), UnmountFlags::DETACH);
        let _ = fs::remove_dir(self.directory.path());
    }
}
