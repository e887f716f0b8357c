//! Samples of one figure.

use serde::Serialize;

/// Samples of one figure: rates per second, milliseconds or nanoseconds.
#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) median: f64,
    pub(super) minimum: f64,
    pub(super) maximum: f64,
    /// In the order in which they were taken.
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
