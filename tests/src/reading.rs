//! A straightforward reference parser of frames. It shares no code with the programs, which are compared with it: by
//! random packets through the kernel (`tests/packets`), and by fuzzing their parser (`fuzz/checks/packet.rs`,
//! which includes this file).

use std::net::{IpAddr, Ipv6Addr};

/// An IP packet.
#[derive(Debug)]
pub struct Reading {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Protocol of the payload.
    pub protocol: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv4 options.
    pub options: Vec<u8>,
    /// The identification shared by its fragments, as raw bytes.
    pub identification: Vec<u8>,
    /// Whether it is the first of several fragments; its later ones have no transport header.
    pub first: bool,
    /// Whether it is a later fragment.
    pub later: bool,
    /// From the transport header to the packet's end.
    pub payload: Vec<u8>,
    /// Number of bytes behind the packet.
    pub behind: usize,
}

/// The frame behind its VLAN tags, at most two: their ids, the ethertype, and the offset of the payload. `beside`: the
/// outer tag, if the kernel has taken it out.
pub fn tags(frame: &[u8], beside: Option<u16>) -> Option<(Vec<u16>, u16, usize)> {
    let mut tags: Vec<u16> = beside.into_iter().collect();
    let mut at = 12;
    loop {
        let ethertype = number(frame.get(at..at + 2)?);
        if ![0x8100, 0x88a8, 0x9100].contains(&ethertype) {
            let ids = tags.iter().map(|tag| tag % 4096).collect();
            return (tags.len() <= 2).then_some((ids, ethertype, at + 2));
        }
        tags.push(number(frame.get(at + 2..at + 4)?));
        at += 4;
    }
}

/// Reads the packet behind a frame's header. `None`: it must be dropped, regardless of sender and receiver. `uncut`: it
/// is still to be cut into segments, and a length of 0 means nothing.
pub fn packet(ip: &[u8], version: u8, uncut: bool) -> Option<Reading> {
    let packet = if version == 4 { read_v4(ip, uncut)? } else { read_v6(ip, uncut)? };
    let needed = match packet.protocol {
        6 => 20,
        17 | 136 => 8,
        33 | 132 => 12,
        1 | 58 => 8,
        _ => 0,
    };
    // ICMP of the other family is not parsed.
    let needed = match (packet.protocol, packet.source.is_ipv4(), packet.first) {
        (1, false, false) | (58, true, false) => 0,
        _ => needed,
    };
    // An SCTP packet may have no chunk; the place of the first chunk is read all the same.
    let in_frame = if packet.protocol == 132 { 16 } else { 0 };
    let is_there = packet.payload.len() >= needed && packet.payload.len() + packet.behind >= in_frame;
    (packet.later || is_there).then_some(packet)
}

/// Where a later fragment may begin.
fn may_begin(protocol: u8, offset: usize) -> bool {
    offset
        >= match protocol {
            6 => 20,
            33 | 132 => 12,
            1 | 17 | 58 | 136 => 8,
            _ => 0,
        }
}

fn number(bytes: &[u8]) -> u16 {
    u16::from_be_bytes(first(bytes))
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| bytes[at])
}

fn read_v4(ip: &[u8], uncut: bool) -> Option<Reading> {
    let header = ip.get(..20)?;
    let header_len = usize::from(header[0] & 15) * 4;
    let total = match number(&header[2..]) {
        0 if uncut => ip.len(),
        total => usize::from(total),
    };
    let fragment = number(&header[6..]);
    let (more, offset) = (fragment & 0x2000 != 0, usize::from(fragment & 0x1fff) * 8);
    let sound = header[0] >> 4 == 4 && header_len >= 20 && total >= header_len && total <= ip.len();
    if !sound || offset > 0 && !may_begin(header[9], offset) {
        return None;
    }
    let address = |at: usize| IpAddr::from(first::<4>(&header[at..]));
    Some(Reading {
        source: address(12),
        destination: address(16),
        protocol: header[9],
        hop_limit: header[8],
        options: ip[20..header_len].to_vec(),
        identification: header[4..6].to_vec(),
        first: more && offset == 0,
        later: offset > 0,
        payload: ip[header_len..total].to_vec(),
        behind: ip.len() - total,
    })
}

/// The payload length behind an IPv6 header.
fn length_v6(ip: &[u8], uncut: bool) -> Option<usize> {
    match (number(&ip[4..]), ip[6]) {
        (0, 0 | 43 | 44 | 51 | 60) => {
            // A jumbo option, first of hop-by-hop options of eight bytes.
            let options = ip.get(40..48)?;
            let length = u32::from_be_bytes(first(&options[4..])) as usize;
            (ip[6] == 0 && options[1..4] == [0, 0xc2, 4] && length > 0xffff).then_some(length)
        }
        (0, _) if uncut => Some(ip.len() - 40),
        (length, _) => Some(length.into()),
    }
}

fn read_v6(ip: &[u8], uncut: bool) -> Option<Reading> {
    let header = ip.get(..40)?;
    let address = |at: usize| IpAddr::from(first::<16>(&header[at..]));
    let length = length_v6(ip, uncut)?;
    if header[0] >> 4 != 6 || 40 + length > ip.len() {
        return None;
    }
    let (mut protocol, mut rest) = (header[6], &ip[40..40 + length]);
    let (mut first, mut later) = (false, false);
    let mut identification = Vec::new();
    let mut headers = 0;
    while [0, 43, 44, 51, 60].contains(&protocol) && !later {
        headers += 1;
        if headers > 8 {
            return None;
        }
        let fixed = rest.get(..8)?;
        let size = match protocol {
            44 => 8,
            51 => (usize::from(fixed[1]) + 2) * 4,
            _ => (usize::from(fixed[1]) + 1) * 8,
        };
        match protocol {
            0 if headers > 1 => return None,
            43 if fixed[2] == 0 || fixed[3] != 0 => return None,
            44 if first => return None,
            44 => {
                let field = number(&fixed[2..]);
                identification = fixed[4..].to_vec();
                (first, later) = (field & 1 != 0 && field >> 3 == 0, field >> 3 != 0);
                if later && !may_begin(fixed[0], usize::from(field >> 3) * 8) {
                    return None;
                }
            }
            _ => {}
        }
        protocol = fixed[0];
        if later {
            break;
        }
        rest = rest.get(size..)?;
    }
    (headers < 8 || later).then_some(Reading {
        source: address(8),
        destination: address(24),
        protocol,
        hop_limit: header[7],
        options: Vec::new(),
        identification,
        first,
        later,
        payload: rest.to_vec(),
        behind: ip.len() - 40 - length,
    })
}

impl Reading {
    /// Type of a message of its family's ICMP.
    pub fn icmp(&self) -> Option<u8> {
        let number = if self.source.is_ipv4() { 1 } else { 58 };
        (!self.later && self.protocol == number).then(|| self.payload[0])
    }

    /// Type of an ICMPv6 message.
    pub fn message(&self) -> Option<u8> {
        self.icmp().filter(|_| self.source.is_ipv6())
    }

    /// Source and destination port, if rules apply to ports of this protocol.
    pub fn ports(&self) -> Option<(u16, u16)> {
        let has = !self.later && [6, 17, 132].contains(&self.protocol);
        has.then(|| (number(&self.payload), number(&self.payload[2..])))
    }

    /// The target of neighbour discovery.
    pub fn target(&self) -> Option<IpAddr> {
        Some(IpAddr::from(first::<16>(self.payload.get(8..24)?)))
    }

    /// Neighbour discovery in fragments, which receivers must not accept.
    pub fn is_broken_discovery(&self) -> bool {
        self.first && self.message().is_some_and(|kind| (133..=137).contains(&kind))
    }

    /// Whether it claims to be about its link.
    pub fn claims_the_link(&self) -> bool {
        !self.first
            && match self.message() {
                Some(133..=137) => self.hop_limit == 255,
                Some(130..=132 | 143) => self.hop_limit == 1,
                _ => false,
            }
    }

    /// Whether it claims to be about its link and is such a message in form.
    pub fn is_formed(&self) -> bool {
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (self.source, self.destination) else {
            return false;
        };
        if !self.claims_the_link() || self.behind > 0 {
            return false;
        }
        let kind = self.payload[0];
        match kind {
            130 => {
                let size = self.payload.len();
                let sources = size.checked_sub(28);
                let is_whole = size == 24 || sources.is_some_and(|bytes| bytes.is_multiple_of(16));
                destination.is_multicast() && self.payload[1] == 0 && is_whole
            }
            131 | 132 => {
                let said = [&self.payload[1..2], &self.payload[4..8]].concat();
                destination.is_multicast() && self.payload.len() == 24 && said == [0; 5]
            }
            143 => {
                let records = usize::from(number(&self.payload[6..]));
                let reserved = [self.payload[1], self.payload[4], self.payload[5]];
                let to_routers = destination.segments() == [0xff02, 0, 0, 0, 0, 0, 0, 0x16];
                to_routers && reserved == [0; 3] && self.payload.len() == 8 + 20 * records
            }
            134 | 137 => is_link_local(source),
            _ => {
                let fixed = if kind == 133 { 8 } else { 24 };
                let flags = if kind == 136 { 0x1f } else { 0xff };
                let reserved = [
                    self.payload[1],
                    self.payload[4] & flags,
                    self.payload[5],
                    self.payload[6],
                    self.payload[7],
                ];
                let options: Vec<&[u8]> = self.payload.get(fixed..).unwrap_or(&[0]).chunks(8).collect();
                let asked = kind != 135 || self.target().is_some_and(|target| asks(destination, target));
                let allowed = |option: &&[u8]| {
                    option.len() == 8
                        && option[1] == 1
                        && ([1, 2].contains(&option[0]) || option[0] == 14 && source.is_unspecified())
                };
                reserved == [0; 5] && options.len() <= 2 && options.iter().all(allowed) && asked
            }
        }
    }

    /// Whether the options of neighbour discovery, after that many bytes, name no Ethernet address but this.
    pub fn names_only(&self, mac: [u8; 6], behind: usize) -> bool {
        let Some(mut options) = self.payload.get(behind..) else { return false };
        let mut read = 0;
        while let Some(option) = options.get(..8) {
            let size = usize::from(option[1]) * 8;
            read += 1;
            if size == 0
                || size > options.len()
                || read > 8
                || [1, 2].contains(&option[0]) && option[2..] != mac
            {
                return false;
            }
            options = &options[size..];
        }
        options.is_empty()
    }
}

/// Whether an address is link-local unicast.
pub fn is_link_local(address: Ipv6Addr) -> bool {
    address.segments()[0] & 0xffc0 == 0xfe80
}

fn asks(destination: Ipv6Addr, target: IpAddr) -> bool {
    let IpAddr::V6(of) = target else { return false };
    let [.., a, b, c] = of.octets();
    let solicited = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c];
    destination == of || destination.octets() == solicited
}

/// Whether IPv4 options are well-formed and none of them is source routing.
pub fn options_are_sound(mut options: &[u8]) -> bool {
    for _ in 0..12 {
        match options {
            [] | [0, ..] => return true,
            [131 | 137, ..] => return false,
            [1, rest @ ..] => options = rest,
            [_, size, ..] if (2..=options.len()).contains(&usize::from(*size)) => {
                options = &options[usize::from(*size)..]
            }
            _ => return false,
        }
    }
    options.is_empty()
}

/// The Ethernet and IP address that an ARP packet's sender claims.
pub fn arp(arp: &[u8]) -> Option<([u8; 6], IpAddr)> {
    let arp = arp.get(..28)?;
    let (sender, target) = ([arp[14], arp[15], arp[16], arp[17]], [arp[24], arp[25], arp[26], arp[27]]);
    let claimed = if sender == [0; 4] && arp[7] == 1 { target } else { sender };
    let sound = arp[..7] == [0, 1, 8, 0, 6, 4, 0] && [1, 2].contains(&arp[7]);
    sound.then(|| (first(&arp[8..]), claimed.into()))
}
