//! Where things are in this repository.
//!
//! Everything xtask makes lives under `target/`, so that `git clean` and `rm -r target` undo all of it.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// The repository's top directory.
pub fn root() -> PathBuf {
    // Cargo sets the variable for `cargo run`; the compiled-in value serves an executable started by hand.
    let manifest_dir = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest_dir.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Where the BPF objects are.
pub fn bpf() -> PathBuf {
    root().join("target/bpf")
}

/// The finished BPF object, read by the build script of `netattach`.
pub fn bpf_object() -> PathBuf {
    bpf().join("netattach.bpf.o")
}

/// The BPF object whose stages log their results: for `netattachd --bpf-log`, not embedded in any executable.
pub fn bpf_log_object() -> PathBuf {
    bpf().join("netattach-log.bpf.o")
}

/// Cargo's target directory for the BPF crate: separate, because another compiler fills it.
pub fn bpf_target_dir() -> PathBuf {
    root().join("target/bpf-build")
}

/// Where the executables that land on a host are collected.
pub fn dist() -> PathBuf {
    root().join("target/dist")
}

/// The suites of live tests, by name.
///
/// # Errors
/// Their directory cannot be listed.
pub fn suites() -> anyhow::Result<Vec<String>> {
    let path = root().join("tests/tests");
    let mut suites = Vec::new();
    for entry in std::fs::read_dir(&path).with_context(|| path.display().to_string())? {
        suites.push(entry?.file_name().to_string_lossy().into_owned());
    }
    suites.sort();
    Ok(suites)
}

/// Where the archives of container images are put.
pub fn images() -> PathBuf {
    root().join("target/image")
}

/// Tools unpacked for this repository alone, never installed on the machine.
pub fn tools() -> PathBuf {
    root().join("target/tools")
}

/// Text with this machine's paths shortened: the repository becomes `.` and the home directory `~`.
pub fn without_local_paths(text: &str) -> String {
    let root = root();
    let mut short =
        text.replace(&format!("{}/", root.display()), "").replace(&root.display().to_string(), ".");
    if let Some(home) = env::home_dir().filter(|home| home.components().count() > 1) {
        short = short.replace(&format!("{}/", home.display()), "~/");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_holds_the_workspace_manifest() {
        assert!(root().join("rust-toolchain.toml").is_file());
    }

    #[test]
    fn paths_of_this_machine_are_shortened() {
        let text = format!("{}/src/a.rs in {}", root().display(), root().display());
        assert_eq!(without_local_paths(&text), "src/a.rs in .");
    }
}
