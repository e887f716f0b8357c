//! `hostAccess`: lets the node and a pod with a macvlan or an ipvlan on a parent of the node reach each other, which
//! the drivers prevent by default.
//!
//! The node gets a link of its own on the parent, of the same kind as its pods' links, and a route over that link to
//! each of the pod's addresses. Both sides get static neighbour entries instead of resolving addresses, so the link
//! answers no requests, and other stations never learn its address. The link receives no frames that stations send to
//! group addresses. It is created for the first pod and deleted after the last, which its routes show, so no other
//! state is needed.
//!
//! All ipvlans have their parent's Ethernet address. If a pod sends to that address and the destination is not
//! another ipvlan, the driver delivers the packet to the node as received on the parent (`ipvlan_xmit_mode_l2` in
//! `drivers/net/ipvlan/ipvlan_core.c`); what the parent sends goes only to the wire. So the node sends through its
//! link and receives through the parent, which a strict `rp_filter` drops.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use sha2::{Digest, Sha256};

use super::ensure_if_present;
use crate::attach::addresses::holder::{Address, AddressError, Holder};
use crate::attach::addresses::own;
use crate::attach::{Node, StepError};
use crate::cni::code;
use crate::mac::Mac;
use crate::netlink::{self, Handle, LinkState, RouteState};
use crate::netns::Netns;
use crate::plan::result::Leased;
use crate::plan::routing::MAIN_TABLE;
use crate::plan::{AttachmentPlan, Sandbox, host_access};
use crate::spec::{self, MacvlanMode, Route};
use crate::step::{Brought, HostAccess, Interface, Output, Reached};
use crate::sysctl;

/// `rtm_protocol` of the routes, which marks them as routes to pods. 111 is not assigned (`/etc/iproute2/rt_protos`).
const PROTOCOL: u8 = 111;

/// No reply for any address of the node (`arp_ignore`).
const NO_REPLY: &str = "8";

/// No link-local address (`addr_gen_mode`).
const NO_ADDRESS: &str = "1";

/// The kernel's names for the kinds of the node's links.
const MACVLAN: &str = "macvlan";
const IPVLAN: &str = "ipvlan";

/// Lock for creating and deleting the node's links on parents.
#[derive(Debug, Default)]
pub struct HostAccesses {
    turn: Mutex<()>,
}

impl HostAccesses {
    fn turn(&self) -> MutexGuard<'_, ()> {
        // The next holder of the lock completes what was left unfinished.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Chooses the link and the routes between the node and the pod. Changes nothing.
///
/// # Errors
/// The node has no address in the pod's subnets, or would drop packets that the pod sends to it.
pub(super) fn choose(
    host: &mut Handle,
    (link, parent): (&spec::Link, &Interface),
    leased: &Leased,
) -> Result<HostAccess, StepError> {
    let of_node = host.addresses(parent.index)?;
    let reached = host_access::reached(&leased.addresses, &of_node);
    if reached.is_empty() {
        // An interface has an IPv6 link-local address without any server.
        let is_local = |net: &IpNet| matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local());
        let device = parent.name.clone();
        return Err(match of_node.iter().all(is_local) {
            true => StepError::HostAccess(HostAccessError::NoAddressYet(device)),
            false => StepError::HostAccess(HostAccessError::NoAddress(device)),
        });
    }
    if matches!(link, spec::Link::Ipvlan(_))
        && reached.iter().any(|it| it.node.is_ipv4())
        && is_strict(&parent.name)
    {
        return Err(HostAccessError::StrictReversePath(parent.name.clone()).into());
    }
    Ok(HostAccess { device: host_access::device(parent.index), reached })
}

/// Whether the node drops packets that it receives on a device other than the one by which it would answer: the
/// larger of the device's own setting and that of `all` applies (`Documentation/networking/ip-sysctl.rst`).
fn is_strict(device: &str) -> bool {
    let is = |value| ["all", device].iter().any(|of| sysctl::is(&format!("ipv4/conf/{of}/rp_filter"), value));
    is("1") && !is("2")
}

/// Makes the node and the pod reach each other as chosen.
///
/// # Errors
/// The kernel refuses, another link has the name, or the node has another route to the pod's address.
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

/// Adds the node's routes to the pod's addresses. An existing route through another device is kept, whatever its
/// metric, and causes an error.
fn add_routes(host: &mut Handle, own: u32, reached: &[Reached]) -> Result<(), StepError> {
    let taken = |ip, holder| {
        StepError::Address(AddressError::Taken { address: Address::Ip(ip), holder: Holder::Route(holder) })
    };
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
            // The route was added meanwhile.
            Err(error) if error.already_exists() => return Err(taken(*pod, None)),
            other => other?,
        }
    }
    Ok(())
}

/// Whether a route of the node leads to a pod over the node's link with index `own`.
fn is_ours(route: &RouteState, own: u32) -> bool {
    route.interface == Some(own) && route.protocol == PROTOCOL
}

/// Returns the node's link on the parent of a pod's link; creates it if it does not exist.
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

/// Returns the error for a link that the kernel does not bring up: two macvlans of a parent that are up cannot have
/// the same address (`macvlan_open` in `drivers/net/macvlan.c`), and a pod may have given its own macvlan the node's
/// address.
fn not_up(error: netlink::Error, own: &LinkState, parent: &LinkState) -> StepError {
    match (error.errno(), own.mac) {
        (Some(rustix::io::Errno::ADDRINUSE), Some(mac)) => {
            let (address, holder) = (Address::Mac(mac), Holder::Sibling(parent.name.clone()));
            StepError::Address(AddressError::Taken { address, holder })
        }
        _ => error.into(),
    }
}

/// Prevents the node from answering for its addresses on a device, from getting a link-local address there, and from
/// accepting router advertisements.
///
/// # Errors
/// The kernel refuses a setting.
pub(in crate::attach) fn be_no_neighbour(name: &str) -> Result<(), StepError> {
    ensure_if_present(&format!("ipv4/conf/{name}/arp_ignore"), NO_REPLY)?;
    ensure_if_present(&format!("ipv6/conf/{name}/accept_ra"), "0")?;
    ensure_if_present(&format!("ipv6/conf/{name}/addr_gen_mode"), NO_ADDRESS)
}

/// Creates the link, down; `None`: another process has created it.
fn create(
    host: &mut Handle,
    (link, parent): (&spec::Link, &LinkState),
    name: &str,
) -> Result<Option<LinkState>, StepError> {
    let (pod_name, of_parent) = (name.to_owned(), Some(parent.name.clone()));
    let made = match link {
        // All ipvlans of a parent have one mode.
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

/// Returns the Ethernet address of the node's macvlan: always the same for one parent, because pods have static
/// entries for it.
fn mac_beside(parent: Mac) -> Mac {
    let digest = Sha256::new().chain_update("hostAccess").chain_update(parent.0).finalize();
    let mut address = [0x02; 6];
    address[1..].copy_from_slice(&digest[..5]);
    Mac(address)
}

/// Returns the name of the node's link on a parent if `mac` is the address of that link, whether the link exists
/// already or is created for the next pod.
pub(in crate::attach) fn taken_beside(parent: &LinkState, mac: Mac) -> Option<String> {
    (parent.mac.map(mac_beside) == Some(mac)).then(|| host_access::device(parent.index))
}

/// Removes the routes from the node to the pod, and the node's link with the last of them. Idempotent.
///
/// # Errors
/// The kernel refuses.
pub(in crate::attach) fn forget(node: &Node, chosen: &HostAccess) -> Result<(), StepError> {
    let pods: Vec<IpAddr> = chosen.reached.iter().map(|it| it.pod).collect();
    forget_pods(node, &mut Handle::open()?, &chosen.device, &pods)
}

/// Like [`forget`], for an attachment whose record does not say what was chosen: by the addresses that it still has,
/// on its parent. Idempotent.
///
/// # Errors
/// The kernel refuses, or the addresses cannot be determined.
pub(in crate::attach) fn forget_unrecorded(
    node: &Node,
    (sandbox, attachment): (&Sandbox, &AttachmentPlan),
    outputs: Brought<'_>,
) -> Result<(), StepError> {
    let recorded = outputs.iter().find_map(|output| match output {
        Output::Link { parent, .. } => parent.as_ref().map(|parent| parent.device.index),
        _ => None,
    });
    let mut host = Handle::open()?;
    let named = attachment.link().and_then(spec::Link::parent);
    let parent = match (recorded, named) {
        (Some(index), _) => Some(index),
        (None, Some(name)) => host.find_link(name)?.map(|link| link.index),
        (None, None) => None,
    };
    // Without a parent there is no link on it.
    let Some(parent) = parent else { return Ok(()) };
    let device = host_access::device(parent);
    if host.find_link(&device)?.is_none() {
        return Ok(());
    }
    let own = own::own(node, (sandbox, attachment), outputs, Some(parent))?;
    let pods: Vec<IpAddr> = own.into_iter().collect();
    forget_pods(node, &mut host, &device, &pods)
}

/// Removes the routes by the node's link of that name to these addresses, and the link with the last of all routes.
fn forget_pods(node: &Node, host: &mut Handle, device: &str, pods: &[IpAddr]) -> Result<(), StepError> {
    let _turn = node.host_accesses.turn();
    let Some(own) = host.find_link(device)?.filter(is_host_link) else { return Ok(()) };
    let (its, others): (Vec<RouteState>, Vec<RouteState>) = host
        .routes()?
        .into_iter()
        .filter(|route| is_ours(route, own.index))
        .partition(|route| pods.contains(&route.destination.addr()));
    if others.is_empty() {
        return Ok(host.ensure_link_absent(&own.name)?);
    }
    host.ensure_routes_absent(&its)?;
    Ok(host.ensure_neighbours_absent(own.index, pods)?)
}

/// Whether a link of the node is one that netattach created for `hostAccess`.
pub fn is_host_link(link: &LinkState) -> bool {
    [MACVLAN, IPVLAN].contains(&&*link.kind) && host_access::is_device(&link.name)
}

/// Describes what is missing between the node and the pod. `made`: the pod's end.
///
/// # Errors
/// The kernel's state cannot be read.
pub(in crate::attach) fn difference(
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
        // All ipvlans take over a new Ethernet address of their parent, and the kernel then drops static entries.
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

/// Why the node and a pod cannot reach each other.
#[derive(Debug, thiserror::Error)]
pub enum HostAccessError {
    /// The node has no address in a subnet of the pod.
    #[error("key hostAccess: {0} has no address of the node in a subnet of the pod")]
    NoAddress(String),
    /// The node has no address on the parent at all; one may follow, for example by DHCP when a node starts.
    #[error("key hostAccess: {0} has no address of the node yet")]
    NoAddressYet(String),
    /// The node would drop packets that the pod sends to it: it receives them on the parent, and answers through
    /// another link.
    #[error(
        "key hostAccess: the node drops what pods on ipvlans send to it (rp_filter is 1); set net.ipv4.conf.{0}.rp_filter to 2"
    )]
    StrictReversePath(String),
}

impl HostAccessError {
    /// The CNI code.
    pub(in crate::attach) fn code(&self) -> u32 {
        match self {
            // The node may be starting.
            Self::NoAddressYet(_) => code::TRY_AGAIN_LATER,
            Self::NoAddress(_) | Self::StrictReversePath(_) => code::INVALID_CONFIG,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::rig;
    use crate::journal::Store;
    use crate::netns::within;
    use crate::spec::{Macvlan, Veth};
    use crate::step::{Outputs, Step};
    use crate::sync::Arc;

    /// As of a damaged record. Needs root, like the agent.
    #[test]
    fn a_route_of_which_no_record_tells_goes_by_the_address_and_those_of_others_stay() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let [node, far] = [(); 2].map(|()| Netns::private().unwrap());
        within(&node, || {
            let journal = Store::open(directory.join("journal")).unwrap();
            let engine = rig::engine(directory, journal, &Arc::new(rig::Maps::default()));
            let mut host = Handle::open().unwrap();
            let (host_name, pod_name) = ("uplink".to_owned(), "peer".to_owned());
            let veth = Veth { host_name, pod_name, mtu: None, mac: None, group: 0, port: None };
            host.create_veth(&veth, None, far.as_fd(), &mut Handle::open_in(&far).unwrap()).unwrap();
            let parent = host.link("uplink").unwrap();
            host.ensure_up(parent.index).unwrap();
            let macvlan = spec::Link::Macvlan(Macvlan {
                pod_name: "eth0".to_owned(),
                parent: Some("uplink".to_owned()),
                mode: MacvlanMode::Bridge,
                mtu: None,
                mac: None,
                group: 0,
                broadcast_queue: None,
                tap: false,
                in_pod: false,
            });
            let own = create(&mut host, (&macvlan, &parent), &host_access::device(parent.index));
            let own = own.unwrap().unwrap().index;
            host.ensure_up(own).unwrap();
            for last in [2, 9] {
                let to = IpNet::from(IpAddr::from([10, 1, 0, last]));
                let route = Route { protocol: Some(PROTOCOL), ..Route::on_link(to) };
                host.add_route(own, &route).unwrap();
            }
            let mut plan = rig::plan(directory, "a", 1);
            let steps = &mut plan.attachments[0].steps;
            steps.truncate(1);
            steps.extend([Step::CreateLink(macvlan), Step::ChooseHostAccess]);
            rig::lease(&engine, &plan);
            let outputs = Outputs::default();
            for _ in 0..2 {
                let of = (&plan.sandbox, &plan.attachments[0]);
                forget_unrecorded(&engine.node, of, outputs.of(0)).unwrap();
                let routes = host.routes().unwrap().into_iter().filter(|route| is_ours(route, own));
                let left: Vec<IpAddr> = routes.map(|route| route.destination.addr()).collect();
                assert_eq!(left, [IpAddr::from([10, 1, 0, 9])]);
            }
        })
        .unwrap();
    }
}
