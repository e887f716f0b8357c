//! The fast path from one pod of a node to another, and between pods and the wire: which attachments may use it, and
//! why packets could not.

use crate::address::Mac;
use crate::stats::Traffic;

/// Value of map `na_fast_port`: an attachment's state on the fast path. All zero: the attachment is not on the fast
/// path, and the pod's traffic goes through the node's network stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FastPort {
    /// Index of the bridge that the node's end is a port of, [`FastPort::ROUTED`] for a routed link, 0 for none.
    /// Frames stay within one bridge, and packets among the routed links.
    pub bridge: u32,
    /// MTU of the node's end, in bytes: longer packets are left to the stack, which can answer them.
    pub mtu: u32,
}

impl FastPort {
    /// No bridge has this index.
    pub const ROUTED: u32 = u32::MAX;
}

/// Key of map `na_fast_mac`: an Ethernet address on a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct StationKey {
    /// Index of the bridge.
    pub bridge: u32,
    /// The address.
    pub mac: Mac,
    /// Zero.
    pub pad: [u8; 2],
}

impl StationKey {
    /// Stored instead of an attachment id for a bridge's own address: the node routes frames to it.
    pub const GATEWAY: u32 = 0;

    /// The key of an address on a bridge.
    #[inline(always)]
    pub const fn new(bridge: u32, mac: Mac) -> Self {
        Self { bridge, mac, pad: [0; 2] }
    }
}

macro_rules! declines {
    ($($(#[$doc:meta])* $number:literal $variant:ident $name:literal,)+) => {
        /// Why a packet that an attachment on the fast path sent, or that came for it by an uplink, went through the
        /// stack. The number is the index into [`FastStats::declined`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Decline {
            $($(#[$doc])* $variant = $number,)+
        }

        impl Decline {
            /// Every reason, by number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The reason's short name: kebab case, stable, used in JSON.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

declines! {
    /// Not a unicast IP packet without a VLAN tag, or neighbour discovery: the bridge must see these.
    0 Control "control",
    /// The destination is not an attachment on the fast path of the same bridge: the gateway, another node, or a pod
    /// that opted out.
    1 Elsewhere "elsewhere",
    /// The destination's policy is not loaded yet, or its device is being removed.
    2 Unready "unready",
    /// Longer than the MTU of the destination's link.
    3 TooBig "too-big",
    /// No agent has checked the node's configuration for too long.
    4 Unwatched "unwatched",
    /// The program of the fast path is not loaded.
    5 NoProgram "no-program",
    /// A routed packet whose hop limit runs out, or with options for routers.
    6 HopLimit "hop-limit",
    /// The node would not forward it: it has no route, does not forward, is the destination itself, or has not resolved
    /// the pod's address yet.
    7 Unroutable "unroutable",
    /// From the wire: the packet is passed to the bridge so that it does not forget the sender's port.
    8 Learning "learning",
    /// From the wire: an answer would not leave by the same device, or the source is not a host's address.
    9 Source "source",
    /// A routed packet whose ports, by which the node may route, cannot be read: a fragment, or one with extension
    /// headers.
    10 NoPorts "no-ports",
}

impl Decline {
    /// How many numbers are reserved: the length of [`FastStats::declined`].
    pub const SLOTS: usize = 16;
}

/// Value of map `na_fast_stat`: counters of one attachment, one copy per CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FastStats {
    /// Received by the fast path. Part of [`Stats::to_pod`](crate::Stats::to_pod).
    pub received: Traffic,
    /// Sent directly to an uplink. Part of [`Stats::from_pod`](crate::Stats::from_pod).
    pub sent: Traffic,
    /// Left to the stack, by [`Decline`] number: sent, or received for it by an uplink.
    pub declined: [u64; Decline::SLOTS],
}

const _: () = {
    assert!(size_of::<FastPort>() == 8);
    assert!(size_of::<StationKey>() == 12);
    assert!(size_of::<FastStats>() == 160);
    // A mask keeps an index in range.
    assert!(Decline::SLOTS.is_power_of_two());
};

impl FastStats {
    /// Adds another CPU's counters.
    pub fn add(&mut self, other: &Self) {
        for (total, part) in [(&mut self.received, &other.received), (&mut self.sent, &other.sent)] {
            total.packets = total.packets.wrapping_add(part.packets);
            total.bytes = total.bytes.wrapping_add(part.bytes);
        }
        for (total, part) in self.declined.iter_mut().zip(other.declined) {
            *total = total.wrapping_add(part);
        }
    }

    /// The reasons for which packets went through the stack, with their counts.
    pub fn declined(&self) -> impl Iterator<Item = (Decline, u64)> + '_ {
        let counted = |reason: &Decline| (*reason, self.declined[*reason as usize]);
        Decline::ALL.iter().map(counted).filter(|(_, packets)| *packets > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_numbered_from_zero_and_fit_the_counters() {
        let numbers: Vec<usize> = Decline::ALL.iter().map(|reason| *reason as usize).collect();
        assert_eq!(numbers, (0..Decline::ALL.len()).collect::<Vec<_>>());
        assert!(Decline::ALL.len() <= Decline::SLOTS);
    }

    /// The page explains the reasons that `LEFT-TO-STACK` shows.
    #[test]
    fn every_reason_is_in_the_page_and_no_other() {
        let page = include_str!("../../docs/configuration.md");
        let (_, table) = page.split_once("\n| reason | packets |\n|---|---|\n").unwrap();
        let rows = table.lines().map_while(|line| line.strip_prefix("| ")?.split_once(" | "));
        let mut found: Vec<&str> =
            rows.flat_map(|(reasons, _)| reasons.split('`').skip(1).step_by(2)).collect();
        let mut names: Vec<&str> = Decline::ALL.iter().map(|reason| reason.name()).collect();
        found.sort_unstable();
        names.sort_unstable();
        assert_eq!(found, names);
    }

    #[test]
    fn adding_sums_every_field() {
        let one = FastStats {
            received: Traffic { packets: 1, bytes: 2 },
            sent: Traffic { packets: 3, bytes: 4 },
            declined: core::array::from_fn(|slot| slot as u64 + 5),
        };
        let mut two = one;
        two.add(&one);
        let expected = FastStats {
            received: Traffic { packets: 2, bytes: 4 },
            sent: Traffic { packets: 6, bytes: 8 },
            declined: core::array::from_fn(|slot| 2 * (slot as u64 + 5)),
        };
        assert_eq!(two, expected);
    }
}
