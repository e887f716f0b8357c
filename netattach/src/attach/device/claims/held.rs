//! The newest claim of a device, and whether its holder still exists.

use crate::attach::StepError;
use crate::attach::device::DeviceError;
use crate::ipam::Owner;
use crate::journal::JournalKey;
use crate::netns::Netns;
use crate::plan::{AttachmentPlan, Sandbox};
use crate::spec;
use crate::step::{Claim, Step};

/// The newest claim of a device.
#[derive(Debug, Clone)]
pub(in crate::attach::device) struct Held {
    pub(super) owner: Owner,
    /// The owner as text for messages.
    pub(super) who: String,
    pub(super) generation: u64,
    /// The namespace that the device was claimed for.
    pub(super) sandbox: Sandbox,
    pub(super) cookie: u64,
    pub(super) state: State,
    /// The attachment's number in the dataplane, if it is enforced.
    pub(super) number: Option<u32>,
    /// The claimed device and its state before the claim; `None` until both are known.
    pub(super) claim: Option<(spec::Device, Claim)>,
    /// The device's index in the pod; `None` if the device was not moved, or if the agent was killed before it
    /// recorded the index.
    pub(super) made: Option<u32>,
}

/// Whether a device is held, or has been given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The attachment holds the device.
    Held,
    /// A thread is giving the device back: no other thread does so, no attachment can claim the device, and the
    /// holder's DEL waits.
    Returning,
    /// The device was given back; the holder's record still exists.
    Returned,
}

impl Held {
    /// The key of the record that has the claim.
    pub(super) fn record(&self) -> JournalKey {
        let Sandbox { container_id, ifname, .. } = &self.sandbox;
        JournalKey { container_id: container_id.clone(), ifname: ifname.clone() }
    }

    /// Whether the pod is gone while its device has not been given back.
    pub(super) fn is_orphan(&self) -> bool {
        self.state == State::Held && self.claim.is_some() && !self.is_alive()
    }

    /// Whether [`Held::is_orphan`] is conclusive for this device. An interface is either brought back to the node by
    /// the kernel or not found at all. If a process drives the device (userspace driver), the agent cannot tell
    /// whether that process has ended: the process may see its namespace at a path that the agent does not see.
    /// Resetting such a device's settings would release the process from its VLAN.
    pub(super) fn is_found_out(&self) -> bool {
        self.claim.as_ref().is_some_and(|(_, claim)| claim.home.is_some())
    }

    /// Whether this is the claim of `owner` with number `generation`.
    pub(super) fn is_claim(&self, generation: u64, owner: &Owner) -> bool {
        self.generation == generation && self.owner == *owner
    }

    /// Whether the device cannot be claimed by `owner`: a thread is giving the device back, or another owner holds it
    /// whose namespace still exists.
    pub(super) fn is_taken_from(&self, owner: &Owner) -> bool {
        self.state == State::Returning || (self.owner != *owner && self.is_alive())
    }

    /// The error for an attachment that must claim the device again later.
    pub(super) fn taken(&self, device: &str) -> StepError {
        let (device, container) = (device.to_owned(), self.owner.container_id.clone());
        StepError::Device(DeviceError::Taken { device, who: self.who.clone(), container })
    }

    /// Whether the namespace that the device was claimed for still exists.
    pub(super) fn is_alive(&self) -> bool {
        // 0: the kernel has no namespace cookies, or the record has lost the cookie.
        let cookie = Some(self.cookie).filter(|cookie| *cookie != 0);
        let found = Netns::of(&self.sandbox.netns, self.sandbox.netns_id, cookie);
        // If the lookup fails, the namespace may exist.
        found.map_or(true, |netns| netns.is_some())
    }
}

pub(super) fn entry(
    owner: Owner,
    sandbox: &Sandbox,
    attachment: &AttachmentPlan,
    (generation, cookie): (u64, u64),
) -> Held {
    let pod = sandbox.pod.as_ref().map(|pod| format!("pod {pod}, ")).unwrap_or_default();
    let who = format!("{pod}container {}, interface {}", sandbox.container_id, attachment.ifname);
    let number = attachment.steps.iter().find_map(|step| match step {
        Step::Protect(protect) => Some(protect.id),
        _ => None,
    });
    let state = State::Held;
    Held { owner, who, generation, sandbox: sandbox.clone(), cookie, state, number, claim: None, made: None }
}
