//! The links that are on top of another one, in any number that a pod has created, and their deletion in one
//! step.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::stats::{StatsFilterMask, StatsMessage};
use rtnetlink::LinkUnspec;
use rustix::io::Errno;

use super::blurred::{INFO, KIND, blurred};
use super::device::is_pair;
use super::link::show;
use super::nft::attribute_in;
use super::socket::NetlinkRequest;
use super::{Error, Handle};
use crate::error_chain::Chain;

/// `IFLA_LINK`, `IFLA_IFALIAS` and `IFLA_LINK_NETNSID` of `linux/if_link.h`.
const LINK: u16 = 5;
const ALIAS: u16 = 20;
const LINK_NETNS: u16 = 37;
/// Length of `ifinfomsg`, and offset of the index in it, as in `if_stats_msg`.
const HEADER: usize = 16;
const INDEX_AT: usize = 4;
/// The group of links that are about to be deleted. Not one of netattach's own.
const LEAVING: u32 = 0x6e61_7570;

/// A link that is on top of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Above {
    /// Index in its namespace.
    pub index: u32,
    /// The number of the namespace that the lower device's index refers to; `None`: the namespace of the
    /// link.
    pub netns: Option<i32>,
    /// Whether the lower device and its namespace are unknown: the link's description is longer than its length
    /// fields or the kernel's answer can hold.
    pub is_blurred: bool,
}

impl Handle {
    /// Returns the links of the namespace that are, or may be, on top of the link with that index. Only links
    /// of a named kind are returned, because the kernel can delete no others, and only those for which
    /// `counts` holds; its arguments are the link's index, kind and alias. A link that cannot be described at
    /// all is included.
    ///
    /// There may be any number of links, so each is requested separately and nothing is kept of the others. A
    /// list would not do: the kernel lists no links if one link's description is longer than 4 MiB, and ends
    /// a list at a link whose description has grown since the list began.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn links_on(
        &mut self,
        index: u32,
        counts: impl Fn(u32, &str, &str) -> bool,
    ) -> Result<Vec<Above>, Error> {
        let mut above = Vec::new();
        for own in self.indices()? {
            let one = show(LinkUnspec::new_with_index(own));
            match self.socket.look(one, |message| on(message, index, &counts)) {
                Err(error) if error.not_found() => {}
                Err(error) if error.is_untold() => {
                    above.push(Above { index: own, netns: None, is_blurred: true });
                }
                found => above.extend(found?),
            }
        }
        Ok(above)
    }

    /// Whether a link's description is longer than its length fields or the kernel's answer can hold.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn is_blurred(&mut self, index: u32) -> Result<bool, Error> {
        let one = show(LinkUnspec::new_with_index(index));
        match self.socket.look(one, |message| blurred(message.get(HEADER..)?).map(drop)) {
            Err(error) if error.is_untold() => Ok(true),
            found => Ok(found?.is_some()),
        }
    }

    /// Returns the indices of all links, by a dump that contains little else, of the same length for each
    /// link.
    pub(super) fn indices(&mut self) -> Result<Vec<u32>, Error> {
        let mut all = StatsMessage::default();
        // The kernel refuses a request without any statistics. These are those of MPLS.
        all.header.filter_mask = StatsFilterMask::AfSpec;
        let indices = self.socket.scan(RouteNetlinkMessage::GetStats(all), index_of)?;
        // Every namespace has a loopback device.
        match indices.is_empty() {
            true => Err(Error::Unreadable("RTM_GETSTATS")),
            false => Ok(indices),
        }
    }

    /// Deletes the links with those indices for the cost of one grace period. Skips links that are gone or
    /// that the kernel does not delete.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn ensure_indices_absent(&mut self, links: &[u32]) -> Result<(), Error> {
        if links.len() > 1 {
            let group = || LinkAttribute::Group(LEAVING);
            let into_group = |index: &u32| {
                let moved = LinkUnspec::new_with_index(*index).append_extra_attribute(group());
                NetlinkRequest::new(RouteNetlinkMessage::SetLink(moved.build()), 0)
            };
            // A link that cannot be moved is deleted by itself below.
            self.socket.batch(links.iter().map(into_group).collect())?;
            let mut all = LinkMessage::default();
            all.attributes.push(group());
            if let Err(error) = self.socket.request(RouteNetlinkMessage::DelLink(all), 0) {
                tracing::debug!(error = %Chain(&error), "no deletion by group, deleting links one by one");
            }
        }
        let delete = |index: &u32| {
            NetlinkRequest::new(RouteNetlinkMessage::DelLink(LinkUnspec::new_with_index(*index).build()), 0)
        };
        self.socket.all_but(links.iter().map(delete).collect(), &[Errno::NODEV, Errno::OPNOTSUPP])
    }
}

/// See [`Handle::links_on`]; evaluates one message.
fn on(message: &[u8], index: u32, counts: impl Fn(u32, &str, &str) -> bool) -> Option<Above> {
    let attributes = message.get(HEADER..)?;
    let own = index_of(message)?;
    let (told, kind, is_blurred) = match blurred(attributes) {
        Some(blurred) => (blurred.before, blurred.kind, true),
        None => (attributes, attribute_in(attribute_in(attributes, INFO)?, KIND)?, false),
    };
    // A blurred description may contain the lower device after the readable part.
    let is_on = attribute_in(told, LINK).map_or(is_blurred, |link| link == index.to_ne_bytes());
    if !is_on {
        return None;
    }
    let kind = text(kind);
    let alias = attribute_in(told, ALIAS).map(text).unwrap_or_default();
    let netns = match attribute_in(told, LINK_NETNS) {
        Some(number) => Some(i32::from_ne_bytes(number.try_into().ok()?)),
        None => None,
    };
    let is_it = !kind.is_empty() && !is_pair(kind) && (own != index || netns.is_some() || is_blurred);
    (is_it && counts(own, kind, alias)).then_some(Above { index: own, netns, is_blurred })
}

/// The index in a message about a link or its counters.
pub(super) fn index_of(message: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(message.get(INDEX_AT..INDEX_AT + 4)?.try_into().ok()?))
}

/// A string up to its terminating zero; empty if it is not valid UTF-8. netattach's own kinds and aliases are
/// always valid.
fn text(value: &[u8]) -> &str {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    std::str::from_utf8(&value[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::{
        InfoData, InfoKind, InfoMacVlan, LinkInfo, MacVlanMacAddressMode, MacVlanMode,
    };

    use super::super::blurred::tests::{LinkAt, ORDERS, with_sources};
    use super::super::lean::tests::{attribute, message};
    use super::*;
    use crate::netns::Netns;
    use crate::spec::{Bridge, Macvlan};

    const fn here(netns: Option<i32>) -> Option<Above> {
        Some(Above { index: 9, netns, is_blurred: false })
    }

    /// A link with index 9 on top of the link with index 4.
    fn shown(kind: &[u8], further: &[Vec<u8>]) -> Vec<u8> {
        let info = attribute(INFO | 0x8000, &attribute(KIND, kind));
        let link = attribute(LINK, &4_u32.to_ne_bytes());
        let mut shown = message(0, &[vec![link, info], further.to_vec()].concat());
        shown[INDEX_AT..INDEX_AT + 4].copy_from_slice(&9_u32.to_ne_bytes());
        shown
    }

    #[test]
    fn a_link_is_on_the_one_that_it_names_unless_it_is_the_other_end_or_nobodys_to_delete() {
        let all = |_: u32, _: &str, _: &str| true;
        assert_eq!(on(&shown(b"macvlan\0", &[]), 4, all), here(None));
        assert_eq!(on(&shown(b"vlan", &[]), 4, all), here(None));
        let elsewhere = [attribute(LINK_NETNS, &3_i32.to_ne_bytes())];
        assert_eq!(on(&shown(b"macvlan\0", &elsewhere), 4, all), here(Some(3)));
        assert_eq!(on(&shown(b"macvlan\0", &[]), 5, all), None);
        for kind in ["veth\0", "netkit\0", "\0"] {
            assert_eq!(on(&shown(kind.as_bytes(), &[]), 4, all), None, "{kind:?}");
        }
        let kept = |own: u32, kind: &str, alias: &str| (own, kind, alias) != (9, "vlan", "eth0.5");
        let named = [attribute(ALIAS, b"eth0.5\0")];
        assert_eq!(on(&shown(b"vlan\0", &named), 4, kept), None);
        assert_eq!(on(&shown(b"macvlan\0", &named), 4, kept), here(None));
    }

    #[test]
    fn a_link_of_which_it_cannot_be_told_what_it_is_on_may_be_on_any_of_that_index() {
        for order in ORDERS {
            // The alias is not read from the unreadable part.
            let behind = attribute(ALIAS, b"card.5\0");
            let mut shown = message(0, &[with_sources(6_000, order), behind]);
            shown[INDEX_AT..INDEX_AT + 4].copy_from_slice(&9_u32.to_ne_bytes());
            let blurred = Some(Above { index: 9, netns: None, is_blurred: true });
            let counts = |_: u32, kind: &str, alias: &str| (kind, alias) == ("macvlan", "");
            assert_eq!(on(&shown, 4, counts), blurred, "{order:?}");
            let of_another = blurred.filter(|_| order.0 == LinkAt::Behind);
            assert_eq!(on(&shown, 5, counts), of_another, "{order:?}");
        }
    }

    impl Handle {
        /// Gives a macvlan that many source addresses, and the mode `source`.
        pub(crate) fn give_sources(&mut self, macvlan: u32, number: u32) {
            give(self, macvlan, (0..number).map(plain));
        }

        /// Shrinks the receive queue, as if the kernel had refused a longer one, or a link's description were
        /// too long for an answer: a link with 20,000 source addresses can then not be described.
        pub(crate) fn narrow(&self) {
            self.socket.narrow();
        }
    }

    fn plain(number: u32) -> [u8; 6] {
        let [_, a, b, c] = number.to_be_bytes();
        [2, 0, 0, a, b, c]
    }

    /// An address that reads as the header of an attribute and the end of another one.
    fn header(number: u32) -> [u8; 6] {
        let [.., a, b] = number.to_be_bytes();
        [0xfc, 0xff, a, b, 0x74, 0x03]
    }

    fn give(handle: &mut Handle, macvlan: u32, sources: impl Iterator<Item = [u8; 6]>) {
        let set = |data: Vec<InfoMacVlan>| {
            let data = [vec![InfoMacVlan::Mode(MacVlanMode::Source)], data].concat();
            let info = vec![LinkInfo::Kind(InfoKind::MacVlan), LinkInfo::Data(InfoData::MacVlan(data))];
            let set =
                LinkUnspec::new_with_index(macvlan).append_extra_attribute(LinkAttribute::LinkInfo(info));
            NetlinkRequest::new(RouteNetlinkMessage::NewLink(set.build()), 0)
        };
        // `MACVLAN_MACADDR_ADD`.
        let add = |address| {
            set(vec![InfoMacVlan::MacAddrMode(MacVlanMacAddressMode::Add), InfoMacVlan::MacAddr(address)])
        };
        // One more attribute after the addresses, from Linux 6.4 on.
        let cutoff = set(vec![InfoMacVlan::BcCutoff(5)]);
        handle.socket.all(sources.map(add).chain([cutoff]).collect()).unwrap();
    }

    /// A macvlan in mode `source` has as many addresses as a process in its pod sets.
    #[test]
    fn a_link_with_thousands_of_source_addresses_is_found_and_deleted() {
        let netns = Netns::private().unwrap();
        let [mut handle, mut same] = [(); 2].map(|()| Handle::open_in(&netns).unwrap());
        let bridge = Bridge { name: "wire".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let wire = handle.ensure_bridge(&bridge).unwrap().link;
        let macvlan = Macvlan::plain("lan", "wire");
        let lan = handle
            .create_macvlan(&macvlan, &wire, std::os::fd::AsFd::as_fd(&netns), &mut same)
            .unwrap()
            .index;
        let kinds = |handle: &mut Handle| -> Vec<String> {
            handle.links().unwrap().into_iter().map(|link| link.kind).collect()
        };
        let blurred = [Above { index: lan, netns: None, is_blurred: true }];
        give(&mut handle, lan, (0..6_000).map(header));
        assert_eq!(handle.link_by_index(lan).unwrap().kind, "macvlan");
        assert_eq!(handle.links_on(wire.index, |_, _, _| true).unwrap(), blurred);
        handle.give_sources(lan, 20_000);
        assert_eq!(handle.link_by_index(lan).unwrap().kind, "macvlan");
        assert!(kinds(&mut handle).contains(&"macvlan".to_owned()));
        assert_eq!(handle.links_on(wire.index, |_, _, _| true).unwrap(), blurred);
        // This link cannot be described at all; the others can, as before.
        same.narrow();
        assert!(same.link_by_index(lan).unwrap_err().is_untold());
        assert_eq!(same.links_on(wire.index, |_, _, _| true).unwrap(), blurred);
        assert_eq!(same.link_by_index(wire.index).unwrap().kind, "bridge");
        same.ensure_indices_absent(&[lan]).unwrap();
        assert!(!kinds(&mut handle).contains(&"macvlan".to_owned()));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..128)) {
            let _ = on(&bytes, 4, |_, _, _| true);
        }
    }
}
