//! The attached sandboxes of this node, in memory; rebuilt from the journal at start.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::addresses::map_room::MapRoom;
use super::addresses::pool_use::{self, PoolUse};
use crate::budget::{self, Budget};
use crate::cni::{CniError, code};
use crate::journal::{JournalKey, Record};
use crate::npwg::NetworkName;
use crate::plan::Plan;
use crate::plan::pools::Live;
use crate::plan::resolve::Numbers;
use crate::step::{Outputs, Protect, Step};
use crate::sync::{Mutex, MutexGuard, locked};

/// A sandbox whose ADD succeeded.
#[derive(Debug, Clone, PartialEq)]
pub struct Attached {
    /// The key of its record.
    pub key: JournalKey,
    /// The plan that was carried out.
    pub plan: Plan,
    /// The outputs of its steps.
    pub outputs: Outputs,
    /// The cookie of its namespace, if the record has it: see [`Netns::cookie`](crate::netns::Netns::cookie).
    pub netns_cookie: Option<u64>,
    /// When its plan was made, in nanoseconds since the node's boot, if the record has it. A rewritten record
    /// contains the time of rewriting.
    pub planned: Option<u64>,
}

impl From<&Record> for Attached {
    fn from(record: &Record) -> Self {
        let (key, plan, outputs) = (record.key.clone(), record.plan.outline(), record.outputs.clone());
        Self { key, plan, outputs, netns_cookie: record.netns_cookie, planned: record.planned.since_boot }
    }
}

impl From<Record> for Attached {
    fn from(record: Record) -> Self {
        let (plan, planned) = (record.plan.outline(), record.planned.since_boot);
        let Record { key, outputs, netns_cookie, .. } = record;
        Self { key, plan, outputs, netns_cookie, planned }
    }
}

impl Attached {
    /// Whether this was attached dynamically to the live sandbox of that record.
    pub fn belongs_to(&self, sandbox: &JournalKey) -> bool {
        self.key.container_id == sandbox.container_id
            && self.plan.dynamic.as_ref().is_some_and(|dynamic| dynamic.sandbox == sandbox.ifname)
    }

    /// Returns the live sandbox that this was attached to; `None`: this is a sandbox itself.
    pub fn sandbox(&self) -> Option<JournalKey> {
        let dynamic = self.plan.dynamic.as_ref()?;
        Some(JournalKey { container_id: self.key.container_id.clone(), ifname: dynamic.sandbox.clone() })
    }
}

/// All attached sandboxes, and the numbers that are in use.
#[derive(Debug)]
pub struct Registry {
    inner: Mutex<Inner>,
    /// Attachment numbers are below this.
    limit: u32,
}

#[derive(Debug, Default)]
struct Inner {
    sandboxes: BTreeMap<JournalKey, Arc<Attached>>,
    /// The sandboxes of which a part may have been undone.
    leaving: BTreeSet<JournalKey>,
    /// Counts the changes of `sandboxes`.
    revision: u64,
    attachments: BTreeSet<u32>,
    /// The attachment number at which the search for a free one starts. Numbers are assigned in turn, because a
    /// number that was just freed must not be reused until no packet can be counted for its former attachment any
    /// more.
    next: u32,
    /// The number of each network, and its count of users.
    networks: BTreeMap<NetworkName, (u32, u32)>,
    pools: PoolUse,
    room: MapRoom,
}

impl Registry {
    /// An empty registry for attachment numbers 1 to `limit` - 1.
    pub fn new(limit: u32) -> Self {
        let inner = Inner { room: MapRoom::new(limit), ..Inner::default() };
        Self { inner: Mutex::new(inner), limit }
    }

    /// Adds or replaces a sandbox and marks its numbers as used.
    pub fn insert(&self, attached: Arc<Attached>) {
        let mut inner = self.lock();
        inner.hold(&attached.plan);
        // What an earlier agent has attached stays, whether or not there is room for it.
        let _ = inner.room.settle(&attached.plan, &attached.outputs);
        inner.leaving.remove(&attached.key);
        inner.sandboxes.insert(attached.key.clone(), attached);
        inner.revision += 1;
    }

    /// Marks the numbers of a plan that could not be rolled back as used, until [`Registry::remove`]: its inverses
    /// will use them again.
    pub fn hold(&self, plan: &Plan) {
        self.lock().hold(plan);
    }

    /// Counts the addresses that a plan has in fact, after its steps.
    ///
    /// # Errors
    /// Code 7 or 11: they are more than the pod may have, or than there is room for. The plan is to be rolled back.
    pub(super) fn count_addresses(&self, plan: &Plan, outputs: &Outputs) -> Result<(), CniError> {
        self.lock().room.settle(plan, outputs)
    }

    /// Marks the attachment numbers of an unreadable plan as used.
    pub fn hold_numbers(&self, ids: impl IntoIterator<Item = u32>) {
        self.lock().attachments.extend(ids);
    }

    /// Notes that a sandbox is about to be detached, until [`Registry::remove`]: from now on nothing of it is
    /// restored, even if its DEL fails.
    pub fn leaves(&self, key: &JournalKey) {
        self.lock().leaving.insert(key.clone());
    }

    /// Removes a sandbox and frees the numbers of `plan`.
    pub fn remove(&self, key: &JournalKey, plan: &Plan) {
        let mut inner = self.lock();
        inner.leaving.remove(key);
        inner.sandboxes.remove(key);
        inner.revision += 1;
        inner.pools.free(key);
        inner.room.free(key);
        for (network, protect) in protected(plan) {
            inner.free(network, protect.id);
        }
    }

    /// Returns the sandbox of that record, if it is attached.
    pub fn get(&self, key: &JournalKey) -> Option<Arc<Attached>> {
        self.lock().sandboxes.get(key).cloned()
    }

    /// Returns the sandbox of that record, if it is attached, with its dynamic attachments.
    pub fn with_dynamic(&self, key: &JournalKey) -> Vec<Arc<Attached>> {
        let inner = self.lock();
        let Some(sandbox) = inner.sandboxes.get(key) else { return Vec::new() };
        [sandbox].into_iter().chain(inner.dynamic_of(key)).cloned().collect()
    }

    /// Returns the dynamic attachments of that record's sandbox, whether or not the sandbox is still attached.
    pub fn dynamic_of(&self, key: &JournalKey) -> Vec<Arc<Attached>> {
        self.lock().dynamic_of(key).cloned().collect()
    }

    /// Returns the attachments of a container, by interface.
    pub fn of_container(&self, container: &str) -> Vec<Arc<Attached>> {
        self.lock().of_container(container).cloned().collect()
    }

    /// Whether no other DEL removes this: a dynamic attachment is removed with its sandbox, unless it could not be
    /// detached then.
    pub fn goes_by_itself(&self, attached: &Attached) -> bool {
        attached.sandbox().is_none_or(|sandbox| self.get(&sandbox).is_none())
    }

    /// Returns all sandboxes, by container and interface.
    pub fn all(&self) -> Vec<Arc<Attached>> {
        self.lock().sandboxes.values().cloned().collect()
    }

    /// Returns all sandboxes of which nothing has been undone.
    pub fn staying(&self) -> Vec<Arc<Attached>> {
        let inner = self.lock();
        let staying = inner.sandboxes.iter().filter(|(key, _)| !inner.leaving.contains(*key));
        staying.map(|(_, attached)| Arc::clone(attached)).collect()
    }

    /// Returns the sandbox of that record, if it is attached and nothing of it has been undone.
    pub fn stays(&self, key: &JournalKey) -> Option<Arc<Attached>> {
        let inner = self.lock();
        inner.sandboxes.get(key).filter(|_| !inner.leaving.contains(key)).cloned()
    }

    /// Returns a number that changes with the set of attached sandboxes.
    pub fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// Returns the number of attached sandboxes.
    pub fn len(&self) -> usize {
        self.lock().sandboxes.len()
    }

    /// Whether no sandbox is attached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reserves numbers for one plan; they are freed unless [`Reservation::keep`] is called.
    pub fn reserve(&self) -> Reservation<'_> {
        self.reserve_more(0)
    }

    /// Reserves numbers for a pod that holds `held` attachment numbers already.
    pub fn reserve_more(&self, held: usize) -> Reservation<'_> {
        let (taken, pending) = (Vec::new(), None);
        Reservation { registry: self, taken, pending, claimed: None, counted: None, held }
    }

    /// Returns the pools of attachments of these networks, including those that are being made.
    pub fn pools_of<'n>(&self, networks: impl Iterator<Item = &'n NetworkName>) -> Live {
        self.lock().pools.of(networks)
    }

    /// Returns the pools of all attachments.
    pub fn pools(&self) -> Live {
        self.lock().pools.all()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        locked(&self.inner)
    }
}

impl Inner {
    fn dynamic_of<'i>(&'i self, key: &'i JournalKey) -> impl Iterator<Item = &'i Arc<Attached>> {
        self.of_container(&key.container_id).filter(|attached| attached.belongs_to(key))
    }

    /// Searches only the entries of this container.
    fn of_container<'i>(&'i self, container: &'i str) -> impl Iterator<Item = &'i Arc<Attached>> {
        let first = JournalKey { container_id: container.to_owned(), ifname: String::new() };
        let from_there = self.sandboxes.range(first..).map(|(_, attached)| attached);
        from_there.take_while(move |attached| attached.key.container_id == container)
    }

    fn hold(&mut self, plan: &Plan) {
        self.pools.hold(plan);
        self.room.hold(plan);
        for (network, protect) in protected(plan) {
            if self.attachments.insert(protect.id) {
                self.networks.entry(network.clone()).or_insert((protect.zone, 0)).1 += 1;
            }
        }
    }

    fn free(&mut self, network: &NetworkName, id: u32) {
        if !self.attachments.remove(&id) {
            return;
        }
        if let Some((_, users)) = self.networks.get_mut(network) {
            *users -= 1;
            if *users == 0 {
                self.networks.remove(network);
            }
        }
    }
}

/// Numbers taken for a plan that is not recorded yet.
#[derive(Debug)]
pub struct Reservation<'a> {
    registry: &'a Registry,
    taken: Vec<(NetworkName, u32)>,
    pending: Option<u32>,
    /// The plan whose pools are claimed.
    claimed: Option<JournalKey>,
    /// The plan whose addresses are counted.
    counted: Option<JournalKey>,
    /// How many numbers the pod already has.
    held: usize,
}

impl Reservation<'_> {
    /// Returns how many numbers one pod may have: half of all.
    fn share(&self) -> usize {
        self.registry.limit.div_ceil(2) as usize
    }

    /// Claims the pools of the plan.
    ///
    /// # Errors
    /// Code 11: live attachments of a network have another pool.
    pub fn claim_pools(&mut self, plan: &Plan) -> Result<(), CniError> {
        self.registry.lock().pools.claim(plan)?;
        self.claimed = Some(pool_use::key(plan));
        Ok(())
    }

    /// Counts the addresses of the plan.
    ///
    /// # Errors
    /// Code 7: the pod would have too many. Code 11: the other pods of the node leave too few.
    pub fn claim_addresses(&mut self, plan: &Plan) -> Result<(), CniError> {
        self.registry.lock().room.claim(plan)?;
        self.counted = Some(pool_use::key(plan));
        Ok(())
    }

    /// Assigns the numbers, pools and addresses to the plan; [`Registry::remove`] frees them.
    pub fn keep(mut self) {
        self.claimed = None;
        self.counted = None;
        self.taken.clear();
    }
}

impl Numbers for Reservation<'_> {
    fn attachment(&mut self) -> Result<u32, CniError> {
        // Some numbers are reserved for other pods.
        let most = Budget { most: budget::ATTACHMENTS.most.min(self.share()), ..budget::ATTACHMENTS };
        most.check(self.held + self.taken.len() + 1)?;
        let mut inner = self.registry.lock();
        let mut in_turn = (inner.next.max(1)..self.registry.limit).chain(1..inner.next);
        let free = in_turn.find(|id| !inner.attachments.contains(id));
        let id = free.ok_or_else(|| {
            let msg = format!("all {} attachment numbers of this node are in use", self.registry.limit - 1);
            CniError::new(code::TRY_AGAIN_LATER, msg)
        })?;
        inner.attachments.insert(id);
        inner.next = id + 1;
        self.pending = Some(id);
        Ok(id)
    }

    fn network(&mut self, name: &NetworkName) -> u32 {
        let mut inner = self.registry.lock();
        let known = inner.networks.get(name).map(|(number, _)| *number);
        let number = known.unwrap_or_else(|| {
            let used: BTreeSet<u32> = inner.networks.values().map(|(number, _)| *number).collect();
            // There are fewer networks than attachments, so a number below the limit is free.
            (1..=self.registry.limit).find(|number| !used.contains(number)).unwrap_or(self.registry.limit)
        });
        inner.networks.entry(name.clone()).or_insert((number, 0)).1 += 1;
        self.taken.extend(self.pending.take().map(|id| (name.clone(), id)));
        number
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut inner = self.registry.lock();
        for (network, id) in self.taken.drain(..) {
            inner.free(&network, id);
        }
        if let Some(id) = self.pending.take() {
            inner.attachments.remove(&id);
        }
        if let Some(key) = self.claimed.take() {
            inner.pools.free(&key);
        }
        if let Some(key) = self.counted.take() {
            inner.room.free(&key);
        }
    }
}

/// Returns the dataplane's part of a plan: the network name and the settings of each attachment.
pub(super) fn protected(plan: &Plan) -> impl Iterator<Item = (&NetworkName, &Protect)> {
    plan.steps().filter_map(|(_, attachment, step)| match step {
        Step::Protect(protect) => Some((&attachment.network, protect)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_sandbox_whose_del_has_failed_nothing_is_put_back_until_it_is_attached_anew() {
        let registry = Registry::new(3);
        let attached = crate::attach::rig::attached("a", &serde_json::json!(null));
        let key = attached.key.clone();
        registry.insert(Arc::clone(&attached));
        assert_eq!(
            (registry.staying(), registry.stays(&key)),
            (vec![attached.clone()], Some(attached.clone()))
        );
        registry.leaves(&key);
        assert_eq!((registry.staying(), registry.stays(&key)), (Vec::new(), None));
        assert_eq!(registry.get(&key), Some(attached.clone()), "it has its numbers still");
        registry.remove(&key, &attached.plan);
        registry.insert(Arc::clone(&attached));
        assert_eq!(registry.stays(&key), Some(attached));
    }

    #[test]
    fn what_was_attached_to_a_live_sandbox_goes_with_it_as_long_as_that_is_there() {
        let registry = Registry::new(3);
        let sandbox = crate::attach::rig::attached("a", &serde_json::json!(null));
        let mut live = Attached::clone(&sandbox);
        live.key.ifname = "net1".to_owned();
        live.plan.dynamic =
            Some(crate::plan::Dynamic { sandbox: sandbox.key.ifname.clone(), by: String::new() });
        registry.insert(Arc::clone(&sandbox));
        assert_eq!([&*sandbox, &live].map(|it| registry.goes_by_itself(it)), [true, false]);
        registry.remove(&sandbox.key, &sandbox.plan);
        assert!(registry.goes_by_itself(&live));
    }

    #[test]
    fn numbers_come_back_unless_kept() {
        let registry = Registry::new(3);
        let mut first = registry.reserve();
        assert_eq!((first.attachment(), first.network(&"a/x".into())), (Ok(1), 1));
        let mut second = registry.reserve();
        assert_eq!((second.attachment(), second.network(&"a/y".into())), (Ok(2), 2));
        assert_eq!(registry.reserve().attachment().unwrap_err().code, code::TRY_AGAIN_LATER);
        drop(first);
        second.keep();
        let mut third = registry.reserve();
        assert_eq!((third.attachment(), third.network(&"a/y".into())), (Ok(1), 2));
    }

    #[test]
    fn the_addresses_of_a_plan_are_counted_until_it_is_removed_or_was_not_carried_out() {
        let registry = Registry::new(100);
        let of = |container: &str, allowed: usize| {
            let mut plan = crate::attach::rig::plan(std::path::Path::new("/nonexistent"), container, 1);
            for step in &mut plan.attachments[0].steps {
                if let Step::Protect(protect) = step {
                    let one = |number: u32| std::net::IpAddr::from(std::net::Ipv4Addr::from(number));
                    protect.allowed = (0..allowed as u32).map(one).collect();
                }
            }
            plan
        };
        let refused = |plan: &Plan| registry.reserve().claim_addresses(plan).err().map(|error| error.code);
        let most = budget::ADDRESSES_OF_POD.most;
        assert_eq!(refused(&of("a", most)), Some(code::INVALID_CONFIG));
        assert_eq!(refused(&of("a", most - 1)), None);
        let mut full = None;
        for number in 0..40 {
            let plan = of(&format!("greedy-{number}"), most - 1);
            let mut numbers = registry.reserve();
            match numbers.claim_addresses(&plan) {
                Ok(()) => numbers.keep(),
                Err(error) => full = full.or(Some(error.code)),
            }
        }
        assert_eq!(full, Some(code::TRY_AGAIN_LATER));
        assert_eq!(refused(&of("a", most - 1)), Some(code::TRY_AGAIN_LATER));
        assert_eq!(refused(&of("a", 0)), None, "its own address on the default network");
        let gone = of("greedy-0", most - 1);
        registry.remove(&pool_use::key(&gone), &gone);
        assert_eq!(refused(&of("a", most - 1)), None);
    }

    #[test]
    fn a_number_that_was_left_just_now_is_given_out_last() {
        let registry = Registry::new(5);
        registry.hold_numbers([2]);
        let one = || {
            let mut reservation = registry.reserve();
            let given = reservation.attachment();
            drop(reservation);
            given
        };
        assert_eq!([(); 5].map(|()| one()), [1, 3, 4, 1, 3].map(Ok));
    }
}
