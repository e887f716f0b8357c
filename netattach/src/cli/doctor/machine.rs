//! Privileges, kernel, what of it leads past programs, the BPF file system and what is pinned there.

use std::path::Path;

use super::Check;
use crate::agent::{self, Settings};
use crate::bpf::{self, probe};
use crate::error_chain::Chain;
use crate::kernel_module::{Loadable, loadable};
use crate::netlink::Handle;

/// The kind of device, the module of its driver, and the check.
const IFB: &str = "ifb";

/// Used by networks of that type alone: its absence is nothing to warn of.
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
    vec![kernel(), ifb(), bpffs(&settings.bpffs), pins(&settings.bpffs)]
}

/// The kernel's version, and what its BPF lacks.
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

/// A kernel that lacks something `needed` runs no program of netattach's; one without the `absent` does with less. One that
/// is older than those of the tests is as good as what it has.
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
            "a newer kernel; until then netattach works with what is said behind each"
        },
    )
}

/// Whether pods can have devices of kind `ifb`, by which those that may make one send past programs on the node.
fn ifb() -> Check {
    match Handle::open().and_then(Handle::ifb) {
        Ok((found, _)) => of_ifb(found.has_driver, || loadable(Path::new("/"), IFB)),
        Err(error) => Check::skipped(IFB, format!("the kernel does not say: {}", Chain(&error))),
    }
}

/// `has_driver`: built in or loaded. `module`: whether it can be loaded.
fn of_ifb(has_driver: bool, module: impl FnOnce() -> Loadable) -> Check {
    const NAME: &str = IFB;
    const PAST: &str = "a pod with CAP_NET_ADMIN can send past the programs on the node by such a device: its attachments there \
                        are full-unless-privileged, and advisory while it has one";
    const NO_POWERS: &str = "give CAP_NET_ADMIN to no pod that is not trusted";
    // As the reference does it, `bandwidth` has a device on the node for each pod that has a rate for what it sends.
    const NO_MODULE: &str = "where no bandwidth plugin is executed, which needs ifb on the node, a line \"install ifb /bin/false\" \
                             in a file of /etc/modprobe.d (a container sees it by the volumes of the component \
                             modprobe-configuration alone)";
    match (has_driver, module()) {
        (true, Loadable::No | Loadable::Unknown) => {
            Check::warning(NAME, format!("the kernel has it: {PAST}"), NO_POWERS)
        }
        (true, Loadable::Yes) => Check::warning(
            NAME,
            format!("the kernel has loaded it: {PAST}"),
            format!("{NO_MODULE}, and modprobe -r ifb; or {NO_POWERS}"),
        ),
        (true, Loadable::Kept) => Check::warning(
            NAME,
            format!("the kernel has loaded it, though modprobe is to keep it away: {PAST}"),
            format!("modprobe -r ifb, which removes such devices of the node too; or {NO_POWERS}"),
        ),
        (false, Loadable::Yes) => Check::warning(
            NAME,
            format!("the kernel loads it when a pod with CAP_NET_ADMIN asks: {PAST}"),
            format!("{NO_MODULE}; or {NO_POWERS}"),
        ),
        (false, Loadable::Kept) => Check::ok(NAME, "not loaded, and modprobe keeps it away"),
        (false, Loadable::No) => Check::ok(NAME, "the kernel has none"),
        (false, Loadable::Unknown) => Check::skipped(
            NAME,
            format!("not loaded; whether the kernel can load it is not seen from here. If it can, {PAST}"),
        ),
    }
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
    fn ifb_is_warned_of_where_pods_can_have_it() {
        use super::super::State;
        let found = |has_driver, module| of_ifb(has_driver, || module);
        let keep = "where no bandwidth plugin is executed, which needs ifb on the node, a line \"install ifb /bin/false\" in a \
                    file of /etc/modprobe.d (a container sees it by the volumes of the component modprobe-configuration alone)";
        let table = [
            (true, Loadable::No, State::Warning, "give CAP_NET_ADMIN to no pod"),
            (true, Loadable::Unknown, State::Warning, "give CAP_NET_ADMIN to no pod"),
            (true, Loadable::Yes, State::Warning, keep),
            (true, Loadable::Kept, State::Warning, "modprobe -r ifb"),
            (false, Loadable::Yes, State::Warning, keep),
            (false, Loadable::Kept, State::Ok, ""),
            (false, Loadable::No, State::Ok, ""),
            (false, Loadable::Unknown, State::Skipped, ""),
        ];
        for (has_driver, module, state, remedy) in table {
            let check = found(has_driver, module);
            assert_eq!(
                (check.state, check.detail.contains("send past")),
                (state, state != State::Ok),
                "{check:?}"
            );
            assert!(check.remedy.starts_with(remedy), "{check:?}");
        }
        // Nothing that is not there fails it.
        assert_ne!(ifb().state, State::Failed);
    }

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
        let less = "a newer kernel; until then netattach works with what is said behind each";
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
