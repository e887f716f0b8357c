//! Reads from the kernel what drivers have to know of the node before they plan.

use super::AttachError;
use crate::error_chain::Chain;
use crate::link::facts::{Facts, Parent, Wanted, Wishes};
use crate::netlink::{self, Handle, LinkState};

/// The facts that drivers ask for. What the node does not have is left out: the step that needs it says so.
///
/// # Errors
/// No netlink socket.
pub(super) fn gather(wishes: &Wishes) -> Result<Facts, AttachError> {
    let mut facts = Facts::default();
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
        }
    }
    Ok(facts)
}

/// The link of that name; the interface of the node's default route where none is named.
pub(super) fn parent(host: &mut Handle, name: Option<&str>) -> Result<LinkState, netlink::Error> {
    match name {
        Some(name) => host.link(name),
        None => {
            let index = host.default_route_interface()?;
            host.link_by_index(index)
        }
    }
}
