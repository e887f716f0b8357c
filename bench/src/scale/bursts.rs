//! Many pods at once on an otherwise empty node, by every way alternately; and one more pod beside the largest burst.

use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use xtask::progress::{self, Done};

use super::adds::{self, Adds, PATIENCE};
use super::sites::{Ground, MEASURED, Sites, WAYS, Way};
use crate::Series;
use crate::pods::{Pod, at_once};

/// Bursts of each size by each way.
const TURNS: usize = 3;

#[derive(Serialize)]
pub(super) struct Bursts {
    pub(super) bursts: Vec<Burst>,
    /// One pod after another while the pods of the largest burst stand.
    pub(super) beside: Adds,
    /// Resident memory of the agent in KiB at the end, with no pod left.
    pub(super) resident_after: u64,
    /// Warnings of the agent meanwhile.
    pub(super) warnings: Vec<String>,
}

/// Milliseconds from the first request to the last answer, in the order of the ways.
#[derive(Serialize)]
pub(super) struct Burst {
    pub(super) pods: u16,
    pub(super) adds: [Series; 3],
    pub(super) dels: [Series; 3],
}

impl Burst {
    pub(super) fn add(&self, way: Way) -> f64 {
        self.adds[way as usize].median
    }

    pub(super) fn del(&self, way: Way) -> f64 {
        self.dels[way as usize].median
    }
}

/// The sizes are in ascending order; `None` without any. The nodes are returned so that the caller keeps them:
/// removing that many namespaces takes the kernel a while, in which it holds its lock of links.
pub(super) fn measure(sizes: &[u16], rounds: u16) -> anyhow::Result<Option<(Bursts, [Ground; 3])>> {
    let Some(most) = sizes.last() else { return Ok(None) };
    let mut prepared = None;
    progress::step("nodes of the bursts", |progress| {
        prepared = Some(Sites::prepare("bursts", most + 1, |_| MEASURED.to_owned(), progress)?);
        Ok(Done::Unchanged(format!("one for each way, with {} pods", most + 1)))
    })?;
    let mut sites = prepared.context("nothing was prepared")?;
    let mut bursts = Vec::new();
    // One pod by each way creates bridges and warms caches.
    burst(&sites, 1)?;
    for pods in sizes {
        progress::step(&format!("{pods} at once"), |progress| {
            let mut samples = [const { (Vec::new(), Vec::new()) }; 3];
            for turn in 1..=TURNS {
                progress.note(&format!("turn {turn} of {TURNS}"));
                for ((add, del), (adds, dels)) in burst(&sites, *pods)?.into_iter().zip(&mut samples) {
                    adds.push(adds::milliseconds(add));
                    dels.push(adds::milliseconds(del));
                }
            }
            let [floor, programs, netattach] =
                samples.map(|(adds, dels)| (Series::new(adds), Series::new(dels)));
            let adds = [floor.0, programs.0, netattach.0];
            bursts.push(Burst { pods: *pods, adds, dels: [floor.1, programs.1, netattach.1] });
            Ok(Done::Unchanged(format!("{TURNS} by each way")))
        })?;
    }
    let mut beside = None;
    progress::step(&format!("beside {most} pods"), |_| {
        for way in WAYS {
            add(&sites, way, *most)?;
        }
        sites.count_standing(*most);
        sites.agent.settle(PATIENCE)?;
        beside = Some(adds::measure(&sites, rounds)?);
        sites.count_standing(0);
        for way in WAYS {
            del(&sites, way, *most)?;
        }
        Ok(Done::Unchanged(format!("{rounds} pods by each way")))
    })?;
    sites.agent.rest(PATIENCE)?;
    let resident_after = sites.agent.resident_kib().context("the agent has no memory")?;
    let warnings = warnings(&sites.agent.log()?);
    let beside = beside.context("nothing was measured")?;
    Ok(Some((Bursts { bursts, beside, resident_after, warnings }, sites.leave())))
}

/// ADD and DEL of that many pods at once, by each way.
fn burst(sites: &Sites, pods: u16) -> anyhow::Result<Vec<(Duration, Duration)>> {
    WAYS.into_iter()
        .map(|way| {
            let times = (add(sites, way, pods)?, del(sites, way, pods)?);
            sites.agent.settle(PATIENCE)?;
            Ok(times)
        })
        .collect()
}

fn add(sites: &Sites, way: Way, pods: u16) -> anyhow::Result<Duration> {
    let pods = sites.some(way, 1..pods + 1)?;
    sites.on(way, || {
        let time = at_once(pods, |pod| sites.add(way, pod))?;
        pods.iter().try_for_each(Pod::is_attached)?;
        Ok(time)
    })
}

fn del(sites: &Sites, way: Way, pods: u16) -> anyhow::Result<Duration> {
    let pods = sites.some(way, 1..pods + 1)?;
    sites.on(way, || {
        let time = at_once(pods, |pod| sites.del(way, pod))?;
        pods.iter().try_for_each(Pod::is_empty)?;
        Ok(time)
    })
}

/// The lines of a log that warn, or are errors.
fn warnings(log: &str) -> Vec<String> {
    let is_one =
        |line: &&str| line.split_whitespace().nth(1).is_some_and(|level| ["WARN", "ERROR"].contains(&level));
    log.lines().filter(is_one).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_told_from_what_says_warn() {
        let log = "2026-01-01T00:00:00Z  INFO agent: WARN is a word\n2026-01-01T00:00:01Z  WARN agent: late\n\
                   2026-01-01T00:00:02Z ERROR agent: lost\n";
        assert_eq!(
            warnings(log),
            ["2026-01-01T00:00:01Z  WARN agent: late", "2026-01-01T00:00:02Z ERROR agent: lost"]
        );
    }
}
