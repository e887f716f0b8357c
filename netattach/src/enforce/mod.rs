//! Keeps the kernel's policies equal to the compiled ones, and enforces attachments from their first packet.
//!
//! The [`enforcer`] combines the parts. An [`attachment`] is enforced with its policies, the settings of the node
//! ([`node_defaults`]) and its `bandwidth`; [`level`] gives its enforcement level, and [`admission`] refuses a pod if
//! that is too low. `node_addresses` are what NetworkPolicies except, and `held` is what stays
//! of an earlier agent while the source does not know enough. The `state` behind the enforcer's lock is a `roster` of attachments, those that are `deferred`
//! until a policy selects them, and the [`policies`], which decide the contents of the `policy_maps`. `programs`
//! attaches programs to devices, and `routed` judges the traffic that the node translates, from and to the addresses that `routed_to`
//! finds. `adoption` adopts the
//! attachments of an earlier agent, `verify` checks that enforcement is still complete (`whole_parents`: each parent once),
//! and [`queries`] answers the rest of the agent. Errors are in [`error`].

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

/// The names of the programs that filters of netattach run on devices.
pub fn names_of_programs() -> Vec<&'static str> {
    crate::bpf::Program::ALL.map(crate::bpf::Program::name).to_vec()
}

/// The names of those on the node's ends of links.
pub fn names_on_node_ends() -> [&'static str; 2] {
    crate::bpf::Program::ON_NODE_ENDS.map(crate::bpf::Program::name)
}

use admission::Unenforceable;
use attachment::EnforcedAttachment;
use error::{AttachFailed, EnforceError};

use crate::netlink::Handle;
use crate::plan::{AttachmentPlan, PodRef};
use crate::step::HookKind;

/// The dataplane, as attaching and detaching use it. A trait so that executables without a dataplane do not carry its
/// code and its BPF object.
pub trait Enforce: fmt::Debug + Send + Sync {
    /// Gives attachments of one pod their policy, counters and programs, and sets their links' pace. `host` is in the node's
    /// namespace, `pod` in the pod's.
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
    /// Takes an attachment's programs off the device that its pod had, and off that one's representor: the pod is gone, the
    /// device is the node's again. Its record stays until [`Enforce::detach`].
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn leave_device(&self, id: u32) -> Result<(), EnforceError>;
    /// Takes an attachment off the fast path before its link is deleted.
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn retire(&self, id: u32) -> Result<(), EnforceError>;
    /// Adopts the attachments of an earlier agent; when they are `all`, others are removed. Returns the failures.
    fn adopt(&self, attachments: &[EnforcedAttachment], all: bool) -> Vec<EnforceError>;
    /// Has what stations send to groups not come in by the node's own link on a parent. Idempotent.
    ///
    /// # Errors
    /// The kernel refused the program.
    fn drop_groups(&self, host_link: u32, host: &mut Handle) -> Result<(), EnforceError>;
    /// The numbers of the attachments that the dataplane has records of.
    fn recorded(&self) -> Vec<u32>;
    /// The first part of the attachment's enforcement that is missing, as text: record, addresses, policy or programs.
    ///
    /// # Errors
    /// The check failed.
    fn verify(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError>;
    /// The same in a look at many attachments that knows so much of their parents, which it adds to.
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
    /// Does what was left for after the attachment's ADD: programs that run by filters in the pod get links, which nobody there
    /// can take off.
    ///
    /// # Errors
    /// The kernel refused a program: it goes on by a filter. Calling again is safe.
    fn settle(&self, attachment: &EnforcedAttachment) -> Result<(), EnforceError>;
    /// Notes what goes past the programs of an attachment whose device is in its pod, as far as that namespace alone shows it:
    /// its level is lower until a look finds it gone.
    ///
    /// # Errors
    /// The kernel does not show the device.
    fn look_into_pod(&self, attachment: &EnforcedAttachment, pod: &mut Handle) -> Result<(), EnforceError>;
    /// Notes whether a look has found a device of kind `ifb` in the pod of the attachments with these numbers: while one is there
    /// their level, and that of others on their parents, is lower. Returns whether one is there that matters to any.
    fn note_ifb(&self, attachments: &[u32], has_one: bool) -> bool;
    /// The first shared pin that is missing, as text.
    ///
    /// # Errors
    /// The check failed.
    fn verify_shared(&self) -> Result<Option<String>, EnforceError>;
    /// Checks that the attachment, as it is about to be enforced, has the required enforcement level: a card may switch what a
    /// representor would show. Devices of others are not asked.
    ///
    /// # Errors
    /// As [`Enforce::permit`].
    fn permit_on_device(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        enforced: &EnforcedAttachment,
    ) -> Result<(), Unenforceable>;
    /// Checks that the attachment has the required enforcement level; `vantage` is where its frames are seen, if known.
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
