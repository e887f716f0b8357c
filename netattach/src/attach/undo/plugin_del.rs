//! DEL of other plugins, including those whose device is gone: a VF that the card no longer has, an interface that
//! the pod has deleted.
//!
//! The specification requires DEL to succeed even if something is missing. Plugins that look up their device first
//! fail instead, at every retry, so that the pod could never terminate.

use std::path::Path;

use crate::attach::apply::{DelegateCall, PluginError};
use crate::attach::{Node, StepError};
use crate::cni::{Command, Value};
use crate::delegate::DelegateError;
use crate::netlink::Handle;
use crate::netns::Netns;
use crate::plan::undo::address_management;
use crate::plan::{AttachmentPlan, Plan, pci_address, result};
use crate::step::{Delegate, Output, Outputs, StepRef};

/// PCI devices of the machine (Documentation/ABI/testing/sysfs-bus-pci).
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// DEL of a plugin for an attachment.
pub(super) struct PluginDel<'a> {
    pub(in crate::attach) node: &'a Node,
    pub(in crate::attach) plan: &'a Plan,
    /// The sandbox's namespace, if it still exists.
    pub(in crate::attach) netns: Option<&'a Netns>,
    pub(in crate::attach) at: StepRef,
    pub(in crate::attach) attachment: &'a AttachmentPlan,
    pub(in crate::attach) delegate: &'a Delegate,
    /// The outputs of the plan's steps.
    pub(in crate::attach) outputs: &'a Outputs,
}

impl PluginDel<'_> {
    /// Calls the plugin. If the plugin created the interface and fails because its device is gone, calls it again for
    /// the cleanup that needs no device.
    pub(in crate::attach) fn run(&self) -> Result<(), StepError> {
        let prev_result = self.prev_result()?;
        let netns = self.netns.map(|_| self.plan.sandbox.netns.as_str());
        match self.call(self.delegate, netns, prev_result.clone()) {
            Err(refused) if refused.is_by_the_plugin() && self.attachment.is_made_at(self.at.1.into()) => {
                self.without_device(refused, prev_result)
            }
            other => Ok(other?),
        }
    }

    /// Releases the addresses, because the plugin may have failed before that, and calls the plugin as a runtime does
    /// whose sandbox is gone: for the cleanup that needs no sandbox.
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
            "the plugin's device is gone; cleaning up what does not need it"
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
            // The plugin has nothing left to release.
            Err(error) if gone.is_some() && error.is_by_the_plugin() => Ok(()),
            other => Ok(other?),
        }
    }

    /// Whether the pod exists and had the interface, but no longer has it.
    fn has_left_the_pod(&self) -> Result<bool, StepError> {
        let is_interface = |(step, output): (&StepRef, &Output)| {
            step.0 == self.at.0 && matches!(output, Output::Device { pod: Some(_), .. })
        };
        let Some(netns) = self.netns.filter(|_| self.outputs.iter().any(is_interface)) else {
            return Ok(false);
        };
        match Handle::open_in(netns)?.find_link(&self.attachment.ifname) {
            // The interface exists, whatever the pod has changed of it.
            Err(error) if error.is_untold() => Ok(false),
            found => Ok(found?.is_none()),
        }
    }

    /// Returns the `prevResult` of the DEL. Every plugin of a list gets the final result and passes it to its IPAM
    /// plugin; if no step has an output, there is no result. A plain executable's configuration contains the
    /// `prevResult` that it received.
    fn prev_result(&self) -> Result<Option<Value>, StepError> {
        let Self { plan, at, attachment, delegate, outputs, .. } = self;
        let known = !delegate.config.contains_key("prevResult")
            && outputs.iter().any(|(step, output)| step.0 == at.0 && *output != Output::Nothing);
        if !known || !attachment.version.has_prev_result_at_del() {
            return Ok(None);
        }
        let told = result::as_reported(&plan.sandbox, attachment, outputs.of(at.0));
        told.map(Some).map_err(|source| {
            StepError::Plugin(PluginError::Result { plugin: delegate.plugin.clone(), source })
        })
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

/// Whether the machine has no such PCI device. A device that cannot be examined counts as present.
fn is_gone(address: &str) -> bool {
    let devices = Path::new(PCI_DEVICES);
    devices.is_dir() && devices.join(address).try_exists().is_ok_and(|is_there| !is_there)
}
