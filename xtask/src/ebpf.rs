//! `cargo xtask build-ebpf`: compiles netattach-ebpf to `target/bpf/netattach.bpf.o` and checks the result. With
//! `--log`, to `target/bpf/netattach-log.bpf.o`, which logs the path of packets.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::progress::{Done, Progress, UserError};
use crate::setup::bpf_toolchain::{self, Compiler, Kind, TARGET};
use crate::{bpf_stack, child, elf, progress, tree};

const PACKAGE: &str = "netattach-ebpf";
/// The third generation of the instruction set: 32-bit operations, in every kernel since 5.1.
const CPU: &str = "v3";

/// The programs that the agent looks for by name.
const PROGRAMS: [&str; 12] = [
    "na_from_pod",
    "na_to_pod",
    "na_fast",
    "na_routed",
    "na_forwarded",
    "na_wire",
    "na_xdp",
    "na_par_from",
    "na_par_to",
    "na_par_in_from",
    "na_par_in_to",
    "na_par_out",
];

/// The map through which aya's macros log.
const LOG_MAP: &str = "AYA_LOGS";

/// Which object is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// The agent's.
    Normal,
    /// The one whose stages log.
    Log,
}

/// Builds the object at the path where the build script of `netattach` finds it; the one that logs is put beside it.
///
/// # Errors
/// No compiler or linker, a compile error, an object without type information or programs, one whose functions call
/// each other deeper than an older kernel's stack goes, or one that logs and should not.
pub fn build(flavour: Flavour) -> anyhow::Result<()> {
    let (step, place_at) = match flavour {
        Flavour::Normal => ("BPF object", tree::bpf_object()),
        Flavour::Log => ("BPF object, log", tree::bpf_log_object()),
    };
    progress::step(step, |progress| {
        let built = compile(progress, flavour)?;
        let contents = elf::bpf_contents(&built)?;
        ensure!(
            contents.btf_bytes > 0,
            "the object has no .BTF section, so the kernel could not name its types"
        );
        for program in PROGRAMS {
            let there = contents.programs.iter().any(|found| found.rsplit('/').next() == Some(program));
            ensure!(there, "the object has no program {program}, which the agent attaches");
        }
        let logs = contents.maps.iter().any(|map| map == LOG_MAP);
        ensure!(
            logs == (flavour == Flavour::Log),
            "the object {} log packets",
            if logs { "must not" } else { "does not" }
        );
        let stack = match flavour {
            Flavour::Normal => {
                let functions = elf::bpf_functions(&built)?;
                let bytes = bpf_stack::check(&functions)?.map_or(0, |chain| chain.bytes());
                format!(", stack {bytes} of {} bytes", bpf_stack::MOST_BYTES)
            }
            // This object is not part of a release: it is loaded by hand to look for a fault, and the kernel of that
            // node verifies it.
            Flavour::Log => String::new(),
        };
        // Agent and command line embed it.
        let object = fs::read(&built).with_context(|| format!("read {}", built.display()))?;
        let changed = place(&elf::without_debug_information(&object)?, &place_at)?;
        let summary = format!(
            "programs {}, maps {}, BTF {} KiB{stack}",
            contents.programs.len(),
            contents.maps.len(),
            contents.btf_bytes.div_ceil(1024)
        );
        Ok(if changed { Done::Changed(summary) } else { Done::Unchanged(summary) })
    })
}

fn compile(progress: &Progress, flavour: Flavour) -> anyhow::Result<PathBuf> {
    let missing = |what: &str| UserError::new(format!("there is no {what}"), "run `cargo xtask setup`");
    let compiler = bpf_toolchain::compiler().ok_or_else(|| missing("compiler for BPF"))?;
    let linker = bpf_toolchain::linker().ok_or_else(|| missing("linker for BPF"))?;
    let mut cargo = cargo_for(&compiler);
    cargo
        .args(["build", "--package", PACKAGE, "--profile", "bpf", "--target", TARGET])
        .args((flavour == Flavour::Log).then_some("--features=log"))
        .arg("--target-dir")
        .arg(tree::bpf_target_dir())
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags(&linker))
        // The caller's wrapper may refuse a second compiler.
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    let mut cargo = match flavour {
        Flavour::Normal => cargo,
        // Tests run meanwhile.
        Flavour::Log => child::nice(cargo),
    };
    child::run(&mut cargo, progress).context("compile the BPF programs")?;
    Ok(tree::bpf_target_dir().join(TARGET).join("bpf").join(PACKAGE))
}

fn cargo_for(compiler: &Compiler) -> Command {
    match compiler.kind {
        Kind::Nightly => {
            let mut cargo = child::rustup("nightly", "cargo");
            cargo.args(["-Z", "build-std=core"]);
            cargo
        }
        Kind::Debian => {
            let mut cargo = child::cargo();
            // A released compiler takes the unstable features that BPF needs only with this variable.
            cargo.env("RUSTC", bpf_toolchain::DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
            cargo
        }
    }
}

/// Flags in cargo's encoding, which alone allows blanks in the linker's path.
fn rustflags(linker: &Path) -> String {
    let linker = format!("-Clinker={}", linker.display());
    let root = env::var("CARGO_HOME")
        .ok()
        .or_else(|| env::home_dir().map(|home| home.join(".cargo").display().to_string()));
    let remap_root = format!("--remap-path-prefix={}=.", tree::root().display());
    let remap_home = root.map(|home| format!("--remap-path-prefix={home}=cargo"));
    let cpu = format!("-Ctarget-cpu={CPU}");
    let fixed = [linker.as_str(), "-Cdebuginfo=2", "-Clink-arg=--btf", &cpu, &remap_root];
    fixed.into_iter().chain(remap_home.as_deref()).collect::<Vec<_>>().join("\x1f")
}

/// Copies only changed files: the agent is rebuilt when the object's time changes.
fn place(new: &[u8], wanted: &Path) -> anyhow::Result<bool> {
    if fs::read(wanted).is_ok_and(|old| old == new) {
        return Ok(false);
    }
    if let Some(dir) = wanted.parent() {
        fs::create_dir_all(dir).context("create target/bpf")?;
    }
    fs::write(wanted, new).with_context(|| format!("write {}", wanted.display()))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linker_in_a_directory_with_a_blank_stays_one_flag() {
        let flags = rustflags(Path::new("/a b/bpf-linker"));
        assert_eq!(flags.split('\x1f').next(), Some("-Clinker=/a b/bpf-linker"));
    }

    #[test]
    fn an_unchanged_object_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = dir.path().join("bpf/wanted");
        assert!(place(b"one", &wanted).unwrap());
        assert!(!place(b"one", &wanted).unwrap());
        assert!(place(b"two", &wanted).unwrap());
        assert_eq!(fs::read(&wanted).unwrap(), b"two");
    }
}
