//! Runs the product's own functions under a model checker, which explores the orders of the threads' steps.
//!
//! Each scenario has a test that must pass and one with a planted fault that must be found, so that a model which no
//! longer detects anything is noticed. A schedule that fails is printed together with the way to replay it.
//!
//! `disk` is a directory in memory. Scenarios: `leases`, `journal` (and `spare`, a fault that the journal once had), `pools`,
//! `engine`, which includes the registry. An agent has a `life`, which may end at any step. `flow` is not of the agent: packets
//! on several CPUs.

mod disk;
mod engine;
mod flow;
mod journal;
mod leases;
pub(crate) mod life;
mod pools;
mod spare;

use std::panic::{AssertUnwindSafe, catch_unwind};
// The standard library's types are used here: the model itself is not under test.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::Config;
use shuttle::scheduler::{PctScheduler, RandomScheduler};

/// Fixed, so that CI explores the same orders each time.
const SEED: u64 = 20_251_122;

/// A larger stack: operations call deep into parsers and system libraries.
fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config
}

/// Explores `schedules` orders of `scenario`: half of them random, half with few thread switches at chosen places,
/// which exposes most faults.
pub(crate) fn explore(schedules: usize, scenario: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::Runner::new(RandomScheduler::new_from_seed(SEED, schedules / 2), config()).run(scenario.clone());
    shuttle::Runner::new(PctScheduler::new_from_seed(SEED, 3, schedules / 2), config()).run(scenario);
}

/// Whether at least one of `schedules` orders of a scenario with a planted fault fails, as it should.
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
