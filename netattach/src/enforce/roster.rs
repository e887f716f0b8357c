//! The enforced attachments: their endpoints for policies, and the hook points of their programs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::attachment::EnforcedAttachment;
use crate::hooks::HookPoint;
use crate::objects::{ObjectName, Place};
use crate::policy::index::{Endpoint, Endpoints};
use crate::policy::level::Enforcement;

/// The data kept per attachment, by number. An attachment is entered before its programs run. It leaves in two steps:
/// first no programs are attached for it any more, and once its record is gone policies no longer see it.
#[derive(Debug, Default)]
pub(super) struct Roster {
    endpoints: Endpoints,
    /// What the endpoints are on: of thousands there are a few.
    places: BTreeSet<Arc<BTreeSet<Place>>>,
    points: BTreeMap<u32, Point>,
    /// What the programs of some were found to lack at the last look.
    shortfalls: BTreeMap<u32, Enforcement>,
    /// By what packets of some were found to go past their programs, at the last look into their pods.
    passed_by: BTreeMap<u32, Enforcement>,
}

/// The hook point of an attachment's programs.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Point {
    point: HookPoint,
    delegated: bool,
}

impl Point {
    fn of(attachment: &EnforcedAttachment) -> Self {
        Self { point: attachment.point.clone(), delegated: attachment.is_delegated() }
    }
}

impl Roster {
    /// Enters an attachment, replacing an earlier one with its number.
    pub(super) fn enter(&mut self, attachment: &EnforcedAttachment) {
        self.forget_looks(attachment.id);
        self.points.insert(attachment.id, Point::of(attachment));
        if let Some(endpoint) = &attachment.endpoint {
            let at = self.shared(&endpoint.at);
            self.endpoints.insert(attachment.id, Arc::new(Endpoint { at, ..endpoint.clone() }));
        }
    }

    fn forget_looks(&mut self, id: u32) {
        self.shortfalls.remove(&id);
        self.passed_by.remove(&id);
    }

    fn shared(&mut self, at: &Arc<BTreeSet<Place>>) -> Arc<BTreeSet<Place>> {
        if let Some(known) = self.places.get(at) {
            return Arc::clone(known);
        }
        // Networks that nothing is on any more.
        self.places.retain(|places| Arc::strong_count(places) > 1);
        self.places.insert(Arc::clone(at));
        Arc::clone(at)
    }

    /// Stops attaching programs for an attachment. Returns whether no programs can be running on a device in its pod:
    /// they run there if another plugin made the interface or the link's hook point is there; for an unknown attachment
    /// they might.
    pub(super) fn end(&mut self, id: u32) -> bool {
        self.forget_looks(id);
        self.points
            .remove(&id)
            .is_some_and(|known| !known.delegated && !matches!(known.point, HookPoint::Pod(_)))
    }

    /// Hides an attachment from policies. Returns whether they saw it.
    pub(super) fn leave(&mut self, id: u32) -> bool {
        self.endpoints.remove(&id).is_some()
    }

    /// Whether this is the current attachment of its number: the number of an ended one may be reused.
    pub(super) fn is_current(&self, attachment: &EnforcedAttachment) -> bool {
        self.points.get(&attachment.id) == Some(&Point::of(attachment))
    }

    /// Notes what an attachment's programs lack, if it has not ended meanwhile.
    pub(super) fn note_shortfall(&mut self, attachment: &EnforcedAttachment, found: Option<Enforcement>) {
        match found.filter(|_| self.is_current(attachment)) {
            Some(found) => self.shortfalls.insert(attachment.id, found),
            None => self.shortfalls.remove(&attachment.id),
        };
    }

    /// What an attachment's programs were found to lack.
    pub(super) fn shortfall(&self, id: u32) -> Option<&Enforcement> {
        self.shortfalls.get(&id)
    }

    /// Notes by what packets go past an attachment's programs, if it has not ended meanwhile.
    pub(super) fn note_passed_by(&mut self, attachment: &EnforcedAttachment, found: Option<Enforcement>) {
        match found.filter(|_| self.is_current(attachment)) {
            Some(found) => self.passed_by.insert(attachment.id, found),
            None => self.passed_by.remove(&attachment.id),
        };
    }

    /// By what packets were found to go past an attachment's programs.
    pub(super) fn passed_by(&self, id: u32) -> Option<&Enforcement> {
        self.passed_by.get(&id)
    }

    /// Index of the device on the node on which an attachment's programs run; 0 where it is not there.
    pub(super) fn host_index(&self, id: u32) -> Option<u32> {
        self.points.get(&id).map(|known| known.point.host_index())
    }

    /// The attachments that policies can select.
    pub(super) fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// The same, with the hook points of their programs.
    pub(super) fn placed(&self) -> impl Iterator<Item = (&Endpoint, &HookPoint)> {
        let placed = |endpoint: &'_ Endpoint| self.points.get(&endpoint.id).map(|known| &known.point);
        self.endpoints.values().filter_map(move |endpoint| Some((&**endpoint, placed(endpoint)?)))
    }

    /// Whether a pod has an attachment on this node.
    pub(super) fn has_pod(&self, pod: &ObjectName) -> bool {
        self.endpoints.values().any(|endpoint| endpoint.pod == *pod)
    }
}

#[cfg(test)]
mod tests {
    use super::super::attachment::tests::{attachment, delegated};
    use super::*;

    #[test]
    fn an_attachment_has_policies_until_its_record_is_gone() {
        let mut roster = Roster::default();
        roster.enter(&attachment(3));
        assert!(roster.is_current(&attachment(3)));
        assert!(roster.end(3), "programs of its own interface are on the node");
        assert!(!roster.is_current(&attachment(3)));
        assert_eq!(roster.endpoints().keys().collect::<Vec<_>>(), [&3]);
        assert_eq!((roster.leave(3), roster.leave(3)), (true, false));
    }

    #[test]
    fn a_number_that_is_given_again_is_another_attachment() {
        let mut roster = Roster::default();
        roster.enter(&delegated(3));
        assert!(!roster.is_current(&attachment(3)));
        assert!(roster.is_current(&delegated(3)));
    }

    #[test]
    fn what_programs_lack_is_known_until_they_do_not_or_the_attachment_ends() {
        use crate::policy::level::Level;
        let mut roster = Roster::default();
        let lack = Enforcement { level: Level::Advisory, why: "behind".to_owned() };
        roster.note_shortfall(&attachment(3), Some(lack.clone()));
        assert_eq!(roster.shortfall(3), None, "it has ended");
        roster.enter(&attachment(3));
        roster.note_shortfall(&attachment(3), Some(lack.clone()));
        assert_eq!(roster.shortfall(3), Some(&lack));
        roster.note_shortfall(&attachment(3), None);
        assert_eq!(roster.shortfall(3), None);
        // What is found in the pod stands beside it.
        let passed_by = Enforcement { level: Level::None, why: "past".to_owned() };
        roster.note_passed_by(&attachment(3), Some(passed_by.clone()));
        roster.note_shortfall(&attachment(3), None);
        assert_eq!(roster.passed_by(3), Some(&passed_by));
        roster.note_passed_by(&attachment(3), None);
        assert_eq!(roster.passed_by(3), None);
        roster.note_shortfall(&attachment(3), Some(lack));
        roster.note_passed_by(&attachment(3), Some(passed_by.clone()));
        roster.end(3);
        assert_eq!((roster.shortfall(3), roster.passed_by(3)), (None, None));
        roster.note_passed_by(&attachment(3), Some(passed_by));
        assert_eq!(roster.passed_by(3), None, "it has ended");
    }

    #[test]
    fn a_device_in_a_pod_is_looked_at_unless_it_is_known_that_nothing_runs_there() {
        let mut roster = Roster::default();
        roster.enter(&delegated(3));
        assert_eq!((roster.end(3), roster.end(4)), (false, false));
    }
}
