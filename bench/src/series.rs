//! Samples of one figure.

use serde::{Deserialize, Serialize};

/// Samples of one figure: rates per second, milliseconds or nanoseconds.
#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) median: f64,
    pub(super) minimum: f64,
    pub(super) maximum: f64,
    /// The samples in the order in which they were taken.
    pub(super) samples: Vec<f64>,
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

impl Series {
    /// Returns the interval that contains the median of many more samples with a probability of 95 per cent: the
    /// samples at the ranks of the sign test, whose binomial distribution is approximated by a normal one. With fewer
    /// than six samples, the probability is lower.
    pub(super) fn interval(&self) -> [f64; 2] {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let rank = f64::midpoint(count as f64, 1.0) - 0.98 * (count as f64).sqrt();
        // A rank is at least 1, and fits.
        let below = (rank.max(1.0) as usize).saturating_sub(1);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
        [at(below), at(count.saturating_sub(below + 1))]
    }

    /// Returns the ratio of each sample to the one that was taken beside it.
    pub(super) fn ratios(&self, to: &Self) -> Self {
        Self::new(self.samples.iter().zip(&to.samples).map(|(sample, to)| sample / to).collect())
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

    #[test]
    fn the_interval_of_the_median_narrows_with_the_number_of_samples() {
        let of = |count: u32| Series::new((1..=count).rev().map(f64::from).collect()).interval();
        // The ranks are those of tables of the binomial distribution.
        assert_eq!([of(1), of(5), of(6), of(10)], [[1.0, 1.0], [1.0, 5.0], [1.0, 6.0], [2.0, 9.0]]);
        assert_eq!([of(40), of(50)], [[14.0, 27.0], [18.0, 33.0]]);
        assert!(Series::new(Vec::new()).interval()[0].is_nan());
    }

    #[test]
    fn ratios_are_of_samples_taken_beside_each_other() {
        let ratios = Series::new(vec![2.0, 9.0, 8.0]).ratios(&Series::new(vec![1.0, 3.0, 2.0]));
        assert_eq!(ratios.samples, [2.0, 3.0, 4.0]);
    }
}
