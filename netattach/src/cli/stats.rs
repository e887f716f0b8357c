//! `netattachctl stats`: counters of attachments.

use std::collections::BTreeMap;
use std::path::Path;

use super::filter::{Filter, line_name};
use super::output::Format;
use super::table::{self, Align, Column, Width};
use super::{Answer, CliError, ask, name_cells, other};
use crate::rpc::message::{AttachmentStats, Request, Response};

const COLUMNS: [Column; 14] = [
    Column::new("POD", Align::Left),
    Column::new("NETWORK", Align::Left),
    Column::new("INTERFACE", Align::Left),
    Column::new("IN-PACKETS", Align::Right),
    Column::wide("IN-BYTES", Align::Right),
    Column::new("OUT-PACKETS", Align::Right),
    Column::wide("OUT-BYTES", Align::Right),
    Column::new("FLOWS", Align::Right),
    Column::wide("DISPLACED", Align::Right),
    Column::new("DROPPED", Align::Right),
    Column::new("REASONS", Align::Left),
    Column::wide("FAST-IN", Align::Right),
    Column::wide("FAST-OUT", Align::Right),
    Column::wide("LEFT-TO-STACK", Align::Left),
];

pub(super) fn run(filter: &Filter, socket: &Path, format: Format) -> Result<Answer, CliError> {
    let chosen = filter.choose(socket)?;
    let Response::Stats(rows) = ask(socket, &Request::Stats)? else { return other(&Request::Stats) };
    let found = chosen.found(rows.iter().map(|row| &row.name));
    let rows = chosen.retain(rows, |row| &row.name);
    let names = rows.iter().map(|row| line_name(&row.name));
    Ok((format.list(&rows, names, |width| render(&rows, filter.nothing(), width))?, found))
}

/// The table, or `nothing` if there are no rows.
fn render(rows: &[AttachmentStats], nothing: &str, width: Width) -> String {
    if rows.is_empty() {
        return nothing.to_owned();
    }
    let cells: Vec<_> = rows.iter().map(row).collect();
    table::of_columns(COLUMNS, &cells, width)
}

fn row(stats: &AttachmentStats) -> [String; 14] {
    let [pod, network, ifname] = name_cells(&stats.name);
    let dropped = stats.dropped.values().fold(0u64, |sum, count| sum.saturating_add(*count));
    [
        pod,
        network,
        ifname,
        stats.received.packets.to_string(),
        stats.received.bytes.to_string(),
        stats.sent.packets.to_string(),
        stats.sent.bytes.to_string(),
        stats.flows.to_string(),
        stats.flows_displaced.to_string(),
        dropped.to_string(),
        reasons(&stats.dropped),
        stats.fast.packets.to_string(),
        stats.fast_sent.packets.to_string(),
        reasons(&stats.left_to_stack),
    ]
}

/// Drop reasons with their counts, the most frequent first.
fn reasons(counts: &BTreeMap<String, u64>) -> String {
    let mut reasons: Vec<_> = counts.iter().collect();
    reasons.sort_by_key(|(reason, count)| (std::cmp::Reverse(**count), *reason));
    reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{idle, name};
    use super::*;
    use crate::rpc::message::Traffic;

    #[test]
    fn numbers_stand_right_and_the_commonest_reason_comes_first() {
        let rows = [
            AttachmentStats {
                received: Traffic { packets: 7, bytes: 700 },
                sent: Traffic { packets: 123_456, bytes: 123_456_789 },
                dropped: [("policy-egress".to_owned(), 2), ("spoofed-mac".to_owned(), 40)].into(),
                fast: Traffic { packets: 5, bytes: 500 },
                fast_sent: Traffic { packets: 6, bytes: 600 },
                left_to_stack: [("control".to_owned(), 3), ("elsewhere".to_owned(), 4)].into(),
                flows: 12,
                flows_displaced: 3,
                ..idle(name(1, "shop/cart-0", "default", "eth0"))
            },
            idle(name(2, "shop/cart-1", "shop/storage", "net1")),
        ];
        assert_eq!(
            render(&rows, "nothing", Width::Unlimited),
            "\
POD          NETWORK       INTERFACE  IN-PACKETS  IN-BYTES  OUT-PACKETS  OUT-BYTES  FLOWS  DISPLACED  DROPPED  REASONS                          FAST-IN  FAST-OUT  LEFT-TO-STACK
shop/cart-0  default       eth0                7       700       123456  123456789     12          3       42  spoofed-mac 40, policy-egress 2        5         6  elsewhere 4, control 3
shop/cart-1  shop/storage  net1                0         0            0          0      0          0        0                                         0         0
"
        );
        assert_eq!(
            render(&rows, "nothing", Width::Limited),
            "\
POD          NETWORK       INTERFACE  IN-PACKETS  OUT-PACKETS  FLOWS  DROPPED  REASONS
shop/cart-0  default       eth0                7       123456     12       42  spoofed-mac 40, policy-egress 2
shop/cart-1  shop/storage  net1                0            0      0        0
"
        );
    }
}
