//! `cargo xtask bench scale`: what one more pod takes beside up to a thousand attachments, what those take while nothing
//! happens, and many pods at once; beside the kernel's share with as many links of its own, and what has to be reached.
//!
//! `sites` are the ways to attach on their nodes. `standing` attachments: `adds` with the datagrams of a `trace`, a
//! `pair` that others should not disturb, changes of a `policy`. Then `bursts`. The `table` compares with the limits.

mod adds;
mod bursts;
mod pair;
mod policy;
mod sites;
mod standing;
mod table;
mod trace;

use std::num::NonZeroU16;
use std::time::Duration;

use serde::Serialize;
use xtask::{dist, setup};

use self::bursts::Bursts;
use self::standing::Standing;
use super::limit::{self, Limit};
use super::{Form, Origin, end, measured};

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Numbers of attachments that stand while others come and go
    #[arg(long, value_delimiter = ',', num_args = 1, default_value = "10,100,300,1000",
          value_parser = clap::value_parser!(u16).range(10..=3000))]
    pub sizes: Vec<u16>,
    /// Pods attached one after another by each way beside each number of attachments
    #[arg(long, default_value = "30")]
    pub rounds: NonZeroU16,
    /// Numbers of pods attached at once
    #[arg(long, value_delimiter = ',', num_args = 1, default_value = "20,100,250",
          value_parser = clap::value_parser!(u16).range(1..=500))]
    pub bursts: Vec<u16>,
    /// Leave bursts out
    #[arg(long, conflicts_with = "bursts")]
    pub no_bursts: bool,
    /// Seconds for which the idle agent is watched beside each number of attachments
    #[arg(long, default_value = "20")]
    pub idle: NonZeroU16,
    /// Fail if a limit is missed
    #[arg(long)]
    pub check: bool,
    /// Where the result goes.
    #[command(flatten)]
    pub form: Form,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    rounds: u16,
    /// Seconds.
    idle: u16,
    standing: Standing,
    bursts: Option<Bursts>,
    limits: Vec<Limit>,
}

/// Measures everything.
///
/// # Errors
/// Not root, a tool is missing, an attachment failed, or a limit is missed and `check` is set.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let report = measured(options.form.output, setup::Scope::Usual, dist::build, || measure(options))?;
    end("scale", options.form, &report.origin, &report, &table::table(&report))?;
    if options.check { limit::check(&report.limits) } else { Ok(()) }
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let (rounds, idle) = (options.rounds.get(), options.idle.get());
    let sizes = ascending(&options.sizes);
    let at_once = if options.no_bursts { Vec::new() } else { ascending(&options.bursts) };
    let origin = Origin::of(command(&sizes, &at_once, rounds, idle));
    let (bursts, _kept) = bursts::measure(&at_once, rounds)?.unzip();
    let standing = standing::measure(&sizes, rounds, Duration::from_secs(idle.into()))?;
    let limits = table::limits(&standing, bursts.as_ref());
    Ok(Report { origin, rounds, idle, standing, bursts, limits })
}

/// Each once.
fn ascending(numbers: &[u16]) -> Vec<u16> {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// The way to measure once more.
fn command(sizes: &[u16], bursts: &[u16], rounds: u16, idle: u16) -> String {
    let list = |numbers: &[u16]| numbers.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    let bursts =
        if bursts.is_empty() { "--no-bursts".to_owned() } else { format!("--bursts {}", list(bursts)) };
    format!("cargo xtask bench scale --sizes {} --rounds {rounds} {bursts} --idle {idle}", list(sizes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_repeats_the_run() {
        let sizes = ascending(&[100, 10, 100]);
        assert_eq!(
            command(&sizes, &[20, 250], 30, 20),
            "cargo xtask bench scale --sizes 10,100 --rounds 30 --bursts 20,250 --idle 20"
        );
        assert_eq!(
            command(&[10], &[], 5, 20),
            "cargo xtask bench scale --sizes 10 --rounds 5 --no-bursts --idle 20"
        );
    }
}
