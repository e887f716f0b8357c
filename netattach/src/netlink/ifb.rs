//! Intermediate devices (`ifb`). Packets that such a device sends on by the interface from which they were
//! redirected carry a mark of the kernel (`tc_skip_classify`, which programs cannot read). Because of this
//! mark, the next device that receives the packet runs no programs for it: neither clsact filters nor tcx,
//! nor nftables chains of the family `netdev`.

use netlink_packet_route::link::InfoKind;
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::link::show;
use super::nft::attribute_in;
use super::socket::Walked;
use super::{Error, Handle};

/// `IFLA_LINKINFO` of `linux/if_link.h`, with `IFLA_INFO_KIND` in it.
const LINK_INFO: u16 = 18;
const KIND: u16 = 1;
/// Length of `ifinfomsg`.
const HEADER: usize = 16;
/// Most links that are read. A usual pod has fewer, so its handle stays usable.
const MOST: usize = 64;
/// Most links that are requested one by one, at some ten microseconds each.
const MOST_BY_INDEX: usize = 4 << 10;
/// Name of the kind in the kernel.
const IFB: &[u8] = b"ifb";

impl Handle {
    /// Returns whether the namespace has an intermediate device, or may have one: if a link's description is
    /// too long for the kernel, the kernel lists no links at all. The kernel lists only intermediate devices,
    /// or, if it has no driver for them, all links; the first listed link shows which. No driver is loaded.
    /// Returns the handle too, unless there are more links than are read: a process that administrates a
    /// pod's network can create as many links as the kernel has memory for, and a handle with a partly read
    /// list cannot be used.
    ///
    /// The kernel ends a list at a link whose description has grown since the list began, see `whole`. If no
    /// link was listed, each link is requested separately; if there are more than a few thousand links, the
    /// result is that a device may exist.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn has_ifb(mut self) -> Result<(bool, Option<Self>), Error> {
        let of_kind = show(LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(InfoKind::Ifb));
        let mut first = None;
        let walked = self.socket.first(of_kind, MOST, |message| {
            first.get_or_insert_with(|| is_ifb(message));
        });
        let walked = match walked {
            Err(error) if error.is_too_many() => return Ok((true, None)),
            walked => walked?,
        };
        let has_one = match first {
            Some(has_one) => has_one,
            None => self.has_ifb_by_index()?,
        };
        Ok((has_one, (walked != Walked::Left).then_some(self)))
    }

    fn has_ifb_by_index(&mut self) -> Result<bool, Error> {
        let indices = self.indices()?;
        if indices.len() > MOST_BY_INDEX {
            return Ok(true);
        }
        for index in indices {
            let one = show(LinkUnspec::new_with_index(index));
            match self.socket.look(one, |message| Some(is_ifb(message))) {
                Err(error) if error.not_found() => {}
                Err(error) if error.is_untold() => return Ok(true),
                found => {
                    if found? == Some(true) {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }
}

/// Whether a message about a link, without its header, describes an intermediate device.
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

    fn make(handle: &mut Handle, kind: InfoKind, name: &str) -> Result<(), Error> {
        let link = LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(kind).name(name.to_owned());
        handle.socket.request(RouteNetlinkMessage::NewLink(link.build()), CREATE | EXCL).map(drop)
    }

    #[test]
    fn one_is_found_among_other_links_while_it_is_there() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let found = || {
            let open = || Handle::open_in(&netns).unwrap();
            let (listed, by_index) = (open().has_ifb().unwrap().0, open().has_ifb_by_index().unwrap());
            assert_eq!(listed, by_index);
            listed
        };
        make(&mut handle, InfoKind::Bridge, "other0").unwrap();
        assert!(!found());
        if make(&mut handle, InfoKind::Ifb, "other1").is_err() {
            // The kernel has no driver.
            assert!(!found());
            return;
        }
        assert!(found());
        let made = handle.link("other1").unwrap();
        handle.ensure_indices_absent(&[made.index]).unwrap();
        assert!(!found());
    }

    /// Holds whether the kernel lists the devices or, without a driver, all links.
    #[test]
    fn a_list_is_read_as_far_as_it_is_looked_at_and_no_handle_goes_on_with_the_rest() {
        let netns = Netns::private().unwrap();
        let (_, handle) = Handle::open_in(&netns).unwrap().has_ifb().unwrap();
        let mut handle = handle.unwrap();
        // The returned handle is in step with the kernel.
        assert_eq!(handle.link("lo").unwrap().index, 1);
        let has_driver = make(&mut handle, InfoKind::Ifb, "device").is_ok();
        for number in 0..=MOST {
            let kind = if has_driver { InfoKind::Ifb } else { InfoKind::Bridge };
            make(&mut handle, kind, &format!("device{number}")).unwrap();
        }
        let (found, rest) = handle.has_ifb().unwrap();
        assert_eq!((found, rest.is_none()), (has_driver, true));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..128)) {
            let _ = is_ifb(&bytes);
        }
    }
}
