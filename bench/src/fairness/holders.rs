//! Pods whose ADD hangs until released, and the resources they hang at.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::super::agent::{Agent, Caller};
use super::super::pods::{Pod, joined};

/// Time limit until the agent shows that its requests are stuck.
const PATIENCE: Duration = Duration::from_secs(30);

/// A plugin whose ADD hangs until it is released. It makes no interface.
pub(super) struct Plugin {
    fifo: PathBuf,
    script: String,
}

impl Plugin {
    pub(super) fn new(scratch: &Path) -> anyhow::Result<Self> {
        let fifo = scratch.join("hang");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).context("make a FIFO")?;
        let script =
            format!("#!/bin/sh\n[ \"$CNI_COMMAND\" = ADD ] && read -r _ < {}\nexit 0\n", fifo.display());
        Ok(Self { fifo, script })
    }

    /// The name of one of several.
    pub(super) fn name(number: u16) -> String {
        format!("hang{number}")
    }

    /// Installs it in a directory under that many names.
    pub(super) fn install(&self, directory: &Path, count: u16) -> anyhow::Result<()> {
        for number in 0..count {
            let path = directory.join(Self::name(number));
            fs::write(&path, &self.script).context("write a plugin")?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).context("make it executable")?;
        }
        Ok(())
    }

    /// Releases the calls that hang now: the kernel wakes them when the FIFO gets a writer, and ends their reading
    /// when the writer is gone.
    fn let_go(fifo: &Path) {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // Fails while no call hangs.
        drop(rustix::fs::open(fifo, flags, Mode::empty()));
    }
}

/// Pods that repeat ADD until they are stopped.
pub(super) struct Holders {
    ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<anyhow::Result<()>>>,
    held: Held,
}

enum Held {
    Fifo(PathBuf),
    Lock(File),
}

impl Holders {
    pub(super) fn at_plugin(agent: &Agent, pods: &[Pod], plugin: &Plugin) -> anyhow::Result<Self> {
        Self::begin(agent, pods, Held::Fifo(plugin.fifo.clone()))
    }

    /// Locks the pool in that directory.
    pub(super) fn at_pool(agent: &Agent, pods: &[Pod], directory: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(directory).context("make the directory of a pool")?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(directory.join("lock"));
        let lock = lock.context("open the lock of a pool")?;
        lock.lock().context("lock a pool")?;
        Self::begin(agent, pods, Held::Lock(lock))
    }

    /// Returns when the agent shows that they are stuck there.
    fn begin(agent: &Agent, pods: &[Pod], held: Held) -> anyhow::Result<Self> {
        let ending = Arc::new(AtomicBool::new(false));
        let hold = |pod: &Pod| {
            let (caller, ending) = (agent.caller(pod), Arc::clone(&ending));
            let containers: Vec<String> = (0..1000).map(|_| pod.new_container()).collect();
            thread::spawn(move || hold(&caller, &containers, &ending))
        };
        let threads = pods.iter().map(hold).collect();
        let holders = Self { ending, threads, held };
        let deadline = Instant::now() + PATIENCE;
        while agent.ask(&["status"])?["troubles"].as_array().is_none_or(Vec::is_empty) {
            if Instant::now() > deadline {
                holders.end()?;
                bail!("no request hangs");
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(holders)
    }

    /// Releases all, and returns when they are gone.
    pub(super) fn end(self) -> anyhow::Result<()> {
        self.ending.store(true, Ordering::SeqCst);
        let fifo = match self.held {
            Held::Lock(lock) => {
                drop(lock);
                None
            }
            Held::Fifo(fifo) => Some(fifo),
        };
        while let Some(fifo) = fifo.as_deref().filter(|_| !self.threads.iter().all(JoinHandle::is_finished)) {
            Plugin::let_go(fifo);
            thread::sleep(Duration::from_millis(10));
        }
        self.threads.into_iter().try_for_each(|thread| joined(thread.join()))
    }
}

/// Repeats ADD until it is stopped, then calls DEL for the last attempt.
fn hold(caller: &Caller, containers: &[String], ending: &AtomicBool) -> anyhow::Result<()> {
    for container in containers {
        // A hanging ADD fails in the end, or succeeds when it is released.
        let _ = caller.call("ADD", container);
        let deleted = caller.call("DEL", container);
        if ending.load(Ordering::SeqCst) {
            return deleted;
        }
    }
    Ok(())
}
