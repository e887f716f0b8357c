//! Which problems become events, and by which reason: failed ADDs on their pods, and conditions of pods, definitions
//! and policies on those, of the runtime's configuration and of the default network on the node. `docs/events.md` has
//! the reasons. What is changed in a pod, whose interface the condition names, may be as its author wants it: no event.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::conf_keeper;
use super::handler::Agent;
use crate::cni::{CniError, code};
use crate::objects::ObjectName;
use crate::publish::{Event, Regarding};
use crate::rounds;
use crate::rpc::message::Condition;
use crate::ticks::ticks;

/// How the default network is named among the conditions of the node.
const DEFAULT_NETWORK: &str = "default network";

/// The reason of an event about a pod that was evicted.
pub(super) const EVICTED: &str = "Evicted";

/// Least time between two events about the default network.
const LEAST_PAUSE: Duration = Duration::from_secs(60);

/// How often conditions are looked at.
const INTERVAL: Duration = Duration::from_secs(10);

/// A pod was not attached.
pub(super) fn of_failed_add(pod: ObjectName, error: &CniError) -> Event {
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

/// A condition of an object that has events; `None` if it is of anything else.
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

/// Reason and action of a condition of an object.
fn of_object(regarding: &Regarding) -> Option<(&'static str, &'static str)> {
    Some(match regarding {
        Regarding::Pod(_) => ("NetworksDiffer", "Attach"),
        Regarding::Definition(_) => ("InvalidNetwork", "Read"),
        Regarding::MultiNetworkPolicy(_) | Regarding::NetworkPolicy(_) => ("PolicyNotAsWritten", "Enforce"),
        Regarding::Node(_) => return None,
    })
}

/// The conditions that may be worth an event.
fn conditions(agent: &Agent) -> Vec<Condition> {
    let mut conditions = agent.conditions();
    let default = agent.health.default_network_problem();
    conditions.extend(default.map(|problem| Condition { object: DEFAULT_NETWORK.to_owned(), problem }));
    conditions
}

/// Reports new conditions as events, without end. `node`: the name of this node in the cluster.
pub(super) async fn report(agent: Arc<Agent>, node: String) {
    let mut tick = ticks(INTERVAL);
    let mut known = BTreeSet::new();
    let mut told: Option<Instant> = None;
    loop {
        tick.tick().await;
        let looking = Arc::clone(&agent);
        let conditions = rounds::look(move || conditions(&looking)).await;
        let mut now = BTreeSet::new();
        for condition in conditions {
            let key = (condition.object.clone(), condition.problem.clone());
            // What plugins of others say may change with each look: every text is an event of its own.
            if condition.object == DEFAULT_NETWORK && !known.contains(&key) {
                if told.is_some_and(|at| at.elapsed() < LEAST_PAUSE) {
                    continue;
                }
                told = Some(Instant::now());
            }
            if !known.contains(&key)
                && let Some(event) = of_condition(&condition, &node)
            {
                agent.report(event);
            }
            now.insert(key);
        }
        known = now;
    }
}

#[cfg(test)]
mod tests {
    use crate::agent::events::*;

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

    /// The rows of `docs/events.md`: reason, and kinds of objects.
    fn page() -> BTreeSet<(&'static str, &'static str)> {
        let (_, table) = include_str!("../../../docs/events.md").split_once("|---|---|---|---|\n").unwrap();
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
