//! Whether a pod could be given the default network, without giving it to one.

use std::collections::BTreeMap;

use super::apply::check_plugins;
use super::engine::Engine;
use super::{AttachError, intent::Network};
use crate::cni;
use crate::plan::Sandbox;
use crate::plan::resolve::{Intent, resolve};

/// The container of the rehearsal, which nobody ever has.
const NOBODY: &str = "rehearsal";

impl Engine {
    /// Whether ADD could give the network to a pod now, as far as the node can tell by looking: its configuration makes
    /// a plan, and every plugin of that plan is installed.
    ///
    /// # Errors
    /// What ADD would fail with.
    pub fn rehearse(&self, default: Network) -> Result<(), AttachError> {
        let variables =
            [("COMMAND", "ADD"), ("CONTAINERID", NOBODY), ("NETNS", "/"), ("IFNAME", "eth0"), ("PATH", "/")];
        let environment: BTreeMap<String, String> =
            variables.map(|(name, value)| (format!("CNI_{name}"), value.to_owned())).into();
        let call = format!(
            "{{\"cniVersion\":\"{}\",\"name\":\"{NOBODY}\",\"type\":\"netattach\"}}",
            cni::Version::LATEST
        );
        let request = cni::Request::parse(&environment, call.as_bytes())?;
        let sandbox = Sandbox {
            container_id: NOBODY.to_owned(),
            ifname: request.ifname.clone(),
            netns: String::new(),
            netns_id: self.own,
            cni_args: String::new(),
            cni_path: Vec::new(),
            config_name: request.name.clone(),
            pod: None,
        };
        let intent =
            Intent { default, default_selection: None, selections: Vec::new(), warnings: Vec::new() };
        let plan = resolve(sandbox, &request, &intent, &self.options, None)?;
        check_plugins(&self.node, &plan)
    }
}
