//! The links that are on another one, however many a pod has made, and deleting them together.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};
use rustix::io::Errno;

use super::device::is_pair;
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

impl Handle {
    /// The links of the namespace that are on the one with that index and of a kind with a name, for which `counts` holds, which
    /// is given that name and the alias; the kernel deletes links of such kinds alone. Each with the number of the namespace
    /// in which that index counts, `None`: this one.
    ///
    /// Reads a list of any length: of the others, nothing is kept.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn links_on(
        &mut self,
        index: u32,
        counts: impl Fn(&str, &str) -> bool,
    ) -> Result<Vec<(u32, Option<i32>)>, Error> {
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
fn on(message: &[u8], index: u32, counts: impl Fn(&str, &str) -> bool) -> Option<(u32, Option<i32>)> {
    let attributes = message.get(HEADER..)?;
    if attribute_in(attributes, LINK)? != index.to_ne_bytes() {
        return None;
    }
    let own = u32::from_ne_bytes(message.get(INDEX_AT..INDEX_AT + 4)?.try_into().ok()?);
    let kind = text(attribute_in(attribute_in(attributes, LINK_INFO)?, KIND)?);
    let alias = attribute_in(attributes, ALIAS).map(text).unwrap_or_default();
    let netns = match attribute_in(attributes, LINK_NETNS) {
        Some(number) => Some(i32::from_ne_bytes(number.try_into().ok()?)),
        None => None,
    };
    let is_it = !kind.is_empty() && !is_pair(kind) && (own != index || netns.is_some());
    (is_it && counts(kind, alias)).then_some((own, netns))
}

/// A string up to the zero that ends it; empty: it is none of UTF-8, as no kind and no alias of ours is.
fn text(value: &[u8]) -> &str {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    std::str::from_utf8(&value[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::lean::tests::{attribute, message};
    use super::*;

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
        let all = |_: &str, _: &str| true;
        assert_eq!(on(&shown(b"macvlan\0", &[]), 4, all), Some((9, None)));
        assert_eq!(on(&shown(b"vlan", &[]), 4, all), Some((9, None)));
        let elsewhere = [attribute(LINK_NETNS, &3_i32.to_ne_bytes())];
        assert_eq!(on(&shown(b"macvlan\0", &elsewhere), 4, all), Some((9, Some(3))));
        assert_eq!(on(&shown(b"macvlan\0", &[]), 5, all), None);
        for kind in ["veth\0", "netkit\0", "\0"] {
            assert_eq!(on(&shown(kind.as_bytes(), &[]), 4, all), None, "{kind:?}");
        }
        let kept = |kind: &str, alias: &str| (kind, alias) != ("vlan", "eth0.5");
        let named = [attribute(ALIAS, b"eth0.5\0")];
        assert_eq!(on(&shown(b"vlan\0", &named), 4, kept), None);
        assert_eq!(on(&shown(b"macvlan\0", &named), 4, kept), Some((9, None)));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..128)) {
            let _ = on(&bytes, 4, |_, _| true);
        }
    }
}
