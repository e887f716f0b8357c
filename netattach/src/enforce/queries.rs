//! Read-only queries for the rest of the agent: policies, counters, and why traffic passes or does not.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::admission;
use super::enforcer::Enforcer;
use super::error::EnforceError;
use super::level::{Vantage, lower_of, past_by_ifb};
use super::policies::Change;
use super::state::State;
use crate::bpf::{self, PacketLog, Records};
use crate::hooks::AttachModes;
use crate::objects::policy::PolicyName;
use crate::objects::{ObjectName, Objects};
use crate::plan::{AttachmentPlan, PodRef};
use crate::policy::conditions::Counts;
use crate::policy::desired::{Condition, Desired};
use crate::policy::diff::{PolicyId, Programmed};
use crate::policy::dump::{Dump, dump};
use crate::policy::explain::{End, Path, Question, View, explain};
use crate::policy::index::Endpoint;
use crate::policy::level::{Enforcement, Level};
use crate::policy::lookup::{CompiledPolicy, RuleFlows, RuleId};
use crate::policy::naming::{Names, Recorded, names};

/// The policies of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    /// Number of the attachment.
    pub id: u32,
    /// Policy number for ingress; `None`: not isolated.
    pub ingress: Option<PolicyId>,
    /// Policy number for egress; `None`: not isolated.
    pub egress: Option<PolicyId>,
    /// The policies that select it.
    pub policies: Vec<PolicyName>,
}

impl Enforcer {
    /// Counters of an attachment.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn stats(&self, id: u32) -> Result<bpf::Stats, EnforceError> {
        Ok(self.dataplane().stats(id)?)
    }

    /// The records of packets that the programs write.
    ///
    /// # Errors
    /// The map could not be opened.
    pub fn records(&self) -> Result<Records, EnforceError> {
        Ok(self.dataplane().records()?)
    }

    /// Opens the lines that the programs write about packets; `None`: the programs write none.
    ///
    /// # Errors
    /// The object was built by another version.
    pub fn packet_log(
        &self,
        say: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Option<PacketLog>, EnforceError> {
        Ok(self.dataplane().packet_log(say)?)
    }

    /// How many flows each rule in force has allowed.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn rule_flows(&self) -> Result<Vec<RuleFlows>, EnforceError> {
        let policies = self.lock().maps().programmed().policies.clone();
        Ok(rule_flows(policies, &self.dataplane().policies().rule_flows()?))
    }

    /// How programs are attached.
    pub fn attach_modes(&self) -> AttachModes {
        self.programs().modes()
    }

    /// How often programs were reattached since the agent's start.
    pub fn put_back(&self) -> u64 {
        self.programs().put_back()
    }

    /// Why routed packets are not judged behind the node's address translation although they should be.
    pub fn routed_unjudged(&self) -> Option<String> {
        self.routed().missing()
    }

    /// Whether an attachment's programs are deferred.
    pub fn is_waiting(&self, id: u32) -> bool {
        self.lock().deferred().waits(id)
    }

    /// The policies of each attachment.
    pub fn in_force(&self) -> Vec<InForce> {
        let state = self.lock();
        in_force(state.maps().programmed(), state.policies().desired())
    }

    /// Number of compiled policies in the maps, and of their rules.
    pub fn programmed(&self) -> (usize, usize) {
        let state = self.lock();
        let policies = &state.maps().programmed().policies;
        (policies.len(), policies.values().map(|policy| policy.rules.len()).sum())
    }

    /// The durations of the last change that affected an attachment; `None` before the first.
    pub fn last_change(&self) -> Option<Change> {
        self.lock().policies().last_change()
    }

    /// Returns the last few changes that affected an attachment since the previous call.
    pub fn take_changes(&self) -> Vec<Change> {
        self.lock().take_changes()
    }

    /// The policies that select an attachment.
    pub fn selecting(&self, pod: Option<&PodRef>, attachment: &AttachmentPlan) -> Vec<PolicyName> {
        let sources = self.sources();
        admission::selected(&sources.source.snapshot(), sources.options, pod, attachment)
    }

    /// The lowest accepted level for an attachment that a policy selects.
    pub fn least(&self, attachment: &AttachmentPlan) -> Level {
        let objects = self.sources().source.snapshot();
        let requirement = admission::requirement(&objects, attachment, self.requirement());
        // An invalid annotation has failed the ADD, or was written since.
        requirement.map_or(Level::None, |(requirement, _)| requirement.least())
    }

    /// Returns the enforcement level for an attachment of that pod. With the attachment's number, the level also
    /// reflects what the last checks have found about its programs.
    pub fn enforcement(&self, id: Option<u32>, pod: Option<&PodRef>, vantage: Vantage<'_>) -> Enforcement {
        let by_place =
            self.enforcement_in(&self.sources().source.snapshot(), pod.map(|pod| &pod.name), vantage);
        lower_of(by_place, id.and_then(|id| self.as_found(&self.lock(), id)))
    }

    /// Returns the level of an attachment according to the last checks of its programs and of its pod; `None`: they
    /// found no problem.
    fn as_found(&self, state: &State, id: u32) -> Option<Enforcement> {
        let is_contested = || self.programs().contested(state.roster().host_index(id)?);
        let of_programs = state.roster().shortfall(id).cloned().or_else(is_contested);
        let by_ifb = state.roster().past_by_ifb(id).map(past_by_ifb);
        let found = [state.roster().passed_by(id).cloned(), of_programs, by_ifb];
        found.into_iter().flatten().reduce(|lowest, found| lower_of(lowest, Some(found)))
    }

    fn enforcement_in(
        &self,
        objects: &Objects,
        pod: Option<&ObjectName>,
        vantage: Vantage<'_>,
    ) -> Enforcement {
        let pod = pod.and_then(|pod| objects.pods.get(pod));
        self.programs().enforcement(pod.map(AsRef::as_ref), vantage)
    }

    /// Returns problems of policies, for their authors: the first of each namespace, and how many more it has.
    pub fn conditions(&self) -> Vec<Condition> {
        let (found, over_capacity) = self.lock().policies().conditions();
        let found = found.listed();
        found.iter().map(|condition| (**condition).clone()).chain(over_capacity).collect()
    }

    /// Returns the numbers of policies with problems that concern attachments of this node.
    pub fn conditions_counted(&self) -> Counts {
        let state = self.lock();
        state.policies().conditions_counted(state.roster().endpoints())
    }

    /// Why traffic passes or does not.
    pub fn explain(&self, question: &Question) -> Vec<Path> {
        let routed = self.routed().leads();
        let state = self.lock();
        let endpoints: Vec<Endpoint> = state.roster().endpoints().values().map(|it| (**it).clone()).collect();
        let sources = self.sources();
        let objects = sources.source.snapshot();
        let placed = state.roster().placed().map(|(endpoint, point)| {
            let (hook, behind_card) = (point.vantage(), state.roster().is_behind_card(endpoint.id));
            let vantage = Vantage { hook: &hook, behind_card };
            let by_place = self.enforcement_in(&objects, Some(&endpoint.pod), vantage);
            (endpoint.id, lower_of(by_place, self.as_found(&state, endpoint.id)))
        });
        let limited = placed.filter(|(_, enforcement)| enforcement.level != Level::Full).collect();
        let view = View {
            objects: &objects,
            limited: &limited,
            endpoints: &endpoints,
            programmed: state.maps().programmed(),
            desired: state.policies().desired(),
            node: self.defaults().rules(),
            behind_translation: sources.behind_translation,
            routed: &routed,
            restrictions: &sources.options.restrictions,
        };
        explain(&view, question)
    }

    /// Returns the pods of a question that are neither attached to this node nor in the source, which may have them
    /// as pods of other nodes.
    pub fn unknown_pods(&self, question: &Question) -> Vec<ObjectName> {
        let pods = [&question.from, &question.to].into_iter().filter_map(|end| match end {
            End::Pod(name) => Some(name),
            End::Address(_) => None,
        });
        let (state, objects) = (self.lock(), self.sources().source.snapshot());
        let is_known =
            |name: &ObjectName| objects.pods.contains_key(name) || objects.remote_pods.get(name).is_some();
        pods.filter(|name| !state.roster().has_pod(name) && !is_known(name)).cloned().collect()
    }

    /// Returns the names for each record, according to the current objects and policies.
    pub fn names(&self, records: &[Recorded]) -> Vec<Names> {
        let objects = self.sources().source.snapshot();
        let state = self.lock();
        let (programmed, desired) = (state.maps().programmed(), state.policies().desired());
        names(&objects, state.roster().endpoints(), programmed, desired, records)
    }

    /// Compiled policies as they are in the maps; see [`dump`].
    pub fn dump(&self, wanted: Option<&str>) -> Vec<Dump> {
        let state = self.lock();
        dump(state.maps().programmed(), state.policies().desired(), wanted)
    }
}

fn in_force(programmed: &Programmed, desired: &Desired) -> Vec<InForce> {
    let some = |id: PolicyId| Some(id).filter(|id| *id != 0);
    let policies = |id| desired.endpoints.get(id).map(|policy| policy.policies.clone()).unwrap_or_default();
    let each = programmed.endpoints.iter().map(|(id, assigned)| InForce {
        id: *id,
        ingress: some(assigned.ingress),
        egress: some(assigned.egress),
        policies: policies(id),
    });
    each.collect()
}

/// Returns each rule with its count from `counted`.
fn rule_flows(
    policies: BTreeMap<PolicyId, Arc<CompiledPolicy>>,
    counted: &BTreeMap<PolicyId, BTreeMap<RuleId, u64>>,
) -> Vec<RuleFlows> {
    let mut rows = Vec::new();
    for (policy, compiled) in policies {
        let flows_of = |rule| counted.get(&policy).and_then(|rules| rules.get(rule)).copied().unwrap_or(0);
        rows.extend(compiled.rules.iter().map(|(rule, text)| RuleFlows {
            policy,
            rule: *rule,
            text: text.to_string(),
            flows: flows_of(rule),
        }));
    }
    rows
}
