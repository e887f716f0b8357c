//! `cargo xtask bench locks`: how often the kernel's lock of links is taken for one ADD of a pod with three networks,
//! compared with the floors, whose ADDs create the same links.
//!
//! It runs in the virtual machine, whose kernel has probes for the `counter`, unless this machine's kernel has them
//! too: `measure` alternates, and the `table` compares with the limit.

mod counter;
mod measure;
mod table;

use std::env;
use std::num::NonZeroU16;
use std::path::PathBuf;

use anyhow::Context;
use serde::Serialize;
use xtask::progress::{self, Done};
use xtask::{dist, setup};

use self::measure::{Counts, Measured};
use super::{floor, machine};
use crate::limit::{self, Limit};
use crate::{Form, Origin, Series, end, measured};

/// The floor's executable in the machine, beside this one.
const FLOOR: &str = "floor";

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Pods attached one after another by each
    #[arg(long, default_value = "15")]
    pub rounds: NonZeroU16,
    /// Fail if the limit is missed
    #[arg(long)]
    pub check: bool,
    /// Measure on this machine, whose kernel has to have probes, in place of the virtual one
    #[arg(long)]
    pub here: bool,
    /// In the virtual machine: print one line of figures
    #[arg(long, hide = true, conflicts_with_all = ["check", "here", "output", "write"])]
    pub inside: bool,
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
    /// Whether the machine is an emulated one.
    emulated: bool,
    contenders: Vec<Figures>,
    limits: Vec<Limit>,
}

/// The number of times that the lock was taken, by any process.
#[derive(Serialize)]
struct Figures {
    name: String,
    /// From the call of an ADD to its answer.
    taken: Series,
    /// The same for an idle interval as long as that ADD.
    idle: Series,
}

/// Counts in the virtual machine, or here.
///
/// # Errors
/// There is no such machine, or here no probe; a contender failed or left something behind; or the limit is missed
/// and `check` is set.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let rounds = options.rounds.get();
    if options.inside {
        // The machine's serial line would influence the measurement.
        progress::silence();
        let floor = env::current_exe().context("find this executable")?.with_file_name(FLOOR);
        return machine::tell(&measure::measure(rounds, Some(floor))?);
    }
    let counted = if options.here {
        // Before anything is built for it.
        counter::probes()?;
        measured(options.form.output, setup::Scope::Usual, dist::build, || measure::measure(rounds, None))?
    } else {
        in_the_machine(options)?
    };
    let report = Report::of(counted, options);
    end("locks", options.form, &report.origin, &report, &table::table(&report))?;
    if options.check { limit::check(&report.limits) } else { Ok(()) }
}

fn in_the_machine(options: &Options) -> anyhow::Result<Measured> {
    machine::prepare(options.form.output)?;
    let mut executable = PathBuf::new();
    progress::step("floor", |progress| {
        executable = floor::build(progress)?;
        Ok(Done::Unchanged("static".to_owned()))
    })?;
    let rounds = options.rounds.to_string();
    machine::measured(&["locks", "--inside", "--rounds", &rounds], &[executable.as_path()])
}

impl Report {
    fn of(measured: Measured, options: &Options) -> Self {
        let Measured { kernel, processors, contenders } = measured;
        let here = if options.here { " --here" } else { "" };
        let command = format!("cargo xtask bench locks --rounds {}{here}", options.rounds);
        let contenders: Vec<Figures> = contenders.into_iter().map(Figures::of).collect();
        let limits = table::limits(&contenders);
        let origin = Origin { command, kernel, processors };
        Self { origin, rounds: options.rounds.get(), emulated: !options.here, contenders, limits }
    }
}

impl Figures {
    fn of(counts: Counts) -> Self {
        let series = |counts: Vec<u64>| Series::new(counts.into_iter().map(|count| count as f64).collect());
        Self { name: counts.name, taken: series(counts.taken), idle: series(counts.idle) }
    }

    /// Returns the number for an ADD itself.
    fn own(&self) -> f64 {
        self.taken.median - self.idle.median
    }
}
