//! The addresses that an attachment still has, for a record that was not taken over or has lost its outputs.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::attach::addresses::occupied::Segment;
use crate::attach::apply::owner;
use crate::attach::{Node, StepError};
use crate::ipam::{Held, Owner, Patience};
use crate::plan::{AttachmentPlan, Sandbox, result};
use crate::step::{Brought, Step};
use crate::waits;

/// Returns the addresses of an attachment: those of its record, unless their pool has given them to another one since,
/// and those that its pool or its lease names, because the record may have lost them. Addresses of another plugin are
/// known by the record alone. Those that a definition or a record names alone are not its own while another attachment
/// on that link has them. `on`: the link; `None`: it is not known, so all of them are its own. Else what leads to one
/// would stay when it goes, because somebody has the same address elsewhere.
///
/// # Errors
/// A pool cannot be read.
pub(in crate::attach) fn own(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    outputs: Brought<'_>,
    on: Option<Segment>,
) -> Result<BTreeSet<IpAddr>, StepError> {
    // A result that cannot be read names none.
    let recorded = result::leased(attachment, outputs).unwrap_or_default().addresses;
    let mut own: BTreeSet<IpAddr> = recorded.iter().map(|it| it.address.addr().to_canonical()).collect();
    let of = owner(sandbox, attachment);
    let leases = || {
        attachment.steps.iter().filter_map(|step| match step {
            Step::Lease(config) => Some(config),
            _ => None,
        })
    };
    let (of_servers, named): (Vec<_>, Vec<_>) = leases().partition(|config| config.asks_the_network());
    own.extend(named.into_iter().flat_map(|config| node.leases.given(config, &of)));
    own.retain(|ip| on.is_none() || !node.occupied.is_held_by_another(on, *ip, &of));
    own.extend(of_servers.into_iter().flat_map(|config| node.leases.given(config, &of)));
    for config in leases() {
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
    use serde_json::json;

    use super::*;
    use crate::attach::addresses::holder::Address;
    use crate::attach::rig;
    use crate::cni::CniArgs;
    use crate::ipam::Kind;
    use crate::journal::Store;
    use crate::step::{Outputs, StepRef};

    /// Otherwise its DEL takes the routes of the other one back.
    #[test]
    fn what_its_definition_alone_names_is_not_its_own_while_another_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let journal = Store::open(directory.join("journal")).unwrap();
        let engine = rig::engine(directory, journal, &crate::sync::Arc::default());
        let [mut a, b] = [("a", 1), ("b", 2)].map(|(container, id)| rig::plan(directory, container, id));
        let mut outputs = Outputs::default();
        outputs.insert(StepRef(0, 0), rig::lease(&engine, &a));
        let ipam = json!({"type": "static", "addresses": [{"address": "10.1.0.7/24"}]});
        let config = json!({"name": "net", "ipam": ipam});
        let named = Kind::Static.parse(config.as_object().unwrap(), &CniArgs::default()).unwrap();
        a.attachments[0].steps.push(Step::Lease(named));
        let own_of_a = |on| own(&engine.node, (&a.sandbox, &a.attachments[0]), outputs.of(0), on).unwrap();
        let [leased, named] = [2, 7].map(|last| IpAddr::from([10, 1, 0, last]));
        assert_eq!(own_of_a(Some(7)), [leased, named].into());
        for ip in [leased, named] {
            engine.node.occupied.claim(7, Address::Ip(ip), &b.sandbox, &b.attachments[0]).unwrap();
        }
        assert_eq!(own_of_a(Some(7)), [leased].into(), "the pool says whose that is");
        for elsewhere in [Some(8), None] {
            assert_eq!(own_of_a(elsewhere), [leased, named].into(), "{elsewhere:?}");
        }
    }

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
