//! Reads the values for one scrape.

use std::borrow::Cow;
use std::time::SystemTime;

use netattach_common::LAYOUT_VERSION;

use super::Metrics;
use super::catalogue as of;
use super::family::{Numbers, Values};
use super::totals::{AttachmentKey, Totals};
use crate::agent::Agent;
use crate::agent::memory::Resident;
use crate::agent::monitoring::events;
use crate::agent::report::Measured;
use crate::bpf::Stats;
use crate::descriptors;
use crate::enforce::error::EnforceError;
use crate::settings::OfAttachments;
use crate::sync::locked;

/// Characters of a container's id in labels: as many as tools show.
const SHORT_ID: usize = 12;

pub(super) fn gather(
    metrics: &Metrics,
    agent: &Agent,
    of_attachments: OfAttachments,
) -> Result<Vec<Numbers>, EnforceError> {
    // Locked while the counters are read and added. Otherwise newer counters of an attachment that ends
    // could be added before older ones of this scrape, which would look like a counter reset.
    let mut totals = locked(&metrics.totals);
    let measured = agent.reporter.measured(&agent.engine)?;
    let counted = counted(&mut totals, agent, &measured)?;
    drop(totals);
    let mut all = vec![built()];
    all.extend(conditions(agent));
    all.push(attachments(&measured));
    if of_attachments.info {
        all.push(info(&measured));
    }
    all.extend(counted);
    if of_attachments.counters {
        all.extend(of_pods(&measured));
    }
    all.extend(pools(agent));
    all.extend(policies(agent, &measured));
    all.extend(flow_table(agent));
    all.extend(own(metrics, agent));
    Ok(all)
}

fn built() -> Numbers {
    let mut built = Numbers::of(&of::BUILD);
    built.add(vec![env!("CARGO_PKG_VERSION").into(), LAYOUT_VERSION.to_string().into()], 1.0);
    built
}

fn conditions(agent: &Agent) -> [Numbers; 3] {
    let mut ready = Numbers::of(&of::READY);
    for condition in agent.reporter.ready() {
        ready.add(vec![condition.condition.into()], if condition.met { 1.0 } else { 0.0 });
    }
    let problems = events::counted(agent);
    [
        ready,
        Numbers::only(&of::TROUBLES, problems.of_node as f64),
        Numbers::only(&of::OBJECT_PROBLEMS, problems.of_objects as f64),
    ]
}

fn attachments(measured: &[Measured]) -> Numbers {
    let mut by = Numbers::of(&of::ATTACHMENTS_BY);
    for it in measured {
        by.add(vec![it.network.clone().into(), it.kind.clone().into(), it.level.into()], 1.0);
    }
    by
}

fn info(measured: &[Measured]) -> Numbers {
    let mut info = Numbers::of(&of::ATTACHMENT_INFO);
    for it in measured {
        let mut labels = pod(it);
        labels.push(it.host_interface.clone().unwrap_or_default().into());
        labels.push(it.of.0.container_id.chars().take(SHORT_ID).collect::<String>().into());
        info.add(labels, 1.0);
    }
    info
}

/// The labels of a pod's interface.
fn pod(it: &Measured) -> Values {
    let (namespace, name) = it.pod.clone().map_or_else(Default::default, |pod| (pod.namespace, pod.name));
    [namespace, name, it.ifname.clone(), it.network.clone()].map(Cow::Owned).into()
}

/// Returns the counters of the packet programs, by network.
fn counted(totals: &mut Totals, agent: &Agent, measured: &[Measured]) -> Result<[Numbers; 5], EnforceError> {
    // Devices that run the programs without an attachment; there should be none.
    let strangers = agent.reporter.strangers()?;
    for it in measured {
        match &it.stats {
            Some(stats) => totals.add(&it.of, &it.network, stats),
            None => totals.mark_seen(&it.of),
        }
    }
    totals.add(&nobody(), "-", &strangers);
    totals.end_of_scrape();
    Ok(totals.numbers())
}

/// Stands for devices without an attachment: no record has this key.
fn nobody() -> AttachmentKey {
    (crate::journal::JournalKey { container_id: String::new(), ifname: String::new() }, 0)
}

fn of_pods(measured: &[Measured]) -> [Numbers; 3] {
    let mut all = [&of::POD_PACKETS, &of::POD_BYTES, &of::POD_DROPS].map(Numbers::of);
    let [packets, bytes, drops] = &mut all;
    for (it, stats) in measured.iter().filter_map(|it| Some((it, it.stats.as_ref()?))) {
        let labels = |last: &'static str| {
            let mut labels = pod(it);
            labels.push(last.into());
            labels
        };
        let Stats { to_pod, from_pod, .. } = stats;
        for (direction, counted) in [("received", to_pod), ("sent", from_pod)] {
            packets.add(labels(direction), counted.packets as f64);
            bytes.add(labels(direction), counted.bytes as f64);
        }
        for (reason, count) in stats.dropped() {
            drops.add(labels(reason.name()), count as f64);
        }
    }
    all
}

fn pools(agent: &Agent) -> [Numbers; 2] {
    let mut all = [&of::POOL_SIZE, &of::POOL_USED].map(Numbers::of);
    let [size, used] = &mut all;
    for pool in agent.health.pools() {
        let labels = || -> Values { vec![pool.network.clone().into(), pool.family.into()] };
        size.add(labels(), pool.size as f64);
        used.add(labels(), pool.used as f64);
    }
    all
}

fn policies(agent: &Agent, measured: &[Measured]) -> [Numbers; 7] {
    let counted = agent.reporter.policies_counted();
    let unenforced = measured.iter().filter(|it| it.unenforced).count();
    [
        Numbers::only(&of::POLICIES, counted.policies as f64),
        Numbers::only(&of::PROGRAMMED, counted.programmed as f64),
        Numbers::only(&of::RULES, counted.rules as f64),
        Numbers::only(&of::POLICY_PROBLEMS, counted.with_problems.wrong as f64),
        Numbers::only(&of::POLICY_WARNINGS, counted.with_problems.warned as f64),
        Numbers::only(&of::POLICY_PODS, counted.with_problems.pods as f64),
        Numbers::only(&of::UNENFORCED, unenforced as f64),
    ]
}

fn flow_table(agent: &Agent) -> [Numbers; 2] {
    let mut all = [&of::FLOWS, &of::FLOW_CAPACITY].map(Numbers::of);
    let [entries, capacity] = &mut all;
    for family in agent.reporter.flow_table() {
        let labels = || -> Values { vec![family.family.clone().into()] };
        entries.add(labels(), family.entries as f64);
        capacity.add(labels(), family.capacity as f64);
    }
    all
}

/// Returns the metrics of the agent itself.
fn own(metrics: &Metrics, agent: &Agent) -> Vec<Numbers> {
    let mut own = vec![
        Numbers::only(&of::PUT_BACK, agent.reporter.put_back() as f64),
        Numbers::only(&of::RECORDS, agent.engine.registry().len() as f64),
        Numbers::only(&of::LEFT_OVER, agent.earlier.unfinished() as f64),
        Numbers::only(&of::COLLECTED, agent.collector.collected() as f64),
        Numbers::only(&of::SCRAPE, locked(&metrics.scraped).as_secs_f64()),
    ];
    own.extend(Resident::now().map(|memory| Numbers::only(&of::MEMORY, memory.all as f64)));
    if let Ok((open, most)) = descriptors::used() {
        own.push(Numbers::only(&of::DESCRIPTORS, open as f64));
        own.push(Numbers::only(&of::MOST_DESCRIPTORS, most as f64));
    }
    let since = metrics.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    own.push(Numbers::only(&of::STARTED, since.as_secs_f64()));
    own
}
