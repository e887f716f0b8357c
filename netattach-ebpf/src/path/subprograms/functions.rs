//! The subprograms of each address family: they take arguments, call the code of another file, and return a number.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    FlowKey, Ip4, Ip6,
    flow::{Leg, Tuple},
    parse::{Packet, walk},
};

use super::{NULL_ARGUMENT, Subprograms, exclusive, reference};
use crate::path::{
    antispoof, conntrack, fragment,
    frame::Skb,
    icmp, policy, routed,
    scope::Scope,
    share,
    verdict::{Denied, Encode, Known, Opening},
};

macro_rules! subprograms {
    (
        $address:ty,
        $on_link:ident,
        $body:path,
        $read:ident,
        $routed:ident,
        $fragment:ident,
        $known:ident,
        $open:ident,
        $enter:ident,
        $renew:ident,
        $ask:ident,
        $displace:ident,
        $answer:ident,
        $end:ident,
        $policy:ident
    ) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $read(skb: *mut __sk_buff, packet: *mut Packet<$address>) -> u32 {
            let skb = Skb::new(skb);
            let answer = match exclusive(packet) {
                Some(packet) => {
                    let read = $body(&skb, packet);
                    read.and_then(|()| skb.check_settled(packet.judged())).map_err(Denied::from)
                }
                None => Err(NULL_ARGUMENT),
            };
            answer.encode()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $routed(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<$address>) -> u32 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => routed::judges(&TcContext::new(skb), scope, packet),
                _ => false,
            };
            answer.into()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $fragment(scope: *const Scope, packet: *mut Packet<$address>) -> u32 {
            if let (Some(scope), Some(packet)) = (reference(scope), exclusive(packet)) {
                fragment::complete(scope, packet);
            }
            // A subprogram must return a value.
            0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $known(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<$address>) -> u32 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => conntrack::look_up(&TcContext::new(skb), scope, packet),
                _ => Err(NULL_ARGUMENT),
            };
            answer.encode()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $open(scope: *const Scope, packet: *const Packet<$address>, known: u32) -> u64 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => conntrack::open(scope, packet, Known(known)),
                _ => Err(NULL_ARGUMENT),
            };
            answer.encode()
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
                _ => Err(NULL_ARGUMENT),
            };
            answer.encode()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $renew(
            skb: *mut __sk_buff,
            scope: *const Scope,
            packet: *const Packet<$address>,
            opening: u32,
        ) -> u32 {
            let answer = match (reference(scope), reference(packet)) {
                (Some(scope), Some(packet)) => {
                    conntrack::renew(&TcContext::new(skb), scope, packet, Opening(opening))
                }
                _ => false,
            };
            answer.into()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $ask(attachment: u32, place: u32, key: *const FlowKey<$address>, now: u32) -> u64 {
            let answer = match reference(key) {
                Some(key) => share::ask::<_, false>(attachment, place, key, now).map_err(Denied::from),
                None => Err(NULL_ARGUMENT),
            };
            answer.encode()
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $displace(attachment: u32, place: u32, key: *const FlowKey<$address>, now: u32) -> u64 {
            let answer = match reference(key) {
                Some(key) => share::ask::<_, true>(attachment, place, key, now).map_err(Denied::from),
                None => Err(NULL_ARGUMENT),
            };
            answer.encode()
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
        fn $end(scope: *const Scope, tuple: *const Tuple<$address>) -> u32 {
            let answer = match (reference(scope), reference(tuple)) {
                (Some(scope), Some(tuple)) => antispoof::is_end(scope, tuple),
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
                _ => Err(NULL_ARGUMENT),
            };
            answer.encode()
        }

        impl Subprograms for $address {
            #[inline(always)]
            fn stays_on_link(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<bool, Denied> {
                $on_link(ctx, scope, packet)
            }

            #[inline(always)]
            fn read(ctx: &TcContext, packet: &mut Packet<Self>) -> Result<(), Denied> {
                Encode::decode($read(ctx.skb.skb, packet))
            }

            #[inline(always)]
            fn is_judged_as_routed(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> bool {
                $routed(ctx.skb.skb, scope, packet) != 0
            }

            #[inline(always)]
            fn complete_fragment(scope: &Scope, packet: &mut Packet<Self>) {
                $fragment(scope, packet);
            }

            #[inline(always)]
            fn look_up(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<Known, Denied> {
                Encode::decode($known(ctx.skb.skb, scope, packet))
            }

            #[inline(always)]
            fn open(scope: &Scope, packet: &Packet<Self>, known: Known) -> Result<Opening, Denied> {
                Encode::decode($open(scope, packet, known.0))
            }

            #[inline(always)]
            fn enter(
                ctx: &TcContext,
                scope: &Scope,
                packet: &Packet<Self>,
                opening: Opening,
            ) -> Result<(), Denied> {
                Encode::decode($enter(ctx.skb.skb, scope, packet, opening.0))
            }

            #[inline(always)]
            fn renew(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>, opening: Opening) -> bool {
                $renew(ctx.skb.skb, scope, packet, opening.0) != 0
            }

            #[inline(always)]
            fn ask_for_place(
                attachment: u32,
                place: u32,
                key: &FlowKey<Self>,
                now: u32,
            ) -> Result<u32, Denied> {
                Encode::decode($ask(attachment, place, key, now))
            }

            #[inline(always)]
            fn displace(attachment: u32, place: u32, key: &FlowKey<Self>, now: u32) -> Result<u32, Denied> {
                Encode::decode($displace(attachment, place, key, now))
            }

            #[inline(always)]
            fn is_answer(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> bool {
                $answer(ctx.skb.skb, scope, packet) != 0
            }

            #[inline(always)]
            fn is_end(scope: &Scope, tuple: &Tuple<Self>) -> bool {
                $end(scope, tuple) != 0
            }

            #[inline(always)]
            fn ask_policy(
                scope: &Scope,
                tuple: &Tuple<Self>,
                leg: Leg,
                with_ports: bool,
            ) -> Result<u32, Denied> {
                let responder = (leg == Leg::Responder).into();
                Encode::decode($policy(scope, tuple, responder, with_ports.into()))
            }
        }
    };
}

subprograms!(
    Ip4,
    never_on_link,
    walk::ipv4,
    na_read4,
    na_guard4,
    na_fragment4,
    na_known4,
    na_open4,
    na_enter4,
    na_renew4,
    na_ask4,
    na_displace4,
    na_answer4,
    na_end4,
    na_policy4
);
subprograms!(
    Ip6,
    on_link,
    walk::ipv6,
    na_read6,
    na_guard6,
    na_fragment6,
    na_known6,
    na_open6,
    na_enter6,
    na_renew6,
    na_ask6,
    na_displace6,
    na_answer6,
    na_end6,
    na_policy6
);

#[unsafe(no_mangle)]
#[inline(never)]
fn na_on_link(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<Ip6>) -> u32 {
    let answer = match (reference(scope), reference(packet)) {
        (Some(scope), Some(packet)) => {
            icmp::stays_on_link(&Skb::new(skb), scope, packet).map_err(Denied::from)
        }
        _ => Err(NULL_ARGUMENT),
    };
    answer.encode()
}

/// No IPv4 packet keeps the link going: ARP does that.
#[inline(always)]
fn never_on_link(_: &TcContext, _: &Scope, _: &Packet<Ip4>) -> Result<bool, Denied> {
    Ok(false)
}

#[inline(always)]
fn on_link(ctx: &TcContext, scope: &Scope, packet: &Packet<Ip6>) -> Result<bool, Denied> {
    Encode::decode(na_on_link(ctx.skb.skb, scope, packet))
}
