//! The figures as tables, and compared with their limits.

use std::fmt::Write;

use super::Report;
use super::adds::Adds;
use super::bursts::Bursts;
use super::pair::PAIRED;
use super::sites::{WAYS, Way};
use super::standing::{Size, Standing};
use crate::limit::{self, Limit};
use crate::{Series, document};

/// Returns the limits.
pub(super) fn limits(standing: &Standing, bursts: Option<&Bursts>) -> Vec<Limit> {
    let mut limits = Vec::new();
    let [empty, sizes @ ..] = standing.sizes.as_slice() else { return limits };
    limits.push(Limit::new(
        format!("ADD on an empty node, to `{}`", Way::WithPrograms.name()),
        ratio(&empty.adds, Way::WithPrograms),
        1.25,
        "times",
    ));
    if let [first, .., last] = sizes {
        let add = |size: &Size| size.adds.of(Way::Netattach).add.median;
        limits.push(Limit::new(
            format!("ADD beside {} attachments, to ADD beside {}", last.attachments, first.attachments),
            add(last) / add(first),
            1.2,
            "times",
        ));
    }
    let most = standing.sizes.iter().map(|size| size.datagrams.until_the_answer.median).fold(0.0, f64::max);
    limits.push(Limit::new(
        "route-netlink datagrams of an ADD of three networks, at any size",
        most,
        5.0,
        "",
    ));
    if let Some(last) = sizes.last() {
        let beside = |what: &str| format!("{what} with {} attachments", last.attachments);
        limits.extend([
            Limit::new(beside("idle, of a processor,"), last.idle, 0.2, "%"),
            Limit::new(beside("resident"), mib(last.resident), 40.0, "MiB"),
        ]);
    }
    let Some(bursts) = bursts else { return limits };
    for burst in &bursts.bursts {
        limits.push(Limit::new(
            format!("the last of {} pods at once, to `{}`", burst.pods, Way::WithPrograms.name()),
            burst.add(Way::Netattach) / burst.add(Way::WithPrograms),
            if burst.pods <= 20 { 1.35 } else { 1.5 },
            "times",
        ));
    }
    if let Some(last) = bursts.bursts.last() {
        limits.extend([
            Limit::new(
                format!("ADD beside {} pods, to `{}`", last.pods, Way::Floor.name()),
                ratio(&bursts.beside, Way::Floor),
                1.5,
                "times",
            ),
            Limit::new(
                format!("resident after {} pods at once and their DELs", last.pods),
                mib(bursts.resident_after),
                24.0,
                "MiB",
            ),
        ]);
    }
    limits.push(Limit::new("warnings of the agent in bursts", bursts.warnings.len() as f64, 0.0, ""));
    limits
}

/// netattach's ADD to that of another way, in the same round of turns.
fn ratio(adds: &Adds, to: Way) -> f64 {
    adds.of(Way::Netattach).add.median / adds.of(to).add.median
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

pub(super) fn table(report: &Report) -> String {
    let Report { standing, bursts, limits, origin, rounds, idle, .. } = report;
    let mut text = format!("{}\n{}", adds(standing, bursts.as_ref()), dels(standing, bursts.as_ref()));
    let _ = write!(
        text,
        "\nMilliseconds of one pod with a bridge port and two macvlans, medians of {rounds}, beside as many attachments, \
         which are bridge ports, veths and macvlans in equal numbers; beside pods that are counted as pods, which have what \
         the measured one has. Each way has a node of its own with all of that. Ratios of netattach to `{}`, to `{}`, and \
         to itself on an empty node.\n\n{}",
        Way::Floor.name(),
        Way::WithPrograms.name(),
        agent(standing)
    );
    let _ = write!(
        text,
        "\nOf the agent, beside as many attachments. Milliseconds of processors for an ADD until its answer, and for a pod \
         with DEL and all that follows. Per cent of a processor in {idle} s in which nothing happens. Datagrams to the \
         route netlink from an ADD's call to its answer and within 2.5 s after it, counted from outside (ptrace). Resident \
         memory; after all are detached {:.1} MiB. Milliseconds from its start to its first answer after `kill -9`, and of \
         processors until then. Milliseconds from a changed policy of one pod to the kernel, and of processors for it.\n\n{}\n\
         Exchanges of a byte per second between two pods of a bridge while nobody comes or goes, and the part that is left \
         of them while another pod comes and goes ten times a second on the same node.\n",
        mib(standing.resident_after),
        pairs(standing)
    );
    if let Some(bursts) = bursts {
        let _ = write!(
            text,
            "\n{}\nMilliseconds from the first request to the last answer on a node with no other pods. {:.1} MiB are resident \
             after all of them; {}.\n",
            at_once(bursts),
            mib(bursts.resident_after),
            warned(&bursts.warnings)
        );
    }
    let _ = write!(text, "\n{}\n{origin}.\n", limit::table(limits));
    text
}

/// Returns the number of the agent's warnings, and the first of them.
fn warned(warnings: &[String]) -> String {
    match warnings {
        [] => "the agent has not warned".to_owned(),
        [first, ..] => format!("the agent has warned {} times, first: `{first}`", warnings.len()),
    }
}

/// A row of times by every way, with ratios.
fn times(name: String, of: impl Fn(Way) -> f64, empty: Option<f64>) -> Vec<String> {
    let [floor, programs, netattach] = WAYS.map(of);
    let mut row = vec![name];
    row.extend([floor, programs, netattach].map(|time| format!("{time:.2}")));
    row.extend([netattach / floor, netattach / programs].map(|ratio| format!("{ratio:.2}")));
    row.extend(empty.map(|empty| format!("{:.2}", netattach / empty)));
    row
}

fn adds(standing: &Standing, bursts: Option<&Bursts>) -> String {
    one_by_one("ADD beside", standing, bursts, |adds, way| adds.of(way).add.median)
}

fn dels(standing: &Standing, bursts: Option<&Bursts>) -> String {
    one_by_one("DEL beside", standing, bursts, |adds, way| adds.of(way).del.median)
}

fn one_by_one(
    title: &str,
    standing: &Standing,
    bursts: Option<&Bursts>,
    of: impl Fn(&Adds, Way) -> f64,
) -> String {
    let empty = standing.sizes.first().map_or(f64::NAN, |size| of(&size.adds, Way::Netattach));
    let mut rows: Vec<Vec<String>> = Vec::new();
    for size in &standing.sizes {
        rows.push(times(size.attachments.to_string(), |way| of(&size.adds, way), Some(empty)));
    }
    if let Some((bursts, last)) = bursts.and_then(|bursts| Some((bursts, bursts.bursts.last()?))) {
        rows.push(times(format!("{} pods", last.pods), |way| of(&bursts.beside, way), Some(empty)));
    }
    let [floor, programs, netattach] = WAYS.map(Way::name);
    let header = [title, floor, programs, netattach, "to floor", "to same", "to empty"];
    document::aligned(&header, &rows)
}

fn agent(standing: &Standing) -> String {
    let header = [
        "beside",
        "processor of an ADD",
        "of a pod",
        "idle %",
        "datagrams",
        "after",
        "MiB",
        "restart",
        "processor",
        "policy",
        "processor",
    ];
    let row = |size: &Size| {
        let median = |series: Option<&Series>, digits: usize| {
            series.map_or_else(|| "-".to_owned(), |series| format!("{:.digits$}", series.median))
        };
        let (restarts, changes) = (size.restarts.as_ref(), size.changes.as_ref());
        vec![
            size.attachments.to_string(),
            format!("{:.2}", size.adds.processor_of_add.median),
            format!("{:.2}", size.adds.processor_of_pod),
            format!("{:.2}", size.idle),
            format!("{:.0}", size.datagrams.until_the_answer.median),
            format!("{:.0}", size.datagrams.afterwards.median),
            format!("{:.1}", mib(size.resident)),
            median(restarts.map(|restarts| &restarts.ready), 0),
            median(restarts.map(|restarts| &restarts.processor), 0),
            median(changes.map(|changes| &changes.in_force), 1),
            median(changes.map(|changes| &changes.processor), 1),
        ]
    };
    let rows: Vec<Vec<String>> = standing.sizes.iter().map(row).collect();
    document::aligned(&header, &rows)
}

fn pairs(standing: &Standing) -> String {
    let [floor, netattach] = PAIRED.map(Way::name);
    let rows: Vec<Vec<String>> = standing
        .sizes
        .iter()
        .filter_map(|size| Some((size.attachments, size.pairs.as_ref()?)))
        .map(|(attachments, pairs)| {
            let mut row = vec![attachments.to_string()];
            for pair in pairs {
                row.extend([format!("{:.0}", pair.alone.median), format!("{:.2}", pair.ratio())]);
            }
            row
        })
        .collect();
    document::aligned(&["beside", floor, "left", netattach, "left"], &rows)
}

fn at_once(bursts: &Bursts) -> String {
    let mut rows = Vec::new();
    for burst in &bursts.bursts {
        rows.push(times(format!("{} ADD", burst.pods), |way| burst.add(way), None));
        rows.push(times(format!("{} DEL", burst.pods), |way| burst.del(way), None));
    }
    let [floor, programs, netattach] = WAYS.map(Way::name);
    document::aligned(&["at once", floor, programs, netattach, "to floor", "to same"], &rows)
}

#[cfg(test)]
mod tests {
    use super::super::adds::{Datagrams, Times};
    use super::super::bursts::Burst;
    use super::super::pair::Pair;
    use super::super::policy::Changes;
    use super::super::standing::Restarts;
    use super::*;

    fn one(figure: f64) -> Series {
        Series::new(vec![figure])
    }

    /// ADDs of these milliseconds, and DELs of ten times as many.
    fn times(ways: [f64; 3]) -> Adds {
        let ways = ways.map(|add| Times { add: one(add), del: one(add * 10.0) });
        Adds { ways, processor_of_add: one(1.5), processor_of_pod: 2.5 }
    }

    fn size(attachments: u16, ways: [f64; 3]) -> Size {
        let stands = attachments > 0;
        Size {
            attachments,
            adds: times(ways),
            datagrams: Datagrams { until_the_answer: Series::new(vec![4.0, 5.0, 6.0]), afterwards: one(1.0) },
            idle: 0.25,
            resident: 40 * 1024,
            pairs: stands
                .then(|| [0.5, 0.75].map(|left| Pair { alone: one(1000.0), beside: one(1000.0 * left) })),
            changes: stands.then(|| Changes { in_force: one(5.0), processor: one(3.0) }),
            restarts: Some(Restarts { ready: one(60.0), processor: one(50.0) }),
        }
    }

    fn standing() -> Standing {
        let sizes = vec![size(0, [2.0, 2.5, 3.0]), size(10, [2.0, 2.5, 4.0]), size(100, [2.0, 2.5, 5.0])];
        Standing { sizes, resident_after: 20 * 1024 }
    }

    fn bursts() -> Bursts {
        let burst = |pods, netattach: f64| Burst {
            pods,
            adds: [20.0, 30.0, netattach].map(one),
            dels: [40.0, 50.0, 60.0].map(one),
        };
        Bursts {
            bursts: vec![burst(20, 40.5), burst(100, 48.0)],
            beside: times([2.0, 3.0, 3.0]),
            resident_after: 24 * 1024,
            warnings: vec!["late".to_owned()],
        }
    }

    #[test]
    fn limits_are_about_the_sizes_that_were_measured() {
        let limit = |what: &str, found, most, unit| Limit::new(what, found, most, unit);
        let of_standing = [
            limit("ADD on an empty node, to `the same, with programs`", 1.2, 1.25, "times"),
            limit("ADD beside 100 attachments, to ADD beside 10", 1.25, 1.2, "times"),
            limit("route-netlink datagrams of an ADD of three networks, at any size", 5.0, 5.0, ""),
            limit("idle, of a processor, with 100 attachments", 0.25, 0.2, "%"),
            limit("resident with 100 attachments", 40.0, 40.0, "MiB"),
        ];
        assert_eq!(limits(&standing(), None), of_standing);
        let of_bursts = [
            limit("the last of 20 pods at once, to `the same, with programs`", 1.35, 1.35, "times"),
            limit("the last of 100 pods at once, to `the same, with programs`", 1.6, 1.5, "times"),
            limit("ADD beside 100 pods, to `netlink, one process`", 1.5, 1.5, "times"),
            limit("resident after 100 pods at once and their DELs", 24.0, 24.0, "MiB"),
            limit("warnings of the agent in bursts", 1.0, 0.0, ""),
        ];
        let all: Vec<Limit> = of_standing.into_iter().chain(of_bursts).collect();
        assert_eq!(limits(&standing(), Some(&bursts())), all);
    }

    #[test]
    fn a_warning_is_shown() {
        let lines = ["late".to_owned(), "lost".to_owned()];
        assert_eq!(warned(&[]), "the agent has not warned");
        assert_eq!(warned(&lines), "the agent has warned 2 times, first: `late`");
    }

    #[test]
    fn every_row_has_its_ratios() {
        let expected = "\
| ADD beside | netlink, one process | the same, with programs | netattach | to floor | to same | to empty |
| ---------- | -------------------: | ----------------------: | --------: | -------: | ------: | -------: |
| 0          |                 2.00 |                    2.50 |      3.00 |     1.50 |    1.20 |     1.00 |
| 10         |                 2.00 |                    2.50 |      4.00 |     2.00 |    1.60 |     1.33 |
| 100        |                 2.00 |                    2.50 |      5.00 |     2.50 |    2.00 |     1.67 |
| 100 pods   |                 2.00 |                    3.00 |      3.00 |     1.50 |    1.00 |     1.00 |
";
        assert_eq!(adds(&standing(), Some(&bursts())), expected);
        let expected = "\
| at once | netlink, one process | the same, with programs | netattach | to floor | to same |
| ------- | -------------------: | ----------------------: | --------: | -------: | ------: |
| 20 ADD  |                20.00 |                   30.00 |     40.50 |     2.02 |    1.35 |
| 20 DEL  |                40.00 |                   50.00 |     60.00 |     1.50 |    1.20 |
| 100 ADD |                20.00 |                   30.00 |     48.00 |     2.40 |    1.60 |
| 100 DEL |                40.00 |                   50.00 |     60.00 |     1.50 |    1.20 |
";
        assert_eq!(at_once(&bursts()), expected);
    }

    #[test]
    fn what_needs_others_is_a_dash_on_an_empty_node() {
        let lines = agent(&standing());
        let cells = |line: usize| -> Vec<String> {
            let line = lines.lines().nth(line).unwrap();
            line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        assert_eq!(cells(2), ["0", "1.50", "2.50", "0.25", "5", "1", "40.0", "60", "50", "-", "-"]);
        assert_eq!(cells(3), ["10", "1.50", "2.50", "0.25", "5", "1", "40.0", "60", "50", "5.0", "3.0"]);
        let expected = "\
| beside | netlink, one process | left | netattach | left |
| ------ | -------------------: | ---: | --------: | ---: |
| 10     |                 1000 | 0.50 |      1000 | 0.75 |
| 100    |                 1000 | 0.50 |      1000 | 0.75 |
";
        assert_eq!(pairs(&standing()), expected);
    }
}
