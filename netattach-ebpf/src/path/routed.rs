//! Behind the node's address translation: routed packets are judged by their real destination, not the one sent to.
//!
//! A pod sends to a Service, or to a port of its node that leads to another pod. The node rewrites the destination
//! before it routes the packet, and the source after that (kube-proxy, hostPort). `na_routed` runs between the two, by
//! a rule of the node's packet filter (nftables with `xt_bpf`; the agent's `netlink::guard`) that drops the packets for
//! which it returns 1: packets begin with their IP header, and look the same on every device. Replies are seen before
//! their translation is reversed, so that both directions are one flow.
//!
//! | chain | sees |
//! |---|---|
//! | input, 99 | what pods send to the node itself |
//! | forward, 90 | what pods send elsewhere, and what comes to them from elsewhere; with br_netfilter also what bridges forward |
//! | output, 90 | what the node sends to its pods |
//!
//! Each packet is judged for the attachment whose address is its source, then for that of its destination (`na_guard`).
//! The devices' programs do not apply policies to packets that come here, as far as [`Gate`](netattach_common::Gate)
//! says so and `na_guard` leads to the attachment: they check the pod's claims about its sender, charge its bandwidth and
//! count the packets.

use aya_ebpf::{
    bindings::__sk_buff,
    macros::socket_filter,
    programs::{SkBuffContext, TcContext},
};
use netattach_common::{
    DropReason, Ip4, Ip6, Side,
    parse::{ETHERNET_LEN, Kind, Packet, Room, walk},
};

use crate::path::{
    count, enforce,
    family::Family,
    frame::{self, Skb},
    log::{self, Stage},
    maps, record,
    scope::Scope,
    subprograms::{NULL_ARGUMENT, Subprograms, exclusive},
    verdict::{Denied, Encode},
};

/// The value for which the filter's rule drops the packet.
const DROPPED: u32 = 1;

#[socket_filter]
pub(crate) fn na_routed(ctx: SkBuffContext) -> i64 {
    let skb = ctx.skb.skb;
    let version: Result<u8, _> = frame::load(&TcContext::new(skb), 0);
    // The packet filter passes no other protocols to chains for both families.
    let drops = match version.map(|byte| byte >> 4) {
        Ok(4) => na_routed4(skb),
        Ok(6) => na_routed6(skb),
        _ => 0,
    };
    drops.into()
}

/// The subprograms of one address family.
trait Routed: Subprograms {
    /// Reads a packet that begins with its IP header.
    fn read_copied(ctx: &TcContext, packet: &mut Packet<Self>) -> Result<(), Denied>;
}

macro_rules! subprograms {
    ($address:ty, $body:path, $copied:ident, $routed:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $copied(skb: *mut __sk_buff, packet: *mut Packet<$address>) -> u32 {
            let answer = match exclusive(packet) {
                Some(packet) => $body(&Skb::new(skb), packet).map_err(Denied::from),
                None => Err(NULL_ARGUMENT),
            };
            answer.encode()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $routed(skb: *mut __sk_buff) -> u32 {
            judge::<$address>(&TcContext::new(skb))
        }

        impl Routed for $address {
            #[inline(always)]
            fn read_copied(ctx: &TcContext, packet: &mut Packet<Self>) -> Result<(), Denied> {
                Encode::decode($copied(ctx.skb.skb, packet))
            }
        }
    };
}

subprograms!(Ip4, walk::copied_ipv4, na_copied4, na_routed4);
subprograms!(Ip6, walk::copied_ipv6, na_copied6, na_routed6);

/// Judges a packet for both of its ends.
#[inline(always)]
fn judge<A: Routed>(ctx: &TcContext) -> u32 {
    let mut room = Room::default();
    let packet: &mut Packet<A> = room.blank();
    let read = A::read_copied(ctx, packet);
    let sender = maps::guarded(&packet.tuple.source.widen()).unwrap_or(0);
    let receiver = maps::guarded(&packet.tuple.destination.widen()).unwrap_or(0);
    // No policy isolates a pod from itself, through any Service: a packet that returns to the address it was sent
    // from.
    if sender == receiver && packet.tuple.source.same(&packet.tuple.destination) {
        return 0;
    }
    if sender != 0 && refuses(ctx, sender, Side::FromPod, packet, read) {
        return DROPPED;
    }
    if receiver != 0 && refuses(ctx, receiver, Side::ToPod, packet, read) {
        return DROPPED;
    }
    0
}

/// Whether an attachment's policies refuse a packet. Only refusals are counted here: packets that pass are counted at
/// the device, and so is what the pod has sent, whose refusal adds only a reason. A packet that does not come to its
/// receiver's device is counted with the Ethernet header that it would have had there.
#[inline(never)]
fn refuses<A: Routed>(
    ctx: &TcContext,
    attachment: u32,
    side: Side,
    packet: &mut Packet<A>,
    read: Result<(), Denied>,
) -> bool {
    let Some(scope) = Scope::of(attachment, side) else {
        // Not counted for the attachment, which is gone: the next one with its id starts with counters of zero.
        count::packet(0, side, framed(ctx), Err(DropReason::Unbound.into()));
        return true;
    };
    if scope.policies.none() && !scope.is_pending() {
        return false;
    }
    let Err(denied) = read.and_then(|()| enforce::policies(ctx, &scope, packet)) else { return false };
    record::dropped(ctx, &scope, packet, denied);
    log::denial(attachment, Stage::Routed, denied);
    match side {
        Side::FromPod => count::dropped_later(attachment, denied),
        Side::ToPod => count::packet(attachment, side, framed(ctx), Err(denied)),
    }
    true
}

/// Bytes of a packet that begins with its IP header, as counted at devices.
#[inline(always)]
fn framed(ctx: &TcContext) -> u32 {
    ctx.len() + ETHERNET_LEN as u32
}

/// Whether the node's packet filter judges a packet at a device, before or after the device: the packet crosses the
/// filter, and the attachment is found by the address on its side. An address that pods share, or that leads to
/// another attachment, does not qualify.
#[inline(always)]
pub(crate) fn judges<A: Family>(ctx: &TcContext, scope: &Scope, packet: &Packet<A>) -> bool {
    if packet.tagged || packet.kind == Kind::LinkControl {
        return false;
    }
    let passes = frame::destination(ctx).is_ok_and(|mac| frame::passes_the_node(ctx, scope, mac));
    passes
        && Some(scope.id)
            == match scope.side {
                Side::FromPod => maps::guarded(&packet.tuple.source.widen()),
                Side::ToPod => maps::guarded(&packet.tuple.destination.widen()),
            }
}
