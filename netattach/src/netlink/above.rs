//! The links that are on another one, however many a pod has made, and deleting them together.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};
use rustix::io::Errno;

use super::device::is_pair;
use super::lean::blurred;
use super::link::show;
use super::nft::attribute_in;
use super::socket::NetlinkRequest;
use super::{Error, Handle};

/// `IFLA_LINK`, `IFLA_LINKINFO` with `IFLA_INFO_KIND` in it, `IFLA_IFALIAS` and `IFLA_LINK_NETNSID` of `linux/if_link.h`.
const LINK: u16 = 5;
const LINK_INFO: u16 = 18;
const KIND: u16 = 1;
const ALIAS: u16 = 20;
const LINK_NETNS: u16 = 37;
/// Length of `ifinfomsg`, and offset of the index in it.
const HEADER: usize = 16;
const INDEX_AT: usize = 4;
/// The group of links that are about to be deleted. Not one of netattach's own.
const LEAVING: u32 = 0x6e61_7570;

/// A link that is on another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Above {
    /// Index in its namespace.
    pub index: u32,
    /// The number of the namespace in which the index of the other one counts; `None`: that of the link.
    pub netns: Option<i32>,
    /// Which namespace that is cannot be told: the link is described by more than its description can say the length of.
    pub is_blurred: bool,
}

impl Handle {
    /// The links of the namespace that are on the one with that index and of a kind with a name, for which `counts` holds, which
    /// is given the index, that name and the alias of each; the kernel deletes links of such kinds alone.
    ///
    /// Reads a list of any length: of the others, nothing is kept.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn links_on(
        &mut self,
        index: u32,
        counts: impl Fn(u32, &str, &str) -> bool,
    ) -> Result<Vec<Above>, Error> {
        let all = show(LinkMessageBuilder::<LinkUnspec>::new());
        self.socket.scan(all, |message| on(message, index, &counts))
    }

    /// Deletes the links with those indices for the cost of one grace period. One that is gone, or that the kernel does not
    /// delete, is left out.
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
            // One that is refused is deleted by itself below.
            self.socket.batch(links.iter().map(into_group).collect())?;
            let mut all = LinkMessage::default();
            all.attributes.push(group());
            if let Err(error) = self.socket.request(RouteNetlinkMessage::DelLink(all), 0) {
                tracing::debug!(%error, "no deletion by group, deleting links one by one");
            }
        }
        let delete = |index: &u32| {
            NetlinkRequest::new(RouteNetlinkMessage::DelLink(LinkUnspec::new_with_index(*index).build()), 0)
        };
        self.socket.all_but(links.iter().map(delete).collect(), &[Errno::NODEV, Errno::OPNOTSUPP])
    }
}

/// See [`Handle::links_on`]; of one message.
fn on(message: &[u8], index: u32, counts: impl Fn(u32, &str, &str) -> bool) -> Option<Above> {
    let attributes = message.get(HEADER..)?;
    if attribute_in(attributes, LINK)? != index.to_ne_bytes() {
        return None;
    }
    let own = u32::from_ne_bytes(message.get(INDEX_AT..INDEX_AT + 4)?.try_into().ok()?);
    let blurred = blurred(attributes);
    let (is_blurred, kind) = match blurred {
        Some(blurred) => (true, blurred.kind?),
        None => (false, attribute_in(attribute_in(attributes, LINK_INFO)?, KIND)?),
    };
    let kind = text(kind);
    let alias = attribute_in(attributes, ALIAS).map(text).unwrap_or_default();
    let netns = match attribute_in(attributes, LINK_NETNS).filter(|_| !is_blurred) {
        Some(number) => Some(i32::from_ne_bytes(number.try_into().ok()?)),
        None => None,
    };
    let is_it = !kind.is_empty() && !is_pair(kind) && (own != index || netns.is_some() || is_blurred);
    (is_it && counts(own, kind, alias)).then_some(Above { index: own, netns, is_blurred })
}

/// A string up to the zero that ends it; empty: it is none of UTF-8, as no kind and no alias of ours is.
fn text(value: &[u8]) -> &str {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    std::str::from_utf8(&value[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::{
        InfoData, InfoKind, InfoMacVlan, LinkInfo, MacVlanMacAddressMode, MacVlanMode,
    };

    use super::super::lean::tests::{attribute, message, with_sources};
    use super::*;
    use crate::netns::Netns;
    use crate::spec::{Bridge, Macvlan, MacvlanMode};

    const fn here(netns: Option<i32>) -> Option<Above> {
        Some(Above { index: 9, netns, is_blurred: false })
    }

    /// A link with index 9 on that with index 4.
    fn shown(kind: &[u8], further: &[Vec<u8>]) -> Vec<u8> {
        let info = attribute(LINK_INFO | 0x8000, &attribute(KIND, kind));
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
        let mut shown = message(0, &[with_sources(6_000)]);
        shown[INDEX_AT..INDEX_AT + 4].copy_from_slice(&9_u32.to_ne_bytes());
        let blurred = Above { index: 9, netns: None, is_blurred: true };
        assert_eq!(on(&shown, 4, |_, kind, _| kind == "macvlan"), Some(blurred));
        assert_eq!(on(&shown, 5, |_, _, _| true), None);
    }

    /// A macvlan in mode `source` has as many addresses as its pod gives it.
    #[test]
    fn a_link_with_thousands_of_source_addresses_is_found_and_deleted() {
        let netns = Netns::private().unwrap();
        let [mut handle, mut same] = [(); 2].map(|()| Handle::open_in(&netns).unwrap());
        let bridge = Bridge { name: "wire".to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
        let wire = handle.ensure_bridge(&bridge).unwrap().link;
        let macvlan = Macvlan {
            pod_name: "lan".to_owned(),
            parent: Some("wire".to_owned()),
            mode: MacvlanMode::Bridge,
            mtu: None,
            mac: None,
            group: 0,
            broadcast_queue: None,
            tap: false,
            in_pod: false,
        };
        let lan = handle
            .create_macvlan(&macvlan, &wire, std::os::fd::AsFd::as_fd(&netns), &mut same)
            .unwrap()
            .index;
        let source = |number: u16| {
            let [a, b] = number.to_be_bytes();
            // `MACVLAN_MACADDR_ADD`.
            let data = vec![
                InfoMacVlan::Mode(MacVlanMode::Source),
                InfoMacVlan::MacAddrMode(MacVlanMacAddressMode::Add),
                InfoMacVlan::MacAddr([2, 0, 0, 0, a, b]),
            ];
            let info = vec![LinkInfo::Kind(InfoKind::MacVlan), LinkInfo::Data(InfoData::MacVlan(data))];
            let set = LinkUnspec::new_with_index(lan).append_extra_attribute(LinkAttribute::LinkInfo(info));
            NetlinkRequest::new(RouteNetlinkMessage::NewLink(set.build()), 0)
        };
        handle.socket.all((0..6_000).map(source).collect()).unwrap();
        let kinds = |handle: &mut Handle| -> Vec<String> {
            handle.links().unwrap().into_iter().map(|link| link.kind).collect()
        };
        assert_eq!(handle.link_by_index(lan).unwrap().kind, "macvlan");
        assert!(kinds(&mut handle).contains(&"macvlan".to_owned()));
        let above = handle.links_on(wire.index, |_, _, _| true).unwrap();
        assert_eq!(above, [Above { index: lan, netns: None, is_blurred: true }]);
        handle.ensure_indices_absent(&[lan]).unwrap();
        assert!(!kinds(&mut handle).contains(&"macvlan".to_owned()));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..128)) {
            let _ = on(&bytes, 4, |_, _, _| true);
        }
    }
}
