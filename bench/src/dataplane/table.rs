//! The figures as tables: the paths compared, and the cost of a policy's size.

use std::fmt::Write;

use super::figures::{Figures, Report};
use super::paths::{BRIDGE, IPTABLES, NETATTACH, NETATTACH_BRIDGED, REDIRECT, VETH, WIRE, WIRE_BRIDGED};
use super::policies::Shape;
use super::{RULES, policies, programs};
use crate::{Series, document};

/// Both tables and their explanation.
pub(super) fn tables(report: &Report) -> String {
    let mut text = paths(report);
    let _ = writeln!(
        text,
        "\nExchanges of one byte per second on one connection (requests), and connections per second with one \
         exchange each; medians of {} samples, the range beside. Client and server share one processor. {REDIRECT}: a \
         link to the node for each pod, as netattach makes it, and six instructions at its end that move every packet \
         into the other pod: the floor of any program there. {}.\n",
        report.rounds, report.origin
    );
    text.push_str(&sizes(report));
    let _ = writeln!(
        text,
        "\nConnections per second by the number of peers that the server's policy allows; the client is the last. \
         {IPTABLES}: the same policy in the shape in which multi-networkpolicy-iptables renders it, in the server's \
         pod behind a Linux bridge."
    );
    text
}

fn paths(report: &Report) -> String {
    let header =
        ["", "requests/s", "range", "to bridge", "to veth", "connections/s", "range", "to bridge", "to veth"];
    let smallest = Some(RULES[0]);
    let shown = [
        (VETH, None),
        (REDIRECT, None),
        (BRIDGE, None),
        (IPTABLES, smallest),
        (NETATTACH, smallest),
        (NETATTACH_BRIDGED, smallest),
        (WIRE, smallest),
        (WIRE_BRIDGED, smallest),
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

/// The times of changed policies, and their explanation.
pub(super) fn policies(report: &Report) -> String {
    let header =
        ["policy", "attachments", "read", "compile", "write", "switch", "sum", "in force after", "range"];
    let row = |change: &policies::Figures| {
        let size = match change.shape {
            Shape::Peers => format!("1 rule, {} peers", change.size),
            Shape::Rules => format!("{} rules", change.size),
        };
        let parts = [&change.read, &change.compile, &change.write, &change.switch].map(|part| part.median);
        let ms = |ms: f64| format!("{ms:.1}");
        let mut cells = vec![size, change.attachments.to_string()];
        cells.extend(parts.map(ms));
        cells.extend([
            ms(parts.iter().sum()),
            ms(change.total.median),
            format!("{:.0}-{:.0}", change.total.minimum, change.total.maximum),
        ]);
        cells
    };
    let rows: Vec<Vec<String>> = report.policies.iter().map(row).collect();
    let mut text = document::aligned(&header, &rows);
    let _ = writeln!(
        text,
        "\nMilliseconds, medians of {} changes. A manifest in YAML is renamed into a directory of a thousand others; in force is it \
         when the word that the programs read names the new policy for every attachment. The parts are as the agent tells \
         (`netattachctl status -o json`). Each rule of a policy of many has its own peer and is counted on its own. {}.",
        report.rounds, report.origin
    );
    text
}

/// The cost of packets in the programs, and its explanation.
pub(super) fn programs(programs: &programs::Report, report: &Report) -> String {
    let header = ["packet", "na_from_pod", "range", "na_to_pod", "range"];
    let row = |figures: &programs::Figures| {
        let mut cells = vec![figures.packet.to_owned()];
        for series in [&figures.from_pod, &figures.to_pod] {
            match series {
                Some(series) => cells.extend([
                    format!("{:.0}", series.median),
                    format!("{:.0}-{:.0}", series.minimum, series.maximum),
                ]),
                None => cells.extend(["-".to_owned(), "-".to_owned()]),
            }
        }
        cells
    };
    let rows: Vec<Vec<String>> = programs.packets.iter().map(row).collect();
    let mut text = document::aligned(&header, &rows);
    let _ = writeln!(
        text,
        "\nNanoseconds of one packet, medians of {} samples of a million runs of the same frame (`BPF_PROG_TEST_RUN`); a program \
         that does nothing takes {:.0}, which is in every figure. To a pod of the \
         bridge na_fast is included, which judges for the receiver. Instructions that the verifier went through: {}. {}.",
        report.rounds,
        programs.floor.median,
        programs
            .verified
            .iter()
            .map(|(name, count)| format!("{name} {count}"))
            .collect::<Vec<_>>()
            .join(", "),
        report.origin
    );
    text
}
