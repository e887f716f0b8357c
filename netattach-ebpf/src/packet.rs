//! From bytes to a [`Packet`]: the bounds-checked walk over Ethernet, IP, extension headers and transport.
//!
//! Headers at their usual place are read directly, after [`pull`] has made sure that they do not lie in a
//! paged buffer; all others by `bpf_skb_load_bytes`. Whatever cannot be read is [`DropReason::Malformed`].

use aya_ebpf::programs::TcContext;
use netattach_common::{
    Address, DropReason, Ip4, Ip6, Mac, Port,
    flow::{Signal, Tuple},
    protocol::{ICMP, ICMPV6, SCTP, TCP, UDP},
};

/// Length of an Ethernet header without tags.
pub(crate) const ETHERNET_LEN: usize = 14;
const IPV4_LEN: usize = size_of::<Ipv4Header>();
const IPV6_LEN: usize = size_of::<Ipv6Header>();

/// EtherType numbers (IEEE 802).
pub(crate) mod ethertype {
    /// IPv4.
    pub(crate) const IPV4: u16 = 0x0800;
    /// ARP.
    pub(crate) const ARP: u16 = 0x0806;
    /// IPv6.
    pub(crate) const IPV6: u16 = 0x86dd;
    /// Customer VLAN tag.
    pub(crate) const VLAN: u16 = 0x8100;
    /// Service VLAN tag.
    pub(crate) const QINQ: u16 = 0x88a8;
    /// Service VLAN tag, as it was before it was standardised.
    pub(crate) const OLD_QINQ: u16 = 0x9100;
}

/// ICMPv6 types (RFC 4443, 4861, 2710, 3810).
pub(crate) mod icmpv6 {
    /// The last of the error types in use.
    pub(crate) const PARAMETER_PROBLEM: u8 = 4;
    /// Echo request.
    pub(crate) const ECHO_REQUEST: u8 = 128;
    /// Echo reply.
    pub(crate) const ECHO_REPLY: u8 = 129;
    /// Multicast listener query.
    pub(crate) const LISTENER_QUERY: u8 = 130;
    /// Multicast listener done.
    pub(crate) const LISTENER_DONE: u8 = 132;
    /// Router solicitation.
    pub(crate) const ROUTER_SOLICITATION: u8 = 133;
    /// Router advertisement.
    pub(crate) const ROUTER_ADVERTISEMENT: u8 = 134;
    /// Neighbour solicitation.
    pub(crate) const NEIGHBOUR_SOLICITATION: u8 = 135;
    /// Neighbour advertisement.
    pub(crate) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    /// Redirect.
    pub(crate) const REDIRECT: u8 = 137;
    /// Multicast listener report, version 2.
    pub(crate) const LISTENER_REPORT_2: u8 = 143;
}

/// An Ethernet header (IEEE 802.3) without tags.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EthernetHeader {
    /// Destination address.
    pub(crate) destination: Mac,
    /// Source address.
    pub(crate) source: Mac,
    ethertype: u16,
}

/// An IPv4 header (RFC 791, 3.1) without options.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv4Header {
    version_and_words: u8,
    service: u8,
    total_len: u16,
    identification: u16,
    fragment: u16,
    hop_limit: u8,
    protocol: u8,
    checksum: u16,
    source: Ip4,
    destination: Ip4,
}

/// An IPv6 header (RFC 8200, 3).
#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv6Header {
    version_and_class: u8,
    flow_label: [u8; 3],
    payload_len: u16,
    next_header: u8,
    hop_limit: u8,
    source: Ip6,
    destination: Ip6,
}

/// A TCP header (RFC 9293, 3.1) up to the flags.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpHeader {
    ports: Ports,
    sequence: [u16; 2],
    acknowledgement: [u16; 2],
    data_offset: u8,
    flags: u8,
}

/// What TCP, UDP and SCTP begin with.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ports {
    source: Port,
    destination: Port,
}

/// An ICMP header (RFC 792, RFC 4443).
#[repr(C)]
#[derive(Clone, Copy)]
struct IcmpHeader {
    kind: u8,
    code: u8,
    checksum: u16,
    identifier: Port,
    sequence: u16,
}

/// How a packet takes part in flows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Ordinary traffic of a flow.
    Flow,
    /// A fragment without the transport header.
    LaterFragment,
    /// An ICMP error about another packet.
    IcmpError,
    /// Neighbour discovery or a multicast listener message on its link.
    LinkControl,
}

/// What the programs need to know about an IP packet.
pub(crate) struct Packet<A> {
    /// Addresses, protocol, ports.
    pub(crate) tuple: Tuple<A>,
    /// How to judge it.
    pub(crate) kind: Kind,
    /// TCP flags.
    pub(crate) signal: Signal,
    /// Whether the ports in `tuple` are ports (rather than an echo identifier or nothing).
    pub(crate) has_ports: bool,
    /// Whether the IPv4 header has options.
    pub(crate) has_options: bool,
    /// Type of an ICMP message.
    pub(crate) icmp_type: u8,
    /// Offset of the transport header in the frame.
    pub(crate) transport: usize,
    /// Offset of the packet's end in the frame.
    pub(crate) end: usize,
}

/// Index of the device, in the namespace of the device.
#[inline(always)]
pub(crate) fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).ifindex }
}

/// Makes the first headers readable in place. A packet shorter than they are stays as it is.
#[inline(always)]
pub(crate) fn pull(ctx: &TcContext) {
    /// Ethernet, IPv6 and the part of TCP that is read.
    const HEADERS: u32 = (ETHERNET_LEN + IPV6_LEN + size_of::<TcpHeader>()) as u32;
    if ctx.data() + (HEADERS as usize) > ctx.data_end() && ctx.data_end() < ctx.data() + ctx.len() as usize {
        // On failure the reads below fail, and the packet counts as malformed.
        let _ = ctx.pull_data(ctx.len().min(HEADERS));
    }
}

/// Reads the Ethernet header.
#[inline(always)]
pub(crate) fn ethernet(ctx: &TcContext) -> Result<&EthernetHeader, DropReason> {
    at(ctx, 0)
}

impl EthernetHeader {
    /// What follows.
    #[inline(always)]
    pub(crate) fn ethertype(&self) -> u16 {
        u16::from_be(self.ethertype)
    }

    /// Whether the frame has a VLAN tag. At ingress the kernel has moved the outer tag into the context; at
    /// egress it may be in either place.
    #[inline(always)]
    pub(crate) fn is_tagged(&self, ctx: &TcContext) -> bool {
        // SAFETY: the context pointer is valid while the program runs.
        let beside = unsafe { (*ctx.skb.skb).vlan_present } != 0;
        beside || matches!(self.ethertype(), ethertype::VLAN | ethertype::QINQ | ethertype::OLD_QINQ)
    }
}

/// Reads an IPv4 packet.
#[inline(always)]
pub(crate) fn ipv4(ctx: &TcContext) -> Result<Packet<Ip4>, DropReason> {
    let header: &Ipv4Header = at(ctx, ETHERNET_LEN)?;
    let (header_len, fragment) = header.shape()?;
    let transport = ETHERNET_LEN + header_len;
    let place = Place { fragment, hop_limit: header.hop_limit };
    let end = ETHERNET_LEN + usize::from(u16::from_be(header.total_len));
    let mut packet = Packet::new(header.tuple(), transport, end);
    packet.has_options = header_len != IPV4_LEN;
    read_transport(ctx, &mut packet, &place, ETHERNET_LEN + IPV4_LEN)?;
    Ok(packet)
}

/// Reads an IPv6 packet, extension headers included (RFC 8200, 4).
#[inline(always)]
pub(crate) fn ipv6(ctx: &TcContext) -> Result<Packet<Ip6>, DropReason> {
    let header: &Ipv6Header = at(ctx, ETHERNET_LEN)?;
    if header.version_and_class >> 4 != 6 {
        return Err(DropReason::Malformed);
    }
    let hop_limit = header.hop_limit;
    let end = ETHERNET_LEN + IPV6_LEN + usize::from(u16::from_be(header.payload_len));
    let mut packet = Packet::new(header.tuple(), ETHERNET_LEN + IPV6_LEN, end);
    let fragment = extension_headers(ctx, &mut packet)?;
    read_transport(ctx, &mut packet, &Place { fragment, hop_limit }, ETHERNET_LEN + IPV6_LEN)?;
    Ok(packet)
}

impl<A: Address> Packet<A> {
    #[inline(always)]
    fn new(tuple: Tuple<A>, transport: usize, end: usize) -> Self {
        Self {
            tuple,
            kind: Kind::Flow,
            signal: Signal { tcp_flags: 0 },
            has_ports: false,
            has_options: false,
            icmp_type: 0,
            transport,
            end,
        }
    }
}

/// Reads packets that an ICMP error quotes.
pub(crate) trait Embedded: Sized {
    /// The tuple of the packet quoted at `offset`, `None` when it cannot be told.
    fn embedded(ctx: &TcContext, offset: usize) -> Option<Tuple<Self>>;
}

impl Embedded for Ip4 {
    #[inline(always)]
    fn embedded(ctx: &TcContext, offset: usize) -> Option<Tuple<Self>> {
        let header: Ipv4Header = load(ctx, offset).ok()?;
        let (header_len, fragment) = header.shape().ok()?;
        if fragment == Fragment::Later {
            return None;
        }
        embedded_ports(ctx, offset + header_len, header.tuple())
    }
}

impl Embedded for Ip6 {
    #[inline(always)]
    fn embedded(ctx: &TcContext, offset: usize) -> Option<Tuple<Self>> {
        let header: Ipv6Header = load(ctx, offset).ok()?;
        // A quoted packet with extension headers is too rare to walk twice for.
        embedded_ports(ctx, offset + IPV6_LEN, header.tuple())
    }
}

#[inline(always)]
fn embedded_ports<A>(ctx: &TcContext, transport: usize, mut tuple: Tuple<A>) -> Option<Tuple<A>> {
    match tuple.protocol {
        TCP | UDP | SCTP => {
            let ports: Ports = load(ctx, transport).ok()?;
            tuple.source_port = ports.source;
            tuple.destination_port = ports.destination;
        }
        ICMP | ICMPV6 => set_echo(&mut tuple, &load(ctx, transport).ok()?),
        _ => {}
    }
    Some(tuple)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fragment {
    /// The whole packet.
    Not,
    /// Begins with the transport header.
    First,
    /// Does not.
    Later,
}

/// What the IP header says about the transport header.
struct Place {
    fragment: Fragment,
    hop_limit: u8,
}

impl Ipv4Header {
    /// Length of the header with its options, and which part of the packet follows.
    #[inline(always)]
    fn shape(&self) -> Result<(usize, Fragment), DropReason> {
        let words = usize::from(self.version_and_words & 15);
        if self.version_and_words >> 4 != 4 || words < 5 {
            return Err(DropReason::Malformed);
        }
        let fragment = match u16::from_be(self.fragment) & 0x3fff {
            0 => Fragment::Not,
            0x2000 => Fragment::First,
            _ => Fragment::Later,
        };
        Ok((words * 4, fragment))
    }

    #[inline(always)]
    fn tuple(&self) -> Tuple<Ip4> {
        Tuple {
            source: self.source,
            destination: self.destination,
            source_port: Port::NONE,
            destination_port: Port::NONE,
            protocol: self.protocol,
        }
    }
}

impl Ipv6Header {
    #[inline(always)]
    fn tuple(&self) -> Tuple<Ip6> {
        Tuple {
            source: self.source,
            destination: self.destination,
            source_port: Port::NONE,
            destination_port: Port::NONE,
            protocol: self.next_header,
        }
    }
}

/// Moves the packet's protocol and transport offset behind the extension headers.
#[inline(always)]
fn extension_headers(ctx: &TcContext, packet: &mut Packet<Ip6>) -> Result<Fragment, DropReason> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const AUTHENTICATION: u8 = 51;
    const DESTINATION: u8 = 60;
    const MOBILITY: u8 = 135;
    const LIMIT: usize = 8;
    let mut fragment = Fragment::Not;
    for _ in 0..LIMIT {
        let protocol = packet.tuple.protocol;
        match protocol {
            HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION | MOBILITY => {}
            _ => return Ok(fragment),
        }
        let [next, length, third, fourth]: [u8; 4] = load(ctx, packet.transport)?;
        let length = usize::from(length);
        packet.tuple.protocol = next;
        packet.transport += match protocol {
            // Type 0 lets a sender choose the way (deprecated by RFC 5095).
            ROUTING if third == 0 => return Err(DropReason::SourceRoute),
            FRAGMENT => {
                let position = u16::from_be_bytes([third, fourth]);
                if position & 0xfff8 != 0 {
                    return Ok(Fragment::Later);
                }
                // Without the "more" bit it is an atomic fragment (RFC 6946), a whole packet.
                if position & 1 != 0 {
                    fragment = Fragment::First;
                }
                8
            }
            AUTHENTICATION => (length + 2) * 4,
            _ => (length + 1) * 8,
        };
    }
    Err(DropReason::ExtensionHeaders)
}

/// Fills in what the transport header says. `usual`: where it lies without options or extension headers.
#[inline(always)]
fn read_transport<A>(
    ctx: &TcContext,
    packet: &mut Packet<A>,
    place: &Place,
    usual: usize,
) -> Result<(), DropReason> {
    if place.fragment == Fragment::Later {
        packet.kind = Kind::LaterFragment;
        return Ok(());
    }
    let offset = packet.transport;
    match packet.tuple.protocol {
        TCP => {
            let header: TcpHeader = transport_header(ctx, offset, usual)?;
            set_ports(packet, header.ports);
            packet.signal = Signal { tcp_flags: header.flags };
        }
        UDP | SCTP => {
            let ports = transport_header(ctx, offset, usual)?;
            set_ports(packet, ports);
        }
        ICMP | ICMPV6 => {
            let header: IcmpHeader = transport_header(ctx, offset, usual)?;
            packet.icmp_type = header.kind;
            packet.kind = icmp_kind(packet.tuple.protocol, header.kind, place)?;
            set_echo(&mut packet.tuple, &header);
        }
        _ => {}
    }
    Ok(())
}

#[inline(always)]
fn set_ports<A>(packet: &mut Packet<A>, ports: Ports) {
    packet.tuple.source_port = ports.source;
    packet.tuple.destination_port = ports.destination;
    packet.has_ports = true;
}

/// Gives an echo its identifier as the requester's port.
#[inline(always)]
fn set_echo<A>(tuple: &mut Tuple<A>, header: &IcmpHeader) {
    const ECHO_REPLY: u8 = 0;
    const ECHO_REQUEST: u8 = 8;
    match (tuple.protocol, header.kind) {
        (ICMP, ECHO_REQUEST) | (ICMPV6, icmpv6::ECHO_REQUEST) => tuple.source_port = header.identifier,
        (ICMP, ECHO_REPLY) | (ICMPV6, icmpv6::ECHO_REPLY) => tuple.destination_port = header.identifier,
        _ => {}
    }
}

#[inline(always)]
fn icmp_kind(protocol: u8, icmp_type: u8, place: &Place) -> Result<Kind, DropReason> {
    if protocol == ICMP {
        // Destination unreachable, source quench, redirect, time exceeded, parameter problem (RFC 792).
        return Ok(if matches!(icmp_type, 3 | 4 | 5 | 11 | 12) { Kind::IcmpError } else { Kind::Flow });
    }
    Ok(match icmp_type {
        1..=icmpv6::PARAMETER_PROBLEM => Kind::IcmpError,
        icmpv6::ROUTER_SOLICITATION..=icmpv6::REDIRECT => {
            // Fragmented neighbour discovery hides its options and must be ignored (RFC 6980, 5).
            if place.fragment == Fragment::First {
                return Err(DropReason::Malformed);
            }
            // Whatever has crossed a router is not about this link (RFC 4861, 6.1 and 7.1).
            if place.hop_limit == 255 { Kind::LinkControl } else { Kind::Flow }
        }
        icmpv6::LISTENER_QUERY..=icmpv6::LISTENER_DONE | icmpv6::LISTENER_REPORT_2
            if place.hop_limit == 1 =>
        {
            Kind::LinkControl
        }
        _ => Kind::Flow,
    })
}

/// Reads at an offset that is mostly `usual`, a constant.
#[inline(always)]
fn transport_header<T: Copy>(ctx: &TcContext, offset: usize, usual: usize) -> Result<T, DropReason> {
    if offset == usual { at(ctx, usual).copied() } else { load(ctx, offset) }
}

/// A header at a constant offset, in place.
#[inline(always)]
pub(crate) fn at<T: Copy>(ctx: &TcContext, offset: usize) -> Result<&T, DropReason> {
    let start = ctx.data() + offset;
    if start + size_of::<T>() > ctx.data_end() {
        return Err(DropReason::Malformed);
    }
    // SAFETY: the bytes lie within the packet (checked above, and again by the verifier), which nothing
    // changes while the program runs; the header types hold integers and byte arrays only. IP headers
    // follow 14 bytes of Ethernet and are aligned for these types wherever the kernel needs it
    // (`NET_IP_ALIGN`); elsewhere a BPF load needs no alignment.
    Ok(unsafe { &*(start as *const T) })
}

/// A copy of a header at any offset.
#[inline(always)]
pub(crate) fn load<T: Copy>(ctx: &TcContext, offset: usize) -> Result<T, DropReason> {
    ctx.load(offset).map_err(|_| DropReason::Malformed)
}
