//! The share of an attachment in the flow table.
//!
//! The table never evicts. Each attachment has its own places, numbered from 0; a flow takes the next place of the
//! attachment at whose hook it is entered and evicts the flow there: an ended one at once (an expired one, or a
//! connection that is over, [`Life::is_over`](crate::entry::Life::is_over)), otherwise, of [`Share::TRIED`] places,
//! the one with the lowest priority. If that is an ended connection, there are usually many of them, and each
//! comparison reads two entries of large tables: for the rest of the second the first ended connection is evicted
//! without comparison. So an attachment that enters more flows than it has places loses only its own flows, whether
//! the agent runs or not. The agent sets the number of places of each.

/// Value of `na_share`: one attachment's share of the flow table. All zero: the initial state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Share {
    /// Number of places requested for IPv4 flows; only the programs increase it. The agent writes the value as a whole,
    /// with the number that it has just read: what is requested between the two is not counted, and those places are
    /// requested again at once, where their flows are compared with others before one of them is displaced.
    pub next_v4: u64,
    /// The same for IPv6.
    pub next_v6: u64,
    /// Places for IPv4 flows; 0: [`Share::FIRST`].
    pub most_v4: u32,
    /// Places for IPv6 flows; 0: [`Share::FIRST`].
    pub most_v6: u32,
    /// Until when segments without a known connection are accepted as possible answers, seconds of the kernel's
    /// monotonic clock; 0: never. The agent sets it once, if attachments outlive the table that had their flows.
    pub answers_until: u32,
    /// The second of the kernel's monotonic clock in which a new flow last compared the flows at [`Share::TRIED`]
    /// places and found none with a lower priority than an ended connection; 0: never. For the rest of that second
    /// new flows skip the comparison.
    pub compared: u32,
}

/// Key of `na_own4` and `na_own6`: a place. The value is the [`FlowKey`](crate::FlowKey) of the flow that took it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct PlaceKey {
    /// Attachment id.
    pub attachment: u32,
    /// Number of the place.
    pub place: u32,
}

const _: () = {
    assert!(size_of::<Share>() == 32);
    assert!(size_of::<PlaceKey>() == 8);
    // Flows remember their places in 16 bits.
    assert!(Share::LAST <= crate::Flow::UNPLACED as u32);
};

impl Share {
    /// How long such answers are accepted, in seconds: within this time a sender repeats unacknowledged data several
    /// times (RFC 6298), whichever end opened the connection.
    pub const GRACE: u32 = 60;
    /// Places of an attachment before the agent has set a number.
    pub const FIRST: u32 = 1024;
    /// Maximum number of places of an attachment in a family.
    pub const LAST: u32 = 1 << 15;
    /// Places that a new flow examines before it displaces another flow.
    pub const TRIED: u32 = 8;

    /// Whether a segment without a known connection may be an answer. `until`: [`Share::answers_until`]; `now`: seconds of
    /// the monotonic clock.
    #[inline(always)]
    pub const fn takes_answers(until: u32, now: u32) -> bool {
        until != 0 && (until.wrapping_sub(now) as i32) > 0
    }

    /// The number of places for the agent's setting `most`.
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
        let taken = [0, 40, 99, 100, 101, 1 << 20].map(|now| Share::takes_answers(100, now));
        assert_eq!(taken, [true, true, true, false, false, false]);
        assert_eq!([0, 1, u32::MAX].map(|now| Share::takes_answers(0, now)), [false; 3]);
    }
}
