//! The rules of the agent's attachments, and the periodic repair that puts back what other programs remove.
//!
//! The lock on the wanted rules is held for one attempt at a time, and an attempt does not wait. So an
//! attachment that loses against other writers of the packet filter again and again does not delay the
//! others. Reading the current trouble is not delayed either, since it has a lock of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::settle::{Note, Wanted, closes, settle};
use super::{
    FirewallError, Kernel, Owner, Settled, Tables, attempt, carry_out, try_to_admit, try_to_dismiss,
};
use crate::error_chain::Chain;
use crate::put_back::PutBack;
use crate::step::Admitted;

/// The rules of the agent's attachments.
#[derive(Debug)]
pub struct Firewall {
    owner: Owner,
    tables: Box<dyn Tables>,
    state: Mutex<State>,
    /// Lock order: this lock may be taken while the lock of `state` is held; never the other way round.
    trouble: Mutex<Trouble>,
}

#[derive(Debug, Default)]
struct State {
    /// Wanted rules, by the comment that they carry.
    wanted: BTreeMap<String, Admitted>,
    /// Comments of rules that are about to be removed: the existing ones stay until then.
    kept: BTreeSet<String>,
    /// Whether every record could be read. If so, rules that no attachment wants are removed.
    is_all_known: bool,
    /// Whether the first repair has run, which removes rules without an attachment.
    has_begun: bool,
    /// The packet filter's generation in which all rules were right.
    right_in: Option<u32>,
}

#[derive(Debug, Default)]
struct Trouble {
    /// Why the rules are not as they should be.
    error: Option<String>,
    /// Counts how often removed rules were put back. One count serves all rules, because a program that
    /// removes rules mostly removes them all.
    put_back: PutBack<()>,
}

impl Firewall {
    /// The rules of the agent with that state directory.
    pub fn new(state: &str) -> Self {
        Self::by(Box::new(Kernel), state)
    }

    fn by(tables: Box<dyn Tables>, state: &str) -> Self {
        Self { owner: Owner::agent(state), tables, state: Mutex::default(), trouble: Mutex::default() }
    }

    /// The owner that the comments of the rules name.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Takes over an attachment of an earlier agent. Nothing is written before [`Firewall::begin`].
    pub fn adopt(&self, note: String, admitted: Admitted) {
        self.lock().wanted.entry(note).or_insert(admitted);
    }

    /// Keeps the remaining rules of an earlier agent's attachment until [`Firewall::detach`]: the attachment
    /// is partly detached, and its addresses may meanwhile belong to another one. A bridge that these rules
    /// close stays closed.
    pub fn keep(&self, note: String) {
        self.lock().kept.insert(note);
    }

    /// Makes the rules what the adopted attachments want. `all`: every record could be read, so rules without
    /// an attachment are removed.
    ///
    /// # Errors
    /// The kernel refuses. [`Firewall::repair`] tries again.
    pub fn begin(&self, all: bool) -> Result<(), FirewallError> {
        self.lock().is_all_known = all;
        self.repair().map(drop)
    }

    /// Gives an attachment its rules. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses. [`Firewall::detach`] takes back what has been done.
    pub fn attach(&self, note: String, admitted: Admitted) -> Result<(), FirewallError> {
        carry_out(|| {
            let mut state = self.lock();
            let done = try_to_admit(&*self.tables, &note, &admitted)?;
            if done.is_some() {
                state.wanted.insert(note.clone(), admitted.clone());
            }
            Ok(done)
        })
        .map(drop)
    }

    /// Removes the rules of an attachment, whether or not the attachment is known. Idempotent.
    ///
    /// # Errors
    /// The kernel refuses. In that case nothing has changed.
    pub fn detach(&self, note: &str) -> Result<(), FirewallError> {
        carry_out(|| {
            let mut state = self.lock();
            let done = try_to_dismiss(&*self.tables, note)?;
            if done.is_some() {
                state.wanted.remove(note);
                state.kept.remove(note);
            }
            Ok(done)
        })
        .map(drop)
    }

    /// Puts back rules that another program has removed: at once, or once a minute if the removals go on and
    /// no bridge is open meanwhile. Returns whether rules were changed.
    ///
    /// # Errors
    /// The kernel does not answer, or refuses; or rules were put back too often just now.
    pub fn repair(&self) -> Result<bool, FirewallError> {
        let is_first = !self.lock().has_begun;
        let allowed = || {
            let checked = self.lock_trouble().put_back.check(&(), Instant::now());
            checked.map_err(FirewallError::FoughtOver)
        };
        let repaired = carry_out(|| self.lock().repair(&self.owner, &*self.tables, &allowed));
        let mut trouble = self.lock_trouble();
        trouble.error = repaired.as_ref().err().map(|error| Chain(error).to_string());
        let changed = repaired?.changed;
        if changed && !is_first {
            trouble.put_back.count((), Instant::now());
        }
        Ok(changed)
    }

    /// Whether no attachment wants rules, and nothing is to be tried again: [`Firewall::repair`] would do nothing.
    /// `false` while another thread is at work. Does not wait.
    pub fn has_nothing(&self) -> bool {
        let wants_nothing = |state: &State| state.has_begun && state.wanted.is_empty();
        self.state.try_lock().is_ok_and(|state| wants_nothing(&state))
            && self.trouble.try_lock().is_ok_and(|trouble| trouble.error.is_none())
    }

    /// Returns why the rules are not as they should be, or why they are unlikely to stay so.
    pub fn trouble(&self) -> Option<String> {
        let trouble = self.lock_trouble();
        let fought_over = || trouble.put_back.fought_over(&(), Instant::now());
        trouble.error.clone().or_else(|| Some(FirewallError::FoughtOver(fought_over()?).to_string()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No lock is poisoned: a panic ends the agent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_trouble(&self) -> MutexGuard<'_, Trouble> {
        // A poisoned lock can be used: each change is complete by itself.
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Makes one attempt to establish the wanted rules. `allowed` says whether rules that other programs
    /// removed may be put back now.
    fn repair(
        &mut self,
        owner: &Owner,
        tables: &dyn Tables,
        allowed: &dyn Fn() -> Result<(), FirewallError>,
    ) -> Result<Option<Settled>, FirewallError> {
        let is_right = || tables.generation().is_ok_and(|now| self.right_in == Some(now));
        if self.has_begun && (self.wanted.is_empty() || is_right()) {
            return Ok(Some(Settled { changed: false, generation: self.right_in }));
        }
        let (known, kept) = (&self.wanted, &self.kept);
        let wanted: Vec<Wanted<'_>> =
            known.iter().map(|(note, admitted)| Wanted { note, admitted }).collect();
        let is_known = |note: &str| known.contains_key(note) || kept.contains(note);
        let is_gone =
            |note: &Note<'_>| note.owner == owner.0 && self.is_all_known && !is_known(note.attachment);
        let settled = attempt(tables, &wanted, |view| {
            let changes = settle(view, &wanted, &is_gone);
            if self.has_begun && !changes.is_empty() {
                let is_closed = !changes.iter().any(|(_, change)| closes(change));
                // `allowed` is called for changes that close a bridge too, so that repeated removals are reported.
                allowed().or_else(|error| if is_closed { Err(error) } else { Ok(()) })?;
            }
            Ok(changes)
        })?;
        if let Some(Settled { generation, .. }) = settled {
            self.right_in = generation;
            self.has_begun = true;
        }
        Ok(settled)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::netlink::Error;
    use crate::netlink::filter::{Ask, Change, Filter, Placed, Rule, Verdict, Version, View};
    use crate::step::Ingress;

    /// Longest wait for an operation that must not be delayed.
    const SOON: Duration = Duration::from_secs(10);

    /// Empty tables that are never written.
    #[derive(Debug, Default)]
    struct Stub {
        /// While this is true, every change that contains this address is too late.
        is_contended: AtomicBool,
        late: AtomicUsize,
        written: AtomicU32,
    }

    const CONTENDED: &str = "10.1.0.2";

    impl Tables for Arc<Stub> {
        fn view(&self, _: &BTreeSet<&str>) -> Result<View, Error> {
            let filter =
                |version| Filter { version, is_there: false, chains: BTreeSet::new(), rules: Vec::new() };
            Ok(View::of([filter(Version::V4), filter(Version::V6)]))
        }

        fn change(&self, _: &View, changes: &[(Version, Change)]) -> Result<bool, Error> {
            if self.is_contended.load(Ordering::SeqCst) && format!("{changes:?}").contains(CONTENDED) {
                self.late.fetch_add(1, Ordering::SeqCst);
                return Ok(false);
            }
            self.written.fetch_add(1, Ordering::SeqCst);
            Ok(true)
        }

        fn generation(&self) -> Result<u32, Error> {
            Ok(self.written.load(Ordering::SeqCst))
        }
    }

    /// Tables with these rules in the chain `CNI-FORWARD` of IPv4, and the changes asked of them.
    #[derive(Debug)]
    struct Told {
        rules: Vec<Rule>,
        changes: Mutex<Vec<Change>>,
    }

    impl Tables for Arc<Told> {
        fn view(&self, _: &BTreeSet<&str>) -> Result<View, Error> {
            let chain = || "CNI-FORWARD".to_owned();
            let placed = self.rules.iter().zip(1..).map(|(rule, handle)| Placed {
                chain: chain(),
                handle,
                rule: Some(rule.clone()),
            });
            let filter = |version, rules| Filter { version, is_there: true, chains: [chain()].into(), rules };
            Ok(View::of([filter(Version::V4, placed.collect()), filter(Version::V6, Vec::new())]))
        }

        fn change(&self, _: &View, changes: &[(Version, Change)]) -> Result<bool, Error> {
            self.changes.lock().unwrap().extend(changes.iter().map(|(_, change)| change.clone()));
            Ok(true)
        }

        fn generation(&self) -> Result<u32, Error> {
            Ok(1)
        }
    }

    /// An attachment that is half detached still has rules, or has none any more.
    #[test]
    fn what_is_half_detached_keeps_what_is_there_of_it_and_gets_no_more() {
        let own = |container: &str| Rule {
            asks: vec![Ask::Source("10.1.0.2".parse().unwrap())],
            verdict: Verdict::Accept,
            comment: Owner::agent("/state").note("lan", container, "eth0"),
        };
        for (rules, expected) in [(vec![own("a")], 1), (Vec::new(), 0)] {
            let tables = Arc::new(Told { rules, changes: Mutex::default() });
            let firewall = Firewall::by(Box::new(Arc::clone(&tables)), "/state");
            firewall.keep(note(&firewall, "a"));
            firewall.begin(true).unwrap();
            assert_eq!(*tables.changes.lock().unwrap(), []);
            firewall.detach(&note(&firewall, "a")).unwrap();
            let changes = tables.changes.lock().unwrap();
            assert!(changes.iter().all(|change| matches!(change, Change::Remove { .. })), "{changes:?}");
            assert_eq!(changes.len(), expected);
        }
        // Rules without an attachment are removed.
        let tables = Arc::new(Told { rules: vec![own("a"), own("b")], changes: Mutex::default() });
        let firewall = Firewall::by(Box::new(Arc::clone(&tables)), "/state");
        firewall.keep(note(&firewall, "a"));
        firewall.begin(true).unwrap();
        let gone = Change::Remove { chain: "CNI-FORWARD".to_owned(), handle: 2 };
        assert_eq!(*tables.changes.lock().unwrap(), [gone]);
    }

    fn admitted(address: &str) -> Admitted {
        Admitted {
            addresses: vec![address.parse().unwrap()],
            admin_chain: "CNI-ADMIN".to_owned(),
            closed: None,
        }
    }

    fn firewall() -> (Arc<Stub>, Arc<Firewall>) {
        let stub = Arc::<Stub>::default();
        let firewall = Firewall::by(Box::new(Arc::clone(&stub)), "/state");
        firewall.begin(true).unwrap();
        (stub, Arc::new(firewall))
    }

    fn note(firewall: &Firewall, container: &str) -> String {
        firewall.owner().note("lan", container, "eth0")
    }

    #[test]
    fn there_is_nothing_to_look_after_while_no_attachment_wants_rules() {
        let new = Firewall::by(Box::new(Arc::<Stub>::default()), "/state");
        assert!(!new.has_nothing(), "rules of an earlier agent may be left");
        let (_, firewall) = firewall();
        let one = note(&firewall, "a");
        assert!(firewall.has_nothing());
        firewall.attach(one.clone(), admitted("10.1.0.3")).unwrap();
        assert!(!firewall.has_nothing());
        firewall.detach(&one).unwrap();
        assert!(firewall.has_nothing());
        let _held = firewall.lock();
        assert!(!firewall.has_nothing(), "another thread is at work");
    }

    #[test]
    fn an_attachment_that_others_are_quicker_than_delays_nobody() {
        let (stub, firewall) = firewall();
        stub.is_contended.store(true, Ordering::SeqCst);
        let (late, late_one) = (Arc::clone(&firewall), note(&firewall, "a"));
        let late = thread::spawn(move || late.attach(late_one, admitted(CONTENDED)));
        while stub.late.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        let (done, is_done) = channel();
        let (other, other_one) = (Arc::clone(&firewall), note(&firewall, "b"));
        let other = thread::spawn(move || {
            let _ =
                done.send(other.attach(other_one.clone(), admitted("10.1.0.3")).map_err(|it| it.to_string()));
            let _ = done.send(other.detach(&other_one).map_err(|it| it.to_string()));
            let _ = done.send(other.trouble().map_or(Ok(()), Err));
        });
        for what in ["attach", "detach", "trouble"] {
            assert_eq!(is_done.recv_timeout(SOON), Ok(Ok(())), "{what}");
        }
        // The attempt goes on meanwhile, and ends once no other process interferes.
        let tries = stub.late.load(Ordering::SeqCst);
        while stub.late.load(Ordering::SeqCst) == tries {
            thread::yield_now();
        }
        stub.is_contended.store(false, Ordering::SeqCst);
        late.join().unwrap().unwrap();
        other.join().unwrap();
    }

    /// Rows: FWL-fought.
    #[test]
    fn what_another_program_removes_again_and_again_is_put_back_a_few_times_and_then_told() {
        let (stub, firewall) = firewall();
        firewall.attach(note(&firewall, "a"), admitted("10.1.0.3")).unwrap();
        // The tables are empty at each read.
        let fought = "tables filter of the node's packet filter: another program removes rules for pods again and again: they were \
                      put back 5 times, and from now on are once a minute, those of closed bridges each \
                      time (`nft monitor` shows which program it is)";
        for time in 1..=5 {
            assert!(firewall.repair().unwrap(), "{time}");
            assert_eq!(firewall.trouble(), None, "{time}");
        }
        let written = stub.written.load(Ordering::SeqCst);
        for _ in 0..3 {
            assert_eq!(firewall.repair().unwrap_err().to_string(), fought);
            assert_eq!(firewall.trouble().as_deref(), Some(fought));
        }
        assert_eq!(stub.written.load(Ordering::SeqCst), written);
        // A pod that comes meanwhile gets its rules all the same.
        firewall.attach(note(&firewall, "b"), admitted("10.1.0.4")).unwrap();
        assert_eq!(stub.written.load(Ordering::SeqCst), written + 1);
    }

    /// Rows: FWL-fought.
    #[test]
    fn a_bridge_that_another_program_opens_again_and_again_is_closed_each_time_and_that_is_told() {
        let (_, firewall) = firewall();
        let closed = Some((Ingress::SameBridge, "br0".to_owned()));
        firewall.attach(note(&firewall, "a"), Admitted { closed, ..admitted("10.1.0.3") }).unwrap();
        for time in 1..=8 {
            assert!(firewall.repair().unwrap(), "{time}");
        }
        assert_eq!(firewall.trouble(), Some(FirewallError::FoughtOver(8).to_string()));
    }
}
