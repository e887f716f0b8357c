//! `cargo xtask bench cluster`: an agent that follows an API server, and its limits.
//!
//! The server is that of the tests, in this process: it costs the agent the same as a real one, and counts the
//! agent's requests. One scenario on one node, from a few pods to 500 with three networks each, 200 definitions, 200
//! policies and 20,000 pods of other nodes as peers.
//!
//! `rig` is server and agent, `objects` the server's objects; `adds`, a `burst`, the `populated` node, changes of
//! `peers`, and thousands of `definitions` are measured in this order; `table` compares them with the limits.

mod adds;
mod burst;
mod definitions;
pub(crate) mod objects;
mod peers;
mod populated;
pub(crate) mod rig;
mod table;

use std::num::NonZeroU16;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use xtask::progress::{self, Done};
use xtask::{dist, setup};

use self::objects::Networks;
use self::rig::Cluster;
use super::agent::{self, Agent};
use super::attach::floor::{self, Spawned};
use super::limit::{self, Limit};
use super::netlink::{self, Netlink};
use super::pods::{Node, PARENT, Pod, make_directory};
use super::{Form, Origin, document, end, measured};

/// The other end of [`PARENT`].
const WIRE: &str = "wire0";
/// The parent of the macvlans by files: each agent has its own.
const PARENT_BY_FILES: (&str, u32) = ("parent1", 12);
const WIRE_BY_FILES: (&str, u32) = ("wire1", 13);
/// The second number of the first network's addresses, in the cluster and by files.
const SUBNET: u8 = 110;
const SUBNET_BY_FILES: u8 = 120;

/// Settings of the measurement and of its output.
pub struct Options {
    /// Pods attached one after another by each way.
    pub rounds: NonZeroU16,
    /// Bursts by each way.
    pub bursts: NonZeroU16,
    /// Pods in a burst.
    pub burst_size: NonZeroU16,
    /// Pods of the populated node.
    pub pods: NonZeroU16,
    /// Pods of other nodes.
    pub peers: u32,
    /// Changes of them.
    pub changes: NonZeroU16,
    /// How long the idle agent is watched.
    pub idle: Duration,
    /// Definitions at last.
    pub definitions: u32,
    /// Fail if a limit is missed.
    pub check: bool,
    /// Where the result goes.
    pub form: Form,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    adds: adds::Adds,
    burst: burst::Bursts,
    populated: populated::Populated,
    peers: peers::Delays,
    definitions: definitions::Definitions,
    limits: Vec<Limit>,
}

/// Measures everything.
///
/// # Errors
/// Not root, a tool is missing, an attachment failed, or a limit is missed and `check` is set.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let report = measured(options.form.output, setup::Scope::Usual, dist::build, || measure(options))?;
    end("cluster", options.form, &report.origin, &report, &table::table(&report))?;
    if options.check { limit::check(&report.limits) } else { Ok(()) }
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let node = Node::enter()?;
    let parent = netlink::pair(PARENT_BY_FILES, WIRE_BY_FILES);
    Netlink::open()?.send(vec![parent, netlink::set_up(WIRE_BY_FILES.1)]).context("make another parent")?;
    let all = options.pods.max(options.burst_size).max(options.rounds.saturating_add(1)).get();
    let pods = node.pods(all)?;
    let mut prepared = None;
    progress::step("agents", |progress| {
        prepared = Some(prepare(&node, &pods, progress)?);
        Ok(Done::Unchanged("one by files, one in a cluster".to_owned()))
    })?;
    let (floor, files, mut cluster) = prepared.context("nothing was prepared")?;
    let adds = step("one by one", || {
        let some = &pods[..=usize::from(options.rounds.get())];
        let adds = adds::measure(some, &floor, &files, &cluster)?;
        for pod in &some[1..] {
            cluster.server.create(&objects::own(pod))?;
        }
        Ok((adds, format!("{} pods each", options.rounds)))
    })?;
    drop(files);
    let at_once = usize::from(options.burst_size.get());
    let burst = step("bursts", || {
        let bursts = burst::measure(&pods[..at_once], options.bursts.get(), &floor, &cluster)?;
        Ok((bursts, format!("{} of {at_once} pods each", options.bursts)))
    })?;
    let populated = step("populated", || {
        let rest = &pods[at_once..];
        let populated = populated::measure(rest, at_once, options.peers, options.idle, SUBNET, &cluster)?;
        Ok((populated, format!("{all} pods, {} of other nodes", options.peers)))
    })?;
    let changes = u32::from(options.changes.get());
    let peers = step("peers", || {
        let delays = peers::measure(WIRE, &pods[0], SUBNET, changes, &cluster)?;
        Ok((delays, format!("{changes} changes")))
    })?;
    let definitions = step("definitions", || {
        let definitions = definitions::measure(options.definitions, &mut cluster)?;
        Ok((definitions, format!("{} of them", options.definitions)))
    })?;
    let origin = Origin::of(command(options));
    let limits = table::limits(&adds, &burst, &populated, &peers);
    Ok(Report { origin, adds, burst, populated, peers, definitions, limits })
}

/// Returns the command to measure again, without options that have their default.
fn command(options: &Options) -> String {
    let Options { rounds, bursts, peers, changes, .. } = options;
    format!(
        "cargo xtask bench cluster --rounds {rounds} --bursts {bursts} --peers {peers} --changes {changes}"
    )
}

/// Runs a step of the run that has a result.
fn step<T>(title: &str, work: impl FnOnce() -> anyhow::Result<(T, String)>) -> anyhow::Result<T> {
    let mut result = None;
    progress::step(title, |_| {
        let (measured, detail) = work()?;
        result = Some(measured);
        Ok(Done::Unchanged(detail))
    })?;
    result.context("a step has no result")
}

/// The floor, an agent by files, and one in a cluster, with the same pods and definitions.
fn prepare(
    node: &Node,
    pods: &[Pod],
    progress: &progress::Progress,
) -> anyhow::Result<(Spawned, Agent, Cluster)> {
    floor::make_bridge()?;
    let floor = Spawned::new(progress)?;
    let leases = |name: &str| make_directory(&node.scratch().join(name));
    let (by_files, in_cluster) = (leases("leases-files")?, leases("leases-cluster")?);
    let everything = |networks: &Networks<'_>| -> Vec<Value> {
        let definitions = (0..objects::DEFINITIONS - 3).map(objects::definition);
        let own = pods.iter().map(objects::own);
        agent::namespaces().into_iter().chain(networks.objects()).chain(definitions).chain(own).collect()
    };
    let networks =
        Networks { bridge: "files0", parent: PARENT_BY_FILES.0, subnet: SUBNET_BY_FILES, leases: &by_files };
    let files = Agent::start_as(node, "files", &everything(&networks), &Value::Object(Default::default()))?;
    let networks = Networks { bridge: "netattach0", parent: PARENT, subnet: SUBNET, leases: &in_cluster };
    let (server, kubeconfig) = rig::serve(node, &everything(&networks))?;
    let cluster = Cluster::start(node, server, kubeconfig)?;
    Ok((floor, files, cluster))
}
