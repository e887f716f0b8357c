//! Facts about the node that drivers need before they plan. Plain data, which `attach` reads from the kernel.

use std::collections::{BTreeMap, BTreeSet};

use crate::spec::VirtualFunction;

/// A fact that a driver requests. The driver names the fact and reads nothing from the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    /// The link of that name; without a name, the interface of the node's default route.
    Parent(Option<String>),
    /// The device of that name on its bus: a PCI address, or a name of the auxiliary bus.
    OnBus(String),
}

/// A link of the node as the parent of pods' links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// Its name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
}

/// A device on a bus of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnBus {
    /// The name of its driver, if it has one.
    pub driver: Option<String>,
    /// Its physical function, for a virtual function.
    pub function: Option<VirtualFunction>,
    /// Its RDMA device, if any.
    pub rdma: Option<String>,
    /// Whether the RDMA device stays on the node when the interface is moved to a pod, because each namespace
    /// there has RDMA devices of its own.
    pub rdma_stays: bool,
    /// Whether its physical function's card is in mode switchdev.
    pub switchdev: bool,
}

impl OnBus {
    /// The driver, if it hands the device to a process, which bypasses the kernel's network stack.
    pub fn userspace(&self) -> Option<&str> {
        const USERSPACE: [&str; 4] = ["vfio-pci", "uio_pci_generic", "igb_uio", "vfio-platform"];
        self.driver.as_deref().filter(|driver| USERSPACE.contains(driver))
    }

    /// The driver, if it may make interfaces: not one that hands the device to a process.
    pub fn network_driver(&self) -> Option<&str> {
        self.driver.as_deref().filter(|_| self.userspace().is_none())
    }
}

/// Facts about the node. If a fact no longer holds when its step is carried out, the step fails; it does not adapt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Parents, by the name in the request.
    pub parents: BTreeMap<Option<String>, Parent>,
    /// Devices on buses, by their names there.
    pub on_bus: BTreeMap<String, OnBus>,
    /// Whether the node's state was read; if not, the plan is not to be carried out.
    pub gathered: bool,
}

/// Facts that drivers ask for, without duplicates.
pub type Wishes = BTreeSet<Wanted>;

impl Facts {
    /// The parent of that name, if the node has it.
    pub fn parent(&self, name: Option<&str>) -> Option<&Parent> {
        self.parents.iter().find(|(asked, _)| asked.as_deref() == name).map(|(_, parent)| parent)
    }
}
