//! Decides whether an ADD that requires its status to be written begins while the API server does not
//! answer. Pure.

use std::time::{Duration, Instant};

/// While the server does not answer, one ADD is tried after this time: possibly only reads fail.
const AGAIN: Duration = Duration::from_secs(10);

/// The results of the writes that ADDs waited for.
#[derive(Debug, Default)]
pub(in crate::agent) struct RequiredStatus {
    /// The time from which an ADD tries again; `None`: no write has failed, or one has succeeded since.
    again: Option<Instant>,
}

impl RequiredStatus {
    /// Whether an ADD may begin. Otherwise it would do all its work, wait for the write and roll back: if
    /// the server is unreachable and the last write has failed, only one ADD at a time is tried.
    pub(in crate::agent) fn may_begin(&mut self, is_reachable: bool, now: Instant) -> bool {
        match self.again {
            Some(again) if !is_reachable => {
                let is_next = now >= again;
                if is_next {
                    self.again = Some(now + AGAIN);
                }
                is_next
            }
            Some(_) | None => true,
        }
    }

    /// Records that an ADD that was admitted has ended without showing whether the server can be written to: the next
    /// ADD tries instead.
    pub(in crate::agent) fn ended_untried(&mut self, now: Instant) {
        self.again = self.again.map(|again| again.min(now));
    }

    /// Records the outcome of a write.
    pub(in crate::agent) fn ended(&mut self, is_written: bool, now: Instant) {
        self.again = (!is_written).then(|| now + AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn while_the_server_does_not_answer_one_add_at_a_time_tries_once_a_write_has_failed() {
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let mut status = RequiredStatus::default();
        let may = |status: &mut RequiredStatus, seconds| {
            [false, true].map(|is_reachable| status.may_begin(is_reachable, at(seconds)))
        };
        status.ended_untried(at(0));
        assert_eq!(may(&mut status, 0), [true, true], "no write has failed");
        status.ended(false, at(10));
        assert_eq!(may(&mut status, 19), [false, true]);
        assert_eq!(may(&mut status, 20), [true, true]);
        assert_eq!(may(&mut status, 20), [false, true], "another one tries");
        status.ended_untried(at(22));
        assert_eq!(may(&mut status, 22), [true, true], "it has not got as far as its write");
        assert_eq!(may(&mut status, 31), [false, true]);
        status.ended(false, at(32));
        assert_eq!(may(&mut status, 41), [false, true]);
        status.ended(true, at(41));
        assert_eq!(may(&mut status, 41), [true, true], "reads alone fail");
    }
}
