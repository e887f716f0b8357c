//! Derives from the settings how networks of pods are found and planned. The agent and `netattachctl
//! validate`, which predicts whether an agent accepts a network, share this code so that they agree.

use std::sync::Arc;

use super::{InvalidAnnotation, Settings, SettingsError};
use crate::attach::{FromNode, IntentReader, ReadNetworks};
use crate::nat::Reserved;
use crate::plan::resolve::Options;
use crate::source::Source;

impl Settings {
    /// Returns the options for planning attachments.
    pub(crate) fn options(&self) -> Options {
        Options {
            exec: self.delegation.exec.clone(),
            device_info_dir: self.device_info_dir.clone(),
            remembered: self.delegation.result_cache,
            enforce: self.delegation.enforce,
            port_mappings: self.unsupported_port_mappings,
            keep_cluster_routes: self.keep_cluster_routes(),
            in_cluster: self.kubernetes.enabled,
            pod_sources: self.pod_sources.clone(),
        }
    }

    /// Returns the ports of the node that are never forwarded to a pod.
    ///
    /// # Errors
    /// A setting is invalid.
    pub(crate) fn reserved_ports(&self) -> Result<Reserved, SettingsError> {
        let own = self.metrics.listen()?.map(|address| address.port());
        Ok(Reserved { own, set: self.reserved_host_ports.iter().copied().collect() })
    }

    /// Returns the reader that finds the networks of pods.
    ///
    /// # Errors
    /// A setting is invalid.
    pub(crate) fn intents(&self, source: Arc<dyn Source>) -> Result<IntentReader, SettingsError> {
        Ok(IntentReader {
            source,
            pod_wait: self.pod_wait(),
            default: self.default_network().map_err(SettingsError::from)?,
            from_node: Arc::new(FromNode::new(self.this_node()?, self.builtin.clone())),
            default_namespace: self.default_network_namespace.clone(),
            restrictions: self.restrictions()?,
            conf_dir: self.cni_conf_dir.clone(),
            ignore_invalid: self.invalid_annotation == InvalidAnnotation::Ignore,
            separate_pools: self.separate_pools,
            known: ReadNetworks::default(),
        })
    }
}
