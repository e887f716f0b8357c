//! Locks and threads, by names that a model checker can stand behind.
//!
//! What several threads share takes these from here. With the feature `model`, which only tests enable, they are
//! shuttle's: a run then tries one order of the threads after another (`model`).

#[cfg(not(feature = "model"))]
pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
#[cfg(not(feature = "model"))]
pub(crate) use std::thread;

#[cfg(feature = "model")]
pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard};
#[cfg(feature = "model")]
pub(crate) use shuttle::thread;

pub(crate) use std::sync::PoisonError;

/// Locks what is never left half changed: whoever panicked while holding it had changed nothing or all.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A step that others see, such as a call of the system: under the model checker any other thread may run before it.
pub(crate) fn step() {
    #[cfg(feature = "model")]
    shuttle::thread::yield_now();
}
