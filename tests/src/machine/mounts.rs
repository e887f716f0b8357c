//! Mounts private to one thread and the processes that it starts.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::traffic::eventually;

/// Directories that runtimes write into: the machine's content stays visible, writes are private.
const WRITTEN: [&str; 4] = ["/etc", "/opt", "/var/lib", "/var/log"];
/// Hidden: sockets and namespaces of the machine's own runtimes are there.
pub(super) const HIDDEN: &str = "/run";
/// containerd mounts overlays over this directory, which the overlay on `/var/lib` does not support.
pub(super) const SNAPSHOTS: &str = "/var/lib/containerd";
const BPFFS: &str = "/sys/fs/bpf";
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/mnt";
/// Killed processes that are still there after this are reported.
const PATIENCE: Duration = Duration::from_secs(10);

/// A mount namespace. When this is dropped, its thread sees the machine's own files again; the namespace ends with
/// its last process.
#[derive(Debug)]
pub(super) struct Mounts {
    /// Directories mounted over, in order.
    over: Vec<PathBuf>,
    /// Inode of the namespace, by which processes started inside are found.
    inside: u64,
}

impl Mounts {
    /// Takes the calling thread into a new mount namespace; `scratch` is an empty directory for its use.
    pub(super) fn enter(scratch: &Path) -> Result<Self> {
        // SAFETY: of the state that threads share only mounts, working directory and umask are unshared; no memory and
        // no descriptor table is.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }
            .context("make a mount namespace")?;
        let mut mounts = Self { over: Vec::new(), inside: fs::metadata(OWN_NAMESPACE)?.ino() };
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        mounts.put("tmpfs", scratch, None)?;
        for directory in WRITTEN {
            let own = scratch.join(directory.replace('/', "_"));
            let (upper, work) = (own.join("upper"), own.join("work"));
            fs::create_dir_all(&upper)?;
            fs::create_dir_all(&work)?;
            let options =
                format!("lowerdir={directory},upperdir={},workdir={}", upper.display(), work.display());
            mounts.put("overlay", Path::new(directory), Some(&CString::new(options)?))?;
        }
        mounts.put("tmpfs", Path::new(HIDDEN), None)?;
        fs::create_dir_all(SNAPSHOTS)?;
        mounts.put("tmpfs", Path::new(SNAPSHOTS), None)?;
        Ok(mounts)
    }

    /// Makes mounts propagate as under systemd: later mounts of the machine appear in containers that want them, and
    /// those that a container makes for the machine appear there. The BPF file system is a different one than the
    /// tests', or missing.
    pub(super) fn as_systemd_does(&mut self, has_bpffs: bool) -> Result<()> {
        match unmount(BPFFS, UnmountFlags::DETACH) {
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(errno) => Err(errno).with_context(|| format!("unmount {BPFFS}"))?,
        }
        if has_bpffs {
            self.put("bpf", Path::new(BPFFS), None)?;
        }
        Ok(mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)?)
    }

    fn put(&mut self, kind: &str, directory: &Path, options: Option<&CStr>) -> Result<()> {
        mount(kind, directory, kind, MountFlags::empty(), options)
            .with_context(|| format!("mount {kind} on {}", directory.display()))?;
        self.over.push(directory.to_owned());
        Ok(())
    }

    /// Empties [`HIDDEN`] or [`SNAPSHOTS`], with what is mounted below.
    pub(super) fn empty(&self, directory: &str) -> Result<()> {
        unmount(directory, UnmountFlags::DETACH).with_context(|| format!("unmount {directory}"))?;
        mount("tmpfs", directory, "tmpfs", MountFlags::empty(), None)
            .with_context(|| format!("mount tmpfs on {directory}"))
    }

    /// Removes a directory with what is mounted below it.
    pub(super) fn forget(&self, directory: &Path) -> Result<()> {
        let mounts = fs::read_to_string("/proc/thread-self/mounts")?;
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        let mut below: Vec<&str> = points.filter(|point| Path::new(point).starts_with(directory)).collect();
        below.reverse();
        for point in below {
            unmount(point, UnmountFlags::DETACH).with_context(|| format!("unmount {point}"))?;
        }
        fs::remove_dir_all(directory).with_context(|| format!("remove {}", directory.display()))
    }

    /// Kills all processes started inside, containers included, and waits for their end.
    pub(super) fn end_processes(&self) {
        let ended = eventually(PATIENCE, || {
            let found = self.processes();
            for pid in found.iter().filter_map(|pid| Pid::from_raw(*pid)) {
                // The process may have ended already.
                let _ = kill_process(pid, Signal::KILL);
            }
            found.is_empty()
        });
        if !ended {
            eprintln!("processes that do not end: {:?}", self.processes());
        }
    }

    /// Processes in the namespace and, as containers have mounts of their own, their descendants.
    fn processes(&self) -> BTreeSet<i32> {
        let mut parents = BTreeMap::new();
        let mut found = BTreeSet::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // A process that ends meanwhile, or is a zombie, has no namespace.
            let Ok(namespace) = fs::metadata(entry.path().join("ns/mnt")) else { continue };
            if namespace.ino() == self.inside {
                found.insert(pid);
            }
            parents.insert(pid, parent(&entry.path()));
        }
        loop {
            let children =
                parents.iter().filter(|(_, parent)| parent.is_some_and(|parent| found.contains(&parent)));
            let more: BTreeSet<i32> =
                children.map(|(pid, _)| *pid).filter(|pid| !found.contains(pid)).collect();
            if more.is_empty() {
                return found;
            }
            found.extend(more);
        }
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        // Threads that this one has started share its namespace, so it cannot leave it; it can unmount everything.
        for directory in self.over.iter().rev() {
            // A process that still uses a mount keeps it, invisible to others.
            if let Err(error) = unmount(directory, UnmountFlags::DETACH) {
                eprintln!("{} stays mounted: {error}", directory.display());
            }
        }
    }
}

/// The fourth field of `/proc/PID/stat`; the second, in parentheses, may contain anything.
fn parent(process: &Path) -> Option<i32> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}
