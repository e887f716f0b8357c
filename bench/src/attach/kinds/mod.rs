//! ADD of a pod with one interface, of each kind that the kernel has a driver for, by each side that can attach it.
//!
//! The `kind`s and the configurations of their plugins; their `floor`; the figures as a `table`, with their limits.
//! Those that a kernel may lack are also measured in an `emulated` machine.

pub mod emulated;
mod floor;
mod kind;
mod table;

use std::num::NonZeroU16;
use std::os::unix::fs::symlink;
use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};
use xtask::progress::{self, Done};

use self::floor::Floor;
use self::kind::{KINDS, Kind, OTHER_PARENT, SIDES, Side};
pub(super) use self::table::table;
use super::parts::{self, Logged, Part};
use super::reference::{self, InTurn};
use super::{Contender, left_nothing};
use crate::agent::{self, Agent, NAMESPACE};
use crate::limit::{self, Limit};
use crate::pods::{INTERFACES, Node, Pod, make_directory};
use crate::{Origin, Series};

/// The indices of the permanent devices on the node, besides those of the parent and of the floor's bridge.
const OTHER_PARENT_INDEX: u32 = 12;
/// Index of the first device that pods get; the others follow, and then their other ends.
const GIVEN: u32 = 30;

/// The kinds that are never measured here.
const LEFT_OUT: [LeftOut; 3] = [
    LeftOut {
        kind: "netkit",
        why: "there is no reference, and what it costs beyond a veth is in the data path",
    },
    LeftOut {
        kind: "vrf",
        why: "chained behind other plugins, it makes no interface that a pod has by itself",
    },
    LeftOut { kind: "sriov", why: "takes a card with SR-IOV, as `bench sriov` has one" },
];

/// Pods that stay, one for each side but the floor.
const STANDING: usize = SIDES.len() - 1;

/// The results of one run.
#[derive(Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) origin: Origin,
    rounds: u16,
    /// Whether the machine is an emulated one.
    emulated: bool,
    kinds: Vec<Figures>,
    left_out: Vec<LeftOut>,
    limits: Vec<Limit>,
}

/// Milliseconds of the ADDs of one kind.
#[derive(Serialize, Deserialize)]
struct Figures {
    #[serde(serialize_with = "by_name", deserialize_with = "of_name")]
    kind: Kind,
    floor: Series,
    agent: Series,
    /// For the agent's ADDs, the time in the agent.
    within: Series,
    executable: Series,
    reference: Option<Series>,
    /// The parts of the time, if it is beyond its limit.
    parts: Vec<Part>,
}

#[derive(Serialize)]
struct LeftOut {
    kind: &'static str,
    why: &'static str,
}

/// One kind, its pod, and the side that attaches it.
struct Site<'a> {
    kind: Kind,
    pod: &'a Pod,
    contenders: Vec<(Side, Box<dyn Contender + 'a>)>,
    /// The samples of each contender.
    samples: Vec<Vec<Duration>>,
}

/// An agent that serves several sites.
pub(super) struct Through<'a>(pub(super) &'a Agent);

impl Contender for Through<'_> {
    fn name(&self) -> &'static str {
        Side::Agent.name()
    }

    fn describe(&self) -> String {
        Side::Agent.description().to_owned()
    }

    fn add(&self, pod: &Pod) -> anyhow::Result<()> {
        self.0.call("ADD", pod, &pod.new_container())
    }

    fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        self.0.call("DEL", pod, &pod.container())
    }
}

/// # Errors
/// The limits that are missed.
pub(super) fn check(report: &Report) -> anyhow::Result<()> {
    limit::check(&report.limits)
}

/// Measures every kind.
pub(super) fn measure(rounds: NonZeroU16) -> anyhow::Result<Report> {
    let rounds = rounds.get();
    let (kinds, lacking) = measure_each(&KINDS, rounds)?;
    let left_out = LEFT_OUT.into_iter().chain(lacking.into_iter().map(LeftOut::without_driver)).collect();
    let limits = table::limits(&kinds);
    let origin = Origin::of(format!("cargo xtask bench attach --only kinds --kind-rounds {rounds}"));
    Ok(Report { origin, rounds, emulated: false, kinds, left_out, limits })
}

/// Measures those of the wanted kinds that the kernel has a driver for. Returns the others as well.
fn measure_each(wanted: &[Kind], rounds: u16) -> anyhow::Result<(Vec<Figures>, Vec<Kind>)> {
    let node = Node::enter()?;
    let stay = if wanted.contains(&Kind::Masqueraded) { STANDING } else { 0 };
    let pods = node.pods((wanted.len() + stay) as u16)?;
    let (own, standing) = pods.split_at(wanted.len());
    floor::prepare(OTHER_PARENT)?;
    let (mut there, mut lacking) = (Vec::new(), Vec::new());
    for (kind, pod) in wanted.iter().copied().zip(own) {
        if has_driver(kind, pod, &node)? {
            there.push((kind, pod));
        } else {
            lacking.push(kind);
        }
    }
    let agent = start_agent(&node, &there, standing)?;
    let mut sites = there
        .iter()
        .map(|(kind, pod)| site(*kind, pod, &node, &agent))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let stood = sites.iter().map(|site| site.stand(standing)).sum::<anyhow::Result<usize>>()?;
    let mut process = Vec::new();
    progress::step("each kind of interface", |progress| {
        // One round that does not count: it creates bridges and warms caches.
        for round in 0..=rounds {
            progress.note(&format!("round {round} of {rounds}"));
            for site in &mut sites {
                site.round(round, &node)?;
            }
            let started = Instant::now();
            agent.version()?;
            process.push(started.elapsed());
        }
        Ok(Done::Unchanged(format!("{rounds} pods each of {} kinds", there.len())))
    })?;
    let logged = by_site(&agent, stood, sites.len())?;
    let mut kinds: Vec<Figures> =
        sites.iter().zip(&logged).map(|(site, logged)| site.figures(logged)).collect();
    for ((figures, site), logged) in kinds.iter_mut().zip(&sites).zip(&logged) {
        if !table::limits(slice::from_ref(&*figures)).iter().all(Limit::is_met) {
            figures.parts = parts::rows(site.of(Side::Agent), &process, logged);
        }
    }
    Ok((kinds, lacking))
}

/// Whether the kernel has the driver of a kind.
fn has_driver(kind: Kind, pod: &Pod, node: &Node) -> anyhow::Result<bool> {
    let floor = Floor::new(kind, node)?;
    let tried = floor::before(kind, Side::Floor, pod, node).and_then(|()| floor.add(pod));
    match tried {
        Err(error) if floor::is_without_driver(kind, &error) => Ok(false),
        tried => {
            tried.and_then(|()| floor.del(pod)).with_context(|| format!("the floor of {}", kind.name()))?;
            Ok(true)
        }
    }
}

/// An agent whose pods choose the network of their kind as their default.
fn start_agent(node: &Node, kinds: &[(Kind, &Pod)], standing: &[Pod]) -> anyhow::Result<Agent> {
    let leases = make_directory(&node.scratch().join("leases-of-kinds"))?;
    let mut objects: Vec<Value> = agent::namespaces().into();
    // The configuration requires a default network, which no pod uses.
    objects.push(agent::network("kube-system", "default", &Kind::Bridge.config(Side::Agent, &leases)));
    for (kind, _) in kinds {
        objects.push(agent::network(NAMESPACE, kind.network(), &kind.config(Side::Agent, &leases)));
    }
    let standing = standing.iter().map(|pod| (Kind::Masqueraded, pod));
    for (kind, pod) in kinds.iter().copied().chain(standing) {
        let network = kind.network();
        let mut pod = agent::pod(pod, "");
        pod["metadata"]["annotations"] =
            json!({"v1.multus-cni.io/default-network": format!("{NAMESPACE}/{network}")});
        objects.push(pod);
    }
    Agent::start(node, &objects)
}

fn site<'a>(kind: Kind, pod: &'a Pod, node: &Node, agent: &'a Agent) -> anyhow::Result<Site<'a>> {
    let executed = |side: Side, plugins| -> anyhow::Result<Box<dyn Contender>> {
        let leases = make_directory(&node.scratch().join(side.name()))?;
        let networks = vec![kind.config(side, &leases)];
        let named = (side.name(), side.description());
        Ok(Box::new(InTurn::of(named, plugins, networks, KINDS.len() + STANDING)))
    };
    let mut contenders: Vec<(Side, Box<dyn Contender + 'a>)> = Vec::new();
    for side in SIDES {
        let contender: Box<dyn Contender + 'a> = match side {
            Side::Floor => Box::new(Floor::new(kind, node)?),
            Side::Agent => Box::new(Through(agent)),
            Side::Executable => {
                let own = make_directory(&node.scratch().join(format!("executable-{}", kind.network())))?;
                symlink(crate::dist().join("netattach-cni"), own.join(kind.plugin()))
                    .context("link the executable")?;
                executed(side, own)?
            }
            Side::Reference if !kind.has_reference() => continue,
            Side::Reference => executed(side, reference::plugins()?)?,
        };
        contenders.push((side, contender));
    }
    let samples = contenders.iter().map(|_| Vec::new()).collect();
    Ok(Site { kind, pod, contenders, samples })
}

/// The agent's ADDs of each site but the first, which does not count, after those of pods that stay.
fn by_site(agent: &Agent, stood: usize, sites: usize) -> anyhow::Result<Vec<Vec<Logged>>> {
    let mut logged = parts::logged_adds(&agent.log()?)?;
    logged.drain(..stood.min(logged.len()));
    ensure!(logged.len().is_multiple_of(sites.max(1)), "{} ADDs are logged of {sites} kinds", logged.len());
    let mut of: Vec<Vec<Logged>> = (0..sites).map(|_| Vec::new()).collect();
    // Each of them once in every round.
    for (number, add) in logged.into_iter().enumerate().skip(sites) {
        of[number % sites].push(add);
    }
    Ok(of)
}

impl Site<'_> {
    /// If pods are masqueraded, each side attaches one that stays: the first one of a node pays for the tables and
    /// chains of all. Returns how many of them the agent has.
    fn stand(&self, pods: &[Pod]) -> anyhow::Result<usize> {
        if self.kind != Kind::Masqueraded {
            return Ok(0);
        }
        let sides = self.contenders.iter().filter(|(side, _)| *side != Side::Floor);
        for ((side, contender), pod) in sides.zip(pods) {
            contender
                .add(pod)
                .with_context(|| format!("a masqueraded pod that stays, by {}", side.name()))?;
        }
        Ok(1)
    }

    /// Everybody attaches the pod once; in every other round in the opposite order.
    fn round(&mut self, number: u16, node: &Node) -> anyhow::Result<()> {
        let Self { kind, pod, contenders, samples } = self;
        let mut turns: Vec<_> = contenders.iter().zip(samples).collect();
        if !number.is_multiple_of(2) {
            turns.reverse();
        }
        for ((side, contender), samples) in turns {
            let before = node.links()?;
            let done = once(*kind, *side, &**contender, (*pod, node)).and_then(|took| {
                // The first one makes bridges, which stay.
                if number > 0 {
                    left_nothing(node, &before, slice::from_ref(*pod))?;
                    samples.push(took);
                }
                Ok(())
            });
            done.with_context(|| format!("{} by {}", kind.name(), side.name()))?;
        }
        Ok(())
    }

    /// The ADDs of a side.
    fn of(&self, wanted: Side) -> &[Duration] {
        let mut all = self.contenders.iter().zip(&self.samples);
        all.find(|((side, _), _)| *side == wanted).map(|(_, samples)| samples.as_slice()).unwrap_or_default()
    }

    fn figures(&self, logged: &[Logged]) -> Figures {
        let series = |side| milliseconds(self.of(side).iter().copied());
        Figures {
            kind: self.kind,
            floor: series(Side::Floor),
            agent: series(Side::Agent),
            within: milliseconds(logged.iter().map(Logged::took)),
            executable: series(Side::Executable),
            reference: self.kind.has_reference().then(|| series(Side::Reference)),
            parts: Vec::new(),
        }
    }
}

impl LeftOut {
    fn without_driver(kind: Kind) -> Self {
        let why = match emulated::JUDGED.contains(&kind) {
            true => "this kernel has no driver for it; `bench kinds-vm` measures it",
            false => "this kernel has no driver for it",
        };
        Self { kind: kind.name(), why }
    }
}

impl Figures {
    fn to_floor(&self) -> Series {
        self.agent.ratios(&self.floor)
    }
}

/// ADD, which is timed, and DEL.
fn once(
    kind: Kind,
    side: Side,
    contender: &dyn Contender,
    (pod, node): (&Pod, &Node),
) -> anyhow::Result<Duration> {
    floor::before(kind, side, pod, node)?;
    let started = Instant::now();
    contender.add(pod).context("ADD")?;
    let took = started.elapsed();
    if kind.is_link() {
        pod.has(&INTERFACES[..1])?;
    }
    contender.del(pod).context("DEL")?;
    Ok(took)
}

pub(super) fn milliseconds(durations: impl Iterator<Item = Duration>) -> Series {
    Series::new(durations.map(|took| took.as_secs_f64() * 1000.0).collect())
}

fn by_name<S: Serializer>(kind: &Kind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.name())
}

fn of_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Kind, D::Error> {
    let name = String::deserialize(deserializer)?;
    let kind = KINDS.into_iter().find(|kind| kind.name() == name);
    kind.ok_or_else(|| D::Error::custom(format!("there is no kind named {name}")))
}
