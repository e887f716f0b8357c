//! The compared ways to attach, each on a node of its own, with its own standing attachments.

use std::ops::Range;
use std::thread;

use anyhow::Context;
use serde_json::{Value, json};
use xtask::progress::Progress;

use crate::agent::{self, Agent, NAMESPACE};
use crate::attach::Contender;
use crate::attach::floor::{self, Spawned};
use crate::pods::{INTERFACES, Node, PARENT, Pod, at_once, in_namespace, joined, make_directory};

/// The networks, besides the default one, of a pod that is measured: two macvlans.
pub(super) const MEASURED: &str = "one,two";
/// The networks of a standing pod, in their order: a routed veth and a macvlan.
const STANDING: [&str; 2] = ["routed", "one"];

/// A way to attach, in the order in which they take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The kernel's share, in one process for each request.
    Floor,
    /// The same with programs at the hooks where netattach has its own.
    WithPrograms,
    Netattach,
}

pub(super) const WAYS: [Way; 3] = [Way::Floor, Way::WithPrograms, Way::Netattach];

impl Way {
    /// Its name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Floor => floor::SPAWNED,
            Self::WithPrograms => floor::WITH_PROGRAMS,
            Self::Netattach => "netattach",
        }
    }
}

/// A node and its pods: the same number of them on each.
pub(super) struct Ground {
    node: Node,
    pods: Vec<Pod>,
}

/// All ways and their nodes.
pub(super) struct Sites {
    pub(super) agent: Agent,
    floors: [Spawned; 2],
    grounds: [Ground; 3],
    /// Number of pods from number 1 on that stay attached while others are attached and detached.
    standing: u16,
}

impl Sites {
    /// Creates the nodes with that many pods each; the calling thread stays on the agent's node. `networks` returns
    /// those of a pod besides the default one, by its number.
    pub(super) fn prepare(
        name: &str,
        pods: u16,
        networks: impl Fn(u16) -> String,
        progress: &Progress,
    ) -> anyhow::Result<Self> {
        progress.note(&format!("3 nodes with {pods} pods each"));
        let of_floor = || {
            thread::scope(|scope| {
                let made = scope.spawn(|| {
                    let node = Node::enter()?;
                    floor::make_bridge()?;
                    Ok(node)
                });
                joined(made.join())
            })
        };
        let nodes = [of_floor()?, of_floor()?, Node::enter()?];
        let mut grounds = Vec::new();
        for node in nodes {
            let pods = node.pods(pods)?;
            grounds.push(Ground { node, pods });
        }
        let grounds: [Ground; 3] = grounds.try_into().ok().context("there are three ways")?;
        progress.note("agent");
        let ground = &grounds[Way::Netattach as usize];
        let agent = Agent::start_as(&ground.node, name, &objects(ground, networks)?, &json!({}))?;
        let floors = [Spawned::new(progress)?, Spawned::with_programs(agent::pins(name), progress)?];
        Ok(Self { agent, floors, grounds, standing: 0 })
    }

    /// The nodes without an agent, whose pods need not be cleaned up while something is measured.
    pub(super) fn leave(self) -> [Ground; 3] {
        self.grounds
    }

    /// A pod of a way's node, by its number.
    pub(super) fn pod(&self, way: Way, number: u16) -> anyhow::Result<&Pod> {
        self.grounds[way as usize].pods.get(usize::from(number)).context("more pods than were made")
    }

    /// Runs work on a way's node, in a thread of its own.
    pub(super) fn on<T: Send>(
        &self,
        way: Way,
        work: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        in_namespace(self.grounds[way as usize].node.namespace(), work).with_context(|| way.name())
    }

    /// Attaches a pod, from its node.
    pub(super) fn add(&self, way: Way, pod: &Pod) -> anyhow::Result<()> {
        match self.floor(way) {
            Some(floor) => floor.add(pod),
            None => self.agent.call("ADD", pod, &pod.new_container()),
        }
    }

    /// Detaches a pod, from its node.
    pub(super) fn del(&self, way: Way, pod: &Pod) -> anyhow::Result<()> {
        match self.floor(way) {
            Some(floor) if self.standing == 0 => floor.del(pod),
            Some(floor) => floor.leave(pod),
            None => self.agent.call("DEL", pod, &pod.container()),
        }
    }

    fn floor(&self, way: Way) -> Option<&Spawned> {
        self.floors.get(way as usize)
    }

    /// Attaches more pods that stay, each to the number of networks in its share, by every way.
    pub(super) fn stand(&mut self, shares: &[usize]) -> anyhow::Result<()> {
        let first = usize::from(self.standing) + 1;
        for way in [Way::Floor, Way::WithPrograms] {
            let ground = &self.grounds[way as usize];
            let pods = ground.pods.get(first..first + shares.len()).context("more pods than were made")?;
            self.on(way, || {
                let mut all = pods.iter().zip(shares);
                all.try_for_each(|(pod, share)| self.floors[way as usize].stand(pod, &ground.node, *share))
            })?;
        }
        self.standing += shares.len() as u16;
        self.stand_again(first as u16..self.standing + 1)
    }

    /// Attaches pods that have stood before, by the agent alone.
    pub(super) fn stand_again(&self, numbers: Range<u16>) -> anyhow::Result<()> {
        self.agent.attach_all(self.some(Way::Netattach, numbers)?)
    }

    /// Detaches pods that stand, by the agent alone; returns when they are empty.
    pub(super) fn stand_down(&self, numbers: Range<u16>) -> anyhow::Result<()> {
        let pods = self.some(Way::Netattach, numbers)?;
        at_once(pods, |pod| self.del(Way::Netattach, pod))?;
        self.on(Way::Netattach, || pods.iter().try_for_each(Pod::is_empty))
    }

    /// Sets the number of pods that stay attached by every way, for the DELs beside them.
    pub(super) fn count_standing(&mut self, standing: u16) {
        self.standing = standing;
    }

    pub(super) fn standing(&self) -> u16 {
        self.standing
    }

    /// Pods of a way, by their numbers.
    pub(super) fn some(&self, way: Way, numbers: Range<u16>) -> anyhow::Result<&[Pod]> {
        let numbers = usize::from(numbers.start)..usize::from(numbers.end);
        self.grounds[way as usize].pods.get(numbers).context("more pods than were made")
    }
}

/// Returns the networks besides the default one for a pod with a share of the standing attachments.
pub(super) fn networks_of(share: usize) -> String {
    STANDING[..share.saturating_sub(1).min(STANDING.len())].join(",")
}

/// Returns the number of networks of each pod for that many attachments.
pub(super) fn shares(mut attachments: u16) -> Vec<usize> {
    let mut shares = Vec::new();
    while attachments > 0 {
        let share = usize::from(attachments).min(INTERFACES.len());
        shares.push(share);
        attachments -= share as u16;
    }
    shares
}

/// The pods and networks of the agent's node.
fn objects(ground: &Ground, networks: impl Fn(u16) -> String) -> anyhow::Result<Vec<Value>> {
    let leases = make_directory(&ground.node.scratch().join("leases"))?;
    let ipam = |network: u8| {
        json!({
            "type": "host-local", "dataDir": leases,
            "ranges": [[{"subnet": format!("10.{}.0.0/16", 110 + network)}]],
        })
    };
    let macvlan = |network: u8| {
        json!({
            "cniVersion": "1.0.0", "type": "macvlan", "master": PARENT, "mode": "bridge", "ipam": ipam(network),
        })
    };
    let bridge = json!({
        "cniVersion": "1.0.0", "type": "bridge", "bridge": "netattach0", "isDefaultGateway": true, "ipam": ipam(0),
    });
    let routed = json!({"cniVersion": "1.0.0", "type": "veth", "ipam": ipam(3)});
    let definitions = [
        agent::network("kube-system", "default", &bridge),
        agent::network(NAMESPACE, "one", &macvlan(1)),
        agent::network(NAMESPACE, "two", &macvlan(2)),
        agent::network(NAMESPACE, "routed", &routed),
    ];
    let pods = ground.pods.iter().map(|pod| agent::pod(pod, &networks(pod.number)));
    Ok(agent::namespaces().into_iter().chain(definitions).chain(pods).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_have_as_many_attachments_as_wanted() {
        assert_eq!(shares(10), [3, 3, 3, 1]);
        assert_eq!(shares(2), [2]);
        assert_eq!(shares(0), [0; 0]);
        for attachments in [90, 200, 700, 1000] {
            assert_eq!(shares(attachments).iter().sum::<usize>(), usize::from(attachments));
        }
    }

    #[test]
    fn the_default_network_is_not_named() {
        assert_eq!([1, 2, 3].map(networks_of), ["", "routed", "routed,one"]);
    }
}
