//! `netattachctl uninstall`: removes from a node whose agent has ended for good what outlasts agents and pods: pins,
//! tables of the packet filter, routes to the pods of other nodes, bridges.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::{CliError, PATIENCE};
use crate::bpf::{close_gates, pinned_attachments, remove_all_pins};
use crate::builtin::routes::{METRIC, PROTOCOL};
use crate::journal::{JournalError, Loaded, Store};
use crate::netlink::{self, Handle, RouteState};
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
    /// Remove nothing, and say what would be removed
    #[arg(long)]
    dry_run: bool,
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
    /// Whether all of this is still there.
    dry_run: bool,
    /// What else was found, of this network namespace.
    #[serde(flatten)]
    found: Found,
}

/// What netattach has made on the node besides pins, for all pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct Found {
    /// Names of tables of nftables.
    tables: Vec<String>,
    /// Destinations of the routes to the pods of other nodes.
    routes: Vec<String>,
    /// Bridges without a port.
    bridges: Vec<String>,
    /// Bridges that something is still connected to. They stay.
    bridges_in_use: Vec<String>,
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bpffs, removed, forced, dry_run, found } = self;
        let root = bpffs.display();
        let done = if *dry_run { "Would remove" } else { "Removed" };
        match (removed, forced) {
            (false, _) => writeln!(f, "Nothing is pinned at {root}.")?,
            (true, false) => writeln!(f, "{done} the programs and maps pinned at {root}.")?,
            (true, true) => writeln!(
                f,
                "{done} the programs and maps pinned at {root}. Devices of attached pods keep their programs until the pods end."
            )?,
        }
        let Found { tables, routes, bridges, bridges_in_use } = found;
        let kinds = [
            ("tables of the packet filter", tables),
            ("routes to", routes),
            ("bridges without a port", bridges),
        ];
        for (kind, names) in kinds.into_iter().filter(|(_, names)| !names.is_empty()) {
            writeln!(f, "{done} {kind}: {}.", names.join(", "))?;
        }
        if !bridges_in_use.is_empty() {
            writeln!(f, "Bridges that something is connected to stay: {}.", bridges_in_use.join(", "))?;
        }
        Ok(())
    }
}

impl Found {
    /// Looks what is there.
    fn look(node: &mut Handle) -> Result<(Self, Vec<RouteState>), netlink::Error> {
        let mut found = Self::default();
        if netlink::guard_exists()? {
            found.tables.push(netlink::GUARD_TABLE.to_owned());
        }
        if !netlink::nat::shape()?.is_empty() {
            found.tables.push(netlink::nat::TABLE.to_owned());
        }
        let mut routes = node.routes()?;
        routes.retain(|route| (route.protocol, route.priority) == (PROTOCOL, METRIC));
        found.routes = routes.iter().map(|route| route.destination.to_string()).collect();
        for (bridge, ports) in node.own_bridges()? {
            if ports == 0 { &mut found.bridges } else { &mut found.bridges_in_use }.push(bridge.name);
        }
        Ok((found, routes))
    }

    /// Removes what was found.
    fn remove(&self, node: &mut Handle, routes: &[RouteState]) -> Result<(), netlink::Error> {
        if !self.tables.is_empty() {
            netlink::remove_guard()?;
            netlink::nat::uninstall()?;
        }
        node.ensure_routes_absent(routes)?;
        self.bridges.iter().try_for_each(|bridge| node.ensure_link_absent(bridge))
    }
}

impl Uninstall {
    /// Removes what is netattach's and returns what was removed.
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
        let mut node = Handle::open()?;
        let (found, routes) = Found::look(&mut node)?;
        let removed = self.bpffs.exists();
        if !self.dry_run {
            // Close the gates first: programs that devices keep must not leave packets to a table that is gone.
            close_gates(&self.bpffs)?;
            found.remove(&mut node, &routes)?;
            if removed {
                remove_all_pins(&self.bpffs)?;
            }
        }
        let bpffs = self.bpffs.clone();
        Ok(Removed { bpffs, removed, forced: self.force, dry_run: self.dry_run, found })
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
    use super::super::tests::is_pinned;
    use super::*;

    #[test]
    fn its_form_for_programs_is_pinned() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let found = Found {
            tables: names(&["netattach"]),
            routes: names(&["10.244.2.0/24"]),
            bridges: names(&["pods0"]),
            bridges_in_use: names(&["br7"]),
        };
        let bpffs = "/sys/fs/bpf/netattach".into();
        is_pinned("uninstall", &Removed { bpffs, removed: true, forced: false, dry_run: true, found });
    }

    #[test]
    fn what_was_removed_is_said_in_a_line() {
        let outcome = |removed, forced| Removed {
            bpffs: "/pins".into(),
            removed,
            forced,
            dry_run: false,
            found: Found::default(),
        };
        let said = |removed, forced| outcome(removed, forced).to_string();
        for forced in [false, true] {
            assert_eq!(said(false, forced), "Nothing is pinned at /pins.\n");
        }
        assert_eq!(said(true, false), "Removed the programs and maps pinned at /pins.\n");
        assert_eq!(
            said(true, true),
            "Removed the programs and maps pinned at /pins. Devices of attached pods keep their programs until the pods end.\n"
        );
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let found = Found {
            tables: names(&["netattach", "netattach-nat"]),
            routes: names(&["10.244.2.0/24", "fd00:2::/64"]),
            bridges: names(&["pods0"]),
            bridges_in_use: names(&["br7"]),
        };
        assert_eq!(
            Removed { dry_run: true, found, ..outcome(true, false) }.to_string(),
            "Would remove the programs and maps pinned at /pins.\n\
             Would remove tables of the packet filter: netattach, netattach-nat.\n\
             Would remove routes to: 10.244.2.0/24, fd00:2::/64.\n\
             Would remove bridges without a port: pods0.\n\
             Bridges that something is connected to stay: br7.\n"
        );
    }
}
