//! `cargo xtask bench sriov`: ADD of a pod with a virtual function (VF) of a card, beside the reference's `host-device` and
//! `tuning`, which do the most of it that those plugins can.
//!
//! It runs in the virtual machine that has such cards, where this executable `measure`s; what it has measured comes out of the
//! machine in one line, and is printed as a `table`.

mod measure;
mod table;

use std::env;
use std::num::NonZeroU16;

use anyhow::{Context, bail};
use serde::Serialize;
use xtask::progress;
use xtask::vm::{self, Program};
use xtask::{dist, setup};

use self::measure::{Measured, SIDES};
use super::kinds::milliseconds;
use crate::limit::{self, Limit};
use crate::{DIST_VARIABLE, Form, Origin, Output, Series, end};

/// The suite of the kernel of the machine with such cards.
const MACHINE: &str = "trixie";
/// What is before the figures in the line that has them.
const FIGURES: &str = "figures of bench sriov: ";
/// Lines of a machine that are shown when it has measured nothing.
const TAIL: usize = 40;

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Pods attached one after another by each
    #[arg(long, default_value = "20")]
    pub rounds: NonZeroU16,
    /// Fail if a limit is missed
    #[arg(long)]
    pub check: bool,
    /// Measure on this machine, whose cards lose their VFs, and print one line of figures. `NETATTACH_SRIOV_DRIVER` names the
    /// driver of the cards
    #[arg(long, conflicts_with_all = ["check", "output", "write"])]
    pub here: bool,
    /// Where the result goes.
    #[command(flatten)]
    pub form: Form,
}

/// The results of one run.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    rounds: u16,
    /// In the order of [`SIDES`].
    contenders: Vec<Figures>,
    limits: Vec<Limit>,
    /// The table of where the time of an ADD goes.
    #[serde(skip)]
    parts: String,
}

/// Milliseconds of one contender.
#[derive(Serialize)]
struct Figures {
    name: &'static str,
    /// Until the answer.
    add: Series,
    /// Until the pod's interface has a carrier as well.
    carrier: Series,
    del: Series,
}

/// Measures in the virtual machine, or here.
///
/// # Errors
/// There is no such machine or card, a contender failed or left something behind, or a limit is missed and `check` is set.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let rounds = options.rounds.get();
    if options.here {
        // A machine's serial line takes processor time.
        progress::silence();
        let measured = serde_json::to_string(&measure::measure(rounds)?).context("write the figures")?;
        progress::line(&format!("{FIGURES}{measured}"));
        return Ok(());
    }
    if options.form.output == Output::Json {
        progress::silence();
    }
    setup::run(setup::Scope::Machine)?;
    if env::var_os(DIST_VARIABLE).is_none() {
        dist::build()?;
    }
    let report = Report::of(measured_in_the_machine(rounds)?, rounds);
    end("sriov", options.form, &report.origin, &report, &table::table(&report))?;
    if options.check { limit::check(&report.limits) } else { Ok(()) }
}

fn measured_in_the_machine(rounds: u16) -> anyhow::Result<Measured> {
    let own = env::current_exe().context("find this executable")?;
    let arguments = ["sriov", "--here", "--rounds", &rounds.to_string()].map(str::to_owned);
    let program = Program { name: "bench", executable: &own, arguments: &arguments };
    let output = vm::program(MACHINE, &program, &crate::dist())?;
    match figures_in(&output) {
        Some(figures) => serde_json::from_str(figures).context("read the machine's figures"),
        None => {
            let from = output.lines().count().saturating_sub(TAIL);
            let tail: Vec<&str> = output.lines().skip(from).map(str::trim_end).collect();
            bail!("nothing was measured in the machine:\n{}", tail.join("\n"));
        }
    }
}

/// What follows the mark in the line that has it.
fn figures_in(output: &str) -> Option<&str> {
    output.lines().find_map(|line| Some(line.trim_end().split_once(FIGURES)?.1))
}

impl Report {
    fn of(measured: Measured, rounds: u16) -> Self {
        let command = format!("cargo xtask bench sriov --rounds {rounds}");
        let origin = Origin { command, kernel: measured.kernel, processors: measured.processors };
        let of_side = |(side, times): (measure::Side, measure::Times)| Figures {
            name: side.name(),
            add: milliseconds(times.add.into_iter()),
            carrier: milliseconds(times.carrier.into_iter()),
            del: milliseconds(times.del.into_iter()),
        };
        let contenders: Vec<Figures> = SIDES.into_iter().zip(measured.sides).map(of_side).collect();
        let limits = table::limits(&contenders);
        Self { origin, rounds, contenders, limits, parts: measured.parts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_what_follows_the_mark() {
        let output = "     Running tests/bench\r\nfigures of bench sriov: {\"a\":1}\r\nguest: ended\r\n";
        assert_eq!(figures_in(output), Some("{\"a\":1}"));
        assert_eq!(figures_in("     Running tests/bench\r\nerror: ADD\r\n"), None);
    }
}
