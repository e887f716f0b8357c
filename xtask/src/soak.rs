//! `cargo xtask soak`: pods come and go at random on two nodes, with a server that fails and agents that die, against a
//! model of what must hold (`tests/src/soak`).

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::thread::JoinHandle;

use anyhow::{Context, bail};

use crate::suite::{self, Count};
use crate::{child, dist, progress, setup, tree};

/// How long it takes within `cargo xtask test`, in minutes.
pub(crate) const IN_TESTS: u32 = 2;
/// The seed that it uses there: a change must not fail because of bugs that new random decisions find. The nightly
/// form uses new seeds.
const SEED_IN_TESTS: u64 = 1_886_525_679;
/// How long it takes in the nightly form, in minutes.
pub const NIGHTLY: u32 = 10;

/// What to do.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How long pods come and go.
    pub minutes: u32,
    /// Repeats the decisions of an earlier run.
    pub seed: Option<u64>,
    /// Attachments that stay meanwhile.
    pub attachments: u32,
}

/// Sets up, builds, and soaks, with a line now and then for a person.
///
/// # Errors
/// Anything that could not be prepared, or a failed check: the seed, the last steps and the directory of the logs
/// have been printed.
pub fn run(options: Options) -> anyhow::Result<()> {
    setup::run(setup::Scope::Testing)?;
    dist::build()?;
    progress::heading("soak");
    progress::step("compile", |progress| {
        let mut cargo = child::cargo();
        child::run(cargo.args(["build", "--package", "netattach-tests", "--bin", "soak"]), progress)?;
        Ok(progress::Done::Unchanged(String::new()))
    })?;
    let (_, success, status) =
        child::watch(&mut command(options)?, |line| progress::line(&tree::without_local_paths(line)))?;
    if !success {
        bail!("the soak failed ({status})");
    }
    Ok(())
}

/// A soak beside other tests.
pub(crate) struct Beside {
    thread: JoinHandle<anyhow::Result<(String, bool)>>,
}

impl Beside {
    /// Starts it. Its executable has been compiled with the other tests.
    ///
    /// # Errors
    /// It cannot be run as root.
    pub(crate) fn start() -> anyhow::Result<Self> {
        let mut command = command(Options { minutes: IN_TESTS, seed: Some(SEED_IN_TESTS), attachments: 0 })?;
        let thread = std::thread::spawn(move || {
            let (output, success, _) = child::watch(&mut command, |_| ())?;
            Ok((output, success))
        });
        Ok(Self { thread })
    }

    /// Waits until it has ended, and prints its output: the last line, or everything if a check failed. It counts as
    /// one test, and is not run again after a failure.
    ///
    /// # Errors
    /// It could not be run.
    pub(crate) fn wait(self) -> anyhow::Result<Count> {
        progress::heading("soak");
        let ended = self.thread.join().map_err(|_| anyhow::anyhow!("the thread of the soak panicked"))?;
        let (output, success) = ended.context("run the soak")?;
        let output = tree::without_local_paths(&output);
        if success {
            for line in output.lines().take(1).chain(output.lines().last()) {
                progress::line(&format!("  {line}"));
            }
            return Ok(Count { passed: 1, ..Count::default() });
        }
        progress::line(&output);
        Ok(Count { failed: 1, ..Count::default() })
    }
}

/// The executable with its arguments, as root.
fn command(options: Options) -> anyhow::Result<Command> {
    let variables = suite::variables();
    let runner = suite::runner(&variables)?;
    let executable: PathBuf = tree::root().join("target/debug/soak");
    let mut words = runner.iter().map(OsStr::new).chain([executable.as_os_str()]);
    let mut command = Command::new(words.next().context("there is an executable")?);
    command.args(words).args(["--minutes", &options.minutes.to_string()]);
    if let Some(seed) = options.seed {
        command.args(["--seed", &seed.to_string()]);
    }
    if options.attachments > 0 {
        command.args(["--attachments", &options.attachments.to_string()]);
    }
    command.arg("--logs").arg(tree::root().join("target/soak"));
    command.envs(variables).current_dir(tree::root());
    Ok(command)
}
