//! The attachments that are enforced: what policies can select of them, and where their programs run.

use std::collections::BTreeMap;

use super::attachment::EnforcedAttachment;
use crate::hooks::HookPoint;
use crate::objects::ObjectName;
use crate::policy::index::Endpoint;

/// What is kept of each attachment, by number. An attachment is entered before its programs run. It leaves in two steps: first
/// nothing is run for it any more, and when its record is gone policies do not see it any more.
#[derive(Debug, Default)]
pub(super) struct Roster {
    endpoints: BTreeMap<u32, Endpoint>,
    points: BTreeMap<u32, Point>,
}

/// Where the programs of an attachment run.
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
    /// Enters an attachment, in place of an earlier one of its number.
    pub(super) fn enter(&mut self, attachment: &EnforcedAttachment) {
        self.points.insert(attachment.id, Point::of(attachment));
        if let Some(endpoint) = &attachment.endpoint {
            self.endpoints.insert(attachment.id, endpoint.clone());
        }
    }

    /// From here on nothing is run for an attachment. Says whether nothing can be running on a device in its pod: programs run
    /// there where another plugin made the interface or the link has its hook point there; of an unknown one, everything is possible.
    pub(super) fn end(&mut self, id: u32) -> bool {
        self.points
            .remove(&id)
            .is_some_and(|known| !known.delegated && !matches!(known.point, HookPoint::Pod(_)))
    }

    /// Policies do not see an attachment any more. Says whether they did.
    pub(super) fn leave(&mut self, id: u32) -> bool {
        self.endpoints.remove(&id).is_some()
    }

    /// Whether that is the attachment of its number: the number of one that has ended may be given to another.
    pub(super) fn is_current(&self, attachment: &EnforcedAttachment) -> bool {
        self.points.get(&attachment.id) == Some(&Point::of(attachment))
    }

    /// The attachments that policies can select.
    pub(super) fn endpoints(&self) -> &BTreeMap<u32, Endpoint> {
        &self.endpoints
    }

    /// The same, with where their programs run.
    pub(super) fn placed(&self) -> impl Iterator<Item = (&Endpoint, &HookPoint)> {
        let placed = |endpoint: &'_ Endpoint| self.points.get(&endpoint.id).map(|known| &known.point);
        self.endpoints.values().filter_map(move |endpoint| Some((endpoint, placed(endpoint)?)))
    }

    /// Whether a pod has an attachment here.
    pub(super) fn has_pod(&self, pod: &ObjectName) -> bool {
        self.endpoints.values().any(|endpoint| endpoint.pod == *pod)
    }
}

#[cfg(test)]
mod tests {
    use super::super::attachment::tests::{attachment, delegated};
    use super::*;

    #[test]
    fn an_attachment_is_seen_by_policies_until_its_record_is_gone() {
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
    fn a_device_in_a_pod_is_looked_at_unless_it_is_known_that_nothing_runs_there() {
        let mut roster = Roster::default();
        roster.enter(&delegated(3));
        assert_eq!((roster.end(3), roster.end(4)), (false, false));
    }
}
