//! Decides whether an ADD that requires its status to be written begins while the API server does not
//! answer. Pure.

use std::time::{Duration, Instant};

/// While the server does not answer, one ADD is tried after this time: possibly only reads fail.
const AGAIN: Duration = Duration::from_secs(10);

/// The results of the writes that ADDs waited for.
#[derive(Debug, Default)]
pub(super) struct RequiredStatus {
    /// When the last write failed, or the last trial began; `None`: no write has failed since the last
    /// success.
    failed: Option<Instant>,
}

impl RequiredStatus {
    /// Whether an ADD may begin. Otherwise it would do all its work, wait for the write and roll back: if
    /// the server is unreachable and the last write has failed, only one ADD at a time is tried.
    pub(super) fn may_begin(&mut self, is_reachable: bool, now: Instant) -> bool {
        match self.failed {
            Some(at) if !is_reachable => {
                let is_next = now.saturating_duration_since(at) >= AGAIN;
                if is_next {
                    self.failed = Some(now);
                }
                is_next
            }
            Some(_) | None => true,
        }
    }

    /// Records the result of a write.
    pub(super) fn ended(&mut self, is_written: bool, now: Instant) {
        self.failed = (!is_written).then_some(now);
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
        assert_eq!(may(&mut status, 0), [true, true], "no write has failed");
        status.ended(false, at(10));
        assert_eq!(may(&mut status, 19), [false, true]);
        assert_eq!(may(&mut status, 20), [true, true]);
        assert_eq!(may(&mut status, 20), [false, true], "another one tries");
        status.ended(false, at(30));
        assert_eq!(may(&mut status, 39), [false, true]);
        status.ended(true, at(39));
        assert_eq!(may(&mut status, 39), [true, true], "reads alone fail");
    }
}
