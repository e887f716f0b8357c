//! A compiled policy as map entries. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use netattach_common::{Ip4, Ip6, PolicyAddress, Port, PortKey, PortRule, RuleKey};

use super::pin::map_name;
use crate::policy::compiled::{CompiledPolicy, Traffic};

/// The entries of one policy, by map. A prefix stands with its length in bits.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) rules: Vec<RuleKey>,
    pub(super) ports: Vec<(u32, PortKey, PortRule)>,
    pub(super) peers_v4: Vec<(PolicyAddress<Ip4>, u32)>,
    pub(super) peers_v6: Vec<(PolicyAddress<Ip6>, u32)>,
    pub(super) prefixes_v4: Vec<(u32, PolicyAddress<Ip4>, u32)>,
    pub(super) prefixes_v6: Vec<(u32, PolicyAddress<Ip6>, u32)>,
}

/// How many entries each map holds or is to hold, in the order of [`Usage::MAPS`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage(pub(super) [usize; 6]);

impl Usage {
    /// The maps that policies are made of.
    pub(super) const MAPS: [&'static str; 6] = [
        map_name::RULE,
        map_name::PORT,
        map_name::PEER4,
        map_name::PEER6,
        map_name::PREFIX4,
        map_name::PREFIX6,
    ];

    /// The first map that cannot take `more` beside `self`: its name, what is needed, what is free.
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

impl Rows {
    pub(super) fn of(policy: u32, compiled: &CompiledPolicy) -> Self {
        let mut rows = Self {
            rules: compiled.rules.keys().map(|rule| RuleKey { policy, rule: *rule }).collect(),
            ..Self::default()
        };
        for (entry, rule) in &compiled.ports {
            let (prefix_len, protocol, port) = match entry.traffic {
                Traffic::Any => (PortKey::CLASS_BITS, 0, Port::NONE),
                Traffic::Protocol(protocol) => (PortKey::PROTOCOL_BITS, protocol, Port::NONE),
                Traffic::Ports { protocol, port, bits } => {
                    (PortKey::port_prefix(bits), protocol, Port::new(port))
                }
            };
            let key = PortKey { policy, class: entry.class, protocol, pad: 0, port };
            rows.ports.push((prefix_len, key, PortRule { rule: *rule, prefix_len }));
        }
        for (network, class) in &compiled.peers {
            rows.add_peer(policy, *network, *class);
        }
        rows
    }

    pub(super) fn usage(&self) -> Usage {
        Usage([
            self.rules.len(),
            self.ports.len(),
            self.peers_v4.len(),
            self.peers_v6.len(),
            self.prefixes_v4.len(),
            self.prefixes_v6.len(),
        ])
    }

    fn add_peer(&mut self, policy: u32, network: IpNet, class: u32) {
        let bits = 32 + u32::from(network.prefix_len());
        let exact = network.prefix_len() == network.max_prefix_len();
        match network.network() {
            IpAddr::V4(address) => {
                let key = PolicyAddress { policy, address: address.into() };
                if exact {
                    self.peers_v4.push((key, class));
                } else {
                    self.prefixes_v4.push((bits, key, class));
                }
            }
            IpAddr::V6(address) => {
                let key = PolicyAddress { policy, address: address.into() };
                if exact {
                    self.peers_v6.push((key, class));
                } else {
                    self.prefixes_v6.push((bits, key, class));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::compiled::PortPrefix;

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
            rules: [(7, "a".to_owned()), (8, "b".to_owned()), (9, "c".to_owned())].into(),
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
        let rows = Rows::of(5, &compiled);
        assert_eq!(
            rows,
            Rows {
                rules: [7, 8, 9].map(|rule| RuleKey { policy: 5, rule }).into(),
                ports: vec![
                    (64, port(1, 0, [0, 0]), PortRule { rule: 7, prefix_len: 64 }),
                    (72, port(2, 17, [0, 0]), PortRule { rule: 8, prefix_len: 72 }),
                    (92, port(3, 6, [0x1f, 0x90]), PortRule { rule: 9, prefix_len: 92 }),
                ],
                peers_v4: vec![(v4([10, 0, 0, 1]), 1)],
                peers_v6: vec![(v6("fd00::1"), 3)],
                prefixes_v4: vec![(40, v4([10, 0, 0, 0]), 2)],
                prefixes_v6: vec![(32, v6("::"), 4)],
            }
        );
        assert_eq!(rows.usage(), Usage([3, 3, 1, 1, 1, 1]));
    }

    #[test]
    fn overflow_names_the_first_map_without_room() {
        let used = Usage([1, 8, 0, 0, 0, 0]);
        let capacity = Usage([10; 6]);
        assert_eq!(used.overflow(&Usage([9, 2, 10, 0, 0, 0]), &capacity), None);
        assert_eq!(used.overflow(&Usage([9, 3, 11, 0, 0, 0]), &capacity), Some((map_name::PORT, 3, 2)));
    }
}
