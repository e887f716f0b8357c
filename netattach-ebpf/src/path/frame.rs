//! The link layer: reading bytes, Ethernet, VLAN tags.
//!
//! Headers at their usual place are read directly, after [`pull`] has made sure that they do not lie in a paged buffer;
//! all others by `bpf_skb_load_bytes`. Unreadable headers are [`DropReason::Malformed`].

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    AttachmentRecord, DropReason, Mac, Side,
    attachment::flag,
    flow::Lane,
    parse::{
        self, Bytes, ETHERNET_LEN, EthernetHeader, Payload, Plain, ethertype,
        frame::{is_named, is_tag},
        header::{self, Ipv4Header, Ipv6Header},
    },
};

use crate::path::{
    maps,
    scope::Scope,
    subprograms::{NULL_ARGUMENT, exclusive, reference},
    verdict::{Denied, Encode},
};

/// `linux/if_packet.h`: addressed to the host.
pub(crate) const PACKET_HOST: u32 = 0;

/// A kernel packet, for reading.
pub(crate) struct Skb(TcContext);

impl Skb {
    #[inline(always)]
    pub(crate) fn new(skb: *mut __sk_buff) -> Self {
        Self(TcContext::new(skb))
    }

    #[inline(always)]
    pub(crate) fn of(ctx: &TcContext) -> Self {
        Self::new(ctx.skb.skb)
    }

    #[inline(always)]
    pub(crate) fn raw(&self) -> *mut __sk_buff {
        self.0.skb.skb
    }

    /// Checks that the first `end` bytes are in the packet's own memory. Bytes in pages may still be in memory of the
    /// sender that passed them to the kernel without a copy (a ring of `packet(7)`, a virtual machine's memory), and
    /// the sender could change them after the verdict.
    #[inline(always)]
    pub(crate) fn check_settled(&self, end: u32) -> Result<(), DropReason> {
        if self.0.data() + end as usize > self.0.data_end() { Err(DropReason::Malformed) } else { Ok(()) }
    }
}

impl Bytes for Skb {
    type At<'a, T: Plain + 'a> = &'a T;

    #[inline(always)]
    fn length(&self) -> u32 {
        self.0.len()
    }

    #[inline(always)]
    fn is_uncut(&self) -> bool {
        // SAFETY: the context pointer is valid while the program runs.
        unsafe { (*self.0.skb.skb).gso_size != 0 }
    }

    #[inline(always)]
    fn tag_beside(&self) -> (bool, u16) {
        // SAFETY: as above.
        unsafe { ((*self.0.skb.skb).vlan_present != 0, (*self.0.skb.skb).vlan_tci as u16) }
    }

    #[inline(always)]
    fn at<T: Plain>(&self, offset: usize) -> Result<&T, DropReason> {
        at(&self.0, offset)
    }

    #[inline(always)]
    fn load<T: Plain>(&self, offset: usize) -> Result<T, DropReason> {
        load(&self.0, offset)
    }
}

/// The parts of a frame that the programs need.
pub(crate) struct Frame {
    /// Whether its source is the attachment's address.
    pub(crate) is_own: bool,
    /// Whether it has tags, so that its payload does not begin at the usual place.
    pub(crate) tagged: bool,
    /// The payload.
    pub(crate) payload: Payload,
}

/// Index of the device, in the device's namespace.
#[inline(always)]
pub(crate) fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).ifindex }
}

/// Whether the kernel considers the packet IPv6. It may not for a tagged frame, whose headers are read elsewhere.
#[inline(always)]
pub(crate) fn says_ipv6(ctx: &TcContext) -> bool {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).protocol == u32::from(ethertype::IPV6.to_be()) }
}

/// The protocol by which the kernel dispatches the packet, in host order. If the kernel has moved a tag out of the
/// frame, this is the protocol behind the tag, as the frame's header has it then.
#[inline(always)]
pub(crate) fn protocol(ctx: &TcContext) -> u16 {
    // SAFETY: the context pointer is valid while the program runs. The field holds 16 bits in network order.
    u16::from_be(unsafe { (*ctx.skb.skb).protocol } as u16)
}

/// Makes the headers of a packet readable in place, including those not at their usual offset: all judged bytes have
/// to be [settled](Skb::check_settled). Also for packets to a pod: the device of the sender may run no program.
#[inline(always)]
pub(crate) fn pull_headers(ctx: &TcContext) -> Result<(), Denied> {
    let usual = if says_ipv6(ctx) { header::HEADERS_V6 } else { header::HEADERS_V4 };
    pull(ctx, usual)?;
    if has_pages(ctx) { Encode::decode(pull_others(ctx.skb.skb)) } else { Ok(()) }
}

/// The same where some bytes are left in pages. Out of line: `na_judge` would need more stack.
#[inline(never)]
fn pull_others(skb: *mut __sk_buff) -> u32 {
    let ctx = TcContext::new(skb);
    let pulled = if has_usual_headers(&ctx) { Ok(()) } else { pull(&ctx, header::HEADERS_MOST) };
    pulled.map_err(Denied::from).encode()
}

/// Makes the first `headers` bytes readable in place. A packet shorter than that stays as it is.
#[inline(always)]
pub(crate) fn pull(ctx: &TcContext, headers: usize) -> Result<(), DropReason> {
    if ctx.data() + headers > ctx.data_end() && has_pages(ctx) {
        return ctx.pull_data(ctx.len().min(headers as u32)).map_err(|_| DropReason::Malformed);
    }
    Ok(())
}

/// Whether some of a packet's bytes cannot be read in place.
#[inline(always)]
fn has_pages(ctx: &TcContext) -> bool {
    ctx.data_end() < ctx.data() + ctx.len() as usize
}

/// Whether all bytes that are read of a packet lie at the usual offsets of headers: no extra header before the
/// transport header, and no message behind it. This is so for a pod's own TCP, whose packets must not be copied.
#[inline(always)]
fn has_usual_headers(ctx: &TcContext) -> bool {
    let Ok(ethernet) = at::<EthernetHeader>(ctx, 0) else { return false };
    match u16::from_be(ethernet.ethertype) {
        ethertype::IPV4 => network::<Ipv4Header>(ctx).is_ok_and(Ipv4Header::is_usual),
        ethertype::IPV6 => says_ipv6(ctx) && network::<Ipv6Header>(ctx).is_ok_and(Ipv6Header::is_usual),
        _ => false,
    }
}

/// Destination address, in place.
#[inline(always)]
pub(crate) fn destination(ctx: &TcContext) -> Result<&Mac, DropReason> {
    at(ctx, 0)
}

/// The header behind Ethernet, in place.
#[inline(always)]
pub(crate) fn network<T: Plain>(ctx: &TcContext) -> Result<&T, DropReason> {
    at(ctx, ETHERNET_LEN)
}

/// Destination and source address of a frame.
#[inline(always)]
pub(crate) fn addresses(ctx: &TcContext) -> Result<(Mac, Mac), DropReason> {
    let header: &EthernetHeader = at(ctx, 0)?;
    Ok((header.destination, header.source))
}

/// Reads the Ethernet header and the VLAN tags. Each tag must be one that the attachment may use.
#[inline(always)]
pub(crate) fn read(ctx: &TcContext, scope: &Scope, record: &AttachmentRecord) -> Result<Frame, Denied> {
    let header: &EthernetHeader = at(ctx, 0)?;
    let is_own = header.source.same(&record.mac);
    let ethertype = u16::from_be(header.ethertype);
    // Otherwise the packet would be judged as one protocol and handled as another.
    if scope.side == Side::FromPod && scope.has(flag::ONE_PROTOCOL) && !is_named(protocol(ctx), ethertype) {
        return Err(DropReason::Malformed.into());
    }
    // SAFETY: the context pointer is valid while the program runs.
    let beside = unsafe { (*ctx.skb.skb).vlan_present } != 0;
    let tagged = beside || is_tag(ethertype);
    let mut payload = Payload { ethertype, offset: ETHERNET_LEN as u16, lane: Lane::NONE };
    if tagged {
        let peeled: Result<(), Denied> = Encode::decode(na_tags(ctx.skb.skb, scope, &mut payload));
        peeled?;
    }
    Ok(Frame { is_own, tagged, payload })
}

/// Whether the node's packet filter sees a packet, or has seen it.
#[inline(always)]
pub(crate) fn passes_the_node(ctx: &TcContext, scope: &Scope, destination: &Mac) -> bool {
    let gate = maps::gate(scope.id);
    match scope.side {
        Side::FromPod => gate.leads(destination),
        Side::ToPod => gate.has_been_passed(is_from_the_stack(ctx), says_ipv6(ctx)),
    }
}

/// Whether a packet at the node's end of a link comes from the node's stack: the kernel's frames from another port of a
/// bridge are addressed to another host. Where br_netfilter passes bridged packets to the packet filter, it turns their
/// type into this one (`br_nf_post_routing`): `na_forwarded` has judged them, if the pod's address leads to it.
#[inline(always)]
fn is_from_the_stack(ctx: &TcContext) -> bool {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).pkt_type == PACKET_HOST }
}

/// Whether a packet is the node's own: it has come in by no device. Asked where the node receives no frames for its
/// routing, so that it masquerades none to the pod either, and the packet filter judges no packet that a bridge forwards.
#[inline(always)]
fn is_local(ctx: &TcContext) -> bool {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).ingress_ifindex == 0 }
}

/// Notes in the scope whether a frame goes to the node's own stack, or comes from it, as far as its place shows that.
/// Only a packet that asks a policy needs it.
#[inline(always)]
pub(crate) fn note_node(ctx: &TcContext, scope: &mut Scope) {
    let is_at_the_node = na_at_node(ctx.skb.skb, scope);
    scope.note_node(is_at_the_node);
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_at_node(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    reference(scope).is_some_and(|scope| is_at_the_node(&TcContext::new(skb), scope)).into()
}

#[inline(always)]
fn is_at_the_node(ctx: &TcContext, scope: &Scope) -> bool {
    if scope.side == Side::ToPod && scope.is_beside_the_stack() {
        return is_from_the_stack(ctx) && (maps::gate(scope.id).is_known() || is_local(ctx));
    }
    let Ok(header) = at::<EthernetHeader>(ctx, 0) else { return false };
    match scope.side {
        Side::FromPod => maps::gate(scope.id).is_at(&header.destination),
        Side::ToPod => scope.is_beside_the_node() && maps::gate(scope.id).is_at(&header.source),
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_tags(skb: *mut __sk_buff, scope: *const Scope, payload: *mut Payload) -> u32 {
    let answer = match (reference(scope), exclusive(payload)) {
        (Some(scope), Some(payload)) => peel(&Skb::new(skb), scope, payload).map_err(Denied::from),
        _ => Err(NULL_ARGUMENT),
    };
    answer.encode()
}

/// Strips the VLAN tags.
#[inline(always)]
fn peel(skb: &Skb, scope: &Scope, payload: &mut Payload) -> Result<(), DropReason> {
    parse::frame::peel(skb, payload, |id| scope.has(flag::VLANS) && maps::may_use_vlan(scope.id, id))
}

/// A header at a constant offset, in place.
#[inline(always)]
pub(crate) fn at<T: Plain>(ctx: &TcContext, offset: usize) -> Result<&T, DropReason> {
    let start = ctx.data() + offset;
    if start + size_of::<T>() > ctx.data_end() {
        return Err(DropReason::Malformed);
    }
    // SAFETY: the bytes lie within the packet (checked above, and again by the verifier), which nothing
    // changes while the program runs, and can stand for the type (`Plain`). IP headers
    // follow 14 bytes of Ethernet and are aligned for these types wherever the kernel needs it
    // (`NET_IP_ALIGN`); elsewhere a BPF load needs no alignment.
    Ok(unsafe { &*(start as *const T) })
}

/// A copy of a header at any offset.
#[inline(always)]
pub(crate) fn load<T: Plain>(ctx: &TcContext, offset: usize) -> Result<T, DropReason> {
    ctx.load(offset).map_err(|_| DropReason::Malformed)
}
