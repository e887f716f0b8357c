//! Which links have an XDP program, and its removal. The kernel sends no notification when a program is
//! attached by a BPF link or when such a link goes away.

use std::collections::BTreeSet;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkXdp};
use rtnetlink::LinkUnspec;

use super::above::index_of;
use super::link::show;
use super::nft::attribute_in;
use super::{Error, Handle};

/// `IFLA_XDP` and `IFLA_XDP_ATTACHED` of `linux/if_link.h`.
const XDP: u16 = 43;
const ATTACHED: u16 = 2;
/// Length of `ifinfomsg`.
const HEADER: usize = 16;

/// Where an XDP program of a link runs. Each place runs at most one program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpPlace {
    /// In the kernel, in generic mode.
    Kernel,
    /// In the driver.
    Driver,
    /// On the card.
    Card,
}

impl XdpPlace {
    /// `XDP_FLAGS_SKB_MODE`, `XDP_FLAGS_DRV_MODE` and `XDP_FLAGS_HW_MODE` of `linux/if_link.h`.
    fn flag(self) -> u32 {
        match self {
            Self::Kernel => 1 << 1,
            Self::Driver => 1 << 2,
            Self::Card => 1 << 3,
        }
    }
}

impl Handle {
    /// The links of the namespace that have an XDP program, by index.
    pub fn links_with_xdp(&mut self) -> Result<BTreeSet<u32>, Error> {
        let has_one = |message: &[u8]| Some((index_of(message)?, with_xdp(message)));
        let all = self.scan_links(has_one)?;
        Ok(all.into_iter().filter_map(|(index, has_one)| has_one.then_some(index)).collect())
    }

    /// Returns the XDP programs of a link: where each runs, and its kernel id.
    ///
    /// # Errors
    /// There is no such link.
    pub fn xdp_programs(&mut self, index: u32) -> Result<Vec<(XdpPlace, u32)>, Error> {
        let shown = self.socket.request(show(LinkUnspec::new_with_index(index)), 0)?;
        Ok(shown.into_iter().flat_map(programs).collect())
    }

    /// Removes the XDP program that runs in that place from a link. Idempotent.
    ///
    /// # Errors
    /// `EBUSY` if a BPF link holds the program: then only that link can be detached. The network link does
    /// not exist.
    pub fn ensure_xdp_absent(&mut self, index: u32, place: XdpPlace) -> Result<(), Error> {
        let none = LinkAttribute::Xdp(vec![LinkXdp::Fd(-1), LinkXdp::Flags(place.flag())]);
        self.change(LinkUnspec::new_with_index(index).append_extra_attribute(none))
    }
}

fn programs(shown: RouteNetlinkMessage) -> Vec<(XdpPlace, u32)> {
    let RouteNetlinkMessage::NewLink(link) = shown else { return Vec::new() };
    let mut found = Vec::new();
    for attribute in &link.attributes {
        if let LinkAttribute::Xdp(told) = attribute {
            found.extend(of_link(told));
        }
    }
    found
}

/// The programs of a link, from the XDP attribute of its message.
pub(super) fn of_link(told: &[LinkXdp]) -> impl Iterator<Item = (XdpPlace, u32)> {
    told.iter().filter_map(|one| match one {
        LinkXdp::SkbProgId(id) => Some((XdpPlace::Kernel, *id)),
        LinkXdp::DrvProgId(id) => Some((XdpPlace::Driver, *id)),
        LinkXdp::HwProgId(id) => Some((XdpPlace::Card, *id)),
        _ => None,
    })
}

/// Whether a link has an XDP program, according to the message about it.
fn with_xdp(message: &[u8]) -> bool {
    let xdp = message.get(HEADER..).and_then(|attributes| attribute_in(attributes, XDP));
    let mode = xdp.and_then(|xdp| attribute_in(xdp, ATTACHED)?.first().copied());
    // A mode (`XDP_ATTACHED_*`), 0 for none.
    mode.is_some_and(|mode| mode != 0)
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::{LinkMessage, XdpAttached};

    use super::*;

    fn encoded(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn the_programs_of_a_link_are_told_by_who_runs_them() {
        let shown = |xdp| {
            let mut link = LinkMessage::default();
            link.attributes.extend([LinkAttribute::Mtu(1500), LinkAttribute::Xdp(xdp)]);
            programs(RouteNetlinkMessage::NewLink(link))
        };
        assert_eq!(shown(vec![LinkXdp::Attached(XdpAttached::None)]), []);
        // The kernel reports a single program twice.
        let alone =
            vec![LinkXdp::Attached(XdpAttached::SocketBuffer), LinkXdp::ProgId(7), LinkXdp::SkbProgId(7)];
        assert_eq!(shown(alone), [(XdpPlace::Kernel, 7)]);
        let both =
            vec![LinkXdp::Attached(XdpAttached::Multiple), LinkXdp::DrvProgId(8), LinkXdp::HwProgId(9)];
        assert_eq!(shown(both), [(XdpPlace::Driver, 8), (XdpPlace::Card, 9)]);
    }

    #[test]
    fn a_link_has_a_program_if_its_message_names_a_mode() {
        let message = |mode: u8| {
            let mut message = vec![0; HEADER];
            message.extend(encoded(3, b"net1\0"));
            message.extend(encoded(XDP | 0x8000, &encoded(ATTACHED, &[mode])));
            message
        };
        assert_eq!([0, 1, 2].map(|mode| with_xdp(&message(mode))), [false, true, true]);
        assert!(!with_xdp(&message(1)[..HEADER + 12]));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..128)) {
            let _ = with_xdp(&bytes);
        }
    }
}
