//! The breakdown of the time of one ADD of netattach.
//!
//! The agent logs it (`netattach::timing`), for work on the thread that carries the request out. The rest of a request
//! is the shim's process, which is measured by a request that needs no agent, and the hand-overs: socket, frames, and
//! the threads that receive, carry out and answer.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::figures::Series;
use crate::document;

/// The beginning of each log line about a request.
const TARGET: &str = "netattach::timing: ";

/// One request in the agent's log.
#[derive(Debug, PartialEq)]
pub(crate) struct Logged {
    took: Duration,
    /// How often each part ran, and its total time.
    parts: BTreeMap<String, (u32, Duration)>,
}

impl Logged {
    /// The whole of its time within the agent.
    pub(super) fn took(&self) -> Duration {
        self.took
    }
}

/// One row: the part's description, how often it occurs in one ADD, and its total time.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Part {
    name: String,
    times: Option<u32>,
    microseconds: f64,
}

/// The ADDs of a log, in its order.
pub(super) fn logged_adds(log: &str) -> anyhow::Result<Vec<Logged>> {
    let lines = log.lines().filter_map(|line| Some(line.split_once(TARGET)?.1));
    let adds = lines.filter(|line| line.contains(" verb=ADD "));
    adds.map(|line| logged(line).with_context(|| format!("read {line:?}"))).collect()
}

fn logged(line: &str) -> Option<Logged> {
    let (_, rest) = line.split_once(" took_us=")?;
    let (took, parts) = rest.split_once(" parts=")?;
    let part = |text: &str| {
        let (name, figures) = text.rsplit_once('=')?;
        let (count, microseconds) = figures.split_once('/')?;
        Some((name.to_owned(), (count.parse().ok()?, Duration::from_micros(microseconds.parse().ok()?))))
    };
    let parts = parts.split(',').map(part).collect::<Option<_>>()?;
    Some(Logged { took: Duration::from_micros(took.parse().ok()?), parts })
}

/// Returns the rows: medians of each part, the longest first. `whole` are the ADDs as measured by their caller,
/// `process` are requests that need no agent.
pub(super) fn rows(whole: &[Duration], process: &[Duration], logged: &[Logged]) -> Vec<Part> {
    let median =
        |durations: Vec<Duration>| Series::new(&durations).median.map(|milliseconds| milliseconds * 1000.0);
    let took = logged.iter().map(|add| add.took).collect();
    let (Some(whole), Some(process), Some(took)) =
        (median(whole.to_vec()), median(process.to_vec()), median(took))
    else {
        return Vec::new();
    };
    let mut names: Vec<&String> = logged.iter().flat_map(|add| add.parts.keys()).collect();
    names.sort();
    names.dedup();
    let mut rows: Vec<Part> = names
        .into_iter()
        .filter_map(|name| {
            let of: Vec<(u32, Duration)> =
                logged.iter().map(|add| add.parts.get(name).copied().unwrap_or_default()).collect();
            let times = of.iter().map(|(count, _)| *count).max();
            let microseconds = median(of.into_iter().map(|(_, time)| time).collect())?;
            Some(Part { name: explained(name), times, microseconds })
        })
        .collect();
    let besides = [("start and end of the shim's process", process), ("hand-overs", whole - process - took)];
    rows.extend(besides.map(|(name, microseconds)| Part {
        name: name.to_owned(),
        times: None,
        microseconds,
    }));
    rows.sort_by(|a, b| b.microseconds.total_cmp(&a.microseconds));
    rows
}

/// The table of these rows; empty without rows.
pub(super) fn table(rows: &[Part]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let times = row.times.map_or_else(|| "-".to_owned(), |times| times.to_string());
            vec![row.name.clone(), times, format!("{:.0}", row.microseconds)]
        })
        .collect();
    let sum: f64 = rows.iter().map(|row| row.microseconds).sum();
    format!(
        "Where the time of one ADD of netattach goes, in microseconds (medians, which add up to {sum:.0}); \
         kernel requests by the first message of their datagram:\n\n{}\n",
        document::aligned(&["", "times", "us"], &cells)
    )
}

/// The description of a part for readers.
fn explained(name: &str) -> String {
    let plain = match name {
        "carrier" => "waiting for the carrier",
        "journal on disk" => "waiting for the journal to be on disk",
        "namespace" => "entering the pod's namespace",
        "reading" => "reading the pod, its networks and their definitions",
        "lease" => "leases, without their locks' waiting",
        "policy" => "policy: maps and programs",
        "the rest" => "the rest of the agent's work",
        "plugin" => "executed plugins",
        other => other,
    };
    plain.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-01-01T00:00:00Z  INFO netattach::agent: ready\n\
2026-01-01T00:00:01Z DEBUG netattach::timing: done verb=ADD container=\"a\" took_us=1000 parts=RTM_NEWLINK=3/600,the rest=1/400\n\
2026-01-01T00:00:02Z DEBUG netattach::timing: done verb=DEL container=\"a\" took_us=9 parts=the rest=1/9\n";

    #[test]
    fn adds_are_read_from_the_log() {
        let part =
            |name: &str, count, microseconds| (name.to_owned(), (count, Duration::from_micros(microseconds)));
        let parts = [part("RTM_NEWLINK", 3, 600), part("the rest", 1, 400)].into();
        assert_eq!(logged_adds(LOG).unwrap(), [Logged { took: Duration::from_micros(1000), parts }]);
        assert!(logged_adds("netattach::timing: done verb=ADD took_us=x parts=").is_err());
    }

    #[test]
    fn the_rows_add_up_to_the_whole() {
        let logged = logged_adds(LOG).unwrap();
        let rows = rows(&[Duration::from_micros(1500)], &[Duration::from_micros(300)], &logged);
        let row = |name: &str, times, microseconds| Part { name: name.to_owned(), times, microseconds };
        let rounded: Vec<Part> =
            rows.into_iter().map(|row| Part { microseconds: row.microseconds.round(), ..row }).collect();
        assert_eq!(
            rounded,
            [
                row("RTM_NEWLINK", Some(3), 600.0),
                row("the rest of the agent's work", Some(1), 400.0),
                row("start and end of the shim's process", None, 300.0),
                row("hand-overs", None, 200.0),
            ]
        );
    }
}
