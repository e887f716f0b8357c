//! Verdicts on a packet, and how one BPF function returns them to another: as a number.

use core::num::NonZeroU32;

use netattach_common::{Decline, DropReason, PortRule, flow::Leg};

/// Why a packet must be dropped. Never zero, so that a `Result` without another value is one number too.
#[derive(Clone, Copy)]
pub(crate) struct Denied(NonZeroU32);

impl Denied {
    /// A record of the drop has been written, with more detail than the caller has.
    const RECORDED: u32 = 1 << 8;

    #[inline(always)]
    pub(crate) const fn new(reason: DropReason) -> Self {
        // SAFETY: reasons are numbered from 1.
        Self(unsafe { NonZeroU32::new_unchecked(reason as u32) })
    }

    /// Number of the [`DropReason`].
    #[inline(always)]
    pub(crate) fn number(self) -> u8 {
        self.0.get() as u8
    }

    #[inline(always)]
    pub(crate) fn is_recorded(self) -> bool {
        self.0.get() & Self::RECORDED != 0
    }

    /// The same denial, with its record written.
    #[inline(always)]
    pub(crate) fn recorded(self) -> Self {
        Self(self.0 | Self::RECORDED)
    }
}

impl From<DropReason> for Denied {
    #[inline(always)]
    fn from(reason: DropReason) -> Self {
        Self::new(reason)
    }
}

/// Why the fast path is not taken, as a number of the same size as the receiver's: both words of a `Result` of the
/// two are then always written, and the verifier refuses to copy a word that may be unwritten.
#[derive(Clone, Copy)]
pub(crate) struct Declined(pub(crate) u32);

impl From<Decline> for Declined {
    #[inline(always)]
    fn from(reason: Decline) -> Self {
        Self(reason as u32)
    }
}

/// The class of a packet that may pass: decides whether the fast path may take it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketClass {
    /// IP traffic without VLAN tags.
    Data,
    /// Traffic that keeps a link going: ARP, neighbour discovery, other ethertypes than IP, tagged frames.
    Control,
}

/// The result of a look-up in the flow table, as one number: code compares it and does not match on it, so that the
/// verifier follows fewer paths.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known(pub(crate) u32);

impl Known {
    /// It belongs to a flow that continues.
    pub(crate) const PASSES: Self = Self(0);
    /// There is no entry for its flow.
    pub(crate) const ABSENT: Self = Self(1);
    /// The entry is of an expired flow: a new one may take its place.
    pub(crate) const OVER: Self = Self(2);

    /// It goes to the opener of a flow without an answer so far, and must not be the answer, for the reason in this
    /// number. A datagram may open a flow of its own, in that entry's place.
    #[inline(always)]
    pub(crate) fn refused(denied: Denied) -> Self {
        Self(Self::OVER.0 + u32::from(denied.number()))
    }

    /// Whether a new flow may take the entry.
    #[inline(always)]
    pub(crate) fn leaves_entry(self) -> bool {
        self.0 >= Self::OVER.0
    }

    /// Why the packet must not be an answer, if it could be one.
    #[inline(always)]
    pub(crate) fn refusal(self) -> Option<Denied> {
        NonZeroU32::new(self.0.saturating_sub(Self::OVER.0)).map(Denied)
    }
}

/// How a flow begins, as one number: the rule that allows it (0: no policy applies), and whether its first packet
/// comes from its opener.
#[derive(Clone, Copy)]
pub(crate) struct Opening(pub(crate) u32);

impl Opening {
    /// The packet may pass, and opens nothing.
    pub(crate) const NONE: Self = Self(u32::MAX);
    /// Set if the first packet comes from the opener. No policy has so many rules.
    const FORWARD: u32 = 1 << 30;
    /// How far the bits of [`Leg::at_end`] are shifted here.
    const STATE: u32 = 23;
    /// Set if the rule is about the pod's own node.
    const OF_NODE: u32 = PortRule::AS_ROUTED;
    /// The bits of the rule.
    const RULE: u32 = (1 << 28) - 1;

    #[inline(always)]
    pub(crate) fn new(rule: u32, forward: bool) -> Self {
        Self(rule & (Self::RULE | Self::OF_NODE) | if forward { Self::FORWARD } else { 0 })
    }

    /// The same, approved at the end that the leg is of, if `at_end` says so.
    #[inline(always)]
    pub(crate) fn at_end(self, leg: Leg, at_end: bool) -> Self {
        Self(self.0 | (u32::from(leg.at_end()) * u32::from(at_end)) << Self::STATE)
    }

    /// The bits that belong to the flow's state.
    #[inline(always)]
    pub(crate) fn state(self) -> u8 {
        (self.0 >> Self::STATE) as u8 & (Leg::Opener.at_end() | Leg::Responder.at_end())
    }

    /// Whether there is a flow to enter.
    #[inline(always)]
    pub(crate) fn is_any(self) -> bool {
        self.0 != Self::NONE.0
    }

    #[inline(always)]
    pub(crate) fn rule(self) -> u32 {
        self.0 & Self::RULE
    }

    /// Whether the rule about the pod's own node allows the flow.
    #[inline(always)]
    pub(crate) fn is_by_rule_of_node(self) -> bool {
        self.0 & Self::OF_NODE != 0
    }

    #[inline(always)]
    pub(crate) fn is_forward(self) -> bool {
        self.0 & Self::FORWARD != 0
    }
}

/// A result as a number, the only type that a BPF function returns. The verifier treats it as any number at the caller,
/// and so does not follow how it came about.
pub(crate) trait Encode<W>: Sized {
    fn encode(self) -> W;
    fn decode(number: W) -> Self;
}

/// Results with few values, as a number from 0.
pub(crate) trait Few: Sized {
    fn number(self) -> u32;
    /// Maps any number to a result.
    fn from_number(number: u32) -> Self;
}

impl Few for () {
    #[inline(always)]
    fn number(self) -> u32 {
        0
    }

    #[inline(always)]
    fn from_number(_: u32) -> Self {}
}

impl Few for bool {
    #[inline(always)]
    fn number(self) -> u32 {
        self.into()
    }

    #[inline(always)]
    fn from_number(number: u32) -> Self {
        number != 0
    }
}

impl Few for PacketClass {
    #[inline(always)]
    fn number(self) -> u32 {
        (self == Self::Control).into()
    }

    #[inline(always)]
    fn from_number(number: u32) -> Self {
        if number == 0 { Self::Data } else { Self::Control }
    }
}

impl Few for Known {
    #[inline(always)]
    fn number(self) -> u32 {
        self.0
    }

    #[inline(always)]
    fn from_number(number: u32) -> Self {
        Self(number)
    }
}

/// A result's number in the upper half, or a denial in the lower one.
impl<T: Few> Encode<u32> for Result<T, Denied> {
    #[inline(always)]
    fn encode(self) -> u32 {
        match self {
            Ok(answer) => answer.number() << 16,
            Err(denied) => denied.0.get(),
        }
    }

    #[inline(always)]
    fn decode(number: u32) -> Self {
        match NonZeroU32::new(number & 0xffff) {
            None => Ok(T::from_number(number >> 16)),
            Some(number) => Err(Denied(number)),
        }
    }
}

/// A number in the lower half, or a denial in the upper one.
impl Encode<u64> for Result<u32, Denied> {
    #[inline(always)]
    fn encode(self) -> u64 {
        self.map_or_else(|denied| u64::from(denied.0.get()) << 32, u64::from)
    }

    #[inline(always)]
    fn decode(number: u64) -> Self {
        NonZeroU32::new((number >> 32) as u32).map_or(Ok(number as u32), |denied| Err(Denied(denied)))
    }
}

/// How a flow begins, or a denial.
impl Encode<u64> for Result<Opening, Denied> {
    #[inline(always)]
    fn encode(self) -> u64 {
        self.map(|opening| opening.0).encode()
    }

    #[inline(always)]
    fn decode(number: u64) -> Self {
        let answer: Result<u32, Denied> = Encode::decode(number);
        answer.map(Opening)
    }
}
