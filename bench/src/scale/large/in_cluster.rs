//! A policy whose selectors lead to the pods of other nodes, in a cluster.
//!
//! A hundred thousand rules with a selector each would need more comparisons with pods than the agent allows
//! (`docs/budgets.md`, comparisons), so there are a thousand, which select a hundred pods each.

use anyhow::Context;
use netattach_tests::api_server::ApiServer;
use serde_json::{Value, json};
use xtask::progress::Progress;

use super::{Author, Figures, NAME, Subject};
use crate::agent::{self, NAMESPACE};
use crate::cluster::objects::{self, Networks, POLICIES};
use crate::cluster::rig::{self, Cluster};
use crate::pods::{Node, PARENT, make_directory};

/// Pods of other nodes, in [`POLICIES`] groups.
const PEERS: u32 = 20_000;
/// Rules, each of which leads to the pods of a group.
const RULES: u32 = 1_000;
/// The second number of the addresses of the first network.
const SUBNET: u8 = 110;
/// The lowest port of any rule.
const FIRST_PORT: u32 = 1024;

pub(super) fn name() -> String {
    format!("{RULES} rules with selectors, {} of {PEERS} peers each", PEERS / POLICIES)
}

/// Measures on a node of its own, whose agent has one pod.
pub(super) fn measure(cycles: u16, progress: &Progress) -> anyhow::Result<Figures> {
    let node = Node::enter()?;
    let pods = node.pods(1)?;
    let pod = pods.first().context("no pod was made")?;
    let leases = make_directory(&node.scratch().join("leases"))?;
    let networks = Networks { bridge: "netattach0", parent: PARENT, subnet: SUBNET, leases: &leases };
    let mut all: Vec<Value> = agent::namespaces().into();
    all.extend(networks.objects());
    all.push(objects::own(pod));
    // The pods of other nodes are known all the time: the cost of the policy is measured, not that of the pods.
    all.push(objects::idle_policy());
    progress.note(&format!("{PEERS} pods of other nodes"));
    all.extend((0..PEERS).map(|number| objects::far(number, SUBNET)));
    let (server, kubeconfig) = rig::serve(&node, &all)?;
    drop(all);
    let cluster = Cluster::start(&node, server, kubeconfig)?;
    cluster.agent.call("ADD", pod, &pod.new_container())?;
    cluster.knows_attached(PEERS)?;
    let mut author = OfCluster { server: &cluster.server, next: Value::Null };
    let subject = Subject::of(&cluster.agent, pod, "net1")?;
    let figures = subject.cycles(name(), cycles, &mut author, progress)?;
    cluster.agent.call("DEL", pod, &pod.container())?;
    Ok(figures)
}

struct OfCluster<'a> {
    server: &'a ApiServer,
    next: Value,
}

impl Author for OfCluster<'_> {
    fn write(&mut self, round: u32) -> anyhow::Result<()> {
        self.next = policy(round);
        Ok(())
    }

    fn put(&mut self) -> anyhow::Result<()> {
        self.server.apply(&self.next).map(drop)
    }

    fn remove(&mut self) -> anyhow::Result<()> {
        self.server.delete("multi-networkpolicies", NAMESPACE, NAME)
    }
}

/// A policy for the pod of number 0.
fn policy(round: u32) -> Value {
    let rule = |number: u32| {
        let peers = json!({"podSelector": {"matchLabels": {"peers": (number % POLICIES).to_string()}}});
        let port = FIRST_PORT + (number + round) % 60_000;
        json!({"from": [peers], "ports": [{"protocol": "TCP", "port": port}]})
    };
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1beta1", "kind": "MultiNetworkPolicy",
        "metadata": {
            "namespace": NAMESPACE, "name": NAME,
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": format!("{NAMESPACE}/one")},
        },
        "spec": {
            "podSelector": {"matchLabels": {"group": "0"}},
            "policyTypes": ["Ingress"],
            "ingress": (0..RULES).map(rule).collect::<Vec<_>>(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_of_peers_has_rules_and_none_is_as_in_the_round_before() {
        let rules = |round| policy(round)["spec"]["ingress"].as_array().unwrap().clone();
        let (one, next) = (rules(0), rules(1));
        let groups: std::collections::BTreeSet<String> =
            one.iter().map(|rule| rule["from"][0].to_string()).collect();
        assert_eq!((one.len(), groups.len()), (RULES as usize, POLICIES as usize));
        assert!(one.iter().zip(&next).all(|(one, next)| one["from"] == next["from"] && one != next));
    }
}
