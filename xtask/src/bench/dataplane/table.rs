//! The figures as two tables: the paths beside each other, and what the size of a policy costs.

use std::fmt::Write;

use super::RULES;
use super::figures::{Figures, Report, Series};
use super::paths::{BRIDGE, IPTABLES, NETATTACH, NETATTACH_BRIDGED, VETH};
use crate::bench::document;

/// Both tables and what they mean.
pub(super) fn tables(report: &Report) -> String {
    let mut text = paths(report);
    let _ = writeln!(
        text,
        "\nExchanges of one byte per second on one connection (requests), and connections per second with one \
         exchange each; medians of {} samples, the range beside. Client and server share one processor. Linux {}, \
         {} processors.\n",
        report.rounds, report.kernel, report.processors
    );
    text.push_str(&sizes(report));
    let _ = writeln!(
        text,
        "\nConnections per second by the number of peers that the server's policy allows; the client is the last. \
         {IPTABLES}: the same policy in the shape in which multi-networkpolicy-iptables renders it, in the server's \
         pod behind a Linux bridge."
    );
    if let Some(flood) = &report.flood {
        text.push('\n');
        text.push_str(&super::flood::table(flood));
    }
    text
}

fn paths(report: &Report) -> String {
    let header =
        ["", "requests/s", "range", "to bridge", "to veth", "connections/s", "range", "to bridge", "to veth"];
    let smallest = Some(RULES[0]);
    let shown = [
        (VETH, None),
        (BRIDGE, None),
        (IPTABLES, smallest),
        (NETATTACH, smallest),
        (NETATTACH_BRIDGED, smallest),
    ];
    let found = shown.into_iter().filter_map(|(name, rules)| report.find(name, rules));
    let rows: Vec<Vec<String>> = found.map(|figures| row(figures, report)).collect();
    document::aligned(&header, &rows)
}

fn row(figures: &Figures, report: &Report) -> Vec<String> {
    let ratio = |of: fn(&Figures) -> &Series, to: &str| {
        let unit = report.find(to, None).map(|unit| of(unit).median);
        unit.map_or_else(|| "-".to_owned(), |unit| format!("{:.2}", of(figures).median / unit))
    };
    let name = match figures.rules {
        Some(rules) => format!("{}, {rules} rules", figures.name),
        None => figures.name.to_owned(),
    };
    let mut cells = vec![name];
    for of in
        [(|figures: &Figures| &figures.requests) as fn(&Figures) -> &Series, |figures| &figures.connections]
    {
        let series = of(figures);
        cells.extend([
            format!("{:.0}", series.median),
            format!("{:.0}-{:.0}", series.minimum, series.maximum),
            ratio(of, BRIDGE),
            ratio(of, VETH),
        ]);
    }
    cells
}

fn sizes(report: &Report) -> String {
    let columns: Vec<String> = RULES.iter().map(ToString::to_string).collect();
    let last = "last to first".to_owned();
    let header: Vec<&str> =
        std::iter::once("").chain(columns.iter().map(String::as_str)).chain([last.as_str()]).collect();
    let rows: Vec<Vec<String>> = [IPTABLES, NETATTACH]
        .into_iter()
        .map(|name| {
            let rates: Vec<Option<f64>> = RULES
                .iter()
                .map(|rules| report.find(name, Some(*rules)).map(|figures| figures.connections.median))
                .collect();
            let shown = |rate: &Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"));
            let first_and_last = rates.first().copied().flatten().zip(rates.last().copied().flatten());
            let ratio =
                first_and_last.map_or_else(|| "-".to_owned(), |(first, last)| format!("{:.2}", last / first));
            let cells = std::iter::once(name.to_owned()).chain(rates.iter().map(shown)).chain([ratio]);
            cells.collect()
        })
        .collect();
    document::aligned(&header, &rows)
}
