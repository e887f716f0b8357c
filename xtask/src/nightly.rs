//! `cargo xtask nightly`: what takes too long for the gate, by name. The gate says what it leaves out.

use std::env;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::progress;
use crate::suite::Stages;

/// What is run at night, as arguments of `cargo xtask`.
const RUNS: [&[&str]; 8] = [
    &["soak"],
    &["demo", "--cluster"],
    &["test", "--longer"],
    &["test", "--upgrade"],
    &["bench", "cluster", "--check"],
    &["bench", "scale", "--check"],
    &["image", "--check", "--twice"],
    &["fuzz", "--long"],
];
/// The suites whose tests have a longer form, which `test --longer` runs: in `cluster` the API server is away for two minutes
/// in place of 20 s, and the agent is killed 12 times in place of 3 at each change of a Deployment.
pub(crate) const LONGER: [&str; 1] = ["cluster"];
/// What tells them, and its value.
pub(crate) const VARIABLE: (&str, &str) = ("NETATTACH_NIGHTLY", "1");

/// The names of what is run at night.
pub fn names() -> String {
    RUNS.map(|words| words.join(" ")).join(", ")
}

/// Runs all of it, whatever fails.
///
/// # Errors
/// What has failed; its own output says why.
pub fn run() -> anyhow::Result<()> {
    let xtask = env::current_exe().context("find this executable")?;
    let mut stages = Stages::new();
    let mut failed = Vec::new();
    for words in RUNS {
        let name = words.join(" ");
        progress::heading(&format!("nightly: {name}"));
        let run = |_: &mut Stages| {
            let mut command = Command::new(&xtask);
            let status = command.args(words).stdin(Stdio::null()).status();
            Ok(status.with_context(|| format!("start {name}"))?.success())
        };
        if !stages.timed(&name, run)? {
            failed.push(name);
        }
    }
    progress::line(&stages.table());
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}
