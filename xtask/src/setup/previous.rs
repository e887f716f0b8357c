//! The executables of the agent that landed last, which tests of upgrades replace and bring back: built once from the sources of
//! its commit, as git has them. Everything is below `target/tools`; nothing is installed.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use crate::progress::{Done, Progress, UserError};
use crate::{child, tree};

/// The commit: the one that landed last before the work that the working tree is of. Whoever lands sets it to what landed
/// before, in the first commit after that.
const COMMIT: &str = "d5c708fe26e51b09346a19ea260a1a25f5b9afdc";

/// What is taken of what is built.
const EXECUTABLES: [&str; 3] = ["netattach", "netattachctl", "netattachd"];

/// Directory of the executables.
pub fn previous() -> PathBuf {
    tree::tools().join("previous")
}

/// Why the executables cannot be built from this clone, and what helps. `None`: they can.
fn lacking() -> Option<(String, &'static str)> {
    let object = format!("{COMMIT}^{{commit}}");
    let mut git = Command::new("git");
    git.arg("-C").arg(tree::root()).args(["cat-file", "-e", &object]);
    let short = &COMMIT[..7];
    match git.output() {
        Ok(answer) if answer.status.success() => None,
        Ok(_) => Some((
            format!("these sources have no commit {short}; a shallow clone has the latest alone"),
            "fetch the whole history: `git fetch --unshallow`",
        )),
        Err(error) => Some((format!("git cannot be started: {error}"), "install git")),
    }
}

/// Builds the executables unless they are here.
///
/// # Errors
/// The clone does not have the commit, or its sources cannot be built.
pub(super) fn ensure(progress: &Progress) -> anyhow::Result<Done> {
    let short = &COMMIT[..7];
    let stamp_file = previous().join("commit");
    let is_there = |name: &str| previous().join(name).is_file();
    if fs::read_to_string(&stamp_file).is_ok_and(|found| found == COMMIT)
        && EXECUTABLES.into_iter().all(is_there)
    {
        return Ok(Done::Unchanged(format!("{short} present")));
    }
    if let Some((why, remedy)) = lacking() {
        return Err(
            UserError::new(format!("the agent that landed last cannot be built: {why}"), remedy).into()
        );
    }
    fs::create_dir_all(previous()).context("create a directory for the executables")?;
    let sources = unpack()?;
    let mut build = Command::new(env::current_exe().context("find this executable")?);
    build.arg("build").current_dir(sources.path()).env("CARGO_MANIFEST_DIR", sources.path().join("xtask"));
    build.env("NETATTACH_COMMIT", COMMIT);
    child::run(&mut build, progress).context("build the executables of the commit")?;
    for name in EXECUTABLES {
        let built = sources.path().join("target/dist").join(name);
        fs::rename(built, previous().join(name)).with_context(|| format!("put {name} into place"))?;
    }
    // The stamp last: it is there only beside what it speaks of.
    fs::write(&stamp_file, COMMIT).context("note which commit was built")?;
    Ok(Done::Changed(format!("{short} built")))
}

/// The sources of the commit, in a directory of their own.
fn unpack() -> anyhow::Result<tempfile::TempDir> {
    let directory = tempfile::Builder::new().prefix("previous-").tempdir_in(tree::tools())?;
    let archive = directory.path().join("sources.tar");
    let mut git = Command::new("git");
    git.arg("-C").arg(tree::root()).args(["archive", "--format=tar", "-o"]).arg(&archive).arg(COMMIT);
    child::stdout_of(&mut git).context("take the sources of the commit from git")?;
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(&archive).arg("-C").arg(directory.path());
    child::stdout_of(&mut tar).context("unpack the sources of the commit")?;
    fs::create_dir_all(directory.path().join("target")).context("create a target directory")?;
    symlink(tree::tools(), directory.path().join("target/tools")).context("lead to the tools")?;
    Ok(directory)
}
