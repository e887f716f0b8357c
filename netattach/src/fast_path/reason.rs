//! Reasons why packets are kept off the fast path.

use std::fmt;

/// Plugins that change nothing on the node's end of a link: chained to a network, they do not keep its
/// attachments off the fast path.
const INSIDE_THE_POD: [&str; 3] = ["sbr", "tuning", "vrf"];

/// Why an attachment is not on the fast path, or packets do not take it by an uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// The agent's setting disables the fast path.
    Off,
    /// The network's configuration disables it.
    OptedOut,
    /// A plugin in the network's list may act on the node's end.
    Plugin(String),
    /// An interface without an end on the node: its kind.
    OnParent(&'static str),
    /// The device does not exist.
    NoDevice,
    /// The device is not a bridge port.
    NoBridge,
    /// The port does not forward.
    PortState,
    /// The port is isolated or locked.
    PortRestricted,
    /// The bridge runs a spanning tree protocol.
    SpanningTree,
    /// The bridge forwards by VLAN.
    VlanFiltering,
    /// There are filters for bridged frames.
    BridgeRules,
    /// There are filters for IP packets, and bridges call them.
    Iptables,
    /// There are filters for IP packets, which packets of a routed link meet.
    IpRules,
    /// The node translates addresses of passing IP packets.
    Nat,
    /// The node's end of a routed link is in a bridge or VRF.
    Enslaved,
    /// The device has filters of its own.
    DeviceRules,
    /// Other programs or filters run at the device.
    Programs,
    /// The node has IPsec policies.
    Ipsec,
    /// The bridge's ageing time is too short.
    Ageing,
    /// The device is not an Ethernet device.
    NotEthernet,
    /// No attachment that takes the fast path uses the uplink.
    Idle,
    /// The device queues what it sends: its queueing discipline.
    Shaped(String),
    /// The bridge, one of its ports or another attachment has the same address.
    SameMac,
    /// The bridge knows the attachment's address behind another port.
    KnownElsewhere,
    /// The kernel refused a request.
    Failed(String),
}

impl Reason {
    /// A short name: stable, used in tables and JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::OptedOut => "opted-out",
            Self::Plugin(_) => "plugin",
            Self::OnParent(kind) => kind,
            Self::NoDevice => "no-device",
            Self::NoBridge => "no-bridge",
            Self::PortState => "port-state",
            Self::PortRestricted => "port-restricted",
            Self::SpanningTree => "spanning-tree",
            Self::VlanFiltering => "vlan-filtering",
            Self::BridgeRules => "bridge-rules",
            Self::Iptables => "iptables",
            Self::IpRules => "ip-rules",
            Self::Nat => "nat",
            Self::Enslaved => "enslaved",
            Self::DeviceRules => "device-rules",
            Self::Programs => "programs",
            Self::Ipsec => "ipsec",
            Self::Ageing => "ageing",
            Self::NotEthernet => "not-ethernet",
            Self::Idle => "idle",
            Self::Shaped(_) => "shaped",
            Self::SameMac => "same-mac",
            Self::KnownElsewhere => "known-elsewhere",
            Self::Failed(_) => "failed",
        }
    }

    /// Returns the first plugin after the network's own that might act on the node's end.
    pub fn of_plugins<'a>(chained: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let acts_on_node = |plugin: &&str| !INSIDE_THE_POD.contains(plugin);
        chained.into_iter().find(acts_on_node).map(|plugin| Self::Plugin(plugin.to_owned()))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("the agent's setting fastPath is off"),
            Self::OptedOut => f.write_str(
                "the network's configuration says fastPath: false, or asks for what the fast path would pass by",
            ),
            Self::Plugin(plugin) => {
                write!(f, "the network's plugin {plugin} may work on the node's end of the link")
            }
            Self::OnParent(kind) => write!(f, "interfaces of kind {kind} have no end on the node"),
            Self::NoDevice => f.write_str("the device is gone"),
            Self::NoBridge => f.write_str("the node's end of the link is in no bridge"),
            Self::PortState => {
                f.write_str("the bridge port does not forward: it is down, without carrier, or blocked")
            }
            Self::PortRestricted => f.write_str("the bridge port is isolated or locked"),
            Self::SpanningTree => f.write_str("the bridge runs a spanning tree protocol"),
            Self::VlanFiltering => f.write_str("the bridge filters by VLAN"),
            Self::BridgeRules => {
                f.write_str("there are packet filters for bridged frames (nftables bridge family, ebtables)")
            }
            Self::Iptables => f.write_str(
                "the bridge shows frames to iptables (bridge-nf-call-iptables), and there are rules or tables",
            ),
            Self::IpRules => f.write_str("there are packet filters for IP packets (nftables, iptables)"),
            Self::Nat => f.write_str("the node translates addresses (nat chains of nftables or iptables)"),
            Self::Enslaved => f.write_str("the device of a routed link, or of the default route, is in a bridge, bond or VRF"),
            Self::DeviceRules => f.write_str("nftables has chains on the device"),
            Self::Programs => f.write_str("another program has attached programs or filters (tc, tcx, netkit, XDP) to the device"),
            Self::Ipsec => f.write_str("the node has IPsec policies"),
            Self::Ageing => f.write_str("the bridge forgets stations within less than 30 seconds"),
            Self::NotEthernet => f.write_str("the device does not send Ethernet frames"),
            Self::Idle => f.write_str("no attachment that it leads to takes the fast path"),
            Self::Shaped(discipline) => {
                write!(f, "the device queues what it sends ({discipline})")
            }
            Self::SameMac => f.write_str(
                "the bridge, one of its ports or another attachment on it has the same MAC address",
            ),
            Self::KnownElsewhere => {
                f.write_str("the bridge has seen the attachment's MAC address behind another port")
            }
            Self::Failed(why) => write!(f, "the kernel refused: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// The documentation explains each state under `FAST-PATH` or `UPLINK`.
    #[test]
    fn every_reason_is_in_the_tables_of_the_page_and_no_other() {
        let (_, names) = include_str!("reason.rs").split_once("pub fn name(&self)").unwrap();
        let (names, _) = names.split_once("\n    }\n").unwrap();
        let arms = names.lines().filter_map(|line| line.trim().strip_suffix("\",")?.split_once("=> \""));
        let mut named: BTreeSet<&str> = arms.map(|(_, name)| name).collect();
        // Of the interfaces without an end on the node only this kind is checked: the representor of a VF is
        // an end on the node.
        named.insert("device");
        let page = include_str!("../../../docs/configuration.md");
        let tables = page.split("\n| state | what keeps it off | `fastPath: on` |\n|---|---|---|\n").skip(1);
        let rows = tables
            .flat_map(|table| table.lines().map_while(|line| line.strip_prefix("| ")?.split_once(" | ")));
        let found: BTreeSet<&str> =
            rows.flat_map(|(states, _)| states.split('`').skip(1).step_by(2)).collect();
        assert_eq!(found, named);
    }
}
