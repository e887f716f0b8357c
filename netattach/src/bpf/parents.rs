//! Macvlans and the parents that carry them: the map in which programs on a parent find a frame's attachment.

use std::collections::{BTreeMap, BTreeSet};

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
}

impl Parents {
    /// Reads the entries of the map.
    pub(super) fn over(mut map: Box<dyn MapOps<ParentKey, ParentEntry>>) -> Result<Self, BpfError> {
        let entries = map.all()?.into_iter().collect();
        Ok(Self { map, entries })
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
        let parents = self.entries.iter().filter(|(key, _)| **key == ParentKey::itself(key.ifindex));
        parents
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
        self.entries.iter().filter(|(_, entry)| entry.attachment != 0).map(|(key, _)| key.ifindex).collect()
    }

    /// The parent of an attachment.
    pub(super) fn parent_of(&self, id: u32) -> Option<u32> {
        self.entries.iter().find(|(_, entry)| entry.attachment == id).map(|(key, _)| key.ifindex)
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
        let of_id = self.entries.iter().filter(|(key, entry)| entry.attachment == id && Some(**key) != keep);
        let keys: Vec<ParentKey> = of_id.map(|(key, _)| *key).collect();
        keys.into_iter().try_for_each(|key| self.erase(key))?;
        // An agent may have been killed before it entered the macvlan of a namespace.
        let macvlans = self.entries.values().filter(|entry| entry.attachment != 0);
        let used: BTreeSet<u64> = macvlans.map(|entry| entry.netns_cookie).collect();
        let unused = self.entries.iter().filter(|(key, entry)| {
            **key == ParentKey::namespace(entry.netns_cookie) && !used.contains(&entry.netns_cookie)
        });
        let keys: Vec<ParentKey> = unused.map(|(key, _)| *key).collect();
        keys.into_iter().try_for_each(|key| self.erase(key))
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
        self.entries.insert(key, entry);
        Ok(())
    }

    fn erase(&mut self, key: ParentKey) -> Result<(), BpfError> {
        self.map.remove(&key)?;
        self.entries.remove(&key);
        Ok(())
    }
}

fn entry_of(id: u32, on: &OnParent) -> ParentEntry {
    let flags = if on.siblings { flag::SIBLINGS } else { 0 };
    ParentEntry { attachment: id, flags, netns_cookie: on.netns_cookie }
}
