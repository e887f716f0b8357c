//! Intermediate devices (`ifb`). What such a device sends on by the interface that it was redirected from carries a mark of the
//! kernel's own (`tc_skip_classify`, which no program reads), with which the next device that receives it runs no programs for
//! it: neither clsact filters nor tcx, nor chains of nftables' family netdev.

use std::cell::Cell;

use netlink_packet_route::link::InfoKind;
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::link::show;
use super::nft::attribute_in;
use super::{Error, Handle};

/// `IFLA_LINKINFO` of `linux/if_link.h`, with `IFLA_INFO_KIND` in it.
const LINK_INFO: u16 = 18;
const KIND: u16 = 1;
/// Length of `ifinfomsg`.
const HEADER: usize = 16;
/// Name of the kind, as the kernel has it.
const IFB: &[u8] = b"ifb";

/// What a namespace shows of intermediate devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ifb {
    /// Whether the kernel has their driver now: built in, or loaded.
    pub has_driver: bool,
    /// Whether one is in the namespace.
    pub is_there: bool,
}

impl Handle {
    /// Looks for intermediate devices in the namespace. The kernel lists those alone, however many links there are, or, where it
    /// has no driver for them, all links; of neither list anything is kept. Loads no driver.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn ifb(&mut self) -> Result<Ifb, Error> {
        let of_kind = show(LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Ifb));
        let (is_there, has_others) = (Cell::new(false), Cell::new(false));
        let listed = self.socket.scan(of_kind, |message| {
            let kind = if is_ifb(message) { &is_there } else { &has_others };
            kind.set(true);
            None::<()>
        });
        match listed {
            // A pod may change its links again and again: what was listed was there, and a list of one kind with nothing in it
            // is read in one piece.
            Err(Error::Interrupted(_)) => {}
            other => drop(other?),
        }
        // Each namespace has a loopback device: where the kernel knows the kind, it leaves that out.
        Ok(Ifb { has_driver: is_there.get() || !has_others.get(), is_there: is_there.get() })
    }
}

/// Whether a message about a link, behind its header, is about an intermediate device.
fn is_ifb(message: &[u8]) -> bool {
    let kind = message
        .get(HEADER..)
        .and_then(|attributes| attribute_in(attributes, LINK_INFO))
        .and_then(|info| attribute_in(info, KIND));
    kind.is_some_and(|kind| kind.strip_suffix(&[0]).unwrap_or(kind) == IFB)
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::RouteNetlinkMessage;

    use super::super::lean::tests::{attribute, message};
    use super::super::socket::{CREATE, EXCL};
    use super::*;
    use crate::netns::Netns;

    #[test]
    fn a_link_is_known_by_its_kind() {
        let of = |kind: &[u8]| message(0, &[attribute(LINK_INFO | 0x8000, &attribute(KIND, kind))]);
        assert!(is_ifb(&of(b"ifb\0")) && is_ifb(&of(b"ifb")));
        for other in [&b"ifb0\0"[..], b"if\0", b"veth\0", b"\0", b""] {
            assert!(!is_ifb(&of(other)), "{other:?}");
        }
        assert!(!is_ifb(&message(0, &[])) && !is_ifb(&[]));
    }

    #[test]
    fn one_is_found_among_other_links_while_it_is_there() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let make = |handle: &mut Handle, kind, name: &str| {
            let link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(kind).name(name.to_owned());
            handle.socket.request(RouteNetlinkMessage::NewLink(link.build()), CREATE | EXCL)
        };
        make(&mut handle, InfoKind::Dummy, "other0").unwrap();
        assert!(!handle.ifb().unwrap().is_there);
        if make(&mut handle, InfoKind::Ifb, "other1").is_err() {
            // The kernel has no driver.
            assert_eq!(handle.ifb().unwrap(), Ifb::default());
            return;
        }
        assert_eq!(handle.ifb().unwrap(), Ifb { has_driver: true, is_there: true });
        let made = handle.link("other1").unwrap();
        handle.ensure_indices_absent(&[made.index]).unwrap();
        assert_eq!(handle.ifb().unwrap(), Ifb { has_driver: true, is_there: false });
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..128)) {
            let _ = is_ifb(&bytes);
        }
    }
}
