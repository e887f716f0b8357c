//! The objects of the measured cluster.

use std::path::Path;

use netattach_tests::manifest;
use serde_json::{Value, json};

use crate::agent::{self, NAMESPACE};
use crate::pods::Pod;

/// The annotation by which agents publish what they attached.
const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
/// The label by which agents find the pods of other nodes.
const ATTACHED: &str = "netattach.dev/networks";
/// Policies, each of which selects its share of the node's pods and has its share of the other nodes' as peers.
pub(crate) const POLICIES: u32 = 200;
/// Definitions of the populated node.
pub(super) const DEFINITIONS: u32 = 200;
/// The third number of the first address of a pod of another node: leases begin below it.
const FIRST_FAR: u32 = 128;

/// The links and directories of one agent, so that it shares nothing with another on the node.
pub(crate) struct Networks<'a> {
    pub(crate) bridge: &'a str,
    pub(crate) parent: &'a str,
    /// The second number of the addresses of its first network.
    pub(crate) subnet: u8,
    pub(crate) leases: &'a Path,
}

impl Networks<'_> {
    /// The default network, a bridge, and two macvlans.
    pub(crate) fn objects(&self) -> [Value; 3] {
        let ipam = |network: u8| {
            let subnet = format!("10.{}.0.0/16", self.subnet + network);
            json!({"type": "host-local", "dataDir": self.leases, "ranges": [[{"subnet": subnet}]]})
        };
        let macvlan = |network: u8| {
            json!({
                "cniVersion": "1.0.0", "type": "macvlan", "master": self.parent, "mode": "bridge", "ipam": ipam(network),
            })
        };
        let bridge = json!({
            "cniVersion": "1.0.0", "type": "bridge", "bridge": self.bridge, "isDefaultGateway": true, "ipam": ipam(0),
        });
        [
            agent::network("kube-system", "default", &bridge),
            agent::network(NAMESPACE, "one", &macvlan(1)),
            agent::network(NAMESPACE, "two", &macvlan(2)),
        ]
    }
}

/// A definition that no pod selects.
pub(super) fn definition(number: u32) -> Value {
    let ipam =
        json!({"type": "host-local", "ranges": [[{"subnet": format!("10.{}.0.0/24", 140 + number % 100)}]]});
    let config = json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": format!("unused{}", number % 1000), "ipam": ipam});
    agent::network(NAMESPACE, &format!("unused-{number}"), &config)
}

/// A pod of the node, with all three networks, and under one of the policies.
pub(crate) fn own(pod: &Pod) -> Value {
    let mut object = agent::pod(pod, "one,two");
    object["metadata"]["labels"] = json!({"group": group(pod.number.into()), "app": "measured"});
    object["spec"]["nodeName"] = json!(agent::NODE);
    object
}

fn group(number: u32) -> String {
    (number % POLICIES).to_string()
}

/// The peers of a policy's rule.
#[derive(Clone, Copy)]
pub(super) enum Peers {
    /// Prefixes.
    Blocks,
    /// The pods of its group, on whichever node.
    Pods,
}

/// A policy for its group of the node's pods.
pub(super) fn policy(number: u32, peers: Peers) -> Value {
    let from = match peers {
        Peers::Blocks => json!({"ipBlock": {"cidr": format!("10.200.{}.0/24", number % 256)}}),
        Peers::Pods => json!({"podSelector": {"matchLabels": {"peers": group(number)}}}),
    };
    let spec = json!({
        "podSelector": {"matchLabels": {"group": group(number)}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [from]}],
    });
    let mut policy = manifest::policy(&format!("policy-{number}"), &format!("{NAMESPACE}/one"), &spec);
    policy["metadata"]["namespace"] = json!(NAMESPACE);
    policy
}

/// Returns a policy with pods as peers, which makes the agent follow those of other nodes; it selects and allows
/// nothing.
pub(crate) fn idle_policy() -> Value {
    let nobody = json!({"matchLabels": {"nobody": "nowhere"}});
    let spec = json!({"podSelector": nobody, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": nobody}]}]});
    let mut policy = manifest::policy("nobody", &format!("{NAMESPACE}/one"), &spec);
    policy["metadata"]["namespace"] = json!(NAMESPACE);
    policy
}

/// Name of a pod of another node.
pub(super) fn far_name(number: u32) -> String {
    format!("deployment-5d8f9c7b6d-{number:05}")
}

/// Its address on a network of the pods: a far pod is on both.
pub(super) fn far_address(subnet: u8, network: u8, number: u32) -> String {
    format!("10.{}.{}.{}", subnet + network, FIRST_FAR + number / 250, 1 + number % 250)
}

/// A pod of another node that is a peer of the policy of its group, as its agent published it.
pub(crate) fn far(number: u32, subnet: u8) -> Value {
    let entry = |network: u8, name: &str| {
        json!({
            "name": format!("{NAMESPACE}/{name}"), "interface": format!("net{network}"),
            "ips": [far_address(subnet, network, number)], "mac": "02:00:00:00:00:01", "dns": {},
        })
    };
    let status = json!([entry(1, "one"), entry(2, "two")]).to_string();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": NAMESPACE, "name": far_name(number),
            "uid": format!("00000000-0000-0000-0001-{number:012}"),
            "labels": {ATTACHED: "", "peers": group(number), "app": "far", "pod-template-hash": "5d8f9c7b6d"},
            "annotations": {STATUS: status},
        },
        "spec": {"nodeName": format!("far-{}", number % 100), "containers": [{"name": "main", "image": "none"}]},
    })
}
