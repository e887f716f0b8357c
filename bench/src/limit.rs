//! Figures beside the most that they may be.

use std::fmt;

use anyhow::bail;
use serde::Serialize;

use crate::document;

/// A figure and the most that it may be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Limit {
    what: String,
    found: f64,
    most: f64,
    unit: &'static str,
}

impl Limit {
    pub(super) fn new(what: impl Into<String>, found: f64, most: f64, unit: &'static str) -> Self {
        Self { what: what.into(), found, most, unit }
    }

    /// Whether the figure is within its limit. What was not measured is not.
    pub(super) fn is_met(&self) -> bool {
        self.found <= self.most
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, found, most, unit } = self;
        write!(f, "{what}: {found:.2} {unit}, and at most {most} are allowed")
    }
}

/// All of them as a table.
pub(super) fn table(limits: &[Limit]) -> String {
    let row = |limit: &Limit| {
        let met = if limit.is_met() { "yes" } else { "**missed**" };
        vec![
            limit.what.clone(),
            format!("{:.2} {}", limit.found, limit.unit).trim_end().to_owned(),
            format!("{} {}", limit.most, limit.unit).trim_end().to_owned(),
            met.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = limits.iter().map(row).collect();
    document::aligned(&["", "found", "at most", "met"], &rows)
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
}
