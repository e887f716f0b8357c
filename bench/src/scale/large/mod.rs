//! Policies of the maximum size, which are created, changed and deleted repeatedly: whether the last time takes as
//! long as the first, and how much memory is left in use.
//!
//! Policies of `files` with the maximum number of rules, and one `in_cluster` whose selectors select pods of other
//! nodes. The `table` compares with the limits.

mod files;
#[cfg(feature = "cluster")]
mod in_cluster;
mod table;

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use xtask::progress::{self, Done, Progress};

use self::files::Rules;
pub(super) use self::table::table;
use super::adds::milliseconds;
use crate::agent::Agent;
use crate::bpf::Words;
use crate::limit::Limit;
use crate::pods::Pod;
use crate::{Origin, Series};

/// The name of the policy.
const NAME: &str = "measured";
/// Number of cycles at the beginning and at the end; the medians of both are compared.
const ENDS: usize = 3;
/// Samples of an agent's memory at rest, a second apart: the resident part of its code varies.
const LOOKS: usize = 11;
/// Time limit for a policy to be in force, and for all that follows that.
const IN_FORCE: Duration = Duration::from_secs(60);

/// The results of one run.
#[derive(Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) origin: Origin,
    cycles: u16,
    policies: Vec<Figures>,
    pub(super) limits: Vec<Limit>,
}

/// One policy, cycle by cycle.
#[derive(Serialize)]
struct Figures {
    name: String,
    /// Milliseconds from the creation of a policy, with none before, to the word that the programs read.
    load: Series,
    /// The same for a policy that replaces it, with all rules different.
    change: Series,
    /// Milliseconds of the agent's processor time for both, for the removal and for all that follows each.
    processor: Series,
    /// Resident memory of the agent at rest in MiB, before the first cycle and after the last.
    before: f64,
    after: f64,
}

impl Figures {
    fn grown(&self) -> f64 {
        self.after - self.before
    }
}

/// Returns the medians of the first samples and of the last.
fn ends(series: &Series) -> [f64; 2] {
    let samples = &series.samples;
    let first = samples.iter().take(ENDS);
    let last = samples.iter().rev().take(ENDS);
    [Series::new(first.copied().collect()).median, Series::new(last.copied().collect()).median]
}

/// Writes the policy and puts it where the agent finds it.
trait Author {
    /// Prepares the policy of a round. None of its rules equals one of the round before.
    fn write(&mut self, round: u32) -> anyhow::Result<()>;
    /// Puts it in place.
    fn put(&mut self) -> anyhow::Result<()>;
    fn remove(&mut self) -> anyhow::Result<()>;
}

/// Measures every policy in as many cycles.
pub(super) fn measure(cycles: u16) -> anyhow::Result<Report> {
    let mut policies = Vec::new();
    for rules in [Rules::Ranges, Rules::Prefixes] {
        progress::step(&rules.name(), |progress| {
            policies.push(files::measure(rules, cycles, progress)?);
            Ok(Done::Unchanged(format!("{cycles} cycles")))
        })?;
    }
    #[cfg(feature = "cluster")]
    progress::step(&in_cluster::name(), |progress| {
        policies.push(in_cluster::measure(cycles, progress)?);
        Ok(Done::Unchanged(format!("{cycles} cycles")))
    })?;
    let origin = Origin::of(format!("cargo xtask bench scale --only policies --cycles {cycles}"));
    let limits = table::limits(&policies);
    Ok(Report { origin, cycles, policies, limits })
}

/// The attachment that the policy selects.
struct Subject<'a> {
    agent: &'a Agent,
    words: Words,
    id: usize,
}

impl<'a> Subject<'a> {
    fn of(agent: &'a Agent, pod: &Pod, interface: &str) -> anyhow::Result<Self> {
        let id = agent.row_of(pod, interface)?["id"].as_u64().and_then(|id| usize::try_from(id).ok());
        let id = id.context("an attachment without a number")?;
        let words = Words::open(&agent.pin("na_policy")?, id + 1)?;
        Ok(Self { agent, words, id })
    }

    /// Repeatedly creates a policy, replaces it by another, and deletes that.
    fn cycles(
        &self,
        name: String,
        cycles: u16,
        author: &mut dyn Author,
        progress: &Progress,
    ) -> anyhow::Result<Figures> {
        progress.note("memory");
        let before = self.resident()?;
        let (mut load, mut change, mut processor) = (Vec::new(), Vec::new(), Vec::new());
        for cycle in 0..u32::from(cycles) {
            progress.note(&format!("cycle {} of {cycles}", cycle + 1));
            let used = self.agent.processor_time()?;
            load.push(self.put(2 * cycle, author)?);
            change.push(self.put(2 * cycle + 1, author)?);
            author.remove()?;
            self.words.wait(self.id, IN_FORCE, |word| word == 0)?;
            self.settle()?;
            processor.push(milliseconds(self.agent.processor_time()?.saturating_sub(used)));
        }
        progress.note("memory");
        let after = self.resident()?;
        let [load, change, processor] = [load, change, processor].map(Series::new);
        Ok(Figures { name, load, change, processor, before, after })
    }

    /// Puts the policy of a round into force; returns the milliseconds. Waits until the previous one is out of the
    /// maps.
    fn put(&self, round: u32, author: &mut dyn Author) -> anyhow::Result<f64> {
        author.write(round)?;
        let before = self.words.get(self.id);
        let began = Instant::now();
        author.put()?;
        self.words.wait(self.id, IN_FORCE, |word| word != before)?;
        let time = began.elapsed();
        self.settle()?;
        self.is_as_written()?;
        Ok(milliseconds(time))
    }

    /// Waits until no work is left. An agent that continues would be measured in part.
    fn settle(&self) -> anyhow::Result<()> {
        ensure!(self.agent.settle(IN_FORCE)?, "the agent has not come to rest after {IN_FORCE:?}");
        Ok(())
    }

    /// Checks that the policy is in force as written: one beyond a bound only isolates, which is fast.
    fn is_as_written(&self) -> anyhow::Result<()> {
        let status = self.agent.ask(&["status"])?;
        let rows = |list: &str| status[list].as_array().into_iter().flatten();
        let is_about_it = |row: &&Value| row["object"].as_str().is_some_and(|object| object.contains(NAME));
        match rows("source").chain(rows("troubles")).find(is_about_it) {
            Some(row) => bail!("the policy is not in force as written: {row}"),
            None => Ok(()),
        }
    }

    /// MiB at rest.
    fn resident(&self) -> anyhow::Result<f64> {
        ensure!(self.agent.rest(IN_FORCE)?, "the agent has not come to rest after {IN_FORCE:?}");
        let mut looks = Vec::with_capacity(LOOKS);
        for _ in 0..LOOKS {
            looks.push(self.agent.resident_kib().context("the agent has no memory")? as f64 / 1024.0);
            thread::sleep(Duration::from_secs(1));
        }
        Ok(Series::new(looks).median)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_a_series_are_medians_of_three() {
        let series = Series::new(vec![9.0, 1.0, 2.0, 100.0, 4.0, 5.0, 3.0]);
        assert_eq!(ends(&series), [2.0, 4.0]);
        assert_eq!(ends(&Series::new(vec![7.0])), [7.0, 7.0]);
    }
}
