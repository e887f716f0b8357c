//! kubectl with all rights, as an operator runs it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Cluster, write_config};
use crate::guide::Operator;
use crate::{Namespace, tools};

/// A kubectl with its configuration.
#[derive(Debug)]
pub struct Kubectl {
    program: PathBuf,
    config: PathBuf,
    home: PathBuf,
    namespace: Arc<Namespace>,
}

/// The result of a command, and its output.
#[derive(Debug)]
pub struct Ended {
    /// Whether its exit code is 0.
    pub success: bool,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Cluster {
    /// Returns kubectl for this cluster; `None` without the program: the test is reported as skipped.
    ///
    /// # Errors
    /// Its configuration cannot be written.
    pub fn kubectl(&self, test: &str) -> Result<Option<Kubectl>> {
        let Some(tools) = tools::directory(test, "NETATTACH_KUBECTL", &["kubectl"]) else { return Ok(None) };
        let home = self.dir.path().join("operator");
        std::fs::create_dir_all(&home)?;
        let own = self.pki.client("operator", Some("system:masters"))?.write(&home, "operator")?;
        let credentials = json!({"client-certificate": own.certificate, "client-key": own.key});
        let config = write_config(&home, "operator", &credentials, self.pki.authority_file())?;
        Ok(Some(Kubectl { program: tools.join("kubectl"), config, home, namespace: self.namespace.clone() }))
    }
}

impl Kubectl {
    /// A command, which is not started yet.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(words).env("KUBECONFIG", &self.config).env("HOME", &self.home);
        command
    }

    /// A line of shell that finds this kubectl with its plugins, which is not started yet.
    pub fn shell(&self, line: &str) -> Command {
        let mut command = self.with_kubectl("sh");
        command.args(["-c", line]);
        command
    }

    /// Returns a shell for the commands of pages, in that directory, from which the cluster can be reached.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn operator(&self, directory: &Path) -> Result<Operator> {
        self.namespace.run(|| Operator::start(self.with_kubectl("bash"), directory))
    }

    /// A program that finds this kubectl with its plugins.
    fn with_kubectl(&self, program: &str) -> Command {
        let user = std::env::var_os("PATH").unwrap_or_default();
        let own = [self.home.as_path(), self.program.parent().unwrap_or(&self.home)];
        let path = own.map(Path::to_path_buf).into_iter().chain(std::env::split_paths(&user));
        let mut command = Command::new(program);
        command.env("KUBECONFIG", &self.config).env("HOME", &self.home);
        // A path with a colon cannot be joined, and its programs are then not found.
        command.env("PATH", std::env::join_paths(path).unwrap_or(user));
        command
    }

    /// Runs a line of shell in a namespace from which the cluster can be reached.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn ask(&self, line: &str, directory: &Path) -> Result<Ended> {
        let mut command = self.shell(line);
        command.current_dir(directory);
        self.ended(command)
    }

    /// Returns the directory for programs of plugins, which kubectl finds by their names.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn attempt(&self, words: &[&str]) -> Result<Ended> {
        self.ended(self.command(words))
    }

    fn ended(&self, mut command: Command) -> Result<Ended> {
        let output = self.namespace.run(|| command.output()).context("start kubectl")?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Ok(Ended {
            success: output.status.success(),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        })
    }

    /// Runs a command that has to succeed; returns its output.
    ///
    /// # Errors
    /// It fails.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let ended = self.attempt(words)?;
        ensure!(ended.success, "kubectl {words:?}: {}{}", ended.stderr, ended.stdout);
        Ok(ended.stdout)
    }

    /// Runs a command whose output is JSON.
    ///
    /// # Errors
    /// It fails, or its output is not JSON.
    pub fn json(&self, words: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.run(&[words, &["-o", "json"]].concat())?)?)
    }
}
