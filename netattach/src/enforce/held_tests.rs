//! How an agent treats the policies of its predecessor while its source is incomplete.

use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::super::attachment::EnforcedAttachment;
use super::super::attachment::tests::attachment;
use super::super::node_addresses::NodeAddresses;
use super::super::policies::Sources;
use super::super::policy_maps::Kernel;
use super::super::policy_maps::fake::FakeKernel;
use super::super::state::State;
use super::*;
use crate::npwg::{NetworkRef, STATUS_ANNOTATION};
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::{ObjectName, Place};
use crate::policy::lookup::PortPrefix;
use crate::policy::options::Options;
use crate::source::Source;
use crate::source::read::manifest::Object;
use crate::source::read::{Kind, api_object, policy};

const ISOLATED: PolicyIds = PolicyIds { ingress: DENY_ALL, egress: DENY_ALL };
const OPEN: PolicyIds = PolicyIds { ingress: 0, egress: 0 };

/// A source that is complete, with these objects.
struct Fixed(Arc<Objects>);

impl Source for Fixed {
    fn snapshot(&self) -> Arc<Objects> {
        Arc::clone(&self.0)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    fn reading(&self) -> Duration {
        Duration::ZERO
    }
}

/// An agent's state, and the kernel's.
struct Agent<'k> {
    state: State,
    kernel: &'k FakeKernel,
}

impl<'k> Agent<'k> {
    /// Returns an agent that has adopted attachment 9.
    fn restarted(last_id: u32, kernel: &'k FakeKernel, objects: &Objects) -> Self {
        Self::adopting(&[9], last_id, kernel, objects)
    }

    fn adopting(attachments: &[u32], last_id: u32, kernel: &'k FakeKernel, objects: &Objects) -> Self {
        let mut agent = Self { state: State::new(last_id), kernel };
        for id in attachments {
            agent.state.take_over(&on_lan(*id));
            agent.state.maps_mut().adopt(*id, kernel).unwrap();
        }
        agent.with(objects, |state, sources, kernel| state.recognise(sources, kernel).unwrap());
        agent
    }

    fn with(&mut self, objects: &Objects, act: impl FnOnce(&mut State, Sources<'_>, &FakeKernel)) {
        static NODE: NodeAddresses = NodeAddresses::none();
        let (source, options) = (Fixed(Arc::new(objects.clone())), Options::default());
        let sources = Sources { source: &source, options: &options, node: &NODE, behind_translation: true };
        act(&mut self.state, sources, self.kernel);
    }

    /// Returns the policies of attachments once these objects are known.
    fn assigned<const N: usize>(&mut self, objects: &Objects, attachments: [u32; N]) -> [PolicyIds; N] {
        self.with(objects, |state, sources, kernel| {
            state.bring_up_to_date(sources, kernel).unwrap();
        });
        attachments.map(|id| Kernel::assigned(self.kernel, id).unwrap())
    }
}

/// An attachment of pod `shop/a` on network `shop/lan`.
fn on_lan(id: u32) -> EnforcedAttachment {
    let mut on_lan = attachment(id);
    let lan = Place::Network(NetworkRef::new("shop", "lan"));
    on_lan.endpoint.as_mut().unwrap().at = Arc::new([lan].into());
    on_lan
}

/// Adds a policy with that name for all pods of namespace `shop`, and for their ingress.
fn ruled(mut objects: Objects, name: &str, ingress: &Value) -> Objects {
    let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "lan".to_owned())]);
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": ingress});
    let name = ObjectName::new("shop", name);
    let policy = policy::read(name.clone(), &annotations, &spec).unwrap();
    objects.policies.insert(name, policy.into());
    objects
}

/// Pods of namespace `shop`, one of them with an address, and a policy that lets them reach each other.
fn objects(pods: &[&str]) -> Objects {
    let mut objects = ruled(Objects::default(), "rules", &json!([{"from": [{"podSelector": {}}]}]));
    for name in pods {
        let status = json!([{"name": "shop/lan", "ips": ["10.0.0.7"]}]).to_string();
        let annotations = if *name == "a" { json!({}) } else { json!({(STATUS_ANNOTATION): status}) };
        let metadata = json!({"namespace": "shop", "name": name, "annotations": annotations});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
        let pod = RawValue::from_string(pod.to_string()).unwrap();
        let Object::Pod(pod) = api_object(Kind::Pod, &pod).unwrap() else { unreachable!() };
        objects.pods.insert(pod.name.clone(), pod);
    }
    objects
}

fn unknown(unknown: Unknown, objects: Objects) -> Objects {
    Objects { unknown, ..objects }
}

#[test]
fn an_isolated_attachment_keeps_its_predecessors_peers_until_all_are_known() {
    let kernel = FakeKernel::with_room(2);
    let all = objects(&["a", "b"]);
    let mut first = Agent { state: State::new(0), kernel: &kernel };
    first.with(&all, |state, sources, kernel| state.enter(&[on_lan(9)], sources, kernel).unwrap());
    let judged = PolicyIds { ingress: 1, egress: 0 };
    assert_eq!(first.assigned(&all, [9]), [judged]);

    let some = unknown(Unknown { remote_pods: true, ..Unknown::default() }, objects(&["a"]));
    let mut agent = Agent::restarted(1, &kernel, &some);
    assert_eq!(agent.assigned(&some, [9]), [judged]);
    assert!(agent.state.is_behind());
    // A new attachment has no earlier policies: it gets the known peers.
    agent.with(&some, |state, sources, kernel| state.enter(&[on_lan(8)], sources, kernel).unwrap());
    assert_eq!(agent.assigned(&some, [9, 8]), [judged, PolicyIds { ingress: 2, egress: 0 }]);
    // The kept policies now equal the desired ones.
    assert_eq!(agent.assigned(&all, [9, 8]), [judged; 2]);
    assert!(!agent.state.is_behind());
    // From then on it has this agent's policies.
    let judged_anew = agent.assigned(&some, [9])[0];
    assert!(judged_anew != judged && judged_anew.ingress != 0, "{judged_anew:?}");
}

#[test]
fn an_attachment_that_was_open_or_allowed_nothing_is_decided_at_once() {
    let some = unknown(Unknown { remote_pods: true, ..Unknown::default() }, objects(&["a"]));
    for before in [OPEN, ISOLATED] {
        let kernel = FakeKernel::with_room(2);
        kernel.assigned.borrow_mut().insert(9, before);
        let mut agent = Agent::restarted(0, &kernel, &some);
        assert_eq!(agent.assigned(&some, [9]), [PolicyIds { ingress: 1, egress: 0 }], "{before:?}");
        assert!(!agent.state.is_behind(), "{before:?}");
    }
}

#[test]
fn a_policy_that_is_changed_while_peers_are_unknown_holds_at_once() {
    let remote_pods = Unknown { remote_pods: true, ..Unknown::default() };
    let some = unknown(remote_pods, objects(&["a"]));
    let port = json!([{"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": 80}]}]);
    let changes = [
        ("is another", ruled(some.clone(), "rules", &port)),
        ("selects it too", ruled(some.clone(), "more", &port)),
    ];
    for (what, changed) in changes {
        let kernel = FakeKernel::with_room(2);
        let mut first = Agent { state: State::new(0), kernel: &kernel };
        let judged = PolicyIds { ingress: 1, egress: 0 };
        let all = objects(&["a", "b"]);
        first.with(&all, |state, sources, kernel| state.enter(&[on_lan(9)], sources, kernel).unwrap());
        let mut agent = Agent::restarted(1, &kernel, &some);
        // A new peer is no change of a policy.
        let more = unknown(remote_pods, objects(&["a", "b"]));
        assert_eq!([agent.assigned(&some, [9]), agent.assigned(&more, [9])], [[judged]; 2]);
        assert_eq!(agent.assigned(&changed, [9]), [PolicyIds { ingress: 2, egress: 0 }], "{what}");
        assert!(!agent.state.is_behind(), "{what}");
    }
}

#[test]
fn an_attachment_waits_no_longer_for_unknown_peers_when_a_known_one_is_revoked() {
    let kernel = FakeKernel::with_room(2);
    let mut first = Agent { state: State::new(0), kernel: &kernel };
    let all = objects(&["a", "b"]);
    first.with(&all, |state, sources, kernel| state.enter(&[on_lan(9)], sources, kernel).unwrap());
    let remote_pods = Unknown { remote_pods: true, ..Unknown::default() };
    let [known, without] = [&["a", "b"][..], &["a"]].map(|pods| unknown(remote_pods, objects(pods)));
    let mut agent = Agent::restarted(1, &kernel, &known);
    assert_eq!(agent.assigned(&known, [9]), [PolicyIds { ingress: 1, egress: 0 }]);
    assert!(agent.state.is_behind());
    // Its address may be given to a pod that no policy allows.
    assert_eq!(agent.assigned(&without, [9]), [PolicyIds { ingress: 2, egress: 0 }]);
    assert!(!agent.state.is_behind());
}

#[test]
fn unknown_peers_are_waited_for_for_some_minutes_and_then_refused() {
    let kernel = FakeKernel::with_room(2);
    kernel.assigned.borrow_mut().insert(9, PolicyIds { ingress: 4, egress: 0 });
    let mut maps = PolicyMaps::new(4);
    maps.adopt(9, &kernel).unwrap();
    let some = unknown(Unknown { remote_pods: true, ..Unknown::default() }, objects(&["a"]));
    let names: Vec<PolicyName> = some.policies.values().map(|policy| policy.name.clone()).collect();
    let policy = Arc::new(EndpointPolicy {
        ingress: Some(Arc::default()),
        policies: names.clone(),
        ingress_by: names,
        ..EndpointPolicy::default()
    });
    let mut held = Held::default();
    held.adopt([9]);
    let began = Instant::now();
    let mut waits = |after: Duration| {
        let endpoints = BTreeMap::from([(9, Arc::clone(&policy))]);
        let mut desired = Desired { endpoints, ..Desired::default() };
        held.hold(&mut desired, &maps, &some, began + after);
        let is_due = [began + after, began + LONGEST].map(|now| held.is_due(now));
        (desired.undecided.contains(&9), held.awaits(), is_due)
    };
    assert_eq!(waits(Duration::ZERO), (true, true, [false, true]));
    assert_eq!(waits(LONGEST - Duration::from_secs(1)), (true, true, [false, true]));
    assert_eq!(waits(LONGEST), (false, false, [false, false]));
}

#[test]
fn a_peer_is_revoked_when_less_is_allowed_to_it_whatever_the_numbers_are() {
    let tables = |peers: &[(&str, ClassId)], ports: &[(ClassId, Traffic)]| {
        let port =
            |(class, traffic): &(ClassId, Traffic)| (PortPrefix { class: *class, traffic: *traffic }, 1);
        CompiledPolicy {
            peers: peers.iter().map(|(net, class)| (net.parse().unwrap(), *class)).collect(),
            ports: ports.iter().map(port).collect(),
            rules: BTreeMap::new(),
        }
    };
    let (tcp, udp) = (Traffic::Protocol(6), Traffic::Protocol(17));
    let before = tables(&[("10.0.0.7/32", 1)], &[(1, tcp)]);
    let cases = [
        ("the same", tables(&[("10.0.0.7/32", 1)], &[(1, tcp)]), false),
        ("another number", tables(&[("10.0.0.6/32", 1), ("10.0.0.7/32", 2)], &[(1, udp), (2, tcp)]), false),
        ("more", tables(&[("10.0.0.7/32", 1)], &[(1, tcp), (1, udp)]), false),
        ("everything", tables(&[("10.0.0.7/32", 1)], &[(1, Traffic::Any)]), false),
        ("by its subnet", tables(&[("10.0.0.0/24", 1)], &[(1, tcp)]), false),
        ("gone", tables(&[("10.0.0.6/32", 1)], &[(1, tcp)]), true),
        ("other labels", tables(&[("10.0.0.7/32", 1)], &[(1, udp)]), true),
    ];
    for (what, now, revoked) in cases {
        assert_eq!(allows_less(&before, &now), revoked, "{what}");
    }
}

#[test]
fn a_rule_that_no_policy_has_written_revokes_nothing() {
    let (everyone, peer, server) = ("0.0.0.0/0", "10.0.0.7/32", "10.0.0.1/32");
    let (tcp, udp) = (Traffic::Protocol(6), Traffic::Protocol(17));
    let tables = |peers: &[(&str, ClassId)], ports: &[(ClassId, Traffic, u32)]| {
        let port = |(class, traffic, rule): &(ClassId, Traffic, u32)| {
            (PortPrefix { class: *class, traffic: *traffic }, *rule)
        };
        CompiledPolicy {
            peers: peers.iter().map(|(net, class)| (net.parse().unwrap(), *class)).collect(),
            ports: ports.iter().map(port).collect(),
            rules: BTreeMap::from([(2, Origin::from("dhcp of the attachment"))]),
        }
    };
    // Rule 2 is about everyone, and so about the peer, until the server is known.
    let before = tables(&[(everyone, 1), (peer, 2)], &[(1, udp, 2), (2, udp, 2), (2, tcp, 1)]);
    let known = tables(&[(server, 1), (peer, 2)], &[(1, udp, 2), (2, tcp, 1)]);
    let gone = tables(&[(server, 1)], &[(1, udp, 2)]);
    assert_eq!([&known, &gone].map(|now| allows_less(&before, now)), [false, true]);
}

#[test]
fn that_there_is_no_policy_is_not_taken_from_a_server_that_does_not_know_the_kind_yet() {
    let kernel = FakeKernel::with_room(2);
    kernel.held.borrow_mut().insert(4, Default::default());
    let judged = PolicyIds { ingress: 4, egress: 0 };
    kernel.assigned.borrow_mut().insert(9, judged);
    let without = Objects { policies: Default::default(), ..objects(&["a"]) };
    let doubtful = unknown(Unknown { kinds: true, ..Unknown::default() }, without.clone());
    let mut agent = Agent::restarted(4, &kernel, &doubtful);
    assert_eq!(agent.assigned(&doubtful, [9]), [judged]);
    agent.with(&doubtful, |state, sources, kernel| state.enter(&[on_lan(8)], sources, kernel).unwrap());
    assert_eq!(agent.assigned(&doubtful, [9, 8]), [judged, ISOLATED], "policies may select it");
    // The policies may select the next pod of this number too.
    agent.with(&doubtful, |state, sources, kernel| state.leave(9, sources, kernel).unwrap());
    agent.with(&doubtful, |state, sources, kernel| state.enter(&[on_lan(7)], sources, kernel).unwrap());
    assert_eq!(agent.assigned(&doubtful, [8, 7]), [ISOLATED; 2]);
    assert!(agent.state.is_behind());
    assert_eq!(agent.assigned(&without, [8, 7]), [OPEN; 2]);
    assert!(!agent.state.is_behind());
    // If no attachment was isolated, no unknown policy can be in force.
    let kernel = FakeKernel::with_room(2);
    let mut agent = Agent::restarted(0, &kernel, &doubtful);
    agent.with(&doubtful, |state, sources, kernel| state.enter(&[on_lan(8)], sources, kernel).unwrap());
    assert_eq!(agent.assigned(&doubtful, [9, 8]), [OPEN; 2]);
}

#[test]
fn policies_that_are_known_isolate_while_others_are_in_doubt() {
    let kernel = FakeKernel::with_room(2);
    kernel.held.borrow_mut().insert(4, Default::default());
    // Isolated for egress, by a policy that the server does not serve at present.
    let judged = PolicyIds { ingress: 0, egress: 4 };
    kernel.assigned.borrow_mut().insert(6, judged);
    let doubtful = unknown(Unknown { kinds: true, ..Unknown::default() }, objects(&["a"]));
    let mut agent = Agent::adopting(&[6, 9], 4, &kernel, &doubtful);
    let isolated = PolicyIds { ingress: 5, egress: 0 };
    assert_eq!(agent.assigned(&doubtful, [6, 9]), [judged, isolated]);
    assert_eq!(agent.assigned(&unknown(Unknown::default(), doubtful), [6, 9]), [isolated; 2]);
}
