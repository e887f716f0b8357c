//! What the flow table owes to one attachment.

/// Value of `na_share`: one attachment's part in the flow table. All zero: nothing was ever owed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Share {
    /// Until when segments of no known connection may also be answers, seconds of the kernel's monotonic clock; 0: they
    /// never may. The agent sets it once, where attachments outlive the table that had their flows.
    pub answers_until: u32,
}

const _: () = assert!(size_of::<Share>() == 4);

impl Share {
    /// For how long answers are taken, seconds: a sender with something to send repeats it several times meanwhile
    /// (RFC 6298), whichever end opened the connection.
    pub const GRACE: u32 = 60;

    /// Whether a segment of no known connection may be an answer. `now`: seconds of the monotonic clock.
    #[inline(always)]
    pub const fn takes_answers(&self, now: u32) -> bool {
        self.answers_until != 0 && (self.answers_until.wrapping_sub(now) as i32) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_until_the_deadline_and_never_without_one() {
        let share = Share { answers_until: 100 };
        assert_eq!(
            [0, 40, 99, 100, 101, 1 << 20].map(|now| share.takes_answers(now)),
            [true, true, true, false, false, false]
        );
        assert_eq!([0, 1, u32::MAX].map(|now| Share::default().takes_answers(now)), [false; 3]);
    }
}
