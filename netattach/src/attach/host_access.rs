//! `hostAccess`: the node and a pod with a macvlan or an ipvlan on a parent of the node reach each other, which the drivers keep
//! apart.
//!
//! The node gets a link of its own on the parent, of the kind of its pods' links, and a route over it to each of the pod's
//! addresses. Neither side asks for the other's Ethernet address: both are entered, so that the link answers nobody, and other
//! stations never learn of it. What stations send to groups does not come in by it. The link comes with the first pod and goes
//! with the last, which the routes over it tell: nothing else has to be remembered.
//!
//! All ipvlans have their parent's Ethernet address. What a pod sends there and is no ipvlan's the driver hands to the node as
//! received by the parent (`ipvlan_xmit_mode_l2` in `drivers/net/ipvlan/ipvlan_core.c`); what the parent sends goes to the wire
//! alone. So the node sends by its link and receives by the parent, which a strict `rp_filter` does not let pass.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use super::apply::ensure_if_present;
use super::occupied::{Address, Holder};
use super::{Node, StepError};
use crate::mac::Mac;
use crate::netlink::{self, Handle, LinkState, RouteState};
use crate::netns::Netns;
use crate::plan::host_access;
use crate::plan::result::Leased;
use crate::plan::routing::MAIN_TABLE;
use crate::spec::{self, MacvlanMode, Route};
use crate::step::{HostAccess, Interface, Reached};
use crate::sysctl;

/// `rtm_protocol` of the routes: by it they are known to be pods'. 111 is in nobody's list (`/etc/iproute2/rt_protos`).
const PROTOCOL: u8 = 111;

/// No reply for any address of the node (`arp_ignore`).
const NO_REPLY: &str = "8";

/// No link-local address (`addr_gen_mode`).
const NO_ADDRESS: &str = "1";

/// The kernel's names for the kinds of the node's links.
const MACVLAN: &str = "macvlan";
const IPVLAN: &str = "ipvlan";

/// The right to make the node's links on parents, and to remove them.
#[derive(Debug, Default)]
pub struct HostAccesses {
    turn: Mutex<()>,
}

impl HostAccesses {
    fn turn(&self) -> MutexGuard<'_, ()> {
        // What was left half done is done by the next that has the turn.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Chooses what leads from the node to the pod and back. Changes nothing.
///
/// # Errors
/// The node has no address in the pod's subnets, or would drop what the pod sends to it.
pub(super) fn choose(
    host: &mut Handle,
    (link, parent): (&spec::Link, &Interface),
    leased: &Leased,
) -> Result<HostAccess, StepError> {
    let of_node = host.addresses(parent.index)?;
    let reached = host_access::reached(&leased.addresses, &of_node);
    if reached.is_empty() {
        // An IPv6 link has an address of its own that no server gives.
        let is_local = |net: &IpNet| matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local());
        let device = parent.name.clone();
        return Err(match of_node.iter().all(is_local) {
            true => StepError::NoAddressYet(device),
            false => StepError::NoHostAddress(device),
        });
    }
    if matches!(link, spec::Link::Ipvlan(_))
        && reached.iter().any(|it| it.node.is_ipv4())
        && is_strict(&parent.name)
    {
        return Err(StepError::StrictReversePath(parent.name.clone()));
    }
    Ok(HostAccess { device: host_access::device(parent.index), reached })
}

/// Whether the node drops what it receives by a device that is not the one by which it would answer: the larger of the
/// device's own setting and that of all counts (`Documentation/networking/ip-sysctl.rst`).
fn is_strict(device: &str) -> bool {
    let is = |value| ["all", device].iter().any(|of| sysctl::is(&format!("ipv4/conf/{of}/rp_filter"), value));
    is("1") && !is("2")
}

/// Has the node and the pod reach each other as chosen.
///
/// # Errors
/// The kernel refuses, another link has the name, or the node has a route to the pod's address that leads elsewhere.
pub(super) fn give(
    node: &Node,
    (host, pod): (&mut Handle, &mut Handle),
    (link, parent, made): (&spec::Link, &LinkState, &Interface),
    chosen: &HostAccess,
) -> Result<(), StepError> {
    let _turn = node.host_accesses.turn();
    let own = ensure_link(node, host, (link, parent), &chosen.device)?;
    add_routes(host, own.index, &chosen.reached)?;
    let (Some(of_pod), Some(of_node)) = (made.mac, own.mac) else {
        return Err(StepError::Missing("an Ethernet address"));
    };
    let pods: Vec<_> = chosen.reached.iter().map(|it| (it.pod, of_pod)).collect();
    let mut nodes: Vec<_> = chosen.reached.iter().map(|it| (it.node, of_node)).collect();
    nodes.dedup();
    host.ensure_neighbours(own.index, &pods)?;
    Ok(pod.ensure_neighbours(made.index, &nodes)?)
}

/// Adds the node's routes to the pod's addresses. One that leads elsewhere stands, whatever its metric: it is another's.
fn add_routes(host: &mut Handle, own: u32, reached: &[Reached]) -> Result<(), StepError> {
    let taken =
        |ip, holder| StepError::AddressTaken { address: Address::Ip(ip), holder: Holder::Route(holder) };
    let mut present = host.routes()?;
    present.retain(|route| reached.iter().any(|it| route.destination == IpNet::from(it.pod)));
    let (stale, others): (Vec<RouteState>, Vec<RouteState>) =
        present.into_iter().partition(|route| is_ours(route, own));
    if let Some(other) = others.first() {
        let device = other.interface.map(|index| host.link_by_index(index).map(|link| link.name));
        return Err(taken(other.destination.addr(), device.transpose()?));
    }
    host.ensure_routes_absent(&stale)?;
    for Reached { pod, node } in reached {
        let route =
            Route { source: Some(*node), protocol: Some(PROTOCOL), ..Route::on_link(IpNet::from(*pod)) };
        match host.add_route(own, &route) {
            // It has come since.
            Err(error) if error.already_exists() => return Err(taken(*pod, None)),
            other => other?,
        }
    }
    Ok(())
}

/// Whether a route of the node is one that leads to a pod over the node's link of that index.
fn is_ours(route: &RouteState, own: u32) -> bool {
    route.interface == Some(own) && route.protocol == PROTOCOL
}

/// The node's link on the parent beside a pod's, which is made if it is not there.
fn ensure_link(
    node: &Node,
    host: &mut Handle,
    (link, parent): (&spec::Link, &LinkState),
    name: &str,
) -> Result<LinkState, StepError> {
    let found = match host.find_link(name)? {
        Some(found) => Some(found),
        None => create(host, (link, parent), name)?,
    };
    let found = found.map_or_else(|| host.link(name), Ok)?;
    let wanted = if matches!(link, spec::Link::Ipvlan(_)) { IPVLAN } else { MACVLAN };
    if found.kind != wanted || found.link != Some(parent.index) {
        let actual = format!("a {} of another parent", found.kind);
        return Err(netlink::Error::WrongKind { name: name.to_owned(), wanted, actual }.into());
    }
    if !found.own {
        host.mark_own(found.index)?;
    }
    be_no_neighbour(name)?;
    if let Some(enforcer) = &node.enforcer {
        enforcer.drop_groups(found.index, host)?;
    }
    host.ensure_up(found.index).map_err(|error| not_up(error, &found, parent))?;
    Ok(found)
}

/// The error for a link that the kernel does not bring up: no two macvlans of a parent that are up have one address
/// (`macvlan_open` in `drivers/net/macvlan.c`), and a pod may have given its own the node's.
fn not_up(error: netlink::Error, own: &LinkState, parent: &LinkState) -> StepError {
    match (error.errno(), own.mac) {
        (Some(rustix::io::Errno::ADDRINUSE), Some(mac)) => {
            let (address, holder) = (Address::Mac(mac), Holder::Sibling(parent.name.clone()));
            StepError::AddressTaken { address, holder }
        }
        _ => error.into(),
    }
}

/// Has the node neither answer for an address of its own by a device, nor get a link-local one or routes there.
///
/// # Errors
/// The kernel refuses a setting.
pub(super) fn be_no_neighbour(name: &str) -> Result<(), StepError> {
    ensure_if_present(&format!("ipv4/conf/{name}/arp_ignore"), NO_REPLY)?;
    ensure_if_present(&format!("ipv6/conf/{name}/accept_ra"), "0")?;
    ensure_if_present(&format!("ipv6/conf/{name}/addr_gen_mode"), NO_ADDRESS)
}

/// Makes it, down; `None`: somebody else has.
fn create(
    host: &mut Handle,
    (link, parent): (&spec::Link, &LinkState),
    name: &str,
) -> Result<Option<LinkState>, StepError> {
    let (pod_name, of_parent) = (name.to_owned(), Some(parent.name.clone()));
    let made = match link {
        // The parent has one mode for all.
        spec::Link::Ipvlan(spec::Ipvlan { mode, .. }) => {
            let (mode, mtu, group, in_pod) = (*mode, None, 0, false);
            let wanted = spec::Ipvlan { pod_name, parent: of_parent, mode, mtu, group, in_pod };
            host.create_ipvlan_here(&wanted, parent)
        }
        _ => {
            let wanted = spec::Macvlan {
                pod_name,
                parent: of_parent,
                mode: MacvlanMode::Bridge,
                mtu: None,
                mac: parent.mac.map(mac_beside),
                group: 0,
                broadcast_queue: None,
                tap: false,
                in_pod: false,
            };
            let (own, mut inside) = (Netns::current()?, Handle::open()?);
            host.create_macvlan(&wanted, parent, own.as_fd(), &mut inside)
        }
    };
    match made {
        Ok(made) => Ok(Some(made)),
        Err(error) if error.already_exists() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The Ethernet address of the node's macvlan: always the same for one parent, as pods know it.
fn mac_beside(parent: Mac) -> Mac {
    let digest = Sha256::new().chain_update("hostAccess").chain_update(parent.0).finalize();
    let mut address = [0x02; 6];
    address[1..].copy_from_slice(&digest[..5]);
    Mac(address)
}

/// The name of the node's link on a parent if the address is that link's, whether it is there already or comes with the
/// next pod.
pub(super) fn taken_beside(parent: &LinkState, mac: Mac) -> Option<String> {
    (parent.mac.map(mac_beside) == Some(mac)).then(|| host_access::device(parent.index))
}

/// Takes back what leads from the node to the pod, and the node's link with the last. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub(super) fn forget(node: &Node, chosen: &HostAccess) -> Result<(), StepError> {
    let _turn = node.host_accesses.turn();
    let mut host = Handle::open()?;
    let Some(own) = host.find_link(&chosen.device)?.filter(is_host_link) else { return Ok(()) };
    let pods: Vec<IpAddr> = chosen.reached.iter().map(|it| it.pod).collect();
    let (its, others): (Vec<RouteState>, Vec<RouteState>) = host
        .routes()?
        .into_iter()
        .filter(|route| is_ours(route, own.index))
        .partition(|route| pods.contains(&route.destination.addr()));
    if others.is_empty() {
        return Ok(host.ensure_link_absent(&own.name)?);
    }
    host.ensure_routes_absent(&its)?;
    Ok(host.ensure_neighbours_absent(own.index, &pods)?)
}

/// Whether a link of the node is one that netattach has made for pods to reach it.
pub fn is_host_link(link: &LinkState) -> bool {
    [MACVLAN, IPVLAN].contains(&&*link.kind) && host_access::is_device(&link.name)
}

/// What is missing of what leads from the node to the pod and back, in words. `made`: the pod's end.
///
/// # Errors
/// The kernel's state cannot be read.
pub(super) fn difference(
    (host, pod): (&mut Handle, &mut Handle),
    made: Option<&LinkState>,
    chosen: &HostAccess,
) -> Result<Option<String>, StepError> {
    let device = &chosen.device;
    let Some(own) = host.find_link(device)?.filter(|link| is_host_link(link) && link.up) else {
        return Ok(Some(format!("link {device}, by which the node reaches the pod, is gone or down")));
    };
    let routes = host.routes_in(MAIN_TABLE)?;
    let is_there = |pod: IpAddr| {
        let leads =
            |route: &RouteState| route.destination == IpNet::from(pod) && route.interface == Some(own.index);
        routes.iter().any(leads)
    };
    if let Some(missing) = chosen.reached.iter().find(|it| !is_there(it.pod)) {
        return Ok(Some(format!("the node's route to {} is gone", missing.pod)));
    }
    if let Some(parent) = own.link.filter(|_| own.kind == IPVLAN) {
        let parent = host.link_by_index(parent)?.name;
        if chosen.reached.iter().any(|it| it.node.is_ipv4()) && is_strict(&parent) {
            return Ok(Some(format!("the node drops what the pod sends to it: rp_filter is 1 for {parent}")));
        }
    }
    let Some(made) = made else { return Ok(None) };
    for Reached { pod: of_pod, node: of_node } in &chosen.reached {
        // All ipvlans follow a new address of their parent, and the kernel forgets what was entered.
        for (handle, index, who, whose, address, mac) in [
            (&mut *host, own.index, "node", "pod's", of_pod, made.mac),
            (&mut *pod, made.index, "pod", "node's", of_node, own.mac),
        ] {
            if handle.neighbour(index, *address)? != mac {
                let mac = mac.map(|mac| mac.to_string()).unwrap_or_default();
                return Ok(Some(format!("the {who} does not know the {whose} address {address} as {mac}")));
            }
        }
    }
    Ok(None)
}
