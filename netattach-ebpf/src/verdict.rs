//! What is said of a packet, in words that one function of BPF can hand to another.

use core::num::NonZeroU32;

use netattach_common::DropReason;

/// Why a packet must not go on. Never zero, so that a `Result` of nothing else is a word too.
#[derive(Clone, Copy)]
pub(crate) struct Denied(NonZeroU32);

impl Denied {
    /// The agent has been told, by someone who knew more about the packet.
    const TOLD: u32 = 1 << 8;

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
    pub(crate) fn is_told(self) -> bool {
        self.0.get() & Self::TOLD != 0
    }

    /// The same, of which the agent has been told.
    #[inline(always)]
    pub(crate) fn told(self) -> Self {
        Self(self.0 | Self::TOLD)
    }
}

impl From<DropReason> for Denied {
    #[inline(always)]
    fn from(reason: DropReason) -> Self {
        Self::new(reason)
    }
}

/// What a packet that may pass is to whoever carries it on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    /// IP traffic without VLAN tags.
    Data,
    /// What keeps a link going: ARP, neighbour discovery, other ethertypes than IP, tagged frames.
    Control,
}

/// An answer as a number, which is all that a function can return in BPF. Whoever reads it may find any number there, and
/// need not look after how it came about: that is the verifier's gain.
pub(crate) trait Word<W>: Sized {
    fn to_word(self) -> W;
    fn from_word(word: W) -> Self;
}

/// The answers that are not denials, two at most.
pub(crate) trait Granted: Sized {
    fn is_second(self) -> bool;
    fn of(second: bool) -> Self;
}

impl Granted for () {
    #[inline(always)]
    fn is_second(self) -> bool {
        false
    }

    #[inline(always)]
    fn of(_: bool) -> Self {}
}

impl Granted for bool {
    #[inline(always)]
    fn is_second(self) -> bool {
        self
    }

    #[inline(always)]
    fn of(second: bool) -> Self {
        second
    }
}

impl Granted for Sort {
    #[inline(always)]
    fn is_second(self) -> bool {
        self == Self::Control
    }

    #[inline(always)]
    fn of(second: bool) -> Self {
        if second { Self::Control } else { Self::Data }
    }
}

/// Stands for the second answer; no reason has this number. The first one is 0.
const SECOND: u32 = 1 << 16;

impl<G: Granted> Word<u32> for Result<G, Denied> {
    #[inline(always)]
    fn to_word(self) -> u32 {
        match self {
            Ok(granted) => {
                if granted.is_second() {
                    SECOND
                } else {
                    0
                }
            }
            Err(denied) => denied.0.get(),
        }
    }

    #[inline(always)]
    fn from_word(word: u32) -> Self {
        match NonZeroU32::new(word & !SECOND) {
            None => Ok(G::of(word == SECOND)),
            Some(word) => Err(Denied(word)),
        }
    }
}

/// The number of a rule in the lower half, or a denial in the upper one.
impl Word<u64> for Result<u32, Denied> {
    #[inline(always)]
    fn to_word(self) -> u64 {
        self.map_or_else(|denied| u64::from(denied.0.get()) << 32, u64::from)
    }

    #[inline(always)]
    fn from_word(word: u64) -> Self {
        NonZeroU32::new((word >> 32) as u32).map_or(Ok(word as u32), |denied| Err(Denied(denied)))
    }
}
