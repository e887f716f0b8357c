//! Attachments that stay while others are created and deleted: pods with one to three networks of their own, without
//! traffic and without changes. They are not part of the model; at the end they must be as at the beginning.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use super::check::lease_files;
use super::model::{entries, node_name};
use super::network::NETWORKS;
use super::rig::Rig;
use crate::node::ip;
use crate::traffic::{eventually, stretched};
use crate::{Call, Node, Pod, manifest};

/// The namespace of the pods: no policy is about it.
const NAMESPACE: &str = "standing";
/// Attachments of a pod, pod by pod: the first of [`KINDS`], the first two, or all.
const SHARES: [usize; 3] = [3, 2, 1];
/// The networks of a pod: a port of a bridge, which is its default network, a routed veth and a macvlan.
const KINDS: [&str; 3] = ["port", "veth", "macvlan"];
/// The parent of the macvlans, and its other end.
const PARENT: [&str; 2] = ["standing0", "standing1"];
/// The directory of their leases, below a node's directory.
const LEASES: &str = "standing-leases";
/// Longest time until an ADD succeeds, and until all statuses are written.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pods that stand.
#[derive(Debug, Default)]
pub(super) struct Standing(Vec<Stander>);

#[derive(Debug)]
struct Stander {
    node: usize,
    attachments: usize,
    sandbox: Pod,
}

impl Standing {
    /// Attaches that many, alternating between the nodes, and waits until their statuses are written.
    pub(super) fn attach(rig: &Rig, attachments: usize) -> Result<Self> {
        let mut standing = Self::default();
        if attachments == 0 {
            return Ok(standing);
        }
        open_more_files()?;
        rig.server
            .create(&manifest::namespace(NAMESPACE, &json!({"kubernetes.io/metadata.name": NAMESPACE})))?;
        for (number, node) in rig.nodes.iter().enumerate() {
            let [parent, other] = PARENT;
            ip(&node.namespace, &["link", "add", parent, "up", "type", "veth", "peer", "name", other])?;
            ip(&node.namespace, &["link", "set", other, "up"])?;
            for kind in 0..KINDS.len() {
                let config = config(node, kind);
                rig.server.create(&manifest::network(NETWORKS, &definition(kind, number), &config))?;
            }
        }
        for (number, share) in shares(attachments).into_iter().enumerate() {
            let node = number % 2;
            let name = format!("s{number}");
            let sandbox = Pod { container: format!("standing-{number}"), ..Pod::new(&name)? };
            let stander = Stander { node, attachments: share, sandbox };
            rig.server.create(&stander.object())?;
            stander.add(&rig.nodes[node]).with_context(|| format!("ADD of {name}, which is to stand"))?;
            standing.0.push(stander);
        }
        let mut late = None;
        let are_written = eventually(PATIENCE, || {
            late = standing.0.iter().find(|it| !it.is_published(rig)).map(|it| it.sandbox.name.clone());
            late.is_none()
        });
        ensure!(are_written, "the status of {late:?} is not written");
        Ok(standing)
    }

    /// Returns the sandboxes of a node, which its runtime knows.
    pub(super) fn sandboxes(&self, node: usize) -> impl Iterator<Item = &Pod> {
        self.0.iter().filter(move |it| it.node == node).map(|it| &it.sandbox)
    }

    /// Whether there are no such attachments.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that all of them are still attached, and that their statuses show that.
    pub(super) fn are_there(&self, rig: &Rig) -> Result<()> {
        for (number, node) in rig.nodes.iter().enumerate() {
            let rows = node.ctl(&["attachments"])?;
            let mut found: BTreeMap<&str, usize> = BTreeMap::new();
            for row in rows.as_array().context("attachments are a list")? {
                *found.entry(row["container_id"].as_str().unwrap_or_default()).or_default() += 1;
            }
            for it in self.0.iter().filter(|it| it.node == number) {
                let name = &it.sandbox.name;
                let count = found.get(it.sandbox.container.as_str()).copied().unwrap_or_default();
                ensure!(count == it.attachments, "{name} has {count} attachments of {}", it.attachments);
                ensure!(it.is_published(rig), "the status of {name} is not what it has");
            }
        }
        Ok(())
    }

    /// Detaches all of them, in order, and removes the objects made for them.
    pub(super) fn end(self, rig: &Rig) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        self.are_there(rig)?;
        for it in self.0 {
            let name = it.sandbox.name.clone();
            let outcome = it.call("DEL", &rig.nodes[it.node]).run();
            ensure!(outcome.exit == 0, "DEL of {name}: {:#}", outcome.json);
            rig.server.delete("pods", NAMESPACE, &name)?;
        }
        for node in &rig.nodes {
            let mut left: BTreeMap<IpAddr, String> = BTreeMap::new();
            let leases = node.path(LEASES);
            if leases.exists() {
                lease_files(&leases, &mut left)?;
            }
            ensure!(left.is_empty(), "leases of pods that stood are left: {left:?}");
            ip(&node.namespace, &["link", "delete", PARENT[0]])?;
        }
        Ok(())
    }
}

impl Stander {
    fn object(&self) -> Value {
        let Self { node, attachments, sandbox } = self;
        let others = KINDS.iter().enumerate().take(*attachments).skip(1);
        let selections: Value = others
            .map(|(kind, name)| json!({"namespace": NETWORKS, "name": definition(kind, *node), "interface": name}))
            .collect();
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": NAMESPACE, "name": sandbox.name, "uid": uid(sandbox), "labels": {"app": "standing"},
                "annotations": {
                    "k8s.v1.cni.cncf.io/networks": selections.to_string(),
                    "v1.multus-cni.io/default-network": format!("{NETWORKS}/{}", definition(0, *node)),
                }
            },
            "spec": {
                "nodeName": node_name(*node),
                "containers": [{"name": "main", "image": "example.com/x"}]
            },
            "status": {"phase": "Running"}
        })
    }

    fn call(&self, verb: &str, node: &Node) -> Call {
        let Pod { container, name, .. } = &self.sandbox;
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={NAMESPACE};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={container};K8S_POD_UID={}",
            uid(&self.sandbox)
        );
        node.call(verb, &self.sandbox).with("CNI_ARGS", &args)
    }

    /// Attaches a pod like a runtime: repeated after a DEL, as the agent may not know all objects yet.
    fn add(&self, node: &Node) -> Result<()> {
        let deadline = Instant::now() + stretched(PATIENCE);
        loop {
            let outcome = self.call("ADD", node).run();
            if outcome.exit == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "it never succeeds: {:#}", outcome.json);
            let outcome = self.call("DEL", node).run();
            ensure!(outcome.exit == 0, "DEL before another ADD: {:#}", outcome.json);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether its status has an entry for each of its attachments.
    fn is_published(&self, rig: &Rig) -> bool {
        let object = rig.server.get("pods", NAMESPACE, &self.sandbox.name);
        object.is_some_and(|object| entries(&object).len() == self.attachments)
    }
}

/// Returns the number of attachments of each pod.
fn shares(mut attachments: usize) -> Vec<usize> {
    let mut shares = Vec::new();
    for share in SHARES.into_iter().cycle() {
        if attachments == 0 {
            break;
        }
        shares.push(share.min(attachments));
        attachments -= share.min(attachments);
    }
    shares
}

/// Name of a network's definition on a node.
fn definition(kind: usize, node: usize) -> String {
    format!("standing-{}-{node}", KINDS[kind])
}

/// Its configuration, with a pool for thousands.
fn config(node: &Node, kind: usize) -> Value {
    let ranges = json!([[{"subnet": format!("10.{}.0.0/16", 80 + kind)}]]);
    let ipam = json!({"type": "host-local", "dataDir": node.path(LEASES), "ranges": ranges});
    let mut config = match KINDS[kind] {
        "port" => json!({"type": "bridge", "bridge": "br-standing", "isDefaultGateway": true}),
        "veth" => json!({"type": "veth"}),
        _ => json!({"type": "macvlan", "master": PARENT[0], "mode": "bridge"}),
    };
    config["cniVersion"] = json!("1.0.0");
    config["ipam"] = ipam;
    config
}

fn uid(sandbox: &Pod) -> String {
    let number = sandbox.name.trim_start_matches('s');
    format!("00000000-0000-4000-9000-{number:0>12}")
}

/// Raises the limit of open files: each sandbox holds a descriptor.
fn open_more_files() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).context("open more files")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_have_as_many_attachments_as_wanted() {
        assert_eq!(shares(0), [0; 0]);
        assert_eq!(shares(8), [3, 2, 1, 2]);
        for attachments in [1, 7, 1000] {
            let shares = shares(attachments);
            assert_eq!(shares.iter().sum::<usize>(), attachments);
            assert!(shares.iter().all(|share| (1..=3).contains(share)));
        }
    }
}
