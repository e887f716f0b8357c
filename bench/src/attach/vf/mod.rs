//! `cargo xtask bench sriov`: ADD of a pod with a virtual function (VF) of a card, compared with the reference's
//! `host-device` and `tuning`, as far as those plugins can do the same.
//!
//! It runs in the virtual machine that has such cards, where this executable `measure`s; the measurements are printed
//! as a `table`.

mod measure;
mod table;

use std::num::NonZeroU16;

use serde::Serialize;
use xtask::progress;

use self::measure::{Measured, SIDES};
use super::kinds::milliseconds;
use super::machine;
use crate::limit::{self, Limit};
use crate::{Form, Origin, Series, end};

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
    /// The table of the parts of an ADD's time.
    #[serde(skip)]
    parts: String,
}

/// Milliseconds of one contender.
#[derive(Serialize)]
struct Figures {
    name: &'static str,
    /// Until the answer.
    add: Series,
    /// Until the pod's interface also has a carrier.
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
        return machine::tell(&measure::measure(rounds)?);
    }
    machine::prepare(options.form.output)?;
    let measured: Measured = machine::measured(&["sriov", "--here", "--rounds", &rounds.to_string()], &[])?;
    let report = Report::of(measured, rounds);
    end("sriov", options.form, &report.origin, &report, &table::table(&report))?;
    if options.check { limit::check(&report.limits) } else { Ok(()) }
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
