//! Devices that carry the macvlans of several pods: maps their frames to attachments.

use crate::address::Mac;

/// Key of `na_par`: an Ethernet address on a parent. The all-zero address, which no frame comes from, stands for the
/// parent itself; parent 0, which is not a device, for a pod's namespace ([`ParentKey::namespace`]); a marked parent
/// for a namespace and a VLAN on it ([`ParentKey::above`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct ParentKey {
    /// Index of the parent in the node's namespace.
    pub ifindex: u32,
    /// Address of a macvlan in a pod.
    pub mac: Mac,
    /// Zero, unless the key is a namespace's.
    pub pad: [u8; 2],
}

impl ParentKey {
    /// The mark of keys of VLANs. No index of a device has that bit.
    pub const ABOVE: u32 = 1 << 31;

    /// The key for packets that a namespace's sockets send by a VLAN of a device, where the packets were judged
    /// before they reached the device.
    #[inline(always)]
    pub const fn above(ifindex: u32, cookie: u64, vlan: u16) -> Self {
        let [a, b, c, d, e, f, g, h] = (cookie << 12 | vlan as u64 & 0xfff).to_ne_bytes();
        Self { ifindex: ifindex | Self::ABOVE, mac: Mac { octets: [a, b, c, d, e, f] }, pad: [g, h] }
    }

    /// The key of a namespace that has a macvlan attachment, on any parent.
    #[inline(always)]
    pub const fn namespace(cookie: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = cookie.to_ne_bytes();
        Self { ifindex: 0, mac: Mac { octets: [a, b, c, d, e, f] }, pad: [g, h] }
    }

    /// The key of a macvlan.
    #[inline(always)]
    pub const fn macvlan(ifindex: u32, mac: Mac) -> Self {
        Self { ifindex, mac, pad: [0; 2] }
    }

    /// The key of the parent itself.
    #[inline(always)]
    pub const fn itself(ifindex: u32) -> Self {
        Self::macvlan(ifindex, Mac { octets: [0; 6] })
    }
}

/// Value of `na_par`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct ParentEntry {
    /// Attachment id; 0 in the entries of parents themselves, of namespaces and of VLANs.
    pub attachment: u32,
    /// The bits of [`flag`].
    pub flags: u32,
    /// Cookie of the namespace whose sockets send from the address: the pod's, or the node's. The lookup compares
    /// this full value, because the keys of VLANs hold only 52 bits of it.
    pub netns_cookie: u64,
}

/// Bits of [`ParentEntry::flags`].
pub mod flag {
    /// The driver passes frames to siblings itself, through the parent's ingress. Without it every frame leaves through
    /// the parent's egress, and an incoming one with the macvlan's source address was reflected from outside.
    pub const SIBLINGS: u32 = 1;
    /// On the parent itself: frames from other namespaces and from addresses without an attachment pass.
    pub const STRANGERS: u32 = 1 << 1;
    /// On the parent itself: frames of this kernel arrive on it only between its macvlans. This is so with a network
    /// card; a veth has sockets of this kernel on its other end.
    pub const CARD: u32 = 1 << 3;
    /// On the parent itself: its queueing discipline was created by the agent, and is removed with the programs.
    pub const OWN_CLSACT: u32 = 1 << 2;
}

/// The hook where a program runs, passed by its filter or link (`tc_classid`). Any other number is the attachment in
/// whose macvlan's ingress it runs.
pub mod place {
    /// Egress of a parent.
    pub const EGRESS: u16 = 0;
    /// Ingress of a parent.
    pub const INGRESS: u16 = u16::MAX;
}

const _: () = {
    assert!(size_of::<ParentKey>() == 12);
    assert!(size_of::<ParentEntry>() == 16);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_keys_of_different_kinds_are_the_same() {
        let mac = |last| Mac { octets: [2, 0, 0, 0, 0, last] };
        let keys = [
            ParentKey::itself(5),
            ParentKey::macvlan(5, mac(1)),
            ParentKey::macvlan(5, mac(2)),
            ParentKey::namespace(5),
            ParentKey::namespace(6),
            ParentKey::above(5, 5, 5),
            ParentKey::above(5, 5, 6),
            ParentKey::above(5, 6, 5),
            ParentKey::above(6, 5, 5),
            ParentKey::above(5, u64::MAX >> 12, 4094),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert_eq!(keys.iter().position(|other| other == key), Some(at), "{key:?}");
        }
        // The cookie in the value tells them apart.
        assert_eq!(ParentKey::above(5, 1 << 52 | 5, 5), ParentKey::above(5, 5, 5));
    }
}
