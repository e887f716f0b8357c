//! `cargo xtask bench dataplane`: how fast packets get from pod to pod, beside a bridge, a bare cable and iptables.

mod figures;
mod flood;
mod load;
mod paths;
mod table;

use std::num::NonZeroU16;
use std::time::Duration;

use anyhow::Context;

use self::figures::{Report, Samples};
use self::load::Kind;
use self::paths::{PORTS, Path};
use super::pods::Node;
use super::{Output, document, measured, print};
use crate::screen::{self, Done};
use crate::{dist, setup};

/// Sizes of the policies that are compared.
const RULES: [u32; 4] = [10, 1_000, 10_000, 100_000];

/// What to measure and what to do with the result.
pub struct Options {
    /// How often each path gets its turn.
    pub rounds: NonZeroU16,
    /// Length of one sample.
    pub sample: Duration,
    /// Form of the result on standard output.
    pub output: Output,
    /// Also replace the table in docs/performance.md.
    pub write: bool,
}

/// Measures all paths.
///
/// # Errors
/// Not root, a tool is missing, or a path does not carry traffic.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let report = measured(options.output, setup::Scope::Comparing, dist::build, || measure(options))?;
    let tables = table::tables(&report);
    print(options.output, &report, &tables)?;
    if options.write {
        document::update("dataplane", &report.command, &tables)?;
    }
    Ok(())
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let node = Node::enter()?;
    let mut pods = node.pods((2 * (3 + 2 * RULES.len()) + flood::PODS) as u16)?.into_iter();
    let mut all = Vec::new();
    let mut agent = None;
    screen::step("paths", |progress| {
        paths::make_bridge()?;
        all.push(paths::veth(&mut pods)?);
        all.push(paths::bridged(&mut pods, None)?);
        for rules in RULES {
            progress.note(&format!("{rules} rules of iptables"));
            all.push(paths::bridged(&mut pods, Some(rules))?);
        }
        progress.note("netattach");
        let (running, made) = paths::netattach(&node, &mut pods, &RULES)?;
        all.extend(made);
        agent = Some(running);
        Ok(Done::Was(format!("{}, each between two pods of its own", all.len())))
    })?;
    let mut samples: Vec<Samples> = all.iter().map(|_| Samples::default()).collect();
    screen::step("traffic", |progress| {
        // Each sample has a port of its own: the client's ports of an earlier one are not free at once.
        let mut ports = PORTS.cycle();
        let mut take = |path: &Path, kind, time| {
            let port = ports.next().unwrap_or(*PORTS.start());
            load::sample(&path.route(), kind, port, time)
                .with_context(|| format!("from pod to pod by {}", path.name))
        };
        // One that does not count: it resolves addresses and warms caches.
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
        Ok(Done::Was(format!("{} samples of {:?} each", 2 * options.rounds.get(), options.sample)))
    })?;
    drop(agent);
    let mut flooded = None;
    screen::step("flood", |progress| {
        flooded = Some(flood::measure(&node, &mut pods, options, &mut |text| progress.note(text))?);
        Ok(Done::Was("new flows from one pod, connections between two others".to_owned()))
    })?;
    let mut report = Report::new(options, all.iter().zip(samples));
    report.flood = flooded;
    Ok(report)
}
