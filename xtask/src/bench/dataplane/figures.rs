//! From samples to figures.

use serde::Serialize;

use super::Options;
use super::paths::Path;

/// Everything one run found out.
#[derive(Serialize)]
pub(super) struct Report {
    /// Command line that repeats the run.
    pub(super) command: String,
    /// Release of the kernel it ran on.
    pub(super) kernel: String,
    /// Processors that were available; client and server share one.
    pub(super) processors: usize,
    /// Samples of each figure.
    pub(super) rounds: u16,
    pub(super) paths: Vec<Figures>,
    /// What a flood of new flows costs those beside it.
    pub(super) flood: Option<super::flood::Flood>,
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

/// Rates per second.
#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) median: f64,
    pub(super) minimum: f64,
    pub(super) maximum: f64,
    /// In the order in which they were taken.
    pub(super) samples: Vec<f64>,
}

impl Report {
    pub(super) fn new<'a>(options: &Options, measured: impl Iterator<Item = (&'a Path, Samples)>) -> Self {
        let rounds = options.rounds.get();
        let milliseconds = options.sample.as_millis();
        Self {
            command: format!("cargo xtask bench dataplane --rounds {rounds} --sample {milliseconds}"),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            processors: thread_count(),
            rounds,
            paths: measured
                .map(|(path, samples)| Figures {
                    name: path.name,
                    rules: path.rules,
                    requests: Series::new(samples.requests),
                    connections: Series::new(samples.connections),
                })
                .collect(),
            flood: None,
        }
    }

    pub(super) fn find(&self, name: &str, rules: Option<u32>) -> Option<&Figures> {
        self.paths.iter().find(|figures| figures.name == name && figures.rules == rules)
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

fn thread_count() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
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
