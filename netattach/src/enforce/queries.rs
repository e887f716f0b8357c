//! What is in force, as the rest of the agent shows it: policies, counters, and why traffic passes or does not.

use super::admission;
use super::enforcer::Enforcer;
use super::error::EnforceError;
use super::policies::Change;
use crate::bpf::{self, FlowTable, PolicyIds, Records};
use crate::hooks::AttachModes;
use crate::objects::ObjectName;
use crate::objects::policy::PolicyName;
use crate::plan::{AttachmentPlan, PodRef};
use crate::policy::desired::Condition;
use crate::policy::diff::PolicyId;
use crate::policy::dump::{Dump, dump};
use crate::policy::explain::{End, Path, Question, View, explain};
use crate::policy::index::Endpoint;
use crate::policy::level::Level;
use crate::policy::lookup::RuleFlows;

/// One row of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    /// Number of the attachment.
    pub id: u32,
    /// Policy number for what comes in; `None`: not isolated.
    pub ingress: Option<PolicyId>,
    /// Policy number for what goes out; `None`: not isolated.
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
        Ok(self.dataplane.stats(id)?)
    }

    /// What the programs tell about packets.
    ///
    /// # Errors
    /// The map could not be opened.
    pub fn records(&self) -> Result<Records, EnforceError> {
        Ok(self.dataplane.records()?)
    }

    /// The flow table.
    pub fn flows(&self) -> &FlowTable {
        &self.flows
    }

    /// How many flows each rule in force has allowed.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn rule_flows(&self) -> Result<Vec<RuleFlows>, EnforceError> {
        let policies = self.lock().programmed.policies.clone();
        let counted = self.dataplane.policies().rule_flows()?;
        let mut rows = Vec::new();
        for (policy, compiled) in policies {
            let flows_of =
                |rule| counted.get(&policy).and_then(|rules| rules.get(rule)).copied().unwrap_or(0);
            rows.extend(compiled.rules.iter().map(|(rule, text)| RuleFlows {
                policy,
                rule: *rule,
                text: text.to_string(),
                flows: flows_of(rule),
            }));
        }
        Ok(rows)
    }

    /// How programs are attached.
    pub fn attach_modes(&self) -> AttachModes {
        self.modes
    }

    /// What is in force.
    pub fn in_force(&self) -> Vec<InForce> {
        let state = self.lock();
        let some = |id: PolicyId| Some(id).filter(|id| *id != 0);
        let row = |(id, assignment): (&u32, &PolicyIds)| InForce {
            id: *id,
            ingress: some(assignment.ingress),
            egress: some(assignment.egress),
            policies: state
                .desired
                .endpoints
                .get(id)
                .map(|policy| policy.policies.clone())
                .unwrap_or_default(),
        };
        state.programmed.endpoints.iter().map(row).collect()
    }

    /// What the last change took that made a difference to any attachment; `None` before the first.
    pub fn last_change(&self) -> Option<Change> {
        self.lock().last_change
    }

    /// The policies that select an attachment.
    pub fn selecting(&self, pod: Option<&PodRef>, attachment: &AttachmentPlan) -> Vec<PolicyName> {
        admission::selected(&self.source.snapshot(), self.options.network_policy, pod, attachment)
    }

    /// The lowest level that is accepted where a policy selects an attachment.
    pub fn least(&self, attachment: &AttachmentPlan) -> Level {
        let demand = admission::demand(&self.source.snapshot(), attachment, self.demand);
        // A word that there is not has failed the ADD, or was written since.
        demand.map_or(Level::None, |(demand, _)| demand.least())
    }

    /// What authors of policies should know.
    pub fn conditions(&self) -> Vec<Condition> {
        let state = self.lock();
        state.desired.conditions.iter().chain(&state.over_capacity).cloned().collect()
    }

    /// Why traffic passes or does not.
    pub fn explain(&self, question: &Question) -> Vec<Path> {
        let state = self.lock();
        let endpoints: Vec<Endpoint> = state.endpoints.values().cloned().collect();
        let objects = self.source.snapshot();
        let limited = self.limited(&objects, &state).into_iter().collect();
        let view = View {
            objects: &objects,
            limited: &limited,
            endpoints: &endpoints,
            programmed: &state.programmed,
            desired: &state.desired,
            node: self.passage.rules(),
            behind_translation: self.routed.stands(),
        };
        explain(&view, question)
    }

    /// The pods of a question that nobody knows: neither attachments of this node nor objects of the source.
    pub fn unknown_pods(&self, question: &Question) -> Vec<ObjectName> {
        let pods = [&question.from, &question.to].into_iter().filter_map(|end| match end {
            End::Pod(name) => Some(name),
            End::Address(_) => None,
        });
        let (state, objects) = (self.lock(), self.source.snapshot());
        let is_attached = |name: &ObjectName| state.endpoints.values().any(|endpoint| endpoint.pod == *name);
        pods.filter(|name| !is_attached(name) && !objects.pods.contains_key(name)).cloned().collect()
    }

    /// Compiled policies as they are in the maps; see [`dump`].
    pub fn dump(&self, wanted: Option<&str>) -> Vec<Dump> {
        let state = self.lock();
        dump(&state.programmed, &state.desired, wanted)
    }
}
