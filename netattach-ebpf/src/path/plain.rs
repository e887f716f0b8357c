//! The packets that most are, judged in one go: whole packets of TCP and UDP.
//!
//! One function lets those pass of which it is certain: of a pod that no policy isolates, or of a flow that goes on. What
//! is left to the policies' tables is a function of its own, as few packets need it and it takes much memory. Of a packet
//! that is not certain to be one of these neither says anything: it is asked again in the order of `judge`, which
//! answers the same for what is judged here:
//!
//! | question of `judge` | here |
//! |---|---|
//! | tags | none |
//! | protocol that a socket has named | the frame's ethertype |
//! | source MAC and address | the attachment's own, by its record alone |
//! | what is written later | the transport's checksum, something behind its header, or nothing |
//! | headers | as `netattach_common::parse::plain` reads them; so no ARP, control message, option, extension header or fragment |
//! | staying a host | no datagram to a port of DHCP or of what routers say to each other; all other rules are about packets that are not read here |
//! | policy in force | it is |
//! | left to the node's packet filter | not if it goes there |
//! | isolation | no policy, a flow that the policies in force have approved, or else what `enforce` says |
//!
//! In the object that logs nothing is judged here, so that all stages are heard.

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
    subprograms::{NULL_ARGUMENT, Subprograms, reference},
    unfinished,
    verdict::{Denied, Encode},
};

/// What is said of a packet. Numbers, as a function's result is.
mod answer {
    /// It passes.
    pub(super) const PASSES: u32 = 0;
    /// It is one of these, and its flow and the policies are to be asked ([`enforce`]).
    pub(super) const FIRST: u32 = 1;
    /// It is none, or only `judge` can say so.
    pub(super) const UNCERTAIN: u32 = 2;
}

/// The verdict on a packet that is one of these; if it passes, then as data. `None`: that is for `judge` to say.
#[inline(always)]
pub(crate) fn verdict(ctx: &TcContext, scope: &Scope) -> Option<Result<(), Denied>> {
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

/// Asks all questions but for those that take the policies' tables.
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
    // What opens a connection is judged by the policy: a look into the table would be one too many.
    let passes = !headers.signal.opens() && conntrack::goes_on(ctx, scope, &headers);
    Some(if passes { answer::PASSES } else { answer::FIRST })
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_first4(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    match reference(scope) {
        Some(scope) => judge::<Ip4>(&TcContext::new(skb), scope, plain::ipv4).encode(),
        None => Err::<(), _>(NULL_ARGUMENT).encode(),
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_first6(skb: *mut __sk_buff, scope: *const Scope) -> u32 {
    match reference(scope) {
        Some(scope) => judge::<Ip6>(&TcContext::new(skb), scope, plain::ipv6).encode(),
        None => Err::<(), _>(NULL_ARGUMENT).encode(),
    }
}

/// Judges a packet about which [`ask`] has left nothing else open.
#[inline(always)]
fn judge<A: Subprograms>(
    ctx: &TcContext,
    scope: &Scope,
    read: impl FnOnce(&Skb) -> Option<Headers<A>>,
) -> Result<(), Denied> {
    let Some(headers) = read(&Skb::of(ctx)) else { return Err(DropReason::Malformed.into()) };
    let mut packet = headers.packet();
    enforce::verdict(ctx, scope, &mut packet).map_err(|denied| {
        record::dropped(ctx, scope, &packet, denied);
        denied.recorded()
    })
}

/// The headers of a packet that is one of these and of which only its flow is to be judged. `None`: it is none, or not of
/// its pod. `own`: the attachment's record, if it has been looked up.
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
    // Who takes a frame goes by its protocol, which a packet socket may have named otherwise.
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

/// Whether nothing of a packet that is judged is written afterwards, but for the checksum of its transport.
#[inline(always)]
fn is_finished<A: Family>(ctx: &TcContext, headers: &Headers<A>) -> bool {
    let header_len = if A::ETHERTYPE == ethertype::IPV4 { IPV4_LEN } else { IPV6_LEN };
    unfinished::is_plain(ctx, (ETHERNET_LEN + header_len) as u32, headers.tuple.lane.protocol())
}

/// Whether a packet comes from its pod's addresses, and is neither of DHCP nor to a port by which routers speak.
#[inline(always)]
fn is_of_its_pod<A: Family>(
    scope: &Scope,
    record: &AttachmentRecord,
    frame: &EthernetHeader,
    headers: &Headers<A>,
) -> bool {
    let tuple = &headers.tuple;
    if scope.has(flag::CHECK_MAC) {
        // Only servers send to the ports of DHCP and DHCPv6 clients; what goes to servers has to be read, and what goes to
        // routers to be told from what goes to one host.
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
