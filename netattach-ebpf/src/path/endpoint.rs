//! The ends of a packet on the fast path: where it comes from, whether an attachment can receive it, and how it gets there.

use aya_ebpf::{
    helpers::generated::{bpf_redirect_peer, bpf_skb_change_type},
    programs::TcContext,
};
use netattach_common::{AttachmentRecord, Decline, FastPort, Mac, attachment::flag, parse::ETHERNET_LEN};

use crate::path::{
    frame::{self, PACKET_HOST},
    maps,
};

/// Stands for the receiver when the packet is on its way to an uplink. No attachment has this number.
pub(crate) const TO_UPLINK: u32 = 0;

/// Where a packet comes from.
#[derive(Clone, Copy)]
pub(crate) struct Origin {
    /// The attachment that sent it, 0 when it came in by an uplink.
    pub(crate) sender: u32,
    /// The segment it may reach: a bridge, or the node's routed links.
    pub(crate) segment: u32,
    /// The ingress device for the node's routing.
    pub(crate) ingress: u32,
    /// MTU of its sender's link, in bytes.
    pub(crate) mtu: u32,
}

impl Origin {
    #[inline(always)]
    pub(crate) fn of(ctx: &TcContext, sender: u32) -> Option<Self> {
        let ingress = frame::ifindex(ctx);
        let (segment, mtu) = if sender == 0 {
            maps::uplink(ingress).map(|uplink| (uplink.segment, uplink.mtu))?
        } else {
            maps::fast_port(sender).map(|port| (port.bridge, port.mtu))?
        };
        Some(Self { sender, segment, ingress, mtu })
    }
}

/// Whether an attachment is in force, has that address and a device of its own: the agent takes a device out of one
/// record before it puts it into another.
#[inline(always)]
pub(crate) fn ready(attachment: u32, mac: &Mac) -> Result<(), Decline> {
    let record = maps::record(attachment).ok_or(Decline::Unready)?;
    if record.has(flag::PRESENT) && record.mac.same(mac) { in_force(record) } else { Err(Decline::Unready) }
}

/// Whether an attachment that is there is in force and has a device of its own.
#[inline(always)]
pub(crate) fn in_force(record: &AttachmentRecord) -> Result<(), Decline> {
    if record.has(flag::PENDING) || record.host_ifindex == 0 { Err(Decline::Unready) } else { Ok(()) }
}

/// Whether a frame fits the link of its receiver.
#[inline(always)]
pub(crate) fn fits(ctx: &TcContext, port: &FastPort) -> bool {
    // As the bridge measures it: a packet that is still to be cut into segments fits. That is asked last, as it is written
    // far from the rest.
    // SAFETY: the context pointer is valid while the program runs.
    ctx.len() <= port.mtu + ETHERNET_LEN as u32 || unsafe { (*ctx.skb.skb).gso_size } != 0
}

/// Puts a packet into the interface of the pod behind a device. Returns the verdict that does it.
#[inline(always)]
pub(crate) fn put_into(ctx: &TcContext, device: u32) -> i32 {
    // SAFETY: the context pointer is valid while the program runs.
    unsafe {
        if (*ctx.skb.skb).pkt_type != PACKET_HOST {
            // The packet is addressed to the pod, not to the device that received it: the pod's stack would not accept
            // it where the kernel does not do this itself. It cannot fail for a unicast packet.
            bpf_skb_change_type(ctx.skb.skb, PACKET_HOST);
        }
        bpf_redirect_peer(device, 0) as i32
    }
}
