//! What is wrong with objects although they can be read, so that nothing says so before somebody suffers from it: policies for
//! networks that there are not, NetworkPolicies that do not hold, definitions by which no pod can be attached, and policies
//! that are not in force as they are written.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use crate::attach::{Engine, IntentReader};
use crate::npwg::{Definition, NetworkRef};
use crate::policy::compile::{Condition as PolicyCondition, Subject};
use crate::policy::model::Severity;
use crate::policy::sync::Enforcer;
use crate::report::Chain;
use crate::rpc::message::Condition;
use crate::source::{Objects, Source};

/// Rows that are told; of more, how many there are.
const TOLD: usize = 100;

/// Looks for trouble, and says what is new in the log.
pub(super) struct Troubles {
    source: Arc<dyn Source>,
    enforcer: Arc<Enforcer>,
    intents: Arc<IntentReader>,
    engine: Arc<Engine>,
    network_policy: bool,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Of which objects; `None` before the first look.
    of: Option<Arc<Objects>>,
    rows: Vec<Condition>,
}

impl Seen {
    /// Whether a look at these would come to the same. Pods, which change most often, make no difference.
    fn is_of(&self, objects: &Objects) -> bool {
        self.of.as_ref().is_some_and(|of| {
            of.definitions == objects.definitions
                && of.policies == objects.policies
                && of.network_policies == objects.network_policies
        })
    }
}

impl Troubles {
    pub(super) fn new(
        source: Arc<dyn Source>,
        enforcer: Arc<Enforcer>,
        intents: Arc<IntentReader>,
        engine: Arc<Engine>,
        network_policy: bool,
    ) -> Self {
        Self { source, enforcer, intents, engine, network_policy, seen: Mutex::default() }
    }

    /// Every trouble there is, a row for each. May block: configurations are read from disk.
    pub(super) fn rows(&self) -> Vec<Condition> {
        let objects = self.source.snapshot();
        let of_policies = self.enforcer.conditions().into_iter().filter_map(of_policy);
        // What is on disk changes without the objects.
        let on_disk = self.of_definitions(&objects, |definition| definition.config.is_none());
        let mut rows = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if !seen.is_of(&objects) {
                let rows = self.look(&objects);
                for row in rows.iter().filter(|row| !seen.rows.contains(row)) {
                    tracing::warn!(object = row.object, problem = row.problem, "not in force");
                }
                *seen = Seen { of: Some(objects), rows };
            }
            seen.rows.clone()
        };
        rows.extend(on_disk);
        rows.extend(of_policies);
        bounded(rows)
    }

    /// Looks again whenever the objects change, until their source ends.
    pub(super) async fn keep_looking(self: Arc<Self>, mut changes: watch::Receiver<u64>) {
        loop {
            let looking = Arc::clone(&self);
            // The join error is a panic, which the panic hook has reported; the next change is another try.
            let _ = tokio::task::spawn_blocking(move || looking.rows()).await;
            // May be dropped at any time: a change stays unseen.
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    fn look(&self, objects: &Objects) -> Vec<Condition> {
        let mut rows = Vec::new();
        if !self.network_policy && !objects.network_policies.is_empty() {
            rows.push(Condition {
                object: "networkpolicies".into(),
                problem: format!(
                    "{} of networking.k8s.io do not hold: networkPolicy is off, which is right only beside a primary network that \
                     enforces them itself",
                    objects.network_policies.len()
                ),
            });
        }
        let default = self.intents.restrictions.default_network.as_ref();
        rows.extend(of_no_network(objects, default));
        rows.extend(self.of_definitions(objects, |definition| definition.config.is_some()));
        rows
    }

    /// The definitions of a kind by which no pod can be attached.
    fn of_definitions(&self, objects: &Objects, is_of_kind: impl Fn(&Definition) -> bool) -> Vec<Condition> {
        let of_kind = objects.definitions.iter().filter(|(_, definition)| is_of_kind(definition));
        let unusable = of_kind.filter_map(|(name, _)| {
            let problem = self.unusable(objects, name)?;
            Some(Condition { object: format!("network-attachment-definition {name}"), problem })
        });
        unusable.collect()
    }

    /// Why no pod can be attached by a definition.
    fn unusable(&self, objects: &Objects, name: &NetworkRef) -> Option<String> {
        match self.intents.network(objects, name) {
            Err(error) => Some(Chain(&error).to_string()),
            Ok(network) => self.engine.check_plan(&network).err().map(|error| error.to_string()),
        }
    }
}

/// The policies for networks that are not defined.
fn of_no_network(objects: &Objects, default: Option<&NetworkRef>) -> Vec<Condition> {
    let mut rows = Vec::new();
    for policy in objects.policies.values() {
        let unknown =
            |network: &&NetworkRef| !objects.definitions.contains_key(*network) && default != Some(*network);
        rows.extend(policy.networks.iter().filter(unknown).map(|network| Condition {
            object: Subject::Policy(policy.name.clone()).to_string(),
            problem: format!("is for network {network}, which is not defined: it selects nothing there"),
        }));
    }
    rows
}

/// What is said of a policy that is not in force as it is written.
fn of_policy(condition: PolicyCondition) -> Option<Condition> {
    let is_error = condition.severity == Severity::Error;
    is_error.then(|| Condition { object: condition.object.to_string(), problem: condition.message })
}

fn bounded(mut rows: Vec<Condition>) -> Vec<Condition> {
    if rows.len() > TOLD {
        let more = rows.len() - TOLD;
        rows.truncate(TOLD);
        rows.push(Condition { object: "-".into(), problem: format!("{more} more are not told") });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::npwg::Definition;
    use crate::policy::manifest::{POLICY_FOR_ANNOTATION, read};
    use crate::source::ObjectName;

    #[test]
    fn a_policy_for_a_network_that_there_is_not_is_told_of_and_the_default_network_need_not_be_an_object() {
        let mut objects = Objects::default();
        let reference = NetworkRef::new("shop", "lan");
        let definition = Definition {
            namespace: "shop".into(),
            name: "lan".into(),
            config: None,
            annotations: Default::default(),
        };
        objects.definitions.insert(reference, definition);
        let annotations = [(POLICY_FOR_ANNOTATION.to_owned(), "lan, lam, kube-system/default".to_owned())];
        let spec = serde_json::json!({"podSelector": {}, "policyTypes": ["Ingress"]});
        let policy = read(ObjectName::new("shop", "p"), &annotations.into(), &spec).unwrap();
        objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
        let default = NetworkRef::new("kube-system", "default");
        let of = |network: &str| Condition {
            object: "multi-networkpolicy shop/p".into(),
            problem: format!("is for network {network}, which is not defined: it selects nothing there"),
        };
        assert_eq!(of_no_network(&objects, Some(&default)), [of("shop/lam")]);
        assert_eq!(of_no_network(&objects, None), [of("kube-system/default"), of("shop/lam")]);
    }

    #[test]
    fn rows_beyond_the_bound_are_counted() {
        let row = |number: usize| Condition { object: number.to_string(), problem: String::new() };
        assert_eq!(bounded((0..TOLD).map(row).collect()).len(), TOLD);
        let more = bounded((0..TOLD + 5).map(row).collect());
        assert_eq!((more.len(), more[TOLD].problem.as_str()), (TOLD + 1, "5 more are not told"));
    }
}
