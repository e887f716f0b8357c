//! Reads the output of test executables: how their tests ended, and which of them failed.

use std::fmt;
use std::mem;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crate::progress;

/// The beginning of the line by which a test reports that this machine lacks something it needs.
pub(crate) const SKIPPED: &str = "SKIPPED: ";
/// The heading of the output of failed tests, and of their names.
const FAILURES: &str = "failures:";

/// Sums over all test executables.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// Tests that passed.
    pub passed: u32,
    /// Tests that passed only when they were run again, alone ([`super::again`]).
    pub unsteady: u32,
    /// Tests that failed, and test executables that died.
    pub failed: u32,
    /// Tests marked `ignore`, and tests that said `SKIPPED` because this machine lacks what they need.
    pub skipped: u32,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, ", self.passed)?;
        if self.unsteady > 0 {
            write!(f, "{} unsteady, ", self.unsteady)?;
        }
        write!(f, "{} failed, {} skipped", self.failed, self.skipped)
    }
}

impl std::ops::AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.unsteady += other.unsteady;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// A test that failed although its executable ended as it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Its executable, as cargo and the virtual machine name it.
    pub(crate) executable: String,
    /// Where that is, from the directory that it was found to run in.
    pub(crate) path: String,
    /// Its name inside of that.
    pub(crate) test: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.executable, self.test)
    }
}

/// One test executable that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finished {
    name: String,
    count: Count,
    took: Duration,
    died: bool,
}

impl Finished {
    /// Prints its line.
    pub(crate) fn print(&self) {
        if self.died {
            progress::finished("FAIL", self.took, &self.name, "ended without a result");
        } else if self.count != Count::default() {
            let mark = if self.count.failed == 0 { "ok" } else { "FAIL" };
            progress::finished(mark, self.took, &self.name, &self.count.to_string());
        }
    }
}

/// A test executable that runs.
struct Running {
    name: String,
    path: String,
    /// Whether its tests are live: their rigs are parts of the running kernel.
    live: bool,
    started: Instant,
    /// Tests that say they were skipped; the harness takes them as passed.
    skipped: u32,
    /// The names under the last heading of failures.
    failures: Vec<String>,
    /// Whether such names are being read.
    naming: bool,
}

/// Reads the output of `cargo test` line by line.
#[derive(Default)]
pub(crate) struct Tally {
    total: Count,
    running: Option<Running>,
    failures: Vec<Failure>,
    times: Vec<(String, Duration)>,
    /// Receives when the first executable runs.
    begun: Option<Sender<()>>,
}

impl Tally {
    /// Sends to `begun` when the first executable runs: cargo has finished compiling and has released its lock on the
    /// target directory.
    pub(super) fn telling(begun: Sender<()>) -> Self {
        Self { begun: Some(begun), ..Self::default() }
    }

    /// Of one live test executable, which is called that.
    pub(crate) fn of(executable: &str) -> Self {
        Self { running: Some(Running::start(executable.to_owned(), "", true)), ..Self::default() }
    }

    /// The sum so far.
    pub(crate) fn total(&self) -> Count {
        self.total
    }

    /// How long each executable took.
    pub(crate) fn times(&self) -> &[(String, Duration)] {
        &self.times
    }

    /// The live tests that failed.
    pub(crate) fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// Takes in a line; returns the executable that it ends, if any.
    pub(crate) fn read(&mut self, line: &str) -> Option<Finished> {
        if let Some(running) = executable_in(line) {
            if let Some(begun) = self.begun.take() {
                // The receiver may be gone.
                let _ = begun.send(());
            }
            let died = self.end();
            self.running = Some(running);
            return died;
        }
        if let Some(running) = &mut self.running {
            running.read(line);
        }
        let mut count = result_in(line)?;
        let mut ended =
            self.running.take().unwrap_or_else(|| Running::start("documentation".to_owned(), "", false));
        let skipped = ended.skipped.min(count.passed);
        count.passed -= skipped;
        count.skipped += skipped;
        self.total += count;
        // Output of other tests may have split some names: those are unknown.
        if ended.live && u32::try_from(ended.failures.len()).is_ok_and(|named| named == count.failed) {
            let named = mem::take(&mut ended.failures).into_iter();
            self.failures.extend(named.map(|test| Failure {
                executable: ended.name.clone(),
                path: ended.path.clone(),
                test,
            }));
        }
        Some(self.finish(ended, count, false))
    }

    /// An executable that was running and said nothing about its tests has died.
    pub(crate) fn end(&mut self) -> Option<Finished> {
        let ended = self.running.take()?;
        let count = Count { failed: 1, ..Count::default() };
        self.total += count;
        Some(self.finish(ended, count, true))
    }

    fn finish(&mut self, ended: Running, count: Count, died: bool) -> Finished {
        let took = ended.started.elapsed();
        self.times.push((ended.name.clone(), took));
        Finished { name: ended.name, count, took, died }
    }
}

impl Running {
    fn start(name: String, path: &str, live: bool) -> Self {
        let (path, started) = (path.to_owned(), Instant::now());
        Self { name, path, live, started, skipped: 0, failures: Vec::new(), naming: false }
    }

    /// The output of tests comes under a first heading of failures, their names under a second.
    fn read(&mut self, line: &str) {
        if line.starts_with(SKIPPED) {
            self.skipped += 1;
        }
        if line == FAILURES {
            self.naming = true;
            self.failures.clear();
        } else if let Some(name) = line.strip_prefix("    ").filter(|_| self.naming) {
            self.failures.push(name.to_owned());
        } else {
            self.naming = false;
        }
    }
}

/// `Running tests/crash.rs (target/debug/deps/crash-0123456789abcdef)`, `Running unittests src/lib.rs (...)` or
/// `Doc-tests netattach`. Live tests are files of a directory `tests`: only the package of the live tests has one.
fn executable_in(line: &str) -> Option<Running> {
    let line = line.trim_start();
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(Running::start(format!("{name} (documentation)"), "", false));
    }
    let (source, path) = line.strip_prefix("Running ")?.strip_suffix(')')?.rsplit_once(" (")?;
    let file = path.rsplit('/').next()?;
    let (name, _hash) = file.rsplit_once('-')?;
    Some(Running::start(name.to_owned(), path, source.starts_with("tests/")))
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`.
fn result_in(line: &str) -> Option<Count> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |what: &str| {
        let part = counts.split("; ").find_map(|part| part.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    let (passed, failed, skipped) = (number("passed")?, number("failed")?, number("ignored")?);
    Some(Count { passed, unsteady: 0, failed, skipped })
}

/// The output of the failed tests: everything between a `failures:` heading and its executable's result.
pub(crate) fn failures_in(output: &str) -> String {
    let mut inside = false;
    let mut kept = String::new();
    for line in output.lines() {
        inside = inside || line == FAILURES || line.contains("process didn't exit successfully");
        if result_in(line).is_some() || executable_in(line).is_some() {
            inside = false;
        }
        if inside {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, TryRecvError};

    use super::*;

    const OUTPUT: &str = "\
     Running unittests src/lib.rs (target/debug/deps/netattach-8b1e9e4e3c7f1a2b)

running 3 tests
SKIPPED: a test with an old kernel: there is none
test mac::tests::a ... ok
test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/crash.rs (target/debug/deps/crash-8b1e9e4e3c7f1a2b)
running 3 tests
     Running tests/netlink.rs (target/debug/deps/netlink-0b1e9e4e3c7f1a2b)
failures:

---- links ----
boom
failures:
    links

test result: FAILED. 4 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.00s
   Doc-tests netattach
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn all_executables_are_summed_and_a_dead_one_counts_as_failed() {
        let mut tally = Tally::default();
        let mut finished: Vec<(String, Count, bool)> = OUTPUT
            .lines()
            .filter_map(|line| tally.read(line))
            .map(|finished| (finished.name, finished.count, finished.died))
            .collect();
        finished.extend(tally.end().map(|finished| (finished.name, finished.count, finished.died)));
        let count = |passed, failed, skipped| Count { passed, failed, skipped, ..Count::default() };
        let expected = [
            ("netattach", count(2, 0, 1), false),
            ("crash", count(0, 1, 0), true),
            ("netlink", count(4, 1, 2), false),
            ("netattach (documentation)", count(1, 0, 0), false),
        ];
        assert_eq!(finished, expected.map(|(name, count, died)| (name.to_owned(), count, died)));
        assert_eq!(tally.total.to_string(), "7 passed, 2 failed, 3 skipped");
        let timed: Vec<&str> = tally.times().iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(timed, ["netattach", "crash", "netlink", "netattach (documentation)"]);
        let [executable, path, test] =
            ["netlink", "target/debug/deps/netlink-0b1e9e4e3c7f1a2b", "links"].map(str::to_owned);
        assert_eq!(tally.failures, [Failure { executable, path, test }]);
    }

    #[test]
    fn only_live_tests_whose_names_are_whole_are_named() {
        let result = "test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out";
        let table: [(&str, &[&str], &[&str]); 4] = [
            ("tests/a.rs", &["failures:", "    one", "    mod::two"], &["one", "mod::two"]),
            // The output of a test looks like a list; the last list counts.
            (
                "tests/a.rs",
                &["failures:", "    x", "", "failures:", "    one", "    two", ""],
                &["one", "two"],
            ),
            ("tests/a.rs", &["failures:", "    one", "a torn line", "    two"], &[]),
            ("unittests src/lib.rs", &["failures:", "    one", "    two"], &[]),
        ];
        for (source, lines, expected) in table {
            let mut tally = Tally::default();
            let first = format!("     Running {source} (target/debug/deps/a-0b1e)");
            for line in [&*first].iter().chain(lines).chain([&result]) {
                tally.read(line);
            }
            let named: Vec<&str> = tally.failures.iter().map(|failure| &*failure.test).collect();
            assert_eq!(named, expected, "{source} {lines:?}");
            assert_eq!(tally.total.failed, 2);
        }
    }

    #[test]
    fn unsteady_tests_are_told_only_where_there_are_some() {
        let count = Count { passed: 947, unsteady: 1, failed: 0, skipped: 1 };
        assert_eq!(count.to_string(), "947 passed, 1 unsteady, 0 failed, 1 skipped");
        let count = Count { unsteady: 0, ..count };
        assert_eq!(count.to_string(), "947 passed, 0 failed, 1 skipped");
    }

    #[test]
    fn an_executable_that_dies_last_counts_too() {
        let mut tally = Tally::default();
        assert_eq!(tally.read("     Running tests/a.rs (target/debug/deps/a-0b1e)"), None);
        assert!(tally.end().is_some_and(|finished| finished.died));
        assert_eq!(tally.total.failed, 1);
    }

    #[test]
    fn it_is_told_when_the_first_executable_runs_and_when_none_will() {
        let (begun, has_begun) = mpsc::channel();
        let mut tally = Tally::telling(begun);
        tally.read("   Compiling a v1.0.0");
        assert_eq!(has_begun.try_recv(), Err(TryRecvError::Empty));
        for name in ["a", "b"] {
            tally.read(&format!("     Running tests/{name}.rs (target/debug/deps/{name}-0b1e)"));
        }
        assert_eq!(has_begun.try_iter().count(), 1);
        assert_eq!(has_begun.try_recv(), Err(TryRecvError::Disconnected));
        let (begun, has_begun) = mpsc::channel();
        drop(Tally::telling(begun));
        assert_eq!(has_begun.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn only_what_failed_tests_said_is_shown_again() {
        assert_eq!(failures_in(OUTPUT), "failures:\n\n---- links ----\nboom\nfailures:\n    links\n\n");
    }
}
