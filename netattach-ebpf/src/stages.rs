//! The functions that the kernel verifies on their own (global functions; with memory as arguments since Linux 5.12).
//!
//! A verifier follows every way through a program. Where one part leaves many of them open, the next is gone through once
//! for each, and Linux 6.1, which forgets less than later kernels, gives up after a million instructions. A global function
//! is gone through once, with arguments that can be anything, and whoever calls it goes on with an answer that can be
//! anything. So the packet path is cut where little is handed on:
//!
//! | stage | does |
//! |---|---|
//! | `na_judge` | reads a frame, checks what a pod says of itself, and goes on with one of the following |
//! | `na_tags` | walk over VLAN tags |
//! | `na_read4`, `na_read6` | read IP and transport headers |
//! | `na_options`, `na_neighbour` | check IPv4 options and neighbour discovery that a pod sends |
//! | `na_other` | judges a frame that is neither IP's nor ARP's |
//! | `na_on_link` | asks whether neighbour discovery is no more than that |
//! | `na_fragment4`, `na_fragment6` | remember what first fragments say, complete later ones |
//! | `na_known4`, `na_known6` | judge a packet by its flow |
//! | `na_open4`, `na_open6` | judge a packet without one by the policy |
//! | `na_enter4`, `na_enter6` | find a place for its flow among the attachment's own, and enter it |
//! | `na_ask4`, `na_ask6` | take one place, or say how little the flow that has it would be missed |
//! | `na_answer4`, `na_answer6` | find the flow that an ICMP error is about |
//! | `na_policy4`, `na_policy6` | ask a policy |
//! | `na_copied4`, `na_copied6`, `na_routed4`, `na_routed6` | the same behind the node's translation (see `routed`) |
//!
//! The kernel takes as arguments the context, numbers, and pointers to memory of a type that the object describes (BTF),
//! wholly written by the caller. Such a pointer may be null as far as the verifier knows. The answer is a number.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    DropReason, FlowKey, Ip4, Ip6,
    flow::{Leg, Tuple},
    parse::{Packet, Payload, options, packet},
};

use crate::{
    antispoof,
    classifier::{self, Scope},
    conntrack::{self, Opening},
    fragment,
    frame::{self, Skb},
    icmp,
    maps::Family,
    policy, share,
    verdict::{Denied, Sort, Word},
};

/// What a stage says that was handed null. Nobody does that.
pub(crate) const NOTHING: Denied = Denied::new(DropReason::Malformed);

/// The stages of one address family.
pub(crate) trait Stages: Family {
    /// Whether a packet that says that it keeps the link going does no more than that.
    fn stays_on_link(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<bool, Denied>;
    /// Reads the headers from IP on, of a packet that has just begun.
    fn read(ctx: &TcContext, packet: &mut Packet<Self>) -> Result<(), Denied>;
    /// Remembers what a first fragment says, or completes a later one by it.
    fn complete_fragment(scope: &Scope, packet: &mut Packet<Self>);
    /// Judges a packet by its flow. `false`: it has none.
    fn is_known(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<bool, Denied>;
    /// Judges a packet of no known flow: the flow that it opens.
    fn open(scope: &Scope, packet: &Packet<Self>) -> Result<Opening, Denied>;
    /// Enters that flow, at a place among its attachment's.
    fn enter(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>, opening: Opening) -> Result<(), Denied>;
    /// Takes a place if no flow that goes on has it; or says how little that would be missed.
    fn ask_for_place(attachment: u32, place: u32, key: &FlowKey<Self>, now: u32) -> Result<u32, Denied>;
    /// Whether an ICMP error is about a packet of a flow that may go on.
    fn is_answer(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> bool;
    /// Asks the policy for a leg: the rule that allows, which is credited.
    fn ask(scope: &Scope, tuple: &Tuple<Self>, leg: Leg, with_ports: bool) -> Result<u32, Denied>;
}

/// Reads a frame and judges it.
#[inline(always)]
pub(crate) fn judge(ctx: &TcContext, scope: &Scope) -> Result<Sort, Denied> {
    Word::from_word(na_judge(ctx.skb.skb, scope))
}

/// Walks over the VLAN tags of a frame.
#[inline(always)]
pub(crate) fn peel(ctx: &TcContext, scope: &Scope, payload: &mut Payload) -> Result<(), Denied> {
    Word::from_word(na_tags(ctx.skb.skb, scope, payload))
}

/// Checks the options of an IPv4 header that lie between these offsets.
#[inline(always)]
pub(crate) fn check_options(skb: &Skb, from: u32, to: u32) -> Result<(), Denied> {
    Word::from_word(na_options(skb.raw(), from, to))
}

/// Judges a frame that is neither IP's nor ARP's.
#[inline(always)]
pub(crate) fn check_other(ctx: &TcContext, scope: &Scope, payload: &Payload) -> Result<(), Denied> {
    Word::from_word(na_other(ctx.skb.skb, scope, payload))
}

/// Checks neighbour discovery that a pod sends.
#[inline(always)]
pub(crate) fn check_neighbour(skb: &Skb, scope: &Scope, packet: &Packet<Ip6>) -> Result<(), Denied> {
    Word::from_word(na_neighbour(skb.raw(), scope, packet))
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_judge(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    let answer = match reference(scope) {
        Some(scope) => classifier::judge_frame(&TcContext::new(skb), scope),
        None => Err(NOTHING),
    };
    answer.to_word()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_tags(skb: *mut __sk_buff, scope: *const Scope, payload: *mut Payload) -> u32 {
    let answer = match (reference(scope), exclusive(payload)) {
        (Some(scope), Some(payload)) => frame::peel(&Skb::new(skb), scope, payload).map_err(Denied::from),
        _ => Err(NOTHING),
    };
    answer.to_word()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_options(skb: *mut __sk_buff, from: u32, to: u32) -> u32 {
    options::ipv4(&Skb::new(skb), from, to).map_err(Denied::from).to_word()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_other(skb: *mut __sk_buff, scope: *const Scope, payload: *const Payload) -> u32 {
    let answer = match (reference(scope), reference(payload)) {
        (Some(scope), Some(payload)) => {
            antispoof::other(&TcContext::new(skb), scope, payload).map_err(Denied::from)
        }
        _ => Err(NOTHING),
    };
    answer.to_word()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_on_link(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<Ip6>) -> u32 {
    let answer = match (reference(scope), reference(packet)) {
        (Some(scope), Some(packet)) => {
            icmp::stays_on_link(&Skb::new(skb), scope, packet).map_err(Denied::from)
        }
        _ => Err(NOTHING),
    };
    answer.to_word()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_neighbour(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<Ip6>) -> u32 {
    let answer = match (reference(scope), reference(packet)) {
        (Some(scope), Some(packet)) => {
            antispoof::neighbour(&Skb::new(skb), scope, packet).map_err(Denied::from)
        }
        _ => Err(NOTHING),
    };
    answer.to_word()
}

macro_rules! stages {
    ($address:ty, $on_link:ident, $body:path, $read:ident, $fragment:ident, $known:ident, $open:ident, $enter:ident, $ask:ident, $answer:ident, $policy:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $read(skb: *mut __sk_buff, packet: *mut Packet<$address>) -> u32 {
            let answer = match exclusive(packet) {
                Some(packet) => $body(&Skb::new(skb), packet).map_err(Denied::from),
                None => Err(NOTHING),
            };
            answer.to_word()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $fragment(scope: *const Scope, packet: *mut Packet<$address>) -> u32 {
            if let (Some(scope), Some(packet)) = (reference(scope), exclusive(packet)) {
                fragment::complete(scope, packet);
            }
            // A stage has to answer.
            0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $known(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<$address>) -> u32 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => conntrack::is_known(&TcContext::new(skb), scope, packet),
                _ => Err(NOTHING),
            };
            answer.to_word()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $open(scope: *const Scope, packet: *const Packet<$address>) -> u64 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => conntrack::open(scope, packet),
                _ => Err(NOTHING),
            };
            answer.map(|opening| opening.0).to_word()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $enter(
            skb: *mut __sk_buff,
            scope: *const Scope,
            packet: *const Packet<$address>,
            opening: u32,
        ) -> u32 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => {
                    conntrack::enter(&TcContext::new(skb), scope, packet, Opening(opening))
                }
                _ => Err(NOTHING),
            };
            answer.to_word()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $ask(attachment: u32, place: u32, key: *const FlowKey<$address>, now: u32) -> u64 {
            let answer = match reference(key) {
                // Copied: the kernel takes no argument of a function for a key or value of a map.
                Some(key) => share::ask(attachment, place, &{ *key }, now).map_err(Denied::from),
                None => Err(NOTHING),
            };
            answer.to_word()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $answer(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<$address>) -> u32 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => conntrack::is_answer(&TcContext::new(skb), scope, packet),
                _ => false,
            };
            answer.into()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $policy(
            scope: *const Scope,
            tuple: *const Tuple<$address>,
            responder: u32,
            with_ports: u32,
        ) -> u64 {
            let leg = if responder != 0 { Leg::Responder } else { Leg::Opener };
            let answer = match (reference(scope), reference(tuple)) {
                (Some(scope), Some(tuple)) => {
                    policy::ask(scope, tuple, leg, with_ports != 0).map_err(Denied::from)
                }
                _ => Err(NOTHING),
            };
            answer.to_word()
        }

        impl Stages for $address {
            #[inline(always)]
            fn stays_on_link(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<bool, Denied> {
                $on_link(ctx, scope, packet)
            }

            #[inline(always)]
            fn read(ctx: &TcContext, packet: &mut Packet<Self>) -> Result<(), Denied> {
                Word::from_word($read(ctx.skb.skb, packet))
            }

            #[inline(always)]
            fn complete_fragment(scope: &Scope, packet: &mut Packet<Self>) {
                $fragment(scope, packet);
            }

            #[inline(always)]
            fn is_known(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<bool, Denied> {
                Word::from_word($known(ctx.skb.skb, scope, packet))
            }

            #[inline(always)]
            fn open(scope: &Scope, packet: &Packet<Self>) -> Result<Opening, Denied> {
                let answer: Result<u32, Denied> = Word::from_word($open(scope, packet));
                answer.map(Opening)
            }

            #[inline(always)]
            fn enter(
                ctx: &TcContext,
                scope: &Scope,
                packet: &Packet<Self>,
                opening: Opening,
            ) -> Result<(), Denied> {
                Word::from_word($enter(ctx.skb.skb, scope, packet, opening.0))
            }

            #[inline(always)]
            fn ask_for_place(
                attachment: u32,
                place: u32,
                key: &FlowKey<Self>,
                now: u32,
            ) -> Result<u32, Denied> {
                Word::from_word($ask(attachment, place, key, now))
            }

            #[inline(always)]
            fn is_answer(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> bool {
                $answer(ctx.skb.skb, scope, packet) != 0
            }

            #[inline(always)]
            fn ask(scope: &Scope, tuple: &Tuple<Self>, leg: Leg, with_ports: bool) -> Result<u32, Denied> {
                let responder = (leg == Leg::Responder).into();
                Word::from_word($policy(scope, tuple, responder, with_ports.into()))
            }
        }
    };
}

stages!(
    Ip4,
    never_on_link,
    packet::ipv4,
    na_read4,
    na_fragment4,
    na_known4,
    na_open4,
    na_enter4,
    na_ask4,
    na_answer4,
    na_policy4
);
stages!(
    Ip6,
    on_link,
    packet::ipv6,
    na_read6,
    na_fragment6,
    na_known6,
    na_open6,
    na_enter6,
    na_ask6,
    na_answer6,
    na_policy6
);

/// No packet of IPv4 says that it keeps the link going: that is ARP's.
#[inline(always)]
fn never_on_link(_: &TcContext, _: &Scope, _: &Packet<Ip4>) -> Result<bool, Denied> {
    Ok(false)
}

#[inline(always)]
fn on_link(ctx: &TcContext, scope: &Scope, packet: &Packet<Ip6>) -> Result<bool, Denied> {
    Word::from_word(na_on_link(ctx.skb.skb, scope, packet))
}

/// A stage's argument.
#[inline(always)]
pub(crate) fn reference<'a, T>(argument: *const T) -> Option<&'a T> {
    // SAFETY: the callers above hand over references to what lives on their stacks until the stage returns; all bytes are
    // written and stand for values of `T`.
    unsafe { argument.as_ref() }
}

/// A stage's argument that it changes.
#[inline(always)]
pub(crate) fn exclusive<'a, T>(argument: *mut T) -> Option<&'a mut T> {
    // SAFETY: as above; the references are exclusive.
    unsafe { argument.as_mut() }
}
