//! The agent's answers about itself, from memory and from the maps.
//!
//! | module | what it does |
//! |---|---|
//! | `attachments` | attachments: interfaces, counters, and how policies are enforced on them |
//! | `policies` | policies, and what they decide |
//! | `node` | features of the kernel, the fast path and its uplinks, memory, the socket |
//! | `pools` | networks, and how full address pools are |
//! | `conditions` | the problems of the whole agent |
//! | `flow` | records of packets as text |

mod attachments;
mod conditions;
pub(super) mod flow;
mod node;
mod policies;
pub(super) mod pools;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub(super) use self::attachments::Measured;
use self::attachments::{each, unnamed};
pub use self::node::features;
use self::node::{kernel_release, resident_memory, sockets, uplink};
use super::health::Health;
use crate::agent::health::trouble::Troubles;
use crate::attach::{Engine, IntentReader};
use crate::enforce::enforcer::Enforcer;
use crate::enforce::error::EnforceError;
use crate::ipam::Owner;
use crate::objects::Origin;
use crate::observe::{Event, Observer};
use crate::policy::naming::Recorded;
use crate::rpc::message::pools::Pool;
use crate::rpc::message::{
    AttachmentName, Condition, FlowRecord, FlowTableUse, FlowsCall, FlowsReport, Kernel, MissingRecords,
    PolicyChange, Readiness, Status,
};
use crate::source::Source;

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

    /// Returns how often programs were reattached.
    pub(super) fn put_back(&self) -> u64 {
        self.enforcer.put_back()
    }

    /// Has the records of the packet path read, for [`Reporter::flows`].
    pub(super) async fn refresh_flows(&self) {
        self.observer.refresh().await;
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

/// Most records in one answer.
const FLOWS_AT_ONCE: usize = 1000;

/// `1 policy`, `2 policies`.
fn counted(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}
