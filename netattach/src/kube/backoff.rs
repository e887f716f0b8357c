//! Pauses between attempts: each twice as long as the one before, up to a bound, and randomised so that the
//! agents of a cluster do not return at once. Pure but for the random number.

use std::time::Duration;

use crate::pace::spread;

/// Pauses between attempts.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    pub(super) const fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, next: first }
    }

    /// Returns the next pause: between half and all of its full length.
    pub(super) fn next(&mut self) -> Duration {
        let full = self.next;
        self.next = (full * 2).min(self.most);
        full / 2 + spread(full / 2)
    }

    /// Starts again with the first pause.
    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use crate::kube::backoff::*;

    #[test]
    fn pauses_double_up_to_the_bound_and_begin_anew() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(200), ms(1000));
        for full in [200, 400, 800, 1000, 1000] {
            let pause = backoff.next();
            assert!(pause >= ms(full / 2) && pause <= ms(full), "{pause:?} of {full} ms");
        }
        backoff.reset();
        assert!(backoff.next() <= ms(200));
    }

    #[test]
    fn agents_of_a_cluster_do_not_pause_equally_long() {
        let mut backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(10));
        let pauses: std::collections::BTreeSet<Duration> = (0..20).map(|_| backoff.next()).collect();
        assert!(pauses.len() > 10, "{pauses:?}");
        let most = Duration::from_secs(5);
        let spread: std::collections::BTreeSet<Duration> = (0..20).map(|_| spread(most)).collect();
        assert!(spread.len() > 10 && spread.iter().all(|it| *it < most), "{spread:?}");
    }
}
