//! `cargo xtask bench attach`: the time to attach one pod with a bridge and two macvlans, compared with alternatives, and
//! one with one interface of each kind.
//!
//! Everything happens in network namespaces made for the run: one that stands for the node and a few that stand for
//! pods. The contenders take turns within one run, so that other load on the machine affects all alike.
//!
//! Contenders: `floor`, `reference`, `netattach` with its `pinned` programs. `figures` are printed as a `table`;
//! `parts` breaks down the time of netattach's ADD. `kinds` are the interfaces one by one, except a virtual function,
//! which `vf` measures on machines that have some. `locks` counts how often the kernel's lock of links is taken.
//! These two run in the virtual `machine`, and so do the kinds that a kernel may lack.

mod figures;
pub mod floor;
pub mod kinds;
pub mod locks;
mod machine;
mod netattach;
mod parts;
mod pinned;
mod reference;
mod table;
#[cfg(feature = "cluster")]
pub mod vf;

use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use xtask::progress::{self, Done, Progress};
use xtask::{dist, setup};

use self::figures::{Figures, Report};
use self::parts::Logged;
use super::agent;
use super::pods::{Node, Pod, at_once};
use super::{Form, document, measured, print};

/// The contenders in their order.
const CONTENDERS: [&str; 5] =
    [floor::IN_PROCESS, floor::SPAWNED, floor::WITH_PROGRAMS, reference::NAME, netattach::NAME];

/// A way to attach the three networks to a pod and to detach them again.
pub(super) trait Contender: Sync {
    /// Its name in the table.
    fn name(&self) -> &'static str;
    /// Its description, in one line under the table.
    fn describe(&self) -> String;
    /// Attaches everything; returns when the pod could use it.
    fn add(&self, pod: &Pod) -> anyhow::Result<()>;
    /// Detaches everything; returns when it is gone.
    fn del(&self, pod: &Pod) -> anyhow::Result<()>;
    /// Its ADDs so far, if it logs a breakdown of their time.
    fn logged(&self) -> anyhow::Result<Vec<Logged>> {
        Ok(Vec::new())
    }
    /// A request that only starts and ends the process that a runtime starts.
    fn start_and_end(&self) -> anyhow::Result<()> {
        Ok(())
    }
    /// Memory of the processes that stay between requests, in KiB.
    fn resident_kib(&self) -> Option<u64> {
        None
    }
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// A pod with three networks.
    Pod,
    /// A pod with one interface, of each kind.
    Kinds,
}

/// Settings of the measurement and of its output.
#[derive(clap::Args)]
pub struct Options {
    /// Measure only this; may be repeated
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Vec<Part>,
    /// Pods with one interface of each kind that are attached one after another by each
    #[arg(long, default_value = "40")]
    pub kind_rounds: NonZeroU16,
    /// Fail if a kind of interface misses a limit
    #[arg(long)]
    pub check: bool,
    /// Pods attached one after another by each contender
    #[arg(long, default_value = "50")]
    pub rounds: NonZeroU16,
    /// Bursts of pods attached at once by each contender
    #[arg(long, default_value_t = 5)]
    pub bursts: u16,
    /// Pods in a burst
    #[arg(long, default_value = "20")]
    pub burst_size: NonZeroU16,
    /// Where the result goes.
    #[command(flatten)]
    pub form: Form,
    /// Leave a contender out, by the name it has in the table; may be repeated
    #[arg(long, value_name = "CONTENDER")]
    pub without: Vec<String>,
}

/// Times spent by one contender.
#[derive(Default)]
struct Samples {
    add: Vec<Duration>,
    del: Vec<Duration>,
    burst_add: Vec<Duration>,
    burst_del: Vec<Duration>,
}

/// The results of both parts.
#[derive(Serialize)]
struct Reports {
    #[serde(flatten)]
    pod: Option<Report>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kinds: Option<kinds::Report>,
}

/// Measures all contenders.
///
/// # Errors
/// Not root, a tool is missing, a contender failed or left something behind, or a limit is missed and `check` is set.
pub fn run(options: &Options) -> anyhow::Result<()> {
    if let Some(unknown) = options.without.iter().find(|name| !CONTENDERS.contains(&name.as_str())) {
        let next = format!("the names are: {}", CONTENDERS.join("; "));
        bail!(progress::UserError::new(format!("there is no contender named `{unknown}`"), next));
    }
    let wants = |part| options.only.is_empty() || options.only.contains(&part);
    let build = || match !wants(Part::Kinds) && options.without.iter().any(|name| name == netattach::NAME) {
        true => Ok(()),
        false => dist::build(),
    };
    // The reference masquerades by iptables.
    let scope = if wants(Part::Kinds) { setup::Scope::Comparing } else { setup::Scope::Usual };
    let reports = measured(options.form.output, scope, build, || {
        let pod = wants(Part::Pod).then(|| measure(options)).transpose()?;
        let kinds = wants(Part::Kinds).then(|| kinds::measure(options.kind_rounds)).transpose()?;
        Ok(Reports { pod, kinds })
    })?;
    let pod = reports.pod.as_ref().map(|report| ("attach", &report.origin, table::table(report)));
    let kinds = reports.kinds.as_ref().map(|report| ("attach kinds", &report.origin, kinds::table(report)));
    let tables: Vec<_> = pod.into_iter().chain(kinds).collect();
    let all: Vec<&str> = tables.iter().map(|(_, _, table)| table.as_str()).collect();
    print(options.form.output, &reports, &all.join("\n"))?;
    for (place, origin, table) in tables.iter().filter(|_| options.form.write) {
        document::update(place, &origin.command, table)?;
    }
    match &reports.kinds {
        Some(report) if options.check => kinds::check(report),
        _ => Ok(()),
    }
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let node = Node::enter()?;
    let pods = node.pods(options.burst_size.get())?;
    let mut contenders = Vec::new();
    progress::step("contenders", |progress| {
        contenders = prepare(&node, &pods, options, progress)?;
        Ok(Done::Unchanged(
            contenders.iter().map(|contender| contender.name()).collect::<Vec<_>>().join("; "),
        ))
    })?;
    let mut samples: Vec<Samples> = contenders.iter().map(|_| Samples::default()).collect();
    let mut process = Vec::new();
    progress::step("one by one", |progress| {
        // One round that does not count: it creates bridges, starts the agent's work and warms caches.
        for contender in &contenders {
            timed(&**contender, &pods[0])?;
        }
        for round in 1..=options.rounds.get() {
            progress.note(&format!("round {round} of {}", options.rounds));
            for (contender, samples) in contenders.iter().zip(&mut samples) {
                once(&**contender, &node, &pods[0], samples)?;
            }
            // Measured among the others, like the ADDs: repeated without pauses, it would take two thirds of that.
            let started = Instant::now();
            if let Some(netattach) = named(&contenders, netattach::NAME) {
                netattach.start_and_end()?;
                process.push(started.elapsed());
            }
        }
        Ok(Done::Unchanged(format!("{} pods each", options.rounds)))
    })?;
    let mut add_parts = Vec::new();
    progress::step("parts of an ADD", |_| {
        add_parts = parts_of_add(&contenders, &samples, &process)?;
        Ok(Done::Unchanged(format!("{} parts", add_parts.len())))
    })?;
    progress::step("bursts", |progress| {
        for number in 1..=options.bursts {
            progress.note(&format!("burst {number} of {}", options.bursts));
            for (contender, samples) in contenders.iter().zip(&mut samples) {
                burst(&**contender, &node, &pods, samples)?;
            }
        }
        Ok(Done::Unchanged(format!("{} of {} pods each", options.bursts, options.burst_size)))
    })?;
    let figures = contenders
        .iter()
        .zip(samples)
        .map(|(contender, samples)| {
            Figures::new(contender.name(), contender.describe(), samples, contender.resident_kib())
        })
        .collect();
    Ok(Report::new(options, figures, add_parts))
}

/// Returns the breakdown of netattach's ADDs; empty if netattach was left out.
fn parts_of_add(
    contenders: &[Box<dyn Contender>],
    samples: &[Samples],
    process: &[Duration],
) -> anyhow::Result<Vec<parts::Part>> {
    let mut all = contenders.iter().zip(samples);
    let Some((netattach, samples)) = all.find(|(contender, _)| contender.name() == netattach::NAME) else {
        return Ok(Vec::new());
    };
    let logged = netattach.logged()?;
    // The first ADD does not count here either.
    let counted = logged.get(1..).unwrap_or_default();
    ensure!(counted.len() == samples.add.len(), "the agent's log has {} ADDs more than were measured", {
        logged.len().saturating_sub(samples.add.len())
    });
    Ok(parts::rows(&samples.add, process, counted))
}

fn named<'c>(contenders: &'c [Box<dyn Contender>], name: &str) -> Option<&'c dyn Contender> {
    contenders.iter().map(|contender| &**contender).find(|contender| contender.name() == name)
}

/// Returns all contenders except those left out. The agent comes last: no other work may wait while it runs.
fn prepare(
    node: &Node,
    pods: &[Pod],
    options: &Options,
    progress: &Progress,
) -> anyhow::Result<Vec<Box<dyn Contender>>> {
    floor::make_bridge()?;
    let mut contenders: Vec<Box<dyn Contender>> = Vec::new();
    let left_out = |name: &str| options.without.iter().any(|without| without == name);
    for name in CONTENDERS.into_iter().filter(|name| !left_out(name)) {
        contenders.push(match name {
            // The programs are the agent's.
            floor::WITH_PROGRAMS if left_out(netattach::NAME) => continue,
            floor::WITH_PROGRAMS => {
                Box::new(floor::Spawned::with_programs(agent::pins(agent::NAME), progress)?)
            }
            floor::IN_PROCESS => Box::new(floor::InProcess::new(node)?),
            floor::SPAWNED => Box::new(floor::Spawned::new(progress)?),
            reference::NAME => Box::new(reference::InTurn::new(node, pods.len())?),
            _ => Box::new(netattach::Netattach::start(node, pods)?),
        });
    }
    Ok(contenders)
}

fn once(contender: &dyn Contender, node: &Node, pod: &Pod, samples: &mut Samples) -> anyhow::Result<()> {
    let before = node.links()?;
    let (add, del) = timed(contender, pod)?;
    left_nothing(node, &before, std::slice::from_ref(pod))
        .with_context(|| format!("after {}", contender.name()))?;
    samples.add.push(add);
    samples.del.push(del);
    Ok(())
}

fn timed(contender: &dyn Contender, pod: &Pod) -> anyhow::Result<(Duration, Duration)> {
    let at = |verb: &'static str| move || format!("{verb} of pod {} by {}", pod.number, contender.name());
    let started = Instant::now();
    contender.add(pod).with_context(at("ADD"))?;
    let add = started.elapsed();
    pod.is_attached().with_context(at("ADD"))?;
    let started = Instant::now();
    contender.del(pod).with_context(at("DEL"))?;
    Ok((add, started.elapsed()))
}

/// All pods at once: the time from the first request to the last answer.
fn burst(contender: &dyn Contender, node: &Node, pods: &[Pod], samples: &mut Samples) -> anyhow::Result<()> {
    let before = node.links()?;
    samples.burst_add.push(
        at_once(pods, |pod| contender.add(pod)).with_context(|| format!("burst by {}", contender.name()))?,
    );
    pods.iter().try_for_each(Pod::is_attached).with_context(|| format!("burst by {}", contender.name()))?;
    samples.burst_del.push(
        at_once(pods, |pod| contender.del(pod)).with_context(|| format!("burst by {}", contender.name()))?,
    );
    left_nothing(node, &before, pods).with_context(|| format!("after {}", contender.name()))
}

/// Checks that a contender leaves no links behind: its times would not be comparable.
fn left_nothing(node: &Node, before: &[String], pods: &[Pod]) -> anyhow::Result<()> {
    pods.iter().try_for_each(Pod::is_empty)?;
    let left: Vec<String> = node.links()?.into_iter().filter(|name| !before.contains(name)).collect();
    ensure!(left.is_empty(), "links are left on the node: {left:?}");
    Ok(())
}
