//! A shell in namespaces of its own that receives one command after the other.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

/// A running shell. It ends with this value, and with it everything that it has started.
#[derive(Debug)]
pub(super) struct Shell {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    home: PathBuf,
}

impl Shell {
    /// Starts it in that directory, which is `$home`.
    pub(super) fn start(home: &Path) -> Result<Self> {
        let mut shell = Command::new("unshare");
        shell.args(["--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]);
        shell.args(["--mount-proc", "bash"]);
        Self::start_as(shell, home)
    }

    /// Starts this command as the shell, in that directory, which is `$home`.
    pub(super) fn start_as(mut shell: Command, home: &Path) -> Result<Self> {
        let errors = fs::File::create(home.join("errors"))?;
        let mut child = shell
            .current_dir(home)
            .env("LC_ALL", "C")
            .env("home", home)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .context("start a shell")?;
        let commands = child.stdin.take().context("standard input")?;
        let answers = BufReader::new(child.stdout.take().context("standard output")?);
        Ok(Self { child, commands, answers, home: home.to_owned() })
    }

    /// Runs commands of which each has to succeed.
    pub(super) fn succeed(&mut self, commands: &str) -> Result<()> {
        self.run("set -euo pipefail", commands).map(drop)
    }

    /// Runs a command, whatever its result, and returns its output.
    pub(super) fn output(&mut self, command: &str) -> Result<String> {
        self.run("set +e", command)
    }

    fn run(&mut self, mode: &str, commands: &str) -> Result<String> {
        // The commands' own input is not that of the shell.
        let text = format!("{mode}\n{{ {commands}\n}} < /dev/null > $home/output 2>&1\necho done\n");
        let written = self.commands.write_all(text.as_bytes()).and_then(|()| self.commands.flush());
        let mut answer = String::new();
        let read = written.and_then(|()| self.answers.read_line(&mut answer));
        let printed = fs::read(self.home.join("output")).unwrap_or_default();
        let printed = String::from_utf8_lossy(&printed).into_owned();
        match read {
            Ok(_) if answer == "done\n" => Ok(printed),
            _ => {
                let errors = fs::read_to_string(self.home.join("errors")).unwrap_or_default();
                bail!(
                    "the shell has ended at\n{commands}\n--- output\n{printed}{errors}\n--- agent\n{}",
                    self.last_log()
                )
            }
        }
    }

    /// Returns the log of the agent.
    pub(super) fn agent_log(&mut self) -> String {
        self.output("cat /run/*/agent.log /run/netattachd.log").unwrap_or_default()
    }

    /// Returns the agent's log after the shell has ended.
    fn last_log(&self) -> String {
        fs::read_to_string(self.home.join("agent.log")).unwrap_or_default()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
