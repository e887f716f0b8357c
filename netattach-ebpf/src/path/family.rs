//! The versions of IP: their constants, their fields of an attachment's record, and their maps.

use aya_ebpf::btf_maps::lpm_trie::Key;
use netattach_common::{
    Address, AddressKey, AttachmentRecord, DropReason, Flow, FlowKey, FragmentKey, Fragmented, Ip4, Ip6,
    PlaceKey, PolicyAddress, Share,
    attachment::flag,
    entry::InPlace,
    key::source,
    parse::{Version, ethertype},
};

use crate::path::{
    entry::{FlowEntry, PlaceHolder},
    maps::{
        ADDRESS4, ADDRESS6, FLOW4, FLOW6, FRAGMENT4, FRAGMENT6, NO_EXIST, OWN4, OWN6, PEER4, PEER6, PREFIX4,
        PREFIX6, SHARE,
    },
};

/// Differences between the versions of IP, apart from how a packet is read ([`Version`]).
pub(crate) trait Family: Version {
    /// The ethertype.
    const ETHERTYPE: u16;
    /// The flag of attachments that receive this family's control messages without a policy check.
    const ACCEPT_ICMP: u32;
    /// Whether all fragments of a packet name the same protocol.
    const FRAGMENTS_NAME_PROTOCOL: bool;
    /// The drop reason for a packet whose source address is not its sender's.
    const SPOOFED: DropReason;

    /// Whether an attachment's record holds the address.
    fn is_recorded(record: &AttachmentRecord, address: &Self) -> bool;

    /// Whether the address is derived from an attachment's MAC address, which no other attachment has.
    fn follows_from_mac(record: &AttachmentRecord, address: &Self) -> bool;

    /// Whether the address is in an attachment's overflow list (addresses that do not fit into the record).
    fn is_listed(attachment: u32, address: &Self) -> bool;
    /// Whether the address was given to an attachment, and to no other.
    fn is_given(attachment: u32, record: &AttachmentRecord, address: &Self) -> bool;
    /// Class of exactly this peer.
    fn exact_class(policy: u32, peer: &Self) -> Option<u32>;
    /// Class of the longest prefix that contains this peer.
    fn prefix_class(policy: u32, peer: &Self) -> Option<u32>;
    /// The entry of a flow, in place.
    fn flow(key: &FlowKey<Self>) -> Option<FlowEntry>;
    /// Enters or replaces a flow. `false`: there is no room for the entry.
    fn enter_flow(key: &FlowKey<Self>, flow: &Flow) -> bool;

    /// Makes the entry of a key, just looked up, that of another flow. `false`: the flow that had it is gone.
    ///
    /// While it is written, another CPU may displace that flow, and the memory may immediately become the entry of
    /// another key ([`crate::path::entry`]): the written words do not belong to that flow, so it begins again with
    /// its next packet.
    #[inline(always)]
    fn begin_flow(key: &FlowKey<Self>, entry: FlowEntry, flow: &Flow) -> bool {
        entry.begin(flow);
        let is_still = Self::flow(key).is_some_and(|found| found.is_same(entry));
        if !is_still {
            entry.give_up(flow.last_seen);
        }
        is_still
    }

    /// Takes a flow out, if it is there.
    fn remove_flow(key: &FlowKey<Self>);
    /// The number of places that an attachment has (at least one), and the counter of places requested.
    fn places(attachment: u32) -> Option<(u32, *mut u64)>;
    /// The key of the flow that took a place last, in place.
    fn at_place(place: &PlaceKey) -> Option<PlaceHolder<Self>>;
    /// Gives a place that has never been taken to a flow. `false`: it has been taken meanwhile, or there is no room for
    /// the entry.
    fn take_place(place: &PlaceKey, key: &FlowKey<Self>) -> bool;
    /// The data remembered from a packet's first fragment, in place.
    fn fragment(key: &FragmentKey<Self>) -> Option<*const Fragmented>;
    /// Enters or replaces a first fragment. `false`: there is no room for the entry.
    fn enter_fragment(key: &FragmentKey<Self>, said: &Fragmented) -> bool;
}

/// The methods of [`Family`] that look maps up.
macro_rules! map_methods {
    (
        addresses: $addresses:ident,
        peers: $peers:ident,
        prefixes: $prefixes:ident,
        flows: $flows:ident,
        places: $places:ident($next:ident, $most:ident),
        fragments: $fragments:ident,
    ) => {
        #[inline(always)]
        fn is_listed(attachment: u32, address: &Self) -> bool {
            $addresses.get_ptr(&AddressKey { attachment, address: *address }).is_some()
        }

        #[inline(always)]
        fn is_given(attachment: u32, record: &AttachmentRecord, address: &Self) -> bool {
            // SAFETY: a u32, copied at once.
            let kind = unsafe { $addresses.get(&AddressKey { attachment, address: *address }) }.copied();
            kind == Some(source::OWN) || Self::follows_from_mac(record, address)
        }

        #[inline(always)]
        fn exact_class(policy: u32, peer: &Self) -> Option<u32> {
            // SAFETY: a u32, copied at once.
            unsafe { $peers.get(&PolicyAddress { policy, address: *peer }) }.copied()
        }

        #[inline(always)]
        fn prefix_class(policy: u32, peer: &Self) -> Option<u32> {
            let whole = (size_of::<PolicyAddress<Self>>() * 8) as u32;
            $prefixes.get(&Key::new(whole, PolicyAddress { policy, address: *peer })).copied()
        }

        #[inline(always)]
        fn flow(key: &FlowKey<Self>) -> Option<FlowEntry> {
            // SAFETY: it is one, just looked up.
            $flows.get_ptr_mut(key).map(|value| unsafe { FlowEntry::new(value) })
        }

        #[inline(always)]
        fn enter_flow(key: &FlowKey<Self>, flow: &Flow) -> bool {
            if $flows.insert(key, flow, NO_EXIST).is_ok() {
                return true;
            }
            enter_in_place::<Self>(key, flow)
        }

        #[inline(always)]
        fn remove_flow(key: &FlowKey<Self>) {
            // An entry that is gone already is fine.
            let _ = $flows.remove(key);
        }

        #[inline(always)]
        fn places(attachment: u32) -> Option<(u32, *mut u64)> {
            let share = SHARE.get_ptr_mut(attachment)?;
            // SAFETY: the map's values stay in place as long as the map does; a whole aligned word, which only the
            // agent writes.
            Some(unsafe {
                (Share::places((&raw const (*share).$most).read_volatile()), &raw mut (*share).$next)
            })
        }

        #[inline(always)]
        fn at_place(place: &PlaceKey) -> Option<PlaceHolder<Self>> {
            // SAFETY: it is one, just looked up.
            $places.get_ptr_mut(place).map(|value| unsafe { PlaceHolder::new(value) })
        }

        #[inline(always)]
        fn take_place(place: &PlaceKey, key: &FlowKey<Self>) -> bool {
            $places.insert(place, key, NO_EXIST).is_ok()
        }

        #[inline(always)]
        fn fragment(key: &FragmentKey<Self>) -> Option<*const Fragmented> {
            $fragments.get_ptr(key)
        }

        #[inline(always)]
        fn enter_fragment(key: &FragmentKey<Self>, said: &Fragmented) -> bool {
            $fragments.insert(key, said, 0).is_ok()
        }
    };
}

impl Family for Ip4 {
    const ETHERTYPE: u16 = ethertype::IPV4;
    const ACCEPT_ICMP: u32 = flag::ACCEPT_ICMP;
    const FRAGMENTS_NAME_PROTOCOL: bool = true;
    const SPOOFED: DropReason = DropReason::SourceIpv4;

    #[inline(always)]
    fn is_recorded(record: &AttachmentRecord, address: &Self) -> bool {
        address.same(&record.ipv4)
    }

    #[inline(always)]
    fn follows_from_mac(_: &AttachmentRecord, _: &Self) -> bool {
        false
    }

    map_methods! {
        addresses: ADDRESS4,
        peers: PEER4,
        prefixes: PREFIX4,
        flows: FLOW4,
        places: OWN4(next_v4, most_v4),
        fragments: FRAGMENT4,
    }
}

impl Family for Ip6 {
    const ETHERTYPE: u16 = ethertype::IPV6;
    const ACCEPT_ICMP: u32 = flag::ACCEPT_ICMPV6;
    const FRAGMENTS_NAME_PROTOCOL: bool = false;
    const SPOOFED: DropReason = DropReason::SourceIpv6;

    #[inline(always)]
    fn is_recorded(record: &AttachmentRecord, address: &Self) -> bool {
        address.same(&record.ipv6) || address.same(&record.link_local)
    }

    #[inline(always)]
    fn follows_from_mac(record: &AttachmentRecord, address: &Self) -> bool {
        address.same(&record.link_local)
    }

    map_methods! {
        addresses: ADDRESS6,
        peers: PEER6,
        prefixes: PREFIX6,
        flows: FLOW6,
        places: OWN6(next_v6, most_v6),
        fragments: FRAGMENT6,
    }
}

/// Makes the entry that a key has already that of another flow, which is gone at once if it has been displaced meanwhile. `false`:
/// there is none. Out of line: the frame of who enters a flow is as large as it may be.
#[inline(never)]
fn enter_in_place<A: Family>(key: &FlowKey<A>, flow: &Flow) -> bool {
    let Some(entry) = A::flow(key) else { return false };
    A::begin_flow(key, entry, flow);
    true
}
