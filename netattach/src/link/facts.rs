//! Facts about the node that drivers need before they plan. Plain data, which `attach` reads from the kernel.

use std::collections::{BTreeMap, BTreeSet};

/// A fact that a driver asks for. The driver names it and reads nothing from the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    /// The link of that name; without a name, the interface of the node's default route.
    Parent(Option<String>),
}

/// A link of the node that is to carry links of pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// Its name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
}

/// Facts about the node. If a fact no longer holds when its step is carried out, the step fails; it does not adapt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Parents, by the name in the request.
    pub parents: BTreeMap<Option<String>, Parent>,
}

/// Facts that drivers ask for, without duplicates.
pub type Wishes = BTreeSet<Wanted>;

impl Facts {
    /// The parent of that name, if the node has it.
    pub fn parent(&self, name: Option<&str>) -> Option<&Parent> {
        self.parents.iter().find(|(asked, _)| asked.as_deref() == name).map(|(_, parent)| parent)
    }
}
