//! Bridges that ADDs make: a bridge made by an ADD that failed is removed again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::netlink::{self, Handle};
use crate::step::{Output, Outputs};

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
