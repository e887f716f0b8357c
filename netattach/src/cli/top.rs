//! `netattachctl top`: traffic of attachments, live in a terminal, otherwise a single measurement.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::filter::{Chosen, Filter, line_name};
use super::output::Format;
use super::table::{self, Align, Width};
use super::{CliError, ask, name_cells, other, time};
use crate::rpc::message::{AttachmentName, AttachmentStats, Request, Response};

/// Clears the screen, and puts the cursor at its beginning (ECMA-48: ED, CUP).
const CLEAR: &str = "\x1b[2J\x1b[H";

/// What to show, and how often.
#[derive(Debug, Args)]
pub(super) struct Top {
    #[command(flatten)]
    filter: Filter,
    /// Time between two samples
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// Take a single sample, as when the output is no terminal
    #[arg(long)]
    once: bool,
    /// Most rows
    #[arg(long, value_name = "NUMBER", default_value_t = 20)]
    rows: usize,
    /// Order of the rows, largest first
    #[arg(long, value_enum, default_value_t = By::Bytes)]
    by: By,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// Bytes per second, both ways
    Bytes,
    /// Packets per second, both ways
    Packets,
    /// Drops per second
    Drops,
    /// New flows per second
    Flows,
}

/// Traffic of one attachment, per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    #[serde(flatten)]
    name: AttachmentName,
    in_packets: f64,
    in_bytes: f64,
    out_packets: f64,
    out_bytes: f64,
    new_flows: f64,
    dropped: f64,
    /// Flows in the table, now.
    flows: u64,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = time::duration(text)?;
    let allowed = Duration::from_millis(100)..=Duration::from_secs(3600);
    if allowed.contains(&interval) { Ok(interval) } else { Err("must be from 100ms to 1h".to_owned()) }
}

impl Top {
    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Writes the busiest attachments: repeatedly in a terminal.
    pub(super) fn run(&self, socket: &Path, format: Format, out: &mut impl Write) -> Result<(), CliError> {
        let chosen = self.filter.choose(socket)?;
        let is_live = !self.once && format == Format::Table && std::io::stdout().is_terminal();
        let mut before = look(socket)?;
        chosen.found(before.1.values().map(|stats| &stats.name))?;
        loop {
            std::thread::sleep(self.interval);
            let now = look(socket)?;
            let rows = self.rows(&before, &now, &chosen);
            let names = rows.iter().map(|row| line_name(&row.name)).collect::<Vec<_>>();
            let text = format.list(&rows, names, |width| render(&rows, width))?;
            if is_live {
                let heading = format!(
                    "{}  every {:?}, per second; Ctrl-C ends\n\n",
                    time::rfc3339(time::now_ms()),
                    self.interval
                );
                write!(out, "{CLEAR}{heading}{text}")?;
            } else {
                write!(out, "{text}")?;
            }
            out.flush()?;
            if !is_live {
                return Ok(());
            }
            before = now;
        }
    }

    /// Returns the chosen attachments that are in both measurements, the busiest first.
    fn rows(&self, before: &Look, now: &Look, chosen: &Chosen) -> Vec<Row> {
        let seconds = now.0.duration_since(before.0).as_secs_f64().max(0.001);
        let rates = now.1.iter().filter_map(|(id, stats)| {
            let earlier = before.1.get(id).filter(|earlier| earlier.name == stats.name)?;
            chosen.matches(&stats.name).then(|| row(earlier, stats, seconds))
        });
        let mut rows: Vec<Row> = rates.collect();
        let rank = |row: &Row| match self.by {
            By::Bytes => row.in_bytes + row.out_bytes,
            By::Packets => row.in_packets + row.out_packets,
            By::Drops => row.dropped,
            By::Flows => row.new_flows,
        };
        // Rates are numbers; the sort keeps the order of names among equals.
        rows.sort_by(|a, b| rank(b).total_cmp(&rank(a)));
        rows.truncate(self.rows);
        rows
    }
}

/// The time of a measurement, and the counters by attachment number.
type Look = (Instant, BTreeMap<u32, AttachmentStats>);

fn look(socket: &Path) -> Result<Look, CliError> {
    let Response::Stats(rows) = ask(socket, &Request::Stats)? else { return other(&Request::Stats) };
    Ok((Instant::now(), rows.into_iter().filter_map(|row| Some((row.name.id?, row))).collect()))
}

fn row(before: &AttachmentStats, now: &AttachmentStats, seconds: f64) -> Row {
    // An attachment that was replaced under its number counts from zero.
    let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
    let dropped =
        |stats: &AttachmentStats| stats.dropped.values().fold(0u64, |sum, it| sum.saturating_add(*it));
    Row {
        name: now.name.clone(),
        in_packets: rate(before.received.packets, now.received.packets),
        in_bytes: rate(before.received.bytes, now.received.bytes),
        out_packets: rate(before.sent.packets, now.sent.packets),
        out_bytes: rate(before.sent.bytes, now.sent.bytes),
        new_flows: rate(before.new_flows, now.new_flows),
        dropped: rate(dropped(before), dropped(now)),
        flows: now.flows,
    }
}

fn render(rows: &[Row], width: Width) -> String {
    let columns = [
        ("POD", Align::Left),
        ("NETWORK", Align::Left),
        ("INTERFACE", Align::Left),
        ("IN-BIT/S", Align::Right),
        ("OUT-BIT/S", Align::Right),
        ("IN-PKT/S", Align::Right),
        ("OUT-PKT/S", Align::Right),
        ("NEW-FLOW/S", Align::Right),
        ("DROP/S", Align::Right),
        ("FLOWS", Align::Right),
    ];
    let cells: Vec<_> = rows
        .iter()
        .map(|row| {
            let [pod, network, ifname] = name_cells(&row.name);
            [
                pod,
                network,
                ifname,
                scaled(row.in_bytes * 8.0),
                scaled(row.out_bytes * 8.0),
                scaled(row.in_packets),
                scaled(row.out_packets),
                scaled(row.new_flows),
                scaled(row.dropped),
                row.flows.to_string(),
            ]
        })
        .collect();
    table::of_columns(columns.map(|(title, align)| table::Column::new(title, align)), &cells, width)
}

/// Three digits and a prefix: `1.23M`.
fn scaled(number: f64) -> String {
    let mut scaled = number;
    for prefix in ["", "k", "M", "G", "T"] {
        if scaled < 999.5 {
            return match (prefix, scaled) {
                ("", number) if number.fract() == 0.0 => format!("{number:.0}"),
                (_, number) if number < 9.995 => format!("{number:.2}{prefix}"),
                (_, number) if number < 99.95 => format!("{number:.1}{prefix}"),
                (_, number) => format!("{number:.0}{prefix}"),
            };
        }
        scaled /= 1000.0;
    }
    format!("{scaled:.0}P")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::tests::{idle, is_pinned, name, run_with};
    use super::*;
    use crate::rpc::message::Traffic;

    #[test]
    fn its_form_for_programs_is_pinned() {
        let row = Row {
            name: name(5, "shop/db", "shop/storage", "net1"),
            in_packets: 1200.0,
            in_bytes: 1_816_800.0,
            out_packets: 600.5,
            out_bytes: 39_633.0,
            new_flows: 0.5,
            dropped: 2.0,
            flows: 12,
        };
        is_pinned("top", &[row]);
    }

    #[test]
    fn numbers_have_three_digits() {
        let cases = [
            (0.0, "0"),
            (0.5, "0.50"),
            (12.0, "12"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (12_345.0, "12.3k"),
            (9.4e6, "9.40M"),
            (123e9, "123G"),
            (5e15, "5P"),
        ];
        for (number, expected) in cases {
            assert_eq!(scaled(number), expected);
        }
    }

    #[test]
    fn a_pipe_gets_one_look_with_the_busiest_first() {
        let looks = AtomicU64::new(0);
        let answer = |request: &Request| {
            assert_eq!(*request, Request::Stats);
            let look = looks.fetch_add(1, Ordering::SeqCst);
            let traffic = |bytes: u64| Traffic { packets: look * bytes, bytes: look * bytes * 100 };
            let row = |id, pod: &str, bytes| AttachmentStats {
                received: traffic(bytes),
                sent: traffic(bytes),
                ..idle(name(id, pod, "shop/lan", "net1"))
            };
            Response::Stats(vec![
                row(1, "shop/idle", 0),
                row(2, "shop/busy", 1_000_000),
                row(3, "shop/some", 10),
            ])
        };
        let (text, result) = run_with(answer, &["top", "--interval", "100ms", "-o", "name", "--rows", "2"]);
        result.unwrap();
        assert_eq!(text, "shop/busy/net1\nshop/some/net1\n");
        let (text, result) = run_with(answer, &["top", "--interval", "100ms", "--pod", "shop/idle"]);
        result.unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[1].starts_with("shop/idle") && !text.contains('\x1b'), "{text}");
    }
}
