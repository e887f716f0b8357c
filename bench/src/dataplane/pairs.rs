//! netattach under a policy compared with [`REDIRECT`], the floor of any program there, in pairs of consecutive
//! samples: other load on the machine affects both about equally.

use std::fmt::Write as _;

use anyhow::Context;
use serde::Serialize;
use xtask::progress::{self, Done};

use super::load::{self, Kind};
use super::paths::{self, NETATTACH, PORTS, Path, REDIRECT};
use super::{Options, RULES};
use crate::limit::{self, Limit};
use crate::pods::Node;
use crate::{Series, document};

/// Pods of the paths: two for each; netattach's path is prepared with three others, which are not measured.
const PODS: u16 = 10;
/// Minimum fraction of the floor's speed.
const LEAST_REQUESTS: f64 = 0.96;
const LEAST_CONNECTIONS: f64 = 0.93;

/// The results.
#[derive(Serialize)]
pub(super) struct Pairs {
    /// Exchanges of a byte per second on one connection.
    requests: Pair,
    /// Connections per second, with one exchange each.
    connections: Pair,
    pub(super) limits: Vec<Limit>,
}

/// Samples of both, in the order of the pairs.
#[derive(Serialize)]
struct Pair {
    redirect: Series,
    netattach: Series,
}

impl Pair {
    fn of([redirect, netattach]: [Vec<f64>; 2]) -> Self {
        Self { redirect: Series::new(redirect), netattach: Series::new(netattach) }
    }

    /// Returns the fraction of the floor's speed, pair by pair.
    fn ratios(&self) -> Series {
        self.netattach.ratios(&self.redirect)
    }

    /// Returns the lower end of the interval of its median.
    fn lower_end(&self) -> f64 {
        let [low, _] = self.ratios().interval();
        low
    }
}

impl Pairs {
    fn of(requests: Pair, connections: Pair) -> Self {
        let limit = |what: &str, pair: &Pair, least| {
            Limit::at_least(
                format!("{what} under a policy, to `{REDIRECT}`"),
                pair.lower_end(),
                least,
                "times",
            )
        };
        let limits = vec![
            limit("requests", &requests, LEAST_REQUESTS),
            limit("connections", &connections, LEAST_CONNECTIONS),
        ];
        Self { requests, connections, limits }
    }
}

/// Takes as many pairs of each kind, whose order alternates.
///
/// # Errors
/// Something cannot be set up, or a path does not carry traffic.
pub(super) fn measure(options: &Options) -> anyhow::Result<Pairs> {
    let node = Node::enter()?;
    let mut pods = node.pods(PODS)?.into_iter();
    let mut made = None;
    progress::step("paths of pairs", |_| {
        let redirect = paths::redirected(&mut pods)?;
        let (agent, all) = paths::netattach(&node, &mut pods, &RULES[..1])?;
        made = Some((agent, redirect, all));
        Ok(Done::Unchanged(format!("{REDIRECT}; {NETATTACH}, {} rules", RULES[0])))
    })?;
    // All of them are kept, so that no cleanup runs meanwhile.
    let (_agent, redirect, all) = made.context("nothing was prepared")?;
    let netattach =
        all.iter().find(|path| path.name == NETATTACH).context("there is no path of netattach")?;
    let both = [&redirect, netattach];
    let mut ports = PORTS.cycle();
    let mut take = |path: &Path, kind| {
        let port = ports.next().unwrap_or(*PORTS.start());
        load::sample(&path.route(), kind, port, options.sample)
            .with_context(|| format!("from pod to pod by {}", path.name))
    };
    let (mut requests, mut connections) = (<[Vec<f64>; 2]>::default(), <[Vec<f64>; 2]>::default());
    progress::step("pairs", |progress| {
        // These do not count: they resolve addresses and warm caches.
        for path in both {
            take(path, Kind::Requests)?;
            take(path, Kind::Connections)?;
        }
        for pair in 0..options.pairs {
            progress.note(&format!("pair {} of {}", pair + 1, options.pairs));
            let order = if pair.is_multiple_of(2) { [0, 1] } else { [1, 0] };
            for at in order {
                requests[at].push(take(both[at], Kind::Requests)?);
            }
            for at in order {
                connections[at].push(take(both[at], Kind::Connections)?);
            }
        }
        Ok(Done::Unchanged(format!("{} of each kind, {:?} a sample", options.pairs, options.sample)))
    })?;
    Ok(Pairs::of(Pair::of(requests), Pair::of(connections)))
}

/// The figures, their explanation and the limits.
pub(super) fn table(pairs: &Pairs, origin: &crate::Origin) -> String {
    let mut text = figures(pairs);
    let _ = write!(
        text,
        "\nExchanges of one byte per second on one connection, and connections per second with one exchange each: medians of {} \
         samples; of the ratios of samples that were taken one after the other, in an order that alternates, the median, and \
         between which values it lies with 95 % probability. {origin}.\n\n{}\nFound: the lower end of the interval.\n",
        pairs.requests.redirect.samples.len(),
        limit::table(&pairs.limits)
    );
    text
}

fn figures(pairs: &Pairs) -> String {
    let row = |name: &str, pair: &Pair| {
        let ratios = pair.ratios();
        let [low, high] = ratios.interval();
        vec![
            name.to_owned(),
            format!("{:.0}", pair.redirect.median),
            format!("{:.0}", pair.netattach.median),
            format!("{:.3}", ratios.median),
            format!("{low:.3} to {high:.3}"),
        ]
    };
    let rows = [row("requests/s", &pairs.requests), row("connections/s", &pairs.connections)];
    let netattach = format!("{NETATTACH}, {} rules", RULES[0]);
    document::aligned(&["", REDIRECT, &netattach, "ratio", "95 %"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs() -> Pairs {
        // Ratios that rise from 0.955 on, and some that are all the same.
        let floor = vec![1000.0; 40];
        let rising = (0..40).map(|number| 955.0 + f64::from(number)).collect();
        Pairs::of(Pair::of([floor.clone(), rising]), Pair::of([floor, vec![930.0; 40]]))
    }

    #[test]
    fn the_lower_end_of_the_interval_counts() {
        // The fourteenth of forty samples.
        let expected = [
            Limit::at_least("requests under a policy, to `only redirect`", 0.968, 0.96, "times"),
            Limit::at_least("connections under a policy, to `only redirect`", 0.93, 0.93, "times"),
        ];
        assert_eq!(pairs().limits, expected);
        assert!(pairs().limits.iter().all(Limit::is_met));
    }

    #[test]
    fn ratios_are_of_the_samples_of_a_pair() {
        let expected = "\
|               | only redirect | netattach, 10 rules | ratio |           95 % |
| ------------- | ------------: | ------------------: | ----: | -------------: |
| requests/s    |          1000 |                 975 | 0.975 | 0.968 to 0.981 |
| connections/s |          1000 |                 930 | 0.930 | 0.930 to 0.930 |
";
        assert_eq!(figures(&pairs()), expected);
    }
}
