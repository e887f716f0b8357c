//! podman with the backend that calls CNI plugins.

use std::fs;

use anyhow::{Context, Result};

use super::{IMAGE, Machine, SUITE};
use crate::guide;

/// The page that has its settings.
const PAGE: &str = include_str!("../../../docs/runtimes.md");

/// podman as root, with [`IMAGE`].
#[derive(Debug)]
pub struct Podman {
    /// The machine that it is used on.
    pub machine: Machine,
}

impl Podman {
    /// Writes podman's configuration at its default place, and loads the image.
    ///
    /// # Errors
    /// podman fails.
    pub fn set_up(machine: Machine) -> Result<Self> {
        let runc = machine.command(SUITE, "runc")?.get_program().to_owned();
        let conmon = machine.command(SUITE, "conmon")?.get_program().to_owned();
        fs::create_dir_all("/etc/containers")?;
        let shown = guide::example(PAGE, "toml", "network_backend")?;
        // Limits stay unchanged: raising one takes a capability that a test machine may lack.
        let configuration = format!(
            r#"{shown}[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
conmon_path = [{conmon:?}]
[engine.runtimes]
runc = [{runc:?}]
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"#
        );
        fs::write("/etc/containers/containers.conf", configuration)?;
        let storage = r#"[storage]
driver = "vfs"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
"#;
        fs::write("/etc/containers/storage.conf", storage)?;
        fs::write("/etc/containers/policy.json", r#"{"default": [{"type": "insecureAcceptAnything"}]}"#)?;
        let podman = Self { machine };
        let archive = podman.machine.archive()?;
        podman.podman(&["load", "--input", archive.to_str().context("a path that is text")?])?;
        Ok(podman)
    }

    /// `podman run --detach`: a container on these networks, each in the syntax of podman's option `--network`.
    ///
    /// # Errors
    /// podman fails.
    pub fn run(&self, container: &str, networks: &[&str]) -> Result<()> {
        let networks: Vec<&str> = networks.iter().flat_map(|network| ["--network", network]).collect();
        self.run_with(container, &networks)
    }

    /// `podman run --detach` with these options.
    ///
    /// # Errors
    /// podman fails.
    pub fn run_with(&self, container: &str, options: &[&str]) -> Result<()> {
        let parent = self.machine.cgroup_parent();
        let words = ["run", "--detach", "--cgroup-parent", &parent, "--name", container];
        self.podman(&[&words, options, &[IMAGE]].concat()).map(drop)
    }

    /// `podman exec` of busybox; returns its output.
    ///
    /// # Errors
    /// podman fails.
    pub fn exec(&self, container: &str, words: &[&str]) -> Result<String> {
        self.podman(&[&["exec", container, "/bin/busybox"], words].concat())
    }

    /// A field of `podman inspect`, as a Go template.
    ///
    /// # Errors
    /// podman fails.
    pub fn inspect(&self, container: &str, template: &str) -> Result<String> {
        Ok(self.podman(&["inspect", "--format", template, container])?.trim().to_owned())
    }

    /// The path of a container's network namespace.
    ///
    /// # Errors
    /// The container does not run.
    pub fn netns(&self, container: &str) -> Result<String> {
        self.inspect(container, "{{.NetworkSettings.SandboxKey}}")
    }

    /// Stops a container and starts it again.
    ///
    /// # Errors
    /// podman fails.
    pub fn restart(&self, container: &str) -> Result<()> {
        self.podman(&["restart", "--time", "0", container]).map(drop)
    }

    /// Kills and removes a container.
    ///
    /// # Errors
    /// podman fails.
    pub fn remove(&self, container: &str) -> Result<()> {
        self.podman(&["rm", "--force", "--time", "0", container]).map(drop)
    }

    fn podman(&self, words: &[&str]) -> Result<String> {
        self.machine.run("podman", words)
    }
}
