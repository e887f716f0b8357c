//! A machine with container runtimes: a [`Node`] and, on separate mounts, containerd and podman as Debian ships them,
//! with everything at its usual path. Nothing is installed, and nothing outlasts the value.
//!
//! `mounts`, `containerd` with its `cri`, `podman`, an `image` to run, and the `cgroups` that runtimes leave.

mod cgroups;
pub mod containerd;
pub mod cri;
mod image;
mod mounts;
pub mod podman;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};

use crate::node::{executable, ip};
use crate::{Node, tools};

use mounts::Mounts;

/// Image of every container: busybox alone, as `/bin/busybox` and under the names of its applets.
pub const IMAGE: &str = "localhost/busybox:1";

/// Where runtimes look for CNI configurations by default.
pub const CONFIGURATIONS: &str = "/etc/cni/net.d";
/// Where runtimes look for CNI plugins.
pub const PLUGINS: &str = "/opt/cni/bin";
/// The directory of containerd's state in memory.
const STATE: &str = "/run/containerd";
/// The Debian suite of all programs except a newer containerd.
const SUITE: &str = "bookworm";
const PROGRAMS: [&str; 7] = [
    "bookworm/usr/bin/containerd",
    "bookworm/usr/bin/ctr",
    "bookworm/usr/bin/podman",
    "bookworm/usr/bin/conmon",
    "bookworm/usr/sbin/runc",
    "bookworm/bin/busybox",
    "sid/usr/bin/containerd",
];
/// The longest that a program of a runtime may take.
const PATIENCE: Duration = Duration::from_secs(60);

static MACHINES: AtomicU32 = AtomicU32::new(0);

/// A machine. It belongs to the thread that made it, whose mounts it has changed.
#[derive(Debug)]
pub struct Machine {
    // Dropped before the node: the node's directory can be removed only from outside of the mounts in it.
    mounts: Mounts,
    /// The node with netattach. Runtimes start in the node's namespace.
    pub node: Node,
    name: String,
    more_groups: Vec<String>,
    tools: PathBuf,
}

impl Machine {
    /// Makes a machine of a node whose agent does not run yet. Without the runtimes the test is reported as skipped,
    /// and there is no machine.
    ///
    /// # Errors
    /// The machine cannot be made.
    pub fn new(test: &str, node: Node) -> Result<Option<Self>> {
        let Some(machine) = Self::enter(test, node)? else { return Ok(None) };
        machine.install_plugins()?;
        Ok(Some(machine))
    }

    /// Makes a machine without netattach and without another network, whose mounts propagate to the containers as
    /// under systemd. If `has_bpffs` is not set, it has no BPF file system.
    ///
    /// # Errors
    /// The machine cannot be made.
    pub fn bare(test: &str, node: Node, has_bpffs: bool) -> Result<Option<Self>> {
        let Some(mut machine) = Self::enter(test, node)? else { return Ok(None) };
        machine.mounts.as_systemd_does(has_bpffs)?;
        for directory in [PLUGINS, "/etc/cni", "/var/lib/cni", "/var/lib/netattach"] {
            fs::remove_dir_all(directory).or_else(absent_is_fine)?;
        }
        fs::create_dir_all(PLUGINS)?;
        fs::create_dir_all(CONFIGURATIONS)?;
        Ok(Some(machine))
    }

    fn enter(test: &str, node: Node) -> Result<Option<Self>> {
        let Some(tools) = tools::directory(test, "NETATTACH_RUNTIMES", &PROGRAMS) else { return Ok(None) };
        let number = MACHINES.fetch_add(1, Ordering::Relaxed);
        let name = format!("netattach-test-{}-{number}", std::process::id());
        let scratch = node.path("mounts");
        fs::create_dir(&scratch)?;
        let mounts = Mounts::enter(&scratch)?;
        // Copied into containers; on the machine it may lead into the directory that is hidden now.
        fs::remove_file("/etc/resolv.conf").or_else(absent_is_fine)?;
        fs::write("/etc/resolv.conf", "nameserver 192.0.2.53\n")?;
        ip(&node.namespace, &["link", "set", "lo", "up"])?;
        Ok(Some(Self { mounts, node, name, more_groups: Vec::new(), tools }))
    }

    /// Writes a network list for netattach, of that version, into the directory that the runtimes read.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn network(&self, directory: &str, name: &str, version: &str) -> Result<()> {
        let mut plugin = self.node.cni_config(version);
        let keys = plugin.as_object_mut().context("a configuration is an object")?;
        keys.retain(|key, _| key != "cniVersion" && key != "name");
        let list = json!({"cniVersion": version, "name": name, "plugins": [plugin]});
        fs::create_dir_all(directory)?;
        Ok(fs::write(Path::new(directory).join(format!("10-{name}.conflist")), list.to_string())?)
    }

    /// The runtimes' calls of netattach since the last query, in order, without VERSION.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn take_calls(&self) -> Result<Vec<Value>> {
        let mut calls = self.node.take_calls()?;
        calls.retain(|call| call["env"]["CNI_COMMAND"] != "VERSION");
        Ok(calls)
    }

    /// Runs a program of a runtime to its end; returns its standard output.
    ///
    /// # Errors
    /// The program cannot be started, fails or does not end.
    fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let mut command = self.command(SUITE, program)?;
        // Files, not pipes: processes that a runtime leaves running may keep its standard output open.
        let (out, err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        command.args(words).stdout(out.try_clone()?).stderr(err.try_clone()?);
        let mut child =
            self.node.namespace.run(|| command.spawn()).with_context(|| format!("start {program}"))?;
        let ended = ends(&child)?;
        if !ended {
            child.kill()?;
        }
        let status = child.wait()?;
        let (out, err) = (content(out)?, content(err)?);
        ensure!(ended, "{program} {words:?} does not end: {out}{err}");
        ensure!(status.success(), "{program} {words:?}: {out}{err}");
        Ok(out)
    }

    /// A program of a suite, with only the environment that it needs.
    fn command(&self, suite: &str, program: &str) -> Result<Command> {
        let found = ["bin", "sbin"].map(|dir| self.tools.join(suite).join("usr").join(dir));
        let path = found.iter().map(|dir| dir.join(program)).find(|path| path.is_file());
        let base = self.tools.join(SUITE).join("usr");
        let directories = [self.tools.join(suite).join("usr/bin"), base.join("bin"), base.join("sbin")];
        let usual = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
        let mut command = Command::new(path.with_context(|| format!("{program} is not in {suite}"))?);
        command
            .env_clear()
            .env("PATH", std::env::join_paths(directories.into_iter().chain(usual))?)
            .env("LD_LIBRARY_PATH", base.join(format!("lib/{}-linux-gnu", std::env::consts::ARCH)))
            .env("HOME", "/run")
            .stdin(Stdio::null());
        Ok(command)
    }

    /// The control groups that containers of this machine have at present.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        cgroups::named(&self.name)
    }

    /// Simulates a power failure and starts again: processes, namespaces and mounts are gone, and the agent does not
    /// run. The disk stays, except the runtime's part of it if that is `wiped`.
    pub(crate) fn lose_power(&mut self, wiped: bool) -> Result<()> {
        self.node.kill()?;
        self.mounts.end_processes();
        self.mounts.empty(mounts::HIDDEN)?;
        if wiped {
            self.mounts.empty(mounts::SNAPSHOTS)?;
        }
        self.node.lose_power()
    }

    /// Removes containerd's state, on disk and in memory. The namespaces of pods stay.
    fn forget_runtime(&self) -> Result<()> {
        self.mounts.empty(mounts::SNAPSHOTS)?;
        self.mounts.forget(Path::new(STATE))
    }

    /// When the machine is dropped, control groups of that name are removed too.
    pub(crate) fn also_remove(&mut self, group: &str) {
        self.more_groups.push(group.to_owned());
    }

    /// Returns the parent of the containers' control groups, which separates them from others.
    fn cgroup_parent(&self) -> String {
        format!("/{}", self.name)
    }

    /// The archive of [`IMAGE`].
    fn archive(&self) -> Result<PathBuf> {
        let archive = self.node.path("image.tar");
        if !archive.exists() {
            image::write(&archive, &self.tools.join(SUITE).join("bin/busybox"))?;
        }
        Ok(archive)
    }

    /// Installs netattach behind a recorder, and the plugin `loopback`.
    fn install_plugins(&self) -> Result<()> {
        self.node.plugin("netattach", &json!({"exec": executable("netattach")?}))?;
        symlink(executable("netattach-cni")?, self.node.path("cni-bin/loopback"))?;
        fs::create_dir_all(PLUGINS)?;
        rustix::mount::mount_bind(self.node.path("cni-bin"), PLUGINS).context("put the plugins into place")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.mounts.end_processes();
        cgroups::remove(&self.name);
        self.more_groups.iter().for_each(|group| cgroups::remove(group));
    }
}

/// A daemon of a runtime.
#[derive(Debug)]
struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    fn start(machine: &Machine, mut command: Command, name: &str) -> Result<Self> {
        let log = machine.node.path(&format!("{name}.log"));
        let file = File::create(&log)?;
        command.stdout(file.try_clone()?).stderr(file);
        let child =
            machine.node.namespace.run(|| command.spawn()).with_context(|| format!("start {name}"))?;
        Ok(Self { child, log })
    }

    /// `kill -9`, unless it has ended already.
    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its log so far.
    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            let said = self.said();
            let telling = said.lines().filter(|line| !line.contains("level=info"));
            eprintln!(
                "--- {}\n{}---",
                self.log.display(),
                telling.map(|line| format!("{line}\n")).collect::<String>()
            );
        }
    }
}

/// Waits for a process; whether it ended in time.
fn ends(child: &Child) -> Result<bool> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let patience = Timespec { tv_sec: PATIENCE.as_secs().try_into()?, tv_nsec: 0 };
    Ok(poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience))? > 0)
}

/// The whole content of a file that a child has written through a copy of the descriptor.
fn content(mut file: File) -> Result<String> {
    use std::io::Seek;
    file.rewind()?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text)
}

fn absent_is_fine(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
