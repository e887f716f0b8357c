//! The figures compared with their limits.

use std::fmt::Write;
use std::time::Duration;

use super::adds::{Adds, Times};
use super::burst::Bursts;
use super::peers::Delays;
use super::populated::Populated;
use super::{Report, document};
use crate::Series;
use crate::limit::{self, Limit};
use crate::processor::Shares;

/// Returns the limits.
pub(super) fn limits(adds: &Adds, burst: &Bursts, populated: &Populated, peers: &Delays) -> Vec<Limit> {
    let per_call = |calls: usize| calls as f64 / adds.rounds.max(1) as f64;
    let mib = |kib: u64| kib as f64 / 1024.0;
    let pods = populated.pods;
    // Three networks each.
    let scrape_of_500 = populated.scrape.median * 500.0 / (3.0 * pods as f64);
    vec![
        Limit::new(
            "ADD in a cluster, to ADD by files",
            adds.cluster.add.median / adds.files.add.median,
            1.05,
            "times",
        ),
        Limit::new("reads of the API server for an ADD", per_call(adds.add_calls.reads), 0.0, ""),
        Limit::new("writes for an ADD", per_call(adds.add_calls.writes), 1.0, ""),
        Limit::new("calls for a DEL", per_call(adds.del_calls.reads + adds.del_calls.writes), 0.0, ""),
        Limit::new(
            format!("the last of {} pods at once, to the floor's last", burst.pods),
            burst.cluster.median / burst.floor.median,
            2.0,
            "times",
        ),
        Limit::new(
            format!("resident at rest, {pods} pods, 200 definitions, 200 policies"),
            mib(populated.alone.resident),
            30.0,
            "MiB",
        ),
        Limit::new(
            format!("and with {} pods of other nodes as peers", populated.peers),
            mib(populated.with_peers.resident),
            45.0,
            "MiB",
        ),
        Limit::new("one pod of another node", populated.bytes_per_peer, 300.0, "bytes"),
        Limit::new("a scrape of the metrics, for each 500 attachments", scrape_of_500, 5.0, "ms"),
        Limit::new("idle, of a processor", populated.idle, 0.5, "%"),
        Limit::new("a pod elsewhere becomes a peer, p50", peers.allowed.median, 100.0, "ms"),
        Limit::new("p99", percentile(&peers.allowed, 99), 100.0, "ms"),
        Limit::new("a pod elsewhere ceases to be a peer, p50", peers.denied.median, 100.0, "ms"),
        Limit::new("p99", percentile(&peers.denied, 99), 100.0, "ms"),
    ]
}

/// Returns the sample that this percentage of samples does not exceed.
fn percentile(series: &Series, percent: usize) -> f64 {
    let mut sorted = series.samples.clone();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

pub(super) fn table(report: &Report) -> String {
    let mut text = times(&report.adds, &report.burst);
    let _ = write!(text, "\n{}", limit::table(&report.limits));
    let many = &report.definitions;
    let mib = |kib: u64| kib as f64 / 1024.0;
    let _ = writeln!(
        text,
        "\nMemory at rest is the median of 31 looks, a second apart. {:.1} MiB of it are the agent's own without peers, and {:.1} MiB with \
         them; right after work, before code that ran for it \
         is given back, {:.1} and {:.1} MiB were resident. {} definitions instead of 200 are in force \
         {:.0} ms after the first of a burst of events, with {:.1} MiB resident; an agent that starts with all of that has read \
         it after {:.0} ms, with {:.1} MiB at most.",
        mib(report.populated.alone.own),
        mib(report.populated.with_peers.own),
        mib(report.populated.alone.after_work),
        mib(report.populated.with_peers.after_work),
        many.count,
        many.burst,
        mib(many.resident),
        many.start,
        mib(many.most_at_start),
    );
    let _ = writeln!(
        text,
        "\nEach pod has a bridge port and two macvlans. {} pods one after another, {} bursts, {} changes of peers. {}.",
        report.adds.rounds,
        report.burst.cluster.samples.len(),
        report.peers.allowed.samples.len(),
        report.origin
    );
    text
}

/// Formats the times of pods, with the floor.
fn times(adds: &Adds, burst: &Bursts) -> String {
    let row = |name: &str, times: &Times, burst: Option<(&Series, &Series)>| {
        let ratio = |series: &Series, floor: &Series| format!("{:.2}", series.median / floor.median);
        let at_once = burst.map_or_else(
            || ["-".to_owned(), "-".to_owned()],
            |(series, floor)| [format!("{:.0}", series.median), ratio(series, floor)],
        );
        let mut cells = vec![
            name.to_owned(),
            format!("{:.2}", times.add.median),
            format!("{:.2}", percentile(&times.add, 99)),
            ratio(&times.add, &adds.floor.add),
            format!("{:.2}", times.del.median),
            ratio(&times.del, &adds.floor.del),
        ];
        cells.extend(at_once);
        cells
    };
    let rows = [
        row("netlink, one process", &adds.floor, Some((&burst.floor, &burst.floor))),
        row("netattach by files", &adds.files, None),
        row("netattach in a cluster", &adds.cluster, Some((&burst.cluster, &burst.floor))),
    ];
    let at_once = format!("{} ADD", burst.pods);
    let header = ["", "ADD", "p99", "ratio", "DEL", "ratio", &at_once, "ratio"];
    let table = document::aligned(&header, &rows);
    format!("{table}\nMilliseconds, medians; ratios to `netlink, one process`.\n\n{}", shares(burst))
}

/// Formats the use of the processors in bursts.
fn shares(burst: &Bursts) -> String {
    let pods = burst.pods * burst.floor.samples.len();
    let each = |of: fn(&Shares) -> Duration| {
        burst.shares.each_ref().map(|shares| of(shares).as_secs_f64() * 1000.0 / pods as f64)
    };
    let row = |name: &str, figures: [f64; 2]| {
        let cells = figures.map(|figure| format!("{figure:.2}"));
        [name.to_owned()].into_iter().chain(cells).collect::<Vec<_>>()
    };
    let all = |shares: &Shares| {
        let Shares { processes, callers, agent, server, rest, idle } = *shares;
        processes + callers + agent + server + rest + idle
    };
    let rows = [
        row("the agent", each(|shares| shares.agent)),
        row("processes that are started, and end", each(|shares| shares.processes)),
        row("the threads that start them", each(|shares| shares.callers)),
        row("the API server, which is the bench's own", each(|shares| shares.server)),
        row("the kernel's threads and whoever else", each(|shares| shares.rest)),
        row("nobody", each(|shares| shares.idle)),
        row("all processors", each(all)),
    ];
    let table = document::aligned(&["", "netlink, one process", "netattach in a cluster"], &rows);
    format!("Milliseconds of the processors for each of the {} pods of a burst:\n\n{table}", burst.pods)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_samples() {
        let series = Series::new((1..=200).rev().map(f64::from).collect());
        assert_eq!([1, 50, 99, 100].map(|percent| percentile(&series, percent)), [2.0, 100.0, 198.0, 200.0]);
        assert!(percentile(&Series::new(Vec::new()), 99).is_nan());
    }
}
