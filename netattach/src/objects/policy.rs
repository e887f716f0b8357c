//! A policy as our own type, with everything that was wrong in the object decided.

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
    /// Which object it is; only pods of its namespace are selected.
    pub name: PolicyName,
    /// The networks whose attachments a MultiNetworkPolicy is about (annotation `policy-for`). A NetworkPolicy has
    /// none: it is about the pod's default network, whatever that is.
    pub networks: BTreeSet<NetworkRef>,
    /// Which pods of the namespace it isolates.
    pub pods: Selector,
    /// What may come in.
    pub ingress: Vec<Rule>,
    /// What may go out.
    pub egress: Vec<Rule>,
    /// Which directions it isolates.
    pub directions: Directions,
    /// What is odd or wrong with the object.
    pub problems: Vec<Problem>,
}

/// What a policy is called among policies of both kinds. Shown as `namespace/name`, and a NetworkPolicy as
/// `networkpolicy namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyName {
    /// Kind of the object.
    pub kind: PolicyKind,
    /// Its namespace and name.
    pub object: ObjectName,
}

/// What kind of object a policy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyKind {
    /// MultiNetworkPolicy of `k8s.cni.cncf.io`.
    Multi,
    /// NetworkPolicy of `networking.k8s.io`.
    Network,
}

/// The way of a connection, seen from the selected pod.
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
    /// Said in so many words.
    Listed {
        /// Ingress is in the list.
        ingress: bool,
        /// Egress is in the list.
        egress: bool,
    },
    /// Left out: to be inferred from the rules, see [`Inference`].
    Inferred,
}

/// What a policy without `policyTypes` isolates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Inference {
    /// The directions that have rules, as the public MultiNetworkPolicy suite expects.
    #[default]
    Presence,
    /// Ingress always, egress where it has rules, as NetworkPolicy v1 says.
    V1,
}

/// Allows what comes from (or goes to) one of the peers **and** is one of the kinds of traffic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The other side.
    pub peers: Peers,
    /// The traffic.
    pub ports: Ports,
}

/// The other side of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peers {
    /// Everyone.
    Any,
    /// Any of these; none if there are none.
    Of(Vec<Peer>),
}

/// One item of `from` or `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// The addresses of `net` that are in none of `except`. Host bits are clear.
    Block {
        /// The block.
        net: IpNet,
        /// What is cut out of it.
        except: Vec<IpNet>,
    },
    /// The addresses that pods have on the policy's networks.
    Pods {
        /// Which namespaces; `None`: the policy's.
        namespaces: Option<Selector>,
        /// Which pods in them.
        pods: Selector,
    },
}

/// The traffic of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ports {
    /// Everything, protocols without ports included.
    Any,
    /// Any of these; none if there are none.
    Of(Vec<PortTerm>),
}

/// One item of `ports`. Always about the destination port.
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

/// How much something matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// In force as written, but perhaps not as meant.
    Warning,
    /// Something written is not in force; it denies where it might have allowed.
    Error,
}

/// One thing that is odd or wrong with a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// How much it matters.
    pub severity: Severity,
    /// Where in the object, such as `spec.ingress[0].from[1]`.
    pub path: String,
    /// What.
    pub finding: Finding,
}

/// What can be odd or wrong with a policy. The texts also say what was made of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// The annotation that names the networks is missing or names none.
    #[error("names no network, so the policy selects nothing")]
    NoNetwork,
    /// An item of that annotation is no network name.
    #[error("{0:?} is not of the form [namespace/]name and is left out")]
    NetworkName(String),
    /// A key that this place does not have, which makes the item unreadable.
    #[error("unknown key {0:?}: matches nothing")]
    UnknownKey(String),
    /// A key of the specification that does not exist.
    #[error("unknown key {0:?} is ignored")]
    IgnoredKey(String),
    /// The same where nothing says which directions the policy isolates.
    #[error("unknown key {0:?}, and no policyTypes: both directions are isolated")]
    UnknownSpecKey(String),
    /// More than the budget has.
    #[error("{0}: whom it selects is isolated and none of its rules applies")]
    Excess(Excess),
    /// The specification does not have the shape that it must have.
    #[error("cannot be read: every pod of the namespace is isolated")]
    Unreadable,
    /// There is more than is told.
    #[error("{0} more findings are not told")]
    Untold(usize),
    /// The selector of the policy is unreadable.
    #[error("{0}: every pod of the namespace is isolated and no rule of this policy applies")]
    PodSelector(SelectorError),
    /// The selector of a peer is unreadable.
    #[error("{0}: matches nothing")]
    PeerSelector(SelectorError),
    /// A known word in the wrong case.
    #[error("{written:?} is read as {read_as:?}")]
    Case {
        /// As written.
        written: String,
        /// As meant.
        read_as: &'static str,
    },
    /// An unknown policy type.
    #[error("{0:?} is neither Ingress nor Egress: both directions are isolated")]
    PolicyType(String),
    /// No `policyTypes`, and the two ways of inferring them differ.
    #[error("missing, and rules alone do not say whether ingress is isolated")]
    TypesInferred,
    /// Rules for a direction that `policyTypes` leaves out.
    #[error("{0:?} is not among the policy types: these rules are ignored")]
    TypeNotListed(Direction),
    /// A peer with none of the three fields.
    #[error("has neither ipBlock nor a selector: matches nothing")]
    EmptyPeer,
    /// `ipBlock` beside a selector.
    #[error("has selectors beside ipBlock: only the block counts")]
    BlockAndSelector,
    /// The block is no prefix.
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
    /// Something that depends on a pod or a namespace where rules are for all of them.
    #[error("rules for all policies take address blocks and port numbers only")]
    NotForAll,
    /// `endPort` where it cannot be.
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

    /// Nothing but the name, and so no rule.
    pub(crate) fn name_only(&self) -> Self {
        Self {
            name: self.name.clone(),
            networks: BTreeSet::new(),
            pods: Selector::default(),
            ingress: Vec::new(),
            egress: Vec::new(),
            directions: self.directions,
            problems: Vec::new(),
        }
    }

    /// The policy as it is in force beyond a bound: it isolates whom it did, and allows nothing.
    pub(crate) fn without_rules(&self, excess: Excess, inference: Inference) -> Self {
        let [ingress, egress] =
            [Direction::Ingress, Direction::Egress].map(|direction| self.isolates(direction, inference));
        let problem =
            Problem { severity: Severity::Error, path: "spec".to_owned(), finding: Finding::Excess(excess) };
        Self {
            name: self.name.clone(),
            networks: self.networks.clone(),
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
