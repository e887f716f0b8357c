//! Routes packets from an interface's addresses by tables of their own, and compares the routes later.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{RoutingError, vrf};
use crate::attach::StepError;
use crate::cni::CniResult;
use crate::netlink::{Handle, Rule};
use crate::plan::by_source::{self, Needed};
use crate::plan::routing::{MAIN_TABLE, metric};
use crate::spec::{BySource, Route, SourceTables};

/// Most routes of one interface that are moved. More routes can only come from another program.
const MOST_ROUTES: usize = 1024;

/// Chooses the tables for the addresses that the interface has according to this result. Changes nothing.
pub(in crate::attach) fn choose(
    pod: &mut Handle,
    ifname: &str,
    asked: &BySource,
    result: &CniResult,
) -> Result<SourceTables, StepError> {
    let addresses = by_source::addresses(result, ifname);
    // Otherwise all its routes would leave the main table without getting another one.
    if addresses.is_empty() {
        return Err(RoutingError::NoSource(ifname.to_owned()).into());
    }
    let link = pod.link(ifname)?;
    let routes = pod.routes_by(link.index, MAIN_TABLE)?;
    if routes.len() > MOST_ROUTES {
        return Err(RoutingError::ManyRoutes {
            plugin: crate::link::sbr::KIND,
            ifname: ifname.to_owned(),
            found: routes.len(),
            most: MOST_ROUTES,
        }
        .into());
    }
    let taken = vrf::taken(pod)?;
    Ok(by_source::choose(asked, link.index, &addresses, &routes, &taken))
}

/// Adds the tables and rules, and removes the routes from the main table. Can be repeated.
pub(in crate::attach) fn apply(pod: &mut Handle, chosen: &SourceTables) -> Result<(), StepError> {
    for one in &chosen.tables {
        for route in &one.routes {
            pod.ensure_route_beside_others(chosen.index, route)?;
        }
    }
    pod.ensure_source_rules(&chosen.rules())?;
    pod.ensure_routes(chosen.index, &chosen.hinted)?;
    Ok(pod.ensure_taken_out_of_main(chosen.index, &chosen.removed)?)
}

/// Describes the first missing rule or route of the tables.
pub(in crate::attach) fn difference(
    pod: &mut Handle,
    ifname: &str,
    chosen: &SourceTables,
) -> Result<Option<String>, StepError> {
    let rules = pod.rules()?;
    for one in &chosen.tables {
        let is_there = |rule: &Rule| rule.source == one.source && rule.table == one.table;
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

/// Describes the first address whose rule is missing, or the first missing route of its table: for callers that kept
/// no record. `addresses`: those of the interface, with their gateways.
pub(in crate::attach) fn missing(
    pod: &mut Handle,
    ifname: &str,
    asked: &BySource,
    addresses: &[(IpNet, Option<IpAddr>)],
) -> Result<Option<String>, StepError> {
    let rules = pod.rules()?;
    let routes = match pod.find_link(ifname)? {
        Some(link) => pod.routes_of_all_tables_by(link.index)?,
        None => Vec::new(),
    };
    for (address, gateway) in addresses {
        let source = address.addr();
        let is_its =
            |rule: &&Rule| rule.source == source && asked.table.is_none_or(|table| table == rule.table);
        let tables: BTreeSet<u32> = rules.iter().filter(is_its).map(|rule| rule.table).collect();
        let Some(first) = tables.first() else {
            return Ok(Some(format!("the rule for what {source} sends is gone")));
        };
        // A requested table may contain routes of other programs.
        let needed = by_source::needed(asked, *address, *gateway).filter(|_| asked.table.is_none());
        let is_there = |needed: Needed| {
            let is_it = |route: &Route| needed.is(route.destination, route.gateway);
            routes.iter().any(|route| is_it(route) && route.table.is_some_and(|it| tables.contains(&it)))
        };
        if let Some(needed) = needed.filter(|needed| !is_there(*needed)) {
            return Ok(Some(format!("table {first} has lost {needed} for what {source} sends")));
        }
    }
    Ok(None)
}

/// Removes the rules for these addresses, like the reference plugin. Lists no rules, because the pod's administrator
/// may have created more rules than are read. If there are many for one address, the remaining ones end with the
/// namespace.
pub(in crate::attach) fn forget(
    pod: &mut Handle,
    asked: &BySource,
    sources: &[IpAddr],
) -> Result<(), StepError> {
    match asked.table {
        Some(table) => {
            let rules: Vec<_> = sources.iter().map(|source| (*source, table)).collect();
            Ok(pod.ensure_source_rules_absent(&rules)?)
        }
        None => Ok(pod.ensure_rules_from_absent(sources)?),
    }
}

/// Returns the addresses of an interface, for callers that do not know its former ones. Returns none if the interface
/// is gone or cannot be reported, or if it has more addresses than are read: the handle is unusable then.
pub(in crate::attach) fn sources_of(pod: &mut Handle, ifname: &str) -> Result<Vec<IpAddr>, StepError> {
    let Some(link) = pod.find_told(ifname)? else { return Ok(Vec::new()) };
    match pod.addresses(link.index) {
        Err(error) if error.is_too_many() => Ok(Vec::new()),
        found => Ok(found?.iter().map(IpNet::addr).collect()),
    }
}
