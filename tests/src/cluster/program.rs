//! A daemon of a cluster, whose log is shown when its test fails.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::Namespace;

/// Lines of the log that are shown.
const SHOWN: usize = 40;

/// A running daemon. It is killed with this value.
#[derive(Debug)]
pub(super) struct Program {
    child: Mutex<Child>,
    log: PathBuf,
}

impl Program {
    /// Starts it inside a namespace; its output is appended to `log`.
    pub(super) fn start(namespace: &Namespace, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = namespace.run(|| command.spawn());
        let child = child.with_context(|| format!("start {}", command.get_program().to_string_lossy()))?;
        Ok(Self { child: Mutex::new(child), log: log.to_owned() })
    }

    /// [`Program::start`] with the mounts of this process instead of this thread's: daemons of the cluster do not
    /// belong to the machine of a worker, and do not end with it.
    pub(super) fn start_outside(namespace: &Namespace, command: Command, log: &Path) -> Result<Self> {
        let start = || {
            // SAFETY: of the state that threads share only working directory, root and umask are unshared; no memory and no
            // descriptor table is.
            unsafe { unshare_unsafe(UnshareFlags::FS) }.context("leave the mounts of a worker")?;
            let mounts = File::open(format!("/proc/{}/ns/mnt", std::process::id()))?;
            move_into_link_name_space(mounts.as_fd(), Some(LinkNameSpaceType::Mount))
                .context("leave the mounts of a worker")?;
            Self::start(namespace, command, log)
        };
        std::thread::scope(|scope| scope.spawn(start).join())
            .unwrap_or_else(|_| Err(anyhow!("the thread that starts a program panicked")))
    }

    /// Whether it has ended by itself.
    pub(super) fn has_ended(&self) -> bool {
        !matches!(self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait(), Ok(None))
    }

    /// `kill -9`, unless it has ended already.
    pub(super) fn end(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
    }

    /// The end of its log.
    pub(super) fn said(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(SHOWN)..].join("\n")
    }

    /// Its resident memory in bytes.
    pub(super) fn resident(&self) -> Result<u64> {
        let pid = self.child.lock().unwrap_or_else(PoisonError::into_inner).id();
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("a process has memory")?;
        let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kibibytes * 1024)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}\n---", self.log.display(), self.said());
        }
    }
}
