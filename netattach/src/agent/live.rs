//! Live pods: when the annotation of an attached pod changes, its interfaces follow. Networks that are added to it are
//! attached as `netattachctl attach` does, and detached when they are taken out of it again. Interfaces of the pod's ADD
//! stay until its sandbox ends, and a network that cannot be attached is tried again; `netattachctl status` shows both.
//!
//! [`changes`] decides, and is pure. Only pods that have changed are looked at. Several are made to follow at a time, as
//! [`Following`] says: a network that hangs keeps no pod of others waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::following::{Asking, Following};
use super::handler::Agent;
use super::share::shared;
use crate::attach::Attached;
use crate::error_chain::{Chain, clipped};
use crate::journal::JournalKey;
use crate::npwg::{self, NETWORKS_ANNOTATION, NetworkRef, Selection, SelectionError};
use crate::objects::{Objects, Pod};
use crate::rpc::message::{AttachCall, Condition, DetachCall, Response, SandboxName};
use crate::sync::{Mutex, locked};
use crate::ticks::ticks;

/// Who attached an interface, in its record and in the pod's status.
pub(super) const BY_ANNOTATION: &str = "annotation";

/// How often what failed is tried again.
const AGAIN: Duration = Duration::from_secs(30);
/// Most rows that are shown.
const MOST_ROWS: usize = 100;
/// How long changes are gathered.
const GATHER: Duration = Duration::from_millis(20);

/// An attachment of a live pod, but not its default network.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    /// Its network; `None` for one that no definition describes.
    network: Option<NetworkRef>,
    ifname: String,
    made: Made,
}

/// What an interface was made by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    /// The pod's ADD.
    Add,
    /// A change of its annotation.
    Annotation,
    /// A request of another program or a person, which the annotation does not describe.
    Request,
}

/// What differs between an annotation and a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Change {
    Attach(Box<Selection>),
    Detach(String),
    /// An interface of the pod's ADD that the annotation does not select any more.
    Stays(String),
}

/// The changes that make a pod's interfaces those that its annotation selects. Detaching comes first: its name or
/// address may be what another selection asks for.
fn changes(selections: &[Selection], interfaces: &[Interface]) -> Vec<Change> {
    let mut left: Vec<&Interface> = interfaces.iter().filter(|it| it.made != Made::Request).collect();
    let mut take =
        |is: &dyn Fn(&Interface) -> bool| left.iter().position(|it| is(it)).map(|at| left.remove(at));
    let is_of = |it: &Interface, selection: &Selection| it.network.as_ref() == Some(&selection.network);
    // Those that name their interface choose first.
    let (named, unnamed): (Vec<_>, Vec<_>) = selections.iter().partition(|it| it.interface.is_some());
    let mut missing = Vec::new();
    for selection in named {
        let name = selection.interface.as_deref();
        if take(&|it| is_of(it, selection) && Some(it.ifname.as_str()) == name).is_none() {
            missing.push(selection);
        }
    }
    for selection in unnamed {
        if take(&|it| is_of(it, selection)).is_none() {
            missing.push(selection);
        }
    }
    let of_left = left.iter().map(|it| match it.made {
        Made::Annotation => Change::Detach(it.ifname.clone()),
        Made::Add | Made::Request => Change::Stays(it.ifname.clone()),
    });
    let of_left: Vec<Change> = of_left.collect();
    let attach = missing.into_iter().map(|selection| Change::Attach(Box::new(selection.clone())));
    of_left.into_iter().chain(attach).collect()
}

/// The networks that changes are of.
fn networks(changes: &[Change], interfaces: &[Interface]) -> BTreeSet<NetworkRef> {
    let of_interface = |ifname: &str| interfaces.iter().find(|it| it.ifname == ifname)?.network.clone();
    let network = |change: &Change| match change {
        Change::Attach(selection) => Some(selection.network.clone()),
        Change::Detach(ifname) => of_interface(ifname),
        Change::Stays(_) => None,
    };
    changes.iter().filter_map(network).collect()
}

/// The pods as they were looked at last, and what did not succeed.
#[derive(Debug, Default)]
pub(super) struct LivePods {
    seen: Mutex<BTreeMap<JournalKey, Weak<Pod>>>,
    conditions: Mutex<BTreeMap<JournalKey, Vec<Condition>>>,
    /// There is a new sandbox whose networks are to be attached.
    again: Notify,
}

impl LivePods {
    /// What of the annotations of live pods is not as they say.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let conditions = locked(&self.conditions);
        shared(conditions.values().flatten().cloned().collect(), MOST_ROWS)
    }

    /// Looks at what is new among the attached sandboxes.
    pub(super) fn look_again(&self) {
        self.again.notify_one();
    }

    /// The pods that have changed since they were looked at, with their sandboxes, and of those that something failed for
    /// the ones that are to try `again`.
    fn changed(
        &self,
        objects: &Objects,
        attached: &[Arc<Attached>],
        again: &dyn Fn(&JournalKey) -> bool,
    ) -> Vec<(JournalKey, Arc<Pod>)> {
        let mut seen = locked(&self.seen);
        let mut conditions = locked(&self.conditions);
        let mut changed = Vec::new();
        let mut now = BTreeMap::new();
        for sandbox in attached.iter().filter(|it| it.plan.dynamic.is_none()) {
            let Some(named) = &sandbox.plan.sandbox.pod else { continue };
            let Some(pod) = objects.pods.get(&named.name) else { continue };
            let is_same = named.uid.as_deref().is_none_or(|uid| pod.has_uid(uid));
            if !is_same || pod.terminating || pod.phase.has_ended() {
                continue;
            }
            let is_seen = seen.get(&sandbox.key).is_some_and(|it| it.as_ptr() == Arc::as_ptr(pod));
            if !is_seen || (conditions.contains_key(&sandbox.key) && again(&sandbox.key)) {
                changed.push((sandbox.key.clone(), Arc::clone(pod)));
            }
            now.insert(sandbox.key.clone(), Arc::downgrade(pod));
        }
        conditions.retain(|key, _| now.contains_key(key));
        *seen = now;
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

/// Makes the interfaces of live pods follow their annotations, without end.
pub(super) async fn follow(agent: Arc<Agent>, mut source: watch::Receiver<u64>) {
    let (mut following, mut tasks) = (Following::default(), JoinSet::new());
    let mut again = ticks(AGAIN);
    loop {
        while let Some(asking) = following.next() {
            let (agent, key, pod) = (Arc::clone(&agent), asking.key.clone(), Arc::clone(&asking.pod));
            let task = tasks.spawn(async move {
                let conditions = bring_up_to_date(&agent, &key, &pod).await;
                agent.live_pods.note(&key, conditions);
            });
            following.begun(task.id(), asking);
        }
        // All may be dropped at any time: a change stays unseen, a notice is kept, the ticker ticks again, and what a task
        // has returned stays with the others.
        let failed_too = tokio::select! {
            changed = source.changed() => match changed {
                Ok(()) => false,
                Err(_) => return,
            },
            () = agent.live_pods.again.notified() => false,
            _ = again.tick() => true,
            Some(ended) = tasks.join_next_with_id() => {
                // A panic, which the panic hook has reported, leaves the pod as it is.
                following.ended(ended.map_or_else(|error| error.id(), |(task, ())| task));
                continue;
            }
        };
        tokio::time::sleep(GATHER).await;
        let objects = agent.intents.source.snapshot();
        let attached = agent.engine.registry().all();
        // One that is at it still is not to begin again as soon as it ends.
        let tries_again = |key: &JournalKey| failed_too && !following.is_under_way(key);
        let changed = agent.live_pods.changed(&objects, &attached, &tries_again);
        for (key, pod) in changed {
            let networks = differences(&agent, &key, &pod)
                .map_or_else(|_| BTreeSet::new(), |(changes, interfaces)| networks(&changes, &interfaces));
            following.ask(Asking { key, pod, networks });
        }
    }
}

/// What makes the pod's interfaces those that its annotation selects, and the interfaces that it has.
///
/// # Errors
/// The annotation is invalid.
fn differences(
    agent: &Agent,
    sandbox: &JournalKey,
    pod: &Pod,
) -> Result<(Vec<Change>, Vec<Interface>), SelectionError> {
    let text = pod.annotations.get(NETWORKS_ANNOTATION).map(String::as_str).unwrap_or_default();
    let selections = match text.trim().is_empty() {
        true => Vec::new(),
        false => npwg::parse_networks(text, &pod.name.namespace)?.selections,
    };
    let interfaces: Vec<Interface> =
        agent.engine.registry().with_dynamic(sandbox).iter().flat_map(|it| interfaces(it)).collect();
    Ok((changes(&selections, &interfaces), interfaces))
}

/// Attaches and detaches what the pod's annotation says. Returns what did not succeed.
async fn bring_up_to_date(agent: &Arc<Agent>, sandbox: &JournalKey, pod: &Pod) -> Vec<Condition> {
    let condition =
        |problem: String| Condition { object: format!("pod {}", pod.name), problem: clipped(problem) };
    let changes = match differences(agent, sandbox, pod) {
        Ok((changes, _)) => changes,
        Err(error) => {
            return vec![condition(format!("its changed annotation is invalid: {}", Chain(&error)))];
        }
    };
    let mut conditions = Vec::new();
    for change in changes {
        let name = SandboxName::Container(sandbox.container_id.clone());
        let answer = match change {
            Change::Stays(ifname) => {
                let problem =
                    format!("{ifname} is not in its annotation any more; it stays until the pod ends");
                conditions.push(condition(problem));
                continue;
            }
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
            Response::Failed(failure) => conditions.push(condition(failure.message)),
            Response::Refused(message) => conditions.push(condition(message)),
            _ => {}
        }
    }
    conditions
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

    use crate::agent::following::tests::pod;
    use crate::agent::live::*;
    use crate::attach::rig;

    fn selection(name: &str, interface: Option<&str>) -> Selection {
        Selection { interface: interface.map(str::to_owned), ..Selection::of(NetworkRef::new("shop", name)) }
    }

    fn interface(name: &str, ifname: &str, made: Made) -> Interface {
        Interface { network: Some(NetworkRef::new("shop", name)), ifname: ifname.to_owned(), made }
    }

    fn attach(name: &str, interface: Option<&str>) -> Change {
        Change::Attach(Box::new(selection(name, interface)))
    }

    #[test]
    fn what_failed_is_tried_again_unless_it_is_being_tried() {
        let (live, pod) = (LivePods::default(), pod("shop", "a"));
        let attached = [rig::attached("a", &json!({"namespace": "shop", "name": "a"}))];
        let pods = [(pod.name.clone(), Arc::clone(&pod))].into_iter().collect();
        let objects = Objects { pods, ..Objects::default() };
        let changed = |again: bool| live.changed(&objects, &attached, &|_| again);
        let it = [(attached[0].key.clone(), pod)];
        assert_eq!(changed(false), it, "nobody has looked at it");
        assert!(changed(true).is_empty());
        let problem = "the plugin hangs".to_owned();
        live.note(&attached[0].key, vec![Condition { object: "pod shop/a".to_owned(), problem }]);
        assert!(changed(false).is_empty());
        assert_eq!(changed(true), it);
    }

    #[test]
    fn a_change_is_at_the_networks_that_come_and_go() {
        let interfaces = [
            interface("a", "net1", Made::Annotation),
            interface("b", "net2", Made::Add),
            Interface { network: None, ifname: "net3".to_owned(), made: Made::Annotation },
        ];
        let detach = |ifname: &str| Change::Detach(ifname.to_owned());
        let changes = [
            detach("net1"),
            Change::Stays("net2".to_owned()),
            detach("net3"),
            detach("net4"),
            attach("c", Some("net1")),
            attach("a", None),
        ];
        assert_eq!(
            networks(&changes, &interfaces),
            BTreeSet::from(["a", "c"].map(|name| NetworkRef::new("shop", name)))
        );
    }

    #[test]
    fn interfaces_follow_the_annotation() {
        let (add, annotation, request) = (Made::Add, Made::Annotation, Made::Request);
        type Row = (&'static str, Vec<Selection>, Vec<Interface>, Vec<Change>);
        let table: [Row; 7] = [
            ("as it was", vec![selection("a", None)], vec![interface("a", "net1", add)], vec![]),
            (
                "one more of the same",
                vec![selection("a", None), selection("a", None)],
                vec![interface("a", "net1", add)],
                vec![attach("a", None)],
            ),
            (
                "one that was added goes",
                vec![selection("a", None)],
                vec![interface("a", "net1", add), interface("b", "net2", annotation)],
                vec![Change::Detach("net2".to_owned())],
            ),
            (
                "one of the ADD stays",
                vec![],
                vec![interface("a", "net1", add)],
                vec![Change::Stays("net1".to_owned())],
            ),
            (
                "what was asked for otherwise is not of the annotation",
                vec![selection("b", None)],
                vec![interface("b", "net1", request)],
                vec![attach("b", None)],
            ),
            (
                "another interface of the same network",
                vec![selection("b", Some("fast"))],
                vec![interface("b", "net2", annotation)],
                vec![Change::Detach("net2".to_owned()), attach("b", Some("fast"))],
            ),
            (
                "those that name their interface choose first",
                vec![selection("a", None), selection("a", Some("net1"))],
                vec![interface("a", "net1", add), interface("a", "net2", add)],
                vec![],
            ),
        ];
        for (what, selections, interfaces, expected) in table {
            assert_eq!(changes(&selections, &interfaces), expected, "{what}");
        }
    }
}
