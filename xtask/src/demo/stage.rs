//! The demo's node, with namespaces of its own, so that nothing can be left on the machine.
//!
//! The calling thread moves to a new network namespace, which is the node, and to a new mount namespace with a
//! `/run` and a BPF filesystem of its own. Named namespaces of pods, leases, socket, journal and pins exist
//! only there: the kernel removes them with the last process, however it ends.

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use anyhow::{Context, anyhow, bail, ensure};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::Value;

use crate::{setup, tree};

/// State of the demo, in its own `/run`.
pub(super) const HOME: &str = "/run/netattach-demo";
/// The pins.
pub(super) const BPFFS: &str = "/sys/fs/bpf/netattach-demo";
/// The pods, by the names of their manifests and of their network namespaces.
pub(super) const PODS: [&str; 3] = ["server", "client", "other"];
/// A machine behind the node's link `demo-lan`; no pod.
pub(super) const NEIGHBOUR: &str = "neighbour";

/// Deadline for a predicate to hold.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(2);
const LOG_LINES: usize = 12;

/// The node, and the agent while it runs.
pub(super) struct Stage {
    path: String,
    agent: Option<Child>,
}

impl Stage {
    /// Moves the calling thread to a new node and prepares it.
    pub(super) fn enter() -> anyhow::Result<Self> {
        // SAFETY: namespaces and working directory of this thread change; memory and descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }
            .context("make network and mount namespaces")?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .context("keep mounts to ourselves")?;
        for (kind, target) in [("tmpfs", "/run"), ("bpf", "/sys/fs/bpf")] {
            mount(kind, target, kind, MountFlags::empty(), None)
                .with_context(|| format!("mount a private {kind} on {target}"))?;
        }
        let manifests = Path::new(HOME).join("manifests");
        fs::create_dir_all(&manifests).with_context(|| format!("create {}", manifests.display()))?;
        for name in manifest_names(&tree::root().join("examples/demo"))? {
            fs::copy(tree::root().join("examples/demo").join(&name), manifests.join(&name))
                .with_context(|| format!("copy {name}"))?;
        }
        let stage = Self { path: search_path()?, agent: None };
        stage.furnish()?;
        Ok(stage)
    }

    fn furnish(&self) -> anyhow::Result<()> {
        self.run("ip link set lo up")?;
        for namespace in PODS.into_iter().chain([NEIGHBOUR]) {
            self.run(&format!("ip netns add {namespace} && ip -n {namespace} link set lo up"))?;
        }
        self.run(&format!(
            "ip link add demo-lan up type veth peer name wire netns {NEIGHBOUR} &&
             ip -n {NEIGHBOUR} addr add 10.202.0.1/24 dev wire &&
             ip -n {NEIGHBOUR} link set wire up"
        ))?;
        Ok(())
    }

    /// Runs a line of shell on the node and returns its standard output.
    ///
    /// # Errors
    /// It fails; carries its output.
    pub(super) fn run(&self, line: &str) -> anyhow::Result<String> {
        let output = self.shell(line).stdin(Stdio::null()).output().context("start sh")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "`{line}` failed ({}): {}{}",
            output.status,
            complaint.trim(),
            said.trim()
        );
        Ok(said)
    }

    /// Runs a line of shell whose output is JSON.
    pub(super) fn json(&self, line: &str) -> anyhow::Result<Value> {
        let said = self.run(line)?;
        serde_json::from_str(&said).with_context(|| format!("`{line}` does not write JSON"))
    }

    /// A shell that ends with this program.
    pub(super) fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]).env("PATH", &self.path).env("LC_ALL", "C").current_dir(HOME);
        // SAFETY: between fork and exec only prctl(2) is called, which is safe there.
        unsafe { command.pre_exec(end_with_parent) };
        command
    }

    /// Starts the agent by a line of shell and waits until it is ready; returns how long that took.
    pub(super) fn start_agent(&mut self, line: &str) -> anyhow::Result<Duration> {
        let started = Instant::now();
        let log = File::options()
            .append(true)
            .create(true)
            .open(Path::new(HOME).join("agent.log"))
            .context("open the agent's log")?;
        let mut asking = self.shell("exec netattachctl status");
        asking.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let agent = self
            .shell(&format!("exec {line}"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the agent's log")?)
            .stderr(log)
            .spawn()
            .context("start netattachd")?;
        let agent = self.agent.insert(agent);
        until("netattachd is ready", || {
            if let Some(status) = agent.try_wait().context("poll netattachd")? {
                bail!("netattachd ended before it was ready ({status})");
            }
            Ok(asking.status().context("start sh")?.success())
        })?;
        Ok(started.elapsed())
    }

    /// Process id of the agent.
    pub(super) fn agent_pid(&self) -> anyhow::Result<u32> {
        self.agent.as_ref().map(Child::id).context("the agent does not run")
    }

    /// Sends the agent a signal and waits until it has ended.
    pub(super) fn end_agent(&mut self, signal: Signal) -> anyhow::Result<()> {
        let mut agent = self.agent.take().context("the agent does not run")?;
        let pid = Pid::from_raw(agent.id().cast_signed()).context("the agent has no process id")?;
        kill_process(pid, signal).context("signal netattachd")?;
        let ended =
            until("netattachd has ended", || Ok(agent.try_wait().context("wait for netattachd")?.is_some()));
        if ended.is_err() {
            // Killed if it does not end by itself.
            self.agent = Some(agent);
        }
        ended
    }

    /// The last lines that the agent wrote.
    pub(super) fn agent_log() -> String {
        let log = fs::read_to_string(Path::new(HOME).join("agent.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    /// Names of the links in a pod's namespace, or on the node, sorted.
    pub(super) fn links(&self, pod: Option<&str>) -> anyhow::Result<Vec<String>> {
        let of = pod.map(|pod| format!("-n {pod} ")).unwrap_or_default();
        let links = self.json(&format!("ip {of}-j link"))?;
        let mut names: Vec<String> =
            each(&links).filter_map(|link| Some(link["ifname"].as_str()?.to_owned())).collect();
        names.sort();
        Ok(names)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            // Harmless when it has ended by itself.
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

/// Runs `work` in the network namespace of a pod.
///
/// # Errors
/// Those of `work`, or the namespace cannot be entered.
pub(super) fn inside<T: Send + 'static>(
    pod: &str,
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> thread::JoinHandle<anyhow::Result<T>> {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    use std::os::fd::AsFd;

    let path = format!("/run/netns/{pod}");
    thread::spawn(move || {
        let namespace = File::open(&path).with_context(|| format!("open {path}"))?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| format!("enter {path}"))?;
        work()
    })
}

/// The result of a thread of [`inside`].
pub(super) fn joined<T>(thread: thread::JoinHandle<anyhow::Result<T>>) -> anyhow::Result<T> {
    thread.join().map_err(|_| anyhow!("a thread in a pod's namespace panicked"))?
}

/// Waits until something holds.
///
/// # Errors
/// It does not hold within [`PATIENCE`], or cannot be evaluated.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !holds()? {
        ensure!(Instant::now() < deadline, "still not so after {} s: {what}", PATIENCE.as_secs());
        // These send no notice: a socket, a process, kernel objects that are freed later.
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Elements of a JSON array; none for anything else.
pub(super) fn each(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Names of files below a directory that are addresses: leases in the format of host-local.
pub(super) fn leases(directory: &Path) -> anyhow::Result<Vec<String>> {
    let name = |file: &str| file.rsplit('/').next().unwrap_or_default().to_owned();
    let files = files_below(directory)?;
    Ok(files.iter().map(|file| name(file)).filter(|name| name.parse::<IpAddr>().is_ok()).collect())
}

/// Paths of all files below a directory, which need not exist.
pub(super) fn files_below(directory: &Path) -> anyhow::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("list {}", directory.display()))?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("list {}", directory.display()))?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path.display().to_string());
        }
    }
    files.sort();
    Ok(files)
}

fn manifest_names(directory: &Path) -> anyhow::Result<Vec<String>> {
    let files = files_below(directory)?;
    let name = |file: &String| file.rsplit('/').next().map(str::to_owned);
    Ok(files.iter().filter_map(name).filter(|name| name.ends_with(".yaml")).collect())
}

/// Our executables and bpftool first, then the user's path with the directories of administration tools.
fn search_path() -> anyhow::Result<String> {
    let bpftool = setup::bpftool().context("there is no bpftool")?;
    let bpftool = bpftool.parent().context("bpftool is in no directory")?.to_owned();
    let user = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(
        [tree::dist(), bpftool]
            .into_iter()
            .chain(env::split_paths(&user))
            .chain(["/usr/sbin", "/sbin"].map(Into::into)),
    );
    path.context("spell PATH")?.into_string().map_err(|path| anyhow!("PATH is not text: {}", path.display()))
}

/// An interrupted demo takes its processes with it.
fn end_with_parent() -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_a_file_named_like_an_address() {
        let directory = tempfile::tempdir().unwrap();
        for file in ["lan/10.0.0.2", "lan/lock", "lan/last_reserved_ip.0", "storage/fd00::2"] {
            let path = directory.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert_eq!(leases(directory.path()).unwrap(), ["10.0.0.2", "fd00::2"]);
        assert_eq!(leases(&directory.path().join("absent")).unwrap(), [""; 0]);
    }
}
