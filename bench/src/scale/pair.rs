//! Two standing pods that exchange packets, while another one is attached and detached.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use super::adds::PATIENCE;
use super::sites::{Sites, Way};
use crate::Series;
use crate::dataplane::load::{self, Kind, Route};
use crate::pods::joined;

/// The ways whose pods reach each other: the agent's programs drop packets of pods that it has not attached.
pub(super) const PAIRED: [Way; 2] = [Way::Floor, Way::Netattach];
/// Length of one sample.
const SAMPLE: Duration = Duration::from_millis(500);
/// Samples of each kind.
const SAMPLES: usize = 3;
/// Interval between ADDs, so that every way attaches as often.
const PACE: Duration = Duration::from_millis(100);
/// Ports of the samples; each sample has its own.
const PORTS: RangeInclusive<u16> = 20_000..=29_999;

/// Exchanges of a byte per second.
#[derive(Serialize)]
pub(super) struct Pair {
    /// While no pod is attached or detached.
    pub(super) alone: Series,
    /// While another pod is attached and detached at a steady pace.
    pub(super) beside: Series,
}

impl Pair {
    /// Returns the remaining fraction of the speed.
    pub(super) fn ratio(&self) -> f64 {
        self.beside.median / self.alone.median
    }
}

/// Measures the first two standing pods, alternating between the ways.
pub(super) fn measure(sites: &Sites) -> anyhow::Result<[Pair; 2]> {
    let mut samples = [const { (Vec::new(), Vec::new()) }; 2];
    let mut ports = PORTS;
    let addresses = [sites.pod(Way::Floor, 2)?.address(0), of_netattach(sites)?];
    // To determine an address, the agent inspects more than that, which takes it a while.
    sites.agent.settle(PATIENCE)?;
    for _ in 0..SAMPLES {
        for ((way, address), (alone, beside)) in PAIRED.into_iter().zip(addresses).zip(&mut samples) {
            let mut sample = || {
                let port = ports.next().context("too many samples")?;
                exchanges(sites, way, (address, port))
                    .with_context(|| format!("between pods of {}", way.name()))
            };
            alone.push(sample()?);
            beside.push(meanwhile(sites, way, sample)?);
        }
    }
    Ok(samples.map(|(alone, beside)| Pair { alone: Series::new(alone), beside: Series::new(beside) }))
}

fn of_netattach(sites: &Sites) -> anyhow::Result<Ipv4Addr> {
    sites.agent.address_of(sites.pod(Way::Netattach, 2)?, "eth0")
}

fn exchanges(sites: &Sites, way: Way, (address, port): (Ipv4Addr, u16)) -> anyhow::Result<f64> {
    let (client, server) = (sites.pod(way, 1)?, sites.pod(way, 2)?);
    let route = Route { client: client.namespace(), server: server.namespace(), address };
    load::sample(&route, Kind::Requests, port, SAMPLE)
}

/// Takes a sample while the pod with number 0 is attached and detached.
fn meanwhile(sites: &Sites, way: Way, sample: impl FnOnce() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    let (pod, ending) = (sites.pod(way, 0)?, AtomicBool::new(false));
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            sites.on(way, || {
                while !ending.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    sites.add(way, pod)?;
                    sites.del(way, pod)?;
                    thread::sleep(PACE.saturating_sub(began.elapsed()));
                }
                Ok(())
            })
        });
        let rate = sample();
        ending.store(true, Ordering::Relaxed);
        joined(other.join()).context("the pod that comes and goes")?;
        rate
    })
}
