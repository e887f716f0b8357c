//! ADD and DEL in a cluster, compared with files and with the kernel's share; and their requests to the API server.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use super::rig::{Calls, Cluster};
use crate::Series;
use crate::agent::Agent;
use crate::attach::Contender;
use crate::attach::floor::Spawned;
use crate::pods::Pod;

/// How long the agent may take to learn that a pod ends, before the pod is detached.
const NEWS: Duration = Duration::from_millis(50);

/// Milliseconds of each way, and the cluster's calls.
#[derive(Serialize)]
pub(super) struct Adds {
    pub(super) floor: Times,
    pub(super) files: Times,
    pub(super) cluster: Times,
    /// Requests of all ADDs together, and of all DELs.
    pub(super) add_calls: Calls,
    pub(super) del_calls: Calls,
    pub(super) rounds: usize,
}

#[derive(Serialize)]
pub(super) struct Times {
    pub(super) add: Series,
    pub(super) del: Series,
}

/// Measures each of the pods by each way, alternately.
pub(super) fn measure(
    pods: &[Pod],
    floor: &Spawned,
    files: &Agent,
    cluster: &Cluster,
) -> anyhow::Result<Adds> {
    let mut samples: [(Vec<f64>, Vec<f64>); 3] = Default::default();
    let (mut add_calls, mut del_calls) = (Calls::default(), Calls::default());
    let (first, pods) = pods.split_first().context("there is no pod to measure with")?;
    // Bridges are made and caches are filled.
    for agent in [files, &cluster.agent] {
        agent.call("ADD", first, &first.new_container())?;
        agent.call("DEL", first, &first.container())?;
    }
    thread::sleep(NEWS);
    for pod in pods {
        let [of_floor, of_files, of_cluster] = &mut samples;
        of_floor.0.push(timed(|| floor.add(pod))?);
        of_floor.1.push(timed(|| floor.del(pod))?);
        of_files.0.push(timed(|| files.call("ADD", pod, &pod.new_container()))?);
        of_files.1.push(timed(|| files.call("DEL", pod, &pod.container()))?);
        let mark = cluster.server.mark();
        of_cluster.0.push(timed(|| cluster.agent.call("ADD", pod, &pod.new_container()))?);
        pod.is_attached()?;
        cluster.published(mark, pod)?;
        add(&mut add_calls, cluster.calls(mark));
        cluster.end(pod)?;
        thread::sleep(NEWS);
        let mark = cluster.server.mark();
        of_cluster.1.push(timed(|| cluster.agent.call("DEL", pod, &pod.container()))?);
        pod.is_empty()?;
        cluster.remove(pod)?;
        thread::sleep(NEWS);
        add(&mut del_calls, cluster.calls(mark));
    }
    let [floor, files, cluster] =
        samples.map(|(adds, dels)| Times { add: Series::new(adds), del: Series::new(dels) });
    Ok(Adds { floor, files, cluster, add_calls, del_calls, rounds: pods.len() })
}

fn add(sum: &mut Calls, calls: Calls) {
    sum.reads += calls.reads;
    sum.writes += calls.writes;
}

fn timed(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed().as_secs_f64() * 1000.0)
}
