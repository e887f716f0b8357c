//! The table of programs: name, hook and slot of each.

use netattach_common::Side;

use super::map_table::map_name;
use crate::spec::TcHook;

/// A program of the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Attached to the host-side device of an attachment.
    At(Side),
    /// For parents of macvlans: frames from pods, frames to pods. Attached by filters, and tail-called by
    /// [`Program::Entry`].
    OnParent(Side),
    /// Attached to parents by tcx links.
    Entry(Entry),
    /// Attached to ingress of uplinks of the node.
    Uplink,
    /// Tail-called by the programs of devices in pods; in mode clsact attached there by filters.
    InPod(Side),
    /// Run by the drivers of uplinks (XDP).
    Xdp,
    /// Run by rules of the node's packet filter, after it has translated addresses, on packets to the node itself and
    /// from it.
    Routed,
    /// The same on packets that the node forwards.
    Forwarded,
    /// Tail-called by [`Program::At`] of [`Side::FromPod`] and by [`Program::Uplink`].
    Fast,
}

impl Program {
    /// Programs that others tail-call come first.
    pub const ALL: [Self; 14] = [
        Self::Fast,
        Self::Uplink,
        Self::Xdp,
        Self::Routed,
        Self::Forwarded,
        Self::At(Side::FromPod),
        Self::At(Side::ToPod),
        Self::OnParent(Side::FromPod),
        Self::OnParent(Side::ToPod),
        Self::Entry(Entry::InFrom),
        Self::Entry(Entry::InTo),
        Self::Entry(Entry::Out),
        Self::InPod(Side::FromPod),
        Self::InPod(Side::ToPod),
    ];

    /// The programs on the node's ends of links.
    pub const ON_NODE_ENDS: [Self; 2] = [Self::At(Side::FromPod), Self::At(Side::ToPod)];

    /// Name in the object, in the kernel and of the pin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::At(Side::FromPod) => "na_from_pod",
            Self::At(Side::ToPod) => "na_to_pod",
            Self::OnParent(Side::FromPod) => "na_par_from",
            Self::OnParent(Side::ToPod) => "na_par_to",
            Self::Entry(Entry::InFrom) => "na_par_in_from",
            Self::Entry(Entry::InTo) => "na_par_in_to",
            Self::Entry(Entry::Out) => "na_par_out",
            Self::Uplink => "na_wire",
            Self::InPod(Side::FromPod) => "na_pod_from",
            Self::InPod(Side::ToPod) => "na_pod_to",
            Self::Xdp => "na_xdp",
            Self::Routed => "na_routed",
            Self::Forwarded => "na_forwarded",
            Self::Fast => "na_fast",
        }
    }

    /// Whether a program on a device is one of netattach's, by its name in the kernel.
    pub fn is_one(name: &str) -> bool {
        Self::ALL.into_iter().any(|program| program.name() == name)
    }

    /// The hook of the device to which links are attached.
    pub(super) const fn tc_hook(self) -> TcHook {
        match self {
            // Packets from a pod come in by the node's end, and go out by the pod's end.
            Self::At(Side::FromPod) | Self::InPod(Side::ToPod) => TcHook::Ingress,
            Self::At(Side::ToPod) | Self::InPod(Side::FromPod) => TcHook::Egress,
            Self::Entry(Entry::InFrom | Entry::InTo) => TcHook::Ingress,
            Self::Entry(Entry::Out) => TcHook::Egress,
            Self::OnParent(_) | Self::Uplink | Self::Xdp | Self::Routed | Self::Forwarded | Self::Fast => {
                TcHook::Ingress
            }
        }
    }

    /// The program array and the slot by which others tail-call the program.
    pub(super) const fn slot(self) -> Option<(&'static str, u32)> {
        match self {
            Self::Fast => Some((map_name::PROGRAM, 0)),
            Self::InPod(Side::FromPod) => Some((map_name::IN_POD, 0)),
            Self::InPod(Side::ToPod) => Some((map_name::IN_POD, 1)),
            Self::OnParent(Side::FromPod) => Some((map_name::ON_PARENT, 0)),
            Self::OnParent(Side::ToPod) => Some((map_name::ON_PARENT, 1)),
            Self::At(_) | Self::Entry(_) | Self::Uplink | Self::Xdp | Self::Routed | Self::Forwarded => None,
        }
    }
}

/// A program of a tcx link on a parent. A filter tells its program the hook by a class; a link has no class.
/// So each hook has a program of its own, which tail-calls [`Program::OnParent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Ingress, for the sender.
    InFrom,
    /// Ingress, for the receiver.
    InTo,
    /// Egress, for the sender.
    Out,
}

impl Entry {
    /// In the order in which packets meet them.
    pub const ALL: [Self; 3] = [Self::InFrom, Self::InTo, Self::Out];
}
