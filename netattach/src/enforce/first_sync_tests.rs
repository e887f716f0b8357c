//! New and existing attachments while the source becomes complete.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::watch;

use super::super::attachment::EnforcedAttachment;
use super::super::attachment::tests::attachment;
use super::super::policy_maps::fake::FakeKernel;
use super::super::state::State;
use super::*;
use crate::npwg::NetworkRef;
use crate::objects::budget::REQUIREMENTS;
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::{ObjectName, Place};
use crate::policy::index::Endpoint;
use crate::source::read::manifest::Object;
use crate::source::read::{Kind, api_object, policy};

/// A source that becomes complete, with these objects, once it has answered its first query: the worst moment for a
/// caller with two queries.
struct Completing {
    objects: Arc<Objects>,
    was_asked: AtomicBool,
}

impl Completing {
    fn new(objects: Objects) -> Self {
        Self { objects: Arc::new(objects), was_asked: AtomicBool::new(false) }
    }

    fn is_complete(&self) -> bool {
        self.was_asked.swap(true, Ordering::Relaxed)
    }
}

impl Source for Completing {
    fn snapshot(&self) -> Arc<Objects> {
        if self.is_complete() { Arc::clone(&self.objects) } else { Arc::default() }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    fn synced(&self) -> Result<(), NotSynced> {
        if self.is_complete() { Ok(()) } else { Err(NotSynced::Incomplete("policies".to_owned())) }
    }

    fn reading(&self) -> Duration {
        Duration::ZERO
    }
}

fn sources<'a>(source: &'a Completing, options: &'a Options) -> Sources<'a> {
    static NODE: NodeAddresses = NodeAddresses::none();
    Sources { source, options, node: &NODE, behind_translation: true }
}

/// Attachment 9 of pod `shop/a` on network `shop/lan`.
fn on_lan() -> EnforcedAttachment {
    let mut on_lan = attachment(9);
    let lan = Place::Network(NetworkRef::new("shop", "lan"));
    on_lan.endpoint.as_mut().unwrap().at = Arc::new([lan].into());
    on_lan
}

/// Pod `shop/a`, and a policy that allows no peer to reach pods on `shop/lan`.
fn isolating() -> Objects {
    let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "lan".to_owned())]);
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"]});
    let rules = ObjectName::new("shop", "rules");
    let mut objects = Objects::default();
    let policy = policy::read(rules.clone(), &annotations, &spec).unwrap();
    objects.policies.insert(rules, policy.into());
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "shop", "name": "a"}});
    let pod = RawValue::from_string(pod.to_string()).unwrap();
    let Object::Pod(pod) = api_object(Kind::Pod, &pod).unwrap() else { unreachable!() };
    objects.pods.insert(pod.name.clone(), pod);
    objects
}

/// The snapshot before the first complete one has no policy, which does not mean that no policy exists.
#[test]
fn an_attachment_that_comes_while_the_source_becomes_complete_is_isolated_until_its_policies_are_known() {
    let (source, options) = (Completing::new(isolating()), Options::default());
    let kernel = FakeKernel::with_room(1);
    let mut state = State::new(0);
    state.enter(&[on_lan()], sources(&source, &options), &kernel).unwrap();
    let isolated = PolicyIds { ingress: DENY_ALL, egress: DENY_ALL };
    assert_eq!(state.maps().assigned(9), Some(isolated));
    state.bring_up_to_date(sources(&source, &options), &kernel).unwrap();
    let judged = PolicyIds { ingress: 1, egress: 0 };
    assert_eq!((state.maps().assigned(9), kernel.installed()), (Some(judged), [1].into()));
}

/// An attachment that an earlier agent isolated stays isolated: its policies are compared once the source is
/// complete.
#[test]
fn an_isolated_pod_stays_isolated_while_the_source_becomes_complete() {
    let (source, options) = (Completing::new(isolating()), Options::default());
    let kernel = FakeKernel::with_room(2);
    let isolated = PolicyIds { ingress: 4, egress: 0 };
    kernel.held.borrow_mut().insert(4, CompiledPolicy::default());
    kernel.assigned.borrow_mut().insert(9, isolated);
    let mut state = State::new(4);
    state.maps_mut().adopt(9, &kernel).unwrap();
    state.take_over(&on_lan());
    state.bring_up_to_date(sources(&source, &options), &kernel).unwrap();
    assert_eq!(kernel.assigned(9).unwrap(), isolated);
    state.bring_up_to_date(sources(&source, &options), &kernel).unwrap();
    assert_eq!(kernel.assigned(9).unwrap(), PolicyIds { ingress: 5, egress: 0 });
}

/// An attachment bypasses the compiler only if the source is known to have no policy, and after the complete state of
/// an earlier agent has been compared.
#[test]
fn an_attachment_is_open_at_once_only_after_the_first_complete_comparison() {
    let (source, options) = (Completing::new(Objects::default()), Options::default());
    let kernel = FakeKernel::with_room(1);
    let endpoints = Endpoints::new();
    let mut policies = Policies::default();
    let sources = sources(&source, &options);
    assert!(!policies.enter_open(9, sources, &kernel).unwrap(), "nothing is known");
    policies.recognise(sources, &endpoints, &kernel).unwrap();
    assert!(policies.unrecognised, "the source was not complete");
    source.was_asked.store(false, Ordering::Relaxed);
    policies.bring_up_to_date(sources, &endpoints, &kernel).unwrap();
    assert!((policies.unrecognised, policies.is_open) == (true, true), "it became complete in between");
    assert!(!policies.enter_open(9, sources, &kernel).unwrap(), "nothing is compared");
    policies.bring_up_to_date(sources, &endpoints, &kernel).unwrap();
    assert!(policies.enter_open(9, sources, &kernel).unwrap());
    assert_eq!(policies.maps().assigned(9), Some(PolicyIds::default()));
    source.was_asked.store(false, Ordering::Relaxed);
    assert!(!policies.enter_open(8, sources, &kernel).unwrap(), "the source is not complete any more");
}

/// Policies that take more work than an update may do: what it did not suffice for waits for nothing but the next
/// sweep, unless that is the change's own, and nothing waits for it.
#[test]
fn a_sweep_goes_on_where_the_work_of_an_update_ended() {
    const POLICIES: u32 = 15;
    let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "lan".to_owned())]);
    let labels: BTreeMap<String, &str> = (0..REQUIREMENTS).map(|it| (format!("no{it}"), "such")).collect();
    let nobody = json!({"namespaceSelector": {"matchLabels": labels}});
    let (mut objects, mut endpoints) = (Objects::default(), Endpoints::new());
    for number in 0..1000 {
        let app = format!("x{number}");
        let metadata = json!({"namespace": "shop", "name": app, "labels": {"app": app}});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
        let pod = RawValue::from_string(pod.to_string()).unwrap();
        let Object::Pod(pod) = api_object(Kind::Pod, &pod).unwrap() else { unreachable!() };
        if number < POLICIES {
            // A namespace has work for four, and beside them for the last, which is small. Trying the others takes all
            // that an update has.
            let selectors = if number + 1 < POLICIES { 625 } else { 156 };
            let ingress = json!([{"from": vec![nobody.clone(); selectors]}, {"ports": [{"port": 7}]}]);
            let selected = json!({"matchLabels": {"app": app}});
            let spec = json!({"podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress});
            let policy = policy::read(pod.name.clone(), &annotations, &spec).unwrap();
            objects.policies.insert(pod.name.clone(), policy.into());
            let endpoint = on_lan().endpoint.unwrap();
            endpoints.insert(number, Endpoint { id: number, pod: pod.name.clone(), ..endpoint }.into());
        }
        objects.pods.insert(pod.name.clone(), pod);
    }
    let (source, options) = (Completing::new(objects), Options::default());
    source.was_asked.store(true, Ordering::Relaxed);
    let (sources, kernel) = (sources(&source, &options), FakeKernel::with_room(100));
    let mut policies = Policies::default();
    let is_open = |policies: &Policies| {
        let tables = policies.desired().endpoints[&(POLICIES - 1)].ingress.as_ref();
        tables.is_some_and(|tables| !tables.ports.is_empty())
    };
    policies.bring_up_to_date(sources, &endpoints, &kernel).unwrap();
    assert_eq!((is_open(&policies), policies.is_behind()), (false, false));
    let swept = |policies: &mut Policies, after| policies.go_on(after, None, sources, &endpoints, &kernel);
    assert!(!swept(&mut policies, Sweep::Change).unwrap(), "it would have the others wait twice as long");
    policies.behind = Behind::Failed;
    assert!(swept(&mut policies, Sweep::Change).unwrap(), "what has failed is tried at once");
    assert_eq!((is_open(&policies), policies.is_behind()), (false, false), "without any more work");
    assert!(swept(&mut policies, Sweep::Pause).unwrap());
    assert!(is_open(&policies));
    assert!(!swept(&mut policies, Sweep::Pause).unwrap(), "there is no room for more");
}

/// Nothing of a deleted policy is kept: neither its rules, nor the tables compiled from them.
#[test]
fn when_the_last_policy_goes_so_does_all_that_was_kept_of_it() {
    let options = Options::default();
    let kernel = FakeKernel::with_room(1);
    let with_policy = Completing::new(isolating());
    let mut state = State::new(0);
    state.take_over(&on_lan());
    for _ in 0..2 {
        state.bring_up_to_date(sources(&with_policy, &options), &kernel).unwrap();
    }
    let rules = Arc::downgrade(with_policy.objects.policies.values().next().unwrap());
    let tables = Arc::downgrade(state.policies().desired().endpoints[&9].ingress.as_ref().unwrap());
    drop(with_policy);
    assert_eq!((rules.strong_count() > 0, tables.strong_count() > 0), (true, true));

    let without = Completing::new(Objects::default());
    without.was_asked.store(true, Ordering::Relaxed);
    state.bring_up_to_date(sources(&without, &options), &kernel).unwrap();
    state.maps_mut().remove_unread(Some(Instant::now()), &kernel).unwrap();
    assert_eq!((rules.strong_count(), tables.strong_count()), (0, 0));
}
