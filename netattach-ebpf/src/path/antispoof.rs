//! Anti-spoofing checks on the packets that a pod sends.
//!
//! `CHECK_MAC` guards the link layer: the source MAC (checked by the caller), sender and link-layer fields of ARP and
//! neighbour discovery, the client of DHCP, and roles reserved to infrastructure: bridge, router, multicast querier,
//! server and relay of DHCP, source routing. `CHECK_ADDRESS` guards addresses: IP source, ARP sender, the address of
//! a DHCP client, the advertised neighbour, the receiver of the packet that an ICMP error is about, and the target of
//! duplicate address detection: a pod that may probe any address could make every new host give up its own. Where a
//! policy isolates the pod, packets from other senders must not use the pod's addresses as source either.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use netattach_common::{
    Address, AttachmentRecord, DropReason, Ip4, Ip6, Mac, Side,
    attachment::flag,
    flow::Tuple,
    link::{self, icmpv6},
    parse::{
        Bytes, Kind, Packet, Payload, arp,
        carrier::{self, SnapHead},
        dhcp,
        header::IPV4_LEN,
        icmp, options,
    },
    protocol,
};

use crate::path::{
    family::Family,
    frame::{self, Frame, Skb},
    scope::Scope,
    subprograms::{NULL_ARGUMENT, reference},
    unfinished,
    verdict::{Denied, Encode},
};

/// IANA number of IGMP.
const IGMP: u8 = 2;

/// Sender checks for packets that a pod sends.
pub(crate) trait Sender: Family {
    /// Checks the packet's claims about its sender.
    fn check_sender(
        skb: &Skb,
        scope: &Scope,
        record: &AttachmentRecord,
        packet: &Packet<Self>,
    ) -> Result<(), Denied>;
}

impl Sender for Ip4 {
    #[inline(always)]
    fn check_sender(
        skb: &Skb,
        scope: &Scope,
        record: &AttachmentRecord,
        packet: &Packet<Self>,
    ) -> Result<(), Denied> {
        ipv4(skb, scope, record, packet)
    }
}

impl Sender for Ip6 {
    #[inline(always)]
    fn check_sender(
        skb: &Skb,
        scope: &Scope,
        record: &AttachmentRecord,
        packet: &Packet<Self>,
    ) -> Result<(), Denied> {
        ipv6(skb, scope, record, packet)
    }
}

/// Judges a frame that is neither IP nor ARP.
#[inline(always)]
pub(crate) fn check_other(ctx: &TcContext, scope: &Scope, payload: &Payload) -> Result<(), Denied> {
    Encode::decode(na_other(ctx.skb.skb, scope, payload))
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_other(skb: *mut __sk_buff, scope: *const Scope, payload: *const Payload) -> u32 {
    let answer = match (reference(scope), reference(payload)) {
        (Some(scope), Some(payload)) => other(&TcContext::new(skb), scope, payload).map_err(Denied::from),
        _ => Err(NULL_ARGUMENT),
    };
    answer.encode()
}

/// [`check_other`] within a subprogram. Rules match IP only, so no rule can allow such a frame: a pod isolated for
/// egress cannot send such frames, and a pod isolated for ingress cannot receive them.
#[inline(always)]
fn other(ctx: &TcContext, scope: &Scope, payload: &Payload) -> Result<(), DropReason> {
    let ethertype = payload.ethertype;
    if scope.has(flag::PENDING) {
        return Err(DropReason::Pending);
    }
    let from_pod = scope.side == Side::FromPod;
    if from_pod {
        // The bytes that identify the frame: its ethertype, or the headers behind its length. Checked also for a
        // frame that passes by its ethertype.
        let judged = if ethertype < link::FIRST_ETHERTYPE { size_of::<SnapHead>() as u32 } else { 1 };
        unfinished::check_frame(ctx, u32::from(payload.offset) + judged)?;
    }
    if scope.record()?.passes(ethertype) {
        return Ok(());
    }
    if from_pod && scope.has(flag::CHECK_MAC) {
        let destination: Mac = frame::load(ctx, 0)?;
        if link::is_infrastructure(&destination, ethertype) {
            return Err(DropReason::LinkProtocol);
        }
        if ethertype < link::FIRST_ETHERTYPE {
            let [access_point]: [u8; 1] = frame::load(ctx, payload.offset.into())?;
            if access_point == link::SPANNING_TREE {
                return Err(DropReason::LinkProtocol);
            }
        }
    }
    if from_pod && scope.has(flag::CHECK_ADDRESS) && carrier::has_addresses(carried(ctx, payload)) {
        return Err(DropReason::Ethertype);
    }
    let policy = if from_pod { scope.policies.egress } else { scope.policies.ingress };
    if policy == 0 { Ok(()) } else { Err(DropReason::Ethertype) }
}

/// The ethertype of a frame; read behind the length if the frame has a length instead. 0: it has none.
#[inline(always)]
fn carried(ctx: &TcContext, payload: &Payload) -> u16 {
    if payload.ethertype >= link::FIRST_ETHERTYPE {
        return payload.ethertype;
    }
    match frame::load::<SnapHead>(ctx, payload.offset.into()) {
        Ok(head) => carrier::in_snap(head),
        Err(_) => 0,
    }
}

/// Checks an ARP packet for Ethernet and IPv4 (RFC 826); a probe has no sender address yet (RFC 5227). Policies do
/// not judge ARP, so an ARP packet from a pod must not be able to carry other data.
#[inline(always)]
pub(crate) fn arp(
    ctx: &TcContext,
    scope: &Scope,
    record: &AttachmentRecord,
    frame: &Frame,
) -> Result<(), Denied> {
    if !arp::fits(ctx.len(), frame.payload.offset) {
        return Err(DropReason::Malformed.into());
    }
    let checked = scope.has(flag::CHECK_MAC) || scope.has(flag::CHECK_ADDRESS);
    if scope.side == Side::ToPod || !checked {
        return Ok(());
    }
    unfinished::check_frame(ctx, u32::MAX)?;
    let claim = arp::read(&Skb::of(ctx), !frame.tagged, frame.payload.offset)?;
    if scope.has(flag::CHECK_MAC) && !claim.mac.same(&record.mac) {
        return Err(DropReason::ArpSenderMac.into());
    }
    if scope.has(flag::CHECK_ADDRESS) && !is_own(scope, record, &claim.address) {
        return Err(DropReason::ArpSenderIp.into());
    }
    let end = arp::end(frame.payload.offset);
    // The kernel's own ARP packets have no padding here: the card adds it.
    if ctx.len() > end {
        return Encode::decode(na_padding(ctx.skb.skb, end));
    }
    Ok(())
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_padding(skb: *mut __sk_buff, end: u32) -> u32 {
    arp::check_padding(&Skb::new(skb), end).map_err(Denied::from).encode()
}

/// Checks that an incoming packet does not claim to come from the pod itself.
#[inline(always)]
pub(crate) fn from_others<A: Family>(scope: &Scope, packet: &Packet<A>) -> Result<(), Denied> {
    let checked = scope.side == Side::ToPod && scope.has(flag::CHECK_ADDRESS);
    if checked && is_own(scope, scope.record()?, &packet.tuple.source) {
        return Err(A::SPOOFED.into());
    }
    Ok(())
}

/// Whether a packet with these ends was sent by or is addressed to the pod, as far as the pod's addresses are known.
/// Each direction has its own branch, as in `judge`.
#[inline(never)]
pub(crate) fn is_of_pod<A: Family>(scope: &Scope, tuple: &Tuple<A>) -> bool {
    if !scope.has(flag::CHECK_ADDRESS) {
        return true;
    }
    let Ok(record) = scope.record() else { return false };
    match scope.side {
        Side::FromPod => is_own(scope, record, &tuple.source),
        Side::ToPod => is_own(scope, record, &tuple.destination),
    }
}

/// Whether the attachment is an end of a packet, and the only attachment that can be this end: a packet that reaches
/// a device may be addressed to another attachment, and several attachments may send from a virtual address.
#[inline(always)]
pub(crate) fn is_end<A: Family>(scope: &Scope, tuple: &Tuple<A>) -> bool {
    let Ok(record) = scope.record() else { return false };
    match scope.side {
        Side::FromPod => A::is_given(scope.id, record, &tuple.source),
        Side::ToPod => A::is_given(scope.id, record, &tuple.destination),
    }
}

/// Checks an IPv4 packet.
#[inline(always)]
fn ipv4(skb: &Skb, scope: &Scope, record: &AttachmentRecord, packet: &Packet<Ip4>) -> Result<(), Denied> {
    let source = &packet.tuple.source;
    if scope.has(flag::CHECK_ADDRESS) && !is_own(scope, record, source) {
        // A DHCP client has no address before it gets one (RFC 2131, 4.1).
        if !(source.same(&Ip4::UNSPECIFIED) && is_udp(packet, dhcp::CLIENTS, dhcp::SERVERS)) {
            return Err(Ip4::SPOOFED.into());
        }
    }
    if scope.has(flag::CHECK_MAC) {
        among_routers(scope, packet, link::is_ipv4_multicast)?;
        if link::is_routers_icmp(packet.icmp_type) {
            return Err(DropReason::RouterMessage.into());
        }
        if packet.is_udp_to(dhcp::CLIENTS) {
            return Err(DropReason::DhcpServer.into());
        }
        if packet.is_udp_to(dhcp::SERVERS) {
            let own: Result<(), Denied> = Encode::decode(na_dhcp(skb.raw(), scope, packet));
            own?;
        }
        if packet.tuple.lane.protocol() == IGMP && packet.kind != Kind::LaterFragment {
            if packet.transport == packet.end {
                return Err(DropReason::Malformed.into());
            }
            let [message]: [u8; 1] = skb.load(packet.transport())?;
            if link::is_routers_igmp(message) {
                return Err(DropReason::RouterMessage.into());
            }
        }
        if packet.has_options {
            let from = packet.network() as u32 + IPV4_LEN as u32;
            let sound: Result<(), Denied> = Encode::decode(na_options(skb.raw(), from, packet.transport));
            sound?;
        }
    }
    if packet.kind == Kind::IcmpError && scope.has(flag::CHECK_ADDRESS) {
        return Encode::decode(na_quoted(skb.raw(), scope, packet));
    }
    Ok(())
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_quoted(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<Ip4>) -> u32 {
    let answer = match (reference(scope), reference(packet)) {
        (Some(scope), Some(packet)) => quoted(&Skb::new(skb), scope, packet).map_err(Denied::from),
        _ => Err(NULL_ARGUMENT),
    };
    answer.encode()
}

/// Checks that an ICMP error is about a packet that was sent to the pod, as every error from a host is: the receiver
/// of an error ends the quoted connection, or sends smaller packets in it, regardless of the error's sender.
#[inline(always)]
fn quoted<A: Family>(skb: &Skb, scope: &Scope, packet: &Packet<A>) -> Result<(), DropReason> {
    let destination: A = icmp::quoted_destination(skb, packet)?;
    if is_own(scope, scope.record()?, &destination) { Ok(()) } else { Err(DropReason::IcmpUnrelated) }
}

/// Refuses protocols by which routers agree on routes and on the owner of an address, to a pod that has only its own
/// addresses.
#[inline(always)]
fn among_routers<A: Family>(
    scope: &Scope,
    packet: &Packet<A>,
    is_group: impl FnOnce(&A) -> bool,
) -> Result<(), Denied> {
    let tuple = &packet.tuple;
    let protocol = tuple.lane.protocol();
    let is_one = if protocol == protocol::UDP {
        packet.has_ports
            && link::is_standby_port(tuple.ports.destination().number())
            && is_group(&tuple.destination)
    } else {
        link::is_routers_protocol(protocol)
    };
    if is_one && scope.has(flag::CHECK_ADDRESS) && !scope.has(flag::SHARES_ADDRESSES) {
        return Err(DropReason::RouterMessage.into());
    }
    Ok(())
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_options(skb: *mut __sk_buff, from: u32, to: u32) -> u32 {
    options::ipv4(&Skb::new(skb), from, to).map_err(Denied::from).encode()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_dhcp(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<Ip4>) -> u32 {
    let answer = match (reference(scope), reference(packet)) {
        (Some(scope), Some(packet)) => to_dhcp_servers(&Skb::new(skb), scope, packet).map_err(Denied::from),
        _ => Err(NULL_ARGUMENT),
    };
    answer.encode()
}

/// Checks a datagram to DHCP servers: a server acts on the client that the message names, and may release or withdraw
/// that client's lease. Later fragments have no ports here.
#[inline(always)]
fn to_dhcp_servers(skb: &Skb, scope: &Scope, packet: &Packet<Ip4>) -> Result<(), DropReason> {
    let end = packet.transport + dhcp::READ;
    // After segmentation behind the programs, each datagram would be a message of its own.
    if skb.is_uncut() {
        return Err(DropReason::Malformed);
    }
    if packet.end < end {
        // Too short for a message, unless the rest is in another fragment or behind the end that the IP header names,
        // where servers on packet sockets continue to read.
        let is_all = !packet.kind.is_fragment() && skb.length() < end;
        return if is_all { Ok(()) } else { Err(DropReason::Malformed) };
    }
    skb.check_settled(end)?;
    let claim = dhcp::read(skb, packet.transport())?;
    let record = scope.record()?;
    if !claim.is_client {
        return Err(DropReason::DhcpServer);
    }
    if !claim.mac.same(&record.mac) {
        return Err(DropReason::SourceMac);
    }
    let is_unaddressed = claim.address.same(&Ip4::UNSPECIFIED);
    if scope.has(flag::CHECK_ADDRESS) && !is_unaddressed && !is_own(scope, record, &claim.address) {
        return Err(Ip4::SPOOFED);
    }
    Ok(())
}

/// Checks an IPv6 packet.
#[inline(always)]
fn ipv6(skb: &Skb, scope: &Scope, record: &AttachmentRecord, packet: &Packet<Ip6>) -> Result<(), Denied> {
    let source = &packet.tuple.source;
    let is_icmp = packet.tuple.lane.protocol() == protocol::ICMPV6;
    if scope.has(flag::CHECK_ADDRESS) && !is_own(scope, record, source) {
        let unsourced = packet.kind == Kind::LinkControl && link::may_lack_source(packet.icmp_type);
        if !(source.same(&Ip6::UNSPECIFIED) && unsourced) {
            return Err(Ip6::SPOOFED.into());
        }
    }
    if scope.has(flag::CHECK_MAC) {
        among_routers(scope, packet, link::is_multicast)?;
        if packet.is_udp_to(dhcp::CLIENTS_V6) {
            return Err(DropReason::DhcpServer.into());
        }
        if packet.is_udp_to(dhcp::SERVERS_V6) {
            return Encode::decode(na_dhcp6(skb.raw(), packet));
        }
    }
    if is_icmp && packet.kind != Kind::LaterFragment {
        return Encode::decode(na_neighbour(skb.raw(), scope, packet));
    }
    Ok(())
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_dhcp6(skb: *mut __sk_buff, packet: *const Packet<Ip6>) -> u32 {
    let answer = match reference(packet) {
        Some(packet) => to_dhcpv6_servers(&Skb::new(skb), packet).map_err(Denied::from),
        None => Err(NULL_ARGUMENT),
    };
    answer.encode()
}

/// Checks a datagram to DHCPv6 servers: a relay names the link of a client, and a server believes the relay. The
/// client is named by an identifier from which no address can be derived, so it is not checked.
#[inline(always)]
fn to_dhcpv6_servers(skb: &Skb, packet: &Packet<Ip6>) -> Result<(), DropReason> {
    let at = packet.transport + dhcp::TYPE_V6;
    // As in `to_dhcp_servers`.
    if skb.is_uncut() {
        return Err(DropReason::Malformed);
    }
    if packet.end <= at {
        let is_all = !packet.kind.is_fragment() && skb.length() <= at;
        return if is_all { Ok(()) } else { Err(DropReason::Malformed) };
    }
    let [message]: [u8; 1] = skb.load(at as usize)?;
    if dhcp::is_of_client_v6(message) { Ok(()) } else { Err(DropReason::DhcpServer) }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn na_neighbour(skb: *mut __sk_buff, scope: *const Scope, packet: *const Packet<Ip6>) -> u32 {
    let answer = match (reference(scope), reference(packet)) {
        (Some(scope), Some(packet)) => neighbour(&Skb::new(skb), scope, packet).map_err(Denied::from),
        _ => Err(NULL_ARGUMENT),
    };
    answer.encode()
}

/// Checks an ICMPv6 message: an error, or neighbour discovery.
#[inline(always)]
fn neighbour(skb: &Skb, scope: &Scope, packet: &Packet<Ip6>) -> Result<(), DropReason> {
    if packet.kind == Kind::IcmpError {
        return if scope.has(flag::CHECK_ADDRESS) { quoted(skb, scope, packet) } else { Ok(()) };
    }
    let check_mac = scope.has(flag::CHECK_MAC);
    let record = scope.record()?;
    if let icmpv6::ROUTER_SOLICITATION | icmpv6::NEIGHBOUR_SOLICITATION | icmpv6::NEIGHBOUR_ADVERTISEMENT =
        packet.icmp_type
    {
        skb.check_settled(packet.end)?;
    }
    let skipped = match packet.icmp_type {
        icmpv6::ROUTER_ADVERTISEMENT
        | icmpv6::REDIRECT
        | icmpv6::LISTENER_QUERY
        | icmpv6::MULTICAST_ROUTER
            if check_mac =>
        {
            return Err(DropReason::RouterMessage);
        }
        icmpv6::ROUTER_SOLICITATION => 8,
        icmpv6::NEIGHBOUR_SOLICITATION | icmpv6::NEIGHBOUR_ADVERTISEMENT => {
            // A solicitation from the unspecified address is duplicate address detection for its target (RFC 4862,
            // 5.4).
            let claims = packet.icmp_type == icmpv6::NEIGHBOUR_ADVERTISEMENT
                || packet.tuple.source.same(&Ip6::UNSPECIFIED);
            if claims && scope.has(flag::CHECK_ADDRESS) {
                let target: Ip6 = skb.load(packet.transport() + 8)?;
                if !is_own(scope, record, &target) {
                    return Err(DropReason::NdTarget);
                }
            }
            24
        }
        _ => return Ok(()),
    };
    if !check_mac {
        return Ok(());
    }
    options::neighbour(skb, &record.mac, packet.transport() + skipped, packet.end as usize)
}

/// Whether an address is the attachment's own. The unspecified one never is: in the record it stands for "none".
#[inline(always)]
pub(crate) fn is_own<A: Family>(scope: &Scope, record: &AttachmentRecord, address: &A) -> bool {
    !address.same(&A::UNSPECIFIED) && (A::is_recorded(record, address) || is_listed(scope.id, address))
}

/// Whether the address is in the attachment's overflow list, for addresses that do not fit into the record. Out of
/// line, with the key on the stack: few packets come here.
#[inline(never)]
fn is_listed<A: Family>(attachment: u32, address: &A) -> bool {
    A::is_listed(attachment, address)
}

#[inline(always)]
fn is_udp(packet: &Packet<Ip4>, source_port: u16, destination_port: u16) -> bool {
    packet.is_udp_to(destination_port) && packet.tuple.ports.source().number() == source_port
}
