//! Messages by which the hosts on a link find each other.

use netattach_common::{
    DropReason, Ip6, Side,
    attachment::flag,
    link::{self, icmpv6},
    parse::{Packet, icmp},
};

use crate::path::{antispoof, frame::Skb, scope::Scope};

/// Whether a link maintenance message stays on the link and does nothing else: it is well-formed, and goes to a
/// link-local address, to one of the link's groups, to an on-link address, or to the pod itself.
#[inline(always)]
pub(crate) fn stays_on_link(skb: &Skb, scope: &Scope, packet: &Packet<Ip6>) -> Result<bool, DropReason> {
    let Some(kind) = icmp::form(skb, packet)? else { return Ok(false) };
    let destination = &packet.tuple.destination;
    if link::is_link_scope(destination) || link::is_link_local(destination) {
        return Ok(true);
    }
    let listener = !matches!(kind, icmpv6::ROUTER_SOLICITATION..=icmpv6::REDIRECT);
    // Reports go to the group they are about (RFC 2710, 3); a hop limit of 1 keeps them on the link.
    if listener && link::is_multicast(destination) {
        return Ok(true);
    }
    // Without the attachment's addresses its prefixes are not known either.
    if !scope.has(flag::CHECK_ADDRESS) {
        return Ok(!link::is_multicast(destination));
    }
    let record = scope.record()?;
    Ok(match scope.side {
        Side::FromPod => record.on_link[0].holds(destination) || record.on_link[1].holds(destination),
        Side::ToPod => antispoof::is_own(scope, record, destination),
    })
}
