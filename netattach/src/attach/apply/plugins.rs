//! Calls of other plugins, and what is looked up about their interfaces.

use std::os::fd::AsFd;
use std::path::PathBuf;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::{Executor, interface, tuning};
use crate::attach::addresses::holder::Address;
use crate::attach::addresses::in_use::check_mac_is_free;
use crate::attach::{AttachError, Doing, Node, StepError};
use crate::cni::{CniArgs, CniError, Command, code};
use crate::delegate::{self, Call, DelegateError};
use crate::ipam::Asked;
use crate::plan::hook_kind::{self, FoundDevice};
use crate::plan::{AttachmentPlan, Plan, Sandbox, result};
use crate::spec::Tune;
use crate::step::{Delegate, MadeBefore, Output, Printed, Role, Step, StepRef};
use crate::waits;

impl Executor<'_> {
    pub(super) fn delegate(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
        delegate: &Delegate,
    ) -> Result<Output, StepError> {
        let unreadable =
            |source| StepError::Plugin(PluginError::Result { plugin: delegate.plugin.clone(), source });
        let before = match delegate.role {
            Role::Plugin if !attachment.is_made_at(at.1.into()) => {
                let so_far = result::as_reported(self.sandbox, attachment, self.progress.outputs().of(at.0));
                Some(so_far.map_err(unreadable)?)
            }
            _ => None,
        };
        let call =
            DelegateCall { command: Command::Add, netns: Some(&self.sandbox.netns), attachment, delegate };
        let (args, stdin) = (self.sandbox.args_of(attachment), call.stdin(before));
        let added = waits::at(&waits::plugin(attachment, &delegate.plugin), || {
            runner(self.node, &self.sandbox.cni_path)
                .add(&call.call(self.sandbox, &args, &stdin), attachment.version)
        })?;
        if delegate.role == Role::Ipam {
            if added.result.ips.is_empty() {
                return Err(PluginError::NoAddress(delegate.plugin.clone()).into());
            }
            let args = CniArgs::parse(&args);
            let of_plugin = |args: CniArgs| Asked::of_plugin(&delegate.plugin, &delegate.config, &args);
            let asked = args.map_or(Asked::Unread, of_plugin);
            let addresses = added.result.ips.iter().map(|ip| ip.address.addr());
            self.occupy(at, attachment, addresses, Some(&asked))?;
        }
        Ok(Output::Delegate { result: Printed::new(added.raw, added.result) })
    }

    /// Tunes an interface. A native interface has its Ethernet address already; another plugin's interface may get
    /// one here.
    pub(super) fn tune(&mut self, attachment: &AttachmentPlan, tune: &Tune) -> Result<Output, StepError> {
        let ifname = &attachment.ifname;
        if let Some(mac) = tune.properties.mac {
            let pod = self.pod.link(ifname)?;
            if pod.mac != Some(mac) {
                let host = self.host.find_peer(&pod, self.netns.as_fd())?;
                let bridge = host.as_ref().and_then(|host| host.controller);
                if let Some(bridge) = bridge {
                    self.node.occupied.claim(bridge, Address::Mac(mac), self.sandbox, attachment)?;
                }
                let own = host.as_ref().map(|host| host.name.as_str());
                check_mac_is_free(&mut self.host, mac, bridge, own)?;
            }
        }
        tuning::tune(&mut self.pod, self.netns, ifname, tune)?;
        Ok(Output::Nothing)
    }

    /// Finds the device on which an interface made by other plugins can be enforced.
    pub(super) fn find_device(
        &mut self,
        at: StepRef,
        attachment: &AttachmentPlan,
    ) -> Result<Output, StepError> {
        let pod = self.pod.find_link(&attachment.ifname)?;
        let host = match &pod {
            Some(pod) => self.host.find_peer(pod, self.netns.as_fd())?,
            None => None,
        };
        let bridge = host.as_ref().and_then(|host| host.controller);
        if let (Some(bridge), Some(mac)) = (bridge, pod.as_ref().and_then(|pod| pod.mac)) {
            self.node.occupied.claim(bridge, Address::Mac(mac), self.sandbox, attachment)?;
        }
        let told = result::own(&self.sandbox.netns, attachment, self.progress.outputs().of(at.0))
            .map_err(|source| PluginError::Result { plugin: attachment.kind.clone(), source })?;
        let addresses = match &pod {
            Some(pod) if told.addresses.is_empty() => self.pod.addresses(pod.index)?,
            _ => Vec::new(),
        };
        let sight = FoundDevice {
            addresses,
            pod: pod.as_ref().map(interface),
            host: host.as_ref().map(interface),
            device: hook_kind::device_info(self.progress.outputs().of(at.0)),
            mode: pod.as_ref().and_then(|pod| pod.mode),
        };
        Ok(sight.output())
    }
}

/// Returns the result of the earlier plugin that has created the attachment's interface; has no effect on the
/// machine.
pub(super) fn take_made(attachment: &AttachmentPlan, made: &MadeBefore) -> Result<Output, StepError> {
    let unreadable =
        |source| StepError::Plugin(PluginError::Result { plugin: attachment.kind.clone(), source });
    let result = Printed::from(made.result.read());
    result.read(attachment.version).map_err(unreadable)?;
    Ok(Output::Delegate { result })
}

/// A call of another plugin for an attachment.
pub(in crate::attach) struct DelegateCall<'a> {
    pub(in crate::attach) command: Command,
    pub(in crate::attach) netns: Option<&'a str>,
    pub(in crate::attach) attachment: &'a AttachmentPlan,
    pub(in crate::attach) delegate: &'a Delegate,
}

impl<'a> DelegateCall<'a> {
    /// Runs the plugin for a verb that prints no result.
    pub(in crate::attach) fn run(
        &self,
        node: &Node,
        sandbox: &Sandbox,
        prev_result: Option<Value>,
    ) -> Result<(), DelegateError> {
        let (args, stdin) = (sandbox.args_of(self.attachment), self.stdin(prev_result));
        waits::at(&waits::plugin(self.attachment, &self.delegate.plugin), || {
            runner(node, &sandbox.cni_path).run(&self.call(sandbox, &args, &stdin)).map(drop)
        })
    }

    fn stdin(&self, prev_result: Option<Value>) -> String {
        /// The plugin's configuration with `prevResult` replaced.
        struct Stdin<'a>(&'a Map<String, Value>, Option<Value>);

        impl Serialize for Stdin<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let told = self.1.as_ref().map(|result| (PREV_RESULT, result));
                let config = self.0.iter().map(|(key, value)| (key.as_str(), value));
                serializer
                    .collect_map(config.filter(|(key, _)| told.is_none() || *key != PREV_RESULT).chain(told))
            }
        }

        const PREV_RESULT: &str = "prevResult";
        // Serialising JSON values cannot fail.
        serde_json::to_string(&Stdin(&self.delegate.config, prev_result)).unwrap_or_default()
    }

    fn call(&'a self, sandbox: &'a Sandbox, args: &'a str, stdin: &'a str) -> Call<'a> {
        Call {
            command: self.command,
            plugin_type: &self.delegate.plugin,
            container_id: &sandbox.container_id,
            netns: self.netns,
            ifname: &self.attachment.ifname,
            args,
            netns_override: false,
            stdin: stdin.as_bytes(),
        }
    }
}

/// Checks that every plugin that the plan runs is installed.
pub(super) fn check_plugins(node: &Node, plan: &Plan) -> Result<(), AttachError> {
    for (_, attachment, step) in plan.steps() {
        if let Step::Delegate(delegate) = step {
            let found = runner(node, &plan.sandbox.cni_path).find(&delegate.plugin);
            found.map_err(|error| AttachError::step(Doing::Attach, attachment, "", error))?;
        }
    }
    Ok(())
}

/// Runs plugins for a runtime: the runtime's search path comes before the agent's own.
pub(in crate::attach) fn runner(node: &Node, cni_path: &[PathBuf]) -> delegate::Delegate {
    let mut search = cni_path.to_vec();
    search.extend(node.delegate.search.iter().filter(|path| !cni_path.contains(path)).cloned());
    delegate::Delegate { search, ..node.delegate.clone() }
}

/// Why the call of a plugin has no usable result.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// A plugin that netattach implements itself failed when called as other plugins are.
    #[error("plugin {plugin}")]
    InProcess {
        /// The plugin type.
        plugin: String,
        /// The cause.
        #[source]
        source: CniError,
    },
    /// Another plugin printed something that is not a result.
    #[error("the result of plugin {plugin} cannot be read")]
    Result {
        /// The plugin type.
        plugin: String,
        /// The cause.
        #[source]
        source: CniError,
    },
    /// An IPAM plugin returned no address.
    #[error("IPAM plugin {0} returned missing IP config")]
    NoAddress(String),
}

impl PluginError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::InProcess { source, .. } => source.code,
            Self::Result { .. } => code::DECODING_FAILURE,
            Self::NoAddress(_) => code::INTERNAL,
        }
    }
}
