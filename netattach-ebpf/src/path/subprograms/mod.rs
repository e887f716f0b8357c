//! The functions that the kernel verifies on their own (global functions; with memory as arguments since Linux 5.12).
//!
//! The verifier follows every path through a program. Where one part leaves many of them open, the next part is
//! verified once for each, and Linux 6.1, which prunes less than later kernels, gives up after a million instructions.
//! A global function is verified once, for arbitrary arguments, and its caller continues with an arbitrary result. So
//! the packet path is cut where few values cross:
//!
//! | subprogram | does | stands in |
//! |---|---|---|
//! | `na_judge` | reads a frame, checks a pod's claims about itself, and continues with one of the following | `judge` |
//! | `na_shortcut4`, `na_shortcut6` | move most packets between two pods of one bridge to their receiver | `shortcut` |
//! | `na_plain4`, `na_plain6` | let most packets pass before that, in one step | `plain` |
//! | `na_first4`, `na_first6` | judge those of them that may begin a flow | `plain` |
//! | `na_at_node` | asks whether a frame goes to the node's own stack, or comes from it | `frame` |
//! | `na_tags` | walks over VLAN tags | `frame` |
//! | `na_read4`, `na_read6` | read IP and transport headers | `functions` |
//! | `na_options`, `na_neighbour`, `na_dhcp`, `na_dhcp6`, `na_quoted`, `na_padding` | check IPv4 options, ICMPv6, DHCP, ICMP errors and the padding of ARP that a pod sends | `antispoof` |
//! | `na_other` | judges a frame that is neither IP nor ARP | `antispoof` |
//! | `na_on_link` | asks whether a message is neighbour discovery and carries nothing else | `functions` |
//! | `na_guard4`, `na_guard6` | ask whether a packet is judged behind the node's translation | `functions` |
//! | `na_fragment4`, `na_fragment6` | remember the ports of first fragments, complete later ones | `functions` |
//! | `na_known4`, `na_known6` | judge a packet by its flow | `functions` |
//! | `na_open4`, `na_open6` | judge a packet without one by the policy | `functions` |
//! | `na_enter4`, `na_enter6` | find a place for its flow among the attachment's own, and enter it | `functions` |
//! | `na_renew4`, `na_renew6` | enter it over an expired flow in the table | `functions` |
//! | `na_ask4`, `na_ask6` | take one place, or return the readiness of the flow that has it to be displaced | `functions` |
//! | `na_displace4`, `na_displace6` | take one place from the flow that has it | `functions` |
//! | `na_answer4`, `na_answer6` | find the flow that an ICMP error is about | `functions` |
//! | `na_end4`, `na_end6` | ask whether only this attachment can be an end of a packet | `functions` |
//! | `na_policy4`, `na_policy6` | ask a policy | `functions` |
//! | `na_copied4`, `na_copied6`, `na_routed4`, `na_routed6` | the same behind the node's translation | `routed` |
//!
//! The kernel accepts as arguments the context, numbers, and pointers to memory of a type that the object describes
//! (BTF), wholly written by the caller. Such a pointer may be null as far as the verifier knows. The result is a number
//! ([`Encode`](crate::path::verdict::Encode)).
//!
//! Functions called by address family are declared here and defined in `functions`, above the code that they run: so
//! that code can call a subprogram without importing its own caller indirectly.

mod functions;

use aya_ebpf::programs::TcContext;
use netattach_common::{
    DropReason, FlowKey,
    flow::{Leg, Tuple},
    parse::Packet,
};

use crate::path::{
    family::Family,
    scope::Scope,
    verdict::{Denied, Known, Opening},
};

/// A subprogram's result for a null pointer, which no caller passes.
pub(crate) const NULL_ARGUMENT: Denied = Denied::new(DropReason::Malformed);

/// The subprograms of one address family.
pub(crate) trait Subprograms: Family {
    /// Whether a packet that claims to be link maintenance does nothing else.
    fn stays_on_link(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<bool, Denied>;
    /// Reads the headers from IP on, of a packet that has just begun. Afterwards the judged bytes of the packet
    /// cannot change any more.
    fn read(ctx: &TcContext, packet: &mut Packet<Self>) -> Result<(), Denied>;
    /// Whether the node's packet filter judges a packet, before or after.
    fn is_judged_as_routed(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> bool;
    /// Remembers the ports of a first fragment that has passed, or completes a later one by them.
    fn complete_fragment(scope: &Scope, packet: &mut Packet<Self>);
    /// Judges a packet by its flow.
    fn look_up(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> Result<Known, Denied>;
    /// Judges a packet of no known flow, or one that must not be an answer; returns the flow that it opens.
    fn open(scope: &Scope, packet: &Packet<Self>, known: Known) -> Result<Opening, Denied>;
    /// Enters that flow, at one of its attachment's places.
    fn enter(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>, opening: Opening) -> Result<(), Denied>;
    /// Enters it in the entry and at the place of an expired flow. `false`: there is none that could be reused.
    fn renew(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>, opening: Opening) -> bool;
    /// Takes a place unless a flow that continues has it; else returns the readiness of that flow to be displaced.
    fn ask_for_place(attachment: u32, place: u32, key: &FlowKey<Self>, now: u32) -> Result<u32, Denied>;
    /// Takes a place from the flow that has it.
    fn displace(attachment: u32, place: u32, key: &FlowKey<Self>, now: u32) -> Result<u32, Denied>;
    /// Whether an ICMP error is about a packet of a flow that may go on.
    fn is_answer(ctx: &TcContext, scope: &Scope, packet: &Packet<Self>) -> bool;
    /// Whether the attachment is an end of a packet, and the only one that can be.
    fn is_end(scope: &Scope, tuple: &Tuple<Self>) -> bool;
    /// Asks the policy for a leg: returns the rule that allows, which is credited.
    fn ask_policy(scope: &Scope, tuple: &Tuple<Self>, leg: Leg, with_ports: bool) -> Result<u32, Denied>;
}

/// A subprogram's argument.
#[inline(always)]
pub(crate) fn reference<'a, T>(argument: *const T) -> Option<&'a T> {
    // SAFETY: the callers of subprograms hand over references to values on their stacks, which live until the
    // subprogram returns; all bytes are written and stand for values of `T`.
    unsafe { argument.as_ref() }
}

/// A subprogram's mutable argument.
#[inline(always)]
pub(crate) fn exclusive<'a, T>(argument: *mut T) -> Option<&'a mut T> {
    // SAFETY: as above; the references are exclusive.
    unsafe { argument.as_mut() }
}
