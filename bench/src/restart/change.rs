//! An agent that is replaced by the next one, which stands by, while pods are created and deleted: how much longer an
//! ADD takes than without a change.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use super::Programs;
use crate::Series;
use crate::agent::{Agent, Caller};
use crate::limit::Limit;
use crate::pods::{Pod, joined};

/// Number of pods that are created and deleted concurrently.
pub(super) const PODS: u16 = 3;
/// How long they are before the change of agents, and after it.
const AROUND: Duration = Duration::from_millis(500);
/// How long an agent may take to become idle.
const PATIENCE: Duration = Duration::from_secs(60);
/// The maximum delay of a pod according to docs/upgrade.md, in milliseconds.
const PROMISED: f64 = 2000.0;

/// Changes of one kind. Milliseconds of the longest ADD of each round.
#[derive(Serialize)]
pub(super) struct Changes {
    pub(super) attachments: u16,
    pub(super) programs: Programs,
    /// For the same time, without a change of the agent.
    pub(super) without: Series,
    pub(super) with: Series,
    /// ADDs while agents changed.
    pub(super) adds: u64,
}

impl Changes {
    /// Returns how much longer the longest ADD took with a change.
    pub(super) fn delay(&self) -> f64 {
        self.with.maximum - self.without.maximum
    }

    pub(super) fn limit(&self) -> Limit {
        let what = format!(
            "an ADD takes longer while the next agent takes over {} attachments, programs {}",
            self.attachments,
            self.programs.name()
        );
        Limit::new(what, self.delay(), PROMISED, "ms")
    }
}

/// The results of these pods.
#[derive(Default)]
struct Came {
    adds: u64,
    longest: Duration,
}

/// Changes the agent repeatedly, with that many attachments beside the changing pods.
pub(super) fn measure(
    agent: &mut Agent,
    coming: &[Pod],
    attachments: u16,
    programs: Programs,
    rounds: u16,
) -> anyhow::Result<Changes> {
    let [mut without, mut with] = [const { Vec::new() }; 2];
    let milliseconds = |came: &Came| came.longest.as_secs_f64() * 1000.0;
    let mut adds = 0;
    for _ in 0..rounds {
        agent.settle(PATIENCE)?;
        let came = while_pods_come(agent, coming, |_| {
            thread::sleep(2 * AROUND);
            Ok(())
        })?;
        without.push(milliseconds(&came));
        programs.prepare(agent)?;
        let next = agent.stand_by()?;
        let came = while_pods_come(agent, coming, |agent| {
            thread::sleep(AROUND);
            agent.hand_over(next)?;
            thread::sleep(AROUND);
            Ok(())
        })?;
        with.push(milliseconds(&came));
        adds += came.adds;
        // The next agent carries out a DEL that came while no agent listened.
        agent.settle(PATIENCE)?;
        agent.has_attachments(attachments)?;
    }
    let [without, with] = [without, with].map(Series::new);
    Ok(Changes { attachments, programs, without, with, adds })
}

/// Creates and deletes pods, each as fast as it can, for the duration of the work.
fn while_pods_come(
    agent: &mut Agent,
    pods: &[Pod],
    work: impl FnOnce(&mut Agent) -> anyhow::Result<()>,
) -> anyhow::Result<Came> {
    let over = AtomicBool::new(false);
    let callers: Vec<(&Pod, Caller)> = pods.iter().map(|pod| (pod, agent.caller(pod))).collect();
    thread::scope(|scope| {
        let starts = |(pod, caller)| {
            let over = &over;
            scope.spawn(move || comes_and_goes(pod, &caller, over))
        };
        let coming: Vec<_> = callers.into_iter().map(starts).collect();
        let worked = work(agent);
        over.store(true, Ordering::Relaxed);
        let came = coming.into_iter().try_fold(Came::default(), |all, thread| {
            let one = joined(thread.join()).context("a pod that comes while agents change")?;
            Ok::<_, anyhow::Error>(Came { adds: all.adds + one.adds, longest: all.longest.max(one.longest) })
        });
        worked.and(came)
    })
}

fn comes_and_goes(pod: &Pod, caller: &Caller, over: &AtomicBool) -> anyhow::Result<Came> {
    let mut came = Came::default();
    while !over.load(Ordering::Relaxed) {
        let container = pod.new_container();
        let began = Instant::now();
        caller.call("ADD", &container)?;
        came.longest = came.longest.max(began.elapsed());
        came.adds += 1;
        caller.call("DEL", &container)?;
    }
    Ok(came)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_promise_is_about_what_the_change_adds() {
        let changes = |with: f64| Changes {
            attachments: 10,
            programs: Programs::Same,
            without: Series::new(vec![20.0, 500.0]),
            with: Series::new(vec![with, 30.0]),
            adds: 7,
        };
        assert!(changes(2500.0).limit().is_met());
        assert_eq!(
            changes(2501.0).limit().to_string(),
            "an ADD takes longer while the next agent takes over 10 attachments, programs as they are: 2001.00 ms, and at most \
             2000 are allowed"
        );
        assert!(!changes(f64::NAN).limit().is_met());
    }
}
