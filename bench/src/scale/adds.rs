//! ADD and DEL of one pod after another beside standing ones, alternating between the ways; and the agent's work for
//! one.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::sites::{Sites, WAYS, Way};
use super::trace;
use crate::Series;

/// Pause after the agent's DEL, so that its later work is not part of the next pod of a floor.
const PAUSE: Duration = Duration::from_millis(50);
/// Whatever follows an ADD is over within this time: announcements take up to two seconds.
const FOLLOWING: Duration = Duration::from_millis(2500);
/// ADDs whose datagrams are counted.
const COUNTED: usize = 5;
/// An agent that is not idle within this time is measured as it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Milliseconds of every way, and of the agent's processor time.
#[derive(Serialize)]
pub(super) struct Adds {
    /// The times, in the order of [`WAYS`].
    pub(super) ways: [Times; 3],
    /// Processor time from the call of an ADD to its answer.
    pub(super) processor_of_add: Series,
    /// Processor time for one pod: ADD, DEL, and all work that follows them.
    pub(super) processor_of_pod: f64,
}

#[derive(Serialize)]
pub(super) struct Times {
    pub(super) add: Series,
    pub(super) del: Series,
}

impl Adds {
    pub(super) fn of(&self, way: Way) -> &Times {
        &self.ways[way as usize]
    }
}

/// Route-netlink datagrams of one ADD.
#[derive(Serialize)]
pub(super) struct Datagrams {
    /// Processor time from the call to the answer.
    pub(super) until_the_answer: Series,
    /// Processor time of the agent within [`FOLLOWING`] after that, for any purpose.
    pub(super) afterwards: Series,
}

/// One sample: ADD, DEL, and the agent's processor time of that ADD.
type Sample = (Duration, Duration, Duration);

/// The pod of number 0, that many times by each way.
pub(super) fn measure(sites: &Sites, rounds: u16) -> anyhow::Result<Adds> {
    for way in WAYS {
        once(sites, way)?;
    }
    sites.agent.settle(PATIENCE)?;
    let before = sites.agent.processor_time()?;
    let mut samples = [const { (Vec::new(), Vec::new()) }; 3];
    let mut processors = Vec::new();
    for _ in 0..rounds {
        for (way, (adds, dels)) in WAYS.into_iter().zip(&mut samples) {
            let (add, del, processor) = once(sites, way)?;
            adds.push(milliseconds(add));
            dels.push(milliseconds(del));
            if way == Way::Netattach {
                processors.push(milliseconds(processor));
                thread::sleep(PAUSE);
            }
        }
    }
    sites.agent.settle(PATIENCE)?;
    let used = sites.agent.processor_time()?.saturating_sub(before);
    Ok(Adds {
        ways: samples.map(|(adds, dels)| Times { add: Series::new(adds), del: Series::new(dels) }),
        processor_of_add: Series::new(processors),
        processor_of_pod: milliseconds(used) / f64::from(rounds),
    })
}

fn once(sites: &Sites, way: Way) -> anyhow::Result<Sample> {
    let pod = sites.pod(way, 0)?;
    sites.on(way, || {
        let before = sites.agent.processor_time()?;
        let began = Instant::now();
        sites.add(way, pod)?;
        let add = began.elapsed();
        let processor = sites.agent.processor_time()?.saturating_sub(before);
        pod.is_attached()?;
        let began = Instant::now();
        sites.del(way, pod)?;
        let del = began.elapsed();
        pod.is_empty()?;
        Ok((add, del, processor))
    })
}

/// Follows the agent through some ADDs. It rests at the beginning.
pub(super) fn datagrams(sites: &Sites) -> anyhow::Result<Datagrams> {
    let pod = sites.pod(Way::Netattach, 0)?;
    let (mut until_the_answer, mut afterwards) = (Vec::new(), Vec::new());
    for _ in 0..COUNTED {
        let (answered, all) = trace::following(sites.agent.process_id(), |sent| {
            let before = sent.load(Ordering::Relaxed);
            sites.add(Way::Netattach, pod)?;
            let answered = sent.load(Ordering::Relaxed) - before;
            thread::sleep(FOLLOWING);
            Ok((answered, sent.load(Ordering::Relaxed) - before))
        })?;
        until_the_answer.push(answered as f64);
        afterwards.push((all - answered) as f64);
        sites.del(Way::Netattach, pod)?;
        sites.agent.settle(PATIENCE)?;
    }
    Ok(Datagrams { until_the_answer: Series::new(until_the_answer), afterwards: Series::new(afterwards) })
}

pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
