//! What part of the flow table an attachment has.
//!
//! The table never evicts. Each attachment has places of its own, numbered from 0; a flow takes the next of those of
//! the attachment at whose hook it is entered, and what is there makes room for it: what has ended at once, or else,
//! of [`Share::TRIED`] places, what is missed least. So whoever enters more flows than it has places loses its own,
//! and nobody else's, whether the agent runs or not. How many places each has is the agent's to say.

/// Value of `na_share`: one attachment's part in the flow table. All zero: what everyone begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Share {
    /// How many places IPv4 flows have asked for; only the programs count on.
    pub next_v4: u64,
    /// The same for IPv6.
    pub next_v6: u64,
    /// Places for IPv4 flows; 0: [`Share::FIRST`].
    pub most_v4: u32,
    /// Places for IPv6 flows; 0: [`Share::FIRST`].
    pub most_v6: u32,
    /// Until when segments of no known connection may also be answers, seconds of the kernel's monotonic clock; 0: they
    /// never may. The agent sets it once, where attachments outlive the table that had their flows.
    pub answers_until: u32,
    /// Zero.
    pub pad: u32,
}

/// Key of `na_own4` and `na_own6`: a place. The value is the [`FlowKey`](crate::FlowKey) of the flow that took it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct PlaceKey {
    /// Whose.
    pub attachment: u32,
    /// Which.
    pub place: u32,
}

const _: () = {
    assert!(size_of::<Share>() == 32);
    assert!(size_of::<PlaceKey>() == 8);
    // Flows remember their places in 16 bits.
    assert!(Share::LAST <= crate::Flow::UNPLACED as u32);
};

impl Share {
    /// For how long answers are taken, seconds: a sender with something to send repeats it several times meanwhile
    /// (RFC 6298), whichever end opened the connection.
    pub const GRACE: u32 = 60;
    /// Places of an attachment that the agent has not given any yet.
    pub const FIRST: u32 = 1024;
    /// The most places that an attachment can have in a family.
    pub const LAST: u32 = 1 << 15;
    /// Places that a new flow looks at before it displaces another.
    pub const TRIED: u32 = 8;

    /// Whether a segment of no known connection may be an answer. `now`: seconds of the monotonic clock.
    #[inline(always)]
    pub const fn takes_answers(&self, now: u32) -> bool {
        self.answers_until != 0 && (self.answers_until.wrapping_sub(now) as i32) > 0
    }

    /// How many places there are where the agent says `most`.
    #[inline(always)]
    pub const fn places(most: u32) -> u32 {
        if most == 0 { Self::FIRST } else { most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_until_the_deadline_and_never_without_one() {
        let share = Share { answers_until: 100, ..Share::default() };
        let taken = [0, 40, 99, 100, 101, 1 << 20].map(|now| share.takes_answers(now));
        assert_eq!(taken, [true, true, true, false, false, false]);
        assert_eq!([0, 1, u32::MAX].map(|now| Share::default().takes_answers(now)), [false; 3]);
    }
}
