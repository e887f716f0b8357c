//! Live pods: when the annotation of an attached pod changes, its interfaces follow. A network that is
//! added to the annotation is attached as by `netattachctl attach`, and detached when it is removed from
//! the annotation. Interfaces of the pod's ADD stay until its sandbox ends, and a network that cannot be
//! attached is retried; `netattachctl status` shows both.
//!
//! [`changes`](super::changes) computes the changes, and is pure. Only pods that have changed are compared.
//! Several pods are changed at a time, within the limits of [`Following`]: a hanging network does not delay
//! the pods of other networks. A pod with changes at several networks gets a turn for each of them, one
//! after another ([`Round`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::{Id, JoinSet};

use super::changes::{Change, Interface, Made, Round, changes, network};
use super::following::{Asking, Following};
use crate::agent::Agent;
use crate::agent::health::share::shared;
use crate::attach::Attached;
use crate::error_chain::{Chain, clipped};
use crate::journal::JournalKey;
use crate::npwg::{self, NETWORKS_ANNOTATION, NetworkRef, SelectionError};
use crate::objects::{Identity, ObjectName, Objects, Pod};
use crate::own_thread;
use crate::rpc::message::{AttachCall, Condition, DetachCall, Response, SandboxName};
use crate::sync::{Mutex, locked};
use crate::ticks::ticks;

/// The requester of an attachment made by annotation, in its record and in the pod's status.
const BY_ANNOTATION: &str = "annotation";

/// How often failed changes are retried.
const AGAIN: Duration = Duration::from_secs(30);
/// Most rows that are shown.
const MOST_ROWS: usize = 100;
/// How long changes of the source are gathered.
const GATHER: Duration = Duration::from_millis(20);

/// The pods of attached sandboxes, as of the last check.
#[derive(Debug, Default)]
struct Seen {
    /// Each with the number of the last check that found it.
    pods: BTreeMap<JournalKey, (Weak<Pod>, u64)>,
    looks: u64,
    /// The input of the last check: all pods, and the registry's
    /// [revision](crate::attach::Registry::revision).
    of: Option<(Identity<ObjectName, Arc<Pod>>, u64)>,
}

/// The pods as of the last check, and the failed changes.
#[derive(Debug, Default)]
pub(super) struct LivePods {
    seen: Mutex<Seen>,
    conditions: Mutex<BTreeMap<JournalKey, Vec<Condition>>>,
    /// Notified when there is a new sandbox whose networks are to be attached.
    again: Notify,
}

impl LivePods {
    /// Returns the differences between live pods and their annotations.
    pub(in crate::agent) fn conditions(&self) -> Vec<Condition> {
        let conditions = locked(&self.conditions);
        shared(conditions.values().flatten().cloned().collect(), MOST_ROWS)
    }

    /// Requests a check for new sandboxes.
    pub(in crate::agent) fn look_again(&self) {
        self.again.notify_one();
    }

    /// Whether there is nothing to do: pods and attachments are unchanged since the last check, and no
    /// failed change is due for a retry.
    fn has_seen(&self, objects: &Objects, revision: u64, tries_again: bool) -> bool {
        if tries_again && !locked(&self.conditions).is_empty() {
            return false;
        }
        let seen = locked(&self.seen);
        seen.of.as_ref().is_some_and(|(pods, attached)| *attached == revision && pods.is_of(&objects.pods))
    }

    /// Returns the pods that have changed since the last check, with their sandboxes, and those with
    /// failures that `again` selects for a retry. `revision`: that of the registry, read before `attached`.
    fn changed(
        &self,
        objects: &Objects,
        (attached, revision): (&[Arc<Attached>], u64),
        again: &dyn Fn(&JournalKey) -> bool,
    ) -> Vec<(JournalKey, Arc<Pod>)> {
        let mut seen = locked(&self.seen);
        let mut conditions = locked(&self.conditions);
        let mut changed = Vec::new();
        seen.looks += 1;
        let look = seen.looks;
        for sandbox in attached.iter().filter(|it| it.plan.dynamic.is_none()) {
            let Some(named) = &sandbox.plan.sandbox.pod else { continue };
            let Some(pod) = objects.pods.get(&named.name) else { continue };
            let is_same = named.uid.as_deref().is_none_or(|uid| pod.has_uid(uid));
            if !is_same || pod.terminating || pod.phase.has_ended() {
                continue;
            }
            let is_seen = seen.take_in(&sandbox.key, pod, look);
            if !is_seen || (conditions.contains_key(&sandbox.key) && again(&sandbox.key)) {
                changed.push((sandbox.key.clone(), Arc::clone(pod)));
            }
        }
        seen.pods.retain(|_, (_, found)| *found == look);
        conditions.retain(|key, _| seen.pods.contains_key(key));
        seen.of = Some((objects.pods.identity(), revision));
        changed
    }

    fn note(&self, key: &JournalKey, conditions: Vec<Condition>) {
        let mut all = locked(&self.conditions);
        if conditions.is_empty() {
            all.remove(key);
        } else {
            all.insert(key.clone(), conditions);
        }
    }
}

impl Seen {
    /// Records the pod of a sandbox. `true`: it is unchanged since the previous check.
    fn take_in(&mut self, key: &JournalKey, pod: &Arc<Pod>, look: u64) -> bool {
        // Most pods are known; nothing is copied for them.
        if let Some((known, found)) = self.pods.get_mut(key) {
            *found = look;
            let is_same = known.as_ptr() == Arc::as_ptr(pod);
            if !is_same {
                *known = Arc::downgrade(pod);
            }
            return is_same;
        }
        self.pods.insert(key.clone(), (Arc::downgrade(pod), look));
        false
    }
}

/// The pods that differ from their annotations, and the tasks that carry out changes.
struct Rounds {
    agent: Arc<Agent>,
    rounds: BTreeMap<JournalKey, Round>,
    following: Following,
    /// Each returns the problem of its change, if it failed.
    tasks: JoinSet<Option<String>>,
}

impl Rounds {
    /// Starts or continues the round of a pod that has changed, or is due for a retry.
    fn look_at(&mut self, key: JournalKey, pod: Arc<Pod>) {
        let round = self.rounds.entry(key.clone()).or_insert_with(|| Round::of(Arc::clone(&pod)));
        round.goes_on_with(pod);
        // If a change is running, the pod asks for a turn when it has ended.
        if round.at.is_none() {
            self.ask(key);
        }
    }

    /// Asks for a turn for the pod's next change.
    fn ask(&mut self, key: JournalKey) {
        if let Some((_, asking)) = self.next(key) {
            self.following.ask(asking);
        }
    }

    /// Returns the pod's next change, and the request for its turn. If there is none, the pod's round ends,
    /// and its remaining problems are shown.
    fn next(&mut self, key: JournalKey) -> Option<(Change, Asking)> {
        let of_sandbox = self.agent.engine.registry().with_dynamic(&key);
        if of_sandbox.is_empty() {
            // The sandbox has been detached.
            self.rounds.remove(&key);
            return None;
        }
        let round = self.rounds.get_mut(&key)?;
        let pod = Arc::clone(&round.pod);
        let problems = match differences(&of_sandbox, &pod) {
            Ok((changes, interfaces)) => match round.next(&changes) {
                Some(change) => {
                    let (agent, namespace) = (&self.agent, &pod.name.namespace);
                    let network = network(change, &interfaces, &|it| may_use(agent, namespace, it));
                    return Some((change.clone(), Asking { key, namespace: namespace.clone(), network }));
                }
                None => round.problems(&changes),
            },
            Err(error) => vec![format!("its changed annotation is invalid: {}", Chain(&error))],
        };
        self.rounds.remove(&key);
        let condition =
            |problem: String| Condition { object: format!("pod {}", pod.name), problem: clipped(problem) };
        self.agent.pods.live.note(&key, problems.into_iter().map(condition).collect());
        None
    }

    /// Begins the changes whose turn has come.
    fn begin(&mut self) {
        while let Some(asked) = self.following.next() {
            let Some((change, asking)) = self.next(asked.key.clone()) else { continue };
            if asking != asked {
                // Another change is due now, which counts for another network.
                self.following.ask(asking);
                continue;
            }
            if let Some(round) = self.rounds.get_mut(&asking.key) {
                round.at = Some(change.clone());
            }
            let (agent, key) = (Arc::clone(&self.agent), asking.key.clone());
            let task = self.tasks.spawn(async move { carry_out(&agent, &key, change).await });
            self.following.begun(task.id(), asking);
        }
    }

    /// Records the end of a task. The pod's next change queues behind those of pods that already wait.
    fn ended(&mut self, task: Id, problem: Option<String>) {
        let Some(key) = self.following.ended(task) else { return };
        if let Some(round) = self.rounds.get_mut(&key) {
            round.ended(problem);
        }
        self.ask(key);
    }
}

/// Applies the annotations of live pods, forever.
pub(in crate::agent) async fn follow(agent: Arc<Agent>, mut source: watch::Receiver<u64>) {
    let mut rounds = Rounds {
        agent: Arc::clone(&agent),
        rounds: BTreeMap::new(),
        following: Following::default(),
        tasks: JoinSet::new(),
    };
    let mut again = ticks(AGAIN);
    loop {
        rounds.begin();
        // All may be dropped at any time: a change stays unseen, a notification is kept, the ticker ticks
        // again, and the results of ended tasks stay in the set.
        let failed_too = tokio::select! {
            changed = source.changed() => match changed {
                Ok(()) => false,
                Err(_) => return,
            },
            () = agent.pods.live.again.notified() => false,
            _ = again.tick() => true,
            Some(ended) = rounds.tasks.join_next_with_id() => {
                // A task that was aborted; none is.
                let Some((task, problem)) = own_thread::joined(ended) else { continue };
                rounds.ended(task, problem);
                continue;
            }
        };
        tokio::time::sleep(GATHER).await;
        let objects = agent.intents.source.snapshot();
        // Read first: attachments made meanwhile are checked the next time.
        let revision = agent.engine.registry().revision();
        if agent.pods.live.has_seen(&objects, revision, failed_too) {
            continue;
        }
        let attached = agent.engine.registry().all();
        // A pod whose round still runs need not be retried: otherwise it would begin again as soon as the
        // round ends.
        let tries_again = |key: &JournalKey| failed_too && !rounds.rounds.contains_key(key);
        let changed = agent.pods.live.changed(&objects, (&attached, revision), &tries_again);
        for (key, pod) in changed {
            rounds.look_at(key, pod);
        }
    }
}

/// Whether pods of a namespace may use a network. If not, the change is refused before it occupies the
/// network.
fn may_use(agent: &Agent, namespace: &str, network: &NetworkRef) -> bool {
    let objects = agent.intents.source.snapshot();
    let definition = objects.definitions.get(network).map(AsRef::as_ref);
    let labels = objects.namespace_labels(namespace);
    agent.intents.restrictions.check(network, definition, namespace, &labels).is_ok()
}

/// Returns the changes that make the pod's interfaces match its annotation, and its interfaces by sandbox.
///
/// # Errors
/// The annotation is invalid.
fn differences(
    of_sandbox: &[Arc<Attached>],
    pod: &Pod,
) -> Result<(Vec<Change>, Vec<Interface>), SelectionError> {
    let text = pod.annotations.get(NETWORKS_ANNOTATION).map(String::as_str).unwrap_or_default();
    let selections = match text.trim().is_empty() {
        true => Vec::new(),
        false => npwg::parse_networks(text, &pod.name.namespace)?.selections,
    };
    let interfaces: Vec<Interface> = of_sandbox.iter().flat_map(|it| interfaces(it)).collect();
    Ok((changes(&selections, &interfaces), interfaces))
}

/// Attaches or detaches one network of a pod. Returns the problem if it fails.
async fn carry_out(agent: &Arc<Agent>, sandbox: &JournalKey, change: Change) -> Option<String> {
    let name = SandboxName::Container(sandbox.container_id.clone());
    let answer = match change {
        Change::Stays(_) => return None,
        Change::Detach(ifname) => {
            agent
                .detach(DetachCall { sandbox: name, ifname, must_be_attached: false, traceparent: None })
                .await
        }
        Change::Attach(selection) => match serde_json::to_value(&*selection) {
            Ok(selection) => {
                let by = BY_ANNOTATION.to_owned();
                let call = AttachCall { sandbox: name, selection, by, traceparent: None };
                agent.attach(call, None).await
            }
            Err(error) => Response::Refused(error.to_string()),
        },
    };
    match answer {
        Response::Failed(failure) => Some(failure.message),
        Response::Refused(message) => Some(message),
        _ => None,
    }
}

/// The interfaces of one record.
fn interfaces(attached: &Attached) -> impl Iterator<Item = Interface> {
    let made = match &attached.plan.dynamic {
        None => Made::Add,
        Some(dynamic) if dynamic.by == BY_ANNOTATION => Made::Annotation,
        Some(_) => Made::Request,
    };
    let others = attached.plan.attachments.iter().filter(|it| !it.default);
    others.map(move |it| Interface {
        network: it.network.definition().cloned(),
        ifname: it.ifname.clone(),
        made,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::agent::pods::changes::tests::pod;
    use crate::agent::pods::live::*;
    use crate::attach::rig;

    #[test]
    fn what_failed_is_tried_again_unless_it_is_being_tried() {
        let (live, pod) = (LivePods::default(), pod("shop", "a"));
        let attached = [rig::attached("a", &json!({"namespace": "shop", "name": "a"}))];
        let pods = [(pod.name.clone(), Arc::clone(&pod))].into_iter().collect();
        let objects = Objects { pods, ..Objects::default() };
        let changed = |again: bool| live.changed(&objects, (&attached, 1), &|_| again);
        let it = [(attached[0].key.clone(), pod)];
        assert_eq!(changed(false), it, "nobody has looked at it");
        assert!(changed(true).is_empty());
        let problem = "the plugin hangs".to_owned();
        live.note(&attached[0].key, vec![Condition { object: "pod shop/a".to_owned(), problem }]);
        assert!(changed(false).is_empty());
        assert_eq!(changed(true), it);
    }

    #[test]
    fn nothing_is_done_while_pods_and_attachments_are_the_same_and_nothing_has_failed() {
        let (live, known) = (LivePods::default(), pod("shop", "a"));
        let attached = [rig::attached("a", &json!({"namespace": "shop", "name": "a"}))];
        let pods = [(known.name.clone(), Arc::clone(&known))].into_iter().collect();
        let mut objects = Objects { pods, ..Objects::default() };
        assert!(!live.has_seen(&objects, 1, false));
        assert_eq!(live.changed(&objects, (&attached, 1), &|_| false).len(), 1);
        assert!(live.has_seen(&objects, 1, true) && !live.has_seen(&objects, 2, false));
        // A pod of another node.
        let other = pod("shop", "b");
        objects.pods.insert(other.name.clone(), other);
        assert!(!live.has_seen(&objects, 1, false));
        assert!(live.changed(&objects, (&attached, 1), &|_| false).is_empty());
        let problem = "the plugin hangs".to_owned();
        let key = &attached[0].key;
        live.note(key, vec![Condition { object: "pod shop/a".to_owned(), problem }]);
        assert_eq!([false, true].map(|again| live.has_seen(&objects, 1, again)), [true, false]);
        // The pod has been detached, and its failures are forgotten.
        assert!(live.changed(&objects, (&[], 2), &|_| true).is_empty());
        assert!(live.has_seen(&objects, 2, true) && live.conditions().is_empty());
        // Attached again, it counts as a new pod.
        assert_eq!(live.changed(&objects, (&attached, 3), &|_| false), [(key.clone(), known)]);
    }
}
