//! The node's root directory, in which other plugins are started: there they find the node's programs,
//! libraries and files, which the agent's image lacks.
//!
//! The node's processes have other pids than in the agent's container, and plugins open namespaces by their
//! own pid. So plugins get the agent's `/proc`, mounted in the agent's own mount namespace only.
//!
//! Paths of leases in definitions are those of the agent's container too, except files of name servers,
//! which are read in the node's root directory where it is there.
//!
//! If the settings of a containerised agent do not say where plugins are started, the plugins of the
//! default network are reported as a problem: most of them lack files that they need, which would otherwise
//! show only with the first pod of each node.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::mount::mount_bind_recursive;

use super::privileges::{self, Unprivileged};
use crate::rpc::message::Condition;
use crate::settings::Delegation;

const PROC: &str = "/proc";

/// Plugins cannot be started in the root directory.
#[derive(Debug, thiserror::Error)]
pub enum UnfitRoot {
    /// A capability is missing.
    #[error(transparent)]
    Privileges(#[from] Unprivileged),
    /// The directory, or its `proc` directory, cannot be used.
    #[error(
        "{} cannot be prepared for plugins: delegation.root is where the node's root directory is mounted, as deploy/components/executed-plugins does",
        path.display()
    )]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Prepares a root directory for plugins.
///
/// # Errors
/// A capability is missing, or a required directory.
pub(in crate::agent) fn prepare(root: &Path) -> Result<(), UnfitRoot> {
    privileges::check_another_root()?;
    let proc = root.join(PROC.trim_start_matches('/'));
    let failed = |source| UnfitRoot::Directory { path: proc.clone(), source };
    // Compared by device, so that an agent that restarts in the same mount namespace does not mount again.
    let device = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.dev());
    if device(&proc).map_err(failed)? != device(Path::new(PROC)).map_err(failed)? {
        mount_bind_recursive(PROC, &proc).map_err(|errno| failed(errno.into()))?;
    }
    Ok(())
}

/// Whether plugins are started in a container's root directory without an explicit setting.
pub(in crate::agent) fn is_forgotten(settings: &Delegation) -> bool {
    !settings.names_root() && is_in_container()
}

/// Whether this process has another root directory than the node's.
fn is_in_container() -> bool {
    let root = |path: &str| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    is_another(std::process::id(), root("/"), root("/proc/1/root"))
}

/// Whether the root directories `own` and `of_first` differ. In a pid namespace of its own the agent is the
/// first process and can see no other root directory. A directory is `None` if it cannot be read.
fn is_another(process: u32, own: Option<(u64, u64)>, of_first: Option<(u64, u64)>) -> bool {
    process == 1 || own.zip(of_first).is_some_and(|(own, first)| own != first)
}

/// Returns the condition for a default network whose `plugins` are started in a container's root directory.
pub(in crate::agent) fn without_the_nodes_files(network: &str, plugins: &[String]) -> Option<Condition> {
    let names = plugins.join(", ");
    (!plugins.is_empty()).then(|| Condition {
        object: "plugins of the default network".to_owned(),
        problem: format!(
            "network {network} has {names} started in the agent's container, which has no files of the node but those that are \
             mounted for it: where it needs any, such as /run/flannel or /var/lib/calico, each ADD fails. Add \
             deploy/components/executed-plugins (helm: executedPlugins.enabled), or say delegation.root: / if it needs none"
        ),
    })
}

/// Files that each container has of its own, whatever the node has at these paths.
const OF_EACH_CONTAINER: [&str; 3] = ["/etc/resolv.conf", "/etc/hosts", "/etc/hostname"];

/// Returns why one of these paths, each with its key, leads to a file of the agent's container and not of
/// the node.
pub(in crate::agent) fn in_the_container(paths: &[(&'static str, PathBuf)]) -> Option<String> {
    if paths.is_empty() || !is_in_container() {
        return None;
    }
    let (key, path) = paths.iter().find(|(_, path)| is_of_container(path, mount_of))?;
    let remedy = match *key {
        "ipam.resolvConf" => {
            "add deploy/components/executed-plugins (helm: executedPlugins.enabled), with which the node's file \
             is read, or leave it out"
        }
        _ => {
            "leave it out, write a path below /var/lib/cni, or have the node's directory mounted there in the \
             agent's container"
        }
    };
    let path = path.display();
    Some(format!("{key} {path} leads to the agent's container and not to the node: {remedy}"))
}

/// Whether a path of a container leads to the container's own files: nothing of the node is mounted there.
/// `mount`: the number of the mount that a path is on, if it exists.
fn is_of_container(path: &Path, mount: impl Fn(&Path) -> Option<u64>) -> bool {
    if OF_EACH_CONTAINER.iter().any(|own| path == Path::new(own)) {
        return true;
    }
    let found = path.ancestors().find_map(&mount);
    found.is_some() && found == mount(Path::new("/"))
}

fn mount_of(path: &Path) -> Option<u64> {
    let found = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
    let has_it = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    has_it.then_some(found.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_a_container_are_told_from_those_of_the_node_by_what_is_mounted_there() {
        let mount = |path: &Path| match path.to_str().unwrap() {
            "/" | "/run" | "/etc" => Some(1),
            "/var/lib/cni" => Some(2),
            _ => None,
        };
        for path in ["/run/cni-ipam-state", "/etc/cni/resolv.conf", "/etc/resolv.conf", "/var/lib/other"] {
            assert!(is_of_container(Path::new(path), mount), "{path}");
        }
        assert!(!is_of_container(Path::new("/var/lib/cni/networks"), mount));
        // The kernel does not number mounts.
        assert!(!is_of_container(Path::new("/run/a"), |_| None));
    }

    #[test]
    fn a_container_is_known_by_its_first_process_or_by_its_root_directory() {
        let (node, image) = (Some((1, 2)), Some((9, 2)));
        // Started by systemd, which has the same root directory even if the unit has its own mounts.
        assert!(!is_another(700, node, node));
        // The only process of a pod.
        assert!(is_another(1, image, image));
        // In a pod with hostPID, or a unit with RootDirectory.
        assert!(is_another(700, image, node));
        assert!(!is_another(700, image, None));
        assert!(!is_another(700, None, node));
    }

    #[test]
    fn plugins_that_may_lack_the_nodes_files_are_named_with_both_ways_out() {
        assert_eq!(without_the_nodes_files("cbr0", &[]), None);
        let row = without_the_nodes_files("cbr0", &["flannel".to_owned()]).unwrap();
        assert_eq!(row.object, "plugins of the default network");
        assert_eq!(
            row.problem,
            "network cbr0 has flannel started in the agent's container, which has no files of the node but those that are \
             mounted for it: where it needs any, such as /run/flannel or /var/lib/calico, each ADD fails. Add \
             deploy/components/executed-plugins (helm: executedPlugins.enabled), or say delegation.root: / if it needs none"
        );
    }

    #[test]
    fn settings_that_name_a_root_directory_have_not_forgotten_it() {
        for root in ["/", "/host"] {
            assert!(!is_forgotten(&Delegation { root: root.into(), ..Delegation::default() }), "{root}");
        }
    }
}
