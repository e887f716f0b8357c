//! The C library of the CNI executable: musl, found or installed, with a Rust standard library for it.
//!
//! A pod waits for that executable to start. glibc's start-up asks the processor about itself some eighty times
//! (`CPUID`), which in a virtual machine is an exit to the hypervisor each: half a millisecond on the machine that
//! this was measured on, where musl starts in a twentieth of that
//! (`docs/decisions/0046-the-cni-executable-is-linked-with-musl.md`). Other architectures than x86-64 have no such
//! instruction, and glibc is used there.
//!
//! Two standard libraries will do: that of rustup's target, which brings musl; or one that is built from the source that Debian
//! packages beside `rustc-web`, for Debian's musl.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt;
use super::bpf_toolchain::DEBIAN_RUSTC;
use crate::progress::{Done, Progress};
use crate::{child, tree};

/// The target with musl.
pub const TARGET: &str = "x86_64-unknown-linux-musl";
/// Links with Debian's musl.
const DEBIAN_LINKER: &str = "musl-gcc";
/// Debian's packages of the source and of the linker.
const DEBIAN_PACKAGES: [&str; 2] = ["rust-web-src", "musl-tools"];

/// The source of the standard library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Musl {
    /// rustup's target of the toolchain that builds everything.
    Rustup,
    /// Built from Debian's source, by the compiler beside it.
    Debian,
}

/// What is here.
pub fn musl() -> Option<Musl> {
    if is_target_here() {
        return Some(Musl::Rustup);
    }
    (has_debian_source() && child::find(DEBIAN_LINKER).is_some()).then_some(Musl::Debian)
}

/// Installs Debian's where rustup's is not here. Without either the executable is linked with glibc.
pub(super) fn ensure(progress: &Progress) -> anyhow::Result<Done> {
    if std::env::consts::ARCH != "x86_64" {
        return Ok(Done::Unchanged("not for this processor: the CNI executable has glibc".to_owned()));
    }
    if let Some(musl) = musl() {
        return Ok(Done::Unchanged(musl.describe()));
    }
    let can_be_installed = Path::new(DEBIAN_RUSTC).is_file() && apt::offers(DEBIAN_PACKAGES[0], progress);
    if !can_be_installed {
        return Ok(Done::Unchanged(format!(
            "the CNI executable has glibc, and starts later for it: `rustup target add {TARGET}`"
        )));
    }
    apt::install(&DEBIAN_PACKAGES, progress)
        .context("install musl and the source of Rust's standard library")?;
    let musl = musl().context("musl was installed and is not found")?;
    Ok(Done::Changed(musl.describe()))
}

impl Musl {
    fn describe(self) -> String {
        match self {
            Self::Rustup => format!("rustup's {TARGET}"),
            Self::Debian => "Debian's, standard library from source".to_owned(),
        }
    }

    /// Arguments for cargo.
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Rustup => &[],
            // Without backtraces, which would need a library to unwind.
            Self::Debian => &["-Zbuild-std=std,panic_abort", "-Zbuild-std-features="],
        }
    }

    /// Flags for the compiler.
    ///
    /// # Errors
    /// The directory of tools cannot be written.
    pub fn flags(self) -> anyhow::Result<Vec<String>> {
        // At a fixed address: relocations would be carried out, and pages copied for them, at each start.
        let mut flags = vec!["-Crelocation-model=static".to_owned()];
        if self == Self::Debian {
            flags.push("-Clink-self-contained=no".to_owned());
            flags.push(format!("-Lnative={}", nothing_to_unwind_by()?.display()));
        }
        Ok(flags)
    }

    /// Variables for cargo.
    pub fn variables(self) -> Vec<(String, String)> {
        match self {
            Self::Rustup => Vec::new(),
            Self::Debian => vec![
                ("RUSTC".to_owned(), DEBIAN_RUSTC.to_owned()),
                // The features that build a standard library are unstable in the compiler and in cargo.
                ("RUSTC_BOOTSTRAP".to_owned(), "1".to_owned()),
                (
                    format!("CARGO_TARGET_{}_LINKER", TARGET.replace('-', "_").to_uppercase()),
                    DEBIAN_LINKER.to_owned(),
                ),
            ],
        }
    }
}

/// A directory with an empty `libunwind.a`: the standard library asks for one also where panics end the process, and Debian's of
/// GCC needs glibc.
fn nothing_to_unwind_by() -> anyhow::Result<PathBuf> {
    const EMPTY_ARCHIVE: &[u8] = b"!<arch>\n";
    let directory = tree::tools().join("musl");
    fs::create_dir_all(&directory).context("create target/tools/musl")?;
    fs::write(directory.join("libunwind.a"), EMPTY_ARCHIVE).context("write target/tools/musl/libunwind.a")?;
    Ok(directory)
}

fn is_target_here() -> bool {
    sysroot("rustc").is_some_and(|sysroot| sysroot.join("lib/rustlib").join(TARGET).join("lib").is_dir())
}

fn has_debian_source() -> bool {
    sysroot(DEBIAN_RUSTC)
        .is_some_and(|sysroot| sysroot.join("lib/rustlib/src/rust/library/std/Cargo.toml").is_file())
}

fn sysroot(rustc: &str) -> Option<PathBuf> {
    child::ask(Command::new(rustc).args(["--print", "sysroot"]).current_dir(tree::root())).map(PathBuf::from)
}
