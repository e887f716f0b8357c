//! Keeps the policies in the kernel's maps equal to the compiled ones, and enforces attachments from their
//! first packet.
//!
//! The [`enforcer`] combines the parts. An [`attachment`] is enforced with its policies, the settings of
//! the node ([`node_defaults`]) and its `bandwidth`; [`level`] determines its enforcement level, and
//! [`admission`] refuses a pod if the level is too low. `node_addresses` are the addresses that
//! NetworkPolicies except, and `held` decides which policies of an earlier agent stay while the source is
//! incomplete.
//!
//! The `state` behind the enforcer's lock consists of a `roster` of attachments, those that are `deferred`
//! until a policy selects them, and the [`policies`], which determine the contents of the `policy_maps`.
//!
//! `programs` attaches programs to devices. `routed` judges the traffic that the node translates, for the
//! addresses that `routed_to` finds. `adoption` adopts the attachments of an earlier agent, `verify` checks
//! that enforcement is still complete (`whole_parents`: each parent once per check), and [`queries`]
//! answers the rest of the agent. Errors are in [`error`].

pub mod admission;
mod adoption;
pub mod attachment;
mod bandwidth;
mod deferred;
pub mod enforcer;
pub mod error;
mod held;
pub mod level;
mod node_addresses;
pub mod node_defaults;
pub mod policies;
mod policy_maps;
mod programs;
pub mod queries;
mod roster;
mod routed;
mod routed_to;
mod state;
mod verify;
mod whole_parents;

use std::fmt;

pub use bandwidth::paces;
pub use whole_parents::WholeParents;

/// Returns the names of the programs that netattach attaches to devices as filters.
pub fn names_of_programs() -> Vec<&'static str> {
    crate::bpf::Program::ALL.map(crate::bpf::Program::name).to_vec()
}

/// Returns the names of the programs on the node's ends of links.
pub fn names_on_node_ends() -> [&'static str; 2] {
    crate::bpf::Program::ON_NODE_ENDS.map(crate::bpf::Program::name)
}

use admission::Unenforceable;
use attachment::EnforcedAttachment;
use error::{AttachFailed, EnforceError};

use crate::mac::Mac;
use crate::netlink::Handle;
use crate::plan::{AttachmentPlan, PodRef};
use crate::step::HookKind;

/// The dataplane, as attaching and detaching use it. A trait so that executables without a dataplane do not carry its
/// code and its BPF object.
pub trait Enforce: fmt::Debug + Send + Sync {
    /// Gives the attachments of one pod their policies, counters and programs, and sets the pace of their
    /// links. `host` is in the node's netns, `pod` in the pod's.
    ///
    /// # Errors
    /// The kernel refused a map, a program or a queue. [`Enforce::detach`] and the deletion of the links roll it back.
    fn attach(
        &self,
        attachments: &[EnforcedAttachment],
        host: &mut Handle,
        pod: &mut Handle,
    ) -> Result<(), AttachFailed>;
    /// Removes the attachment with this number from the dataplane, if it exists.
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn detach(&self, id: u32) -> Result<(), EnforceError>;
    /// Detaches an attachment's programs from the device that its pod had, and from the device's
    /// representor: the pod is gone, and the device belongs to the node again. Its record stays until
    /// [`Enforce::detach`].
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn leave_device(&self, id: u32) -> Result<(), EnforceError>;
    /// Takes an attachment off the fast path before its link is deleted.
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn retire(&self, id: u32) -> Result<(), EnforceError>;
    /// Adopts the attachments of an earlier agent; if they are `all`, other attachments are removed.
    /// Returns the failures.
    fn adopt(&self, attachments: &[EnforcedAttachment], all: bool) -> Vec<EnforceError>;
    /// Drops multicast and broadcast frames of stations that arrive by the node's own link on a parent.
    /// Idempotent.
    ///
    /// # Errors
    /// The kernel refused the program.
    fn drop_groups(&self, host_link: u32, host: &mut Handle) -> Result<(), EnforceError>;
    /// The Ethernet address in the record of the attachment with this number; `None`: it has no record.
    fn mac(&self, id: u32) -> Option<Mac>;
    /// Writes an attachment's record anew if its Ethernet address is its parent's and the record has another one.
    /// Returns whether it did. An attachment that has ended is left alone.
    ///
    /// # Errors
    /// The kernel refused the map.
    fn follow(&self, attachment: &EnforcedAttachment) -> Result<bool, EnforceError>;
    /// Returns the numbers of the attachments with records in the dataplane.
    fn recorded(&self) -> Vec<u32>;
    /// Returns the first missing part of the attachment's enforcement, as text: record, addresses, policy
    /// or programs. The Ethernet address of one that has its parent's is not compared: see [`Enforce::follow`].
    ///
    /// # Errors
    /// The check failed.
    fn verify(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError>;
    /// As [`Enforce::verify`], as part of a check of many attachments: uses and extends what the check
    /// knows of their parents.
    ///
    /// # Errors
    /// The check failed.
    fn verify_among_others(
        &self,
        attachment: &EnforcedAttachment,
        known: &mut WholeParents,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError>;
    /// Reattaches programs that another process has detached from the attachment's device; returns whether it did.
    ///
    /// # Errors
    /// The kernel refused a program.
    fn restore(&self, attachment: &EnforcedAttachment, host: &mut Handle) -> Result<bool, EnforceError>;
    /// Does the work that the attachment's ADD has deferred: programs attached as filters in the pod are
    /// attached by BPF links, which no process in the pod can remove.
    ///
    /// # Errors
    /// The kernel refused a program, which stays attached as a filter. Calling again is safe.
    fn settle(&self, attachment: &EnforcedAttachment) -> Result<(), EnforceError>;
    /// Records which packets bypass the programs of an attachment whose device is in its pod, as far as the
    /// pod's netns shows it: its level is lower until a check finds nothing any more.
    ///
    /// # Errors
    /// The kernel does not show the device.
    fn look_into_pod(&self, attachment: &EnforcedAttachment, pod: &mut Handle) -> Result<(), EnforceError>;
    /// Records whether a check has found a device of kind `ifb` in the pod of these attachments: while
    /// there is one, their level, and that of others on their parents, is lower. Returns whether it matters
    /// to any attachment.
    fn note_ifb(&self, attachments: &[u32], has_one: bool) -> bool;
    /// Returns the first missing shared pin, as text.
    ///
    /// # Errors
    /// The check failed.
    fn verify_shared(&self) -> Result<Option<String>, EnforceError>;
    /// Checks that the attachment, as it is about to be enforced, has the required enforcement level: a
    /// card may switch frames that a representor would see. Devices of other plugins are not queried.
    ///
    /// # Errors
    /// As [`Enforce::permit`].
    fn permit_on_device(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        enforced: &EnforcedAttachment,
    ) -> Result<(), Unenforceable>;
    /// Checks that the attachment has the required enforcement level; `vantage`: where its programs see its
    /// frames, if known.
    ///
    /// # Errors
    /// The level is too low; the error names the origin of the requirement.
    fn permit(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        vantage: Option<&HookKind>,
    ) -> Result<(), Unenforceable>;
}
