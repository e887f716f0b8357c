//! The measurement, on the machine with the cards: one VF, which the contenders give to a pod and take back
//! alternately.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use netattach_tests::Namespace;
use netattach_tests::node::ip;
use netattach_tests::sriov::{Cards, Vf};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xtask::progress::{self, Done};

use crate::Origin;
use crate::agent::{self, Agent, NAMESPACE};
use crate::attach::Contender;
use crate::attach::kinds::Through;
use crate::attach::parts;
use crate::attach::reference::{self, InTurn};
use crate::netlink::Netlink;
use crate::pods::{INTERFACES, Node, Pod, make_directory};

/// The address that the pod's interface gets.
const MAC: &str = "02:00:00:00:0b:01";
/// The machine has little memory.
const ATTACHMENTS: u32 = 64;
/// Longer than an emulated card needs for its carrier.
const PATIENCE: Duration = Duration::from_secs(20);
/// The number of contenders that are the agent's: the first ones.
const BY_AGENT: usize = 2;

/// The side that gives the pod its VF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// `sriov`, restricted to what the reference can do.
    Alike,
    /// `sriov`, with all that the card can set.
    Every,
    /// The reference's plugins.
    Reference,
}

pub(super) const SIDES: [Side; 3] = [Side::Alike, Side::Every, Side::Reference];

/// The measurements.
#[derive(Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) kernel: String,
    pub(super) processors: usize,
    /// In the order of [`SIDES`].
    pub(super) sides: Vec<Times>,
    /// The parts of the time of an ADD of [`Side::Alike`], as a table.
    pub(super) parts: String,
}

/// The times of one contender, round by round.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Times {
    /// Until the answer.
    pub(super) add: Vec<Duration>,
    /// Until the pod's interface also has a carrier.
    pub(super) carrier: Vec<Duration>,
    pub(super) del: Vec<Duration>,
}

impl Side {
    /// The name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Alike => "sriov",
            Self::Every => "sriov, every key",
            Self::Reference => "host-device, tuning",
        }
    }

    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Alike => {
                "netattach: the VF moved into the pod, with an address of a pool and another Ethernet address, \
                 which the card sets; leases, journal, BPF programs and policy included"
            }
            Self::Every => "the same, and VLAN, priority, rate, spoof check and trust set by the card",
            Self::Reference => {
                "containernetworking's executables in turn: the VF moved into the pod, with an address of \
                 host-local's, its Ethernet address set from there; the card sets nothing"
            }
        }
    }

    fn network(self) -> &'static str {
        match self {
            Self::Alike => "alike",
            Self::Every => "every",
            Self::Reference => "reference",
        }
    }

    /// Returns the network's configuration, with a separate subnet and leases below that directory.
    fn config(self, device: &str, leases: &Path) -> Value {
        let subnet = format!("10.{}.0.0/16", 120 + self as u8);
        let ipam = json!({"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": subnet}]]});
        let mut config = json!({"cniVersion": "1.0.0", "name": self.network()});
        let mut keys = match self {
            Self::Alike | Self::Every => {
                json!({"type": "sriov", "deviceID": device, "mac": MAC, "ipam": ipam})
            }
            Self::Reference => json!({"plugins": [
                {"type": "host-device", "pciBusID": device, "ipam": ipam}, {"type": "tuning", "mac": MAC}
            ]}),
        };
        if self == Self::Every {
            for (key, value) in [("vlan", json!(100)), ("vlanQoS", json!(3)), ("max_tx_rate", json!(200))] {
                keys[key] = value;
            }
            for (key, value) in [("spoofchk", "off"), ("trust", "on")] {
                keys[key] = json!(value);
            }
        }
        for (key, value) in keys.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        config
    }
}

/// Measures that many rounds, after one that does not count.
pub(super) fn measure(rounds: u16) -> anyhow::Result<Measured> {
    let cards = Cards::take("bench sriov")?.context("no driver of cards is named")?;
    let vfs = cards.make_vfs(1)?;
    let vf = vfs.first().context("the card has no VF")?;
    // Without that, `tuning` may not set the address from within the pod.
    ip(&Namespace::of_this_process()?, &["link", "set", &cards.device, "vf", "0", "trust", "on"])?;
    let node = Node::here()?;
    let pods = node.pods(SIDES.len() as u16)?;
    let agent = start_agent(&node, &vf.address, &pods)?;
    let contenders = SIDES
        .into_iter()
        .map(|side| contender(side, &vf.address, &node, &agent))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut sides: Vec<Times> = SIDES.iter().map(|_| Times::default()).collect();
    let mut process = Vec::new();
    progress::step("a VF in turns", |progress| {
        for round in 0..=rounds {
            progress.note(&format!("round {round} of {rounds}"));
            // In every other round, the reference is before the agent's; the order of the agent's is fixed, as its
            // log depends on it.
            let turns = if round.is_multiple_of(2) { [0, 1, BY_AGENT] } else { [BY_AGENT, 0, 1] };
            for at in turns {
                let mut uncounted = Times::default();
                let times = if round > 0 { &mut sides[at] } else { &mut uncounted };
                once(&*contenders[at], (&pods[at], &node), vf, times)
                    .with_context(|| format!("round {round} of {}", SIDES[at].name()))?;
            }
            let started = Instant::now();
            agent.version()?;
            process.push(started.elapsed());
        }
        Ok(Done::Unchanged(format!("{rounds} pods each of {} contenders", SIDES.len())))
    })?;
    let logged = parts::logged_adds(&agent.log()?)?;
    // The first round does not count.
    let alike: Vec<_> = logged.into_iter().skip(BY_AGENT).step_by(BY_AGENT).collect();
    ensure!(alike.len() == usize::from(rounds), "the agent's log has {} ADDs of {rounds}", alike.len());
    let parts = parts::table(&parts::rows(&sides[0].add, &process, &alike));
    let Origin { kernel, processors, .. } = Origin::of(String::new());
    Ok(Measured { kernel, processors, sides, parts })
}

/// Starts an agent whose pods, except the reference's, have the VF by the network of their contender as their default
/// network.
fn start_agent(node: &Node, device: &str, pods: &[Pod]) -> anyhow::Result<Agent> {
    let leases = make_directory(&node.scratch().join("leases"))?;
    let mut objects: Vec<Value> = agent::namespaces().into();
    // The configuration requires a default network, which no pod uses.
    let bridge =
        json!({"cniVersion": "1.0.0", "type": "bridge", "bridge": "unused0", "ipam": {"type": "static"}});
    objects.push(agent::network("kube-system", "default", &bridge));
    for (side, pod) in SIDES.into_iter().zip(pods).take(BY_AGENT) {
        objects.push(agent::network(NAMESPACE, side.network(), &side.config(device, &leases)));
        let mut pod = agent::pod(pod, "");
        let network = format!("{NAMESPACE}/{}", side.network());
        pod["metadata"]["annotations"] = json!({"v1.multus-cni.io/default-network": network});
        objects.push(pod);
    }
    Agent::start_as(node, agent::NAME, &objects, &json!({"maxAttachments": ATTACHMENTS}))
}

fn contender<'a>(
    side: Side,
    device: &str,
    node: &Node,
    agent: &'a Agent,
) -> anyhow::Result<Box<dyn Contender + 'a>> {
    if side != Side::Reference {
        return Ok(Box::new(Through(agent)));
    }
    let leases = make_directory(&node.scratch().join(side.network()))?;
    let (named, network) = ((side.name(), side.description()), side.config(device, &leases));
    Ok(Box::new(InTurn::of(named, reference::plugins()?, vec![network], SIDES.len())))
}

/// ADD, the carrier, and DEL of a pod, after which the VF is on the node again.
fn once(
    contender: &dyn Contender,
    (pod, node): (&Pod, &Node),
    vf: &Vf,
    times: &mut Times,
) -> anyhow::Result<()> {
    let started = Instant::now();
    contender.add(pod).context("ADD")?;
    times.add.push(started.elapsed());
    await_carrier(pod, node)?;
    times.carrier.push(started.elapsed());
    let started = Instant::now();
    contender.del(pod).context("DEL")?;
    times.del.push(started.elapsed());
    pod.is_empty()?;
    ensure!(
        vf.on_node().as_deref() == Some(vf.device.as_str()),
        "the VF is not on the node as {}",
        vf.device
    );
    Ok(())
}

fn await_carrier(pod: &Pod, node: &Node) -> anyhow::Result<()> {
    let mut netlink = Netlink::open_in(pod.namespace(), node.namespace())?;
    let deadline = Instant::now() + PATIENCE;
    while !netlink.running()?.iter().any(|name| name == INTERFACES[0]) {
        ensure!(Instant::now() < deadline, "the VF has no carrier in the pod");
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_told_what_it_can_do_of_the_same() {
        let leases = Path::new("/leases");
        let ipam = |number: u8| {
            let subnet = format!("10.{number}.0.0/16");
            json!({"type": "host-local", "dataDir": "/leases", "ranges": [[{"subnet": subnet}]]})
        };
        let expected = [
            json!({
                "cniVersion": "1.0.0", "name": "alike", "type": "sriov", "deviceID": "0000:01:10.0",
                "mac": MAC, "ipam": ipam(120)
            }),
            json!({
                "cniVersion": "1.0.0", "name": "every", "type": "sriov", "deviceID": "0000:01:10.0",
                "mac": MAC, "ipam": ipam(121), "vlan": 100, "vlanQoS": 3, "max_tx_rate": 200,
                "spoofchk": "off", "trust": "on"
            }),
            json!({
                "cniVersion": "1.0.0", "name": "reference", "plugins": [
                    {"type": "host-device", "pciBusID": "0000:01:10.0", "ipam": ipam(122)},
                    {"type": "tuning", "mac": MAC}
                ]
            }),
        ];
        assert_eq!(SIDES.map(|side| side.config("0000:01:10.0", leases)), expected);
    }
}
