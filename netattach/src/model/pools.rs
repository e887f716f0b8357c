//! Addresses are leased from pools while unneeded pools are forgotten, by an agent that may end at any step; then the
//! next one starts. It has to know each pool from which an address was leased.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::disk::Disk;
use super::life::Life;
use super::{explore, finds};
use crate::ipam::Pool;
use crate::journal::Store;
use crate::journal::files::Files;
use crate::sync::{Arc, Mutex, locked, thread};

/// Number of pools that are noted at first: enough that unneeded ones are forgotten.
const NOTED: usize = 66;

fn pool(number: usize) -> Pool {
    Pool::directory("/pools", &format!("net-{number:03}"))
}

fn noted() -> Disk {
    let line = |number| format!("{}\n", serde_json::to_string(&pool(number)).unwrap());
    let disk = Disk::default();
    let lines = (0..NOTED).map(line).collect::<String>();
    disk.create("pools.jsonl").unwrap().write_at(0, lines.as_bytes()).unwrap();
    disk
}

fn store(disk: &Disk, life: &Life) -> Store {
    Store::over(Arc::new(disk.of(life)), PathBuf::from("/journal"), "this boot".to_owned()).unwrap()
}

/// One ADD leases from a pool that is noted already and one from another, concurrently with a check. The fault: the
/// holders of addresses are read before the check begins, not for each pool.
fn leases_beside_a_look(ends: bool, asks_first: bool) {
    let (disk, life) = (noted(), Life::default());
    let store_of_agent = Arc::new(store(&disk, &life));
    // The addresses are files, which outlive the agent.
    let leased: Arc<Mutex<BTreeSet<Pool>>> = Arc::default();
    let add = |pool: Pool| {
        let (store, leased) = (Arc::clone(&store_of_agent), Arc::clone(&leased));
        thread::spawn(move || {
            let Ok(noted) = store.note_pool(pool.clone()) else { return };
            locked(&leased).insert(pool);
            drop(noted);
        })
    };
    let adds = [add(pool(7)), add(pool(NOTED))];
    let (looked_at, held) = (Arc::clone(&store_of_agent), Arc::clone(&leased));
    let look = thread::spawn(move || {
        let before = locked(&held).clone();
        drop(looked_at.keep_pools(|pool| match asks_first {
            true => before.contains(pool),
            false => locked(&held).contains(pool),
        }));
    });
    // These may have reached any step.
    crate::sync::step();
    if ends {
        life.end();
    }
    adds.into_iter().chain([look]).for_each(|beside| beside.join().unwrap());
    let (known, leased) = (store(&disk, &Life::default()).pools(), locked(&leased).clone());
    match ends {
        true => assert!(leased.iter().all(|pool| known.contains(pool)), "{leased:?} of {known:?}"),
        false => assert_eq!(known, [pool(7), pool(NOTED)]),
    }
}

#[test]
fn of_pools_that_nobody_needs_none_is_forgotten_that_somebody_leases_from() {
    explore(2_000, || leases_beside_a_look(false, false));
}

#[test]
fn an_agent_that_ends_at_any_step_has_noted_what_was_leased_from() {
    explore(2_000, || leases_beside_a_look(true, false));
}

#[test]
fn a_look_that_asks_for_addresses_before_it_begins_is_found() {
    assert!(finds(2_000, || leases_beside_a_look(false, true)));
}
