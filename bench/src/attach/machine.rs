//! A measurement in the virtual machine: this executable runs there with other arguments, and prints its measurements
//! in one line.

use std::env;
use std::path::Path;

use anyhow::{Context, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use xtask::vm::{self, Program};
use xtask::{dist, progress, setup};

use crate::{DIST_VARIABLE, Output};

/// The suite of the machine's kernel.
pub(super) const SUITE: &str = "trixie";
/// The mark before the figures in their line.
const FIGURES: &str = "figures of the bench: ";
/// Number of the machine's last lines that are shown if it has measured nothing.
const TAIL: usize = 40;

/// Sets the machine up, and builds the executables to measure in it.
pub(super) fn prepare(output: Output) -> anyhow::Result<()> {
    if output == Output::Json {
        progress::silence();
    }
    setup::run(setup::Scope::Machine)?;
    if env::var_os(DIST_VARIABLE).is_none() { dist::build() } else { Ok(()) }
}

/// Runs this executable in the machine with these arguments, and with executables beside it that it starts; returns
/// the value that it [prints](tell) there.
pub(super) fn measured<T: DeserializeOwned>(arguments: &[&str], beside: &[&Path]) -> anyhow::Result<T> {
    let own = env::current_exe().context("find this executable")?;
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let program = Program { name: "bench", executable: &own, arguments: &arguments, beside };
    let output = vm::program(SUITE, &program, &crate::dist())?;
    match figures_in(&output) {
        Some(figures) => serde_json::from_str(figures).context("read the machine's figures"),
        None => {
            let from = output.lines().count().saturating_sub(TAIL);
            let tail: Vec<&str> = output.lines().skip(from).map(str::trim_end).collect();
            bail!("nothing was measured in the machine:\n{}", tail.join("\n"));
        }
    }
}

/// In the machine: prints the measurements.
pub(super) fn tell(measured: &impl Serialize) -> anyhow::Result<()> {
    let measured = serde_json::to_string(measured).context("write the figures")?;
    progress::line(&format!("{FIGURES}{measured}"));
    Ok(())
}

/// Returns the text after the mark.
fn figures_in(output: &str) -> Option<&str> {
    output.lines().find_map(|line| Some(line.trim_end().split_once(FIGURES)?.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_what_follows_the_mark() {
        let output = "     Running tests/bench\r\nfigures of the bench: {\"a\":1}\r\nguest: ended\r\n";
        assert_eq!(figures_in(output), Some("{\"a\":1}"));
        assert_eq!(figures_in("     Running tests/bench\r\nerror: ADD\r\n"), None);
    }
}
