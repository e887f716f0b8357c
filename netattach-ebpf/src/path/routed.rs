//! Behind the node's address translation: routed packets are judged by their real destination, not the one sent to.
//!
//! A pod sends to a Service, or to a port of its node that leads to another pod. The node rewrites the destination
//! before it routes the packet, and the source after that (kube-proxy, hostPort). `na_routed` and `na_forwarded` run
//! between the two, by rules of the node's packet filter (nftables with `xt_bpf`; the agent's `netlink::guard`) that drop
//! the packets for which they return 1: packets begin with their IP header, and look the same on every device. Replies
//! are seen before their translation is reversed, so that both directions are one flow.
//!
//! | chain | program | sees |
//! |---|---|---|
//! | input, 99 | `na_routed` | what pods send to the node itself |
//! | forward, 90 | `na_forwarded` | what pods send elsewhere, and what comes to them from elsewhere; with br_netfilter also what bridges forward |
//! | output, 90 | `na_routed` | what the node sends to its pods |
//!
//! A packet at forward with an address of the node is not the node's: a bridge forwards it to a neighbour, or it comes
//! from one. The rule about the pod's own node does not hold for it.
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

/// At input and output: the packet goes to the node itself, or comes from it.
#[socket_filter]
pub(crate) fn na_routed(ctx: SkBuffContext) -> i64 {
    drops(ctx, 1)
}

/// At forward: the node is neither end, whatever addresses the packet has.
#[socket_filter]
pub(crate) fn na_forwarded(ctx: SkBuffContext) -> i64 {
    drops(ctx, 0)
}

#[inline(always)]
fn drops(ctx: SkBuffContext, at_the_node: u32) -> i64 {
    let skb = ctx.skb.skb;
    let version: Result<u8, _> = frame::load(&TcContext::new(skb), 0);
    // The packet filter passes no other protocols to chains for both families.
    let drops = match version.map(|byte| byte >> 4) {
        Ok(4) => na_routed4(skb, at_the_node),
        Ok(6) => na_routed6(skb, at_the_node),
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
        fn $routed(skb: *mut __sk_buff, at_the_node: u32) -> u32 {
            judge::<$address>(&TcContext::new(skb), at_the_node)
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
fn judge<A: Routed>(ctx: &TcContext, at_the_node: u32) -> u32 {
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
    if sender != 0 && refuses(ctx, sender, End::new(Side::FromPod, at_the_node), packet, read) {
        return DROPPED;
    }
    if receiver != 0 && refuses(ctx, receiver, End::new(Side::ToPod, at_the_node), packet, read) {
        return DROPPED;
    }
    0
}

/// For which end of a packet it is judged, and whether the node itself is the other one. A number: a BPF function has
/// five arguments.
#[derive(Clone, Copy)]
struct End(u32);

impl End {
    const TO_POD: u32 = 1 << 1;

    #[inline(always)]
    fn new(side: Side, at_the_node: u32) -> Self {
        Self(at_the_node | if side == Side::ToPod { Self::TO_POD } else { 0 })
    }

    #[inline(always)]
    fn side(self) -> Side {
        if self.0 & Self::TO_POD != 0 { Side::ToPod } else { Side::FromPod }
    }

    /// 1 or 0.
    #[inline(always)]
    fn at_the_node(self) -> u32 {
        self.0 & 1
    }
}

/// Whether an attachment's policies refuse a packet. Only refusals are counted here: packets that pass are counted at
/// the device, and so is what the pod has sent, whose refusal adds only a reason. A packet that does not come to its
/// receiver's device is counted with the Ethernet header that it would have had there.
#[inline(never)]
fn refuses<A: Routed>(
    ctx: &TcContext,
    attachment: u32,
    end: End,
    packet: &mut Packet<A>,
    read: Result<(), Denied>,
) -> bool {
    let side = end.side();
    let Some(mut scope) = Scope::of(attachment, side) else {
        // Not counted for the attachment, which is gone: the next one with its id starts with counters of zero.
        count::packet(0, side, framed(ctx), Err(DropReason::Unbound.into()));
        return true;
    };
    if scope.policies.none() && !scope.is_pending() {
        return false;
    }
    scope.note_node(end.at_the_node());
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
