//! Throw-away network namespaces.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use anyhow::{Context, Result, anyhow};
use netattach::netns::{Netns, within};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// A network namespace that lives as long as this value. Its loopback is down, as in a fresh pod.
///
/// The thread that made it waits inside, so that it has a path (`/proc/PID/task/TID/ns/net`) without a mount.
#[derive(Debug)]
pub struct Namespace {
    netns: Netns,
    path: PathBuf,
    release: Option<mpsc::Sender<()>>,
    keeper: Option<std::thread::JoinHandle<()>>,
}

impl Namespace {
    /// Makes a namespace. Needs root.
    pub fn new() -> Result<Self> {
        let (release, released) = mpsc::channel::<()>();
        let (made, path) = mpsc::channel();
        let keeper = std::thread::Builder::new().name("netns-keeper".into()).spawn(move || {
            // SAFETY: only this thread's network namespace is unshared; no memory or descriptor table is.
            let unshared = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
            let tid = rustix::thread::gettid().as_raw_nonzero();
            let own = PathBuf::from(format!("/proc/{}/task/{tid}/ns/net", std::process::id()));
            let opened = unshared.map_err(anyhow::Error::from).and_then(|()| Ok(Netns::open(&own)?));
            if made.send(opened.map(|netns| (netns, own))).is_ok() {
                // An error means that the owner is gone: the namespace may go too.
                let _ = released.recv();
            }
        })?;
        let (netns, path) = path
            .recv()
            .map_err(|_| anyhow!("the namespace's thread ended early"))?
            .context("make a network namespace (root is needed)")?;
        Ok(Self { netns, path, release: Some(release), keeper: Some(keeper) })
    }

    /// The namespace of this process; it is not removed.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn of_this_process() -> Result<Self> {
        let process = std::process::id();
        let path = PathBuf::from(format!("/proc/{process}/task/{process}/ns/net"));
        Ok(Self { netns: Netns::open(&path)?, path, release: None, keeper: None })
    }

    /// A namespace of another owner, such as a runtime; it is not removed.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn at(path: &Path) -> Result<Self> {
        Ok(Self { netns: Netns::open(path)?, path: path.to_owned(), release: None, keeper: None })
    }

    /// The namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// A path that other processes can open while this value lives.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Id of a task in the namespace, as `ip link ... netns` takes it.
    pub fn task(&self) -> String {
        // The path is `/proc/PID/task/TID/ns/net`.
        self.path
            .components()
            .nth(4)
            .map(|id| id.as_os_str().to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// Runs `work` on a thread inside the namespace. Child processes started by it start there.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        within(&self.netns, work).expect("a namespace held open can be entered")
    }

    /// Brings the loopback device up, for services that listen there.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn loopback_up(&self) -> Result<()> {
        crate::node::ip(self, &["link", "set", "lo", "up"])
    }

    /// Binds the namespace to a file like `ip netns add`, for processes that do not see `/proc` of this process.
    ///
    /// # Errors
    /// The file cannot be made, or the kernel refuses.
    pub fn bind(&self, file: &Path) -> Result<Bound> {
        File::create(file)?;
        // Created before the mount, so that the file is removed too if the kernel refuses.
        let bound = Bound(file.to_owned());
        mount_bind(self.path(), file)?;
        Ok(bound)
    }
}

/// The file that a namespace is bound to. Mount and file end with this value, whatever the outcome of the test: a
/// mount that is left keeps the test's directory, and the namespace, until the machine is rebooted.
#[derive(Debug)]
#[must_use = "the namespace is bound as long as this lives"]
pub struct Bound(PathBuf);

impl Bound {
    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
        let _ = fs::remove_file(&self.0);
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.release.take());
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}
