//! A compiled policy as map entries. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use netattach_common::{Ip4, Ip6, PolicyAddress, Port, PortKey, PortRule};

use super::map_table::map_name;
use crate::policy::lookup::{CompiledPolicy, Origin, Traffic};

/// The key of a trie: the number of significant bits, and the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(super) struct Prefix<K> {
    pub(super) bits: u32,
    pub(super) of: K,
}

const _: () = {
    assert!(size_of::<Prefix<PortKey>>() == size_of::<u32>() + size_of::<PortKey>());
    assert!(size_of::<Prefix<PolicyAddress<Ip4>>>() == size_of::<u32>() + size_of::<PolicyAddress<Ip4>>());
    assert!(size_of::<Prefix<PolicyAddress<Ip6>>>() == size_of::<u32>() + size_of::<PolicyAddress<Ip6>>());
};

// SAFETY: `repr(C)` without padding, as the sizes above say, of plain bytes.
unsafe impl aya::Pod for Prefix<PortKey> {}
// SAFETY: as above.
unsafe impl aya::Pod for Prefix<PolicyAddress<Ip4>> {}
// SAFETY: as above.
unsafe impl aya::Pod for Prefix<PolicyAddress<Ip6>> {}

/// The keys of policies, by map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) ports: Vec<Prefix<PortKey>>,
    pub(super) peers_v4: Vec<PolicyAddress<Ip4>>,
    pub(super) peers_v6: Vec<PolicyAddress<Ip6>>,
    pub(super) prefixes_v4: Vec<Prefix<PolicyAddress<Ip4>>>,
    pub(super) prefixes_v6: Vec<Prefix<PolicyAddress<Ip6>>>,
}

/// The entries of policies: keys, and values in the same order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PolicyRows {
    pub(super) keys: Keys,
    pub(super) port_rules: Vec<PortRule>,
    pub(super) classes: Classes,
}

/// The classes of peers and prefixes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Classes {
    pub(super) peers_v4: Vec<u32>,
    pub(super) peers_v6: Vec<u32>,
    pub(super) prefixes_v4: Vec<u32>,
    pub(super) prefixes_v6: Vec<u32>,
}

/// Number of entries in each map, in the order of [`Usage::MAPS`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage(pub(super) [usize; 5]);

impl Usage {
    /// The maps that contain policies.
    pub(super) const MAPS: [&'static str; 5] =
        [map_name::PORT, map_name::PEER4, map_name::PEER6, map_name::PREFIX4, map_name::PREFIX6];

    /// The number of entries of a policy, without generating them.
    pub(super) fn of(compiled: &CompiledPolicy) -> Self {
        let mut usage = Self([compiled.ports.len(), 0, 0, 0, 0]);
        for network in compiled.peers.keys() {
            let exact = network.prefix_len() == network.max_prefix_len();
            let map = match (network, exact) {
                (IpNet::V4(_), true) => 1,
                (IpNet::V6(_), true) => 2,
                (IpNet::V4(_), false) => 3,
                (IpNet::V6(_), false) => 4,
            };
            usage.0[map] += 1;
        }
        usage
    }

    /// Returns the first map that has no room for `more` in addition to `self`: its name, the entries needed
    /// and free.
    pub(super) fn overflow(&self, more: &Self, capacity: &Self) -> Option<(&'static str, usize, usize)> {
        (0..Self::MAPS.len()).find_map(|map| {
            let free = capacity.0[map].saturating_sub(self.0[map]);
            (more.0[map] > free).then_some((Self::MAPS[map], more.0[map], free))
        })
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (total, part) in self.0.iter_mut().zip(other.0) {
            *total += part;
        }
    }

    pub(super) fn subtract(&mut self, other: &Self) {
        for (total, part) in self.0.iter_mut().zip(other.0) {
            *total = total.saturating_sub(part);
        }
    }
}

impl Keys {
    pub(super) fn usage(&self) -> Usage {
        Usage([
            self.ports.len(),
            self.peers_v4.len(),
            self.peers_v6.len(),
            self.prefixes_v4.len(),
            self.prefixes_v6.len(),
        ])
    }

    /// Appends the keys of another policy.
    pub(super) fn extend(&mut self, other: &Self) {
        self.ports.extend_from_slice(&other.ports);
        self.peers_v4.extend_from_slice(&other.peers_v4);
        self.peers_v6.extend_from_slice(&other.peers_v6);
        self.prefixes_v4.extend_from_slice(&other.prefixes_v4);
        self.prefixes_v6.extend_from_slice(&other.prefixes_v6);
    }
}

impl PolicyRows {
    pub(super) fn of(policy: u32, compiled: &CompiledPolicy) -> Self {
        let mut rows = Self::default();
        // This rule comes after the policies' own rules.
        let of_node = compiled.rules.iter().rev().find(|(_, origin)| matches!(origin, Origin::OfNode(_)));
        let of_node = of_node.map(|(rule, _)| *rule);
        for (entry, rule) in &compiled.ports {
            let (prefix_len, protocol, port) = match entry.traffic {
                Traffic::Any => (PortKey::CLASS_BITS, 0, Port::NONE),
                Traffic::Protocol(protocol) => (PortKey::PROTOCOL_BITS, protocol, Port::NONE),
                Traffic::Ports { protocol, port, bits } => {
                    (PortKey::port_prefix(bits), protocol, Port::new(port))
                }
            };
            let key = PortKey { policy, class: entry.class, protocol, pad: 0, port };
            rows.keys.ports.push(Prefix { bits: prefix_len, of: key });
            let mark = if of_node == Some(*rule) { PortRule::AS_ROUTED } else { 0 };
            rows.port_rules.push(PortRule { rule: *rule | mark, prefix_len });
        }
        for (network, class) in &compiled.peers {
            rows.add_peer(policy, *network, *class);
        }
        rows
    }

    /// Appends the entries of another policy.
    pub(super) fn append(&mut self, other: &mut Self) {
        self.keys.extend(&other.keys);
        self.port_rules.append(&mut other.port_rules);
        self.classes.peers_v4.append(&mut other.classes.peers_v4);
        self.classes.peers_v6.append(&mut other.classes.peers_v6);
        self.classes.prefixes_v4.append(&mut other.classes.prefixes_v4);
        self.classes.prefixes_v6.append(&mut other.classes.prefixes_v6);
    }

    fn add_peer(&mut self, policy: u32, network: IpNet, class: u32) {
        let Self { keys, classes, .. } = self;
        let bits = 32 + u32::from(network.prefix_len());
        let exact = network.prefix_len() == network.max_prefix_len();
        match network.network() {
            IpAddr::V4(address) => {
                let of = PolicyAddress { policy, address: address.into() };
                if exact {
                    keys.peers_v4.push(of);
                    classes.peers_v4.push(class);
                } else {
                    keys.prefixes_v4.push(Prefix { bits, of });
                    classes.prefixes_v4.push(class);
                }
            }
            IpAddr::V6(address) => {
                let of = PolicyAddress { policy, address: address.into() };
                if exact {
                    keys.peers_v6.push(of);
                    classes.peers_v6.push(class);
                } else {
                    keys.prefixes_v6.push(Prefix { bits, of });
                    classes.prefixes_v6.push(class);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::lookup::PortPrefix;

    #[test]
    fn full_length_prefixes_become_exact_peers_and_the_rest_prefixes() {
        let compiled = CompiledPolicy {
            peers: [("10.0.0.1/32", 1), ("10.0.0.0/8", 2), ("fd00::1/128", 3), ("::/0", 4)]
                .map(|(network, class)| (network.parse().unwrap(), class))
                .into(),
            ports: [
                (PortPrefix { class: 1, traffic: Traffic::Any }, 7),
                (PortPrefix { class: 2, traffic: Traffic::Protocol(17) }, 8),
                (PortPrefix { class: 3, traffic: Traffic::Ports { protocol: 6, port: 0x1f90, bits: 12 } }, 9),
            ]
            .into(),
            rules: [(7, "a".into()), (8, "b".into()), (9, Origin::OfNode("c"))].into(),
        };
        let v4 = |address: [u8; 4]| PolicyAddress { policy: 5, address: Ip4 { octets: address } };
        let v6 = |address: &str| PolicyAddress {
            policy: 5,
            address: address.parse::<std::net::Ipv6Addr>().unwrap().into(),
        };
        let port = |class, protocol, port| PortKey {
            policy: 5,
            class,
            protocol,
            pad: 0,
            port: Port { octets: port },
        };
        let prefix = |bits, of| Prefix { bits, of };
        let rule = |rule, prefix_len| PortRule { rule, prefix_len };
        let expected = PolicyRows {
            keys: Keys {
                ports: vec![
                    Prefix { bits: 64, of: port(1, 0, [0, 0]) },
                    Prefix { bits: 72, of: port(2, 17, [0, 0]) },
                    Prefix { bits: 92, of: port(3, 6, [0x1f, 0x90]) },
                ],
                peers_v4: vec![v4([10, 0, 0, 1])],
                peers_v6: vec![v6("fd00::1")],
                prefixes_v4: vec![prefix(40, v4([10, 0, 0, 0]))],
                prefixes_v6: vec![Prefix { bits: 32, of: v6("::") }],
            },
            port_rules: vec![rule(7, 64), rule(8, 72), rule(9 | PortRule::AS_ROUTED, 92)],
            classes: Classes {
                peers_v4: vec![1],
                peers_v6: vec![3],
                prefixes_v4: vec![2],
                prefixes_v6: vec![4],
            },
        };
        let rows = PolicyRows::of(5, &compiled);
        assert_eq!(rows, expected);
        assert_eq!(rows.keys.usage(), Usage([3, 1, 1, 1, 1]));
        assert_eq!(Usage::of(&compiled), rows.keys.usage());
    }

    #[test]
    fn overflow_names_the_first_map_without_room() {
        let used = Usage([8, 0, 0, 0, 0]);
        let capacity = Usage([10; 5]);
        assert_eq!(used.overflow(&Usage([2, 10, 0, 0, 0]), &capacity), None);
        assert_eq!(used.overflow(&Usage([3, 11, 0, 0, 0]), &capacity), Some((map_name::PORT, 3, 2)));
    }
}
