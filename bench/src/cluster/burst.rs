//! Many pods with three networks at once, compared with the kernel's share.

use anyhow::Context;
use serde::Serialize;

use super::rig::Cluster;
use crate::Series;
use crate::attach::Contender;
use crate::attach::floor::Spawned;
use crate::pods::{Pod, at_once};
use crate::processor::{Meter, Shares};

/// Milliseconds from the first request to the last answer.
#[derive(Serialize)]
pub(super) struct Bursts {
    pub(super) pods: usize,
    pub(super) floor: Series,
    pub(super) cluster: Series,
    /// The use of the processors during all bursts of each.
    pub(super) shares: [Shares; 2],
}

/// Attaches all pods at once, by each way alternately. They stay attached by the cluster's agent.
pub(super) fn measure(
    pods: &[Pod],
    bursts: u16,
    floor: &Spawned,
    cluster: &Cluster,
) -> anyhow::Result<Bursts> {
    let (mut of_floor, mut of_cluster) = (Vec::new(), Vec::new());
    let mut shares = [Shares::default(); 2];
    for number in 1..=bursts {
        let meter = Meter::begin(&cluster.agent)?;
        let add = |pod: &Pod| meter.of_caller(|| floor.add(pod));
        of_floor.push(at_once(pods, add).context("burst by the floor")?.as_secs_f64());
        shares[0] += meter.end()?;
        at_once(pods, |pod| floor.del(pod)).context("burst by the floor")?;
        cluster.settle()?;
        // A refusal is an error.
        let meter = Meter::begin(&cluster.agent)?;
        let add = |pod: &Pod| meter.of_caller(|| cluster.agent.call("ADD", pod, &pod.new_container()));
        of_cluster.push(at_once(pods, add).context("burst by netattach")?.as_secs_f64());
        shares[1] += meter.end()?;
        pods.iter().try_for_each(Pod::is_attached)?;
        if number < bursts {
            at_once(pods, |pod| cluster.agent.call("DEL", pod, &pod.container()))
                .context("burst by netattach")?;
            pods.iter().try_for_each(Pod::is_empty)?;
        }
        cluster.settle()?;
    }
    let milliseconds =
        |samples: Vec<f64>| Series::new(samples.into_iter().map(|seconds| seconds * 1000.0).collect());
    Ok(Bursts { pods: pods.len(), floor: milliseconds(of_floor), cluster: milliseconds(of_cluster), shares })
}
