//! `cargo xtask bench kinds-vm`: the kinds whose drivers a kernel may lack, in the virtual machine, whose kernel has
//! them.
//!
//! Processors are emulated there, which slows different work down by different factors. So a yardstick is measured
//! beside them: a kind that is measured without an emulator as well.

use std::num::NonZeroU16;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use xtask::progress;

use super::kind::Kind;
use super::{Figures, Report, check, measure_each, table};
use crate::attach::machine;
use crate::{Form, Origin, end};

/// The kinds that are measured for their limits.
pub(super) const JUDGED: [Kind; 3] = [Kind::Ipvlan, Kind::Vlan, Kind::Dummy];
/// What is measured: the yardstick, which every kernel has and whose reference is in the machine, and the others.
const MEASURED: [Kind; 1 + JUDGED.len()] = [Kind::Bridge, JUDGED[0], JUDGED[1], JUDGED[2]];

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Pods with one interface of each kind that are attached one after another by each
    #[arg(long, default_value = "15")]
    pub rounds: NonZeroU16,
    /// Fail if a limit is missed
    #[arg(long)]
    pub check: bool,
    /// In the virtual machine: print one line of figures
    #[arg(long, hide = true, conflicts_with_all = ["check", "output", "write"])]
    pub inside: bool,
    /// Where the result goes.
    #[command(flatten)]
    pub form: Form,
}

/// The measurements.
#[derive(Serialize, Deserialize)]
struct Measured {
    kernel: String,
    processors: usize,
    /// In the order of [`MEASURED`].
    kinds: Vec<Figures>,
}

/// Measures in the virtual machine.
///
/// # Errors
/// There is no such machine, a contender failed or left something behind, or a limit is missed and `check` is set.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let rounds = options.rounds.get();
    if options.inside {
        // The machine's serial line takes processor time.
        progress::silence();
        return machine::tell(&Measured::here(rounds)?);
    }
    machine::prepare(options.form.output)?;
    let measured = machine::measured(&["kinds-vm", "--inside", "--rounds", &rounds.to_string()], &[])?;
    let report = Report::of(measured, rounds)?;
    end("kinds-vm", options.form, &report.origin, &report, &table(&report))?;
    if options.check { check(&report) } else { Ok(()) }
}

impl Measured {
    fn here(rounds: u16) -> anyhow::Result<Self> {
        let (kinds, lacking) = measure_each(&MEASURED, rounds)?;
        // A kind that is left out would miss no limit.
        let lacking: Vec<&str> = lacking.into_iter().map(Kind::name).collect();
        ensure!(lacking.is_empty(), "this kernel has no driver for: {}", lacking.join(", "));
        let Origin { kernel, processors, .. } = Origin::of(String::new());
        Ok(Self { kernel, processors, kinds })
    }
}

impl Report {
    fn of(measured: Measured, rounds: u16) -> anyhow::Result<Self> {
        let Measured { kernel, processors, mut kinds } = measured;
        let command = format!("cargo xtask bench kinds-vm --rounds {rounds}");
        let origin = Origin { command, kernel, processors };
        let (yardstick, judged) = kinds.split_first_mut().context("no kind was measured")?;
        // It is judged, and its time broken down, where nothing is emulated.
        yardstick.parts.clear();
        let limits = table::limits(judged);
        Ok(Self { origin, rounds, emulated: true, kinds, left_out: Vec::new(), limits })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use xtask::vm::guests::GUESTS;

    use super::super::kind::KINDS;
    use super::super::table::tests::figures;
    use super::*;
    use crate::attach::parts;
    use crate::limit::Limit;

    fn measured(kinds: impl IntoIterator<Item = Figures>) -> Measured {
        Measured { kernel: "6.12".to_owned(), processors: 1, kinds: kinds.into_iter().collect() }
    }

    #[test]
    fn figures_are_read_as_they_were_printed() {
        let printed = serde_json::to_value(measured(KINDS.map(|kind| figures(kind, 2.0, None)))).unwrap();
        let read: Measured = serde_json::from_value(printed.clone()).unwrap();
        assert_eq!(read.kinds.iter().map(|figures| figures.kind).collect::<Vec<_>>(), KINDS);
        assert_eq!(serde_json::to_value(read).unwrap(), printed);
    }

    #[test]
    fn all_but_the_yardstick_are_judged() {
        let log = "netattach::timing: done verb=ADD container=\"a\" took_us=9 parts=the rest=1/9\n";
        let logged = parts::logged_adds(log).unwrap();
        let of = |kind| {
            let times = [Duration::from_micros(20)];
            Figures { parts: parts::rows(&times, &times, &logged), ..figures(kind, 4.0, Some(8.0)) }
        };
        let report = Report::of(measured([Kind::Bridge, Kind::Dummy].map(of)), 15).unwrap();
        let limit = |what: &str, found, most| Limit::new(format!("`dummy`: {what}"), found, most, "times");
        let expected = [
            limit("ADD, to its floor", 4.0, 3.0),
            limit("the agent's part, to its floor", 2.0, 3.0),
            limit("ADD, to the reference's", 0.5, 0.25),
        ];
        assert_eq!(report.limits, expected);
        let broken_down = report.kinds.iter().map(|figures| !figures.parts.is_empty());
        assert_eq!(broken_down.collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn the_machine_has_what_the_reference_executes() {
        let guest = GUESTS.iter().find(|guest| guest.suite == machine::SUITE).unwrap();
        let executed = MEASURED.map(Kind::plugin).into_iter().chain(["host-local"]);
        let lacking: Vec<&str> = executed.filter(|plugin| !guest.plugins.contains(plugin)).collect();
        assert_eq!(lacking, [""; 0]);
    }
}
