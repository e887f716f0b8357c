//! netattach itself, called as by a container runtime.

use serde_json::{Value, json};

use super::Contender;
use super::parts::{self, Logged};
use crate::agent::{self, Agent, NAMESPACE};
use crate::pods::{Node, PARENT, Pod, make_directory};

pub(super) const NAME: &str = "netattach";

/// Agent and shim.
pub(super) struct Netattach(Agent);

impl Netattach {
    /// Starts an agent that knows all pods.
    pub(super) fn start(node: &Node, pods: &[Pod]) -> anyhow::Result<Self> {
        let leases = make_directory(&node.scratch().join("leases"))?;
        let ipam = |network: u8| {
            json!({
                "type": "host-local",
                "dataDir": leases,
                "ranges": [[{"subnet": format!("10.{}.0.0/16", 110 + network)}]],
            })
        };
        let macvlan = |network: u8| json!({"cniVersion": "1.0.0", "type": "macvlan", "master": PARENT, "mode": "bridge", "ipam": ipam(network)});
        let bridge = json!({
            "cniVersion": "1.0.0", "type": "bridge", "bridge": "netattach0", "isDefaultGateway": true, "ipam": ipam(0),
        });
        let networks = [
            agent::network("kube-system", "default", &bridge),
            agent::network(NAMESPACE, "one", &macvlan(1)),
            agent::network(NAMESPACE, "two", &macvlan(2)),
        ];
        let pods = pods.iter().map(|pod| agent::pod(pod, "one,two"));
        let objects: Vec<Value> = agent::namespaces().into_iter().chain(networks).chain(pods).collect();
        Ok(Self(Agent::start(node, &objects)?))
    }
}

impl Contender for Netattach {
    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> String {
        "shim, socket, agent: leases, journal, BPF programs and policy included".to_owned()
    }

    fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        self.0.call("ADD", pod, &pod.new_container())
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        self.0.call("DEL", pod, &pod.container())
    }

    fn logged(&self) -> anyhow::Result<Vec<Logged>> {
        parts::logged_adds(&self.0.log()?)
    }

    fn start_and_end(&self) -> anyhow::Result<()> {
        self.0.version()
    }

    fn resident_kib(&self) -> Option<u64> {
        self.0.resident_kib()
    }
}
