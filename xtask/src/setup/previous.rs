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

/// A landed release has a tag with the number of its issue, set when it lands.
const LANDED: &str = "refs/tags/issue-*";
/// The commit that landed last before there were tags.
const BEFORE_TAGS: &str = "50fbfbb1a7fe900de8812689f265d4ca69aa26b4";

/// The executables that are kept of the build.
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

/// The commit that landed last before the one that is checked out: that of the newest tag behind it. `None`: no tag is behind
/// it, or git cannot be asked.
fn landed(root: &Path) -> Option<String> {
    // An annotated tag is an object that names the commit.
    const OF_COMMIT: &str = "--format=%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end)";
    let mut git = Command::new("git");
    git.arg("-C").arg(root).args(["for-each-ref", "--merged=HEAD", "--no-contains=HEAD"]);
    git.args(["--sort=-creatordate", "--count=1", OF_COMMIT, LANDED]);
    child::ask(&mut git).filter(|commit| !commit.is_empty())
}

/// Why the executables cannot be built from this clone, and the remedy. `None`: they can.
fn lacking(commit: &str) -> Option<(String, &'static str)> {
    let object = format!("{commit}^{{commit}}");
    let mut git = Command::new("git");
    git.arg("-C").arg(tree::root()).args(["cat-file", "-e", &object]);
    let short = short(commit);
    match git.output() {
        Ok(answer) if answer.status.success() => None,
        Ok(_) => Some((
            format!("these sources have no commit {short}; a shallow clone has the latest alone"),
            "fetch the whole history: `git fetch --unshallow`",
        )),
        Err(error) => Some((format!("git cannot be started: {error}"), "install git")),
    }
}

fn short(commit: &str) -> &str {
    commit.get(..7).unwrap_or(commit)
}

/// Builds all of it unless it is here.
///
/// # Errors
/// The clone does not have the commit, or its sources cannot be built.
pub(super) fn ensure(progress: &Progress) -> anyhow::Result<Done> {
    let landed = landed(&tree::root());
    let commit = landed.as_deref().unwrap_or(BEFORE_TAGS);
    let short = short(commit);
    let stamp_file = previous().join("commit");
    let is_there = |name: &str| previous().join(name).exists();
    if fs::read_to_string(&stamp_file).is_ok_and(|found| found == commit)
        && EXECUTABLES.into_iter().chain([ARCHIVE, MANIFESTS]).all(is_there)
    {
        return Ok(Done::Unchanged(format!("{short} present")));
    }
    if let Some((why, remedy)) = lacking(commit) {
        return Err(
            UserError::new(format!("the agent that landed last cannot be built: {why}"), remedy).into()
        );
    }
    let sources = unpack(commit)?;
    let mut build = Command::new(env::current_exe().context("find this executable")?);
    build.args(["image", "--name", IMAGE]).current_dir(sources.path());
    build.env("CARGO_MANIFEST_DIR", sources.path().join("xtask"));
    build.env("NETATTACH_COMMIT", commit).env("SOURCE_DATE_EPOCH", time(commit)?);
    child::run(&mut build, progress).context("build the image of the commit")?;
    take(sources.path())?;
    // The stamp is written last, so that it exists only beside a complete build.
    fs::write(&stamp_file, commit).context("note which commit was built")?;
    Ok(Done::Changed(format!("{short} built")))
}

/// Replaces the earlier files by the built ones.
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
fn time(commit: &str) -> anyhow::Result<String> {
    let mut git = Command::new("git");
    git.arg("-C").arg(tree::root()).args(["log", "-1", "--format=%ct", commit]);
    child::ask(&mut git).context("ask git for the time of the commit")
}

/// The sources of the commit, in a directory of their own.
fn unpack(commit: &str) -> anyhow::Result<tempfile::TempDir> {
    let directory = tempfile::Builder::new().prefix("previous-").tempdir_in(tree::tools())?;
    let archive = directory.path().join("sources.tar");
    let mut git = Command::new("git");
    git.arg("-C").arg(tree::root()).args(["archive", "--format=tar", "-o"]).arg(&archive).arg(commit);
    child::stdout_of(&mut git).context("take the sources of the commit from git")?;
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(&archive).arg("-C").arg(directory.path());
    child::stdout_of(&mut tar).context("unpack the sources of the commit")?;
    fs::create_dir_all(directory.path().join("target")).context("create a target directory")?;
    symlink(tree::tools(), directory.path().join("target/tools")).context("lead to the tools")?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository of its own, whose commits and tags are a second apart.
    struct Repository(tempfile::TempDir);

    impl Repository {
        fn new() -> Self {
            let repository = Self(tempfile::tempdir().unwrap());
            repository.git(0, &["init", "--quiet", "--initial-branch=main"]);
            repository
        }

        fn git(&self, second: u32, words: &[&str]) -> String {
            let mut git = Command::new("git");
            git.arg("-C").arg(self.0.path()).args(["-c", "user.name=a", "-c", "user.email=a@example.com"]);
            git.args(["-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false"]).args(words);
            git.env("GIT_COMMITTER_DATE", format!("{} +0000", 1_700_000_000 + second));
            child::ask(&mut git).unwrap_or_else(|| panic!("git {words:?}"))
        }

        fn commit(&self, second: u32) -> String {
            self.git(second, &["commit", "--quiet", "--allow-empty", "--message=x"]);
            self.git(second, &["rev-parse", "HEAD"])
        }

        fn landed(&self) -> Option<String> {
            landed(self.0.path())
        }
    }

    #[test]
    fn what_landed_last_is_the_newest_tag_behind_what_is_checked_out() {
        let repository = Repository::new();
        let first = repository.commit(1);
        repository.git(1, &["tag", "v1"]);
        repository.commit(2);
        assert_eq!(repository.landed(), None, "another sort of tag");
        repository.git(2, &["tag", "issue-9", &first]);
        assert_eq!(repository.landed(), Some(first.clone()));
        let second = repository.commit(3);
        repository.git(4, &["tag", "--annotate", "--message=x", "issue-10"]);
        assert_eq!(repository.landed(), Some(first.clone()), "it has landed itself");
        repository.commit(5);
        assert_eq!(repository.landed(), Some(second.clone()));

        // A release that landed on another branch is not an ancestor.
        repository.git(6, &["checkout", "--quiet", "-b", "other", &first]);
        repository.commit(6);
        repository.git(6, &["tag", "issue-11"]);
        repository.git(6, &["checkout", "--quiet", "main"]);
        assert_eq!(repository.landed(), Some(second));
        assert_eq!(landed(&repository.0.path().join("absent")), None);
    }
}
