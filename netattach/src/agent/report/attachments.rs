//! What the agent tells of attachments: their interfaces, their counters, and how policies are enforced on them.

use super::Reporter;
use super::node::fast_path;
use crate::attach::{Attached, Engine};
use crate::bpf;
use crate::bpf::FastStats;
use crate::enforce::attachment::is_behind_card;
use crate::enforce::error::EnforceError;
use crate::enforce::level::Vantage;
use crate::journal::JournalKey;
use crate::objects::ObjectName;
use crate::objects::policy::PolicyName;
use crate::plan::{AttachmentPlan, Sandbox, hook_kind, result};
use crate::policy::desired::Subject;
use crate::policy::level::{Enforcement, Level};
use crate::rpc::message::{Attachment, AttachmentName, AttachmentStats, Condition, Kind, State, Traffic};
use crate::step::{Interface, MadeBy};

/// The remedy if a policy has no effect; the reason precedes it.
const WAY_OUT: &str = "change that, or take a network of another kind (docs/limits.md), and recreate the pod";

/// The text for an interface behind which netattach is chained, and whose addresses are not known.
const ANY_ADDRESS: &str = "the pod may send from any IP address: neither the result of its plugins nor the kernel has one of the interface, and allowedAddresses names none";

/// An attachment, for metrics.
#[derive(Debug)]
pub(in crate::agent) struct Measured {
    /// The record of its sandbox, and its index there.
    pub(in crate::agent) of: (JournalKey, u16),
    pub(in crate::agent) pod: Option<ObjectName>,
    pub(in crate::agent) network: String,
    pub(in crate::agent) ifname: String,
    pub(in crate::agent) kind: String,
    /// The end of its link on the node, or its parent.
    pub(in crate::agent) host_interface: Option<String>,
    /// The enforcement level of policies.
    pub(in crate::agent) level: &'static str,
    /// Whether a policy selects it that is not enforced, or not as far as required.
    pub(in crate::agent) unenforced: bool,
    /// The counters of its programs, if it has any.
    pub(in crate::agent) stats: Option<bpf::Stats>,
}

impl Reporter {
    pub(in crate::agent) fn attachments(&self, engine: &Engine) -> Vec<Attachment> {
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

    pub(in crate::agent) fn stats(&self, engine: &Engine) -> Result<Vec<AttachmentStats>, EnforceError> {
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
    pub(in crate::agent) fn measured(&self, engine: &Engine) -> Result<Vec<Measured>, EnforceError> {
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
    pub(in crate::agent) fn strangers(&self) -> Result<bpf::Stats, EnforceError> {
        self.counted(0)
    }

    /// Whether policies are not enforced on an attachment, or not as far as required.
    pub(super) fn short_of(&self, row: &Row<'_>, enforcement: &Enforcement) -> bool {
        match enforcement.level {
            Level::None | Level::Advisory => true,
            level => level < self.enforcer.least(row.plan),
        }
    }

    /// Returns the enforcement level of an attachment.
    pub(super) fn enforcement(&self, row: &Row<'_>) -> Enforcement {
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
}

/// One attachment of one sandbox.
pub(super) struct Row<'a> {
    pub(super) attached: &'a Attached,
    pub(super) number: u16,
    pub(super) plan: &'a AttachmentPlan,
}

impl Row<'_> {
    pub(super) fn name(&self) -> AttachmentName {
        let pod = self.sandbox().pod.as_ref();
        AttachmentName {
            id: self.id(),
            pod: pod.map(|pod| pod.name.clone()),
            network: self.plan.network.to_string(),
            ifname: self.plan.ifname.clone(),
        }
    }

    /// Returns the problem that a policy is not enforced on the attachment, or not as far as required.
    pub(super) fn unenforced(&self, policy: &PolicyName, enforcement: &Enforcement) -> Condition {
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
    pub(super) fn laxity(&self) -> Option<String> {
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

    pub(super) fn sandbox(&self) -> &Sandbox {
        &self.attached.plan.sandbox
    }

    /// Its number in the dataplane, if it has one.
    pub(super) fn id(&self) -> Option<u32> {
        self.plan.number()
    }

    pub(super) fn kind(&self) -> Kind {
        let kind = self.plan.kind.clone();
        match self.plan.made_by() {
            MadeBy::Link(_) | MadeBy::Device(_) | MadeBy::Kernel => Kind::Native(kind),
            MadeBy::Plugin => Kind::Exec(kind),
        }
    }

    pub(super) fn link(&self) -> (Option<Interface>, Option<Interface>) {
        let ends = result::link(self.attached.outputs.of(self.number));
        ends.map_or((None, None), |(host, pod)| (host, Some(pod)))
    }

    /// Returns the parent of its link, if the configuration names one.
    pub(super) fn parent(&self) -> Option<String> {
        self.plan.link()?.parent().map(str::to_owned)
    }

    pub(super) fn result(&self) -> crate::cni::CniResult {
        // A result that was readable at ADD is still readable; without a result there is nothing to show.
        result::result(self.sandbox(), self.plan, self.attached.outputs.of(self.number)).unwrap_or_default()
    }
}

/// Returns one row for each attachment for which `make` returns one, sorted by pod and then in the pod's
/// order.
pub(super) fn each<T>(engine: &Engine, mut make: impl FnMut(&Row<'_>) -> Option<T>) -> Vec<T> {
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
pub(super) fn unnamed(id: u32) -> AttachmentName {
    AttachmentName { id: Some(id), pod: None, network: "-".to_owned(), ifname: "-".to_owned() }
}

fn traffic(counted: crate::bpf::Traffic) -> Traffic {
    Traffic { packets: counted.packets, bytes: counted.bytes }
}
