//! `cargo xtask nightly`: what takes too long for the gate, by name. The gate says what it leaves out.

use std::env;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::progress;
use crate::suite::Stages;

/// What is run at night, as arguments of `cargo xtask`.
const RUNS: [&[&str]; 3] = [&["soak"], &["bench", "cluster", "--check"], &["fuzz", "--long"]];

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
