//! Checks privileges, kernel, the BPF file system and the pins in it.

use std::path::Path;

use super::Check;
use crate::agent;
use crate::bpf::{self, probe};
use crate::error_chain::Chain;
use crate::settings::Settings;

/// Only networks of that type use it, so its absence is no reason for a warning.
const NOT_USED: &str = "netkit";

/// Type of a BPF file system (`BPF_FS_MAGIC` in `linux/magic.h`).
const BPFFS: i64 = 0xcafe_4a11;

/// Checks whether this process may inspect everything.
pub(super) fn privileges() -> Check {
    match agent::check_privileges() {
        Ok(()) => Check::ok("privileges", "this process may look at everything"),
        Err(error) => Check::warning(
            "privileges",
            Chain(&error).to_string(),
            "run this as root: checks that need root are incomplete",
        ),
    }
}

pub(super) fn checks(settings: &Settings) -> Vec<Check> {
    vec![kernel(), bpffs(&settings.bpffs), pins(&settings.bpffs)]
}

/// Checks the kernel's version and its BPF features.
fn kernel() -> Check {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let requirements = probe::requirements();
    let needed = probe::lacking(&requirements);
    let absent = agent::kernel_features()
        .into_iter()
        .filter(|feature| !feature.present && feature.name != NOT_USED)
        .map(|feature| format!("{} ({})", feature.name, feature.detail));
    judged(&release, &needed, &absent.collect::<Vec<_>>())
}

/// Judges a kernel: one that lacks a `needed` feature runs no program of netattach; one that lacks only the `absent`
/// features runs with restrictions. A kernel older than those of the tests is judged by its features.
fn judged(release: &str, needed: &[&str], absent: &[String]) -> Check {
    const NAME: &str = "kernel";
    if !needed.is_empty() {
        let detail = format!("{release} lacks {}, without which no program can be loaded", needed.join(", "));
        return Check::failed(
            NAME,
            detail,
            "use a newer kernel (docs/supported.md has those that are tested)",
        );
    }
    let (major, minor) = probe::OLDEST_TESTED;
    let is_old = version(release).is_some_and(|version| version < probe::OLDEST_TESTED);
    let mut problems = Vec::new();
    if is_old {
        problems.push(format!("is older than {major}.{minor}, the oldest that is tested"));
    }
    if !absent.is_empty() {
        problems.push(format!("lacks {}", absent.join(", ")));
    }
    if problems.is_empty() {
        return Check::ok(NAME, format!("{release} has all that is used"));
    }
    Check::warning(
        NAME,
        format!("{release} {}", problems.join(", and ")),
        if is_old {
            "use a newer kernel (docs/supported.md has those that are tested); what netattach needs is there"
        } else {
            "use a newer kernel; until then netattach works, with the limitation given for each feature"
        },
    )
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Checks whether the directory of pins is on a BPF file system.
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

/// Checks which layouts are pinned.
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
    }

    #[test]
    fn an_old_kernel_is_warned_of_and_one_that_lacks_what_is_needed_fails() {
        let (needed, absent) = (["map ringbuf"], ["tcx (refused)".to_owned()]);
        let newer = "use a newer kernel (docs/supported.md has those that are tested)";
        let enough = format!("{newer}; what netattach needs is there");
        let less =
            "use a newer kernel; until then netattach works, with the limitation given for each feature";
        let old = "5.15.0-1-amd64 is older than 6.1, the oldest that is tested";
        let table = [
            (judged("6.1.0-9-amd64", &[], &[]), Check::ok("kernel", "6.1.0-9-amd64 has all that is used")),
            (judged("6.1.0", &[], &absent), Check::warning("kernel", "6.1.0 lacks tcx (refused)", less)),
            (judged("5.15.0-1-amd64", &[], &[]), Check::warning("kernel", old, &*enough)),
            (
                judged("5.15.0-1-amd64", &[], &absent),
                Check::warning("kernel", format!("{old}, and lacks tcx (refused)"), &*enough),
            ),
            (
                judged("5.4.0", &needed, &absent),
                Check::failed(
                    "kernel",
                    "5.4.0 lacks map ringbuf, without which no program can be loaded",
                    newer,
                ),
            ),
            (judged("next", &[], &[]), Check::ok("kernel", "next has all that is used")),
        ];
        for (found, expected) in table {
            assert_eq!(found, expected);
        }
    }
}
