//! The link layer: reading bytes, Ethernet, VLAN tags.
//!
//! Headers at their usual place are read directly, after [`pull`] has made sure that they do not lie in a
//! paged buffer; all others by `bpf_skb_load_bytes`. Whatever cannot be read is [`DropReason::Malformed`].

use aya_ebpf::programs::TcContext;
use netattach_common::{
    AttachmentRecord, DropReason, Hook, Mac,
    attachment::flag,
    flow::{self, Lane},
};

use crate::{classifier::Scope, fast::PACKET_HOST, maps, stages, verdict::Denied};

/// Length of an Ethernet header without tags.
pub(crate) const ETHERNET_LEN: usize = 14;
/// Length of a VLAN tag.
const TAG_LEN: usize = 4;

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

/// An Ethernet header (IEEE 802.3) without tags.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EthernetHeader {
    pub(crate) destination: Mac,
    pub(crate) source: Mac,
    pub(crate) ethertype: u16,
}

/// A VLAN tag (IEEE 802.1Q) behind its ethertype, and the ethertype of what follows.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tag {
    control: u16,
    ethertype: u16,
}

/// What the programs need to know about a frame.
pub(crate) struct Frame {
    /// Whether it says that it comes from the attachment's address.
    pub(crate) is_own: bool,
    /// Whether it goes to the node's routing or comes from there, and its packet is judged there.
    pub(crate) is_for_the_node: bool,
    /// Whether it has tags, so that what it carries does not begin at the usual place.
    pub(crate) tagged: bool,
    /// What it carries.
    pub(crate) payload: Payload,
}

/// What a frame carries, behind its tags. Without padding, as stages want their arguments.
#[repr(C)]
pub(crate) struct Payload {
    /// What it is.
    pub(crate) ethertype: u16,
    /// Where it begins, as an offset in the frame.
    pub(crate) offset: u16,
    /// The VLAN tags as they stand in keys; no protocol yet.
    pub(crate) lane: Lane,
}

const _: () = assert!(size_of::<Payload>() == 8);

/// Index of the device, in the namespace of the device.
#[inline(always)]
pub(crate) fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).ifindex }
}

/// Whether the kernel takes the packet for IPv6. Of a tagged frame it may not say so: its headers are read elsewhere.
#[inline(always)]
pub(crate) fn says_ipv6(ctx: &TcContext) -> bool {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe { (*ctx.skb.skb).protocol == u32::from(ethertype::IPV6.to_be()) }
}

/// Makes the first `headers` bytes readable in place. A packet shorter than that stays as it is.
#[inline(always)]
pub(crate) fn pull(ctx: &TcContext, headers: usize) {
    if ctx.data() + headers > ctx.data_end() && ctx.data_end() < ctx.data() + ctx.len() as usize {
        // On failure the reads below fail, and the packet counts as malformed.
        let _ = ctx.pull_data(ctx.len().min(headers as u32));
    }
}

/// Destination address, in place.
#[inline(always)]
pub(crate) fn destination(ctx: &TcContext) -> Result<&Mac, DropReason> {
    at(ctx, 0)
}

/// The header behind Ethernet, in place.
#[inline(always)]
pub(crate) fn network<T: Copy>(ctx: &TcContext) -> Result<&T, DropReason> {
    at(ctx, ETHERNET_LEN)
}

/// Where a frame goes, and where it says it comes from.
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
    let is_for_the_node = scope.leaves_to_the_node() && passes_the_node(ctx, scope, &header.destination);
    let ethertype = u16::from_be(header.ethertype);
    // SAFETY: the context pointer is valid while the program runs.
    let beside = unsafe { (*ctx.skb.skb).vlan_present } != 0;
    let tagged = beside || is_tag(ethertype);
    let mut payload = Payload { ethertype, offset: ETHERNET_LEN as u16, lane: Lane::NONE };
    if tagged {
        stages::peel(ctx, scope, &mut payload)?;
    }
    Ok(Frame { is_own, is_for_the_node, tagged, payload })
}

/// Whether the node's packet filter sees a packet, or has seen it.
#[inline(always)]
fn passes_the_node(ctx: &TcContext, scope: &Scope, destination: &Mac) -> bool {
    let gate = maps::gate(scope.id);
    match scope.hook {
        Hook::FromPod => gate.leads(destination),
        Hook::ToPod => {
            // SAFETY: the context pointer is valid while the program runs.
            let routed = unsafe { (*ctx.skb.skb).pkt_type } == PACKET_HOST;
            gate.has_been_passed(routed, says_ipv6(ctx))
        }
    }
}

/// Walks over at most two tags. At ingress the kernel has moved the outer one into the context; at egress it may be
/// in either place. The body of a stage.
#[inline(always)]
pub(crate) fn peel(ctx: &TcContext, scope: &Scope, payload: &mut Payload) -> Result<(), DropReason> {
    let (mut ethertype, mut offset) = (payload.ethertype, ETHERNET_LEN);
    let mut ids = [0u16; 2];
    let mut found = 0usize;
    // SAFETY: the context pointer is valid while the program runs.
    let (present, beside) = unsafe { ((*ctx.skb.skb).vlan_present, (*ctx.skb.skb).vlan_tci) };
    if present != 0 {
        ids[0] = allowed(scope, beside as u16)?;
        found = 1;
    }
    if is_tag(ethertype) {
        let tag: Tag = load(ctx, offset)?;
        let id = allowed(scope, u16::from_be(tag.control))?;
        if found == 0 {
            ids[0] = id
        } else {
            ids[1] = id
        }
        found += 1;
        ethertype = u16::from_be(tag.ethertype);
        offset += TAG_LEN;
    }
    if is_tag(ethertype) && found == 1 {
        let tag: Tag = load(ctx, offset)?;
        ids[1] = allowed(scope, u16::from_be(tag.control))?;
        ethertype = u16::from_be(tag.ethertype);
        offset += TAG_LEN;
    }
    if is_tag(ethertype) {
        return Err(DropReason::VlanTagged);
    }
    payload.ethertype = ethertype;
    payload.offset = offset as u16;
    payload.lane = Lane::new(0, flow::tags(ids[0], ids[1]));
    Ok(())
}

/// The VLAN id of a tag's control information (priority bits left out), when the attachment may use it.
#[inline(always)]
fn allowed(scope: &Scope, control: u16) -> Result<u16, DropReason> {
    let id = control & 0xfff;
    if scope.has(flag::VLANS) && maps::may_use_vlan(scope.id, id) {
        Ok(id)
    } else {
        Err(DropReason::VlanTagged)
    }
}

#[inline(always)]
fn is_tag(number: u16) -> bool {
    matches!(number, ethertype::VLAN | ethertype::QINQ | ethertype::OLD_QINQ)
}

/// Reads a header that mostly lies at `usual`, a constant. `plain` says whether it does: the verifier would follow
/// each offset that is compared on its own.
#[inline(always)]
pub(crate) fn header<T: Copy>(
    ctx: &TcContext,
    plain: bool,
    usual: usize,
    offset: usize,
) -> Result<T, DropReason> {
    if plain { at(ctx, usual).copied() } else { load(ctx, offset) }
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
