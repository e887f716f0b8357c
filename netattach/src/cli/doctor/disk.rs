//! Whether what the agent writes can be written: its directories are on file systems that take files.

use std::path::{Path, PathBuf};

use rustix::fs::{StatVfs, StatVfsMountFlags, statvfs};

use super::super::missing::list;
use super::Check;
use crate::agent::Settings;
use crate::ipam::Pool;

const NAME: &str = "disk";

/// Blocks and inodes of a file system that count as none: a record takes one of each.
const TOO_FEW: u64 = 16;

/// Looks at each directory that the agent writes to, those of the pools that it has taken addresses from among them.
pub(super) fn check(settings: &Settings, pools: &[Pool]) -> Check {
    let set = &settings.cni_conf.dir;
    let cni_conf = (!set.as_os_str().is_empty()).then(|| ("cniConf.dir", set.clone()));
    let state = [("stateDir", settings.state_dir.clone()), ("runDir", settings.run_dir.clone())];
    let of_plugins = [
        ("delegation.cacheDir", settings.delegation.cache_dir.clone()),
        ("deviceInfoDir", settings.device_info_dir.clone()),
    ];
    let pools = pools.iter().map(|pool| ("ipam.dataDir", pool.path()));
    let all: Vec<(&str, PathBuf)> =
        state.into_iter().chain(of_plugins).chain(cni_conf).chain(pools).collect();
    let problems: Vec<String> = all
        .iter()
        .filter_map(|(key, path)| Some(format!("{} ({key}) {}", path.display(), problem(path)?)))
        .collect();
    if problems.is_empty() {
        let mut keys: Vec<&str> = all.iter().map(|(key, _)| *key).collect();
        keys.dedup();
        return Check::ok(NAME, format!("{} are on file systems that take files", keys.join(", ")));
    }
    Check::failed(
        NAME,
        list(&problems),
        "free space there, or mount it writable: until then no pod is attached, and DELs are repeated",
    )
}

/// What keeps files from being written there. A directory that does not exist is made in the nearest that does.
fn problem(path: &Path) -> Option<String> {
    let there = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match statvfs(there) {
        Ok(found) => of_file_system(&found).map(str::to_owned),
        Err(errno) => Some(format!("cannot be examined: {errno}")),
    }
}

fn of_file_system(found: &StatVfs) -> Option<&'static str> {
    if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Some("is on a file system that is mounted read-only");
    }
    if found.f_bavail < TOO_FEW {
        return Some("is on a file system that is full");
    }
    // File systems without a fixed number of inodes say that they have none.
    (found.f_files > 0 && found.f_favail < TOO_FEW).then_some("is on a file system that has no inodes left")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_system(blocks: u64, files: u64, free_files: u64, flags: StatVfsMountFlags) -> StatVfs {
        let mut found = statvfs("/").unwrap();
        (found.f_bavail, found.f_files, found.f_favail, found.f_flag) = (blocks, files, free_files, flags);
        found
    }

    #[test]
    fn a_file_system_takes_files_while_it_is_writable_and_has_room() {
        let writable = StatVfsMountFlags::empty();
        let table = [
            (file_system(1000, 1000, 1000, writable), None),
            (file_system(1000, 0, 0, writable), None),
            (
                file_system(1000, 1000, 1000, StatVfsMountFlags::RDONLY),
                Some("is on a file system that is mounted read-only"),
            ),
            (file_system(3, 1000, 1000, writable), Some("is on a file system that is full")),
            (file_system(1000, 1000, 3, writable), Some("is on a file system that has no inodes left")),
        ];
        for (found, expected) in table {
            assert_eq!(of_file_system(&found), expected);
        }
    }

    #[test]
    fn a_directory_on_a_read_only_file_system_is_named_with_its_key_and_the_remedy() {
        // The kernel's own settings are on one that takes no files.
        let mut settings = Settings::default();
        settings.state_dir = "/proc/nowhere".into();
        let found =
            check(&settings, &[Pool::directory("/proc/leases", "shop"), Pool::directory("/tmp", "shop")]);
        assert_eq!(found.state, super::super::State::Failed, "{found:?}");
        let full = "is on a file system that is full";
        let expected = format!("/proc/nowhere (stateDir) {full}, /proc/leases/shop (ipam.dataDir) {full}");
        assert_eq!(found.detail, expected);
        assert!(found.remedy.starts_with("free space there"), "{found:?}");
    }
}
