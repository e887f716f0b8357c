//! What threads share, under a model checker: one order of the threads' steps after another, the product's own functions.
//!
//! Each state has a test that finds nothing and one with a planted fault that is found, so that a model which has
//! stopped looking is noticed. A schedule that fails is printed with what replays it.
//!
//! `disk` is a directory in memory. States: `leases`, `journal` (and `spare`, a fault that it had once), `engine`, which has the registry, too. An agent has a `life`, which ends at any step.

mod disk;
mod engine;
mod journal;
mod leases;
pub(crate) mod life;
mod spare;

use std::panic::{AssertUnwindSafe, catch_unwind};
// The model's own, not the modelled.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::Config;
use shuttle::scheduler::{PctScheduler, RandomScheduler};

/// The seed: CI explores the same orders each time.
const SEED: u64 = 20_251_122;

/// Operations go deep: parsers and the system's libraries among them.
fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config
}

/// Explores `schedules` orders of `scenario`, half of them at random, half with few changes of thread at
/// chosen places, which is what most faults need.
pub(crate) fn explore(schedules: usize, scenario: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::Runner::new(RandomScheduler::new_from_seed(SEED, schedules / 2), config()).run(scenario.clone());
    shuttle::Runner::new(PctScheduler::new_from_seed(SEED, 3, schedules / 2), config()).run(scenario);
}

/// Whether one of at most `schedules` orders of a scenario with a planted fault fails, as it should.
pub(crate) fn finds(schedules: usize, planted: impl Fn() + Send + Sync + Copy + 'static) -> bool {
    let explored = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&explored);
    let counting = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        planted();
    };
    let found = catch_unwind(AssertUnwindSafe(|| explore(schedules, counting))).is_err();
    println!("planted fault found: {found}, orders explored: {}", explored.load(Ordering::Relaxed));
    found
}
