//! One operation at a time for each container, and none at all during GC.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{
    Mutex as AsyncMutex, OwnedMutexGuard, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock,
};

/// Hands out turns. A container's attachments never overlap; different containers do not wait for each other. GC
/// waits for all that began before it, and what comes after it waits for GC.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Shared by the containers' operations.
    everything: Arc<RwLock<()>>,
    containers: Mutex<HashMap<String, Weak<AsyncMutex<()>>>>,
}

/// A container's turn. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _container: OwnedMutexGuard<()>,
    _not_gc: OwnedRwLockReadGuard<()>,
}

impl Turns {
    /// Waits for the turn of GC: no other operation runs until the guard is dropped.
    pub(super) async fn wait_for_all(&self) -> OwnedRwLockWriteGuard<()> {
        Arc::clone(&self.everything).write_owned().await
    }

    /// Waits for the container's turn, in the order of asking.
    pub(super) async fn wait(&self, container_id: &str) -> Turn {
        // First this one: a container's turn is then never held by who waits for GC.
        let not_gc = Arc::clone(&self.everything).read_owned().await;
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
        Turn { _container: turn.lock_owned().await, _not_gc: not_gc }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_pending<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        let mut future = future;
        std::future::poll_fn(|context| std::task::Poll::Ready(future.as_mut().poll(context).is_pending()))
            .await
    }

    /// Rows: ADD-09, GCC-08.
    #[tokio::test]
    async fn gc_runs_alone_and_in_its_turn() {
        let turns = Turns::default();
        let before = turns.wait("a").await;
        let gc = turns.wait_for_all();
        tokio::pin!(gc);
        assert!(is_pending(gc.as_mut()).await);
        let after = turns.wait("b");
        tokio::pin!(after);
        assert!(is_pending(after.as_mut()).await, "what comes after GC waits for it");
        drop(before);
        let gc = gc.await;
        assert!(is_pending(after.as_mut()).await);
        drop(gc);
        after.await;
    }

    /// Rows: ADD-09.
    #[tokio::test]
    async fn one_container_waits_and_another_does_not() {
        let turns = Turns::default();
        let first = turns.wait("a").await;
        let _other = turns.wait("b").await;
        let waiting = turns.wait("a");
        tokio::pin!(waiting);
        assert!(is_pending(waiting.as_mut()).await);
        drop(first);
        waiting.await;
        assert_eq!(turns.containers.lock().unwrap().len(), 2);
    }
}
