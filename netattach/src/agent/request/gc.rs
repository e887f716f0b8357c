//! Runs GC concurrently with other requests: it delays only those for the network that it is working on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::operation::blocking;
use super::request_log;
use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::admission::scheduler::Watch;
use crate::attach::{AttachError, Census, Collected};
use crate::cni::{self, CniError, code};
use crate::own_thread;
use crate::plan::gc::{Holder, Place};
use crate::waits::Resource;

/// How long GC waits for one plugin or pool that stays occupied: long enough for operations that work, but not for
/// those that hang.
const PATIENCE: Duration = Duration::from_secs(5);

impl Agent {
    /// Carries out a GC. One at a time: the list of attachments in a queued GC would be out of date by its turn.
    pub(in crate::agent) async fn gc(self: &Arc<Self>, request: cni::Request) -> Result<String, CniError> {
        let Some(_alone) = self.admission.collect() else {
            return Err(CniError::new(code::TRY_AGAIN_LATER, "a GC is running"));
        };
        // Watch before the census: the runtime cannot know of containers that arrive from here on.
        let watch = self.admission.turns().watch();
        let request = Arc::new(request);
        let asked = Arc::clone(&request);
        let (census, mut collected) = self
            .work(move |agent| {
                let mut collected = Collected::default();
                Ok((agent.engine.census(&asked, &mut collected), collected))
            })
            .await?;
        let Some(mut census) = census else { return outcome(collected) };
        for busy in watch.seen() {
            census.keep(&busy);
        }
        collected.add(self.take_back_stale(&mut census, &watch).await);
        collected.add(self.release_held(&request, census, watch).await?);
        self.work(move |agent| {
            agent.withdraw(collected.pods());
            outcome(collected)
        })
        .await
    }

    /// Detaches stale sandboxes, like as many DELs, each in its container's turn. A container for which a
    /// request arrived meanwhile is left to that request.
    async fn take_back_stale(self: &Arc<Self>, census: &mut Census, watch: &Watch) -> Collected {
        let mut collected = Collected::default();
        let mut under_way = JoinSet::new();
        for (container, stale) in census.stale.clone() {
            let Some(turn) = watch.take(&container).await else {
                census.keep(&container);
                continue;
            };
            turn.rolls_back();
            let agent = Arc::clone(self);
            under_way.spawn(async move {
                let work = move |agent: &Agent| {
                    let begun = Instant::now();
                    let collected = agent.engine.collect(&stale);
                    if !collected.detached.is_empty() {
                        let why = "GC: it is no longer in use";
                        request_log::collected(&container, why, &collected.detached, begun.elapsed());
                    }
                    // The lanes are full: the error is returned, so that the work is retried.
                    let is_crowded = |error: &AttachError| matches!(error, AttachError::Crowded(_));
                    match collected.errors.iter().find(|error| is_crowded(error)) {
                        Some(error) => Err(CniError::from(error)),
                        None => Ok(collected),
                    }
                };
                let done = agent.in_lane(Class::Del, work).await;
                drop(turn);
                done
            });
        }
        while let Some(done) = under_way.join_next().await {
            match own_thread::joined(done) {
                Some(Ok(done)) => collected.add(done),
                Some(Err(error)) => collected.errors.push(AttachError::Plan(error)),
                // A task that was aborted; none is.
                None => {}
            }
        }
        collected
    }

    /// Asks every pool and plugin to release stale entries, those not in use by operations first. The
    /// others are waited for at the end, for up to [`PATIENCE`] each.
    async fn release_held(
        self: &Arc<Self>,
        request: &Arc<cni::Request>,
        census: Census,
        watch: Watch,
    ) -> Result<Collected, CniError> {
        let mut collected = Collected::default();
        let census = Arc::new(census);
        let known = Arc::clone(&census);
        let holders =
            self.work(move |agent| Ok(agent.engine.holders(&known, &agent.intents.defined()))).await?;
        let until = Instant::now() + self.engine.node().delegate.timeout;
        let mut left: VecDeque<(Holder, bool)> = holders.into_iter().map(|holder| (holder, false)).collect();
        while let Some((holder, was_put_off)) = left.pop_front() {
            let now = Instant::now();
            let until_clear = if was_put_off { until.min(now + PATIENCE) } else { now };
            let closed = self.admission.traffic().close(&resource(&holder), until_clear).await;
            match closed {
                None if was_put_off => {
                    collected.errors.push(AttachError::OutOfTime(holder.network.to_string()))
                }
                None => left.push_back((holder, true)),
                Some(closed) => {
                    let (request, census, busy) = (Arc::clone(request), Arc::clone(&census), watch.seen());
                    let released = self
                        .work(move |agent| {
                            Ok(agent.engine.release_others(&request, &census, &holder, &busy, until))
                        })
                        .await;
                    drop(closed);
                    collected.errors.extend(released?.err());
                }
            }
        }
        Ok(collected)
    }

    /// Runs blocking work outside the lanes.
    pub(in crate::agent) async fn work<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, CniError> + Send + 'static,
    ) -> Result<T, CniError> {
        let agent = Arc::clone(self);
        blocking(move || work(&agent)).await
    }
}

fn outcome(collected: Collected) -> Result<String, CniError> {
    collected.outcome().map(|()| String::new())
}

/// The resource that operations occupy while they use the holder's pool or plugin.
fn resource(holder: &Holder) -> Resource {
    match &holder.place {
        Place::Pool(pool) => Resource::Pool(pool.clone()),
        Place::Plugin(plugin) => {
            Resource::Plugin { plugin: plugin.plugin.clone(), network: holder.config_name.clone() }
        }
    }
}
