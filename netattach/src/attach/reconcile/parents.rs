//! Has attachments follow parents that get another Ethernet address, such as a bond that fails over: a pod is cut off
//! while the dataplane expects the former one.
//!
//! The kernel's notifications come for every link that is made on a parent or removed from it, and an address changes
//! rarely. So of a parent among the changes only the address is read, and of its attachments only those are looked at
//! whose records have another one ([`Parents`]).
//!
//! | who | when |
//! |---|---|
//! | [`Engine::adopt`](crate::attach::Engine::adopt) | at the start, before anything else |
//! | [`Engine::follow_parents`] | at once, and at each notification |
//! | [`Engine::settle`](crate::attach::Engine::settle) | after an ADD: its parent may have changed before the registry had the attachment |
//! | CHECK, [`Engine::restore_attachments`](crate::attach::Engine::restore_attachments) | with their own looks |
//!
//! Whoever follows announces the pod's addresses: what the kernel has announced at the change was from the new address,
//! and dropped.

use std::collections::{BTreeMap, BTreeSet};

use super::enforcement;
use crate::attach::{Attached, Engine};
use crate::enforce::Enforce;
use crate::enforce::attachment::{EnforcedAttachment, present_mac};
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::mac::Mac;
use crate::netlink::{self, Changes, Handle};
use crate::spec::Link;
use crate::sync::{Mutex, locked};

/// The parents whose attachments have all been looked at since the parent has its Ethernet address; at most as many as
/// there are parents.
///
/// The lock is held while the address of a parent is compared with a record, and until the record is written: of two
/// that follow at once, the later one sees the newer address. Inside it are the dataplane's locks and requests to the
/// kernel.
#[derive(Debug, Default)]
pub(in crate::attach) struct Parents(Mutex<BTreeMap<u32, Mac>>);

/// The Ethernet addresses of parents, each read once for one look at many attachments; `None`: the parent is gone or
/// has none.
#[derive(Debug, Default)]
pub(in crate::attach) struct Addresses(BTreeMap<u32, Option<Mac>>);

impl Addresses {
    fn of(&mut self, parent: u32, host: &mut Handle) -> Result<Option<Mac>, netlink::Error> {
        match self.0.get(&parent) {
            Some(known) => Ok(*known),
            None => self.again(parent, host),
        }
    }

    fn again(&mut self, parent: u32, host: &mut Handle) -> Result<Option<Mac>, netlink::Error> {
        let found = present_mac(host, parent)?;
        self.0.insert(parent, found);
        Ok(found)
    }
}

impl Parents {
    /// Returns those of the parents that have another address than when all their attachments were looked at, and
    /// counts them as looked at from now on: the caller looks, and reports a failure to [`Parents::look_again`].
    /// `followed`: every parent that has attachments; others are forgotten.
    fn readdressed(
        &self,
        parents: &[u32],
        followed: impl Fn(u32) -> bool,
        host: &mut Handle,
    ) -> Result<BTreeSet<u32>, EnforceError> {
        let mut looked = locked(&self.0);
        let mut changed = BTreeMap::new();
        for parent in parents {
            let found = present_mac(host, *parent)?;
            changed.extend(found.filter(|mac| looked.get(parent) != Some(mac)).map(|mac| (*parent, mac)));
        }
        looked.retain(|parent, _| followed(*parent));
        looked.extend(&changed);
        Ok(changed.into_keys().collect())
    }

    /// The attachments on these parents are still to be looked at.
    fn look_again(&self, parents: &BTreeSet<u32>) {
        locked(&self.0).retain(|parent, _| !parents.contains(parent));
    }

    /// Has an attachment take over the Ethernet address that it has now, see [`EnforcedAttachment::follow_parent`], and
    /// writes its record anew if that has another one. Returns whether it did.
    ///
    /// # Errors
    /// The parent or the interface cannot be read, or the record not be written.
    pub(in crate::attach) fn follow(
        &self,
        enforcer: &dyn Enforce,
        guarded: &mut EnforcedAttachment,
        addresses: &mut Addresses,
        host: &mut Handle,
    ) -> Result<bool, EnforceError> {
        let Some(parent) = guarded.inherits() else { return Ok(false) };
        let mut looked = locked(&self.0);
        let noted = enforcer.mac(guarded.number());
        if noted.is_some() && addresses.of(parent, host)? == noted {
            guarded.keep(noted);
            return Ok(false);
        }
        // The address that was read before may have changed again.
        guarded.follow_parent(noted, addresses.again(parent, host)?)?;
        let is_written = enforcer.follow(guarded)?;
        if is_written && looked.get(&parent) != Some(&guarded.mac()) {
            looked.remove(&parent);
        }
        Ok(is_written)
    }
}

impl Engine {
    /// Whether the changes may be of parents that links of pods follow.
    pub fn has_parent_among(&self, changes: &Changes) -> bool {
        !self.node.occupied.followed_among(changes).is_empty()
    }

    /// Has attachments follow those parents among the changes that have got another Ethernet address, and announces
    /// their addresses.
    ///
    /// # Errors
    /// The last failure. The next call looks at the attachments on these parents again, if they are among the changes.
    pub fn follow_parents(&self, changes: &Changes) -> Result<(), EnforceError> {
        let Some(enforcer) = &self.node.enforcer else { return Ok(()) };
        let occupied = &self.node.occupied;
        let mut host = Handle::open()?;
        let among = occupied.followed_among(changes);
        let changed = self.parents.readdressed(&among, |parent| occupied.is_parent(parent), &mut host)?;
        if changed.is_empty() {
            return Ok(());
        }
        let (mut followed, mut outcome) = (Vec::new(), Ok(()));
        let mut addresses = Addresses::default();
        for attached in self.registry.staying().iter().filter(|attached| has_follower(attached)) {
            let on_changed = |guarded: &EnforcedAttachment| {
                guarded.inherits().is_some_and(|parent| changed.contains(&parent))
            };
            let (is_other, done) =
                self.follow_each((enforcer.as_ref(), attached), on_changed, &mut addresses, &mut host);
            followed.extend(is_other.then(|| attached.key.clone()));
            outcome = done.and(outcome);
        }
        if outcome.is_err() {
            self.parents.look_again(&changed);
        }
        self.announce_followed(&followed);
        outcome
    }

    /// Has the attachments of one sandbox follow their parents, and announces their addresses if one has another
    /// Ethernet address now. A failure is logged: the periodic looks try again.
    pub(in crate::attach) fn follow_parents_of(&self, attached: &Attached) {
        let Some(enforcer) = self.node.enforcer.as_ref().filter(|_| has_follower(attached)) else { return };
        let (mut addresses, of) = (Addresses::default(), (enforcer.as_ref(), attached));
        let (is_other, outcome) = match Handle::open() {
            Ok(mut host) => self.follow_each(of, |_| true, &mut addresses, &mut host),
            Err(error) => (false, Err(error.into())),
        };
        if is_other {
            self.announce_followed(std::slice::from_ref(&attached.key));
        }
        if let Err(error) = outcome {
            let container = &attached.key.container_id;
            tracing::warn!(container, error = %Chain(&error), "cannot read the parents of its links; will try again");
        }
    }

    /// Has those attachments of a sandbox that are `wanted` follow their parents. Returns whether a record was written
    /// anew, and the last failure.
    fn follow_each(
        &self,
        (enforcer, attached): (&dyn Enforce, &Attached),
        wanted: impl Fn(&EnforcedAttachment) -> bool,
        addresses: &mut Addresses,
        host: &mut Handle,
    ) -> (bool, Result<(), EnforceError>) {
        let (mut is_other, mut outcome) = (false, Ok(()));
        let Attached { plan, outputs, netns_cookie, .. } = attached;
        let guards = enforcement::guards(plan, outputs, *netns_cookie).map(|(_, guarded)| guarded);
        for mut guarded in guards.filter(wanted) {
            match self.parents.follow(enforcer, &mut guarded, addresses, host) {
                Ok(is_written) => is_other |= is_written,
                Err(error) => outcome = Err(error),
            }
        }
        (is_other, outcome)
    }

    /// Announces the addresses of sandboxes that have followed their parents.
    pub(in crate::attach) fn announce_followed(&self, followed: &[JournalKey]) {
        if followed.is_empty() {
            return;
        }
        tracing::info!(
            sandboxes = followed.len(),
            "parents of pods have other Ethernet addresses, which are now those of the pods"
        );
        for key in followed {
            if let Err(error) = self.announce(key) {
                let container = &key.container_id;
                tracing::warn!(container, error = %Chain(&error), "addresses not announced to neighbours");
            }
        }
    }
}

/// Whether an attachment of the sandbox has the Ethernet address of its parent.
fn has_follower(attached: &Attached) -> bool {
    attached.plan.attachments.iter().any(|it| it.link().is_some_and(Link::follows_parent))
}

/// Has attachments of an earlier agent take over the Ethernet addresses that they have now. One that cannot be read
/// keeps that in its record. Returns the numbers of those with another one than in the record.
pub(in crate::attach) fn follow_at_start(
    enforcer: &dyn Enforce,
    attachments: &mut [EnforcedAttachment],
) -> BTreeSet<u32> {
    let mut followed = BTreeSet::new();
    let mut following = attachments.iter_mut().filter(|it| it.inherits().is_some()).peekable();
    if following.peek().is_none() {
        return followed;
    }
    let failed = |error: EnforceError| {
        tracing::warn!(error = %Chain(&error), "cannot read whether parents of pods have another Ethernet address");
    };
    let mut addresses = Addresses::default();
    let mut host = Handle::open().map_err(|error| failed(error.into())).ok();
    for attachment in following {
        let noted = enforcer.mac(attachment.number());
        let before = noted.unwrap_or(attachment.mac());
        let taken_over = match (&mut host, attachment.inherits()) {
            (Some(host), Some(parent)) => {
                let of_parent = addresses.of(parent, host).map_err(EnforceError::from);
                of_parent
                    .and_then(|of_parent| attachment.follow_parent(noted, of_parent))
                    .map_err(failed)
                    .is_ok()
            }
            _ => false,
        };
        if !taken_over {
            attachment.keep(noted);
        }
        followed.extend((attachment.mac() != before).then(|| attachment.number()));
    }
    followed
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;
    use crate::netlink::Touched;
    use crate::netns::{Netns, within};
    use crate::plan::{Plan, fixtures};
    use crate::spec::{Bridge, Ipvlan, IpvlanMode};
    use crate::step::{Interface, Output, Outputs, Parent, Protect, Step, StepRef};

    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 0x77]);

    fn interface(name: &str, index: u32, mac: Mac) -> Interface {
        Interface { name: name.to_owned(), index, mac: Some(mac), mtu: 1500 }
    }

    /// A sandbox with an ipvlan on a parent of this index that had that address, and whose namespace is gone.
    fn on(parent: u32, mac: Mac, container: &str, id: u32) -> Arc<Attached> {
        let link = Link::Ipvlan(Ipvlan {
            pod_name: "net1".to_owned(),
            parent: Some("wire".to_owned()),
            mode: IpvlanMode::L2,
            mtu: None,
            group: 1,
            in_pod: false,
        });
        let steps = vec![Step::CreateLink(link), Step::Protect(Protect { id, ..Protect::verified() })];
        let attachments = vec![fixtures::attachment("ipvlan", steps)];
        let device = interface("wire", parent, mac);
        let parent = Some(Parent { device, netns_cookie: 0, trunks: Vec::new() });
        let made = Output::Link { host: None, pod: interface("net1", 9, mac), parent };
        Arc::new(Attached {
            key: rig::key(container),
            plan: Plan { sandbox: fixtures::sandbox(container), attachments, dynamic: None },
            outputs: Outputs::from_iter([(StepRef(0, 0), made)]),
            netns_cookie: None,
            planned: None,
        })
    }

    fn guarded(attached: &Attached) -> Vec<EnforcedAttachment> {
        enforcement::guards(&attached.plan, &attached.outputs, None).map(|(_, guarded)| guarded).collect()
    }

    fn touched(links: impl Into<BTreeSet<u32>>) -> Changes {
        Changes::Of(Touched { links: links.into(), ..Touched::default() })
    }

    /// Rows: IVL-parent-mac.
    #[test]
    fn only_a_parent_with_another_address_is_followed_and_only_by_those_whose_record_differs() {
        let netns = Netns::private().unwrap();
        within(&netns, || {
            let mut host = Handle::open().unwrap();
            let wire =
                host.ensure_bridge(&Bridge { name: "wire".to_owned(), ..Bridge::default() }).unwrap().link;
            let (index, first) = (wire.index, wire.mac.unwrap());
            let (directory, maps) =
                (tempfile::tempdir().unwrap(), crate::sync::Arc::new(rig::Maps::default()));
            let journal = Store::open(directory.path().join("journal")).unwrap();
            let engine = rig::engine(directory.path(), journal, &maps);
            for (container, id) in [("a", 1), ("b", 2)] {
                let attached = on(index, first, container, id);
                maps.record(id, first);
                engine.node.occupied.adopt(&attached);
                engine.registry.insert(attached);
            }
            let compared = |changes: &Changes| {
                engine.follow_parents(changes).unwrap();
                maps.take_compared()
            };
            assert!(!engine.has_parent_among(&touched([index + 1])));
            assert!(engine.has_parent_among(&touched([index])));
            assert_eq!(compared(&Changes::Anything), [0; 0], "as it was");
            host.announce_all(index, OTHER).unwrap();
            maps.record(2, OTHER);
            assert_eq!(compared(&touched([index + 1])), [0; 0], "another device");
            assert_eq!(compared(&touched([index])), [1]);
            assert_eq!(maps.mac(1), Some(OTHER));
            // As when a pod comes or goes. What others do to a record is for the periodic looks.
            maps.record(2, first);
            assert_eq!(compared(&touched([index])), [0; 0]);
            // A parent that has an address for a moment in which a periodic look finds it.
            host.announce_all(index, first).unwrap();
            engine.follow_parents_of(&engine.registry.get(&rig::key("a")).unwrap());
            assert_eq!((maps.take_compared(), maps.mac(1)), (vec![1], Some(first)));
            host.announce_all(index, OTHER).unwrap();
            assert_eq!(compared(&touched([index])), [1, 2]);
            // At a start.
            host.announce_all(index, first).unwrap();
            let mut found: Vec<_> = engine.registry.all().iter().flat_map(|it| guarded(it)).collect();
            assert_eq!(follow_at_start(&*maps, &mut found), [1, 2].into());
            assert!(found.iter().all(|it| it.mac() == first));
        })
        .unwrap();
    }
}
