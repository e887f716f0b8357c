//! Thousands of definitions: as a burst of events, and at the start of an agent.

use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use super::objects::{self, DEFINITIONS};
use super::rig::Cluster;

#[derive(Serialize)]
pub(super) struct Definitions {
    pub(super) count: u32,
    /// Milliseconds from the first event to the snapshot that has the last definition.
    pub(super) burst: f64,
    /// The agent's memory with all of them, in KiB.
    pub(super) resident: u64,
    /// Milliseconds from the start of an agent until it has read everything.
    pub(super) start: f64,
    /// The most that was resident during that start, in KiB.
    pub(super) most_at_start: u64,
}

/// Adds definitions until there are that many, and restarts the agent.
pub(super) fn measure(count: u32, cluster: &mut Cluster) -> anyhow::Result<Definitions> {
    // The definitions of the pods' three networks are among them.
    let more: Vec<_> = (DEFINITIONS - 3..count - 3).map(objects::definition).collect();
    let began = Instant::now();
    for definition in &more {
        cluster.server.create(definition)?;
    }
    let all = usize::try_from(count).context("count the definitions")?;
    cluster.wait_until("all definitions are known", || Ok(cluster.definitions()? == all))?;
    let burst = began.elapsed();
    cluster.settle()?;
    let resident = cluster.agent.resident_kib().context("the agent has no memory")?;
    let began = cluster.agent.start_again()?;
    let is_read = || Ok(cluster.is_synced() && cluster.definitions()? == all);
    cluster.wait_until("all definitions are known after a restart", is_read)?;
    let start = began.elapsed();
    cluster.settle()?;
    let most_at_start = cluster.agent.most_resident_kib().context("the agent has no memory")?;
    let milliseconds = |time: Duration| time.as_secs_f64() * 1000.0;
    Ok(Definitions { count, burst: milliseconds(burst), resident, start: milliseconds(start), most_at_start })
}
