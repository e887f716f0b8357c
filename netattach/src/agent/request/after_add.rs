//! The work after an ADD's answer: only the container's next operation waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::admission::scheduler::Turn;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::own_thread;

/// Delay before a status is published, so that it does not compete with the answer for a processor.
const PUBLISH_AFTER: Duration = Duration::from_millis(2);
/// How long after an ADD its addresses are announced to neighbours and the programs in its pod are attached
/// by BPF links, at the latest, not counting the wait for the pods before it. Until then other ADDs go
/// first: a runtime that attaches many pods at once has not started this pod's containers yet.
const FINISH_WITHIN: Duration = Duration::from_secs(2);
/// How often it is checked whether ADDs are running.
const FINISH_POLL: Duration = Duration::from_millis(50);

/// Most threads that publish statuses at a time.
pub(in crate::agent) const MOST_PUBLISHERS: usize = 8;

/// Limits on the work after ADDs.
#[derive(Debug)]
pub(in crate::agent) struct AfterAdd {
    publishers: Semaphore,
    /// Lets one thread at a time do the dataplane work that ADDs have deferred.
    settler: Semaphore,
}

impl Default for AfterAdd {
    fn default() -> Self {
        Self { publishers: Semaphore::new(MOST_PUBLISHERS), settler: Semaphore::new(1) }
    }
}

impl Agent {
    /// Publishes the sandbox's status within its turn: the caller does not wait for it, but the container's
    /// next operation does.
    pub(super) fn publish_later(self: &Arc<Self>, sandbox: JournalKey, turn: Turn) {
        turn.finish();
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(PUBLISH_AFTER).await;
            let Ok(_publisher) = agent.after_add.publishers.acquire().await else { return };
            let publisher = Arc::clone(&agent);
            // Fails only while the agent ends; the next agent publishes it.
            let _ = own_thread::blocking(move || publisher.publish(&sandbox)).await;
            drop(turn);
        });
    }

    /// Has the addresses of the record's attachments announced, and attaches the programs in its pod by BPF
    /// links, once no ADD is running. No operation waits for this: the record may be gone by that time, or
    /// a later ADD of the container may be announced twice, which is harmless.
    pub(in crate::agent) fn finish_later(self: &Arc<Self>, record: JournalKey) {
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            let latest = Instant::now() + FINISH_WITHIN;
            tokio::time::sleep(PUBLISH_AFTER).await;
            agent.no_add_works(latest).await;
            agent.engine.announce_soon([record.clone()]);
            agent.settle(&record, latest).await;
        });
    }

    /// Waits until no ADD is running, at most until `latest`.
    async fn no_add_works(&self, latest: Instant) {
        while !self.admission.traffic().is_at_rest(Class::Add) && Instant::now() < latest {
            tokio::time::sleep(FINISH_POLL).await;
        }
    }

    /// Lets the engine attach the programs in the pod by BPF links. This waits for RCU grace periods, so
    /// announcements do not wait for it. It may run at any point of later operations.
    async fn settle(&self, record: &JournalKey, latest: Instant) {
        let Ok(_settler) = self.after_add.settler.acquire().await else { return };
        // Other ADDs may have begun while this pod waited for the permit.
        self.no_add_works(latest).await;
        let (engine, of) = (Arc::clone(&self.engine), record.clone());
        if let Ok(Err(error)) = own_thread::blocking(move || crate::upkeep(|| engine.settle(&of))).await {
            tracing::warn!(container = record.container_id, error = %Chain(&error), "work after the ADD not completed; the next check tries again");
        }
    }
}
