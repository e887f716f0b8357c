//! Turns and lanes under the model checker: threads that ask, give up, work and leave, and a GC that closes the
//! resource they occupy.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use shuttle::future::block_on;

use super::{Class, Closed, Traffic, Turns};
use crate::model::{explore, finds};
use crate::sync::{Arc, Mutex, locked, step, thread};
use crate::waits::{Place, Resource};

/// Number of threads working on each object, to detect more than are allowed.
type AtWork = Arc<Mutex<BTreeMap<&'static str, usize>>>;

/// Works on an object that at most `most` threads may work on at a time.
fn work(at_work: &AtWork, on: &'static str, most: usize) {
    let count = {
        let mut at_work = locked(at_work);
        let count = at_work.entry(on).or_default();
        *count += 1;
        *count
    };
    assert!(count <= most, "{count} at work on {on}");
    step();
    *locked(at_work).entry(on).or_default() -= 1;
}

/// Operations on two containers, a check, a request that gives up, and a GC that watches. The injected
/// fault: a turn that ends before its work.
fn turns(ends_early: bool) {
    let turns = Arc::new(Turns::default());
    let at_work = AtWork::default();
    let operation = move |turns: &Arc<Turns>, at_work: &AtWork, container: &'static str| {
        let turn = block_on(turns.wait(container));
        if ends_early {
            drop(turn);
            work(at_work, container, 1);
        } else {
            work(at_work, container, 1);
            drop(turn);
        }
    };
    let mut others = Vec::new();
    for container in ["a", "a", "b"] {
        let (turns, at_work) = (Arc::clone(&turns), Arc::clone(&at_work));
        others.push(thread::spawn(move || operation(&turns, &at_work, container)));
    }
    let (looking, of) = (Arc::clone(&turns), Arc::clone(&at_work));
    others.push(thread::spawn(move || {
        if let Some(turn) = looking.look("b") {
            work(&of, "b", 1);
            drop(turn);
        }
    }));
    let (given_up, of) = (Arc::clone(&turns), Arc::clone(&at_work));
    others.push(thread::spawn(move || {
        let watch = given_up.watch();
        // Polled once: it enters the queue, and then stops waiting.
        let mut waiting = Box::pin(given_up.wait("a"));
        let polled = block_on(std::future::poll_fn(|context| {
            std::task::Poll::Ready(waiting.as_mut().poll(context).is_ready())
        }));
        step();
        drop(waiting);
        if let Some(turn) = block_on(watch.take("b")) {
            work(&of, "b", 1);
            drop(turn);
        }
        assert!(polled || watch.seen().contains("a"));
    }));
    operation(&turns, &at_work, "a");
    others.into_iter().for_each(|other| other.join().unwrap());
    assert_eq!(
        turns.lock().order.containers(&HashSet::new()).count(),
        0,
        "nobody has a turn or waits for one"
    );
    assert!(turns.lock().waiting.is_empty());
}

#[test]
fn a_container_is_worked_on_by_one_at_a_time_and_everybody_has_a_turn() {
    explore(2_000, || turns(false));
}

#[test]
fn a_turn_that_ends_before_its_work_is_found() {
    assert!(finds(2_000, || turns(true)));
}

/// ADDs in lanes with one work slot, two of which go to a pool. The injected fault: working after leaving
/// the lane.
fn lanes(leaves_early: bool) {
    let traffic = Traffic::new(1);
    let at_work = AtWork::default();
    let operation = move |traffic: &Arc<Traffic>, at_work: &AtWork, pool: Option<&Resource>| {
        let slot = traffic.enter(Class::Add).unwrap();
        loop {
            block_on(slot.begin());
            work(at_work, "place", 1);
            let needs = pool.into_iter().cloned().collect();
            if slot.admit(&needs).is_ok() {
                break;
            }
            assert!(slot.was_sent_back());
        }
        if let Some(pool) = pool {
            slot.arrive(pool);
            work(at_work, "pool", 2);
            slot.depart();
        }
        if leaves_early {
            drop(slot);
            work(at_work, "place", 1);
        } else {
            work(at_work, "place", 1);
            drop(slot);
        }
    };
    let pool = Resource::Pool(crate::ipam::Pool::directory("/pools", "net"));
    let others = [Some(pool.clone()), Some(pool)].map(|pool| {
        let (traffic, at_work) = (Arc::clone(&traffic), Arc::clone(&at_work));
        thread::spawn(move || operation(&traffic, &at_work, pool.as_ref()))
    });
    operation(&traffic, &at_work, None);
    others.into_iter().for_each(|other| other.join().unwrap());
    let state = traffic.lock();
    assert!(state.waiting.is_empty() && state.since.is_empty() && state.asleep.is_empty(), "{state:?}");
    assert!(state.lanes.held().is_empty());
}

#[test]
fn a_place_is_worked_in_by_one_at_a_time_and_everybody_comes_through() {
    explore(2_000, || lanes(false));
}

#[test]
fn work_in_the_place_of_another_is_found() {
    assert!(finds(2_000, || lanes(true)));
}

/// How a GC closes a pool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closing {
    /// As the agent closes it.
    Whole,
    /// The injected fault: it checks that the pool is free, and closes it in a second step.
    InTwoSteps,
    /// The injected fault: it subscribes to departures only after the check.
    AsksLate,
}

/// The state of a pool.
#[derive(Default)]
struct AtPool {
    standing: usize,
    is_closed: bool,
}

/// The work of a GC on a pool that it has closed.
fn collect(pool: &Mutex<AtPool>) {
    {
        let mut at = locked(pool);
        assert!(at.standing == 0 && !at.is_closed, "{} are at a pool that is closed", at.standing);
        at.is_closed = true;
    }
    step();
    locked(pool).is_closed = false;
}

fn close(traffic: &Arc<Traffic>, resource: &Resource, how: Closing, pool: &Mutex<AtPool>) {
    let never = Instant::now() + Duration::from_secs(3600);
    match how {
        Closing::Whole => {
            let closed = block_on(traffic.close(resource, never));
            collect(pool);
            drop(closed.expect("it is waited for"));
        }
        Closing::InTwoSteps => {
            let is_clear = traffic.lock().lanes.is_clear(resource);
            if is_clear && traffic.lock().lanes.close(resource) {
                let closed = Closed { traffic: Arc::clone(traffic), resource: resource.clone() };
                collect(pool);
                drop(closed);
            }
        }
        Closing::AsksLate => loop {
            let is_closed = {
                let mut state = traffic.lock();
                state.lanes.is_clear(resource) && state.lanes.close(resource)
            };
            if is_closed {
                collect(pool);
                return drop(Closed { traffic: Arc::clone(traffic), resource: resource.clone() });
            }
            step();
            block_on(traffic.left.notified());
        },
    }
}

/// ADDs and a DEL that go to a pool, a GC that closes it, and a second GC that closes it only if it is free.
fn closing(how: Closing) {
    let traffic = Traffic::new(1);
    let pool = Arc::new(Mutex::new(AtPool::default()));
    let resource = Resource::Pool(crate::ipam::Pool::directory("/pools", "net"));
    let operation = |class| {
        let (traffic, pool, resource) = (Arc::clone(&traffic), Arc::clone(&pool), resource.clone());
        move || {
            let slot = traffic.enter(class).unwrap();
            loop {
                block_on(slot.begin());
                if slot.admit(&[resource.clone()].into()).is_ok() {
                    break;
                }
            }
            slot.arrive(&resource);
            {
                let mut at = locked(&pool);
                assert!(!at.is_closed, "somebody comes to a pool that is closed");
                at.standing += 1;
            }
            step();
            locked(&pool).standing -= 1;
            slot.depart();
        }
    };
    let mut others: Vec<_> =
        [Class::Add, Class::Add, Class::Del].map(operation).map(thread::spawn).into_iter().collect();
    let (beside, of, at) = (Arc::clone(&traffic), Arc::clone(&pool), resource.clone());
    others.push(thread::spawn(move || {
        if let Some(closed) = block_on(beside.close(&at, Instant::now())) {
            collect(&of);
            drop(closed);
        }
    }));
    close(&traffic, &resource, how, &pool);
    others.into_iter().for_each(|other| other.join().unwrap());
    let mut state = traffic.lock();
    assert!(state.waiting.is_empty() && state.since.is_empty() && state.asleep.is_empty(), "{state:?}");
    assert!(state.lanes.held().is_empty() && state.lanes.close(&resource), "it is open again");
}

#[test]
fn a_pool_is_closed_only_while_it_is_unused_and_every_operation_finishes() {
    explore(3_000, || closing(Closing::Whole));
}

#[test]
fn a_pool_checked_and_closed_in_two_steps_is_found() {
    assert!(finds(3_000, || closing(Closing::InTwoSteps)));
}

#[test]
fn a_gc_that_asks_late_who_leaves_is_found() {
    assert!(finds(3_000, || closing(Closing::AsksLate)));
}
