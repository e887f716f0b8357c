//! `netattachctl uninstall`: removes from a node whose agent has ended for good what outlasts agents and
//! pods, and prints what is kept and why.
//!
//! First the configuration by which the runtime calls netattach is removed, so that no new pod waits for an
//! agent that will not come; then the state in the kernel (`kernel`), then the state on disk and the
//! executables (`files`).

mod files;
mod kernel;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use self::files::Files;
use self::kernel::Kernel;
use super::table::{self, Width};
use super::{CliError, PATIENCE, missing};
use crate::agent::own_existing;
use crate::bpf::{are_removable, close_gates, pinned_attachments, remove_all_pins};
use crate::ipam::Pool;
use crate::journal::{Loaded, Store};
use crate::netlink::Handle;
use crate::rpc::client::{self, ClientError};
use crate::rpc::message::Request;
use crate::rpc::pending;

/// What to take away.
#[derive(Debug, Args)]
pub(super) struct Uninstall {
    /// Directory of the pinned programs and maps
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf/netattach")]
    bpffs: PathBuf,
    /// The agent's state directory, with its journal
    #[arg(long, value_name = "DIR", default_value = "/var/lib/netattach")]
    state_dir: PathBuf,
    /// The container runtime's directory of configurations: what agents have written there is removed
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    cni_conf_dir: PathBuf,
    /// Remove netattach's executables from this directory, such as /opt/cni/bin. Plugins under names that others use stay
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Option<PathBuf>,
    /// Remove all of it even if pods are attached, or if that cannot be determined: devices of those pods keep their programs,
    /// which no agent maintains, until the pods end; macvlans, and VFs with representors, are no longer judged
    #[arg(long)]
    force: bool,
    /// Remove nothing, and say what would be removed
    #[arg(long)]
    dry_run: bool,
    /// Remove nothing, and fail with this text: for the chart's Job that stops `helm uninstall`
    #[arg(long, value_name = "WHY", hide = true)]
    refuse: Option<String>,
}

/// The outcome of `uninstall`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Removed {
    /// The directory of pinned programs and maps.
    bpffs: PathBuf,
    /// Whether there were any.
    removed: bool,
    /// Whether the check for attached pods was skipped; devices of attached pods keep their programs until the pods go.
    forced: bool,
    /// Whether this was a dry run, which removes nothing.
    dry_run: bool,
    /// Configurations for the container runtime.
    configurations: Vec<PathBuf>,
    /// Names of tables of nftables.
    tables: Vec<String>,
    /// Destinations of the routes to the pods of other nodes.
    routes: Vec<String>,
    /// Uplinks of the node, parents of macvlans and representors whose programs are removed: these devices
    /// outlast the pods.
    devices: Vec<String>,
    /// The node's own links on parents of pods.
    host_links: Vec<String>,
    /// Bridges without a port.
    bridges: Vec<String>,
    /// Bridges with ports. They are kept.
    bridges_in_use: Vec<String>,
    /// Journal, requests that waited for the agent, and its socket.
    state: Vec<PathBuf>,
    /// Executables.
    executables: Vec<PathBuf>,
    /// What is kept.
    stays: Vec<Stays>,
}

/// Something that is kept on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Stays {
    what: String,
    why: String,
}

impl Stays {
    fn new(what: impl ToString, why: impl Into<String>) -> Self {
        Self { what: what.to_string(), why: why.into() }
    }
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let root = self.bpffs.display();
        let done = if self.dry_run { "Would remove" } else { "Removed" };
        match (self.removed, self.forced) {
            (false, _) => writeln!(f, "Nothing is pinned at {root}.")?,
            (true, false) => writeln!(f, "{done} the programs and maps pinned at {root}.")?,
            (true, true) => writeln!(
                f,
                "{done} the programs and maps pinned at {root}. Devices of attached pods keep their programs until the pods end, but \
                 for parents of macvlans and representors of VFs: those pods are no longer judged."
            )?,
        }
        let paths = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect();
        let kinds: [(&str, Vec<String>); 8] = [
            ("configurations of the container runtime", paths(&self.configurations)),
            ("tables of the packet filter", self.tables.clone()),
            ("routes to", self.routes.clone()),
            ("programs on uplinks, parents of macvlans and representors", self.devices.clone()),
            ("the node's links on parents of pods", self.host_links.clone()),
            ("bridges without a port", self.bridges.clone()),
            ("state", paths(&self.state)),
            ("executables", paths(&self.executables)),
        ];
        for (kind, names) in kinds.into_iter().filter(|(_, names)| !names.is_empty()) {
            writeln!(f, "{done} {kind}: {}.", names.join(", "))?;
        }
        let mut reasons: Vec<&str> = Vec::new();
        for Stays { why, .. } in &self.stays {
            if reasons.contains(&why.as_str()) {
                continue;
            }
            reasons.push(why);
            let what = self.stays.iter().filter(|it| it.why == *why).map(|it| &it.what);
            writeln!(f, "Stays: {}: {why}.", missing::list(what))?;
        }
        Ok(())
    }
}

impl Removed {
    /// Returns the lines that describe it, no wider than those of tables.
    pub(super) fn text(&self, width: Width) -> String {
        table::sentences(&self.to_string(), width)
    }
}

impl Uninstall {
    /// Removes what is netattach's and returns what was removed.
    ///
    /// # Errors
    /// [`CliError::AgentRuns`] while an agent answers, [`CliError::Attached`] while pods are attached, or an error that
    /// names what could not be removed; [`CliError::Usage`] with `--refuse`.
    pub(super) fn run(&self, socket: &Path) -> Result<Removed, CliError> {
        if let Some(why) = &self.refuse {
            return Err(CliError::Usage(why.clone()));
        }
        match client::call::<super::Response>(socket, &Request::Status, PATIENCE) {
            Err(error) if error.is_agent_absent() => {}
            Err(error @ ClientError::Connect { .. }) => return Err(error.into()),
            // Any answer means that an agent serves this socket.
            _ => return Err(CliError::AgentRuns(socket.to_owned())),
        }
        // The lock prevents that an agent starts now, and shows whether one runs with another socket.
        let _state = own_existing("state directory", &self.state_dir)?;
        let _pins = own_existing("pins", &self.bpffs)?;
        let records =
            if self.force { Records::read(&self.state_dir).unwrap_or_default() } else { self.attached()? };
        let mut files = Files::default();
        files.look_for_configurations(&self.cni_conf_dir)?;
        let run = socket.parent().filter(|_| socket.file_name().is_some_and(|name| name == "netattach.sock"));
        files.look_for_state(&self.state_dir, run, records.needed());
        files.look_at_pools(&records.pools);
        if let Some(directory) = &self.cni_bin_dir {
            files.look_for_executables(directory)?;
        }
        let mut node = Handle::open()?;
        let kernel = Kernel::look(&mut node, &self.owner())?;
        let removed = are_removable(&self.bpffs)?;
        if !self.dry_run {
            files.remove_configurations()?;
            // Gates before tables: programs that stay on devices must not leave packets to a removed table.
            close_gates(&self.bpffs)?;
            kernel.remove(&mut node)?;
            if removed {
                remove_all_pins(&self.bpffs)?;
            }
            files.remove_rest()?;
        }
        let stays = kernel.stays().chain(files.stays).collect();
        Ok(Removed {
            bpffs: self.bpffs.clone(),
            removed,
            forced: self.force,
            dry_run: self.dry_run,
            configurations: files.configurations,
            routes: kernel.routes(),
            devices: kernel.devices(),
            tables: kernel.tables,
            host_links: kernel.host_links,
            bridges: kernel.bridges,
            bridges_in_use: kernel.bridges_in_use,
            state: files.state,
            executables: files.executables,
            stays,
        })
    }

    /// Returns the owner recorded in the agent's tables: its state directory, with symbolic links resolved.
    fn owner(&self) -> String {
        let path = std::fs::canonicalize(&self.state_dir);
        path.unwrap_or_else(|_| self.state_dir.clone()).to_string_lossy().into_owned()
    }

    /// Returns the records of the journal, if neither these nor the maps show an attached pod.
    fn attached(&self) -> Result<Records, CliError> {
        let records = Records::read(&self.state_dir)?;
        if !records.attached.is_empty() {
            return Err(CliError::Attached(records.attached.into_iter().collect()));
        }
        match pinned_attachments(&self.bpffs)? {
            0 => Ok(records),
            pinned => Err(CliError::Attached(vec![format!(
                "{pinned} attachments in the maps at {}, of which {} has no record",
                self.bpffs.display(),
                self.state_dir.display()
            )])),
        }
    }
}

/// The state directory's information about the node.
#[derive(Debug, Default)]
struct Records {
    /// The pods that have records, or their containers. A damaged record counts too.
    attached: BTreeSet<String>,
    /// DELs that no agent has carried out.
    waiting: usize,
    /// The pools from which leases were ever taken.
    pools: Vec<Pool>,
}

impl Records {
    fn read(state_dir: &Path) -> Result<Self, CliError> {
        let journal = state_dir.join("journal");
        let waiting = pending::list(state_dir)?.len();
        if !journal.exists() {
            return Ok(Self { waiting, ..Self::default() });
        }
        let store = Store::open(journal)?;
        let mut attached = BTreeSet::new();
        for key in store.keys()? {
            let pod = match store.load(&key) {
                Ok(Loaded::Whole(record)) => record.plan.sandbox.pod.clone(),
                _ => None,
            };
            let container = || format!("container {}", key.container_id);
            attached.insert(pod.map_or_else(container, |pod| pod.to_string()));
        }
        Ok(Self { attached, waiting, pools: store.pools() })
    }

    /// Returns what the state directory is still needed for.
    fn needed(&self) -> Option<String> {
        let Self { attached, waiting, .. } = self;
        match (attached.len(), waiting) {
            (0, 0) => None,
            (0, waiting) => Some(format!(
                "DELs that wait for an agent: {waiting}, of pods that another plugin may have attached"
            )),
            (pods, _) => Some(format!(
                "pods attached: {pods}; their records say how they are detached, which an agent that is installed again does"
            )),
        }
    }
}
