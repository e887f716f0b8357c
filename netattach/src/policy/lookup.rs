//! A policy in the form the kernel looks up: addresses to classes, classes and ports to rules.
//!
//! A packet is judged in two steps whose cost does not depend on the number of rules: the longest prefix of
//! [`CompiledPolicy::peers`] that holds the peer's address gives a class; the longest entry of
//! [`CompiledPolicy::ports`] for that class, the protocol and the destination port gives the rule that allows
//! it. No class or no entry: denied.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use ipnet::IpNet;

use crate::objects::policy::{Direction, PolicyName};

/// Number of a set of rules that one group of peer addresses matches. 0 is never used: it means "no class".
pub type ClassId = u32;

/// Number of a rule within its policy set, for counters and explanations. 0 is never used.
pub type RuleId = u32;

/// One direction of the policies that select an attachment. Two attachments selected by the same rules share
/// one value (and in the kernel one policy id).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CompiledPolicy {
    /// Peer prefixes, host bits clear. A longer prefix decides alone: its class carries every rule that the
    /// prefixes around it contribute.
    pub peers: BTreeMap<IpNet, ClassId>,
    /// The traffic that each class may exchange.
    pub ports: BTreeMap<PortPrefix, RuleId>,
    /// The origin of each rule.
    pub rules: BTreeMap<RuleId, Origin>,
}

/// The origin of a rule: `namespace/policy ingress[0]`. Formatted only on demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// In a policy.
    Policy {
        /// The policy.
        name: Arc<PolicyName>,
        /// Its list of rules.
        direction: Direction,
        /// Position in the list, from 0.
        position: usize,
    },
    /// Another origin, in words.
    Other(String),
    /// Another origin, for a rule for all traffic with the node's addresses. It holds only if the packet goes to
    /// the node's own stack or comes from it ([`PortRule::AS_ROUTED`](netattach_common::PortRule::AS_ROUTED)), and for
    /// what the pod opens, only if the node's packet filter judges the packet again after the node's address
    /// translation. So it does not replace narrower rules of a class.
    OfNode(&'static str),
}

impl From<&str> for Origin {
    fn from(words: &str) -> Self {
        Self::Other(words.to_owned())
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy { name, direction, position } => write!(f, "{name} {direction}[{position}]"),
            Self::Other(words) => f.write_str(words),
            Self::OfNode(words) => f.write_str(words),
        }
    }
}

/// The number of flows that a rule has allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleFlows {
    /// Number of the policy in the maps.
    pub policy: u32,
    /// Number of the rule in it.
    pub rule: u32,
    /// `namespace/policy direction[number]`.
    pub text: String,
    /// Flows since the policy was installed.
    pub flows: u64,
}

/// A class with a protocol and a block of destination ports, from general to specific.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortPrefix {
    /// The class of peers.
    pub class: ClassId,
    /// The traffic.
    pub traffic: Traffic,
}

/// The traffic that a [`PortPrefix`] covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Traffic {
    /// Everything, protocols without ports included.
    Any,
    /// Every port of one IP protocol (IANA number: TCP 6, UDP 17, SCTP 132).
    Protocol(u8),
    /// The destination ports whose first `bits` bits equal those of `port`. `bits` is 1 to 16; 16 is one port.
    Ports {
        /// IP protocol number.
        protocol: u8,
        /// First port of the block, host byte order, the bits after `bits` clear.
        port: u16,
        /// Length of the prefix in bits.
        bits: u8,
    },
}

/// `tcp`, or the number of a protocol that policies do not name.
pub(super) fn protocol_name(protocol: u8, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match protocol {
        1 => f.write_str("icmp"),
        6 => f.write_str("tcp"),
        17 => f.write_str("udp"),
        58 => f.write_str("icmpv6"),
        132 => f.write_str("sctp"),
        number => write!(f, "protocol {number}"),
    }
}

/// `any`, `tcp`, `tcp/80`, `tcp/64-127`.
impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Any => f.write_str("any"),
            Self::Protocol(protocol) => protocol_name(protocol, f),
            Self::Ports { protocol, port, bits } => {
                protocol_name(protocol, f)?;
                match u16::MAX.checked_shr(bits.into()).unwrap_or(0) {
                    0 => write!(f, "/{port}"),
                    rest => write!(f, "/{port}-{}", port | rest),
                }
            }
        }
    }
}
