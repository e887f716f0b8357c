//! What drivers have to know of the node before they plan. Plain data, which `attach` reads from the kernel.

use std::collections::{BTreeMap, BTreeSet};

/// Something of the node that a driver asks about. It names it and reads nothing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    /// The link of that name; the interface of the node's default route when absent.
    Parent(Option<String>),
}

/// A link of the node on which links of pods are to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// Its name.
    pub name: String,
    /// In bytes.
    pub mtu: u32,
}

/// Facts about the node. One that no longer holds when its step is carried out makes the step fail; it is not adapted there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// By the name that was asked for.
    pub parents: BTreeMap<Option<String>, Parent>,
}

/// Facts that drivers ask for, each once.
pub type Wishes = BTreeSet<Wanted>;

impl Facts {
    /// The parent of that name, where the node has it.
    pub fn parent(&self, name: Option<&str>) -> Option<&Parent> {
        self.parents.iter().find(|(asked, _)| asked.as_deref() == name).map(|(_, parent)| parent)
    }
}
