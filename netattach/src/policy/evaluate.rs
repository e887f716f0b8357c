//! The kernel's decision over a compiled policy, in user space: the same code, on the same tables before they become
//! maps. For explanations and for tests.

use std::net::IpAddr;

use ipnet::IpNet;
use netattach_common::decide::{Query, Tables, Verdict, decide};
use netattach_common::{Port, PortKey};

use super::lookup::{ClassId, CompiledPolicy, PortPrefix, RuleId, Traffic};
use super::traffic::wider;

/// The verdict of a policy on traffic of a protocol (IANA number) with `peer`. `port` is the port of the side that did
/// not open the flow, `None` for traffic without ports.
pub fn judge(policy: &CompiledPolicy, peer: IpAddr, protocol: u8, port: Option<u16>) -> Verdict {
    // The tables hold one policy only: its number is not looked at.
    decide(policy, 0, &Query::new(peer, protocol, port.map(Port::new)))
}

/// The rule that allows the traffic; `None`: denied.
pub fn evaluate(policy: &CompiledPolicy, peer: IpAddr, protocol: u8, port: Option<u16>) -> Option<RuleId> {
    match judge(policy, peer, protocol, port) {
        Verdict::Allow { rule } => Some(rule),
        Verdict::UnknownPeer | Verdict::UnknownPort => None,
    }
}

/// The prefix that decides about an address, and its class.
pub fn peer_entry(policy: &CompiledPolicy, peer: IpAddr) -> Option<(IpNet, ClassId)> {
    let exact = IpNet::from(peer);
    if let Some(class) = policy.peers.get(&exact) {
        return Some((exact, *class));
    }
    let shorter = (0..exact.max_prefix_len()).rev().filter_map(|bits| IpNet::new(peer, bits).ok());
    shorter.map(|net| net.trunc()).find_map(|net| Some((net, *policy.peers.get(&net)?)))
}

impl Tables<IpAddr> for CompiledPolicy {
    fn exact_class(&self, _: u32, peer: &IpAddr) -> Option<u32> {
        self.peers.get(&IpNet::from(*peer)).copied()
    }

    fn prefix_class(&self, _: u32, peer: &IpAddr) -> Option<u32> {
        peer_entry(self, *peer).map(|(_, class)| class)
    }

    fn rule(&self, key: &PortKey, bits: u32) -> Option<u32> {
        let protocol = Traffic::Protocol(key.protocol);
        let narrowest = match bits {
            PortKey::PORT_BITS => {
                Traffic::Ports { protocol: key.protocol, port: key.port.number(), bits: 16 }
            }
            _ => protocol,
        };
        let candidates = std::iter::once(narrowest).chain(wider(narrowest));
        candidates
            .map(|traffic| PortPrefix { class: key.class, traffic })
            .find_map(|entry| self.ports.get(&entry).copied())
    }
}
