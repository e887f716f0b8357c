//! The figures as a table.

use std::fmt::Write;

use super::figures::{Figures, Report};
use super::parts;
use crate::document;

/// The yardstick of all rows: the least that one CNI call can take.
const YARDSTICK: &str = super::floor::SPAWNED;

/// The table and the descriptions of its rows.
pub(super) fn table(report: &Report) -> String {
    let burst = |verb: &str| format!("{} {verb}", report.burst_size);
    let header =
        ["", "ADD", "p99", "ratio", "DEL", "p99", "ratio", &burst("ADD"), "ratio", &burst("DEL"), "ratio"];
    let rows: Vec<Vec<String>> = report.contenders.iter().map(|figures| row(figures, report)).collect();
    let mut text = document::aligned(&header, &rows);
    let _ = writeln!(
        text,
        "\nMilliseconds, medians of {} pods and {} bursts; ratios to `{YARDSTICK}`. {}.\n",
        report.rounds, report.bursts, report.origin
    );
    if let Some(ratio) = to_same_work(report) {
        let (netattach, same) = (super::netattach::NAME, super::floor::WITH_PROGRAMS);
        let _ = writeln!(text, "ADD of `{netattach}` takes {ratio:.2} times as long as `{same}`.\n");
    }
    for figures in &report.contenders {
        let memory = figures
            .resident_kib
            .map(|kib| format!("; {:.1} MiB resident", kib_to_mib(kib)))
            .unwrap_or_default();
        let _ = writeln!(text, "- {}: {}{memory}", figures.name, figures.description);
    }
    let parts = parts::table(&report.add_parts);
    if !parts.is_empty() {
        let _ = write!(text, "\n{parts}");
    }
    text
}

/// Ratio of netattach's ADD to one process that does all of its netlink work.
fn to_same_work(report: &Report) -> Option<f64> {
    let median = |name| report.named(name)?.add.median;
    Some(median(super::netattach::NAME)? / median(super::floor::WITH_PROGRAMS)?)
}

fn row(figures: &Figures, report: &Report) -> Vec<String> {
    let yardstick = report.named(YARDSTICK);
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
    let ratio = |of: fn(&Figures) -> Option<f64>| {
        let (value, unit) = (of(figures), yardstick.and_then(of));
        value.zip(unit).map_or_else(|| "-".to_owned(), |(value, unit)| format!("{:.2}", value / unit))
    };
    vec![
        figures.name.to_owned(),
        number(figures.add.median),
        number(figures.add.p99),
        ratio(|figures| figures.add.median),
        number(figures.del.median),
        number(figures.del.p99),
        ratio(|figures| figures.del.median),
        number(figures.burst_add.median),
        ratio(|figures| figures.burst_add.median),
        number(figures.burst_del.median),
        ratio(|figures| figures.burst_del.median),
    ]
}

fn kib_to_mib(kib: u64) -> f64 {
    // Exact up to 2^53 KiB.
    kib as f64 / 1024.0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Origin;
    use crate::attach::Samples;

    #[test]
    fn ratios_are_to_the_spawned_floor_and_missing_figures_are_dashes() {
        let figures = |name, milliseconds| {
            let add = vec![Duration::from_millis(milliseconds)];
            Figures::new(name, "x".to_owned(), Samples { add, ..Samples::default() }, None)
        };
        let report = Report {
            origin: Origin { command: String::new(), kernel: "6.18".to_owned(), processors: 2 },
            rounds: 1,
            bursts: 0,
            burst_size: 20,
            contenders: vec![figures(YARDSTICK, 2), figures("other", 5)],
            add_parts: Vec::new(),
        };
        let row = row(&report.contenders[1], &report);
        assert_eq!(row, ["other", "5.00", "5.00", "2.50", "-", "-", "-", "-", "-", "-", "-"]);
    }
}
