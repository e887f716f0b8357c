//! Decides which problems become Kubernetes events, and with which reason: failed ADDs on their pods;
//! conditions of pods, definitions and policies on these objects; conditions of the runtime's configuration
//! and of the default network on the node. `docs/events.md` lists the reasons. A change inside a pod, whose
//! condition names the interface, may be intended by the pod's author and makes no event.
//!
//! The agents of all nodes read definitions and policies. Those agents report them whose node has a pod or
//! attachment of the namespace, each after a random delay: the first one writes the event, and the others
//! find it. Metrics count such problems by the same rule.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::agent::cni_conf::conf_keeper;
use crate::agent::health::trouble;
use crate::cni::{CniError, code};
use crate::objects::ObjectName;
use crate::pace::spread;
use crate::publish::{Event, Regarding};
use crate::rounds;
use crate::rpc::message::Condition;
use crate::ticks::ticks;

/// The name of the default network in conditions of the node.
const DEFAULT_NETWORK: &str = "default network";

/// The reason of an event about a pod that was evicted.
pub(in crate::agent) const EVICTED: &str = "Evicted";

/// Least time between two events about the default network.
const LEAST_PAUSE: Duration = Duration::from_secs(60);

/// How often conditions are checked.
const INTERVAL: Duration = Duration::from_secs(10);

/// The time over which the agents of a cluster spread reports of problems that all of them see.
const SPREAD: Duration = Duration::from_secs(30);

/// The event for a pod that was not attached.
pub(in crate::agent) fn of_failed_add(pod: ObjectName, error: &CniError) -> Event {
    let note = match error.details.as_str() {
        "" => error.msg.clone(),
        details => format!("{}: {details}", error.msg),
    };
    Event { regarding: Regarding::Pod(pod), reason: reason(error.code), action: "Attach", note }
}

/// The reason of a failure, by its code (CNI specification, section 5).
fn reason(code: u32) -> &'static str {
    match code {
        code::INVALID_CONFIG
        | code::DECODING_FAILURE
        | code::UNSUPPORTED_FIELD
        | code::INCOMPATIBLE_VERSION => "InvalidNetwork",
        code::INVALID_ENVIRONMENT => "InvalidRequest",
        code::IO_FAILURE => "NodeFailure",
        code::TRY_AGAIN_LATER | code::NOT_AVAILABLE => "NotReady",
        _ => "AttachFailed",
    }
}

/// The event for a condition; `None` if its object gets no events.
fn of_condition(condition: &Condition, node: &str) -> Option<Event> {
    let of_node = || Regarding::Node(node.to_owned());
    let (regarding, reason, action) = match condition.object.as_str() {
        conf_keeper::OBJECT => (of_node(), "CniConfigurationDisturbed", "Configure"),
        DEFAULT_NETWORK => (of_node(), "DefaultNetworkNotReady", "Attach"),
        object => {
            let regarding = Regarding::of_condition(object)?;
            let (reason, action) = of_object(&regarding)?;
            (regarding, reason, action)
        }
    };
    Some(Event { regarding, reason, action, note: condition.problem.clone() })
}

/// Reason and action of the event for an object's condition.
fn of_object(regarding: &Regarding) -> Option<(&'static str, &'static str)> {
    Some(match regarding {
        Regarding::Pod(_) => ("NetworksDiffer", "Attach"),
        Regarding::Definition(_) => ("InvalidNetwork", "Read"),
        Regarding::MultiNetworkPolicy(_) | Regarding::NetworkPolicy(_) => ("PolicyNotAsWritten", "Enforce"),
        Regarding::Node(_) => return None,
    })
}

/// Returns the conditions that may become events.
fn conditions(agent: &Agent) -> Vec<Condition> {
    let mut conditions = agent.conditions();
    let default = agent.health.default_network_problem();
    conditions.extend(default.map(|problem| Condition { object: DEFAULT_NETWORK.to_owned(), problem }));
    conditions
}

/// Returns the namespaces present on this node: of its pods, and of networks with attachments here.
fn namespaces(agent: &Agent) -> BTreeSet<String> {
    let (objects, attached) = (agent.intents.source.snapshot(), agent.engine.registry().all());
    let networks = attached.iter().flat_map(|it| &it.plan.attachments);
    let networks = networks.filter_map(|it| it.network.definition()).map(|it| it.namespace.clone());
    objects.pods.keys().map(|name| name.namespace.clone()).chain(networks).collect()
}

/// Numbers of problems, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Problems {
    /// Conditions of this node and its pods.
    pub(super) of_node: usize,
    /// Objects that all agents read and that concern this node; all NetworkPolicies together are one if they are not
    /// enforced.
    pub(super) of_objects: usize,
}

/// Counts the conditions of the status.
pub(super) fn counted(agent: &Agent) -> Problems {
    let conditions = agent.conditions();
    let namespaces = if conditions.is_empty() { BTreeSet::new() } else { namespaces(agent) };
    count(&conditions, &namespaces)
}

/// See [`counted`]. `namespaces`: the namespaces present on this node.
fn count(conditions: &[Condition], namespaces: &BTreeSet<String>) -> Problems {
    let mut of_node = 0;
    let mut objects = BTreeSet::new();
    for condition in conditions {
        let object = condition.object.as_str();
        let read_by_all = Regarding::of_condition(object).filter(Regarding::is_read_by_all);
        match read_by_all.map(|it| namespaces.contains(it.namespace())) {
            Some(true) => drop(objects.insert(object)),
            Some(false) => {}
            None if object == trouble::NETWORK_POLICIES => drop(objects.insert(object)),
            None => of_node += usize::from(object != trouble::MORE),
        }
    }
    Problems { of_node, of_objects: objects.len() }
}

/// A condition: its object and its problem.
type Key = (String, String);

/// The conditions that were reported, and those waiting.
#[derive(Debug, Default)]
struct Reports {
    /// Conditions that were reported, or that are not to be reported.
    known: BTreeSet<Key>,
    /// When conditions of objects that all agents read are due.
    due: BTreeMap<Key, Instant>,
    /// When the last event about the default network was reported.
    told: Option<Instant>,
}

impl Reports {
    /// Returns the events to report after a check. `namespaces`: the namespaces present on this node;
    /// `delay`: the delay of an event that other agents report as well.
    fn look(
        &mut self,
        conditions: Vec<Condition>,
        namespaces: &BTreeSet<String>,
        (node, now): (&str, Instant),
        mut delay: impl FnMut() -> Duration,
    ) -> Vec<Event> {
        let (mut events, mut known, mut due) = (Vec::new(), BTreeSet::new(), BTreeMap::new());
        for condition in conditions {
            let key = (condition.object.clone(), condition.problem.clone());
            if self.known.contains(&key) {
                known.insert(key);
                continue;
            }
            // Errors of other plugins may change with each check, and every text would be an event of its
            // own.
            if condition.object == DEFAULT_NETWORK {
                if self.told.is_some_and(|at| now.duration_since(at) < LEAST_PAUSE) {
                    continue;
                }
                self.told = Some(now);
            }
            if let Some(event) = of_condition(&condition, node) {
                if event.regarding.is_read_by_all() {
                    // A pod of the namespace may be scheduled on this node later.
                    if !namespaces.contains(event.regarding.namespace()) {
                        continue;
                    }
                    let at = self.due.get(&key).copied().unwrap_or_else(|| now + delay());
                    if at > now {
                        due.insert(key, at);
                        continue;
                    }
                }
                events.push(event);
            }
            known.insert(key);
        }
        (self.known, self.due) = (known, due);
        events
    }
}

/// Reports new conditions as events, without end. `node`: the name of this node in the cluster.
pub(in crate::agent) async fn report(agent: Arc<Agent>, node: String) {
    let mut tick = ticks(INTERVAL);
    let mut reports = Reports::default();
    loop {
        tick.tick().await;
        let looking = Arc::clone(&agent);
        let look = move || {
            let conditions = conditions(&looking);
            // Collecting them takes longer the more is attached, and without conditions they are not asked for.
            let namespaces = if conditions.is_empty() { BTreeSet::new() } else { namespaces(&looking) };
            (conditions, namespaces)
        };
        let (conditions, namespaces) = rounds::look(look).await;
        for event in reports.look(conditions, &namespaces, (&node, Instant::now()), || spread(SPREAD)) {
            agent.report(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::agent::monitoring::events::*;

    #[test]
    fn conditions_of_objects_become_events_and_others_do_not() {
        let condition = |object: &str| Condition { object: object.to_owned(), problem: "wrong".to_owned() };
        let events: Vec<_> = [
            "pod shop/a",
            "pod shop/a net1",
            "network-attachment-definition shop/b",
            "multi-networkpolicy shop/c",
            "networkpolicy shop/d",
            "journal",
            "CNI configuration",
            "default network",
        ]
        .iter()
        .map(|object| of_condition(&condition(object), "n").map(|it| (it.regarding.to_string(), it.reason)))
        .collect();
        let some = |name: &str, reason| Some((name.to_owned(), reason));
        assert_eq!(
            events,
            [
                some("shop/a", "NetworksDiffer"),
                None,
                some("shop/b", "InvalidNetwork"),
                some("shop/c", "PolicyNotAsWritten"),
                some("shop/d", "PolicyNotAsWritten"),
                None,
                some("n", "CniConfigurationDisturbed"),
                some("n", "DefaultNetworkNotReady")
            ]
        );
    }

    /// Returns the objects of the events for each check. `table`: seconds since the start, the objects with
    /// a problem, and the namespaces on the node; delays are 15 s.
    fn looks(table: &[(u64, &[&str], &[&str])]) -> Vec<Vec<String>> {
        let (mut reports, start) = (Reports::default(), Instant::now());
        let look = |(seconds, objects, namespaces): &(u64, &[&str], &[&str])| {
            let condition =
                |object: &&str| Condition { object: (*object).to_owned(), problem: "x".to_owned() };
            let namespaces = namespaces.iter().map(|it| (*it).to_owned()).collect();
            let conditions = objects.iter().map(condition).collect();
            let now = start + Duration::from_secs(*seconds);
            let events = reports.look(conditions, &namespaces, ("n", now), || Duration::from_secs(15));
            events.iter().map(|event| event.regarding.to_string()).collect()
        };
        table.iter().map(look).collect()
    }

    #[test]
    fn what_all_agents_see_is_reported_after_a_while_where_the_node_has_something_of_its_namespace() {
        let all: &[&str] =
            &["pod shop/p", "network-attachment-definition shop/d", "multi-networkpolicy other/m"];
        let found = looks(&[
            (0, all, &["shop"]),
            (10, all, &["shop"]),
            (20, all, &["shop"]),
            (30, all, &["shop"]),
            // A pod of the other namespace has come.
            (40, all, &["other", "shop"]),
            (50, all, &["other"]),
            (60, all, &["other"]),
            (70, all, &["other"]),
        ]);
        let expected: [&[&str]; 8] = [&["shop/p"], &[], &["shop/d"], &[], &[], &[], &["other/m"], &[]];
        assert_eq!(found, expected);
        // A condition that ends before its delay is not reported, and one that returns is new.
        let policy: &[&str] = &["networkpolicy shop/n"];
        let found = looks(&[
            (0, policy, &["shop"]),
            (10, &[], &["shop"]),
            (20, policy, &["shop"]),
            (30, policy, &["shop"]),
            (40, policy, &["shop"]),
            (50, &[], &["shop"]),
            (60, policy, &["shop"]),
            (80, policy, &["shop"]),
        ]);
        let expected: [&[&str]; 8] = [&[], &[], &[], &[], &["shop/n"], &[], &[], &["shop/n"]];
        assert_eq!(found, expected);
        assert!((0..20).all(|_| spread(SPREAD) < SPREAD));
    }

    #[test]
    fn an_object_that_all_agents_read_is_counted_once_and_where_the_node_has_something_of_its_namespace() {
        let condition = |object: &str, problem: &str| Condition {
            object: object.to_owned(),
            problem: problem.to_owned(),
        };
        let conditions = [
            condition("network-attachment-definition shop/a", "one"),
            condition("network-attachment-definition shop/a", "two"),
            condition("network-attachment-definition other/a", "one"),
            condition("multi-networkpolicy shop/p", "one"),
            condition("networkpolicies", "3 are not enforced"),
            condition("pod shop/a net1", "one"),
            condition("pod shop/a", "one"),
            condition("journal", "one"),
            condition("-", "5 more are not shown"),
        ];
        let counted = count(&conditions, &["shop".to_owned()].into());
        assert_eq!(counted, Problems { of_node: 3, of_objects: 3 });
        assert_eq!(count(&conditions, &BTreeSet::new()), Problems { of_node: 3, of_objects: 1 });
        assert_eq!(count(&[], &BTreeSet::new()), Problems::default());
    }

    #[test]
    fn the_default_network_is_reported_once_a_minute() {
        let found = looks(&[
            (0, &[DEFAULT_NETWORK], &[]),
            (10, &[DEFAULT_NETWORK], &[]),
            (20, &[], &[]),
            (30, &[DEFAULT_NETWORK], &[]),
            (60, &[DEFAULT_NETWORK], &[]),
        ]);
        let expected: [&[&str]; 5] = [&["n"], &[], &[], &[], &["n"]];
        assert_eq!(found, expected);
    }

    /// The rows of `docs/events.md`: reason, and kinds of objects.
    fn page() -> BTreeSet<(&'static str, &'static str)> {
        let (_, table) =
            include_str!("../../../../docs/events.md").split_once("|---|---|---|---|\n").unwrap();
        let rows = table.lines().map_while(|line| line.strip_prefix("| `")?.split_once("` | "));
        rows.flat_map(|(reason, row)| {
            row.split(" | ").next().unwrap().split(", ").map(move |on| (reason, on))
        })
        .collect()
    }

    #[test]
    fn the_page_has_every_reason_with_what_it_is_on_and_no_other() {
        let codes = (0..=999).map(|code| (reason(code), "pod"));
        let name = || ObjectName { namespace: "shop".into(), name: "a".into() };
        let objects = [
            (Regarding::Pod(name()), "pod"),
            (Regarding::Definition(name()), "NetworkAttachmentDefinition"),
            (Regarding::MultiNetworkPolicy(name()), "MultiNetworkPolicy"),
            (Regarding::NetworkPolicy(name()), "NetworkPolicy"),
        ];
        let objects = objects.map(|(object, on)| (of_object(&object).unwrap().0, on));
        let of_node = [conf_keeper::OBJECT, DEFAULT_NETWORK].map(|object| {
            let condition = Condition { object: object.to_owned(), problem: "wrong".to_owned() };
            (of_condition(&condition, "n").unwrap().reason, "Node")
        });
        let all: BTreeSet<_> = codes.chain(objects).chain(of_node).chain([(EVICTED, "pod")]).collect();
        assert_eq!(page(), all);
    }

    #[test]
    fn each_code_of_a_failed_add_has_a_reason() {
        let table = [
            (code::INCOMPATIBLE_VERSION, "InvalidNetwork"),
            (code::UNSUPPORTED_FIELD, "InvalidNetwork"),
            (code::INVALID_ENVIRONMENT, "InvalidRequest"),
            (code::IO_FAILURE, "NodeFailure"),
            (code::DECODING_FAILURE, "InvalidNetwork"),
            (code::INVALID_CONFIG, "InvalidNetwork"),
            (code::TRY_AGAIN_LATER, "NotReady"),
            (code::NOT_AVAILABLE, "NotReady"),
            (100, "AttachFailed"),
        ];
        let found = table.map(|(code, _)| (code, reason(code)));
        assert_eq!(found, table);
    }

    #[test]
    fn a_failed_add_is_an_event_of_its_pod() {
        let error = CniError::new(code::INVALID_CONFIG, "network shop/x is not defined");
        let event = of_failed_add(ObjectName::new("shop", "a"), &error);
        assert_eq!(
            event,
            Event {
                regarding: Regarding::Pod(ObjectName::new("shop", "a")),
                reason: "InvalidNetwork",
                action: "Attach",
                note: "network shop/x is not defined".to_owned(),
            }
        );
    }
}
