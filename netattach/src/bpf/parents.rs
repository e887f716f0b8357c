//! Macvlans and the parents that carry them: the map in which programs on a parent find a frame's attachment.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use netattach_common::parent::flag;
use netattach_common::{self as common, ParentEntry, ParentKey};

use super::BpfError;
use super::map_ops::MapOps;

/// The device at which an attachment's frames are judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A device of its own, by index.
    Own(u32),
    /// The parent of its macvlan.
    Parent(OnParent),
    /// The device in the pod.
    InPod,
    /// None.
    Nowhere,
}

impl Device {
    /// Index of the device in the node's namespace; 0 if it is not there.
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
    /// Whether the driver hands frames to siblings itself, by way of the parent's ingress (mode bridge).
    pub siblings: bool,
    /// Cookie of the pod's network namespace (`SO_NETNS_COOKIE`); 0 where the kernel gives none.
    pub netns_cookie: u64,
}

/// A parent that runs the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parent {
    /// Cookie of the node's namespace. Its frames pass.
    pub netns_cookie: u64,
    /// Whether it is a network card: all frames of this kernel that come in by it are sent from macvlan to macvlan.
    pub card: bool,
    /// Whether frames of other namespaces pass that have no attachment's source address.
    pub strangers: bool,
    /// Whether the agent made the device's `clsact`.
    pub own_clsact: bool,
}

/// The map `na_par`, with a cache of its entries.
pub(super) struct Parents {
    map: Box<dyn MapOps<ParentKey, ParentEntry>>,
    entries: BTreeMap<ParentKey, ParentEntry>,
    index: Index,
}

/// The entries by what they are asked for, so that nobody looks through those of a thousand macvlans.
#[derive(Debug, Default, PartialEq, Eq)]
struct Index {
    /// The addresses of each attachment.
    of: HashMap<u32, BTreeSet<ParentKey>>,
    /// Number of addresses on each parent.
    on: BTreeMap<u32, usize>,
    /// Number of addresses by the cookie of their namespace.
    within: HashMap<u64, usize>,
    /// The parents that are entered.
    covered: BTreeSet<u32>,
    /// Cookies of the namespaces that are entered and have no address. An agent may have been killed before it entered the
    /// macvlan of a namespace.
    unused: BTreeSet<u64>,
}

impl Index {
    fn add(&mut self, key: ParentKey, entry: &ParentEntry) {
        let cookie = entry.netns_cookie;
        if entry.attachment != 0 {
            self.of.entry(entry.attachment).or_default().insert(key);
            *self.on.entry(key.ifindex).or_default() += 1;
            *self.within.entry(cookie).or_default() += 1;
            self.unused.remove(&cookie);
        } else if key == ParentKey::namespace(cookie) {
            if !self.within.contains_key(&cookie) {
                self.unused.insert(cookie);
            }
        } else if key == ParentKey::itself(key.ifindex) {
            self.covered.insert(key.ifindex);
        }
    }

    /// `is_entered`: whether a namespace has an entry.
    fn take(&mut self, key: ParentKey, entry: &ParentEntry, is_entered: impl Fn(u64) -> bool) {
        let cookie = entry.netns_cookie;
        if entry.attachment != 0 {
            if let Some(keys) = self.of.get_mut(&entry.attachment) {
                keys.remove(&key);
                if keys.is_empty() {
                    self.of.remove(&entry.attachment);
                }
            }
            if let Some(count) = self.on.get_mut(&key.ifindex) {
                *count -= 1;
                if *count == 0 {
                    self.on.remove(&key.ifindex);
                }
            }
            if let Some(count) = self.within.get_mut(&cookie) {
                *count -= 1;
                if *count == 0 {
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
}

impl Parents {
    /// Reads the entries of the map.
    pub(super) fn over(mut map: Box<dyn MapOps<ParentKey, ParentEntry>>) -> Result<Self, BpfError> {
        let entries: BTreeMap<_, _> = map.all()?.into_iter().collect();
        let mut index = Index::default();
        entries.iter().for_each(|(key, entry)| index.add(*key, entry));
        Ok(Self { map, entries, index })
    }

    /// Binds an address on a parent to an attachment, and unbinds any other address of the attachment.
    pub(super) fn bind(&mut self, id: u32, mac: common::Mac, on: &OnParent) -> Result<(), BpfError> {
        let key = ParentKey::macvlan(on.parent, mac);
        if on.netns_cookie != 0 {
            let namespace = ParentEntry { attachment: 0, flags: 0, netns_cookie: on.netns_cookie };
            self.write(ParentKey::namespace(on.netns_cookie), namespace)?;
        }
        self.write(key, entry_of(id, on))?;
        self.unbind_all_but(id, Some(key))
    }

    /// Unbinds every address of an attachment.
    pub(super) fn unbind(&mut self, id: u32) -> Result<(), BpfError> {
        self.unbind_all_but(id, None)
    }

    /// Enters a parent itself.
    pub(super) fn cover(&mut self, parent: u32, what: Parent) -> Result<(), BpfError> {
        let flags =
            [(what.card, flag::CARD), (what.strangers, flag::STRANGERS), (what.own_clsact, flag::OWN_CLSACT)];
        let flags = flags.into_iter().filter(|(set, _)| *set).fold(0, |flags, (_, bit)| flags | bit);
        self.write(
            ParentKey::itself(parent),
            ParentEntry { attachment: 0, flags, netns_cookie: what.netns_cookie },
        )
    }

    /// Removes a parent.
    pub(super) fn uncover(&mut self, parent: u32) -> Result<(), BpfError> {
        self.erase(ParentKey::itself(parent))
    }

    /// The parents that are entered.
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

    /// Whether the kernel's map has the attachment as it was bound.
    pub(super) fn has(&self, id: u32, mac: common::Mac, on: &OnParent) -> Result<bool, BpfError> {
        let found = self.map.get(&ParentKey::macvlan(on.parent, mac))?;
        Ok(found == Some(entry_of(id, on)))
    }

    fn unbind_all_but(&mut self, id: u32, keep: Option<ParentKey>) -> Result<(), BpfError> {
        let of_id = self.index.of.get(&id).into_iter().flatten().copied();
        let keys: Vec<ParentKey> = of_id.filter(|key| Some(*key) != keep).collect();
        keys.into_iter().try_for_each(|key| self.erase(key))?;
        let unused: Vec<u64> = self.index.unused.iter().copied().collect();
        unused.into_iter().try_for_each(|cookie| self.erase(ParentKey::namespace(cookie)))
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

fn entry_of(id: u32, on: &OnParent) -> ParentEntry {
    let flags = if on.siblings { flag::SIBLINGS } else { 0 };
    ParentEntry { attachment: id, flags, netns_cookie: on.netns_cookie }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Default)]
    struct InMemory(BTreeMap<ParentKey, ParentEntry>);

    impl MapOps<ParentKey, ParentEntry> for InMemory {
        fn get(&self, key: &ParentKey) -> Result<Option<ParentEntry>, BpfError> {
            Ok(self.0.get(key).copied())
        }

        fn put(&mut self, key: ParentKey, entry: ParentEntry) -> Result<(), BpfError> {
            self.0.insert(key, entry);
            Ok(())
        }

        fn remove(&mut self, key: &ParentKey) -> Result<(), BpfError> {
            self.0.remove(key);
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
        Bind { id: u32, mac: u8, parent: u32, cookie: u64 },
        Unbind(u32),
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
        let one = prop_oneof![
            4 => bind,
            2 => (1..5_u32).prop_map(Deed::Unbind),
            1 => (1..3_u32).prop_map(Deed::Cover),
            1 => (1..3_u32).prop_map(Deed::Uncover),
        ];
        prop::collection::vec(one, 0..30)
    }

    proptest! {
        #[test]
        fn the_index_is_that_of_the_entries(deeds in deeds()) {
            let mut parents = Parents::over(Box::<InMemory>::default()).unwrap();
            for deed in deeds {
                match deed {
                    Deed::Bind { id, mac, parent, cookie } => {
                        let on = OnParent { parent, siblings: false, netns_cookie: cookie };
                        parents.bind(id, common::Mac { octets: [2, 0, 0, 0, 0, mac] }, &on).unwrap();
                    }
                    Deed::Unbind(id) => parents.unbind(id).unwrap(),
                    Deed::Cover(parent) => {
                        let what = Parent { netns_cookie: 9, card: false, strangers: false, own_clsact: true };
                        parents.cover(parent, what).unwrap();
                    }
                    Deed::Uncover(parent) => parents.uncover(parent).unwrap(),
                }
                let mut expected = Index::default();
                parents.entries.iter().for_each(|(key, entry)| expected.add(*key, entry));
                prop_assert_eq!(&parents.index, &expected);
                // Nobody's namespace stays entered after a macvlan has come or gone.
                let kernels: BTreeMap<_, _> = parents.map.all().unwrap().into_iter().collect();
                prop_assert_eq!(&kernels, &parents.entries);
            }
        }
    }
}
