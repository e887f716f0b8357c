//! The devices beneath a VLAN.

use super::{Error, Handle, LinkState};
use crate::spec::LinkMode;

/// Most VLANs that are one in another (`MAX_NEST_DEV` of `linux/netdevice.h`).
const MOST: usize = 8;

impl Handle {
    /// Where the frames of a link leave with a tag, if it is a VLAN: the device beneath and the VLAN there; and so on, if that
    /// is a VLAN itself.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn trunks(&mut self, link: &LinkState) -> Result<Vec<(u32, u16)>, Error> {
        let mut found = Vec::new();
        let (mut mode, mut beneath) = (link.mode, link.link);
        while let (Some(LinkMode::Vlan(tag)), Some(device)) = (mode, beneath) {
            found.push((device, tag.id));
            if found.len() == MOST {
                break;
            }
            (mode, beneath) = match self.link_by_index(device) {
                Ok(next) => (next.mode, next.link),
                // It is in another namespace, where no pod's link has its parent.
                Err(error) if error.not_found() => break,
                Err(error) => return Err(error),
            };
        }
        Ok(found)
    }
}
