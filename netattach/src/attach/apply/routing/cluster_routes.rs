//! Keeps cluster traffic on the cluster's interface while the pod's default routes move, and compares the routes
//! later.

use ipnet::IpNet;

use super::{described, is, route_by_source};
use crate::attach::StepError;
use crate::netlink::Handle;
use crate::plan::cluster_routes::{ClusterSide, kept};
use crate::plan::routing::MAIN_TABLE;
use crate::spec::Route;
use crate::step::Kept;

/// Reads the state of the cluster's interface; `None` if it does not exist.
pub(in crate::attach) fn look(pod: &mut Handle, ifname: &str) -> Result<Option<ClusterSide>, StepError> {
    let Some(link) = pod.find_link(ifname)? else { return Ok(None) };
    let all = pod.routes_in(MAIN_TABLE)?;
    Ok(Some(ClusterSide {
        ifname: link.name,
        index: link.index,
        addresses: pod.addresses(link.index)?,
        routes: all.iter().filter(|route| route.interface == Some(link.index)).map(described).collect(),
        taken: all.iter().map(|route| route.destination).collect(),
    }))
}

/// Adds the routes and rules that keep cluster traffic where it was before these default routes moved.
pub(in crate::attach) fn keep(
    pod: &mut Handle,
    side: &ClusterSide,
    moved: &[Route],
    destinations: &[IpNet],
) -> Result<Option<Kept>, StepError> {
    let Some(kept) = kept(side, moved, destinations) else { return Ok(None) };
    pod.ensure_routes(side.index, &kept.routes)?;
    route_by_source(pod, std::slice::from_ref(&kept.answers))?;
    Ok(Some(kept))
}

/// Describes the first missing kept route. The table by source is compared with those of all interfaces.
pub(super) fn compare(kept: &Kept, pod: &mut Handle) -> Result<Option<String>, StepError> {
    let index = pod.find_link(&kept.answers.ifname)?.map(|link| link.index);
    let found = pod.routes_in(MAIN_TABLE)?;
    let is_there = |route: &&Route| {
        found.iter().any(|found| {
            found.interface == index && found.destination == route.destination && is(found, route)
        })
    };
    let gone = kept.routes.iter().find(|route| !is_there(route));
    Ok(gone.map(|route| {
        format!("the route to {} of the cluster by {} is gone", route.destination, kept.answers.ifname)
    }))
}
