//! Decides whether a policy allows a peer and a port.
//!
//! 1. The peer's exact address gives its class; failing that, the longest prefix that holds it does. An exact
//!    address is the longest prefix there is, so the first hit decides alone.
//! 2. No class, or the class of [`NOTHING`]: denied. (`0.0.0.0/0` and `::/0` are prefixes like any other.)
//! 3. The longest entry of that class for protocol and port names the rule that allows. Without ports
//!    (ICMP, later fragments, other protocols) only entries without ports count.
//! 4. No entry: denied.

use crate::{Port, PortKey};

/// The class that allows nothing, for addresses that an exception excludes from a block. It has no ports, and in the
/// reason of a dropped packet it counts as a peer that no rule names.
pub const NOTHING: u32 = 1;

/// The tables a policy is compiled to.
pub trait Tables<A> {
    /// Class of exactly this peer.
    fn exact_class(&self, policy: u32, peer: &A) -> Option<u32>;
    /// Class of the longest prefix that holds this peer.
    fn prefix_class(&self, policy: u32, peer: &A) -> Option<u32>;
    /// Rule of the longest entry that matches the first `bits` bits of `key`.
    fn rule(&self, key: &PortKey, bits: u32) -> Option<u32>;
}

/// The question to a policy: may the pod and this peer exchange this traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Query<A> {
    /// The other side's address.
    pub peer: A,
    /// Port of the side that did not open the flow; [`Port::NONE`] for traffic without ports.
    pub port: Port,
    /// IP protocol number.
    pub protocol: u8,
    /// Whether the traffic has ports. A separate field instead of an `Option`: compiled for the kernel, the port is
    /// read in any case, and before Linux 6.3 the verifier refuses reads of uninitialised data.
    pub has_port: bool,
}

const _: () = {
    // No padding, which would be uninitialised: BPF functions pass it to each other.
    assert!(size_of::<Query<crate::Ip4>>() == 8);
    assert!(size_of::<Query<crate::Ip6>>() == 20);
};

impl<A> Query<A> {
    /// A question about traffic with a port, or without ports.
    #[inline(always)]
    pub fn new(peer: A, protocol: u8, port: Option<Port>) -> Self {
        let (port, has_port) = match port {
            Some(port) => (port, true),
            None => (Port::NONE, false),
        };
        Self { peer, protocol, port, has_port }
    }
}

/// The answer of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Allowed by this rule.
    Allow {
        /// Rule id within the policy.
        rule: u32,
    },
    /// No rule names the peer, or only as an exception.
    UnknownPeer,
    /// Rules name the peer, none this protocol and port.
    UnknownPort,
}

/// Judges one flow by one policy.
#[inline(always)]
pub fn decide<A, T: Tables<A>>(tables: &T, policy: u32, query: &Query<A>) -> Verdict {
    let class = match tables.exact_class(policy, &query.peer) {
        Some(class) => class,
        None => match tables.prefix_class(policy, &query.peer) {
            Some(class) => class,
            None => NOTHING,
        },
    };
    if class == NOTHING {
        return Verdict::UnknownPeer;
    }
    let bits = if query.has_port { PortKey::PORT_BITS } else { PortKey::PROTOCOL_BITS };
    let key = PortKey { policy, class, protocol: query.protocol, pad: 0, port: query.port };
    match tables.rule(&key, bits) {
        Some(rule) => Verdict::Allow { rule },
        None => Verdict::UnknownPort,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{ICMP, TCP, UDP};
    use proptest::prelude::*;

    /// Tables as lists, searched linearly.
    #[derive(Default, Debug)]
    struct Lists {
        exact: Vec<(u32, [u8; 4], u32)>,
        prefixes: Vec<(u32, [u8; 4], u32, u32)>,
        ports: Vec<(PortKey, u32, u32)>,
    }

    fn same_bits(a: &[u8], b: &[u8], bits: u32) -> bool {
        (0..bits as usize).all(|bit| (a[bit / 8] ^ b[bit / 8]) & (0x80 >> (bit % 8)) == 0)
    }

    fn port_bytes(key: &PortKey) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&key.policy.to_ne_bytes());
        bytes[4..8].copy_from_slice(&key.class.to_ne_bytes());
        bytes[8] = key.protocol;
        bytes[10..].copy_from_slice(&key.port.octets);
        bytes
    }

    impl Tables<[u8; 4]> for Lists {
        fn exact_class(&self, policy: u32, peer: &[u8; 4]) -> Option<u32> {
            self.exact.iter().find(|(p, a, _)| (p, a) == (&policy, peer)).map(|entry| entry.2)
        }

        fn prefix_class(&self, policy: u32, peer: &[u8; 4]) -> Option<u32> {
            self.prefixes
                .iter()
                .filter(|(p, address, bits, _)| *p == policy && same_bits(address, peer, *bits))
                .max_by_key(|entry| entry.2)
                .map(|entry| entry.3)
        }

        fn rule(&self, key: &PortKey, bits: u32) -> Option<u32> {
            self.ports
                .iter()
                .filter(|(entry, len, _)| {
                    *len <= bits && same_bits(&port_bytes(entry), &port_bytes(key), *len)
                })
                .max_by_key(|entry| entry.1)
                .map(|entry| entry.2)
        }
    }

    fn key(policy: u32, class: u32, protocol: u8, port: u16) -> PortKey {
        PortKey { policy, class, protocol, pad: 0, port: Port::new(port) }
    }

    fn query(peer: [u8; 4], protocol: u8, port: impl Into<Option<u16>>) -> Query<[u8; 4]> {
        Query::new(peer, protocol, port.into().map(Port::new))
    }

    /// Policy 7: 10.0.0.0/8 (class 4) any; 10.1.0.0/16 (class 2) TCP 80 and 8080-8083; host 10.1.0.9 (class 3) UDP;
    /// 10.2.0.0/16 nothing, the result of compiling an `except`.
    fn example() -> Lists {
        Lists {
            exact: vec![(7, [10, 1, 0, 9], 3)],
            prefixes: vec![
                (7, [10, 0, 0, 0], 8, 4),
                (7, [10, 1, 0, 0], 16, 2),
                (7, [10, 2, 0, 0], 16, NOTHING),
            ],
            ports: vec![
                (key(7, 4, 0, 0), PortKey::CLASS_BITS, 11),
                (key(7, 2, TCP, 80), PortKey::PORT_BITS, 12),
                (key(7, 2, TCP, 8080), PortKey::port_prefix(14), 13),
                (key(7, 3, UDP, 0), PortKey::PROTOCOL_BITS, 14),
            ],
        }
    }

    #[test]
    fn longest_peer_prefix_decides_alone() {
        let cases = [
            (query([10, 9, 9, 9], TCP, 22), Verdict::Allow { rule: 11 }),
            (query([10, 9, 9, 9], ICMP, None), Verdict::Allow { rule: 11 }),
            (query([10, 1, 2, 3], TCP, 80), Verdict::Allow { rule: 12 }),
            (query([10, 1, 2, 3], TCP, 8083), Verdict::Allow { rule: 13 }),
            (query([10, 1, 2, 3], TCP, 8084), Verdict::UnknownPort),
            (query([10, 1, 2, 3], TCP, None), Verdict::UnknownPort),
            (query([10, 1, 2, 3], UDP, 80), Verdict::UnknownPort),
            (query([10, 1, 0, 9], UDP, 53), Verdict::Allow { rule: 14 }),
            (query([10, 1, 0, 9], UDP, None), Verdict::Allow { rule: 14 }),
            (query([10, 1, 0, 9], TCP, 80), Verdict::UnknownPort),
            (query([10, 2, 0, 1], TCP, 80), Verdict::UnknownPeer),
            (query([192, 0, 2, 1], TCP, 80), Verdict::UnknownPeer),
        ];
        for (query, expected) in cases {
            assert_eq!(decide(&example(), 7, &query), expected, "{query:?}");
        }
    }

    #[test]
    fn another_policy_shares_nothing() {
        assert_eq!(decide(&example(), 8, &query([10, 9, 9, 9], TCP, 22)), Verdict::UnknownPeer);
    }

    proptest! {
        #[test]
        fn an_exact_entry_is_a_prefix_of_full_length(
            prefixes in prop::collection::vec((any::<[u8; 4]>(), 0u32..=32, 1u32..4), 0..8),
            peer in any::<[u8; 4]>(),
            class in prop::option::of(1u32..4),
            port in any::<u16>(),
        ) {
            let ports: Vec<_> = (1..4).map(|class| (key(1, class, TCP, 0), PortKey::CLASS_BITS, class)).collect();
            let prefixes: Vec<_> = prefixes.into_iter().map(|(a, bits, c)| (1, a, bits.min(31), c)).collect();
            let exact: Vec<_> = class.map(|class| (1, peer, class)).into_iter().collect();
            let mut as_prefix = prefixes.clone();
            as_prefix.extend(class.map(|class| (1, peer, 32, class)));
            let with_exact = Lists { exact, prefixes, ports: ports.clone() };
            let with_prefix = Lists { exact: Vec::new(), prefixes: as_prefix, ports };
            let query = query(peer, TCP, port);
            prop_assert_eq!(decide(&with_exact, 1, &query), decide(&with_prefix, 1, &query));
        }
    }
}
