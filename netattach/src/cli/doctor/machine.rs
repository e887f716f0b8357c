//! Privileges, kernel, the BPF file system and what is pinned there.

use std::path::Path;

use super::Check;
use crate::agent::{self, Settings};
use crate::bpf;
use crate::error_chain::Chain;

/// The oldest kernel whose BPF the programs are made for.
const OLDEST: (u32, u32) = (5, 15);

/// Looked for, and used by nothing: its absence is nothing to warn of.
const NOT_USED: &str = "netkit";

/// Of a file system of BPF (`BPF_FS_MAGIC` in `linux/magic.h`).
const BPFFS: i64 = 0xcafe_4a11;

/// Whether this process may look at everything.
pub(super) fn privileges() -> Check {
    match agent::check_privileges() {
        Ok(()) => Check::ok("privileges", "this process may look at everything"),
        Err(error) => Check::warning(
            "privileges",
            Chain(&error).to_string(),
            "run this as root: what needs the rights is looked at as far as it goes",
        ),
    }
}

pub(super) fn checks(settings: &Settings) -> Vec<Check> {
    vec![kernel(), bpffs(&settings.bpffs), pins(&settings.bpffs)]
}

/// The kernel's version, and what its BPF lacks.
fn kernel() -> Check {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if version(&release).is_some_and(|version| version < OLDEST) {
        let detail = format!("{release} is older than {}.{}", OLDEST.0, OLDEST.1);
        return Check::failed(
            "kernel",
            detail,
            "use a newer kernel (docs/runtimes.md has those that are supported)",
        );
    }
    let absent: Vec<String> = agent::kernel_features()
        .into_iter()
        .filter(|feature| !feature.present && feature.name != NOT_USED)
        .map(|feature| format!("{} ({})", feature.name, feature.detail))
        .collect();
    if absent.is_empty() {
        return Check::ok("kernel", format!("{release} has all that is used"));
    }
    let detail = format!("{release} lacks {}", absent.join(", "));
    Check::warning(
        "kernel",
        detail,
        "a newer kernel; until then netattach works with what is said behind each",
    )
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Whether the directory of pins is on a BPF file system.
fn bpffs(root: &Path) -> Check {
    const NAME: &str = "bpf file system";
    let there = root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statfs(there) {
        Ok(found) if found.f_type & 0xffff_ffff == BPFFS => {
            Check::ok(NAME, format!("{} is one", there.display()))
        }
        Ok(_) => {
            let detail = format!("{} is not on a BPF file system", root.display());
            let remedy = "mount -t bpf bpf /sys/fs/bpf on the node; in a pod, mount it from there with HostToContainer";
            Check::failed(NAME, detail, remedy)
        }
        Err(error) => Check::failed(
            NAME,
            format!("{} cannot be examined: {error}", there.display()),
            "run this as root on the node",
        ),
    }
}

/// Which layouts are pinned.
fn pins(root: &Path) -> Check {
    const NAME: &str = "pins";
    let ours = format!("v{}", netattach_common::LAYOUT_VERSION);
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Check::skipped(
                NAME,
                format!("nothing is pinned at {}: no agent has run", root.display()),
            );
        }
        Err(error) => {
            return Check::failed(
                NAME,
                format!("{}: {error}", root.display()),
                "run this as root on the node",
            );
        }
    };
    let mut layouts: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    layouts.sort();
    let others: Vec<&str> = layouts.iter().map(String::as_str).filter(|name| *name != ours).collect();
    if !layouts.contains(&ours) {
        let detail = format!("{} has no {ours}, which this version uses", root.display());
        return Check::warning(NAME, detail, "start netattachd, which pins it");
    }
    if !others.is_empty() {
        let detail = format!("{} has {ours}, and of other versions {}", root.display(), others.join(", "));
        let remedy = "an agent of this version removes them once it serves; if another version runs on purpose, nothing";
        return Check::warning(NAME, detail, remedy);
    }
    match bpf::pinned_attachments(root) {
        Ok(count) => Check::ok(NAME, format!("{ours} with {count} attachments")),
        Err(error) => Check::failed(
            NAME,
            Chain(&error).to_string(),
            "restart netattachd, which adopts or makes what is missing",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_has_two_numbers() {
        assert_eq!(version("6.18.44"), Some((6, 18)));
        assert_eq!(version("5.15.0-1-amd64"), Some((5, 15)));
        assert_eq!(version("6.1-rc1"), Some((6, 1)));
        assert_eq!(version("next"), None);
        assert!(version("5.10.0").unwrap() < OLDEST);
    }
}
