//! The emulator that virtual machines run in, unpacked below `target/tools`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt::Suite;
use super::kernel;
use super::{Kernel, apt};
use crate::progress::{Done, Progress, UserError};
use crate::vm::guests::{GUESTS, Guest};
use crate::{child, tree};

/// The suites, each with the packages taken from it: the emulator, its firmware, and the libraries that a system with the
/// rest of the tools lacks. They run with Debian 12's C library and later ones; Debian 12's own QEMU (7.2) has no card with
/// SR-IOV.
const SUITES: [(&str, &[&str]); 2] = [
    ("bookworm-backports", &["qemu-system-x86", "qemu-system-data", "qemu-system-common"]),
    (
        "bookworm",
        &[
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
        ],
    ),
];

/// The emulator of virtual machines.
pub struct Emulator {
    /// The executable.
    pub program: PathBuf,
    /// Directory of the libraries that it needs beside the system's.
    pub libraries: PathBuf,
    /// Directory of its firmware.
    pub firmware: [PathBuf; 2],
}

fn root() -> PathBuf {
    tree::tools().join("qemu")
}

fn emulator() -> Option<Emulator> {
    let libraries = root().join("usr/lib/x86_64-linux-gnu");
    let program = root().join("usr/bin/qemu-system-x86_64");
    child::ask(Command::new(&program).arg("--version").env("LD_LIBRARY_PATH", &libraries))?;
    let firmware = ["usr/share/qemu", "usr/share/seabios"].map(|path| root().join(path));
    Some(Emulator { program, libraries, firmware })
}

/// The emulator and its options, if it has been set up and the emulator starts.
pub fn machine(guest: &Guest) -> Option<(Emulator, Kernel)> {
    Some((emulator()?, kernel::find(guest)?))
}

/// Unpacks the emulator and the guests' kernels unless they are here. Without `required`, a system that cannot have them, or
/// not now, does without.
pub(super) fn ensure(required: bool, progress: &Progress) -> anyhow::Result<Done> {
    let lacking = || emulator().is_none() || GUESTS.iter().any(|guest| kernel::find(guest).is_none());
    if !lacking() {
        return Ok(Done::Unchanged(kernels()));
    }
    if !apt::is_here() || std::env::consts::ARCH != "x86_64" {
        let lacking = "no virtual machines: they take apt and an x86-64 processor";
        return match required {
            true => Err(UserError::new(lacking, "run this on Debian or Ubuntu").into()),
            false => Ok(Done::Unchanged(format!("{lacking}: tests in them are skipped"))),
        };
    }
    match unpack(progress) {
        Ok(()) => Ok(Done::Changed(format!("QEMU, {} unpacked", kernels()))),
        Err(error) if !required => {
            Ok(Done::Unchanged(format!("not to be had: {error:#}; tests in them are skipped")))
        }
        Err(error) => Err(error),
    }
}

/// The kernels that are here, in words.
fn kernels() -> String {
    let releases: Vec<String> = GUESTS.iter().filter_map(kernel::find).map(|kernel| kernel.release).collect();
    format!("Linux {}", releases.join(", "))
}

fn unpack(progress: &Progress) -> anyhow::Result<()> {
    if emulator().is_none() {
        for (suite, packages) in SUITES {
            apt::unpack_from_suite(packages, suite, &root(), progress)?;
        }
        link_library_directory(&root())?;
        emulator().context("the unpacked emulator does not start")?;
    }
    for guest in GUESTS.iter().filter(|guest| kernel::find(guest).is_none()) {
        let suite = Suite::open(guest.suite, progress)?;
        kernel::unpack(guest, &suite, progress)?;
        suite.close()?;
    }
    Ok(())
}

/// Packages of these suites still put some libraries into `/lib`, which is a link to `/usr/lib` on an installed system.
fn link_library_directory(root: &Path) -> anyhow::Result<()> {
    let (from, to) = (root.join("lib/x86_64-linux-gnu"), root.join("usr/lib/x86_64-linux-gnu"));
    let Ok(entries) = fs::read_dir(&from) else { return Ok(()) };
    for entry in entries.filter_map(Result::ok) {
        fs::rename(entry.path(), to.join(entry.file_name()))
            .context("bring the emulator's libraries together")?;
    }
    Ok(())
}
