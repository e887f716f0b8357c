//! `netattachctl uninstall`: removes netattach's pins from a node whose agent has ended for good.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::{CliError, PATIENCE};
use crate::bpf::{close_gates, pinned_attachments, remove_all_pins};
use crate::journal::{JournalError, Loaded, Store};
use crate::netlink;
use crate::rpc::client::{self, ClientError};
use crate::rpc::message::Request;

/// What to take away.
#[derive(Debug, Args)]
pub(super) struct Uninstall {
    /// Directory of the pinned programs and maps
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf/netattach")]
    bpffs: PathBuf,
    /// The agent's state directory, with its journal
    #[arg(long, value_name = "DIR", default_value = "/var/lib/netattach")]
    state_dir: PathBuf,
    /// Remove them even if pods are attached, or if that cannot be determined: devices of those pods keep their programs,
    /// which no agent maintains, until the pods end
    #[arg(long)]
    force: bool,
}

/// The outcome of `uninstall`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Removed {
    /// The directory of pinned programs and maps.
    bpffs: PathBuf,
    /// Whether there were any.
    removed: bool,
    /// Whether the check for attached pods was skipped; devices of attached pods keep their programs until the pods go.
    forced: bool,
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bpffs, removed, forced } = self;
        let root = bpffs.display();
        match (removed, forced) {
            (false, _) => writeln!(f, "Nothing is pinned at {root}."),
            (true, false) => writeln!(f, "Removed the programs and maps pinned at {root}."),
            (true, true) => writeln!(
                f,
                "Removed the programs and maps pinned at {root}. Devices of attached pods keep their programs until the pods end."
            ),
        }
    }
}

impl Uninstall {
    /// Removes the pins and returns what was removed.
    ///
    /// # Errors
    /// [`CliError::AgentRuns`] while an agent answers, [`CliError::Attached`] while pods are attached, or an error that
    /// names what could not be removed.
    pub(super) fn run(&self, socket: &Path) -> Result<Removed, CliError> {
        match client::call(socket, &Request::Status, PATIENCE) {
            Err(error) if error.is_agent_absent() => {}
            Err(error @ ClientError::Connect { .. }) => return Err(error.into()),
            // Any answer means that an agent serves this socket.
            _ => return Err(CliError::AgentRuns(socket.to_owned())),
        }
        let attached = if self.force { BTreeSet::new() } else { self.attached()? };
        if !attached.is_empty() {
            return Err(CliError::Attached(attached.into_iter().collect()));
        }
        // Close the gates first: programs that devices keep must not leave packets to a table that is gone.
        close_gates(&self.bpffs)?;
        if netlink::guard_exists()? {
            netlink::remove_guard()?;
        }
        if !netlink::nat::shape()?.is_empty() {
            netlink::nat::uninstall()?;
        }
        let removed = self.bpffs.exists();
        if removed {
            remove_all_pins(&self.bpffs)?;
        }
        Ok(Removed { bpffs: self.bpffs.clone(), removed, forced: self.force })
    }

    /// The pods in the journal's records; if there are none, the number of attachments in the maps.
    fn attached(&self) -> Result<BTreeSet<String>, CliError> {
        let mut attached = recorded(&self.state_dir.join("journal"))?;
        let pinned = pinned_attachments(&self.bpffs)?;
        if attached.is_empty() && pinned > 0 {
            attached.insert(format!(
                "{pinned} attachments in the maps at {}, of which {} has no record",
                self.bpffs.display(),
                self.state_dir.display()
            ));
        }
        Ok(attached)
    }
}

/// The pods that have records, or their containers. A damaged record counts too.
fn recorded(journal: &Path) -> Result<BTreeSet<String>, JournalError> {
    if !journal.exists() {
        return Ok(BTreeSet::new());
    }
    let store = Store::open(journal)?;
    let mut found = BTreeSet::new();
    for key in store.keys()? {
        let pod = match store.load(&key) {
            Ok(Loaded::Whole(record)) => record.plan.sandbox.pod.clone(),
            _ => None,
        };
        let container = || format!("container {}", key.container_id);
        found.insert(pod.map_or_else(container, |pod| pod.to_string()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_removed_is_said_in_a_line() {
        let said = |removed, forced| Removed { bpffs: "/pins".into(), removed, forced }.to_string();
        for forced in [false, true] {
            assert_eq!(said(false, forced), "Nothing is pinned at /pins.\n");
        }
        assert_eq!(said(true, false), "Removed the programs and maps pinned at /pins.\n");
        assert_eq!(
            said(true, true),
            "Removed the programs and maps pinned at /pins. Devices of attached pods keep their programs until the pods end.\n"
        );
    }
}
