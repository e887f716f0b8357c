//! The ends of a packet on the fast path: where it comes from, and whether an attachment can receive it.

use aya_ebpf::programs::TcContext;
use netattach_common::{AttachmentRecord, Decline, Mac, attachment::flag};

use crate::path::{frame, maps};

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
