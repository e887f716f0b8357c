//! Threads that accept connections, and serve what can be served at once.
//!
//! A pod waits for every thread that has to be woken between its runtime's call and the answer. So a request is one thread's from
//! its connection to its answer, which the client is woken by: as long as nothing has to be waited for, and another thread is
//! there to accept the next. What has to wait, for its turn, a place or a client, goes on in the runtime, and is carried out on
//! its blocking threads.

use std::io;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};

use super::converse::{self, ConnectionError};
use super::door::{Door, Woken};
use super::duty::Duty;
use super::incoming::{Arrived, Incoming};
use super::server::{Handler, Limits};
use crate::error_chain::Chain;
use crate::own_thread;

/// Threads that accept connections. All but one may be serving.
pub const ACCEPTORS: usize = 4;

/// How long a request may take behind its connection: it is sent without waiting.
const SOON: Duration = Duration::from_millis(20);

/// Delay before the next attempt after accept(2) failed, usually for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What all of them share.
pub(super) struct Acceptors<H> {
    /// Another takes its place when the socket's file is lost. `None`: no more connections are accepted.
    door: Mutex<Option<Arc<Door>>>,
    duty: Duty,
    handler: Arc<H>,
    limits: Limits,
    /// For connections whose request has not arrived.
    places: Arc<Semaphore>,
    /// Connections that wait for something.
    waiting: Mutex<JoinSet<()>>,
}

impl<H: Handler> Acceptors<H> {
    pub(super) fn of(door: Door, handler: Arc<H>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            door: Mutex::new(Some(Arc::new(door))),
            duty: Duty::of(ACCEPTORS),
            handler,
            limits,
            places: Arc::new(Semaphore::new(limits.unread)),
            waiting: Mutex::default(),
        })
    }

    /// Accepts until the door is closed. For one of [`ACCEPTORS`] blocking threads of the runtime.
    pub(super) fn accept(&self) {
        while let Some(door) = self.door().clone() {
            if let Err(error) = self.accept_at(&door) {
                tracing::warn!("accept: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    /// Accepts until that door is closed, and all who had connected have been accepted.
    fn accept_at(&self, door: &Door) -> io::Result<()> {
        let step = door.step()?;
        loop {
            let woken = step.sleep()?;
            while let Some(stream) = door.accept()? {
                // A panic ends that client's connection, and this thread goes on.
                if catch_unwind(AssertUnwindSafe(|| self.take(stream))).is_err() {
                    tracing::error!("a request was not answered: its thread panicked");
                }
            }
            if woken == Woken::Closed {
                return Ok(());
            }
        }
    }

    /// Serves one connection: here, if it can be served at once and another thread accepts the next.
    fn take(&self, stream: UnixStream) {
        let Some(_off_duty) = self.duty.leave() else { return self.wait(stream, Incoming::default()) };
        let mut incoming = Incoming::default();
        match incoming.read_within(&stream, SOON) {
            Ok(Arrived::Nothing) => {}
            Ok(Arrived::Partly) => self.wait(stream, incoming),
            Ok(Arrived::Whole(payload)) => {
                let handler = Arc::clone(&self.handler);
                let mut serving = Box::pin(converse::serve(stream, payload, handler, self.limits));
                let mut context = Context::from_waker(Waker::noop());
                // Whoever polls it next is woken: this is its first time only.
                match own_thread::serving(|| serving.as_mut().poll(&mut context)) {
                    Poll::Ready(served) => report(served),
                    Poll::Pending => self.go_on(async move { report(serving.await) }),
                }
            }
            Err(error) => {
                let answer = self.limits.answer;
                self.go_on(async move { report(converse::refuse(stream, error, answer).await) });
            }
        }
    }

    /// Has the runtime wait for the rest of the request. Waits itself for a place first.
    fn wait(&self, stream: UnixStream, incoming: Incoming) {
        let runtime = tokio::runtime::Handle::current();
        // Closed only by `Acceptors::abort`.
        let Ok(place) = runtime.block_on(Arc::clone(&self.places).acquire_owned()) else { return };
        let (handler, limits) = (Arc::clone(&self.handler), self.limits);
        self.go_on(async move { report(converse::receive(stream, incoming, place, handler, limits).await) });
    }

    fn go_on(&self, conversation: impl Future<Output = ()> + Send + 'static) {
        let mut waiting = self.waiting();
        waiting.spawn(conversation);
        while let Some(ended) = waiting.try_join_next() {
            report_panic(ended);
        }
    }

    /// Listens on another socket. Who has connected to the one before is served.
    pub(super) fn replace(&self, fresh: Door) {
        let before = self.door().replace(Arc::new(fresh));
        close(before.as_deref());
    }

    /// Accepts those who have connected, and then nobody: closed, they would not know what became of their request. Whoever comes
    /// later is refused, and knows that.
    pub(super) fn close(&self) {
        let last = self.door().take();
        close(last.as_deref());
    }

    /// Waits until all who have been accepted are answered. Nobody accepts any more.
    pub(super) async fn answered(&self) {
        let mut waiting = std::mem::take(&mut *self.waiting());
        while let Some(ended) = waiting.join_next().await {
            report_panic(ended);
        }
    }

    /// Gives up those who wait.
    pub(super) fn abort(&self) {
        self.close();
        self.places.close();
        self.waiting().abort_all();
    }

    fn door(&self) -> MutexGuard<'_, Option<Arc<Door>>> {
        // A poisoned lock is usable: every change is one assignment.
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, JoinSet<()>> {
        // As above: tokio keeps its set whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has nobody connect any more.
fn close(door: Option<&Door>) {
    if let Some(Err(error)) = door.map(Door::close) {
        tracing::error!(%error, "end a listening socket");
    }
}

fn report(served: Result<(), ConnectionError>) {
    if let Err(error) = served {
        tracing::warn!("client: {}", Chain(&error));
    }
}

/// A panic in a request closes that client's connection and affects no other.
pub(super) fn report_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!("a request was not answered: {error}");
    }
}
