//! The addresses that an attachment still has, for a record that was not taken over or has lost its outputs.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::attach::apply::owner;
use crate::attach::{Node, StepError};
use crate::ipam::{Held, Owner, Patience};
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::step::{Brought, Step};
use crate::waits;

/// Returns the addresses of an attachment: those of its record, unless their pool has given them to another one since,
/// and those that its pool or its lease names, because the record may have lost them. Addresses of another plugin are
/// known by the record alone.
///
/// # Errors
/// A pool cannot be read.
pub(in crate::attach) fn own(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    outputs: Brought<'_>,
) -> Result<BTreeSet<IpAddr>, StepError> {
    // A result that cannot be read names none.
    let recorded = result::leased(attachment, outputs).unwrap_or_default().addresses;
    let mut own: BTreeSet<IpAddr> = recorded.iter().map(|it| it.address.addr().to_canonical()).collect();
    let of = owner(sandbox, attachment);
    for step in &attachment.steps {
        let Step::Lease(config) = step else { continue };
        own.extend(node.leases.given(config, &of));
        if let Some(pool) = config.pool() {
            let holders = || node.leases.holders(&pool, Patience::Operation);
            settle(&mut own, &of, waits::at_pool(Some(pool.clone()), holders)?);
        }
    }
    Ok(own)
}

/// Adds what the pool has for the owner, and removes what it has for others. An entry of an old version names no
/// interface.
fn settle(own: &mut BTreeSet<IpAddr>, of: &Owner, held: Vec<Held>) {
    let is_its =
        |it: &Owner| it.container_id == of.container_id && (it.ifname.is_empty() || it.ifname == of.ifname);
    for Held { address, owner } in held {
        match owner {
            Some(owner) if is_its(&owner) => {
                own.insert(address);
            }
            Some(_) => {
                own.remove(&address);
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_pool_has_for_it_is_its_own_and_what_it_has_for_another_is_not() {
        let owner = |container: &str, ifname: &str| {
            Some(Owner { container_id: container.to_owned(), ifname: ifname.to_owned() })
        };
        let address = |last: u8| IpAddr::from([10, 1, 0, last]);
        let held = |last: u8, owner: Option<Owner>| Held { address: address(last), owner };
        let mut own: BTreeSet<IpAddr> = [2, 3, 4, 9].map(address).into();
        let pool = vec![
            held(2, owner("b", "eth0")),
            held(3, owner("a", "net1")),
            held(4, None),
            held(5, owner("a", "eth0")),
            held(6, owner("a", "")),
            held(7, owner("b", "")),
            held(8, None),
        ];
        settle(&mut own, &owner("a", "eth0").unwrap(), pool);
        assert_eq!(own, [4, 5, 6, 9].map(address).into());
    }
}
