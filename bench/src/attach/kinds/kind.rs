//! The kinds of interfaces, and the configuration of each plugin.

use std::path::Path;

use serde_json::{Value, json};

use crate::pods::PARENT;

/// The parent of ipvlans and VLANs: macvlans and ipvlans cannot share one.
pub(super) const OTHER_PARENT: &str = "parent1";
/// The tag of VLANs.
pub(super) const TAG: u16 = 7;

/// A kind of interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Bridge,
    /// A bridge whose pods have the node's address elsewhere.
    Masqueraded,
    Ptp,
    Veth,
    Macvlan,
    Macvtap,
    Ipvlan,
    Vlan,
    Dummy,
    Tap,
    /// A device of the node: the end of a veth.
    HostDevice,
    Loopback,
}

/// The sides that attach, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Floor,
    Agent,
    Executable,
    Reference,
}

/// The kinds in the order of the table.
pub(super) const KINDS: [Kind; 12] = [
    Kind::Bridge,
    Kind::Masqueraded,
    Kind::Ptp,
    Kind::Veth,
    Kind::Macvlan,
    Kind::Macvtap,
    Kind::Ipvlan,
    Kind::Vlan,
    Kind::Dummy,
    Kind::Tap,
    Kind::HostDevice,
    Kind::Loopback,
];

pub(super) const SIDES: [Side; 4] = [Side::Floor, Side::Agent, Side::Executable, Side::Reference];

impl Kind {
    /// The name of the plugin.
    pub(super) fn plugin(self) -> &'static str {
        match self {
            Self::Bridge | Self::Masqueraded => "bridge",
            Self::Ptp => "ptp",
            Self::Veth => "veth",
            Self::Macvlan => "macvlan",
            Self::Macvtap => "macvtap",
            Self::Ipvlan => "ipvlan",
            Self::Vlan => "vlan",
            Self::Dummy => "dummy",
            Self::Tap => "tap",
            Self::HostDevice => "host-device",
            Self::Loopback => "loopback",
        }
    }

    /// The name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Masqueraded => "bridge, ipMasq",
            other => other.plugin(),
        }
    }

    /// The name of its network.
    pub(super) fn network(self) -> &'static str {
        match self {
            Self::Masqueraded => "masqueraded",
            other => other.plugin(),
        }
    }

    /// Whether containernetworking has a plugin for the same.
    pub(super) fn has_reference(self) -> bool {
        !matches!(self, Self::Veth | Self::Macvtap)
    }

    /// Whether a link is created or moved, which is limited by a ratio to the floor: `lo` exists already.
    pub(super) fn is_link(self) -> bool {
        self != Self::Loopback
    }

    /// Returns the minimum ratio of the reference's ADD to the agent's.
    pub(super) fn faster(self) -> f64 {
        if self == Self::Masqueraded { 8.0 } else { 4.0 }
    }

    /// Returns the plugin's configuration, with a separate subnet and leases below that directory.
    pub(super) fn config(self, side: Side, leases: &Path) -> Value {
        let bridge =
            |name: &str| json!({"bridge": format!("{name}{}", side as u8), "isDefaultGateway": true});
        let keys = match self {
            Self::Bridge => bridge("plain"),
            Self::Masqueraded => {
                let mut keys = bridge("masqueraded");
                keys["ipMasq"] = json!(true);
                keys
            }
            Self::Macvlan | Self::Macvtap => json!({"master": PARENT, "mode": "bridge"}),
            Self::Ipvlan => json!({"master": OTHER_PARENT, "mode": "l2"}),
            Self::Vlan => json!({"master": OTHER_PARENT, "vlanId": TAG}),
            Self::HostDevice => json!({"device": side.device()}),
            Self::Ptp | Self::Veth | Self::Dummy | Self::Tap | Self::Loopback => json!({}),
        };
        let mut config = json!({"cniVersion": "1.0.0", "name": self.network(), "type": self.plugin()});
        if self != Self::Loopback {
            let subnet = format!("10.{}.0.0/16", 100 + 20 * side as u8 + self as u8);
            config["ipam"] =
                json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": subnet}]]});
        }
        for (key, value) in keys.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        config
    }
}

impl Side {
    /// The name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Agent => "netattach",
            Self::Executable => "netattach-cni",
            Self::Reference => "reference",
        }
    }

    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Floor => {
                "the same links, addresses and routes in two datagrams to the kernel; no process, no lease, \
                 no record, nothing in the packet filter"
            }
            Self::Agent => "shim, socket, agent: leases, journal, BPF programs and policy included",
            Self::Executable => "the plugin as an executable, without an agent",
            Self::Reference => "containernetworking's executable, with its host-local",
        }
    }

    /// Returns the device of the node that its pods get.
    pub(super) fn device(self) -> String {
        format!("given{}", self as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_subnet_of_its_own_by_every_side() {
        let mut subnets: Vec<String> = Vec::new();
        for side in SIDES {
            for kind in KINDS.into_iter().filter(|kind| *kind != Kind::Loopback) {
                let config = kind.config(side, Path::new("/leases"));
                subnets.push(config["ipam"]["ranges"][0][0]["subnet"].to_string());
            }
        }
        let all = subnets.len();
        subnets.sort();
        subnets.dedup();
        assert_eq!(subnets.len(), all);
    }

    #[test]
    fn a_masqueraded_bridge_is_told_its_keys() {
        let expected = json!({
            "cniVersion": "1.0.0", "name": "masqueraded", "type": "bridge", "bridge": "masqueraded1",
            "isDefaultGateway": true, "ipMasq": true,
            "ipam": {"type": "host-local", "dataDir": "/leases", "ranges": [[{"subnet": "10.121.0.0/16"}]]},
        });
        assert_eq!(Kind::Masqueraded.config(Side::Agent, Path::new("/leases")), expected);
        let lo = json!({"cniVersion": "1.0.0", "name": "loopback", "type": "loopback"});
        assert_eq!(Kind::Loopback.config(Side::Agent, Path::new("/leases")), lo);
    }
}
