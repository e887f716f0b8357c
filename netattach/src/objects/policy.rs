//! A policy as netattach's own type, with every problem of the object already resolved.

use std::collections::BTreeSet;
use std::fmt;

use ipnet::IpNet;

use super::ObjectName;
use super::budget::Excess;
use super::labels::{Selector, SelectorError};
use crate::npwg::NetworkRef;
use crate::npwg::selection::PortProtocol;

/// Annotation that names the networks of a policy, separated by commas.
pub const POLICY_FOR_ANNOTATION: &str = "k8s.v1.cni.cncf.io/policy-for";

/// One policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The object; only pods of its namespace are selected.
    pub name: PolicyName,
    /// The networks whose attachments a MultiNetworkPolicy applies to (annotation `policy-for`). Empty for a
    /// NetworkPolicy, which applies to the pod's default network.
    pub networks: BTreeSet<NetworkRef>,
    /// Whether it applies to every network that its kind may name: it stands for policies that are not kept, or its
    /// annotation names more than a policy may be for.
    pub all_networks: bool,
    /// The pods of the namespace that it isolates.
    pub pods: Selector,
    /// The allowed ingress traffic.
    pub ingress: Vec<Rule>,
    /// The allowed egress traffic.
    pub egress: Vec<Rule>,
    /// The directions it isolates.
    pub directions: Directions,
    /// Problems found while reading the object.
    pub problems: Vec<Problem>,
}

/// Name of a policy among policies of both kinds. Printed as `namespace/name`, and for a NetworkPolicy as
/// `networkpolicy namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyName {
    /// Kind of the object.
    pub kind: PolicyKind,
    /// Its namespace and name.
    pub object: ObjectName,
}

/// The kind of a policy object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyKind {
    /// MultiNetworkPolicy of `k8s.cni.cncf.io`.
    Multi,
    /// NetworkPolicy of `networking.k8s.io`.
    Network,
}

/// The direction of a connection, seen from the selected pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Towards the pod.
    Ingress,
    /// From the pod.
    Egress,
}

/// `policyTypes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Directions {
    /// Given explicitly.
    Listed {
        /// Ingress is in the list.
        ingress: bool,
        /// Egress is in the list.
        egress: bool,
    },
    /// Omitted: inferred from the rules, see [`Inference`].
    Inferred,
}

/// The directions that a policy without `policyTypes` isolates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Inference {
    /// The directions that have rules, as the public MultiNetworkPolicy suite expects.
    #[default]
    Presence,
    /// Ingress always, egress if it has rules, as NetworkPolicy v1 defines.
    V1,
}

/// Allows traffic from (or to) one of the peers **and** of one of the listed ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The peers.
    pub peers: Peers,
    /// The ports.
    pub ports: Ports,
}

/// The peers of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peers {
    /// Any peer.
    Any,
    /// Any of these; an empty list matches nothing.
    Of(Vec<Peer>),
}

/// One item of `from` or `to`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Peer {
    /// The addresses of `net` that are in none of `except`. Host bits are zero.
    Block {
        /// The block.
        net: IpNet,
        /// The excluded blocks.
        except: Vec<IpNet>,
    },
    /// The addresses of pods on the policy's networks.
    Pods {
        /// The namespaces; `None`: the policy's own.
        namespaces: Option<Selector>,
        /// The pods in them.
        pods: Selector,
    },
}

impl Peer {
    /// The cost of comparing it with one pod, at most: that of its selectors ([`Selector::weight`]), at least 1.
    pub fn weight(&self) -> usize {
        match self {
            Self::Block { .. } => 1,
            Self::Pods { namespaces, pods } => {
                (namespaces.as_ref().map_or(0, Selector::weight) + pods.weight()).max(1)
            }
        }
    }
}

/// The ports of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ports {
    /// All traffic, including protocols without ports.
    Any,
    /// Any of these; an empty list matches nothing.
    Of(Vec<PortTerm>),
}

/// One item of `ports`. Always applies to the destination port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortTerm {
    /// All ports of a protocol.
    Protocol(PortProtocol),
    /// The ports from `first` to `last`, both included.
    Range {
        /// Protocol.
        protocol: PortProtocol,
        /// Lowest port, never 0.
        first: u16,
        /// Highest port, not below `first`.
        last: u16,
    },
    /// The ports that the receiving pod declares under this name for this protocol.
    Named {
        /// Protocol.
        protocol: PortProtocol,
        /// Name of the container port.
        name: String,
    },
}

/// Severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Enforced as written, but perhaps not as intended.
    Warning,
    /// Part of the policy is not enforced as written; it denies traffic that it might have allowed.
    Error,
}

/// A problem found in a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Severity.
    pub severity: Severity,
    /// Path in the object, such as `spec.ingress[0].from[1]`.
    pub path: String,
    /// The problem.
    pub finding: Finding,
}

/// The problems that a policy can have. The texts also say how the policy is enforced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// The annotation that names the networks is missing or names none.
    #[error("names no network, so the policy selects nothing")]
    NoNetwork,
    /// An item of that annotation is not a network name.
    #[error("{0:?} is not of the form [namespace/]name and is left out")]
    NetworkName(String),
    /// An unknown key, which makes the item unreadable.
    #[error("unknown key {0:?}: matches nothing")]
    UnknownKey(String),
    /// An unknown key of the specification.
    #[error("unknown key {0:?} is ignored")]
    IgnoredKey(String),
    /// An unknown key of the specification while the directions that the policy isolates are not given.
    #[error("unknown key {0:?}, and no policyTypes: both directions are isolated")]
    UnknownSpecKey(String),
    /// A limit is exceeded.
    #[error("{0}: the pods that it selects are isolated and none of its rules applies")]
    Excess(Excess),
    /// The specification is malformed.
    #[error("cannot be read: every pod of the namespace is isolated")]
    Unreadable,
    /// There are more findings than are reported.
    #[error("{0} more findings are not listed")]
    Unlisted(usize),
    /// The selector of the policy is invalid.
    #[error("{0}: every pod of the namespace is isolated and no rule of this policy applies")]
    PodSelector(SelectorError),
    /// The selector of a peer is invalid.
    #[error("{0}: matches nothing")]
    PeerSelector(SelectorError),
    /// A known value in the wrong letter case.
    #[error("{written:?} is read as {read_as:?}")]
    Case {
        /// As written.
        written: String,
        /// As intended.
        read_as: &'static str,
    },
    /// An unknown policy type.
    #[error("{0:?} is neither Ingress nor Egress: both directions are isolated")]
    PolicyType(String),
    /// `policyTypes` is missing, and the two ways of inferring it differ.
    #[error("missing, and rules alone do not say whether ingress is isolated")]
    TypesInferred,
    /// Rules for a direction that `policyTypes` omits.
    #[error("{0:?} is not among the policy types: these rules are ignored")]
    TypeNotListed(Direction),
    /// A peer with none of the three fields.
    #[error("has neither ipBlock nor a selector: matches nothing")]
    EmptyPeer,
    /// `ipBlock` together with a selector.
    #[error("has selectors beside ipBlock: only the block counts")]
    BlockAndSelector,
    /// The block is not a prefix.
    #[error("{0:?} is not an address block such as 10.0.0.0/8: matches nothing")]
    Cidr(String),
    /// A prefix with host bits.
    #[error("{written} has host bits and is read as {read_as}")]
    HostBits {
        /// As written.
        written: String,
        /// With the host bits clear.
        read_as: IpNet,
    },
    /// An exception that lies outside the block.
    #[error("{0} is outside the block and is left out")]
    ExceptOutside(IpNet),
    /// An exception that covers the whole block.
    #[error("{0} covers the whole block: matches nothing")]
    ExceptCovers(IpNet),
    /// An unknown protocol.
    #[error("protocol {0:?} is not TCP, UDP or SCTP: matches nothing")]
    Protocol(String),
    /// A port that is neither a number in range nor a name.
    #[error("port {0} is neither a number from 1 to 65535 nor the name of a container port: matches nothing")]
    Port(String),
    /// A peer or port that depends on a pod or a namespace, in rules that apply to all of them.
    #[error("rules for all policies take address blocks and port numbers only")]
    NotForAll,
    /// `endPort` that does not fit the port.
    #[error("endPort {end} needs a port number not above it: matches nothing")]
    EndPort {
        /// As written.
        end: String,
    },
}

impl PolicyName {
    /// A MultiNetworkPolicy.
    pub fn multi(object: ObjectName) -> Self {
        Self { kind: PolicyKind::Multi, object }
    }

    /// A NetworkPolicy.
    pub fn network(object: ObjectName) -> Self {
        Self { kind: PolicyKind::Network, object }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            PolicyKind::Multi => write!(f, "{}", self.object),
            PolicyKind::Network => write!(f, "networkpolicy {}", self.object),
        }
    }
}

impl Policy {
    /// Namespace of the object and of the pods it selects.
    pub fn namespace(&self) -> &str {
        &self.name.object.namespace
    }

    /// The rules of one direction.
    pub fn rules(&self, direction: Direction) -> &[Rule] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }

    /// The policy reduced to its name, without rules.
    pub(crate) fn name_only(&self) -> Self {
        Self {
            name: self.name.clone(),
            networks: BTreeSet::new(),
            all_networks: self.all_networks,
            pods: Selector::default(),
            ingress: Vec::new(),
            egress: Vec::new(),
            directions: self.directions,
            problems: Vec::new(),
        }
    }

    /// The policy as it is enforced when a limit is exceeded: it isolates the same pods and allows nothing.
    pub(crate) fn without_rules(&self, excess: Excess, inference: Inference) -> Self {
        let [ingress, egress] =
            [Direction::Ingress, Direction::Egress].map(|direction| self.isolates(direction, inference));
        let problem =
            Problem { severity: Severity::Error, path: "spec".to_owned(), finding: Finding::Excess(excess) };
        Self {
            name: self.name.clone(),
            networks: self.networks.clone(),
            all_networks: self.all_networks,
            pods: self.pods.clone(),
            ingress: Vec::new(),
            egress: Vec::new(),
            directions: Directions::Listed { ingress, egress },
            problems: vec![problem],
        }
    }

    /// Whether the pods that the policy selects are isolated in a direction.
    pub fn isolates(&self, direction: Direction, inference: Inference) -> bool {
        match (self.directions, direction) {
            (Directions::Listed { ingress, .. }, Direction::Ingress) => ingress,
            (Directions::Listed { egress, .. }, Direction::Egress) => egress,
            (Directions::Inferred, Direction::Ingress) => {
                inference == Inference::V1 || !self.ingress.is_empty()
            }
            (Directions::Inferred, Direction::Egress) => !self.egress.is_empty(),
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.finding)
    }
}
