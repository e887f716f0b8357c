//! Results of checks of attachments, by share: a check covers some shares, all of them, or the attachments
//! on a few devices. Pure.

use std::time::{Duration, Instant};

use crate::attach::Looked;
use crate::rpc::message::Condition;

/// Number of checks in which each attachment is checked once.
pub(super) const SHARES: usize = 6;
/// Most rows that are kept of each share.
const MOST_ROWS: usize = 100;

/// The attachments with problems.
#[derive(Debug, Default)]
pub(super) struct Shares {
    rows: [Vec<Condition>; SHARES],
    next: usize,
    /// When the last share was checked.
    last: Option<Instant>,
}

impl Shares {
    /// Returns the next share, which is checked now.
    pub(in crate::agent) fn next(&mut self, now: Instant) -> usize {
        let next = self.next;
        self.next = (next + 1) % SHARES;
        self.last = Some(now);
        next
    }

    /// Whether no share has been checked for that long: checks of devices must not displace those of
    /// shares.
    pub(super) fn is_late(&self, now: Instant, patience: Duration) -> bool {
        self.last.is_none_or(|last| now.saturating_duration_since(last) >= patience)
    }

    /// Replaces the results of a share.
    pub(in crate::agent) fn replace(&mut self, share: usize, found: Vec<Looked>) {
        if let Some(rows) = self.rows.get_mut(share) {
            rows.clear();
            rows.extend(found.into_iter().filter_map(row).take(MOST_ROWS));
        }
    }

    /// Replaces the results of some attachments.
    pub(super) fn merge(&mut self, found: Vec<Looked>) {
        for one in found {
            let Some(rows) = self.rows.get_mut(one.share) else { continue };
            rows.retain(|row| row.object != one.subject);
            if rows.len() < MOST_ROWS {
                rows.extend(row(one));
            }
        }
    }

    /// Returns all results.
    pub(in crate::agent) fn rows(&self) -> impl Iterator<Item = Condition> + '_ {
        self.rows.iter().flatten().cloned()
    }
}

fn row(looked: Looked) -> Option<Condition> {
    let Looked { subject, missing, .. } = looked;
    missing.map(|problem| Condition { object: subject, problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looked(share: usize, subject: &str, missing: Option<&str>) -> Looked {
        Looked { share, subject: subject.to_owned(), missing: missing.map(str::to_owned) }
    }

    fn told(shares: &Shares) -> Vec<String> {
        shares.rows().map(|row| format!("{}: {}", row.object, row.problem)).collect()
    }

    #[test]
    fn a_look_at_some_attachments_says_nothing_of_others() {
        let mut shares = Shares::default();
        shares.replace(1, vec![looked(1, "a", Some("x")), looked(1, "b", None), looked(1, "c", Some("x"))]);
        shares.merge(vec![looked(1, "a", None), looked(1, "b", Some("y")), looked(4, "d", Some("z"))]);
        assert_eq!(told(&shares), ["c: x", "b: y", "d: z"]);
        shares.replace(1, vec![looked(1, "c", Some("x"))]);
        assert_eq!(told(&shares), ["c: x", "d: z"]);
        shares.merge(vec![looked(1, "c", Some("other")), looked(4, "d", None)]);
        assert_eq!(told(&shares), ["c: other"]);
    }

    #[test]
    fn shares_take_turns_and_have_few_rows_each() {
        let mut shares = Shares::default();
        let (now, patience) = (Instant::now(), Duration::from_secs(30));
        assert!(shares.is_late(now, patience));
        let turns: Vec<usize> = (0..SHARES + 1).map(|_| shares.next(now)).collect();
        assert_eq!(turns, [0, 1, 2, 3, 4, 5, 0]);
        assert_eq!([29, 30].map(|s| shares.is_late(now + Duration::from_secs(s), patience)), [false, true]);
        let many = |share| (0..300).map(|number| looked(share, &number.to_string(), Some("x"))).collect();
        shares.replace(0, many(0));
        shares.merge(many(2));
        assert_eq!(shares.rows().count(), 2 * MOST_ROWS);
    }
}
