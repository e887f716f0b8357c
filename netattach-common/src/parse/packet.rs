//! A [`Packet`], and the memory that one is read into.

use core::mem::MaybeUninit;

use super::frame::Payload;
use super::header::Part;
use super::version::Version;
use crate::flow::{Signal, Tuple};
use crate::{DropReason, Ip4, Ip6};

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
    /// A whole packet with ports, untagged, of which only its flow matters: its parts have no place.
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
