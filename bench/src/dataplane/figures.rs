//! Computes figures from samples.

use std::fmt::Write as _;

use serde::Serialize;

use super::paths::Path;
use super::{Options, Part, policies, programs};
use crate::{Origin, Series};

/// The results of one run.
#[derive(Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) origin: Origin,
    /// Number of samples of each figure.
    pub(super) rounds: u16,
    /// Client and server share one processor.
    pub(super) paths: Vec<Figures>,
    /// netattach compared with its floor.
    pub(super) pairs: Option<super::pairs::Pairs>,
    /// The cost of a flood of new flows to others.
    pub(super) flood: Option<super::flood::Flood>,
    pub(super) policies: Vec<policies::Figures>,
    pub(super) programs: Option<programs::Report>,
}

/// Measured rates of one path.
#[derive(Default)]
pub(super) struct Samples {
    pub(super) requests: Vec<f64>,
    pub(super) connections: Vec<f64>,
}

/// The figures of one path.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) name: &'static str,
    /// Number of peers that the server's policy allows; `None` without a policy.
    pub(super) rules: Option<u32>,
    /// Exchanges of a byte per second on one connection.
    pub(super) requests: Series,
    /// Connections per second, with one exchange each.
    pub(super) connections: Series,
}

impl Report {
    /// A report without results yet, for a run with these options.
    pub(super) fn of(options: &Options) -> Self {
        let rounds = options.rounds.get();
        let mut command =
            format!("cargo xtask bench dataplane --rounds {rounds} --sample {}", options.sample.as_millis());
        if options.only.is_empty() || options.only.contains(&Part::Pairs) {
            let _ = write!(command, " --pairs {}", options.pairs);
        }
        for part in &options.only {
            let _ = write!(command, " --only {}", part.name());
        }
        Self {
            origin: Origin::of(command),
            rounds,
            paths: Vec::new(),
            pairs: None,
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
