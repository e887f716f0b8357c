//! The expected state, derived from the objects as their authors wrote them. Plain and slow; shares no code with the
//! product.
//!
//! Rules: <https://github.com/k8snetworkplumbingwg/multi-networkpolicy>; owners of addresses: `docs/limits.md` and
//! `docs/architecture.md`, "The cluster".

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::Value;

use super::decide::Key;

const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const PORTS: &str = "netattach.dev/ports";
const ATTACHED: &str = "netattach.dev/networks";
const POLICY_FOR: &str = "k8s.v1.cni.cncf.io/policy-for";

/// UDP or TCP, as in policies.
pub(super) type Protocol = &'static str;

/// The attachment of a sandbox to a network, whether its pod still exists or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attachment {
    pub(super) node: usize,
    pub(super) pod: Key,
    pub(super) uid: String,
    /// `namespace/name` of the definition.
    pub(super) network: String,
    pub(super) addresses: Vec<IpAddr>,
}

/// The objects of a moment.
#[derive(Debug, Clone, Default)]
pub(super) struct World {
    pub(super) pods: BTreeMap<Key, Value>,
    /// Labels.
    pub(super) namespaces: BTreeMap<String, Value>,
    pub(super) policies: Vec<Value>,
    pub(super) attachments: Vec<Attachment>,
    /// The claims of status annotations: network, address, pod.
    pub(super) claims: Vec<(String, IpAddr, Key)>,
}

/// The knowledge of an agent: each kind of objects may be from a different time.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'w> {
    /// Node of the agent.
    pub(super) node: usize,
    pub(super) own_pods: &'w World,
    pub(super) other_pods: &'w World,
    pub(super) namespaces: &'w World,
    pub(super) policies: &'w World,
    pub(super) attachments: &'w World,
}

/// One end of a packet's path: a pod's address on a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct End<'a> {
    pub(super) node: usize,
    pub(super) pod: &'a Key,
    pub(super) uid: &'a str,
    pub(super) network: &'a str,
    pub(super) address: IpAddr,
}

/// A holder of an address.
struct Holder<'w> {
    /// The pod; `None` if no selector can match it.
    pod: Option<&'w Value>,
    /// Protocol, name, number.
    ports: Vec<(String, String, u64)>,
}

impl World {
    /// Fills in the claims of the pods that are there.
    pub(super) fn with_claims(mut self) -> Self {
        for (key, pod) in &self.pods {
            if pod["metadata"]["labels"].get(ATTACHED).is_none() {
                continue;
            }
            for entry in entries(pod) {
                let addresses = entry["ips"].as_array().into_iter().flatten();
                let addresses = addresses.filter_map(|ip| ip.as_str()?.split('/').next()?.parse().ok());
                let network = entry["name"].as_str().unwrap_or_default();
                self.claims.extend(addresses.map(|address| (network.to_owned(), address, key.clone())));
            }
        }
        self
    }

    /// Returns the knowledge of an agent that has received everything.
    pub(super) fn seen_by(&self, node: usize) -> View<'_> {
        View { node, own_pods: self, other_pods: self, namespaces: self, policies: self, attachments: self }
    }

    /// Whether several sandboxes have that address of a network.
    pub(super) fn is_shared(&self, network: &str, address: IpAddr) -> bool {
        let has = |it: &&Attachment| it.network == network && it.addresses.contains(&address);
        self.attachments.iter().filter(has).count() > 1
    }
}

/// The entries of a pod's status annotation.
pub(super) fn entries(pod: &Value) -> Vec<Value> {
    let text = pod["metadata"]["annotations"][STATUS].as_str().unwrap_or("[]");
    serde_json::from_str(text).unwrap_or_default()
}

impl<'w> View<'w> {
    /// Whether the policies that this agent enforces let a packet pass at that end. `None`: its pod is not known, so
    /// no result is expected.
    pub(super) fn lets(
        &self,
        end: &End<'_>,
        is_ingress: bool,
        peer: IpAddr,
        protocol: Protocol,
        port: u16,
    ) -> Option<bool> {
        let pod = self.own_pods.pods.get(end.pod).filter(|pod| pod["metadata"]["uid"] == end.uid)?;
        let (wanted, rules, peers) =
            if is_ingress { ("Ingress", "ingress", "from") } else { ("Egress", "egress", "to") };
        let mut isolated = false;
        for policy in &self.policies.policies {
            let spec = &policy["spec"];
            let is_listed = match spec["policyTypes"].as_array() {
                Some(types) => types.iter().any(|it| it == wanted),
                None => spec[rules].as_array().is_some_and(|rules| !rules.is_empty()),
            };
            let is_about = policy["metadata"]["namespace"] == end.pod.0
                && networks(policy).any(|network| network == end.network)
                && selects(&spec["podSelector"], &pod["metadata"]["labels"]);
            if !is_about || !is_listed {
                continue;
            }
            isolated = true;
            // On the network at that end or, if no pod has the address there, on each of the other networks.
            let on = |is_own: bool| -> Vec<Vec<Holder<'w>>> {
                let there = networks(policy).filter(|network| (*network == end.network) == is_own);
                let holders = there.map(|network| self.holders(network, peer));
                holders.filter(|holders| !holders.is_empty()).collect()
            };
            let own = on(true);
            let holders = if own.is_empty() { on(false) } else { own };
            for rule in spec[rules].as_array().into_iter().flatten() {
                let is_meant = match rule[peers].as_array() {
                    None => true,
                    Some(peers) => self.means(policy, peers, &holders, peer),
                };
                let fits = match rule["ports"].as_array() {
                    None => true,
                    Some(ports) => ports.iter().any(|term| {
                        let declares = |ports: &[(String, String, u64)]| {
                            ports.iter().any(|(of, name, number)| {
                                of == protocol && term["port"] == *name && *number == u64::from(port)
                            })
                        };
                        term["protocol"].as_str().unwrap_or("TCP") == protocol
                            && match (&term["port"], is_ingress) {
                                (Value::Null, _) => true,
                                (Value::Number(first), _) => {
                                    let first = first.as_u64().unwrap_or_default();
                                    let last = term["endPort"].as_u64().unwrap_or(first);
                                    (first..=last).contains(&port.into())
                                }
                                (_, true) => declares(&declared(pod)),
                                (_, false) => is_of_all(&holders, |one| declares(&one.ports)),
                            }
                    }),
                };
                if is_meant && fits {
                    return Some(true);
                }
            }
        }
        Some(!isolated)
    }

    /// Whether one of the peers of a rule means an address.
    fn means(&self, policy: &Value, peers: &[Value], holders: &[Vec<Holder<'_>>], address: IpAddr) -> bool {
        let in_block = |peer: &Value| {
            let block = &peer["ipBlock"];
            let except = block["except"].as_array().into_iter().flatten();
            block["cidr"].as_str().is_some_and(|cidr| contains(cidr, address))
                && !except.filter_map(Value::as_str).any(|cidr| contains(cidr, address))
        };
        let is_selected = |peer: &Value, pod: &Value| {
            let namespace = &pod["metadata"]["namespace"];
            let in_scope = match &peer["namespaceSelector"] {
                Value::Null => *namespace == policy["metadata"]["namespace"],
                selector => selects(selector, &self.labels_of(namespace.as_str().unwrap_or_default())),
            };
            let any = serde_json::json!({});
            let pods = if peer["podSelector"].is_null() { &any } else { &peer["podSelector"] };
            peer["ipBlock"].is_null() && in_scope && selects(pods, &pod["metadata"]["labels"])
        };
        let is_meant = |holder: &Holder<'_>| {
            holder.pod.is_some_and(|pod| peers.iter().any(|peer| is_selected(peer, pod)))
        };
        peers.iter().any(in_block) || is_of_all(holders, is_meant)
    }

    fn labels_of(&self, namespace: &str) -> Value {
        self.namespaces.namespaces.get(namespace).cloned().unwrap_or_default()
    }

    /// Returns the holders of an address on a network: the sandboxes of the agent's node, otherwise all pods of other
    /// nodes that claim it.
    fn holders(&self, network: &str, address: IpAddr) -> Vec<Holder<'w>> {
        let attached =
            self.attachments.attachments.iter().filter(|it| {
                it.node == self.node && it.network == network && it.addresses.contains(&address)
            });
        let attached: Vec<Holder<'w>> = attached
            .map(|it| {
                let pod = self.own_pods.pods.get(&it.pod).filter(|pod| pod["metadata"]["uid"] == it.uid);
                Holder { pod, ports: pod.map(declared).unwrap_or_default() }
            })
            .collect();
        if !attached.is_empty() {
            return attached;
        }
        let claims = self.other_pods.claims.iter().filter(|it| it.0 == network && it.1 == address);
        claims
            .filter_map(|(_, _, key)| self.other_pods.pods.get(key))
            .filter(|pod| pod["spec"]["nodeName"] != node_name(self.node))
            .map(|pod| Holder { pod: Some(pod), ports: published(pod) })
            .collect()
    }
}

/// Whether the condition holds for all holders of an address, and there is at least one.
fn is_of_all(holders: &[Vec<Holder<'_>>], is_true: impl Fn(&Holder<'_>) -> bool) -> bool {
    !holders.is_empty() && holders.iter().flatten().all(is_true)
}

/// Name of a node in the cluster.
pub(super) fn node_name(node: usize) -> String {
    format!("node-{node}")
}

fn networks(policy: &Value) -> impl Iterator<Item = &str> {
    let text = policy["metadata"]["annotations"][POLICY_FOR].as_str().unwrap_or_default();
    text.split(',').map(str::trim).filter(|name| !name.is_empty())
}

/// The ports of a pod's containers.
fn declared(pod: &Value) -> Vec<(String, String, u64)> {
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    let ports = containers.flat_map(|container| container["ports"].as_array().into_iter().flatten());
    let of = |port: &Value| {
        let text = |key: &str| Some(port[key].as_str()?.to_owned());
        Some((text("protocol")?, text("name")?, port["containerPort"].as_u64()?))
    };
    ports.filter_map(of).collect()
}

/// Returns the ports that an agent wrote in addition to the status.
fn published(pod: &Value) -> Vec<(String, String, u64)> {
    let text = pod["metadata"]["annotations"][PORTS].as_str().unwrap_or("{}");
    let ports: BTreeMap<String, Vec<u64>> = serde_json::from_str(text).unwrap_or_default();
    let of = |(key, numbers): (String, Vec<u64>)| {
        let (protocol, name) =
            key.split_once('/').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap_or_default();
        numbers.into_iter().map(move |number| (protocol.clone(), name.clone(), number))
    };
    ports.into_iter().flat_map(of).collect()
}

fn selects(selector: &Value, labels: &Value) -> bool {
    let equal = selector["matchLabels"].as_object().into_iter().flatten();
    let expressions = selector["matchExpressions"].as_array().into_iter().flatten();
    let holds = |expression: &Value| {
        let value = labels.get(expression["key"].as_str().unwrap_or_default());
        let is_listed = || {
            let values = expression["values"].as_array();
            value.is_some_and(|value| values.is_some_and(|values| values.contains(value)))
        };
        match expression["operator"].as_str() {
            Some("In") => is_listed(),
            Some("NotIn") => !is_listed(),
            Some("Exists") => value.is_some(),
            Some("DoesNotExist") => value.is_none(),
            _ => false,
        }
    };
    equal.into_iter().all(|(key, value)| labels.get(key) == Some(value)) && expressions.into_iter().all(holds)
}

/// Whether a prefix contains an address: compared bit by bit.
fn contains(cidr: &str, address: IpAddr) -> bool {
    let Some((base, length)) = cidr.split_once('/') else { return false };
    let (Ok(base), Ok(length)) = (base.parse::<IpAddr>(), length.parse::<usize>()) else { return false };
    let bits = |address: IpAddr| -> Vec<bool> {
        let bytes = match address {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        bytes.into_iter().flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1 == 1)).collect()
    };
    base.is_ipv4() == address.is_ipv4() && bits(base)[..length] == bits(address)[..length]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_compared_bit_by_bit() {
        let table = [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.20.0.0/29", "10.20.0.7", true),
            ("10.20.0.0/29", "10.20.0.8", false),
            ("0.0.0.0/0", "fd21::1", false),
            ("fd21::8/125", "fd21::f", true),
            ("fd21::8/125", "fd21::10", false),
        ];
        for (cidr, address, expected) in table {
            assert_eq!(contains(cidr, address.parse().unwrap()), expected, "{cidr} {address}");
        }
    }
}
