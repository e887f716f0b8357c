//! The table of programs: name, hook and slot of each.

use netattach_common::Side;

use super::map_table::map_name;
use super::sys::Direction;

/// A program of the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Attached to devices that are one attachment's.
    At(Side),
    /// For parents of macvlans: what their pods send, what they receive. Attached by filters, and where
    /// [`Program::Entry`] goes on by a tail call.
    OnParent(Side),
    /// Attached to parents by tcx links.
    Entry(Entry),
    /// Attached to uplinks of the node: what comes in by them.
    Wire,
    /// Where the programs of devices in pods go on by a tail call; attached there by filters.
    InPod(Side),
    /// Run by the drivers of uplinks (XDP).
    Early,
    /// Run by a rule of the node's packet filter, behind its translation of addresses.
    Routed,
    /// Where [`Side::FromPod`]'s and [`Program::Wire`] go on by a tail call.
    Fast,
}

impl Program {
    /// Those that others go on in come first.
    pub const ALL: [Self; 13] = [
        Self::Fast,
        Self::Wire,
        Self::Early,
        Self::Routed,
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

    /// Its name in the object, in the kernel and as a pin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::At(Side::FromPod) => "na_from_pod",
            Self::At(Side::ToPod) => "na_to_pod",
            Self::OnParent(Side::FromPod) => "na_par_from",
            Self::OnParent(Side::ToPod) => "na_par_to",
            Self::Entry(Entry::InFrom) => "na_par_in_from",
            Self::Entry(Entry::InTo) => "na_par_in_to",
            Self::Entry(Entry::Out) => "na_par_out",
            Self::Wire => "na_wire",
            Self::InPod(Side::FromPod) => "na_pod_from",
            Self::InPod(Side::ToPod) => "na_pod_to",
            Self::Early => "na_xdp",
            Self::Routed => "na_routed",
            Self::Fast => "na_fast",
        }
    }

    /// The hook of its device that its links are on.
    pub(super) const fn direction(self) -> Direction {
        match self {
            // What a pod sends comes in by the node's end, and leaves by its own.
            Self::At(Side::FromPod) | Self::InPod(Side::ToPod) => Direction::Ingress,
            Self::At(Side::ToPod) | Self::InPod(Side::FromPod) => Direction::Egress,
            Self::Entry(Entry::InFrom | Entry::InTo) => Direction::Ingress,
            Self::Entry(Entry::Out) => Direction::Egress,
            Self::OnParent(_) | Self::Wire | Self::Early | Self::Routed | Self::Fast => Direction::Ingress,
        }
    }

    /// Its map of programs and its slot there, if others go on in it.
    pub(super) const fn slot(self) -> Option<(&'static str, u32)> {
        match self {
            Self::Fast => Some((map_name::PROGRAM, 0)),
            Self::InPod(Side::FromPod) => Some((map_name::IN_POD, 0)),
            Self::InPod(Side::ToPod) => Some((map_name::IN_POD, 1)),
            Self::OnParent(Side::FromPod) => Some((map_name::ON_PARENT, 0)),
            Self::OnParent(Side::ToPod) => Some((map_name::ON_PARENT, 1)),
            Self::At(_) | Self::Entry(_) | Self::Wire | Self::Early | Self::Routed => None,
        }
    }
}

/// A place of a parent's link, and the program that it runs: it says where it is, which a link cannot, and goes on in
/// [`Program::OnParent`].
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
    /// In the order in which a packet meets them.
    pub const ALL: [Self; 3] = [Self::InFrom, Self::InTo, Self::Out];
}
