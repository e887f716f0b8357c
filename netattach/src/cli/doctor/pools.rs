//! Address pools: checks for addresses held by containers without a record, and for pools that cannot be
//! read.
//!
//! Reading a pool that another process has locked takes as long as an operation would wait ([`DEADLINE`]),
//! and on a hanging disk forever. So pools are read concurrently, by threads that are abandoned after a
//! bound for all of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::super::missing::list;
use super::Check;
use crate::error_chain::Chain;
use crate::ipam::{DEADLINE, Error, Held, Leases, Owner, Patience, Pool};

const NAME: &str = "leases";

/// Most pools that are read at a time.
const AT_ONCE: usize = 16;

/// Timeout for all of them: long enough that a locked pool is reported as locked.
const BOUND: Duration = DEADLINE.saturating_add(Duration::from_secs(2));

/// Checks these pools for addresses whose holder is none of these containers, which have records.
pub(super) fn checks(pools: &[Pool], containers: &BTreeSet<String>) -> Vec<Check> {
    let leases = Leases::default();
    let found = side_by_side(pools, BOUND, move |pool| leases.holders(pool, Patience::Operation));
    told(pools.iter().zip(found), containers)
}

/// Returns the finding for each pool as text; `None`: there was none in time.
fn told<'p>(
    found: impl Iterator<Item = (&'p Pool, Option<Result<Vec<Held>, Error>>)>,
    containers: &BTreeSet<String>,
) -> Vec<Check> {
    let (mut checks, mut late) = (Vec::new(), Vec::new());
    for (pool, found) in found {
        match found {
            Some(Ok(held)) => checks.extend(stray(pool, &held, containers)),
            Some(Err(error)) => checks.push(Check::failed(
                NAME,
                Chain(&error).to_string(),
                "find out which process holds the lock of the directory, and check that it can be read",
            )),
            None => late.push(pool.to_string()),
        }
    }
    if !late.is_empty() {
        let detail = format!("not checked within {} s: {}", BOUND.as_secs(), list(&late));
        let remedy = "see whether the file systems of their directories answer; if other processes hold the locks of many pools, run this \
                      again";
        checks.push(Check::failed(NAME, detail, remedy));
    }
    checks
}

/// Returns the addresses of a pool whose holder has no record.
fn stray(pool: &Pool, held: &[Held], containers: &BTreeSet<String>) -> Option<Check> {
    let is_stray = |owner: &Owner| !containers.contains(&owner.container_id);
    let stray: Vec<String> = held
        .iter()
        .filter_map(|held| Some((held.address, held.owner.as_ref()?)))
        .filter(|(_, owner)| is_stray(owner))
        .map(|(address, owner)| format!("{address} of {owner}"))
        .collect();
    if stray.is_empty() {
        return None;
    }
    let detail = format!("{pool}: addresses of containers without a record: {}", list(&stray));
    let remedy = "a runtime that sends GC releases them, and containerd sends none; else, if no other plugin uses the \
                  directory, remove the files of these addresses in it";
    Some(Check::warning(NAME, detail, remedy))
}

/// Returns the results of `look` for each item, [`AT_ONCE`] of them at a time, as far as they are available
/// within `bound`. A thread whose `look` hangs is abandoned: this process ends without it.
fn side_by_side<I, T>(
    items: &[I],
    bound: Duration,
    look: impl Fn(&I) -> T + Send + Sync + 'static,
) -> Vec<Option<T>>
where
    I: Clone + Send + Sync + 'static,
    T: Send + 'static,
{
    let due = Instant::now() + bound;
    let shared = Arc::new((items.to_vec(), AtomicUsize::new(0), look));
    let (sender, receiver) = mpsc::channel();
    for _ in 0..AT_ONCE.min(items.len()) {
        let (shared, sender) = (Arc::clone(&shared), sender.clone());
        let work = move || {
            let (items, next, look) = &*shared;
            loop {
                let place = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(place).filter(|_| Instant::now() < due) else { return };
                if sender.send((place, look(item))).is_err() {
                    return;
                }
            }
        };
        // If a thread cannot be started, the others do its work; items that no thread takes have no result.
        let _ = thread::Builder::new().name("pools".to_owned()).spawn(work);
    }
    drop(sender);
    let mut found: Vec<Option<T>> = items.iter().map(|_| None).collect();
    while let Ok((place, answer)) = receiver.recv_timeout(due.saturating_duration_since(Instant::now())) {
        if let Some(of_item) = found.get_mut(place) {
            *of_item = Some(answer);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Barrier;

    use super::*;
    use crate::cli::doctor::State;

    /// Longer than any test waits.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn all_are_looked_at_at_once_and_each_answer_is_that_of_its_own() {
        // No thread continues before all of them have arrived.
        let barrier = Barrier::new(AT_ONCE);
        let items: Vec<usize> = (0..AT_ONCE).collect();
        let found = side_by_side(&items, LONG, move |item| {
            barrier.wait();
            item * 2
        });
        assert_eq!(found, items.iter().map(|item| Some(item * 2)).collect::<Vec<_>>());
        let many: Vec<usize> = (0..5 * AT_ONCE).collect();
        assert_eq!(
            side_by_side(&many, LONG, |item| *item),
            many.iter().copied().map(Some).collect::<Vec<_>>()
        );
        assert_eq!(side_by_side(&[0_usize; 0], LONG, |item| *item), []);
    }

    #[test]
    fn those_that_hang_keep_nobody_waiting_beyond_the_bound() {
        let began = Instant::now();
        let hangs = |item: &usize| {
            let began = Instant::now();
            while *item == 0 && began.elapsed() < LONG {
                thread::park_timeout(LONG);
            }
            *item
        };
        assert_eq!(
            side_by_side(&[0, 1, 0, 2], Duration::from_millis(200), hangs),
            [None, Some(1), None, Some(2)]
        );
        assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn a_pool_is_told_of_by_who_has_no_record_by_its_error_or_as_one_that_did_not_answer() {
        let pools = ["fine", "stray", "hung"].map(|network| Pool::directory("/pools", network));
        let held = |container: &str| {
            let owner = Owner { container_id: container.to_owned(), ifname: "eth0".to_owned() };
            vec![Held { address: IpAddr::from([10, 1, 0, 2]), owner: Some(owner) }]
        };
        let found = [Some(Ok(held("known"))), Some(Ok(held("lost"))), None];
        let checks = told(pools.iter().zip(found), &["known".to_owned()].into());
        let shown: Vec<_> = checks.iter().map(|check| (check.state, check.detail.clone())).collect();
        let [_, stray, hung] = pools.each_ref().map(ToString::to_string);
        let lost = "10.1.0.2 of interface eth0 of container lost";
        assert_eq!(
            shown,
            [
                (State::Warning, format!("{stray}: addresses of containers without a record: {lost}")),
                (State::Failed, format!("not checked within 12 s: {hung}")),
            ]
        );
    }
}
