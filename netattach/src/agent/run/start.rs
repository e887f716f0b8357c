//! Starts the parts of the agent, each after those that it depends on. Requests are served only afterwards.

use std::path::Path;
use std::sync::Arc;

use super::AgentError;
use super::owned::{self, Owned};
use super::sources::{self, Sources};
use super::stand_by;
use crate::agent::cni_conf::CniConf;
use crate::agent::monitoring::metrics::{LastCounts, Metrics};
use crate::agent::node::plugin_group;
use crate::agent::node_network;
use crate::agent::request::publication::Statuses;
use crate::attach::{
    AttachError, Bridges, DefaultNetwork, Devices, Engine, Forwarding, HostAccesses, Inheritance,
    IntentReader, Node, Occupied, Recovery,
};
use crate::bpf::probe::Requirement;
use crate::bpf::{self, BpfError, Dataplane};
use crate::delegate::{self, Caller, Delegate, Orphan, PluginGroup, ResultCache, end_orphans};
use crate::enforce::Enforce;
use crate::enforce::enforcer::Enforcer;
use crate::error_chain::Chain;
use crate::firewall::Firewall;
use crate::hooks::{AttachModes, choose_all};
use crate::ipam::{self, dhcp};
use crate::journal::Store;
use crate::kube::Cluster;
use crate::nat::Nat;
use crate::netlink::{Handle, KnownLinks, LOOPBACK};
use crate::rpc::message::Condition;
use crate::rpc::pending::{self, Pending};
use crate::settings::{Settings, SettingsError, StatusWrites};
use crate::source::Source;

/// How messages name the directory of pins.
const PINS: &str = "pins in";

/// State that exists before the first request is served.
pub(super) struct Started {
    pub(super) parts: Parts,
    pub(super) recovery: Recovery,
    pub(super) pending: Vec<Pending>,
    pub(super) statuses: Statuses,
    pub(super) conf: Option<CniConf>,
    /// Identifies the plugins that this agent runs.
    pub(super) owner: String,
    /// The lock of the pins.
    pub(super) pins: Option<Owned>,
    /// Why executed plugins have no control group, if they should have one.
    pub(super) no_group: Option<Condition>,
}

/// The parts that requests and background tasks share.
pub(super) struct Parts {
    pub(super) source: Arc<dyn Source>,
    pub(super) cluster: Option<Arc<Cluster>>,
    pub(super) enforcer: Arc<Enforcer>,
    pub(super) engine: Arc<Engine>,
    pub(super) intents: Arc<IntentReader>,
}

/// Starts all parts. Waits only for the kernel and the disk. `sources`: already opened sources.
pub(super) fn start(
    settings: &Settings,
    metrics: &Arc<Metrics>,
    sources: Option<Sources>,
) -> Result<Started, AgentError> {
    let (source, publisher, cluster) = match sources {
        Some(sources) => sources,
        None => sources::open(settings, metrics)?,
    };
    let lock_pins = || owned::lock(PINS, &settings.bpffs, stand_by::letting_go(settings));
    // If nothing is pinned yet, there are no pins of another agent to lock.
    let mut pins = settings.bpffs.exists().then(lock_pins).transpose()?;
    let enforcer = enforcer(settings, &source)?;
    if pins.is_none() {
        pins = Some(lock_pins()?);
    }
    let journal = Store::open(settings.state_dir.join("journal"))?;
    let owner = owner(settings);
    let (group, no_group) = plugin_group::prepare(settings);
    let engine = engine(settings, journal, owner.clone(), &enforcer, metrics, group)?;
    let intents = Arc::new(settings.intents(Arc::clone(&source))?);
    // Ends orphaned plugins before work that they may still be doing is undone, and before a container gets
    // resources that they may still be releasing.
    for Orphan { pid, command, container_id, gone } in end_orphans(&owner) {
        tracing::warn!(pid, command, container_id, gone, "killed a plugin that an earlier agent had started");
    }
    let recovery = adopt(&engine)?;
    engine.give_back_unknown_leases()?;
    engine.withdraw_lost_leases();
    if intents.default != DefaultNetwork::Builtin
        && let Err(error) = node_network::remove_routes(&engine)
    {
        tracing::warn!(error = %Chain(&error), "cannot remove routes of the builtin network, which is no longer configured");
    }
    let required = settings.kubernetes.enabled && settings.kubernetes.status == StatusWrites::Required;
    let statuses = Statuses::new(publisher, settings.network_status, required);
    if let Err(error) = statuses.publish_again(&engine, &recovery) {
        tracing::warn!(error = %Chain(&error), "network-status not updated");
    }
    let conf = CniConf::of(settings)?;
    let pending = pending::list(&settings.state_dir)?;
    let parts = Parts { source, cluster, enforcer, engine, intents };
    Ok(Started { parts, recovery, pending, statuses, conf, owner, pins, no_group })
}

/// The mark that identifies the agent's plugins: its state directory, which no two agents share.
fn owner(settings: &Settings) -> String {
    let path = std::fs::canonicalize(&settings.state_dir);
    path.unwrap_or_else(|_| settings.state_dir.clone()).to_string_lossy().into_owned()
}

/// The pins and the capacities that the settings name.
pub(in crate::agent) fn dataplane(settings: &Settings) -> Result<bpf::Config, SettingsError> {
    Ok(bpf::Config {
        max_attachments: settings.max_attachments,
        log: settings.log_object()?,
        ..bpf::Config::new(settings.bpffs.clone())
    })
}

/// Loads or adopts the dataplane.
fn enforcer(settings: &Settings, source: &Arc<dyn Source>) -> Result<Arc<Enforcer>, AgentError> {
    let opened = Dataplane::open(&dataplane(settings)?);
    let dataplane = opened.map_err(|source| no_dataplane(source, &bpf::probe::requirements()))?;
    let options = settings.policy_options(settings.restrictions()?).map_err(SettingsError::from)?;
    let modes = attach_modes(settings)?;
    let (passage, demand) = (settings.passage(), settings.unenforceable);
    let owned = (dataplane, owner(settings));
    Ok(Arc::new(Enforcer::new(owned, Arc::clone(source), options, passage, modes, demand)?))
}

/// Returns why there is no dataplane: missing kernel features say more than the error that they caused.
fn no_dataplane(source: BpfError, requirements: &[Requirement]) -> AgentError {
    match bpf::probe::lacking(requirements) {
        lacks if lacks.is_empty() => source.into(),
        lacks => {
            let release = rustix::system::uname().release().to_string_lossy().into_owned();
            AgentError::Kernel { release, lacks, source: Box::new(source) }
        }
    }
}

/// Builds the engine that carries out the plans in the journal.
fn engine(
    settings: &Settings,
    journal: Store,
    owner: String,
    enforcer: &Arc<Enforcer>,
    metrics: &Arc<Metrics>,
    group: Option<Arc<PluginGroup>>,
) -> Result<Arc<Engine>, AgentError> {
    let root = settings.delegation.plugin_root().map(Path::to_path_buf);
    let dhcp = dhcp::Leases::open(&settings.state_dir.join("dhcp"))?;
    let node = Node {
        leases: ipam::Leases::renewing(dhcp).with_root(root.clone()),
        nat: Some(Nat::new(&owner).reserving(settings.reserved_ports()?)),
        firewall: Some(Firewall::new(&owner)),
        delegate: Delegate {
            search: settings.cni_bin_dirs.clone(),
            timeout: settings.plugin_timeout(),
            caller: Caller::Agent { name: owner, group },
            root,
            watcher: Some(Arc::clone(metrics) as Arc<dyn delegate::Watcher>),
        },
        cache: ResultCache::new(&settings.delegation.cache_dir),
        bridges: Bridges::default(),
        occupied: Occupied::default(),
        host_accesses: HostAccesses::default(),
        devices: Devices::default(),
        records: true,
        enforcer: Some(Arc::clone(enforcer) as Arc<dyn Enforce>),
        links: Some(KnownLinks::open().map_err(AgentError::Links)?),
        forwarding: Forwarding::default(),
        announces_late: true,
        departures: Some(Arc::new(LastCounts::of(Arc::clone(metrics), Arc::clone(enforcer)))),
    };
    let inheritance = Inheritance::new(&settings.multus_state_dir);
    let (limit, repeated) = (settings.max_attachments, settings.repeated_add);
    Ok(Arc::new(Engine::new(node, journal, limit, settings.options(), inheritance, repeated)?))
}

/// Adopts existing attachments, and finds interrupted operations.
fn adopt(engine: &Engine) -> Result<Recovery, AttachError> {
    let recovery = engine.adopt()?;
    tracing::info!(adopted = recovery.adopted, unfinished = recovery.unfinished.len(), "journal read");
    for damaged in &recovery.damaged {
        tracing::error!(record = damaged, "damaged record; its pod keeps running");
    }
    for (key, error) in &recovery.left_alone {
        let record = format!("{}@{}", key.container_id, key.ifname);
        tracing::error!(record, error, "not recovered; DEL will try again");
    }
    for error in &recovery.unenforced {
        tracing::error!(error, "not taken over by the dataplane; it is tried again");
    }
    Ok(recovery)
}

/// Warns of pools that are on another file system than the journal. May hang where such a file system does, so the
/// agent does not wait for it.
pub(super) fn warn_of_pools(engine: &Engine) {
    let elsewhere = engine.pools_elsewhere();
    if let Some(first) = elsewhere.first() {
        let (pools, first) = (elsewhere.len(), first.display());
        tracing::warn!(
            pools, %first,
            "pools are on another file system than the journal: a loss of power may leave addresses taken; \
             put ipam.dataDir and stateDir on one"
        );
    }
}

/// How programs are attached: as the settings require, as far as the kernel supports it.
pub(in crate::agent) fn attach_modes(settings: &Settings) -> Result<AttachModes, AgentError> {
    let has_clsact = Handle::open().and_then(|mut node| node.has_clsact()).map_err(AgentError::Clsact)?;
    Ok(choose_all(settings.attach, has_clsact, bpf::probe::has_tcx(LOOPBACK)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_lacks_is_said_before_where_that_was_noticed() {
        let row = |name, needed, present| Requirement { name, needed, purpose: "", since: "5.8", present };
        let unknown = || Err(std::io::Error::other("unknown"));
        let said =
            |rows: &[Requirement]| Chain(&no_dataplane(BpfError::NotBpffs("/a".into()), rows)).to_string();
        let noticed = "/a is not on a BPF filesystem: run `mount -t bpf bpf /sys/fs/bpf`";
        let enough =
            [row("map lpm_trie", true, Ok(true)), row("BTF", false, Ok(false)), row("xdp", true, unknown())];
        assert_eq!(said(&enough), format!("set up the dataplane: {noticed}"));
        let [trie, btf, xdp] = enough;
        let lacking =
            [trie, row("map ringbuf", true, Ok(false)), btf, row("helper jiffies64", true, Ok(false)), xdp];
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        assert_eq!(
            said(&lacking),
            format!(
                "kernel {release} lacks map ringbuf, helper jiffies64, without which no program can be loaded: use a newer one \
                 (docs/supported.md has those that are tested): {noticed}"
            )
        );
    }
}
