//! Bridges that ADDs make: a bridge made by an ADD that failed is removed again, and one that is gone beneath its pods is
//! made again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;

use super::StepError;
use super::apply::ensure_if_present;
use crate::netlink::{self, Handle, LinkState};
use crate::plan::addressing::Others;
use crate::plan::{AttachmentPlan, addressing, result};
use crate::spec;
use crate::step::{Brought, Interface, Output, Outputs, Step};

/// The bridges that unfinished plans are about to use, with the number of plans that use each. A bridge in use is
/// kept.
#[derive(Debug, Default)]
pub struct Bridges {
    users: Mutex<BTreeMap<String, u32>>,
}

/// The bridges of one plan while it is being carried out.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    bridges: &'a Bridges,
    names: Vec<String>,
}

/// The bridge of an attachment, as it was when the attachment was made.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Beneath {
    pub(super) spec: spec::Bridge,
    pub(super) link: Interface,
    /// Its addresses as the pods' gateway.
    pub(super) gateways: Vec<IpNet>,
    /// Which other addresses are in their place.
    pub(super) others: Others,
    /// The attachment's ADD made it, or found one that netattach had made.
    pub(super) made: bool,
}

/// How the bridge of an attachment differs from what was there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// It is gone.
    Gone,
    /// The link of this index, which it is, is down.
    Down(u32),
    /// It lacks these addresses.
    Gateways(u32, Vec<IpNet>),
}

impl Beneath {
    /// The bridge of an attachment; `None` if it has none.
    pub(super) fn of(attachment: &AttachmentPlan, outputs: Brought<'_>) -> Option<Self> {
        let spec = attachment.steps.iter().find_map(|step| match step {
            Step::EnsureBridge(bridge) => Some(bridge.clone()),
            _ => None,
        })?;
        let bridge = outputs.iter().find_map(|output| match output {
            Output::Bridge(bridge) => Some(bridge.clone()),
            _ => None,
        })?;
        let beside = attachment.steps.iter().find_map(|step| match step {
            Step::Gateway { beside, .. } => Some(*beside),
            _ => None,
        });
        let leased = result::leased(attachment, outputs).unwrap_or_default();
        let gateways = match beside {
            Some(_) => addressing::gateways(&leased.addresses),
            None => Vec::new(),
        };
        // What one ADD was told to remove, those before it must not put back.
        let others = if beside == Some(true) { Others::Kept } else { Others::Refused };
        Some(Self { spec, link: bridge.link, gateways, others, made: bridge.made || bridge.ours })
    }

    pub(super) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(super) fn has_gateways(&self) -> bool {
        !self.gateways.is_empty()
    }

    /// Whether the attachment says that the bridge is all our own: an ADD made it, or it is the pods' gateway, which is
    /// made and configured by ADDs alone. Others may be a node's bridge into the networks around it, whose other ports
    /// only its administrator knows.
    pub(super) fn is_ours(&self) -> bool {
        self.made || !self.gateways.is_empty()
    }

    /// How it differs. `found`: the bridge of that name with its addresses. An address that another one has taken the
    /// place of is not missed: a later ADD was told to (`forceAddress`), or an administrator wants it so.
    pub(super) fn change(&self, found: Option<(&LinkState, &[IpNet])>) -> Option<Change> {
        let Some((bridge, addresses)) = found else { return Some(Change::Gone) };
        if !bridge.up {
            return Some(Change::Down(bridge.index));
        }
        let missing =
            addressing::gateway_changes(addresses, &self.gateways, self.others).unwrap_or_default().add;
        (!missing.is_empty()).then_some(Change::Gateways(bridge.index, missing))
    }

    /// Makes it again, without its ports, unless somebody has.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn restore(&self, bridges: &Bridges, host: &mut Handle) -> Result<(), StepError> {
        let mut entered = bridges.begin();
        entered.enter(&self.spec.name);
        let ensured = host.restore_bridge(&self.spec, self.link.index, self.link.mac)?;
        if ensured.created {
            // As when it was made first.
            ensure_if_present(&format!("ipv6/conf/{}/accept_ra", self.spec.name), "0")?;
        }
        Ok(())
    }
}

impl Bridges {
    /// Starts with no bridge in use by the plan.
    pub(super) fn begin(&self) -> Entered<'_> {
        Entered { bridges: self, names: Vec::new() }
    }

    /// Deletes the bridges that this ADD made and that have no port, unless another plan is about to use them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn remove_made(&self, outputs: &Outputs) -> Result<(), netlink::Error> {
        let made = |output: &Output| match output {
            Output::Bridge(bridge) if bridge.made => Some(bridge.link.clone()),
            _ => None,
        };
        let made: Vec<_> = outputs.values().filter_map(made).collect();
        if made.is_empty() {
            return Ok(());
        }
        // The lock is held until they are deleted: an ADD that comes meanwhile makes the bridge again.
        let users = self.lock();
        let mut host = Handle::open()?;
        let links = host.links()?;
        for bridge in made.iter().filter(|bridge| !users.contains_key(&bridge.name)) {
            let is_it = links
                .iter()
                .any(|link| link.index == bridge.index && link.name == bridge.name && link.kind == "bridge");
            let has_ports = links.iter().any(|link| link.controller == Some(bridge.index));
            if is_it && !has_ports {
                tracing::info!(bridge = bridge.name, "removing a bridge that a failed ADD created");
                host.ensure_link_absent(&bridge.name)?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, u32>> {
        // Every change is a single operation, so a poisoned map is consistent.
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entered<'_> {
    /// Records that the plan is about to use a bridge.
    pub(super) fn enter(&mut self, name: &str) {
        *self.bridges.lock().entry(name.to_owned()).or_default() += 1;
        self.names.push(name.to_owned());
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut users = self.bridges.lock();
        for name in &self.names {
            if let Some(count) = users.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    users.remove(name);
                }
            }
        }
    }
}
