//! The agent's answers about itself, from memory and from the maps.
//!
//! | module | what it does |
//! |---|---|
//! | `pools` | networks, and how full address pools are |
//! | `conditions` | the problems of the whole agent |
//! | `flow` | records of packets as text |

mod conditions;
pub(super) mod flow;
pub(super) mod pools;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::health::Health;
use super::memory::Resident;
use crate::agent::health::trouble::Troubles;
use crate::attach::{Attached, Engine, IntentReader};
use crate::bpf::{self, FastStats, Segment, XdpMode};
use crate::cni::code;
use crate::enforce::attachment::is_behind_card;
use crate::enforce::enforcer::Enforcer;
use crate::enforce::error::EnforceError;
use crate::enforce::level::Vantage;
use crate::error_chain::Chain;
use crate::fast_path::{self, uplink};
use crate::ipam::Owner;
use crate::journal::JournalKey;
use crate::netlink::{Handle, LOOPBACK};
use crate::objects::label_query::{self, QueryError};
use crate::objects::policy::PolicyName;
use crate::objects::{ObjectName, Origin};
use crate::observe::{Event, Observer};
use crate::plan::{AttachmentPlan, Sandbox, hook_kind, result};
use crate::policy::desired::Subject;
use crate::policy::level::{Enforcement, Level};
use crate::policy::naming::Recorded;
use crate::rpc::message::pools::Pool;
use crate::rpc::message::{
    Attachment, AttachmentName, AttachmentPolicy, AttachmentStats, Condition, Dump, Failure, FastPath,
    FastPathCount, Feature, FlowRecord, FlowTableUse, FlowsCall, FlowsReport, Kernel, Kind, MissingRecords,
    Path, PolicyChange, PolicyReport, Question, Readiness, RuleFlows, State, Status, Traffic, Uplink,
};
use crate::source::Source;
use crate::step::{Interface, MadeBy};

/// The remedy if a policy has no effect; the reason precedes it.
const WAY_OUT: &str = "change that, or take a network of another kind (docs/limits.md), and recreate the pod";

/// The text for an interface behind which netattach is chained, and whose addresses are not known.
const ANY_ADDRESS: &str = "the pod may send from any IP address: neither the result of its plugins nor the kernel has one of the interface, and allowedAddresses names none";

/// Answers queries about the agent.
pub(super) struct Reporter {
    source: Arc<dyn Source>,
    enforcer: Arc<Enforcer>,
    health: Arc<Health>,
    troubles: Arc<Troubles>,
    observer: Arc<Observer>,
    /// The socket for the runtime's calls.
    socket: PathBuf,
}

/// An attachment, for metrics.
#[derive(Debug)]
pub(super) struct Measured {
    /// The record of its sandbox, and its index there.
    pub(super) of: (JournalKey, u16),
    pub(super) pod: Option<ObjectName>,
    pub(super) network: String,
    pub(super) ifname: String,
    pub(super) kind: String,
    /// The end of its link on the node, or its parent.
    pub(super) host_interface: Option<String>,
    /// The enforcement level of policies.
    pub(super) level: &'static str,
    /// Whether a policy selects it that is not enforced, or not as far as required.
    pub(super) unenforced: bool,
    /// The counters of its programs, if it has any.
    pub(super) stats: Option<bpf::Stats>,
}

/// Numbers of policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PoliciesCounted {
    /// Policies of the source.
    pub(super) policies: usize,
    /// Compiled policies in the maps.
    pub(super) programmed: usize,
    /// Their rules.
    pub(super) rules: usize,
    /// Policies that are not in force as written.
    pub(super) problems: usize,
}

/// One attachment of one sandbox.
struct Row<'a> {
    attached: &'a Attached,
    number: u16,
    plan: &'a AttachmentPlan,
}

impl Reporter {
    pub(super) fn new(
        source: Arc<dyn Source>,
        enforcer: Arc<Enforcer>,
        health: Arc<Health>,
        troubles: Arc<Troubles>,
        observer: Arc<Observer>,
        socket: PathBuf,
    ) -> Self {
        Self { source, enforcer, health, troubles, observer, socket }
    }

    pub(super) fn attachments(&self, engine: &Engine) -> Vec<Attachment> {
        each(engine, |row| {
            let (host, pod) = row.link();
            let enforcement = self.enforcement(row);
            Some(Attachment {
                name: row.name(),
                container_id: row.attached.key.container_id.clone(),
                kind: row.kind(),
                mac: pod.as_ref().and_then(|pod| pod.mac),
                addresses: row.result().ips.iter().map(|ip| ip.address).collect(),
                host_interface: host.map(|host| host.name).or_else(|| row.parent()),
                enforcement: enforcement.level.into(),
                enforcement_detail: enforcement.why,
                programs_wait: row.id().is_some_and(|id| self.enforcer.is_waiting(id)),
                fast_path: row.id().and_then(|id| self.enforcer.fast_paths().status(id)).map(fast_path),
                state: State::Attached,
            })
        })
    }

    pub(super) fn stats(&self, engine: &Engine) -> Result<Vec<AttachmentStats>, EnforceError> {
        let mut failed = None;
        let census = self.enforcer.flows().census().unwrap_or_default();
        let flows = |id: u32| {
            let by_family = census.by_attachment.get(&id).copied().unwrap_or_default();
            by_family.into_iter().map(u64::from).sum()
        };
        let mut rows = each(engine, |row| match self.stats_of(row.id()?) {
            Ok((stats, fast)) => {
                Some(AttachmentStats { flows: flows(row.id()?), ..stats_row(row.name(), &stats, &fast) })
            }
            Err(error) => {
                failed = Some(error);
                None
            }
        });
        // Devices that run the programs without an attachment: there should be none.
        let strangers = stats_row(unnamed(0), &self.enforcer.stats(0)?, &FastStats::default());
        rows.extend(Some(strangers).filter(|row| !row.dropped.is_empty()));
        failed.map_or(Ok(rows), Err)
    }

    /// Returns all attachments, for metrics.
    ///
    /// # Errors
    /// A map cannot be read.
    pub(super) fn measured(&self, engine: &Engine) -> Result<Vec<Measured>, EnforceError> {
        let mut failed = None;
        let rows = each(engine, |row| {
            let enforcement = self.enforcement(row);
            let pod = row.sandbox().pod.as_ref();
            let stats = row.id().map(|id| self.enforcer.stats(id)).transpose();
            let stats = stats.unwrap_or_else(|error| {
                failed = Some(error);
                None
            });
            let unenforced =
                self.short_of(row, &enforcement) && !self.enforcer.selecting(pod, row.plan).is_empty();
            Some(Measured {
                of: (row.attached.key.clone(), row.number),
                pod: pod.map(|pod| pod.name.clone()),
                network: row.plan.network.to_string(),
                ifname: row.plan.ifname.clone(),
                kind: row.plan.kind.clone(),
                host_interface: row.link().0.map(|host| host.name).or_else(|| row.parent()),
                level: enforcement.level.name(),
                unenforced,
                stats,
            })
        });
        failed.map_or(Ok(rows), Err)
    }

    /// Returns the counters of one attachment.
    ///
    /// # Errors
    /// The map cannot be read.
    fn counted(&self, id: u32) -> Result<bpf::Stats, EnforceError> {
        self.enforcer.stats(id)
    }

    /// Returns the counters of devices that run the programs without an attachment; there should be none.
    ///
    /// # Errors
    /// The map cannot be read.
    pub(super) fn strangers(&self) -> Result<bpf::Stats, EnforceError> {
        self.counted(0)
    }

    /// Numbers of policies.
    pub(super) fn policies_counted(&self) -> PoliciesCounted {
        let (programmed, rules) = self.enforcer.programmed();
        PoliciesCounted {
            policies: self.source.snapshot().policies.len(),
            programmed,
            rules,
            problems: self.enforcer.conditions_counted(),
        }
    }

    /// Returns how often programs were reattached.
    pub(super) fn put_back(&self) -> u64 {
        self.enforcer.put_back()
    }

    /// Whether policies are not enforced on an attachment, or not as far as required.
    fn short_of(&self, row: &Row<'_>, enforcement: &Enforcement) -> bool {
        match enforcement.level {
            Level::None | Level::Advisory => true,
            level => level < self.enforcer.least(row.plan),
        }
    }

    /// Returns the enforcement level of an attachment.
    fn enforcement(&self, row: &Row<'_>) -> Enforcement {
        let hook = hook_kind::of(row.plan, row.attached.outputs.of(row.number));
        let vantage = Vantage { hook: &hook, behind_card: is_behind_card(row.plan) };
        let mut found = self.enforcer.enforcement(row.id(), row.sandbox().pod.as_ref(), vantage);
        if let Some(laxity) = row.laxity() {
            found.why = if found.why.is_empty() { laxity } else { format!("{}; {laxity}", found.why) };
        }
        found
    }

    fn stats_of(&self, id: u32) -> Result<(bpf::Stats, FastStats), EnforceError> {
        Ok((self.enforcer.stats(id)?, self.enforcer.fast_paths().stats(id)?))
    }

    /// Number of attachments in each fast-path state; those on the fast path first, then by name.
    fn fast_path(&self, engine: &Engine) -> Vec<FastPathCount> {
        let mut counts: BTreeMap<(bool, String, String), u64> = BTreeMap::new();
        let standings = each(engine, |row| self.enforcer.fast_paths().status(row.id()?));
        for FastPath { state, detail } in standings.into_iter().map(fast_path) {
            *counts.entry((state != ON, state, detail)).or_default() += 1;
        }
        let count = |((_, state, detail), attachments)| FastPathCount {
            standing: FastPath { state, detail },
            attachments,
        };
        counts.into_iter().map(count).collect()
    }

    /// Returns the records of the packet path, with the attachments' names.
    pub(super) fn flows(&self, engine: &Engine, call: FlowsCall) -> Result<FlowsReport, EnforceError> {
        let batch = self.observer.from(call.from, FLOWS_AT_ONCE);
        let names: BTreeMap<u32, (AttachmentName, Vec<IpAddr>)> = each(engine, |row| {
            let addresses = row.result().ips.iter().map(|ip| ip.address.addr()).collect();
            Some((row.id()?, (row.name(), addresses)))
        })
        .into_iter()
        .collect();
        let mut numbers = Vec::new();
        let records = batch.events.iter().map(|(time_ms, event)| {
            let attachment = match event {
                Event::Packet(record) => record.attachment,
                Event::Ended(ended) => ended.entry.flow.attachment,
            };
            numbers.push(attachment);
            let known = names.get(&attachment).cloned();
            let (name, addresses) = known.unwrap_or_else(|| (unnamed(attachment), Vec::new()));
            match event {
                Event::Packet(record) => flow::describe(record, name, *time_ms),
                Event::Ended(ended) => flow::describe_ended(ended, name, &addresses, *time_ms),
            }
        });
        let mut records: Vec<FlowRecord> = records.collect();
        self.name(&mut records, &numbers);
        let strangers = (unnamed(0), Vec::new());
        let mut untold = Vec::new();
        for (id, (name, _)) in names.into_iter().chain([(0, strangers)]) {
            let stats = self.enforcer.stats(id)?;
            let (withheld, lost) = (stats.records_withheld, stats.records_lost);
            untold.extend((withheld + lost > 0).then_some(MissingRecords { name, withheld, lost }));
        }
        let (next, missed, untold_ends) = (batch.next, batch.missed, batch.untold);
        Ok(FlowsReport { records, next, missed, untold, untold_ends })
    }

    /// Adds to records the names of their ends and of the objects that decided; `attachments` are their
    /// numbers.
    fn name(&self, records: &mut [FlowRecord], attachments: &[u32]) {
        let recorded = |(record, attachment): (&FlowRecord, &u32)| Recorded {
            attachment: *attachment,
            source: record.source,
            destination: record.destination,
            policy: record.policy,
            rule: record.rule,
        };
        let recorded: Vec<Recorded> = records.iter().zip(attachments).map(recorded).collect();
        for (record, names) in records.iter_mut().zip(self.enforcer.names(&recorded)) {
            record.source_pod = names.source;
            record.destination_pod = names.destination;
            record.decided_by = names.decided_by;
        }
    }

    /// Returns the address pools, with the attachments that hold addresses.
    pub(super) fn pools(&self, engine: &Engine, intents: &IntentReader) -> Vec<Pool> {
        let names = each(engine, |row| {
            let container_id = row.attached.key.container_id.clone();
            Some((Owner { container_id, ifname: row.plan.ifname.clone() }, row.name()))
        });
        pools::report(engine, intents, &names.into_iter().collect())
    }

    /// The pods of the source that these labels select, sorted.
    ///
    /// # Errors
    /// The selector is invalid.
    pub(super) fn select(&self, selector: &str) -> Result<Vec<ObjectName>, QueryError> {
        let selector = label_query::parse(selector)?;
        let objects = self.source.snapshot();
        let selected = objects.pods.values().filter(|pod| selector.matches(&pod.labels));
        Ok(selected.map(|pod| pod.name.clone()).collect())
    }

    pub(super) fn policy_dump(&self, wanted: Option<&str>) -> Vec<Dump> {
        self.enforcer.dump(wanted).into_iter().map(Into::into).collect()
    }

    /// Returns every path that the flow can take.
    ///
    /// # Errors
    /// Code 3: a pod that is neither attached nor in any manifest.
    pub(super) fn explain(&self, question: Question) -> Result<Vec<Path>, Failure> {
        let question = question.into();
        match self.enforcer.unknown_pods(&question).as_slice() {
            [] => Ok(self.enforcer.explain(&question).into_iter().map(Into::into).collect()),
            [pod, ..] => Err(Failure {
                code: code::UNKNOWN_CONTAINER,
                message: format!(
                    "pod {pod} is not attached on this node and is in no manifest; netattachctl attachments lists what is \
                     attached"
                ),
                not_there: true,
            }),
        }
    }

    pub(super) fn policy(&self, engine: &Engine) -> Result<PolicyReport, EnforceError> {
        let in_force = self.enforcer.in_force();
        let mut unenforced = Vec::new();
        let attachments = each(engine, |row| {
            let id = row.id();
            let enforcement = self.enforcement(row);
            let force = in_force.iter().find(|force| Some(force.id) == id);
            let force = force.filter(|_| enforcement.level != Level::None);
            let selecting = || self.enforcer.selecting(row.sandbox().pod.as_ref(), row.plan);
            let selected_by = force.map_or_else(selecting, |force| force.policies.clone());
            if self.short_of(row, &enforcement) {
                unenforced.extend(selected_by.iter().map(|policy| row.unenforced(policy, &enforcement)));
            }
            Some(AttachmentPolicy {
                name: row.name(),
                ingress: force.and_then(|force| force.ingress),
                egress: force.and_then(|force| force.egress),
                enforcement: enforcement.level.into(),
                selected_by: selected_by.iter().map(ToString::to_string).collect(),
            })
        });
        let conditions = self
            .enforcer
            .conditions()
            .into_iter()
            .map(|condition| Condition { object: condition.object.to_string(), problem: condition.message })
            .chain(unenforced);
        let rules = self.enforcer.rule_flows()?.into_iter().map(|rule| RuleFlows {
            policy: rule.policy,
            rule: rule.rule,
            text: rule.text,
            flows: rule.flows,
        });
        Ok(PolicyReport { attachments, rules: rules.collect(), conditions: conditions.collect() })
    }

    /// Returns problems with objects, and with the files that describe networks.
    pub(super) fn of_objects(&self) -> Vec<Condition> {
        let objects = self.source.snapshot();
        let problems = objects.problems.iter().map(|problem| Condition {
            object: problem.origin.to_string(),
            problem: match problem.origin {
                Origin::File { document: Some(number), .. } => {
                    format!("document {number}: {}", problem.message)
                }
                _ => problem.message.clone(),
            },
        });
        let mut rows: Vec<Condition> = problems.collect();
        // Other problems of an unreadable object concern an earlier version of it, or its replacement.
        let unread: BTreeSet<&str> = rows.iter().map(|row| row.object.as_str()).collect();
        let mut others = self.troubles.rows();
        others.retain(|row| !unread.contains(row.object.as_str()));
        rows.extend(self.health.unusable_files());
        rows.extend(others);
        rows.extend(self.unjudged());
        rows
    }

    /// Returns the conditions that an ADD depends on.
    pub(super) fn ready(&self) -> Vec<Readiness> {
        self.with_source(self.health.conditions())
    }

    /// As [`Reporter::ready`], without triggering new checks.
    pub(super) fn known_ready(&self) -> Vec<Readiness> {
        self.with_source(self.health.known_conditions())
    }

    fn with_source(&self, conditions: Vec<Readiness>) -> Vec<Readiness> {
        let objects = self.source.snapshot();
        let mut found = vec![
            counted(objects.pods.len(), "pod", "pods"),
            counted(objects.definitions.len(), "network", "networks"),
            counted(objects.policies.len(), "policy", "policies"),
        ];
        let others = objects.remote_pods.len();
        found.extend(
            (others > 0)
                .then(|| counted(others, "attached pod of the cluster", "attached pods of the cluster")),
        );
        let synced = self.source.synced();
        let source = Readiness {
            condition: "source".into(),
            met: synced.is_ok(),
            detail: synced.err().map_or_else(|| found.join(", "), |error| error.to_string()),
        };
        let server = self.source.reachable().map(|reached| Readiness {
            condition: "API server".into(),
            met: reached.is_ok(),
            detail: reached.err().unwrap_or_else(|| "changes are followed".into()),
        });
        let mut ready: Vec<Readiness> = std::iter::once(source).chain(server).collect();
        ready.extend(conditions);
        ready.push(sockets(&self.socket));
        ready
    }

    pub(super) fn status(&self, engine: &Engine, troubles: Vec<Condition>) -> Status {
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ready: self.ready(),
            source: self.of_objects(),
            troubles,
            kernel: Kernel { release: kernel_release(), features: features() },
            attach_mode: self.enforcer.attach_modes().attachments.name().into(),
            attach_mode_others: self.enforcer.attach_modes().others.name().into(),
            programs_put_back: self.enforcer.put_back(),
            // Not known here.
            collected: 0,
            memory_bytes: resident_memory(),
            attachments: each(engine, |_| Some(())).len() as u64,
            fast_path_mode: self.enforcer.fast_paths().mode().name().into(),
            fast_path: self.fast_path(engine),
            uplinks: self.enforcer.fast_paths().uplinks().into_iter().map(uplink).collect(),
            flows: self.flow_table(),
            policy_change: self.enforcer.last_change().map(|change| {
                let us = |it: Duration| u64::try_from(it.as_micros()).unwrap_or(u64::MAX);
                PolicyChange {
                    read_us: us(change.read),
                    compile_us: us(change.compiled),
                    write_us: us(change.written),
                    switch_us: us(change.switched),
                    policies: change.policies as u64,
                    attachments: change.attachments as u64,
                }
            }),
        }
    }

    /// Returns the problem that the node's packet filter does not run the agent's rules.
    fn unjudged(&self) -> Option<Condition> {
        let why = self.enforcer.routed_unjudged()?;
        Some(Condition {
            object: "packet filter".into(),
            problem: format!(
                "the table netattach cannot be put back, so pods that are isolated for egress reach neither Services nor their node: {why}"
            ),
        })
    }

    /// Returns the use of the flow table.
    pub(super) fn flow_table(&self) -> Vec<FlowTableUse> {
        let flows = self.enforcer.flows();
        let census = flows.census().unwrap_or_default();
        let [v4, v6] = flows.capacity();
        [("IPv4", census.v4, v4), ("IPv6", census.v6, v6)]
            .map(|(family, entries, capacity)| FlowTableUse {
                family: family.to_owned(),
                entries,
                capacity: capacity.into(),
            })
            .into()
    }
}

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reporter").finish_non_exhaustive()
    }
}

impl Row<'_> {
    fn name(&self) -> AttachmentName {
        let pod = self.sandbox().pod.as_ref();
        AttachmentName {
            id: self.id(),
            pod: pod.map(|pod| pod.name.clone()),
            network: self.plan.network.to_string(),
            ifname: self.plan.ifname.clone(),
        }
    }

    /// Returns the problem that a policy is not enforced on the attachment, or not as far as required.
    fn unenforced(&self, policy: &PolicyName, enforcement: &Enforcement) -> Condition {
        let AttachmentName { pod, network, ifname, .. } = self.name();
        let pod = pod.map_or_else(|| self.attached.key.container_id.clone(), |pod| pod.to_string());
        Condition {
            object: Subject::Policy(policy.clone()).to_string(),
            problem: match enforcement.level {
                Level::None => format!(
                    "selects {ifname} of {pod} on {network}, where nothing is enforced ({}): it has no effect there; {WAY_OUT}",
                    enforcement.why
                ),
                _ => format!("selects {ifname} of {pod} on {network}, where enforcement is {enforcement}"),
            },
        }
    }

    /// Returns which traffic its programs let pass although it is not the attachment's own, as text.
    fn laxity(&self) -> Option<String> {
        let protect = self.plan.protect()?;
        let own = || {
            let own = result::own(&self.sandbox().netns, self.plan, self.attached.outputs.of(self.number));
            own.unwrap_or_default()
        };
        // If netattach is chained, its checks are the requested function; otherwise a policy is.
        let is_lax =
            protect.needed && protect.check_addresses && result::is_unaddressed(protect, self.plan, &own());
        let any = is_lax.then(|| ANY_ADDRESS.to_owned());
        let lax: Vec<String> = any.into_iter().chain(protect.laxity()).collect();
        (!lax.is_empty()).then(|| lax.join("; "))
    }

    fn sandbox(&self) -> &Sandbox {
        &self.attached.plan.sandbox
    }

    /// Its number in the dataplane, if it has one.
    fn id(&self) -> Option<u32> {
        self.plan.number()
    }

    fn kind(&self) -> Kind {
        let kind = self.plan.kind.clone();
        match self.plan.made_by() {
            MadeBy::Link(_) | MadeBy::Device(_) | MadeBy::Kernel => Kind::Native(kind),
            MadeBy::Plugin => Kind::Exec(kind),
        }
    }

    fn link(&self) -> (Option<Interface>, Option<Interface>) {
        let ends = result::link(self.attached.outputs.of(self.number));
        ends.map_or((None, None), |(host, pod)| (host, Some(pod)))
    }

    /// Returns the parent of its link, if the configuration names one.
    fn parent(&self) -> Option<String> {
        self.plan.link()?.parent().map(str::to_owned)
    }

    fn result(&self) -> crate::cni::CniResult {
        // A result that was readable at ADD is still readable; without a result there is nothing to show.
        result::result(self.sandbox(), self.plan, self.attached.outputs.of(self.number)).unwrap_or_default()
    }
}

/// Returns one row for each attachment for which `make` returns one, sorted by pod and then in the pod's
/// order.
fn each<T>(engine: &Engine, mut make: impl FnMut(&Row<'_>) -> Option<T>) -> Vec<T> {
    let mut sandboxes = engine.registry().all();
    sandboxes.sort_by(|a, b| (&a.plan.sandbox.pod, &a.key).cmp(&(&b.plan.sandbox.pod, &b.key)));
    let mut rows = Vec::new();
    for attached in &sandboxes {
        for (number, plan) in attached.plan.attachments.iter().enumerate() {
            // Attachment numbers fit: see `Plan::steps`.
            rows.extend(make(&Row { attached, number: number as u16, plan }));
        }
    }
    rows
}

/// Most records in one answer.
const FLOWS_AT_ONCE: usize = 1000;

/// The state of an attachment on the fast path.
const ON: &str = "on";

fn uplink((found, xdp): (uplink::Uplink, Option<Result<XdpMode, String>>)) -> Uplink {
    let leads_to = match found.segment {
        Segment::Bridge(_) => "bridge",
        Segment::Routed => "routes",
    };
    let standing = fast_path(found.status.map_or_else(fast_path::Status::Off, |()| fast_path::Status::On));
    let xdp = match xdp {
        None => String::new(),
        Some(Ok(XdpMode::Native)) => "native".into(),
        Some(Ok(XdpMode::Generic)) => "generic".into(),
        Some(Err(error)) => error,
    };
    Uplink { device: found.name, leads_to: leads_to.into(), standing, xdp }
}

fn fast_path(status: fast_path::Status) -> FastPath {
    match status {
        fast_path::Status::On => FastPath { state: ON.into(), detail: String::new() },
        fast_path::Status::Undecided => {
            FastPath { state: "undecided".into(), detail: "the node has not been checked yet".into() }
        }
        fast_path::Status::Off(reason) => {
            FastPath { state: reason.name().into(), detail: reason.to_string() }
        }
    }
}

fn stats_row(name: AttachmentName, stats: &bpf::Stats, fast: &FastStats) -> AttachmentStats {
    AttachmentStats {
        name,
        received: traffic(stats.to_pod),
        sent: traffic(stats.from_pod),
        dropped: stats.dropped().map(|(reason, packets)| (reason.name().to_owned(), packets)).collect(),
        fast: traffic(fast.received),
        fast_sent: traffic(fast.sent),
        left_to_stack: fast.declined().map(|(reason, packets)| (reason.name().to_owned(), packets)).collect(),
        records_withheld: stats.records_withheld,
        records_lost: stats.records_lost,
        flows: 0,
        new_flows: stats.new_flows,
        flows_displaced: stats.flows_displaced,
    }
}

/// Returns the name of an attachment of which only the number is known; 0 stands for devices without an
/// attachment.
fn unnamed(id: u32) -> AttachmentName {
    AttachmentName { id: Some(id), pod: None, network: "-".to_owned(), ifname: "-".to_owned() }
}

fn traffic(counted: crate::bpf::Traffic) -> Traffic {
    Traffic { packets: counted.packets, bytes: counted.bytes }
}

/// `1 policy`, `2 policies`.
fn counted(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// The kernel's features, probed now.
pub fn features() -> Vec<Feature> {
    let shown = |name: &str, absence: &str, present: Result<bool, String>| Feature {
        name: name.to_owned(),
        detail: match &present {
            Ok(true) => String::new(),
            Ok(false) => absence.to_owned(),
            Err(problem) => format!("cannot be determined: {problem}"),
        },
        present: present == Ok(true),
    };
    let clsact = Handle::open()
        .map_err(|error| Chain(&error).to_string())
        .and_then(|mut node| node.has_clsact().map_err(|error| Chain(&error).to_string()));
    let tbf = Handle::open()
        .map_err(|error| Chain(&error).to_string())
        .and_then(|mut node| node.has_pacing().map_err(|error| Chain(&error).to_string()));
    let mut features = vec![
        shown("clsact", "tcx is used if it is available; since 4.5", clsact),
        shown("tbf", "traffic above a bandwidth limit is dropped, not delayed", tbf),
    ];
    features.extend(bpf::probe::features(LOOPBACK).into_iter().map(|feature| {
        shown(feature.name, feature.absence, feature.present.map_err(|error| error.to_string()))
    }));
    features
}

fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Resident set of this process in bytes; 0 if it cannot be read.
fn resident_memory() -> u64 {
    Resident::now().map_or(0, |resident| resident.all as u64)
}

/// Whether the runtime finds the agent: another process may have removed the socket's file, which the agent
/// then creates again.
fn sockets(socket: &std::path::Path) -> Readiness {
    let path = socket.display();
    let found = std::fs::symlink_metadata(socket);
    let found = found.map(|found| found.file_type().is_socket());
    let problem = match found {
        Ok(true) => None,
        Ok(false) => Some(format!("{path} is no socket")),
        Err(error) => Some(format!("{path}: {error}")),
    };
    let met = problem.is_none();
    Readiness { condition: "sockets".into(), met, detail: problem.unwrap_or_else(|| path.to_string()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use crate::agent::report::*;

    #[test]
    fn the_runtime_finds_a_socket_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netattach.sock");
        let shown = path.display();
        let found = || {
            let Readiness { condition, met, detail } = sockets(&path);
            assert_eq!(condition, "sockets");
            (met, detail)
        };
        assert_eq!(found(), (false, format!("{shown}: No such file or directory (os error 2)")));
        std::fs::write(&path, "").unwrap();
        assert_eq!(found(), (false, format!("{shown} is no socket")));
        std::fs::remove_file(&path).unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        assert_eq!(found(), (true, shown.to_string()));
    }
}
