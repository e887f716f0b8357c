//! Link-local traffic: addresses on a link, and the messages by which hosts on it find each other.
//!
//! Neighbour discovery and multicast listener messages pass regardless of policies, since no link works without them.
//! Therefore their form is checked strictly: they must go to hosts on the link, and must not be able to carry other
//! data. Messages of another form are treated as ordinary ICMPv6.

use crate::address::{Address, Ip4, Ip6, Mac};

/// A prefix of IPv6 addresses that an attachment's link has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Prefix {
    /// An address in it.
    pub address: Ip6,
    /// Prefix length, 1 to 128; 0: no prefix.
    pub bits: u32,
}

const _: () = assert!(size_of::<Prefix>() == 20);

impl Prefix {
    /// Maximum number of prefixes of an attachment.
    pub const MOST: usize = 2;
    /// No prefix.
    pub const NONE: Self = Self { address: Ip6::UNSPECIFIED, bits: 0 };

    /// Whether an address is in the prefix.
    #[inline(always)]
    pub const fn holds(&self, address: &Ip6) -> bool {
        let ([a, b], [x, y]) = (self.address.halves(), address.halves());
        self.bits != 0
            && (a ^ x) & first_bits(self.bits) == 0
            && (b ^ y) & first_bits(self.bits.saturating_sub(64)) == 0
    }
}

/// The mask of the first `bits` bits of 64; all of them for more.
#[inline(always)]
const fn first_bits(bits: u32) -> u64 {
    match bits {
        0 => 0,
        1..64 => u64::MAX << (64 - bits),
        _ => u64::MAX,
    }
}

/// ICMPv6 types (RFC 4443, 4861, 2710, 3810, 4286).
pub mod icmpv6 {
    /// The last of the error types in use.
    pub const PARAMETER_PROBLEM: u8 = 4;
    /// Echo request.
    pub const ECHO_REQUEST: u8 = 128;
    /// Echo reply.
    pub const ECHO_REPLY: u8 = 129;
    /// Multicast listener query.
    pub const LISTENER_QUERY: u8 = 130;
    /// Multicast listener report.
    pub const LISTENER_REPORT: u8 = 131;
    /// Multicast listener done.
    pub const LISTENER_DONE: u8 = 132;
    /// Router solicitation.
    pub const ROUTER_SOLICITATION: u8 = 133;
    /// Router advertisement.
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    /// Neighbour solicitation.
    pub const NEIGHBOUR_SOLICITATION: u8 = 135;
    /// Neighbour advertisement.
    pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    /// Redirect.
    pub const REDIRECT: u8 = 137;
    /// Multicast listener report, version 2.
    pub const LISTENER_REPORT_2: u8 = 143;
    /// Multicast router advertisement.
    pub const MULTICAST_ROUTER: u8 = 151;
}

/// An ICMPv6 message of neighbour discovery or multicast listener discovery, with a hop limit that proves that no
/// router forwarded it.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
    /// The four bytes after the checksum.
    pub flags: [u8; 4],
    /// Length of the message in bytes.
    pub length: u32,
    /// Source address.
    pub source: &'a Ip6,
    /// Destination address.
    pub destination: &'a Ip6,
    /// The bytes where solicitations and advertisements have their target.
    pub target: &'a Ip6,
}

/// An option of neighbour discovery (RFC 4861, 4.6) up to its length.
pub type OptionHead = [u8; 2];

impl Message<'_> {
    /// Maximum number of options of a message: hosts send a link-layer address, and a nonce for duplicate detection.
    pub const OPTIONS: u32 = 2;

    /// Checks that the message has the form of its type, and returns the offset of its options; `None` if the form is
    /// wrong. The options are to be checked one by one ([`is_option`](Self::is_option)) up to the end.
    #[inline(always)]
    pub fn options_at(&self) -> Option<u32> {
        use icmpv6::*;
        let [first, second, third, fourth] = self.flags;
        let reserved = first | second | third | fourth | self.code;
        // Messages without options of this kind, or that only routers send; pods are no routers.
        let free = match self.kind {
            LISTENER_QUERY => is_multicast(self.destination) && self.code == 0 && is_query(self.length),
            LISTENER_REPORT | LISTENER_DONE => {
                is_multicast(self.destination) && self.length == 24 && reserved == 0
            }
            LISTENER_REPORT_2 => self.is_report(),
            ROUTER_ADVERTISEMENT | REDIRECT => is_link_local(self.source),
            _ => false,
        };
        if free {
            return Some(self.length);
        }
        let (begin, meant) = match self.kind {
            ROUTER_SOLICITATION => (8, true),
            NEIGHBOUR_SOLICITATION => (24, asks(self.destination, self.target)),
            NEIGHBOUR_ADVERTISEMENT => (24, true),
            _ => return None,
        };
        // An advertisement has three flags (RFC 4861, 4.4).
        let first = if self.kind == NEIGHBOUR_ADVERTISEMENT { first & 0x1f } else { first };
        let reserved = first | second | third | fourth | self.code;
        let options = self.length.wrapping_sub(begin);
        let whole = options.is_multiple_of(8) && options <= Self::OPTIONS * 8;
        (meant && reserved == 0 && whole).then_some(begin)
    }

    /// Whether a version 2 report has exactly the number of records that it claims (RFC 3810, 5.2), each with a
    /// group, without sources (used only by source-specific multicast) and without auxiliary data (used by no
    /// protocol).
    #[inline(always)]
    fn is_report(&self) -> bool {
        let [first, second, high, low] = self.flags;
        let records = u32::from(u16::from_be_bytes([high, low]));
        let is_to_routers = self.destination.halves() == [0xff02 << 48, 0x16];
        is_to_routers && self.code | first | second == 0 && self.length == 8 + 20 * records
    }

    /// Whether an option is allowed in the message: a link-layer address (RFC 4861, 4.6.1), or the nonce of duplicate
    /// address detection (RFC 7527, 4.2).
    #[inline(always)]
    pub fn is_option(&self, head: OptionHead) -> bool {
        const SOURCE: u8 = 1;
        const TARGET: u8 = 2;
        const NONCE: u8 = 14;
        let [kind, eights] = head;
        let allowed = match kind {
            SOURCE | TARGET => true,
            NONCE => self.source.same(&Ip6::UNSPECIFIED),
            _ => false,
        };
        allowed && eights == 1
    }
}

/// Ethertypes (IEEE 802) of protocols between bridges, switches and cards.
mod role {
    /// MAC control: pause frames.
    pub(super) const MAC_CONTROL: u16 = 0x8808;
    /// Slow protocols: LACP, marker, link OAM.
    pub(super) const SLOW: u16 = 0x8809;
    /// 802.1X.
    pub(super) const EAPOL: u16 = 0x888e;
    /// Link layer discovery.
    pub(super) const LLDP: u16 = 0x88cc;
}

/// Smaller numbers are the length of a frame whose protocol is given by LLC (IEEE 802.3, 3.2.6).
pub const FIRST_ETHERTYPE: u16 = 0x0600;

/// The service access point of the spanning tree protocol (IEEE 802.1D).
pub const SPANNING_TREE: u8 = 0x42;

/// Whether a frame that is neither IP nor ARP belongs to a protocol of bridges, switches and cards: by its type, or by
/// a destination address reserved for them (IEEE 802.1Q, tables 8-1 and 10-1; Cisco's for spanning trees, CDP, VTP and
/// UDLD).
#[inline(always)]
pub const fn is_infrastructure(destination: &Mac, ethertype: u16) -> bool {
    let [a, b, c] = destination.words();
    let (high, low) = ((u16::from_be(a) as u32) << 16 | u16::from_be(b) as u32, u16::from_be(c));
    let standard = high == 0x0180_c200 && low < 0x30;
    let proprietary = high == 0x0100_0ccc && (low == 0xcccc || low == 0xcccd);
    let spoken = matches!(ethertype, role::MAC_CONTROL | role::SLOW | role::EAPOL | role::LLDP);
    standard || proprietary || spoken
}

/// Whether a listener query may have this length in bytes: that of version 1, or of version 2 with any number of sources (RFC
/// 3810, 5.1).
#[inline(always)]
fn is_query(length: u32) -> bool {
    length == 24 || length >= 28 && (length - 28).is_multiple_of(16)
}

/// Types of IGMP messages (RFC 3376, RFC 4286) that only routers send: queries, DVMRP, PIM in its first version, and router
/// advertisements.
pub const fn is_routers_igmp(message: u8) -> bool {
    matches!(message, 0x11 | 0x13 | 0x14 | 0x30)
}

/// IP protocols by which routers agree on routes and on the owner of an address: EIGRP (RFC 7868), OSPF (RFC 2328),
/// PIM (RFC 7761), VRRP (RFC 9568) and CARP.
#[inline(always)]
pub const fn is_routers_protocol(number: u8) -> bool {
    matches!(number, 88 | 89 | 103 | 112)
}

/// UDP ports on which routers agree on the owner of an address, by multicast: HSRP (RFC 2281), HSRP for IPv6, and
/// GLBP. In unicast packets these ports have no special meaning.
#[inline(always)]
pub const fn is_standby_port(number: u16) -> bool {
    matches!(number, 1985 | 2029 | 3222)
}

/// Types of ICMP messages (RFC 792, RFC 1256) that only routers send: redirect and router advertisement. A packet
/// that is not an ICMP message has type 0 ([`Packet::icmp_type`](crate::parse::Packet::icmp_type)).
#[inline(always)]
pub const fn is_routers_icmp(message: u8) -> bool {
    matches!(message, 5 | 9)
}

/// Whether a message may have an unspecified source: those sent by hosts before they have an address (RFC 4862, 5.4;
/// RFC 3590).
#[inline(always)]
pub const fn may_lack_source(message: u8) -> bool {
    use icmpv6::*;
    matches!(
        message,
        LISTENER_REPORT | LISTENER_DONE | ROUTER_SOLICITATION | NEIGHBOUR_SOLICITATION | LISTENER_REPORT_2
    )
}

/// Whether a solicitation for `target` has a valid destination: the target, or its solicited-node address (RFC 4861,
/// 7.2.2).
#[inline(always)]
fn asks(destination: &Ip6, target: &Ip6) -> bool {
    let ([high, low], [_, target_low]) = (destination.halves(), target.halves());
    let solicited = high == 0xff02 << 48 && low == 1 << 32 | 0xff << 24 | target_low & 0xff_ffff;
    solicited || destination.same(target)
}

/// Whether an address is an IPv4 multicast group's (RFC 5771).
#[inline(always)]
pub const fn is_ipv4_multicast(address: &Ip4) -> bool {
    let [first, ..] = address.octets;
    first >> 4 == 0xe
}

/// Whether an address is a multicast group's (RFC 4291, 2.7).
#[inline(always)]
pub const fn is_multicast(address: &Ip6) -> bool {
    address.octets[0] == 0xff
}

/// Whether an address is of a multicast group with at most link scope (RFC 4291, 2.7).
#[inline(always)]
pub const fn is_link_scope(address: &Ip6) -> bool {
    address.halves()[0] >> 48 & 0xff0f == 0xff02
}

/// Whether an address is link-local unicast (RFC 4291, 2.5.6).
#[inline(always)]
pub const fn is_link_local(address: &Ip6) -> bool {
    address.halves()[0] >> 54 == 0xfe80 >> 6
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::Ipv6Addr;
    use icmpv6::*;

    fn ip(text: &str) -> Ip6 {
        text.parse::<Ipv6Addr>().unwrap().into()
    }

    #[test]
    fn a_prefix_holds_the_addresses_that_begin_like_it() {
        for (prefix, bits, address, expected) in [
            ("fd00::1", 64, "fd00::ffff:0:0:1", true),
            ("fd00::1", 64, "fd00:0:0:1::1", false),
            ("fd00::1", 128, "fd00::1", true),
            ("fd00::1", 128, "fd00::2", false),
            ("fd00::1", 127, "fd00::", true),
            ("fd00::1", 120, "fd00::ff", true),
            ("fd00::1", 120, "fd00::100", false),
            ("fd00::1", 1, "8000::", true),
            ("fd00::1", 1, "7fff::", false),
            ("fd00::1", 65, "fd00::8000:0:0:0", false),
            ("::", 0, "::", false),
        ] {
            let found = Prefix { address: ip(prefix), bits }.holds(&ip(address));
            assert_eq!(found, expected, "{address} in {prefix}/{bits}");
        }
    }

    #[test]
    fn scopes_are_told_apart() {
        let found = |text: &str| {
            let address = ip(text);
            (is_multicast(&address), is_link_scope(&address), is_link_local(&address))
        };
        assert_eq!(found("ff02::1"), (true, true, false));
        assert_eq!(found("ff12::1"), (true, true, false));
        assert_eq!(found("ff05::1"), (true, false, false));
        assert_eq!(found("fe80::1"), (false, false, true));
        assert_eq!(found("febf::1"), (false, false, true));
        assert_eq!(found("fec0::1"), (false, false, false));
        assert_eq!(found("fd00::1"), (false, false, false));
    }

    #[test]
    fn what_routers_say_to_each_other_is_told_apart() {
        let all = |is: fn(u8) -> bool| (0..=u8::MAX).filter(|number| is(*number)).collect::<Vec<_>>();
        assert_eq!(all(is_routers_protocol), [88, 89, 103, 112]);
        assert_eq!(all(is_routers_igmp), [0x11, 0x13, 0x14, 0x30]);
        let ports: Vec<u16> = (0..=u16::MAX).filter(|port| is_standby_port(*port)).collect();
        assert_eq!(ports, [1985, 2029, 3222]);
        let groups = [[223, 255, 255, 255], [224, 0, 0, 2], [239, 255, 255, 255], [240, 0, 0, 1]]
            .map(|octets| is_ipv4_multicast(&Ip4 { octets }));
        assert_eq!(groups, [false, true, true, false]);
    }

    #[test]
    fn only_messages_of_their_types_form_are_about_the_link() {
        let from_router = |kind, length| (kind, [0; 4], length, "fe80::1", "ff02::1", "::");
        let solicitation =
            |destination, length| (NEIGHBOUR_SOLICITATION, [0; 4], length, "fd00::1", destination, "fd00::2");
        let advertisement =
            |flags, length| (NEIGHBOUR_ADVERTISEMENT, flags, length, "fd00::1", "fd00::2", "fd00::1");
        let listener = |kind, destination, length| (kind, [0; 4], length, "fe80::1", destination, "::");
        let report =
            |flags, destination, length| (LISTENER_REPORT_2, flags, length, "fe80::1", destination, "::");
        for ((kind, flags, length, source, destination, target), expected) in [
            (solicitation("fd00::2", 24), Some(24)),
            (solicitation("ff02::1:ff00:2", 40), Some(24)),
            (solicitation("ff02::1:ff00:3", 24), None),
            (solicitation("ff05::1:ff00:2", 24), None),
            (solicitation("fd00::3", 24), None),
            (solicitation("fd00::2", 23), None),
            (solicitation("fd00::2", 28), None),
            (solicitation("fd00::2", 48), None),
            (advertisement([0xe0, 0, 0, 0], 32), Some(24)),
            (advertisement([0x10, 0, 0, 0], 32), None),
            (advertisement([0, 0, 0, 1], 32), None),
            ((NEIGHBOUR_SOLICITATION, [0x20, 0, 0, 0], 24, "fd00::1", "fd00::2", "fd00::2"), None),
            ((ROUTER_SOLICITATION, [0; 4], 16, "fe80::1", "ff02::2", "::"), Some(8)),
            ((ROUTER_SOLICITATION, [0; 4], 32, "fe80::1", "ff02::2", "::"), None),
            (from_router(ROUTER_ADVERTISEMENT, 200), Some(200)),
            (from_router(REDIRECT, 200), Some(200)),
            ((REDIRECT, [0; 4], 200, "fd00::1", "ff02::1", "::"), None),
            (listener(LISTENER_QUERY, "ff02::1", 24), Some(24)),
            (listener(LISTENER_QUERY, "ff02::1", 28), Some(28)),
            (listener(LISTENER_QUERY, "ff0e::77", 60), Some(60)),
            (listener(LISTENER_QUERY, "ff02::1", 12), None),
            (listener(LISTENER_QUERY, "ff02::1", 43), None),
            (listener(LISTENER_REPORT, "ff0e::77", 24), Some(24)),
            (listener(LISTENER_REPORT, "ff0e::77", 25), None),
            (listener(LISTENER_DONE, "ff02::2", 24), Some(24)),
            ((LISTENER_REPORT, [0, 1, 0, 0], 24, "fe80::1", "ff0e::77", "::"), None),
            (report([0; 4], "ff02::16", 8), Some(8)),
            (report([0, 0, 0, 6], "ff02::16", 128), Some(128)),
            (report([0, 0, 1, 0], "ff02::16", 8 + 20 * 256), Some(8 + 20 * 256)),
            (report([0, 0, 0, 6], "ff02::16", 144), None),
            (report([0, 0, 0, 6], "ff02::16", 127), None),
            (report([0; 4], "ff02::16", 1400), None),
            (report([0, 1, 0, 6], "ff02::16", 128), None),
            (report([0, 0, 0, 6], "ff02::1", 128), None),
            (report([0, 0, 0, 6], "ff0e::16", 128), None),
            (report([0, 0, 0, 6], "fe80::2", 128), None),
            (listener(ECHO_REQUEST, "fe80::2", 8), None),
        ] {
            let (source, destination, target) = (&ip(source), &ip(destination), &ip(target));
            let message = Message { kind, code: 0, flags, length, source, destination, target };
            assert_eq!(message.options_at(), expected, "{message:?}");
        }
    }

    #[test]
    fn frames_of_bridges_are_known_by_type_or_address() {
        let found =
            |destination: [u8; 6], ethertype| is_infrastructure(&Mac { octets: destination }, ethertype);
        for ethertype in [0x8808, 0x8809, 0x888e, 0x88cc] {
            assert!(found([2, 0, 0, 0, 0, 2], ethertype), "{ethertype:#x}");
        }
        for last in [0, 2, 3, 0xe, 0xf, 0x10, 0x20, 0x21, 0x2f] {
            assert!(found([1, 0x80, 0xc2, 0, 0, last], 38), "{last:#x}");
        }
        assert!(found([1, 0, 0xc, 0xcc, 0xcc, 0xcd], 50));
        assert!(found([1, 0, 0xc, 0xcc, 0xcc, 0xcc], 50));
        for (destination, ethertype) in [
            ([2, 0, 0, 0, 0, 2], 0x88b5),
            ([1, 0x80, 0xc2, 0, 0, 0x30], 38),
            ([0xff; 6], 0x8863),
            ([1, 0, 0x5e, 0, 0, 1], 38),
        ] {
            assert!(!found(destination, ethertype), "{destination:x?} {ethertype:#x}");
        }
    }

    #[test]
    fn a_host_writes_nothing_into_the_code() {
        let address = &ip("fd00::2");
        let message = |kind, code, length| {
            Message {
                kind,
                code,
                flags: [0; 4],
                length,
                source: address,
                destination: address,
                target: address,
            }
            .options_at()
        };
        assert_eq!(message(NEIGHBOUR_SOLICITATION, 0, 24), Some(24));
        assert_eq!(message(NEIGHBOUR_SOLICITATION, 1, 24), None);
        assert_eq!(message(ROUTER_SOLICITATION, 1, 8), None);
        let (all_routers, group) = (&ip("ff02::16"), &ip("ff0e::77"));
        for (kind, destination, length) in
            [(LISTENER_REPORT_2, all_routers, 8), (LISTENER_REPORT, group, 24), (LISTENER_QUERY, group, 24)]
        {
            let found = [0, 1].map(|code| {
                let flags = [0; 4];
                Message { kind, code, flags, length, source: address, destination, target: address }
                    .options_at()
            });
            assert_eq!(found, [Some(length), None], "{kind}");
        }
    }

    #[test]
    fn options_are_link_layer_addresses_and_the_nonce_of_duplicate_detection() {
        let of = |source: &str, head| {
            let (source, other) = (&ip(source), &ip("ff02::1:ff00:2"));
            Message {
                kind: NEIGHBOUR_SOLICITATION,
                code: 0,
                flags: [0; 4],
                length: 32,
                source,
                destination: other,
                target: other,
            }
            .is_option(head)
        };
        assert_eq!(
            [[1, 1], [2, 1], [1, 2], [14, 1], [5, 1]].map(|head| of("fd00::1", head)),
            [true, true, false, false, false]
        );
        assert!(of("::", [14, 1]));
    }
}
