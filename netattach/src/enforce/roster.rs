//! The enforced attachments: their endpoints for policies, and the hook points of their programs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::attachment::EnforcedAttachment;
use super::level::PastBy;
use crate::hooks::HookPoint;
use crate::objects::{ObjectName, Place};
use crate::policy::index::{Endpoint, Endpoints};
use crate::policy::level::Enforcement;

/// The data kept per attachment, by number. An attachment is entered before its programs run. It leaves in
/// two steps: first no more programs are attached for it; once its record is gone, policies no longer see
/// it.
#[derive(Debug, Default)]
pub(super) struct Roster {
    endpoints: Endpoints,
    /// The sets of places of the endpoints: thousands of endpoints share a few.
    places: BTreeSet<Arc<BTreeSet<Place>>>,
    points: BTreeMap<u32, Point>,
    /// What the programs of some attachments lacked at the last check.
    shortfalls: BTreeMap<u32, Enforcement>,
    /// Which packets bypassed the programs of some attachments at the last check of their pods.
    passed_by: BTreeMap<u32, Enforcement>,
    /// Attachments whose pods had devices of kind `ifb` at the last check, as far as these matter for them
    /// or others, each with the parent whose links the device reaches.
    with_ifb: BTreeMap<u32, Option<u32>>,
    /// The same, indexed by parent.
    with_ifb_on: BTreeSet<(u32, u32)>,
}

/// The hook point of an attachment's programs.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Point {
    point: HookPoint,
    delegated: bool,
    /// Whether it is a representor.
    behind_card: bool,
    /// Index of the parent whose links reach each other within it.
    shares: Option<u32>,
}

impl Point {
    fn of(attachment: &EnforcedAttachment) -> Self {
        Self {
            point: attachment.point.clone(),
            delegated: attachment.is_delegated(),
            behind_card: attachment.is_on_representor(),
            shares: attachment.shares,
        }
    }

    /// Whether its pod can bypass its programs by a device of kind `ifb`: that is possible if they see the
    /// pod's packets on a device that receives them in the node. Programs in the pod see packets before
    /// they leave it, which no such device prevents.
    fn is_past_by_ifb(&self) -> bool {
        match self.point {
            HookPoint::NodeEnd(_) => !self.behind_card,
            HookPoint::Parent { .. } => self.shares.is_some(),
            HookPoint::Pod(_) | HookPoint::Nowhere(_) => false,
        }
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
        self.forget_ifb(id);
    }

    fn forget_ifb(&mut self, id: u32) {
        if let Some(Some(parent)) = self.with_ifb.remove(&id) {
            self.with_ifb_on.remove(&(parent, id));
        }
    }

    fn shared(&mut self, at: &Arc<BTreeSet<Place>>) -> Arc<BTreeSet<Place>> {
        if let Some(known) = self.places.get(at) {
            return Arc::clone(known);
        }
        // Drops place sets without an endpoint.
        self.places.retain(|places| Arc::strong_count(places) > 1);
        self.places.insert(Arc::clone(at));
        Arc::clone(at)
    }

    /// Stops attaching programs for an attachment. Returns whether no programs can be running on a device
    /// in its pod: they run there if another plugin made the interface or the link's hook point is there,
    /// and possibly for an unknown attachment.
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

    /// Records what an attachment's programs lack, unless it has ended meanwhile.
    pub(super) fn note_shortfall(&mut self, attachment: &EnforcedAttachment, found: Option<Enforcement>) {
        match found.filter(|_| self.is_current(attachment)) {
            Some(found) => self.shortfalls.insert(attachment.id, found),
            None => self.shortfalls.remove(&attachment.id),
        };
    }

    /// Returns what an attachment's programs lacked at the last check.
    pub(super) fn shortfall(&self, id: u32) -> Option<&Enforcement> {
        self.shortfalls.get(&id)
    }

    /// Records which packets bypass an attachment's programs, unless it has ended meanwhile.
    pub(super) fn note_passed_by(&mut self, attachment: &EnforcedAttachment, found: Option<Enforcement>) {
        match found.filter(|_| self.is_current(attachment)) {
            Some(found) => self.passed_by.insert(attachment.id, found),
            None => self.passed_by.remove(&attachment.id),
        };
    }

    /// Returns which packets bypassed an attachment's programs at the last check.
    pub(super) fn passed_by(&self, id: u32) -> Option<&Enforcement> {
        self.passed_by.get(&id)
    }

    /// Records whether the pod of the attachment with this number has a device of kind `ifb`. Returns
    /// whether packets can bypass the programs of this attachment, or of others on its parent, by it.
    pub(super) fn note_ifb(&mut self, id: u32, has_one: bool) -> bool {
        let matters = |known: &Point| known.is_past_by_ifb() || known.shares.is_some();
        let known = self.points.get(&id).filter(|known| has_one && matters(known));
        let shares = known.map(|known| known.shares);
        self.forget_ifb(id);
        let Some(shares) = shares else { return false };
        self.with_ifb.insert(id, shares);
        self.with_ifb_on.extend(shares.map(|parent| (parent, id)));
        true
    }

    /// Returns whose device of kind `ifb` lets packets bypass an attachment's programs.
    pub(super) fn past_by_ifb(&self, id: u32) -> Option<PastBy> {
        if self.with_ifb.is_empty() {
            return None;
        }
        let known = self.points.get(&id)?;
        if known.is_past_by_ifb() && self.with_ifb.contains_key(&id) {
            return Some(PastBy::ItsPod);
        }
        let parent = known.shares?;
        let mut on_it = self.with_ifb_on.range((parent, 0)..=(parent, u32::MAX));
        on_it.any(|(_, other)| *other != id).then_some(PastBy::PodOnItsParent)
    }

    /// Whether an attachment's programs are on a representor.
    pub(super) fn is_behind_card(&self, id: u32) -> bool {
        self.points.get(&id).is_some_and(|known| known.behind_card)
    }

    /// Returns the index of the device on the node on which an attachment's programs run; 0 if they are not
    /// on the node.
    pub(super) fn host_index(&self, id: u32) -> Option<u32> {
        self.points.get(&id).map(|known| known.point.host_index())
    }

    /// The attachments that policies can select.
    pub(super) fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// Returns the same with the hook points of their programs.
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
    use crate::bpf::OnParent;
    use crate::hooks::PodDevice;
    use crate::netns::NetnsId;

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
        // The finding in the pod is kept beside it.
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
    fn a_pod_with_an_ifb_lowers_what_sees_it_from_the_node_and_all_on_its_parent() {
        const NAMESPACE: NetnsId = NetnsId { device: 1, inode: 2 };
        let device = |index| {
            let netns = "/nonexistent".into();
            PodDevice { netns, netns_id: NAMESPACE, netns_cookie: None, index }
        };
        let on = |parent, siblings| HookPoint::Parent {
            on: OnParent { parent, siblings, netns_cookie: 0 },
            macvlan: device(2),
        };
        let mut roster = Roster::default();
        let mut enter = |id, point: HookPoint, shares| {
            let mut entered = attachment(id);
            (entered.point, entered.shares) = (point, shares);
            roster.enter(&entered);
        };
        enter(1, HookPoint::NodeEnd(7), None);
        enter(2, on(8, true), Some(8));
        enter(3, on(8, true), Some(8));
        enter(4, on(9, true), Some(9));
        // Not in mode bridge: its packets leave by the parent.
        enter(5, on(9, false), None);
        // Ipvlans, and a device.
        enter(6, HookPoint::Pod(device(2)), Some(10));
        enter(7, HookPoint::Pod(device(2)), Some(10));
        enter(8, HookPoint::Pod(device(2)), None);
        enter(9, HookPoint::NodeEnd(11), None);
        let (own, other) = (Some(PastBy::ItsPod), Some(PastBy::PodOnItsParent));
        let found = |roster: &Roster| (1..=9).map(|id| roster.past_by_ifb(id)).collect::<Vec<_>>();
        assert_eq!(found(&roster), [None; 9]);
        let noted: Vec<bool> = [1, 2, 5, 6, 8, 99].map(|id| roster.note_ifb(id, true)).to_vec();
        assert_eq!(noted, [true, true, false, true, false, false]);
        assert_eq!(found(&roster), [own, own, other, None, None, None, other, None, None]);
        assert!(!roster.note_ifb(2, false));
        assert_eq!(found(&roster), [own, None, None, None, None, None, other, None, None]);
        // Its number now belongs to another attachment, on another parent.
        let mut moved = attachment(6);
        (moved.point, moved.shares) = (HookPoint::Pod(device(2)), Some(8));
        roster.enter(&moved);
        roster.enter(&attachment(1));
        assert_eq!(found(&roster), [None; 9], "attachments that have the numbers of others");
        assert!(roster.note_ifb(6, true));
        assert_eq!(found(&roster), [None, other, other, None, None, None, None, None, None]);
        roster.end(6);
        assert_eq!(found(&roster), [None; 9], "an attachment that has ended");
        assert!(roster.with_ifb.is_empty() && roster.with_ifb_on.is_empty());
    }

    #[test]
    fn a_device_in_a_pod_is_looked_at_unless_it_is_known_that_nothing_runs_there() {
        let mut roster = Roster::default();
        roster.enter(&delegated(3));
        assert_eq!((roster.end(3), roster.end(4)), (false, false));
    }
}
