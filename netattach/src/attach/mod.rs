//! Carries plans out, and takes them back.
//!
//! [`Engine`] has one function per CNI verb. Everything it does to the machine goes through a plan's steps
//! ([`apply`]) and their inverses ([`undo`]), each of them in the journal before it happens; DEL and CHECK need
//! nothing else. The choices were made in `plan`: what is left here is in order, and boring.

pub mod apply;
mod available;
mod bridges;
mod check;
mod conf_dir;
#[cfg(test)]
mod damage_tests;
mod default_network;
mod device_info;
mod dynamic;
mod engine;
mod error;
mod gc;
mod guard;
mod inherited;
mod intent;
mod occupied;
mod plugin_del;
mod registry;
mod repeated;
#[cfg(test)]
pub(crate) mod rig;
mod routing;
pub mod standalone;
pub mod status;
pub mod undo;

pub use bridges::Bridges;
pub use default_network::{DefaultNetwork, InvalidDefaultNetwork};
pub use engine::{Engine, Recovery};
pub use error::{AttachError, Doing, StepError};
pub use gc::{Census, Collected, Stale};
pub use inherited::{Inheritance, InheritanceError};
pub use intent::{IntentError, IntentReader};
pub use occupied::{Address, Holder, Occupied};
pub use registry::{Attached, Registry};
pub use repeated::RepeatedAdd;
pub use status::{StatusFileError, StatusFiles};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::delegate;
use crate::ipam::host_local::Leases;
use crate::journal::{JournalError, Record};
use crate::netlink::Handle;
use crate::plan::{AttachmentPlan, Output, PodRef, StepRef, Vantage};
use crate::policy::error::EnforceError;
use crate::policy::guarded::Guarded;
use crate::policy::unenforced::Unenforceable;

/// What a node offers to every attachment. Shared by all operations.
#[derive(Debug)]
pub struct Node {
    /// Address pools.
    pub leases: Leases,
    /// Other CNI plugins.
    pub delegate: delegate::Delegate,
    /// Where others look for what was attached.
    pub cache: delegate::ResultCache,
    /// Bridges that are about to be used.
    pub bridges: Bridges,
    /// Whose addresses are whose.
    pub occupied: Occupied,
    /// The dataplane; absent in the plain CNI executables.
    pub enforcer: Option<Arc<dyn Enforce>>,
}

/// What attaching and detaching ask of the dataplane. A trait so that executables without a dataplane do not
/// carry its code and its BPF object.
pub trait Enforce: fmt::Debug + Send + Sync {
    /// The attachment has its policy, its counters and its programs, and its link its pace. `host` is in the node's
    /// namespace, `pod` in the pod's.
    ///
    /// # Errors
    /// The kernel refused a map, a program or a queue; whatever was done, [`Enforce::detach`] and the end of the link
    /// take back.
    fn attach(&self, guarded: &Guarded, host: &mut Handle, pod: &mut Handle) -> Result<(), EnforceError>;
    /// The dataplane knows the attachment with this number no more, or never did.
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn detach(&self, id: u32) -> Result<(), EnforceError>;
    /// Packets reach the attachment by the node's stack only, from here on: its link is about to go.
    ///
    /// # Errors
    /// The kernel refused. Calling again is safe.
    fn retire(&self, id: u32) -> Result<(), EnforceError>;
    /// These attachments exist, and no others when these are `all`. Says what is wrong with which.
    fn adopt(&self, attachments: &[Guarded], all: bool) -> Vec<EnforceError>;
    /// The numbers of the attachments that the dataplane has records of.
    fn recorded(&self) -> Vec<u32>;
    /// What is missing of the attachment's enforcement, in words: record, addresses, policy or programs.
    ///
    /// # Errors
    /// It could not be looked at.
    fn verify(&self, guarded: &Guarded, host: &mut Handle) -> Result<Option<String>, EnforceError>;
    /// Puts the programs back where somebody has taken them off the attachment's device, and says whether it did.
    ///
    /// # Errors
    /// The kernel refused a program.
    fn restore(&self, guarded: &Guarded, host: &mut Handle) -> Result<bool, EnforceError>;
    /// What is missing of what all attachments share, in words.
    ///
    /// # Errors
    /// It could not be looked at.
    fn verify_shared(&self) -> Result<Option<String>, EnforceError>;
    /// Policies hold for the attachment as far as is asked; `vantage` is where its frames are seen, as far as that is known.
    ///
    /// # Errors
    /// They do not, and whose word it is.
    fn permit(
        &self,
        pod: Option<&PodRef>,
        attachment: &AttachmentPlan,
        vantage: Option<&Vantage>,
    ) -> Result<(), Unenforceable>;
}

/// Where the progress of a plan is kept.
pub trait Progress {
    /// To be called before the effect of a step that has an inverse.
    ///
    /// # Errors
    /// The progress could not be kept: the step must not happen.
    fn begin(&mut self, step: StepRef) -> Result<(), JournalError>;
    /// To be called after it.
    ///
    /// # Errors
    /// The progress could not be kept.
    fn done(&mut self, step: StepRef, output: Output) -> Result<(), JournalError>;
    /// To be called before another plugin runs: what it does may outlive a loss of power.
    ///
    /// # Errors
    /// The plan could not be made durable.
    fn wait_durable(&mut self) -> Result<(), JournalError>;
    /// Whether a step may have had an effect.
    fn has_begun(&self, step: StepRef) -> bool;
    /// To be called before the first step, with the cookie of the sandbox's namespace, 0 where the kernel gives none.
    ///
    /// # Errors
    /// It could not be kept.
    fn is_in(&mut self, netns_cookie: u64) -> Result<(), JournalError>;
    /// The cookie of the namespace that the steps were carried out in, if it is known.
    fn netns_cookie(&self) -> Option<u64>;
    /// What the finished steps brought.
    fn outputs(&self) -> &BTreeMap<StepRef, Output>;
}

impl Progress for Record {
    fn begin(&mut self, step: StepRef) -> Result<(), JournalError> {
        Record::begin(self, step)
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

    fn is_in(&mut self, netns_cookie: u64) -> Result<(), JournalError> {
        Record::is_in(self, netns_cookie)
    }

    fn netns_cookie(&self) -> Option<u64> {
        self.netns_cookie
    }

    fn outputs(&self) -> &BTreeMap<StepRef, Output> {
        &self.outputs
    }
}
