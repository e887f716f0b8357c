//! The table of a VRF, and the routes that an interface keeps when it joins one. Pure.

use std::collections::BTreeSet;

use super::AttachmentPlan;
use super::routing::{MAIN_TABLE, interface_of};
use crate::cni::{CniError, code};
use crate::link::vrf::TABLES_OF_ALL;
use crate::spec::{Route, Vrf, VrfPort};
use crate::step::Step;

/// `RT_TABLE_LOCAL`.
const LOCAL_TABLE: u32 = 255;

/// `RTPROT_REDIRECT`, `RTPROT_KERNEL` and `RTPROT_RA`: the kernel adds these routes itself, or receives them again.
const OF_THE_KERNEL: [u8; 3] = [1, 2, 9];

/// Returns the VRF that a chained `vrf` of the attachment requests.
pub fn asked_for(attachment: &AttachmentPlan) -> Option<&Vrf> {
    attachment.steps.iter().find_map(|step| match step {
        Step::JoinVrf(asked) => Some(asked),
        _ => None,
    })
}

/// Refuses a VRF that has the name of an interface of the pod.
///
/// # Errors
/// The error names the attachment and the key.
pub fn check_names(attachments: &[AttachmentPlan]) -> Result<(), CniError> {
    let is_interface = |name: &str| attachments.iter().any(|other| other.ifname == name);
    let mut asked = attachments.iter().filter_map(|attachment| Some((attachment, asked_for(attachment)?)));
    match asked.find(|(_, vrf)| is_interface(&vrf.name)) {
        Some((AttachmentPlan { ifname, network, .. }, Vrf { name, .. })) => {
            let msg =
                format!("attach {ifname} ({network}): key vrfname: {name:?} is another interface of the pod");
            Err(CniError::new(code::INVALID_CONFIG, msg))
        }
        None => Ok(()),
    }
}

/// Returns the table of a new VRF: the requested one, else the first from 1 on that no VRF, route or rule uses.
/// `None`: no table is left.
pub fn table(asked: &Vrf, taken: &BTreeSet<u32>) -> Option<u32> {
    let mut free = (1..=u32::MAX).filter(|table| !taken.contains(table) && !TABLES_OF_ALL.contains(table));
    asked.table.or_else(|| free.next())
}

/// Describes the owner of a requested table, if it has one before a VRF uses it. `of_rules`: the tables that rules of
/// the pod select.
pub fn owner(table: u32, of_rules: &BTreeSet<u32>) -> Option<&'static str> {
    if interface_of(table).is_some() {
        return Some("one of netattach's own, for what an interface's addresses send");
    }
    of_rules.contains(&table).then_some("a table that a rule of the pod leads to")
}

/// Whether a VRF is deleted once it has no ports; `own`: it has netattach's mark. A VRF that was planned to be
/// created and has no mark was left by an agent that ended between creating and marking it, or belongs to another
/// program: the table distinguishes the two, unless the other program chose the same one.
pub fn goes(chosen: &VrfPort, own: bool, table: Option<u32>) -> bool {
    own || (chosen.made && table == Some(chosen.table))
}

/// Returns those of an interface's routes, each with its table, that must be restored when the interface has joined:
/// those of the main table move to the VRF's table, the others stay in theirs.
pub fn kept(routes: &[Route], table: u32) -> Vec<Route> {
    let of_kernel = |route: &&Route| route.protocol.is_some_and(|protocol| OF_THE_KERNEL.contains(&protocol));
    let in_table = |route: &Route| route.table.unwrap_or(MAIN_TABLE);
    let kept = routes.iter().filter(|route| !of_kernel(route) && in_table(route) != LOCAL_TABLE);
    let mut kept: Vec<Route> = kept
        .map(|route| Route {
            table: Some(if in_table(route) == MAIN_TABLE { table } else { in_table(route) }),
            // The kernel has accepted the gateway before, by routes that may come later here.
            on_link: route.gateway.is_some(),
            ..route.clone()
        })
        .collect();
    // Routes by which a gateway is reached come before routes through that gateway.
    kept.sort_by_key(|route| route.gateway.is_some());
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{fixtures, routing};

    #[test]
    fn a_vrf_goes_that_is_marked_or_has_the_table_that_it_was_to_be_made_with() {
        let goes = |made, own, table| {
            let chosen = VrfPort { name: "blue".into(), table: 7, made, index: 3, routes: Vec::new() };
            goes(&chosen, own, table)
        };
        assert!(goes(true, true, Some(8)) && goes(false, true, Some(7)) && goes(true, false, Some(7)));
        assert!(!goes(true, false, Some(8)) && !goes(true, false, None) && !goes(false, false, Some(7)));
    }

    #[test]
    fn a_table_that_is_asked_for_is_nobody_elses() {
        let owned = |table| owner(table, &BTreeSet::from([0, 101, 253, 254, 255]));
        let (rule, own) = (
            Some("a table that a rule of the pod leads to"),
            Some("one of netattach's own, for what an interface's addresses send"),
        );
        let found = [100, 101, routing::table_of(0), routing::table_of(1), routing::table_of(7)].map(owned);
        assert_eq!(found, [None, rule, None, own, own]);
    }

    #[test]
    fn a_vrf_has_no_other_interfaces_name() {
        let in_vrf = |name: &str| {
            let asked = Vrf { name: name.into(), table: None };
            fixtures::attachment("bridge", vec![Step::ChooseVrf(asked.clone()), Step::JoinVrf(asked)])
        };
        let eth0 = AttachmentPlan { ifname: "eth0".into(), ..fixtures::attachment("bridge", Vec::new()) };
        let net2 = AttachmentPlan { ifname: "net2".into(), ..in_vrf("blue") };
        for name in ["eth0", "net2"] {
            let found = check_names(&[eth0.clone(), in_vrf(name), net2.clone()]).unwrap_err();
            let said =
                format!("attach net1 (shop/lan): key vrfname: {name:?} is another interface of the pod");
            assert_eq!((found.code, found.msg), (code::INVALID_CONFIG, said));
        }
        assert_eq!(check_names(&[eth0, in_vrf("blue"), net2]).ok(), Some(()));
    }

    #[test]
    fn the_table_is_the_one_asked_for_or_the_first_that_is_free() {
        let vrf = |table| Vrf { name: "blue".into(), table };
        assert_eq!(table(&vrf(Some(7)), &BTreeSet::from([7])), Some(7), "two VRFs may share one");
        assert_eq!(table(&vrf(None), &BTreeSet::new()), Some(1));
        assert_eq!(table(&vrf(None), &BTreeSet::from([1, 2, 4, 254])), Some(3));
        let most: BTreeSet<u32> = (1..=252).collect();
        assert_eq!(table(&vrf(None), &most), Some(256), "none of the namespace's own");
    }

    #[test]
    fn routes_that_somebody_made_are_kept_and_those_of_the_main_table_move() {
        let route = |to: &str, via: Option<&str>, table: Option<u32>, protocol: u8| Route {
            gateway: via.map(|via| via.parse().unwrap()),
            table,
            protocol: Some(protocol),
            ..Route::on_link(to.parse().unwrap())
        };
        let routes = [
            route("0.0.0.0/0", Some("10.1.0.1"), Some(254), 4),
            route("10.1.0.0/24", None, Some(254), 2),
            route("192.0.2.0/24", None, None, 4),
            route("198.51.100.0/24", Some("10.1.0.1"), Some(500), 3),
            route("fe80::/64", None, Some(254), 2),
            route("::/0", Some("fe80::1"), Some(254), 9),
            route("10.1.0.2/32", None, Some(255), 4),
        ];
        let with = |table: u32, route: &Route| Route {
            table: Some(table),
            on_link: route.gateway.is_some(),
            ..route.clone()
        };
        let expected = [with(7, &routes[2]), with(7, &routes[0]), with(500, &routes[3])];
        assert_eq!(kept(&routes, 7), expected);
    }
}
