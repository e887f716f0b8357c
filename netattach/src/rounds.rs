//! Looks of one moment go one after another, on one thread that may block: each on a thread of its own is the waking of two
//! threads, there and back, and of a third where threads have ended meanwhile. What a look takes at rest is less than that.
//!
//! A look that hangs, on a disk or in the kernel, keeps no other from being taken: after [`PATIENCE`] those that wait go on beside
//! it, and as long as it hangs each goes at once.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::own_thread;
use crate::sync::{Mutex, locked};

/// How long a look waits for others, and for its answer to go with theirs.
const PATIENCE: Duration = Duration::from_millis(50);

/// A look that is to be taken.
type Job = Box<dyn FnOnce() -> Answer + Send>;
/// What it has seen, which its asker waits for.
type Answer = Box<dyn FnOnce() + Send>;

/// Takes a look beside others that are due at the same time. How long it took is for the look to say: others have their turn before
/// it, and after it until the answer goes. Dropping the future does not keep the look from being taken. There is no answer where
/// the runtime ends, which polls nothing any more; nor, in tests, where the look panics.
pub(crate) async fn look<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> T {
    static ROUNDS: LazyLock<Arc<Rounds>> = LazyLock::new(Arc::default);
    look_in(&ROUNDS, PATIENCE, look).await
}

/// Takes a look with others, as [`look`], if it is routine: taken because it is time. For one that somebody waits for, or that
/// something gives occasion for, a thread begins at once.
pub(crate) async fn take<T: Send + 'static>(
    is_routine: bool,
    taken: impl FnOnce() -> T + Send + 'static,
) -> T {
    if is_routine {
        return look(taken).await;
    }
    match own_thread::joined(tokio::task::spawn_blocking(taken).await) {
        Some(seen) => seen,
        None => pending().await,
    }
}

async fn look_in<T: Send + 'static>(
    rounds: &Arc<Rounds>,
    patience: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (answer, mut answered) = oneshot::channel();
    let job = move || -> Answer {
        let seen = look();
        // Nobody may wait for it any more.
        Box::new(move || drop(answer.send(seen)))
    };
    if let Some(worker) = Rounds::begin(rounds, Box::new(job)) {
        // Others that are due at the same time come first to ask for theirs.
        tokio::task::yield_now().await;
        start(worker);
    }
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

/// Looks that wait for their turn, as many as there are tasks that take some.
#[derive(Default)]
struct Rounds(Mutex<State>);

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// Answers that go when the round has ended: their askers share a thread, which wakes once.
    answers: Vec<Answer>,
    /// Workers that are at it or about to be.
    workers: usize,
    /// Whether somebody has lost his patience since there was no worker.
    is_slow: bool,
}

impl State {
    fn leave(&mut self) {
        self.workers -= 1;
        self.is_slow &= self.workers > 0;
    }
}

impl Rounds {
    /// Has a look wait. Returns the worker that is to take it, unless one is there that will.
    fn begin(this: &Arc<Self>, job: Job) -> Option<Worker> {
        let mut state = locked(&this.0);
        state.waiting.push_back(job);
        let is_needed = state.workers == 0 || state.is_slow;
        is_needed.then(|| Worker::of(this, &mut state))
    }

    /// Somebody has waited for long: answers that are there go, and so do from now on those that come. Returns a worker for the
    /// looks that wait, if any do.
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

/// Takes looks until none waits.
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

    /// The next look; if there is none, the answers of those before, and this worker has left: who asks then finds it gone.
    fn next(&mut self) -> Result<Job, Vec<Answer>> {
        let mut state = locked(&self.rounds.0);
        state.waiting.pop_front().ok_or_else(|| {
            state.leave();
            self.has_left = true;
            std::mem::take(&mut state.answers)
        })
    }
}

/// One that is dropped before it has worked, with a runtime that ends, leaves what waits to the patience of those who have asked.
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
