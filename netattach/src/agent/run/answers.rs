//! Builds the parts that requests are answered from.

use std::sync::Arc;

use super::AgentError;
use super::background::Background;
use super::start::Parts;
use crate::agent::cleanup::collector::Collector;
use crate::agent::health::Health;
use crate::agent::health::trouble::Troubles;
use crate::agent::monitoring::Monitoring;
use crate::agent::monitoring::http::Http;
use crate::agent::monitoring::metrics::Metrics;
use crate::agent::monitoring::traces::Traces;
use crate::agent::node_network::NodeNetwork;
use crate::agent::pods::missed::Repairs;
use crate::agent::report::Reporter;
use crate::agent::state::Outside;
use crate::attach::DefaultNetwork;
use crate::journal::JournalKey;
use crate::kubelet::PodResources;
use crate::observe::Observer;
use crate::rpc::message::Condition;
use crate::settings::unprobed;
use crate::settings::{Settings, SettingsError};

/// Returns the part that maintains the routes of the network that the agent makes, if it makes one.
pub(super) fn node_network(
    settings: &Settings,
    parts: &Parts,
) -> Result<Option<Arc<NodeNetwork>>, AgentError> {
    let Parts { source, engine, intents, .. } = parts;
    let default = settings.default_network().map_err(SettingsError::from)?;
    Ok((default == DefaultNetwork::Builtin).then(|| {
        Arc::new(NodeNetwork::new(Arc::clone(source), Arc::clone(engine), Arc::clone(&intents.from_node)))
    }))
}

/// Returns the part that answers queries about the state, and starts the checks for problems of objects.
pub(super) fn reporter(
    background: &mut Background,
    parts: &Parts,
    health: &Arc<Health>,
    observer: Arc<Observer>,
    settings: &Settings,
    node_network: Option<Arc<NodeNetwork>>,
) -> Reporter {
    let Parts { source, enforcer, engine, intents, .. } = parts;
    let troubles = Arc::new(Troubles::new(
        Arc::clone(source),
        Arc::clone(enforcer),
        Arc::clone(intents),
        Arc::clone(engine),
        settings.network_policy(),
        node_network,
    ));
    background.keep("checks of objects", Arc::clone(&troubles).keep_looking(source.changes()));
    Reporter::new(
        Arc::clone(source),
        Arc::clone(enforcer),
        Arc::clone(health),
        troubles,
        observer,
        settings.socket(),
    )
}

/// Returns the server of metrics and probes, if it is enabled.
pub(super) fn server(settings: &Settings) -> Result<Option<Arc<Http>>, AgentError> {
    let address = settings.metrics.listen()?;
    let is_in_pod = settings.kubernetes.enabled && settings.kubernetes.kubeconfig.as_os_str().is_empty();
    if is_in_pod && let Some(problem) = unprobed(address) {
        tracing::warn!("{problem}");
    }
    Ok(address.map(|address| Arc::new(Http::new(address, settings.metrics.of_attachments()))))
}

/// Returns the exporter of traces, if it is enabled.
pub(super) fn traces(background: &mut Background, settings: &Settings) -> Result<Option<Traces>, AgentError> {
    let endpoint = settings.traces.endpoint()?;
    Ok(endpoint.map(|endpoint| {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let (traces, sending) = Traces::to(endpoint, settings.node_name().unwrap_or(host));
        background.keep("traces", sending);
        traces
    }))
}

/// Returns the agent's connections to the rest of the node.
pub(super) fn outside(
    settings: &Settings,
    server: Option<Arc<Http>>,
    traces: Option<Traces>,
    metrics: Arc<Metrics>,
    no_group: Option<Condition>,
    left_alone: Vec<(JournalKey, String)>,
) -> Outside {
    Outside {
        collector: Collector::new(
            settings.state_dir.clone(),
            settings.collect_after(),
            settings.runtime_socket(),
        ),
        kubelet: PodResources::new(&settings.pod_resources_socket, &settings.device_checkpoint),
        repairs: Repairs::new(settings.repair, settings.repair_after()),
        monitoring: Monitoring::new(server, metrics, traces),
        no_group,
        left_alone,
    }
}
