//! The devices below a VLAN.

use super::{Error, Handle, LinkState};
use crate::spec::LinkMode;

/// Most VLANs that may be nested (`MAX_NEST_DEV` of `linux/netdevice.h`).
const MOST: usize = 8;

impl Handle {
    /// For a VLAN: returns the device below and the VLAN id there; and so on, if that device is a VLAN too.
    /// Only devices of this namespace: a pod's link never has its parent in another one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn trunks(&mut self, link: &LinkState) -> Result<Vec<(u32, u16)>, Error> {
        let mut found = Vec::new();
        if !matches!(link.mode, Some(LinkMode::Vlan(_))) {
            return Ok(found);
        }
        let mut next = self.device_by_index(link.index)?;
        while let Some(vlan) = next.filter(|_| found.len() < MOST) {
            // If the VLAN was moved here, the device below is in another namespace, and its index denotes an
            // unrelated device here.
            let beneath = vlan.link.link.filter(|_| vlan.stays());
            let (Some(LinkMode::Vlan(tag)), Some(device)) = (vlan.link.mode, beneath) else { break };
            found.push((device, tag.id));
            next = self.device_by_index(device)?;
        }
        Ok(found)
    }
}
