//! Figures with their upper or lower bounds.

use std::fmt;

use anyhow::bail;
use serde::Serialize;

use crate::document;

/// A figure with its bound.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Limit {
    what: String,
    found: f64,
    #[serde(flatten)]
    bound: Bound,
    unit: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Bound {
    Most(f64),
    Least(f64),
}

impl Limit {
    /// The most that it may be.
    pub(super) fn new(what: impl Into<String>, found: f64, most: f64, unit: &'static str) -> Self {
        Self { what: what.into(), found, bound: Bound::Most(most), unit }
    }

    /// The least that it may be.
    pub(super) fn at_least(what: impl Into<String>, found: f64, least: f64, unit: &'static str) -> Self {
        Self { what: what.into(), found, bound: Bound::Least(least), unit }
    }

    /// Whether the figure is within its limit; `false` if it was not measured.
    pub(super) fn is_met(&self) -> bool {
        match self.bound {
            Bound::Most(most) => self.found <= most,
            Bound::Least(least) => self.found >= least,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, found, bound, unit } = self;
        write!(f, "{what}: {found:.2} {unit}, and ")?;
        match bound {
            Bound::Most(most) => write!(f, "at most {most} are allowed"),
            Bound::Least(least) => write!(f, "at least {least} are wanted"),
        }
    }
}

/// Formats all limits as a table.
pub(super) fn table(limits: &[Limit]) -> String {
    let all_are_most = limits.iter().all(|limit| matches!(limit.bound, Bound::Most(_)));
    let row = |limit: &Limit| {
        let met = if limit.is_met() { "yes" } else { "**missed**" };
        let (side, bound) = match limit.bound {
            Bound::Most(most) if all_are_most => ("", most),
            Bound::Most(most) => ("at most ", most),
            Bound::Least(least) => ("at least ", least),
        };
        vec![
            limit.what.clone(),
            format!("{:.2} {}", limit.found, limit.unit).trim_end().to_owned(),
            format!("{side}{bound} {}", limit.unit).trim_end().to_owned(),
            met.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = limits.iter().map(row).collect();
    document::aligned(&["", "found", if all_are_most { "at most" } else { "to be" }, "met"], &rows)
}

/// # Errors
/// The limits that are missed.
pub(super) fn check(limits: &[Limit]) -> anyhow::Result<()> {
    let missed: Vec<String> =
        limits.iter().filter(|limit| !limit.is_met()).map(ToString::to_string).collect();
    if missed.is_empty() { Ok(()) } else { bail!("missed: {}", missed.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(found: f64) -> Limit {
        Limit::new("memory", found, 30.0, "MiB")
    }

    #[test]
    fn a_limit_is_met_at_it_and_not_by_what_was_not_measured() {
        assert!(memory(30.0).is_met());
        assert!(!memory(30.01).is_met());
        assert!(!memory(f64::NAN).is_met());
    }

    #[test]
    fn a_lower_bound_is_met_at_it_and_not_by_what_was_not_measured() {
        let speed = |found| Limit::at_least("speed", found, 0.96, "times");
        assert_eq!(
            [speed(0.96), speed(0.95), speed(f64::NAN)].map(|limit| limit.is_met()),
            [true, false, false]
        );
        assert_eq!(speed(0.95).to_string(), "speed: 0.95 times, and at least 0.96 are wanted");
    }

    #[test]
    fn only_those_that_are_missed_are_an_error() {
        assert!(check(&[memory(30.0)]).is_ok());
        let missed = check(&[memory(1.0), memory(31.0)]).unwrap_err();
        assert_eq!(missed.to_string(), "missed: memory: 31.00 MiB, and at most 30 are allowed");
    }

    #[test]
    fn a_table_says_which_are_missed() {
        let expected = "\
|        |     found | at most |        met |
| ------ | --------: | ------: | ---------: |
| memory | 30.00 MiB |  30 MiB |        yes |
| memory | 31.00 MiB |  30 MiB | **missed** |
";
        assert_eq!(table(&[memory(30.0), memory(31.0)]), expected);
    }

    #[test]
    fn a_table_says_on_which_side_of_its_bound_a_figure_is_to_be() {
        let expected = "\
|        |      found |               to be |        met |
| ------ | ---------: | ------------------: | ---------: |
| speed  | 0.95 times | at least 0.96 times | **missed** |
| memory |  30.00 MiB |      at most 30 MiB |        yes |
";
        assert_eq!(table(&[Limit::at_least("speed", 0.95, 0.96, "times"), memory(30.0)]), expected);
    }
}
