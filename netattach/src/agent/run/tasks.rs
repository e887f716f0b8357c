//! The agent's background tasks, from its start to its end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::AgentError;
use super::background::Background;
use super::start::Parts;
use crate::agent::Agent;
use crate::agent::cni_conf::runtime_conf;
use crate::agent::health::Health;
use crate::agent::memory;
use crate::agent::monitoring::metrics::Metrics;
use crate::agent::monitoring::{events, packet_log};
use crate::agent::node_network::NodeNetwork;
use crate::agent::pods::{live, repair};
use crate::agent::report::flow::wall_clock;
use crate::attach::{AttachError, Engine, Node, NotFollowed};
use crate::bpf;
use crate::enforce::enforcer::Enforcer;
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::firewall::Firewall;
use crate::journal::JournalKey;
use crate::kube::{Cluster, TaintRemoval};
use crate::nat::Nat;
use crate::netlink::nat::TABLE as NAT_TABLE;
use crate::netlink::{AddressWatch, Changes, LinkWatch, StationWatch};
use crate::observe::{Event, Observer};
use crate::pace::{self, Retries};
use crate::put_back::PutBack;
use crate::rounds::{self, Begun};
use crate::settings::Settings;
use crate::source::Source;
use crate::ticks::{self, ticks};

/// How often the records of the packet programs are read; and how often while there are few and no client
/// asks for them.
const OBSERVE_INTERVAL: Duration = Duration::from_millis(100);
const SILENT_INTERVAL: Duration = Duration::from_secs(1);
/// Few are at most this many a second. A thousand pods that do nothing still send some solicitations and reports of groups
/// each second, and reading ten times a second for them took more than all other work of an agent at rest. The programs'
/// buffer has room for a hundred times as many.
const FEW: usize = 100;
/// After this many reads that found few, reads are rarer.
const SILENCE: u32 = 50;

/// Most records that are read before other tasks get their turn.
const RECORDS_AT_ONCE: usize = 4096;

/// How often the flow table is scanned for ended flows, or as often as [`pace`] leaves it.
const COLLECT_INTERVAL: Duration = Duration::from_secs(5);
/// The interval while an attachment may soon need more flow entries than it has.
const PRESSED_INTERVAL: Duration = Duration::from_secs(1);

/// How long a processor works for one round of a pass over the flow table.
const COLLECT_ROUND: Duration = Duration::from_millis(1);
/// Pause between the rounds.
const COLLECT_PAUSE: Duration = Duration::from_millis(50);

/// How often the tables in the node's packet filter are checked.
const ROUTED_INTERVAL: Duration = Duration::from_secs(1);

/// Least time between two reads of the node's addresses, and the pause after a failed one.
const BETWEEN_ADDRESSES: Duration = Duration::from_secs(1);

/// How often unreferenced policies are checked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// How often a node that may have its startup taint is checked.
const TAINT_INTERVAL: Duration = Duration::from_secs(2);
/// The longest pause after the API server has refused the taint's removal again and again.
const TAINT_MOST_PAUSE: Duration = Duration::from_secs(60);

/// The pause after the addresses of a parent were not taken over, or those of a pod not announced; it doubles with each
/// failure in a row, up to the longest.
const PARENTS_PAUSE: Duration = Duration::from_secs(1);
const PARENTS_MOST_PAUSE: Duration = Duration::from_secs(8);

/// The pause between announcements of two sandboxes. Each goes to all ipvlans of the parent, or to all ports of the
/// bridge: the kernel queues a thousand frames for the ipvlans of a parent (`IPVLAN_QBACKLOG_LIMIT`), and drops others
/// unnoticed.
const BETWEEN_ANNOUNCEMENTS: Duration = Duration::from_millis(3);
/// How often announcements of a sandbox are tried before they are given up: its pod may have made them impossible, and
/// a neighbour asks again anyway, if later.
const MOST_ANNOUNCEMENTS: u32 = 10;

/// Starts the tasks that follow the packets of the node, and the return of memory.
pub(super) fn follow_packets(
    background: &mut Background,
    parts: &Parts,
    (observer, health): (&Arc<Observer>, &Arc<Health>),
    settings: &Settings,
) -> Result<(), AgentError> {
    let Parts { enforcer, engine, .. } = parts;
    background.keep(
        "the fast path",
        Arc::clone(enforcer.fast_paths()).keep(LinkWatch::open()?, StationWatch::open()?),
    );
    background
        .keep("records of packets", observe(Arc::clone(observer), Arc::clone(enforcer), enforcer.records()?));
    let names = Arc::new(packet_log::Names::default());
    if let Some(log) = enforcer.packet_log({
        let names = Arc::clone(&names);
        move |line| names.say(line)
    })? {
        packet_log::keep(log, names, settings.bpf_log_of(), Arc::clone(engine))?;
    }
    background.keep("the flow table", collect_flows(Arc::clone(enforcer)));
    let of_parents = follow_parents(Arc::clone(engine), Arc::clone(health), LinkWatch::open_for_links()?);
    background.keep("addresses of parents", of_parents);
    background.keep("announcements to neighbours", announce(Arc::clone(engine)));
    background.keep("free memory at rest", memory::keep_at_rest());
    Ok(())
}

/// Starts the tasks that keep the agent's tables in the node's packet filter unchanged.
pub(super) fn keep_packet_filter(background: &mut Background, parts: &Parts) -> Result<(), AgentError> {
    let Parts { enforcer, engine, .. } = parts;
    if enforcer.judges_routed() {
        background.keep("the packet filter", keep_routed(Arc::clone(enforcer), LinkWatch::open()?));
        background.keep("addresses of the node", keep_addresses(Arc::clone(enforcer), AddressWatch::open()?));
    }
    let no_nat = |node: &Node| node.nat.as_ref().is_none_or(Nat::has_nothing);
    let repair_nat = |node: &Node| node.nat.as_ref().map_or(Ok(false), Nat::repair);
    let keep_nat = keep_put_back(Arc::clone(engine), NAT_TABLE, no_nat, repair_nat);
    background.keep("the translation of addresses", keep_nat);
    let no_firewall = |node: &Node| node.firewall.as_ref().is_none_or(Firewall::has_nothing);
    let repair_firewall = |node: &Node| node.firewall.as_ref().map_or(Ok(false), Firewall::repair);
    let what = "rules of iptables for pods";
    let keep_firewall = keep_put_back(Arc::clone(engine), what, no_firewall, repair_firewall);
    background.keep("the node's forwarding", keep_firewall);
    Ok(())
}

/// Starts the tasks that follow the source: for the routes of the agent's own network, and for policies.
pub(super) fn follow_source(
    background: &mut Background,
    parts: &Parts,
    node_network: Option<Arc<NodeNetwork>>,
    metrics: &Arc<Metrics>,
) -> Result<(), AgentError> {
    let Parts { source, enforcer, .. } = parts;
    if let Some(network) = node_network {
        background
            .keep("the network of the node", network.keep(source.changes(), LinkWatch::open_for_routes()?));
    }
    background.keep("policies", follow_policies(Arc::clone(enforcer), source.changes(), Arc::clone(metrics)));
    Ok(())
}

/// Starts the tasks that only an agent in a cluster has.
pub(super) fn serve_cluster(
    background: &mut Background,
    cluster: &Arc<Cluster>,
    source: &Arc<dyn Source>,
    agent: &Arc<Agent>,
    settings: &Settings,
) -> Result<(), AgentError> {
    background.keep("live pods", live::follow(Arc::clone(agent), source.changes()));
    let means = repair::Means { cluster: Arc::clone(cluster), runtime: settings.runtime_socket() };
    background.keep("pods without their networks", repair::keep(Arc::clone(agent), means));
    background.keep("events", events::report(Arc::clone(agent), settings.node_name()?));
    let taint = settings.kubernetes.startup_taint.clone();
    if !taint.is_empty() {
        background.keep("the startup taint", keep_untainted(Arc::clone(cluster), Arc::clone(agent), taint));
    }
    Ok(())
}

/// Starts the tasks that check attachments and the runtime.
pub(super) fn look_after_attachments(
    background: &mut Background,
    agent: &Arc<Agent>,
    health: &Arc<Health>,
    settings: &Settings,
) {
    if let Some(socket) = settings.runtime_socket() {
        background.keep("what the runtime reads", runtime_conf::keep_asking(Arc::clone(health), socket));
    }
    background.keep("sandboxes that no runtime asks for", Arc::clone(agent).keep_collecting());
    background.keep("what others change", Arc::clone(agent).keep_as_made());
    background.keep("leases that others change", Arc::clone(agent).keep_leases());
    background.keep("what others change in pods", Arc::clone(agent).keep_looking_into_pods());
}

/// When the records of the packet programs are read: the programs do not wake the reader.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reading {
    /// Reads in a row that found few events.
    silent: u32,
}

impl Reading {
    fn interval(&self) -> Duration {
        if self.silent < SILENCE { OBSERVE_INTERVAL } else { SILENT_INTERVAL }
    }

    /// Notes what a read found.
    fn note(&mut self, found: usize, was_asked: bool) {
        let few = FEW as u128 * self.interval().as_millis() / 1000;
        let is_silent = found as u128 <= few && !was_asked;
        self.silent = if is_silent { self.silent.saturating_add(1) } else { 0 };
    }
}

/// Reads the records of the packet programs several times a second, or once a second where few come; and when a reader
/// wants them.
async fn observe(observer: Arc<Observer>, enforcer: Arc<Enforcer>, mut records: bpf::Records) {
    let mut reading = Reading::default();
    loop {
        // Both futures may be dropped at any time: a wish that was noted and not yet taken stays.
        tokio::select! {
            () = ticks::next(reading.interval()) => {}
            () = observer.wanted() => {}
        }
        let (ended, unreported) = enforcer.flows().take_ended();
        let mut found = usize::try_from(unreported).unwrap_or(usize::MAX);
        let packets = std::iter::from_fn(|| records.next()).take(RECORDS_AT_ONCE).map(Event::Packet);
        let events =
            packets.chain(ended.into_iter().map(Event::Ended)).inspect(|_| found = found.saturating_add(1));
        observer.take_in(events, unreported, wall_clock());
        reading.note(found, observer.was_asked());
    }
}

/// Scans parts of the flow table for [`COLLECT_ROUND`]. `false`: there is more to scan.
fn collect_some_flows(enforcer: &Enforcer) -> Result<bool, EnforceError> {
    let began = pace::worked();
    loop {
        let is_whole = enforcer.collect_flows()?;
        if is_whole || pace::worked().saturating_sub(began) >= COLLECT_ROUND {
            return Ok(is_whole);
        }
    }
}

/// Removes ended flows from the flow table, a bounded number of entries at a time.
async fn collect_flows(enforcer: Arc<Enforcer>) {
    loop {
        let mut worked = Duration::ZERO;
        loop {
            let enforcer = Arc::clone(&enforcer);
            let collect = move || crate::upkeep(|| collect_some_flows(&enforcer));
            let round = move || pace::measured("the flow table", collect);
            let (is_whole, took) = rounds::look(round).await;
            worked += took;
            match is_whole {
                Ok(false) => tokio::time::sleep(COLLECT_PAUSE).await,
                Ok(true) => break,
                Err(error) => {
                    tracing::error!(error = %Chain(&error), "flow table not scanned; will try again");
                    break;
                }
            }
        }
        let pressed = enforcer.flows().is_pressed();
        let pause =
            if pressed { PRESSED_INTERVAL } else { pace::pause_by_two_parts(COLLECT_INTERVAL, worked) };
        ticks::pause(pause).await;
    }
}

/// Removes the node's startup taint once all conditions hold, and whenever the node gets it again: a node
/// that registers again has it.
async fn keep_untainted(cluster: Arc<Cluster>, agent: Arc<Agent>, taint: String) {
    let mut refused = 0_u32;
    loop {
        let is_ready = agent.reporter.ready().iter().all(|condition| condition.met);
        let mut is_refused = false;
        if is_ready {
            match cluster.remove_taint(&taint).await {
                TaintRemoval::Done(since) => cluster.tainted_again(&taint, since).await,
                TaintRemoval::Refused => is_refused = true,
                TaintRemoval::Failed => {}
            }
        }
        refused = if is_refused { refused.saturating_add(1) } else { 0 };
        ticks::pause(pace::after_failures(TAINT_INTERVAL, refused, TAINT_MOST_PAUSE)).await;
    }
}

/// Maintains the enforcement of routed traffic: once a second, and when links change. Changes are gathered:
/// a process that may change a pod's links could otherwise trigger this work all the time.
async fn keep_routed(enforcer: Arc<Enforcer>, mut watch: LinkWatch) -> std::io::Result<()> {
    let mut tick = ticks(ROUTED_INTERVAL);
    let mut checked = true;
    let mut took = Duration::ZERO;
    let mut begun = None;
    loop {
        // Both futures may be dropped at any time: notifications stay in the socket, and the ticker ticks again.
        let is_told = tokio::select! {
            ready = watch.readable() => ready.map(|()| true)?,
            _ = tick.tick() => false,
        };
        // What a routine check has found is not needed before.
        if let Some(check) = begun.take() {
            (checked, took) = kept_routed(check).await;
        }
        if is_told {
            tokio::time::sleep(pace::gather(took)).await;
        }
        let changes = watch.changes().ok().filter(|_| checked).unwrap_or(Changes::Anything);
        let enforcer = Arc::clone(&enforcer);
        let keep = move || {
            let begun = Instant::now();
            let kept = crate::upkeep(|| enforcer.keep_routed(&changes));
            (kept, begun.elapsed())
        };
        let check = rounds::begin(!is_told, keep).await;
        match is_told {
            true => (checked, took) = kept_routed(check).await,
            false => begun = Some(check),
        }
    }
}

/// Returns whether the check of routed traffic succeeded, and how long it lasted.
async fn kept_routed(check: Begun<(Result<(), EnforceError>, Duration)>) -> (bool, Duration) {
    let (kept, lasted) = check.result().await;
    if let Err(error) = &kept {
        tracing::warn!(error = %Chain(error), "enforcement of routed traffic not checked; will try again");
    }
    (kept.is_ok(), lasted)
}

/// Updates policies when the kernel notifies that addresses of the node have changed: at once, and further changes within a
/// second.
async fn keep_addresses(enforcer: Arc<Enforcer>, mut watch: AddressWatch) -> std::io::Result<()> {
    loop {
        let taking = Arc::clone(&enforcer);
        let taken = rounds::take(false, move || crate::upkeep(|| taking.keep_addresses())).await;
        if let Err(error) = &taken {
            tracing::warn!(error = %Chain(error), "addresses of the node not taken over; will try again");
        }
        tokio::time::sleep(BETWEEN_ADDRESSES).await;
        if taken.is_ok() {
            watch.readable().await?;
            // The enforcer has a watch of its own, and reads the addresses that it notifies.
            let _ = watch.told();
        }
    }
}

/// Has links of pods follow a parent that gets another Ethernet address: see [`Engine::follow_parents`]. Changes are
/// gathered, and most are of links that no pod has as its parent. What has changed between the adoption and the first
/// notification is found by a look at all parents. Those that fail are looked at again, while others are followed; the
/// status shows at once which attachments do not follow.
async fn follow_parents(
    engine: Arc<Engine>,
    health: Arc<Health>,
    mut watch: LinkWatch,
) -> std::io::Result<()> {
    let mut changes = Changes::Anything;
    let mut retries = Retries::new(PARENTS_PAUSE, PARENTS_MOST_PAUSE);
    loop {
        let mut took = Duration::ZERO;
        let mut parents = engine.followed_among(&changes);
        parents.extend(retries.due(Instant::now()));
        if !parents.is_empty() {
            let (engine, tried) = (Arc::clone(&engine), parents.clone());
            let follow = move || {
                let begun = Instant::now();
                let followed = crate::upkeep(|| engine.follow_parents(&tried));
                (followed, begun.elapsed())
            };
            let (followed, lasted) = rounds::take(false, follow).await;
            took = lasted;
            let failed = not_followed(&followed, &retries);
            if retries.note(&parents, &failed, Instant::now()) {
                health.look_at_attachments_soon();
            }
        }
        // The wait may be dropped at any time: notifications stay in the socket.
        if let Ok(ready) = tokio::time::timeout(retries.pause(Instant::now()), watch.readable()).await {
            ready?;
        }
        tokio::time::sleep(pace::gather(took)).await;
        changes = watch.changes().unwrap_or(Changes::Anything);
    }
}

/// Returns the parents that could not be followed, and logs them: each in a row of failures once.
fn not_followed(failed: &[NotFollowed], before: &Retries<u32>) -> BTreeSet<u32> {
    let log = |failed: &NotFollowed| {
        let times = before.failures(&failed.parent);
        if times == 0 {
            tracing::warn!(error = %Chain(failed), "address of a parent not taken over; will try again");
        } else {
            tracing::debug!(error = %Chain(failed), times, "address of a parent not taken over again");
        }
        failed.parent
    };
    failed.iter().map(log).collect()
}

/// Announces the addresses of pods that were attached or have followed their parents; those that fail, again. It is the
/// only one that does after an ADD, one sandbox after the other.
///
/// Records that come during a round and for a while after it are gathered: a parent whose address changes all the time
/// has those of all its pods announced only so often.
async fn announce(engine: Arc<Engine>) {
    let mut retries = Retries::new(PARENTS_PAUSE, PARENTS_MOST_PAUSE).at_most(MOST_ANNOUNCEMENTS);
    loop {
        let waited = tokio::time::timeout(retries.pause(Instant::now()), engine.unannounced()).await;
        let mut records = waited.unwrap_or_default();
        records.extend(retries.due(Instant::now()));
        let begun = Instant::now();
        let mut failed = BTreeSet::new();
        for record in &records {
            let (announcing, of) = (Arc::clone(&engine), record.clone());
            let announced = rounds::take(false, move || crate::upkeep(|| announcing.announce(&of))).await;
            if let Err(error) = announced {
                log_unannounced(record, &error, retries.failures(record));
                failed.insert(record.clone());
            }
            tokio::time::sleep(BETWEEN_ANNOUNCEMENTS).await;
        }
        retries.note(&records, &failed, Instant::now());
        tokio::time::sleep(pace::gather(begun.elapsed())).await;
    }
}

/// Logs that the addresses of a sandbox were not announced. `before`: how many times in a row that has failed before.
fn log_unannounced(record: &JournalKey, error: &AttachError, before: u32) {
    let container = &record.container_id;
    if before == 0 {
        tracing::warn!(container, error = %Chain(error), "addresses not announced to neighbours; will try again");
    } else if before + 1 < MOST_ANNOUNCEMENTS {
        tracing::debug!(container, error = %Chain(error), "addresses not announced to neighbours again");
    } else {
        tracing::info!(container, error = %Chain(error), "addresses not announced to neighbours; given up");
    }
}

/// Restores what other programs remove from the packet filter, within a second (two, where another look hangs); where
/// no attachment has anything there, no thread is woken. Logs the first few repairs, and then one per minute.
async fn keep_put_back<E: std::error::Error + Send + 'static>(
    engine: Arc<Engine>,
    what: &'static str,
    has_nothing: fn(&Node) -> bool,
    repair: fn(&Node) -> Result<bool, E>,
) {
    let mut tick = ticks(ROUTED_INTERVAL);
    let mut failed = None;
    let mut told = PutBack::default();
    let mut begun: Option<Begun<Result<bool, E>>> = None;
    loop {
        tick.tick().await;
        // What a repair has found is said a second later: it mostly finds nothing.
        if let Some(repair) = begun.take() {
            let repaired = repair.result().await;
            let now = repaired.as_ref().err().map(|error| Chain(error).to_string());
            match (repaired, &now) {
                (Ok(true), _) if told.once_more((), Instant::now()).is_ok() => {
                    tracing::warn!(what, "the packet filter was changed by another program; put back");
                }
                (Err(_), Some(error)) if now != failed => {
                    tracing::error!(error, what, "the packet filter not checked; will try again");
                }
                _ => {}
            }
            failed = now;
        }
        if !has_nothing(engine.node()) {
            let engine = Arc::clone(&engine);
            begun = Some(rounds::begin(true, move || crate::upkeep(|| repair(engine.node()))).await);
        }
    }
}

/// Updates the policies in the maps whenever the source changes, and deletes those that no packet can still
/// be reading.
async fn follow_policies(enforcer: Arc<Enforcer>, mut changes: watch::Receiver<u64>, metrics: Arc<Metrics>) {
    let mut sweep = ticks(SWEEP_INTERVAL);
    // The source may have changed since the enforcer read it, before this receiver was there.
    changes.mark_changed();
    loop {
        // Both futures may be dropped at any time: a change stays marked as unseen, and the ticker ticks again.
        let changed = tokio::select! {
            changed = changes.changed() => match changed {
                Ok(()) => true,
                Err(_) => return,
            },
            _ = sweep.tick() => false,
        };
        let (enforcer, metrics) = (Arc::clone(&enforcer), Arc::clone(&metrics));
        let update = move || {
            let done = if changed { enforcer.sync() } else { enforcer.sweep() };
            if let Err(error) = done {
                tracing::error!(error = %Chain(&error), "policies not updated");
            }
            for change in enforcer.take_changes() {
                metrics.policies_changed(&change);
            }
        };
        rounds::take(!changed, update).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_once_a_second_while_few_come_and_nobody_asks() {
        let [often, rarely] = [OBSERVE_INTERVAL, SILENT_INTERVAL];
        // What each of as many reads finds, whether somebody asked, and the interval afterwards.
        for (reads, found, was_asked, expected) in [
            (SILENCE - 1, 0, false, often),
            (SILENCE, 0, false, rarely),
            (SILENCE, FEW / 10, false, rarely),
            (SILENCE * 2, FEW / 10 + 1, false, often),
            (SILENCE * 2, 0, true, often),
        ] {
            let mut reading = Reading::default();
            (0..reads).for_each(|_| reading.note(found, was_asked));
            assert_eq!(reading.interval(), expected, "{reads} reads, {found}, {was_asked}");
        }
        // A read of a second finds ten times as many.
        for (found, was_asked, expected) in
            [(FEW, false, rarely), (FEW + 1, false, often), (0, true, often), (usize::MAX, false, often)]
        {
            let mut reading = Reading { silent: SILENCE };
            reading.note(found, was_asked);
            assert_eq!(reading.interval(), expected, "{found}, {was_asked}");
        }
    }

    #[test]
    fn a_taint_whose_removal_is_refused_is_tried_more_and_more_rarely() {
        let pause = |refused| pace::after_failures(TAINT_INTERVAL, refused, TAINT_MOST_PAUSE);
        let pauses = [0, 1, 2, 3, 5, 6, 7, u32::MAX].map(|refused| pause(refused).as_secs());
        assert_eq!(pauses, [2, 2, 4, 8, 32, 60, 60, 60]);
    }
}
