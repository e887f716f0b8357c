//! The problems of the whole agent, from all its parts, for the status and for events.

use crate::agent::Agent;
use crate::rpc::message::{Condition, Readiness, Status};

impl Agent {
    /// Returns the agent's status, and has the checks run soon.
    pub(in crate::agent) fn status(&self) -> Status {
        self.health.look_soon();
        Status {
            collected: self.collector.collected(),
            ..self.reporter.status(&self.engine, self.troubles())
        }
    }

    /// Returns problems with single networks, pools and attachments, as last seen.
    fn troubles(&self) -> Vec<Condition> {
        let mut troubles = self.health.troubles();
        let warnings = self.intents.source.warnings().into_iter();
        troubles.extend(warnings.map(|it| Condition { object: it.object, problem: it.problem }));
        troubles.extend(self.admission.conditions(|container| self.engine.describe(container)));
        troubles.extend(self.pods.conditions(|key| self.sandbox_name(key)));
        troubles.extend(self.collector.troubles());
        troubles.extend(self.monitoring.condition());
        troubles.extend(self.no_group.clone());
        troubles.extend(self.earlier.conditions(&self.engine));
        // Last, as there may be many.
        troubles.extend(self.pods.changed_inside(|attached| self.engine.is_same(attached)));
        troubles
    }

    /// Returns everything that differs from the objects, or that `netattachctl status` reports otherwise.
    pub(in crate::agent) fn conditions(&self) -> Vec<Condition> {
        let mut conditions = self.reporter.of_objects();
        conditions.extend(self.troubles());
        conditions
    }

    /// Returns the conditions that an ADD depends on.
    pub(in crate::agent) fn conditions_of_ready(&self) -> Vec<Readiness> {
        self.reporter.ready()
    }
}
