//! The counts as a table, and compared with their limit.

use std::fmt::Write;

use super::{Figures, Report};
use crate::attach::{floor, netattach};
use crate::document;
use crate::limit::{self, Limit};

/// Maximum ratio of an ADD's locks to those of the floor with programs.
const MOST: f64 = 1.3;

/// Returns the limits.
pub(super) fn limits(contenders: &[Figures]) -> Vec<Limit> {
    let what = format!("acquisitions of an ADD, to `{}`", floor::WITH_PROGRAMS);
    let ratio = ratio(netattach::NAME, floor::WITH_PROGRAMS, contenders);
    vec![Limit::new(what, ratio, MOST, "times")]
}

/// Returns the ratio of two contenders; no number unless both were measured.
fn ratio(of: &str, to: &str, contenders: &[Figures]) -> f64 {
    let own = |name: &str| contenders.iter().find(|figures| figures.name == name).map(Figures::own);
    own(of).zip(own(to)).map_or(f64::NAN, |(of, to)| of / to)
}

/// The table, its explanation and the limit.
pub(super) fn table(report: &Report) -> String {
    let mut text = counts(&report.contenders);
    let place = if report.emulated { "In an emulated machine: " } else { "" };
    let _ = write!(
        text,
        "\nAcquisitions of the kernel's lock of links (`rtnl_mutex`), by whomever on the machine, tries included: from the call \
         of an ADD of a pod with a bridge port and two macvlans to its answer; and while nothing happened, for as long. Medians \
         of {} in turns. Ratios without what was taken while nothing happened. {place}{}.\n\n{}",
        report.rounds,
        report.origin,
        limit::table(&report.limits)
    );
    text
}

fn counts(contenders: &[Figures]) -> String {
    let row = |figures: &Figures| {
        let Figures { name, taken, idle } = figures;
        let mut row = vec![
            name.clone(),
            format!("{:.0}", taken.median),
            format!("{:.0}-{:.0}", taken.minimum, taken.maximum),
            format!("{:.0}", idle.median),
        ];
        let to = [floor::SPAWNED, floor::WITH_PROGRAMS];
        row.extend(to.map(|to| format!("{:.2}", ratio(name, to, contenders))));
        row
    };
    let rows: Vec<Vec<String>> = contenders.iter().map(row).collect();
    document::aligned(&["", "ADD", "range", "idle", "to floor", "to same"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Series;

    fn contenders() -> [Figures; 3] {
        let of = |name: &str, taken: [f64; 3], idle| Figures {
            name: name.to_owned(),
            taken: Series::new(taken.to_vec()),
            idle: Series::new(vec![idle]),
        };
        [
            of(floor::SPAWNED, [10.0, 11.0, 12.0], 1.0),
            of(floor::WITH_PROGRAMS, [21.0, 21.0, 25.0], 1.0),
            of(netattach::NAME, [26.0, 27.0, 27.0], 2.0),
        ]
    }

    #[test]
    fn what_is_taken_while_nothing_happens_is_no_part_of_an_add() {
        let what = "acquisitions of an ADD, to `the same, with programs`";
        assert_eq!(limits(&contenders()), [Limit::new(what, 1.25, 1.3, "times")]);
    }

    #[test]
    fn a_contender_that_was_not_measured_misses_the_limit() {
        assert!(!limits(&contenders()[..2])[0].is_met());
    }

    #[test]
    fn every_contender_is_compared_with_both_floors() {
        let expected = "\
|                         | ADD | range | idle | to floor | to same |
| ----------------------- | --: | ----: | ---: | -------: | ------: |
| netlink, one process    |  11 | 10-12 |    1 |     1.00 |    0.50 |
| the same, with programs |  21 | 21-25 |    1 |     2.00 |    1.00 |
| netattach               |  27 | 26-27 |    2 |     2.50 |    1.25 |
";
        assert_eq!(counts(&contenders()), expected);
    }
}
