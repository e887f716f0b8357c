//! Threads that accept connections, and serve requests that need no waiting.
//!
//! Every thread that has to be woken between the runtime's call and the answer delays the pod. So one
//! thread handles a request from its connection to its answer, which wakes the client, as long as nothing
//! has to be waited for and another thread is free to accept the next connection. A request that has to
//! wait (for its turn, a slot or the client) continues as a task of the async runtime, and is carried out
//! on the runtime's blocking threads.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::converse::{self, ConnectionError};
use super::door::{Door, Doorstep, Woken};
use super::duty::Duty;
use super::incoming::{Arrived, Incoming};
use super::server::{Handler, Limits};
use crate::error_chain::Chain;
use crate::own_thread;
use crate::sync::{Mutex, MutexGuard, locked};

/// Number of threads that accept connections. All but one may be serving.
pub const ACCEPTORS: usize = 4;

/// How long a thread waits for the request after accepting a connection. Clients send it without waiting.
const SOON: Duration = Duration::from_millis(20);

/// Delay before the next attempt after accept(2) failed, usually for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A thread logs one of this many consecutive failed attempts.
const SAID: u32 = 10;

/// After this many consecutive failed attempts a thread leaves a listener that is closed, with the
/// connections still in its queue.
const LAST_TRIES: u32 = 20;

/// State shared by the accepting threads.
pub(super) struct Acceptors<H> {
    /// The listener; replaced when the socket's file is lost. `None`: no more connections are accepted.
    door: Mutex<Option<Arc<Door>>>,
    duty: Duty,
    handler: Arc<H>,
    limits: Limits,
    /// Limits connections whose request has not arrived.
    places: Arc<Semaphore>,
    /// Tasks of connections that wait for something.
    waiting: Mutex<JoinSet<()>>,
}

impl<H: Handler> Acceptors<H> {
    pub(super) fn of(door: Arc<Door>, handler: Arc<H>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            door: Mutex::new(Some(door)),
            duty: Duty::of(ACCEPTORS),
            handler,
            limits,
            places: Arc::new(Semaphore::new(limits.unread)),
            waiting: Mutex::default(),
        })
    }

    /// Accepts at the listener `first`, and at those that replace it, until the last one is closed. Runs on
    /// each of [`ACCEPTORS`] blocking threads of the runtime. All of them begin with the same listener: it
    /// may be closed before they run, and the connections in its queue are still served.
    pub(super) fn accept(&self, first: Arc<Door>) {
        let mut at = Some(first);
        while let Some(door) = at {
            self.accept_at(&door);
            // Not in the loop's condition, which would hold the lock while this thread accepts.
            at = self.door().clone();
        }
    }

    /// Accepts until that listener is closed and its queue is empty.
    fn accept_at(&self, door: &Door) {
        let mut step = None;
        let mut failed = 0_u32;
        loop {
            match self.accept_next(door, &mut step) {
                Ok(Woken::Connection) => failed = 0,
                Ok(Woken::Closed) => return,
                Err(error) => {
                    if failed.is_multiple_of(SAID) {
                        tracing::warn!("accept: {error}");
                    }
                    failed = failed.saturating_add(1);
                    if failed >= LAST_TRIES && !self.is_open(door) {
                        return;
                    }
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Sleeps until the listener is readable or closed, and accepts all queued connections. `step`: the
    /// epoll instance of this thread, created at the first call.
    fn accept_next(&self, door: &Door, step: &mut Option<Doorstep>) -> io::Result<Woken> {
        let step = match step {
            Some(step) => step,
            None => step.insert(door.step()?),
        };
        let woken = step.sleep()?;
        while let Some(stream) = door.accept()? {
            self.take(stream);
        }
        Ok(woken)
    }

    /// Whether this listener is the current one, so that it still gets connections.
    fn is_open(&self, door: &Door) -> bool {
        self.door().as_deref().is_some_and(|current| std::ptr::eq(current, door))
    }

    /// Serves one connection: on this thread if it need not wait and another thread can accept the next.
    fn take(&self, stream: UnixStream) {
        if self.places.is_closed() {
            // Dropped, like the waiting connections: see `Acceptors::abort`.
            return;
        }
        let Some(_off_duty) = self.duty.leave() else { return self.wait(stream, Incoming::default()) };
        let mut incoming = Incoming::default();
        match incoming.read_within(&stream, SOON) {
            Ok(Arrived::Nothing) => {}
            Ok(Arrived::Partly) => self.wait(stream, incoming),
            Ok(Arrived::Whole(payload)) => {
                let handler = Arc::clone(&self.handler);
                let mut serving = Box::pin(converse::serve(stream, payload, handler, self.limits));
                let mut context = Context::from_waker(Waker::noop());
                // The next poll registers a real waker: this is only the first poll.
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

    /// Spawns a task that waits for the rest of the request. First blocks until a slot in `places` is free.
    fn wait(&self, stream: UnixStream, incoming: Incoming) {
        let runtime = tokio::runtime::Handle::current();
        // Closed only by `Acceptors::abort`.
        let Ok(place) = runtime.block_on(Arc::clone(&self.places).acquire_owned()) else { return };
        let (handler, limits) = (Arc::clone(&self.handler), self.limits);
        self.go_on(async move { report(converse::receive(stream, incoming, place, handler, limits).await) });
    }

    fn go_on(&self, conversation: impl Future<Output = ()> + Send + 'static) {
        let mut waiting = self.waiting();
        if self.places.is_closed() {
            // Dropped, like the waiting connections: `Acceptors::abort` closes `places` before it takes
            // this lock.
            return;
        }
        waiting.spawn(conversation);
        forget_ended(&mut waiting);
    }

    /// Frees the results of ended tasks: without this call they are only freed at the next connection.
    pub(super) fn forget_ended(&self) {
        forget_ended(&mut self.waiting());
    }

    /// Replaces the listener. Connections in the old one's queue are still served.
    pub(super) fn replace(&self, fresh: Door) {
        let before = self.door().replace(Arc::new(fresh));
        close(before.as_deref());
    }

    /// Closes the listener. Queued connections are still accepted: if they were dropped, their clients
    /// would not know whether their request was carried out. A later client is refused by the kernel, so it
    /// knows.
    pub(super) fn close(&self) {
        let last = self.door().take();
        close(last.as_deref());
    }

    /// Waits until all accepted connections are answered. Called when no thread accepts any more.
    pub(super) async fn answered(&self) {
        let mut waiting = std::mem::take(&mut *self.waiting());
        while let Some(ended) = waiting.join_next().await {
            own_thread::joined(ended);
        }
    }

    /// Aborts the waiting connections.
    pub(super) fn abort(&self) {
        self.close();
        self.places.close();
        self.waiting().abort_all();
    }

    fn door(&self) -> MutexGuard<'_, Option<Arc<Door>>> {
        locked(&self.door)
    }

    fn waiting(&self) -> MutexGuard<'_, JoinSet<()>> {
        locked(&self.waiting)
    }
}

fn forget_ended(waiting: &mut JoinSet<()>) {
    while let Some(ended) = waiting.try_join_next() {
        own_thread::joined(ended);
    }
}

/// Refuses further connections to a listener.
fn close(door: Option<&Door>) {
    if let Some(Err(error)) = door.map(Door::close) {
        tracing::error!(error = %Chain(&error), "end a listening socket");
    }
}

fn report(served: Result<(), ConnectionError>) {
    if let Err(error) = served {
        tracing::warn!("client: {}", Chain(&error));
    }
}
