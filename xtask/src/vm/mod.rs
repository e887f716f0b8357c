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
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use self::guests::{GUESTS, Guest};
use crate::progress::Done;
use crate::setup::{self, Emulator, Kernel, Scope};
use crate::suite::{self, Count, Failure, Followed, Tally, failures_in, follow};
use crate::{dist, progress, tree};

/// Memory of a machine in MiB: most of it holds the test executables, twice while they are unpacked. Half of it is the most
/// that the kernel unpacks.
const MEMORY: &str = "3072";
/// Longer than everything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(900);

/// Test executables with their arguments, parts of the names of the tests to run; none: all of them.
type Selection = Vec<(String, Vec<String>)>;

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
    let mut total = Count::default();
    for guest in guests {
        total += match &options.test {
            Some(test) => run_in(guest, &vec![(test.clone(), options.filters.clone())], &executables)?,
            None => run_usual(guest, &executables)?,
        };
    }
    progress::line(&total.to_string());
    if !suite::is_success(total) {
        bail!("tests failed");
    }
    Ok(())
}

/// Runs every guest's own tests in the machines that are there.
///
/// # Errors
/// A machine could not be started or ended before its tests.
pub fn tests() -> anyhow::Result<Count> {
    let mut total = Count::default();
    for guest in &GUESTS {
        total += run_usual(guest, &tree::dist())?;
    }
    Ok(total)
}

/// Runs a guest's own tests. It has what they need: one that is skipped has failed.
fn run_usual(guest: &Guest, executables: &Path) -> anyhow::Result<Count> {
    if setup::machine(guest).is_none() {
        progress::line("  SKIPPED: tests in a virtual machine: there is no emulator for them here");
        return Ok(Count { skipped: 1, ..Count::default() });
    }
    let owned = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect();
    let selection = guest.tests.iter().map(|(name, parts)| ((*name).to_owned(), owned(parts))).collect();
    let mut count = run_in(guest, &selection, executables)?;
    count.failed += mem::take(&mut count.skipped);
    Ok(count)
}

/// Runs a selection, and then each test that failed once more, in a machine of its own.
fn run_in(guest: &Guest, selection: &Selection, executables: &Path) -> anyhow::Result<Count> {
    let tally = in_machine(guest, selection, executables)?;
    suite::settle(&tally, |Failure { executable, test, .. }| {
        // Called by its name, and by the kernel that it ran under.
        let (name, _) = executable.split_once(' ').unwrap_or((executable, ""));
        let alone = vec![(name.to_owned(), vec!["--exact".to_owned(), test.clone()])];
        Ok(in_machine(guest, &alone, executables)?.total() == Count { passed: 1, ..Count::default() })
    })
}

/// Runs a selection in one machine, and prints how the tests end.
fn in_machine(guest: &Guest, selection: &Selection, executables: &Path) -> anyhow::Result<Tally> {
    let (emulator, kernel) = setup::machine(guest).context("the virtual machine has not been set up")?;
    progress::heading(&format!("test under Linux {}", kernel.release));
    let scratch = tempfile::tempdir_in(tree::tools()).context("create a scratch directory")?;
    let initrd = scratch.path().join("initrd");
    progress::step("pack", |progress| {
        let archive = image::pack(guest, &kernel, selection, executables, progress)?;
        fs::write(&initrd, &archive).context("write the machine's files")?;
        Ok(Done::Unchanged(format!("{} MiB", archive.len() >> 20)))
    })?;
    let started = Instant::now();
    let Followed { tally, output, status, .. } =
        follow(&mut start(&emulator, guest, &kernel, &initrd), Tally::default())
            .context("run the virtual machine")?;
    if !output.lines().any(|line| line.trim_end() == guest::ENDED) {
        let tail: Vec<&str> = output.lines().rev().take(40).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!("the virtual machine ended early ({status}):\n{}", tail.join("\n"));
    }
    if tally.total().failed > 0 {
        progress::line(&failures_in(&output));
    }
    progress::finished("ok", started.elapsed(), "virtual machine", "ended");
    Ok(tally)
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
