//! Builds whole Ethernet frames, valid or deliberately broken.
//!
//! ```
//! use netattach_tests::packet::{Packet, tcp};
//! let frame = Packet::between("10.0.0.1", "10.0.0.2").tcp(40000, 80, tcp::SYN).frame();
//! assert_eq!(frame.len(), 14 + 20 + 20);
//! ```
//!
//! IPv4 header checksums are right; transport checksums are zero, as no code here verifies them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netattach::mac::Mac;
pub use netattach_common::flow::tcp;

/// The default source MAC address of frames.
pub const POD_MAC: Mac = Mac([0x02, 0, 0, 0, 0, 0x01]);
/// The destination MAC address of frames.
pub const PEER_MAC: Mac = Mac([0x02, 0, 0, 0, 0, 0x02]);

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const FRAGMENT: u8 = 44;

/// An IP packet in an Ethernet frame.
#[derive(Debug, Clone)]
pub struct Packet {
    source_mac: Mac,
    tags: Vec<u16>,
    source: IpAddr,
    destination: IpAddr,
    hop_limit: u8,
    protocol: u8,
    options: Vec<u8>,
    extensions: Vec<(u8, Vec<u8>)>,
    /// Offset in units of 8 bytes, and whether more follow.
    fragment: Option<(u16, bool)>,
    /// The identification shared by a packet's fragments.
    identification: u16,
    payload: Vec<u8>,
}

impl Packet {
    /// From one address to another of the same family, without payload.
    pub fn between(source: &str, destination: &str) -> Self {
        Self {
            source_mac: POD_MAC,
            tags: Vec::new(),
            source: source.parse().expect("a source address"),
            destination: destination.parse().expect("a destination address"),
            hop_limit: 64,
            protocol: 59,
            options: Vec::new(),
            extensions: Vec::new(),
            fragment: None,
            identification: 1,
            payload: Vec::new(),
        }
    }

    /// With another Ethernet source.
    pub fn from_mac(mut self, mac: Mac) -> Self {
        self.source_mac = mac;
        self
    }

    /// With an 802.1Q tag inside the frame.
    pub fn tagged(mut self, vlan: u16) -> Self {
        self.tags.push(vlan);
        self
    }

    /// With another TTL or hop limit.
    pub fn hop_limit(mut self, hop_limit: u8) -> Self {
        self.hop_limit = hop_limit;
        self
    }

    /// With IPv4 options; the length must be a multiple of 4.
    pub fn options(mut self, options: &[u8]) -> Self {
        assert!(options.len().is_multiple_of(4) && options.len() <= 40);
        self.options = options.to_vec();
        self
    }

    /// With one more IPv6 extension header; `rest` follows its "next header" byte.
    pub fn extension(mut self, number: u8, rest: &[u8]) -> Self {
        self.extensions.push((number, rest.to_vec()));
        self
    }

    /// Sets the identification shared by its fragments; 1 by default.
    pub fn identification(mut self, number: u16) -> Self {
        self.identification = number;
        self
    }

    /// As a fragment at `offset` (in units of 8 bytes).
    pub fn fragment(mut self, offset: u16, more: bool) -> Self {
        self.fragment = Some((offset, more));
        self
    }

    /// Carrying a TCP segment.
    pub fn tcp(self, source: u16, destination: u16, flags: u8) -> Self {
        let mut header = [0; 20];
        header[..2].copy_from_slice(&source.to_be_bytes());
        header[2..4].copy_from_slice(&destination.to_be_bytes());
        header[12] = 5 << 4;
        header[13] = flags;
        self.payload(TCP, &header)
    }

    /// Carrying a UDP datagram with four bytes.
    pub fn udp(self, source: u16, destination: u16) -> Self {
        let mut datagram = [0; 12];
        datagram[..2].copy_from_slice(&source.to_be_bytes());
        datagram[2..4].copy_from_slice(&destination.to_be_bytes());
        datagram[4..6].copy_from_slice(&12u16.to_be_bytes());
        self.payload(UDP, &datagram)
    }

    /// Carrying an SCTP packet whose first chunk is of this type.
    pub fn sctp(self, source: u16, destination: u16, chunk: u8) -> Self {
        let mut header = [0; 16];
        header[..2].copy_from_slice(&source.to_be_bytes());
        header[2..4].copy_from_slice(&destination.to_be_bytes());
        header[12] = chunk;
        self.payload(132, &header)
    }

    /// Carrying an ICMP echo request of the packet's family.
    pub fn ping(self, identifier: u16) -> Self {
        let kind = if self.source.is_ipv4() { 8 } else { 128 };
        self.icmp(kind, &[identifier.to_be_bytes(), [0, 1]].concat())
    }

    /// Carrying the reply to an ICMP echo request.
    pub fn pong(self, identifier: u16) -> Self {
        let kind = if self.source.is_ipv4() { 0 } else { 129 };
        self.icmp(kind, &[identifier.to_be_bytes(), [0, 1]].concat())
    }

    /// Carrying "destination unreachable" about another packet.
    pub fn unreachable(self, about: &Self) -> Self {
        let kind = if self.source.is_ipv4() { 3 } else { 1 };
        let quoted = about.ip();
        self.icmp(kind, &[&[0; 4], &quoted[..]].concat())
    }

    /// Carrying an ICMP message of the packet's family; `rest` follows the checksum.
    pub fn icmp(self, kind: u8, rest: &[u8]) -> Self {
        let protocol = if self.source.is_ipv4() { ICMP } else { ICMPV6 };
        self.payload(protocol, &[&[kind, 0, 0, 0], rest].concat())
    }

    /// Carrying neighbour discovery: `kind`, the target, and link-layer options as (type, address).
    pub fn neighbour(self, kind: u8, target: &str, options: &[(u8, Mac)]) -> Self {
        let target: Ipv6Addr = target.parse().expect("a target address");
        let mut rest = vec![0; 4];
        rest.extend(target.octets());
        for (option, mac) in options {
            rest.extend([*option, 1]);
            rest.extend(mac.0);
        }
        self.hop_limit(255).icmp(kind, &rest)
    }

    /// Carrying any payload.
    pub fn payload(mut self, protocol: u8, payload: &[u8]) -> Self {
        self.protocol = protocol;
        self.payload = payload.to_vec();
        self
    }

    /// The frame.
    pub fn frame(&self) -> Vec<u8> {
        let ethertype: u16 = if self.source.is_ipv4() { 0x0800 } else { 0x86dd };
        let mut frame = [&PEER_MAC.0[..], &self.source_mac.0[..]].concat();
        for vlan in &self.tags {
            frame.extend(0x8100u16.to_be_bytes());
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend(ethertype.to_be_bytes());
        frame.extend(self.ip());
        frame
    }

    fn ip(&self) -> Vec<u8> {
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => self.ipv4(source, destination),
            (IpAddr::V6(source), IpAddr::V6(destination)) => self.ipv6(source, destination),
            _ => panic!("{} and {} are of different families", self.source, self.destination),
        }
    }

    fn ipv4(&self, source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
        let header_len = 20 + self.options.len();
        let mut packet = vec![0; 20];
        packet[0] = 0x40 | (header_len / 4) as u8;
        packet[2..4].copy_from_slice(&((header_len + self.payload.len()) as u16).to_be_bytes());
        let fragment = self.fragment.map_or(0x4000, |(offset, more)| offset | u16::from(more) << 13);
        if self.fragment.is_some() {
            packet[4..6].copy_from_slice(&self.identification.to_be_bytes());
        }
        packet[6..8].copy_from_slice(&fragment.to_be_bytes());
        packet[8] = self.hop_limit;
        packet[9] = self.protocol;
        packet[12..16].copy_from_slice(&source.octets());
        packet[16..20].copy_from_slice(&destination.octets());
        packet.extend(&self.options);
        let checksum = internet_checksum(&packet);
        packet[10..12].copy_from_slice(&checksum.to_be_bytes());
        packet.extend(&self.payload);
        packet
    }

    fn ipv6(&self, source: Ipv6Addr, destination: Ipv6Addr) -> Vec<u8> {
        let mut extensions = self.extensions.clone();
        if let Some((offset, more)) = self.fragment {
            let field = (offset << 3 | u16::from(more)).to_be_bytes();
            let [high, low] = self.identification.to_be_bytes();
            extensions.push((FRAGMENT, [&[0], &field[..], &[0, 0, high, low]].concat()));
        }
        let mut body = Vec::new();
        for (index, (_, rest)) in extensions.iter().enumerate() {
            body.push(extensions.get(index + 1).map_or(self.protocol, |(number, _)| *number));
            body.extend(rest);
        }
        body.extend(&self.payload);
        let mut packet = vec![0; 40];
        packet[0] = 0x60;
        packet[4..6].copy_from_slice(&(body.len() as u16).to_be_bytes());
        packet[6] = extensions.first().map_or(self.protocol, |(number, _)| *number);
        packet[7] = self.hop_limit;
        packet[8..24].copy_from_slice(&source.octets());
        packet[24..40].copy_from_slice(&destination.octets());
        packet.extend(body);
        packet
    }
}

/// An ARP request of a host that claims to be `sender` at `sender_mac`.
pub fn arp_request(sender_mac: Mac, sender: &str, target: &str) -> Vec<u8> {
    let address = |text: &str| text.parse::<Ipv4Addr>().expect("an IPv4 address").octets();
    let mut frame = vec![0xff; 6];
    frame.extend(POD_MAC.0);
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(sender_mac.0);
    frame.extend(address(sender));
    frame.extend([0; 6]);
    frame.extend(address(target));
    frame
}

/// Returns a DHCP message from a client to a server, from its UDP header on. `kind`: operation, hardware type and the
/// length of hardware addresses; `client` and `relay`: the addresses of both; `mac`: the client's.
pub fn dhcp(kind: [u8; 3], client: &str, relay: &str, mac: Mac) -> Vec<u8> {
    let address = |text: &str| text.parse::<Ipv4Addr>().expect("an IPv4 address").octets();
    let mut message = vec![0; 240];
    message[..3].copy_from_slice(&kind);
    message[12..16].copy_from_slice(&address(client));
    message[24..28].copy_from_slice(&address(relay));
    message[28..34].copy_from_slice(&mac.0);
    [&[0_u8, 68, 0, 67, 0, 248, 0, 0][..], &message].concat()
}

/// A frame of any ethertype with 46 zero bytes.
pub fn other_ethertype(ethertype: u16) -> Vec<u8> {
    any_frame(PEER_MAC, POD_MAC, ethertype, &[0; 46])
}

/// A frame with any header and payload.
pub fn any_frame(destination: Mac, source: Mac, ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&destination.0[..], &source.0, &ethertype.to_be_bytes(), payload].concat()
}

/// RFC 1071, over an even number of bytes.
fn internet_checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_frame_has_the_documented_bytes() {
        let frame = Packet::between("10.0.0.1", "10.0.0.2").udp(53, 0x1234).frame();
        let expected = [
            &[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0][..],
            &[0x45, 0, 0, 32, 0, 0, 0x40, 0, 64, 17, 0x26, 0xcb, 10, 0, 0, 1, 10, 0, 0, 2],
            &[0, 53, 0x12, 0x34, 0, 12, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(frame, expected.concat());
    }

    #[test]
    fn ipv6_extension_headers_form_a_chain() {
        let packet = Packet::between("fd00::1", "fd00::2")
            .extension(0, &[0, 1, 4, 0, 0, 0, 0])
            .fragment(3, true)
            .udp(1, 2);
        let frame = packet.frame();
        assert_eq!(frame[14 + 6], 0, "hop-by-hop first");
        assert_eq!(frame[14 + 40], 44, "then a fragment");
        assert_eq!(frame[14 + 48], 17, "then UDP");
        assert_eq!(frame[14 + 50..14 + 52], [0, 3 << 3 | 1]);
    }
}
