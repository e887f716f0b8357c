//! Tools that tests, demo and benchmarks use besides the compilers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::apt;
use crate::progress::{Done, Progress, UserError};
use crate::{child, tree};

/// The first bpftool that knows tcx links.
const BPFTOOL_MINIMUM: (u32, u32) = (7, 5);
/// Suites that carry a new enough bpftool, oldest C library first: it runs on any that is not older.
const BPFTOOL_SUITE: &str = "bookworm-backports";
const REFERENCE_SUITE: &str = "sid";
const BPFFS: &str = "/sys/fs/bpf";

/// A bpftool that shows tcx links: the machine's own or the one unpacked by setup.
pub fn bpftool() -> Option<PathBuf> {
    let unpacked = tree::tools().join("bpftool/usr/sbin/bpftool");
    [child::find("bpftool"), Some(unpacked)]
        .into_iter()
        .flatten()
        .find(|path| bpftool_version(path).is_some_and(|version| version >= BPFTOOL_MINIMUM))
}

/// Directory of the reference CNI plugins (containernetworking), unpacked by setup.
pub fn reference_plugins() -> PathBuf {
    tree::tools().join("containernetworking-plugins/usr/lib/cni")
}

/// The C library as an archive: without it no executable can be linked statically.
pub(super) fn ensure_static_libc(progress: &Progress) -> anyhow::Result<Done> {
    let archive =
        || child::ask(Command::new("cc").arg("-print-file-name=libc.a")).filter(|path| path.contains('/'));
    if archive().is_some() {
        return Ok(Done::Unchanged("libc.a".to_owned()));
    }
    apt::install(&["gcc", "libc6-dev"], progress)?;
    archive()
        .map(|_| Done::Changed("libc.a from libc6-dev".to_owned()))
        .context("cc still does not find libc.a")
}

pub(super) fn ensure_bpftool(progress: &Progress) -> anyhow::Result<Done> {
    let describe = |path: &Path| bpftool_version(path).map(|(major, minor)| format!("{major}.{minor}"));
    if let Some(path) = bpftool() {
        return Ok(Done::Unchanged(describe(&path).unwrap_or_default()));
    }
    let into = tree::tools().join("bpftool");
    apt::unpack_from_suite(&["bpftool"], BPFTOOL_SUITE, &into, progress)?;
    let path = bpftool().context("the unpacked bpftool does not start")?;
    Ok(Done::Changed(format!("{} from {BPFTOOL_SUITE}, unpacked", describe(&path).unwrap_or_default())))
}

/// Programs, each with the package that has it.
pub(super) fn ensure_programs(programs: &[(&str, &str)], progress: &Progress) -> anyhow::Result<Done> {
    let missing: Vec<&str> = programs
        .iter()
        .filter(|(program, _)| child::find(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(Done::Unchanged("present".to_owned()));
    }
    apt::install(&missing, progress)?;
    Ok(Done::Changed(format!("installed {}", missing.join(", "))))
}

pub(super) fn ensure_reference_plugins(progress: &Progress) -> anyhow::Result<Done> {
    let version =
        || child::ask(Command::new(reference_plugins().join("bridge")).env("CNI_COMMAND", "VERSION"));
    let present = |what: &str| format!("bridge, macvlan and {what} unpacked");
    if version().is_some() {
        return Ok(Done::Unchanged(present("others")));
    }
    let into = tree::tools().join("containernetworking-plugins");
    apt::unpack_from_suite(&["containernetworking-plugins"], REFERENCE_SUITE, &into, progress)?;
    version().context("the unpacked plugins do not start")?;
    Ok(Done::Changed(format!("{} from {REFERENCE_SUITE}", present("others"))))
}

/// Directory of busybox, whose DHCP server tests lease from, unpacked by setup.
pub fn busybox() -> PathBuf {
    tree::tools().join("busybox/bin")
}

pub(super) fn ensure_busybox(progress: &Progress) -> anyhow::Result<Done> {
    let has_server = || {
        let applets = child::ask(Command::new(busybox().join("busybox")).arg("--list"))?;
        applets.lines().any(|applet| applet == "udhcpd").then_some(())
    };
    if has_server().is_some() {
        return Ok(Done::Unchanged("udhcpd of busybox".to_owned()));
    }
    apt::unpack("busybox", &tree::tools().join("busybox"), progress)?;
    has_server().context("the unpacked busybox has no udhcpd")?;
    Ok(Done::Changed("udhcpd of busybox unpacked".to_owned()))
}

/// Directory of Prometheus and promtool, unpacked by setup.
pub fn prometheus() -> PathBuf {
    tree::tools().join("prometheus/usr/bin")
}

/// The programs that scrape the agent and evaluate the dashboard and the alerts in a test.
pub(super) fn ensure_prometheus(progress: &Progress) -> anyhow::Result<Done> {
    let version = || child::ask(Command::new(prometheus().join("promtool")).arg("--version"));
    let number = |words: String| words.split(' ').nth(2).unwrap_or_default().trim_end_matches(',').to_owned();
    if let Some(words) = version() {
        return Ok(Done::Unchanged(number(words)));
    }
    apt::unpack("prometheus", &tree::tools().join("prometheus"), progress)?;
    let words = version().context("the unpacked promtool does not start")?;
    Ok(Done::Changed(format!("{} unpacked", number(words))))
}

/// libFuzzer is C++.
pub(super) fn ensure_cxx(progress: &Progress) -> anyhow::Result<Done> {
    if child::find("c++").is_some() {
        return Ok(Done::Unchanged("c++".to_owned()));
    }
    apt::install(&["g++"], progress)?;
    Ok(Done::Changed("installed g++".to_owned()))
}

/// The tools that policies are compared with.
pub(super) fn ensure_iptables(progress: &Progress) -> anyhow::Result<Done> {
    if child::find("iptables-restore").is_some() {
        return Ok(Done::Unchanged("present".to_owned()));
    }
    apt::install(&["iptables"], progress)?;
    Ok(Done::Changed("installed iptables".to_owned()))
}

/// The tool that the table which translates addresses is listed with.
pub(super) fn ensure_nft(progress: &Progress) -> anyhow::Result<Done> {
    if child::find("nft").is_some() {
        return Ok(Done::Unchanged("present".to_owned()));
    }
    apt::install(&["nftables"], progress)?;
    Ok(Done::Changed("installed nftables".to_owned()))
}

pub(super) fn ensure_bpffs(progress: &Progress) -> anyhow::Result<Done> {
    if is_bpffs(BPFFS) {
        return Ok(Done::Unchanged(BPFFS.to_owned()));
    }
    let mut mount = apt::as_root("mount", &["mounting bpffs"])?;
    mount.args(["-t", "bpf", "bpf", BPFFS]);
    child::run(&mut mount, progress).map_err(|cause| {
        cause.context(UserError::new(
            "bpffs cannot be mounted",
            "run on a machine or in a container that may mount it (CAP_SYS_ADMIN, /sys writable)",
        ))
    })?;
    Ok(Done::Changed(format!("mounted on {BPFFS}")))
}

fn is_bpffs(path: &str) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).any(|fields| {
        fields.get(1).is_some_and(|mounted| *mounted == path)
            && fields.get(2).is_some_and(|kind| *kind == "bpf")
    })
}

fn bpftool_version(path: &Path) -> Option<(u32, u32)> {
    version_in(&child::ask(Command::new(path).arg("version"))?)
}

fn version_in(words: &str) -> Option<(u32, u32)> {
    let version = words.lines().find_map(|line| line.strip_prefix("bpftool v"))?;
    let mut numbers = version.split(['.', ' ']).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bpftool_version_is_two_numbers() {
        let table = [
            ("bpftool v7.5.0\nusing libbpf v1.5\nfeatures:", Some((7, 5))),
            ("bpftool v7.10.0", Some((7, 10))),
            ("WARNING: bpftool not found for kernel 6.8", None),
        ];
        for (words, expected) in table {
            assert_eq!(version_in(words), expected, "{words:?}");
        }
    }

    #[test]
    fn a_later_minor_version_is_enough() {
        assert!((7, 10) >= BPFTOOL_MINIMUM && (7, 1) < BPFTOOL_MINIMUM);
    }
}
