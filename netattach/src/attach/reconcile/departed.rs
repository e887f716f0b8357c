//! Sandboxes that no runtime will ask to detach: their namespace is gone, or their DEL failed and is not retried.
//!
//! A sandbox has departed if its path no longer leads to its namespace, its links on the node, which are deleted with
//! the namespace, are gone, and no process is in the namespace. If one of these cannot be determined, the sandbox has
//! not departed.
//!
//! The kernel gives a new namespace the lowest free inode number, so the next namespace at a path often has the number
//! of the former one. The cookie tells the two apart. It is asked for once for each file that the kernel makes for a
//! namespace ([`Recognised`]), as that takes several system calls.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use crate::attach::AttachError;
use crate::attach::engine::Engine;
use crate::attach::registry::Attached;
use crate::journal::{JournalKey, Loaded, RecordState};
use crate::netlink::{Handle, LinkState};
use crate::netns::{self, Inhabited, Netns, NetnsError, Since};
use crate::plan::{self, Sandbox};
use crate::step::{Interface, Output};
use crate::sync::{Mutex, locked};

impl Engine {
    /// Returns the attached sandboxes that have departed. Costs one file access for each sandbox that has not.
    ///
    /// # Errors
    /// The node's links or processes cannot be listed.
    pub fn departed(&self) -> Result<Vec<Arc<Attached>>, AttachError> {
        let mut all = self.registry.all();
        self.recognised.keep_only(&all);
        all.retain(|attached| self.registry.goes_by_itself(attached));
        self.departed_of(all, || inhabited().map(Arc::new))
    }

    /// Whether this sandbox is still attached unchanged, and has departed. `processes` lists the processes of the
    /// node; called only if needed.
    ///
    /// # Errors
    /// As [`Engine::departed`].
    pub fn has_departed(
        &self,
        attached: &Arc<Attached>,
        processes: impl FnOnce() -> Result<Arc<Inhabited>, AttachError>,
    ) -> Result<bool, AttachError> {
        Ok(self.is_same(attached) && !self.departed_of(vec![Arc::clone(attached)], processes)?.is_empty())
    }

    /// Whether one of these processes of the node is in the sandbox's namespace. `None`: none is, but the list of
    /// processes is incomplete.
    pub fn is_lived_in(&self, attached: &Attached, inhabited: &Inhabited) -> Option<bool> {
        let is_seen = sees_in(inhabited, attached);
        (is_seen || inhabited.complete).then_some(is_seen)
    }

    /// Whether this sandbox has been neither detached nor attached again since.
    pub fn is_same(&self, attached: &Arc<Attached>) -> bool {
        self.registry.get(&attached.key).is_some_and(|now| Arc::ptr_eq(&now, attached))
    }

    /// Returns the records of unfinished operations whose sandbox is gone: the record is of an earlier boot, or the
    /// namespace does not exist. Damaged records are left to an operator.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub fn abandoned(&self) -> Result<Vec<JournalKey>, AttachError> {
        let mut abandoned = self.journal.keys()?;
        abandoned.retain(|key| {
            if self.registry.get(key).is_some() {
                return false;
            }
            // A record that cannot be read is kept.
            let Ok(Loaded::Whole(record)) = self.journal.peek(key) else { return false };
            let is_attached = record.state == RecordState::Attached && !record.is_of_earlier_boot();
            let is_gone = record.is_of_earlier_boot()
                || found(&record.plan.sandbox, record.netns_cookie, |_| false) == Found::Absent;
            !is_attached && is_gone && record.check_whole().is_ok()
        });
        Ok(abandoned)
    }

    fn departed_of(
        &self,
        mut suspects: Vec<Arc<Attached>>,
        processes: impl FnOnce() -> Result<Arc<Inhabited>, AttachError>,
    ) -> Result<Vec<Arc<Attached>>, AttachError> {
        suspects.retain(|attached| self.recognised.is_absent(attached));
        if suspects.is_empty() {
            return Ok(suspects);
        }
        let inhabited = processes()?;
        let mut node = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
        let links = node.links().map_err(|error| AttachError::Open(error.into()))?;
        let mut departed = Vec::new();
        for attached in suspects {
            let is_lived_in = sees_in(&inhabited, &attached);
            let all = self.registry.with_dynamic(&attached.key);
            let ends = Ends::of(&all);
            // A dynamic attachment whose sandbox was detached is known by that.
            let outlives_one = attached.plan.dynamic.is_some() && self.registry.goes_by_itself(&attached);
            let is_known = inhabited.complete || ends.is_any() || outlives_one;
            if !is_lived_in && !ends.are_there(&links) && is_known {
                departed.push(attached);
            }
        }
        Ok(departed)
    }
}

fn sees_in(inhabited: &Inhabited, attached: &Attached) -> bool {
    let path = inhabited.paths.get(&attached.plan.sandbox.netns_id);
    path.is_some_and(|path| may_be_of(path, attached))
}

/// Whether the namespace at this path may be the sandbox's, which had the same inode number: the kernel reuses the
/// number of a namespace that has ended. Uses the cookie in memory: a record that was damaged later must not prevent
/// checks of the others.
fn may_be_of(path: &Path, attached: &Attached) -> bool {
    let Some(cookie) = attached.netns_cookie else { return true };
    match Netns::open(path).and_then(|netns| netns.cookie()) {
        Ok(found) => found.is_none_or(|found| found == cookie),
        // The process has ended meanwhile, or its namespace cannot be entered: the next check decides.
        Err(_) => true,
    }
}

/// Lists the namespaces of all processes of the node.
///
/// # Errors
/// They cannot be listed.
pub fn inhabited() -> Result<Inhabited, AttachError> {
    Ok(Inhabited::look().map_err(|source| NetnsError::Open { path: "/proc".into(), source })?)
}

/// The namespaces that were found to be those of their sandboxes, by their cookies.
#[derive(Debug, Default)]
pub(in crate::attach) struct Recognised(Mutex<HashMap<JournalKey, Since>>);

impl Recognised {
    /// Whether the sandbox's path certainly does not lead to its namespace.
    fn is_absent(&self, attached: &Attached) -> bool {
        let is_known = |since| locked(&self.0).get(&attached.key) == Some(&since);
        match found(&attached.plan.sandbox, attached.netns_cookie, is_known) {
            Found::Recognised(since) => {
                locked(&self.0).insert(attached.key.clone(), since);
                false
            }
            Found::Absent => true,
            Found::Perhaps => false,
        }
    }

    /// Forgets sandboxes that are not attached any more.
    fn keep_only(&self, attached: &[Arc<Attached>]) {
        let mut recognised = locked(&self.0);
        if recognised.len() > attached.len() {
            let keys: HashSet<&JournalKey> = attached.iter().map(|attached| &attached.key).collect();
            recognised.retain(|key, _| keys.contains(key));
        }
    }
}

/// What a sandbox's path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Certainly not its namespace.
    Absent,
    /// Its namespace, by the cookie.
    Recognised(Since),
    /// A namespace with its inode number that was recognised before or has no known cookie; or nothing can be told.
    Perhaps,
}

/// Looks where the sandbox's path leads to. `is_known`: whether the namespace was recognised before.
fn found(sandbox: &Sandbox, cookie: Option<u64>, is_known: impl Fn(Since) -> bool) -> Found {
    let Ok(at) = netns::found_at(Path::new(&sandbox.netns), sandbox.netns_id) else { return Found::Perhaps };
    match (at, cookie) {
        (None, _) => Found::Absent,
        (Some(since), Some(_)) if !is_known(since) => {
            match Netns::of(&sandbox.netns, sandbox.netns_id, cookie) {
                Ok(Some(_)) => Found::Recognised(since),
                Ok(None) => Found::Absent,
                Err(_) => Found::Perhaps,
            }
        }
        (Some(_), _) => Found::Perhaps,
    }
}

/// The links on the node that end with a sandbox's namespace.
#[derive(Debug, Default)]
struct Ends<'a> {
    groups: HashSet<u32>,
    hosts: Vec<&'a Interface>,
}

impl<'a> Ends<'a> {
    fn of(attached: &'a [Arc<Attached>]) -> Self {
        let mut ends = Self::default();
        for attached in attached {
            ends.groups.insert(plan::link_group(&attached.key.container_id, &attached.key.ifname));
            ends.hosts.extend(attached.outputs.values().filter_map(|output| match output {
                Output::Link { host, .. } | Output::Device { host, .. } => host.as_ref(),
                _ => None,
            }));
        }
        ends
    }

    /// Whether the sandbox had such a link.
    fn is_any(&self) -> bool {
        !self.hosts.is_empty()
    }

    fn are_there(&self, links: &[LinkState]) -> bool {
        links.iter().any(|link| {
            let is_host = |host: &&Interface| host.name == link.name && host.index == link.index;
            self.groups.contains(&link.group) || self.hosts.iter().any(is_host)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use serde_json::json;

    use super::*;
    use crate::attach::rig;

    /// Needs root, like the agent.
    #[test]
    fn another_namespace_at_the_path_is_not_the_sandboxs_though_it_has_its_number() {
        let netns = Netns::private().unwrap();
        // Before Linux 5.14 a namespace has none.
        let Some(cookie) = netns.cookie().unwrap() else { return };
        let with = |netns_cookie: Option<u64>| {
            let mut attached = Arc::into_inner(rig::attached("a", &json!(null))).unwrap();
            attached.plan.sandbox.netns = format!("/proc/self/fd/{}", netns.as_fd().as_raw_fd());
            attached.plan.sandbox.netns_id = netns.id();
            Arc::new(Attached { netns_cookie, ..attached })
        };
        let recognised = Recognised::default();
        let absent = |netns_cookie: Option<u64>| recognised.is_absent(&with(netns_cookie));
        assert_eq!([Some(cookie + 1), None].map(absent), [true, false]);
        assert_eq!(locked(&recognised.0).len(), 0);
        assert!(!absent(Some(cookie)));
        assert_eq!(locked(&recognised.0).len(), 1);
        // It is the same file, so nobody enters the namespace again.
        assert!(!absent(Some(cookie + 1)));
        recognised.keep_only(&[]);
        assert_eq!(locked(&recognised.0).len(), 0);
        let attached = with(None);
        let sandbox = &attached.plan.sandbox;
        let (own, other) = (Some(cookie), Some(cookie + 1));
        let is_absent = |cookie: Option<u64>| found(sandbox, cookie, |_| false) == Found::Absent;
        assert_eq!([own, other].map(is_absent), [false, true]);
    }
}
