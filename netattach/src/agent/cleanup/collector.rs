//! Detaches sandboxes for which no runtime will send a DEL: some runtimes never send GC, and after a crash
//! or a reboot a runtime may have forgotten its sandboxes.
//!
//! Every half minute the agent looks for sandboxes whose netns is gone ([`Engine::departed`]), for
//! unfinished operations that no runtime repeats, and, if the runtime's socket is known, for sandboxes that
//! the runtime does not list. A sandbox that every check of a grace time finds is detached as by DEL, in
//! its container's turn. If a check is not possible, the sandbox is kept. If the runtime lists none of the
//! attached sandboxes, it may be another runtime than theirs; then a sandbox with processes, or whose
//! processes are unknown, is kept too.
//!
//! [`Engine::departed`]: crate::attach::Engine::departed

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::waiting_dels::{UnderWay, WaitingDels};
use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::admission::scheduler::MOST_DELS;
use crate::agent::pods::drift::MOST_ROWS;
use crate::agent::request::request_log;
use crate::attach::{Attached, inhabited};
use crate::cni::CniError;
use crate::cri;
use crate::error_chain::Chain;
use crate::journal::JournalKey;
use crate::netns::Inhabited;
use crate::pace;
use crate::rpc::message::Condition;
use crate::sync::{Mutex, locked};
use crate::ticks::ticks;

/// Shortest and longest time between two checks.
const LOOKS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// An attached sandbox that the runtime does not list is considered only after this many grace times:
/// runtimes list a sandbox only once it has started, minutes after its ADD at worst.
const STARTING: u32 = 5;

/// Longest pause between two attempts for one sandbox.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// How long a list of the node's processes stays valid: a sandbox may wait for its slot among the DELs.
const PROCESSES_STAY: Duration = Duration::from_secs(2);

/// Most sandboxes collected at a time: an eighth of the queue of DELs, so that the runtime's DELs have
/// room.
const AT_ONCE: usize = MOST_DELS / 8;

/// Why a sandbox is to be detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// Its namespace and links are gone.
    Departed,
    /// An operation did not finish, and its sandbox is gone.
    Abandoned,
    /// The runtime does not list it. `lists_others`: the runtime lists at least one other attached sandbox,
    /// so it is the sandboxes' runtime, and has not lost all of its state.
    Unlisted { lists_others: bool },
}

/// How an attempt to collect a sandbox ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Detached,
    /// It need not be detached any more.
    NotDue,
    /// It is kept for now; the reason.
    Stays(&'static str),
}

/// Why a sandbox is kept that the runtime does not list.
const LIVED_IN: &str = "the runtime lists no attached pod at all, so it may be another one than theirs, and processes are \
                        or may be in its namespace; see runtimeSocket";

impl Why {
    fn text(self) -> &'static str {
        match self {
            Self::Departed => "its namespace is gone",
            Self::Abandoned => "it is half detached, and its namespace is gone",
            Self::Unlisted { .. } => "the runtime does not list it",
        }
    }
}

/// A sandbox that a check has found.
#[derive(Debug, Clone)]
struct Found {
    key: JournalKey,
    /// The sandbox at that time; `None` if it is not attached.
    attached: Option<Arc<Attached>>,
    why: Why,
}

impl Found {
    fn is_same(&self, other: &Self) -> bool {
        let is_same = match (&self.attached, &other.attached) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        is_same && self.why == other.why
    }
}

#[derive(Debug)]
struct Suspect {
    found: Found,
    again: Instant,
    attempts: u32,
    held: Option<Held>,
}

/// Why a suspect is still attached.
#[derive(Debug, PartialEq, Eq)]
enum Held {
    Failed(String),
    Stays(&'static str),
}

/// The node's processes, listed once for all sandboxes of a check.
#[derive(Debug, Default)]
struct Processes(Mutex<Option<(Instant, Arc<Inhabited>)>>);

impl Processes {
    /// Returns the list of processes, which is renewed when it is older than [`PROCESSES_STAY`].
    fn seen<E>(
        &self,
        now: Instant,
        look: impl FnOnce() -> Result<Inhabited, E>,
    ) -> Result<Arc<Inhabited>, E> {
        // Holds the lock while the processes are listed: concurrent callers need that list.
        let mut last = locked(&self.0);
        if let Some((at, seen)) = last.as_ref()
            && now.saturating_duration_since(*at) < PROCESSES_STAY
        {
            return Ok(Arc::clone(seen));
        }
        let seen = Arc::new(look()?);
        *last = Some((now, Arc::clone(&seen)));
        Ok(seen)
    }
}

/// The sandboxes that checks have found, and the runtime to ask.
#[derive(Debug)]
pub(in crate::agent) struct Collector {
    /// The grace time; `None`: nothing is collected.
    after: Option<Duration>,
    /// The runtime's socket; `None`: the runtime is not asked.
    runtime: Option<PathBuf>,
    state: Mutex<State>,
    /// The DELs that were recorded while no agent answered.
    pub(super) waiting_dels: WaitingDels,
}

#[derive(Debug, Default)]
struct State {
    suspects: BTreeMap<JournalKey, Suspect>,
    /// Since when each attached sandbox is known. Used only if the runtime is asked.
    known: BTreeMap<JournalKey, (Arc<Attached>, Instant)>,
    collected: u64,
    /// Why the runtime's list could not be obtained.
    unlisted: Option<String>,
}

impl Collector {
    pub(in crate::agent) fn new(
        state_dir: PathBuf,
        after: Option<Duration>,
        runtime: Option<PathBuf>,
    ) -> Self {
        let waiting_dels = WaitingDels::new(state_dir, interval(after));
        Self { after, runtime, state: Mutex::default(), waiting_dels }
    }

    /// How many sandboxes have been collected since the agent's start.
    pub(in crate::agent) fn collected(&self) -> u64 {
        locked(&self.state).collected
    }

    /// Returns the sandboxes about to be collected, those that cannot be, and the failure of a runtime that
    /// does not answer.
    pub(in crate::agent) fn troubles(&self) -> Vec<Condition> {
        let state = locked(&self.state);
        let mut troubles = bounded(self.waiting_dels.troubles(), "recorded DELs");
        let suspects = state.suspects.values().map(Suspect::condition).collect();
        troubles.extend(bounded(suspects, "stale sandboxes"));
        if let (Some(socket), Some(problem)) = (&self.runtime, &state.unlisted) {
            troubles.push(Condition {
                object: format!("runtime {}", socket.display()),
                problem: format!("cannot check for sandboxes that it has lost: {problem}"),
            });
        }
        troubles
    }

    /// Records the results of a check, and returns the sandboxes to collect now, those with the fewest
    /// failures first. So sandboxes that hang or fail repeatedly leave room for those not yet tried.
    fn take_in(&self, found: Vec<Found>, after: Duration, now: Instant) -> Vec<Found> {
        let mut state = locked(&self.state);
        let mut before = std::mem::take(&mut state.suspects);
        let mut due = Vec::new();
        for found in found {
            let same = before.remove(&found.key).filter(|suspect| suspect.found.is_same(&found));
            let suspect = same.unwrap_or_else(|| Suspect {
                found: found.clone(),
                again: now + after,
                attempts: 0,
                held: None,
            });
            if suspect.again <= now {
                due.push((suspect.attempts, found));
            }
            state.suspects.insert(suspect.found.key.clone(), suspect);
        }
        due.sort_by_key(|(attempts, _)| *attempts);
        due.into_iter().map(|(_, found)| found).collect()
    }

    /// Returns the sandboxes that have been attached long enough that the runtime should list them. Called
    /// before the runtime is asked.
    fn started(&self, all: Vec<Arc<Attached>>, after: Duration, now: Instant) -> Vec<Arc<Attached>> {
        let mut state = locked(&self.state);
        let mut before = std::mem::take(&mut state.known);
        let mut started = Vec::new();
        for attached in all {
            // Other users of CNI name no pod, and the runtime does not list their containers.
            if attached.plan.sandbox.pod.is_none() {
                continue;
            }
            let same = before.remove(&attached.key).filter(|(known, _)| Arc::ptr_eq(known, &attached));
            let (_, since) = same.unwrap_or_else(|| (Arc::clone(&attached), now));
            if since + after * STARTING <= now {
                started.push(Arc::clone(&attached));
            }
            state.known.insert(attached.key.clone(), (attached, since));
        }
        started
    }

    fn done(&self, key: &JournalKey, collected: bool) {
        let mut state = locked(&self.state);
        state.suspects.remove(key);
        state.collected += u64::from(collected);
    }

    /// Records why a suspect is still attached, logs it if it is new, and schedules the next attempt.
    fn held(&self, key: &JournalKey, held: Held, now: Instant) {
        let mut state = locked(&self.state);
        let Some(suspect) = state.suspects.get_mut(key) else { return };
        suspect.attempts = suspect.attempts.saturating_add(1);
        suspect.again = now + pace::after_failures(interval(self.after), suspect.attempts, LONGEST_PAUSE);
        let container = &key.container_id;
        match &held {
            _ if suspect.held.as_ref() == Some(&held) => {}
            Held::Failed(error) => tracing::warn!(container, error, "not detached; it is tried again"),
            Held::Stays(why) => {
                let found = suspect.found.why.text();
                tracing::warn!(container, found, why, "stale sandbox without a DEL; it stays attached");
            }
        }
        suspect.held = Some(held);
    }

    /// Records whether the runtime has answered; logs a new error.
    fn heard(&self, error: Option<String>) {
        let mut state = locked(&self.state);
        if let Some(error) = error.as_ref().filter(|error| state.unlisted.as_ref() != Some(*error)) {
            tracing::warn!(error, "cannot check for sandboxes that the runtime has lost");
        }
        state.unlisted = error;
    }
}

impl Suspect {
    fn condition(&self) -> Condition {
        let why = self.found.why.text();
        let problem = match &self.held {
            None => format!("{why}, and no runtime has asked for its DEL: it is about to be detached"),
            Some(Held::Stays(reason)) => format!("{why}, and it stays attached: {reason}"),
            Some(Held::Failed(error)) => format!(
                "{why}, and detaching it has failed {} times; it is tried again: {error}",
                self.attempts
            ),
        };
        Condition { object: format!("container {}", self.found.key.container_id), problem }
    }
}

/// Returns at most [`MOST_ROWS`] rows, plus a row with the number of the others.
fn bounded(mut rows: Vec<Condition>, of: &str) -> Vec<Condition> {
    let more = rows.len().saturating_sub(MOST_ROWS);
    rows.truncate(MOST_ROWS);
    let row = || Condition { object: of.to_owned(), problem: format!("{more} more are not shown") };
    rows.extend((more > 0).then(row));
    rows
}

/// Returns those of `due` that can begin beside `under_way` others, each with its container's turn. A
/// sandbox without a turn is skipped: another operation, possibly its own collection, has it.
fn begun<T>(due: Vec<Found>, under_way: usize, turn: impl Fn(&Found) -> Option<T>) -> Vec<(Found, T)> {
    let with_turns = due.into_iter().filter_map(|found| turn(&found).map(|turn| (found, turn)));
    with_turns.take(AT_ONCE.saturating_sub(under_way)).collect()
}

/// Returns the time between two checks.
fn interval(after: Option<Duration>) -> Duration {
    let [shortest, longest] = LOOKS;
    after.unwrap_or(longest).clamp(shortest, longest)
}

impl Agent {
    /// Looks for recorded DELs, and for sandboxes that no runtime will ask for, until the agent ends.
    pub(in crate::agent) async fn keep_collecting(self: Arc<Self>) {
        let mut tick = ticks(interval(self.collector.after));
        // The first tick is immediate, and the start of the agent has already done this.
        tick.tick().await;
        let (mut waiting_dels, mut lost) = (UnderWay::default(), JoinSet::new());
        loop {
            tick.tick().await;
            self.carry_out_waiting(&mut waiting_dels).await;
            if let Some(after) = self.collector.after {
                self.collect_lost(after, &mut lost).await;
            }
        }
    }

    /// Looks for lost sandboxes, and starts to collect those that are due, beside those `under_way`. Does
    /// not wait for them, as one may hang.
    async fn collect_lost(self: &Arc<Self>, after: Duration, under_way: &mut JoinSet<()>) {
        let Some(mut found) = self.look_for_lost().await else { return };
        let unlisted = self.ask_the_runtime(after, &found).await;
        found.extend(unlisted);
        while under_way.try_join_next().is_some() {}
        let due = self.collector.take_in(found, after, Instant::now());
        let begun = begun(due, under_way.len(), |found| self.admission.turns().take(&found.key.container_id));
        // Shared by the turns of all of them.
        let processes = Arc::new(Processes::default());
        for (found, turn) in begun {
            turn.rolls_back();
            let (agent, processes) = (Arc::clone(self), Arc::clone(&processes));
            under_way.spawn(async move {
                agent.collect_one(found, processes).await;
                drop(turn);
            });
        }
    }

    /// Returns the lost sandboxes; `None`: the check failed, so nothing is known.
    async fn look_for_lost(self: &Arc<Self>) -> Option<Vec<Found>> {
        let looked = self.work(|agent| {
            let departed = agent.engine.departed()?;
            let abandoned = agent.engine.abandoned()?;
            Ok((departed, abandoned))
        });
        match looked.await {
            Ok((departed, abandoned)) => {
                let departed = departed.into_iter().map(|attached| Found {
                    key: attached.key.clone(),
                    attached: Some(attached),
                    why: Why::Departed,
                });
                let abandoned =
                    abandoned.into_iter().map(|key| Found { key, attached: None, why: Why::Abandoned });
                Some(departed.chain(abandoned).collect())
            }
            Err(error) => {
                tracing::error!(error = %Chain(&error), "stale-sandbox check failed");
                None
            }
        }
    }

    /// Returns the sandboxes that the runtime does not list, except those in `found`.
    async fn ask_the_runtime(&self, after: Duration, found: &[Found]) -> Vec<Found> {
        let Some(socket) = &self.collector.runtime else { return Vec::new() };
        let all = self.engine.registry().all();
        let mut by_themselves = all.clone();
        by_themselves.retain(|attached| self.engine.registry().goes_by_itself(attached));
        let mut started = self.collector.started(by_themselves, after, Instant::now());
        let listed = match cri::sandboxes(socket).await {
            Ok(listed) => listed,
            Err(error) => {
                self.collector.heard(Some(Chain(&error).to_string()));
                return Vec::new();
            }
        };
        self.collector.heard(None);
        let lists_others = all.iter().any(|it| listed.contains(&it.key.container_id));
        let known: HashSet<&JournalKey> = found.iter().map(|found| &found.key).collect();
        started.retain(|it| !listed.contains(&it.key.container_id) && !known.contains(&it.key));
        let unlisted = |attached: Arc<Attached>| Found {
            key: attached.key.clone(),
            attached: Some(attached),
            why: Why::Unlisted { lists_others },
        };
        started.into_iter().map(unlisted).collect()
    }

    async fn collect_one(self: &Arc<Self>, found: Found, processes: Arc<Processes>) {
        let key = found.key.clone();
        match self.in_lane(Class::Del, move |agent| agent.collect_blocking(&found, &processes)).await {
            Ok(Outcome::Detached) => self.collector.done(&key, true),
            Ok(Outcome::NotDue) => self.collector.done(&key, false),
            Ok(Outcome::Stays(why)) => self.collector.held(&key, Held::Stays(why), Instant::now()),
            Err(error) => {
                self.collector.held(&key, Held::Failed(Chain(&error).to_string()), Instant::now());
            }
        }
    }

    fn collect_blocking(&self, found: &Found, processes: &Processes) -> Result<Outcome, CniError> {
        let Found { key, attached, why } = found;
        let begun = Instant::now();
        let known = self.engine.registry().with_dynamic(key);
        let detached = || {
            request_log::collected(&key.container_id, why.text(), &known, begun.elapsed());
            Ok(Outcome::Detached)
        };
        let Some(attached) = attached else {
            return if self.engine.finish(key)? { detached() } else { Ok(Outcome::NotDue) };
        };
        let seen = || processes.seen(Instant::now(), inhabited);
        let is_due = match why {
            Why::Departed => self.engine.has_departed(attached, seen)?,
            Why::Abandoned => self.engine.is_same(attached),
            Why::Unlisted { .. } => {
                self.engine.is_same(attached) && self.engine.registry().goes_by_itself(attached)
            }
        };
        if !is_due {
            return Ok(Outcome::NotDue);
        }
        let may_be_anothers = *why == Why::Unlisted { lists_others: false };
        if may_be_anothers && self.engine.is_lived_in(attached, &*seen()?) != Some(false) {
            return Ok(Outcome::Stays(LIVED_IN));
        }
        let pod = self.engine.del_recorded(key)?;
        self.withdraw(pod.as_ref());
        detached()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::rig::attached;
    use crate::netns::NetnsId;
    use crate::plan::Dynamic;

    const AFTER: Duration = Duration::from_secs(60);

    fn found(name: &str, why: Why) -> Vec<Found> {
        let key = JournalKey { container_id: name.into(), ifname: "eth0".into() };
        vec![Found { key, attached: None, why }]
    }

    #[test]
    fn only_what_every_look_of_the_grace_time_finds_is_collected() {
        let collector = Collector::new("/nonexistent".into(), Some(AFTER), None);
        let start = Instant::now();
        let look = |after: u64, found: Vec<Found>| {
            collector.take_in(found, AFTER, start + Duration::from_secs(after)).len()
        };
        let departed = || found("a", Why::Departed);
        let unlisted = || found("a", Why::Unlisted { lists_others: true });
        assert_eq!([look(0, departed()), look(30, departed()), look(60, departed())], [0, 0, 1]);
        assert_eq!(look(90, Vec::new()), 0, "it is there again");
        assert_eq!([look(120, departed()), look(150, departed()), look(180, departed())], [0, 0, 1]);
        assert_eq!([look(200, unlisted()), look(230, unlisted())], [0, 0]);
        assert_eq!(look(260, unlisted()), 1, "for a grace time of its own");
    }

    #[test]
    fn only_pods_that_are_attached_for_long_are_looked_for_in_the_runtimes_list() {
        let collector = Collector::new("/nonexistent".into(), Some(AFTER), None);
        let start = Instant::now();
        let at = |after: u64, all: &[&Arc<Attached>]| {
            let all = all.iter().map(|attached| Arc::clone(attached)).collect();
            let started = collector.started(all, AFTER, start + Duration::from_secs(after));
            started.into_iter().map(|attached| attached.key.container_id.clone()).collect::<Vec<_>>()
        };
        let pod = serde_json::json!({"namespace": "shop", "name": "a"});
        let (a, other) = (attached("a", &pod), attached("other", &serde_json::Value::Null));
        assert_eq!(at(0, &[&a, &other]), [""; 0]);
        assert_eq!(at(299, &[&a, &other]), [""; 0], "it may be starting");
        assert_eq!(at(300, &[&a, &other]), ["a"], "the other names no pod");
        let again = attached("a", &pod);
        assert_eq!(at(301, &[&again]), [""; 0], "attached anew");
        assert_eq!(at(601, &[&again]), ["a"]);
        // An attachment made for a live pod, when it is collected on its own.
        let mut live = Attached::clone(&attached("b", &pod));
        live.plan.dynamic = Some(Dynamic { sandbox: "eth0".to_owned(), by: String::new() });
        let live = Arc::new(live);
        assert_eq!([at(602, &[&live]), at(902, &[&live])], [vec![], vec!["b".to_owned()]]);
    }

    #[test]
    fn processes_are_looked_at_once_for_all_sandboxes_of_a_look() {
        let processes = Processes::default();
        let start = Instant::now();
        let looks = std::cell::Cell::new(0);
        let seen = |after: Duration, works: bool| {
            let look = || {
                looks.set(looks.get() + 1);
                let path = format!("/proc/{}/ns/net", looks.get()).into();
                let paths = [(NetnsId { device: 4, inode: 1 }, path)].into();
                if works { Ok(Inhabited { paths, complete: true }) } else { Err("no") }
            };
            let seen = processes.seen(start + after, look);
            seen.map(|seen| seen.paths.values().map(|it| it.display().to_string()).collect::<Vec<_>>())
        };
        let of = |number: u32| Ok(vec![format!("/proc/{number}/ns/net")]);
        assert_eq!(seen(Duration::ZERO, false), Err("no"));
        assert_eq!(seen(Duration::ZERO, true), of(2), "each that needs it tries");
        assert_eq!(seen(Duration::from_millis(1), true), of(2));
        assert_eq!(seen(PROCESSES_STAY - Duration::from_nanos(1), false), of(2));
        assert_eq!(seen(PROCESSES_STAY, true), of(3), "it has waited for a place");
        assert_eq!(looks.get(), 3);
    }

    #[test]
    fn what_fails_is_tried_again_and_shown_until_it_is_done() {
        let collector = Collector::new("/nonexistent".into(), Some(AFTER), None);
        let start = Instant::now();
        let due = |after: u64| {
            collector.take_in(found("a", Why::Departed), AFTER, start + Duration::from_secs(after))
        };
        due(0);
        let [waits] = <[Condition; 1]>::try_from(collector.troubles()).unwrap();
        assert_eq!(
            (waits.object.as_str(), waits.problem.as_str()),
            (
                "container a",
                "its namespace is gone, and no runtime has asked for its DEL: it is about to be detached"
            )
        );
        let key = due(60).remove(0).key;
        collector.held(&key, Held::Failed("not now".into()), start + Duration::from_secs(60));
        assert_eq!([due(61).len(), due(90).len()], [0, 1]);
        collector.held(&key, Held::Failed("not now".into()), start + Duration::from_secs(90));
        assert_eq!([due(120).len(), due(150).len()], [0, 1]);
        let [failed] = <[Condition; 1]>::try_from(collector.troubles()).unwrap();
        assert_eq!(
            failed.problem,
            "its namespace is gone, and detaching it has failed 2 times; it is tried again: not now"
        );
        collector.held(&key, Held::Stays(LIVED_IN), start + Duration::from_secs(150));
        let [stays] = <[Condition; 1]>::try_from(collector.troubles()).unwrap();
        assert_eq!(stays.problem, format!("its namespace is gone, and it stays attached: {LIVED_IN}"));
        collector.done(&key, true);
        assert!(collector.troubles().is_empty());
        assert_eq!(collector.collected(), 1);
    }

    /// A sandbox of a network that hangs holds its container's turn for that time.
    #[test]
    fn what_hangs_keeps_its_places_for_itself_and_no_look_waits_for_it() {
        let collector = Collector::new("/nonexistent".into(), Some(AFTER), None);
        let start = Instant::now();
        let many = || {
            let names = (0..2 * AT_ONCE).map(|number| format!("{number:03}"));
            names.flat_map(|name| found(&name, Why::Abandoned)).collect::<Vec<_>>()
        };
        assert_eq!(collector.take_in(many(), AFTER, start).len(), 0);
        let turns = std::cell::RefCell::new(HashSet::new());
        let look = |after: u32, under_way: usize| {
            let due = collector.take_in(many(), AFTER, start + after * AFTER);
            let take = |found: &Found| turns.borrow_mut().insert(found.key.clone()).then_some(());
            begun(due, under_way, take).into_iter().map(|(found, ())| found.key).collect::<Vec<_>>()
        };
        let first = look(1, 0);
        assert_eq!((first.len(), turns.borrow().len()), (AT_ONCE, AT_ONCE), "no turn is taken beyond");
        assert_eq!(look(2, AT_ONCE), []);
        let ended = &first[..3];
        for key in ended {
            collector.held(key, Held::Failed("not now".into()), start);
            turns.borrow_mut().remove(key);
        }
        let next = look(3, AT_ONCE - ended.len());
        assert_eq!(next.len(), ended.len());
        assert!(!next.iter().any(|key| first.contains(key)), "those that were not tried go first");
    }

    #[test]
    fn looks_are_as_far_apart_as_the_setting_says() {
        let seconds = |after: Option<u64>| interval(after.map(Duration::from_secs)).as_secs();
        assert_eq!([None, Some(1), Some(7), Some(3600)].map(seconds), [30, 1, 7, 30]);
    }
}
