//! A [`Packet`], and the memory that one is read into.

use core::mem::MaybeUninit;

use super::frame::Payload;
use super::header::{Part, TcpHeader};
use super::version::Version;
use crate::flow::{Signal, Tuple};
use crate::{DropReason, Ip4, Ip6, protocol};

/// The role of a packet in flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Ordinary traffic of a flow.
    Flow,
    /// The same, and the first fragment of it.
    FirstFragment,
    /// A fragment without the transport header.
    LaterFragment,
    /// An ICMP error about another packet.
    IcmpError,
    /// Neighbour discovery or a multicast listener message on its link.
    LinkControl,
}

/// The programs' data of an IP packet. No padding, as required for arguments of subprograms.
#[repr(C)]
#[derive(Debug)]
pub struct Packet<A> {
    /// Addresses, protocol, ports, VLAN tags.
    pub tuple: Tuple<A>,
    /// Identification, which the fragments of one packet share.
    pub identification: u32,
    /// Offset of the transport header in the frame.
    pub transport: u32,
    /// Offset of the packet's end in the frame.
    pub end: u32,
    /// Its role in flows.
    pub kind: Kind,
    /// Its effect on a connection.
    pub signal: Signal,
    /// Whether the ports in `tuple` are ports (rather than an echo identifier or nothing).
    pub has_ports: bool,
    /// Whether the IPv4 header has options.
    pub has_options: bool,
    /// Type of an ICMP message.
    pub icmp_type: u8,
    /// Whether the frame has VLAN tags.
    pub tagged: bool,
    /// Offset of the IP header in the frame.
    network: u16,
}

const _: () = {
    assert!(size_of::<Packet<Ip4>>() == size_of::<Tuple<Ip4>>() + 20);
    assert!(size_of::<Packet<Ip6>>() == size_of::<Tuple<Ip6>>() + 20);
};

/// The position of the transport header.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The part of the packet that follows.
    pub part: Part,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Whether it is at its usual offset: no tags, options or extension headers before it.
    pub(super) plain: bool,
    /// The usual offset.
    pub(super) usual: usize,
}

/// Room for a packet of either family: the compiler would keep one for each on the stack, which is small.
#[derive(Debug)]
pub struct Room(MaybeUninit<Packet<Ip6>>);

impl Default for Room {
    #[inline(always)]
    fn default() -> Self {
        Self(MaybeUninit::uninit())
    }
}

impl Room {
    /// A packet of which only the frame has been read.
    #[inline(always)]
    pub fn begin<A: Version>(&mut self, payload: &Payload, tagged: bool) -> &mut Packet<A> {
        let packet = self.blank();
        packet.tuple.lane = payload.lane;
        packet.tagged = tagged;
        packet.network = payload.offset;
        packet
    }

    /// A packet that begins with its IP header.
    #[inline(always)]
    pub fn blank<A: Version>(&mut self) -> &mut Packet<A> {
        const { assert!(size_of::<Packet<A>>() <= size_of::<Packet<Ip6>>()) };
        const { assert!(align_of::<Packet<A>>() == align_of::<Packet<Ip6>>()) };
        let packet = self.0.as_mut_ptr().cast::<Packet<A>>();
        // SAFETY: large enough and aligned (asserted above). Zeros are a packet: an address of zeros (`Plain`),
        // numbers, `false`, and the first kind. Word by word, since the compiler would call a function that fills
        // memory byte by byte.
        unsafe {
            let words = packet.cast::<u32>();
            for word in 0..size_of::<Packet<A>>() / size_of::<u32>() {
                words.add(word).write_volatile(0);
            }
            &mut *packet
        }
    }
}

impl Kind {
    /// Whether the packet is one of several fragments.
    #[inline(always)]
    pub fn is_fragment(self) -> bool {
        matches!(self, Self::FirstFragment | Self::LaterFragment)
    }
}

impl<A: Version> Packet<A> {
    /// A whole, untagged packet with ports of which only the flow matters: the offsets of its parts are not set.
    #[inline(always)]
    pub(super) fn of_flow(tuple: Tuple<A>, signal: Signal) -> Self {
        Self {
            tuple,
            identification: 0,
            transport: 0,
            end: 0,
            kind: Kind::Flow,
            signal,
            has_ports: true,
            has_options: false,
            icmp_type: 0,
            tagged: false,
            network: 0,
        }
    }

    /// Stores the offsets of the packet's parts, given in bytes from the start of the IP header.
    #[inline(always)]
    pub(super) fn measure(&mut self, header_len: usize, length: u32) {
        self.transport = u32::from(self.network) + header_len as u32;
        self.end = u32::from(self.network) + length;
    }

    /// Whether the packet ends before so many bytes of its transport header.
    #[inline(always)]
    pub(super) fn lacks(&self, header_len: u16) -> bool {
        self.transport + u32::from(header_len) > self.end
    }

    #[inline(always)]
    pub(super) fn holds(&self, header_len: u16) -> Result<(), DropReason> {
        if self.lacks(header_len) { Err(DropReason::Malformed) } else { Ok(()) }
    }

    /// Offset up to which the packet is judged, without the options of neighbour discovery: the part of its transport
    /// header that is read; for an ICMP error also the headers that it quotes; for a link maintenance message the
    /// bytes that identify it as one.
    #[inline(always)]
    pub fn judged(&self) -> u32 {
        const MESSAGE: u32 = 8 + 60 + 8;
        let most = match self.kind {
            Kind::IcmpError | Kind::LinkControl => MESSAGE,
            _ => size_of::<TcpHeader>() as u32,
        };
        (self.transport + most).min(self.end)
    }

    /// Whether it is a datagram to that port. Later fragments have no ports.
    #[inline(always)]
    pub fn is_udp_to(&self, port: u16) -> bool {
        self.tuple.lane.protocol() == protocol::UDP
            && self.has_ports
            && self.tuple.ports.destination().number() == port
    }

    /// Offset of the IP header in the frame.
    #[inline(always)]
    pub fn network(&self) -> usize {
        self.network.into()
    }

    /// Offset of the transport header in the frame.
    #[inline(always)]
    pub fn transport(&self) -> usize {
        self.transport as usize
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::super::bytes::{Bytes, Copied, InMemory, Plain};
    use super::super::frame::ETHERNET_LEN;
    use super::super::header::{
        HEADERS_V4, HEADERS_V6, IPV4_LEN, IPV6_LEN, Ipv4Header, Ipv6Header, is_extension,
    };
    use super::super::{icmp, options, walk};
    use super::*;
    use crate::flow::Lane;
    use crate::protocol::{ICMP, ICMPV6, UDP};
    use proptest::prelude::*;

    /// Records the offset up to which bytes are read.
    struct Watched<'a> {
        bytes: InMemory<'a>,
        until: Cell<usize>,
    }

    impl Watched<'_> {
        fn note<T>(&self, offset: usize) {
            self.until.set(self.until.get().max(offset + size_of::<T>()));
        }
    }

    impl Bytes for Watched<'_> {
        type At<'b, T: Plain + 'b>
            = Copied<T>
        where
            Self: 'b;

        fn length(&self) -> u32 {
            self.bytes.length()
        }

        fn is_uncut(&self) -> bool {
            self.bytes.is_uncut()
        }

        fn tag_beside(&self) -> (bool, u16) {
            self.bytes.tag_beside()
        }

        fn at<T: Plain>(&self, offset: usize) -> Result<Copied<T>, DropReason> {
            self.note::<T>(offset);
            self.bytes.at(offset)
        }

        fn load<T: Plain>(&self, offset: usize) -> Result<T, DropReason> {
            self.note::<T>(offset);
            self.bytes.load(offset)
        }
    }

    fn ipv4(bytes: &Watched<'_>, packet: &mut Packet<Ip4>) -> Result<(), DropReason> {
        walk::ipv4(bytes, packet)?;
        options::ipv4(bytes, (packet.network() + IPV4_LEN) as u32, packet.transport)
    }

    fn ipv6(bytes: &Watched<'_>, packet: &mut Packet<Ip6>) -> Result<(), DropReason> {
        walk::ipv6(bytes, packet)?;
        if packet.kind == Kind::LinkControl { icmp::form(bytes, packet).map(drop) } else { Ok(()) }
    }

    /// A frame: the family, whether it has a tag, the words of an IPv4 header, the protocol, the field of fragments, and what
    /// follows the header's first 20 or 40 bytes.
    #[derive(Debug, Clone)]
    struct Frame(bool, bool, u8, u8, u16, Vec<u8>);

    impl Frame {
        fn bytes(&self) -> Vec<u8> {
            let Self(six, tagged, words, protocol, fragment, rest) = self;
            let mut frame = vec![0; ETHERNET_LEN + if *tagged { 4 } else { 0 }];
            let mut header = vec![0; if *six { IPV6_LEN } else { IPV4_LEN }];
            if *six {
                (header[0], header[6], header[7]) = (0x60, *protocol, 255);
                header[4..6].copy_from_slice(&(rest.len() as u16).to_be_bytes());
            } else {
                (header[0], header[9]) = (0x40 | *words, *protocol);
                header[2..4].copy_from_slice(&((IPV4_LEN + rest.len()) as u16).to_be_bytes());
                header[6..8].copy_from_slice(&fragment.to_be_bytes());
            }
            frame.extend(header);
            frame.extend(rest);
            frame
        }

        /// The offset up to which it is read, if its headers are valid, and the packet's end according to its
        /// headers.
        fn read(&self) -> Option<(usize, usize)> {
            if self.0 { self.read_as::<Ip6>(ipv6) } else { self.read_as::<Ip4>(ipv4) }
        }

        fn read_as<A: Version>(
            &self,
            walk: impl Fn(&Watched<'_>, &mut Packet<A>) -> Result<(), DropReason>,
        ) -> Option<(usize, usize)> {
            let bytes = &self.bytes();
            let read = InMemory { bytes, in_place: bytes.len(), is_uncut: false, tag_beside: None };
            let watched = Watched { bytes: read, until: Cell::new(0) };
            let offset = ETHERNET_LEN as u16 + if self.1 { 4 } else { 0 };
            let mut room = Room::default();
            let packet = room.begin::<A>(&Payload { ethertype: 0, offset, lane: Lane::NONE }, self.1);
            walk(&watched, packet).ok()?;
            if packet.kind == Kind::IcmpError {
                let mut answer = packet.tuple;
                A::answer_to_quoted(&watched, packet.transport() + 8, &mut answer);
            }
            // Bytes behind the packet's end belong to no packet.
            Some((watched.until.get().min(packet.end as usize), packet.judged() as usize))
        }

        /// The offset up to which it is read, if its first header shows that its headers are at their usual offsets.
        fn usual(&self) -> Option<usize> {
            let bytes = &self.bytes();
            let read = InMemory { bytes, in_place: bytes.len(), is_uncut: false, tag_beside: None };
            let (usual, headers) = if self.0 {
                (read.at::<Ipv6Header>(ETHERNET_LEN).is_ok_and(|it| it.is_usual()), HEADERS_V6)
            } else {
                (read.at::<Ipv4Header>(ETHERNET_LEN).is_ok_and(|it| it.is_usual()), HEADERS_V4)
            };
            (usual && !self.1).then_some(headers)
        }
    }

    #[test]
    fn a_packet_says_up_to_where_it_is_judged() {
        let with = |before: &[u8]| [before, &[0; 12]].concat();
        let quoted = [&[3, 0, 0, 0, 0, 0, 0, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 0, UDP][..], &[0; 18]].concat();
        let advertised = [&[136_u8, 0, 0, 0, 0, 0, 0, 0][..], &[0; 16], &[2, 1, 0, 0, 0, 0, 0, 0]].concat();
        for (frame, read, usual) in [
            (Frame(false, false, 5, UDP, 0, with(&[])), (38, 46), Some(50)),
            (Frame(true, false, 0, UDP, 0, with(&[])), (58, 66), Some(70)),
            (Frame(false, true, 5, UDP, 0, with(&[])), (42, 50), None),
            (Frame(false, false, 15, UDP, 0, with(&[0; 40])), (78, 86), None),
            (Frame(true, false, 0, 60, 0, with(&[UDP, 0, 1, 4, 0, 0, 0, 0])), (66, 74), None),
            (Frame(false, false, 5, ICMP, 0, quoted), (66, 70), None),
            (Frame(true, false, 0, ICMPV6, 0, advertised), (80, 86), None),
        ] {
            assert_eq!((frame.read(), frame.usual()), (Some(read), usual), "{frame:?}");
        }
    }

    proptest! {
        #[test]
        fn no_packet_is_judged_by_more_than_it_says(
            (six, tagged) in any::<(bool, bool)>(),
            words in 5u8..16,
            protocol in lively(),
            fragment in prop_oneof![Just(0u16), Just(0x2000), 0u16..8],
            rest in proptest::collection::vec(lively(), 0..160),
        ) {
            let frame = Frame(six, tagged, words, protocol, fragment, rest);
            if let Some((read, judged)) = frame.read() {
                prop_assert!(read <= judged, "{read} {judged}");
                prop_assert!(frame.usual().is_none_or(|usual| read <= usual), "{read}");
            }
        }
    }

    /// Bytes that are often a protocol, a type of a message or a length.
    fn lively() -> impl Strategy<Value = u8> {
        let numbers: Vec<u8> = (0..=u8::MAX).filter(|it| *it < 24 || is_extension(*it)).collect();
        prop_oneof![
            4 => prop::sample::select(numbers),
            2 => prop::sample::select(vec![33u8, 58, 132, 134, 135, 136, 143]),
            1 => any::<u8>(),
        ]
    }
}
