//! One operation at a time for each container.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// Hands out turns. A container's attachments never overlap; different containers do not wait for each other.
#[derive(Debug, Default)]
pub(super) struct Turns {
    containers: Mutex<HashMap<String, Weak<AsyncMutex<()>>>>,
}

impl Turns {
    /// Waits for the container's turn, in the order of asking. The turn ends when the guard is dropped.
    pub(super) async fn wait(&self, container_id: &str) -> OwnedMutexGuard<()> {
        let turn = {
            let mut containers = self.containers.lock().unwrap_or_else(PoisonError::into_inner);
            containers.retain(|_, turn| turn.strong_count() > 0);
            match containers.get(container_id).and_then(Weak::upgrade) {
                Some(turn) => turn,
                None => {
                    let turn = Arc::new(AsyncMutex::new(()));
                    containers.insert(container_id.to_owned(), Arc::downgrade(&turn));
                    turn
                }
            }
        };
        turn.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_container_waits_and_another_does_not() {
        let turns = Turns::default();
        let first = turns.wait("a").await;
        let _other = turns.wait("b").await;
        let waiting = turns.wait("a");
        tokio::pin!(waiting);
        assert!(
            std::future::poll_fn(|context| std::task::Poll::Ready(
                waiting.as_mut().poll(context).is_pending()
            ))
            .await
        );
        drop(first);
        waiting.await;
        assert_eq!(turns.containers.lock().unwrap().len(), 2);
    }
}
