//! The files of a pod's service account at the path in the agent's container, as a kubelet writes and replaces them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::node_root::OwnMounts;

/// The link to the directory with the files of now.
const CURRENT: &str = "..data";
const FILES: [&str; 3] = ["ca.crt", "namespace", "token"];

/// The files; they exist only in the mounts of one thread and of processes that it starts.
#[derive(Debug)]
pub struct ServiceAccount {
    /// The directory on which an empty file system is mounted.
    run: PathBuf,
    writes: AtomicU32,
}

impl ServiceAccount {
    /// Mounts the directory; `/var/run` contains nothing else.
    ///
    /// # Errors
    /// The kernel refuses the mount, or a file cannot be written.
    pub fn mount(_: &OwnMounts, token: &str, authority: &str) -> Result<Self> {
        // A link on most machines.
        let run = fs::canonicalize("/var/run")?;
        mount("tmpfs", &run, "tmpfs", MountFlags::empty(), None)
            .with_context(|| format!("mount on {}", run.display()))?;
        let account = Self { run, writes: AtomicU32::new(0) };
        let directory = account.directory();
        fs::create_dir_all(&directory)?;
        for file in FILES {
            symlink(Path::new(CURRENT).join(file), directory.join(file))?;
        }
        account.write(token, authority)?;
        Ok(account)
    }

    /// Replaces the token and the certificate of the server's authority, all at once.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, token: &str, authority: &str) -> Result<()> {
        let next = format!("..{}", self.writes.fetch_add(1, Ordering::Relaxed));
        let directory = self.directory();
        fs::create_dir(directory.join(&next))?;
        for (file, content) in FILES.into_iter().zip([authority, "kube-system", token]) {
            fs::write(directory.join(&next).join(file), content)?;
        }
        let link = directory.join("..data_tmp");
        symlink(next, &link)?;
        Ok(fs::rename(link, directory.join(CURRENT))?)
    }

    fn directory(&self) -> PathBuf {
        self.run.join("secrets/kubernetes.io/serviceaccount")
    }
}

impl Drop for ServiceAccount {
    fn drop(&mut self) {
        // The thread's mounts end with it anyway.
        let _ = unmount(&self.run, UnmountFlags::DETACH);
    }
}
