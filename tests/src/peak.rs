//! The most memory of its own that an agent had while a test went on.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::Node;

/// How often is looked: what is there for less than that is not seen.
const INTERVAL: Duration = Duration::from_millis(1);

/// Looks at an agent's memory until it is asked for the most.
#[derive(Debug)]
pub struct Peak {
    looking: JoinHandle<u64>,
    stop: Arc<AtomicBool>,
}

impl Peak {
    /// Begins to look.
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

    /// The most that was seen, in KiB.
    ///
    /// # Panics
    /// The agent is gone.
    pub fn most(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.looking.join().expect("the agent is there")
    }
}

/// Resident anonymous memory of a process in KiB: its own, without files and without BPF maps.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux says it");
    line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
}
