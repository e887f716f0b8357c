//! Repairs pods that run without their networks: pods that select networks, but that the runtime did not
//! ask this agent to attach, because netattach's configuration file was missing or another one was used.
//!
//! They are reported, and, if the setting `repair` says so, attached or evicted. This happens only if every
//! check of a grace time has found the pod so, no request to attach it came during that time, and every
//! record of the journal can be read: an unreadable record may be the pod's.
//!
//! `attach` asks the runtime for the pod's sandbox and records it without a network of its own; its
//! networks follow as those of a live pod whose annotation was changed ([`super::live`]).
//!
//! `evict` evicts one pod after another. A pod is evicted only if the runtime has asked this agent to
//! attach some pod since the problem was found: otherwise the next pod would start without its networks as
//! well. Per controller only few pods are evicted in an hour, of a DaemonSet one. Mirror pods of static
//! pods are never evicted.

use std::collections::BTreeMap;
use std::future::ready;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::missed::PutOff;
use crate::agent::Agent;
use crate::agent::admission::lanes::Class;
use crate::agent::monitoring::events;
use crate::attach::Attached;
use crate::cri;
use crate::error_chain::Chain;
use crate::kube::{Candidate, Cluster, NotEvicted};
use crate::netns::{Netns, NetnsError};
use crate::npwg::{NETWORKS_ANNOTATION, STATUS_ANNOTATION, status};
use crate::objects::{ObjectName, Objects, Phase, Pod};
use crate::plan::{PodRef, Sandbox};
use crate::publish::{Event, Regarding};
use crate::rounds;
use crate::settings::Repair;
use crate::ticks::ticks;

/// Shortest and longest time between two checks.
const LOOKS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// The interface of a pod's default network, as runtimes of Kubernetes name it.
const IFNAME: &str = "eth0";

/// What repairs use.
pub(in crate::agent) struct Means {
    /// The cluster, for evictions.
    pub(in crate::agent) cluster: Arc<Cluster>,
    /// The runtime's socket, for finding sandboxes.
    pub(in crate::agent) runtime: Option<PathBuf>,
}

/// Looks for pods without their networks, and repairs them, forever.
pub(in crate::agent) async fn keep(agent: Arc<Agent>, means: Means) {
    let [shortest, longest] = LOOKS;
    let mut tick = ticks(agent.pods.repairs.after.clamp(shortest, longest));
    loop {
        tick.tick().await;
        let looking = Arc::clone(&agent);
        let looked = rounds::look(move || {
            let unreadable = looking.engine.unreadable_records();
            let (objects, attached) = (looking.intents.source.snapshot(), looking.engine.registry().all());
            (without_networks(&objects, &attached), unreadable)
        });
        let (found, unreadable) = looked.await;
        // A directory that cannot be listed may contain the records of all pods.
        let unreadable = unreadable.unwrap_or(1);
        for pod in agent.pods.repairs.take_in(found, unreadable, Instant::now()) {
            match agent.pods.repairs.how {
                Repair::Report => {}
                Repair::Attach => attach(&agent, &means, &pod).await,
                Repair::Evict => evict(&agent, &means.cluster, &pod).await,
            }
        }
    }
}

/// Returns the pods that select networks and run without them.
fn without_networks(objects: &Objects, attached: &[Arc<Attached>]) -> Vec<PodRef> {
    // A pod may have several sandboxes for a while, including one of an earlier pod of its name whose DEL
    // fails.
    let mut sandboxes: BTreeMap<&ObjectName, Vec<&PodRef>> = BTreeMap::new();
    for pod in attached.iter().filter_map(|it| it.plan.sandbox.pod.as_ref()) {
        sandboxes.entry(&pod.name).or_default().push(pod);
    }
    let selects = |pod: &Pod| {
        pod.annotations.get(NETWORKS_ANNOTATION).is_some_and(|text| !text.trim().is_empty())
            && !pod.host_network
    };
    // A network-status shows that other software, such as Multus, attached the pod before netattach
    // replaced it: statuses of an earlier agent are withdrawn at the start. An unreadable status may say
    // the same.
    let is_anothers = |pod: &Pod| {
        let text = pod.annotations.get(STATUS_ANNOTATION).filter(|_| pod.is_by_another());
        text.is_some_and(|text| {
            status::parse(text).map_or(true, |entries| entries.iter().any(|entry| !entry.default))
        })
    };
    let has_sandbox = |pod: &Pod| {
        let mut of_name = sandboxes.get(&pod.name).into_iter().flatten();
        of_name.any(|sandbox| sandbox.uid.as_deref().is_none_or(|uid| pod.has_uid(uid)))
    };
    let runs = |pod: &&Arc<Pod>| pod.phase == Phase::Running && !pod.terminating;
    let missed = objects
        .pods
        .values()
        .filter(runs)
        .filter(|pod| selects(pod) && !has_sandbox(pod) && !is_anothers(pod));
    missed.map(|pod| PodRef { name: pod.name.clone(), uid: pod.uid.clone() }).collect()
}

/// Records the pod's sandbox; its networks are attached afterwards.
async fn attach(agent: &Arc<Agent>, means: &Means, pod: &PodRef) {
    let failed = |why: String| {
        agent.pods.repairs.put_off(
            pod,
            format!("not attached: {why}"),
            PutOff::Tried(Duration::ZERO),
            Instant::now(),
        );
    };
    let sandbox = match find_sandbox(agent, means, pod).await {
        Ok(sandbox) => sandbox,
        Err(why) => return failed(why),
    };
    let container = sandbox.container_id.clone();
    let taken = agent.in_turn(&container, Class::Add, ready(Ok(None)), move |agent| {
        Ok(agent.engine.take_over(sandbox.clone())?)
    });
    match taken.await {
        Ok(((), turn)) => {
            drop(turn);
            tracing::info!(pod = %pod.name, container, "runs without its networks; they are being attached");
            agent.pods.live.look_again();
        }
        Err(error) => failed(Chain(&error).to_string()),
    }
}

/// Returns the pod's sandbox as the runtime reports it.
async fn find_sandbox(agent: &Arc<Agent>, means: &Means, pod: &PodRef) -> Result<Sandbox, String> {
    let said = |error: cri::CriError| Chain(&error).to_string();
    let socket = means.runtime.as_ref().ok_or("runtimeSocket is not set")?;
    let objects = agent.intents.source.snapshot();
    let known = objects.pods.get(&pod.name).ok_or("it is gone")?;
    let mut ready = cri::ready_sandboxes(socket).await.map_err(said)?;
    ready.retain(|it| {
        it.namespace == pod.name.namespace && it.name == pod.name.name && known.has_uid(&it.uid)
    });
    let [found] = ready.as_slice() else {
        return Err(format!("the runtime has {} ready sandboxes of it", ready.len()));
    };
    let path = cri::network_namespace(socket, &found.id).await.map_err(said)?;
    let opened = Netns::open(&path).map_err(|error: NetnsError| Chain(&error).to_string())?;
    let ObjectName { namespace, name } = &pod.name;
    let (id, uid) = (&found.id, &found.uid);
    Ok(Sandbox {
        container_id: id.clone(),
        ifname: IFNAME.to_owned(),
        netns: path.to_string_lossy().into_owned(),
        netns_id: opened.id(),
        cni_args: format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={id};K8S_POD_UID={uid}"
        ),
        cni_path: Vec::new(),
        config_name: String::new(),
        pod: Some(PodRef { name: pod.name.clone(), uid: Some(uid.clone()) }),
    })
}

/// Evicts the pod, if it is due and allowed, and the server accepts it.
async fn evict(agent: &Arc<Agent>, cluster: &Cluster, pod: &PodRef) {
    let repairs = &agent.pods.repairs;
    let put_off = |why: String, how| repairs.put_off(pod, why, how, Instant::now());
    if let Err(why) = repairs.may_evict_any(pod, Instant::now()) {
        return put_off(why, PutOff::Waits);
    }
    let candidate = match cluster.candidate(&pod.name).await {
        Ok(candidate) => candidate,
        Err(error) => return not_evicted(error, put_off),
    };
    if let Err((why, how)) = may_evict(pod, &candidate) {
        return put_off(why, how);
    }
    if let Some(Err(why)) = candidate.owner.as_ref().map(|owner| repairs.may_evict_of(owner, Instant::now()))
    {
        return put_off(why, PutOff::Later);
    }
    match cluster.evict(&pod.name, &candidate.uid).await {
        Ok(()) => {
            repairs.was_evicted(pod, candidate.owner.as_ref(), Instant::now());
            tracing::warn!(pod = %pod.name, "evicted: it ran without the networks that it selects");
            agent.report(Event {
                regarding: Regarding::Pod(pod.name.clone()),
                reason: events::EVICTED,
                action: "Evict",
                note: "evicted: it ran without the networks that it selects, as the runtime did not ask for them".to_owned(),
            });
        }
        Err(error) => not_evicted(error, put_off),
    }
}

/// Whether the pod, as the server has it now, may be evicted.
fn may_evict(pod: &PodRef, candidate: &Candidate) -> Result<(), (String, PutOff)> {
    if pod.uid.as_ref().is_some_and(|uid| *uid != candidate.uid) || candidate.has_ended {
        return Err(("it is gone".to_owned(), PutOff::Waits));
    }
    if candidate.is_static {
        let why = "it is a static pod, which is not evicted: restart it by its file on the node".to_owned();
        return Err((why, PutOff::Never));
    }
    if candidate.owner.is_none() {
        let why = "it has no controller that would recreate it, so it is not evicted: delete and create it"
            .to_owned();
        return Err((why, PutOff::Never));
    }
    Ok(())
}

fn not_evicted(error: NotEvicted, put_off: impl FnOnce(String, PutOff)) {
    match error {
        NotEvicted::Gone => put_off("it is gone".to_owned(), PutOff::Waits),
        NotEvicted::Forbidden { why, pause } => {
            put_off(format!("its eviction is put off: {why}"), PutOff::Tried(pause));
        }
        NotEvicted::Failed(why) => put_off(format!("not evicted: {why}"), PutOff::Tried(Duration::ZERO)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::agent::pods::repair::*;
    use crate::attach::rig::attached;
    use crate::kube::Owner;
    use crate::objects::Powers;

    #[test]
    fn the_sandbox_of_an_earlier_pod_of_the_name_hides_no_other() {
        let name = ObjectName::new("shop", "db-0");
        let pod = Pod {
            name: name.clone(),
            uid: Some("uid-new".to_owned()),
            mirror_of: None,
            labels: Default::default(),
            annotations: [(NETWORKS_ANNOTATION.to_owned(), "lan".to_owned())].into(),
            phase: Phase::Running,
            host_network: false,
            ports: Vec::new(),
            powers: Powers::default(),
            on_this_node: true,
            terminating: false,
        };
        let objects =
            Objects { pods: [(name.clone(), Arc::new(pod))].into_iter().collect(), ..Objects::default() };
        let of = |uid: &str| json!({"namespace": "shop", "name": "db-0", "uid": uid});
        let [old, new] = ["uid-old", "uid-new"].map(of);
        let missed = |all: &[(&str, &Value)]| {
            let all: Vec<_> = all.iter().map(|(container, pod)| attached(container, pod)).collect();
            without_networks(&objects, &all).into_iter().map(|pod| pod.name).collect::<Vec<_>>()
        };
        assert_eq!(missed(&[]), std::slice::from_ref(&name));
        assert_eq!(missed(&[("a", &old)]), [name]);
        for all in [[("a", &old), ("b", &new)], [("a", &new), ("b", &old)]] {
            assert_eq!(missed(&all), [], "{all:?}");
        }
    }

    #[test]
    fn static_pods_and_pods_that_nobody_makes_anew_are_left_alone() {
        let pod = PodRef { name: ObjectName::new("shop", "a"), uid: Some("uid-a".to_owned()) };
        let owner = Owner { kind: "ReplicaSet".to_owned(), name: "web".to_owned(), uid: "o".to_owned() };
        let whole =
            Candidate { uid: "uid-a".to_owned(), owner: Some(owner), is_static: false, has_ended: false };
        let how = |candidate: Candidate| may_evict(&pod, &candidate).map_err(|(_, how)| how);
        assert_eq!(how(whole.clone()), Ok(()));
        assert_eq!(how(Candidate { is_static: true, ..whole.clone() }), Err(PutOff::Never));
        assert_eq!(how(Candidate { owner: None, ..whole.clone() }), Err(PutOff::Never));
        assert_eq!(how(Candidate { has_ended: true, ..whole.clone() }), Err(PutOff::Waits));
        assert_eq!(how(Candidate { uid: "other".to_owned(), ..whole }), Err(PutOff::Waits));
    }
}
