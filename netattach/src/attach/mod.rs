//! Carries out plans, and rolls them back.
//!
//! [`Engine`] has one function per CNI verb. Every change that it makes to the machine is a step of a plan
//! ([`apply`]) or its inverse ([`undo`]), written to the journal before the change; DEL and CHECK need nothing else.
//! `plan` makes all decisions; this module only carries them out in order.
//!
//! | module | what it does |
//! |---|---|
//! | `weight` | estimates the memory that an ADD takes, before it begins |
//! | `intent`, `read_networks`, `default_network`, `made_before`, [`conf_dir`], `from_node` | derive the networks that the pod wants from a request |
//! | `engine`, `facts` | one function per CNI verb; facts about the node that planning needs |
//! | `adopt` | takes over the state that earlier agents have left |
//! | `repeated_add`, `occupied` | an ADD for a sandbox that is already attached; holders of addresses |
//! | [`apply`], `admit`, `bridges`, `bridge_stack`, `by_source`, `device_info`, `routing`, `cluster_routes`, `translation`, `restrict_sender`, `tuning`, `vrf`, `enforcement` | the effects of steps |
//! | [`host_access`] | the node's own links on parents, through which the node and pods reach each other |
//! | `announce_late` | announces addresses to neighbours after an ADD has been answered |
//! | [`undo`], `delete_links`, `plugin_del`, `needs` | inverses of steps, those of links, and DEL of other plugins; resources that a DEL may wait for |
//! | `devices`, `which_device`, `take_device`, `card`, `give_back`, `above`, `left_programs`, `identity`, `bus` | devices of the node: which attachment holds one; how a device is named, moved, given back, freed of the pod's links and programs, and identified |
//! | `representor` | representors of VFs of cards in switchdev mode |
//! | `sriov_cni` | the files in which sriov-cni records the holder of each VF |
//! | `check`, `status_verb`, `gc` | the verbs CHECK, STATUS and GC |
//! | `survey`, `leases` | use of address pools; DHCP leases, taken and released |
//! | `departed`, `drift`, `edited`, `lost_records` | sandboxes that no runtime will detach; changes that other programs make to attachments and to their records |
//! | `dynamic`, `take_over`, `multus_del` | attachments of live pods, also of those that another plugin attached; pods that Multus attached |
//! | `registry`, `pool_use`, `network_status` | attached sandboxes, in memory; their pools; their published status |
//! | [`standalone`] | the native plugins as plain CNI executables |
//! | `error` | errors, and their CNI codes |

mod above;
mod admit;
mod adopt;
mod announce_late;
pub mod apply;
mod bridge_stack;
mod bridges;
mod bus;
mod by_source;
mod card;
mod check;
mod cluster_routes;
pub mod conf_dir;
#[cfg(test)]
mod damage_tests;
mod default_network;
mod delete_links;
mod departed;
mod device_info;
mod devices;
mod drift;
mod dynamic;
mod edited;
mod enforcement;
mod engine;
mod error;
mod facts;
mod from_node;
#[cfg(test)]
mod full_disk_tests;
mod gc;
mod give_back;
pub mod host_access;
mod identity;
mod intent;
mod leases;
mod left_programs;
mod lost_records;
mod made_before;
mod multus_del;
mod needs;
mod network_status;
mod occupied;
mod plugin_del;
mod pool_use;
mod read_networks;
mod registry;
mod repeated_add;
mod representor;
mod restrict_sender;
#[cfg(test)]
pub(crate) mod rig;
mod routing;
mod sriov_cni;
pub mod standalone;
mod status_verb;
mod survey;
mod take_device;
mod take_over;
mod translation;
mod tuning;
pub mod undo;
mod vrf;
mod weight;
mod which_device;

pub use adopt::Recovery;
pub use bridges::Bridges;
pub use default_network::{CILIUMS_SUFFIX, DefaultNetwork, InvalidDefaultNetwork};
pub use departed::inhabited;
pub use devices::Devices;
pub use drift::Drifted;
pub use edited::{Examined, WholeRecords};
pub use enforcement::{Looked, Which};
pub use engine::Engine;
pub use error::{AttachError, Doing, StepError};
pub use from_node::FromNode;
pub use gc::{Census, Collected, Stale};
pub use host_access::HostAccesses;
pub use intent::{IntentError, IntentReader, pod_of};
pub use multus_del::{Inheritance, InheritanceError};
pub use network_status::network_status;
pub use occupied::{Address, Holder, Occupied};
pub use read_networks::ReadNetworks;
pub use registry::{Attached, Registry};
pub use repeated_add::RepeatedAdd;
pub use survey::SurveyError;
pub use weight::selected_by;

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
