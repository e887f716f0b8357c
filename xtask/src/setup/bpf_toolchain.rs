//! The compiler and the linker of the BPF object: found, or installed.
//!
//! Two compilers will do: rustup's nightly with the source of `core`, which is then built for BPF; or Debian's
//! `rustc-web`, whose companion package carries `core` ready-made for BPF. The linker reads the compiler's LLVM
//! bitcode and therefore needs an LLVM that is not older than the compiler's.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt;
use crate::progress::{Done, Progress, UserError};
use crate::{child, elf, tree};

/// Version of bpf-linker that is installed when there is none; LLVM 21 to 23.
const LINKER_VERSION: &str = "0.13.0";
const LINKER_LLVM: std::ops::RangeInclusive<u32> = 21..=23;
/// Debian's compiler.
pub const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
/// The package with `core` ready-made for BPF.
const DEBIAN_CORE: &str = "libstd-rust-web-dev-bpf";
/// The target of the BPF object: little endian, as is every machine the agent is built for.
pub const TARGET: &str = "bpfel-unknown-none";

/// A compiler that can build the BPF object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiler {
    /// How it is called.
    pub kind: Kind,
    /// Version, as it prints it.
    pub version: String,
    /// The major version of its LLVM.
    pub llvm: u32,
}

/// How a compiler is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `rustup run nightly`, with `-Z build-std=core`.
    Nightly,
    /// `/usr/bin/rustc` with a ready-made `core`.
    Debian,
}

impl Compiler {
    fn describe(&self) -> String {
        let origin = match self.kind {
            Kind::Nightly => "rustup nightly, core from source",
            Kind::Debian => "Debian, ready-made core",
        };
        format!("{} ({origin}), LLVM {}", self.version, self.llvm)
    }
}

/// The compiler to use now, if there is one that the present linker understands.
pub fn compiler() -> Option<Compiler> {
    choose(nightly(), debian(), linker_llvm())
}

/// The linker to use now.
pub fn linker() -> Option<PathBuf> {
    let unpacked = tree::tools().join("bin/bpf-linker");
    let candidates = [child::find("bpf-linker"), Some(unpacked)];
    candidates.into_iter().flatten().find(|path| child::ask(Command::new(path).arg("--version")).is_some())
}

/// Installs a compiler unless there is one whose linker is here too or can be built.
pub(super) fn ensure_compiler(progress: &Progress) -> anyhow::Result<Done> {
    let present = compiler();
    if let Some(compiler) = &present
        && (linker().is_some() || linker_can_be_built(compiler.llvm, progress))
    {
        return Ok(Done::Unchanged(compiler.describe()));
    }
    if apt::offers(DEBIAN_CORE, progress) {
        apt::install(&["rustc-web", DEBIAN_CORE], progress)
            .context("install Debian's compiler with the BPF target")?;
        return debian()
            .map(|compiler| Done::Changed(compiler.describe()))
            .ok_or_else(|| no_compiler().into());
    } else if let Some(compiler) = present {
        return Ok(Done::Unchanged(compiler.describe()));
    } else if child::find("rustup").is_some() {
        let mut install = Command::new("rustup");
        install.args(["toolchain", "install", "nightly", "--profile", "minimal", "--component", "rust-src"]);
        child::run(&mut install, progress).context("install rustup's nightly with rust-src")?;
    }
    compiler().map(|compiler| Done::Changed(compiler.describe())).ok_or_else(|| no_compiler().into())
}

/// Installs a linker for one of the compilers that are there.
pub(super) fn ensure_linker(progress: &Progress) -> anyhow::Result<Done> {
    if compiler().is_some()
        && let Some(path) = linker()
    {
        return Ok(Done::Unchanged(describe_linker(&path)));
    }
    let compilers: Vec<Compiler> = nightly().into_iter().chain(debian()).collect();
    let newest = compilers.first().ok_or_else(no_compiler)?.llvm;
    match compilers.iter().find(|compiler| linker_can_be_built(compiler.llvm, progress)) {
        Some(compiler) => build_linker(compiler.llvm, progress)?,
        None => download_linker(progress).map_err(|cause| {
            cause.context(UserError::new(
                format!("no bpf-linker for LLVM {newest}: apt has no llvm-{newest}-dev, and the published one did not come"),
                "put bpf-linker on PATH (https://github.com/aya-rs/bpf-linker/releases)",
            ))
        })?,
    }
    let path = linker().context("bpf-linker was installed and still does not start")?;
    Ok(Done::Changed(describe_linker(&path)))
}

fn linker_can_be_built(llvm: u32, progress: &Progress) -> bool {
    LINKER_LLVM.contains(&llvm) && apt::offers(&format!("llvm-{llvm}-dev"), progress)
}

fn build_linker(llvm: u32, progress: &Progress) -> anyhow::Result<()> {
    let (development, polly) = (format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev"));
    apt::install(&[&development, &polly, "zlib1g-dev", "libzstd-dev", "g++"], progress)?;
    let feature = format!("llvm-{llvm}");
    let mut install = child::cargo();
    install
        .args(["install", "bpf-linker", "--version", LINKER_VERSION, "--locked"])
        .args(["--no-default-features", "--features", &feature])
        .env("LLVM_PREFIX", format!("/usr/lib/llvm-{llvm}"));
    child::run(&mut install, progress).context("build bpf-linker")?;
    Ok(())
}

/// The project's own static build of the linker, for systems whose archive lacks the LLVM it needs.
fn download_linker(progress: &Progress) -> anyhow::Result<()> {
    let arch = env::consts::ARCH;
    let file = format!("bpf-linker-{arch}-unknown-linux-musl.tar.zst");
    let url = format!("https://github.com/aya-rs/bpf-linker/releases/download/v{LINKER_VERSION}/{file}");
    let missing: Vec<&str> =
        ["curl", "zstd"].into_iter().filter(|tool| child::find(tool).is_none()).collect();
    if !missing.is_empty() {
        apt::install(&missing, progress)?;
    }
    let bin = tree::tools().join("bin");
    std::fs::create_dir_all(&bin).context("create target/tools/bin")?;
    let archive = bin.join(&file);
    let mut curl = Command::new("curl");
    curl.args(["--fail", "--silent", "--show-error", "--location", "--proto", "=https", "--max-time", "120"]);
    child::run(curl.arg("--output").arg(&archive).arg(&url), progress).context("download bpf-linker")?;
    child::run(
        Command::new("tar").arg("--extract").arg("--file").arg(&archive).arg("-C").arg(&bin),
        progress,
    )
    .context("unpack bpf-linker")?;
    std::fs::remove_file(&archive).context("remove the archive of bpf-linker")
}

fn describe_linker(path: &Path) -> String {
    let version = child::ask(Command::new(path).arg("--version")).unwrap_or_default();
    let llvm = llvm_of_linker(path).map_or_else(|| "own LLVM".to_owned(), |major| format!("LLVM {major}"));
    format!("{version}, {llvm}")
}

fn no_compiler() -> UserError {
    UserError::new(
        "no compiler for the BPF object, and none that can be installed",
        "install rustup and run `rustup toolchain install nightly --component rust-src`",
    )
}

fn choose(nightly: Option<Compiler>, debian: Option<Compiler>, linker_llvm: Option<u32>) -> Option<Compiler> {
    let readable = |compiler: &Compiler| linker_llvm.is_none_or(|linker| compiler.llvm <= linker);
    nightly.into_iter().chain(debian).find(readable)
}

fn nightly() -> Option<Compiler> {
    let sysroot = child::ask(child::rustup("nightly", "rustc").args(["--print", "sysroot"]))?;
    let core = Path::new(&sysroot).join("lib/rustlib/src/rust/library/core/Cargo.toml");
    let version = core.is_file().then(|| child::ask(child::rustup("nightly", "rustc").arg("-Vv")))??;
    described(Kind::Nightly, &version)
}

fn debian() -> Option<Compiler> {
    let sysroot = child::ask(Command::new(DEBIAN_RUSTC).args(["--print", "sysroot"]))?;
    let core = Path::new(&sysroot).join("lib/rustlib").join(TARGET).join("lib");
    let version = core.is_dir().then(|| child::ask(Command::new(DEBIAN_RUSTC).arg("-Vv")))??;
    described(Kind::Debian, &version)
}

fn described(kind: Kind, verbose_version: &str) -> Option<Compiler> {
    let version = verbose_version.lines().next()?.split(" (").next()?.to_owned();
    let llvm = verbose_version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
    Some(Compiler { kind, version, llvm: llvm.split('.').next()?.parse().ok()? })
}

fn linker_llvm() -> Option<u32> {
    llvm_of_linker(&linker()?)
}

/// The major version of the LLVM library an executable is linked to; none when LLVM is inside it.
fn llvm_of_linker(path: &Path) -> Option<u32> {
    let needed = elf::needed_libraries(path).ok()?;
    needed.iter().find_map(|library| {
        library
            .strip_prefix("libLLVM.so.")
            .or_else(|| library.strip_prefix("libLLVM-"))?
            .split('.')
            .next()?
            .parse()
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiler(kind: Kind, llvm: u32) -> Compiler {
        Compiler { kind, version: "rustc".to_owned(), llvm }
    }

    #[test]
    fn a_compiler_is_read_from_its_own_words() {
        let words = "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)\nLLVM version: 22.1.8";
        let expected = Compiler { kind: Kind::Debian, version: "rustc 1.96.0".to_owned(), llvm: 22 };
        assert_eq!(described(Kind::Debian, words), Some(expected));
        assert_eq!(described(Kind::Debian, "rustc 1.63.0"), None);
    }

    #[test]
    fn nightly_comes_first_unless_the_linker_cannot_read_it() {
        let nightly = Some(compiler(Kind::Nightly, 23));
        let debian = Some(compiler(Kind::Debian, 22));
        let kind = |linker| choose(nightly.clone(), debian.clone(), linker).map(|compiler| compiler.kind);
        assert_eq!(kind(None), Some(Kind::Nightly));
        assert_eq!(kind(Some(23)), Some(Kind::Nightly));
        assert_eq!(kind(Some(22)), Some(Kind::Debian));
        assert_eq!(kind(Some(21)), None);
    }
}
