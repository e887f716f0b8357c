//! Ethernet frames with UDP datagrams between DHCP's ports. Pure.
//!
//! A client has no address yet, so the kernel's UDP cannot send for it (RFC 2131, section 4.1).

use std::net::Ipv4Addr;

use crate::mac::Mac;

/// The port of servers and relays.
const SERVER: u16 = 67;
/// The port of clients.
const CLIENT: u16 = 68;
const UDP: u8 = 17;
const ETHERTYPE: [u8; 2] = [8, 0];
/// Lengths of the headers, in bytes; an IPv4 header may be longer.
const ETHERNET_HEADER: usize = 14;
const IPV4_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
/// More fragments, and the offset of this one (RFC 791, section 3.1).
const FRAGMENT: u16 = 0x3fff;

/// The broadcast Ethernet address.
pub(super) const EVERYBODY: Mac = Mac([0xff; 6]);

/// The addresses of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// Ethernet addresses of the sender and the receiver.
    pub mac: (Mac, Mac),
    /// IPv4 addresses of the sender and the receiver.
    pub ip: (Ipv4Addr, Ipv4Addr),
}

/// Returns a frame from a client to servers. `None`: the payload does not fit into a packet.
pub(super) fn from_client(ends: &Ends, payload: &[u8]) -> Option<Vec<u8>> {
    let udp_length = u16::try_from(UDP_HEADER + payload.len()).ok()?;
    let length = udp_length.checked_add(IPV4_HEADER as u16)?;
    let mut udp = Vec::with_capacity(udp_length.into());
    udp.extend([CLIENT, SERVER, udp_length, 0].iter().flat_map(|half| half.to_be_bytes()));
    udp.extend_from_slice(payload);
    let sum = match finish(sum(&udp, pseudo_header(ends.ip, udp_length))) {
        // Zero would mean that there is no checksum (RFC 768).
        0 => 0xffff,
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    let mut ip = [0; IPV4_HEADER];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    ip[8] = 64;
    ip[9] = UDP;
    ip[12..16].copy_from_slice(&ends.ip.0.octets());
    ip[16..20].copy_from_slice(&ends.ip.1.octets());
    let checksum = finish(sum_of(&ip));
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    Some([&ends.mac.1.0[..], &ends.mac.0.0, &ETHERTYPE, &ip, &udp].concat())
}

/// Returns the addresses and the payload of a frame from a server's port to a client's. `None`: it is another frame
/// or a fragment, or a checksum is wrong.
pub fn to_client(frame: &[u8]) -> Option<(Ends, &[u8])> {
    let (ethernet, packet) = frame.split_first_chunk::<ETHERNET_HEADER>()?;
    if ethernet[12..] != ETHERTYPE {
        return None;
    }
    let fixed = packet.first_chunk::<IPV4_HEADER>()?;
    let header = packet.get(..usize::from(fixed[0] & 15) * 4)?;
    let half = |bytes: &[u8; IPV4_HEADER], at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let is_whole = half(fixed, 6) & FRAGMENT == 0;
    if fixed[0] >> 4 != 4 || header.len() < IPV4_HEADER || fixed[9] != UDP || !is_whole {
        return None;
    }
    if finish(sum_of(header)) != 0 {
        return None;
    }
    let udp = packet.get(header.len()..usize::from(half(fixed, 2)))?;
    let &[a, b, c, d, e, f, g, h] = udp.first_chunk::<UDP_HEADER>()?;
    let [from, to, length, checksum] = [[a, b], [c, d], [e, f], [g, h]].map(u16::from_be_bytes);
    let udp = udp.get(..length.into())?;
    let payload = udp.get(UDP_HEADER..)?;
    if from != SERVER || to != CLIENT {
        return None;
    }
    let address = |at: usize| Ipv4Addr::new(fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]);
    let ip = (address(12), address(16));
    if !is_intact(udp, pseudo_header(ip, length), checksum) {
        return None;
    }
    let [t0, t1, t2, t3, t4, t5, f0, f1, f2, f3, f4, f5, ..] = *ethernet;
    let ends = Ends { mac: (Mac([f0, f1, f2, f3, f4, f5]), Mac([t0, t1, t2, t3, t4, t5])), ip };
    Some((ends, payload))
}

/// Whether the checksum of a datagram is right. If a card was to compute it, it contains only the sum of the pseudo
/// header, as between interfaces of one node (`CHECKSUM_PARTIAL`, include/linux/skbuff.h).
fn is_intact(udp: &[u8], pseudo: u32, checksum: u16) -> bool {
    checksum == 0 || finish(sum(udp, pseudo)) == 0 || checksum == !finish(pseudo)
}

fn pseudo_header((from, to): (Ipv4Addr, Ipv4Addr), udp_length: u16) -> u32 {
    let addresses = sum(&to.octets(), sum_of(&from.octets()));
    addresses + u32::from(UDP) + u32::from(udp_length)
}

fn sum_of(bytes: &[u8]) -> u32 {
    sum(bytes, 0)
}

/// Adds the 16-bit words of `bytes`, in network byte order; a last odd byte is the upper half of a word (RFC 1071).
/// At most 65,535 bytes are added at once, so the sum does not overflow.
fn sum(bytes: &[u8], before: u32) -> u32 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let words = pairs.iter().map(|pair| u32::from(u16::from_be_bytes(*pair)));
    let last = rest.iter().map(|byte| u32::from(*byte) << 8);
    words.chain(last).fold(before, |sum, word| sum.wrapping_add(word))
}

/// Folds a sum and inverts it.
fn finish(mut sum: u32) -> u16 {
    while let Some(carry) = Some(sum >> 16).filter(|carry| *carry != 0) {
        sum = (sum & 0xffff) + carry;
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ends() -> Ends {
        Ends { mac: (Mac([2, 0, 0, 0, 0, 1]), EVERYBODY), ip: (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST) }
    }

    /// A frame as a server sends it.
    fn reply(payload: &[u8]) -> Vec<u8> {
        let mut frame = from_client(&ends(), payload).unwrap();
        // Swapping two words of a sum leaves it.
        frame.swap(34, 36);
        frame.swap(35, 37);
        frame
    }

    #[test]
    fn a_datagram_to_the_clients_port_is_read_as_it_was_written() {
        for payload in [&b"even"[..], b"odd"] {
            assert_eq!(to_client(&reply(payload)), Some((ends(), payload)));
        }
        // Ethernet pads short frames.
        let padded = [&reply(b"x")[..], &[0; 17]].concat();
        assert_eq!(to_client(&padded), Some((ends(), &b"x"[..])));
        assert_eq!(to_client(&from_client(&ends(), b"x").unwrap()), None, "to a server");
    }

    #[test]
    fn a_datagram_that_has_changed_on_the_way_is_none() {
        let frame = reply(b"payload");
        for at in 12..frame.len() {
            let mut changed = frame.clone();
            changed[at] ^= 0x10;
            // The sum of IPv4 does not cover a byte twice, and no single change of the payload keeps its sum.
            assert_eq!(to_client(&changed), None, "byte {at}");
            assert_eq!(to_client(&frame[..at]), None, "cut at {at}");
        }
    }

    #[test]
    fn a_checksum_that_was_left_to_a_card_is_that_of_the_pseudo_header() {
        let mut frame = reply(b"payload");
        let partial = !finish(pseudo_header(ends().ip, 8 + 7));
        frame[40..42].copy_from_slice(&partial.to_be_bytes());
        assert_eq!(to_client(&frame), Some((ends(), &b"payload"[..])));
        frame[40..42].copy_from_slice(&[0, 0]);
        assert_eq!(to_client(&frame), Some((ends(), &b"payload"[..])), "none");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_none(bytes: Vec<u8>) {
            let _ = to_client(&bytes);
        }
    }
}
