//! Locks and threads, by names that a model checker can stand behind.
//!
//! What several threads share takes these from here. With the feature `model`, which only tests enable, they are
//! shuttle's: a run then tries one order of the threads after another (`model`).

#[cfg(not(feature = "model"))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(feature = "model"))]
pub(crate) use std::thread;

#[cfg(feature = "model")]
pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(feature = "model")]
pub(crate) use shuttle::thread;

pub(crate) use std::sync::PoisonError;

/// Locks what is never left half changed: whoever panicked while holding it had changed nothing or all.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for somebody else, for about that long; under the model checker until others have had their turn.
pub(crate) fn pause(time: std::time::Duration) {
    #[cfg(feature = "model")]
    let _ = time;
    #[cfg(feature = "model")]
    shuttle::thread::yield_now();
    #[cfg(not(feature = "model"))]
    thread::sleep(time);
}

/// What a future comes to until then, if it does. Under the model checker no time passes: what is due later never is.
pub(crate) async fn until<F: Future>(due: std::time::Instant, future: F) -> Option<F::Output> {
    #[cfg(not(feature = "model"))]
    return tokio::time::timeout_at(due.into(), future).await.ok();
    #[cfg(feature = "model")]
    {
        let mut future = std::pin::pin!(future);
        let is_due = due <= std::time::Instant::now();
        std::future::poll_fn(|context| match future.as_mut().poll(context) {
            std::task::Poll::Pending if is_due => std::task::Poll::Ready(None),
            polled => polled.map(Some),
        })
        .await
    }
}

/// A step that others see, such as a call of the system: under the model checker any other thread may run before it.
pub(crate) fn step() {
    // Not a yield: the checker would prefer others after it.
    #[cfg(feature = "model")]
    thread::sleep(std::time::Duration::ZERO);
}
