//! Runs periodic checks that are due at the same moment one after another on one blocking thread. A thread for each
//! check would mean waking two threads, there and back, and a third if threads have ended meanwhile; an idle check
//! costs less than that.
//!
//! A check that hangs, on a disk or in the kernel, does not block the others: once a caller has waited for its result
//! for [`PATIENCE`], the waiting checks run on another thread, and as long as the check hangs, each new check gets a
//! thread at once.
//!
//! A check that runs every second mostly finds nothing, so its caller fetches the result when it has another reason to
//! run ([`begin`]): the check's end then wakes no thread. Until its caller comes, nobody waits: where all checks of a
//! round are such, those behind one that hangs start up to a second and [`PATIENCE`] late, once.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::own_thread;
use crate::sync::{Mutex, locked};

/// How long a caller waits until checks no longer wait for earlier ones, nor their results to be delivered together.
const PATIENCE: Duration = Duration::from_millis(50);

/// A check to run.
type Job = Box<dyn FnOnce() -> Answer + Send>;
/// Delivers the result of a check to its caller.
type Answer = Box<dyn FnOnce() + Send>;

/// Runs a check together with others that are due at the same time, and returns its result. The check must measure
/// its duration itself: it waits for checks before it, and its result waits for checks after it. Dropping the future
/// does not cancel the check. The future never completes if the runtime ends, which polls nothing any more, or, in
/// tests, if the check panics.
pub(crate) async fn look<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> T {
    look_in(&ROUNDS, PATIENCE, look).await
}

static ROUNDS: LazyLock<Arc<Rounds>> = LazyLock::new(Arc::default);

/// Runs a check like [`look`] if it is routine, that is, periodic. For a check that a caller waits for, or that an
/// event triggered, starts a thread at once.
pub(crate) async fn take<T: Send + 'static>(
    is_routine: bool,
    taken: impl FnOnce() -> T + Send + 'static,
) -> T {
    begin(is_routine, taken).await.result().await
}

/// Starts a check like [`take`], and returns before it has run.
pub(crate) async fn begin<T: Send + 'static>(
    is_routine: bool,
    taken: impl FnOnce() -> T + Send + 'static,
) -> Begun<T> {
    match is_routine {
        true => Begun::InRound(begin_in(&ROUNDS, taken).await),
        false => Begun::Alone(tokio::task::spawn_blocking(taken)),
    }
}

/// A check that has been started, whose result nobody waits for yet. Dropping it does not cancel the check.
pub(crate) enum Begun<T> {
    /// Together with others.
    InRound(oneshot::Receiver<T>),
    /// On a thread of its own.
    Alone(JoinHandle<T>),
}

impl<T> Begun<T> {
    /// Waits for the result, like [`look`].
    pub(crate) async fn result(self) -> T {
        match self {
            Self::InRound(answered) => result_in(&ROUNDS, PATIENCE, answered).await,
            Self::Alone(thread) => match own_thread::joined(thread.await) {
                Some(seen) => seen,
                None => pending().await,
            },
        }
    }
}

async fn look_in<T: Send + 'static>(
    rounds: &Arc<Rounds>,
    patience: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> T {
    let answered = begin_in(rounds, look).await;
    result_in(rounds, patience, answered).await
}

async fn begin_in<T: Send + 'static>(
    rounds: &Arc<Rounds>,
    look: impl FnOnce() -> T + Send + 'static,
) -> oneshot::Receiver<T> {
    let (answer, answered) = oneshot::channel();
    let job = move || -> Answer {
        let seen = look();
        // The caller may have dropped the future.
        Box::new(move || drop(answer.send(seen)))
    };
    if let Some(worker) = Rounds::begin(rounds, Box::new(job)) {
        // Tasks that are due at the same time enqueue their checks first.
        tokio::task::yield_now().await;
        start(worker);
    }
    answered
}

async fn result_in<T>(rounds: &Arc<Rounds>, patience: Duration, mut answered: oneshot::Receiver<T>) -> T {
    let soon = tokio::time::timeout(patience, &mut answered).await;
    let seen = match soon {
        Ok(seen) => seen,
        Err(_) => {
            if let Some(worker) = Rounds::hurry(rounds) {
                start(worker);
            }
            answered.await
        }
    };
    match seen {
        Ok(seen) => seen,
        Err(_) => pending().await,
    }
}

fn start(worker: Worker) {
    drop(tokio::task::spawn_blocking(move || worker.work()));
}

/// The checks that wait, at most one per task that runs checks.
#[derive(Default)]
struct Rounds(Mutex<State>);

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// Results to deliver when the round ends: their receivers share a thread, which wakes once.
    answers: Vec<Answer>,
    /// Workers that run or are about to run.
    workers: usize,
    /// Whether a check has waited longer than [`PATIENCE`] since there was no worker.
    is_slow: bool,
}

impl State {
    fn leave(&mut self) {
        self.workers -= 1;
        self.is_slow &= self.workers > 0;
    }
}

impl Rounds {
    /// Enqueues a check. Returns a worker to start for it, unless an existing worker will run it.
    fn begin(this: &Arc<Self>, job: Job) -> Option<Worker> {
        let mut state = locked(&this.0);
        state.waiting.push_back(job);
        let is_needed = state.workers == 0 || state.is_slow;
        is_needed.then(|| Worker::of(this, &mut state))
    }

    /// Called when a check has waited too long: delivers the available results, and makes later results be delivered
    /// at once. Returns a worker to start for the waiting checks, if there are any.
    fn hurry(this: &Arc<Self>) -> Option<Worker> {
        let (answers, worker) = {
            let mut state = locked(&this.0);
            let worker = (!state.waiting.is_empty()).then(|| Worker::of(this, &mut state));
            state.is_slow = state.workers > 0;
            (std::mem::take(&mut state.answers), worker)
        };
        answers.into_iter().for_each(|answer| answer());
        worker
    }
}

/// Runs checks until none waits.
struct Worker {
    rounds: Arc<Rounds>,
    has_left: bool,
}

impl Worker {
    fn of(rounds: &Arc<Rounds>, state: &mut State) -> Self {
        state.workers += 1;
        Self { rounds: Arc::clone(rounds), has_left: false }
    }

    fn work(mut self) {
        loop {
            let job = match self.next() {
                Ok(job) => job,
                Err(answers) => return answers.into_iter().for_each(|answer| answer()),
            };
            let answer = job();
            let mut state = locked(&self.rounds.0);
            if state.is_slow {
                drop(state);
                answer();
            } else {
                state.answers.push(answer);
            }
        }
    }

    /// Returns the next check. If there is none, returns the results of the finished checks; from then on this worker
    /// does not count any more, so a later check gets a new one.
    fn next(&mut self) -> Result<Job, Vec<Answer>> {
        let mut state = locked(&self.rounds.0);
        state.waiting.pop_front().ok_or_else(|| {
            state.leave();
            self.has_left = true;
            std::mem::take(&mut state.answers)
        })
    }
}

/// A worker that is dropped before it has run, because the runtime ends, leaves the waiting checks to the timeout of
/// their callers.
impl Drop for Worker {
    fn drop(&mut self) {
        if !self.has_left {
            locked(&self.rounds.0).leave();
        }
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn looks_that_are_due_together_go_on_one_thread_and_each_has_its_answer() {
        let rounds = Arc::default();
        let look = |number: u32| look_in(&rounds, LONG, move || (number, thread::current().id()));
        let (one, two, three) = tokio::join!(look(1), look(2), look(3));
        let seen = [one, two, three];
        assert_eq!(seen.map(|(number, _)| number), [1, 2, 3]);
        let [one, two, three] = seen.map(|(_, thread)| thread);
        assert!(one == two && two == three && one != thread::current().id(), "{seen:?}");
        let state = locked(&rounds.0);
        assert_eq!((state.workers, state.waiting.len(), state.answers.len()), (0, 0, 0));
        assert!(!state.is_slow);
    }

    #[tokio::test]
    async fn a_look_that_hangs_keeps_no_other_from_being_taken_nor_from_its_answer() {
        let rounds = Arc::default();
        let (end, ended) = mpsc::channel::<()>();
        let hanging = look_in(&rounds, PATIENCE, move || ended.recv().is_err());
        let others = async {
            // Before it in its round, and behind it.
            let look = |number: u32| look_in(&rounds, PATIENCE, move || number);
            assert_eq!(tokio::join!(look(1), look(2)), (1, 2));
            assert_eq!(look(3).await, 3);
            drop(end);
        };
        // The others begin, so that it is in their round.
        let ((), hung) = tokio::join!(others, hanging);
        assert!(hung);
        assert_eq!(look_in(&rounds, LONG, || 4).await, 4);
    }

    #[tokio::test]
    async fn a_result_that_is_fetched_later_is_there_whatever_was_looked_at_meanwhile() {
        let rounds = Arc::default();
        let [one, two] = [1, 2].map(|number| begin_in(&rounds, move || number));
        let (one, two) = tokio::join!(one, two);
        assert_eq!(look_in(&rounds, LONG, || 3).await, 3);
        assert_eq!(result_in(&rounds, LONG, two).await, 2);
        // Nobody wants that of another one.
        drop(begin_in(&rounds, || 4).await);
        assert_eq!(look_in(&rounds, LONG, || 5).await, 5);
        assert_eq!(result_in(&rounds, LONG, one).await, 1);
    }

    #[tokio::test]
    async fn a_look_that_hangs_keeps_its_result_until_it_ends_and_no_other_from_being_taken() {
        let rounds = Arc::default();
        let (end, ended) = mpsc::channel::<()>();
        let hanging = begin_in(&rounds, move || ended.recv().is_err()).await;
        let behind = begin_in(&rounds, || 1).await;
        assert_eq!(result_in(&rounds, PATIENCE, behind).await, 1);
        drop(end);
        assert!(result_in(&rounds, PATIENCE, hanging).await);
    }

    #[tokio::test]
    async fn what_waits_behind_a_look_that_hangs_is_taken_beside_it() {
        let rounds = Arc::default();
        let (end, ended) = mpsc::channel::<()>();
        let hanging = look_in(&rounds, PATIENCE, move || ended.recv().is_err());
        let behind = async {
            assert_eq!(look_in(&rounds, PATIENCE, || 1).await, 1);
            drop(end);
        };
        let (hung, ()) = tokio::join!(hanging, behind);
        assert!(hung);
    }

    #[test]
    fn a_runtime_that_ends_leaves_the_next_able_to_look() {
        let rounds = Arc::default();
        let job = || -> Answer { Box::new(|| {}) };
        drop(Rounds::begin(&rounds, Box::new(job)));
        assert_eq!(locked(&rounds.0).workers, 0);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        assert_eq!(runtime.block_on(look_in(&rounds, LONG, || 1)), 1);
        assert_eq!(locked(&rounds.0).waiting.len(), 0);
    }
}

#[cfg(test)]
#[cfg(feature = "model")]
mod model;
