//! The root directory of a node, mounted on a directory in it, as the agent's container has it with
//! `delegation.root`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Proof that the thread has its own mount namespace.
#[derive(Debug)]
pub struct OwnMounts(());

/// Runs `work` on a thread with its own mount namespace, which ends with the thread.
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

/// A second mount of the machine's root directory. It is not below a directory of a node or a test, which are removed
/// recursively: while this is mounted, that would delete the machine's files.
#[derive(Debug)]
pub struct NodeRoot {
    directory: tempfile::TempDir,
}

impl NodeRoot {
    /// Mounts it with all current submounts, with a separate `/proc` and an empty file system on each directory of
    /// `empty`.
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

    /// Returns its path.
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
