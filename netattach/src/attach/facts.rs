//! Reads from the kernel the facts about the node that drivers need before they plan.

use super::AttachError;
use super::device::{bus, representor};
use crate::error_chain::Chain;
use crate::link::facts::{Facts, OnBus, Parent, Wanted, Wishes};
use crate::netlink::{self, Handle, KnownLinks, LinkState};

/// Gathers the facts that drivers ask for. A fact that does not exist on the node is left out: the step that needs it
/// reports that.
///
/// # Errors
/// A netlink socket cannot be opened, or the kernel does not report a card's mode.
pub(super) fn gather(wishes: &Wishes) -> Result<Facts, AttachError> {
    let mut facts = Facts { gathered: true, ..Facts::default() };
    if wishes.is_empty() {
        return Ok(facts);
    }
    let mut host = Handle::open().map_err(|error| AttachError::Open(error.into()))?;
    for wanted in wishes {
        match wanted {
            Wanted::Parent(name) => match parent(&mut host, name.as_deref()) {
                Ok(LinkState { name: found, mtu, .. }) => {
                    facts.parents.insert(name.clone(), Parent { name: found, mtu });
                }
                Err(error) => tracing::debug!(name, error = %Chain(&error), "no such parent"),
            },
            Wanted::OnBus(name) => {
                let Some(found) = bus::find(name) else { continue };
                let switchdev = representor::is_switchdev(found.function.as_ref());
                let switchdev = switchdev.map_err(|error| AttachError::Open(error.into()))?;
                facts.on_bus.insert(name.clone(), OnBus { switchdev, ..found });
            }
        }
    }
    Ok(facts)
}

/// Returns the link of the node with that name, if there is one.
pub(super) fn named(
    host: &mut Handle,
    name: &str,
    known: Option<&KnownLinks>,
) -> Result<Option<LinkState>, netlink::Error> {
    match known {
        Some(known) => known.find(name, host),
        None => host.find_link(name),
    }
}

/// Returns the link with that name; without a name, the interface of the node's default route.
pub(super) fn parent(host: &mut Handle, name: Option<&str>) -> Result<LinkState, netlink::Error> {
    match name {
        Some(name) => host.link(name),
        None => {
            let index = host.default_route_interface()?;
            host.link_by_index(index)
        }
    }
}
