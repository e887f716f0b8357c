//! Decides which failed writes are logged: while a server is unavailable, the writes of all pods fail
//! repeatedly for one reason. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often a lasting reason is logged again, with the number of failures.
const COUNTED: Duration = Duration::from_secs(60);
/// A reason that did not occur for this long counts as new: attempts for a pod are at most a minute apart,
/// or as long as the server asks for.
const OVER: Duration = Duration::from_secs(180);

/// The failures by reason: the HTTP status of the refusal, of which there are few, or no answer.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<Option<u16>, Reason>);

#[derive(Debug)]
struct Reason {
    /// When it last occurred.
    last: Instant,
    /// When it was last logged.
    said: Instant,
    /// How many failures were not logged since.
    left_out: u64,
}

/// What to log for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    /// The failure, as the first for its reason.
    Failure,
    /// The failure, and the number of others since the last line for its reason.
    More(u64),
    /// Nothing.
    Nothing,
}

impl Failures {
    /// Records a failed write with that status.
    pub(super) fn line(&mut self, code: Option<u16>, now: Instant) -> Line {
        let known = self.0.get_mut(&code).filter(|reason| now.duration_since(reason.last) < OVER);
        let Some(reason) = known else {
            self.0.insert(code, Reason { last: now, said: now, left_out: 0 });
            return Line::Failure;
        };
        reason.last = now;
        if now.duration_since(reason.said) < COUNTED {
            reason.left_out += 1;
            return Line::Nothing;
        }
        reason.said = now;
        Line::More(std::mem::take(&mut reason.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_of_a_reason_is_logged_and_then_how_many_there_are_each_minute() {
        let (mut failures, start) = (Failures::default(), Instant::now());
        let mut line = |code, seconds| failures.line(code, start + Duration::from_secs(seconds));
        assert_eq!((line(None, 0), line(Some(503), 1)), (Line::Failure, Line::Failure));
        for second in 1..60 {
            assert_eq!(line(None, second), Line::Nothing);
        }
        assert_eq!((line(None, 60), line(Some(503), 60)), (Line::More(59), Line::Nothing));
        assert_eq!((line(None, 119), line(None, 120)), (Line::Nothing, Line::More(1)));
        // The reason was gone, and occurs again.
        assert_eq!((line(None, 120 + 180), line(None, 301)), (Line::Failure, Line::Nothing));
    }
}
