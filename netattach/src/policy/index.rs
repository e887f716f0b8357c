//! Selection: the policies that select an attachment, and the addresses that a pod's status claims.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::desired::{Condition, Subject};
use super::options::Options;
use crate::error_chain::Chain;
use crate::npwg::STATUS_ANNOTATION;
use crate::objects::access::Restrictions;
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::policy::{Policy, PolicyKind, Severity};
use crate::objects::remote::claims;
use crate::objects::{ObjectName, Objects, Place, Pod};

/// The attachments of this node, by number. Each is one value, shared by all its users.
pub type Endpoints = BTreeMap<u32, Arc<Endpoint>>;

/// One attachment of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Number in the kernel's maps.
    pub id: u32,
    /// The pod.
    pub pod: ObjectName,
    /// Its uid, as the runtime names it, to distinguish it from other pods of the same name; `None`:
    /// unknown.
    pub uid: Option<String>,
    /// The networks that it is on: one value for all attachments that are on the same.
    pub at: Arc<BTreeSet<Place>>,
    /// IP addresses.
    pub addresses: Vec<IpAddr>,
    /// The DHCP peers of the attachment, if DHCP assigns the addresses.
    pub dhcp: Option<Dhcp>,
    /// Ethertypes that pass in spite of policies.
    pub ethertypes: Vec<u16>,
}

/// Where DHCP servers and relays of an attachment are, each list in order and without duplicates.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Dhcp {
    /// The servers that are asked to extend its lease, besides all hosts on the link.
    pub asks: Vec<IpNet>,
    /// The servers that may answer; empty: not known before there is a lease.
    pub hears: Vec<IpNet>,
}

impl Endpoint {
    /// Returns the pod, unless the source has none of that name, or another one: a sandbox may outlive its
    /// pod, and a new pod of the same name may exist before the sandbox is detached.
    pub(super) fn pod_in<'o>(&self, objects: &'o Objects) -> Option<&'o Arc<Pod>> {
        objects.pods.get(&self.pod).filter(|pod| self.is_of(pod))
    }

    /// Whether it belongs to that pod of its name.
    pub(super) fn is_of(&self, pod: &Pod) -> bool {
        self.uid.as_deref().is_none_or(|uid| pod.has_uid(uid))
    }
}

/// Whether an attachment on these networks is on the default network: as its pod's default network, or as a
/// further network by the definition of the node's default network. Both lead to the same pods, Services
/// and networks beyond, from another address. No NetworkPolicy selects the latter as a peer.
pub(crate) fn is_on_default(at: &BTreeSet<Place>, restrictions: &Restrictions) -> bool {
    at.iter().any(|place| match place {
        Place::Default => true,
        Place::Network(network) => restrictions.default_network.as_ref() == Some(network),
    })
}

/// Whether a policy selects an attachment of `pod`. Ignores whether the namespace may still use the
/// network: an existing attachment stays isolated.
pub(super) fn selects(policy: &Policy, options: &Options, pod: &Pod, at: &BTreeSet<Place>) -> bool {
    is_about(policy, options, at) && selects_pod(policy, pod)
}

/// Whether a policy is about one of the networks of an attachment.
pub(super) fn is_about(policy: &Policy, options: &Options, at: &BTreeSet<Place>) -> bool {
    match policy.name.kind {
        PolicyKind::Multi => at.iter().any(|place| {
            matches!(place, Place::Network(network) if policy.all_networks || policy.networks.contains(network))
        }),
        PolicyKind::Network => options.network_policy && is_on_default(at, &options.restrictions),
    }
}

/// Whether a policy selects a pod, on the networks that it is about.
pub(super) fn selects_pod(policy: &Policy, pod: &Pod) -> bool {
    !pod.host_network && policy.namespace() == pod.name.namespace && policy.pods.matches(&pod.labels)
}

/// The policies that select an attachment of `pod`, sorted by name.
pub(crate) fn selecting<'a>(
    objects: &'a Objects,
    options: &Options,
    pod: &Pod,
    at: &BTreeSet<Place>,
) -> impl Iterator<Item = &'a Arc<Policy>> {
    of_namespace(objects, &pod.name.namespace).filter(move |policy| selects(policy, options, pod, at))
}

/// The policies of a namespace, of both kinds, sorted by name.
pub(super) fn of_namespace<'a>(
    objects: &'a Objects,
    namespace: &str,
) -> impl Iterator<Item = &'a Arc<Policy>> + use<'a> {
    let of_namespace = |policies: &'a BTreeMap<ObjectName, Arc<Policy>>, namespace: &str| {
        let first = ObjectName::new(namespace, "");
        let namespace = namespace.to_owned();
        let from_first = policies.range(first..).map(|(_, policy)| policy);
        from_first.take_while(move |policy| policy.namespace() == namespace)
    };
    of_namespace(&objects.policies, namespace).chain(of_namespace(&objects.network_policies, namespace))
}

/// Networks of one policy that are reported because its namespace may not use them. The others are counted.
const FORBIDDEN: usize = 16;

/// The networks of a policy that its namespace may use. For the others conditions are added.
pub(super) fn usable_networks(
    objects: &Objects,
    policy: &Policy,
    restrictions: &Restrictions,
    conditions: &mut Vec<Condition>,
) -> BTreeSet<Place> {
    if policy.name.kind == PolicyKind::Network {
        return BTreeSet::from([Place::Default]);
    }
    let namespace = policy.namespace();
    let labels = objects.namespace_labels(namespace);
    let mut tell = |what: &dyn fmt::Display| {
        conditions.push(Condition {
            object: Subject::Policy(policy.name.clone()),
            severity: Severity::Error,
            message: format!("annotation {POLICY_FOR_ANNOTATION}: {what}: no address there counts as a peer"),
        });
    };
    let mut usable = policy.networks.clone();
    let mut told = 0;
    usable.retain(|network| {
        let definition = objects.definitions.get(network).map(Arc::as_ref);
        let checked = restrictions.check_policy(network, definition, namespace, &labels);
        if let Err(forbidden) = &checked
            && told < FORBIDDEN
        {
            told += 1;
            tell(&Chain(forbidden));
        }
        checked.is_ok()
    });
    let more = policy.networks.len() - usable.len() - told;
    if more > 0 {
        tell(&format_args!("namespace {namespace} may not use {more} more of the networks"));
    }
    usable.into_iter().map(Place::Network).collect()
}

/// The addresses in a pod's status annotation.
pub(super) fn published_addresses(pod: &Pod) -> Result<BTreeSet<(Place, IpAddr)>, Condition> {
    let Some(annotation) = pod.annotations.get(STATUS_ANNOTATION) else { return Ok(BTreeSet::new()) };
    let claims = claims(Some(annotation), &pod.name.namespace).map_err(|error| Condition {
        object: Subject::Pod(pod.name.clone()),
        severity: Severity::Error,
        message: format!("is no policy's peer: {}", Chain(&error)),
    })?;
    Ok(claims.into_iter().collect())
}
