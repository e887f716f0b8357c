//! `cargo xtask test`: everything that can be proved on this machine, and one line that sums it up.
//!
//! Tests make network namespaces and load BPF, which takes root. Called by anyone else, everything is still
//! built as that user, and only the test executables run through sudo.

use std::env;
use std::fmt;
use std::mem;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::setup::Scope;
use crate::{child, dist, fuzz, screen, setup, tree, vm};

/// Fuzzing time for all targets together when this runs as the gate.
const FUZZ_SECONDS: u32 = 60;
/// Tests with this in their names need a card that only a virtual machine has, see [`vm::guests`].
const ONLY_IN_GUESTS: &str = "sriov::";
/// How the line begins by which a test says that this machine lacks what it needs.
pub(crate) const SKIPPED: &str = "SKIPPED: ";

/// Sums over all test executables.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// Tests that did what they say.
    pub passed: u32,
    /// Tests that did not, and test executables that died.
    pub failed: u32,
    /// Tests marked `ignore`, and tests that said `SKIPPED` because this machine lacks what they need.
    pub skipped: u32,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl std::ops::AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Sets up, builds, tests; with `ci` also fuzzes. The last line on standard output is the sum.
///
/// # Errors
/// Anything that could not be prepared, or that some test failed.
pub fn run(ci: bool) -> anyhow::Result<()> {
    setup::run(if ci { Scope::Gate } else { Scope::Testing })?;
    dist::build()?;
    let mut total = workspace()?;
    total += by_tcx()?;
    total += vm::tests()?;
    if ci {
        screen::heading("fuzz");
        total += fuzz::run_all(FUZZ_SECONDS)?;
    }
    screen::line(&total.to_string());
    if total.failed > 0 {
        bail!("tests failed");
    }
    Ok(())
}

/// Everything.
fn workspace() -> anyhow::Result<Count> {
    screen::heading("test");
    screen::step("compile", |progress| {
        child::run(child::cargo().args(["test", "--workspace", "--no-run"]), progress)?;
        Ok(screen::Done::Was(String::new()))
    })?;
    tests(&["--workspace"], &variables())
}

/// What attaches programs, once more with agents that attach them by tcx where a test does not say.
fn by_tcx() -> anyhow::Result<Count> {
    screen::heading("test with programs attached by tcx");
    let selection = ["policy_live", "restart", "gc"].into_iter().flat_map(|name| ["--test", name]);
    let selection: Vec<&str> = ["--package", "netattach-tests"].into_iter().chain(selection).collect();
    let tcx = ("NETATTACH_ATTACH", PathBuf::from("tcx"));
    tests(&selection, &variables().into_iter().chain([tcx]).collect::<Vec<_>>())
}

/// Runs a selection of the tests.
fn tests(selection: &[&str], variables: &[(&str, PathBuf)]) -> anyhow::Result<Count> {
    let mut cargo = child::cargo();
    cargo.arg("test").args(selection).args(["--no-fail-fast", "--color", "never"]);
    cargo.envs(variables.iter().cloned());
    run_as_root(&mut cargo, variables)?;
    cargo.args(["--", "--skip", ONLY_IN_GUESTS]);
    let mut tally = Tally::default();
    let (output, success, status) = child::watch(&mut cargo, |line| {
        if line.starts_with(SKIPPED) {
            screen::line(&format!("  {line}"));
        }
        if let Some(finished) = tally.read(line) {
            finished.print();
        }
    })
    .context("run the tests")?;
    if let Some(died) = tally.end() {
        died.print();
    }
    if !success && tally.total.failed == 0 {
        // Not a test's verdict but cargo's: show all there is.
        bail!("cargo test failed ({status}):\n{}", tree::without_local_paths(&output));
    }
    if tally.total.failed > 0 {
        screen::line(&tree::without_local_paths(&failures_in(&output)));
    }
    Ok(tally.total)
}

/// What tests are told: where the executables under test are, and what they are tested with.
fn variables() -> [(&'static str, PathBuf); 3] {
    [
        ("NETATTACH_DIST", tree::dist()),
        ("NETATTACH_REFERENCE_PLUGINS", setup::reference_plugins()),
        ("NETATTACH_RUNTIMES", setup::runtimes()),
    ]
}

/// Lets test executables run as root when this process does not.
fn run_as_root(cargo: &mut Command, variables: &[(&str, PathBuf)]) -> anyhow::Result<()> {
    if child::is_root() {
        return Ok(());
    }
    let stuck = |problem: &str| screen::Stuck::new(problem, "run `cargo xtask test` as root");
    if child::find("sudo").is_none() {
        bail!(stuck("the tests need root for network namespaces and BPF, and there is no sudo"));
    }
    // Asked before anything runs, while a person may still be looking at the terminal.
    let granted = Command::new("sudo").arg("-v").status().is_ok_and(|status| status.success());
    if !granted {
        bail!(stuck("the tests need root for network namespaces and BPF, and sudo refused"));
    }
    screen::line("  the tests need root for network namespaces and BPF: their executables run through sudo");
    let kept = ["CARGO_MANIFEST_DIR", "RUST_BACKTRACE", "PATH", "CI"];
    let kept = kept.iter().filter_map(|name| Some(format!("{name}={}", env::var(name).ok()?)));
    let told = variables.iter().map(|(name, path)| format!("{name}={}", path.display()));
    let runner: Vec<String> =
        ["sudo", "-n", "--", "env"].map(str::to_owned).into_iter().chain(kept).chain(told).collect();
    let runner = serde_json::to_string(&runner).context("spell the test runner")?;
    // An array of JSON strings is also an array of TOML strings.
    cargo.arg("--config").arg(format!("target.{}.runner={runner}", dist::host_triple()?));
    Ok(())
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
            screen::finished("FAIL", self.took, &self.name, "ended without a result");
        } else if self.count != Count::default() {
            let mark = if self.count.failed == 0 { "ok" } else { "FAIL" };
            screen::finished(mark, self.took, &self.name, &self.count.to_string());
        }
    }
}

/// Reads the output of `cargo test` line by line.
#[derive(Default)]
pub(crate) struct Tally {
    total: Count,
    running: Option<(String, Instant)>,
    /// Tests of the running executable that say they were skipped; the harness takes them as passed.
    skipped: u32,
}

impl Tally {
    /// The sum so far.
    pub(crate) fn total(&self) -> Count {
        self.total
    }

    /// Takes in a line; returns the executable that it ends, if any.
    pub(crate) fn read(&mut self, line: &str) -> Option<Finished> {
        if let Some(name) = executable_in(line) {
            let died = self.end();
            self.running = Some((name, Instant::now()));
            return died;
        }
        if line.starts_with(SKIPPED) {
            self.skipped += 1;
        }
        let mut count = result_in(line)?;
        let skipped = mem::take(&mut self.skipped).min(count.passed);
        count.passed -= skipped;
        count.skipped += skipped;
        let (name, started) =
            self.running.take().unwrap_or_else(|| ("documentation".to_owned(), Instant::now()));
        self.total += count;
        Some(Finished { name, count, took: started.elapsed(), died: false })
    }

    /// An executable that was running and said nothing about its tests has died.
    pub(crate) fn end(&mut self) -> Option<Finished> {
        let (name, started) = self.running.take()?;
        self.skipped = 0;
        let count = Count { failed: 1, ..Count::default() };
        self.total += count;
        Some(Finished { name, count, took: started.elapsed(), died: true })
    }
}

/// `Running unittests src/lib.rs (target/debug/deps/netattach-0123456789abcdef)` or `Doc-tests netattach`.
fn executable_in(line: &str) -> Option<String> {
    let line = line.trim_start();
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(format!("{name} (documentation)"));
    }
    let (_, path) = line.strip_prefix("Running ")?.strip_suffix(')')?.rsplit_once(" (")?;
    let file = path.rsplit('/').next()?;
    let (name, _hash) = file.rsplit_once('-')?;
    Some(name.to_owned())
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`.
fn result_in(line: &str) -> Option<Count> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |what: &str| {
        let part = counts.split("; ").find_map(|part| part.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    Some(Count { passed: number("passed")?, failed: number("failed")?, skipped: number("ignored")? })
}

/// What the failed tests said: everything between a `failures:` heading and its executable's result.
pub(crate) fn failures_in(output: &str) -> String {
    let mut inside = false;
    let mut kept = String::new();
    for line in output.lines() {
        inside = inside || line == "failures:" || line.contains("process didn't exit successfully");
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
        let count = |passed, failed, skipped| Count { passed, failed, skipped };
        let expected = [
            ("netattach", count(2, 0, 1), false),
            ("crash", count(0, 1, 0), true),
            ("netlink", count(4, 1, 2), false),
            ("netattach (documentation)", count(1, 0, 0), false),
        ];
        assert_eq!(finished, expected.map(|(name, count, died)| (name.to_owned(), count, died)));
        assert_eq!(tally.total.to_string(), "7 passed, 2 failed, 3 skipped");
    }

    #[test]
    fn an_executable_that_dies_last_counts_too() {
        let mut tally = Tally::default();
        assert_eq!(tally.read("     Running tests/a.rs (target/debug/deps/a-0b1e)"), None);
        assert!(tally.end().is_some_and(|finished| finished.died));
        assert_eq!(tally.total.failed, 1);
    }

    #[test]
    fn only_what_failed_tests_said_is_shown_again() {
        assert_eq!(failures_in(OUTPUT), "failures:\n\n---- links ----\nboom\nfailures:\n    links\n\n");
    }
}
