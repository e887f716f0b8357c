//! Checks whether the agent's directories are writable: their file systems have room, and permit writing by
//! this process.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, StatVfs, StatVfsMountFlags, accessat, statvfs};
use rustix::io::Errno;

use super::super::missing::list;
use super::Check;
use crate::durable::MAKE_OWN;
use crate::ipam::Pool;
use crate::settings::Settings;

const NAME: &str = "disk";

/// The directory to which the agent's pod copies the executables. The agent and the doctor's pod see it
/// read-only.
const EXECUTABLES: (&str, &str) = ("of the executables", "/opt/cni/bin");

const MAKE_ROOM: &str =
    "free space there, or mount it writable: until then no pod is attached, and DELs are repeated";

/// Blocks and inodes of a file system that count as none: a record takes one of each.
const TOO_FEW: u64 = 16;

/// Checks each directory that the agent writes to, including the pools from which it has taken addresses.
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
    let shown = |key: &str, path: &Path, problem: String| format!("{} ({key}) {problem}", path.display());
    let full = all.iter().filter_map(|(key, path)| Some(shown(key, path, problem(path)?)));
    let full: Vec<String> = full.collect();
    let (what, copied) = EXECUTABLES;
    let all_written = all.iter().map(|(key, path)| (*key, path.as_path())).chain([(what, Path::new(copied))]);
    let owned = all_written.filter_map(|(key, path)| Some(shown(key, path, of_another(path)?)));
    let owned: Vec<String> = owned.collect();
    let remedies = [(&full, MAKE_ROOM), (&owned, MAKE_OWN)];
    let remedies: Vec<&str> =
        remedies.into_iter().filter(|(found, _)| !found.is_empty()).map(|(_, remedy)| remedy).collect();
    if remedies.is_empty() {
        let mut keys: Vec<&str> = all.iter().map(|(key, _)| *key).collect();
        keys.dedup();
        let keys = keys.join(", ");
        return Check::ok(NAME, format!("{keys} are on file systems that take files, and may be written to"));
    }
    Check::failed(NAME, list([full, owned].concat()), remedies.join("; "))
}

/// Returns the nearest existing directory: a missing one would be created there.
fn nearest(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

/// Returns what prevents writing files there.
fn problem(path: &Path) -> Option<String> {
    match statvfs(nearest(path)) {
        Ok(found) => of_file_system(&found).map(str::to_owned),
        Err(errno) => Some(format!("cannot be examined: {errno}")),
    }
}

/// Returns the problem if this process may not write there; root may not either, without
/// `CAP_DAC_OVERRIDE`, if the directory belongs to another user. Does not report read-only mounts.
fn of_another(path: &Path) -> Option<String> {
    let there = nearest(path);
    let asked = accessat(CWD, there, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS);
    let found = there.metadata().ok()?;
    refused(asked, there, found.uid(), found.mode())
}

fn refused(asked: Result<(), Errno>, there: &Path, owner: u32, mode: u32) -> Option<String> {
    let there = there.display();
    let said = format!("may not be written to: {there} is of user {owner}, mode {:04o}", mode & 0o7777);
    (asked == Err(Errno::ACCESS)).then_some(said)
}

fn of_file_system(found: &StatVfs) -> Option<&'static str> {
    if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Some("is on a file system that is mounted read-only");
    }
    if found.f_bavail < TOO_FEW {
        return Some("is on a file system that is full");
    }
    // File systems without a fixed number of inodes report zero inodes.
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
    fn a_directory_that_is_another_users_is_told_of_with_its_owner_and_a_read_only_mount_is_not() {
        let of = |asked| refused(asked, Path::new("/opt/cni"), 1234, 0o40755);
        let expected = "may not be written to: /opt/cni is of user 1234, mode 0755";
        assert_eq!(of(Err(Errno::ACCESS)).as_deref(), Some(expected));
        assert_eq!(of(Err(Errno::ROFS)), None);
        assert_eq!(of(Ok(())), None);
    }

    #[test]
    fn a_directory_on_a_read_only_file_system_is_named_with_its_key_and_the_remedy() {
        // The kernel's settings are on a file system that accepts no files.
        let mut settings = Settings::default();
        settings.state_dir = "/proc/nowhere".into();
        let found =
            check(&settings, &[Pool::directory("/proc/leases", "shop"), Pool::directory("/tmp", "shop")]);
        assert_eq!(found.state, super::super::State::Failed, "{found:?}");
        let full = "is on a file system that is full";
        let expected = format!("/proc/nowhere (stateDir) {full}, /proc/leases/shop (ipam.dataDir) {full}");
        // A user other than root may not write to further directories.
        assert!(found.detail.starts_with(&expected), "{found:?}");
        assert!(found.remedy.starts_with("free space there"), "{found:?}");
    }
}
