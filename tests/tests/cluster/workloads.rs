//! The life of a Deployment, with nothing but what Kubernetes and the runtime do, and an agent that is killed at random.

use netattach_tests::cluster::Setup;

use crate::rig::{Rig, nightly};

const REPLICAS: usize = 10;

/// Ten pods with three networks each are policed, scaled, replaced and deleted.
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
    let before = rig.settled(&[("client", 1), ("web", REPLICAS)]);
    rig.restart("web");
    let after = rig.settled_with_kills(&[("client", 1), ("web", REPLICAS)], kills);
    let kept: Vec<_> = before.iter().filter(|pod| after.contains(pod)).collect();
    assert!(kept.len() == 1 && kept[0].name.starts_with("client"), "the client alone: {kept:?}");

    rig.policed(&after).assert_holds();
    rig.delete_deployment("web");
    rig.delete_deployment("client");
    rig.assert_nothing_is_left();
}
