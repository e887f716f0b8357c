//! The pods that are running: their attachments follow their annotation, and stay as they were made.
//!
//! | module | what it does |
//! |---|---|
//! | `live` | makes the attachments of live pods follow their annotation |
//! | `following` | the order of the pods |
//! | `changes` | the changes that are due |
//! | `missed` | the pods that run without their networks |
//! | `repair` | reports, attaches or evicts them |
//! | `drift` | restores links, leases, records and status on the node that other processes have changed |
//! | `in_pods` | reports changes that other processes make in pods |

mod changes;
pub(super) mod drift;
mod following;
mod in_pods;
pub(super) mod live;
pub(super) mod missed;
pub(super) mod repair;

use std::sync::Arc;

use self::drift::Drift;
use self::in_pods::InPods;
use self::live::LivePods;
use self::missed::Repairs;
use crate::attach::Attached;
use crate::journal::JournalKey;
use crate::objects::ObjectName;
use crate::rpc::message::Condition;

/// What is known of the pods that are running.
#[derive(Debug)]
pub(super) struct RunningPods {
    live: LivePods,
    repairs: Repairs,
    drift: Drift,
    in_pods: InPods,
}

impl RunningPods {
    pub(super) fn new(repairs: Repairs) -> Self {
        Self { live: LivePods::default(), repairs, drift: Drift::default(), in_pods: InPods::default() }
    }

    /// Notes that a request asks to attach a pod, so it is not without its networks for good.
    pub(super) fn asked_for(&self, pod: &ObjectName) {
        self.repairs.asked_for(pod);
    }

    /// Returns the problems of pods, except changes inside them. `name`: names a sandbox.
    pub(super) fn conditions(&self, name: impl Fn(&JournalKey) -> String) -> Vec<Condition> {
        let mut conditions = self.live.conditions();
        conditions.extend(self.repairs.conditions());
        conditions.extend(self.drift.conditions(name));
        conditions
    }

    /// Returns the changes that other processes have made in pods, which may be many.
    pub(super) fn changed_inside(&self, is_attached: impl Fn(&Arc<Attached>) -> bool) -> Vec<Condition> {
        self.in_pods.conditions(is_attached)
    }
}
