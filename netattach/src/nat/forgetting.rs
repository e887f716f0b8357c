//! Deletes conntrack entries of UDP: one walk through all entries serves every request that arrived before
//! the walk began.
//!
//! The duration of a walk depends on the size of the kernel's conntrack table, not on its contents (34 ms for
//! the usual 262,144 buckets), and no request to the kernel selects entries by a port alone. So an ADD, whose
//! pod has had no packet yet, does not wait for the walk; a DEL waits, because the pod's address is free
//! afterwards.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::npwg::selection::PortProtocol;
use crate::sync::{Arc, Condvar, Mutex, PoisonError, locked, thread};

use super::wish::HostPort;

/// Longest wait for a walk: beyond it, the kernel is taken not to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Which connections by a port of the node are deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Which {
    /// Those that lead to any destination but the pod.
    Misled,
    /// Those that lead to the pod.
    Led,
}

/// The targets of one walk, by port of the node. At most one entry for each port of each ADD and DEL that arrived
/// since the previous walk began.
pub(super) type Stale = BTreeMap<u16, Vec<(Which, HostPort)>>;

/// Runs the walks and lets callers wait for them.
#[derive(Debug)]
pub(super) struct Forgetting {
    shared: Arc<Shared>,
    /// Walks once, and reports its own failures.
    walk: fn(&Stale),
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    stale: Stale,
    /// Number of the walk that takes the queue next.
    next: u64,
    /// Walks before this number have ended.
    ended: u64,
    /// Whether a thread is walking; it checks the queue again before it stops.
    walking: bool,
}

/// A walk that callers can wait for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Walk(u64);

impl Forgetting {
    pub(super) fn new(walk: fn(&Stale)) -> Self {
        Self { shared: Arc::default(), walk }
    }

    /// Requests that connections by the UDP ports among these are deleted, by a walk that begins after this
    /// call. Returns `None` if there is no such port.
    pub(super) fn ask(&self, which: Which, ports: &[HostPort]) -> Option<Walk> {
        let mut udp = ports.iter().filter(|port| port.protocol == PortProtocol::Udp).peekable();
        udp.peek()?;
        let mut queue = locked(&self.shared.queue);
        for port in udp {
            queue.stale.entry(port.at.port()).or_default().push((which, *port));
        }
        let asked = Walk(queue.next);
        let begins = !std::mem::replace(&mut queue.walking, true);
        drop(queue);
        if begins {
            self.begin();
        }
        Some(asked)
    }

    /// Waits until the walk has ended, [`PATIENCE`] at most.
    pub(super) fn wait(&self, asked: Walk) {
        let due = Instant::now() + PATIENCE;
        let mut queue = locked(&self.shared.queue);
        while queue.ended <= asked.0 {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.shared.ended.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner);
            queue = waited.0;
        }
    }

    /// Walks on a thread of its own, or on this one if no thread can be created.
    fn begin(&self) {
        let (shared, walk) = (Arc::clone(&self.shared), self.walk);
        let spawned = thread::Builder::new().name("udp-forget".to_owned()).spawn(move || shared.serve(walk));
        if spawned.is_err() {
            self.shared.serve(self.walk);
        }
    }
}

impl Shared {
    /// Walks until no further request is queued.
    fn serve(&self, walk: fn(&Stale)) {
        loop {
            let mut queue = locked(&self.queue);
            if queue.stale.is_empty() {
                queue.walking = false;
                return;
            }
            let stale = std::mem::take(&mut queue.stale);
            queue.next += 1;
            let begun = queue.next;
            drop(queue);
            walk(&stale);
            locked(&self.queue).ended = begun;
            self.ended.notify_all();
        }
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn port(protocol: PortProtocol, number: u16) -> HostPort {
        let at = ([0, 0, 0, 0], number).into();
        HostPort { protocol, at, to: ([10, 1, 0, 2], 53).into() }
    }

    #[test]
    fn only_ports_for_udp_are_a_reason_to_walk() {
        let forgetting = Forgetting::new(|_| unreachable!());
        assert!(forgetting.ask(Which::Led, &[]).is_none());
        assert!(forgetting.ask(Which::Misled, &[port(PortProtocol::Tcp, 80)]).is_none());
    }

    #[test]
    fn who_asks_during_a_walk_shares_the_next_one() {
        static WALKS: Mutex<Vec<Stale>> = Mutex::new(Vec::new());
        static GATE: Mutex<()> = Mutex::new(());
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        let forgetting = Forgetting::new(|stale| {
            BEGUN.fetch_add(1, Ordering::SeqCst);
            drop(GATE.lock().unwrap());
            WALKS.lock().unwrap().push(stale.clone());
        });
        let closed = GATE.lock().unwrap();
        let [first, second, third] = [1, 2, 3].map(|number| port(PortProtocol::Udp, number));
        let during = forgetting.ask(Which::Led, &[first]).unwrap();
        while BEGUN.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let after = [(Which::Led, second), (Which::Misled, third)]
            .map(|(which, port)| forgetting.ask(which, &[port]).unwrap());
        drop(closed);
        after.into_iter().chain([during]).for_each(|walk| forgetting.wait(walk));
        let alone = Stale::from([(1, vec![(Which::Led, first)])]);
        let shared = Stale::from([(2, vec![(Which::Led, second)]), (3, vec![(Which::Misled, third)])]);
        assert_eq!(*WALKS.lock().unwrap(), [alone, shared]);
    }
}

#[cfg(feature = "model")]
mod model {
    use super::*;
    use crate::model::explore;

    /// The ports that have been walked for.
    static WALKED: std::sync::Mutex<Vec<u16>> = std::sync::Mutex::new(Vec::new());

    fn asks(forgetting: &Forgetting, number: u16) {
        let at = ([0, 0, 0, 0], number).into();
        let port = HostPort { protocol: PortProtocol::Udp, at, to: ([10, 1, 0, 2], 53).into() };
        let walk = forgetting.ask(Which::Led, &[port]).unwrap();
        forgetting.wait(walk);
        assert!(WALKED.lock().unwrap().contains(&number), "{number} has been waited for in vain");
    }

    #[test]
    fn nobody_waits_for_ever_and_nobody_goes_on_before_his_walk_has_ended() {
        explore(2_000, || {
            WALKED.lock().unwrap().clear();
            let walk: fn(&Stale) = |stale| {
                crate::sync::step();
                WALKED.lock().unwrap().extend(stale.keys());
            };
            let forgetting = Arc::new(Forgetting::new(walk));
            let others: Vec<_> = [1, 2]
                .map(|number| {
                    let forgetting = Arc::clone(&forgetting);
                    thread::spawn(move || asks(&forgetting, number))
                })
                .into();
            asks(&forgetting, 3);
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }
}
