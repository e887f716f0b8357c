//! Rounds under the model checker: threads that request checks, and one whose deadline may pass at any moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Answer, Rounds, Worker};
use crate::model::{explore, finds};
use crate::sync::{locked, step, thread};

/// A worker that finds nothing to do and leaves a step later: the fault.
fn work_and_leave_late(worker: Worker) {
    loop {
        let job = locked(&worker.rounds.0).waiting.pop_front();
        let Some(job) = job else { break };
        job()();
    }
    step();
    drop(worker);
}

/// Three request a check. Each request is served, and answered once, although no other request follows.
fn looks(work: fn(Worker), hurries: bool) {
    let rounds = Arc::new(Rounds::default());
    let answered: [Arc<AtomicUsize>; 3] = Default::default();
    let mut others = Vec::new();
    for answers in &answered {
        let (rounds, answers) = (Arc::clone(&rounds), Arc::clone(answers));
        others.push(thread::spawn(move || {
            let job = move || -> Answer {
                step();
                Box::new(move || {
                    answers.fetch_add(1, Ordering::Relaxed);
                })
            };
            if let Some(worker) = Rounds::begin(&rounds, Box::new(job)) {
                work(worker);
            }
        }));
    }
    if hurries && let Some(worker) = Rounds::hurry(&rounds) {
        work(worker);
    }
    others.into_iter().for_each(|other| other.join().unwrap());
    let counts = answered.map(|answers| answers.load(Ordering::Relaxed));
    assert_eq!(counts, [1; 3]);
    let state = locked(&rounds.0);
    assert_eq!((state.workers, state.waiting.len(), state.answers.len(), state.is_slow), (0, 0, 0, false));
}

#[test]
fn every_look_is_taken_and_answered_although_nobody_asks_again() {
    explore(4_000, || looks(Worker::work, false));
}

#[test]
fn impatience_has_nothing_lost_and_nothing_answered_twice() {
    explore(4_000, || looks(Worker::work, true));
}

#[test]
fn a_worker_that_leaves_after_it_found_nothing_is_found() {
    assert!(finds(4_000, || looks(work_and_leave_late, false)));
}
