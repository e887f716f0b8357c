//! `cargo xtask bench dataplane`: the speed of packets from pod to pod, compared with a bridge, a bare cable and
//! iptables; the time until a changed policy is in force; and the cost of a packet in the programs.
//!
//! `paths` between pods under `load` or a `generator`'s frames, two of them in `pairs`, a `flood` and its effect on
//! two others, `policies` by size, `programs` by packet; `figures` are printed as a `table`.

mod figures;
mod flood;
mod generator;
pub(crate) mod load;
mod pairs;
mod paths;
mod policies;
mod programs;
mod table;

use std::num::NonZeroU16;
use std::time::Duration;

use anyhow::{Context, bail};
use xtask::progress::{self, Done};
use xtask::{dist, setup};

use self::figures::{Figures, Report, Samples};
use self::flood::Flood;
use self::load::Kind;
use self::paths::{PORTS, Path};
use super::pods::Node;
use super::{Form, document, limit, measured, print};

/// Sizes of the policies that are compared.
const RULES: [u32; 4] = [10, 1_000, 10_000, 100_000];

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Traffic between two pods.
    Paths,
    /// The same by netattach beside its floor, sample by sample, and its limits.
    Pairs,
    /// Changes of policies, from the manifest to the kernel.
    Policies,
    /// Nanoseconds of a packet in each program.
    Programs,
    /// What a flood of new flows from one pod costs others.
    Flood,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Paths => "paths",
            Self::Pairs => "pairs",
            Self::Policies => "policies",
            Self::Programs => "programs",
            Self::Flood => "flood",
        }
    }
}

/// Settings of the measurement and of its output.
pub struct Options {
    /// Only these parts; all of them if none is named.
    pub only: Vec<Part>,
    /// Number of turns of each path.
    pub rounds: NonZeroU16,
    /// Length of one sample.
    pub sample: Duration,
    /// Number of pairs of samples of each kind.
    pub pairs: u16,
    /// Fail if a limit of the pairs is missed.
    pub check: bool,
    /// Where the result goes.
    pub form: Form,
}

/// Runs the selected measurements.
///
/// # Errors
/// Not root, a tool is missing, a path does not carry traffic; `check` is set, and a limit is missed or none is measured.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let wants = |part| options.only.is_empty() || options.only.contains(&part);
    if options.check && !wants(Part::Pairs) {
        let next = "name them too (`--only pairs`), or leave `--check` out";
        bail!(progress::UserError::new("only pairs have limits, and they are not measured", next));
    }
    let rounds = options.rounds.get();
    let scope = if wants(Part::Paths) { setup::Scope::Comparing } else { setup::Scope::Usual };
    let mut report = Report::of(options);
    measured(options.form.output, scope, dist::build, || {
        // The programs first: they take the shortest time, and the other parts leave the machine warm.
        if wants(Part::Programs) {
            report.programs = Some(programs::measure(rounds)?);
        }
        if wants(Part::Policies) {
            report.policies = policies::measure(rounds)?;
        }
        if wants(Part::Paths) {
            report.paths = measure(options)?;
        }
        if wants(Part::Pairs) {
            report.pairs = Some(pairs::measure(options)?);
        }
        if wants(Part::Flood) {
            report.flood = Some(flooded(options)?);
        }
        Ok(())
    })?;
    let tables: Vec<(Part, String)> = [
        (Part::Paths, (!report.paths.is_empty()).then(|| table::tables(&report))),
        (Part::Pairs, report.pairs.as_ref().map(|pairs| pairs::table(pairs, &report.origin))),
        (Part::Policies, (!report.policies.is_empty()).then(|| table::policies(&report))),
        (Part::Programs, report.programs.as_ref().map(|programs| table::programs(programs, &report))),
        (Part::Flood, report.flood.as_ref().map(flood::table)),
    ]
    .into_iter()
    .filter_map(|(part, table)| Some((part, table?)))
    .collect();
    let all: Vec<&str> = tables.iter().map(|(_, table)| table.as_str()).collect();
    print(options.form.output, &report, &all.join("\n"))?;
    for (part, table) in tables.iter().filter(|_| options.form.write) {
        let place = if *part == Part::Paths { "dataplane" } else { part.name() };
        document::update(place, &report.origin.command, table)?;
    }
    match &report.pairs {
        Some(pairs) if options.check => limit::check(&pairs.limits),
        _ => Ok(()),
    }
}

/// Every path takes its turn in each round.
fn measure(options: &Options) -> anyhow::Result<Vec<Figures>> {
    let node = Node::enter()?;
    let mut pods = node.pods((2 * (6 + 2 * RULES.len())) as u16)?.into_iter();
    let mut all = Vec::new();
    let mut agent = None;
    progress::step("paths", |progress| {
        paths::make_bridge()?;
        all.push(paths::veth(&mut pods)?);
        all.push(paths::redirected(&mut pods)?);
        all.push(paths::bridged(&mut pods, None)?);
        for rules in RULES {
            progress.note(&format!("{rules} rules of iptables"));
            all.push(paths::bridged(&mut pods, Some(rules))?);
        }
        progress.note("netattach");
        let (running, made) = paths::netattach(&node, &mut pods, &RULES)?;
        all.extend(made);
        agent = Some(running);
        Ok(Done::Unchanged(format!("{}, each between two pods of its own", all.len())))
    })?;
    let mut samples: Vec<Samples> = all.iter().map(|_| Samples::default()).collect();
    progress::step("traffic", |progress| {
        // Each sample has its own port: the client's ports of an earlier sample are not free immediately.
        let mut ports = PORTS.cycle();
        let mut take = |path: &Path, kind, time| {
            let port = ports.next().unwrap_or(*PORTS.start());
            load::sample(&path.route(), kind, port, time)
                .with_context(|| format!("from pod to pod by {}", path.name))
        };
        // A round that does not count: it resolves addresses and warms caches.
        for path in &all {
            take(path, Kind::Connections, Duration::from_millis(50))?;
        }
        for round in 1..=options.rounds.get() {
            progress.note(&format!("round {round} of {}", options.rounds));
            for (path, samples) in all.iter().zip(&mut samples) {
                samples.requests.push(take(path, Kind::Requests, options.sample)?);
                samples.connections.push(take(path, Kind::Connections, options.sample)?);
            }
        }
        Ok(Done::Unchanged(format!("{} samples of {:?} each", 2 * options.rounds.get(), options.sample)))
    })?;
    drop(agent);
    Ok(all.iter().zip(samples).map(|(path, samples)| Figures::new(path, samples)).collect())
}

/// Connections of two pods during floods of a third.
fn flooded(options: &Options) -> anyhow::Result<Flood> {
    let node = Node::enter()?;
    let mut pods = node.pods(flood::PODS as u16)?.into_iter();
    let mut flooded = None;
    progress::step("flood", |progress| {
        flooded = Some(flood::measure(&node, &mut pods, options, &mut |text| progress.note(text))?);
        Ok(Done::Unchanged("new flows from one pod, connections between two others".to_owned()))
    })?;
    flooded.context("a flood that was not measured")
}
