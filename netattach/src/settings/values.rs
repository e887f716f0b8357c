//! The values that the agent takes from the settings, where these are not the fields themselves.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{BpfLog, Delegation, EstablishedOnChange, Midstream, OtherMacvlans, Settings, SettingsError};
use crate::attach::{DefaultNetwork, InvalidDefaultNetwork};
use crate::bpf::{Detail, LogObject};
use crate::builtin::ThisNode;
use crate::enforce::node_defaults::NodeDefaults;
use crate::npwg::NetworkRef;
use crate::npwg::network::is_subdomain;
use crate::objects::access::{Isolation, Restrictions};
use crate::plan::cluster_routes::Keep;

/// Default limit of the memory of all executed plugins together, in MiB; a plugin takes about 10.
const PLUGIN_MEMORY: u64 = 256;

impl Settings {
    /// Returns the name of this node in the cluster: the setting, else the variable `NODE_NAME`, else the
    /// host's name in lower case, which is the kubelet's default.
    ///
    /// # Errors
    /// [`SettingsError::NodeName`].
    pub fn node_name(&self) -> Result<String, SettingsError> {
        let set = Some(self.kubernetes.node_name.clone()).filter(|name| !name.is_empty());
        let named = set.or_else(|| std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty()));
        let host = || rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase();
        let name = named.unwrap_or_else(host);
        if is_subdomain(&name) { Ok(name) } else { Err(SettingsError::NodeName(name)) }
    }

    /// Returns how long to wait for the agent that already serves this node to end. `None`: not at all.
    pub(crate) fn stand_by(&self) -> Option<Duration> {
        (self.stand_by_seconds > 0).then(|| Duration::from_secs(self.stand_by_seconds))
    }

    /// Returns how long a sandbox must be gone before it is detached without a DEL. `None`: it is never
    /// detached.
    pub fn collect_after(&self) -> Option<Duration> {
        (self.collect_after_seconds > 0).then(|| Duration::from_secs(self.collect_after_seconds))
    }

    /// Returns how long a pod without its networks is watched before it is repaired.
    pub fn repair_after(&self) -> Duration {
        Duration::from_secs(self.repair_after_seconds)
    }

    /// The container runtime's CRI socket. `None`: the runtime is not asked for its sandboxes.
    pub fn runtime_socket(&self) -> Option<PathBuf> {
        (!self.runtime_socket.as_os_str().is_empty()).then(|| self.runtime_socket.clone())
    }

    /// Returns the network that every pod gets.
    ///
    /// # Errors
    /// [`InvalidDefaultNetwork`].
    pub fn default_network(&self) -> Result<DefaultNetwork, InvalidDefaultNetwork> {
        self.default_network.parse()
    }

    /// Returns which routes stay on the cluster's interface when a pod's default route moves: as set; if
    /// unset, they stay if a cluster is the source.
    pub fn keep_cluster_routes(&self) -> Option<Keep> {
        let asks_cluster = self.kubernetes.enabled;
        let keep = Keep { cidrs: self.cluster_cidrs.clone(), asks_cluster };
        self.keep_cluster_routes.unwrap_or(asks_cluster).then_some(keep)
    }

    /// Whether NetworkPolicies are enforced on the pods' default networks: as set; if unset, they are
    /// enforced if the agent makes the default network, because no other software enforces them there.
    pub fn network_policy(&self) -> bool {
        self.network_policy.unwrap_or_else(|| self.default_network() == Ok(DefaultNetwork::Builtin))
    }

    /// Returns this node, and the source of the ranges of its pods.
    ///
    /// # Errors
    /// [`SettingsError::NodeName`], with a cluster as the source.
    pub fn this_node(&self) -> Result<ThisNode, SettingsError> {
        let name = self.kubernetes.enabled.then(|| self.node_name()).transpose()?;
        Ok(ThisNode { name, pod_cidrs: self.builtin.pod_cidrs.clone() })
    }

    /// Returns which namespaces may use which networks.
    ///
    /// # Errors
    /// [`SettingsError::DefaultNetwork`].
    pub fn restrictions(&self) -> Result<Restrictions, SettingsError> {
        let global_namespaces = self.global_namespaces.iter().cloned().collect();
        let default_network = match self.default_network()? {
            DefaultNetwork::Definition(network) => Some(network),
            DefaultNetwork::Name(name) => Some(NetworkRef::new(&self.default_network_namespace, name)),
            DefaultNetwork::Path(_) | DefaultNetwork::Builtin | DefaultNetwork::Chained => None,
        };
        let isolation = self.namespace_isolation.then_some(Isolation { global_namespaces });
        Ok(Restrictions { default_network, isolation })
    }

    /// The socket that the CNI executable and the command line connect to.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join("netattach.sock")
    }

    /// Returns the defaults for every attachment, except those that depend on the kernel.
    pub fn passage(&self) -> NodeDefaults {
        NodeDefaults {
            new_flows_per_second: self.new_flows_per_second,
            strict_connections: self.midstream == Midstream::Drop,
            keep_established: self.established_on_change == EstablishedOnChange::Keep,
            accept_icmp: self.accept_icmp,
            accept_icmpv6: self.accept_icmpv6,
            paced: false,
            fast_path: self.fast_path,
            xdp: self.xdp,
            strangers: self.other_macvlans == OtherMacvlans::Pass,
        }
    }

    /// Returns the BPF object that logs packets, if logging is enabled.
    ///
    /// # Errors
    /// [`SettingsError::BpfLogObject`].
    pub fn log_object(&self) -> Result<Option<LogObject>, SettingsError> {
        let detail = match self.bpf_log {
            BpfLog::Off => return Ok(None),
            BpfLog::Debug => Detail::Verdicts,
            BpfLog::Trace => Detail::Stages,
        };
        if self.bpf_log_object.as_os_str().is_empty() {
            return Err(SettingsError::BpfLogObject);
        }
        Ok(Some(LogObject { path: self.bpf_log_object.clone(), detail }))
    }

    /// Returns the only attachment whose packets are logged, as `NAMESPACE/POD/INTERFACE`.
    pub fn bpf_log_of(&self) -> Option<String> {
        (!self.bpf_log_of.is_empty()).then(|| self.bpf_log_of.clone())
    }

    /// How long an ADD waits for a pod that the source does not have.
    pub fn pod_wait(&self) -> Duration {
        Duration::from_secs(self.pod_wait_seconds)
    }

    /// How long one call of another plugin may take.
    pub fn plugin_timeout(&self) -> Duration {
        Duration::from_secs(self.delegation.timeout_seconds)
    }

    /// Returns the memory limit of all plugins together, in bytes; `None`: they have no control group of
    /// their own.
    pub fn plugin_memory(&self) -> Option<u64> {
        let mib = self.delegation.memory_limit_mib.unwrap_or(PLUGIN_MEMORY);
        (mib != 0).then_some(mib << 20)
    }
}

impl Delegation {
    /// Returns the root directory in which plugins are started, unless it is the agent's own.
    pub(crate) fn plugin_root(&self) -> Option<&Path> {
        Some(self.root.as_path()).filter(|root| self.names_root() && *root != Path::new("/"))
    }

    /// Whether the root directory of plugins is set explicitly.
    pub(crate) fn names_root(&self) -> bool {
        !self.root.as_os_str().is_empty()
    }
}
