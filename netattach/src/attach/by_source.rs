//! Routes what an interface's addresses send by tables of their own, and compares it later.

use std::net::IpAddr;

use super::{StepError, vrf};
use crate::cni::CniResult;
use crate::netlink::Handle;
use crate::plan::by_source;
use crate::plan::routing::{MAIN_TABLE, metric};
use crate::spec::{BySource, Route, SourceTables};

/// Most routes of one interface that are taken over. More can only come from outside.
const MOST_ROUTES: usize = 1024;

/// Chooses the tables for the addresses that the interface has by this result. Changes nothing.
pub(super) fn choose(
    pod: &mut Handle,
    ifname: &str,
    asked: &BySource,
    result: &CniResult,
) -> Result<SourceTables, StepError> {
    if result.ips.is_empty() {
        return Err(StepError::NoSource(ifname.to_owned()));
    }
    let link = pod.link(ifname)?;
    let routes = pod.routes_by(link.index, MAIN_TABLE)?;
    if routes.len() > MOST_ROUTES {
        return Err(StepError::ManyRoutes {
            plugin: crate::link::sbr::KIND,
            ifname: ifname.to_owned(),
            found: routes.len(),
            most: MOST_ROUTES,
        });
    }
    let taken = vrf::taken(pod)?;
    let addresses = by_source::addresses(result, ifname);
    Ok(by_source::choose(asked, link.index, &addresses, &routes, &taken))
}

/// Makes the tables and rules, and takes the routes out of the main table. Can be repeated.
pub(super) fn apply(pod: &mut Handle, chosen: &SourceTables) -> Result<(), StepError> {
    for one in &chosen.tables {
        for route in &one.routes {
            pod.ensure_route_beside_others(chosen.index, route)?;
        }
    }
    pod.ensure_source_rules(&chosen.rules())?;
    pod.ensure_routes(chosen.index, &chosen.hinted)?;
    Ok(pod.ensure_taken_out_of_main(chosen.index, &chosen.removed)?)
}

/// The first rule or route of the tables that is gone, in words.
pub(super) fn difference(
    pod: &mut Handle,
    ifname: &str,
    chosen: &SourceTables,
) -> Result<Option<String>, StepError> {
    let rules = pod.rules()?;
    for one in &chosen.tables {
        let is_there = |rule: &crate::netlink::Rule| rule.source == one.source && rule.table == one.table;
        if !rules.iter().any(is_there) {
            return Ok(Some(format!("the rule from {} to table {} is gone", one.source, one.table)));
        }
        let found = pod.routes_in(one.table)?;
        let index = pod.find_link(ifname)?.map(|link| link.index);
        let is_there = |route: &&Route| {
            found.iter().any(|found| {
                found.interface == index
                    && found.destination == route.destination.trunc()
                    && found.gateway == route.gateway
                    && found.priority == metric(route)
            })
        };
        if let Some(route) = one.routes.iter().find(|route| !is_there(route)) {
            let what = format!("the route to {} in table {} is gone", route.destination, one.table);
            return Ok(Some(what));
        }
    }
    Ok(None)
}

/// The first address without a rule, for callers that kept no record.
pub(super) fn without_rule(
    pod: &mut Handle,
    asked: &BySource,
    addresses: &[IpAddr],
) -> Result<Option<IpAddr>, StepError> {
    let rules = pod.rules()?;
    let has_one = |address: &IpAddr| {
        rules
            .iter()
            .any(|rule| rule.source == *address && asked.table.is_none_or(|table| table == rule.table))
    };
    Ok(addresses.iter().find(|address| !has_one(address)).copied())
}

/// Removes the rules for addresses that the interface has or had, as the reference plugin does.
pub(super) fn forget(
    pod: &mut Handle,
    ifname: &str,
    asked: &BySource,
    had: &[IpAddr],
) -> Result<(), StepError> {
    let mut sources = had.to_vec();
    if let Some(link) = pod.find_link(ifname)? {
        sources.extend(pod.addresses(link.index)?.iter().map(|address| address.addr()));
    }
    let rules = pod.rules()?;
    let its = rules
        .iter()
        .filter(|rule| sources.contains(&rule.source) && asked.table.is_none_or(|table| table == rule.table));
    let its: Vec<_> = its.copied().collect();
    Ok(pod.ensure_rules_absent(&its)?)
}
