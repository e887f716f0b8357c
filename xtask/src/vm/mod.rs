//! `cargo xtask vm`: selections of the tests in virtual machines, each with a kernel or devices that this machine lacks.
//!
//! The machines are emulated, so that they run wherever the tests run: inside other virtual machines too. All that one has
//! is in its memory, and what it prints comes out of its serial line.
//!
//! `guests` lists the machines, `image` and `archive` pack what one has in its memory, `guest` is its first process.

mod archive;
pub mod guest;
pub mod guests;
mod image;

use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use tempfile::TempDir;

use self::guests::{GUESTS, Guest, Tests};
use crate::progress::{Done, Progress};
use crate::setup::{self, Emulator, Kernel, Scope};
use crate::suite::{self, Count, Failure, Followed, Tally, failures_in, follow};
use crate::{child, dist, progress, tree};

/// Memory of a machine in MiB: most of it holds the test executables, twice while they are unpacked. Half of it is the most
/// that the kernel unpacks.
const MEMORY: &str = "3072";
/// Longer than everything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(1800);

/// Where the files of a machine are while it runs, below its scratch directory.
const INITRD: &str = "initrd";

/// What is run in a machine.
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

/// A guest's own tests.
fn usual(guest: &Guest) -> Selection {
    Selection::of(guest.tests)
}

/// What is run in a machine in place of tests.
#[derive(Debug)]
pub struct Program<'a> {
    /// What it is called.
    pub name: &'a str,
    /// Its executable, dynamic or static.
    pub executable: &'a Path,
    /// Without tabs and line breaks.
    pub arguments: &'a [String],
}

/// What to run where.
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
        None => tests(packed(&guests, executables)?)?,
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
    guests: Vec<(&'static Guest, Option<Machine>)>,
    executables: PathBuf,
}

/// A machine that can be started.
struct Machine {
    emulator: Emulator,
    kernel: Kernel,
    /// Holds what the machine has in its memory, until it is dropped.
    scratch: TempDir,
}

/// Builds and packs every guest's own tests, for the machines that are there.
///
/// # Errors
/// Something could not be built or read.
pub fn pack() -> anyhow::Result<Packed> {
    packed(&GUESTS.iter().collect::<Vec<_>>(), tree::dist())
}

fn packed(guests: &[&'static Guest], executables: PathBuf) -> anyhow::Result<Packed> {
    let packed = guests.iter().map(|guest| {
        let is_there = setup::machine(guest).is_some();
        let machine = is_there.then(|| Machine::pack(guest, &usual(guest), &executables)).transpose()?;
        Ok((*guest, machine))
    });
    Ok(Packed { guests: packed.collect::<anyhow::Result<_>>()?, executables })
}

/// Runs all of them, each machine beside the others: most of the time their tests wait for something.
///
/// # Errors
/// A machine could not be started or ended before its tests.
pub fn tests(packed: Packed) -> anyhow::Result<Count> {
    let Packed { guests, executables } = packed;
    let executables = &executables;
    let outcomes = thread::scope(|scope| {
        let start = |(guest, machine)| scope.spawn(move || its_own(guest, machine, executables));
        let started = guests.into_iter().map(start);
        // Collected first: a thread that is not started yet is not waited for.
        let started: Vec<_> = started.collect();
        let ended =
            started.into_iter().map(|it| it.join().map_err(|_| anyhow!("a thread of the run panicked")));
        ended.map(|outcome| outcome.flatten()).collect::<Vec<_>>()
    });
    let mut total = Count::default();
    for outcome in outcomes {
        total += outcome?;
    }
    Ok(total)
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

/// Runs a program in the machine whose kernel is of that suite, beside the executables of that directory; returns all that the
/// machine has printed. It is told what tests are told.
///
/// # Errors
/// There is no such machine, or it ended early. How the program ended is not looked at.
pub fn program(suite: &str, program: &Program<'_>, executables: &Path) -> anyhow::Result<String> {
    let guest = GUESTS.iter().find(|guest| guest.suite == suite).context("there is no such guest")?;
    let machine = Machine::with(guest, |kernel, _| image::pack_program(guest, kernel, program, executables))?;
    progress::heading(&format!("{} under Linux {}", program.name, machine.kernel.release));
    let ((), output) = machine.run_to_the_end(guest, |command| {
        let (output, _, status) = child::watch(command, |_| {})?;
        Ok(((), output, status))
    })?;
    Ok(output)
}

/// Runs a guest's own tests. It has what they need: one that is skipped has failed.
fn its_own(guest: &Guest, machine: Option<Machine>, executables: &Path) -> anyhow::Result<Count> {
    let Some(machine) = machine else { return Ok(none_here()) };
    let mut count = run_in(guest, &usual(guest), executables, Some(machine))?;
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
        Self::with(guest, |kernel, progress| image::pack(guest, kernel, selection, executables, progress))
    }

    /// With what is packed for its kernel in its memory.
    fn with(
        guest: &Guest,
        pack: impl FnOnce(&Kernel, &Progress) -> anyhow::Result<Vec<u8>>,
    ) -> anyhow::Result<Self> {
        let (emulator, kernel) = setup::machine(guest).context("the virtual machine has not been set up")?;
        let scratch = tempfile::tempdir_in(tree::tools()).context("create a scratch directory")?;
        progress::step(&format!("pack for {}", guest.suite), |progress| {
            let archive = pack(&kernel, progress)?;
            fs::write(scratch.path().join(INITRD), &archive).context("write the machine's files")?;
            Ok(Done::Unchanged(format!("{} MiB", archive.len() >> 20)))
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

    /// Runs it until it ends by itself. `watch` runs its command, and returns what it makes of what that prints, all of that, and
    /// how it ended; the first two are returned.
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
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", MEMORY, "-M", "q35"]);
    command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
    command.args(guest.devices);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initrd);
    command.args(["-append", "console=ttyS0 loglevel=3 panic=-1 mitigations=off tsc=unstable"]);
    command
}
