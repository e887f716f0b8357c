//! Frames of other ethertypes whose payload is another frame or an IP packet, with addresses that the programs do not
//! check.

use super::frame::{ethertype, is_tag};

/// Number of bytes behind the length of an IEEE 802.3 frame that name its payload: the headers of LLC and SNAP.
pub type SnapHead = [u8; 8];

/// MPLS (RFC 3032).
const MPLS: u16 = 0x8847;
/// MPLS with an upstream-assigned label (RFC 5332).
const MPLS_UPSTREAM: u16 = 0x8848;
/// PPP over Ethernet (RFC 2516), discovery of a server.
const PPPOE_DISCOVERY: u16 = 0x8863;
/// PPP over Ethernet (RFC 2516), session.
const PPPOE_SESSION: u16 = 0x8864;

/// Returns the ethertype of the payload of an IEEE 802.3 frame with SNAP (RFC 1042, and 802.1H), 0 if it has none.
#[inline(always)]
pub const fn in_snap(head: SnapHead) -> u16 {
    // The service access points without the bits for a group address and for a response; unnumbered information, with
    // or without the bit that requests a response, which receivers ignore.
    match head {
        [0xaa | 0xab, 0xaa | 0xab, 0x03 | 0x13, 0, 0, 0 | 0xf8, high, low] => u16::from_be_bytes([high, low]),
        _ => 0,
    }
}

/// Whether a payload of this ethertype has or may have IP addresses that the programs do not check: in SNAP that
/// includes ARP, IP and tagged frames.
#[inline(always)]
pub const fn has_addresses(number: u16) -> bool {
    let is_ip = matches!(number, ethertype::IPV4 | ethertype::ARP | ethertype::IPV6);
    let carries = matches!(number, MPLS | MPLS_UPSTREAM | PPPOE_DISCOVERY | PPPOE_SESSION);
    is_ip || carries || is_tag(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_carries_ip_or_may_is_told_from_what_does_not() {
        let carriers: Vec<u16> = (0..=u16::MAX).filter(|number| has_addresses(*number)).collect();
        assert_eq!(
            carriers,
            [0x0800, 0x0806, 0x8100, 0x86dd, 0x8847, 0x8848, 0x8863, 0x8864, 0x88a8, 0x9100]
        );
    }

    #[test]
    fn snap_says_what_follows() {
        for (head, expected) in [
            ([0xaa, 0xaa, 3, 0, 0, 0, 0x08, 0x00], 0x0800),
            ([0xab, 0xab, 3, 0, 0, 0, 0x86, 0xdd], 0x86dd),
            ([0xaa, 0xaa, 3, 0, 0, 0xf8, 0x08, 0x06], 0x0806),
            ([0xaa, 0xaa, 0x13, 0, 0, 0, 0x08, 0x00], 0x0800),
            ([0xaa, 0xaa, 3, 0, 0, 0x0c, 0x20, 0x00], 0),
            ([0xaa, 0xaa, 3, 0, 1, 0, 0x08, 0x00], 0),
            ([0xaa, 0xaa, 0xf3, 0, 0, 0, 0x08, 0x00], 0),
            ([0x42, 0x42, 3, 0, 0, 0, 0x08, 0x00], 0),
            ([0xfe, 0xfe, 3, 0x83, 0, 0, 0x08, 0x00], 0),
        ] {
            assert_eq!(in_snap(head), expected, "{head:02x?}");
        }
    }
}
