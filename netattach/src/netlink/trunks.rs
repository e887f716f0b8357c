//! The devices beneath a VLAN.

use super::{Error, Handle, LinkState};
use crate::spec::LinkMode;

/// Most VLANs that are one in another (`MAX_NEST_DEV` of `linux/netdevice.h`).
const MOST: usize = 8;

impl Handle {
    /// Where the frames of a link leave with a tag, if it is a VLAN: the device beneath and the VLAN there; and so on, if that
    /// is a VLAN itself. Only devices of this namespace: in another no pod's link has its parent.
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
            // Beneath one that was moved here is a device of another namespace: its index is some other device's in this one.
            let beneath = vlan.link.link.filter(|_| vlan.stays());
            let (Some(LinkMode::Vlan(tag)), Some(device)) = (vlan.link.mode, beneath) else { break };
            found.push((device, tag.id));
            next = self.device_by_index(device)?;
        }
        Ok(found)
    }
}
