//! What takes processors and measures no time: done beside the live tests, at the lowest priority where there is the program for
//! that, so that it has what they leave.

use super::{Count, Stages, Tally, watched};
use crate::{child, fuzz, progress, tidy};

/// Fuzzing time for all targets together.
const FUZZ_SECONDS: u32 = 60;

/// All of it, one after another; `strict`: what only the gate does, too. Everything that the tests run has been compiled: cargo
/// lets one at a time compile into a directory, and nobody is to wait for this.
///
/// # Errors
/// What cannot be compiled, or what the lints found. A failed test is counted.
pub(super) fn beside_tests(strict: bool, stages: &mut Stages) -> anyhow::Result<Count> {
    if strict {
        stages.timed("lints", |_| tidy::run(&[tidy::Part::Lints], None))?;
    }
    let total = stages.timed("tests under a model checker", |_| orders())?;
    if strict {
        stages.timed("compile fuzz targets", |_| fuzz::compile_idly())?;
    }
    Ok(total)
}

/// Every fuzz target for some seconds. Not at the lowest priority: an input may take a time of the clock.
///
/// # Errors
/// Those of [`fuzz::run_all`].
pub(super) fn fuzz() -> anyhow::Result<Count> {
    progress::heading("fuzz");
    fuzz::run_all(&fuzz::Options { targets: Vec::new(), time: fuzz::Time::Together(FUZZ_SECONDS) })
}

/// What threads share, in many orders of their steps. These are no live tests: what fails is not tried again.
fn orders() -> anyhow::Result<Count> {
    progress::heading("test what threads share, under a model checker");
    let mut cargo = child::cargo();
    cargo.args(["test", "--package", "netattach", "--features", "model", "--lib", "--color", "never"]);
    cargo.args(["--", "model::"]);
    Ok(watched(&mut child::idle(cargo), Tally::default())?.total())
}
