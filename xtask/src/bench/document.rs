//! The figures as a table, on the screen and in docs/performance.md.

use std::fmt::Write;
use std::fs;

use anyhow::{Context, ensure};

use super::figures::{Figures, Report};
use crate::screen::Stuck;
use crate::tree;

const DOCUMENT: &str = "docs/performance.md";
const BEGIN: &str = "<!-- begin: bench attach -->";
const END: &str = "<!-- end: bench attach -->";
/// What everything is compared with: the least that one CNI call can take.
const YARDSTICK: &str = super::floor::SPAWNED;

/// The table and what its rows are.
pub(super) fn table(report: &Report) -> String {
    let burst = |verb: &str| format!("{} {verb}", report.burst_size);
    let header =
        ["", "ADD", "p99", "ratio", "DEL", "p99", "ratio", &burst("ADD"), "ratio", &burst("DEL"), "ratio"];
    let rows: Vec<Vec<String>> = report.contenders.iter().map(|figures| row(figures, report)).collect();
    let mut text = aligned(&header, &rows);
    let _ = writeln!(
        text,
        "\nMilliseconds, medians of {} pods and {} bursts; ratios to `{YARDSTICK}`. Linux {}, {} processors.\n",
        report.rounds, report.bursts, report.kernel, report.processors
    );
    for figures in &report.contenders {
        let memory = figures
            .resident_kib
            .map(|kib| format!("; {:.1} MiB resident", kib_to_mib(kib)))
            .unwrap_or_default();
        let _ = writeln!(text, "- {}: {}{memory}", figures.name, figures.description);
    }
    text
}

/// Replaces the table in docs/performance.md, with the command that made it.
pub(super) fn update(report: &Report) -> anyhow::Result<()> {
    let path = tree::root().join(DOCUMENT);
    let old = fs::read_to_string(&path).with_context(|| format!("read {DOCUMENT}"))?;
    let new = replaced(&old, &format!("`{} --write`\n\n{}", report.command, table(report)))?;
    fs::write(&path, new).with_context(|| format!("write {DOCUMENT}"))
}

fn row(figures: &Figures, report: &Report) -> Vec<String> {
    let yardstick = report.named(YARDSTICK);
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
    let ratio = |of: fn(&Figures) -> Option<f64>| {
        let (value, unit) = (of(figures), yardstick.and_then(of));
        value.zip(unit).map_or_else(|| "-".to_owned(), |(value, unit)| format!("{:.1}", value / unit))
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

/// A Markdown table that also reads well as plain text.
fn aligned(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].chars().count(), 3]).max().unwrap_or(3)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    let mut line = |cells: &[&str]| {
        for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            let _ = if column == 0 {
                write!(text, "| {cell:<width$} ")
            } else {
                write!(text, "| {cell:>width$} ")
            };
        }
        text.push_str("|\n");
    };
    line(header);
    let rules: Vec<String> = widths
        .iter()
        .enumerate()
        .map(
            |(column, width)| {
                if column == 0 { "-".repeat(*width) } else { format!("{}:", "-".repeat(width - 1)) }
            },
        )
        .collect();
    line(&rules.iter().map(String::as_str).collect::<Vec<_>>());
    for row in rows {
        line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    text
}

fn replaced(old: &str, content: &str) -> anyhow::Result<String> {
    let marked = old.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    ensure!(
        marked.is_some(),
        Stuck::new(
            format!("{DOCUMENT} has no place for the table"),
            format!("put `{BEGIN}` and `{END}` into it")
        )
    );
    let (before, after) = marked.unwrap_or_default();
    Ok(format!("{before}{BEGIN}\n{}\n{END}{after}", content.trim_end()))
}

fn kib_to_mib(kib: u64) -> f64 {
    // Exact up to 2^53 KiB.
    kib as f64 / 1024.0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::Samples;

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let old = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        assert_eq!(replaced(&old, "new\n\n").unwrap(), format!("before\n{BEGIN}\nnew\n{END}\nafter\n"));
        assert_eq!(
            replaced("no marks", "new").unwrap_err().to_string(),
            "docs/performance.md has no place for the table"
        );
    }

    #[test]
    fn ratios_are_to_the_spawned_floor_and_missing_figures_are_dashes() {
        let figures = |name, milliseconds| {
            let add = vec![Duration::from_millis(milliseconds)];
            Figures::new(name, "x".to_owned(), Samples { add, ..Samples::default() }, None)
        };
        let report = Report {
            command: String::new(),
            kernel: "6.18".to_owned(),
            processors: 2,
            rounds: 1,
            bursts: 0,
            burst_size: 20,
            contenders: vec![figures(YARDSTICK, 2), figures("other", 5)],
        };
        let row = row(&report.contenders[1], &report);
        assert_eq!(row, ["other", "5.00", "5.00", "2.5", "-", "-", "-", "-", "-", "-", "-"]);
    }

    #[test]
    fn columns_are_aligned() {
        let expected = "| x    |  ADD |\n| ---- | ---: |\n| long | 1.00 |\n";
        assert_eq!(aligned(&["x", "ADD"], &[vec!["long".to_owned(), "1.00".to_owned()]]), expected);
    }
}
