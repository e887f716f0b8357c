//! `netattachctl uninstall`: takes netattach's pins off a node whose agent has ended for good.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{CliError, PATIENCE};
use crate::bpf::{close_gates, pinned_attachments, remove_all_pins};
use crate::journal::{JournalError, Loaded, Store};
use crate::netlink;
use crate::rpc::client::{self, ClientError};
use crate::rpc::message::Request;

/// What to take away.
#[derive(Debug, Args)]
pub(super) struct Uninstall {
    /// Where they are pinned
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf/netattach")]
    bpffs: PathBuf,
    /// Where the agent wrote down what is attached
    #[arg(long, value_name = "DIR", default_value = "/var/lib/netattach")]
    state_dir: PathBuf,
    /// Remove them although pods are attached, or although that cannot be told: devices of those pods keep their programs,
    /// which nobody looks after, until the pods go
    #[arg(long)]
    force: bool,
}

impl Uninstall {
    /// Removes the pins and says so.
    ///
    /// # Errors
    /// [`CliError::AgentRuns`] while an agent answers, [`CliError::Attached`] while pods are attached, and what could not be
    /// removed.
    pub(super) fn run(&self, socket: &Path) -> Result<String, CliError> {
        match client::call(socket, &Request::Status, PATIENCE) {
            Err(error) if error.is_nobody_there() => {}
            Err(error @ ClientError::Connect { .. }) => return Err(error.into()),
            // Whatever it answers, somebody serves that socket.
            _ => return Err(CliError::AgentRuns(socket.to_owned())),
        }
        let attached = if self.force { BTreeSet::new() } else { self.attached()? };
        if !attached.is_empty() {
            return Err(CliError::Attached(attached.into_iter().collect()));
        }
        // Devices that keep their programs are not to leave packets to a table that is gone.
        close_gates(&self.bpffs)?;
        if netlink::guard_is_there()? {
            netlink::remove_guard()?;
        }
        let root = self.bpffs.display();
        if !self.bpffs.exists() {
            return Ok(format!("Nothing is pinned at {root}.\n"));
        }
        remove_all_pins(&self.bpffs)?;
        let rest = if self.force {
            " Devices of pods that are still attached keep theirs until the pods go."
        } else {
            ""
        };
        Ok(format!("Removed the programs and maps pinned at {root}.{rest}\n"))
    }

    /// The pods that the records name, and attachments in the maps that are in no record.
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

/// Whom the records are of. A record that is not whole is of somebody too.
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
        found.insert(pod.map_or_else(container, |pod| format!("{}/{}", pod.namespace, pod.name)));
    }
    Ok(found)
}
