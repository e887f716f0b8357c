//! `cargo xtask fuzz`: runs every target of `fuzz/` with coverage feedback, on the released compiler.
//!
//! The flags are those that turn on LLVM's coverage instrumentation for libFuzzer; with them no other tool is
//! needed. `cargo fuzz` works on the same directory.
//!
//! What a target checks is a file in `fuzz/checks`, which the suite `inputs` runs as well, without feedback: the gate takes that.
//!
//! Inputs that targets find are stored below `target/fuzz/corpus` and are the start of the next run. A long run also
//! copies inputs that reach new code to `fuzz/corpus`, to be committed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use serde::Deserialize;

use crate::progress::UserError;
use crate::suite::Count;
use crate::{child, dist, progress, setup, tree};

/// No target may need more, in MiB: its inputs are small.
const MEMORY_LIMIT: u32 = 1024;
/// No input may take longer, in seconds.
const INPUT_TIMEOUT: u32 = 10;

/// How long each target runs in a long run at least, in seconds.
pub const LONG: u32 = 600;

/// Coverage and comparisons. No address sanitizer: the targets run safe Rust, where a broken bound is a panic.
const RUSTFLAGS: [&str; 6] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

#[derive(Deserialize)]
struct Manifest {
    #[serde(rename = "bin")]
    targets: Vec<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// The targets to run, and the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Names of targets; all of them if this is empty.
    pub targets: Vec<String>,
    /// How long.
    pub time: Time,
}

/// How long targets run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Time {
    /// So many seconds for all together, one after another.
    Together(u32),
    /// So many seconds for each, as many targets at a time as there are processors; inputs that reach new code are
    /// added to `fuzz/corpus`.
    Each(u32),
}

/// Prepares the machine and runs targets.
///
/// # Errors
/// As [`run_all`], or that a target found something.
pub fn run(options: &Options) -> anyhow::Result<()> {
    setup::run(setup::Scope::Fuzzing)?;
    progress::heading("fuzz");
    let total = run_all(options)?;
    ensure!(
        total.failed == 0,
        UserError::new("fuzzing found something", "give the input to the target again, then fix it")
    );
    Ok(())
}

/// Runs targets. Returns how many found nothing and how many found something.
///
/// # Errors
/// There is no target of a name, or targets cannot be built or started. A finding is counted, printed, and not an error
/// here.
fn run_all(options: &Options) -> anyhow::Result<Count> {
    let names = chosen(all()?, &options.targets)?;
    let (seconds, at_once, keep) = match options.time {
        Time::Together(seconds) => {
            (seconds / u32::try_from(names.len()).context("count the targets")?, 1, false)
        }
        Time::Each(seconds) => (seconds, thread::available_parallelism().map_or(1, usize::from), true),
    };
    let seconds = seconds.max(1);
    progress::step("compile", |progress| {
        child::run(&mut compiler(&names)?, progress).context("compile the fuzz targets")?;
        Ok(progress::Done::Unchanged(format!("{} targets, {seconds} s each", names.len())))
    })?;
    let waiting = Mutex::new(names.iter());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || -> anyhow::Result<Count> {
        let mut total = Count::default();
        while let Some(name) = next() {
            total += Target::at(name)?.run(seconds, keep)?;
        }
        Ok(total)
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        let mut total = Count::default();
        for worker in workers {
            total += worker.join().map_err(|_| anyhow!("a thread that runs targets panicked"))??;
        }
        Ok(total)
    })
}

/// The command that compiles targets.
fn compiler(names: &[String]) -> anyhow::Result<Command> {
    let mut cargo = child::cargo();
    cargo
        .args(["build", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target/fuzz"])
        .args(["--target", &dist::host_triple()?])
        .args(names.iter().flat_map(|name| ["--bin", name]))
        .env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\x1f"));
    Ok(cargo)
}

/// The names of all targets, in the order of the manifest.
fn all() -> anyhow::Result<Vec<String>> {
    let manifest =
        fs::read_to_string(tree::root().join("fuzz/Cargo.toml")).context("read fuzz/Cargo.toml")?;
    let targets = toml::from_str::<Manifest>(&manifest).context("read fuzz/Cargo.toml")?.targets;
    Ok(targets.into_iter().map(|target| target.name).collect())
}

/// The targets that were asked for, in the order of the manifest.
fn chosen(all: Vec<String>, wanted: &[String]) -> anyhow::Result<Vec<String>> {
    ensure!(!all.is_empty(), "fuzz/Cargo.toml names no target");
    if let Some(unknown) = wanted.iter().find(|name| !all.contains(name)) {
        let next = format!("the targets are {}", all.join(", "));
        return Err(UserError::new(format!("fuzz/Cargo.toml has no target {unknown}"), next).into());
    }
    Ok(all.into_iter().filter(|name| wanted.is_empty() || wanted.contains(name)).collect())
}

/// A target's executable and directories.
struct Target<'a> {
    name: &'a str,
    executable: PathBuf,
    /// The inputs that it has found.
    found: PathBuf,
    /// The committed inputs.
    seeds: PathBuf,
    /// Inputs that it failed at.
    findings: PathBuf,
}

impl<'a> Target<'a> {
    fn at(name: &'a str) -> anyhow::Result<Self> {
        let built = tree::root().join("target/fuzz");
        let target = Self {
            name,
            executable: built.join(dist::host_triple()?).join("release").join(name),
            found: built.join("corpus").join(name),
            seeds: tree::root().join("fuzz/corpus").join(name),
            findings: tree::root().join("fuzz/artifacts").join(name),
        };
        for dir in [&target.found, &target.seeds, &target.findings] {
            fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        }
        Ok(target)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .arg(format!("-timeout={INPUT_TIMEOUT}"))
            .arg(format!("-rss_limit_mb={MEMORY_LIMIT}"))
            .arg(format!("-artifact_prefix={}/", self.findings.display()));
        command
    }

    fn run(&self, seconds: u32, keep: bool) -> anyhow::Result<Count> {
        let mut command = self.command();
        command.arg(format!("-max_total_time={seconds}")).arg(&self.found).arg(&self.seeds);
        let started = Instant::now();
        let mut inputs = String::new();
        let (output, clean, _) = child::watch(&mut command, |line| {
            if line.contains("DONE") || line.starts_with("Done ") {
                line.clone_into(&mut inputs);
            }
        })?;
        if clean {
            let kept = if keep { self.keep()? } else { String::new() };
            progress::finished("ok", started.elapsed(), self.name, &(inputs + &kept));
            return Ok(Count { passed: 1, ..Count::default() });
        }
        progress::finished(
            "FAIL",
            started.elapsed(),
            self.name,
            "the input that does it is under fuzz/artifacts",
        );
        progress::line(&tree::without_local_paths(&output));
        Ok(Count { failed: 1, ..Count::default() })
    }

    /// Adds to the seeds the inputs that reach code that the seeds do not reach; hit counts are ignored, as they
    /// would keep thousands of inputs.
    fn keep(&self) -> anyhow::Result<String> {
        let before = files(&self.seeds)?;
        let mut command = self.command();
        command.args(["-merge=1", "-use_counters=0"]).arg(&self.seeds).arg(&self.found);
        let (output, clean, status) = child::watch(&mut command, |_| {})?;
        ensure!(clean, "merge what {} found: {status}\n{output}", self.name);
        Ok(format!(", {} more in fuzz/corpus", files(&self.seeds)? - before))
    }
}

fn files(dir: &Path) -> anyhow::Result<usize> {
    Ok(fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_chosen_by_name_and_an_unknown_one_is_refused_with_those_there_are() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let all = || names(&["annotation", "packet", "policies"]);
        assert_eq!(chosen(all(), &[]).unwrap(), all());
        assert_eq!(chosen(all(), &names(&["policies", "packet"])).unwrap(), names(&["packet", "policies"]));
        let error = chosen(all(), &names(&["packets"])).unwrap_err();
        let stuck = error.downcast_ref::<UserError>().unwrap();
        assert_eq!(stuck.next, "the targets are annotation, packet, policies");
    }
}
