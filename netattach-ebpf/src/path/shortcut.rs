//! The shortcut: judges most packets between two pods of one bridge for both ends, and puts them into the receiver's
//! interface in one step, without `na_fast`.
//!
//! As `plain`, it only decides that a packet passes. A packet that is not certain to pass continues in `na_from_pod`
//! as if the shortcut had not been tried: nothing is written before the last question is answered. The answers are
//! the same as on the normal path:
//!
//! | question | asked there by | here |
//! |---|---|---|
//! | does the sender take part in the fast path, on a bridge? | `fast` | by its place |
//! | is the fast path watched? | `fast` | by the same clock and limit |
//! | which attachment in force is the receiver, and does the packet fit its link? | `fast` | only the one found last for the address |
//! | may the sender send it? | `plain` | only a packet that `plain` lets pass |
//! | may the receiver receive it? | `plain` | the same packet, by one lookup of the flow that both have in common |
//! | is it within both bandwidths? | `limit` | there is no limit |
//!
//! Both ends are counted, and the flow is updated, as the two programs would do.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    FastPort, Ip4, Ip6, Side, StationKey,
    attachment::flag,
    parse::{
        EthernetHeader,
        plain::{self as headers, Headers},
    },
};

use crate::path::{
    clock, conntrack, count,
    endpoint::{fits, in_force, put_into},
    family::Family,
    frame::{self, Skb},
    maps, plain,
    scope::Scope,
};

/// How far a packet gets by the shortcut.
pub(crate) enum Way {
    /// It is in its receiver's interface; the program returns this verdict to the kernel.
    Taken(i32),
    /// The sender may send it, which is counted; this receiver still has to judge it.
    Sent(u32),
    /// Nothing has been asked.
    NotTaken,
}

/// The outcomes as numbers. No kernel verdict used here is zero, or has the bit that marks a receiver.
const NOT_TAKEN: u32 = 0;
const SENT: u32 = 1 << 31;

/// Lets a packet from a pod take the shortcut, as far as it goes.
#[inline(always)]
pub(crate) fn take(ctx: &TcContext) -> Way {
    if cfg!(feature = "log") {
        return Way::NotTaken;
    }
    let skb = ctx.skb.skb;
    let way = if frame::says_ipv6(ctx) { na_shortcut6(skb) } else { na_shortcut4(skb) };
    match way {
        NOT_TAKEN => Way::NotTaken,
        sent if sent & SENT != 0 => Way::Sent(sent & !SENT),
        verdict => Way::Taken(verdict as i32),
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_shortcut4(skb: *mut __sk_buff) -> u32 {
    deliver::<Ip4>(&TcContext::new(skb), headers::ipv4).unwrap_or_else(not_taken)
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_shortcut6(skb: *mut __sk_buff) -> u32 {
    deliver::<Ip6>(&TcContext::new(skb), headers::ipv6).unwrap_or_else(not_taken)
}

/// [`NOT_TAKEN`], read from memory: the compiler would copy a constant before each of thirty questions.
#[inline(always)]
fn not_taken() -> u32 {
    let way = NOT_TAKEN;
    // SAFETY: a variable.
    unsafe { (&raw const way).read_volatile() }
}

#[inline(always)]
fn deliver<A: Family>(ctx: &TcContext, read: impl FnOnce(&Skb) -> Option<Headers<A>>) -> Option<u32> {
    let (sender, own) = maps::last_owner(frame::ifindex(ctx))?;
    let from = maps::fast_port(sender).filter(|port| port.bridge != 0 && port.bridge != FastPort::ROUTED)?;
    let frame = frame::at::<EthernetHeader>(ctx, 0).ok()?;
    if frame.destination.octets[0] & 1 != 0 {
        return None;
    }
    let station = StationKey::new(from.bridge, frame.destination);
    let (receiver, port, record) = maps::last_station(&station)?;
    let sends = Scope::present(sender, own, Side::FromPod).beside_the_stack();
    let receives = Scope::present(receiver, record, Side::ToPod);
    if receiver == sender
        || in_force(record).is_err()
        || !fits(ctx, port)
        || sends.has(flag::LIMIT_FROM_POD)
        || receives.has(flag::LIMIT_TO_POD)
    {
        return None;
    }
    let headers = plain::headers(ctx, &sends, frame, Some(own), read)?;
    let (now, second) = clock::nanoseconds_and_seconds();
    if now >= maps::fast_until() {
        return None;
    }
    let bytes = ctx.len();
    if sends.policies.to_word() | receives.policies.to_word() != 0 {
        // The flow is the same for both only in one network.
        let certain = sends.zone == receives.zone
            && !headers.signal.opens()
            && !(sends.leaves_to_the_node() && frame::passes_the_node(ctx, &sends, &frame.destination));
        if !certain || !conntrack::goes_on_between(&sends, &receives, &headers, second, bytes) {
            if !sends.policies.none() {
                return None;
            }
            // No policy of the sender's is asked for a flow.
            count::packet(sender, Side::FromPod, bytes, Ok(()));
            return Some(SENT | receiver);
        }
    }
    count::packet(sender, Side::FromPod, bytes, Ok(()));
    count::packet(receiver, Side::ToPod, bytes, Ok(()));
    count::fast_path(receiver, bytes);
    Some(put_into(ctx, record.host_ifindex) as u32)
}
