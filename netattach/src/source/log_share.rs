//! Decides which problems of objects are logged individually: authors can cause thousands, and change them
//! repeatedly. Each namespace has a share of the lines; the others are counted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Most lines of one namespace at once.
const BURST: u32 = 20;
/// After those, one line in this time.
const INTERVAL: Duration = Duration::from_secs(10);
/// How often the number of left-out lines is logged.
const COUNTED: Duration = Duration::from_secs(60);
/// Most namespaces with a share of their own; the others have a common one.
const NAMESPACES: usize = 1024;

/// The lines of each namespace.
#[derive(Debug, Default)]
pub struct LogShare(BTreeMap<String, Share>);

#[derive(Debug)]
struct Share {
    /// When the share will be full again: each line postpones that by [`INTERVAL`].
    whole_at: Instant,
    /// The number of left-out lines not logged yet, and when that number was last logged.
    left_out: u64,
    said: Option<Instant>,
}

/// What to log for a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// The problem.
    Problem,
    /// The number of left-out lines of the namespace since it was last logged.
    LeftOut(u64),
    /// Nothing.
    Nothing,
}

impl LogShare {
    /// Nothing was logged yet.
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Logs one more problem of an object in this namespace (empty: in none), or how many were left out.
    pub fn log(&mut self, namespace: &str, problem: impl FnOnce()) {
        match self.line(namespace, Instant::now()) {
            Line::Problem => problem(),
            Line::LeftOut(more) => {
                tracing::warn!(
                    namespace,
                    more,
                    "further problems are not logged one by one; see netattachctl status"
                );
            }
            Line::Nothing => {}
        }
    }

    fn line(&mut self, namespace: &str, now: Instant) -> Line {
        if self.0.len() >= NAMESPACES && !self.0.contains_key(namespace) {
            self.0.retain(|_, share| share.whole_at > now || share.left_out > 0);
        }
        let is_told_apart = self.0.len() < NAMESPACES || self.0.contains_key(namespace);
        let key = if is_told_apart { namespace } else { "" };
        let share = match self.0.get_mut(key) {
            Some(share) => share,
            None => self.0.entry(key.to_owned()).or_insert(Share { whole_at: now, left_out: 0, said: None }),
        };
        let whole_at = share.whole_at.max(now) + INTERVAL;
        if whole_at.duration_since(now) <= INTERVAL * BURST {
            share.whole_at = whole_at;
            return Line::Problem;
        }
        share.left_out += 1;
        if share.said.is_some_and(|said| now.duration_since(said) < COUNTED) {
            return Line::Nothing;
        }
        share.said = Some(now);
        Line::LeftOut(std::mem::take(&mut share.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_some_lines_at_once_and_then_few_while_others_have_theirs() {
        let (mut lines, start) = (LogShare::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(lines.line("hostile", start), Line::Problem);
        }
        assert_eq!(lines.line("hostile", start), Line::LeftOut(1));
        for _ in 0..1000 {
            assert_eq!(lines.line("hostile", start), Line::Nothing);
        }
        assert_eq!(lines.line("shop", start), Line::Problem);
        assert_eq!(lines.line("", start), Line::Problem);
        let later = start + INTERVAL;
        assert_eq!(lines.line("hostile", later), Line::Problem);
        assert_eq!(lines.line("hostile", later), Line::Nothing);
        assert_eq!(lines.line("hostile", start + COUNTED - INTERVAL), Line::Problem);
        for _ in 0..4 {
            let _ = lines.line("hostile", start + COUNTED - INTERVAL);
        }
        let minute = start + COUNTED;
        assert_eq!(lines.line("hostile", minute), Line::Problem);
        assert_eq!(lines.line("hostile", minute), Line::LeftOut(1003), "since that was said last");
    }

    #[test]
    fn very_many_namespaces_have_one_share() {
        let (mut lines, start) = (LogShare::default(), Instant::now());
        for number in 0..NAMESPACES {
            assert_eq!(lines.line(&format!("n{number}"), start), Line::Problem);
        }
        for number in 0..BURST {
            assert_eq!(lines.line(&format!("more-{number}"), start), Line::Problem);
        }
        assert_eq!(lines.line("another", start), Line::LeftOut(1));
        assert!(lines.0.len() <= NAMESPACES + 1);
        assert_eq!(lines.line("another", start + INTERVAL), Line::Problem, "the first are whole again");
    }
}
