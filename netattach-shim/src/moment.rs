//! Determines which of two events came first, independent of the wall clock.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The kernel's identifier of the current boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The time of a decision, comparable with that of another one. Independent of the wall clock, which can be
/// set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The boot of the node.
    pub boot: String,
    /// Nanoseconds since that boot, suspended time included. Absent in records of version 1.
    pub since_boot: Option<u64>,
}

impl Moment {
    /// Whether this moment is in the same boot as `now` and at most `age` earlier. `false` if that is not
    /// known.
    pub fn is_within(&self, age: Duration, now: &Self) -> bool {
        let [then, at] = [self, now].map(|moment| moment.since_boot.map(Duration::from_nanos));
        self.boot == now.boot && then.zip(at).is_some_and(|(then, at)| at.saturating_sub(then) <= age)
    }

    /// The current moment, in that boot.
    pub fn now(boot: &str) -> Self {
        let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let nanoseconds = u64::try_from(since.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
        let nanoseconds = nanoseconds.saturating_add(u64::try_from(since.tv_nsec).unwrap_or(0));
        Self { boot: boot.to_owned(), since_boot: Some(nanoseconds) }
    }
}

/// The identifier of the node's current boot.
///
/// # Errors
/// The kernel does not provide it.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_within_an_age_in_its_own_boot_alone() {
        let moment = |boot: &str, seconds: Option<u64>| Moment {
            boot: boot.to_owned(),
            since_boot: seconds.map(|seconds| seconds * 1_000_000_000),
        };
        let table = [
            (moment("a", Some(100)), true),
            (moment("a", Some(40)), true),
            (moment("a", Some(39)), false),
            // One of two processors may be ahead.
            (moment("a", Some(101)), true),
            (moment("b", Some(100)), false),
            (moment("a", None), false),
        ];
        for (then, expected) in table {
            assert_eq!(
                then.is_within(Duration::from_secs(60), &moment("a", Some(100))),
                expected,
                "{then:?}"
            );
        }
        assert!(!moment("a", Some(100)).is_within(Duration::from_secs(60), &moment("a", None)));
    }
}
