//! Live tests that fail are run again, alone.
//!
//! They work on the running kernel and share the machine's processors with each other. A test that fails beside the
//! others and passes alone has shown a race: that is reported, but does not stop a landing. Tests that touch no
//! kernel are not run again, and neither are executables that die.

use super::tally::{Count, Failure, Tally};

/// More failures than this mean a broken machine or a real race.
const MOST: u32 = 3;

/// The sum of a run in which every live test that failed was given another try by `passes`, which says whether it then
/// passed.
///
/// # Errors
/// Those of `passes`.
pub(super) fn settle(
    tally: &Tally,
    mut passes: impl FnMut(&Failure) -> anyhow::Result<bool>,
) -> anyhow::Result<Count> {
    let mut total = tally.total();
    for failure in worth_it(tally.failures()) {
        if passes(failure)? {
            total.failed -= 1;
            total.unsteady += 1;
        }
    }
    Ok(total)
}

/// Whether a run with this sum succeeded.
pub(crate) fn is_success(total: Count) -> bool {
    total.failed == 0 && total.unsteady <= MOST
}

/// The tests to run again: none if so many failed that the run has failed in any case.
fn worth_it(failures: &[Failure]) -> &[Failure] {
    if u32::try_from(failures.len()).is_ok_and(|failed| failed <= MOST) { failures } else { &[] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of an executable `a` with these failed tests.
    fn tally(failed: &[&str]) -> Tally {
        let mut tally = Tally::default();
        let names = failed.iter().map(|name| format!("    {name}"));
        let result = format!("test result: FAILED. 9 passed; {} failed; 1 ignored", failed.len());
        let first = "     Running tests/a.rs (target/debug/deps/a-0b1e)".to_owned();
        for line in [first, "failures:".to_owned()].into_iter().chain(names).chain([result]) {
            tally.read(&line);
        }
        tally
    }

    #[test]
    fn what_passes_alone_is_unsteady_and_the_rest_has_failed() {
        let mut tried = Vec::new();
        let total = settle(&tally(&["x", "y"]), |failure| {
            tried.push(failure.to_string());
            Ok(failure.test == "y")
        });
        assert_eq!(total.unwrap(), Count { passed: 9, unsteady: 1, failed: 1, skipped: 1 });
        assert_eq!(tried, ["a: x", "a: y"]);
    }

    #[test]
    fn where_too_much_failed_nothing_is_tried_again() {
        let total = settle(&tally(&["w", "x", "y", "z"]), |failure| panic!("{failure} is run again"));
        assert_eq!(total.unwrap(), Count { passed: 9, unsteady: 0, failed: 4, skipped: 1 });
    }

    #[test]
    fn an_executable_that_died_is_not_tried_again() {
        let mut tally = tally(&[]);
        tally.read("     Running tests/b.rs (target/debug/deps/b-0b1e)");
        assert!(tally.end().is_some());
        let total = settle(&tally, |failure| panic!("{failure} is run again"));
        assert_eq!(total.unwrap(), Count { passed: 9, unsteady: 0, failed: 1, skipped: 1 });
    }

    #[test]
    fn a_run_bears_three_unsteady_tests_and_no_failed_one() {
        let table = [((0, 0), true), ((3, 0), true), ((4, 0), false), ((0, 1), false), ((1, 1), false)];
        for ((unsteady, failed), expected) in table {
            let count = Count { passed: 9, unsteady, failed, skipped: 0 };
            assert_eq!(is_success(count), expected, "{count}");
        }
    }
}
