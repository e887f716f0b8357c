//! The namespaces of a run: the node that the measuring thread moves to, and pods that every contender uses.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::netlink::{self, Netlink};

/// Interfaces of a pod, in the order of their networks.
pub(super) const INTERFACES: [&str; 3] = ["eth0", "net1", "net2"];
/// The parent of macvlans.
pub(super) const PARENT: &str = "parent0";
pub(super) const PARENT_INDEX: u32 = 10;
/// The other end of the parent, which gives it a carrier.
const WIRE_INDEX: u32 = 11;

/// A namespace that stands for the node. The thread that made it lives there.
pub(super) struct Node {
    namespace: File,
    scratch: tempfile::TempDir,
}

/// A namespace that stands for a pod's sandbox.
pub(super) struct Pod {
    /// The number of the pod, from 0.
    pub(super) number: u16,
    namespace: File,
    home: File,
    attempts: AtomicU32,
}

impl Node {
    /// Moves the calling thread to a new node that has a parent for macvlans.
    pub(super) fn enter() -> anyhow::Result<Self> {
        netlink::leave_for_new()?;
        let mut netlink = Netlink::open()?;
        netlink
            .send(vec![
                netlink::set_up(1),
                netlink::pair((PARENT, PARENT_INDEX), ("wire0", WIRE_INDEX)),
                netlink::set_up(WIRE_INDEX),
            ])
            .context("prepare the node's namespace")?;
        let scratch = tempfile::tempdir().context("create a scratch directory")?;
        Ok(Self { namespace: own_namespace()?, scratch })
    }

    /// Returns the machine itself, with its links, and its loopback up.
    #[cfg(feature = "cluster")]
    pub(super) fn here() -> anyhow::Result<Self> {
        Netlink::open()?.send(vec![netlink::set_up(1)]).context("prepare the machine's namespace")?;
        let scratch = tempfile::tempdir().context("create a scratch directory")?;
        Ok(Self { namespace: own_namespace()?, scratch })
    }

    /// Makes `count` pods, each with its loopback up.
    pub(super) fn pods(&self, count: u16) -> anyhow::Result<Vec<Pod>> {
        // Each pod holds two descriptors.
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit { current: limit.maximum, ..limit };
        setrlimit(Resource::Nofile, raised).context("open more files")?;
        (0..count).map(|number| self.pod(number)).collect()
    }

    /// A directory for leases, sockets and manifests; removed at the end.
    pub(super) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    pub(super) fn namespace(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }

    /// Names of the node's links.
    pub(super) fn links(&self) -> anyhow::Result<Vec<String>> {
        Netlink::open()?.link_names().context("list the node's links")
    }

    fn pod(&self, number: u16) -> anyhow::Result<Pod> {
        // A thread's namespace outlives it as long as its file is open.
        let made = thread::spawn(|| {
            netlink::leave_for_new()?;
            Netlink::open()?.send(vec![netlink::set_up(1)])?;
            own_namespace()
        });
        let namespace = made.join().map_err(|_| anyhow!("the thread that makes a pod panicked"))??;
        let home = self.namespace.try_clone().context("keep the node's namespace")?;
        Ok(Pod { number, namespace, home, attempts: AtomicU32::new(0) })
    }
}

impl Pod {
    pub(super) fn namespace(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }

    /// Returns a path by which other processes reach the namespace during this run; nothing is mounted.
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd()))
    }

    /// A container id that no earlier ADD used.
    pub(super) fn new_container(&self) -> String {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        self.container_of(attempt)
    }

    /// The container id of the latest ADD.
    pub(super) fn container(&self) -> String {
        self.container_of(self.attempts.load(Ordering::Relaxed))
    }

    /// Whether all interfaces are there.
    pub(super) fn is_attached(&self) -> anyhow::Result<()> {
        self.has(&INTERFACES)
    }

    /// Whether these interfaces are there.
    pub(super) fn has(&self, interfaces: &[&str]) -> anyhow::Result<()> {
        let links = self.links()?;
        for interface in interfaces {
            ensure!(
                links.iter().any(|name| name == *interface),
                "{interface} is missing; the pod has {links:?}"
            );
        }
        Ok(())
    }

    /// Whether only the loopback is there.
    pub(super) fn is_empty(&self) -> anyhow::Result<()> {
        let left = self.links()?;
        ensure!(left == ["lo"], "links are left in pod {}: {left:?}", self.number);
        Ok(())
    }

    /// The pod's address on a network, for contenders without IPAM.
    pub(super) fn address(&self, network: u8) -> Ipv4Addr {
        let [high, low] = (self.number + 256).to_be_bytes();
        Ipv4Addr::new(10, 90 + network, high, low)
    }

    fn links(&self) -> anyhow::Result<Vec<String>> {
        Netlink::open_in(self.namespace.as_fd(), self.home.as_fd())?
            .link_names()
            .context("list the pod's links")
    }

    fn container_of(&self, attempt: u32) -> String {
        format!("bench-{}-{}-{attempt}", std::process::id(), self.number)
    }
}

fn own_namespace() -> anyhow::Result<File> {
    File::open("/proc/thread-self/ns/net").context("open this thread's network namespace")
}

/// Creates a contender's directory if it does not exist; an existing one keeps its contents.
pub(super) fn make_directory(path: &Path) -> anyhow::Result<PathBuf> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
    Ok(path.to_owned())
}

/// Work for all pods at once: the time from the first to the last.
pub(super) fn at_once(
    pods: &[Pod],
    work: impl Fn(&Pod) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<Duration> {
    let (started, work) = (Instant::now(), &work);
    thread::scope(|scope| {
        // Threads inherit the namespace of the thread that starts them.
        let running: Vec<_> = pods.iter().map(|pod| scope.spawn(move || work(pod))).collect();
        running.into_iter().try_for_each(|thread| joined(thread.join()))
    })?;
    Ok(started.elapsed())
}

/// Runs work on a thread inside a namespace.
pub(super) fn in_namespace<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    thread::scope(|scope| {
        joined(
            scope
                .spawn(|| {
                    netlink::enter(namespace)?;
                    work()
                })
                .join(),
        )
    })
}

/// The result of a benchmark thread.
pub(super) fn joined<T>(joined: thread::Result<anyhow::Result<T>>) -> anyhow::Result<T> {
    joined.map_err(|_| anyhow!("a thread of the benchmark panicked"))?
}
