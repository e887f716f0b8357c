//! `cargo xtask test`: everything that can be proved on this machine, and one line that sums it up.
//!
//! Tests make network namespaces and load BPF, which takes root. Called by anyone else, everything is still
//! built as that user, and only the test executables run through sudo.
//!
//! `tally` reads what test executables print, `again` runs what failed once more, alone; `computed` is what goes on beside the
//! live tests; `stages` are what the time went to.

mod again;
mod computed;
mod stages;
mod tally;

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, anyhow, bail};

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

/// The benches that are left out where nothing but the floor is built.
pub(crate) const FEATURES: &str = "netattach-bench/cluster";
/// Tests with this in their names need a card that only a virtual machine has, see [`vm::guests`].
const ONLY_IN_GUESTS: &str = "sriov::";
/// Tests with this in their names need the release that landed last, whose build takes minutes: [`upgrade`] runs them.
const UPGRADES: &str = "upgrade::";
/// Live tests that also run with programs attached by tcx: executable and module.
const BY_TCX: [(&str, &str); 3] = [("policy", "policy_live::"), ("lifecycle", "restart::"), ("cni", "gc::")];

/// Suites that mostly wait, for looks, deadlines and what others do: more of their tests go on at once than there are
/// processors. Those of the others measure, or use all processors.
const WAITING: [&str; 4] = ["api", "cni", "lifecycle", "plugins"];
/// How many for each processor: together they take less than one.
const AT_ONCE: usize = 3;
/// The suite with clusters of Kubernetes.
const CLUSTER: &str = "cluster";
/// How many more of its tests go on at once than there are processors: starting a cluster takes seconds of one, and the minute or
/// two after that a fifth.
const CLUSTERS_MORE: usize = 1;

/// What a run covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The tests that this machine can run.
    Tests,
    /// What every change must pass: tidy, every test without exception, and the fuzz targets for a minute.
    Gate,
}

/// Sets up, builds, tests; then prints what the time went to. The last line on standard output is the sum.
///
/// # Errors
/// Anything that could not be prepared, or that some test failed.
pub fn run(extent: Extent) -> anyhow::Result<()> {
    let mut stages = Stages::new();
    let outcome = everything(extent, &mut stages);
    progress::line(&format!("\n{}", stages.table()));
    progress::line(&format!("not in this run: {} (cargo xtask nightly)", nightly::names()));
    let total = outcome?;
    progress::line(&total.to_string());
    if !is_success(total) {
        bail!("tests failed");
    }
    Ok(())
}

fn everything(extent: Extent, stages: &mut Stages) -> anyhow::Result<Count> {
    let strict = extent == Extent::Gate;
    stages.timed("set-up", |_| setup::run(if strict { Scope::Gate } else { Scope::Testing }))?;
    let cluster = Building::start(strict);
    stages.timed("BPF object", |_| ebpf::build(Flavour::Normal))?;
    let (compiled, is_compiled) = mpsc::channel();
    // What needs the processors and no executable, one after another: compiling at first, and then at the lowest priority what
    // measures no time. The tests leave it half of the processors' time, as most of them wait for something.
    let computed = move |stages: &mut Stages| {
        if strict {
            stages.timed("tidy", |_| tidy::run(&tidy::quick(), None))?;
        }
        progress::heading("test");
        stages.timed("compile tests", |_| compile(&["--workspace", "--features", FEATURES]))?;
        stages.timed("BPF object that logs", |_| ebpf::build(Flavour::Log))?;
        // Nobody is there to be told when the executables could not be built.
        let _ = compiled.send(());
        computed::beside_tests(strict, stages)
    };
    // In its end this optimises with a thread for each executable, the last of them alone, while the other can use all
    // processors: it comes first.
    let live = |stages: &mut Stages| {
        stages.timed("executables", |_| dist::build())?;
        stages.timed("image", |_| release::image_of_built())?;
        let compiled = |_: &mut Stages| is_compiled.recv().context("the tests were not compiled");
        stages.timed("compile tests, when executables were built", compiled)?;
        live_tests(cluster, stages)
    };
    let (mut total, tested) = beside(stages, computed, live)?;
    total += tested;
    total += around_machines(strict, stages)?;
    Ok(total)
}

/// What is left when nothing measures time any more: the virtual machines, each with one processor's work, the soak and fuzzing.
fn around_machines(strict: bool, stages: &mut Stages) -> anyhow::Result<Count> {
    let soak = soak::Beside::start()?;
    let packed = stages.timed("files of virtual machines", |_| vm::pack())?;
    let machines = |stages: &mut Stages| stages.timed("tests in virtual machines", |_| vm::tests(packed));
    let fuzzed = |stages: &mut Stages| match strict {
        true => stages.timed("fuzz", |_| computed::fuzz()),
        false => Ok(Count::default()),
    };
    let (mut total, fuzzed) = beside(stages, machines, fuzzed)?;
    total += fuzzed;
    total += stages.timed("soak, when all these had ended", |_| soak.wait())?;
    Ok(total)
}

/// Does two kinds of work beside each other.
fn beside<A: Send, B>(
    stages: &mut Stages,
    one: impl FnOnce(&mut Stages) -> anyhow::Result<A> + Send,
    other: impl FnOnce(&mut Stages) -> anyhow::Result<B>,
) -> anyhow::Result<(A, B)> {
    let (one, other) = thread::scope(|scope| {
        let one = scope.spawn(|| {
            let mut stages = Stages::new();
            let done = one(&mut stages);
            (done, stages)
        });
        let other = other(stages);
        (one.join(), other)
    });
    let (one, of_one) = one.map_err(|_| anyhow!("a thread of the run panicked"))?;
    stages.extend(of_one);
    // An error of the one is not to hide that of the other.
    match (one, other) {
        (Ok(one), Ok(other)) => Ok((one, other)),
        (Err(one), Err(other)) => {
            progress::failure(&one);
            Err(other)
        }
        (Err(error), _) | (_, Err(error)) => Err(error),
    }
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
    let mut total = tests(&selection, &[], &told, &mut Stages::new())?;
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
    // A test that finds nothing to be upgraded is to fail.
    let told: Vec<_> = variables().into_iter().chain([("CI", PathBuf::from("true"))]).collect();
    let total = tests(&selection, &[UPGRADES], &told, &mut Stages::new())?;
    progress::line(&total.to_string());
    if !is_success(total) {
        bail!("tests failed");
    }
    Ok(())
}

/// All tests of this machine: those that mostly wait; those with a cluster, whose programs have been built by then; the others,
/// some of which measure, when what goes on beside them has mostly ended; what documentation shows; and some once more.
fn live_tests(cluster: Building, stages: &mut Stages) -> anyhow::Result<Count> {
    let (clustered, others): (Vec<_>, Vec<_>) =
        tree::suites()?.into_iter().partition(|suite| suite == CLUSTER);
    let (waiting, others): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|suite| WAITING.contains(&suite.as_str()));
    let told = |at_once: usize| {
        let threads = ("RUST_TEST_THREADS", PathBuf::from(at_once.to_string()));
        variables().into_iter().chain([threads]).collect::<Vec<_>>()
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);

    let at_once = told(AT_ONCE * processors);
    let mut total = stages.timed("tests that mostly wait", |stages| {
        tests(&selected(of_suites(&waiting)), &[], &at_once, stages)
    })?;
    stages.timed("Kubernetes, when these had ended", |_| cluster.wait())?;
    let at_once = told(processors + CLUSTERS_MORE);
    total += stages.timed("tests with a cluster", |stages| {
        tests(&selected(of_suites(&clustered)), &[], &at_once, stages)
    })?;
    total += stages.timed("other tests", |stages| {
        let others = selected(["--lib", "--bins"].into_iter().chain(of_suites(&others)));
        let mut total = tests(&others, &[], &variables(), stages)?;
        total += tests(&selected(["--doc"].into_iter()), &[], &variables(), stages)?;
        Ok(total)
    })?;
    total += stages.timed("tests by tcx", by_tcx)?;
    Ok(total)
}

/// Suites, as cargo takes them.
fn of_suites(suites: &[String]) -> impl Iterator<Item = &str> {
    suites.iter().flat_map(|suite| ["--test", suite.as_str()])
}

/// Of the whole workspace: another selection has other features, and is compiled anew.
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

/// What attaches programs, once more with agents that attach them by tcx where a test does not say.
fn by_tcx(stages: &mut Stages) -> anyhow::Result<Count> {
    progress::heading("test with programs attached by tcx");
    let (executables, modules): (BTreeSet<_>, Vec<_>) = BY_TCX.into_iter().unzip();
    let executables = executables.into_iter().flat_map(|name| ["--test", name]);
    let selection: Vec<&str> = ["--package", "netattach-tests"].into_iter().chain(executables).collect();
    let tcx = ("NETATTACH_ATTACH", PathBuf::from("tcx"));
    tests(&selection, &modules, &variables().into_iter().chain([tcx]).collect::<Vec<_>>(), stages)
}

/// Runs the tests of a selection of executables, those with one of `names` in theirs or all, and then each live test that
/// failed once more, alone.
fn tests(
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
    let tally = watched(&mut cargo, Tally::default())?;
    tally.times().iter().for_each(|(name, took)| stages.part(name, *took));
    settle(&tally, |Failure { executable, path, test }| {
        // Not through cargo, which may take it for another selection and build it anew.
        let path = tree::root().join(path);
        let mut words = runner.iter().map(OsStr::new).chain([path.as_os_str()]);
        let mut alone = Command::new(words.next().context("there is an executable")?);
        alone.args(words).args(["--exact", test]).envs(variables.iter().cloned());
        alone.current_dir(tree::root().join("tests"));
        let total = watched(&mut alone, Tally::of(executable))?.total();
        Ok(total == Count { passed: 1, ..Count::default() })
    })
}

/// The sum once every live test that failed had another try by `passes`; says what came of it.
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
    /// What became of them.
    pub(crate) tally: Tally,
    /// All that it printed.
    pub(crate) output: String,
    /// Whether it says that it succeeded.
    success: bool,
    /// How it ended, in words.
    pub(crate) status: String,
}

/// Runs what prints as test executables do, and prints how each of them ends.
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

/// Runs tests, prints how they end, and what those said that failed.
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

/// What tests are told: where the executables under test are, and what they are tested with.
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

/// What runs test executables as root when this process is not: the words before theirs.
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
