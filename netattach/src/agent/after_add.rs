//! What follows an ADD's answer: nothing waits for it but the container's next operation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handler::Agent;
use super::lanes::Class;
use super::scheduler::Turn;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::own_thread;

/// Delay before a status is published, so that it does not compete with the answer for a processor.
const PUBLISH_AFTER: Duration = Duration::from_millis(2);
/// How long after an ADD its addresses are announced to neighbours, and programs in its pod get links, at the latest, but for the
/// turn of the pods before it: while other ADDs work, these go first. A runtime that attaches so many pods has not started this
/// one's containers by then.
const FINISH_WITHIN: Duration = Duration::from_secs(2);
/// Time between two looks whether ADDs work.
const FINISH_POLL: Duration = Duration::from_millis(50);

impl Agent {
    /// Publishes the sandbox's status within its turn: the caller does not wait for that, the container's next
    /// operation does.
    pub(super) fn publish_later(self: &Arc<Self>, sandbox: JournalKey, turn: Turn) {
        turn.finish();
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(PUBLISH_AFTER).await;
            let Ok(_publisher) = agent.publishers.acquire().await else { return };
            let publisher = Arc::clone(&agent);
            // Not where the agent ends: the next one publishes it.
            let _ = own_thread::blocking(move || publisher.publish(&sandbox)).await;
            drop(turn);
        });
    }

    /// Announces the addresses of what that record attached, and has its programs in the pod run by links, once no ADD works.
    /// Nothing waits for it: by then the record may be gone, and a later ADD of the container be announced twice, which harms
    /// nobody.
    pub(super) fn finish_later(self: &Arc<Self>, record: JournalKey) {
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            let latest = Instant::now() + FINISH_WITHIN;
            tokio::time::sleep(PUBLISH_AFTER).await;
            agent.no_add_works(latest).await;
            agent.announce(&record).await;
            agent.settle(&record, latest).await;
        });
    }

    /// Waits until no ADD works, or until then.
    async fn no_add_works(&self, latest: Instant) {
        while !self.traffic.is_at_rest(Class::Add) && Instant::now() < latest {
            tokio::time::sleep(FINISH_POLL).await;
        }
    }

    async fn announce(&self, record: &JournalKey) {
        let Ok(_announcer) = self.announcer.acquire().await else { return };
        let (engine, of) = (Arc::clone(&self.engine), record.clone());
        if let Ok(Err(error)) = own_thread::blocking(move || engine.announce(&of)).await {
            tracing::warn!(container = record.container_id, error = %Chain(&error), "addresses not announced: neighbours that knew another holder find this one when they ask again");
        }
    }

    /// Waits for grace periods, so announcements do not wait for it. It may come at any moment of later operations.
    async fn settle(&self, record: &JournalKey, latest: Instant) {
        let Ok(_settler) = self.settler.acquire().await else { return };
        // Others may have begun while the pods before this one had theirs.
        self.no_add_works(latest).await;
        let (engine, of) = (Arc::clone(&self.engine), record.clone());
        if let Ok(Err(error)) = own_thread::blocking(move || crate::upkeep(|| engine.settle(&of))).await {
            tracing::warn!(container = record.container_id, error = %Chain(&error), "programs in the pod still run as filters; the next check tries again");
        }
    }
}
