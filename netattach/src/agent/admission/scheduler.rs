//! Suspends and wakes operations, as [`turns`](super::turns) and [`lanes`](super::lanes) decide.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use super::lanes::{Class, Full, Lanes, Limits, Ticket};
use super::turns::{Asker, Order};
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError, locked};
use crate::waits::{Crowded, Footprint, Place, Resource};

/// Most DELs that work at a time. They mostly wait for the kernel, and concurrent DELs share its grace periods, so
/// there may be many; ADDs never wait for them.
const PARALLEL_DELS: usize = 64;

/// Most CHECKs that work at a time.
const PARALLEL_CHECKS: usize = 4;

/// The limits of all operations: see docs/architecture.md, Threads and locks.
pub(in crate::agent) const fn limits(parallel_adds: usize) -> [Limits; 3] {
    [
        Limits {
            working: parallel_adds,
            standing: parallel_adds,
            shared: parallel_adds + 40,
            begun: parallel_adds + 88,
            queued: MOST_ADDS,
        },
        Limits { working: PARALLEL_DELS, standing: 32, shared: 64, begun: 96, queued: MOST_DELS },
        Limits { working: PARALLEL_CHECKS, standing: 4, shared: 8, begun: 16, queued: MOST_CHECKS },
    ]
}

/// Most ADDs that may wait or run; further ones are refused at once.
pub(super) const MOST_ADDS: usize = 512;
/// Most DELs that may wait or run.
pub(in crate::agent) const MOST_DELS: usize = 1024;
/// Most CHECKs that may wait or run.
pub(super) const MOST_CHECKS: usize = 128;

/// Most threads that all operations together may occupy.
pub(in crate::agent) const fn most_threads(parallel_adds: usize) -> usize {
    let [adds, dels, checks] = limits(parallel_adds);
    adds.begun + dels.begun + checks.begun
}

/// Hands out turns. Operations on one container never overlap; different containers do not wait for each other.
#[derive(Debug, Default)]
pub(in crate::agent) struct Turns(Mutex<Asking>);

#[derive(Debug, Default)]
struct Asking {
    order: Order,
    waiting: HashMap<Asker, oneshot::Sender<()>>,
    /// Operations that have sent their answer and hold their turn only for work that other operations need
    /// not wait for, and the agent's own checks.
    finishing: HashSet<Asker>,
    /// Operations that are detaching their container.
    taking_back: HashMap<Asker, TakingBack>,
    /// The containers that had or asked for a turn since [`Turns::watch`].
    watched: Option<HashSet<String>>,
}

/// A container that is being detached.
#[derive(Debug)]
struct TakingBack {
    container: String,
    since: Instant,
    /// The operations that wait for its end, including those that have given up.
    waiting: Vec<oneshot::Sender<()>>,
}

/// A container whose detachment others wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Awaited {
    pub(in crate::agent) container: String,
    /// How long its detachment has taken so far.
    pub(in crate::agent) lasts: Duration,
    /// Number of operations that wait.
    pub(in crate::agent) waiting: usize,
}

/// A container's turn. Dropping it ends the turn.
#[derive(Debug)]
pub(in crate::agent) struct Turn {
    turns: Arc<Turns>,
    container: String,
    asker: Asker,
}

/// Records which containers' turns are taken, until it is dropped.
#[derive(Debug)]
pub(in crate::agent) struct Watch(Arc<Turns>);

impl Turns {
    /// Waits for the container's turn, in the order of requests.
    pub(in crate::agent) async fn wait(self: &Arc<Self>, container: &str) -> Turn {
        let (turn, granted) = {
            let mut asking = self.lock();
            asking.note(container);
            self.ask(&mut asking, container)
        };
        given(turn, granted).await
    }

    fn ask(self: &Arc<Self>, asking: &mut Asking, container: &str) -> (Turn, Option<oneshot::Receiver<()>>) {
        let (asker, has_it) = asking.order.ask(container);
        let granted = (!has_it).then(|| {
            let (grant, granted) = oneshot::channel();
            asking.waiting.insert(asker, grant);
            granted
        });
        (Turn { turns: Arc::clone(self), container: container.to_owned(), asker }, granted)
    }

    /// Returns the container's turn, if it is free.
    pub(in crate::agent) fn take(self: &Arc<Self>, container: &str) -> Option<Turn> {
        let asker = self.lock().order.ask_if_free(container)?;
        Some(Turn { turns: Arc::clone(self), container: container.to_owned(), asker })
    }

    /// As [`Turns::take`], for a check of the agent or a repair after it: it ends soon, and does not count
    /// as a request for the container. A [`Watch`] waits for its end, as for an operation that has
    /// answered.
    pub(in crate::agent) fn look(self: &Arc<Self>, container: &str) -> Option<Turn> {
        let mut asking = self.lock();
        let asker = asking.order.ask_if_free(container)?;
        asking.finishing.insert(asker);
        Some(Turn { turns: Arc::clone(self), container: container.to_owned(), asker })
    }

    /// As [`Turn::finish`], for the thread that carries out the operation with the container's turn: a
    /// client that has the answer may ask for a GC before the turn's owner runs again.
    pub(in crate::agent) fn finish(&self, container: &str) {
        let mut asking = self.lock();
        if let Some(holder) = asking.order.holder(container) {
            asking.finishing.insert(holder);
        }
    }

    /// Returns the containers that are being detached in their turns.
    pub(in crate::agent) fn leaving(&self) -> Vec<String> {
        self.lock().taking_back.values().map(|it| it.container.clone()).collect()
    }

    /// Completes when the operation that is detaching the container ends, successful or not. `None`: no operation is.
    pub(in crate::agent) fn departure(&self, container: &str) -> Option<impl Future<Output = ()> + use<>> {
        let mut asking = self.lock();
        let taking_back = asking.taking_back.values_mut().find(|it| it.container == container)?;
        let (grant, gone) = oneshot::channel();
        // Removes ADDs that have given up waiting.
        taking_back.waiting.retain(|waiting| !waiting.is_closed());
        taking_back.waiting.push(grant);
        // The sender is dropped with the turn.
        Some(async move { drop(gone.await) })
    }

    /// Returns the containers whose detachment others wait for.
    pub(super) fn awaited(&self) -> Vec<Awaited> {
        let asking = self.lock();
        let awaited = asking.taking_back.values().map(|it| Awaited {
            container: it.container.clone(),
            lasts: it.since.elapsed(),
            waiting: it.waiting.iter().filter(|waiting| !waiting.is_closed()).count(),
        });
        awaited.filter(|it| it.waiting > 0).collect()
    }

    /// Returns for how long a container has been in detachment. `None`: it is not being detached.
    pub(in crate::agent) fn detaching_for(&self, container: &str) -> Option<Duration> {
        let asking = self.lock();
        asking.taking_back.values().find(|it| it.container == container).map(|it| it.since.elapsed())
    }

    /// Starts recording which containers have or ask for a turn. One watch at a time.
    pub(in crate::agent) fn watch(self: &Arc<Self>) -> Watch {
        let mut asking = self.lock();
        let busy = asking.order.containers(&asking.finishing).map(str::to_owned).collect();
        asking.watched = Some(busy);
        Watch(Arc::clone(self))
    }

    fn lock(&self) -> MutexGuard<'_, Asking> {
        locked(&self.0)
    }
}

impl Asking {
    fn note(&mut self, container: &str) {
        if let Some(watched) = self.watched.as_mut().filter(|watched| !watched.contains(container)) {
            watched.insert(container.to_owned());
        }
    }
}

async fn given(turn: Turn, granted: Option<oneshot::Receiver<()>>) -> Turn {
    if let Some(granted) = granted {
        // The sender is dropped only with this turn.
        let _ = granted.await;
    }
    turn
}

impl Turn {
    /// Marks this turn as one that detaches the container: operations that need its resources may wait for the end.
    pub(in crate::agent) fn rolls_back(&self) {
        let mut asking = self.turns.lock();
        let container = self.container.clone();
        let taking_back = TakingBack { container, since: Instant::now(), waiting: Vec::new() };
        asking.taking_back.insert(self.asker, taking_back);
    }

    /// The operation is about to be answered: no other operation needs to wait for the work that is left.
    pub(in crate::agent) fn finish(&self) {
        self.turns.lock().finishing.insert(self.asker);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut asking = self.turns.lock();
        asking.finishing.remove(&self.asker);
        asking.taking_back.remove(&self.asker);
        asking.waiting.remove(&self.asker);
        if let Some(next) = asking.order.leave(&self.container, self.asker)
            && let Some(grant) = asking.waiting.remove(&next)
        {
            // If the waiting task was cancelled, the dropped turn frees itself.
            let _ = grant.send(());
        }
    }
}

impl Watch {
    /// The containers that had a turn or asked for one since the watch began.
    pub(in crate::agent) fn seen(&self) -> HashSet<String> {
        self.0.lock().watched.clone().unwrap_or_default()
    }

    /// Takes the turn of a container that was not requested since the watch began. Waits only for
    /// operations that are finishing, and for checks.
    pub(in crate::agent) async fn take(&self, container: &str) -> Option<Turn> {
        let (turn, granted) = {
            let mut asking = self.0.lock();
            if asking.watched.as_ref().is_some_and(|watched| watched.contains(container)) {
                return None;
            }
            self.0.ask(&mut asking, container)
        };
        Some(given(turn, granted).await)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.lock().watched = None;
    }
}

/// The lanes of all operations, with the threads and tasks that wait in them.
#[derive(Debug)]
pub(in crate::agent) struct Traffic {
    state: Mutex<State>,
    /// Notifies when an operation leaves a resource.
    left: Notify,
}

#[derive(Debug)]
struct State {
    lanes: Lanes,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
    /// When each operation arrived at its resource.
    since: HashMap<Ticket, Instant>,
    /// Sleeping threads whose operation may not continue yet, each with its own condition variable: in a
    /// burst most begun operations sleep, and each of them passes several resources.
    asleep: HashMap<Ticket, Arc<Condvar>>,
}

/// An operation's slot in the lanes. Dropping it leaves the lanes.
#[derive(Debug)]
pub(in crate::agent) struct Slot {
    traffic: Arc<Traffic>,
    class: Class,
    ticket: Ticket,
    sent_back: AtomicBool,
}

/// A resource closed to other operations until this is dropped.
#[derive(Debug)]
pub(in crate::agent) struct Closed {
    traffic: Arc<Traffic>,
    resource: Resource,
}

/// A resource that operations have occupied for a while, or wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::agent) struct Held {
    pub(in crate::agent) resource: Resource,
    pub(in crate::agent) standing: usize,
    pub(in crate::agent) waiting: usize,
    /// How long the first operation has occupied it or waited for it to be opened.
    pub(in crate::agent) longest: Duration,
}

impl Traffic {
    pub(in crate::agent) fn new(parallel_adds: usize) -> Arc<Self> {
        let state = State {
            lanes: Lanes::new(limits(parallel_adds)),
            waiting: HashMap::new(),
            since: HashMap::new(),
            asleep: HashMap::new(),
        };
        Arc::new(Self { state: Mutex::new(state), left: Notify::new() })
    }

    /// Enters the queue of that class.
    ///
    /// # Errors
    /// [`Full`].
    pub(in crate::agent) fn enter(self: &Arc<Self>, class: Class) -> Result<Arc<Slot>, Full> {
        let ticket = self.lock().lanes.enter(class)?;
        let slot = Slot { traffic: Arc::clone(self), class, ticket, sent_back: AtomicBool::new(false) };
        Ok(Arc::new(slot))
    }

    /// Waits until no operation occupies the resource, then closes it to all. Operations do not wait for
    /// this caller meanwhile. `None`: the resource was not free in time.
    pub(in crate::agent) async fn close(
        self: &Arc<Self>,
        resource: &Resource,
        until: Instant,
    ) -> Option<Closed> {
        loop {
            // Registered before the check, so that an operation that leaves in between is not missed.
            let mut left = std::pin::pin!(self.left.notified());
            left.as_mut().enable();
            {
                let mut state = self.lock();
                if state.lanes.is_clear(resource) && state.lanes.close(resource) {
                    return Some(Closed { traffic: Arc::clone(self), resource: resource.clone() });
                }
            }
            crate::sync::until(until, left).await?;
        }
    }

    /// Whether no operation of the class works or waits to begin.
    pub(in crate::agent) fn is_at_rest(&self, class: Class) -> bool {
        self.lock().lanes.is_at_rest(class)
    }

    /// Returns the resources that operations have occupied for longer than `longer_than`, with the
    /// operations that wait for them.
    pub(in crate::agent) fn held(&self, longer_than: Duration) -> Vec<Held> {
        let state = self.lock();
        let rows = state.lanes.held().into_iter().map(|held| {
            let there = held.standing.iter().chain(&held.at_door);
            let since = there.filter_map(|ticket| state.since.get(ticket));
            Held {
                resource: held.resource,
                standing: held.standing.len(),
                waiting: held.at_door.len() + held.queued,
                longest: since.map(Instant::elapsed).max().unwrap_or_default(),
            }
        });
        rows.filter(|held| held.longest > longer_than).collect()
    }

    /// Wakes the operations that may continue.
    fn advance(&self, state: &mut State, class: Class) {
        for ticket in state.lanes.advance(class) {
            match state.waiting.remove(&ticket) {
                // If the waiting task was cancelled, the dropped slot leaves by itself.
                Some(grant) => drop(grant.send(())),
                None => state.wake(ticket),
            }
        }
    }

    fn sleep_until_it_may_work<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        ticket: Ticket,
    ) -> MutexGuard<'a, State> {
        let woken = Arc::new(Condvar::new());
        state.asleep.insert(ticket, Arc::clone(&woken));
        while !state.lanes.may_work(ticket) {
            state = woken.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.asleep.remove(&ticket);
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}

impl State {
    /// Wakes the operation's thread if it sleeps.
    fn wake(&self, ticket: Ticket) {
        if let Some(woken) = self.asleep.get(&ticket) {
            woken.notify_all();
        }
    }
}

impl Slot {
    /// Waits until the operation may begin. Must be called again after the operation was sent back.
    pub(in crate::agent) async fn begin(&self) {
        self.sent_back.store(false, Ordering::Relaxed);
        let granted = {
            let mut state = self.traffic.lock();
            self.traffic.advance(&mut state, self.class);
            if state.lanes.may_work(self.ticket) {
                return;
            }
            let (grant, granted) = oneshot::channel();
            state.waiting.insert(self.ticket, grant);
            granted
        };
        // The sender is dropped only with this slot.
        let _ = granted.await;
    }

    /// Whether the operation was sent back to the queue since it began.
    pub(in crate::agent) fn was_sent_back(&self) -> bool {
        self.sent_back.load(Ordering::Relaxed)
    }
}

impl Place for Slot {
    fn admit(&self, needs: &Footprint) -> Result<(), Crowded> {
        let mut state = self.traffic.lock();
        if state.lanes.admit(self.ticket, needs) {
            return Ok(());
        }
        self.sent_back.store(true, Ordering::Relaxed);
        self.traffic.advance(&mut state, self.class);
        Err(Crowded)
    }

    fn arrive(&self, resource: &Resource) {
        let mut state = self.traffic.lock();
        let is_open = state.lanes.arrive(self.ticket, resource);
        state.since.insert(self.ticket, Instant::now());
        self.traffic.advance(&mut state, self.class);
        if !is_open {
            drop(self.traffic.sleep_until_it_may_work(state, self.ticket));
        }
    }

    fn depart(&self) {
        let mut state = self.traffic.lock();
        let has_place = state.lanes.depart(self.ticket);
        state.since.remove(&self.ticket);
        self.traffic.advance(&mut state, self.class);
        // Notified before waiting for a slot: the operation has left the resource already.
        self.traffic.left.notify_waiters();
        if !has_place {
            drop(self.traffic.sleep_until_it_may_work(state, self.ticket));
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.traffic.lock();
        state.lanes.leave(self.ticket);
        state.waiting.remove(&self.ticket);
        state.since.remove(&self.ticket);
        self.traffic.advance(&mut state, self.class);
        drop(state);
        self.traffic.left.notify_waiters();
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        let mut state = self.traffic.lock();
        for ticket in state.lanes.open(&self.resource) {
            state.wake(ticket);
        }
        for class in Class::ALL {
            self.traffic.advance(&mut state, class);
        }
        drop(state);
        self.traffic.left.notify_waiters();
    }
}

#[cfg(test)]
#[cfg(feature = "model")]
mod model;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waits::{at, within};

    async fn is_pending<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        let mut future = future;
        std::future::poll_fn(|context| std::task::Poll::Ready(future.as_mut().poll(context).is_pending()))
            .await
    }

    /// Rows: ADD-09.
    #[tokio::test]
    async fn one_container_waits_and_another_does_not() {
        let turns = Arc::new(Turns::default());
        let first = turns.wait("a").await;
        let _other = turns.wait("b").await;
        {
            let given_up = turns.wait("a");
            tokio::pin!(given_up);
            assert!(is_pending(given_up.as_mut()).await);
        }
        let waiting = turns.wait("a");
        tokio::pin!(waiting);
        assert!(is_pending(waiting.as_mut()).await);
        assert!(turns.take("a").is_none() && turns.take("c").is_some());
        drop(first);
        waiting.await;
        assert_eq!(turns.lock().order.containers(&HashSet::new()).collect::<Vec<_>>(), ["b"]);
    }

    /// Rows: GCC-08.
    #[tokio::test]
    async fn a_watch_sees_whoever_had_a_turn_since() {
        let turns = Arc::new(Turns::default());
        let before = turns.wait("before").await;
        let answered = turns.wait("answered").await;
        answered.finish();
        let watch = turns.watch();
        drop(before);
        drop(turns.wait("since").await);
        assert_eq!(watch.seen(), ["before", "since"].map(str::to_owned).into());
        assert!(watch.take("since").await.is_none() && watch.take("never").await.is_some());
        {
            let finished = watch.take("answered");
            tokio::pin!(finished);
            assert!(is_pending(finished.as_mut()).await);
            drop(answered);
            assert!(finished.await.is_some());
        }
        drop(watch);
        let answering = turns.wait("answering").await;
        turns.finish("answering");
        turns.finish("nobody's");
        let watch = turns.watch();
        assert!(watch.seen().is_empty());
        drop(answering);
        drop(watch);
        assert!(turns.lock().finishing.is_empty());
        assert!(turns.lock().watched.is_none());
    }

    /// A check is no request of the runtime, so its container counts as in use only if the runtime says so.
    #[tokio::test]
    async fn a_look_makes_no_container_busy_and_a_watch_waits_for_its_end() {
        let turns = Arc::new(Turns::default());
        let before = turns.look("before").unwrap();
        let watch = turns.watch();
        let since = turns.look("since").unwrap();
        assert!(turns.look("since").is_none() && turns.take("before").is_none(), "it has the turn");
        for (container, look) in [("before", before), ("since", since)] {
            let taken = watch.take(container);
            tokio::pin!(taken);
            assert!(is_pending(taken.as_mut()).await, "{container}");
            drop(look);
            assert!(taken.await.is_some(), "{container}");
        }
        // An operation that asks for the turn meanwhile is a request.
        let look = turns.look("asked").unwrap();
        let asking = turns.wait("asked");
        tokio::pin!(asking);
        assert!(is_pending(asking.as_mut()).await);
        assert!(watch.take("asked").await.is_none());
        assert_eq!(watch.seen(), ["asked".to_owned()].into());
        drop(look);
        asking.await;
        assert!(turns.lock().finishing.is_empty());
    }

    fn pool(name: &str) -> Resource {
        Resource::Pool(crate::ipam::Pool::directory("/leases", name))
    }

    /// An operation that has begun and occupies the pool until the returned sender fires; then it has
    /// worked.
    async fn standing(traffic: &Arc<Traffic>, class: Class, name: &'static str) -> oneshot::Sender<()> {
        let slot = traffic.enter(class).unwrap();
        slot.begin().await;
        let ((go, gone), (stand, stands)) = (oneshot::channel(), oneshot::channel());
        std::thread::spawn(move || {
            within(slot, || {
                at(&pool(name), || {
                    stand.send(()).unwrap();
                    let _ = gone.blocking_recv();
                });
            });
        });
        stands.await.unwrap();
        go
    }

    #[tokio::test]
    async fn who_waits_for_a_place_to_work_in_is_at_no_resource() {
        let traffic = Traffic::new(1);
        let inside = standing(&traffic, Class::Add, "a").await;
        let working = traffic.enter(Class::Add).unwrap();
        working.begin().await;
        let resource = pool("a");
        let closing = traffic.close(&resource, Instant::now() + Duration::from_secs(60));
        tokio::pin!(closing);
        assert!(is_pending(closing.as_mut()).await);
        drop(inside);
        let closed = tokio::time::timeout(Duration::from_secs(30), closing).await;
        assert!(closed.is_ok_and(|closed| closed.is_some()), "while the other still works");
        drop(working);
    }

    #[tokio::test]
    async fn an_operation_that_needs_nothing_crowded_begins_beside_all_that_hang() {
        let traffic = Traffic::new(1);
        let hanging = standing(&traffic, Class::Add, "a").await;
        let crowded = traffic.enter(Class::Add).unwrap();
        crowded.begin().await;
        assert_eq!(crowded.admit(&[pool("a")].into()), Err(Crowded));
        assert!(crowded.was_sent_back());
        let again = crowded.begin();
        tokio::pin!(again);
        assert!(is_pending(again.as_mut()).await);
        assert_eq!(
            traffic.held(Duration::ZERO).iter().map(|held| (held.standing, held.waiting)).collect::<Vec<_>>(),
            [(1, 1)]
        );
        let other = traffic.enter(Class::Add).unwrap();
        other.begin().await;
        assert_eq!(other.admit(&[pool("b")].into()), Ok(()));
        drop((other, hanging));
        again.await;
        assert_eq!(crowded.admit(&[pool("a")].into()), Ok(()));
    }

    /// Rows: GCC-08.
    #[tokio::test]
    async fn a_resource_is_closed_when_nobody_stands_there_and_nobody_waits_until_then() {
        let traffic = Traffic::new(2);
        let soon = || Instant::now() + Duration::from_millis(20);
        let inside = standing(&traffic, Class::Del, "a").await;
        assert!(traffic.close(&pool("a"), soon()).await.is_none());
        let beside = standing(&traffic, Class::Add, "a").await;
        drop((inside, beside));
        let closed = traffic.close(&pool("a"), Instant::now() + Duration::from_secs(60)).await.unwrap();
        let slot = traffic.enter(Class::Add).unwrap();
        slot.begin().await;
        let door = std::thread::spawn(move || within(slot, || at(&pool("a"), || ())));
        drop(standing(&traffic, Class::Add, "b").await);
        assert!(!door.is_finished());
        drop(closed);
        door.join().unwrap();
    }
}
