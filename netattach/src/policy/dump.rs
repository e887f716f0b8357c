//! Compiled policies as they are in the maps, for people.

use std::collections::BTreeSet;

use ipnet::IpNet;
use netattach_common::PolicyIds;

use super::desired::Desired;
use super::diff::{PolicyId, Programmed};
use super::lookup::{ClassId, CompiledPolicy, RuleId};
use crate::objects::policy::PolicyName;

/// Most peers, and most ports, of a policy that are shown, as the size of an answer is limited.
const SHOWN: usize = 20_000;

/// One compiled policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    /// Its number in the maps.
    pub policy: PolicyId,
    /// The attachments under it, by number, and in which direction.
    pub attachments: Vec<Use>,
    /// Its rules.
    pub rules: Vec<Rule>,
    /// Peers and their classes.
    pub peers: Vec<Peer>,
    /// The traffic that each class may exchange.
    pub ports: Vec<Port>,
    /// How many rules, peers and ports are in the maps but not shown.
    pub left_out: usize,
}

/// Where a policy is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// Number of the attachment.
    pub attachment: u32,
    /// Whether the policy judges ingress.
    pub ingress: bool,
    /// Whether the policy judges egress.
    pub egress: bool,
}

/// A rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Its number.
    pub rule: RuleId,
    /// Object, direction and position.
    pub from: String,
}

/// Peers with the same class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Their prefix; of two that hold an address, the longer one counts.
    pub net: IpNet,
    /// Class 1 may exchange nothing.
    pub class: ClassId,
}

/// Traffic that a class may exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Which class.
    pub class: ClassId,
    /// `any`, `tcp`, `tcp/80` or `tcp/64-127`.
    pub traffic: String,
    /// The rule that allows it.
    pub rule: RuleId,
}

/// Returns the policies in the maps: all of them, the one with a number, or those caused by an object
/// (`[networkpolicy ]namespace/name`), either by a rule or by isolating an attachment without
/// allowing anything.
pub fn dump(programmed: &Programmed, desired: &Desired, wanted: Option<&str>) -> Vec<Dump> {
    let of_object = wanted.map(|name| isolating(programmed, desired, name)).unwrap_or_default();
    let is_wanted = |id: &PolicyId, policy: &CompiledPolicy| match wanted {
        None => true,
        Some(name) => {
            id.to_string() == name
                || of_object.contains(id)
                || policy.rules.values().any(|origin| is_of(&origin.to_string(), name))
        }
    };
    let policies = programmed.policies.iter().filter(|(id, policy)| is_wanted(id, policy));
    policies.map(|(id, policy)| shown(*id, policy, programmed)).collect()
}

/// The policies of directions that the object isolates.
fn isolating(programmed: &Programmed, desired: &Desired, object: &str) -> BTreeSet<PolicyId> {
    let is_it = |by: &[PolicyName]| by.iter().any(|name| name.to_string() == object);
    let of_attachment = |(id, assigned): (&u32, &PolicyIds)| {
        let Some(desired) = desired.endpoints.get(id) else { return [None, None] };
        [
            is_it(&desired.ingress_by).then_some(assigned.ingress),
            is_it(&desired.egress_by).then_some(assigned.egress),
        ]
    };
    programmed.endpoints.iter().flat_map(of_attachment).flatten().collect()
}

/// Whether a rule is of the object: `shop/db ingress[0]` is of `shop/db`.
fn is_of(origin: &str, object: &str) -> bool {
    origin.rsplit_once(' ').is_some_and(|(name, _)| name == object)
}

fn shown(id: PolicyId, policy: &CompiledPolicy, programmed: &Programmed) -> Dump {
    let used = |(attachment, assignment): (&u32, &PolicyIds)| {
        let (ingress, egress) = (assignment.ingress == id, assignment.egress == id);
        (ingress || egress).then_some(Use { attachment: *attachment, ingress, egress })
    };
    let beyond = |length: usize| length.saturating_sub(SHOWN);
    Dump {
        policy: id,
        attachments: programmed.endpoints.iter().filter_map(used).collect(),
        rules: policy
            .rules
            .iter()
            .take(SHOWN)
            .map(|(rule, from)| Rule { rule: *rule, from: from.to_string() })
            .collect(),
        peers: policy
            .peers
            .iter()
            .take(SHOWN)
            .map(|(net, class)| Peer { net: *net, class: *class })
            .collect(),
        ports: policy
            .ports
            .iter()
            .take(SHOWN)
            .map(|(entry, rule)| Port { class: entry.class, traffic: entry.traffic.to_string(), rule: *rule })
            .collect(),
        left_out: beyond(policy.rules.len()) + beyond(policy.peers.len()) + beyond(policy.ports.len()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::objects::ObjectName;
    use crate::policy::desired::EndpointPolicy;
    use crate::policy::lookup::{PortPrefix, Traffic};

    #[test]
    fn a_policy_is_found_by_its_number_and_by_its_objects() {
        let traffic = Traffic::Ports { protocol: 6, port: 64, bits: 10 };
        let compiled = CompiledPolicy {
            peers: BTreeMap::from([("10.0.0.0/8".parse().unwrap(), 2)]),
            ports: BTreeMap::from([(PortPrefix { class: 2, traffic }, 1)]),
            rules: BTreeMap::from([(1, "shop/db ingress[0]".into())]),
        };
        let programmed = Programmed {
            policies: BTreeMap::from([(7, Arc::new(compiled)), (8, Arc::default())]),
            endpoints: BTreeMap::from([(3, PolicyIds { ingress: 7, egress: 8 })]),
            last_id: 8,
        };
        let seven = Dump {
            policy: 7,
            attachments: vec![Use { attachment: 3, ingress: true, egress: false }],
            rules: vec![Rule { rule: 1, from: "shop/db ingress[0]".to_owned() }],
            peers: vec![Peer { net: "10.0.0.0/8".parse().unwrap(), class: 2 }],
            ports: vec![Port { class: 2, traffic: "tcp/64-127".to_owned(), rule: 1 }],
            left_out: 0,
        };
        // `shop/deny` has no rule: it is found by the attachment that it isolates.
        let name = |name: &str| PolicyName::multi(ObjectName::new("shop", name));
        let endpoint = EndpointPolicy {
            policies: vec![name("db"), name("deny")],
            ingress_by: vec![name("db")],
            egress_by: vec![name("deny")],
            ..EndpointPolicy::default()
        };
        let desired = Desired { endpoints: BTreeMap::from([(3, Arc::new(endpoint))]), ..Desired::default() };
        let numbers = |wanted| -> Vec<PolicyId> {
            dump(&programmed, &desired, wanted).iter().map(|dump| dump.policy).collect()
        };
        assert_eq!(dump(&programmed, &desired, Some("7")), std::slice::from_ref(&seven));
        assert_eq!(dump(&programmed, &desired, Some("shop/db")), [seven]);
        assert_eq!(numbers(Some("shop/deny")), [8]);
        assert_eq!(numbers(Some("shop/d")), [] as [PolicyId; 0]);
        assert_eq!(numbers(None), [7, 8]);
    }
}
