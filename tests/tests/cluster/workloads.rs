//! The life of a Deployment, managed only by Kubernetes and the runtime, with an agent that is killed at random.

use std::time::Instant;

use netattach_tests::cluster::Setup;
use netattach_tests::nightly;
use netattach_tests::traffic::eventually;

use crate::rig::{OUTAGE, PATIENCE, Rig, Running};

const REPLICAS: usize = 10;

/// Ten pods with three networks each are policed, scaled, replaced around a time without an API server, and deleted.
#[test]
fn the_pods_of_a_deployment_live_under_an_agent_that_is_killed_at_random() {
    let Some(mut rig) = Rig::new("workloads", &Setup::default()) else { return };
    let kills = nightly(3, 12);
    rig.deploy("client", 1);
    rig.deploy("web", REPLICAS);
    let pods = rig.settled(&[("client", 1), ("web", REPLICAS)]);
    {
        let policed = rig.policed(&pods);
        policed.assert_holds();
        rig.worker.node_mut().kill().unwrap();
        policed.assert_holds();
        rig.worker.node_mut().start().unwrap();
        policed.assert_holds();
    }

    rig.scale("web", REPLICAS + 2);
    rig.settled_with_kills(&[("client", 1), ("web", REPLICAS + 2)], kills);
    rig.scale("web", REPLICAS / 2);
    rig.settled_with_kills(&[("client", 1), ("web", REPLICAS / 2)], kills);
    rig.scale("web", REPLICAS);
    // Sorted by name, they follow those with policies.
    rig.deploy("worker", 2);
    let before = rig.settled(&[("client", 1), ("web", REPLICAS), ("worker", 2)]);
    let after = replaced_around_an_outage(&mut rig, &before);
    let kept: Vec<_> = before.iter().filter(|pod| after.contains(pod)).collect();
    assert!(kept.len() == 1 && kept[0].name.starts_with("client"), "the client alone: {kept:?}");

    rig.policed(&after).assert_holds();
    for deployment in ["web", "client", "worker"] {
        rig.delete_deployment(deployment);
    }
    rig.assert_nothing_is_left();
}

/// The server stops during a rollout, and just after a pod was deleted. Meanwhile a sandbox of a pod that the kubelet
/// knows ends, and the agent is killed at random. When the server is back, one pod fewer is requested.
fn replaced_around_an_outage(rig: &mut Rig, before: &[Running]) -> Vec<Running> {
    rig.restart("web");
    let is_new = |name: &str| before.iter().all(|pod| pod.name != name);
    let has_begun = || rig.attached().iter().any(|[name, _]| is_new(name));
    assert!(eventually(PATIENCE, has_begun), "{:?}", rig.attached());

    let [.., deleted, worker] = before else { panic!("no pods") };
    rig.delete(&deleted.name);
    rig.cluster.stop_server();
    let stopped = Instant::now();
    rig.worker.containerd().cri().unwrap().stop_sandbox(&worker.container).unwrap();
    let [short, long] = OUTAGE;
    rig.kill_for(nightly(short, long).saturating_sub(stopped.elapsed()));
    // Its DEL may have come while no agent ran: the next one has found it, without the server.
    let is_gone = || rig.attached().iter().all(|[_, container]| *container != worker.container);
    assert!(eventually(PATIENCE, is_gone), "{:?}", rig.attached());
    rig.cluster.start_server().unwrap();

    rig.scale("web", REPLICAS - 1);
    // The agent was killed often enough for the short form.
    let kills = nightly(1, 12);
    let after = rig.settled_with_kills(&[("client", 1), ("web", REPLICAS - 1), ("worker", 2)], kills);
    let same = after.iter().find(|pod| pod.name == worker.name);
    assert!(same.is_some_and(|pod| pod.container != worker.container), "{worker:?} {same:?}");
    after
}
