//! The control group of executed plugins.

use std::sync::Arc;

use crate::delegate::PluginGroup;
use crate::error_chain::Chain;
use crate::rpc::message::Condition;
use crate::settings::Settings;

/// Creates the group, if plugins are to have one. If that is not possible, they run in the agent's own
/// group, which is a problem to report if the settings ask for a group.
pub(in crate::agent) fn prepare(settings: &Settings) -> (Option<Arc<PluginGroup>>, Option<Condition>) {
    let Some(limit) = settings.plugin_memory() else { return (None, None) };
    match PluginGroup::prepare(limit) {
        Ok(group) => {
            let (path, mib) = (group.path().display(), group.limit() >> 20);
            tracing::info!(group = %path, mib, "executed plugins have a control group of their own");
            (Some(Arc::new(group)), None)
        }
        Err(error) => {
            let problem = format!(
                "they run in that of the agent, so one that takes all its memory ends the agent: {}; or set \
                 delegation.memoryLimitMiB: 0",
                Chain(&error)
            );
            tracing::debug!(problem, "no control group of executed plugins");
            let is_asked_for = settings.delegation.memory_limit_mib.is_some();
            let object = "control group of executed plugins".to_owned();
            (None, is_asked_for.then_some(Condition { object, problem }))
        }
    }
}
