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
//! Whoever follows has the pod's addresses announced ([`Engine::announce_soon`]): what the kernel has announced at the
//! change was from the new address, and dropped. An agent may end between the two, so each start announces those of all
//! pods that follow a parent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::enforcement;
use crate::attach::{AttachError, Attached, Doing, Engine};
use crate::enforce::Enforce;
use crate::enforce::attachment::{EnforcedAttachment, present_mac};
use crate::enforce::error::EnforceError;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::mac::Mac;
use crate::netlink::{self, Changes, Handle};
use crate::plan::AttachmentPlan;
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

/// A parent that attachments could not follow.
#[derive(Debug, thiserror::Error)]
#[error("attachments on {device}")]
pub struct NotFollowed {
    /// Index of the parent.
    pub parent: u32,
    /// What it is called.
    pub device: String,
    /// The first failure.
    pub source: Arc<EnforceError>,
}

/// The first failure on each parent that could not be followed.
type Failures = BTreeMap<u32, EnforceError>;

impl Parents {
    /// Returns those of the parents that have another address than when all their attachments were looked at, and
    /// counts them as looked at from now on: the caller looks, and reports a failure to [`Parents::look_again`].
    /// `followed`: every parent that has attachments; others are forgotten. One that cannot be read is `failed`.
    fn readdressed(
        &self,
        parents: &BTreeSet<u32>,
        followed: impl Fn(u32) -> bool,
        host: &mut Handle,
        failed: &mut Failures,
    ) -> BTreeSet<u32> {
        let mut looked = locked(&self.0);
        let mut changed = BTreeMap::new();
        for parent in parents {
            match present_mac(host, *parent) {
                Ok(found) => {
                    let other = found.filter(|mac| looked.get(parent) != Some(mac));
                    changed.extend(other.map(|mac| (*parent, mac)));
                }
                Err(error) => {
                    failed.insert(*parent, error.into());
                }
            }
        }
        looked.extend(&changed);
        looked.retain(|parent, _| followed(*parent));
        changed.into_keys().collect()
    }

    /// The attachments on these parents are still to be looked at.
    fn look_again(&self, parents: &Failures) {
        locked(&self.0).retain(|parent, _| !parents.contains_key(parent));
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

/// A look at attachments, which reads each parent once.
struct Look<'e> {
    enforcer: &'e dyn Enforce,
    addresses: Addresses,
    host: Handle,
}

impl<'e> Look<'e> {
    fn begin(enforcer: &'e dyn Enforce) -> Result<Self, netlink::Error> {
        Ok(Self { enforcer, addresses: Addresses::default(), host: Handle::open()? })
    }

    fn not_followed(&mut self, parent: u32, source: EnforceError) -> NotFollowed {
        let device = self.host.link_by_index(parent).map_or_else(|_| nameless(parent), |link| link.name);
        NotFollowed { parent, device, source: Arc::new(source) }
    }
}

/// What a device is called whose name is not to be found out.
fn nameless(index: u32) -> String {
    format!("the device with index {index}")
}

impl Engine {
    /// Returns those parents among the changes that links of pods follow.
    pub fn followed_among(&self, changes: &Changes) -> BTreeSet<u32> {
        self.node.occupied.followed_among(changes).into_iter().collect()
    }

    /// Has attachments follow those of the parents that have got another Ethernet address, and their addresses
    /// announced. Returns the parents of attachments that could not follow: all others have done so, and the next call
    /// for these parents looks at their attachments again.
    pub fn follow_parents(&self, parents: &BTreeSet<u32>) -> Vec<NotFollowed> {
        let Some(enforcer) = &self.node.enforcer else { return Vec::new() };
        let mut look = match Look::begin(enforcer.as_ref()) {
            Ok(look) => look,
            Err(error) => {
                let source = Arc::new(EnforceError::from(error));
                let failed = |parent: &u32| NotFollowed {
                    parent: *parent,
                    device: nameless(*parent),
                    source: Arc::clone(&source),
                };
                return parents.iter().map(failed).collect();
            }
        };
        let (is_parent, mut failures) = (|parent| self.node.occupied.is_parent(parent), Failures::new());
        let changed = self.parents.readdressed(parents, is_parent, &mut look.host, &mut failures);
        if !changed.is_empty() {
            self.follow_changed(&changed, &mut look, &mut failures);
        }
        failures.into_iter().map(|(parent, error)| look.not_followed(parent, error)).collect()
    }

    /// Has attachments follow these parents, which have other Ethernet addresses.
    fn follow_changed(&self, changed: &BTreeSet<u32>, look: &mut Look<'_>, failures: &mut Failures) {
        let mut followed = Vec::new();
        for attached in self.registry.staying().iter().filter(|attached| follows_a_parent(attached)) {
            let failed = |_: &AttachmentPlan, parent, error| {
                failures.entry(parent).or_insert(error);
            };
            let is_other = self.follow_each(attached, look, |parent| changed.contains(&parent), failed);
            followed.extend(is_other.then(|| attached.key.clone()));
        }
        self.parents.look_again(failures);
        self.announce_followed(followed);
    }

    /// Has the attachments of one sandbox follow their parents, and their addresses announced if one has another
    /// Ethernet address now.
    ///
    /// # Errors
    /// The first failure of those that CHECK compares. The periodic looks try again. All others are logged.
    pub(in crate::attach) fn follow_parents_of(&self, attached: &Attached) -> Result<(), AttachError> {
        let Some(enforcer) = self.node.enforcer.as_ref().filter(|_| follows_a_parent(attached)) else {
            return Ok(());
        };
        let mut look = Look::begin(enforcer.as_ref()).map_err(|error| AttachError::Open(error.into()))?;
        let mut outcome = Ok(());
        let is_other = self.follow_each(attached, &mut look, |_| true, |attachment, _, error| {
            if outcome.is_ok() && !attachment.disable_check {
                outcome = Err(AttachError::step(Doing::Check, attachment, "follow its parent", error));
                return;
            }
            let container = &attached.key.container_id;
            tracing::warn!(container, error = %Chain(&error), "cannot follow the parent of a link; will try again");
        });
        self.announce_followed(is_other.then(|| attached.key.clone()).into_iter().collect());
        outcome
    }

    /// Has the attachments of a sandbox on parents that are `wanted` follow these. Returns whether a record was written
    /// anew. Each that cannot be looked at is `failed`, with its parent.
    fn follow_each(
        &self,
        attached: &Attached,
        look: &mut Look<'_>,
        wanted: impl Fn(u32) -> bool,
        mut failed: impl FnMut(&AttachmentPlan, u32, EnforceError),
    ) -> bool {
        let mut is_other = false;
        let Attached { plan, outputs, netns_cookie, .. } = attached;
        for (attachment, mut guarded) in enforcement::guards(plan, outputs, *netns_cookie) {
            let Some(parent) = guarded.inherits().filter(|parent| wanted(*parent)) else { continue };
            let Look { enforcer, addresses, host } = &mut *look;
            match self.parents.follow(*enforcer, &mut guarded, addresses, host) {
                Ok(is_written) => is_other |= is_written,
                Err(error) => failed(attachment, parent, error),
            }
        }
        is_other
    }

    /// Has the addresses of sandboxes announced that have followed their parents.
    pub(in crate::attach) fn announce_followed(&self, followed: Vec<JournalKey>) {
        if followed.is_empty() {
            return;
        }
        tracing::info!(
            sandboxes = followed.len(),
            "parents of pods have other Ethernet addresses, which are now those of the pods"
        );
        self.announce_soon(followed);
    }
}

/// Whether an attachment of the sandbox has the Ethernet address of its parent.
pub(in crate::attach) fn follows_a_parent(attached: &Attached) -> bool {
    attached.plan.attachments.iter().any(|it| it.link().is_some_and(Link::follows_parent))
}

/// Has attachments of an earlier agent take over the Ethernet addresses that they have now. One that cannot be read
/// keeps that in its record.
pub(in crate::attach) fn follow_at_start(enforcer: &dyn Enforce, attachments: &mut [EnforcedAttachment]) {
    let mut following = attachments.iter_mut().filter(|it| it.inherits().is_some()).peekable();
    if following.peek().is_none() {
        return;
    }
    let failed = |error: EnforceError| {
        tracing::warn!(error = %Chain(&error), "cannot read whether parents of pods have another Ethernet address");
    };
    let mut addresses = Addresses::default();
    let mut host = Handle::open().map_err(|error| failed(error.into())).ok();
    for attachment in following {
        let noted = enforcer.mac(attachment.number());
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
    }
}

#[cfg(test)]
mod tests {
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
                let failed = engine.follow_parents(&engine.followed_among(changes));
                assert!(failed.is_empty(), "{failed:?}");
                maps.take_compared()
            };
            assert_eq!(engine.followed_among(&touched([index + 1])), BTreeSet::new());
            assert_eq!(engine.followed_among(&touched([index])), [index].into());
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
            engine.follow_parents_of(&engine.registry.get(&rig::key("a")).unwrap()).unwrap();
            assert_eq!((maps.take_compared(), maps.mac(1)), (vec![1], Some(first)));
            host.announce_all(index, OTHER).unwrap();
            assert_eq!(compared(&touched([index])), [1, 2]);
            // At a start.
            host.announce_all(index, first).unwrap();
            let mut found: Vec<_> = engine.registry.all().iter().flat_map(|it| guarded(it)).collect();
            follow_at_start(&*maps, &mut found);
            assert!(found.iter().all(|it| it.mac() == first));
        })
        .unwrap();
    }

    /// An attachment whose record cannot be written keeps no other from following, on its parent or on others, and only
    /// its parent is looked at again.
    #[test]
    fn one_that_cannot_follow_holds_up_no_other_and_is_a_difference_for_check() {
        let netns = Netns::private().unwrap();
        within(&netns, || {
            let mut host = Handle::open().unwrap();
            let mut bridge = |name: &str| {
                let bridge = Bridge { name: name.to_owned(), ..Bridge::default() };
                host.ensure_bridge(&bridge).unwrap().link.index
            };
            let [wire, other] = ["wire", "other"].map(&mut bridge);
            for index in [wire, other] {
                host.announce_all(index, OTHER).unwrap();
            }
            let (directory, maps) =
                (tempfile::tempdir().unwrap(), crate::sync::Arc::new(rig::Maps::default()));
            let journal = Store::open(directory.path().join("journal")).unwrap();
            let engine = rig::engine(directory.path(), journal, &maps);
            let first = Mac([2, 0, 0, 0, 0, 1]);
            for (container, id, parent) in [("a", rig::LIMIT, wire), ("b", 1, wire), ("c", 2, other)] {
                let attached = on(parent, first, container, id);
                maps.record(id, first);
                engine.node.occupied.adopt(&attached);
                engine.registry.insert(attached);
            }
            let all = engine.followed_among(&Changes::Anything);
            let followed = || {
                let failed = engine.follow_parents(&all).into_iter();
                failed.map(|failed| (failed.parent, Chain(&failed).to_string())).collect::<Vec<_>>()
            };
            let expected = EnforceError::NoDevice("eth0".to_owned());
            let expected = vec![(wire, format!("attachments on wire: {expected}"))];
            assert_eq!(followed(), expected);
            assert_eq!([1, 2].map(|id| maps.mac(id)), [Some(OTHER); 2]);
            assert_eq!(engine.take_unannounced(), [rig::key("b"), rig::key("c")].into());
            maps.take_compared();
            assert_eq!(followed(), expected);
            assert_eq!(maps.take_compared(), [rig::LIMIT], "the others have followed");
            assert_eq!(engine.take_unannounced(), BTreeSet::new());
            let of = |container| engine.registry.get(&rig::key(container)).unwrap();
            let error = Chain(&engine.follow_parents_of(&of("a")).unwrap_err()).to_string();
            assert!(error.starts_with("check net1 (shop/lan): follow its parent: "), "{error}");
            engine.follow_parents_of(&of("b")).unwrap();
        })
        .unwrap();
    }
}
