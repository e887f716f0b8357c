//! `cargo xtask fuzz`: runs every target of `fuzz/` with coverage feedback, on the released compiler.
//!
//! The flags are those that turn on LLVM's coverage instrumentation for libFuzzer; with them no other tool is
//! needed. `cargo fuzz` works on the same directory for whoever prefers it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::screen::Stuck;
use crate::suite::Count;
use crate::{child, dist, screen, setup, tree};

/// No target may need more, in MiB: its inputs are small.
const MEMORY_LIMIT: u32 = 1024;
/// No input may take longer, in seconds.
const INPUT_TIMEOUT: u32 = 10;

/// Coverage and comparisons. No address sanitizer: what the targets run is safe Rust, where a broken bound is a panic.
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
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// Prepares the machine and runs every target; `seconds` is shared among them.
///
/// # Errors
/// As [`run_all`], or that a target found something.
pub fn run(seconds: u32) -> anyhow::Result<()> {
    setup::run(setup::Scope::Fuzzing)?;
    screen::heading("fuzz");
    let total = run_all(seconds)?;
    ensure!(
        total.failed == 0,
        Stuck::new("fuzzing found something", "give the input to the target again, then fix it")
    );
    Ok(())
}

/// Runs every target; `seconds` is shared among them. Returns targets that found nothing and that found something.
///
/// # Errors
/// The targets cannot be built or started. A finding is counted, printed, and not an error here.
pub fn run_all(seconds: u32) -> anyhow::Result<Count> {
    let manifest =
        fs::read_to_string(tree::root().join("fuzz/Cargo.toml")).context("read fuzz/Cargo.toml")?;
    let targets = toml::from_str::<Manifest>(&manifest).context("read fuzz/Cargo.toml")?.targets;
    ensure!(!targets.is_empty(), "fuzz/Cargo.toml names no target");
    let each = (seconds / u32::try_from(targets.len()).context("count the targets")?).max(1);
    screen::step("compile", |progress| {
        let mut cargo = child::cargo();
        cargo
            .args(["build", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target/fuzz"])
            .args(["--target", &dist::host_triple()?])
            .env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\x1f"));
        child::run(&mut cargo, progress).context("compile the fuzz targets")?;
        Ok(screen::Done::Was(format!("{} targets, {each} s each", targets.len())))
    })?;
    let mut total = Count::default();
    for target in &targets {
        total += run_one(&target.name, each)?;
    }
    Ok(total)
}

fn run_one(name: &str, seconds: u32) -> anyhow::Result<Count> {
    let executable = tree::root().join("target/fuzz").join(dist::host_triple()?).join("release").join(name);
    let found = tree::root().join("target/fuzz/corpus").join(name);
    let seeds = tree::root().join("fuzz/corpus").join(name);
    let findings = tree::root().join("fuzz/artifacts").join(name);
    for dir in [&found, &findings] {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    let mut command = Command::new(executable);
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_TIMEOUT}"))
        .arg(format!("-rss_limit_mb={MEMORY_LIMIT}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .arg(&found)
        .args(Some(seeds).filter(|dir: &std::path::PathBuf| Path::is_dir(dir)));
    let started = Instant::now();
    let mut inputs = String::new();
    let (output, clean, _) = child::watch(&mut command, |line| {
        if line.contains("DONE") || line.starts_with("Done ") {
            line.clone_into(&mut inputs);
        }
    })?;
    if clean {
        screen::finished("ok", started.elapsed(), name, &inputs);
        return Ok(Count { passed: 1, ..Count::default() });
    }
    screen::finished("FAIL", started.elapsed(), name, "the input that does it is under fuzz/artifacts");
    screen::line(&tree::without_local_paths(&output));
    Ok(Count { failed: 1, ..Count::default() })
}
