//! Runs blocking work: on the thread that serves the request, if that thread serves nothing else, and otherwise on
//! another thread.

use std::cell::Cell;

use tokio::task::JoinError;

thread_local! {
    /// Whether this thread serves one request and nothing else.
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Runs `serve` on a thread that its requests have for themselves: blocking there delays no other work.
pub(crate) fn serving<T>(serve: impl FnOnce() -> T) -> T {
    IS_OWN.set(true);
    let served = serve();
    IS_OWN.set(false);
    served
}

/// The agent is shutting down: work for another thread is not done.
#[derive(Debug, thiserror::Error)]
#[error("the agent is shutting down")]
pub(crate) struct Ending;

/// Runs blocking work: netlink, files and other plugins.
///
/// # Errors
/// [`Ending`].
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Ending> {
    if IS_OWN.get() {
        return Ok(work());
    }
    joined(tokio::task::spawn_blocking(work).await).ok_or(Ending)
}

/// Returns the result of a task or a thread of the runtime; `None`: it was cancelled, or the runtime ends. A panic
/// ends the agent (`docs/decisions/0047-a-panic-ends-the-agent.md`); in tests, where it unwinds, the panic continues
/// in the waiting caller.
pub(crate) fn joined<T>(ended: Result<T, JoinError>) -> Option<T> {
    match ended {
        Ok(done) => Some(done),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => None,
    }
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
    async fn a_panic_goes_on_in_who_waits_and_what_is_given_up_has_no_result() {
        let waits = tokio::spawn(blocking(|| -> u32 { panic!("a panic of the test") }));
        let panic = waits.await.unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a panic of the test"));
        let given_up = tokio::spawn(std::future::pending::<u32>());
        given_up.abort();
        assert_eq!(joined(given_up.await), None);
        assert_eq!(joined(tokio::spawn(async { 7 }).await), Some(7));
    }
}
