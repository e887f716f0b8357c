//! The exceptions of the node: destinations that see a pod's own address. One list serves all attachments
//! that follow it. Pure.
//!
//! The list changes while pods are attached, and entries that do not change stay in the kernel: ranges are
//! not merged, so a range that is added or removed is exactly one element.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::wish::{List, prefix};
use crate::netlink::nat::{Element, Set};

/// The name of the list. No list that is derived from a configuration has this name.
pub(super) const LIST: List = [0, 0, 0, 0, 0, 1];

/// IPv4 destinations that are never masqueraded: link-local and multicast addresses.
const NEVER_V4: [Ipv4Net; 2] = [
    Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16),
    Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4),
];
/// IPv6 destinations that are never masqueraded: link-local and multicast addresses.
const NEVER_V6: [Ipv6Net; 2] = [
    Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10),
    Ipv6Net::new_assert(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8),
];

/// The destinations of a family that are never masqueraded.
pub(super) fn never(v4: bool) -> Vec<IpNet> {
    if v4 { NEVER_V4.map(IpNet::from).to_vec() } else { NEVER_V6.map(IpNet::from).to_vec() }
}

/// The list and its inputs. See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Exceptions {
    /// The list that the agent has set; `None`: not set yet.
    given: Option<Vec<IpNet>>,
    /// The subnets of the attachments that follow the list, and how many each has.
    own: BTreeMap<IpNet, usize>,
    /// The elements of the list at the last [`Exceptions::settle`].
    elements: BTreeSet<Element>,
}

/// The difference that [`Exceptions::settle`] found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Elements to be removed.
    pub(super) gone: Vec<Element>,
    /// Elements to be added.
    pub(super) new: Vec<Element>,
}

impl Changes {
    pub(super) fn extend(&mut self, other: Self) {
        self.gone.extend(other.gone);
        self.new.extend(other.new);
    }
}

impl Exceptions {
    /// Sets the configured list; returns the former one.
    pub(super) fn give(&mut self, given: Option<Vec<IpNet>>) -> Option<Vec<IpNet>> {
        std::mem::replace(&mut self.given, given)
    }

    /// The configured list.
    pub(super) fn given(&self) -> Option<&[IpNet]> {
        self.given.as_deref()
    }

    /// Whether some attachment follows the list.
    pub(super) fn is_followed(&self) -> bool {
        !self.own.is_empty()
    }

    /// Counts an attachment's subnets in; returns whether one of them is new.
    pub(super) fn count(&mut self, subnets: &[IpNet]) -> bool {
        let before = self.own.len();
        for subnet in subnets {
            *self.own.entry(*subnet).or_default() += 1;
        }
        self.own.len() != before
    }

    /// Counts an attachment's subnets out; returns whether one of them is no longer used.
    pub(super) fn uncount(&mut self, subnets: &[IpNet]) -> bool {
        let before = self.own.len();
        for subnet in subnets {
            let Some(users) = self.own.get_mut(subnet) else { continue };
            *users = users.saturating_sub(1);
            if *users == 0 {
                self.own.remove(subnet);
            }
        }
        self.own.len() != before
    }

    /// Recomputes the list from the configured networks and the counted subnets; returns the difference.
    pub(super) fn settle(&mut self) -> Changes {
        let wanted: BTreeSet<Element> = self.nets().into_iter().map(|net| prefix(LIST, net)).collect();
        let changes = Changes {
            gone: self.elements.difference(&wanted).cloned().collect(),
            new: wanted.difference(&self.elements).cloned().collect(),
        };
        self.elements = wanted;
        changes
    }

    /// The elements of the list.
    pub(super) fn elements(&self) -> &BTreeSet<Element> {
        &self.elements
    }

    /// The networks of the list: none unless an attachment follows it, and only in the families that such
    /// attachments have.
    fn nets(&self) -> Vec<IpNet> {
        let mut nets = Vec::new();
        for v4 in [true, false] {
            let of_family = |net: &&IpNet| net.addr().is_ipv4() == v4;
            let mut own = self.own.keys().filter(of_family).peekable();
            if own.peek().is_some() {
                nets.extend(never(v4));
                nets.extend(own.copied());
                nets.extend(self.given.iter().flatten().filter(of_family).map(IpNet::trunc));
            }
        }
        apart(nets)
    }
}

/// The networks that the list's elements contain, in any order.
pub(super) fn nets_of(elements: &BTreeSet<Element>) -> Vec<IpNet> {
    let of_list = elements.iter().filter(|element| is_of_list(element));
    of_list.filter_map(net_of).collect()
}

/// Whether an element belongs to the list.
pub(super) fn is_of_list(element: &Element) -> bool {
    matches!(element.set, Set::Prefixes4 | Set::Prefixes6) && element.key.starts_with(&LIST)
}

/// The network of an element; `None` if its range is not a network. The agent writes only networks.
fn net_of(element: &Element) -> Option<IpNet> {
    const LIST_BYTES: usize = 8;
    let address = |key: &[u8]| match key.get(LIST_BYTES..)?.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(&key[LIST_BYTES..]).ok()?)),
        16 => Some(IpAddr::from(<[u8; 16]>::try_from(&key[LIST_BYTES..]).ok()?)),
        _ => None,
    };
    let (first, last) = (address(&element.key)?, address(element.end.as_ref()?)?);
    let length = match (first, last) {
        (IpAddr::V4(first), IpAddr::V4(last)) => (u32::from(first) ^ u32::from(last)).leading_zeros(),
        (IpAddr::V6(first), IpAddr::V6(last)) => (u128::from(first) ^ u128::from(last)).leading_zeros(),
        _ => return None,
    };
    let net = IpNet::new(first, u8::try_from(length).ok()?).ok()?;
    (net.network() == first && net.broadcast() == last).then_some(net)
}

/// Drops networks that are contained in another one: ranges of one list must not overlap.
fn apart(mut nets: Vec<IpNet>) -> Vec<IpNet> {
    // A network sorts before the networks that it contains.
    nets.sort_by_key(|net| (net.addr().is_ipv6(), net.network(), net.prefix_len()));
    let mut kept: Vec<IpNet> = Vec::with_capacity(nets.len());
    for net in nets {
        if !kept.last().is_some_and(|last| last.contains(&net)) {
            kept.push(net);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// The networks of elements, in the order of the elements.
    fn shown(elements: &[Element]) -> Vec<String> {
        elements.iter().map(|element| net_of(element).unwrap().to_string()).collect()
    }

    fn settled(list: &mut Exceptions) -> (Vec<String>, Vec<String>) {
        let Changes { gone, new } = list.settle();
        (shown(&gone), shown(&new))
    }

    fn both(gone: &[&str], new: &[&str]) -> (Vec<String>, Vec<String>) {
        (gone.iter().map(ToString::to_string).collect(), new.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_range_that_comes_or_goes_is_one_element_and_the_others_stay() {
        let mut list = Exceptions::default();
        list.give(Some(nets(&["10.1.0.0/24", "10.1.1.0/24", "fd00:1::/64"])));
        // No attachment follows the list.
        assert_eq!(settled(&mut list), both(&[], &[]));
        list.count(&nets(&["10.1.0.0/24"]));
        let first = ["10.1.0.0/24", "10.1.1.0/24", "169.254.0.0/16", "224.0.0.0/4"];
        assert_eq!(settled(&mut list), both(&[], &first));
        list.count(&nets(&["fd00:1::/64"]));
        assert_eq!(settled(&mut list), both(&[], &["fd00:1::/64", "fe80::/10", "ff00::/8"]));
        // Neighbours are not merged.
        list.give(Some(nets(&["10.1.0.0/24", "10.1.2.0/24", "10.1.3.0/24", "fd00:1::/64", "fd00:2::/64"])));
        let new = ["10.1.2.0/24", "10.1.3.0/24", "fd00:2::/64"];
        assert_eq!(settled(&mut list), both(&["10.1.1.0/24"], &new));
        // The subnet of an attachment stays while it is there.
        list.give(Some(nets(&["10.1.2.0/24"])));
        assert_eq!(settled(&mut list), both(&["10.1.3.0/24", "fd00:2::/64"], &[]));
        list.uncount(&nets(&["fd00:1::/64"]));
        assert_eq!(settled(&mut list), both(&["fd00:1::/64", "fe80::/10", "ff00::/8"], &[]));
        list.uncount(&nets(&["10.1.0.0/24"]));
        let rest = ["10.1.0.0/24", "10.1.2.0/24", "169.254.0.0/16", "224.0.0.0/4"];
        assert_eq!(settled(&mut list), both(&rest, &[]));
        assert_eq!(list.elements(), &BTreeSet::new());
    }

    #[test]
    fn ranges_of_the_list_do_not_overlap_and_are_read_back() {
        let mut list = Exceptions::default();
        list.count(&nets(&["10.1.0.0/24", "10.1.0.0/25", "fd00::/64"]));
        list.give(Some(nets(&["10.0.0.7/8", "10.1.0.0/16", "169.254.7.0/24", "::/0", "0.0.0.0/0"])));
        assert_eq!(settled(&mut list), both(&[], &["0.0.0.0/0", "::/0"]));
        list.give(Some(nets(&["10.0.0.0/8", "10.255.255.255/32", "11.0.0.1/32", "fd00::/64"])));
        list.settle();
        let back = [
            "10.0.0.0/8",
            "11.0.0.1/32",
            "169.254.0.0/16",
            "224.0.0.0/4",
            "fd00::/64",
            "fe80::/10",
            "ff00::/8",
        ];
        assert_eq!(nets_of(list.elements()), nets(&back));
    }

    #[test]
    fn what_is_no_network_of_the_list_is_not_taken_for_one() {
        let element = |list: List, first: [u8; 4], last: Option<[u8; 4]>| {
            let key = |address: [u8; 4]| [&list[..], &[0, 0], &address].concat();
            Element { set: Set::Prefixes4, key: key(first), end: last.map(key), value: Vec::new() }
        };
        let others = [
            element(LIST, [10, 0, 0, 1], Some([10, 0, 0, 2])),
            element(LIST, [10, 0, 0, 9], Some([10, 0, 0, 1])),
            element(LIST, [10, 0, 0, 0], None),
            element([0x80, 0, 0, 0, 0, 1], [10, 0, 0, 0], Some([10, 0, 0, 255])),
            Element { set: Set::Masquerade4, ..element(LIST, [10, 0, 0, 0], Some([10, 0, 0, 255])) },
            Element { key: LIST.to_vec(), ..element(LIST, [10, 0, 0, 0], Some([10, 0, 0, 255])) },
        ];
        assert_eq!(nets_of(&others.into()), []);
    }
}
