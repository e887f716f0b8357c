//! Opens the source of objects that the settings choose: a directory of manifests, or a cluster.

use std::sync::Arc;

use super::AgentError;
use crate::agent::monitoring::metrics::Metrics;
use crate::attach::DefaultNetwork;
use crate::error_chain::Chain;
use crate::kube::{Access, Cluster, ClusterOptions, NodesWanted, Watcher as ApiWatcher};
use crate::publish::{Publish, StatusFiles};
use crate::settings::{Repair, Settings, SettingsError};
use crate::source::{Files, Source};

/// The source of objects, the publisher of statuses, and the cluster if it is both.
pub(super) type Sources = (Arc<dyn Source>, Arc<dyn Publish>, Option<Arc<Cluster>>);

/// Opens the source that the settings name. Nothing is written to a cluster until the journal has been read.
pub(in crate::agent) fn open(settings: &Settings, metrics: &Arc<Metrics>) -> Result<Sources, AgentError> {
    let kubernetes = &settings.kubernetes;
    if !kubernetes.enabled {
        let files = Files::open(&settings.source, Default::default())?;
        let statuses = StatusFiles::new(settings.run_dir.join("network-status"));
        return Ok((Arc::new(files), Arc::new(statuses), None));
    }
    let cluster = Arc::new(Cluster::start(ClusterOptions {
        watcher: Some(Arc::clone(metrics) as Arc<dyn ApiWatcher>),
        ..cluster_options(settings)?
    })?);
    Ok((Arc::clone(&cluster) as Arc<dyn Source>, cluster.publisher(), Some(cluster)))
}

/// Returns how the cluster is followed, without reporting its requests to metrics.
fn cluster_options(settings: &Settings) -> Result<ClusterOptions, AgentError> {
    let kubernetes = &settings.kubernetes;
    let kubeconfig = Some(kubernetes.kubeconfig.clone()).filter(|path| !path.as_os_str().is_empty());
    Ok(ClusterOptions {
        access: kubeconfig.map_or(Access::InCluster, Access::Kubeconfig),
        node: settings.node_name()?,
        network_policies: settings.network_policy(),
        default_network: settings.restrictions()?.default_network,
        ranges: settings.keep_cluster_routes().is_some(),
        nodes: nodes_wanted(&settings.default_network().map_err(SettingsError::from)?),
        watch_seconds: kubernetes.watch_seconds,
        startup_taint: !kubernetes.startup_taint.is_empty(),
        eviction: settings.repair == Repair::Evict,
        watcher: None,
    })
}

/// Returns the rights in the cluster that an agent with these settings lacks, each with the rule that
/// grants it.
///
/// # Errors
/// Why the server could not be asked, on one line.
pub fn missing_rights(settings: &Settings) -> Result<Vec<String>, String> {
    let options = cluster_options(settings).map_err(|error| Chain(&error).to_string())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let missing = runtime.block_on(crate::kube::missing_rights(options));
    let missing = missing.map_err(|error| Chain(&error).to_string())?;
    Ok(missing.into_iter().map(|it| format!("{}: {}", it.object, it.problem)).collect())
}

/// Returns which objects of the cluster's nodes are needed.
fn nodes_wanted(default: &DefaultNetwork) -> NodesWanted {
    match default {
        DefaultNetwork::Builtin => NodesWanted::All,
        DefaultNetwork::Definition(_) | DefaultNetwork::Name(_) => NodesWanted::OwnAndWhetherOthers,
        DefaultNetwork::Path(_) | DefaultNetwork::Chained => NodesWanted::Own,
    }
}
