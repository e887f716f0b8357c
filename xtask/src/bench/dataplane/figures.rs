//! From samples to figures.

use std::fmt::Write as _;

use serde::Serialize;

use super::paths::Path;
use super::{Options, policies, programs};
use crate::bench::Origin;

/// Everything one run found out.
#[derive(Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) origin: Origin,
    /// Samples of each figure.
    pub(super) rounds: u16,
    /// Client and server share one processor.
    pub(super) paths: Vec<Figures>,
    /// What a flood of new flows costs those beside it.
    pub(super) flood: Option<super::flood::Flood>,
    pub(super) policies: Vec<policies::Figures>,
    pub(super) programs: Option<programs::Report>,
}

/// Rates that one path was measured at.
#[derive(Default)]
pub(super) struct Samples {
    pub(super) requests: Vec<f64>,
    pub(super) connections: Vec<f64>,
}

/// What one path does.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) name: &'static str,
    /// Peers that the server's policy allows; none without a policy.
    pub(super) rules: Option<u32>,
    /// Exchanges of a byte per second on one connection.
    pub(super) requests: Series,
    /// Connections per second, with one exchange each.
    pub(super) connections: Series,
}

/// Samples of one figure: rates per second, milliseconds or nanoseconds.
#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) median: f64,
    pub(super) minimum: f64,
    pub(super) maximum: f64,
    /// In the order in which they were taken.
    pub(super) samples: Vec<f64>,
}

impl Report {
    /// What a run with these options found nothing out for yet.
    pub(super) fn of(options: &Options) -> Self {
        let rounds = options.rounds.get();
        let mut command =
            format!("cargo xtask bench dataplane --rounds {rounds} --sample {}", options.sample.as_millis());
        for part in &options.only {
            let _ = write!(command, " --only {}", part.name());
        }
        Self {
            origin: Origin::of(command),
            rounds,
            paths: Vec::new(),
            flood: None,
            policies: Vec::new(),
            programs: None,
        }
    }

    pub(super) fn find(&self, name: &str, rules: Option<u32>) -> Option<&Figures> {
        self.paths.iter().find(|figures| figures.name == name && figures.rules == rules)
    }
}

impl Figures {
    pub(super) fn new(path: &Path, samples: Samples) -> Self {
        Self {
            name: path.name,
            rules: path.rules,
            requests: Series::new(samples.requests),
            connections: Series::new(samples.connections),
        }
    }
}

impl Series {
    pub(super) fn new(samples: Vec<f64>) -> Self {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
        Self {
            median: at(sorted.len() / 2),
            minimum: at(0),
            maximum: at(sorted.len().saturating_sub(1)),
            samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_has_its_middle_and_its_ends() {
        let series = Series::new(vec![3.0, 1.0, 2.0]);
        let expected = Series { median: 2.0, minimum: 1.0, maximum: 3.0, samples: vec![3.0, 1.0, 2.0] };
        assert_eq!(series, expected);
    }
}
