//! The kernel's simulated network card (`netdevsim`), which Debian's kernels leave out, built for a guest's kernel from the
//! source that Debian made that kernel of: VFs as their physical function sets them, and the representors of a card in mode
//! switchdev. It needs some 200 MB while it is built, and 30 s.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::Context;

use super::apt::Suite;
use super::tools;
use crate::child;
use crate::progress::Progress;

/// The name of the module.
pub(super) const NAME: &str = "netdevsim";

/// Its source files. As they are listed, unpacking ends with the last of them, in half of the time.
const SOURCES: [&str; 14] = [
    "Makefile",
    "bpf.c",
    "bus.c",
    "dev.c",
    "ethtool.c",
    "fib.c",
    "health.c",
    "hwstats.c",
    "ipsec.c",
    "macsec.c",
    "netdev.c",
    "netdevsim.h",
    "psample.c",
    "udp_tunnels.c",
];

/// Programs that build modules, below the directory of `linux-kbuild`, and that need the suite's own C library.
const HELPERS: [&str; 2] = ["scripts/mod/modpost.real-lsb-64", "tools/objtool/objtool.real-x86"];
const LIBRARIES: [&str; 4] = ["libc6", "libelf1t64", "zlib1g", "libzstd1"];

/// Builds the module for the kernel of that release, in a scratch directory.
///
/// # Errors
/// The kernel's headers and source cannot be had, or it cannot be built.
pub(super) fn build(
    suite: &Suite,
    release: &str,
    scratch: &Path,
    progress: &Progress,
) -> anyhow::Result<PathBuf> {
    tools::ensure_programs(&[("gcc", "gcc"), ("make", "make")], progress)?;
    // 6.12.117+deb13-amd64: the headers of all flavours, and the source of all 6.12, are packages of their own.
    let common = release.rsplit_once('-').map_or(release, |(common, _)| common);
    let series: Vec<&str> = release.splitn(3, '.').take(2).collect();
    let source = format!("linux-source-{}", series.join("."));
    let own = [
        format!("linux-headers-{release}"),
        format!("linux-headers-{common}-common"),
        format!("linux-kbuild-{common}"),
        source.clone(),
    ];
    let packages: Vec<&str> = own.iter().map(String::as_str).chain(LIBRARIES).collect();
    let root = scratch.join("root");
    suite.unpack(&packages, &root, progress)?;
    progress.note("unpack the simulated card");
    let driver = unpack_driver(&root, &source, scratch, progress)?;
    let headers = root.join("usr/src").join(format!("linux-headers-{release}"));
    prepare_headers(&root, &headers)?;
    prepare_helpers(&root, &root.join("usr/lib").join(format!("linux-kbuild-{common}")))?;
    progress.note("build the simulated card");
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    let mut make = Command::new("make");
    make.arg(format!("-j{jobs}")).arg("-C").arg(&headers).arg(format!("M={}", driver.display())).args([
        "CONFIG_NETDEVSIM=m",
        // Without debug information, which would be twenty times the rest.
        "KCFLAGS=-DCONFIG_NETDEVSIM_MODULE=1 -g0",
        // A clock of its own needs another module that Debian leaves out.
        "CONFIG_PTP_1588_CLOCK_MOCK=n",
        // Without types (BTF), which programs on its devices do not need.
        "PAHOLE=true",
        // The machine's compiler may be older than the kernel's, which has one more option.
        "CC=gcc",
        "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=",
        "modules",
    ]);
    child::run(&mut make, progress).context("build netdevsim")?;
    Ok(driver.join(format!("{NAME}.ko")))
}

/// Unpacks the driver alone of the kernel's source.
fn unpack_driver(root: &Path, source: &str, scratch: &Path, progress: &Progress) -> anyhow::Result<PathBuf> {
    let directory = Path::new(source).join("drivers/net").join(NAME);
    let archive = root.join("usr/src").join(format!("{source}.tar.xz"));
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(scratch).arg("-xf").arg(&archive).arg("--occurrence=1");
    tar.args(SOURCES.map(|file| directory.join(file)));
    child::run(&mut tar, progress).with_context(|| format!("unpack {}", archive.display()))?;
    Ok(scratch.join(directory))
}

/// Has the headers find each other below `root`, and look for no types in an image that is not one.
fn prepare_headers(root: &Path, headers: &Path) -> anyhow::Result<()> {
    let path = headers.join("Makefile");
    let included = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let included = included.replace("/usr/src", &root.join("usr/src").to_string_lossy());
    fs::write(&path, included).with_context(|| format!("write {}", path.display()))?;
    fs::remove_file(headers.join("vmlinux")).context("remove the stripped image of the headers")
}

/// Makes the programs of another suite run with that suite's C library.
fn prepare_helpers(root: &Path, kbuild: &Path) -> anyhow::Result<()> {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    for helper in HELPERS {
        let (path, real) = (kbuild.join(helper), kbuild.join(format!("{helper}.real")));
        fs::rename(&path, &real).with_context(|| format!("rename {}", path.display()))?;
        let script = format!(
            "#!/bin/sh\nexec '{lib}/ld-linux-x86-64.so.2' --library-path '{lib}' '{real}' \"$@\"\n",
            lib = libraries.display(),
            real = real.display()
        );
        fs::write(&path, script).with_context(|| format!("write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("make {} executable", path.display()))?;
    }
    Ok(())
}
