//! The thread that renews the leases of all pods. It sleeps until a lease is due, in steps of at most a minute,
//! and has sockets open only while exchanges run.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::converse::{hear, send};
use super::exchange::{Act, Exchange, Outcome};
use super::leases::{Held, OVER, Shared, open_client};
use super::record::Record;
use super::terms::Due;
use super::wire::{self, Socket, now, random};
use super::writer::Job;
use crate::error_chain::Chain;
use crate::ipam::Owner;
use crate::sync::{PoisonError, locked};

/// Most concurrent exchanges; the others wait. Each has a descriptor.
const AT_ONCE: usize = 32;
/// Most concurrent exchanges of one network while leases of other networks are due: its server may be gone, or delay
/// its replies on purpose.
const OF_ONE: usize = 8;
/// How often a thread with open sockets checks for other leases that are due.
const LOOK: Duration = Duration::from_secs(1);
/// How long until removing a lost address from a pod is retried.
const TAKE_AGAIN: Duration = Duration::from_secs(10);
/// How long the thread may sleep without open sockets if a lease will be due. The clock of its sleep stands still
/// while the node is suspended, whereas leases go on: a lease that has expired meanwhile is noticed at most this long
/// after the node resumes.
const LONGEST: Duration = Duration::from_secs(60);
/// The same if no lease will be due.
const IDLE: Duration = Duration::from_secs(24 * 3600);

/// A running exchange.
struct Asking {
    owner: Owner,
    network: String,
    number: u64,
    begun: Duration,
    exchange: Exchange,
    socket: Socket,
}

/// The work that is due at one moment.
#[derive(Default)]
struct Work {
    ask: Vec<(Owner, u64, Record, super::exchange::Purpose, Duration)>,
    /// Leases whose address must be removed from the pod, with the reason.
    over: Vec<(Owner, u64, String)>,
    next: Option<Duration>,
}

/// Renews until the leases end.
pub(super) fn run(shared: &Arc<Shared>) {
    let mut asking: Vec<Asking> = Vec::new();
    loop {
        let mut state = locked(&shared.state);
        if state.ends {
            return;
        }
        let under_way = asking.iter().map(|one| one.network.clone()).collect();
        let work = due(state.held.iter_mut(), &shared.boot, under_way);
        if work.ask.is_empty() && work.over.is_empty() && asking.is_empty() {
            let slept = shared.changed.wait_timeout(state, sleep(work.next, now()));
            // The loop checks again, whatever woke the thread: a new lease, the timeout, or a spurious wakeup.
            drop(slept.unwrap_or_else(PoisonError::into_inner));
            continue;
        }
        drop(state);
        for (owner, number, why) in work.over {
            shared.enqueue(owner, number, Job::Lose(why));
        }
        for (owner, number, record, purpose, until) in work.ask {
            let begun = now();
            match open_client(&record, &owner) {
                Ok((socket, client)) => {
                    let exchange = Exchange::begin(client, purpose, begun, until, random());
                    let network = record.config.network;
                    asking.push(Asking { owner, network, number, begun, exchange, socket });
                }
                Err(error) => failed(shared, &owner, number, begun, &Chain(&error).to_string()),
            }
        }
        asking.retain_mut(|one| !go_on(shared, one));
        if !asking.is_empty() {
            let soon = work.next.map_or(LOOK, |next| next.saturating_sub(now()).min(LOOK));
            let until = asking.iter().map(|one| one.exchange.due()).fold(now() + soon, Duration::min);
            wire::wait(asking.iter().map(|one| &one.socket), until);
        }
    }
}

/// Returns how long the thread may sleep without open sockets. `next`: when a lease will be due.
fn sleep(next: Option<Duration>, now: Duration) -> Duration {
    next.map_or(IDLE, |next| next.saturating_sub(now).min(LONGEST))
}

/// Returns the work for leases that are not busy, and marks them busy. `under_way`: the network of each running
/// exchange.
fn due<'h>(
    held: impl Iterator<Item = (&'h Owner, &'h mut Held)>,
    boot: &str,
    under_way: Vec<String>,
) -> Work {
    let mut work = Work::default();
    let now = now();
    let mut waiting = Vec::new();
    for (owner, held) in held.filter(|(_, held)| !held.is_busy) {
        let over = |number, why: &str| (owner.clone(), number, why.to_owned());
        if let Some(why) = held.record.is_to_be_taken(boot) {
            match held.tried.map(|at| at + TAKE_AGAIN).filter(|at| *at > now) {
                Some(at) => work.next = Some(work.next.map_or(at, |next| next.min(at))),
                None => {
                    work.over.push(over(held.number, why));
                    held.is_busy = true;
                }
            }
            continue;
        }
        let Some(terms) = held.record.in_force(boot) else { continue };
        match terms.due(now, held.tried) {
            Due::At(at) => work.next = at.into_iter().chain(work.next).min(),
            Due::Ask(purpose, until) => {
                let network = held.record.config.network.clone();
                waiting.push((network, held.tried, (owner, held, purpose, until)));
            }
            Due::Over => {
                held.is_busy = true;
                work.over.push(over(held.number, OVER));
            }
        }
    }
    for (owner, held, purpose, until) in in_turn(waiting, under_way) {
        held.is_busy = true;
        work.ask.push((owner.clone(), held.number, held.record.clone(), purpose, until));
    }
    work
}

/// Returns those of the waiting exchanges that may start, each given with its network and its last failed attempt;
/// the others wait until a running one ends. Those without an attempt go first, then the oldest attempts.
fn in_turn<T>(mut waiting: Vec<(String, Option<Duration>, T)>, under_way: Vec<String>) -> Vec<T> {
    let room = AT_ONCE.saturating_sub(under_way.len());
    let mut of_network: HashMap<String, usize> = HashMap::new();
    for network in under_way {
        *of_network.entry(network).or_default() += 1;
    }
    waiting.sort_by_key(|(_, tried, _)| *tried);
    let (mut first, mut then) = (Vec::new(), Vec::new());
    for (network, _, one) in waiting {
        let many = of_network.entry(network).or_default();
        *many += 1;
        if *many <= OF_ONE { first.push(one) } else { then.push(one) }
    }
    first.into_iter().chain(then).take(room).collect()
}

/// Processes the messages that an exchange has received, and sends its next ones. Returns whether the exchange is
/// over.
fn go_on(shared: &Shared, one: &mut Asking) -> bool {
    let is_held = |held: &Held| held.number == one.number;
    if !locked(&shared.state).held.get(&one.owner).is_some_and(is_held) {
        // The lease was released: another request would make the server lease it again.
        return true;
    }
    match hear(&mut one.exchange, &one.socket) {
        Act::Wait => return false,
        Act::Send(outgoing) => {
            send(&one.socket, &outgoing);
            return false;
        }
        Act::Done(Outcome::Bound(terms, _)) => shared.change(&one.owner, one.number, |held| {
            if held.trouble.take().is_some() {
                tracing::info!(owner = %one.owner, address = %terms.address, "lease by dhcp extended again");
            }
            held.give(&terms);
            held.tried = None;
            held.is_busy = false;
        }),
        Act::Done(Outcome::Silence(heard)) => failed(shared, &one.owner, one.number, one.begun, &heard),
        Act::Done(Outcome::Refused(heard)) => {
            shared.enqueue(one.owner.clone(), one.number, Job::Lose(heard));
        }
    }
    true
}

/// Notes that an exchange that began at `begun` has not renewed a lease.
fn failed(shared: &Shared, owner: &Owner, number: u64, begun: Duration, heard: &str) {
    shared.change(owner, number, |held| {
        let trouble = format!("not extended, and asked for again: {heard}");
        if held.trouble.as_ref() != Some(&trouble) {
            let (network, address) = (&held.record.config.network, held.record.address);
            tracing::warn!(%owner, network, %address, heard, "lease by dhcp not extended; it is asked for again");
        }
        held.trouble = Some(trouble);
        held.tried = Some(begun);
        held.is_busy = false;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_whose_server_does_not_answer_leaves_room_for_others() {
        let seconds = |tried: Option<u64>| tried.map(Duration::from_secs);
        let of = |network: &str, tried, number: u32| (network.to_owned(), seconds(tried), number);
        let dead = (0..40).map(|number| of("dead", Some(u64::from(40 - number)), number));
        let others = [of("lan", Some(90), 40), of("lan", None, 41), of("dead", None, 42)];
        let waiting: Vec<_> = dead.chain(others).collect();
        let many = |network: &str, many| vec![network.to_owned(); many];
        // Leases that were not tried yet, and those that have waited longest, up to the share; then the rest of the
        // silent network.
        let begun = in_turn(waiting.clone(), Vec::new());
        let share = [41, 42, 39, 38, 37, 36, 35, 34, 33, 40];
        assert_eq!(begun.len(), AT_ONCE);
        assert_eq!(begun[..share.len()], share);
        assert_eq!(in_turn(waiting.clone(), many("dead", 30)), [41, 40]);
        assert_eq!(in_turn(waiting, many("dead", AT_ONCE)), [0; 0]);
    }

    #[test]
    fn a_lease_that_ends_while_the_node_is_suspended_is_looked_at_within_a_minute_of_its_going_on() {
        let seconds = Duration::from_secs;
        let now = seconds(7 * 3600);
        for (next, expected) in [
            (Some(now + seconds(4 * 3600)), LONGEST),
            (Some(now + seconds(17)), seconds(17)),
            (Some(now), seconds(0)),
            // It was suspended past that.
            (Some(now - seconds(3600)), seconds(0)),
            // Nothing will ever be due: there are no leases, or only such as do not end.
            (None, IDLE),
        ] {
            assert_eq!(sleep(next, now), expected, "{next:?}");
        }
        assert_eq!(LONGEST, seconds(60));
    }
}
