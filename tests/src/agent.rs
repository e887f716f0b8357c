//! A running agent with its log, which is read while it runs.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::Namespace;
use crate::traffic::{eventually, stretched};

/// An agent that takes longer to get ready, or to end by itself, counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// An agent that has been started.
#[derive(Debug)]
pub(crate) struct Agent {
    child: Child,
    log: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Agent {
    /// Starts an agent inside a namespace and waits until it logs a line that contains `said`. The command's stderr is
    /// a pipe.
    ///
    /// # Errors
    /// The line does not appear; the error has the agent's log.
    pub(crate) fn start(namespace: &Namespace, mut command: Command, said: &'static str) -> Result<Self> {
        let mut child = namespace.run(|| command.spawn()).context("start the agent")?;
        let stderr = child.stderr.take().context("the agent's stderr is a pipe")?;
        let (ready, is_ready) = mpsc::channel();
        let log = Arc::new(Mutex::new(String::new()));
        let read = Arc::clone(&log);
        let reader = std::thread::Builder::new().name("agent-log".into()).spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if line.contains(said) {
                    // The receiver is gone after the start.
                    let _ = ready.send(());
                }
                let mut log = locked(&read);
                log.push_str(&line);
                log.push('\n');
            }
        })?;
        let agent = Self { child, log, reader };
        match is_ready.recv_timeout(stretched(PATIENCE)) {
            Ok(()) => Ok(agent),
            Err(error) => bail!("the agent did not get ready ({error}):\n{}", agent.kill()?),
        }
    }

    /// The agent's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the agent (`kill -9`); returns its log.
    ///
    /// # Errors
    /// The agent cannot be killed.
    pub(crate) fn kill(mut self) -> Result<String> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(self.log())
    }

    /// Sends SIGTERM; returns the agent's log.
    ///
    /// # Errors
    /// The agent did not end by itself with success.
    pub(crate) fn stop(mut self) -> Result<String> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let status = self.child.wait()?;
        let log = self.log();
        ensure!(status.success(), "the agent ended with {status}:\n{log}");
        Ok(log)
    }

    /// Waits until the agent has ended by itself; `None`: it still runs.
    pub(crate) fn wait_for_end(&mut self) -> Option<ExitStatus> {
        let mut ended = None;
        eventually(PATIENCE, || {
            ended = self.child.try_wait().ok().flatten();
            ended.is_some()
        });
        ended
    }

    /// The agent's whole log, once it has ended.
    pub(crate) fn log(self) -> String {
        // A reader that panicked leaves the lines that it has read.
        let _ = self.reader.join();
        locked(&self.log).clone()
    }

    /// Returns the log so far.
    pub(crate) fn log_so_far(&self) -> String {
        locked(&self.log).clone()
    }
}

fn locked(log: &Mutex<String>) -> MutexGuard<'_, String> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}
