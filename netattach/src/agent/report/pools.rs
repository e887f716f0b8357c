//! Networks and address pools for operators: how full pools are, and the holders of their addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::attach::{Engine, IntentReader};
use crate::error_chain::Chain;
use crate::ipam::{self, Held, Owner, RangeUse, Survey};
use crate::plan::gc::Defined;
use crate::rpc::message::AttachmentName;
use crate::rpc::message::pools::{Holder, Network, Pool, Range};

/// Most holders in one answer.
const MOST_HOLDERS: usize = 10_000;

/// How long pools are read for one answer. The client waits for twice as long, and each locked pool takes a
/// tenth of a second.
const LONGEST: Duration = Duration::from_secs(5);

/// A pool under construction.
#[derive(Default)]
struct Found {
    networks: BTreeSet<String>,
    ranges: Vec<RangeUse>,
    held: Vec<Held>,
    problem: Option<String>,
}

/// Returns the defined networks, the default network first.
pub(in crate::agent) fn networks(intents: &IntentReader) -> Vec<Network> {
    let network = |defined: &Defined| Network {
        network: defined.network.name.to_string(),
        default: defined.default,
        plugins: defined.network.list.plugins.iter().map(|plugin| plugin.plugin_type().to_owned()).collect(),
    };
    intents.defined().iter().map(network).collect()
}

/// Returns every pool that a definition names or that attachments have addresses of. `names`: the
/// attachments.
pub(in crate::agent) fn report(
    engine: &Engine,
    intents: &IntentReader,
    names: &BTreeMap<Owner, AttachmentName>,
) -> Vec<Pool> {
    let mut found: BTreeMap<ipam::Pool, Found> = BTreeMap::new();
    let due = Instant::now() + LONGEST;
    for defined in intents.defined() {
        for (pool, survey) in engine.survey(&defined.network, due) {
            let pool = found.entry(pool).or_default();
            pool.networks.insert(defined.network.name.to_string());
            match survey {
                Ok(Survey { ranges, held }) => {
                    pool.held = held;
                    let new = ranges.into_iter().filter(|range| !pool.ranges.contains(range));
                    pool.ranges.extend(new.collect::<Vec<_>>());
                }
                Err(error) => pool.problem = Some(Chain(&error).to_string()),
            }
        }
    }
    for (pool, held) in engine.known_pools(|pool| !found.contains_key(pool), due) {
        let of = match held {
            Ok(held) => Found { held, ..Found::default() },
            Err(error) => Found { problem: Some(Chain(&error).to_string()), ..Found::default() },
        };
        found.insert(pool, of);
    }
    // An empty pool that no definition names is obsolete.
    found.retain(|_, pool| !pool.networks.is_empty() || !pool.held.is_empty() || pool.problem.is_some());
    let mut room = MOST_HOLDERS;
    found.into_iter().map(|(pool, found)| shown(&pool, found, names, &mut room)).collect()
}

fn shown(pool: &ipam::Pool, found: Found, names: &BTreeMap<Owner, AttachmentName>, room: &mut usize) -> Pool {
    let count = found.held.len().min(*room);
    *room -= count;
    let left_out = (found.held.len() - count) as u64;
    let holders = found.held.into_iter().take(count).map(|held| holder(held, names));
    Pool {
        networks: found.networks.into_iter().collect(),
        directory: pool.path(),
        ranges: found.ranges.into_iter().map(range).collect(),
        holders: holders.collect(),
        left_out,
        problem: found.problem,
    }
}

fn holder(held: Held, names: &BTreeMap<Owner, AttachmentName>) -> Holder {
    let Held { address, owner } = held;
    let owner = owner.unwrap_or_else(|| Owner { container_id: String::new(), ifname: "-".to_owned() });
    let name = names.get(&owner).cloned().unwrap_or_else(|| AttachmentName {
        id: None,
        pod: None,
        network: "-".to_owned(),
        ifname: owner.ifname.clone(),
    });
    Holder { address, name, container_id: owner.container_id }
}

fn range(range: RangeUse) -> Range {
    let RangeUse { set, first, last, gateway, size, used, free, free_runs, longest_free, longest_free_size } =
        range;
    Range {
        set: set as u64,
        first,
        last,
        gateway,
        size,
        used,
        free,
        free_runs,
        longest_free,
        longest_free_size,
    }
}
