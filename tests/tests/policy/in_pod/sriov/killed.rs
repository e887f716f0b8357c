//! `kill -9` of the agent while it takes a VF, configures it, moves it, or returns it.

use std::path::Path;

use netattach::netlink::DeviceState;
use netattach::spec::VfSettings;
use netattach_tests::{Outcome, nightly};

use super::native::{Own, all_keys};
use super::*;

/// Most points of ADD, and of DEL, at which the agent is killed, unless all are tested: in an emulated machine each
/// takes seconds.
const KILLED: usize = 10;

/// The state of the VFs, the node and the pod while the pod is not attached.
struct Before {
    vfs: Vec<(DeviceState, VfSettings)>,
    all: Snapshot,
}

/// An agent with crash points, and a pod that should have a VF under a policy.
struct Killed {
    own: Own,
    before: Option<Before>,
}

impl Killed {
    /// `None`: this machine has no such card.
    fn new(test: &str) -> Option<Self> {
        let own = Own::without_agent(test, &all_keys())?;
        own.node.write("policy", &only_the_client_of_vfs()).unwrap();
        let vfs = own.before();
        let mut killed = Self { own, before: None };
        killed.start();
        // Directories of leases and the default network's bridge stay once they are made.
        killed.add().success();
        killed.del().success();
        killed.before = Some(Before { vfs, all: killed.look() });
        killed.assert_as_before("no crash");
        Some(killed)
    }

    fn start(&mut self) {
        self.own.node.start_with_points(Path::new(env!("CARGO_BIN_EXE_crash-agent"))).unwrap();
    }

    fn add(&self) -> Outcome {
        self.own.node.add(&self.own.pods[0])
    }

    fn del(&self) -> Outcome {
        self.own.node.del(&self.own.pods[0])
    }

    /// Carries out the operation, and returns the numbers of the points at which the agent is to be killed: those at
    /// which interfaces and programs change, unless all are tested.
    fn points_of(&self, operation: impl FnOnce(&Self) -> Outcome) -> Vec<usize> {
        self.own.node.arm(usize::MAX).unwrap();
        operation(self).success();
        let points = self.own.node.points();
        self.own.node.disarm().unwrap();
        let kinds = nightly(&["netlink:", "link:", "give-back:"][..], &[""][..]);
        let is_chosen = |at: &usize| kinds.iter().any(|kind| points[*at].starts_with(kind));
        let chosen: Vec<usize> = (0..points.len()).filter(is_chosen).collect();
        assert!(chosen.len() > 5, "{points:?}");
        let most = nightly(KILLED, usize::MAX);
        let apart = chosen.len().div_ceil(most);
        chosen.into_iter().step_by(apart).collect()
    }

    /// Makes the agent die at that point of an operation, and starts the next one; returns the point's name. `None`:
    /// the operation has no such point, and is complete.
    fn outlives(&mut self, point: usize, verb: &str) -> Option<String> {
        let (node, pod) = (&self.own.node, &self.own.pods[0]);
        let answered = node.comes_to(point, pod, || node.call(verb, pod).run())?;
        let what = format!("{verb}, {}", self.own.node.was_killed_at(point));
        // A DEL that is not answered is noted for the next agent.
        let is_told = answered.exit == 0 || verb == "ADD" && answered.json["code"] == 11;
        assert!(is_told, "{what}: {:#}", answered.json);
        self.start();
        Some(what)
    }

    fn look(&self) -> Snapshot {
        Snapshot::take(&self.own.node, &[&self.own.pods[0]]).unwrap()
    }

    /// Checks that the VF is on the node under its name, as before, with its settings on the card and without an
    /// address; nothing of the pod is left, and the agent has no namespace but its own.
    fn assert_as_before(&self, what: &str) {
        let before = self.before.as_ref().unwrap();
        self.own.assert_as_after(what, &before.vfs);
        assert_eq!(self.look(), before.all, "{what}");
        assert_eq!(self.namespaces().len(), 1, "{what}: that which keeps the kernel's hooks on");
        let links = Network::of(&self.own.node.namespace).unwrap().links;
        assert_eq!(links[&self.own.vfs[0].device].addresses, BTreeSet::new(), "{what}");
    }

    /// Returns the namespaces that the agent keeps, and that are neither the node's nor a pod's.
    fn namespaces(&self) -> BTreeSet<PathBuf> {
        let pods = self.own.pods.iter().map(|pod| &pod.namespace);
        let known = pods.chain([&self.own.node.namespace]);
        let known: BTreeSet<PathBuf> = known.map(|it| fs::read_link(it.path()).unwrap()).collect();
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.own.node.agent_pid())).unwrap();
        let open = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        open.filter(|path| path.to_string_lossy().starts_with("net:[") && !known.contains(path)).collect()
    }

    /// Checks that both pods can be attached and reach each other, and that everything is as before afterwards.
    fn end(self) {
        for pod in &self.own.pods {
            self.own.node.add(pod).success();
        }
        let client = CLIENT_ADDRESS.parse().unwrap();
        assert!(ping(&self.own.pods[0].namespace, client, PATIENCE).unwrap());
        for pod in &self.own.pods {
            self.own.node.del(pod).success();
        }
        self.assert_as_before("the next ADD");
    }
}

/// The next agent rolls back the unfinished operation, unasked, or has a complete attachment.
///
/// Rows: SRV-killed.
#[test]
fn an_agent_killed_while_it_takes_a_vf_leaves_it_to_be_given_back() {
    let Some(mut killed) = Killed::new("an_agent_killed_while_it_takes_a_vf") else { return };
    let points = killed.points_of(Killed::add);
    killed.del().success();
    for point in points {
        let Some(what) = killed.outlives(point, "ADD") else {
            killed.del().success();
            break;
        };
        let checked = killed.own.node.check(&killed.own.pods[0]);
        if checked.exit != 0 {
            assert_eq!(checked.json["code"], 3, "{what}: {:#}", checked.json);
            killed.assert_as_before(&what);
        }
        killed.del().success();
        killed.assert_as_before(&what);
    }
    killed.end();
}

/// Wherever the VF was on its way home, the kernel or the next agent brings it there.
///
/// Rows: SRV-killed.
#[test]
fn an_agent_killed_while_it_gives_a_vf_back_has_the_next_one_do_it() {
    let Some(mut killed) = Killed::new("an_agent_killed_while_it_gives_a_vf_back") else { return };
    killed.add().success();
    let points = killed.points_of(Killed::del);
    for point in points {
        killed.add().success();
        let Some(what) = killed.outlives(point, "DEL") else { break };
        // The namespace between the pod's and the node's ends with the agent, and the VF is nowhere until then.
        assert!(eventually(PATIENCE, || killed.del().exit == 0), "{what}");
        killed.assert_as_before(&what);
    }
    killed.end();
}
