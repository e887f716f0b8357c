//! Work that blocks, on a thread that may: on the thread that serves the request, if one does nothing else, and otherwise on one
//! that is woken for it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Whether this thread serves one request and nothing else.
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Runs `serve`, whose requests have this thread for themselves: what blocks there delays nobody else.
pub(crate) fn serving<T>(serve: impl FnOnce() -> T) -> T {
    /// Also when `serve` panics.
    struct Ends;

    impl Drop for Ends {
        fn drop(&mut self) {
            IS_OWN.set(false);
        }
    }

    IS_OWN.set(true);
    let _ends = Ends;
    serve()
}

/// Work on a blocking thread has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoResult {
    /// It has panicked, which the panic hook has reported.
    #[error("{0}")]
    Panicked(String),
    /// The agent ends.
    #[error("the agent is shutting down")]
    Ending,
}

/// Runs work that blocks: netlink, files and other plugins do.
///
/// # Errors
/// [`NoResult`].
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoResult> {
    if IS_OWN.get() {
        // What panics leaves behind is as if it had panicked on a thread of its own.
        let worked = catch_unwind(AssertUnwindSafe(work));
        return worked.map_err(|_| NoResult::Panicked("the request's thread panicked".to_owned()));
    }
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        if error.is_cancelled() { NoResult::Ending } else { NoResult::Panicked(error.to_string()) }
    })
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn work_is_done_on_the_own_thread_of_a_request_and_elsewhere_on_another() {
        let here = thread::current().id();
        let current = || thread::current().id();
        assert_ne!(blocking(current).await.unwrap(), here);
        let mut polled = Box::pin(blocking(current));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let std::task::Poll::Ready(done) = serving(|| polled.as_mut().poll(&mut context)) else {
            panic!("it is done at once")
        };
        assert_eq!(done.unwrap(), here);
        assert_ne!(blocking(current).await.unwrap(), here, "the thread is others' again");
    }

    #[tokio::test]
    async fn work_that_panics_has_no_result_wherever_it_is_done() {
        let panics = || -> u32 { panic!("a panic of the test") };
        assert!(matches!(blocking(panics).await, Err(NoResult::Panicked(_))));
        let mut polled = Box::pin(blocking(panics));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let polled = serving(|| polled.as_mut().poll(&mut context));
        assert!(matches!(polled, std::task::Poll::Ready(Err(NoResult::Panicked(_)))));
        assert!(!IS_OWN.get());
    }
}
