//! A bound on the rate of writes to the server. Pure.

use std::time::{Duration, Instant};

/// A token bucket: tokens arrive at a steady rate, and some can be saved.
#[derive(Debug)]
pub(super) struct Bucket {
    interval: Duration,
    burst: u32,
    tokens: u32,
    /// When the last token arrived.
    filled: Instant,
}

impl Bucket {
    /// Returns a full bucket of `burst` tokens, which gets one each `interval`.
    pub(super) fn new(interval: Duration, burst: u32, now: Instant) -> Self {
        Self { interval, burst, tokens: burst, filled: now }
    }

    /// Takes a token.
    ///
    /// # Errors
    /// There is no token; when the next one arrives.
    pub(super) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        while self.tokens < self.burst && self.filled + self.interval <= now {
            self.filled += self.interval;
            self.tokens += 1;
        }
        if self.tokens == self.burst {
            self.filled = now;
        }
        if self.tokens == 0 {
            return Err(self.filled + self.interval);
        }
        self.tokens -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::kube::rate::*;

    #[test]
    fn a_burst_is_followed_by_the_steady_rate() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut bucket = Bucket::new(ms(100), 3, start);
        for _ in 0..3 {
            assert_eq!(bucket.take(start), Ok(()));
        }
        assert_eq!(bucket.take(start + ms(99)), Err(start + ms(100)));
        assert_eq!(bucket.take(start + ms(100)), Ok(()));
        assert_eq!(bucket.take(start + ms(100)), Err(start + ms(200)));
        // Unused tokens are saved, up to the burst.
        let later = start + ms(10_000);
        for _ in 0..3 {
            assert_eq!(bucket.take(later), Ok(()));
        }
        assert_eq!(bucket.take(later), Err(later + ms(100)));
    }
}
