//! The virtual machine that some tests run in: an emulator and an older kernel, unpacked below `target/tools`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt::{self, Suite};
use crate::screen::{Done, Progress, Stuck};
use crate::{child, tree};

/// Debian 12: the oldest kernel that a supported Debian runs.
const SUITE: &str = "bookworm";
/// What names the kernel of the day. The cloud flavour is the same source with fewer drivers.
const KERNEL: &str = "linux-image-cloud-amd64";
/// The emulator, its firmware, and the libraries that a system with the rest of the tools lacks.
const EMULATOR: [&str; 15] = [
    "qemu-system-x86",
    "qemu-system-data",
    "qemu-system-common",
    "seabios",
    "libcapstone4",
    "libfdt1",
    "libpmem1",
    "libndctl6",
    "libdaxctl1",
    "librdmacm1",
    "libibverbs1",
    "libnl-3-200",
    "libnl-route-3-200",
    "libslirp0",
    "libvdeplug2",
];

/// What a virtual machine is started with.
pub struct Machine {
    /// The emulator.
    pub emulator: PathBuf,
    /// Where the libraries are that the emulator needs beside the system's.
    pub libraries: PathBuf,
    /// Where its firmware is.
    pub firmware: [PathBuf; 2],
    /// The kernel.
    pub kernel: PathBuf,
    /// Directory of the kernel's modules.
    pub modules: PathBuf,
    /// What the kernel calls itself.
    pub release: String,
}

fn root() -> PathBuf {
    tree::tools().join("machine")
}

/// The machine, if it has been set up and its emulator starts.
pub fn machine() -> Option<Machine> {
    let libraries = root().join("usr/lib/x86_64-linux-gnu");
    let emulator = root().join("usr/bin/qemu-system-x86_64");
    child::ask(Command::new(&emulator).arg("--version").env("LD_LIBRARY_PATH", &libraries))?;
    let modules = fs::read_dir(root().join("lib/modules")).ok()?.find_map(Result::ok)?.path();
    let release = modules.file_name()?.to_string_lossy().into_owned();
    let kernel = root().join("boot").join(format!("vmlinuz-{release}"));
    kernel.is_file().then_some(())?;
    let firmware = ["usr/share/qemu", "usr/share/seabios"].map(|path| root().join(path));
    Some(Machine { emulator, libraries, firmware, kernel, modules, release })
}

/// Unpacks the machine unless it is here. Without `required`, a system that cannot have it, or not now, does without.
pub(super) fn ensure(required: bool, progress: &Progress) -> anyhow::Result<Done> {
    let described = |machine: &Machine| format!("Linux {}", machine.release);
    if let Some(machine) = machine() {
        return Ok(Done::Was(described(&machine)));
    }
    if !apt::is_here() || std::env::consts::ARCH != "x86_64" {
        let lacking = "no virtual machine: it takes apt and an x86-64 processor";
        return match required {
            true => Err(Stuck::new(lacking, "run this on Debian or Ubuntu").into()),
            false => Ok(Done::Was(format!("{lacking}: tests in it are skipped"))),
        };
    }
    match unpack(progress) {
        Ok(machine) => Ok(Done::Now(format!("{} and QEMU unpacked", described(&machine)))),
        Err(error) if !required => {
            Ok(Done::Was(format!("not to be had: {error:#}; tests in it are skipped")))
        }
        Err(error) => Err(error),
    }
}

fn unpack(progress: &Progress) -> anyhow::Result<Machine> {
    let suite = Suite::open(SUITE, progress)?;
    let kernel = suite.first_dependency(KERNEL)?;
    let packages: Vec<&str> = EMULATOR.into_iter().chain([kernel.as_str()]).collect();
    suite.unpack(&packages, &root(), progress)?;
    suite.close()?;
    link_library_directory(&root())?;
    machine().context("the unpacked emulator does not start")
}

/// Packages of this suite still put some libraries into `/lib`, which is a link to `/usr/lib` on an installed system.
fn link_library_directory(root: &Path) -> anyhow::Result<()> {
    let (from, to) = (root.join("lib/x86_64-linux-gnu"), root.join("usr/lib/x86_64-linux-gnu"));
    let Ok(entries) = fs::read_dir(&from) else { return Ok(()) };
    for entry in entries.filter_map(Result::ok) {
        fs::rename(entry.path(), to.join(entry.file_name()))
            .context("bring the emulator's libraries together")?;
    }
    Ok(())
}
