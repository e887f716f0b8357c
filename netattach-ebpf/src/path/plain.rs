//! Judges the most common packets in one step: whole packets of TCP and UDP.
//!
//! One function lets packets pass that are certain to be allowed: those of a pod that no policy isolates, or of a
//! flow that continues. A second function asks the policies' tables; it is separate because few packets need it and
//! it takes much stack. For any other packet neither gives a verdict: `judge` asks its questions in order, and would
//! give the same answer for the packets that are judged here:
//!
//! | question of `judge` | here |
//! |---|---|
//! | tags | none |
//! | protocol that a socket has named | equal to the frame's ethertype |
//! | source MAC and address | the attachment's own, by its record alone |
//! | bytes that are written later | the transport's checksum, bytes behind its header, or none |
//! | headers | as `netattach_common::parse::plain` reads them; so no ARP, control message, option, extension header or fragment |
//! | staying a host | no datagram to a port of DHCP or of what routers say to each other; all other rules are about packets that are not read here |
//! | policy in force | it is |
//! | left to the node's packet filter | not if it goes there |
//! | isolation | no policy, a flow that the policies in force have approved, or else what `enforce` says |
//!
//! In the object that logs, no packet is judged here, so that all stages are logged.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    AttachmentRecord, DropReason, Ip4, Ip6, Side,
    attachment::flag,
    link,
    parse::{
        Bytes, ETHERNET_LEN, EthernetHeader, ethertype,
        header::{IPV4_LEN, IPV6_LEN},
        plain::{self, Headers},
    },
    protocol::UDP,
};

use crate::path::{
    conntrack, enforce,
    family::Family,
    frame::{self, Skb},
    record,
    scope::Scope,
    subprograms::{NULL_ARGUMENT, Subprograms, exclusive, reference},
    unfinished,
    verdict::{Denied, Encode},
};

/// The answer about a packet. Numbers, as the result of a BPF function is a number.
mod answer {
    /// It passes.
    pub(super) const PASSES: u32 = 0;
    /// It is a packet of this kind; its flow and the policies decide ([`enforce`]).
    pub(super) const FIRST: u32 = 1;
    /// It is not of this kind, or only `judge` can tell.
    pub(super) const UNCERTAIN: u32 = 2;
}

/// The verdict on a packet of this kind; if it passes, it has class data. `None`: left to `judge`.
#[inline(always)]
pub(crate) fn verdict(ctx: &TcContext, scope: &mut Scope) -> Option<Result<(), Denied>> {
    if cfg!(feature = "log") {
        return None;
    }
    let skb = ctx.skb.skb;
    let six = frame::says_ipv6(ctx);
    match if six { na_plain6(skb, scope) } else { na_plain4(skb, scope) } {
        answer::PASSES => Some(Ok(())),
        answer::FIRST => {
            Some(Encode::decode(if six { na_first6(skb, scope) } else { na_first4(skb, scope) }))
        }
        _ => None,
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_plain4(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    let Some(scope) = reference(scope) else { return answer::UNCERTAIN };
    ask::<Ip4>(&TcContext::new(skb), scope, plain::ipv4).unwrap_or(answer::UNCERTAIN)
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_plain6(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    let Some(scope) = reference(scope) else { return answer::UNCERTAIN };
    ask::<Ip6>(&TcContext::new(skb), scope, plain::ipv6).unwrap_or(answer::UNCERTAIN)
}

/// Asks all questions except those that need the policies' tables.
#[inline(always)]
fn ask<A: Family>(
    ctx: &TcContext,
    scope: &Scope,
    read: impl FnOnce(&Skb) -> Option<Headers<A>>,
) -> Option<u32> {
    let frame = frame::at::<EthernetHeader>(ctx, 0).ok()?;
    let headers = headers(ctx, scope, frame, None, read)?;
    if scope.policies.none() {
        return Some(answer::PASSES);
    }
    if scope.leaves_to_the_node() && frame::passes_the_node(ctx, scope, &frame.destination) {
        return None;
    }
    // A packet that opens a connection is judged by the policy: a lookup in the flow table would be superfluous.
    let passes = !headers.signal.opens() && conntrack::goes_on(ctx, scope, &headers);
    Some(if passes { answer::PASSES } else { answer::FIRST })
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_first4(skb: *mut __sk_buff, scope: *mut Scope) -> u32 {
    match exclusive(scope) {
        Some(scope) => judge::<Ip4>(&TcContext::new(skb), scope, plain::ipv4).encode(),
        None => Err::<(), _>(NULL_ARGUMENT).encode(),
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_first6(skb: *mut __sk_buff, scope: *mut Scope) -> u32 {
    match exclusive(scope) {
        Some(scope) => judge::<Ip6>(&TcContext::new(skb), scope, plain::ipv6).encode(),
        None => Err::<(), _>(NULL_ARGUMENT).encode(),
    }
}

/// Judges a packet after [`ask`] has answered all other questions.
#[inline(always)]
fn judge<A: Subprograms>(
    ctx: &TcContext,
    scope: &mut Scope,
    read: impl FnOnce(&Skb) -> Option<Headers<A>>,
) -> Result<(), Denied> {
    let Some(headers) = read(&Skb::of(ctx)) else { return Err(DropReason::Malformed.into()) };
    let mut packet = headers.packet();
    frame::note_node(ctx, scope);
    enforce::verdict(ctx, scope, &mut packet).map_err(|denied| {
        record::dropped(ctx, scope, &packet, denied);
        denied.recorded()
    })
}

/// The headers of a packet of this kind of which only the flow remains to be judged. `None`: it is not of this kind,
/// or not the pod's. `own`: the attachment's record, if it has been looked up.
#[inline(always)]
pub(crate) fn headers<A: Family>(
    ctx: &TcContext,
    scope: &Scope,
    frame: &EthernetHeader,
    own: Option<&AttachmentRecord>,
    read: impl FnOnce(&Skb) -> Option<Headers<A>>,
) -> Option<Headers<A>> {
    let skb = Skb::of(ctx);
    let (tagged, _) = skb.tag_beside();
    // The kernel dispatches a frame by its protocol, and a packet socket may have named another one.
    let is_of_family = frame.ethertype == A::ETHERTYPE.to_be() && frame::protocol(ctx) == A::ETHERTYPE;
    if tagged || !is_of_family || scope.is_pending() {
        return None;
    }
    let headers = read(&skb)?;
    let passes = scope.side == Side::ToPod || {
        let own = match own {
            Some(own) => own,
            None => scope.record().ok()?,
        };
        is_of_its_pod(scope, own, frame, &headers) && is_finished(ctx, &headers)
    };
    passes.then_some(headers)
}

/// Whether no judged byte of a packet is written afterwards, except the checksum of its transport.
#[inline(always)]
fn is_finished<A: Family>(ctx: &TcContext, headers: &Headers<A>) -> bool {
    let header_len = if A::ETHERTYPE == ethertype::IPV4 { IPV4_LEN } else { IPV6_LEN };
    unfinished::is_plain(ctx, (ETHERNET_LEN + header_len) as u32, headers.tuple.lane.protocol())
}

/// Whether a packet comes from its pod's addresses, and is neither DHCP nor to a port of routing protocols.
#[inline(always)]
fn is_of_its_pod<A: Family>(
    scope: &Scope,
    record: &AttachmentRecord,
    frame: &EthernetHeader,
    headers: &Headers<A>,
) -> bool {
    let tuple = &headers.tuple;
    if scope.has(flag::CHECK_MAC) {
        // Only servers send to the ports of DHCP and DHCPv6 clients; messages to servers have to be read, and packets
        // to routers distinguished from those to a single host.
        let is_read = |port: u16| matches!(port, 67 | 68 | 546 | 547) || link::is_standby_port(port);
        let is_to_others = tuple.lane.protocol() == UDP && is_read(tuple.ports.destination().number());
        if !frame.source.same(&record.mac) || is_to_others {
            return false;
        }
    }
    // The unspecified address stands for "none" in the record.
    !scope.has(flag::CHECK_ADDRESS)
        || !tuple.source.same(&A::UNSPECIFIED) && A::is_recorded(record, &tuple.source)
}
