//! Threads that accept connections, and serve what can be served at once.
//!
//! A pod waits for every thread that has to be woken between its runtime's call and the answer. So a request is one thread's from
//! its connection to its answer, which the client is woken by: as long as nothing has to be waited for, and another thread is
//! there to accept the next. What has to wait, for its turn, a place or a client, goes on in the runtime, and is carried out on
//! its blocking threads.

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

/// Threads that accept connections. All but one may be serving.
pub const ACCEPTORS: usize = 4;

/// How long a request may take behind its connection: it is sent without waiting.
const SOON: Duration = Duration::from_millis(20);

/// Delay before the next attempt after accept(2) failed, usually for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Of so many failed attempts of a thread in a row the log has one.
const SAID: u32 = 10;

/// After so many failed attempts in a row a door that is closed is left, with those who had connected.
const LAST_TRIES: u32 = 20;

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

    /// Accepts at that door, and at those that take its place, until the last one is closed. For one of [`ACCEPTORS`] blocking
    /// threads of the runtime, all of which begin at the same door: it may be closed before they run, and who had connected is
    /// served.
    pub(super) fn accept(&self, first: Arc<Door>) {
        let mut at = Some(first);
        while let Some(door) = at {
            self.accept_at(&door);
            // Not the condition of the loop, which would hold the lock as long as this thread accepts.
            at = self.door().clone();
        }
    }

    /// Accepts until that door is closed, and all who had connected have been accepted.
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

    /// Sleeps until there is something to do, and accepts all who have connected. `step`: where this thread sleeps, once it does.
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

    /// Whether connections are accepted at that door from now on as well.
    fn is_open(&self, door: &Door) -> bool {
        self.door().as_deref().is_some_and(|current| std::ptr::eq(current, door))
    }

    /// Serves one connection: here, if it can be served at once and another thread accepts the next.
    fn take(&self, stream: UnixStream) {
        if self.places.is_closed() {
            // Given up, as whoever waits.
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
        if self.places.is_closed() {
            // Given up, as those that wait: see `Acceptors::abort`, which closes them before it has this lock.
            return;
        }
        waiting.spawn(conversation);
        forget_ended(&mut waiting);
    }

    /// Frees what those have left behind who have been answered: nobody may come for long.
    pub(super) fn forget_ended(&self) {
        forget_ended(&mut self.waiting());
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
            own_thread::joined(ended);
        }
    }

    /// Gives up those who wait.
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

/// Has nobody connect any more.
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
