//! Detects bytes that the kernel or a card writes into a packet after the verdict.
//!
//! A sender may leave the checksum of a packet to the device that transmits it (`CHECKSUM_PARTIAL`): two bytes are
//! written at an offset that the packet names. The kernel's own transports name the offset of their checksum. A
//! packet socket may name any offset (`PACKET_VNET_HDR` of packet(7)), and the value written there is under the
//! sender's control: it could replace an address, a port or a protocol after the verdict.

use core::mem::MaybeUninit;

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_probe_read_kernel, programs::TcContext};
use netattach_common::{
    DropReason,
    parse::{Kind, Packet, dhcp, header::TcpHeader},
    protocol::{GRE, ICMPV6, SCTP, TCP, UDP},
    unfinished::{CAST, WINDOW},
};

use crate::path::family::Family;

/// Offsets in the kernel's `struct sk_buff` of the fields that are read here, taken from the kernel's BTF
/// (`bpf::packet_fields` of the agent, which writes them before it loads the programs): the first byte; relative to
/// it the bit of `ip_summed`, and the bytes of `csum_start` and `mac_header`. The verifier skips code that is never
/// executed, so kernels that do not let programs read accept them too.
#[unsafe(no_mangle)]
static NA_SKB: [u16; 4] = [0; 4];

/// Whether the agent has replaced [`CAST`] by the kernel's function, with which single fields are read in place: 5 ns
/// instead of 25 for each packet.
#[unsafe(no_mangle)]
static NA_CAST: u8 = 0;

/// `linux/skbuff.h`, of two bits.
const CHECKSUM_PARTIAL: u8 = 3;
/// Nothing is written.
const NOWHERE: u32 = u32::MAX;

/// Refuses an IP packet of which a judged byte would be rewritten after the verdict, except the checksum of its own
/// transport header.
#[inline(always)]
pub(crate) fn check<A: Family>(ctx: &TcContext, packet: &Packet<A>) -> Result<(), DropReason> {
    let at = na_unfinished(ctx.skb.skb);
    let protocol = packet.tuple.lane.protocol();
    let is_own = packet.kind != Kind::LaterFragment && is_checksum(at, packet.transport() as u32, protocol);
    let judged = match protocol {
        // For neighbour discovery the whole message is judged.
        ICMPV6 => packet.end,
        // For DHCP all of the client's claims about itself.
        UDP if packet.is_udp_to(dhcp::SERVERS) => packet.transport + dhcp::READ,
        _ => packet.judged(),
    };
    if is_own || at >= judged { Ok(()) } else { Err(DropReason::Malformed) }
}

/// As [`check`], for another frame of which the first `judged` bytes are judged.
#[inline(always)]
pub(crate) fn check_frame(ctx: &TcContext, judged: u32) -> Result<(), DropReason> {
    if na_unfinished(ctx.skb.skb) >= judged { Ok(()) } else { Err(DropReason::Malformed) }
}

/// Whether no judged byte of a TCP or UDP packet is rewritten, except its checksum: for a packet that carries a
/// tunnel, the checksum of the inner packet is written. `transport`: offset of that header in the frame.
#[inline(always)]
pub(crate) fn is_plain(ctx: &TcContext, transport: u32, protocol: u8) -> bool {
    let at = na_unfinished(ctx.skb.skb);
    at >= transport + size_of::<TcpHeader>() as u32 || is_checksum(at, transport, protocol)
}

/// Whether that offset in the frame is that of the checksum in a transport header.
#[inline(always)]
fn is_checksum(at: u32, transport: u32, protocol: u8) -> bool {
    let within = match protocol {
        TCP => 16,
        UDP => 6,
        GRE => 4,
        ICMPV6 => 2,
        SCTP => 8,
        _ => return false,
    };
    at == transport + within
}

/// The offset in the frame at which bytes will be written. 0, a byte that is judged in every frame: the offset is
/// unknown.
#[unsafe(no_mangle)]
#[inline(never)]
fn na_unfinished(skb: *mut __sk_buff) -> u32 {
    // SAFETY: read as the agent wrote it; constants to the verifier.
    let [first, summed, start, mac] = unsafe { core::ptr::read_volatile(&raw const NA_SKB) };
    if first == 0 {
        return NOWHERE;
    }
    // Masked, so that they are within what is read; the agent has made sure that they are, and that numbers are in place.
    let [start, mac] = [start, mac].map(|at| usize::from(at) & (WINDOW - 2));
    let (byte, bit) = (usize::from(summed / 8) & (WINDOW - 1), summed % 8);
    // SAFETY: as above.
    if unsafe { core::ptr::read_volatile(&raw const NA_CAST) } != 0 {
        // SAFETY: the agent has put the kernel's function here, which takes the context and returns the packet. The
        // verifier knows the packet's type, and that fields lie where they are read.
        return unsafe {
            let cast: unsafe extern "C" fn(*mut __sk_buff) -> *const u8 = core::mem::transmute(CAST as usize);
            written(cast(skb).wrapping_add(first.into()), (byte, bit), start, mac)
        };
    }
    let mut fields = MaybeUninit::<[u64; WINDOW / 8]>::uninit();
    // SAFETY: the helper writes that many bytes. What it reads is the kernel's packet, which the context pointer of a classifier
    // points to; it checks the address itself, and fails.
    let failed = unsafe {
        let from = skb.cast::<u8>().wrapping_add(first.into());
        bpf_probe_read_kernel(fields.as_mut_ptr().cast(), WINDOW as u32, from.cast())
    };
    if failed != 0 {
        return 0;
    }
    // SAFETY: the helper has written all of it.
    unsafe { written(fields.as_ptr().cast(), (byte, bit), start, mac) }
}

/// The offset in the frame at which bytes will be written, from the fields behind `fields`: the byte of `ip_summed`
/// and its bit there, and the bytes of `csum_start` and `mac_header`.
///
/// # Safety
/// All of them can be read, the numbers in place.
#[inline(always)]
unsafe fn written(fields: *const u8, (byte, bit): (usize, u16), start: usize, mac: usize) -> u32 {
    // SAFETY: the caller's.
    let number = |at: usize| u32::from(unsafe { fields.wrapping_add(at).cast::<u16>().read() });
    // SAFETY: the caller's.
    if unsafe { fields.wrapping_add(byte).read() } >> bit & 3 != CHECKSUM_PARTIAL {
        return NOWHERE;
    }
    // Both from the beginning of the packet's memory.
    (number(start) + number(start + 2)).saturating_sub(number(mac))
}
