//! The programs of a Kubernetes cluster: built from Debian's source package, whose binary packages are the client alone,
//! a device plugin for the kubelet, and etcd as Debian ships it. Everything is below `target/tools`; nothing is installed.
//!
//! The build takes minutes of two processors. It is done once, at low priority, and beside the compile of the tests
//! ([`Building`]). `recipe` has the steps of the build.

mod recipe;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, anyhow};

use self::recipe::Part;
use super::apt;
use crate::progress::{self, Done, Progress};
use crate::{child, tree};

const TITLE: &str = "Kubernetes";

/// Directory of the programs of a cluster: `etcd`, `kube-apiserver` and the others.
pub fn kubernetes() -> PathBuf {
    tree::tools().join("kubernetes")
}

/// The programs of a cluster, while a thread builds them.
pub struct Building {
    progress: Progress,
    thread: JoinHandle<anyhow::Result<Done>>,
}

impl Building {
    /// Starts to build them, unless they are here. Without `required`, a machine that cannot have them does without.
    pub fn start(required: bool) -> Self {
        let progress = Progress::default();
        let own = progress.clone();
        Self { progress, thread: thread::spawn(move || ensure(required, &own)) }
    }

    /// Waits until they are built; shown as a step.
    ///
    /// # Errors
    /// Those of the build, with what its programs said.
    pub fn wait(self) -> anyhow::Result<()> {
        let Self { progress, thread } = self;
        progress::step(TITLE, |shown| {
            while !thread.is_finished() {
                shown.note(&progress.current());
                thread::sleep(Duration::from_millis(100));
            }
            thread.join().unwrap_or_else(|_| Err(anyhow!("the thread that builds Kubernetes panicked")))
        })
    }
}

fn ensure(required: bool, progress: &Progress) -> anyhow::Result<Done> {
    let lacking = lacking();
    if lacking.is_empty() {
        return Ok(Done::Unchanged(versions()?));
    }
    if !apt::is_here() {
        return apt::without("Kubernetes", required);
    }
    match build(&lacking, progress) {
        Ok(()) => Ok(Done::Changed(format!("{} built", versions()?))),
        Err(error) if !required => {
            Ok(Done::Unchanged(format!("not to be had: {error:#}; tests with it are skipped")))
        }
        Err(error) => Err(error),
    }
}

/// The parts that are missing, or were built by another recipe.
fn lacking() -> Vec<Part> {
    let is_built = |part: &Part| {
        let stamp = fs::read_to_string(kubernetes().join(part.stamp_file()));
        stamp.is_ok_and(|stamp| stamp == part.stamp())
    };
    Part::ALL.into_iter().filter(|part| !is_built(part)).collect()
}

fn build(parts: &[Part], progress: &Progress) -> anyhow::Result<()> {
    // A fixed name, so that the next build removes the files of an interrupted one.
    let scratch = tree::tools().join("kubernetes-build");
    remove(&scratch)?;
    fs::create_dir_all(&scratch).with_context(|| format!("create {}", scratch.display()))?;
    let made =
        recipe::follow(parts, &scratch, progress).and_then(|programs| put_into_place(parts, &programs));
    made.and(remove_later(&scratch))
}

/// Puts the programs of parts beside those of the others. A stamp exists only beside the programs that it describes.
fn put_into_place(parts: &[Part], programs: &Path) -> anyhow::Result<()> {
    let place = kubernetes();
    fs::create_dir_all(&place).with_context(|| format!("create {}", place.display()))?;
    for part in parts {
        let stamp = place.join(part.stamp_file());
        if let Err(error) = fs::remove_file(&stamp)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(error).with_context(|| format!("remove {}", stamp.display()));
        }
    }
    for entry in fs::read_dir(programs).context("list the programs of Kubernetes")? {
        let name = entry.context("list the programs of Kubernetes")?.file_name();
        fs::rename(programs.join(&name), place.join(&name))
            .with_context(|| format!("put {} into place", name.display()))?;
    }
    for part in parts {
        fs::write(place.join(part.stamp_file()), part.stamp())
            .context("note by which recipe Kubernetes was built")?;
    }
    Ok(())
}

/// Starts to remove a directory, which takes a minute on some file systems.
fn remove_later(directory: &Path) -> anyhow::Result<()> {
    let mut remove = Command::new("nice");
    remove.args(["rm", "-rf", "--"]).arg(directory);
    remove.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    remove.spawn().with_context(|| format!("remove {}", directory.display()))?;
    Ok(())
}

fn remove(directory: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}

/// What the programs say that they are.
fn versions() -> anyhow::Result<String> {
    let say = |program: &str| {
        let words = child::ask(Command::new(kubernetes().join(program)).arg("--version"));
        words.with_context(|| format!("{program} does not start"))
    };
    let etcd = say("etcd")?;
    let etcd = etcd.lines().next().and_then(|line| line.rsplit(' ').next()).unwrap_or_default();
    let kubernetes = say("kube-apiserver")?;
    Ok(format!("{kubernetes}, etcd {etcd}"))
}
