//! Logs whether the node is ready, as `netattachctl status` shows it: once when that is known, and at each
//! change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::rpc::message::Readiness;
use crate::ticks;

/// How often the results of the checks are compared with the last log line, and how often before the first
/// one.
const INTERVAL: Duration = Duration::from_secs(1);
const FIRST_INTERVAL: Duration = Duration::from_millis(50);
/// How long the first checks may take before the node is logged as not ready: some run only once the agent
/// serves.
const PATIENCE: Duration = Duration::from_secs(2);

/// The conditions that the last line named as not met. The check of each condition logs the problem itself.
#[derive(Debug, Default)]
struct Said(Option<Vec<String>>);

/// A line of the log.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Ready,
    NotReady { condition: String, problem: String, others: usize },
}

impl Said {
    /// Returns the line for these conditions, unless it is the same as before. `is_early`: some may not be
    /// known yet.
    fn line(&mut self, conditions: Vec<Readiness>, is_early: bool) -> Option<Line> {
        let unmet: Vec<Readiness> = conditions.into_iter().filter(|it| !it.met).collect();
        let names = unmet.iter().map(|it| it.condition.clone()).collect();
        if self.0.as_ref() == Some(&names) || self.0.is_none() && is_early && !unmet.is_empty() {
            return None;
        }
        self.0 = Some(names);
        let others = unmet.len().saturating_sub(1);
        Some(match unmet.into_iter().next() {
            None => Line::Ready,
            Some(first) => Line::NotReady { condition: first.condition, problem: first.detail, others },
        })
    }
}

/// Follows the conditions, forever. Triggers no checks.
pub(in crate::agent) async fn tell(agent: Arc<Agent>) {
    let (mut said, began) = (Said::default(), Instant::now());
    loop {
        match said.line(agent.reporter.known_ready(), began.elapsed() < PATIENCE) {
            Some(Line::Ready) => tracing::info!("ready"),
            Some(Line::NotReady { condition, problem, others: 0 }) => {
                tracing::warn!("not ready: {condition}: {problem}");
            }
            Some(Line::NotReady { condition, problem, others }) => {
                tracing::warn!(others, "not ready: {condition}: {problem}");
            }
            None => {}
        }
        ticks::next(if said.0.is_some() { INTERVAL } else { FIRST_INTERVAL }).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(unmet: &[(&str, &str)]) -> Vec<Readiness> {
        let all = ["source", "journal", "default network"].map(|name| {
            let problem = unmet.iter().find(|(condition, _)| *condition == name);
            Readiness {
                condition: name.to_owned(),
                met: problem.is_none(),
                detail: problem.map_or("well", |(_, problem)| problem).to_owned(),
            }
        });
        all.into()
    }

    fn not_ready(condition: &str, problem: &str, others: usize) -> Option<Line> {
        Some(Line::NotReady { condition: condition.to_owned(), problem: problem.to_owned(), others })
    }

    #[test]
    fn each_change_is_said_once_with_the_first_reason() {
        let mut said = Said::default();
        let full = ("journal", "no space");
        let undefined = ("default network", "not defined");
        let steps = [
            (conditions(&[undefined]), not_ready(undefined.0, undefined.1, 0)),
            (conditions(&[undefined]), None),
            // The check of the network logs this.
            (conditions(&[("default network", "its plugin is missing")]), None),
            (conditions(&[full, undefined]), not_ready(full.0, full.1, 1)),
            (conditions(&[full]), not_ready(full.0, full.1, 0)),
            (conditions(&[]), Some(Line::Ready)),
            (conditions(&[]), None),
            (conditions(&[full]), not_ready(full.0, full.1, 0)),
        ];
        for (number, (conditions, expected)) in steps.into_iter().enumerate() {
            assert_eq!(said.line(conditions, false), expected, "step {number}");
        }
    }

    #[test]
    fn a_node_is_not_called_unready_before_it_was_looked_at() {
        let mut said = Said::default();
        let unknown = || conditions(&[("journal", "state of journal is not known yet")]);
        assert_eq!(said.line(unknown(), true), None);
        assert_eq!(said.line(conditions(&[]), true), Some(Line::Ready));
        // Once a check has run, its result is known.
        assert_eq!(
            said.line(conditions(&[("journal", "no space")]), true),
            not_ready("journal", "no space", 0)
        );
        let mut said = Said::default();
        assert_eq!(said.line(unknown(), true), None);
        assert_eq!(said.line(unknown(), false), not_ready("journal", "state of journal is not known yet", 0));
    }
}
