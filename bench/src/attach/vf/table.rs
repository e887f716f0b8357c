//! The figures as a table, and compared with their limit.

use std::fmt::Write;

use super::measure::SIDES;
use super::{Figures, Report};
use crate::limit::{self, Limit};
use crate::{Series, document};

/// The part of the reference's ADD that ours may take: a third.
const MOST: f64 = 0.333;

/// Returns the limits, for the better end of each interval.
pub(super) fn limits(contenders: &[Figures]) -> Vec<Limit> {
    let (Some(alike), Some(reference)) = (contenders.first(), contenders.last()) else { return Vec::new() };
    let [low, _] = alike.add.ratios(&reference.add).interval();
    vec![Limit::new("`sriov`: ADD, to the reference's", low, MOST, "times")]
}

/// Returns the table, its explanation and the limit, and the parts of an ADD's time.
pub(super) fn table(report: &Report) -> String {
    let header = [
        "",
        "ADD",
        "and carrier",
        "DEL",
        "reference's ADD",
        "95 %",
        "and carrier",
        "95 %",
        "reference's DEL",
    ];
    let rows: Vec<Vec<String>> =
        report.contenders.iter().map(|figures| row(figures, &report.contenders)).collect();
    let mut text = document::aligned(&header, &rows);
    let _ = writeln!(
        text,
        "\nMilliseconds, medians of {}, in turns whose order alternates, of one VF; and how many times as long the reference \
         took in the same round, medians and between which values those lie with 95 % probability. In an emulated machine: \
         {}.\n",
        report.rounds, report.origin
    );
    for side in SIDES {
        let _ = writeln!(text, "- {}: {}", side.name(), side.description());
    }
    let _ = writeln!(
        text,
        "\n{}\nFound: the better end of the interval of 95 %.\n",
        limit::table(&report.limits)
    );
    let _ = write!(text, "`sriov`. {}", report.parts);
    text
}

fn row(figures: &Figures, all: &[Figures]) -> Vec<String> {
    let median = |series: &Series| format!("{:.2}", series.median);
    let between = |series: &Series| {
        let [low, high] = series.interval();
        format!("{low:.2} to {high:.2}")
    };
    let Figures { name, add, carrier, del } = figures;
    let mut row = vec![(*name).to_owned(), median(add), median(carrier), median(del)];
    match all.last().filter(|reference| reference.name != *name) {
        Some(reference) => {
            let (faster, sooner) = (reference.add.ratios(add), reference.carrier.ratios(carrier));
            row.extend([median(&faster), between(&faster), median(&sooner), between(&sooner)]);
            row.push(median(&reference.del.ratios(del)));
        }
        None => row.extend(["-"; 5].map(str::to_owned)),
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(name: &'static str, add: f64) -> Figures {
        let one = |figure: f64| Series::new(vec![figure]);
        Figures { name, add: one(add), carrier: one(add + 100.0), del: one(50.0) }
    }

    #[test]
    fn the_first_is_limited_by_the_last() {
        let found = limits(&[figures("sriov", 100.0), figures("every", 500.0), figures("reference", 400.0)]);
        assert_eq!(found, [Limit::new("`sriov`: ADD, to the reference's", 0.25, 0.333, "times")]);
    }

    #[test]
    fn all_are_compared_with_the_last() {
        let all = [figures("sriov", 100.0), figures("reference", 400.0)];
        let found = all.each_ref().map(|figures| row(figures, &all));
        let compared = ["4.00", "4.00 to 4.00", "2.50", "2.50 to 2.50", "1.00"];
        let expected = [
            [&["sriov", "100.00", "200.00", "50.00"][..], &compared].concat(),
            [&["reference", "400.00", "500.00", "50.00"][..], &["-"; 5]].concat(),
        ];
        assert_eq!(found, expected);
    }
}
