//! What threads share, under a model checker: one order of the threads' steps after another, the product's own functions.
//!
//! Each state has a test that finds nothing and one with a planted fault that is found, so that a model which has
//! stopped looking is noticed. A schedule that fails is printed with what replays it.

mod disk;
mod journal;
mod spare;

use std::panic::{AssertUnwindSafe, catch_unwind};
// The model's own, not the modelled.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::Config;
use shuttle::scheduler::{PctScheduler, RandomScheduler};

/// The seed: CI explores the same orders each time.
const SEED: u64 = 20_251_122;

/// Explores `schedules` orders of `scenario`, half of them at random, half with few changes of thread at
/// chosen places, which is what most faults need.
fn explore(schedules: usize, scenario: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::Runner::new(RandomScheduler::new_from_seed(SEED, schedules / 2), Config::default())
        .run(scenario);
    shuttle::Runner::new(PctScheduler::new_from_seed(SEED, 3, schedules / 2), Config::default())
        .run(scenario);
}

/// Whether one of at most `schedules` orders of a scenario with a planted fault fails, as it should.
fn finds(schedules: usize, planted: impl Fn() + Send + Sync + Copy + 'static) -> bool {
    let explored = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&explored);
    let run = AssertUnwindSafe(|| {
        let counting = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            planted();
        };
        let scheduler = RandomScheduler::new_from_seed(SEED, schedules);
        shuttle::Runner::new(scheduler, Config::default()).run(counting);
    });
    let found = catch_unwind(run).is_err();
    println!("planted fault found: {found}, orders explored: {}", explored.load(Ordering::Relaxed));
    found
}
