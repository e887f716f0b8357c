//! The state that netattach has created in the kernel of a node for all pods, besides pins: tables, routes,
//! bridges.

use super::Stays;
use crate::attach::host_access::is_host_link;
use crate::bpf::{Program, Side};
use crate::builtin::routes::{METRIC, PROTOCOL};
use crate::netlink::{self, DeviceState, FilteredDevice, Handle, RouteState};

/// The programs that run only on devices which outlast every pod: uplinks of the node, and parents of
/// macvlans. As filters they would stay attached forever; BPF links are removed with their pins.
const LASTING: [Program; 3] =
    [Program::Uplink, Program::OnParent(Side::FromPod), Program::OnParent(Side::ToPod)];

/// Why a table of another owner is kept.
const OF_ANOTHER: &str = "this table is another agent's or another program's";

/// Settings that ADDs have switched on, below `/proc/sys`.
const FORWARDING: [&str; 2] = ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"];

/// The state found in this network namespace.
#[derive(Debug, Default)]
pub(super) struct Kernel {
    /// Names of tables of nftables.
    pub(super) tables: Vec<String>,
    /// Tables with the names of ours but another owner. They are kept.
    others: Vec<(&'static str, String)>,
    routes: Vec<RouteState>,
    devices: Vec<FilteredDevice>,
    /// Representors, whose `clsact` other programs may have created.
    representors: Vec<FilteredDevice>,
    /// Names of the node's own links on parents of pods.
    pub(super) host_links: Vec<String>,
    /// Bridges without a port.
    pub(super) bridges: Vec<String>,
    /// Bridges with ports. They are kept.
    pub(super) bridges_in_use: Vec<String>,
}

impl Kernel {
    /// Finds the state of the agent with that state directory.
    pub(super) fn look(node: &mut Handle, owner: &str) -> Result<Self, netlink::Error> {
        let mut found = Self::default();
        if netlink::guard_exists()? {
            found.note_table(netlink::GUARD_TABLE, netlink::guard_of_another(owner)?);
        }
        if !netlink::nat::shape()?.is_empty() {
            found.note_table(netlink::nat::TABLE, netlink::nat::comment_of_another(owner)?);
        }
        found.routes = node.routes()?;
        found.routes.retain(|route| (route.protocol, route.priority) == (PROTOCOL, METRIC));
        found.host_links = node.links()?.into_iter().filter(is_host_link).map(|link| link.name).collect();
        found.devices = node.devices_with_filters(&LASTING.map(Program::name), |_| true)?;
        // The other ends of pods' links are deleted with the pods.
        found.representors =
            node.devices_with_filters(&Program::ON_NODE_ENDS.map(Program::name), DeviceState::stays)?;
        found.devices.retain(|device| !found.host_links.contains(&device.name));
        for (bridge, ports) in node.own_bridges()? {
            if ports == 0 { &mut found.bridges } else { &mut found.bridges_in_use }.push(bridge.name);
        }
        Ok(found)
    }

    fn note_table(&mut self, name: &'static str, other: Option<String>) {
        match other {
            None => self.tables.push(name.to_owned()),
            Some(whose) => self.others.push((name, whose)),
        }
    }

    /// Destinations of the routes to the pods of other nodes.
    pub(super) fn routes(&self) -> Vec<String> {
        self.routes.iter().map(|route| route.destination.to_string()).collect()
    }

    /// Names of the uplinks, parents of macvlans and representors that run programs.
    pub(super) fn devices(&self) -> Vec<String> {
        self.devices.iter().chain(&self.representors).map(|device| device.name.clone()).collect()
    }

    /// Removes what was found, except bridges in use.
    pub(super) fn remove(&self, node: &mut Handle) -> Result<(), netlink::Error> {
        let is_ours = |name: &str| self.tables.iter().any(|table| table == name);
        if is_ours(netlink::GUARD_TABLE) {
            netlink::remove_guard()?;
        }
        if is_ours(netlink::nat::TABLE) {
            netlink::nat::uninstall()?;
        }
        node.ensure_routes_absent(&self.routes)?;
        self.devices.iter().try_for_each(|device| node.ensure_unfiltered(device, true))?;
        self.representors.iter().try_for_each(|device| node.ensure_unfiltered(device, false))?;
        self.host_links.iter().try_for_each(|link| node.ensure_link_absent(link))?;
        for bridge in &self.bridges {
            if let Some(bridge) = node.find_link(bridge)? {
                node.ensure_own_bridge_absent(&bridge)?;
            }
        }
        Ok(())
    }

    /// Returns what is kept.
    pub(super) fn stays(&self) -> impl Iterator<Item = Stays> {
        let bridges = self
            .bridges_in_use
            .iter()
            .map(|bridge| Stays::new(bridge, "something is connected to this bridge"));
        let is_on = |key: &&str| {
            std::fs::read_to_string(format!("/proc/sys/{key}")).is_ok_and(|value| value.trim_end() == "1")
        };
        let forwarding = FORWARDING.into_iter().filter(is_on).map(|key| {
            Stays::new(key, "other programs of the node may need it; who had it switched on is not known")
        });
        let table =
            |(name, whose): &(&str, String)| Stays::new(format!("table {name} ({whose})"), OF_ANOTHER);
        bridges.chain(self.others.iter().map(table)).chain(forwarding)
    }
}
