//! Ranges of addresses and sets of them.
//!
//! A range lies in a subnet and has a gateway that is never handed out. A set is a list of ranges of one family; each
//! set provides one address.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Addresses from `start` to `end`, inclusive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// The subnet, which determines the prefix length of the addresses; host bits clear.
    pub subnet: IpNet,
    /// First address.
    pub start: IpAddr,
    /// Last address.
    pub end: IpAddr,
    /// The container's gateway, skipped by the allocator. May lie outside the subnet.
    pub gateway: IpAddr,
}

/// Ranges of one family, never empty, none overlapping another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RangeSet(pub(super) Vec<Range>);

/// The limits of a range as configured, before defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// `rangeStart`; otherwise the address after the network's.
    pub start: Option<IpAddr>,
    /// `rangeEnd`; otherwise the last address that is not an IPv4 broadcast address.
    pub end: Option<IpAddr>,
    /// `gateway`; otherwise the address after the network's.
    pub gateway: Option<IpAddr>,
}

/// A range cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// `10.1.2.3/24` instead of `10.1.2.0/24`.
    #[error("subnet {subnet} has host bits set; the network is {network}")]
    HostBits {
        /// As configured.
        subnet: IpNet,
        /// Without the host bits.
        network: IpNet,
    },
    /// Longer than /30 or /126.
    #[error("subnet {0} is too small to allocate from: at least four addresses are needed")]
    TooSmall(IpNet),
    /// `::ffff:10.0.0.0/104`.
    #[error("subnet {0} writes an IPv4 network in IPv6 form")]
    MappedSubnet(IpNet),
    /// A limit is not an address of the subnet.
    #[error("{limit} {address} is not in subnet {subnet}")]
    OutsideSubnet {
        /// `rangeStart` or `rangeEnd`.
        limit: &'static str,
        /// Its value.
        address: IpAddr,
        /// The subnet it should be in.
        subnet: IpNet,
    },
    /// The subnet has no address that an interface can have.
    #[error("subnet {0} is multicast: no interface has an address of it")]
    Multicast(IpNet),
    /// The first limit is above the last.
    #[error("rangeStart {start} is after rangeEnd {end}")]
    StartAfterEnd {
        /// `rangeStart`.
        start: IpAddr,
        /// `rangeEnd`.
        end: IpAddr,
    },
}

impl Range {
    /// Applies the defaults and validates. IPv4 addresses in IPv6 form are taken as IPv4.
    ///
    /// # Errors
    /// The subnet cannot be allocated from, or a limit does not lie in it. This includes a limit of the other family:
    /// an IPv6 address is in no IPv4 subnet.
    pub fn new(subnet: IpNet, limits: Limits) -> Result<Self, RangeError> {
        if let IpAddr::V6(address) = subnet.addr()
            && address.to_ipv4_mapped().is_some()
        {
            return Err(RangeError::MappedSubnet(subnet));
        }
        if subnet.prefix_len() > subnet.max_prefix_len() - 2 {
            return Err(RangeError::TooSmall(subnet));
        }
        if subnet.addr().is_multicast() {
            return Err(RangeError::Multicast(subnet));
        }
        if subnet.trunc() != subnet {
            return Err(RangeError::HostBits { subnet, network: subnet.trunc() });
        }
        let first = from_bits(to_bits(subnet.network()) + 1, subnet.addr());
        let last = match subnet {
            IpNet::V4(_) => from_bits(to_bits(subnet.broadcast()) - 1, subnet.addr()),
            IpNet::V6(_) => subnet.broadcast(),
        };
        let within = |limit, address: Option<IpAddr>| match address.map(|a| a.to_canonical()) {
            Some(address) if !subnet.contains(&address) => {
                Err(RangeError::OutsideSubnet { limit, address, subnet })
            }
            address => Ok(address),
        };
        let start = within("rangeStart", limits.start)?.unwrap_or(first);
        let end = within("rangeEnd", limits.end)?.unwrap_or(last);
        if start > end {
            return Err(RangeError::StartAfterEnd { start, end });
        }
        let gateway = limits.gateway.map_or(first, |gateway| gateway.to_canonical());
        Ok(Self { subnet, start, end, gateway })
    }

    /// Whether the address lies in the range, even if it is the gateway.
    pub fn contains(&self, address: IpAddr) -> bool {
        // IpAddr orders every IPv4 address before every IPv6 one, so an address of the other family is never in
        // between.
        self.start <= address && address <= self.end
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.start <= other.end && other.start <= self.end
    }
}

impl RangeSet {
    /// The ranges in order.
    pub fn ranges(&self) -> &[Range] {
        &self.0
    }

    /// Whether the addresses are IPv4.
    pub fn is_ipv4(&self) -> bool {
        self.0.first().is_some_and(|range| range.start.is_ipv4())
    }

    /// The range that contains the address.
    pub fn range_of(&self, address: IpAddr) -> Option<&Range> {
        self.0.iter().find(|range| range.contains(address))
    }

    /// A range of this set and one of the other set that overlap.
    pub fn overlap<'a>(&'a self, other: &'a Self) -> Option<(&'a Range, &'a Range)> {
        self.0.iter().find_map(|ours| Some((ours, other.0.iter().find(|theirs| ours.overlaps(theirs))?)))
    }

    /// Two ranges of this set that overlap.
    pub fn own_overlap(&self) -> Option<(&Range, &Range)> {
        self.0.iter().enumerate().find_map(|(position, first)| {
            Some((first, self.0[position + 1..].iter().find(|second| first.overlaps(second))?))
        })
    }
}

/// `10.0.0.1-10.0.0.6`.
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

/// `10.0.0.1-10.0.0.6,10.0.1.1-10.0.1.6`.
impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, range) in self.0.iter().enumerate() {
            let comma = if position == 0 { "" } else { "," };
            write!(f, "{comma}{range}")?;
        }
        Ok(())
    }
}

/// The address as a number, for arithmetic within one family.
pub(super) fn to_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The inverse of [`to_bits`] for an address of the same family as `like`.
pub(super) fn from_bits(bits: u128, like: IpAddr) -> IpAddr {
    match like {
        // The number came from an IPv4 subnet, whose addresses all fit.
        IpAddr::V4(_) => Ipv4Addr::from_bits(bits as u32).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(bits).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn range(subnet: &str, limits: Limits) -> Result<Range, RangeError> {
        Range::new(subnet.parse().unwrap(), limits)
    }

    #[test]
    fn defaults_leave_out_network_and_ipv4_broadcast() {
        assert_eq!(
            range("10.0.0.0/29", Limits::default()).unwrap(),
            Range {
                subnet: "10.0.0.0/29".parse().unwrap(),
                start: ip("10.0.0.1"),
                end: ip("10.0.0.6"),
                gateway: ip("10.0.0.1")
            }
        );
        assert_eq!(
            range("2001:db8::/64", Limits::default()).unwrap(),
            Range {
                subnet: "2001:db8::/64".parse().unwrap(),
                start: ip("2001:db8::1"),
                end: ip("2001:db8::ffff:ffff:ffff:ffff"),
                gateway: ip("2001:db8::1")
            }
        );
    }

    #[test]
    fn network_and_broadcast_are_accepted_when_stated_and_mapped_addresses_are_ipv4() {
        let limits = Limits {
            start: Some(ip("::ffff:10.0.0.0")),
            end: Some(ip("10.0.0.3")),
            gateway: Some(ip("192.0.2.1")),
        };
        assert_eq!(
            range("10.0.0.0/30", limits).unwrap(),
            Range {
                subnet: "10.0.0.0/30".parse().unwrap(),
                start: ip("10.0.0.0"),
                end: ip("10.0.0.3"),
                gateway: ip("192.0.2.1")
            }
        );
    }

    #[test]
    fn unusable_ranges_say_why() {
        let start = |text| Limits { start: Some(ip(text)), ..Limits::default() };
        let end = |text| Limits { end: Some(ip(text)), ..Limits::default() };
        let both = |a, b| Limits { start: Some(ip(a)), end: Some(ip(b)), ..Limits::default() };
        let table = [
            (
                "10.1.2.3/24",
                Limits::default(),
                "subnet 10.1.2.3/24 has host bits set; the network is 10.1.2.0/24",
            ),
            (
                "10.0.0.0/31",
                Limits::default(),
                "subnet 10.0.0.0/31 is too small to allocate from: at least four addresses are needed",
            ),
            (
                "2001:db8::/127",
                Limits::default(),
                "subnet 2001:db8::/127 is too small to allocate from: at least four addresses are needed",
            ),
            (
                "::ffff:10.0.0.0/104",
                Limits::default(),
                "subnet ::ffff:10.0.0.0/104 writes an IPv4 network in IPv6 form",
            ),
            ("10.0.0.0/24", start("10.0.1.5"), "rangeStart 10.0.1.5 is not in subnet 10.0.0.0/24"),
            ("10.0.0.0/24", end("2001:db8::1"), "rangeEnd 2001:db8::1 is not in subnet 10.0.0.0/24"),
            ("10.0.0.0/24", both("10.0.0.9", "10.0.0.8"), "rangeStart 10.0.0.9 is after rangeEnd 10.0.0.8"),
        ];
        for (subnet, limits, expected) in table {
            assert_eq!(range(subnet, limits).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn disjoint_slices_of_one_subnet_do_not_overlap() {
        let slice = |a, b| {
            range("10.0.0.0/24", Limits { start: Some(ip(a)), end: Some(ip(b)), gateway: None }).unwrap()
        };
        let low = slice("10.0.0.2", "10.0.0.9");
        let high = slice("10.0.0.10", "10.0.0.20");
        let across = slice("10.0.0.9", "10.0.0.10");
        let v6 = range("2001:db8::/64", Limits::default()).unwrap();
        let set = RangeSet(vec![low.clone(), high]);
        assert_eq!(set.own_overlap(), None);
        assert_eq!(set.overlap(&RangeSet(vec![v6])), None);
        assert_eq!(set.overlap(&RangeSet(vec![across.clone()])), Some((&low, &across)));
    }
}
