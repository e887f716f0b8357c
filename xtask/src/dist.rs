//! `cargo xtask build`: the BPF object and the executables that land on a host, static, in `target/dist`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};

use crate::progress::{Done, Progress, UserError};
use crate::{child, ebpf, elf, progress, tree};

/// The executables that land on a host, with the most each may weigh in bytes.
const EXECUTABLES: [(&str, Option<u64>); 4] = [
    // Started for every CNI call: its size is part of a pod's latency.
    ("netattach", Some(2 * 1024 * 1024)),
    // Started for every attachment where there is no agent.
    ("netattach-cni", Some(4 * 1024 * 1024)),
    ("netattachctl", None),
    ("netattachd", None),
];

/// Names of the executables that land on a host.
pub fn names() -> impl Iterator<Item = &'static str> {
    EXECUTABLES.iter().map(|(name, _)| *name)
}

/// Builds everything.
///
/// # Errors
/// A compile error, an executable that is not static, or one over its size limit.
pub fn build() -> anyhow::Result<()> {
    progress::heading("build");
    ebpf::build()?;
    let mut built = BTreeMap::new();
    progress::step("executables", |progress| {
        let names: Vec<&str> = EXECUTABLES.iter().map(|(name, _)| *name).collect();
        built = static_executables("netattach", &names, progress)?;
        Ok(Done::Unchanged(format!("{}, release, static", host_triple()?)))
    })?;
    for (name, limit) in EXECUTABLES {
        progress::step(&format!("  {name}"), |_| deliver(name, limit, &built))?;
    }
    Ok(())
}

/// Builds executables of a package with the C library inside; returns where each is.
///
/// # Errors
/// A compile error, or the compiler cannot be asked for its host.
pub fn static_executables(
    package: &str,
    names: &[&str],
    progress: &Progress,
) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut cargo = child::cargo();
    cargo.args(["build", "--release", "--package", package, "--target", &host_triple()?]);
    for name in names {
        cargo.args(["--bin", name]);
    }
    // Named, so that the caller's configuration does not change the place of the result.
    cargo.arg("--target-dir").arg(tree::root().join("target"));
    cargo.env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static");
    // Read by the build script of `netattach`, which would otherwise look below the directory of this target.
    cargo.env("NETATTACH_BPF_OBJECT", tree::bpf_object());
    child::run(&mut cargo, progress).context("compile the executables")?;
    let release = tree::root().join("target").join(host_triple()?).join("release");
    Ok(names.iter().map(|name| ((*name).to_owned(), release.join(name))).collect())
}

fn deliver(name: &str, limit: Option<u64>, built: &BTreeMap<String, PathBuf>) -> anyhow::Result<Done> {
    let source = built.get(name).with_context(|| format!("{name} was not built"))?;
    ensure!(
        elf::is_static(source)?,
        UserError::new(
            format!("{name} needs a dynamic loader, so it would not run on every node"),
            "find the dependency that links a shared library (`cargo tree -p netattach`, crates ending in -sys)",
        )
    );
    let size = fs::metadata(source).with_context(|| format!("look at {name}"))?.len();
    if let Some(limit) = limit {
        ensure!(
            size <= limit,
            "{name} weighs {}, more than the {} it may",
            mebibytes(size),
            mebibytes(limit)
        );
    }
    fs::create_dir_all(tree::dist()).context("create target/dist")?;
    let target = tree::dist().join(name);
    // Written beside and renamed: a running copy keeps its file, a new one never starts half-written.
    let fresh = tree::dist().join(format!(".{name}.new"));
    fs::copy(source, &fresh).with_context(|| format!("copy {name}"))?;
    fs::rename(&fresh, &target).with_context(|| format!("put {name} in place"))?;
    Ok(Done::Unchanged(mebibytes(size)))
}

/// The triple of this machine, as the compiler names it.
///
/// # Errors
/// rustc cannot be asked.
pub fn host_triple() -> anyhow::Result<String> {
    let words = child::ask(Command::new("rustc").arg("-Vv").current_dir(tree::root()))
        .context("ask rustc for its host")?;
    let host = words.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    Ok(host.to_owned())
}

fn mebibytes(bytes: u64) -> String {
    // Tenths are exact enough for a size that people read.
    let tenths = bytes * 10 / (1024 * 1024);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_down_to_tenths() {
        assert_eq!(mebibytes(2 * 1024 * 1024), "2.0 MiB");
        assert_eq!(mebibytes(1_500_000), "1.4 MiB");
    }
}
