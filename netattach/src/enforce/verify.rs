//! Whether attachments are enforced as they should be, and putting programs back where somebody has taken them off.

use std::sync::atomic::Ordering;

use super::attachment::Guarded;
use super::enforcer::Enforcer;
use super::error::EnforceError;
use crate::hooks::HookPoint;
use crate::netlink::Handle;

impl Enforcer {
    /// What is missing of an attachment's enforcement, in words.
    ///
    /// # Errors
    /// A map or the device's filters could not be read.
    pub fn verify(&self, guarded: &Guarded, host: &mut Handle) -> Result<Option<String>, EnforceError> {
        let Guarded { id, point, .. } = guarded;
        if point.is_nowhere() {
            return Ok(None);
        }
        if let Some(difference) =
            self.dataplane.attachments().difference(*id, &point.device(), &self.applied(guarded))?
        {
            return Ok(Some(difference));
        }
        {
            let state = self.lock();
            let found = self.dataplane.policies().of(*id)?;
            let wanted = state.programmed.endpoints.get(id).copied().unwrap_or_default();
            if found != wanted {
                return Ok(Some("it is under other policies in the dataplane".to_owned()));
            }
        }
        if let HookPoint::Parent { on, .. } = point {
            let missing = self.parents.missing(&self.dataplane, on.parent, host)?;
            return Ok(missing.map(|name| not_attached(name, on.parent, host)));
        }
        let index = point.host_index();
        if let Some(missing) = self.missing(guarded, host)? {
            return Ok(Some(missing));
        }
        if let Some(pace) = guarded.host_pace().filter(|_| self.passage.paced)
            && host.find_pace(index)? != Some((pace.rate, pace.queue))
        {
            let device = device_name(index, host);
            return Ok(Some(format!("device {device} does not send at the attachment's rate")));
        }
        Ok(None)
    }

    /// Puts the programs back where somebody has taken them off an attachment's device, and says whether it did.
    ///
    /// # Errors
    /// The device's filters could not be read, or the kernel refused a program.
    pub fn restore(&self, guarded: &Guarded, host: &mut Handle) -> Result<bool, EnforceError> {
        let device = guarded.host_index();
        if matches!(guarded.point, HookPoint::Parent { .. }) {
            if !self.parents.restore(&self.dataplane, guarded.id, host)? {
                return Ok(false);
            }
        } else if self.is_waiting(guarded.id) {
            return self.begin_if_due(guarded.id);
        } else if !self.run_again(guarded, host)? {
            return Ok(false);
        }
        self.put_back.fetch_add(1, Ordering::Relaxed);
        let device = device_name(device, host);
        tracing::warn!(device, attachment = guarded.whose, "somebody took programs off a device; put back");
        Ok(true)
    }

    /// Somebody took a program off, and it was put back.
    pub(super) fn count_put_back(&self) {
        self.put_back.fetch_add(1, Ordering::Relaxed);
    }

    /// How often programs were put back since the agent's start.
    pub fn put_back(&self) -> u64 {
        self.put_back.load(Ordering::Relaxed)
    }

    /// What is missing of what all attachments share, in words.
    ///
    /// # Errors
    /// The pins cannot be looked at.
    pub fn verify_shared(&self) -> Result<Option<String>, EnforceError> {
        Ok(self.dataplane.missing_pin()?.map(|path| format!("pin {} is gone", path.display())))
    }
}

/// That a program is missing on a device of the node, in words.
pub(super) fn not_attached(program: &str, device: u32, host: &mut Handle) -> String {
    format!("program {program} is not attached to device {}", device_name(device, host))
}

/// What a device is called, or its index if it is gone.
pub(super) fn device_name(index: u32, host: &mut Handle) -> String {
    host.link_by_index(index).map_or_else(|_| index.to_string(), |link| link.name)
}
