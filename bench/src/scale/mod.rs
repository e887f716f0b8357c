//! `cargo xtask bench scale`: the cost of one more pod beside up to a thousand attachments, the cost of those while
//! idle, and many pods at once; compared with the kernel's share with as many links of its own, and with the limits.
//!
//! `sites` are the ways to attach on their nodes. `standing` attachments: `adds` with the datagrams of a `trace`, a
//! `pair` that others should not disturb, changes of a `policy`. Then `bursts`. The `table` compares with the limits.
//! `large` policies are a separate part.

mod adds;
mod bursts;
mod large;
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
use super::{Form, Origin, document, measured, print};

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Attachments that stand, and bursts.
    Attachments,
    /// Policies as large as they may be, again and again.
    Policies,
}

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Measure only this; may be repeated
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Vec<Part>,
    /// How often each large policy comes, changes and goes
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    pub cycles: u16,
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

/// The results of both parts.
#[derive(Serialize)]
struct Reports {
    #[serde(flatten)]
    attachments: Option<Report>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policies: Option<large::Report>,
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
    let wants = |part| options.only.is_empty() || options.only.contains(&part);
    let reports = measured(options.form.output, setup::Scope::Usual, dist::build, || {
        // Policies first: the nodes of the others, with all their namespaces, take the kernel a while to remove.
        let policies = wants(Part::Policies).then(|| large::measure(options.cycles)).transpose()?;
        let attachments = wants(Part::Attachments).then(|| measure(options)).transpose()?;
        Ok(Reports { attachments, policies })
    })?;
    let attachments = reports.attachments.as_ref();
    let policies = reports.policies.as_ref();
    let tables: Vec<_> = [
        attachments.map(|report| ("scale", &report.origin, table::table(report))),
        policies.map(|report| ("scale policies", &report.origin, large::table(report))),
    ]
    .into_iter()
    .flatten()
    .collect();
    let all: Vec<&str> = tables.iter().map(|(_, _, table)| table.as_str()).collect();
    print(options.form.output, &reports, &all.join("\n"))?;
    for (place, origin, table) in tables.iter().filter(|_| options.form.write) {
        document::update(place, &origin.command, table)?;
    }
    if !options.check {
        return Ok(());
    }
    let limits = attachments.map(|report| &report.limits).into_iter();
    let limits = limits.chain(policies.map(|report| &report.limits)).flatten();
    limit::check(&limits.cloned().collect::<Vec<_>>())
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

/// Returns the numbers without duplicates.
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
    let sizes = list(sizes);
    format!(
        "cargo xtask bench scale --only attachments --sizes {sizes} --rounds {rounds} {bursts} --idle {idle}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_repeats_the_run() {
        let sizes = ascending(&[100, 10, 100]);
        assert_eq!(
            command(&sizes, &[20, 250], 30, 20),
            "cargo xtask bench scale --only attachments --sizes 10,100 --rounds 30 --bursts 20,250 --idle 20"
        );
        assert_eq!(
            command(&[10], &[], 5, 20),
            "cargo xtask bench scale --only attachments --sizes 10 --rounds 5 --no-bursts --idle 20"
        );
    }
}
