//! The control group in which plugins run, separate from the agent: their total memory is limited, and if a plugin
//! exceeds the limit, the kernel kills it instead of the agent.
//!
//! The agent creates it inside of its own group, which has to be delegated to the agent: by systemd (`Delegate=yes`),
//! or as the group of a container. A cgroup v2 group can have either processes or child groups with limits, so the
//! agent first moves into a leaf:
//!
//! ```text
//! its own group
//! |- agent      the agent
//! `- plugins    every plugin, and what it leaves behind
//! ```
//!
//! Both stay until the agent's own group is removed, with its service or its container. See cgroups(7) and
//! <https://systemd.io/CGROUP_DELEGATION>.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, getxattr, open};
use rustix::mount::{MountFlags, mount_remount};

/// The leaf that contains the agent.
const AGENT: &str = "agent";
/// The group of the plugins.
const PLUGINS: &str = "plugins";
/// The extended attributes by which systemd marks a delegated group.
const MARKS: [&str; 2] = ["user.delegate", "trusted.delegate"];

/// A group that plugins are started in.
#[derive(Debug)]
pub struct PluginGroup {
    directory: OwnedFd,
    path: PathBuf,
    /// Memory limit of all plugins together, in bytes.
    limit: u64,
}

/// Why plugins run in the agent's own group.
#[derive(Debug, thiserror::Error)]
pub enum NoGroup {
    /// The node has no cgroup v2 hierarchy.
    #[error(
        "the node has no control groups of version 2 at this process: boot it with systemd.unified_cgroup_hierarchy=1"
    )]
    NotUnified,
    /// The group is managed by another program.
    #[error(
        "the control group {} is not the agent's to divide: run it as a service with Delegate=yes, or in a container",
        path.display()
    )]
    NotDelegated {
        /// The group.
        path: PathBuf,
    },
    /// The group contains other processes.
    #[error("the control group {} has {others} processes besides the agent: start the agent in one of its own", path.display())]
    Shared {
        /// The group.
        path: PathBuf,
        /// How many.
        others: usize,
    },
    /// The memory controller is not available in the group.
    #[error("memory is not limited in the control group {}: have its parent enable the controller `memory`", path.display())]
    NoMemory {
        /// The group.
        path: PathBuf,
    },
    /// A file of the group cannot be used.
    #[error("use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl PluginGroup {
    /// Creates the group, or takes over that of an earlier agent, and limits the memory of all plugins to `limit`
    /// bytes, but at most to half of the limit of the agent's own group.
    ///
    /// # Errors
    /// [`NoGroup`]; nothing was changed then.
    pub fn prepare(limit: u64) -> Result<Self, NoGroup> {
        let own =
            own_group(&read(Path::new("/proc/self/cgroup"))?, &read(Path::new("/proc/self/mountinfo"))?)
                .ok_or(NoGroup::NotUnified)?;
        let base = match own.directory.parent() {
            Some(parent) if own.directory.ends_with(AGENT) && parent.join(PLUGINS).is_dir() => {
                parent.to_owned()
            }
            _ => {
                divide(&own)?;
                own.directory
            }
        };
        let path = base.join(PLUGINS);
        make(&path)?;
        let limit = limit.min(most_of(&base).map_or(u64::MAX, |most| most / 2));
        write(&path.join("memory.max"), &limit.to_string())?;
        // The file does not exist without swap.
        let _ = fs::write(path.join("memory.swap.max"), "0");
        Self::existing(path, limit)
    }

    /// Opens an existing group that was limited to `limit` bytes.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn existing(path: PathBuf, limit: u64) -> Result<Self, NoGroup> {
        match open(&path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(directory) => Ok(Self { directory, path, limit }),
            Err(errno) => Err(NoGroup::File { path, source: errno.into() }),
        }
    }

    /// Memory limit of all plugins together, in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Path of the group's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The descriptor with which a process is started in the group.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Returns how many processes of the group the OOM killer has killed; 0 if unknown.
    pub(super) fn ended_for_memory(&self) -> u64 {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        count.unwrap_or(0)
    }
}

/// Moves this process into a leaf of its group and enables the memory controller. Reverts its changes on failure.
fn divide(own: &Own) -> Result<(), NoGroup> {
    let base = &own.directory;
    let refused = || NoGroup::NotDelegated { path: base.clone() };
    // Only the root group has no type, and the root is never delegated.
    if !base.join("cgroup.type").exists() || !is_delegated(base) {
        return Err(refused());
    }
    if !read(&base.join("cgroup.controllers"))?.split_whitespace().any(|it| it == "memory") {
        return Err(NoGroup::NoMemory { path: base.clone() });
    }
    let own_id = std::process::id().to_string();
    let others = read(&base.join("cgroup.procs"))?.lines().filter(|line| *line != own_id).count();
    if others > 0 {
        return Err(NoGroup::Shared { path: base.clone(), others });
    }
    let leaf = base.join(AGENT);
    make_writable(own, &leaf)?;
    let divided = write(&leaf.join("cgroup.procs"), "0")
        .and_then(|()| write(&base.join("cgroup.subtree_control"), "+memory"));
    if divided.is_err() {
        let _ = fs::write(base.join("cgroup.procs"), "0");
        let _ = fs::remove_dir(&leaf);
    }
    divided
}

/// Creates the leaf. A runtime mounts the file system read-only in a container; the agent can remount it in its own
/// mount namespace, as for `/proc/sys`.
fn make_writable(own: &Own, leaf: &Path) -> Result<(), NoGroup> {
    match make(leaf) {
        Err(NoGroup::File { source, .. }) if source.kind() == ErrorKind::ReadOnlyFilesystem => {
            let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            mount_remount(&own.mount, flags, "")
                .map_err(|errno| NoGroup::File { path: own.mount.clone(), source: errno.into() })?;
            make(leaf)
        }
        made => made,
    }
}

/// Whether no other program manages the group: systemd marks those of its units that are delegated.
fn is_delegated(group: &Path) -> bool {
    let is_unit = group
        .file_name()
        .and_then(|name| Path::new(name).extension())
        .is_some_and(|kind| ["service", "scope", "slice"].iter().any(|unit| kind == *unit));
    let is_marked = |mark: &str| {
        let mut value = [0; 8];
        getxattr(group, mark, &mut value).is_ok_and(|length| value.get(..length) == Some(b"1"))
    };
    !is_unit || MARKS.into_iter().any(is_marked)
}

/// Returns the memory limit of a group, if there is one.
fn most_of(group: &Path) -> Option<u64> {
    fs::read_to_string(group.join("memory.max")).ok()?.trim().parse().ok()
}

fn make(directory: &Path) -> Result<(), NoGroup> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(NoGroup::File { path: directory.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

fn read(path: &Path) -> Result<String, NoGroup> {
    fs::read_to_string(path).map_err(|source| NoGroup::File { path: path.to_owned(), source })
}

fn write(path: &Path, text: &str) -> Result<(), NoGroup> {
    // Not created: a file of a group exists or is not available.
    let written = File::options()
        .write(true)
        .open(path)
        .and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()));
    written.map_err(|source| NoGroup::File { path: path.to_owned(), source })
}

/// The group of this process in the cgroup v2 hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct Own {
    directory: PathBuf,
    /// Mount point of its file system.
    mount: PathBuf,
}

/// Parses `/proc/self/cgroup` and `/proc/self/mountinfo`; `None`: the group's directory is not reachable.
fn own_group(groups: &str, mounts: &str) -> Option<Own> {
    let group = Path::new(groups.lines().find_map(|line| line.strip_prefix("0::"))?);
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        if kind.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut fields = place.split(' ').skip(3);
        let (root, mount) = (fields.next()?, PathBuf::from(fields.next()?));
        // A path with `..` belongs to another cgroup namespace.
        let below = group.strip_prefix(root).ok().filter(|below| !below.starts_with(".."))?;
        let directory = if below.as_os_str().is_empty() { mount.clone() } else { mount.join(below) };
        Some(Own { directory, mount })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found_where_its_hierarchy_is_mounted() {
        let mount = |root: &str, at: &str| {
            format!(
                "24 1 0:5 / /proc rw - proc proc rw\n\
                 31 24 0:27 {root} {at} ro,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup rw\n"
            )
        };
        let own =
            |directory: &str, mount: &str| Some(Own { directory: directory.into(), mount: mount.into() });
        let usual = mount("/", "/sys/fs/cgroup");
        let table = [
            (
                "0::/system.slice/netattach.service\n",
                usual.clone(),
                own("/sys/fs/cgroup/system.slice/netattach.service", "/sys/fs/cgroup"),
            ),
            // In the namespace of a container.
            ("0::/\n", usual.clone(), own("/sys/fs/cgroup", "/sys/fs/cgroup")),
            // A part of the hierarchy is mounted.
            ("0::/a/b/c\n", mount("/a", "/groups"), own("/groups/b/c", "/groups")),
            ("0::/b\n", mount("/a", "/groups"), None),
            ("0::/../b\n", usual.clone(), None),
            // Version 1 beside it, and alone.
            (
                "4:memory:/x\n0::/y\n",
                mount("/", "/sys/fs/cgroup/unified"),
                own("/sys/fs/cgroup/unified/y", "/sys/fs/cgroup/unified"),
            ),
            ("4:memory:/x\n", usual, None),
            ("0::/y\n", String::new(), None),
        ];
        for (groups, mounts, expected) in table {
            assert_eq!(own_group(groups, &mounts), expected, "{groups}");
        }
    }

    #[test]
    fn a_unit_of_systemd_is_divided_only_where_it_says_so() {
        let directory = tempfile::tempdir().unwrap();
        for (name, delegated) in
            [("netattach.service", false), ("a.scope", false), ("a.slice", false), ("pod-1", true)]
        {
            let group = directory.path().join(name);
            fs::create_dir(&group).unwrap();
            assert_eq!(is_delegated(&group), delegated, "{name}");
        }
    }
}
