//! Refuses settings with which no agent can run, by the path of the key.

use super::{CniConf, Repair, Settings, SettingsError};
use crate::attach::{DefaultNetwork, standalone};
use crate::builtin::InvalidSettings;
use crate::cni::identifier::check_network_name;
use crate::npwg::network::{is_label, is_subdomain};
use crate::plan::pod_sources::Permission;
use crate::rpc::shim::MAX_AGENT_WAIT;

/// Most permissions in `podSources`.
const MOST_PERMISSIONS: u64 = 256;

/// Most ports in `reservedHostPorts`.
const MOST_RESERVED_PORTS: u64 = 1024;

/// Most ranges in `clusterCIDRs`.
const MOST_CLUSTER_CIDRS: u64 = 64;

impl Settings {
    pub(super) fn validate(&self) -> Result<(), SettingsError> {
        self.check_source()?;
        let taint = &self.kubernetes.startup_taint;
        if !taint.is_empty() && !is_taint_key(taint) {
            return Err(SettingsError::StartupTaint(taint.clone()));
        }
        self.check_default_network()?;
        namespace("defaultNetworkNamespace".into(), &self.default_network_namespace)?;
        for (index, name) in self.global_namespaces.iter().enumerate() {
            namespace(format!("globalNamespaces[{index}]"), name)?;
        }
        if let Some((index, range)) =
            self.cluster_cidrs.iter().enumerate().find(|(_, net)| net.prefix_len() == 0)
        {
            return Err(SettingsError::WholeRange { index, range: *range });
        }
        let mistake = |(index, permission): (usize, &Permission)| {
            permission.problem().map(|problem| SettingsError::PodSources { index, problem })
        };
        if let Some(mistake) = self.pod_sources.iter().enumerate().find_map(mistake) {
            return Err(mistake);
        }
        self.cni_conf.validate()?;
        self.policy_options(self.restrictions()?)?;
        self.check_delegation()?;
        self.log_object()?;
        let of = self.bpf_log_of.split('/').filter(|part| !part.is_empty()).count();
        if !self.bpf_log_of.is_empty() && (of != 3 || self.bpf_log_of.split('/').count() != 3) {
            return Err(SettingsError::BpfLogOf(self.bpf_log_of.clone()));
        }
        self.check_numbers()?;
        if !self.runtime_socket.as_os_str().is_empty() && !self.runtime_socket.is_absolute() {
            return Err(SettingsError::RuntimeSocket(self.runtime_socket.clone()));
        }
        self.check_repair()?;
        self.metrics.listen()?;
        self.traces.endpoint()?;
        Ok(())
    }

    /// Refuses two sources of objects, and none.
    fn check_source(&self) -> Result<(), SettingsError> {
        let kubernetes = &self.kubernetes;
        match (self.source.as_os_str().is_empty(), kubernetes.enabled) {
            (_, false) if !kubernetes.kubeconfig.as_os_str().is_empty() => {
                Err(SettingsError::UnusedKubeconfig)
            }
            (true, false) => Err(SettingsError::NoSource),
            (false, true) => Err(SettingsError::TwoSources),
            (true, true) => self.node_name().map(drop),
            (false, false) => Ok(()),
        }
    }

    /// Refuses a default network that other settings contradict.
    fn check_default_network(&self) -> Result<(), SettingsError> {
        let default_network = self.default_network()?;
        self.builtin.validate()?;
        if default_network == DefaultNetwork::Chained
            && !self.cni_conf.dir.as_os_str().is_empty()
            && !self.cni_conf.remove
        {
            return Err(SettingsError::ChainedConf(self.cni_conf.dir.clone()));
        }
        if default_network == DefaultNetwork::Builtin
            && !self.kubernetes.enabled
            && self.builtin.pod_cidrs.is_empty()
        {
            return Err(InvalidSettings::NoRange.into());
        }
        Ok(())
    }

    /// Refuses settings about other plugins that have no effect.
    fn check_delegation(&self) -> Result<(), SettingsError> {
        let others =
            |(_, kind): &(usize, &String)| !standalone::built_in().any(|known| known == kind.as_str());
        if let Some((index, kind)) = self.delegation.exec.iter().enumerate().find(others) {
            return Err(SettingsError::NotBuiltIn { index, kind: kind.clone() });
        }
        if self.delegation.names_root() && !self.delegation.root.is_absolute() {
            return Err(SettingsError::Root(self.delegation.root.clone()));
        }
        Ok(())
    }

    /// Refuses numbers that are out of range.
    fn check_numbers(&self) -> Result<(), SettingsError> {
        let range = |key, value: u64, min, max| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(SettingsError::Range { key, value, min, max })
            }
        };
        range("clusterCIDRs", self.cluster_cidrs.len() as u64, 0, MOST_CLUSTER_CIDRS)?;
        range("podSources", self.pod_sources.len() as u64, 0, MOST_PERMISSIONS)?;
        range("reservedHostPorts", self.reserved_host_ports.len() as u64, 0, MOST_RESERVED_PORTS)?;
        range("maxAttachments", self.max_attachments.into(), 2, 65_534)?;
        range("standBySeconds", self.stand_by_seconds, 0, 86_400)?;
        range("kubernetes.watchSeconds", self.kubernetes.watch_seconds.into(), 1, 600)?;
        range("podWaitSeconds", self.pod_wait_seconds, 0, 60)?;
        range("cniConf.agentWaitSeconds", self.cni_conf.agent_wait_seconds, 0, MAX_AGENT_WAIT)?;
        range("collectAfterSeconds", self.collect_after_seconds, 0, 86_400)?;
        range("repairAfterSeconds", self.repair_after_seconds, 1, 86_400)?;
        range("parallelAdds", self.parallel_adds as u64, 1, 128)?;
        if let Some(limit) = self.delegation.memory_limit_mib.filter(|limit| *limit != 0) {
            range("delegation.memoryLimitMiB", limit, 16, 1 << 20)?;
        }
        range("delegation.timeoutSeconds", self.delegation.timeout_seconds, 1, 600)
    }

    /// Refuses repairs that cannot be carried out.
    fn check_repair(&self) -> Result<(), SettingsError> {
        let how = match self.repair {
            Repair::Report => return Ok(()),
            Repair::Attach => "attach",
            Repair::Evict => "evict",
        };
        if !self.kubernetes.enabled {
            return Err(SettingsError::Repair { how, needs: "kubernetes.enabled" });
        }
        if self.cni_conf.remove {
            return Err(SettingsError::Repair {
                how,
                needs: "cniConf.remove to be false: no new pod is netattach's",
            });
        }
        if self.repair == Repair::Attach && self.runtime_socket.as_os_str().is_empty() {
            return Err(SettingsError::Repair {
                how,
                needs: "runtimeSocket, which tells where a pod's namespace is",
            });
        }
        Ok(())
    }
}

impl CniConf {
    fn validate(&self) -> Result<(), SettingsError> {
        let stem = self.name.strip_suffix(".conflist").unwrap_or_default();
        if stem.is_empty() || self.name.contains(['/', '\0']) {
            return Err(SettingsError::ConfName(self.name.clone()));
        }
        if self.dir.is_relative() && !self.dir.as_os_str().is_empty() {
            return Err(SettingsError::ConfDir(self.dir.clone()));
        }
        if self.remove && self.dir.as_os_str().is_empty() {
            return Err(SettingsError::ConfRemove);
        }
        check_network_name(&self.network).map_err(SettingsError::ConfNetwork)
    }
}

/// Whether `text` is the key of a taint: a name of up to 63 characters, behind a subdomain and a slash if it has a
/// prefix.
fn is_taint_key(text: &str) -> bool {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name.as_bytes()),
        None => (None, text.as_bytes()),
    };
    let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    prefix.is_none_or(|prefix| prefix.len() <= 253 && is_subdomain(prefix))
        && name.len() <= 63
        && is_end(name.first())
        && is_end(name.last())
        && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

fn namespace(key: String, name: &str) -> Result<(), SettingsError> {
    if is_label(name) { Ok(()) } else { Err(SettingsError::Namespace { key, value: name.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_taints_are_told_from_what_no_node_has() {
        for key in ["netattach.dev/agent-not-ready", "example.com/Not_ready.1", "a", "node.cilium.io/x"] {
            assert!(is_taint_key(key), "{key}");
        }
        let long = "a".repeat(64);
        let wrong = [
            "",
            "/",
            "a/",
            "/a",
            "a/b/c",
            "A/b",
            "a/-b",
            "a/b:NoSchedule",
            "a/b=true:NoSchedule",
            "a b",
            long.as_str(),
        ];
        for key in wrong {
            assert!(!is_taint_key(key), "{key}");
        }
    }
}
