//! What the agent may do in the cluster.

use super::Check;
use crate::agent::{self, Settings};

/// Asks the API server for each right that the agent needs, with the agent's own identity.
pub(super) fn check(settings: &Settings) -> Check {
    const NAME: &str = "cluster access";
    if !settings.kubernetes.enabled {
        return Check::skipped(NAME, "objects come from a directory of manifests");
    }
    match agent::missing_rights(settings) {
        Ok(missing) if missing.is_empty() => {
            Check::ok(NAME, "the agent has every right that its settings need")
        }
        Ok(missing) => Check::failed(
            NAME,
            missing.join("; "),
            "apply deploy/base/rbac.yaml with the components that the settings need (evict, startup-taint), or add these rules \
             to the ClusterRole of the agent's service account",
        ),
        Err(error) => Check::failed(
            NAME,
            error,
            "see that the API server can be reached from this node, and that the token or certificate is valid",
        ),
    }
}
