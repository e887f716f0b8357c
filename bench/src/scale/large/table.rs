//! The figures as a table, and compared with their limits.

use std::fmt::Write;

use super::{ENDS, Figures, Report, ends};
use crate::limit::{self, Limit};
use crate::{Series, document};

/// Maximum ratio of the last time to the first.
const SLOWER: f64 = 1.25;
/// MiB that may be left in use.
const LEFT: f64 = 5.0;

/// Returns the limits.
pub(super) fn limits(policies: &[Figures]) -> Vec<Limit> {
    let of = |figures: &Figures| {
        let Figures { name, load, change, processor, .. } = figures;
        let slower = |what: &str, series: &Series| {
            let [first, last] = ends(series);
            Limit::new(format!("{name}: {what}, the last to the first"), last / first, SLOWER, "times")
        };
        [
            slower("in force where there was none", load),
            slower("in place of another", change),
            slower("processors of a cycle", processor),
            Limit::new(format!("{name}: resident afterwards, to before"), figures.grown(), LEFT, "MiB"),
        ]
    };
    policies.iter().flat_map(of).collect()
}

/// The table, its explanation and the limits.
pub(in crate::scale) fn table(report: &Report) -> String {
    let mut text = policies(&report.policies);
    let _ = write!(
        text,
        "\nMilliseconds until a policy is in force where there was none (`load`), and in place of another whose rules are all \
         others (`change`), and of the agent's processors for both, for the removal and for all that follows: in the first and in \
         the last of {} cycles, medians of {ENDS}. MiB resident at rest before the first and after the last. Each policy on a node \
         of its own, for one attachment. {}.\n\n{}",
        report.cycles,
        report.origin,
        limit::table(&report.limits)
    );
    text
}

fn policies(all: &[Figures]) -> String {
    let header = ["policy", "load", "last", "change", "last", "processors", "last", "MiB before", "after"];
    let row = |figures: &Figures| {
        let Figures { name, load, change, processor, before, after } = figures;
        let mut row = vec![name.clone()];
        for series in [load, change, processor] {
            row.extend(ends(series).map(|time| format!("{time:.0}")));
        }
        row.extend([before, after].map(|mib| format!("{mib:.1}")));
        row
    };
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
    document::aligned(&header, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        let rising = |from: f64| Series::new((0..20).map(|cycle| from + f64::from(cycle)).collect());
        Figures {
            name: "many".to_owned(),
            load: rising(99.0),
            change: rising(9.0),
            processor: rising(199.0),
            before: 20.0,
            after: 25.5,
        }
    }

    #[test]
    fn the_last_is_compared_with_the_first() {
        let limit = |what: &str, found, most, unit| Limit::new(format!("many: {what}"), found, most, unit);
        let expected = [
            limit("in force where there was none, the last to the first", 1.17, 1.25, "times"),
            limit("in place of another, the last to the first", 2.7, 1.25, "times"),
            limit("processors of a cycle, the last to the first", 1.085, 1.25, "times"),
            limit("resident afterwards, to before", 5.5, 5.0, "MiB"),
        ];
        let found = limits(&[figures()]);
        assert_eq!(found, expected);
        assert_eq!(found.iter().map(Limit::is_met).collect::<Vec<_>>(), [true, false, true, false]);
    }

    #[test]
    fn a_policy_is_a_row() {
        let expected = "\
| policy | load | last | change | last | processors | last | MiB before | after |
| ------ | ---: | ---: | -----: | ---: | ---------: | ---: | ---------: | ----: |
| many   |  100 |  117 |     10 |   27 |        200 |  217 |       20.0 |  25.5 |
";
        assert_eq!(policies(&[figures()]), expected);
    }
}
