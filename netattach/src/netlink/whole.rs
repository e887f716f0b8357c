//! Complete lists of links, even if links change while they are listed.
//!
//! Before a dump of links the kernel allocates a buffer for the link with the longest description. If a link
//! has a longer description by the time of its turn, the kernel ends the dump: with `EMSGSIZE`, or silently
//! where a dump of links ends by itself (Linux 6.10, `RTNL_FLAG_DUMP_SPLIT_NLM_DONE`). A pod with
//! `CAP_NET_ADMIN` can give one of its links hundreds of alternative names, or a macvlan thousands of
//! addresses, by one request and as often as it likes. So a list is compared with the indices of all links,
//! which the kernel describes in a fixed length each, and missing links are requested one by one.

use std::collections::BTreeSet;

use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::{LinkMessageBuilder, LinkUnspec};
use rustix::io::Errno;

use super::link::show;
use super::{Error, Handle};

impl Handle {
    /// Returns the kernel's messages about all links of the namespace, including those that were created
    /// during the dump.
    ///
    /// # Errors
    /// The kernel refuses. In another namespace also [too many](Error::is_too_many): see [`Handle::open_in`].
    pub(super) fn all_links(&mut self) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let mut found = unless_cut(self.socket.dump(every()))?;
        let listed: BTreeSet<u32> = found.iter().filter_map(index).collect();
        let missing = self.missing(|index| listed.contains(&index))?;
        let asked = missing.into_iter().map(|index| show(LinkUnspec::new_with_index(index)));
        self.socket.add_each(&mut found, asked)?;
        Ok(found)
    }

    /// As [`Handle::all_links`], but returns what `read` finds in the part of each message after the header;
    /// that has to include the index.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn scan_links<T>(
        &mut self,
        read: impl Fn(&[u8]) -> Option<(u32, T)>,
    ) -> Result<Vec<(u32, T)>, Error> {
        let mut found = unless_cut(self.socket.scan(every(), &read))?;
        let listed: BTreeSet<u32> = found.iter().map(|(index, _)| *index).collect();
        for index in self.missing(|index| listed.contains(&index))? {
            match self.socket.look(show(LinkUnspec::new_with_index(index)), &read) {
                Err(error) if error.not_found() => {}
                one => found.extend(one?),
            }
        }
        Ok(found)
    }

    /// The indices of the links that are not in a list.
    fn missing(&mut self, is_listed: impl Fn(u32) -> bool) -> Result<Vec<u32>, Error> {
        let mut indices = self.indices()?;
        indices.retain(|index| !is_listed(*index));
        Ok(indices)
    }
}

/// Requests all links.
fn every() -> RouteNetlinkMessage {
    show(LinkMessageBuilder::<LinkUnspec>::new())
}

/// Treats a list that the kernel has cut off as empty.
fn unless_cut<T>(listed: Result<Vec<T>, Error>) -> Result<Vec<T>, Error> {
    match listed {
        Err(error) if error.errno() == Some(Errno::MSGSIZE) => Ok(Vec::new()),
        listed => listed,
    }
}

fn index(message: &RouteNetlinkMessage) -> Option<u32> {
    match message {
        RouteNetlinkMessage::NewLink(link) => Some(link.header.index),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::above::index_of;
    use super::*;
    use crate::netlink::Refused;
    use crate::netns::Netns;
    use crate::spec::Bridge;

    fn refused(errno: i32) -> Result<Vec<u32>, Error> {
        Err(Refused { request: "RTM_GETLINK", errno, text: None }.into())
    }

    #[test]
    fn a_list_that_was_cut_is_none_and_another_error_is_one() {
        assert_eq!(unless_cut(refused(libc::EMSGSIZE)).unwrap(), [0_u32; 0]);
        assert_eq!(unless_cut(refused(libc::EINVAL)).unwrap_err().errno(), Some(Errno::INVAL));
        assert_eq!(unless_cut(Ok(vec![1, 2])).unwrap(), [1, 2]);
    }

    #[test]
    fn what_is_missing_on_a_list_is_asked_for_by_itself_and_what_is_gone_is_none() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        for name in ["br0", "br1"] {
            let bridge =
                Bridge { name: name.to_owned(), mtu: None, promiscuous: false, vlan_filtering: false };
            handle.ensure_bridge(&bridge).unwrap();
        }
        let all: BTreeMap<u32, String> =
            handle.links().unwrap().into_iter().map(|link| (link.index, link.name)).collect();
        assert_eq!(all.values().collect::<Vec<_>>(), ["lo", "br0", "br1"]);
        // As if the kernel had ended the list after the first link.
        let missing = handle.missing(|index| index == 1).unwrap();
        assert_eq!(missing, all.keys().copied().filter(|index| *index != 1).collect::<Vec<_>>());
        let asked =
            missing.iter().chain(&[0x7fff_ffff]).map(|index| show(LinkUnspec::new_with_index(*index)));
        let mut found = Vec::new();
        handle.socket.add_each(&mut found, asked).unwrap();
        assert_eq!(found.iter().filter_map(index).collect::<Vec<_>>(), missing);
        let scanned = handle.scan_links(|message| Some((index_of(message)?, ()))).unwrap();
        assert_eq!(
            scanned.into_iter().map(|(index, ())| index).collect::<BTreeSet<_>>(),
            all.into_keys().collect()
        );
    }

    #[test]
    fn one_by_one_no_more_is_read_than_of_a_list() {
        let netns = Netns::private().unwrap();
        let mut handle = Handle::open_in(&netns).unwrap();
        let asked = |number: usize| (0..number).map(|_| show(LinkUnspec::new_with_index(1)));
        let mut found = Vec::new();
        handle.socket.limit(2, usize::MAX);
        handle.socket.add_each(&mut found, asked(2)).unwrap();
        let refused = handle.socket.add_each(&mut found, asked(1)).unwrap_err();
        assert!(matches!(refused, Error::TooMany("RTM_GETLINK", 2)), "{refused}");
        handle.socket.limit(usize::MAX, 1);
        let refused = handle.socket.add_each(&mut Vec::new(), asked(2)).unwrap_err();
        assert!(matches!(refused, Error::TooMany("RTM_GETLINK", 1)), "{refused}");
    }
}
