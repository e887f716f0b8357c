//! Carries out plans, and rolls them back.
//!
//! [`Engine`] has one function per CNI verb. Every change that it makes to the machine is a step of a plan
//! ([`apply`]) or its inverse ([`undo`]), written to the journal before the change; DEL and CHECK need nothing else.
//! `plan` makes all decisions; this module only carries them out in order.
//!
//! | module | what it does |
//! |---|---|
//! | `intent` | derives the networks that the pod wants from a request |
//! | `engine`, `facts` | one function per CNI verb; facts about the node that planning needs |
//! | `repeated_add` | an ADD for a sandbox that is already attached |
//! | [`apply`] | the effects of steps |
//! | [`undo`] | their inverses |
//! | `device` | devices of the node, taken and given back |
//! | `addresses` | holders of addresses, pools, leases, announcements to neighbours |
//! | `check`, `status_verb`, `gc` | the verbs CHECK, STATUS and GC |
//! | `dynamic` | attachments of live pods, added and removed |
//! | `registry`, `network_status` | attached sandboxes, in memory; their published status |
//! | `adopt` | takes over the state that earlier agents have left |
//! | `reconcile` | restores what other programs change of attachments and their records; sandboxes that no runtime will detach |
//! | `inherited` | pods that another plugin attached |
//! | [`standalone`] | the native plugins as plain CNI executables |
//! | `error` | errors, and their CNI codes |

mod addresses;
mod adopt;
pub mod apply;
mod check;
#[cfg(test)]
mod damage_tests;
mod device;
mod dynamic;
mod engine;
mod error;
mod facts;
#[cfg(test)]
mod full_disk_tests;
mod gc;
mod inherited;
mod intent;
mod network_status;
mod reconcile;
mod registry;
mod repeated_add;
#[cfg(test)]
pub(crate) mod rig;
pub mod standalone;
mod status_verb;
pub mod undo;

pub use addresses::holder::{Address, Holder};
pub use addresses::occupied::Occupied;
pub use addresses::survey::SurveyError;
pub use adopt::Recovery;
pub use apply::bridges::Bridges;
pub use apply::host_access::{self, HostAccesses};
pub use device::claims::Devices;
pub use engine::Engine;
pub use error::{AttachError, Doing, StepError};
pub use gc::{Census, Collected, Stale};
pub use inherited::multus_del::{Inheritance, InheritanceError};
pub use intent::default_network::{CILIUMS_SUFFIX, DefaultNetwork, InvalidDefaultNetwork};
pub use intent::from_node::FromNode;
pub use intent::read_networks::ReadNetworks;
pub use intent::weight::selected_by;
pub use intent::{IntentError, IntentReader, conf_dir, pod_of};
pub use network_status::network_status;
pub use reconcile::departed::inhabited;
pub use reconcile::drift::Drifted;
pub use reconcile::edited::{Examined, WholeRecords};
pub use reconcile::enforcement::{Looked, Which};
pub use reconcile::parents::NotFollowed;
pub use registry::{Attached, Registry};
pub use repeated_add::RepeatedAdd;

use std::sync::Arc;

use crate::delegate;
use crate::enforce::Enforce;
use crate::firewall::Firewall;
use crate::ipam;
use crate::journal::{JournalError, JournalKey, Record};
use crate::nat::Nat;
use crate::netlink::KnownLinks;
use crate::plan::AttachmentPlan;
use crate::step::{Home, Output, Outputs, StepRef};
use crate::sysctl;

/// The node's state that all attachments and operations share.
#[derive(Debug)]
pub struct Node {
    /// Address pools.
    pub leases: ipam::Leases,
    /// Other CNI plugins.
    pub delegate: delegate::Delegate,
    /// The cache in which other programs look up attachments.
    pub cache: delegate::ResultCache,
    /// The locks for bridges that are about to be used.
    pub bridges: Bridges,
    /// Last known state of bridges and parents; absent in the plain CNI executables, which ask the kernel once.
    pub links: Option<KnownLinks>,
    /// The node's forwarding settings.
    pub forwarding: Forwarding,
    /// The holders of addresses.
    pub occupied: Occupied,
    /// The node's own links on parents of pods.
    pub host_accesses: HostAccesses,
    /// The devices that pods hold.
    pub devices: Devices,
    /// The node's address translation; absent in the plain CNI executables, which share an nftables table.
    pub nat: Option<Nat>,
    /// Lets the node forward packets of pods past a filter that drops; absent in the plain CNI executables, which
    /// write their own rules.
    pub firewall: Option<Firewall>,
    /// Whether each attachment has a record until its DEL, with the former state of its device: in the agent, and in
    /// those plain CNI executables that take VFs.
    pub records: bool,
    /// The dataplane; absent in the plain CNI executables.
    pub enforcer: Option<Arc<dyn Enforce>>,
    /// Whether [`Engine::announce`] announces IPv4 addresses to neighbours after the ADD, instead of the kernel when
    /// the link comes up.
    pub announces_late: bool,
    /// The receiver of notifications about attachments that end.
    pub departures: Option<Arc<dyn Departures>>,
}

/// The sysctls that enable forwarding.
#[derive(Debug)]
pub struct Forwarding {
    /// For IPv4.
    pub v4: sysctl::Kept,
    /// For IPv6.
    pub v6: sysctl::Kept,
}

impl Default for Forwarding {
    fn default() -> Self {
        Self { v4: sysctl::Kept::new("ipv4/ip_forward"), v6: sysctl::Kept::new("ipv6/conf/all/forwarding") }
    }
}

/// Receives a notification when an attachment's link is gone, before the dataplane removes the attachment with its
/// counters.
pub trait Departures: std::fmt::Debug + Send + Sync {
    /// Called when attachment `number` of the record ends; `id` is its number in the dataplane.
    fn ends(&self, record: &JournalKey, number: u16, of: &AttachmentPlan, id: u32);
}

/// The recorded progress of a plan.
pub trait Progress {
    /// Call this before the effects of steps that have an inverse.
    ///
    /// # Errors
    /// The progress could not be recorded: the steps must not happen.
    fn begin(&mut self, steps: &[StepRef]) -> Result<(), JournalError>;
    /// Call this after the step.
    ///
    /// # Errors
    /// The progress could not be recorded.
    fn done(&mut self, step: StepRef, output: Output) -> Result<(), JournalError>;
    /// Call this before another plugin runs: the plugin's changes may survive a power failure.
    ///
    /// # Errors
    /// The plan could not be made durable.
    fn wait_durable(&mut self) -> Result<(), JournalError>;
    /// Whether a step may have had an effect.
    fn has_begun(&self, step: StepRef) -> bool;
    /// Call this before the first step, with the cookie of the sandbox's namespace, 0 where the kernel gives none.
    ///
    /// # Errors
    /// The cookie could not be recorded.
    fn note_namespace(&mut self, netns_cookie: u64) -> Result<(), JournalError>;
    /// The cookie of the namespace that the steps were carried out in, if it is known.
    fn netns_cookie(&self) -> Option<u64>;
    /// The outputs of the finished steps.
    fn outputs(&self) -> &Outputs;
    /// The state of a device on the node before the move, if the device may have been moved and no output contains
    /// that state.
    fn home(&self) -> Option<&Home> {
        None
    }
}

impl Progress for Record {
    fn begin(&mut self, steps: &[StepRef]) -> Result<(), JournalError> {
        Record::begin(self, steps)
    }

    fn done(&mut self, step: StepRef, output: Output) -> Result<(), JournalError> {
        Record::done(self, step, output)
    }

    fn wait_durable(&mut self) -> Result<(), JournalError> {
        Record::wait_durable(self)
    }

    fn has_begun(&self, step: StepRef) -> bool {
        Record::has_begun(self, step)
    }

    fn note_namespace(&mut self, netns_cookie: u64) -> Result<(), JournalError> {
        Record::note_namespace(self, netns_cookie)
    }

    fn netns_cookie(&self) -> Option<u64> {
        self.netns_cookie
    }

    fn outputs(&self) -> &Outputs {
        &self.outputs
    }
}
