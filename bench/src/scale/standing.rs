//! A growing number of standing attachments: the cost of another pod beside them, and their own cost.

use std::thread;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use xtask::progress::{self, Done};

use super::adds::{self, Adds, Datagrams, PATIENCE, milliseconds};
use super::pair::{self, Pair};
use super::policy::{self, Changes};
use super::sites::{self, MEASURED, Sites};
use crate::Series;
use crate::agent::Agent;

/// Restarts with each number of attachments.
const RESTARTS: usize = 3;

/// The measurements beside a number of attachments.
#[derive(Serialize)]
pub(super) struct Size {
    pub(super) attachments: u16,
    pub(super) adds: Adds,
    pub(super) datagrams: Datagrams,
    /// Per cent of a processor that the idle agent uses.
    pub(super) idle: f64,
    /// Resident memory of the agent in KiB.
    pub(super) resident: u64,
    /// In the order of [`pair::PAIRED`]; `None` without standing pods.
    pub(super) pairs: Option<[Pair; 2]>,
    pub(super) changes: Option<Changes>,
    /// Measured last, from the largest size down.
    pub(super) restarts: Option<Restarts>,
}

/// Milliseconds from the agent's start to its first answer, and of its processor time then.
#[derive(Serialize)]
pub(super) struct Restarts {
    pub(super) ready: Series,
    pub(super) processor: Series,
}

#[derive(Serialize)]
pub(super) struct Standing {
    pub(super) sizes: Vec<Size>,
    /// Resident memory of the agent in KiB when all were detached, before any restart.
    pub(super) resident_after: u64,
}

/// The sizes in ascending order, after an empty node.
pub(super) fn measure(sizes: &[u16], rounds: u16, idle: Duration) -> anyhow::Result<Standing> {
    let steps = steps(sizes);
    let shares: Vec<usize> = steps.iter().flat_map(|(_, shares)| shares).copied().collect();
    let mut prepared = None;
    progress::step("nodes", |progress| {
        let networks = |number: u16| match usize::from(number).checked_sub(1) {
            None => MEASURED.to_owned(),
            Some(index) => sites::networks_of(shares.get(index).copied().unwrap_or_default()),
        };
        prepared = Some(Sites::prepare("scale", shares.len() as u16 + 1, networks, progress)?);
        Ok(Done::Unchanged(format!("one for each way, with {} pods", shares.len() + 1)))
    })?;
    let mut sites = prepared.context("nothing was prepared")?;
    // Numbers of pods that stand at each size.
    let (mut found, mut pods) = (Vec::new(), Vec::new());
    for (attachments, shares) in &steps {
        progress::step(&format!("{attachments} attachments"), |progress| {
            progress.note("attaching");
            sites.stand(shares)?;
            pods.push(sites.standing());
            found.push(beside(&sites, *attachments, rounds, idle, progress)?);
            Ok(Done::Unchanged(format!("{rounds} pods by each way")))
        })?;
    }
    let all = sites.standing();
    let mut resident_after = 0;
    progress::step("restarts", |progress| {
        progress.note("detaching");
        sites.stand_down(1..all + 1)?;
        sites.agent.settle(PATIENCE)?;
        resident_after = sites.agent.resident_kib().context("the agent has no memory")?;
        progress.note("attaching");
        sites.stand_again(1..all + 1)?;
        let mut above = all;
        for (size, pods) in found.iter_mut().zip(&pods).rev() {
            sites.stand_down(pods + 1..above + 1)?;
            above = *pods;
            progress.note(&format!("beside {}", size.attachments));
            size.restarts = Some(restarts(&mut sites.agent, size.attachments)?);
        }
        Ok(Done::Unchanged(format!("{RESTARTS} with each number of attachments")))
    })?;
    Ok(Standing { sizes: found, resident_after })
}

/// Returns each size, from an empty node on, with the shares of the pods that are added to reach it.
fn steps(sizes: &[u16]) -> Vec<(u16, Vec<usize>)> {
    let mut steps = vec![(0, Vec::new())];
    let mut before = 0;
    for size in sizes {
        steps.push((*size, sites::shares(size.saturating_sub(before))));
        before = *size;
    }
    steps
}

fn beside(
    sites: &Sites,
    attachments: u16,
    rounds: u16,
    idle: Duration,
    progress: &progress::Progress,
) -> anyhow::Result<Size> {
    sites.agent.settle(PATIENCE)?;
    progress.note("pods one after another");
    let adds = adds::measure(sites, rounds)?;
    progress.note("idle");
    sites.agent.rest(PATIENCE)?;
    let resident = sites.agent.resident_kib().context("the agent has no memory")?;
    let before = sites.agent.processor_time()?;
    thread::sleep(idle);
    let used = sites.agent.processor_time()?.saturating_sub(before);
    progress.note("datagrams");
    let datagrams = adds::datagrams(sites)?;
    // A pair needs two pods, and a policy one.
    let stands = sites.standing() >= 2;
    progress.note("two others");
    let pairs = if stands { Some(pair::measure(sites)?) } else { None };
    progress.note("policy");
    let changes = if stands { Some(policy::measure(sites)?) } else { None };
    let idle = used.as_secs_f64() / idle.as_secs_f64() * 100.0;
    Ok(Size { attachments, adds, datagrams, idle, resident, pairs, changes, restarts: None })
}

/// The agent is killed each time, so its state is that after a crash.
fn restarts(agent: &mut Agent, attachments: u16) -> anyhow::Result<Restarts> {
    let (mut ready, mut processor) = (Vec::new(), Vec::new());
    for _ in 0..RESTARTS {
        ready.push(milliseconds(agent.restart()?));
        processor.push(milliseconds(agent.processor_time()?));
        agent.has_attachments(attachments)?;
        agent.settle(PATIENCE)?;
    }
    Ok(Restarts { ready: Series::new(ready), processor: Series::new(processor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_brings_what_is_missing_to_it() {
        let found = steps(&[10, 14, 20]);
        assert_eq!(found, [(0, vec![]), (10, vec![3, 3, 3, 1]), (14, vec![3, 1]), (20, vec![3, 3])]);
    }
}
