//! Attachments whose programs wait until a policy selects them.
//!
//! Attachments of other plugins have their policies in the maps from the ADD on, so only the programs
//! remain to be attached. Unless the network asks for it at once, this is deferred until a policy selects
//! the attachment: on a device in a pod it takes two RCU grace periods, and source checks might break
//! traffic that works without them. Running programs stay until the attachment ends.

use std::collections::BTreeMap;

use super::attachment::EnforcedAttachment;
use super::policy_maps::PolicyMaps;

/// The deferred attachments, by number.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    waiting: BTreeMap<u32, EnforcedAttachment>,
}

impl Deferred {
    /// Defers an attachment.
    pub(super) fn wait(&mut self, attachment: &EnforcedAttachment) {
        self.waiting.insert(attachment.id, attachment.clone());
    }

    /// Removes an attachment: its programs run, or it has ended.
    pub(super) fn remove(&mut self, id: u32) {
        self.waiting.remove(&id);
    }

    /// Whether an attachment is deferred.
    pub(super) fn waits(&self, id: u32) -> bool {
        self.waiting.contains_key(&id)
    }

    /// The attachment of this number, if it is deferred and isolated: its programs are to be attached now.
    pub(super) fn due(&self, id: u32, maps: &PolicyMaps) -> Option<&EnforcedAttachment> {
        self.waiting.get(&id).filter(|_| maps.is_isolated(id))
    }

    /// All attachments whose programs are to be attached now.
    pub(super) fn all_due(&self, maps: &PolicyMaps) -> Vec<u32> {
        self.waiting.keys().copied().filter(|id| maps.is_isolated(*id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::attachment::tests::delegated;
    use super::super::policy_maps::fake::FakeKernel;
    use super::*;
    use crate::bpf::PolicyIds;
    use crate::policy::diff::DENY_ALL;

    #[test]
    fn programs_are_due_once_a_policy_isolates_an_attachment_that_waits() {
        let (kernel, mut maps) = (FakeKernel::default(), PolicyMaps::default());
        let mut deferred = Deferred::default();
        deferred.wait(&delegated(3));
        assert_eq!((deferred.waits(3), deferred.due(3, &maps)), (true, None));
        maps.assign(3, PolicyIds::default(), &kernel).unwrap();
        assert_eq!(deferred.all_due(&maps), [0; 0], "no policy selects it");
        for id in [3, 4] {
            maps.assign(id, PolicyIds { ingress: 0, egress: DENY_ALL }, &kernel).unwrap();
        }
        assert_eq!((deferred.due(3, &maps), deferred.all_due(&maps)), (Some(&delegated(3)), vec![3]));
        deferred.remove(3);
        assert_eq!((deferred.waits(3), deferred.due(3, &maps)), (false, None));
    }
}
