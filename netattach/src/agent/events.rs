//! Which problems become events, and by which reason: failed ADDs on their pods, and conditions of pods, definitions
//! and policies on those. `docs/events.md` has the reasons.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::handler::Agent;
use crate::cni::{CniError, code};
use crate::objects::ObjectName;
use crate::publish::{Event, Regarding};
use crate::rpc::message::Condition;

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
fn of_condition(condition: &Condition) -> Option<Event> {
    let regarding = Regarding::of_condition(&condition.object)?;
    let (reason, action) = match regarding {
        Regarding::Pod(_) => ("NetworksDiffer", "Attach"),
        Regarding::Definition(_) => ("InvalidNetwork", "Read"),
        Regarding::MultiNetworkPolicy(_) | Regarding::NetworkPolicy(_) => ("PolicyNotAsWritten", "Enforce"),
    };
    Some(Event { regarding, reason, action, note: condition.problem.clone() })
}

/// Reports new conditions as events, without end.
pub(super) async fn report(agent: Arc<Agent>) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut known = BTreeSet::new();
    loop {
        tick.tick().await;
        let looking = Arc::clone(&agent);
        // The join error is a panic, which the panic hook has reported.
        let Ok(conditions) = tokio::task::spawn_blocking(move || looking.conditions()).await else {
            continue;
        };
        let mut now = BTreeSet::new();
        for condition in conditions {
            let key = (condition.object.clone(), condition.problem.clone());
            if !known.contains(&key)
                && let Some(event) = of_condition(&condition)
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
        let events: Vec<_> =
            ["pod shop/a", "network-attachment-definition shop/b", "multi-networkpolicy shop/c", "journal"]
                .iter()
                .map(|object| {
                    of_condition(&condition(object)).map(|it| (it.regarding.to_string(), it.reason))
                })
                .collect();
        let some = |name: &str, reason| Some((name.to_owned(), reason));
        assert_eq!(
            events,
            [
                some("shop/a", "NetworksDiffer"),
                some("shop/b", "InvalidNetwork"),
                some("shop/c", "PolicyNotAsWritten"),
                None
            ]
        );
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
