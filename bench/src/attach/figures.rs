//! Computes figures from durations.

use std::time::Duration;

use serde::Serialize;

use super::parts::Part;
use super::{Options, Samples};
use crate::Origin;

/// The results of one run.
#[derive(Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) origin: Origin,
    pub(super) rounds: u16,
    pub(super) bursts: u16,
    pub(super) burst_size: u16,
    pub(super) contenders: Vec<Figures>,
    /// The breakdown of the time of netattach's ADD.
    pub(super) add_parts: Vec<Part>,
}

/// The times of one contender.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) name: &'static str,
    pub(super) description: String,
    /// One pod.
    pub(super) add: Series,
    pub(super) del: Series,
    /// A burst of pods, from the first request to the last answer.
    pub(super) burst_add: Series,
    pub(super) burst_del: Series,
    /// Resident memory of the processes that stay between requests, in KiB.
    pub(super) resident_kib: Option<u64>,
}

/// Durations in milliseconds.
#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) median: Option<f64>,
    pub(super) p99: Option<f64>,
    pub(super) minimum: Option<f64>,
    /// The samples in the order in which they were taken.
    pub(super) samples: Vec<f64>,
}

impl Report {
    pub(super) fn new(options: &Options, contenders: Vec<Figures>, add_parts: Vec<Part>) -> Self {
        let (rounds, burst_size) = (options.rounds.get(), options.burst_size.get());
        let command = format!(
            "cargo xtask bench attach --only pod --rounds {rounds} --bursts {} --burst-size {burst_size}",
            options.bursts
        );
        Self {
            origin: Origin::of(command),
            rounds,
            bursts: options.bursts,
            burst_size,
            contenders,
            add_parts,
        }
    }

    pub(super) fn named(&self, name: &str) -> Option<&Figures> {
        self.contenders.iter().find(|figures| figures.name == name)
    }
}

impl Figures {
    pub(super) fn new(
        name: &'static str,
        description: String,
        samples: Samples,
        resident_kib: Option<u64>,
    ) -> Self {
        Self {
            name,
            description,
            add: Series::new(&samples.add),
            del: Series::new(&samples.del),
            burst_add: Series::new(&samples.burst_add),
            burst_del: Series::new(&samples.burst_del),
            resident_kib,
        }
    }
}

impl Series {
    pub(super) fn new(durations: &[Duration]) -> Self {
        let samples: Vec<f64> = durations.iter().map(|taken| taken.as_secs_f64() * 1000.0).collect();
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() {
            0 => None,
            count if count % 2 == 0 => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
            _ => Some(sorted[middle]),
        };
        // Nearest rank: for fewer than a hundred samples this is the largest.
        let rank = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
        Self { median, p99: sorted.get(rank).copied(), minimum: sorted.first().copied(), samples }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(milliseconds: impl IntoIterator<Item = u64>) -> Series {
        Series::new(&milliseconds.into_iter().map(Duration::from_millis).collect::<Vec<_>>())
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        let expected = Series {
            median: Some(2.5),
            p99: Some(4.0),
            minimum: Some(1.0),
            samples: vec![4.0, 1.0, 3.0, 2.0],
        };
        assert_eq!(series([4, 1, 3, 2]), expected);
    }

    #[test]
    fn the_99th_percentile_leaves_one_in_a_hundred_above_it() {
        assert_eq!(series(1..=200).p99, Some(198.0));
        assert_eq!(series(1..=100).p99, Some(99.0));
        assert_eq!(series([7]).p99, Some(7.0));
    }

    #[test]
    fn no_samples_give_no_figures() {
        assert_eq!(series([]), Series { median: None, p99: None, minimum: None, samples: vec![] });
    }
}
