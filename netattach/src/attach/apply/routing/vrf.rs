//! Makes a pod's interface a port of a VRF, removes it again, and compares it.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::RoutingError;
use crate::attach::StepError;
use crate::attach::apply::LinkError;
use crate::cni::code;
use crate::link::vrf::KIND;
use crate::netlink::{self, Handle, LinkState};
use crate::plan::routing::metric;
use crate::plan::vrf;
use crate::spec::{Route, Vrf, VrfPort};

/// Most routes of one interface that are moved. More routes can only come from another program.
const MOST_ROUTES: usize = 1024;

/// Chooses the table, and the routes that the interface has afterwards. Changes nothing.
pub(in crate::attach) fn choose(pod: &mut Handle, ifname: &str, asked: &Vrf) -> Result<VrfPort, StepError> {
    let link = pod.link(ifname)?;
    if let Some(index) = link.controller {
        let controller = pod.link_by_index(index)?.name;
        return Err(VrfError::PortOfAnother { ifname: ifname.to_owned(), controller }.into());
    }
    let present = find(pod, &asked.name)?;
    let table = match &present {
        Some((vrf, table)) => {
            check_table(vrf, *table, asked.table)?;
            *table
        }
        None => free_table(pod, asked)?,
    };
    if let Some((destination, what)) = pod.undescribed_route_by(link.index)? {
        return Err(VrfError::RouteNotKept { ifname: ifname.to_owned(), destination, what }.into());
    }
    let routes = pod.routes_of_all_tables_by(link.index)?;
    if routes.len() > MOST_ROUTES {
        let (ifname, found) = (ifname.to_owned(), routes.len());
        return Err(RoutingError::ManyRoutes { plugin: KIND, ifname, found, most: MOST_ROUTES }.into());
    }
    Ok(VrfPort {
        name: asked.name.clone(),
        table,
        made: present.is_none(),
        index: link.index,
        routes: vrf::kept(&routes, table),
    })
}

/// Creates the VRF if it does not exist, and makes the interface its port, with its former addresses and routes.
pub(in crate::attach) fn join(pod: &mut Handle, chosen: &VrfPort) -> Result<(), StepError> {
    let vrf = match find(pod, &chosen.name)? {
        Some((vrf, table)) => {
            check_table(&vrf, table, Some(chosen.table))?;
            if !vrf.up {
                pod.ensure_up(vrf.index)?;
            }
            vrf
        }
        None => pod.create_vrf(&chosen.name, chosen.table).map_err(|source| match source.errno() {
            Some(rustix::io::Errno::OPNOTSUPP) => StepError::Link(LinkError::NoDriver { kind: KIND, source }),
            _ => source.into(),
        })?,
    };
    // The kernel sets a new port down and up, which removes its routes, and its IPv6 addresses unless a setting keeps
    // them.
    let kept = pod.v6_addresses_to_keep(chosen.index)?;
    pod.set_controller(chosen.index, vrf.index)?;
    pod.ensure_kept_addresses(kept)?;
    for route in &chosen.routes {
        pod.ensure_route_beside_others(chosen.index, route)?;
    }
    Ok(())
}

/// How an interface's VRF is identified when it leaves.
#[derive(Clone, Copy)]
pub(in crate::attach) enum By<'a> {
    /// The record of the choice: the VRF is deleted with its last port if netattach has created it.
    Record(&'a VrfPort),
    /// Names alone, as with the reference plugin: the VRF is deleted with its last port, whoever created it.
    Name(&'a str),
}

/// Removes an interface from a VRF, and deletes the VRF once it has no ports. Objects that are gone need nothing.
pub(in crate::attach) fn leave(pod: &mut Handle, ifname: &str, by: By<'_>) -> Result<(), StepError> {
    let (name, made) = match by {
        By::Record(chosen) => (chosen.name.as_str(), Some(chosen.index)),
        By::Name(name) => (name, None),
    };
    // If the kernel cannot report the link, it is another link to which the pod gave this name: a VRF never has too
    // many attributes.
    let found = pod.find_told(name)?.filter(|link| link.kind == KIND);
    let Some(found) = found else { return Ok(()) };
    let port = match made.map(|index| pod.link_by_index(index)) {
        Some(Err(netlink::Error::NoSuchLink(_))) => None,
        // The kernel deletes the port with its namespace, as it does the VRF.
        Some(Err(error)) if error.is_untold() => None,
        Some(port) => Some(port?),
        None => pod.find_told(ifname)?,
    };
    if let Some(port) = port.filter(|port| port.controller == Some(found.index)) {
        if let By::Record(_) = by {
            // While the link is up, the main table would route through it until it is deleted.
            pod.ensure_down(port.index)?;
        }
        pod.ensure_no_controller(port.index)?;
    }
    let goes = match by {
        By::Record(chosen) => vrf::goes(chosen, found.own, found.table),
        By::Name(_) => true,
    };
    if goes && !pod.has_ports(found.index)? {
        pod.ensure_link_absent(name)?;
    }
    Ok(())
}

/// Describes the first difference. If no table is given, any table is right.
pub(in crate::attach) fn difference(
    pod: &mut Handle,
    ifname: &str,
    (name, table): (&str, Option<u32>),
    routes: &[Route],
) -> Result<Option<String>, StepError> {
    let Some(vrf) = pod.find_link(name)?.filter(|link| link.kind == KIND) else {
        return Ok(Some(format!("VRF {name} is gone")));
    };
    let present = vrf.table.unwrap_or_default();
    if let Some(table) = table.filter(|table| *table != present) {
        return Ok(Some(format!("VRF {name} has table {present}, not {table}")));
    }
    if !vrf.up {
        return Ok(Some(format!("VRF {name} is down")));
    }
    let Some(port) = pod.find_link(ifname)?.filter(|link| link.controller == Some(vrf.index)) else {
        return Ok(Some(format!("interface {ifname} is not in VRF {name}")));
    };
    if routes.is_empty() {
        return Ok(None);
    }
    let found = pod.routes_of_all_tables_by(port.index)?;
    let is_there = |route: &&Route| {
        found.iter().any(|found| {
            found.destination == route.destination.trunc()
                && found.gateway == route.gateway
                && found.table == route.table
                && metric(found) == metric(route)
        })
    };
    Ok(routes.iter().find(|route| !is_there(route)).map(|route| {
        format!("the route to {} in table {} is gone", route.destination, route.table.unwrap_or_default())
    }))
}

/// Returns the VRF with that name, and its table.
fn find(pod: &mut Handle, name: &str) -> Result<Option<(LinkState, u32)>, StepError> {
    let Some(link) = pod.find_link(name)? else { return Ok(None) };
    if link.kind != KIND {
        let actual = if link.kind.is_empty() { "a device".to_owned() } else { format!("a {}", link.kind) };
        return Err(netlink::Error::WrongKind { name: link.name, wanted: "a VRF", actual }.into());
    }
    let table = link.table.unwrap_or_default();
    Ok(Some((link, table)))
}

fn check_table(vrf: &LinkState, present: u32, wanted: Option<u32>) -> Result<(), StepError> {
    match wanted.filter(|wanted| *wanted != present) {
        Some(wanted) => Err(VrfError::OtherTable { name: vrf.name.clone(), present, wanted }.into()),
        None => Ok(()),
    }
}

/// Returns the table for a new VRF.
fn free_table(pod: &mut Handle, asked: &Vrf) -> Result<u32, StepError> {
    let taken = match asked.table {
        Some(table) => {
            let of_rules = pod.tables_of_rules()?.into_iter().collect();
            if let Some(owner) = vrf::owner(table, &of_rules) {
                return Err(VrfError::TableTaken { table, owner }.into());
            }
            BTreeSet::new()
        }
        None => taken(pod)?,
    };
    vrf::table(asked, &taken).ok_or(StepError::Missing("a routing table that nothing uses"))
}

/// Returns the tables that routes, rules and VRFs use.
pub(super) fn taken(pod: &mut Handle) -> Result<BTreeSet<u32>, StepError> {
    let mut taken = pod.tables_in_use()?;
    taken.extend(pod.links()?.iter().filter_map(|link| link.table));
    Ok(taken)
}

/// Why an interface cannot become a port of a VRF.
#[derive(Debug, thiserror::Error)]
pub enum VrfError {
    /// The interface for a VRF is already a port of another link.
    #[error("vrf: {ifname} is a port of {controller} already")]
    PortOfAnother {
        /// The interface.
        ifname: String,
        /// The link that it is a port of.
        controller: String,
    },
    /// The existing VRF has another table.
    #[error("key table: VRF {name} is there with table {present}, not {wanted}")]
    OtherTable {
        /// Name of the VRF.
        name: String,
        /// Its table.
        present: u32,
        /// The requested table.
        wanted: u32,
    },
    /// A route of an interface cannot be moved to another table.
    #[error("vrf: the route of {ifname} to {destination} has {what}, and would not be there afterwards")]
    RouteNotKept {
        /// The interface.
        ifname: String,
        /// The route's destination.
        destination: IpNet,
        /// The attribute of the route that cannot be kept.
        what: &'static str,
    },
    /// The table for a VRF has another use.
    #[error("key table: {table} is {owner}")]
    TableTaken {
        /// The table.
        table: u32,
        /// Its use.
        owner: &'static str,
    },
}

impl VrfError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            Self::PortOfAnother { .. }
            | Self::OtherTable { .. }
            | Self::RouteNotKept { .. }
            | Self::TableTaken { .. } => code::INVALID_CONFIG,
        }
    }
}
