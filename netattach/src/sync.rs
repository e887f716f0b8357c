//! Locks and threads, under names that a model checker can replace.
//!
//! Code shared by several threads uses these. With the feature `model`, which only tests enable, they are shuttle's: a
//! run then tries one order of the threads after another (`model`).

#[cfg(not(feature = "model"))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(feature = "model"))]
pub(crate) use std::thread;

#[cfg(feature = "model")]
pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(feature = "model")]
pub(crate) use shuttle::thread;

pub(crate) use std::sync::PoisonError;
use std::sync::TryLockError;

/// Locks data. No lock of the product is ever poisoned: a panic ends the agent
/// (`docs/decisions/0047-a-panic-ends-the-agent.md`). In tests, where a panic unwinds, other threads continue with
/// the data as the panicking thread has left it.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks data like [`locked`]; `None`: another thread still holds the lock at `due`.
pub(crate) fn locked_until<T>(mutex: &Mutex<T>, due: std::time::Instant) -> Option<MutexGuard<'_, T>> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if std::time::Instant::now() >= due => return None,
            Err(TryLockError::WouldBlock) => pause(std::time::Duration::from_millis(1)),
        }
    }
}

/// Waits for about this duration for another thread or process; under the model checker, until other threads have
/// run.
pub(crate) fn pause(time: std::time::Duration) {
    #[cfg(feature = "model")]
    let _ = time;
    #[cfg(feature = "model")]
    shuttle::thread::yield_now();
    #[cfg(not(feature = "model"))]
    thread::sleep(time);
}

/// Returns the output of a future, if it completes by `due`. Under the model checker no time passes: a later deadline
/// is never reached.
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

/// A step visible to other threads, such as a system call: under the model checker any other thread may run before it.
pub(crate) fn step() {
    // Not a yield: the checker would prefer other threads after it.
    #[cfg(feature = "model")]
    thread::sleep(std::time::Duration::ZERO);
}
