//! Control groups that runtimes make for containers, and leave behind when these are killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::traffic::eventually;

const HIERARCHIES: &str = "/sys/fs/cgroup";
/// A killed process stays in its group until its parent has reaped it.
const PATIENCE: Duration = Duration::from_secs(10);

/// The groups of that name: at the top of the one hierarchy, or of each.
pub(super) fn named(name: &str) -> Vec<PathBuf> {
    let top = Path::new(HIERARCHIES);
    let hierarchies = directories(top).into_iter().chain([top.to_owned()]);
    hierarchies.map(|hierarchy| hierarchy.join(name)).filter(|group| group.is_dir()).collect()
}

/// Removes these groups with everything in them.
pub(super) fn remove(name: &str) {
    let gone = eventually(PATIENCE, || {
        named(name).iter().for_each(|group| remove_tree(group));
        named(name).is_empty()
    });
    if !gone {
        eprintln!("control groups that cannot be removed: {:?}", named(name));
    }
}

/// From the inside out: only an empty group can be removed. Its files need not and cannot be.
fn remove_tree(group: &Path) {
    directories(group).iter().for_each(|inner| remove_tree(inner));
    // Success is checked afterwards.
    let _ = fs::remove_dir(group);
}

fn directories(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}
