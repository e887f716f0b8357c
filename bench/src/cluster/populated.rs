//! The memory of an agent with many objects, and its use of the processor while idle.

use std::thread;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use super::objects::{self, POLICIES, Peers};
use super::rig::Cluster;
use crate::Series;
use crate::agent::NAMESPACE;
use crate::pods::Pod;

/// Scrapes of the metrics.
const SCRAPES: usize = 21;

/// Samples of the memory of an agent at rest, a second apart. The resident part of its code varies.
const LOOKS: usize = 31;

/// Memory in KiB: resident at rest, the agent's own part of it, and resident right after work, before the agent
/// returned code that had run and free memory. At rest: medians of [`LOOKS`].
#[derive(Clone, Copy, Serialize)]
pub(super) struct Memory {
    pub(super) resident: u64,
    pub(super) own: u64,
    pub(super) after_work: u64,
}

impl Memory {
    pub(super) fn of(cluster: &Cluster) -> anyhow::Result<Self> {
        let resident = || cluster.agent.resident_kib().context("the agent has no memory");
        cluster.settle()?;
        let after_work = resident()?;
        cluster.rest()?;
        let mut looks = Vec::with_capacity(LOOKS);
        for _ in 0..LOOKS {
            let own = cluster.agent.own_kib().context("the agent has no memory of its own")?;
            looks.push((resident()?, own));
            thread::sleep(Duration::from_secs(1));
        }
        let median = |of: fn(&(u64, u64)) -> u64| {
            let mut all: Vec<u64> = looks.iter().map(of).collect();
            all.sort_unstable();
            all[all.len() / 2]
        };
        Ok(Self { resident: median(|look| look.0), own: median(|look| look.1), after_work })
    }
}

#[derive(Serialize)]
pub(super) struct Populated {
    pub(super) pods: usize,
    pub(super) peers: u32,
    /// With its own pods, definitions and policies; no policy has pods as peers.
    pub(super) alone: Memory,
    /// Also with the pods of other nodes, as peers of the policies.
    pub(super) with_peers: Memory,
    /// Milliseconds of a scrape of the agent's metrics, without peers.
    pub(super) scrape: Series,
    /// The memory of one pod of another node.
    pub(super) bytes_per_peer: f64,
    /// Per cent of a processor while idle.
    pub(super) idle: f64,
}

/// Attaches the rest of the pods, and adds objects step by step.
pub(super) fn measure(
    rest: &[Pod],
    attached: usize,
    peers: u32,
    idle: Duration,
    subnet: u8,
    cluster: &Cluster,
) -> anyhow::Result<Populated> {
    cluster.agent.attach_all(rest)?;
    for number in 0..POLICIES {
        cluster.server.create(&objects::policy(number, Peers::Blocks))?;
    }
    let alone = Memory::of(cluster)?;
    let mut scrapes = Vec::new();
    for _ in 0..SCRAPES {
        scrapes.push(cluster.agent.scrape()?.as_secs_f64() * 1000.0);
    }
    cluster.server.create(&objects::idle_policy())?;
    // The pods arrive as a list, as for an agent that starts.
    for number in 0..peers {
        cluster.server.create(&objects::far(number, subnet))?;
    }
    if peers > 0 {
        cluster.knows_attached(peers)?;
    }
    let known = Memory::of(cluster)?;
    for number in 0..POLICIES {
        cluster.server.apply(&objects::policy(number, Peers::Pods))?;
    }
    cluster.server.delete("multi-networkpolicies", NAMESPACE, "nobody")?;
    let with_peers = Memory::of(cluster)?;
    let before = cluster.agent.processor_time()?;
    thread::sleep(idle);
    let used = cluster.agent.processor_time()?.saturating_sub(before);
    Ok(Populated {
        pods: attached + rest.len(),
        peers,
        alone,
        with_peers,
        scrape: Series::new(scrapes),
        bytes_per_peer: (known.own.saturating_sub(alone.own) * 1024) as f64 / f64::from(peers.max(1)),
        idle: used.as_secs_f64() / idle.as_secs_f64() * 100.0,
    })
}
