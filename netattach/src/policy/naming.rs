//! Names for people: the pods at the ends of recorded flows, and the policies that decided about them.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::desired::Desired;
use super::diff::{PolicyId, Programmed};
use super::index::{Endpoints, published_addresses};
use super::lookup::RuleId;
use crate::npwg::STATUS_ANNOTATION;
use crate::objects::{ObjectName, Objects, Place};

/// A flow or packet as it was recorded at an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recorded {
    /// Number of the attachment.
    pub attachment: u32,
    /// Source address, if it was read.
    pub source: Option<IpAddr>,
    /// Destination address, if it was read.
    pub destination: Option<IpAddr>,
    /// The policy that decided.
    pub policy: Option<PolicyId>,
    /// The rule that allowed.
    pub rule: Option<RuleId>,
}

/// The names of a record.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names {
    /// The pod of the source address on the attachment's networks.
    pub source: Option<ObjectName>,
    /// The pod of the destination address.
    pub destination: Option<ObjectName>,
    /// The rule that allowed: `namespace/policy ingress[0]`; of a drop the policies that isolate, sorted.
    pub decided_by: Vec<String>,
}

/// Names the records by the present objects and policies. A policy that has been replaced since has no name
/// any more, and an attachment that no longer exists has no network, so its ends have no names.
pub fn names(
    objects: &Objects,
    endpoints: &Endpoints,
    programmed: &Programmed,
    desired: &Desired,
    records: &[Recorded],
) -> Vec<Names> {
    let wanted: HashSet<IpAddr> =
        records.iter().flat_map(|record| [record.source, record.destination]).flatten().collect();
    let pods = pods_of(objects, endpoints, &wanted);
    let pod = |record: &Recorded, address: Option<IpAddr>| {
        let at = &endpoints.get(&record.attachment)?.at;
        let mut named =
            pods.get(&address?)?.iter().filter(|(place, _)| at.contains(place)).map(|(_, pod)| pod);
        let first = named.next()?;
        // Two pods that claim one address: neither is named.
        named.all(|other| other == first).then(|| first.clone())
    };
    let one = |record: &Recorded| Names {
        source: pod(record, record.source),
        destination: pod(record, record.destination),
        decided_by: decided_by(programmed, desired, record),
    };
    records.iter().map(one).collect()
}

/// The pods that have these addresses, each with the network. Attachments of this node come before claims of others.
fn pods_of(
    objects: &Objects,
    endpoints: &Endpoints,
    wanted: &HashSet<IpAddr>,
) -> HashMap<IpAddr, Vec<(Place, ObjectName)>> {
    let mut found: HashMap<IpAddr, Vec<(Place, ObjectName)>> = HashMap::new();
    for endpoint in endpoints.values() {
        for address in endpoint.addresses.iter().filter(|address| wanted.contains(address)) {
            let places = endpoint.at.iter().map(|place| (place.clone(), endpoint.pod.clone()));
            found.entry(*address).or_default().extend(places);
        }
    }
    let here = found.clone();
    let mut claim = |address: IpAddr, place: &Place, pod: ObjectName| {
        let is_here = here.get(&address).is_some_and(|pods| pods.iter().any(|(at, _)| at == place));
        if !is_here {
            found.entry(address).or_default().push((place.clone(), pod));
        }
    };
    for pod in objects.remote_pods.iter().filter(|pod| pod.unreadable().is_none()) {
        for (place, address) in pod.claims().filter(|(_, address)| wanted.contains(address)) {
            claim(address, place, pod.object_name());
        }
    }
    // With manifests as the source, pods of other nodes are among these; with a cluster, pods that another
    // plugin has attached.
    let elsewhere = objects
        .pods
        .values()
        .filter(|pod| pod.has_what_it_claims() && !pod.host_network && !pod.phase.has_ended())
        .filter(|pod| pod.annotations.contains_key(STATUS_ANNOTATION))
        .filter(|pod| !endpoints.values().any(|endpoint| endpoint.pod == pod.name));
    for pod in elsewhere {
        for (place, address) in published_addresses(pod).unwrap_or_default() {
            if wanted.contains(&address) {
                claim(address, &place, pod.name.clone());
            }
        }
    }
    found
}

fn decided_by(programmed: &Programmed, desired: &Desired, record: &Recorded) -> Vec<String> {
    let Some(policy) = record.policy else { return Vec::new() };
    if let Some(rule) = record.rule {
        let origin = programmed.policies.get(&policy).and_then(|compiled| compiled.rules.get(&rule));
        return origin.map(ToString::to_string).into_iter().collect();
    }
    let assigned = programmed.endpoints.get(&record.attachment);
    let (Some(assigned), Some(desired)) = (assigned, desired.endpoints.get(&record.attachment)) else {
        return Vec::new();
    };
    let isolating = match policy {
        id if id == assigned.ingress => &desired.ingress_by,
        id if id == assigned.egress => &desired.egress_by,
        _ => return Vec::new(),
    };
    isolating.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use netattach_common::PolicyIds;

    use super::*;
    use crate::npwg::NetworkRef;
    use crate::objects::policy::{PolicyKind, PolicyName};
    use crate::policy::desired::EndpointPolicy;
    use crate::policy::index::Endpoint;
    use crate::policy::lookup::CompiledPolicy;

    fn endpoint(id: u32, pod: &str, network: &str, address: [u8; 4]) -> (u32, Arc<Endpoint>) {
        let at = [Place::Network(NetworkRef::new(
            network.split_once('/').unwrap().0,
            network.split_once('/').unwrap().1,
        ))]
        .into();
        let endpoint = Endpoint {
            id,
            pod: pod.parse().unwrap(),
            uid: None,
            at: Arc::new(at),
            addresses: vec![address.into()],
            dhcp: None,
            ethertypes: vec![],
        };
        (id, Arc::new(endpoint))
    }

    #[test]
    fn ends_are_named_on_the_networks_of_the_attachment() {
        let endpoints = [
            endpoint(1, "shop/cart", "shop/lan", [10, 0, 0, 1]),
            endpoint(2, "shop/db", "shop/lan", [10, 0, 0, 2]),
            endpoint(3, "ops/db", "ops/lan", [10, 0, 0, 2]),
            endpoint(4, "ops/a", "ops/lan", [10, 0, 0, 9]),
            endpoint(5, "ops/b", "ops/lan", [10, 0, 0, 9]),
        ]
        .into();
        let record = |attachment, source: [u8; 4], destination: [u8; 4]| Recorded {
            attachment,
            source: Some(source.into()),
            destination: Some(destination.into()),
            policy: None,
            rule: None,
        };
        let records = [
            record(1, [10, 0, 0, 1], [10, 0, 0, 2]),
            record(3, [10, 0, 0, 1], [10, 0, 0, 2]),
            record(3, [10, 0, 0, 2], [10, 0, 0, 9]),
            record(77, [10, 0, 0, 1], [10, 0, 0, 2]),
        ];
        let named =
            names(&Objects::default(), &endpoints, &Programmed::default(), &Desired::default(), &records);
        let ends: Vec<_> = named
            .iter()
            .map(|names| [&names.source, &names.destination].map(|pod| pod.as_ref().map(ToString::to_string)))
            .collect();
        let some = |pod: &str| Some(pod.to_owned());
        assert_eq!(
            ends,
            [
                [some("shop/cart"), some("shop/db")],
                [None, some("ops/db")],
                [some("ops/db"), None],
                [None, None]
            ]
        );
    }

    #[test]
    fn what_decided_is_the_rule_or_the_policies_that_isolate() {
        let policy = |name: &str| PolicyName { kind: PolicyKind::Multi, object: name.parse().unwrap() };
        let compiled =
            CompiledPolicy { rules: [(1, "shop/db ingress[0]".into())].into(), ..CompiledPolicy::default() };
        let programmed = Programmed {
            policies: [(7, Arc::new(compiled))].into(),
            endpoints: [(1, PolicyIds { ingress: 7, egress: 8 })].into(),
            last_id: 8,
        };
        let isolated = EndpointPolicy {
            ingress_by: vec![policy("shop/db"), policy("shop/more")],
            egress_by: vec![policy("shop/out")],
            ..EndpointPolicy::default()
        };
        let desired = Desired { endpoints: [(1, Arc::new(isolated))].into(), ..Desired::default() };
        let by = |attachment, policy, rule| {
            decided_by(
                &programmed,
                &desired,
                &Recorded { attachment, source: None, destination: None, policy, rule },
            )
        };
        assert_eq!(by(1, Some(7), Some(1)), ["shop/db ingress[0]"]);
        assert_eq!(by(1, Some(7), None), ["shop/db", "shop/more"]);
        assert_eq!(by(1, Some(8), None), ["shop/out"]);
        for (attachment, policy, rule) in
            [(1, None, None), (1, Some(7), Some(2)), (1, Some(99), None), (2, Some(7), None)]
        {
            assert_eq!(by(attachment, policy, rule), [""; 0]);
        }
    }
}
