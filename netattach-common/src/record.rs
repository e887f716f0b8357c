//! The programs' records of single packets, passed through a ring buffer.

use crate::address::{Ip6, Port};

/// One entry of `na_record`: a packet that opened a flow, or one that was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Record {
    /// When: nanoseconds of the kernel's monotonic clock, as of its last tick.
    pub time: u64,
    /// Attachment id; 0 for a device without an attachment.
    pub attachment: u32,
    /// Index of the device.
    pub ifindex: u32,
    /// The attachment's policy for ingress when it happened, 0 when it was not isolated.
    pub ingress: u32,
    /// The same for egress.
    pub egress: u32,
    /// The rule that allowed, of the policy for the leg in `responder`; 0 when none did.
    pub rule: u32,
    /// Length of the frame in bytes.
    pub length: u32,
    /// Source address, IPv4 as an IPv4-mapped one; unspecified when the packet was not read that far.
    pub source: Ip6,
    /// Destination address, likewise.
    pub destination: Ip6,
    /// Source port, 0 for protocols without.
    pub source_port: Port,
    /// Destination port, 0 for protocols without.
    pub destination_port: Port,
    /// Ethertype behind the tags, host order; 0 when the frame was not read that far.
    pub ethertype: u16,
    /// VLAN id of the outer tag, 0 without one.
    pub vlan: u16,
    /// [`DropReason`](crate::DropReason) number; 0: the packet opened a flow.
    pub reason: u8,
    /// 0: sent by the pod; 1: on its way to the pod.
    pub to_pod: u8,
    /// IP protocol number.
    pub protocol: u8,
    /// TCP flags (RFC 9293, 3.1), or the equivalent of an SCTP chunk.
    pub flags: u8,
    /// 1: addresses and protocol are known.
    pub parsed: u8,
    /// 1: the flow was opened by the peer, and the pod's ingress policy allowed it.
    pub responder: u8,
    /// Zero.
    pub pad: [u8; 2],
}

const _: () = {
    assert!(size_of::<Record>() == 80);
    assert!(core::mem::offset_of!(Record, source) == 32);
    assert!(core::mem::offset_of!(Record, ethertype) == 68);
    assert!(core::mem::offset_of!(Record, reason) == 72);
};
