//! DEL of other plugins, of those too whose device is gone: a VF that its card has no more, an interface that the pod has
//! deleted.
//!
//! By the specification a DEL succeeds although something is missing. Plugins that look for their device first fail instead, and
//! would as often as the runtime asks: the pod could not end.

use std::path::Path;

use super::apply::DelegateCall;
use super::{Node, StepError};
use crate::cni::{Command, Value};
use crate::delegate::DelegateError;
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::undo::address_management;
use crate::plan::{AttachmentPlan, Plan, pci_address, result};
use crate::step::{Delegate, Output, Outputs, StepRef};

/// The devices of the machine (Documentation/ABI/testing/sysfs-bus-pci).
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// DEL of a plugin for an attachment.
pub(super) struct PluginDel<'a> {
    pub(super) node: &'a Node,
    pub(super) plan: &'a Plan,
    /// The sandbox's namespace, if it still exists.
    pub(super) netns: Option<&'a Netns>,
    pub(super) at: StepRef,
    pub(super) attachment: &'a AttachmentPlan,
    pub(super) delegate: &'a Delegate,
    /// What the steps of the plan brought.
    pub(super) outputs: &'a Outputs,
}

impl PluginDel<'_> {
    /// Asks the plugin. One that refuses while the device is gone of which it made the interface is asked for what needs none.
    pub(super) fn run(&self) -> Result<(), StepError> {
        let prev_result = self.prev_result()?;
        let netns = self.netns.map(|_| self.plan.sandbox.netns.as_str());
        match self.call(self.delegate, netns, prev_result.clone()) {
            Err(refused) if refused.is_by_the_plugin() && self.attachment.is_made_at(self.at.1.into()) => {
                self.without_device(refused, prev_result)
            }
            other => Ok(other?),
        }
    }

    /// Releases the addresses, as the plugin may not have come to it, and asks the plugin in the way of a runtime whose
    /// sandbox is gone: for what can be cleaned up without.
    fn without_device(&self, refused: DelegateError, prev_result: Option<Value>) -> Result<(), StepError> {
        let gone = pci_address(&self.delegate.config).filter(|address| is_gone(address));
        if gone.is_none() && !self.has_left_the_pod()? {
            return Err(refused.into());
        }
        tracing::warn!(
            plugin = self.delegate.plugin,
            ifname = self.attachment.ifname,
            pci = gone,
            error = %crate::error_chain::Chain(&refused),
            "the plugin's device is gone: what needs none is cleaned up"
        );
        if let Some(ipam) = address_management(self.delegate) {
            let netns = self.netns.map(|_| self.plan.sandbox.netns.as_str());
            self.call(&ipam, netns, prev_result.clone())?;
        }
        let repeated = match self.netns {
            Some(_) => self.call(self.delegate, None, prev_result),
            None => Err(refused),
        };
        match repeated {
            // Nothing is left that it could give back.
            Err(error) if gone.is_some() && error.is_by_the_plugin() => Ok(()),
            other => Ok(other?),
        }
    }

    /// Whether the pod is there, had the interface and has it no more.
    fn has_left_the_pod(&self) -> Result<bool, StepError> {
        let is_interface = |(step, output): (&StepRef, &Output)| {
            step.0 == self.at.0 && matches!(output, Output::Device { pod: Some(_), .. })
        };
        let Some(netns) = self.netns.filter(|_| self.outputs.iter().any(is_interface)) else {
            return Ok(false);
        };
        Ok(Handle::open_in(netns)?.find_link(&self.attachment.ifname)?.is_none())
    }

    /// Every plugin of a list is given the final result, and hands it to its address management; without any there is nothing
    /// to give. A plain executable's configuration holds the one that came in.
    fn prev_result(&self) -> Result<Option<Value>, StepError> {
        let Self { plan, at, attachment, delegate, outputs, .. } = self;
        let known = !delegate.config.contains_key("prevResult")
            && outputs.iter().any(|(step, output)| step.0 == at.0 && *output != Output::Nothing);
        if !known || !attachment.version.has_prev_result_at_del() {
            return Ok(None);
        }
        let told = result::as_reported(&plan.sandbox, attachment, outputs.of(at.0));
        told.map(Some).map_err(|source| StepError::Result { plugin: delegate.plugin.clone(), source })
    }

    fn call(
        &self,
        delegate: &Delegate,
        netns: Option<&str>,
        prev_result: Option<Value>,
    ) -> Result<(), DelegateError> {
        let call = DelegateCall { command: Command::Del, netns, attachment: self.attachment, delegate };
        call.run(self.node, &self.plan.sandbox, prev_result)
    }
}

/// Whether the machine has no such PCI device. What cannot be looked at counts as there.
fn is_gone(address: &str) -> bool {
    let devices = Path::new(PCI_DEVICES);
    devices.is_dir() && devices.join(address).try_exists().is_ok_and(|is_there| !is_there)
}
