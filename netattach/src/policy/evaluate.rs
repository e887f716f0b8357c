//! The lookup that the kernel makes in a compiled policy, in user space: for explanations and for tests.

use std::net::IpAddr;

use ipnet::IpNet;

use super::compiled::{CompiledPolicy, PortPrefix, RuleId, Traffic};
use super::traffic::wider;

/// The rule that allows traffic of a protocol (IANA number) with `peer` to destination port `dport`; `None`:
/// denied. For protocols without ports `dport` is 0.
///
/// Longest prefix first, both of the address and of the port.
pub fn evaluate(policy: &CompiledPolicy, peer: IpAddr, protocol: u8, dport: u16) -> Option<RuleId> {
    let longest = if peer.is_ipv4() { 32 } else { 128 };
    let prefixes = (0..=longest).rev().filter_map(|bits| IpNet::new(peer, bits).ok());
    let class = prefixes.map(|net| net.trunc()).find_map(|net| policy.peers.get(&net).copied())?;
    let exact = Traffic::Ports { protocol, port: dport, bits: 16 };
    let mut candidates = std::iter::once(exact).chain(wider(exact));
    candidates.find_map(|traffic| policy.ports.get(&PortPrefix { class, traffic }).copied())
}
