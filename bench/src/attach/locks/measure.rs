//! The measurement: one pod, which the contenders attach and detach alternately.

use std::path::PathBuf;
use std::slice;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use xtask::progress::{self, Done, Progress};

use super::counter::Counter;
use crate::Origin;
use crate::agent;
use crate::attach::floor::{self, Spawned};
use crate::attach::netattach::Netattach;
use crate::attach::{Contender, left_nothing, timed};
use crate::pods::{Node, Pod};

/// Pause after a DEL for all work that follows an ADD and a DEL: announcements take up to two seconds.
const PAUSE: Duration = Duration::from_secs(10);

/// The counts of all contenders.
#[derive(Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) kernel: String,
    pub(super) processors: usize,
    pub(super) contenders: Vec<Counts>,
}

/// The number of times that the lock was taken, round by round.
#[derive(Serialize, Deserialize)]
pub(super) struct Counts {
    pub(super) name: String,
    /// During the ADD.
    pub(super) taken: Vec<u64>,
    /// The same for an idle interval of the same length.
    pub(super) idle: Vec<u64>,
}

impl Counts {
    fn of(contender: &str) -> Self {
        Self { name: contender.to_owned(), taken: Vec::new(), idle: Vec::new() }
    }
}

/// Counts in that many rounds, after one that does not count. The floor's executable is built if none is given.
pub(super) fn measure(rounds: u16, executable: Option<PathBuf>) -> anyhow::Result<Measured> {
    let counter = Counter::open()?;
    let node = Node::enter()?;
    let pods = node.pods(1)?;
    let pod = pods.first().context("no pod was made")?;
    let mut contenders = Vec::new();
    progress::step("contenders", |progress| {
        contenders = prepare(&node, &pods, executable, progress)?;
        let names: Vec<&str> = contenders.iter().map(|contender| contender.name()).collect();
        Ok(Done::Unchanged(names.join("; ")))
    })?;
    let mut counts: Vec<Counts> = contenders.iter().map(|contender| Counts::of(contender.name())).collect();
    progress::step("ADDs in turns", |progress| {
        // One round that does not count: it creates bridges.
        for contender in &contenders {
            timed(&**contender, pod)?;
            thread::sleep(PAUSE);
        }
        for round in 1..=rounds {
            progress.note(&format!("round {round} of {rounds}"));
            for (contender, counts) in contenders.iter().zip(&mut counts) {
                let (taken, idle) = once(&counter, &**contender, &node, pod)
                    .with_context(|| format!("round {round} of {}", contender.name()))?;
                counts.taken.push(taken);
                counts.idle.push(idle);
            }
        }
        Ok(Done::Unchanged(format!("{rounds} pods each")))
    })?;
    let Origin { kernel, processors, .. } = Origin::of(String::new());
    Ok(Measured { kernel, processors, contenders: counts })
}

/// The floors and netattach, whose agent has the programs that one of the floors attaches.
fn prepare(
    node: &Node,
    pods: &[Pod],
    executable: Option<PathBuf>,
    progress: &Progress,
) -> anyhow::Result<Vec<Box<dyn Contender>>> {
    floor::make_bridge()?;
    let executable = executable.map_or_else(|| floor::build(progress), Ok)?;
    let contenders: Vec<Box<dyn Contender>> = vec![
        Box::new(Spawned::of(executable.clone(), None)),
        Box::new(Spawned::of(executable, Some(agent::pins(agent::NAME)))),
        Box::new(Netattach::start(node, pods)?),
    ];
    Ok(contenders)
}

/// Returns how often the lock is taken during an ADD, and in an idle interval of the same length.
fn once(counter: &Counter, contender: &dyn Contender, node: &Node, pod: &Pod) -> anyhow::Result<(u64, u64)> {
    let before = node.links()?;
    let (lasted, taken) = counter
        .during(|| {
            let began = Instant::now();
            contender.add(pod)?;
            Ok(began.elapsed())
        })
        .context("ADD")?;
    pod.is_attached()?;
    contender.del(pod).context("DEL")?;
    left_nothing(node, &before, slice::from_ref(pod))?;
    thread::sleep(PAUSE);
    let ((), idle) = counter.during(|| {
        thread::sleep(lasted);
        Ok(())
    })?;
    Ok((taken, idle))
}
