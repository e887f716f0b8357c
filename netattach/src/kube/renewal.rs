//! Decides when the connection to the API server is made anew. Pure.
//!
//! A refused identity or a broken connection is a reason at once: another token or certificate may help. A
//! late answer alone is none: it would add a TLS handshake of every agent to the load of a busy server.
//! Only if several answers in a row are late, or nothing at all has been received for a while, the
//! connection may be dead without having been closed.

use std::time::{Duration, Instant};

/// Least time between two renewals after a failure of the connection or a refused identity.
const AFTER_FAILURE: Duration = Duration::from_secs(2);
/// Least time between two renewals after late answers.
const AFTER_LATE: Duration = Duration::from_secs(30);
/// Number of consecutive late answers, of any requests, that are a reason.
const LATE: u32 = 5;
/// A late answer is a reason if nothing was received on any connection for so long, or if it was itself
/// waited for so long.
const SILENCE: Duration = Duration::from_secs(30);

/// The result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answered {
    /// The server has answered.
    Well,
    /// There was no answer in that time.
    Late(Duration),
    /// There is no connection, or the server rejects the agent's identity.
    Broken,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Renewal {
    /// When the connection was last made or attempted.
    since: Instant,
    /// When something was last received.
    heard: Instant,
    /// Number of consecutive late answers.
    late: u32,
}

impl Renewal {
    /// The state of a connection that is made now.
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, heard: now, late: 0 }
    }

    /// Records that something was received on a connection.
    pub(super) fn heard(&mut self, now: Instant) {
        (self.heard, self.late) = (now, 0);
    }

    /// Records the result of a request. Returns whether the connection is to be made anew now.
    pub(super) fn is_due(&mut self, answered: Answered, now: Instant) -> bool {
        let pause = match answered {
            Answered::Well => {
                self.heard(now);
                return false;
            }
            Answered::Broken => AFTER_FAILURE,
            Answered::Late(within) => {
                self.late = self.late.saturating_add(1);
                let is_silent = now.duration_since(self.heard) >= SILENCE || within >= SILENCE;
                if self.late < LATE && !is_silent {
                    return false;
                }
                AFTER_LATE
            }
        };
        if now.duration_since(self.since) < pause {
            return false;
        }
        (self.since, self.late) = (now, 0);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each answer, given with its time in seconds since the start, whether it is a reason.
    fn due(answers: &[(u64, Answered)]) -> Vec<bool> {
        let start = Instant::now();
        let mut renewal = Renewal::new(start);
        answers.iter().map(|(at, it)| renewal.is_due(*it, start + Duration::from_secs(*at))).collect()
    }

    #[test]
    fn a_connection_that_breaks_is_made_anew_at_once_and_then_every_two_seconds() {
        let broken = Answered::Broken;
        assert_eq!(
            due(&[(10, broken), (11, broken), (12, broken), (13, broken), (14, broken)]),
            [true, false, true, false, true]
        );
    }

    #[test]
    fn late_answers_are_a_reason_in_a_row_or_in_silence_and_each_half_minute_at_most() {
        let late = Answered::Late(Duration::from_secs(1));
        // An overloaded server that answers now and then.
        let mixed: Vec<_> =
            (40..80).map(|at| (at, if at % 4 == 0 { Answered::Well } else { late })).collect();
        assert_eq!(due(&mixed), vec![false; 40]);
        // No answer was late for long, and the last one is 5 s old.
        let in_a_row: Vec<_> =
            [(40, Answered::Well)].into_iter().chain((45..52).map(|at| (at, late))).collect();
        assert_eq!(due(&in_a_row), [false, false, false, false, false, true, false, false]);
        // After silence the first late answer is a reason; a server that never answers is not contacted
        // more often.
        assert_eq!(
            due(&[(31, late), (33, late), (60, late), (61, late), (90, late), (91, late)]),
            [true, false, false, true, false, true]
        );
        // An answer that was waited for so long, beside others that were answered.
        let long = Answered::Late(SILENCE);
        assert_eq!(due(&[(39, Answered::Well), (40, long), (41, long)]), [false, true, false]);
    }

    #[test]
    fn an_event_of_a_watch_counts_as_an_answer() {
        let (start, late) = (Instant::now(), Answered::Late(Duration::from_secs(1)));
        let mut renewal = Renewal::new(start);
        let at = |seconds| start + Duration::from_secs(seconds);
        renewal.heard(at(35));
        assert!(!renewal.is_due(late, at(40)));
        assert!(renewal.is_due(late, at(65)));
    }
}
