//! Ends plugins that outlived the agent that called them.
//!
//! When an agent is killed, the plugin that it waits for keeps running: its effects could come after the DEL of the
//! next agent and would never be removed. Therefore every plugin has an environment variable with its agent's name,
//! which its child processes inherit, and an agent ends such plugins at its start before anything else.
//!
//! Only unfinished calls are ended: when a call is finished, the plugin itself has exited. A process that a plugin
//! leaves behind on purpose has a session of its own ([`daemon(3)`]) and is left alone; a plugin that creates a
//! session in the middle of its work cannot be distinguished from that.
//!
//! [`daemon(3)`]: https://man7.org/linux/man-pages/man3/daemon.3.html

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};

/// The variable with the name of the agent that called the plugin.
pub(super) const VARIABLE: &str = "NETATTACH_PLUGIN_OF";

/// How long a killed process may take to exit: the kernel finishes its current system call first.
const PATIENCE: Duration = Duration::from_secs(5);

/// A plugin that was ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// Its process id.
    pub pid: i32,
    /// `CNI_COMMAND`.
    pub command: String,
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// Whether it has exited. One that has not is blocked in the kernel and will run no more code of its own.
    pub gone: bool,
}

/// Ends every plugin called by an agent of that name whose call has not finished, together with its process group.
/// Blocks until they have exited, for some seconds at most.
pub fn end_orphans(owner: &str) -> Vec<Orphan> {
    let mut found: BTreeMap<i32, (Orphan, OwnedFd)> = BTreeMap::new();
    let deadline = Instant::now() + PATIENCE;
    // A plugin may start another process during the search, hence the loop.
    loop {
        let more: Vec<(Orphan, OwnedFd)> =
            running(owner).filter(|(it, _)| !found.contains_key(&it.pid)).collect();
        if more.is_empty() {
            break;
        }
        for (orphan, process) in more {
            end(&orphan, &process);
            found.insert(orphan.pid, (orphan, process));
        }
        if Instant::now() >= deadline {
            break;
        }
    }
    let is_gone = |(orphan, process)| Orphan { gone: has_ended(&process, deadline), ..orphan };
    found.into_values().map(is_gone).collect()
}

fn running(owner: &str) -> impl Iterator<Item = (Orphan, OwnedFd)> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(move |pid| {
        // Opened before the process is examined, so that the process that is killed is the one examined.
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some((look(pid, owner)?, process))
    })
}

/// The process, if it is a plugin of that agent whose call has not finished.
fn look(pid: i32, owner: &str) -> Option<Orphan> {
    let directory = fs::metadata(format!("/proc/{pid}")).ok()?;
    if directory.uid() != rustix::process::geteuid().as_raw() {
        return None;
    }
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let variable = |name: &str| {
        let mut variables =
            environment.split(|byte| *byte == 0).filter_map(|it| std::str::from_utf8(it).ok());
        variables.find_map(|it| it.strip_prefix(name)?.strip_prefix('='))
    };
    if variable(VARIABLE)? != owner {
        return None;
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let named = |name| variable(name).unwrap_or_default().to_owned();
    let orphan =
        Orphan { pid, command: named("CNI_COMMAND"), container_id: named("CNI_CONTAINERID"), gone: false };
    is_called(pid, &stat).then_some(orphan)
}

/// Whether the process leads its process group but not its session, as a plugin does from start to end: see
/// proc_pid_stat(5).
fn is_called(pid: i32, stat: &str) -> bool {
    // The name before it may contain anything, even parentheses.
    let Some((_, fields)) = stat.rsplit_once(") ") else { return false };
    let mut fields = fields.split(' ');
    let (Some(state), Some(_parent)) = (fields.next(), fields.next()) else { return false };
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<i32>().ok());
    let (Some(group), Some(session)) = (number(fields.next()), number(fields.next())) else { return false };
    group == pid && session != pid && !matches!(state, "Z" | "X")
}

fn end(orphan: &Orphan, process: &OwnedFd) {
    // The leader still exists, so the number identifies its group.
    if let Some(group) = Pid::from_raw(orphan.pid) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    // A failure means that the process has already ended.
    let _ = pidfd_send_signal(process, Signal::KILL);
}

/// Whether the process ends before the deadline.
fn has_ended(process: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // All durations here are far below the kernel's limit.
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(process, PollFlags::IN)], timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_leads_its_group_and_not_its_session() {
        let stat =
            |state: &str, group: i32, session: i32| format!("42 (a) (b) {state} 1 {group} {session} 0 -1");
        assert!(is_called(42, &stat("S", 42, 7)));
        assert!(!is_called(42, &stat("S", 42, 42)), "a daemon");
        assert!(!is_called(42, &stat("S", 41, 7)), "started by the plugin");
        assert!(!is_called(42, &stat("Z", 42, 7)), "over");
        assert!(!is_called(42, "42 (x"));
    }
}
