//! Why traffic passes or does not: the question, and the decision at both ends of each path.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::attachment::Level;
use crate::objects::ObjectName;

/// A flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// The end that opens the flow.
    pub from: End,
    /// The other end.
    pub to: End,
    /// Protocol and port.
    pub traffic: Asked,
}

/// One end of a flow in a question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// A pod, at any of its addresses.
    Pod(ObjectName),
    /// An address, of a pod or not.
    Address(IpAddr),
}

/// The traffic of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// IANA number; 0 for frames that are not IP.
    pub protocol: u8,
    /// Destination port, for protocols that have ports.
    pub port: Option<u16>,
    /// The packets in question; the first of the flow, if left out.
    #[serde(default, skip_serializing_if = "Form::is_opening")]
    pub form: Form,
}

/// Packets of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// The first of a flow.
    #[default]
    Opening,
    /// A segment of TCP or SCTP that asks for no connection, of a connection that is not in the flow table.
    Segment,
    /// A later fragment, of a packet whose first fragment was not seen.
    Fragment,
    /// ARP, neighbour discovery, multicast listener messages.
    Link,
    /// A frame of this ethertype, which is neither IP's nor ARP's.
    Ethertype(u16),
}

impl Form {
    fn is_opening(&self) -> bool {
        *self == Self::Opening
    }
}

/// One path that the flow can take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Path {
    /// The network that both ends are on, if both ends are known.
    pub network: Option<String>,
    /// The end that opens the flow.
    pub from: Named,
    /// The other end.
    pub to: Named,
    /// Protocol and port.
    pub traffic: Asked,
    /// The decision at `from`, about egress.
    pub egress: Leg,
    /// The decision at `to`, about ingress.
    pub ingress: Leg,
    /// The node may translate the destination (a Service, a hostPort, a NodePort). The decisions are then about the destination
    /// behind the translation, and do not hold for the one in the question.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub translated: bool,
    /// Ends whose enforcement the pod can bypass.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<Limit>,
}

/// An end where enforcement is below [`Level::Full`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// The end.
    pub of: Named,
    /// Enforcement level there.
    pub enforcement: Level,
    /// The reason for the lower level.
    pub why: String,
}

/// An address, and the pod that has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// The pod, if it is known.
    pub pod: Option<ObjectName>,
    /// The address.
    pub address: IpAddr,
}

/// The decision at one end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Leg {
    /// The end is not an enforced attachment of this node.
    NotHere,
    /// No policy isolates this direction.
    NotIsolated,
    /// A rule allows the flow.
    Allowed {
        /// Number of the policy in the maps.
        policy: u32,
        /// The longest prefix that holds the peer.
        peer: IpNet,
        /// The class of that prefix.
        class: u32,
        /// Number of the rule in the policy.
        rule: u32,
        /// The rule in words: object, direction and position.
        by: String,
    },
    /// Policies isolate this direction, but are not enforced.
    Unenforced {
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
        /// Why they are not enforced.
        why: String,
    },
    /// The direction is isolated, but the agent's settings let ICMP of this family pass.
    AcceptedIcmp,
    /// The packet is needed for the link to work, and no policy blocks it.
    KeepsLink,
    /// The network's definition names the ethertype.
    Named,
    /// The frame is of a protocol of bridges, switches and cards, which pods do not speak.
    Infrastructure,
    /// Policies isolate this direction, and no rule allows frames that are not IP.
    NotIp {
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
    },
    /// Policies isolate this direction, and the settings drop segments of unknown connections.
    Midstream,
    /// No rule allows the flow.
    Denied {
        /// Number of the policy in the maps.
        policy: u32,
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
        /// Why no rule allows it.
        missing: Missing,
    },
    /// The direction is isolated completely: its policy does not fit into the maps.
    OverCapacity {
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
    },
    /// The policy is of an earlier agent, and its content is in the maps only.
    Unknown {
        /// Number of the policy in the maps.
        policy: u32,
    },
}

/// Why no rule allows a flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// No rule names the peer.
    Peer,
    /// Rules name a block around the peer, with this exception.
    Excepted(IpNet),
    /// These rules name the peer, for other traffic: `shop/db ingress[0] (tcp/80)`.
    Port(Vec<String>),
}
