//! `cargo xtask vm`: selections of the tests in virtual machines, each with a kernel or devices that this machine lacks.
//!
//! The machines are emulated, so that they run wherever the tests run: inside other virtual machines too. All files
//! of a machine are in its memory, and its output comes from its serial line.
//!
//! `guests` lists the machines, `image` and `archive` pack the files in a machine's memory, `guest` is its first
//! process.

mod archive;
pub mod guest;
pub mod guests;
mod image;

use std::fs::File;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use tempfile::TempDir;

use self::guests::{GUESTS, Guest, Tests};
use crate::progress::{Done, Progress};
use crate::setup::{self, Emulator, Kernel, Scope};
use crate::suite::{self, Count, Failure, Followed, Tally, failures_in, follow};
use crate::{child, dist, progress, tree};

/// Memory of a machine in MiB: most of it holds the test executables, twice while they are unpacked. Half of what is left
/// beside the packed ones is the most that the kernel unpacks.
const MEMORY: &str = "3584";
/// How many run at once: there has to be memory for them, and each has one processor's work.
const AT_ONCE: usize = 2;
/// Deadline; longer than a run takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(2700);

/// Path of a running machine's files, below its scratch directory.
const INITRD: &str = "initrd";

/// The tests to run in a machine.
#[derive(Debug)]
struct Selection {
    /// Test executables with their arguments, parts of the names of the tests to run; none: all of them.
    tests: Vec<(String, Vec<String>)>,
    /// Whether they are run in their longer form.
    is_longer: bool,
}

impl Selection {
    fn of(tests: Tests) -> Self {
        let owned = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect();
        let tests = tests.iter().map(|(name, parts)| ((*name).to_owned(), owned(parts))).collect();
        Self { tests, is_longer: false }
    }
}

/// How many of the guests' own tests are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// Those that every change must pass.
    Gate,
    /// All of them.
    Whole,
}

/// A guest's own tests, by machine.
fn usual(guest: &Guest, extent: Extent) -> impl Iterator<Item = Selection> {
    let tests = match extent {
        Extent::Gate => guest.gate,
        Extent::Whole => guest.tests,
    };
    tests.iter().copied().map(Selection::of)
}

/// A program to run in a machine instead of tests.
#[derive(Debug)]
pub struct Program<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its executable, dynamic or static.
    pub executable: &'a Path,
    /// Without tabs and line breaks.
    pub arguments: &'a [String],
    /// Executables that it starts, which are in its directory under their own names.
    pub beside: &'a [&'a Path],
}

/// The selection of machines and tests.
#[derive(Debug, Default)]
pub struct Options {
    /// This guest only, by its suite.
    pub guest: Option<String>,
    /// This test executable only, with the tests that have one of `filters` in their names.
    pub test: Option<String>,
    /// None: all tests.
    pub filters: Vec<String>,
    /// Directory of the executables under test; without one they are built.
    pub executables: Option<PathBuf>,
}

/// Sets up, builds, runs what was asked for, and prints the sum.
///
/// # Errors
/// Anything that could not be prepared, or that some test failed.
pub fn run(options: Options) -> anyhow::Result<()> {
    let chosen = |guest: &&Guest| options.guest.as_deref().is_none_or(|suite| suite == guest.suite);
    let guests: Vec<&Guest> = GUESTS.iter().filter(chosen).collect();
    let names = GUESTS.map(|guest| guest.suite).join(", ");
    ensure!(!guests.is_empty(), "there is no guest of that name, but {names}");
    setup::run(Scope::Machine)?;
    if options.executables.is_none() {
        dist::build()?;
    }
    let executables = options.executables.unwrap_or_else(tree::dist);
    let total = match options.test {
        None => tests(packed(&guests, Extent::Whole, executables)?)?,
        Some(test) => {
            let selection = Selection { tests: vec![(test, options.filters)], is_longer: false };
            let mut total = Count::default();
            for guest in guests {
                total += run_in(guest, &selection, &executables, None)?;
            }
            total
        }
    };
    progress::line(&total.to_string());
    if !suite::is_success(total) {
        bail!("tests failed");
    }
    Ok(())
}

/// Guests' own tests, packed: nothing is compiled from here on, unless a test fails and runs again.
pub struct Packed {
    machines: Vec<(&'static Guest, Selection, Option<Machine>)>,
    executables: PathBuf,
}

/// A machine that can be started.
struct Machine {
    emulator: Emulator,
    kernel: Kernel,
    /// Holds the files in the machine's memory; they are removed when it is dropped.
    scratch: TempDir,
}

/// Builds and packs the tests of the gate, for the machines that are there.
///
/// # Errors
/// Something could not be built or read.
pub fn pack() -> anyhow::Result<Packed> {
    packed(&GUESTS.iter().collect::<Vec<_>>(), Extent::Gate, tree::dist())
}

fn packed(guests: &[&'static Guest], extent: Extent, executables: PathBuf) -> anyhow::Result<Packed> {
    let selections =
        guests.iter().flat_map(|guest| usual(guest, extent).map(move |selection| (*guest, selection)));
    let machines = selections.map(|(guest, selection)| {
        let is_there = setup::machine(guest).is_some();
        let machine = is_there.then(|| Machine::pack(guest, &selection, &executables)).transpose()?;
        Ok((guest, selection, machine))
    });
    Ok(Packed { machines: machines.collect::<anyhow::Result<_>>()?, executables })
}

/// Runs all of them, several machines at once: their tests mostly wait.
///
/// # Errors
/// A machine could not be started or ended before its tests; the others were run nevertheless.
pub fn tests(packed: Packed) -> anyhow::Result<Count> {
    let Packed { machines, executables } = packed;
    let machines = Mutex::new(machines.into_iter());
    let next = || machines.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut outcomes = Vec::new();
        while let Some((guest, selection, machine)) = next() {
            outcomes.push(its_own(guest, &selection, machine, &executables));
        }
        outcomes
    };
    let outcomes = thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        let panicked = |_| vec![Err(anyhow!("a thread of the run panicked"))];
        workers.into_iter().flat_map(|it| it.join().unwrap_or_else(panicked)).collect::<Vec<_>>()
    });
    all_of(outcomes)
}

/// The sum, or the last of the errors; those before it are printed.
fn all_of(outcomes: Vec<anyhow::Result<Count>>) -> anyhow::Result<Count> {
    let mut total = Count::default();
    let mut failed = None;
    for outcome in outcomes {
        match outcome {
            Ok(count) => total += count,
            Err(error) => {
                if let Some(earlier) = failed.replace(error) {
                    progress::failure(&earlier);
                }
            }
        }
    }
    failed.map_or(Ok(total), Err)
}

/// Runs the tests that have a longer form in a machine, in that form.
///
/// # Errors
/// As [`tests`], and those of packing.
pub fn longer() -> anyhow::Result<Count> {
    let mut total = Count::default();
    for guest in GUESTS.iter().filter(|guest| !guest.longer.is_empty()) {
        let selection = Selection { is_longer: true, ..Selection::of(guest.longer) };
        total += match setup::machine(guest) {
            Some(_) => run_in(guest, &selection, &tree::dist(), None)?,
            None => none_here(),
        };
    }
    Ok(total)
}

/// Runs a program in the machine whose kernel is of that suite, with the executables of that directory; returns the
/// machine's whole output. The program gets the same variables as tests.
///
/// # Errors
/// There is no such machine, or it ended early. The program's own exit status is not checked.
pub fn program(suite: &str, program: &Program<'_>, executables: &Path) -> anyhow::Result<String> {
    let guest = GUESTS.iter().find(|guest| guest.suite == suite).context("there is no such guest")?;
    let machine =
        Machine::with(guest, |kernel, (_, to)| image::pack_program(guest, kernel, program, executables, to))?;
    progress::heading(&format!("{} under Linux {}", program.name, machine.kernel.release));
    let ((), output) = machine.run_to_the_end(guest, |command| {
        let (output, _, status) = child::watch(command, |_| {})?;
        Ok(((), output, status))
    })?;
    Ok(output)
}

/// Runs a machine's own tests. The machine has everything they need: a skipped test has failed.
fn its_own(
    guest: &Guest,
    selection: &Selection,
    machine: Option<Machine>,
    executables: &Path,
) -> anyhow::Result<Count> {
    let Some(machine) = machine else { return Ok(none_here()) };
    let mut count = run_in(guest, selection, executables, Some(machine))?;
    count.failed += mem::take(&mut count.skipped);
    Ok(count)
}

fn none_here() -> Count {
    progress::line("  SKIPPED: tests in a virtual machine: there is no emulator for them here");
    Count { skipped: 1, ..Count::default() }
}

/// Runs a selection, in the machine that was packed for it if there is one, and then each test that failed once more, in a
/// machine of its own.
fn run_in(
    guest: &Guest,
    selection: &Selection,
    executables: &Path,
    packed: Option<Machine>,
) -> anyhow::Result<Count> {
    let packed = packed.map_or_else(|| Machine::pack(guest, selection, executables), Ok)?;
    let tally = packed.run(guest)?;
    suite::settle(&tally, |Failure { executable, test, .. }| {
        // Called by its name, and by the kernel that it ran under.
        let (name, _) = executable.split_once(' ').unwrap_or((executable, ""));
        let tests = vec![(name.to_owned(), vec!["--exact".to_owned(), test.clone()])];
        let alone = Selection { tests, is_longer: selection.is_longer };
        let tally = Machine::pack(guest, &alone, executables)?.run(guest)?;
        Ok(tally.total() == Count { passed: 1, ..Count::default() })
    })
}

impl Machine {
    fn pack(guest: &Guest, selection: &Selection, executables: &Path) -> anyhow::Result<Self> {
        Self::with(guest, |kernel, to| image::pack(guest, kernel, selection, executables, to))
    }

    /// With the archive that is written for its kernel.
    fn with(
        guest: &Guest,
        pack: impl FnOnce(&Kernel, (&Progress, File)) -> anyhow::Result<u64>,
    ) -> anyhow::Result<Self> {
        let (emulator, kernel) = setup::machine(guest).context("the virtual machine has not been set up")?;
        let scratch = tempfile::tempdir_in(tree::tools()).context("create a scratch directory")?;
        progress::step(&format!("pack for {}", guest.suite), |progress| {
            let file = File::create(scratch.path().join(INITRD)).context("write the machine's files")?;
            Ok(Done::Unchanged(format!("{} MiB", pack(&kernel, (progress, file))? >> 20)))
        })?;
        Ok(Self { emulator, kernel, scratch })
    }

    /// Runs its tests, and prints how they end.
    fn run(self, guest: &Guest) -> anyhow::Result<Tally> {
        progress::heading(&format!("test under Linux {}", self.kernel.release));
        let (tally, output) = self.run_to_the_end(guest, |command| {
            let Followed { tally, output, status, .. } = follow(command, Tally::default())?;
            Ok((tally, output, status))
        })?;
        if tally.total().failed > 0 {
            progress::line(&failures_in(&output));
        }
        Ok(tally)
    }

    /// Runs it until it ends by itself. `watch` runs its command, and returns its evaluation of the output, the whole
    /// output, and how the command ended; the first two are returned.
    fn run_to_the_end<T>(
        self,
        guest: &Guest,
        watch: impl FnOnce(&mut Command) -> anyhow::Result<(T, String, String)>,
    ) -> anyhow::Result<(T, String)> {
        let started = Instant::now();
        let mut command = start(&self.emulator, guest, &self.kernel, &self.scratch.path().join(INITRD));
        let (made_of_it, output, status) = watch(&mut command).context("run the virtual machine")?;
        if !output.lines().any(|line| line.trim_end() == guest::ENDED) {
            let tail: Vec<&str> = output.lines().rev().take(40).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            bail!("the virtual machine ended early ({status}):\n{}", tail.join("\n"));
        }
        progress::finished("ok", started.elapsed(), &format!("virtual machine {}", guest.suite), "ended");
        Ok((made_of_it, output))
    }
}

fn start(emulator: &Emulator, guest: &Guest, kernel: &Kernel, initrd: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE.as_secs().to_string()).arg(&emulator.program);
    command.env("LD_LIBRARY_PATH", &emulator.libraries);
    for directory in &emulator.firmware {
        command.arg("-L").arg(directory);
    }
    // Emulated whatever the host's processor offers: hardware that only half offers it fails late and in odd ways.
    // One processor: to wake another takes milliseconds, as each is a thread of the emulator. A test that waits for an answer
    // took four times as long with two, and twice the host's processors.
    command.args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", MEMORY, "-M", "q35"]);
    command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
    command.args(guest.devices);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initrd);
    command.args(["-append", "console=ttyS0 loglevel=3 panic=-1 mitigations=off tsc=reliable"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_that_end_early_fail_the_run_and_the_others_are_summed() {
        let passed = |passed| Ok(Count { passed, ..Count::default() });
        let sum = all_of(vec![passed(2), passed(3)]).unwrap();
        assert_eq!(sum, Count { passed: 5, ..Count::default() });
        let error = all_of(vec![Err(anyhow!("one")), passed(3), Err(anyhow!("other"))]).unwrap_err();
        assert_eq!(error.to_string(), "other");
    }

    #[test]
    fn no_machine_has_nothing_to_run() {
        let machines =
            |guest: &Guest| usual(guest, Extent::Whole).map(|it| it.tests.len()).collect::<Vec<_>>();
        assert_eq!(GUESTS.each_ref().map(machines), [vec![1, 4], vec![5]]);
    }

    /// What is named for the gate alone would not be run by `cargo xtask vm`.
    #[test]
    fn the_gate_runs_a_part_of_the_tests() {
        for guest in &GUESTS {
            assert_eq!(guest.gate.len(), guest.tests.len(), "{}", guest.suite);
            for (gate, whole) in guest.gate.iter().zip(guest.tests) {
                let is_part = |suite: &str, part: &str| {
                    let mut of_suite = whole.iter().filter(|(name, _)| *name == suite);
                    of_suite.any(|(_, parts)| parts.iter().any(|of_whole| part.contains(of_whole)))
                };
                for (suite, parts) in *gate {
                    let lacking: Vec<&&str> = parts.iter().filter(|part| !is_part(suite, part)).collect();
                    assert_eq!(lacking, [&""; 0], "{} {suite}", guest.suite);
                }
            }
        }
    }
}
