//! What the agent tells of policies.

use super::Reporter;
use super::attachments::each;
use crate::attach::Engine;
use crate::cni::code;
use crate::enforce::error::EnforceError;
use crate::objects::label_query::QueryError;
use crate::objects::{ObjectName, label_query};
use crate::policy::conditions::Counts;
use crate::policy::level::Level;
use crate::rpc::message::{
    AttachmentPolicy, Condition, Dump, Failure, Path, PolicyReport, Question, RuleFlows,
};

/// Numbers of policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::agent) struct PoliciesCounted {
    /// Policies of the source.
    pub(in crate::agent) policies: usize,
    /// Compiled policies in the maps.
    pub(in crate::agent) programmed: usize,
    /// Their rules.
    pub(in crate::agent) rules: usize,
    /// Those with problems that concern attachments of this node.
    pub(in crate::agent) with_problems: Counts,
}

impl Reporter {
    /// Numbers of policies.
    pub(in crate::agent) fn policies_counted(&self) -> PoliciesCounted {
        let (programmed, rules) = self.enforcer.programmed();
        PoliciesCounted {
            policies: self.source.snapshot().policies.len(),
            programmed,
            rules,
            with_problems: self.enforcer.conditions_counted(),
        }
    }

    /// The pods of the source that these labels select, sorted.
    ///
    /// # Errors
    /// The selector is invalid.
    pub(in crate::agent) fn select(&self, selector: &str) -> Result<Vec<ObjectName>, QueryError> {
        let selector = label_query::parse(selector)?;
        let objects = self.source.snapshot();
        let selected = objects.pods.values().filter(|pod| selector.matches(&pod.labels));
        Ok(selected.map(|pod| pod.name.clone()).collect())
    }

    pub(in crate::agent) fn policy_dump(&self, wanted: Option<&str>) -> Vec<Dump> {
        self.enforcer.dump(wanted).into_iter().map(Into::into).collect()
    }

    /// Returns every path that the flow can take.
    ///
    /// # Errors
    /// Code 3: a pod that is neither attached nor in any manifest.
    pub(in crate::agent) fn explain(&self, question: Question) -> Result<Vec<Path>, Failure> {
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

    pub(in crate::agent) fn policy(&self, engine: &Engine) -> Result<PolicyReport, EnforceError> {
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
}
