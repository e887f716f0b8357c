//! Explains why traffic is allowed or denied: evaluates the tables in force like the packet programs, and
//! returns the decision as text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use netattach_common::Mac;
use netattach_common::decide::Verdict as Decision;
use netattach_common::link::is_infrastructure;
use netattach_common::protocol::{ICMP, ICMPV6};

use super::classes::NOTHING;
use super::desired::Desired;
use super::diff::{PolicyId, Programmed};
use super::evaluate::{judge, peer_entry};
use super::index::{Endpoint, is_on_default, published_addresses};
use super::lookup::{ClassId, CompiledPolicy, Origin, PortPrefix, RuleId, protocol_name};
use crate::objects::access::Restrictions;
use crate::objects::policy::Direction;
use crate::objects::remote::RemotePod;
use crate::objects::{ObjectName, Objects, Place};
use crate::policy::level::{Enforcement, Level};

/// A question about a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The end that opens the flow.
    pub from: End,
    /// The peer of the flow.
    pub to: End,
    /// The traffic.
    pub traffic: Asked,
}

/// One end of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// A pod, by any of its addresses.
    Pod(ObjectName),
    /// An address.
    Address(IpAddr),
}

/// The traffic of a flow. Shown as `tcp/80` or `icmp`; packets that do not open a flow as `tcp/80 (segment)` or
/// `ethertype 0x88b5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// IANA number; 0 for traffic other than IP.
    pub protocol: u8,
    /// Destination port, for protocols that have ports.
    pub port: Option<u16>,
    /// The packets that the question is about.
    pub form: Form,
}

/// The packets that a question is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Form {
    /// The first of a flow.
    #[default]
    Opening,
    /// A TCP or SCTP segment that does not open a connection, of a connection that is not in the flow table.
    Segment,
    /// A later fragment of a packet whose first fragment was not seen.
    Fragment,
    /// ARP, neighbour discovery, multicast listener messages.
    Link,
    /// A frame of an ethertype that is neither IP's nor ARP's.
    Ethertype(u16),
}

impl Asked {
    /// The traffic that a rule would have to name: no rule names segments, and the port of a later fragment is unknown.
    pub(super) fn as_rules_name_it(self) -> Self {
        let port = self.port.filter(|_| self.form != Form::Fragment);
        Self { port, form: Form::Opening, ..self }
    }
}

/// One path that the flow can take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// The network of both ends, where both are known.
    pub network: Option<String>,
    /// The end that opens the flow.
    pub from: Named,
    /// The peer of the flow.
    pub to: Named,
    /// The traffic.
    pub traffic: Asked,
    /// Egress of `from`.
    pub egress: Leg,
    /// Ingress of `to`.
    pub ingress: Leg,
    /// The node may translate the destination: then the verdict holds for the translated destination, not for the one
    /// asked about.
    pub translated: bool,
    /// The ends at which enforcement is below `full`.
    pub limits: Vec<Limit>,
}

/// The enforcement at one end, where it is below `full`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// Which.
    pub of: Named,
    /// How far.
    pub enforcement: Level,
    /// Why not further.
    pub why: String,
}

/// An address and its pod. Shown as `shop/db (10.0.0.2)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The pod, if it is known.
    pub pod: Option<ObjectName>,
    /// The address.
    pub address: IpAddr,
}

/// The verdict at one end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leg {
    /// Not an enforced attachment of this node: the node that has it decides.
    NotHere,
    /// No policy isolates this direction.
    NotIsolated,
    /// A rule allows it.
    Allowed {
        /// Number of the policy in the maps.
        policy: PolicyId,
        /// The entry that matched the peer.
        peer: IpNet,
        /// The class of that entry.
        class: ClassId,
        /// Number of the rule in the policy.
        rule: RuleId,
        /// The object, direction and position of the rule.
        by: String,
    },
    /// Policies isolate this direction but are not enforced.
    Unenforced {
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
        /// Why.
        why: String,
    },
    /// The direction is isolated, but the agent's settings let ICMP of this family pass.
    AcceptedIcmp,
    /// The link needs it (ARP, neighbour discovery): no policy denies it.
    KeepsLink,
    /// The network's definition names the ethertype.
    Named,
    /// A protocol of bridges, switches and cards, which pods do not speak.
    Infrastructure,
    /// Policies isolate this direction, and no rule allows traffic other than IP.
    NotIp {
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
    },
    /// Policies isolate this direction, and the settings drop segments of unknown connections.
    Midstream,
    /// No rule allows it.
    Denied {
        /// Number of the policy in the maps.
        policy: PolicyId,
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
        /// The part that no rule matches.
        missing: Missing,
    },
    /// Isolated completely, because the policy does not fit into the maps.
    OverCapacity {
        /// The objects that isolate the direction.
        selected_by: Vec<String>,
    },
    /// Under a policy of an earlier agent: its content is in the maps only.
    Unknown {
        /// Number of the policy in the maps.
        policy: PolicyId,
    },
}

/// The part of a flow that no rule matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// No rule names the peer.
    Peer,
    /// Rules name a block around the peer and cut this out of it.
    Excepted(IpNet),
    /// These rules name the peer, but other traffic: `shop/db ingress[0] (tcp/80)`.
    Port(Vec<String>),
}

/// The node's settings that apply to packets of every attachment, beside its policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeRules {
    /// Connections that are older than the flow table are dropped.
    pub strict_connections: bool,
    /// ICMP passes.
    pub accept_icmp: bool,
    /// ICMPv6 passes.
    pub accept_icmpv6: bool,
}

/// The policies in force, and the objects and attachments that they apply to.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Every object.
    pub objects: &'a Objects,
    /// The attachments of this node that are enforced.
    pub endpoints: &'a [Endpoint],
    /// Attachments whose enforcement is below `full`.
    pub limited: &'a BTreeMap<u32, Enforcement>,
    /// The content of the maps.
    pub programmed: &'a Programmed,
    /// The result of the last compilation.
    pub desired: &'a Desired,
    /// The settings that apply to every attachment.
    pub node: NodeRules,
    /// Traffic that the node routes from and to default networks is judged after the node has translated addresses.
    pub behind_translation: bool,
    /// The attachment that each address leads to there.
    pub routed: &'a BTreeMap<IpAddr, u32>,
    /// Which network is the node's default.
    pub restrictions: &'a Restrictions,
}

/// A possible end of the flow, by an address.
#[derive(Debug, Clone)]
struct Candidate<'a> {
    named: Named,
    /// Empty: unknown, it can be on any network.
    at: BTreeSet<Place>,
    endpoint: Option<&'a Endpoint>,
}

/// Every path that the flow can take: one for each network and address family that both ends have.
pub fn explain(view: &View<'_>, question: &Question) -> Vec<Path> {
    let (from, to) = (view.candidates(&question.from), view.candidates(&question.to));
    let pairs = from.iter().flat_map(|from| to.iter().map(move |to| (from, to)));
    pairs.filter_map(|(from, to)| view.path(from, to, question.traffic)).collect()
}

impl View<'_> {
    fn candidates(&self, end: &End) -> Vec<Candidate<'_>> {
        let mut found: Vec<Candidate<'_>> = self.endpoints.iter().flat_map(Candidate::of_endpoint).collect();
        let is_local = |pod: &ObjectName| self.endpoints.iter().any(|endpoint| endpoint.pod == *pod);
        let elsewhere = self.objects.pods.values().filter(|pod| !is_local(&pod.name));
        let elsewhere = elsewhere.filter(|pod| !pod.host_network && !pod.phase.has_ended());
        for pod in elsewhere.filter(|pod| pod.has_what_it_claims()) {
            for (place, address) in published_addresses(pod).unwrap_or_default() {
                let named = Named { pod: Some(pod.name.clone()), address };
                found.push(Candidate { named, at: BTreeSet::from([place]), endpoint: None });
            }
        }
        let remote = self.remote_ends(end);
        let is_taken = |address: IpAddr, place: &Place| {
            self.endpoints.iter().any(|it| it.addresses.contains(&address) && it.at.contains(place))
        };
        for (pod, place, address) in remote.filter(|(_, place, address)| !is_taken(*address, place)) {
            let named = Named { pod: Some(pod.object_name()), address };
            found.push(Candidate { named, at: BTreeSet::from([place.clone()]), endpoint: None });
        }
        match end {
            End::Pod(name) => found.retain(|candidate| candidate.named.pod.as_ref() == Some(name)),
            End::Address(address) => found.retain(|candidate| candidate.named.address == *address),
        }
        if let (End::Address(address), true) = (end, found.is_empty()) {
            let named = Named { pod: None, address: *address };
            found.push(Candidate { named, at: BTreeSet::new(), endpoint: None });
        }
        found
    }

    /// The pods of other nodes that an end can be, with their addresses; none whose name a pod of this node has too.
    fn remote_ends(&self, end: &End) -> impl Iterator<Item = (&RemotePod, &Place, IpAddr)> {
        let (named, anybody, wanted) = match end {
            End::Pod(name) => (self.objects.remote_pods.get(name), None, None),
            End::Address(address) => (None, Some(self.objects.remote_pods.iter()), Some(*address)),
        };
        let pods = named.into_iter().chain(anybody.into_iter().flatten());
        let claims = pods
            .filter(|pod| pod.unreadable().is_none())
            .flat_map(|pod| pod.claims().map(move |(place, address)| (&**pod, place, address)));
        claims
            .filter(move |(_, _, address)| wanted.is_none_or(|wanted| wanted == *address))
            .filter(|(pod, _, _)| !self.objects.pods.contains_key(&pod.object_name()))
    }

    fn path(&self, from: &Candidate<'_>, to: &Candidate<'_>, traffic: Asked) -> Option<Path> {
        let shared = from.at.intersection(&to.at).next();
        let anywhere = from.at.is_empty() || to.at.is_empty();
        let judged = from.endpoint.is_some() || to.endpoint.is_some();
        let same_family = from.named.address.is_ipv4() == to.named.address.is_ipv4();
        // ICMP is of IPv4 only, ICMPv6 of IPv6 only.
        let spoken = match traffic.protocol {
            ICMP => from.named.address.is_ipv4(),
            ICMPV6 => from.named.address.is_ipv6(),
            _ => true,
        };
        if !same_family || !spoken || !judged || !(anywhere || shared.is_some()) {
            return None;
        }
        let egress = self.leg(from, Direction::Egress, to.named.address, traffic);
        let ingress = self.leg(to, Direction::Ingress, from.named.address, traffic);
        let limits =
            [(from, &egress), (to, &ingress)].into_iter().filter_map(|(of, leg)| self.limit(of, leg));
        Some(Path {
            network: shared.map(ToString::to_string),
            from: from.named.clone(),
            to: to.named.clone(),
            traffic,
            limits: limits.collect(),
            translated: self.is_translated(from, to),
            egress,
            ingress,
        })
    }

    /// Whether the node may translate a destination that is no pod's before the destination is judged.
    fn is_translated(&self, from: &Candidate<'_>, to: &Candidate<'_>) -> bool {
        let by_the_node = is_on_default(&from.at, self.restrictions) && self.is_routed(from);
        self.behind_translation && by_the_node && to.named.pod.is_none()
    }

    /// Whether the node's packet filter judges what a candidate sends by its address.
    fn is_routed(&self, of: &Candidate<'_>) -> bool {
        let leads_to = self.routed.get(&of.named.address);
        of.endpoint.is_some_and(|endpoint| leads_to == Some(&endpoint.id))
    }

    /// The limit of enforcement at an end that a policy isolates.
    fn limit(&self, of: &Candidate<'_>, leg: &Leg) -> Option<Limit> {
        if matches!(
            leg,
            Leg::NotHere | Leg::NotIsolated | Leg::Unenforced { .. } | Leg::KeepsLink | Leg::Named
        ) {
            return None;
        }
        let Enforcement { level, why } = self.limited.get(&of.endpoint?.id)?;
        Some(Limit { of: of.named.clone(), enforcement: *level, why: why.clone() })
    }

    fn leg(&self, at: &Candidate<'_>, direction: Direction, peer: IpAddr, traffic: Asked) -> Leg {
        let Some(endpoint) = at.endpoint else { return Leg::NotHere };
        match traffic.form {
            Form::Link => return Leg::KeepsLink,
            Form::Ethertype(number) if endpoint.ethertypes.contains(&number) => return Leg::Named,
            // No MAC address is given: multicast addresses of bridges are not asked about.
            Form::Ethertype(number)
                if direction == Direction::Egress && is_infrastructure(&Mac::default(), number) =>
            {
                return Leg::Infrastructure;
            }
            _ => {}
        }
        let assigned = self.programmed.endpoints.get(&endpoint.id).copied().unwrap_or_default();
        let policy = match direction {
            Direction::Ingress => assigned.ingress,
            Direction::Egress => assigned.egress,
        };
        if policy == 0 {
            return Leg::NotIsolated;
        }
        let desired = self.desired.endpoints.get(&endpoint.id);
        let isolating = desired.iter().flat_map(|it| match direction {
            Direction::Ingress => &it.ingress_by,
            Direction::Egress => &it.egress_by,
        });
        let selected_by = isolating.map(ToString::to_string).collect();
        if let Some(Enforcement { level: Level::None, why }) = self.limited.get(&endpoint.id) {
            return Leg::Unenforced { selected_by, why: why.clone() };
        }
        match traffic.form {
            Form::Ethertype(_) => return Leg::NotIp { selected_by },
            Form::Segment if self.node.strict_connections => return Leg::Midstream,
            _ => {}
        }
        let NodeRules { accept_icmp, accept_icmpv6, .. } = self.node;
        if (traffic.protocol == ICMP && accept_icmp) || (traffic.protocol == ICMPV6 && accept_icmpv6) {
            return Leg::AcceptedIcmp;
        }
        match self.programmed.policies.get(&policy) {
            Some(compiled) => {
                // A question names no link-layer address: the node is taken at its word.
                let is_node_excepted = direction == Direction::Ingress || self.is_routed(at);
                decided((policy, compiled), selected_by, peer, traffic, is_node_excepted)
            }
            None if policy == crate::policy::diff::DENY_ALL => Leg::OverCapacity { selected_by },
            None => Leg::Unknown { policy },
        }
    }
}

impl<'a> Candidate<'a> {
    fn of_endpoint(endpoint: &'a Endpoint) -> impl Iterator<Item = Self> {
        endpoint.addresses.iter().map(move |address| Self {
            named: Named { pod: Some(endpoint.pod.clone()), address: *address },
            at: (*endpoint.at).clone(),
            endpoint: Some(endpoint),
        })
    }
}

/// `is_node_excepted`: the rule about the pod's own node holds.
fn decided(
    (policy, compiled): (PolicyId, &CompiledPolicy),
    selected_by: Vec<String>,
    peer: IpAddr,
    traffic: Asked,
    is_node_excepted: bool,
) -> Leg {
    let entry = peer_entry(compiled, peer);
    let Asked { protocol, port, .. } = traffic.as_rules_name_it();
    let missing = match (judge(compiled, peer, protocol, port), entry) {
        (Decision::Allow { rule }, _)
            if !is_node_excepted && matches!(compiled.rules.get(&rule), Some(Origin::OfNode(_))) =>
        {
            Missing::Peer
        }
        (Decision::Allow { rule }, Some((peer, class))) => {
            let by = compiled.rules.get(&rule).map(ToString::to_string).unwrap_or_default();
            return Leg::Allowed { policy, peer, class, rule, by };
        }
        (_, Some((net, NOTHING))) => Missing::Excepted(net),
        (_, None) => Missing::Peer,
        (_, Some((_, class))) => Missing::Port(traffic_of(compiled, class)),
    };
    Leg::Denied { policy, selected_by, missing }
}

/// The traffic that rules allow to a class of peers.
fn traffic_of(compiled: &CompiledPolicy, class: ClassId) -> Vec<String> {
    let mut by_rule: BTreeMap<RuleId, Vec<String>> = BTreeMap::new();
    for (PortPrefix { traffic, .. }, rule) in compiled.ports.iter().filter(|(entry, _)| entry.class == class)
    {
        by_rule.entry(*rule).or_default().push(traffic.to_string());
    }
    let origin = |rule: &RuleId| compiled.rules.get(rule).map(ToString::to_string).unwrap_or_default();
    by_rule.iter().map(|(rule, traffic)| format!("{} ({})", origin(rule), traffic.join(", "))).collect()
}

impl Path {
    /// Whether the flow passes, as far as this node can tell.
    pub fn passes(&self) -> bool {
        [&self.egress, &self.ingress].iter().all(|leg| {
            matches!(
                leg,
                Leg::NotHere
                    | Leg::NotIsolated
                    | Leg::Unenforced { .. }
                    | Leg::AcceptedIcmp
                    | Leg::KeepsLink
                    | Leg::Named
                    | Leg::Allowed { .. }
            )
        })
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.form {
            Form::Link => return f.write_str("ARP or neighbour discovery"),
            Form::Ethertype(number) => return write!(f, "ethertype {number:#06x}"),
            _ => {}
        }
        protocol_name(self.protocol, f)?;
        self.port.map_or(Ok(()), |port| write!(f, "/{port}"))?;
        match self.form {
            Form::Segment => f.write_str(" (segment of no known connection)"),
            Form::Fragment => f.write_str(" (later fragment)"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pod {
            Some(pod) => write!(f, "{pod} ({})", self.address),
            None => write!(f, "{}", self.address),
        }
    }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
