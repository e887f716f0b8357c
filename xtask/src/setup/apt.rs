//! Packages: installed by the machine's own apt, or unpacked under `target/tools` from another Debian suite.
//!
//! Nothing here writes to `/etc/apt`, and no installation may remove a package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, ensure};

use crate::child;
use crate::progress::{Done, Progress, UserError};
use crate::tree;

/// Where Debian publishes; proxies and mirrors in apt's own configuration still apply.
const MIRROR: &str = "http://deb.debian.org/debian";
const KEYRING: &str = "usr/share/keyrings/debian-archive-keyring.gpg";

/// Whether this machine has apt at all.
pub(super) fn is_here() -> bool {
    child::find("apt-get").is_some()
}

/// The outcome of a step that gets something by apt, on a machine without it: an error if it is `required`.
pub(super) fn without(what: &str, required: bool) -> anyhow::Result<Done> {
    let lacking = format!("this machine has no apt to get {what} with");
    match required {
        true => Err(UserError::new(lacking, "run the gate on Debian or Ubuntu").into()),
        false => Ok(Done::Unchanged(format!("{lacking}: tests that need that are skipped"))),
    }
}

/// The version apt would install, if any.
fn candidate(package: &str) -> Option<String> {
    let policy = child::ask(Command::new("apt-cache").args(["policy", package]))?;
    candidate_in(&policy)
}

/// Whether apt knows `package`, after a look at fresh package lists if the present ones do not have it.
pub(super) fn offers(package: &str, progress: &Progress) -> bool {
    let known = || is_here() && candidate(package).is_some();
    // Lists as old as the machine's image lack what Debian has published since.
    known() || (is_here() && refresh(progress).is_ok() && known())
}

/// Installs packages without asking anything, refreshing the package lists when they do not know a package.
pub(super) fn install(packages: &[&str], progress: &Progress) -> anyhow::Result<()> {
    if !is_here() {
        return Err(UserError::new(
            format!("this machine has no apt to install {} with", packages.join(", ")),
            "install the equivalents with your own package manager, then run `cargo xtask setup` again",
        )
        .into());
    }
    let _ = packages.iter().all(|package| offers(package, progress));
    let attempt = |progress: &Progress| {
        let mut command = as_root("apt-get", packages)?;
        command
            .args(["install", "--yes", "--quiet", "--no-install-recommends", "--no-remove"])
            .args(packages);
        child::run(&mut command, progress)
    };
    // A list that is out of date names versions the mirror has dropped: refresh once, then believe the error.
    if attempt(progress).is_err() {
        refresh(progress)?;
        attempt(progress).with_context(|| format!("install {}", packages.join(", ")))?;
    }
    Ok(())
}

/// The compressors of packages.
pub(super) fn ensure_xz(progress: &Progress) -> anyhow::Result<()> {
    match child::find("xz") {
        Some(_) => Ok(()),
        None => install(&["xz-utils"], progress),
    }
}

/// A command that runs as root: directly, or through sudo.
///
/// # Errors
/// Neither is possible; the error lists `what` for the reader to do by hand.
pub(super) fn as_root(program: &str, what: &[&str]) -> anyhow::Result<Command> {
    let mut command = if child::is_root() {
        Command::new(program)
    } else if child::find("sudo").is_some() {
        let mut command = Command::new("sudo");
        // -n: a password prompt would wait for an answer that cannot come.
        command.args(["-n", "--", program]);
        command
    } else {
        return Err(UserError::new(
            format!("root is needed for {}, and there is no sudo", what.join(", ")),
            "run `cargo xtask setup` as root once",
        )
        .into());
    };
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    Ok(command)
}

/// Unpacks a package of the machine's own sources into a directory, without installing it.
pub(super) fn unpack(package: &str, into: &Path, progress: &Progress) -> anyhow::Result<()> {
    download_and_unpack(&[package], None, into, progress)
}

/// Unpacks packages of the Debian suite `suite` into a directory, without installing them.
pub(super) fn unpack_from_suite(
    packages: &[&str],
    suite: &str,
    into: &Path,
    progress: &Progress,
) -> anyhow::Result<()> {
    let suite = Suite::open(suite, progress)?;
    suite.unpack(packages, into, progress)?;
    suite.close()
}

/// The package lists of a Debian suite, fetched, apart from the machine's own.
pub(super) struct Suite {
    private: PathBuf,
    config: PathBuf,
}

impl Suite {
    /// Fetches the lists.
    pub(super) fn open(suite: &str, progress: &Progress) -> anyhow::Result<Self> {
        Self::fetch(suite, suite, &["deb"], progress)
    }

    /// Fetches the lists, those of source packages too. It may be open beside another of the same suite.
    pub(super) fn with_sources(suite: &str, progress: &Progress) -> anyhow::Result<Self> {
        Self::fetch(suite, &format!("{suite}-sources"), &["deb", "deb-src"], progress)
    }

    fn fetch(suite: &str, directory: &str, kinds: &[&str], progress: &Progress) -> anyhow::Result<Self> {
        let private = tree::tools().join("apt").join(directory);
        for dir in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(private.join(dir)).with_context(|| format!("create {dir} for apt"))?;
        }
        let keyring = keyring(progress)?;
        let sources = private.join("sources.list");
        let line = |kind| format!("{kind} [signed-by={}] {MIRROR} {suite} main\n", keyring.display());
        fs::write(&sources, kinds.iter().map(line).collect::<String>())
            .context("write the private package sources")?;
        // No package counts as installed: apt would prefer an installed version to that of the suite.
        fs::write(private.join("status"), "").context("write the private package status")?;
        let config = private.join("apt.conf");
        fs::write(&config, private_config(&private)).context("write the private apt configuration")?;
        child::run(Command::new("apt-get").args(["update", "--quiet"]).env("APT_CONFIG", &config), progress)
            .with_context(|| format!("fetch the package list of {suite}"))?;
        Ok(Self { private, config })
    }

    /// The packages that an empty package depends on.
    pub(super) fn first_dependency(&self, package: &str) -> anyhow::Result<String> {
        let mut ask = Command::new("apt-cache");
        ask.args(["depends", package]).env("APT_CONFIG", &self.config);
        let words = child::ask(&mut ask).with_context(|| format!("ask what {package} depends on"))?;
        dependency_in(&words).with_context(|| format!("{package} depends on nothing"))
    }

    /// Unpacks packages into a directory, without installing them.
    pub(super) fn unpack(&self, packages: &[&str], into: &Path, progress: &Progress) -> anyhow::Result<()> {
        download_and_unpack(packages, Some(&self.config), into, progress)
    }

    /// Downloads a source package into a directory; returns the archive as its authors published it, without Debian's
    /// changes.
    pub(super) fn source(&self, package: &str, into: &Path, progress: &Progress) -> anyhow::Result<PathBuf> {
        fs::create_dir_all(into).with_context(|| format!("create {}", into.display()))?;
        let mut download = Command::new("apt-get");
        download.args(["source", "--download-only", "--quiet", package]).current_dir(into);
        child::run(download.env("APT_CONFIG", &self.config), progress)
            .with_context(|| format!("download the source of {package}"))?;
        let entries = fs::read_dir(into).context("list the download")?.filter_map(Result::ok);
        let original = |path: &PathBuf| path.to_string_lossy().contains(".orig.tar.");
        let archive = entries.map(|entry| entry.path()).find(original);
        archive.with_context(|| format!("the source of {package} has no archive of its authors"))
    }

    /// Removes the lists.
    pub(super) fn close(self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.private).context("remove the private package lists")
    }
}

/// Fetches the package lists, once per run: asking again would not bring more.
fn refresh(progress: &Progress) -> anyhow::Result<()> {
    static REFRESHED: AtomicBool = AtomicBool::new(false);
    if REFRESHED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let mut command = as_root("apt-get", &["apt-get update"])?;
    command.args(["update", "--quiet"]);
    // One unreachable third-party source makes this fail although the packages wanted are there:
    // the installation that follows is the judge.
    child::watch(&mut command, |line| progress.note(line))?;
    Ok(())
}

fn keyring(progress: &Progress) -> anyhow::Result<PathBuf> {
    let installed = Path::new("/").join(KEYRING);
    if installed.is_file() {
        return Ok(installed);
    }
    // Ubuntu has Debian's keys as a package; unpacked, they are trusted for the private sources only.
    let into = tree::tools().join("keyring");
    unpack("debian-archive-keyring", &into, progress).context("get Debian's archive keys")?;
    Ok(into.join(KEYRING))
}

fn download_and_unpack(
    packages: &[&str],
    config: Option<&Path>,
    into: &Path,
    progress: &Progress,
) -> anyhow::Result<()> {
    fs::create_dir_all(into).with_context(|| format!("create {}", into.display()))?;
    let scratch = tempfile::tempdir_in(tree::tools()).context("create a scratch directory")?;
    let mut download = Command::new("apt-get");
    download.args(["download", "--quiet"]).args(packages).current_dir(scratch.path());
    if let Some(config) = config {
        download.env("APT_CONFIG", config);
    }
    let names = packages.join(", ");
    child::run(&mut download, progress).with_context(|| format!("download {names}"))?;
    let archives: Vec<PathBuf> = fs::read_dir(scratch.path())
        .context("list the download")?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    ensure!(archives.len() == packages.len(), "apt-get download left {} files for {names}", archives.len());
    for archive in archives {
        child::run(Command::new("dpkg").arg("-x").arg(&archive).arg(into), progress)
            .with_context(|| format!("unpack one of {names}"))?;
    }
    Ok(())
}

fn private_config(dir: &Path) -> String {
    let dir = dir.display();
    // The sandbox user could not write below a private directory; only signed lists and archives are read.
    format!(
        r#"Dir::Etc::sourcelist "{dir}/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "{dir}/lists";
Dir::State::status "{dir}/status";
Dir::Cache "{dir}/cache";
APT::Sandbox::User "root";
Acquire::Languages "none";
"#
    )
}

fn candidate_in(policy: &str) -> Option<String> {
    let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    (version != "(none)").then(|| version.to_owned())
}

fn dependency_in(words: &str) -> Option<String> {
    words.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_dependency_is_read() {
        let words = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-50-cloud-amd64\n  Conflicts: x\n";
        assert_eq!(dependency_in(words).as_deref(), Some("linux-image-6.1.0-50-cloud-amd64"));
        assert_eq!(dependency_in("linux-image-cloud-amd64\n"), None);
    }

    #[test]
    fn the_candidate_is_read_from_the_policy() {
        let table = [
            ("x:\n  Installed: (none)\n  Candidate: 7.1.0+6.1\n", Some("7.1.0+6.1")),
            ("x:\n  Installed: 1\n  Candidate: (none)\n", None),
            ("", None),
        ];
        for (policy, expected) in table {
            assert_eq!(candidate_in(policy).as_deref(), expected, "{policy:?}");
        }
    }
}
