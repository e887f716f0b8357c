//! `cargo xtask demo --cluster`: the same on a real cluster, by kubectl. An executable of the tests performs it on
//! the tests' cluster (`tests/src/bin/cluster-demo.rs`).

use std::ffi::OsStr;
use std::process::Command;

use anyhow::{Context, bail};

use crate::{child, dist, progress, release, setup, suite, tree};

/// Sets up, builds executables and image, and runs the demonstration.
///
/// # Errors
/// Something cannot be prepared, or was not as expected.
pub fn run() -> anyhow::Result<()> {
    setup::run(setup::Scope::Testing)?;
    let kubernetes = setup::Building::start(true);
    dist::build()?;
    release::image_of_built()?;
    progress::step("compile", |progress| {
        let mut cargo = child::cargo();
        child::run(cargo.args(["build", "--package", "netattach-tests", "--bin", EXECUTABLE]), progress)?;
        Ok(progress::Done::Unchanged(String::new()))
    })?;
    kubernetes.wait()?;
    let variables = suite::variables();
    let runner = suite::runner(&variables)?;
    let executable = tree::root().join("target/debug").join(EXECUTABLE);
    let mut words = runner.iter().map(OsStr::new).chain([executable.as_os_str()]);
    let mut command = Command::new(words.next().context("there is an executable")?);
    command.args(words).envs(variables).current_dir(tree::root());
    let status = command.status().context("start the demonstration")?;
    if !status.success() {
        bail!("the demonstration failed ({status})");
    }
    Ok(())
}

const EXECUTABLE: &str = "cluster-demo";
