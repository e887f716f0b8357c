//! The devices by which packets with loopback addresses may leave: those with `route_localnet`. The table
//! drops packets with such addresses that come in by these devices; a process that closes a device does so
//! while its table still drops them.
//!
//! The kernel only checks whether the setting is zero. Processes without an agent therefore set a value of
//! their own, by which they find the devices that they opened even after another program has removed their
//! table.

use std::collections::BTreeSet;

use super::NatError;
use crate::netlink::Error;
use crate::netlink::nat::{self, SHARED_TABLE, Set};
use crate::sysctl;

/// Attempts to read a set while other processes change it.
const TRIES: u32 = 5;

/// Path of the settings of all devices, by name.
const SETTINGS: &str = "ipv4/conf";
const CLOSED: &str = "0";
/// The value by which the agent and other programs open a device.
const OPEN: &str = "1";
/// The value by which processes without an agent open a device.
const OPEN_WITHOUT_AGENT: &str = "2";

/// Opens a device for the agent.
pub(super) fn open(device: &str) -> Result<(), NatError> {
    if sysctl::is(&key(device), OPEN_WITHOUT_AGENT) {
        return Ok(());
    }
    Ok(sysctl::ensure(&key(device), OPEN)?)
}

/// Opens a device for a process without an agent.
pub(super) fn open_without_agent(device: &str) -> Result<(), NatError> {
    Ok(sysctl::ensure(&key(device), OPEN_WITHOUT_AGENT)?)
}

/// Opens a device for the agent, if it is still there.
pub(super) fn reopen(device: &str) -> Result<(), NatError> {
    unless_gone(open(device))
}

/// Opens a device that a process without an agent needs, if it is still there.
pub(super) fn reopen_without_agent(device: &str) -> Result<(), NatError> {
    unless_gone(open_without_agent(device))
}

/// Closes a device, whichever process opened it. Idempotent.
pub(super) fn close(device: &str) -> Result<(), NatError> {
    unless_gone(sysctl::ensure(&key(device), CLOSED).map_err(NatError::from))
}

/// Treats a missing device as success: the node's end of a pod's link is gone at its DEL.
fn unless_gone(set: Result<(), NatError>) -> Result<(), NatError> {
    match set {
        Err(NatError::Sysctl(error)) if error.source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Closes a device for the agent, unless processes without an agent need it: the last of those closes it.
pub(super) fn close_unless_shared(device: &str) -> Result<(), NatError> {
    let is_shared = || Ok::<_, NatError>(named(SHARED_TABLE).map_err(NatError::Shared)?.contains(device));
    if !is_shared()? {
        close(device)?;
        // A process may have asked for the device meanwhile.
        if !is_shared()? {
            return Ok(());
        }
    }
    reopen_without_agent(device)
}

/// The devices that are elements of a table.
pub(super) fn named(table: &str) -> Result<BTreeSet<String>, Error> {
    let mut found = nat::elements_of(table, Set::Devices);
    for _ in 1..TRIES {
        match &found {
            Err(Error::Interrupted(_)) => found = nat::elements_of(table, Set::Devices),
            _ => break,
        }
    }
    Ok(found?.iter().filter_map(super::wish::device_named).collect())
}

/// The devices that processes without an agent have opened.
pub(super) fn opened_without_agent() -> BTreeSet<String> {
    let devices = sysctl::names(SETTINGS).unwrap_or_default();
    devices.into_iter().filter(|device| sysctl::is(&key(device), OPEN_WITHOUT_AGENT)).collect()
}

/// Says in words that a device is closed; `None` if it is open.
pub(super) fn closed(device: &str) -> Option<String> {
    sysctl::is(&key(device), CLOSED).then(|| format!("127.0.0.1 leads nowhere: {} is 0", key(device)))
}

fn key(device: &str) -> String {
    format!("{SETTINGS}/{device}/route_localnet")
}
