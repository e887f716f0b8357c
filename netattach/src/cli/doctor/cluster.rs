//! Checks the agent's rights in the cluster.

use super::Check;
use crate::agent;
use crate::settings::Settings;

/// Asks the API server for each right that the agent needs, with the agent's own identity. If the agent `is_apart`,
/// its service account is in its pod, where this process cannot read it.
pub(super) fn check(settings: &Settings, is_apart: bool) -> Check {
    const NAME: &str = "cluster access";
    if !settings.kubernetes.enabled {
        return Check::skipped(NAME, "objects come from a directory of manifests");
    }
    if is_apart && settings.kubernetes.kubeconfig.as_os_str().is_empty() {
        return Check::skipped(
            NAME,
            "the agent's service account is in its pod: kubectl netattach doctor --node NODE asks by it, as does the Job of \
             deploy/doctor",
        );
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

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn the_service_account_of_a_pod_is_not_looked_for_outside_of_it() {
        let mut settings = Settings::default();
        settings.kubernetes.enabled = true;
        let found = check(&settings, true);
        assert_eq!(found.state, State::Skipped, "{found:?}");
        assert!(found.detail.starts_with("the agent's service account is in its pod: "), "{found:?}");
        // A kubeconfig can be used by every process that can read it.
        settings.kubernetes.kubeconfig = "/nowhere/kubeconfig".into();
        assert_eq!(check(&settings, true).state, State::Failed);
        assert_eq!(check(&Settings::default(), true).detail, "objects come from a directory of manifests");
    }
}
