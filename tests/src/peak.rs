//! The peak of an agent's own memory during a test.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::Node;

/// The sampling interval: shorter peaks are missed.
const INTERVAL: Duration = Duration::from_millis(1);

/// Samples an agent's memory until [`Peak::most`] is called.
#[derive(Debug)]
pub struct Peak {
    looking: JoinHandle<u64>,
    stop: Arc<AtomicBool>,
}

impl Peak {
    /// Starts sampling.
    pub fn of(node: &Node) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, pid) = (Arc::clone(&stop), node.agent_pid());
        let looking = thread::spawn(move || {
            let mut most = 0;
            while !stopped.load(Ordering::Relaxed) {
                most = most.max(resident(pid));
                thread::sleep(INTERVAL);
            }
            most
        });
        Self { looking, stop }
    }

    /// The highest sample, in KiB.
    ///
    /// # Panics
    /// The agent is gone.
    pub fn most(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.looking.join().expect("the agent is there")
    }
}

/// Resident anonymous memory of a process in KiB: its own, without files and BPF maps.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux says it");
    line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
}
