//! The packets that most are, judged in one go: whole packets of TCP and UDP, of a pod that no policy isolates or of a
//! flow that goes on.
//!
//! This only says that a packet passes, never that it does not. Whatever is not certain here is asked again in the order
//! of `judge`, which answers the same for what passes here:
//!
//! | question of `judge` | here |
//! |---|---|
//! | tags | none |
//! | protocol that a socket has named | the frame's ethertype |
//! | source MAC and address | the attachment's own, by its record alone |
//! | headers | as `netattach_common::parse::plain` reads them; so no ARP, control message, option, extension header or fragment |
//! | staying a host | no datagram to a port of DHCP clients; all other rules are about packets that are not read here |
//! | policy in force | it is |
//! | left to the node's packet filter | not if it goes there |
//! | isolation | no policy, or a flow that the policies in force have approved |
//!
//! In the object that logs nothing passes here, so that all stages are heard.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    Ip4, Ip6, Side,
    attachment::flag,
    parse::{
        Bytes, EthernetHeader,
        plain::{self, Headers},
    },
    protocol::UDP,
};

use crate::path::{
    conntrack,
    family::Family,
    frame::{self, Skb},
    scope::Scope,
    subprograms::reference,
};

/// Whether a packet is one of these, and passes as data.
#[inline(always)]
pub(crate) fn passes(ctx: &TcContext, scope: &Scope) -> bool {
    if cfg!(feature = "log") {
        return false;
    }
    let answer =
        if frame::says_ipv6(ctx) { na_plain6(ctx.skb.skb, scope) } else { na_plain4(ctx.skb.skb, scope) };
    answer != 0
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_plain4(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    let Some(scope) = reference(scope) else { return 0 };
    is_certain::<Ip4>(&TcContext::new(skb), scope, plain::ipv4).into()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_plain6(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    let Some(scope) = reference(scope) else { return 0 };
    is_certain::<Ip6>(&TcContext::new(skb), scope, plain::ipv6).into()
}

/// Whether `judge` would let a packet pass as data.
#[inline(always)]
fn is_certain<A: Family>(
    ctx: &TcContext,
    scope: &Scope,
    read: impl FnOnce(&Skb) -> Option<Headers<A>>,
) -> bool {
    let skb = Skb::of(ctx);
    let (tagged, _) = skb.tag_beside();
    let Ok(frame) = frame::at::<EthernetHeader>(ctx, 0) else { return false };
    // Who takes a frame goes by its protocol, which a packet socket may have named otherwise.
    let is_of_family = frame.ethertype == A::ETHERTYPE.to_be() && frame::protocol(ctx) == A::ETHERTYPE;
    if tagged || !is_of_family || scope.is_pending() {
        return false;
    }
    let Some(headers) = read(&skb) else { return false };
    if scope.side == Side::FromPod && !is_of_its_pod(scope, frame, &headers) {
        return false;
    }
    if scope.policies.none() {
        return true;
    }
    if scope.leaves_to_the_node() && frame::passes_the_node(ctx, scope, &frame.destination) {
        return false;
    }
    // What opens a connection is judged by the policy: a look into the table would be one too many.
    !headers.signal.opens() && conntrack::goes_on(ctx, scope, &headers)
}

/// Whether a packet comes from its pod's addresses, and is not to clients of DHCP.
#[inline(always)]
fn is_of_its_pod<A: Family>(scope: &Scope, frame: &EthernetHeader, headers: &Headers<A>) -> bool {
    let Ok(record) = scope.record() else { return false };
    let tuple = &headers.tuple;
    if scope.has(flag::CHECK_MAC) {
        // Only servers send to the ports of DHCP and DHCPv6 clients.
        let to_clients =
            tuple.lane.protocol() == UDP && matches!(tuple.ports.destination().number(), 68 | 546);
        if !frame.source.same(&record.mac) || to_clients {
            return false;
        }
    }
    // The unspecified address stands for "none" in the record.
    !scope.has(flag::CHECK_ADDRESS)
        || !tuple.source.same(&A::UNSPECIFIED) && A::is_recorded(record, &tuple.source)
}
