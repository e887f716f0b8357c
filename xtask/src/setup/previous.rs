//! The release that landed last, which tests of upgrades replace and bring back: its executables, its image and its manifests,
//! built once from the sources of its commit, as git has them. Everything is below `target/tools`; nothing is installed.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::progress::{Done, Progress, UserError};
use crate::release::{self, Arch};
use crate::{child, tree};

/// The commit: the one that landed last before the work that the working tree is of. Whoever lands sets it to what landed
/// before, in the first commit after that.
const COMMIT: &str = "50fbfbb1a7fe900de8812689f265d4ca69aa26b4";

/// What is taken of the executables that are built.
const EXECUTABLES: [&str; 3] = ["netattach", "netattachctl", "netattachd"];
/// The image, beside them, and the name under which a runtime keeps it.
const ARCHIVE: &str = "netattach.oci.tar";
const IMAGE: &str = "localhost/netattach:previous";
/// The manifests, beside them.
const MANIFESTS: &str = "deploy";

/// Directory of all of it.
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

/// Builds all of it unless it is here.
///
/// # Errors
/// The clone does not have the commit, or its sources cannot be built.
pub(super) fn ensure(progress: &Progress) -> anyhow::Result<Done> {
    let short = &COMMIT[..7];
    let stamp_file = previous().join("commit");
    let is_there = |name: &str| previous().join(name).exists();
    if fs::read_to_string(&stamp_file).is_ok_and(|found| found == COMMIT)
        && EXECUTABLES.into_iter().chain([ARCHIVE, MANIFESTS]).all(is_there)
    {
        return Ok(Done::Unchanged(format!("{short} present")));
    }
    if let Some((why, remedy)) = lacking() {
        return Err(
            UserError::new(format!("the agent that landed last cannot be built: {why}"), remedy).into()
        );
    }
    let sources = unpack()?;
    let mut build = Command::new(env::current_exe().context("find this executable")?);
    build.args(["image", "--name", IMAGE]).current_dir(sources.path());
    build.env("CARGO_MANIFEST_DIR", sources.path().join("xtask"));
    build.env("NETATTACH_COMMIT", COMMIT).env("SOURCE_DATE_EPOCH", time()?);
    child::run(&mut build, progress).context("build the image of the commit")?;
    take(sources.path())?;
    // The stamp last: it is there only beside what it speaks of.
    fs::write(&stamp_file, COMMIT).context("note which commit was built")?;
    Ok(Done::Changed(format!("{short} built")))
}

/// Takes what was built, in place of what was there.
fn take(sources: &Path) -> anyhow::Result<()> {
    let built = EXECUTABLES.map(|name| (sources.join("target/dist").join(name), name));
    let archive = sources.join("target/image").join(release::archive_name(Arch::host()?));
    let _ = fs::remove_dir_all(previous());
    fs::create_dir_all(previous()).context("create a directory for the release")?;
    for (from, name) in built.into_iter().chain([(archive, ARCHIVE), (sources.join(MANIFESTS), MANIFESTS)]) {
        fs::rename(from, previous().join(name)).with_context(|| format!("put {name} into place"))?;
    }
    Ok(())
}

/// When the commit was made, which everything in its image has as its time.
fn time() -> anyhow::Result<String> {
    let mut git = Command::new("git");
    git.arg("-C").arg(tree::root()).args(["log", "-1", "--format=%ct", COMMIT]);
    child::ask(&mut git).context("ask git for the time of the commit")
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
