//! A guest's kernel: of Debian's package only its image and the modules that the guest loads are kept, with one that Debian
//! does not build.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use super::apt::{self, Suite};
use super::{modules, netdevsim};
use crate::progress::Progress;
use crate::tree;
use crate::vm::guests::Guest;

/// The modules that were asked for when a kernel was unpacked.
const WANTED: &str = "wanted";
/// The release name of the kernel.
const RELEASE: &str = "release";
/// The kernel.
const IMAGE: &str = "vmlinuz";
/// The directory of modules, whose names sort in the order in which they can be loaded.
const MODULES: &str = "modules";

/// A kernel that a guest can be started with.
pub struct Kernel {
    /// Release name.
    pub release: String,
    /// The kernel.
    pub image: PathBuf,
    /// Modules, each after its dependencies.
    pub modules: Vec<PathBuf>,
}

fn directory(guest: &Guest) -> PathBuf {
    tree::tools().join("kernels").join(guest.suite)
}

/// The guest's kernel, if it is here with the modules that the guest loads today.
pub(super) fn find(guest: &Guest) -> Option<Kernel> {
    let directory = directory(guest);
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok();
    (read(WANTED)? == wanted(guest)).then_some(())?;
    let entries = fs::read_dir(directory.join(MODULES)).ok()?;
    let mut modules: Vec<PathBuf> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
    modules.sort();
    Some(Kernel { release: read(RELEASE)?, image: directory.join(IMAGE), modules })
}

/// Unpacks the guest's kernel of today.
pub(super) fn unpack(guest: &Guest, suite: &Suite, progress: &Progress) -> anyhow::Result<()> {
    apt::ensure_xz(progress)?;
    let scratch = tempfile::tempdir_in(tree::tools()).context("create a scratch directory")?;
    let (package, kept) = (scratch.path().join("package"), scratch.path().join("kept"));
    suite.unpack(&[&suite.first_dependency(guest.kernel)?], &package, progress)?;
    let (release, modules) = modules_of(&package)?;
    if guest.modules().contains(&netdevsim::NAME) {
        let built = netdevsim::build(suite, &release, scratch.path(), progress)?;
        let to = modules.join(built.file_name().unwrap_or_default());
        fs::rename(&built, to).context("put the simulated card to the kernel's modules")?;
    }
    progress.note("keep the modules that are needed");
    fs::create_dir_all(kept.join(MODULES)).context("create a directory for modules")?;
    for (number, module) in modules::closure(&modules, &guest.modules())?.into_iter().enumerate() {
        let path = kept.join(MODULES).join(format!("{number:02}-{}.ko", module.name));
        fs::write(&path, module.content).with_context(|| format!("write {}", path.display()))?;
    }
    let image = package.join("boot").join(format!("vmlinuz-{release}"));
    fs::rename(&image, kept.join(IMAGE)).with_context(|| format!("keep {}", image.display()))?;
    fs::write(kept.join(RELEASE), release).context("note the kernel's release")?;
    fs::write(kept.join(WANTED), wanted(guest)).context("note the modules asked for")?;
    put(&kept, &directory(guest))
}

/// The directory of a package's modules, with the kernel's release.
fn modules_of(package: &Path) -> anyhow::Result<(String, PathBuf)> {
    // Debian 13 has brought everything below /usr.
    let directories = ["usr/lib/modules", "lib/modules"].map(|path| package.join(path));
    let entries = directories.iter().find_map(|path| fs::read_dir(path).ok());
    let found = entries.and_then(|mut entries| entries.find_map(Result::ok));
    let path = found.context("the package holds no modules")?.path();
    let release = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    ensure!(!release.is_empty(), "the modules are of no release");
    Ok((release, path))
}

fn put(from: &Path, to: &Path) -> anyhow::Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| format!("remove {}", to.display()))?;
    }
    fs::rename(from, to).with_context(|| format!("put a kernel at {}", to.display()))
}

fn wanted(guest: &Guest) -> String {
    guest.modules().join(" ")
}
