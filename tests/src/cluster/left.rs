//! The leftovers on the node of a [`Site`].

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::site::Site;
use crate::snapshot::Network;

/// The directories of netattach's files on a node.
const PLACES: [&str; 8] = [
    "/opt/cni",
    "/etc/cni",
    "/var/lib/cni",
    "/var/lib/netattach",
    "/run/netattach",
    "/run/netns",
    "/sys/fs/bpf/netattach",
    "/var/run/k8s.cni.cncf.io",
];
/// Files that are not removed: docs/remove.md lists the parts of netattach that stay.
const STAYS: [&str; 4] = [
    "/var/lib/cni/networks/",
    "/var/lib/netattach/journal/",
    // containerd sends another DEL when the kubelet makes it forget a sandbox, up to minutes later.
    "/var/lib/netattach/pending/",
    "/run/netattach/netattach.sock.lock",
];

/// The operator's view of the node: everything that could be left there.
#[derive(Debug, PartialEq, Eq)]
pub struct Left {
    links: BTreeSet<String>,
    files: BTreeSet<PathBuf>,
}

impl Left {
    /// Looks at the node. Called by a thread that has its mounts.
    ///
    /// # Errors
    /// Its links cannot be listed.
    pub fn of(site: &Site) -> Result<Self> {
        let network = Network::of(&site.worker.node().namespace)?;
        let mut files = BTreeSet::new();
        PLACES.into_iter().for_each(|place| list(Path::new(place), &mut files));
        Ok(Self { links: network.links.into_keys().collect(), files })
    }

    /// Returns the links and files of the node that did not exist then, except documented files that stay.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn added(&self, site: &Site) -> Result<(Vec<String>, Vec<String>)> {
        let after = Self::of(site)?;
        let links = after.links.difference(&self.links).cloned().collect();
        let files = after.files.difference(&self.files).map(|file| file.display().to_string());
        let stays = |file: &String| STAYS.iter().any(|place| file.starts_with(place));
        Ok((links, files.filter(|file| !stays(file)).collect()))
    }
}

fn list(directory: &Path, files: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => list(&entry.path(), files),
            false => drop(files.insert(entry.path())),
        }
    }
}
