//! Keeps the kernel's policies equal to what is compiled, and attachments under them from their first packet.
//!
//! The [`enforcer`] composes the parts. An [`attachment`] comes under its policies with the settings that hold for all of them
//! ([`node_defaults`]) and with its `bandwidth`; how far policies hold is its [`level`], and [`admission`] refuses a pod where
//! that is not far enough. The `state` behind the enforcer's lock is a `roster` of attachments, those that are `deferred` until a
//! policy selects them, and the [`policies`], which decide what the `policy_maps` are to hold. `programs` runs programs on
//! devices, and `routed` judges what the node translates. `adoption` takes over what an earlier agent left, `verify` looks
//! whether all of it is still so, and [`queries`] answers the rest of the agent. What goes wrong is an [`error`].

pub mod admission;
mod adoption;
pub mod attachment;
mod bandwidth;
mod deferred;
pub mod enforcer;
pub mod error;
pub mod level;
pub mod node_defaults;
pub mod policies;
mod policy_maps;
mod programs;
pub mod queries;
mod roster;
mod routed;
mod state;
mod verify;

use std::fmt;

use admission::Unenforceable;
use attachment::EnforcedAttachment;
use error::EnforceError;

use crate::netlink::Handle;
use crate::plan::{AttachmentPlan, PodRef};
use crate::step::HookKind;

/// The dataplane, as attaching and detaching use it. A trait so that executables without a dataplane do not
/// carry its code and its BPF object.
pub trait Enforce: fmt::Debug + Send + Sync {
    /// Gives an attachment its policy, its counters and its programs, and its link its pace. `host` is in the node's
    /// namespace, `pod` in the pod's.
    ///
    /// # Errors
    /// The kernel refused a map, a program or a queue. [`Enforce::detach`] and the end of the link take back what was done.
    fn attach(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
        pod: &mut Handle,
    ) -> Result<(), EnforceError>;
    /// Removes the attachment with this number from the dataplane, if it is there.
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn detach(&self, id: u32) -> Result<(), EnforceError>;
    /// Takes an attachment off the fast path: its link is about to go.
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn retire(&self, id: u32) -> Result<(), EnforceError>;
    /// Takes over the attachments of an earlier agent; when they are `all`, others are removed. Returns what failed.
    fn adopt(&self, attachments: &[EnforcedAttachment], all: bool) -> Vec<EnforceError>;
    /// The numbers of the attachments that the dataplane has records of.
    fn recorded(&self) -> Vec<u32>;
    /// The first part of the attachment's enforcement that is missing, in words: record, addresses, policy or programs.
    ///
    /// # Errors
    /// It could not be looked at.
    fn verify(
        &self,
        attachment: &EnforcedAttachment,
        host: &mut Handle,
    ) -> Result<Option<String>, EnforceError>;
    /// Puts the programs back where another process has taken them off the attachment's device, and says whether it did.
    ///
    /// # Errors
    /// The kernel refused a program.
    fn restore(&self, attachment: &EnforcedAttachment, host: &mut Handle) -> Result<bool, EnforceError>;
    /// The first shared pin that is missing, in words.
    ///
    /// # Errors
    /// It could not be looked at.
    fn verify_shared(&self) -> Result<Option<String>, EnforceError>;
    /// Checks that policies hold for the attachment as far as is required; `vantage` is where its frames are seen, as far as that is
    /// known.
    ///
    /// # Errors
    /// They do not; the error names who requires it.
    fn permit(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        vantage: Option<&HookKind>,
    ) -> Result<(), Unenforceable>;
}
