//! What the kernel shows of links and filters, kept up to date by looking at what has changed.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use super::decide::{Filters, Node};
use crate::netlink::{self, Changes, Family, Handle, hooked_chains};

/// From here on all links are listed instead of asked for one by one.
const MANY: usize = 64;

/// Why the node could not be looked at.
#[derive(Debug, thiserror::Error)]
pub(super) enum LookError {
    /// Links or filters.
    #[error(transparent)]
    Netlink(#[from] netlink::Error),
    /// A file below `/proc`.
    #[error("read {path}")]
    Read {
        /// Which.
        path: &'static str,
        /// Why not.
        source: io::Error,
    },
}

impl Node {
    /// Looks at what may have changed of the links of `devices` and of their bridges, and forgets all others.
    pub(super) fn look_at_links(
        &mut self,
        devices: &BTreeSet<u32>,
        changes: &Changes,
        host: &mut Handle,
    ) -> Result<(), LookError> {
        let stale: Option<BTreeSet<u32>> = match changes {
            Changes::Anything => None,
            Changes::Of(touched) => {
                let known = |index: &u32| self.links.contains_key(index);
                let changed = touched.iter().copied().filter(known);
                let new = devices.iter().copied().filter(|index| !known(index));
                Some(changed.chain(new).collect()).filter(|stale: &BTreeSet<u32>| stale.len() < MANY)
            }
        };
        match stale {
            Some(stale) => {
                for index in stale {
                    self.look_at(index, host)?;
                }
            }
            None => {
                let all = host.forwarding_states()?;
                self.links = all.into_iter().map(|link| (link.index, link)).collect();
            }
        }
        let controllers: BTreeSet<u32> =
            devices.iter().filter_map(|device| self.links.get(device)?.controller).collect();
        for index in &controllers {
            if !self.links.contains_key(index) {
                self.look_at(*index, host)?;
            }
        }
        self.links.retain(|index, _| devices.contains(index) || controllers.contains(index));
        Ok(())
    }

    fn look_at(&mut self, index: u32, host: &mut Handle) -> Result<(), LookError> {
        match host.forwarding_state(index)? {
            Some(link) => self.links.insert(index, link),
            None => self.links.remove(&index),
        };
        Ok(())
    }

    /// Looks at packet filters. The kernel tells nobody of sysctls and of the older tables.
    /// `routed`: there are links whose packets meet those for IP packets without a bridge's doing.
    pub(super) fn look_at_filters(&mut self, routed: bool) -> Result<(), LookError> {
        let one_calls_ip =
            self.links.values().filter_map(|link| link.bridge).any(|bridge| bridge.calls_iptables);
        let bridges_call_ip = is_on("/proc/sys/net/bridge/bridge-nf-call-iptables")?
            || is_on("/proc/sys/net/bridge/bridge-nf-call-ip6tables")?;
        let inet = hooked_chains(Family::Inet)?;
        let netdev = hooked_chains(Family::Netdev)?;
        let ip = (routed || bridges_call_ip || one_calls_ip)
            && (inet.count > 0
                || hooked_chains(Family::Ip4)?.count > 0
                || hooked_chains(Family::Ip6)?.count > 0
                || has_lines("/proc/thread-self/net/ip_tables_names")?
                || has_lines("/proc/thread-self/net/ip6_tables_names")?);
        self.filters = Filters {
            bridge: hooked_chains(Family::Bridge)?.count > 0 || has_old_ebtables(),
            ip,
            bridges_call_ip,
            devices: inet.devices.into_iter().chain(netdev.devices).collect(),
        };
        Ok(())
    }
}

/// The older ebtables cannot be asked without loading it: where one of its tables is loaded, it counts as used.
fn has_old_ebtables() -> bool {
    ["ebtable_filter", "ebtable_nat", "ebtable_broute"]
        .iter()
        .any(|module| Path::new("/sys/module").join(module).exists())
}

fn is_on(path: &'static str) -> Result<bool, LookError> {
    Ok(!matches!(contents(path)?.trim(), "" | "0"))
}

fn has_lines(path: &'static str) -> Result<bool, LookError> {
    Ok(!contents(path)?.is_empty())
}

/// Empty when there is no such file: the kernel does not have, or has not loaded, what it is about.
fn contents(path: &'static str) -> Result<String, LookError> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other.map_err(|source| LookError::Read { path, source }),
    }
}
