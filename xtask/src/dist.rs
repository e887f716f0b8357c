//! `cargo xtask build`: the BPF object and the executables that land on a host, static, in `target/dist`.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::progress::{Done, Progress, UserError};
use crate::release::{Arch, commit};
use crate::setup::musl;
use crate::{child, ebpf, elf, progress, tree};

/// The executable that is started for every CNI call, and its package.
const SHIM: (&str, &str) = ("netattach", "netattach-shim");

/// The executables that land on a host, with the most each may weigh in bytes. The others are weighed with the image.
const EXECUTABLES: [(&str, Option<u64>); 4] = [
    // Its size is part of a pod's latency. With glibc, where there is no musl, it is 1.5 MiB.
    (SHIM.0, Some(2 * 1024 * 1024)),
    // Started for every attachment where there is no agent.
    ("netattach-cni", Some(5 * 1024 * 1024)),
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
    ebpf::build(ebpf::Flavour::Normal)?;
    executables(Arch::host()?).map(drop)
}

/// Builds the executables that land on a host of an architecture, with the BPF object that is there; returns their directory.
///
/// # Errors
/// As [`build`].
pub fn executables(arch: Arch) -> anyhow::Result<PathBuf> {
    let mut built = BTreeMap::new();
    progress::step("executables", |progress| {
        let others: Vec<&str> = names().filter(|name| *name != SHIM.0).collect();
        built = static_executables_for(arch, "netattach", &others, progress)?;
        Ok(Done::Unchanged(format!("{}, release, static", arch.triple())))
    })?;
    progress::step("CNI executable", |progress| {
        let (path, triple) = shim(arch, progress)?;
        built.insert(SHIM.0.to_owned(), path);
        Ok(Done::Unchanged(format!("{triple}, release, static")))
    })?;
    let directory = directory(arch);
    let commit = commit::commit();
    for (name, limit) in EXECUTABLES {
        let deliver = |_: &Progress| deliver(name, limit, &built, &directory, commit.as_deref());
        progress::step(&format!("  {name}"), deliver)?;
    }
    Ok(directory)
}

/// Where the executables for an architecture are collected.
pub fn directory(arch: Arch) -> PathBuf {
    if arch.is_tested() { tree::dist() } else { tree::root().join("target/dist-other").join(arch.name()) }
}

/// Builds executables of a package for this machine with the C library inside; returns where each is.
///
/// # Errors
/// A compile error, or the compiler cannot be asked for its host.
pub fn static_executables(
    package: &str,
    names: &[&str],
    progress: &Progress,
) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    static_executables_for(Arch::host()?, package, names, progress)
}

fn static_executables_for(
    arch: Arch,
    package: &str,
    names: &[&str],
    progress: &Progress,
) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut cargo = cargo_for(package, names, arch.triple());
    // The loader's relocations as a bitmap: a thirtieth of an executable otherwise. A static one relocates itself, which the C
    // library that is linked in knows since 2.36.
    let packed = "-Clink-arg=-Wl,-z,pack-relative-relocs".to_owned();
    let script = tree::root().join("xtask/executables.ld");
    // LLD would discard the table that the script keeps.
    let linker = "-Clink-arg=-fuse-ld=bfd".to_owned();
    let without_tables = format!("-Clink-arg=-Wl,-T,{}", script.display());
    cargo.env("CARGO_ENCODED_RUSTFLAGS", rustflags([packed, linker, without_tables])?).envs(arch.variables());
    // Read by the build script of `netattach`, which would otherwise look below the directory of this target.
    cargo.env("NETATTACH_BPF_OBJECT", tree::bpf_object());
    child::run(&mut cargo, progress).context("compile the executables")?;
    Ok(names.iter().map(|name| ((*name).to_owned(), built(arch.triple(), name))).collect())
}

/// Builds the CNI executable, with musl where there is one for that architecture; where it is, and the compiler's target.
fn shim(arch: Arch, progress: &Progress) -> anyhow::Result<(PathBuf, &'static str)> {
    let (name, package) = SHIM;
    let Some(musl) = musl::musl().filter(|_| arch == Arch::Amd64 && arch.is_tested()) else {
        let path = static_executables_for(arch, package, &[name], progress)?.remove(name);
        return Ok((path.context("it was not built")?, arch.triple()));
    };
    let mut cargo = cargo_for(package, &[name], musl::TARGET);
    cargo.args(musl.arguments()).envs(musl.variables());
    cargo.env("CARGO_ENCODED_RUSTFLAGS", rustflags(musl.flags()?)?);
    child::run(&mut cargo, progress).context("compile the CNI executable")?;
    Ok((built(musl::TARGET, name), musl::TARGET))
}

fn cargo_for(package: &str, names: &[&str], triple: &str) -> Command {
    let mut cargo = child::cargo();
    cargo.args(["build", "--release", "--package", package, "--target", triple]);
    for name in names {
        cargo.args(["--bin", name]);
    }
    // Named, so that the caller's configuration does not change the place of the result.
    cargo.arg("--target-dir").arg(tree::root().join("target"));
    cargo
}

fn built(triple: &str, name: &str) -> PathBuf {
    tree::root().join("target").join(triple).join("release").join(name)
}

/// Flags in cargo's encoding, with `more`. Paths of this machine are mapped to others, so that executables do not
/// depend on the build directory: panic messages name source files.
fn rustflags(more: impl IntoIterator<Item = String>) -> anyhow::Result<String> {
    let sysroot = child::ask(Command::new("rustc").args(["--print", "sysroot"]).current_dir(tree::root()))
        .context("ask rustc where it is")?;
    let cargo = env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
    // With the C library inside, and without unwind tables: a panic ends the process, and without symbols a backtrace
    // has no information. The tables would be a tenth of an executable. Those of libraries that were compiled with them are
    // discarded when the executable is linked.
    let mut flags = vec!["-Ctarget-feature=+crt-static".to_owned(), "-Cforce-unwind-tables=no".to_owned()];
    flags.extend(more);
    // rustc applies the last mapping that matches, and one of these directories may be inside another.
    flags.extend(cargo.map(|cargo| remap(&cargo, "cargo")));
    flags.push(remap(Path::new(&sysroot), "rust"));
    flags.push(remap(&tree::root(), "."));
    Ok(flags.join("\x1f"))
}

fn remap(from: &Path, to: &str) -> String {
    format!("--remap-path-prefix={}={to}", from.display())
}

fn deliver(
    name: &str,
    limit: Option<u64>,
    built: &BTreeMap<String, PathBuf>,
    directory: &Path,
    commit: Option<&str>,
) -> anyhow::Result<Done> {
    let source = built.get(name).with_context(|| format!("{name} was not built"))?;
    ensure!(
        elf::is_static(source)?,
        UserError::new(
            format!("{name} needs a dynamic loader, so it would not run on every node"),
            "find the dependency that links a shared library (`cargo tree -p netattach`, crates ending in -sys)",
        )
    );
    ensure!(
        !elf::has_symbols(source)?,
        UserError::new(
            format!("{name} has its symbols, a seventh of what is delivered"),
            "give its package no settings of its own in `profile.release.package`: they lose `strip`",
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
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let target = directory.join(name);
    // Written beside and renamed: a running copy keeps its file, a new one never starts half-written.
    let fresh = directory.join(format!(".{name}.new"));
    fs::copy(source, &fresh).with_context(|| format!("copy {name}"))?;
    if let Some(commit) = commit {
        let mut bytes = fs::read(&fresh).with_context(|| format!("read {name}"))?;
        commit::write_into(&mut bytes, commit).with_context(|| format!("write the commit into {name}"))?;
        fs::write(&fresh, bytes).with_context(|| format!("write {name}"))?;
    }
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

/// In tenths of mebibytes.
pub(crate) fn mebibytes(bytes: u64) -> String {
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
