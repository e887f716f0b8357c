//! `cargo xtask test`: everything that can be proved on this machine, and one line that sums it up.
//!
//! Tests make network namespaces and load BPF, which takes root. Called by another user than root, everything is
//! still built as that user, and only the test executables run through sudo.
//!
//! `tally` reads the output of test executables, `again` runs failed tests once more, alone; `computed` is the work
//! beside the live tests; `stages` record the time and the failures: a failed stage does not stop stages that do not
//! need it.

mod again;
mod computed;
mod stages;
mod tally;

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use anyhow::{Context, anyhow, bail};

use self::computed::Testing;
pub use self::tally::Count;
use self::tally::SKIPPED;
pub(crate) use self::{
    again::is_success,
    stages::Stages,
    tally::{Failure, Tally, failures_in},
};

use crate::ebpf::Flavour;
use crate::setup::{Building, Scope};
use crate::{child, dist, ebpf, nightly, progress, release, setup, soak, tidy, tree, vm};

/// The benches that are left out if nothing but the floor is built.
pub(crate) const FEATURES: &str = "netattach-bench/cluster";
/// Tests with this in their names need a card that only a virtual machine has, see [`vm::guests`].
const ONLY_IN_GUESTS: &str = "sriov::";
/// Tests with this in their names need the release that landed last, whose build takes minutes: [`upgrade`] runs them.
const UPGRADES: &str = "upgrade::";
/// Live tests that also run with programs attached by tcx: executable and module.
const BY_TCX: [(&str, &str); 3] = [("policy", "policy_live::"), ("lifecycle", "restart::"), ("cni", "gc::")];

/// Suites that mostly wait for periodic checks, deadlines and other programs: more of their tests run at once than
/// there are processors. Some tests of the other suites measure, or use all processors.
const WAITING: [&str; 4] = ["api", "cni", "lifecycle", "plugins"];
/// How many tests for each processor: together they take less than one.
const AT_ONCE: usize = 3;
/// The suite with clusters of Kubernetes.
const CLUSTER: &str = "cluster";
/// How many more of its tests go on at once than there are processors: starting a cluster takes seconds of one, and the minute or
/// two after that a fifth.
const CLUSTERS_MORE: usize = 1;
/// How many more tests of all other suites run at once: tests that measure tolerate a short wait for a processor, and
/// most of `policy`, which takes the longest, waits for an agent or for packets that do not arrive.
const OTHERS_MORE: usize = 1;

/// What a run covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The tests that this machine can run.
    Tests,
    /// What every change must pass: tidy, and every test without exception.
    Gate,
}

/// Sets up, builds, tests; then prints the time of each stage, and every stage that failed. The last line on standard
/// output is the sum.
///
/// # Errors
/// Some stage failed, or some test.
pub fn run(extent: Extent) -> anyhow::Result<()> {
    let mut stages = Stages::new();
    let total = everything(extent, &mut stages);
    progress::line(&format!("\n{}", stages.table()));
    progress::line(&format!("not in this run: {} (cargo xtask nightly)", nightly::names()));
    for failure in stages.failures() {
        progress::line(&tree::without_local_paths(&format!("failed: {failure}")));
    }
    progress::line(&total.to_string());
    verdict(&stages.failed(), total)
}

/// The outcome.
fn verdict(failed: &[&str], total: Count) -> anyhow::Result<()> {
    match (failed, is_success(total)) {
        ([], true) => Ok(()),
        ([], false) => bail!("tests failed"),
        (stages, true) => bail!("these stages failed: {}", stages.join(", ")),
        (stages, false) => bail!("tests failed, and these stages: {}", stages.join(", ")),
    }
}

/// The set-up for all tests; strict for the gate.
fn scope_of(strict: bool) -> Scope {
    if strict { Scope::Gate } else { Scope::Testing }
}

fn everything(extent: Extent, stages: &mut Stages) -> Count {
    let strict = extent == Extent::Gate;
    if stages.tried("set-up of what compiles", |_| setup::compilers(scope_of(strict))).is_none() {
        return Count::default();
    }
    let (cluster, cluster_builds) = mpsc::channel();
    let built = move |stages: &mut Stages| built_and_tested(strict, &cluster_builds, stages);
    let (total, ()) = beside(stages, built, |stages| set_up_rest(strict, cluster, stages));
    total.unwrap_or_default()
}

/// Sets up what no compile needs, mostly from the network, and starts to build the programs of a cluster. If it failed,
/// drops `cluster` without the programs: there is nothing to test with then.
fn set_up_rest(strict: bool, cluster: Sender<Building>, stages: &mut Stages) {
    if stages.tried("set-up of the rest", |_| setup::rest(scope_of(strict))).is_none() {
        return;
    }
    // There is no receiver if something could not be built.
    let _ = cluster.send(Building::start(strict));
    if strict {
        stages.tried("tidy", |_| tidy::run(&tidy::quick(), None));
    }
}

/// Builds the BPF object and then everything that needs it, runs the tests, and does the work beside them.
fn built_and_tested(strict: bool, cluster: &Receiver<Building>, stages: &mut Stages) -> Count {
    if stages.tried("BPF object", |_| ebpf::build(Flavour::Normal)).is_none() {
        return Count::default();
    }
    let (computing, testing) = computed::turns();
    let computed =
        move |stages: &mut Stages| computed::beside_tests(strict, &computing, stages, computed::work);
    let live = |stages: &mut Stages| live(cluster, testing, stages);
    let (computed, mut total) = beside(stages, computed, live);
    total += computed.unwrap_or_default();
    total
}

/// The executables, and the test executables.
fn live(cluster: &Receiver<Building>, testing: Testing, stages: &mut Stages) -> Count {
    // Toward its end this stage optimises with a thread for each executable, the last one alone, while the compile of
    // the tests can use all processors: so this stage comes first.
    if stages.tried("executables", |_| dist::build()).is_none() {
        return Count::default();
    }
    let set_up = |_: &mut Stages| cluster.recv().context("it failed");
    let Some(cluster) = stages.tried("set-up of the rest, when executables were built", set_up) else {
        return Count::default();
    };
    // An image that is too large exists nevertheless.
    stages.tried("image", |_| release::image_of_built());
    let compiled = |_: &mut Stages| computed::compiled(&testing.first_compiled);
    if stages.tried("compile the tests that come first, when executables were built", compiled).is_none() {
        return Count::default();
    }
    let mut total = live_tests(cluster, testing, stages);
    total += around_machines(stages);
    total
}

/// The work left when no test measures time any more: the virtual machines, each with one processor's work, and the soak.
fn around_machines(stages: &mut Stages) -> Count {
    let soak = soak::Beside::start();
    let machines = stages.tried("tests in virtual machines", |_| vm::tests(vm::pack()?));
    let soaked = stages.tried("soak, when the machines had ended", |_| soak?.wait());
    let mut total = machines.unwrap_or_default();
    total += soaked.unwrap_or_default();
    total
}

/// Does two kinds of work concurrently. The first result is `None` if its thread panicked, which is a failed stage.
fn beside<A: Send, B>(
    stages: &mut Stages,
    one: impl FnOnce(&mut Stages) -> A + Send,
    other: impl FnOnce(&mut Stages) -> B,
) -> (Option<A>, B) {
    let (one, other) = thread::scope(|scope| {
        let one = scope.spawn(|| {
            let mut stages = Stages::new();
            let done = one(&mut stages);
            (done, stages)
        });
        let other = other(stages);
        (one.join(), other)
    });
    let Ok((one, of_one)) = one else {
        stages.fail("a thread of the run", anyhow!("it panicked"));
        return (None, other);
    };
    stages.extend(of_one);
    (Some(one), other)
}

/// The unit tests alone, which need neither set-up nor root: the short loop.
///
/// # Errors
/// Anything that could not be compiled, or that some test failed.
pub fn unit() -> anyhow::Result<()> {
    progress::heading("unit tests");
    let selection = ["--workspace", "--exclude", "netattach-tests", "--lib"];
    compile(&selection)?;
    let mut cargo = child::cargo();
    cargo.arg("test").args(selection).args(["--no-fail-fast", "--color", "never"]);
    let total = watched(&mut cargo, Tally::default())?.total();
    progress::line(&total.to_string());
    if !is_success(total) {
        bail!("tests failed");
    }
    Ok(())
}

/// The tests with a longer form, in that form. The last line on standard output is the sum.
///
/// # Errors
/// Anything that could not be prepared, or that some test failed.
pub fn longer() -> anyhow::Result<()> {
    setup::run(Scope::Testing)?;
    let cluster = Building::start(true);
    dist::build()?;
    progress::heading("tests in their longer form");
    let suites = nightly::LONGER.iter().flat_map(|suite| ["--test", suite]);
    let selection: Vec<&str> = ["--package", "netattach-tests", "--bins"].into_iter().chain(suites).collect();
    compile(&selection)?;
    cluster.wait()?;
    let (name, value) = nightly::VARIABLE;
    let told: Vec<_> = variables().into_iter().chain([(name, PathBuf::from(value))]).collect();
    let mut total = tests(Tally::default(), &selection, &[], &told, &mut Stages::new())?;
    total += vm::longer()?;
    progress::line(&total.to_string());
    if !is_success(total) {
        bail!("tests failed");
    }
    Ok(())
}

/// The tests of the upgrade from the release that landed last to this one, and of the way back. The last line on standard output
/// is the sum.
///
/// # Errors
/// Anything that could not be prepared, or that some test failed.
pub fn upgrade() -> anyhow::Result<()> {
    setup::run(Scope::Testing)?;
    let cluster = setup::Building::start(true);
    setup::upgrades()?;
    dist::build()?;
    release::image_of_built()?;
    progress::heading("tests of upgrades");
    let selection = ["--package", "netattach-tests", "--bins", "--test", "lifecycle", "--test", "cluster"];
    compile(&selection)?;
    cluster.wait()?;
    // A test that finds no release to upgrade from must fail.
    let told: Vec<_> = variables().into_iter().chain([("CI", PathBuf::from("true"))]).collect();
    let total = tests(Tally::default(), &selection, &[UPGRADES], &told, &mut Stages::new())?;
    progress::line(&total.to_string());
    if !is_success(total) {
        bail!("tests failed");
    }
    Ok(())
}

/// All tests of this machine: those that mostly wait; those with a cluster, whose programs have been built by then;
/// the others, some of which measure, when the concurrent work has mostly ended; the examples of the documentation;
/// and some tests once more.
fn live_tests(cluster: Building, testing: Testing, stages: &mut Stages) -> Count {
    let Testing { others_compiled, cluster_begun, others_begun, .. } = testing;
    let told = |at_once: usize| {
        let threads = ("RUST_TEST_THREADS", PathBuf::from(at_once.to_string()));
        variables().into_iter().chain([threads]).collect::<Vec<_>>()
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let mut total = Count::default();

    let waiting = |stages: &mut Stages| {
        let at_once = told(AT_ONCE * processors);
        tests(Tally::default(), &selected(of_suites(&WAITING)), &[], &at_once, stages)
    };
    total += stages.tried("tests that mostly wait", waiting).unwrap_or_default();
    match stages.tried("Kubernetes, when these had ended", |_| cluster.wait()) {
        Some(()) => {
            let clustered = |stages: &mut Stages| {
                let at_once = told(processors + CLUSTERS_MORE);
                let selection = selected(of_suites(&[CLUSTER]));
                tests(Tally::telling(cluster_begun), &selection, &[], &at_once, stages)
            };
            total += stages.tried("tests with a cluster", clustered).unwrap_or_default();
        }
        // Work that should wait for them does not.
        None => drop(cluster_begun),
    }
    let compiled = |_: &mut Stages| computed::compiled(&others_compiled);
    if stages.tried("compile the other tests, when these had ended", compiled).is_none() {
        return total;
    }
    let others = |stages: &mut Stages| {
        let suites = tree::suites()?;
        let first = first_suites();
        let others: Vec<&str> =
            suites.iter().map(String::as_str).filter(|suite| !first.contains(suite)).collect();
        let selection = selected(["--lib", "--bins"].into_iter().chain(of_suites(&others)));
        tests(Tally::telling(others_begun), &selection, &[], &told(processors + OTHERS_MORE), stages)
    };
    total += stages.tried("other tests", others).unwrap_or_default();
    let documentation = |stages: &mut Stages| {
        tests(Tally::default(), &selected(["--doc"].into_iter()), &[], &variables(), stages)
    };
    total += stages.tried("documentation", documentation).unwrap_or_default();
    let by_tcx = |stages: &mut Stages| by_tcx(told(processors + OTHERS_MORE), stages);
    total += stages.tried("tests by tcx", by_tcx).unwrap_or_default();
    total
}

/// The suites that are run first, and compiled first.
fn first_suites() -> Vec<&'static str> {
    WAITING.into_iter().chain([CLUSTER]).collect()
}

/// Suites, as cargo takes them.
fn of_suites<'s>(suites: &'s [&'s str]) -> impl Iterator<Item = &'s str> {
    suites.iter().flat_map(|suite| ["--test", *suite])
}

/// Of the whole workspace: another selection has other features, and would be compiled again.
fn selected<'s>(of: impl Iterator<Item = &'s str>) -> Vec<&'s str> {
    ["--workspace", "--features", FEATURES].into_iter().chain(of).collect()
}

/// Compiles a selection of the tests.
fn compile(selection: &[&str]) -> anyhow::Result<()> {
    progress::step("compile", |progress| {
        let mut cargo = child::cargo();
        cargo.arg("test").args(selection).arg("--no-run");
        child::run(&mut child::nice(cargo), progress)?;
        Ok(progress::Done::Unchanged(String::new()))
    })
}

/// The tests that attach programs, once more with agents that attach them by tcx unless a test chooses. `told`:
/// further variables for the tests.
fn by_tcx(told: Vec<(&'static str, PathBuf)>, stages: &mut Stages) -> anyhow::Result<Count> {
    progress::heading("test with programs attached by tcx");
    let (executables, modules): (BTreeSet<_>, Vec<_>) = BY_TCX.into_iter().unzip();
    let executables = executables.into_iter().flat_map(|name| ["--test", name]);
    let selection: Vec<&str> = ["--package", "netattach-tests"].into_iter().chain(executables).collect();
    let tcx = ("NETATTACH_ATTACH", PathBuf::from("tcx"));
    let told: Vec<_> = told.into_iter().chain([tcx]).collect();
    tests(Tally::default(), &selection, &modules, &told, stages)
}

/// Runs the tests of a selection of executables, those with one of `names` in theirs or all, and then each live test that
/// failed once more, alone. `tally` has read nothing yet.
fn tests(
    tally: Tally,
    selection: &[&str],
    names: &[&str],
    variables: &[(&str, PathBuf)],
    stages: &mut Stages,
) -> anyhow::Result<Count> {
    let runner = runner(variables)?;
    let mut cargo = child::cargo();
    cargo.arg("test").args(selection).args(["--no-fail-fast", "--color", "never"]);
    cargo.envs(variables.iter().cloned());
    if !runner.is_empty() {
        let runner = serde_json::to_string(&runner).context("spell the test runner")?;
        // An array of JSON strings is also an array of TOML strings.
        cargo.arg("--config").arg(format!("target.{}.runner={runner}", dist::host_triple()?));
    }
    let is_night = variables.iter().any(|(name, _)| *name == nightly::VARIABLE.0);
    let at_night = nightly::TESTS.iter().map(|(_, test)| *test).filter(|_| !is_night);
    let left_out =
        [ONLY_IN_GUESTS, UPGRADES].into_iter().chain(at_night).filter(|name| !names.contains(name));
    cargo.arg("--").args(left_out.flat_map(|name| ["--skip", name])).args(names);
    let tally = watched(&mut cargo, tally)?;
    tally.times().iter().for_each(|(name, took)| stages.part(name, *took));
    settle(&tally, |Failure { executable, path, test }| {
        // Not through cargo, which may treat it as another selection and build it again.
        let path = tree::root().join(path);
        let mut words = runner.iter().map(OsStr::new).chain([path.as_os_str()]);
        let mut alone = Command::new(words.next().context("there is an executable")?);
        alone.args(words).args(["--exact", test]).envs(variables.iter().cloned());
        alone.current_dir(tree::root().join("tests"));
        let total = watched(&mut alone, Tally::of(executable))?.total();
        Ok(total == Count { passed: 1, ..Count::default() })
    })
}

/// The sum after each failed live test was run again by `passes`; prints the outcome.
///
/// # Errors
/// Those of `passes`.
pub(crate) fn settle(
    tally: &Tally,
    mut passes: impl FnMut(&Failure) -> anyhow::Result<bool>,
) -> anyhow::Result<Count> {
    again::settle(tally, |failure| {
        let passed = passes(failure)?;
        let verdict =
            if passed { "unsteady: it passes when it runs again, alone" } else { "fails alone too" };
        progress::line(&format!("  {failure}: {verdict}"));
        Ok(passed)
    })
}

/// A command that ran tests.
pub(crate) struct Followed {
    /// Their results.
    pub(crate) tally: Tally,
    /// Its whole output.
    pub(crate) output: String,
    /// Whether it says that it succeeded.
    success: bool,
    /// How it ended, in words.
    pub(crate) status: String,
}

/// Runs a command that prints as test executables do, and prints how each of them ends.
pub(crate) fn follow(command: &mut Command, mut tally: Tally) -> anyhow::Result<Followed> {
    let (output, success, status) = child::watch(command, |line| {
        if line.starts_with(SKIPPED) {
            progress::line(&format!("  {line}"));
        }
        if let Some(finished) = tally.read(line) {
            finished.print();
        }
    })?;
    if let Some(died) = tally.end() {
        died.print();
    }
    Ok(Followed { tally, output, success, status })
}

/// Runs tests, prints how they end, and the output of those that failed.
fn watched(command: &mut Command, tally: Tally) -> anyhow::Result<Tally> {
    let Followed { tally, output, success, status } = follow(command, tally).context("run the tests")?;
    if !success && tally.total().failed == 0 {
        // Not a test's verdict but cargo's: show all there is.
        bail!("the tests could not be run ({status}):\n{}", tree::without_local_paths(&output));
    }
    if tally.total().failed > 0 {
        progress::line(&tree::without_local_paths(&failures_in(&output)));
    }
    Ok(tally)
}

/// The variables for tests: the paths of the executables under test, and of the tools that test them.
pub(crate) fn variables() -> [(&'static str, PathBuf); 11] {
    [
        ("NETATTACH_DIST", tree::dist()),
        ("NETATTACH_REFERENCE_PLUGINS", setup::reference_plugins()),
        ("NETATTACH_BUSYBOX", setup::busybox()),
        ("NETATTACH_BPF_LOG", tree::bpf()),
        ("NETATTACH_RUNTIMES", setup::runtimes()),
        ("NETATTACH_KUBERNETES", setup::kubernetes()),
        ("NETATTACH_PROMETHEUS", setup::prometheus()),
        ("NETATTACH_KUBECTL", setup::kubectl()),
        ("NETATTACH_HELM_RENDERER", setup::helm_renderer()),
        ("NETATTACH_IMAGES", tree::images()),
        ("NETATTACH_PREVIOUS", setup::previous()),
    ]
}

/// The command prefix that runs test executables as root when this process is not root.
pub(crate) fn runner(variables: &[(&str, PathBuf)]) -> anyhow::Result<Vec<String>> {
    if child::is_root() {
        return Ok(Vec::new());
    }
    let stuck = |problem: &str| progress::UserError::new(problem, "run `cargo xtask test` as root");
    if child::find("sudo").is_none() {
        bail!(stuck("the tests need root for network namespaces and BPF, and there is no sudo"));
    }
    // Asked before anything runs, while a person may still be looking at the terminal.
    let granted = Command::new("sudo").arg("-v").status().is_ok_and(|status| status.success());
    if !granted {
        bail!(stuck("the tests need root for network namespaces and BPF, and sudo refused"));
    }
    progress::line(
        "  the tests need root for network namespaces and BPF: their executables run through sudo",
    );
    let kept = ["CARGO_MANIFEST_DIR", "RUST_BACKTRACE", "PATH", "CI"];
    let kept = kept.iter().filter_map(|name| Some(format!("{name}={}", env::var(name).ok()?)));
    let told = variables.iter().map(|(name, path)| format!("{name}={}", path.display()));
    Ok(["sudo", "-n", "--", "env"].map(str::to_owned).into_iter().chain(kept).chain(told).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_fails_by_its_tests_and_by_its_stages_and_names_both() {
        let good = Count { passed: 9, ..Count::default() };
        let bad = Count { failed: 1, ..good };
        let table: [(&[&str], Count, Option<&str>); 4] = [
            (&[], good, None),
            (&[], bad, Some("tests failed")),
            (&["tidy", "lints"], good, Some("these stages failed: tidy, lints")),
            (&["lints"], bad, Some("tests failed, and these stages: lints")),
        ];
        for (failed, total, expected) in table {
            let error = verdict(failed, total).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), expected, "{failed:?} {total}");
        }
    }

    #[test]
    fn a_failed_stage_and_a_panic_leave_what_goes_on_beside_them() {
        let mut stages = Stages::new();
        let lints = |stages: &mut Stages| stages.tried("lints", |_| -> anyhow::Result<u32> { bail!("no") });
        let machines = |stages: &mut Stages| stages.tried("machines", |_| Ok(1));
        assert_eq!(beside(&mut stages, lints, machines), (Some(None), Some(1)));
        let panics = |_: &mut Stages| -> u32 { panic!("on purpose") };
        assert_eq!(beside(&mut stages, panics, |_| 2), (None, 2));
        assert_eq!(stages.failures(), ["lints: no", "a thread of the run: it panicked"]);
    }

    #[test]
    fn every_suite_that_comes_first_is_there() {
        let suites = tree::suites().unwrap();
        let lacking: Vec<&str> =
            first_suites().into_iter().filter(|suite| !suites.iter().any(|there| there == suite)).collect();
        assert_eq!(lacking, Vec::<&str>::new());
    }
}
