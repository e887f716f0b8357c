//! Logs the result of each stage for a packet, in an object that is built for it (feature `log`, `cargo xtask
//! build-ebpf --log`). In the normal object the calls compile to nothing.
//!
//! The agent sets [`NA_LOG_OF`](chosen) to the attachment whose packets are to be followed. It replaces the numbers
//! behind `attachment=`, `reason=` and `decline=` by names.

use aya_ebpf::programs::TcContext;
use netattach_common::{Side, flow::Tuple};

use crate::path::{
    scope::Scope,
    verdict::{Denied, Encode, Few, Opening},
};

/// The stage that a log line is about.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum Stage {
    /// The sender checks; and whether its policy is left to the node's packet filter.
    Sender = 1,
    /// The flow table.
    Flow,
    /// The policies.
    Policy,
    /// The place of a new flow.
    Place,
    /// The verdict at the device, behind all of these and the bandwidth.
    Verdict,
    /// The verdict behind the node's translation, if it is a refusal.
    Routed,
    /// The receiver found by the fast path: an attachment, or 0 for an uplink.
    Fast,
    /// Why the fast path was not taken.
    Declined,
}

/// Logs that a packet has arrived.
#[inline(always)]
pub(crate) fn arrival(ctx: &TcContext, attachment: u32, side: Side) {
    imp::arrival(ctx, attachment, side);
}

/// Logs a packet's headers.
#[inline(always)]
pub(crate) fn headers<A: Addresses>(scope: &Scope, tuple: &Tuple<A>) {
    imp::headers(scope.id, tuple);
}

/// Logs the result of a stage.
#[inline(always)]
pub(crate) fn outcome<T: Few + Copy>(attachment: u32, stage: Stage, outcome: &Result<T, Denied>) {
    imp::stage(attachment, stage, (*outcome).encode());
}

/// Logs the finding of a stage for a packet that continues. In a branch of its own: the compiler copies the unused
/// half of a result too, and the verifier refuses to read it.
#[inline(always)]
pub(crate) fn answer<T: Few>(attachment: u32, stage: Stage, answer: T) {
    imp::stage(attachment, stage, Ok(answer).encode());
}

/// Logs why a stage denies a packet.
#[inline(always)]
pub(crate) fn denial(attachment: u32, stage: Stage, denied: Denied) {
    imp::stage(attachment, stage, Err::<(), _>(denied).encode());
}

/// Logs the result of the policies.
#[inline(always)]
pub(crate) fn policy(attachment: u32, outcome: &Result<Opening, Denied>) {
    let number = match outcome {
        Ok(opening) if opening.is_any() => opening.rule(),
        Ok(_) => NOTHING,
        Err(denied) => REFUSED | u32::from(denied.number()),
    };
    imp::stage(attachment, Stage::Policy, number);
}

/// A policy that lets a packet pass without a flow. No rule has the number.
const NOTHING: u32 = 1 << 30;
/// Set beside the reason of a policy that does not.
const REFUSED: u32 = 1 << 31;

/// Logs a number of a stage.
#[inline(always)]
pub(crate) fn number(attachment: u32, stage: Stage, number: u32) {
    imp::stage(attachment, stage, number);
}

pub(crate) use imp::Addresses;

#[cfg(not(feature = "log"))]
mod imp {
    use super::{Side, Stage, TcContext, Tuple};

    /// For every type: logs nothing.
    pub(crate) trait Addresses {}
    impl<A> Addresses for A {}

    #[inline(always)]
    pub(super) fn arrival(_: &TcContext, _: u32, _: Side) {}

    #[inline(always)]
    pub(super) fn headers<A>(_: u32, _: &Tuple<A>) {}

    #[inline(always)]
    pub(super) fn stage(_: u32, _: Stage, _: u32) {}
}

#[cfg(feature = "log")]
mod imp {
    use aya_ebpf::{bindings::__sk_buff, macros::map, maps::Array};
    use aya_log_ebpf::{debug, trace};
    use netattach_common::{Ip4, Ip6};

    use super::{Side, Stage, TcContext, Tuple};
    use crate::path::subprograms::reference;

    /// Number of the attachment whose packets are followed: 0 for none, `u32::MAX` for every one. Written by the agent.
    #[map]
    static NA_LOG_OF: Array<u32> = Array::with_max_entries(1, 0);

    const EVERY: u32 = u32::MAX;

    /// Stands for the context, which aya's macros do not use yet. A subprogram takes no argument that it does not
    /// use: LLVM would leave it out of the calls, and the verifier insists on it.
    const UNUSED: () = ();

    /// Address families that can be logged.
    pub(crate) trait Addresses: Sized {
        /// Hands a tuple over to the family's subprogram.
        fn say(attachment: u32, tuple: &Tuple<Self>);
    }

    macro_rules! addresses {
        ($address:ty, $say:ident) => {
            impl Addresses for $address {
                #[inline(always)]
                fn say(attachment: u32, tuple: &Tuple<Self>) {
                    $say(attachment, tuple);
                }
            }

            #[unsafe(no_mangle)]
            #[inline(never)]
            fn $say(attachment: u32, tuple: *const Tuple<$address>) -> u32 {
                let Some(tuple) = reference(tuple) else { return 0 };
                let (from, to) = (tuple.source.octets, tuple.destination.octets);
                let [source, destination] = [tuple.ports.source(), tuple.ports.destination()]
                    .map(|port| u32::from(u16::from_be_bytes(port.octets)));
                let protocol = u32::from(tuple.lane.protocol());
                trace!(
                    UNUSED,
                    "attachment={} headers: {:i} port {} to {:i} port {}, protocol {}",
                    attachment,
                    from,
                    source,
                    to,
                    destination,
                    protocol
                );
                0
            }
        };
    }

    addresses!(Ip4, na_log_tuple4);
    addresses!(Ip6, na_log_tuple6);

    #[inline(always)]
    pub(super) fn arrival(ctx: &TcContext, attachment: u32, side: Side) {
        if is_followed(attachment) {
            na_log_arrival(ctx.skb.skb, attachment, side as u32);
        }
    }

    #[inline(always)]
    pub(super) fn headers<A: Addresses>(attachment: u32, tuple: &Tuple<A>) {
        if is_followed(attachment) {
            A::say(attachment, tuple);
        }
    }

    #[inline(always)]
    pub(super) fn stage(attachment: u32, stage: Stage, outcome: u32) {
        if is_followed(attachment) {
            na_log_stage(attachment, stage as u32, outcome);
        }
    }

    #[inline(always)]
    fn is_followed(attachment: u32) -> bool {
        let of = NA_LOG_OF.get(0).copied().unwrap_or(0);
        of == attachment || of == EVERY
    }

    #[unsafe(no_mangle)]
    #[inline(never)]
    fn na_log_arrival(skb: *mut __sk_buff, attachment: u32, side: u32) -> u32 {
        let ctx = TcContext::new(skb);
        // SAFETY: the context pointer is valid while the program runs.
        let (device, ethertype) = unsafe { ((*skb).ifindex, u16::from_be((*skb).protocol as u16)) };
        let bytes = ctx.len();
        if side == Side::FromPod as u32 {
            trace!(
                &ctx,
                "attachment={} from the pod: {} bytes, ethertype {:x}, at device {}",
                attachment,
                bytes,
                ethertype,
                device
            );
        } else {
            trace!(
                &ctx,
                "attachment={} to the pod: {} bytes, ethertype {:x}, at device {}",
                attachment,
                bytes,
                ethertype,
                device
            );
        }
        0
    }

    /// `outcome`: an encoded result (`verdict::Encode`), or a number where the stage has one.
    #[unsafe(no_mangle)]
    #[inline(never)]
    fn na_log_stage(attachment: u32, stage: u32, outcome: u32) -> u32 {
        const SENDER: u32 = Stage::Sender as u32;
        const FLOW: u32 = Stage::Flow as u32;
        const POLICY: u32 = Stage::Policy as u32;
        const PLACE: u32 = Stage::Place as u32;
        const VERDICT: u32 = Stage::Verdict as u32;
        const ROUTED: u32 = Stage::Routed as u32;
        const FAST: u32 = Stage::Fast as u32;
        let (reason, answer) = (outcome & 0xff, outcome >> 16);
        match (stage, reason, answer) {
            (FAST, ..) if outcome == 0 => trace!(UNUSED, "attachment={} fast path: to an uplink", attachment),
            (FAST, ..) => trace!(UNUSED, "attachment={} fast path: to attachment={}", attachment, outcome),
            (POLICY, ..) if outcome & super::REFUSED != 0 => {
                trace!(UNUSED, "attachment={} policy: denied, reason={}", attachment, reason);
            }
            (POLICY, ..) if outcome == super::NOTHING => {
                trace!(UNUSED, "attachment={} policy: allowed, opens no flow", attachment);
            }
            (POLICY, ..) => trace!(UNUSED, "attachment={} policy: allowed, rule {}", attachment, outcome),
            (SENDER, 0, 0) => trace!(UNUSED, "attachment={} sender: accepted", attachment),
            (SENDER, 0, _) => {
                trace!(
                    UNUSED,
                    "attachment={} sender: accepted; judged behind the node's translation", attachment
                )
            }
            (SENDER, ..) => trace!(UNUSED, "attachment={} sender: denied, reason={}", attachment, reason),
            (FLOW, 0, 0) => trace!(UNUSED, "attachment={} flow: goes on", attachment),
            (FLOW, 0, 1) => trace!(UNUSED, "attachment={} flow: none", attachment),
            (FLOW, 0, _) => trace!(UNUSED, "attachment={} flow: over", attachment),
            (FLOW, ..) => trace!(UNUSED, "attachment={} flow: denied, reason={}", attachment, reason),
            (PLACE, 0, _) => trace!(UNUSED, "attachment={} flow: entered", attachment),
            (PLACE, ..) => trace!(UNUSED, "attachment={} flow: not entered, reason={}", attachment, reason),
            (VERDICT, 0, _) => debug!(UNUSED, "attachment={} verdict: passes", attachment),
            (VERDICT, ..) => debug!(UNUSED, "attachment={} verdict: dropped, reason={}", attachment, reason),
            (ROUTED, ..) => debug!(
                UNUSED,
                "attachment={} verdict behind the translation: dropped, reason={}", attachment, reason
            ),
            _ => {
                trace!(UNUSED, "attachment={} fast path: left to the stack, decline={}", attachment, outcome)
            }
        }
        0
    }
}
