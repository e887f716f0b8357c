//! Macvlans and their parents: the map in which programs on a parent find the attachment of a frame.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use netattach_common::parent::flag;
use netattach_common::{self as common, ParentEntry, ParentKey};

use super::BpfError;
use super::map_ops::MapOps;

/// The device at which an attachment's frames are judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A device that belongs to the attachment alone, by index.
    Own(u32),
    /// The parent of its macvlan.
    Parent(OnParent),
    /// The device in the pod.
    InPod,
    /// No device.
    Nowhere,
}

impl Device {
    /// Index of the device in the node's namespace; 0 if the device is not there.
    pub fn index(&self) -> u32 {
        match self {
            Self::Own(index) => *index,
            Self::Parent(on) => on.parent,
            Self::InPod | Self::Nowhere => 0,
        }
    }
}

/// The parent of an attachment's macvlan. Frames are matched by parent and Ethernet address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnParent {
    /// Index of the parent in the node's namespace.
    pub parent: u32,
    /// Whether the driver delivers frames to siblings itself, by way of the parent's ingress (mode bridge).
    pub siblings: bool,
    /// Cookie of the pod's network namespace (`SO_NETNS_COOKIE`); 0 if the kernel has no cookies.
    pub netns_cookie: u64,
}

/// The devices by which an attachment's frames leave once more after they have been judged: the devices below
/// a VLAN.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trunks {
    /// Cookie of the pod's network namespace; 0 if the kernel has no cookies.
    pub netns_cookie: u64,
    /// Index of each device in the node's namespace, with the VLAN of the frames there.
    pub on: Vec<(u32, u16)>,
}

/// A parent that runs the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parent {
    /// Cookie of the node's namespace, whose frames pass.
    pub netns_cookie: u64,
    /// Whether the parent is a network card. If so, frames that come in by it and originate in this kernel
    /// were sent from macvlan to macvlan.
    pub card: bool,
    /// Whether frames from other namespaces pass if their source address belongs to no attachment.
    pub strangers: bool,
    /// Whether the agent created the device's `clsact`.
    pub own_clsact: bool,
}

/// The map `na_par`, with a cache of its entries.
pub(super) struct Parents {
    map: Box<dyn MapOps<ParentKey, ParentEntry>>,
    entries: BTreeMap<ParentKey, ParentEntry>,
    index: Index,
    /// Trunks of the attachments that have any.
    trunks: BTreeMap<u32, Trunks>,
}

/// Indices over the entries, so that a lookup does not scan the entries of a thousand macvlans.
#[derive(Debug, Default, PartialEq, Eq)]
struct Index {
    /// The addresses of each attachment.
    of: HashMap<u32, BTreeSet<ParentKey>>,
    /// Number of addresses on each parent.
    on: BTreeMap<u32, usize>,
    /// Number of addresses on each parent, by the cookie of their namespace.
    within: HashMap<u64, BTreeMap<u32, usize>>,
    /// The parents in the map.
    covered: BTreeSet<u32>,
    /// Cookies of namespaces in the map that have no address. An agent may have been killed before it added
    /// the macvlan of a namespace.
    unused: BTreeSet<u64>,
}

impl Index {
    fn add(&mut self, key: ParentKey, entry: &ParentEntry) {
        let cookie = entry.netns_cookie;
        if entry.attachment != 0 {
            self.of.entry(entry.attachment).or_default().insert(key);
            *self.on.entry(key.ifindex).or_default() += 1;
            *self.within.entry(cookie).or_default().entry(key.ifindex).or_default() += 1;
            self.unused.remove(&cookie);
        } else if key == ParentKey::namespace(cookie) {
            if !self.within.contains_key(&cookie) {
                self.unused.insert(cookie);
            }
        } else if key == ParentKey::itself(key.ifindex) {
            self.covered.insert(key.ifindex);
        }
    }

    /// `is_entered`: whether the map has an entry for a namespace.
    fn take(&mut self, key: ParentKey, entry: &ParentEntry, is_entered: impl Fn(u64) -> bool) {
        let cookie = entry.netns_cookie;
        if entry.attachment != 0 {
            if let Some(keys) = self.of.get_mut(&entry.attachment) {
                keys.remove(&key);
                if keys.is_empty() {
                    self.of.remove(&entry.attachment);
                }
            }
            take_one(&mut self.on, key.ifindex);
            if let Some(on) = self.within.get_mut(&cookie) {
                take_one(on, key.ifindex);
                if on.is_empty() {
                    self.within.remove(&cookie);
                    if is_entered(cookie) {
                        self.unused.insert(cookie);
                    }
                }
            }
        } else if key == ParentKey::namespace(cookie) {
            self.unused.remove(&cookie);
        } else if key == ParentKey::itself(key.ifindex) {
            self.covered.remove(&key.ifindex);
        }
    }

    /// Whether a namespace has an address on a parent.
    fn has(&self, cookie: u64, parent: u32) -> bool {
        self.within.get(&cookie).is_some_and(|on| on.contains_key(&parent))
    }
}

/// Decrements a count and removes it at zero.
fn take_one(counts: &mut BTreeMap<u32, usize>, of: u32) {
    if let Some(count) = counts.get_mut(&of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&of);
        }
    }
}

impl Parents {
    /// Reads the entries of the map.
    pub(super) fn over(mut map: Box<dyn MapOps<ParentKey, ParentEntry>>) -> Result<Self, BpfError> {
        let entries: BTreeMap<_, _> = map.all()?.into_iter().collect();
        let mut index = Index::default();
        entries.iter().for_each(|(key, entry)| index.add(*key, entry));
        Ok(Self { map, entries, index, trunks: BTreeMap::new() })
    }

    /// Binds an address on a parent to an attachment, and unbinds any other address of the attachment. Before
    /// that, frames which its namespace sends through VLANs on this parent stop passing.
    pub(super) fn bind(&mut self, id: u32, mac: common::Mac, on: &OnParent) -> Result<(), BpfError> {
        let key = ParentKey::macvlan(on.parent, mac);
        if on.netns_cookie != 0 {
            self.close(on.netns_cookie, on.parent)?;
            self.write(ParentKey::namespace(on.netns_cookie), of_namespace(on.netns_cookie))?;
        }
        let before = self.entries.get(&key).map(|entry| entry.netns_cookie);
        self.write(key, entry_of(id, on))?;
        if let Some(cookie) = before.filter(|cookie| *cookie != on.netns_cookie) {
            self.reopen(cookie, on.parent)?;
        }
        self.unbind_all_but(id, Some(key))
    }

    /// Stops frames of an attachment from passing the devices below its VLAN, and unbinds every address of
    /// the attachment.
    pub(super) fn unbind(&mut self, id: u32) -> Result<(), BpfError> {
        self.pass_above(id, &Trunks::default())?;
        self.unbind_all_but(id, None)
    }

    /// Lets frames pass that an attachment sends and that have been judged at a VLAN, on these devices below
    /// the VLAN and nowhere else. They do not pass on a device on which the attachment's namespace has an
    /// address, because a macvlan there could send frames that look the same. A device that is not a parent
    /// gets no entry, since no program would look it up.
    pub(super) fn pass_above(&mut self, id: u32, trunks: &Trunks) -> Result<(), BpfError> {
        let before = if trunks.netns_cookie == 0 || trunks.on.is_empty() {
            self.trunks.remove(&id)
        } else {
            self.trunks.insert(id, trunks.clone())
        };
        for Trunks { netns_cookie, on } in before.iter().chain([trunks]) {
            on.iter().try_for_each(|(device, vlan)| self.settle(*netns_cookie, *device, *vlan))?;
        }
        Ok(())
    }

    /// Removes the entries that an earlier agent made for attachments that no longer exist.
    pub(super) fn forget_lost(&mut self) -> Result<(), BpfError> {
        let wanted: BTreeSet<ParentKey> = self.wanted().map(|(key, _)| key).collect();
        let marked = self.entries.range(ParentKey::itself(ParentKey::ABOVE)..).map(|(key, _)| *key);
        let lost: Vec<ParentKey> = marked.filter(|key| !wanted.contains(key)).collect();
        lost.into_iter().try_for_each(|key| self.erase(key))
    }

    /// Adds a parent to the map, with the entries for frames from VLANs that pass there.
    pub(super) fn cover(&mut self, parent: u32, what: Parent) -> Result<(), BpfError> {
        let flags =
            [(what.card, flag::CARD), (what.strangers, flag::STRANGERS), (what.own_clsact, flag::OWN_CLSACT)];
        let flags = flags.into_iter().filter(|(set, _)| *set).fold(0, |flags, (_, bit)| flags | bit);
        self.write(
            ParentKey::itself(parent),
            ParentEntry { attachment: 0, flags, netns_cookie: what.netns_cookie },
        )?;
        let passing: BTreeMap<ParentKey, u64> =
            self.wanted_above(parent).filter(|(_, cookie)| self.passes(*cookie, parent)).collect();
        passing.into_iter().try_for_each(|(key, cookie)| self.write(key, of_namespace(cookie)))
    }

    /// Removes a parent, and the entries for frames that passed there.
    pub(super) fn uncover(&mut self, parent: u32) -> Result<(), BpfError> {
        self.erase(ParentKey::itself(parent))?;
        let entered: Vec<ParentKey> = self.entered_above(parent).map(|(key, _)| *key).collect();
        entered.into_iter().try_for_each(|key| self.erase(key))
    }

    /// The parents in the map.
    pub(super) fn covered(&self) -> BTreeMap<u32, Parent> {
        let entered = self.index.covered.iter().map(|ifindex| ParentKey::itself(*ifindex));
        entered
            .filter_map(|key| Some((key, self.entries.get(&key)?)))
            .map(|(key, entry)| {
                let parent = Parent {
                    netns_cookie: entry.netns_cookie,
                    card: entry.flags & flag::CARD != 0,
                    strangers: entry.flags & flag::STRANGERS != 0,
                    own_clsact: entry.flags & flag::OWN_CLSACT != 0,
                };
                (key.ifindex, parent)
            })
            .collect()
    }

    /// The parents that carry attachments.
    pub(super) fn in_use(&self) -> BTreeSet<u32> {
        self.index.on.keys().copied().collect()
    }

    /// The parent of an attachment.
    pub(super) fn parent_of(&self, id: u32) -> Option<u32> {
        self.index.of.get(&id)?.first().map(|key| key.ifindex)
    }

    /// The attachments that have an address on a parent.
    pub(super) fn attachments(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.values().map(|entry| entry.attachment).filter(|id| *id != 0)
    }

    /// Whether the kernel's map has the entries that let an attachment's frames pass below its VLAN.
    pub(super) fn has_trunks(&self, id: u32) -> Result<bool, BpfError> {
        let Some(Trunks { netns_cookie, on }) = self.trunks.get(&id) else { return Ok(true) };
        for (device, vlan) in on.iter().filter(|(device, _)| self.passes(*netns_cookie, *device)) {
            let found = self.map.get(&ParentKey::above(*device, *netns_cookie, *vlan))?;
            if found != Some(of_namespace(*netns_cookie)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether the kernel's map has the attachment's binding.
    pub(super) fn has(&self, id: u32, mac: common::Mac, on: &OnParent) -> Result<bool, BpfError> {
        let found = self.map.get(&ParentKey::macvlan(on.parent, mac))?;
        Ok(found == Some(entry_of(id, on)))
    }

    fn unbind_all_but(&mut self, id: u32, keep: Option<ParentKey>) -> Result<(), BpfError> {
        let of_id = self.index.of.get(&id).into_iter().flatten().copied();
        let keys: Vec<ParentKey> = of_id.filter(|key| Some(*key) != keep).collect();
        for key in keys {
            let cookie = self.entries.get(&key).map_or(0, |entry| entry.netns_cookie);
            self.erase(key)?;
            self.reopen(cookie, key.ifindex)?;
        }
        let unused: Vec<u64> = self.index.unused.iter().copied().collect();
        unused.into_iter().try_for_each(|cookie| self.erase(ParentKey::namespace(cookie)))
    }

    /// The keys and namespaces for all frames that attachments want to pass, including those that do not
    /// pass.
    fn wanted(&self) -> impl Iterator<Item = (ParentKey, u64)> + '_ {
        self.trunks.values().flat_map(|Trunks { netns_cookie, on }| {
            on.iter()
                .map(move |(device, vlan)| (ParentKey::above(*device, *netns_cookie, *vlan), *netns_cookie))
        })
    }

    /// The keys and namespaces for frames that attachments want to pass on a device.
    fn wanted_above(&self, device: u32) -> impl Iterator<Item = (ParentKey, u64)> + '_ {
        let marked = ParentKey::itself(device | ParentKey::ABOVE);
        self.wanted().filter(move |(key, _)| key.ifindex == marked.ifindex)
    }

    /// The entries for frames that pass on a device.
    fn entered_above(&self, device: u32) -> impl Iterator<Item = (&ParentKey, &ParentEntry)> {
        let marked = ParentKey::itself(device | ParentKey::ABOVE);
        self.entries.range(marked..).take_while(move |(key, _)| key.ifindex == marked.ifindex)
    }

    /// Whether frames that a namespace sends by a VLAN may pass on a device, and the device has programs that
    /// look them up.
    fn passes(&self, cookie: u64, device: u32) -> bool {
        self.index.covered.contains(&device) && !self.index.has(cookie, device)
    }

    /// Adds or removes the entry for frames that a namespace sends by a VLAN on a device, according to the
    /// present state.
    fn settle(&mut self, cookie: u64, device: u32, vlan: u16) -> Result<(), BpfError> {
        let key = ParentKey::above(device, cookie, vlan);
        let is_wanted = self.wanted().any(|wanted| wanted == (key, cookie));
        if is_wanted && self.passes(cookie, device) {
            self.write(key, of_namespace(cookie))
        } else if self.entries.contains_key(&key) {
            self.erase(key)
        } else {
            Ok(())
        }
    }

    /// Removes all entries for frames that a namespace sends by VLANs on a device, also those of an earlier agent.
    fn close(&mut self, cookie: u64, device: u32) -> Result<(), BpfError> {
        let of_namespace = self.entered_above(device).filter(|(_, entry)| entry.netns_cookie == cookie);
        let keys: Vec<ParentKey> = of_namespace.map(|(key, _)| *key).collect();
        keys.into_iter().try_for_each(|key| self.erase(key))
    }

    /// Restores the entries for frames that a namespace sends by VLANs on a device, once it has no address there.
    fn reopen(&mut self, cookie: u64, device: u32) -> Result<(), BpfError> {
        let of_namespace = self.trunks.values().filter(|trunks| trunks.netns_cookie == cookie);
        let on_device = of_namespace.flat_map(|trunks| &trunks.on).filter(|(on, _)| *on == device);
        let vlans: Vec<u16> = on_device.map(|(_, vlan)| *vlan).collect();
        vlans.into_iter().try_for_each(|vlan| self.settle(cookie, device, vlan))
    }

    /// The number of entries of any kind.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn write(&mut self, key: ParentKey, entry: ParentEntry) -> Result<(), BpfError> {
        if self.entries.get(&key) == Some(&entry) {
            return Ok(());
        }
        self.map.put(key, entry)?;
        self.forget(key);
        self.index.add(key, &entry);
        self.entries.insert(key, entry);
        Ok(())
    }

    fn erase(&mut self, key: ParentKey) -> Result<(), BpfError> {
        self.map.remove(&key)?;
        self.forget(key);
        Ok(())
    }

    fn forget(&mut self, key: ParentKey) {
        if let Some(entry) = self.entries.remove(&key) {
            let entries = &self.entries;
            self.index.take(key, &entry, |cookie| entries.contains_key(&ParentKey::namespace(cookie)));
        }
    }
}

/// The entry of a namespace, and of frames that it sends by VLANs.
fn of_namespace(netns_cookie: u64) -> ParentEntry {
    ParentEntry { attachment: 0, flags: 0, netns_cookie }
}

fn entry_of(id: u32, on: &OnParent) -> ParentEntry {
    let flags = if on.siblings { flag::SIBLINGS } else { 0 };
    ParentEntry { attachment: id, flags, netns_cookie: on.netns_cookie }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An agent may be killed after each change.
    #[derive(Default)]
    struct InMemory(BTreeMap<ParentKey, ParentEntry>);

    impl InMemory {
        /// Checks that no frames from VLANs pass on a device where their namespace has an address.
        fn check(&self) {
            let addresses = addresses(&self.0);
            for (key, entry) in self.0.iter().filter(|(key, _)| is_marked(key)) {
                let device = key.ifindex & !ParentKey::ABOVE;
                assert!(!addresses.contains(&(device, entry.netns_cookie)), "{:?}", self.0);
            }
        }
    }

    fn is_marked(key: &ParentKey) -> bool {
        key.ifindex & ParentKey::ABOVE != 0
    }

    /// The devices on which namespaces have addresses.
    fn addresses(entries: &BTreeMap<ParentKey, ParentEntry>) -> BTreeSet<(u32, u64)> {
        let of_macvlans = entries.iter().filter(|(_, entry)| entry.attachment != 0);
        of_macvlans.map(|(key, entry)| (key.ifindex, entry.netns_cookie)).collect()
    }

    impl MapOps<ParentKey, ParentEntry> for InMemory {
        fn get(&self, key: &ParentKey) -> Result<Option<ParentEntry>, BpfError> {
            Ok(self.0.get(key).copied())
        }

        fn put(&mut self, key: ParentKey, entry: ParentEntry) -> Result<(), BpfError> {
            self.0.insert(key, entry);
            self.check();
            Ok(())
        }

        fn remove(&mut self, key: &ParentKey) -> Result<(), BpfError> {
            self.0.remove(key);
            self.check();
            Ok(())
        }

        fn remove_all(&mut self, keys: &[ParentKey]) -> Result<(), BpfError> {
            keys.iter().try_for_each(|key| self.remove(key))
        }

        fn all(&mut self) -> Result<Vec<(ParentKey, ParentEntry)>, BpfError> {
            Ok(self.0.iter().map(|(key, entry)| (*key, *entry)).collect())
        }
    }

    #[derive(Debug, Clone)]
    enum Deed {
        Bind {
            id: u32,
            mac: u8,
            parent: u32,
            cookie: u64,
        },
        Pass {
            id: u32,
            cookie: u64,
            on: Vec<(u32, u16)>,
        },
        Unbind(u32),
        /// Another agent starts, which does not know this attachment any more.
        Restart(u32),
        Cover(u32),
        Uncover(u32),
    }

    fn deeds() -> impl Strategy<Value = Vec<Deed>> {
        let bind = (1..5_u32, 0..3_u8, 1..3_u32, 0..4_u64).prop_map(|(id, mac, parent, cookie)| Deed::Bind {
            id,
            mac,
            parent,
            cookie,
        });
        let on = prop::collection::vec((1..3_u32, 5..7_u16), 0..3);
        let pass = (1..5_u32, 0..4_u64, on).prop_map(|(id, cookie, on)| Deed::Pass { id, cookie, on });
        let one = prop_oneof![
            4 => bind,
            4 => pass,
            2 => (1..5_u32).prop_map(Deed::Unbind),
            1 => (1..5_u32).prop_map(Deed::Restart),
            1 => (1..3_u32).prop_map(Deed::Cover),
            1 => (1..3_u32).prop_map(Deed::Uncover),
        ];
        prop::collection::vec(one, 0..30)
    }

    fn cover(parents: &mut Parents, parent: u32) {
        let what = Parent { netns_cookie: 9, card: false, strangers: false, own_clsact: true };
        parents.cover(parent, what).unwrap();
    }

    proptest! {
        #[test]
        fn the_index_is_that_of_the_entries(deeds in deeds()) {
            let mut parents = Parents::over(Box::<InMemory>::default()).unwrap();
            let mut trunks: BTreeMap<u32, Trunks> = BTreeMap::new();
            for deed in deeds {
                match deed {
                    Deed::Bind { id, mac, parent, cookie } => {
                        let on = OnParent { parent, siblings: false, netns_cookie: cookie };
                        parents.bind(id, common::Mac { octets: [2, 0, 0, 0, 0, mac] }, &on).unwrap();
                    }
                    Deed::Pass { id, cookie, on } => {
                        trunks.insert(id, Trunks { netns_cookie: cookie, on });
                        parents.pass_above(id, &trunks[&id]).unwrap();
                    }
                    Deed::Unbind(id) => {
                        parents.unbind(id).unwrap();
                        trunks.remove(&id);
                    }
                    Deed::Restart(lost) => {
                        parents = Parents::over(Box::new(InMemory(parents.entries.clone()))).unwrap();
                        trunks.remove(&lost);
                        trunks.iter().for_each(|(id, trunks)| parents.pass_above(*id, trunks).unwrap());
                        parents.forget_lost().unwrap();
                    }
                    Deed::Cover(parent) => cover(&mut parents, parent),
                    Deed::Uncover(parent) => parents.uncover(parent).unwrap(),
                }
                let mut expected = Index::default();
                parents.entries.iter().for_each(|(key, entry)| expected.add(*key, entry));
                prop_assert_eq!(&parents.index, &expected);
                // No namespace without a macvlan stays in the map after a macvlan has been added or removed.
                let kernels: BTreeMap<_, _> = parents.map.all().unwrap().into_iter().collect();
                prop_assert_eq!(&kernels, &parents.entries);
                let addresses = addresses(&kernels);
                let wanted = trunks.values().filter(|trunks| trunks.netns_cookie != 0);
                let wanted = wanted.flat_map(|Trunks { netns_cookie, on }| {
                    on.iter().map(move |(device, vlan)| (*device, *netns_cookie, *vlan))
                });
                let is_parent = |(device, ..): &(u32, u64, u16)| kernels.contains_key(&ParentKey::itself(*device));
                let passing = wanted.filter(is_parent);
                let passing = passing.filter(|(device, cookie, _)| !addresses.contains(&(*device, *cookie)));
                let passing: BTreeSet<ParentKey> =
                    passing.map(|(device, cookie, vlan)| ParentKey::above(device, cookie, vlan)).collect();
                let entered: BTreeSet<ParentKey> = kernels.keys().copied().filter(is_marked).collect();
                prop_assert_eq!(entered, passing);
                prop_assert!(trunks.keys().all(|id| parents.has_trunks(*id).unwrap()));
            }
        }
    }

    #[test]
    fn what_a_kernel_has_lost_of_it_is_noticed() {
        let mut parents = Parents::over(Box::<InMemory>::default()).unwrap();
        let trunks = Trunks { netns_cookie: 7, on: vec![(3, 5), (2, 6)] };
        parents.pass_above(1, &trunks).unwrap();
        assert_eq!(parents.len(), 0, "no parent");
        cover(&mut parents, 2);
        cover(&mut parents, 3);
        assert_eq!(parents.len(), 4);
        assert_eq!([1, 2].map(|id| parents.has_trunks(id).unwrap()), [true; 2]);
        parents.map.remove(&ParentKey::above(2, 7, 6)).unwrap();
        assert_eq!([1, 2].map(|id| parents.has_trunks(id).unwrap()), [false, true]);
    }
}
