//! Determines by which addresses the node's packet filter finds an attachment: those that the node itself
//! routes to it.
//!
//! The table of the packet filter assumes that all traffic routed from and to such an address belongs to
//! this pod. On a layer-2 network that does not hold: another host may have the address there, and the node
//! routes to that host, or elsewhere.

use std::net::IpAddr;

use crate::netlink::{self, Handle, LinkState};
use crate::plan::result::{Ends, Leased};
use crate::plan::{AttachmentPlan, Sandbox, author, host_access};
use crate::step::{LeasedAddress, MadeBy, Step};

/// The addresses that the node routes to an attachment by a device of the attachment's own, according to its plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RoutedTo {
    /// None: its network is a layer-2 network without routing by the node.
    None,
    /// These addresses, by its end on the node, or by its bridge, which has the gateways.
    These(Vec<IpAddr>),
    /// The addresses in a subnet that the node has on this parent (`hostAccess`), by the node's own link on the
    /// parent.
    Beside {
        /// Index of the parent.
        parent: u32,
        /// The pod's addresses.
        leased: Vec<LeasedAddress>,
    },
    /// Another plugin made its interface. The pod did not choose these addresses: the node routes to them
    /// if its end is no bridge port, or if the node routes to them by that bridge.
    Found(Vec<IpAddr>),
}

impl RoutedTo {
    /// Returns the addresses that the node routes to an attachment with these addresses.
    pub(super) fn of(
        (sandbox, attachment): (&Sandbox, &AttachmentPlan),
        leased: &Leased,
        ends: Option<&Ends>,
    ) -> Self {
        let addresses = || leased.addresses.iter().map(|leased| leased.address);
        let has = |is_one: fn(&Step) -> bool| attachment.steps.iter().any(is_one);
        match attachment.made_by() {
            MadeBy::Link(link) if link.is_routed() || has(|step| matches!(step, Step::Gateway { .. })) => {
                Self::These(addresses().map(|address| address.addr()).collect())
            }
            MadeBy::Link(_) if has(|step| matches!(step, Step::ChooseHostAccess)) => {
                match ends.and_then(|ends| ends.parent.as_ref()) {
                    Some(parent) => {
                        Self::Beside { parent: parent.device.index, leased: leased.addresses.clone() }
                    }
                    None => Self::None,
                }
            }
            MadeBy::Plugin => {
                let given = addresses().filter(|it| author::subnet(sandbox, attachment, *it).is_some());
                Self::Found(given.map(|address| address.addr()).collect())
            }
            MadeBy::Link(_) | MadeBy::Device(_) | MadeBy::Kernel => Self::None,
        }
    }

    /// Returns the addresses according to the kernel's present state. `end`: index of the attachment's end
    /// on the node, if its frames are seen there.
    ///
    /// # Errors
    /// The kernel could not be queried.
    pub(super) fn addresses(
        &self,
        end: Option<u32>,
        host: &mut Handle,
    ) -> Result<Vec<IpAddr>, netlink::Error> {
        match self {
            Self::None => Ok(Vec::new()),
            Self::These(addresses) => Ok(addresses.clone()),
            Self::Beside { parent, leased } => {
                let reached = host_access::reached(leased, &host.addresses(*parent)?);
                Ok(reached.into_iter().map(|reached| reached.pod).collect())
            }
            Self::Found(addresses) => match end {
                Some(end) => found(addresses, end, host),
                None => Ok(Vec::new()),
            },
        }
    }
}

/// Returns those of these addresses that the node routes by that end of an interface which another plugin
/// has made.
fn found(addresses: &[IpAddr], end: u32, host: &mut Handle) -> Result<Vec<IpAddr>, netlink::Error> {
    let Some(end) = host.forwarding_state(end)? else { return Ok(Vec::new()) };
    let controller = match end.controller {
        Some(index) => host.forwarding_state(index)?,
        None => None,
    };
    // Routes of an Open vSwitch to its ports are not visible here.
    let Some(bridge) = controller.filter(|link| link.bridge.is_some()) else { return Ok(addresses.to_vec()) };
    let mut routed = Vec::with_capacity(addresses.len());
    for address in addresses {
        if gateway_on(bridge.index, *address, host)?.is_some() {
            routed.push(*address);
        }
    }
    Ok(routed)
}

/// Returns the link by which the node routes to an address over a bridge: the bridge itself, or the node's end of a
/// veth to it.
///
/// # Errors
/// The kernel could not be queried.
pub(super) fn gateway_on(
    bridge: u32,
    address: IpAddr,
    host: &mut Handle,
) -> Result<Option<u32>, netlink::Error> {
    let by = host.matching_route(address)?.and_then(|route| route.interface);
    Ok(match by {
        Some(by) if leads_to_bridge(by, bridge, host)? => Some(by),
        _ => None,
    })
}

/// Whether packets that leave by a link of the node reach a bridge: the link is the bridge, or a veth whose other end
/// is a port of it. The reference plugin `bridge` with `vlan` has its gateway on such a veth.
fn leads_to_bridge(link: u32, bridge: u32, host: &mut Handle) -> Result<bool, netlink::Error> {
    if link == bridge {
        return Ok(true);
    }
    let Some(peer) = shown(link, host)?.and_then(|link| link.link) else { return Ok(false) };
    // The other end of a veth may be in another namespace, and its index may belong to another link here.
    let port = shown(peer, host)?.filter(|port| port.link == Some(link));
    Ok(port.is_some_and(|port| port.controller == Some(bridge)))
}

/// Returns a link of the node; `None`: it is gone.
fn shown(index: u32, host: &mut Handle) -> Result<Option<LinkState>, netlink::Error> {
    match host.link_by_index(index) {
        Err(error) if error.not_found() => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use serde_json::json;

    use super::*;
    use crate::netns::{Netns, within};
    use crate::plan::fixtures;
    use crate::spec::{self, Addressing, Veth};
    use crate::step::{Delegate, Interface, Parent, Role};

    fn leased(addresses: &[&str]) -> Leased {
        let leased = |text: &&str| LeasedAddress { address: text.parse().unwrap(), gateway: None };
        Leased { addresses: addresses.iter().map(leased).collect(), ..Leased::default() }
    }

    fn veth(port: Option<spec::BridgePort>) -> Step {
        let (host_name, pod_name) = ("na0".to_owned(), "net1".to_owned());
        Step::CreateLink(spec::Link::Veth(Veth { host_name, pod_name, mtu: None, mac: None, group: 0, port }))
    }

    fn macvlan() -> Step {
        Step::CreateLink(spec::Link::Macvlan(spec::Macvlan::plain("net1", "wire0")))
    }

    /// Rows: SVC-layer-2.
    #[test]
    fn an_address_leads_to_an_attachment_where_the_node_routes_to_it_and_nowhere_else() {
        let port = || Some(spec::BridgePort { bridge: "br0".to_owned(), ..spec::BridgePort::default() });
        let gateway = Step::Gateway { bridge: "br0".to_owned(), force: false, beside: false, vlan: None };
        let config = json!({
            "name": "n", "cniVersion": "1.0.0", "ipam": {"type": "other"},
            "runtimeConfig": {"ips": ["10.9.0.8/24"]},
        });
        let plugin = Step::Delegate(Delegate {
            plugin: "foreign".to_owned(),
            config: config.as_object().unwrap().clone(),
            role: Role::Plugin,
        });
        let both = leased(&["10.9.0.7/24", "10.9.0.8/24"]);
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let all = || RoutedTo::These(ips(&["10.9.0.7", "10.9.0.8"]));
        let beside = RoutedTo::Beside { parent: 7, leased: both.addresses.clone() };
        let interface = |name: &str, index| Interface { name: name.to_owned(), index, mac: None, mtu: 1500 };
        let parent = Parent { device: interface("wire0", 7), netns_cookie: 9, trunks: Vec::new() };
        let ends = Ends { host: None, pod: interface("net1", 4), parent: Some(parent) };
        for (steps, expected) in [
            (vec![veth(None)], all()),
            (vec![veth(port()), gateway], all()),
            (vec![veth(port())], RoutedTo::None),
            (vec![macvlan(), Step::ChooseHostAccess], beside),
            (vec![macvlan()], RoutedTo::None),
            (vec![Step::ClaimDevice(fixtures::device())], RoutedTo::None),
            // An address that the pod has asked for may belong to another host.
            (vec![plugin], RoutedTo::Found(ips(&["10.9.0.7"]))),
        ] {
            let attachment = fixtures::attachment("any", steps);
            let found = RoutedTo::of((&fixtures::sandbox("c1"), &attachment), &both, Some(&ends));
            assert_eq!(found, expected, "{:?}", attachment.steps);
        }
    }

    /// Rows: SVC-layer-2.
    #[test]
    fn of_another_plugins_port_the_routes_by_its_bridge_count_and_of_a_parent_the_subnets_of_the_node() {
        let node = Netns::private().unwrap();
        within(&node, || {
            let mut host = Handle::open().unwrap();
            let bridge = |name: &str| spec::Bridge { name: name.to_owned(), ..spec::Bridge::default() };
            let [routing, switching] =
                ["routing0", "switching0"].map(|name| host.ensure_bridge(&bridge(name)).unwrap().link.index);
            let addressing =
                |text: &str| Addressing { addresses: vec![text.parse().unwrap()], ..Addressing::default() };
            host.configure(routing, &addressing("10.9.0.1/24")).unwrap();
            // A port of each; a bridge itself is no port.
            for (name, on) in [("a", routing), ("b", switching)] {
                let port = spec::BridgePort { bridge: name.to_owned(), ..spec::BridgePort::default() };
                let [host_name, pod_name] = [format!("{name}0"), format!("{name}1")];
                let veth = Veth { host_name, pod_name, mtu: None, mac: None, group: 0, port: Some(port) };
                let (own, mut inside) = (Netns::current().unwrap(), Handle::open().unwrap());
                host.create_veth(&veth, Some(on), own.as_fd(), &mut inside).unwrap();
            }
            let [a, b] = ["a0", "b0"].map(|name| host.link(name).unwrap().index);
            let [here, elsewhere]: [IpAddr; 2] = ["10.9.0.7", "10.8.0.7"].map(|it| it.parse().unwrap());
            // The node's end of a veth to the bridge, as for a gateway in a VLAN.
            let gateway = host.link("a1").unwrap().index;
            host.configure(gateway, &addressing("10.7.0.1/24")).unwrap();
            let in_vlan: IpAddr = "10.7.0.7".parse().unwrap();
            let given = RoutedTo::Found(vec![here, elsewhere, in_vlan]);
            for (end, expected) in [
                (Some(a), vec![here, in_vlan]),
                (Some(b), Vec::new()),
                // The end is no port: the plugin routes the addresses by the end itself.
                (Some(switching), vec![here, elsewhere, in_vlan]),
                (Some(999), Vec::new()),
                (None, Vec::new()),
            ] {
                assert_eq!(given.addresses(end, &mut host).unwrap(), expected, "{end:?}");
            }
            let both = leased(&["10.9.0.7/24", "10.8.0.7/8"]).addresses;
            let beside = RoutedTo::Beside { parent: routing, leased: both };
            assert_eq!(beside.addresses(None, &mut host).unwrap(), [here]);
        })
        .unwrap();
    }
}
