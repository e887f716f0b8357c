//! containerd: the daemon, and its plain client `ctr`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{CONFIGURATIONS, Daemon, IMAGE, Machine, cri, ends};
use crate::guide;
use crate::traffic::eventually;

/// The daemon's socket.
pub const SOCKET: &str = "/run/containerd/containerd.sock";
const START: Duration = Duration::from_secs(30);
/// Namespace of Kubernetes' containers, in containerd's own sense of the word.
const KUBERNETES: &str = "k8s.io";

/// The page that has the settings of each version.
const PAGE: &str = include_str!("../../../docs/runtimes.md");

/// Additional settings for a test machine: an image of its own, and no lowering of the out-of-memory score, for which
/// it may lack the capability.
const MORE_1_6: &str = r#"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/busybox:1"
restrict_oom_score_adj = true
disable_apparmor = true
"#;
const MORE_2: &str = r#"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "localhost/busybox:1"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true
"#;

/// The versions that tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Of Debian 12: CNI 1.0.
    V1_6,
    /// CNI 1.1: it asks for STATUS.
    V2,
}

/// A running containerd, with [`IMAGE`].
#[derive(Debug)]
pub struct Containerd {
    daemon: Daemon,
    version: Version,
    reading: Reading,
    /// The machine that it runs on.
    pub machine: Machine,
}

/// The CNI configurations that its CRI plugin reads.
#[derive(Debug)]
struct Reading {
    directory: String,
    /// Most of them for one pod.
    most: u32,
}

/// A container started by `ctr run`, which waits for its end.
#[derive(Debug)]
pub struct Container<'a> {
    containerd: &'a Containerd,
    name: String,
    client: Daemon,
}

impl Container<'_> {
    /// `ctr task exec` of busybox; returns its output.
    ///
    /// # Errors
    /// The command fails.
    pub fn exec(&self, words: &[&str]) -> Result<String> {
        self.task(&[&["exec", "--exec-id", "probe", &self.name, "/bin/busybox"], words].concat())
    }

    /// Kills the container's process and waits until `ctr` has called DEL and ended.
    ///
    /// # Errors
    /// `ctr` fails.
    pub fn end(self) -> Result<()> {
        self.task(&["kill", "--signal", "SIGKILL", &self.name])?;
        ensure!(ends(&self.client.child)?, "ctr run does not end: {}", self.client.said());
        Ok(())
    }

    fn task(&self, words: &[&str]) -> Result<String> {
        let machine = &self.containerd.machine;
        ctr(machine, &machine.name, &[&["task"], words].concat())
    }
}

impl Version {
    /// The newest version of the CNI specification that it supports.
    pub fn cni(self) -> &'static str {
        match self {
            Self::V1_6 => "1.0.0",
            Self::V2 => "1.1.0",
        }
    }

    /// Returns the directory in which its CRI plugin looks for CNI configurations: one of the versions uses a
    /// directory of the tests.
    pub fn configurations(self) -> &'static str {
        match self {
            Self::V1_6 => CONFIGURATIONS,
            Self::V2 => "/etc/netattach/net.d",
        }
    }

    /// Returns the daemon's settings: those of the page, with the configurations to read and the additions for a test
    /// machine.
    fn settings(self, reading: &Reading) -> Result<String> {
        let (number, more) = match self {
            Self::V1_6 => ("version = 2", MORE_1_6),
            Self::V2 => ("version = 3", MORE_2),
        };
        let Reading { directory, most } = reading;
        let shown = guide::example(PAGE, "toml", number)?;
        let usual = format!("conf_dir = {CONFIGURATIONS:?}");
        ensure!(shown.contains(&usual), "docs/runtimes.md does not name the usual directory");
        Ok(shown.replace(&usual, &format!("conf_dir = {directory:?}\nmax_conf_num = {most}")) + more)
    }

    fn suite(self) -> &'static str {
        match self {
            Self::V1_6 => "bookworm",
            Self::V2 => "sid",
        }
    }
}

impl Containerd {
    /// Starts the daemon and waits until it serves.
    ///
    /// # Errors
    /// The daemon does not serve in time.
    pub fn start(machine: Machine, version: Version) -> Result<Self> {
        let reading = Reading { directory: version.configurations().to_owned(), most: 1 };
        let containerd = Self { version, daemon: serving(&machine, version, &reading)?, reading, machine };
        containerd.import()?;
        Ok(containerd)
    }

    fn import(&self) -> Result<()> {
        let archive = self.machine.archive()?;
        let archive = archive.to_str().context("a path that is text")?;
        for namespace in [KUBERNETES, &self.machine.name] {
            ctr(&self.machine, namespace, &["images", "import", archive])?;
        }
        Ok(())
    }

    /// `ctr images import` of an archive; returns its output.
    ///
    /// # Errors
    /// The archive is refused.
    pub fn import_from(&self, archive: &Path) -> Result<String> {
        let archive = archive.to_str().context("a path that is text")?;
        ctr(&self.machine, &self.machine.name, &["images", "import", archive])
    }

    /// Takes an archive for the pods of Kubernetes, as `ctr --namespace k8s.io images import` on a node does.
    ///
    /// # Errors
    /// The archive is refused.
    pub fn import_for_pods(&self, archive: &Path) -> Result<String> {
        let archive = archive.to_str().context("a path that is text")?;
        ctr(&self.machine, KUBERNETES, &["images", "import", archive])
    }

    /// Gives an image of the pods of Kubernetes another name.
    ///
    /// # Errors
    /// There is no such image.
    pub fn tag_for_pods(&self, image: &str, other: &str) -> Result<String> {
        ctr(&self.machine, KUBERNETES, &["images", "tag", image, other])
    }

    /// The images that it has, one row for each.
    ///
    /// # Errors
    /// `ctr` fails.
    pub fn images(&self) -> Result<String> {
        ctr(&self.machine, &self.machine.name, &["images", "list"])
    }

    /// `ctr run` of one process in a container of an image, to its end; returns its output.
    ///
    /// # Errors
    /// The process cannot be started or fails.
    pub fn run_once(&self, image: &str, name: &str, words: &[&str]) -> Result<String> {
        ctr(
            &self.machine,
            &self.machine.name,
            &[&["run", "--rm", "--read-only", image, name], words].concat(),
        )
    }

    /// Kills the daemon (`kill -9`) and starts it again: its containers stay.
    ///
    /// # Errors
    /// As [`Containerd::start`].
    pub fn restart(&mut self) -> Result<()> {
        self.daemon.end();
        self.daemon = serving(&self.machine, self.version, &self.reading)?;
        Ok(())
    }

    /// As [`Containerd::restart`], reading at most that many CNI configurations from a directory.
    ///
    /// # Errors
    /// As [`Containerd::start`].
    pub fn restart_reading(&mut self, directory: &str, most: u32) -> Result<()> {
        self.reading = Reading { directory: directory.to_owned(), most };
        self.restart()
    }

    /// Kills the daemon and starts it again without its state: containers keep running, but no daemon knows them.
    ///
    /// # Errors
    /// As [`Containerd::start`].
    pub fn restart_wiped(&mut self) -> Result<()> {
        self.daemon.end();
        self.machine.forget_runtime()?;
        self.serve_anew(true)
    }

    /// Serves on a machine that has started again.
    pub(crate) fn serve_anew(&mut self, wiped: bool) -> Result<()> {
        self.daemon.end();
        self.daemon = serving(&self.machine, self.version, &self.reading)?;
        if wiped { self.import() } else { Ok(()) }
    }

    /// A client of the container runtime interface.
    ///
    /// # Errors
    /// No connection, or the runtime does not serve it.
    pub fn cri(&self) -> Result<cri::Client> {
        let mut client = cri::Client::connect(SOCKET, self.machine.cgroup_parent())?;
        ensure!(eventually(START, || client.is_served()), "the interface for Kubernetes does not get ready");
        Ok(client)
    }

    /// `ctr run --cni`: a container with a network, outside of Kubernetes. Returns when it runs.
    ///
    /// # Errors
    /// The container does not run.
    pub fn run(&self, name: &str) -> Result<Container<'_>> {
        let mut command = self.machine.command(Version::V1_6.suite(), "ctr")?;
        command
            .args(["--address", SOCKET, "--namespace", &self.machine.name])
            .args(["run", "--rm", "--cni", IMAGE, name]);
        let client = Daemon::start(&self.machine, command, name)?;
        let container = Container { containerd: self, name: name.to_owned(), client };
        // Created, network made, started: in this order.
        let runs = || container.task(&["list"]).is_ok_and(|tasks| is_running(&tasks, name));
        ensure!(eventually(START, runs), "ctr run: {}", container.client.said());
        Ok(container)
    }
}

/// Whether the table of tasks (name, process id, state) shows a task as running.
fn is_running(tasks: &str, name: &str) -> bool {
    tasks.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.first() == Some(&name) && words.last() == Some(&"RUNNING")
    })
}

fn serving(machine: &Machine, version: Version, reading: &Reading) -> Result<Daemon> {
    let config = machine.node.path("containerd.toml");
    fs::write(&config, version.settings(reading)?)?;
    let mut command = machine.command(version.suite(), "containerd")?;
    command.arg("--config").arg(&config);
    let daemon = Daemon::start(machine, command, "containerd")?;
    let serves = || Path::new(SOCKET).exists() && ctr(machine, KUBERNETES, &["version"]).is_ok();
    ensure!(eventually(START, serves), "containerd does not answer: {}", daemon.said());
    Ok(daemon)
}

fn ctr(machine: &Machine, namespace: &str, words: &[&str]) -> Result<String> {
    machine.run("ctr", &[&["--address", SOCKET, "--namespace", namespace], words].concat())
}
