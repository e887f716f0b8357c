//! The effect of lists and events on the cache.

use serde_json::json;

use super::*;
use crate::kube::ATTACHED_LABEL;
use crate::objects::budget::REMOTE_PODS;
use crate::objects::remote::BY_ANOTHER;

fn raw(json: &serde_json::Value) -> Box<RawValue> {
    serde_json::value::to_raw_value(json).unwrap()
}

fn pod(name: &str, uid: &str) -> Box<RawValue> {
    raw(&json!({"metadata": {"namespace": "shop", "name": name, "uid": uid, "resourceVersion": "7"}}))
}

fn policy(name: &str, spec: &serde_json::Value) -> Box<RawValue> {
    raw(&json!({
        "metadata": {
            "namespace": "shop",
            "name": name,
            "annotations": {"k8s.v1.cni.cncf.io/policy-for": "net-a"},
        },
        "spec": spec,
    }))
}

fn names(objects: &Objects) -> Vec<String> {
    objects.pods.values().map(|pod| format!("{} {}", pod.name, pod.uid.clone().unwrap_or_default())).collect()
}

fn problems(objects: &Objects) -> Vec<String> {
    objects.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn an_object_that_is_sent_again_unchanged_is_no_change() {
    let mut cache = Cache::default();
    assert!(cache.put(Kind::Pod, &pod("a", "1")).is_some());
    let first = cache.take_changed().unwrap();
    assert_eq!(names(&first), ["shop/a 1"]);
    assert!(first.pods.values().all(|pod| pod.on_this_node));
    cache.put(Kind::Pod, &pod("a", "1"));
    assert_eq!(cache.take_changed(), None);
    cache.put(Kind::Pod, &pod("b", "2"));
    let second = cache.take_changed().unwrap();
    let name = ObjectName::new("shop", "a");
    assert!(Arc::ptr_eq(&first.pods[&name], &second.pods[&name]));
    cache.remove(Kind::Pod, &pod("b", "2"));
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/a 1"]);
    cache.remove(Kind::Pod, &pod("b", "2"));
    assert_eq!(cache.take_changed(), None);
}

#[test]
fn what_a_complete_list_does_not_have_is_gone() {
    let mut cache = Cache::default();
    cache.put(Kind::Pod, &pod("a", "1"));
    cache.put(Kind::Namespace, &raw(&json!({"metadata": {"name": "shop", "labels": {"team": "x"}}})));
    let listed: BTreeSet<Key> = cache.put(Kind::Pod, &pod("b", "2")).into_iter().collect();
    cache.retain(Kind::Pod, &listed);
    let objects = cache.take_changed().unwrap();
    assert_eq!(names(&objects), ["shop/b 2"]);
    assert_eq!(objects.namespaces.keys().collect::<Vec<_>>(), ["shop"]);
}

#[test]
fn an_unreadable_object_is_its_own_problem_and_its_last_version_stays() {
    let mut cache = Cache::default();
    cache.put(Kind::Pod, &pod("a", "1"));
    let broken = raw(&json!({
        "metadata": {"namespace": "shop", "name": "a", "uid": "1"},
        "spec": {"containers": [{"ports": [{"containerPort": 0}]}]},
    }));
    assert!(cache.put(Kind::Pod, &broken).is_some());
    cache.put(Kind::Pod, &pod("b", "2"));
    let objects = cache.take_changed().unwrap();
    assert_eq!(names(&objects), ["shop/a 1", "shop/b 2"]);
    assert_eq!(problems(&objects), ["pod shop/a: read Pod shop/a: container port 0 is not from 1 to 65535"]);
    cache.put(Kind::Pod, &pod("a", "1"));
    assert_eq!(problems(&cache.take_changed().unwrap()), Vec::<String>::new());
    // An object without a name is ignored.
    assert_eq!(cache.put(Kind::Pod, &raw(&json!({"metadata": []}))), None);
    assert_eq!(cache.take_changed(), None);
}

/// An author who may add ephemeral containers to a live pod cannot freeze its state for the policies of its node.
#[test]
fn a_pod_with_more_ephemeral_containers_than_are_read_follows_its_labels() {
    let mut cache = Cache::default();
    cache.put(Kind::Pod, &pod("a", "1"));
    cache.take_changed();
    let containers = |number: usize| vec![json!({"name": "debug"}); number];
    let quarantined = raw(&json!({
        "metadata": {"namespace": "shop", "name": "a", "uid": "1", "labels": {"quarantine": "true"}},
        "spec": {
            "containers": [{"name": "app"}],
            "ephemeralContainers": containers(budget::CONTAINERS.most + 1),
        },
    }));
    cache.put(Kind::Pod, &quarantined);
    let objects = cache.take_changed().unwrap();
    assert_eq!(problems(&objects), Vec::<String>::new());
    let labels = &objects.pods[&ObjectName::new("shop", "a")].labels;
    assert_eq!(*labels, [("quarantine".to_owned(), "true".to_owned())].into());
}

#[test]
fn a_policy_that_cannot_be_read_isolates_and_never_replaces_one_that_could() {
    let mut cache = Cache::default();
    cache.put(Kind::MultiNetworkPolicy, &policy("p", &json!({"podSelector": 7})));
    let isolating = cache.take_changed().unwrap();
    let name = ObjectName::new("shop", "p");
    let rules = |objects: &Objects| objects.policies[&name].rules(Direction::Ingress).len();
    assert_eq!((rules(&isolating), isolating.problems.len()), (0, 1));
    let open = json!({"podSelector": {}, "ingress": [{}]});
    cache.put(Kind::MultiNetworkPolicy, &policy("p", &open));
    assert_eq!(rules(&cache.take_changed().unwrap()), 1);
    cache.put(Kind::MultiNetworkPolicy, &policy("p", &json!({"podSelector": 7})));
    let objects = cache.take_changed().unwrap();
    assert_eq!((rules(&objects), objects.problems.len()), (1, 1));
}

#[test]
fn pods_of_other_nodes_are_wanted_while_a_policy_with_pods_as_peers_can_select_a_pod_here() {
    let mut cache = Cache::default();
    let wanted = |cache: &Cache| [true, false].map(|tells_apart| cache.wants_remote_pods(tells_apart));
    let labelled = |namespace: &str, name: &str, role: &str| {
        let labels = json!({"role": role});
        raw(&json!({"metadata": {"namespace": namespace, "name": name, "uid": name, "labels": labels}}))
    };
    cache.put(Kind::Pod, &labelled("other", "o", "web"));
    let blocks = json!({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]});
    let selected = json!({"matchLabels": {"role": "web"}});
    let pods = json!({"podSelector": selected, "ingress": [{"from": [{"podSelector": {}}]}]});
    cache.put(Kind::MultiNetworkPolicy, &policy("blocks", &blocks));
    cache.put(Kind::MultiNetworkPolicy, &policy("pods", &pods));
    assert_eq!(wanted(&cache), [Want::Not; 2], "no pod of this node is in its namespace");
    cache.put(Kind::Pod, &labelled("shop", "db", "db"));
    assert_eq!(wanted(&cache), [Want::Soon; 2], "it selects no pod of this node");
    cache.put(Kind::Pod, &labelled("shop", "web", "web"));
    assert_eq!(wanted(&cache), [Want::Now, Want::Soon]);
    cache.remove(Kind::MultiNetworkPolicy, &policy("pods", &pods));
    assert_eq!(wanted(&cache), [Want::Not; 2], "blocks alone want none");
}

#[test]
fn a_definition_beyond_the_memory_for_all_is_not_kept() {
    let mut cache = Cache::default();
    let definition = |name: &str, bytes: usize| {
        raw(&json!({"metadata": {"namespace": "shop", "name": name}, "spec": {"config": " ".repeat(bytes)}}))
    };
    const LARGE: usize = 512 << 10;
    let fit = budget::DEFINITIONS_OF_CLUSTER.most / LARGE - 1;
    for number in 0..fit {
        cache.put(Kind::Definition, &definition(&format!("n{number:03}"), LARGE));
    }
    assert_eq!(problems(&cache.take_changed().unwrap()), Vec::<String>::new());
    let kind = Content::Objects(Kind::Definition);
    let refused =
        |cache: &Cache| cache.refused().map(|it| (it.0, it.1, it.2.to_string())).collect::<Vec<_>>();
    cache.put(Kind::Definition, &definition("last", 2 * LARGE - 1000));
    assert_eq!((cache.take_changed(), cache.wants_list(kind)), (None, false));
    assert_eq!(refused(&cache), [(kind, 1, "shop/last".to_owned())]);
    // Removing or shrinking objects makes room, once there is enough of it.
    cache.remove(Kind::Definition, &definition("n000", 0));
    assert!(!cache.wants_list(kind));
    cache.put(Kind::Definition, &definition("n001", 100));
    assert!(cache.wants_list(kind));
    cache.list_begins(kind);
    assert!(!cache.wants_list(kind));
    cache.put(Kind::Definition, &definition("n002", LARGE));
    assert!(!cache.has_admitted(kind), "it was there before");
    cache.put(Kind::Definition, &definition("last", 2 * LARGE - 1000));
    assert!(cache.has_admitted(kind));
    let objects = cache.take_changed().unwrap();
    assert_eq!((objects.definitions.len(), problems(&objects)), (fit, Vec::new()));
    assert_eq!((refused(&cache), cache.wants_lists()), (Vec::new(), false));
    // A refused object that is no longer in a list is forgotten.
    cache.put(Kind::Definition, &definition("other", 2 * LARGE - 1000));
    assert_eq!(refused(&cache), [(kind, 1, "shop/other".to_owned())]);
    let mut listed = merge::keys(&cache.objects, Kind::Definition).into_iter().collect();
    cache.retain(Kind::Definition, &listed);
    assert_eq!(refused(&cache), []);
    // A list with fewer objects makes room as well.
    cache.put(Kind::Definition, &definition("other", 2 * LARGE - 1000));
    assert_eq!(listed.pop_first().unwrap().name, ObjectName::new("shop", "last"));
    listed.insert(Key { kind: Kind::Definition.word(), name: ObjectName::new("shop", "other") });
    cache.retain(Kind::Definition, &listed);
    assert!(cache.wants_list(kind));
}

#[test]
fn pods_that_name_this_node_take_no_more_than_their_bound_and_nothing_once_they_have_ended() {
    let mut cache = Cache::default();
    const LARGE: usize = 128 << 10;
    let pod = |namespace: &str, name: &str, phase: &str| {
        let annotations = json!({"k8s.v1.cni.cncf.io/networks": "n".repeat(LARGE)});
        raw(&json!({
            "metadata": {"namespace": namespace, "name": name, "annotations": annotations},
            "status": {"phase": phase},
        }))
    };
    let one = pod("shop", "db", "Running");
    let fit = budget::PODS_OF_NODE.most / bytes_of(&api_object(Kind::Pod, &one).unwrap(), &one);
    let many = 2 * fit;
    cache.put(Kind::Pod, &one);
    // The author of many pods: their specifications assign them to this node.
    for number in 0..many {
        cache.put(Kind::Pod, &pod("greedy", &format!("p{number:04}"), "Pending"));
    }
    let kept = |cache: &Cache, namespace: &str| {
        cache.objects.pods.keys().filter(|name| name.namespace == namespace).count()
    };
    assert_eq!([kept(&cache, "shop"), kept(&cache, "greedy")], [1, fit - 1]);
    let kind = Content::Objects(Kind::Pod);
    let refused = |cache: &Cache| cache.refused().map(|it| (it.0, it.1)).collect::<Vec<_>>();
    assert_eq!(refused(&cache), [(kind, many - (fit - 1))]);
    // A pod of another author is added, and one of the first author's is removed.
    cache.put(Kind::Pod, &pod("shop", "cart", "Running"));
    assert_eq!([kept(&cache, "shop"), kept(&cache, "greedy")], [2, fit - 2]);
    // The kubelet has refused them.
    for number in 0..many {
        cache.put(Kind::Pod, &pod("greedy", &format!("p{number:04}"), "Failed"));
    }
    assert_eq!([kept(&cache, "shop"), kept(&cache, "greedy")], [2, many]);
    assert_eq!(refused(&cache), []);
    let ended = &cache.objects.pods[&ObjectName::new("greedy", "p0000")];
    assert!(ended.annotations.is_empty() && ended.phase.has_ended());
    // The status that an agent has published is compared until the pod is detached.
    let attached = raw(&json!({
        "metadata": {
            "namespace": "shop", "name": "job", "labels": {ATTACHED_LABEL: "1"},
            "annotations": {"k8s.v1.cni.cncf.io/network-status": "[]"},
        },
        "status": {"phase": "Succeeded"},
    }));
    cache.put(Kind::Pod, &attached);
    assert_eq!(cache.objects.pods[&ObjectName::new("shop", "job")].annotations.len(), 1);
    // That of another plugin is not needed any more.
    let by_another = raw(&json!({
        "metadata": {
            "namespace": "shop", "name": "former", "labels": {ATTACHED_LABEL: BY_ANOTHER},
            "annotations": {"k8s.v1.cni.cncf.io/network-status": "[]"},
        },
        "status": {"phase": "Succeeded"},
    }));
    cache.put(Kind::Pod, &by_another);
    assert!(cache.objects.pods[&ObjectName::new("shop", "former")].annotations.is_empty());
}

/// Returns the policies of namespaces, each with its number of requirements; those without rules are marked.
fn kept(objects: &Objects) -> Vec<String> {
    let one = |policy: &Arc<Policy>| {
        let isolates = if policy.rules(Direction::Ingress).is_empty() { " isolates" } else { "" };
        format!("{} {}{isolates}", policy.name, policy.pods.requirements.len())
    };
    objects.policies.values().map(one).collect()
}

#[test]
fn the_author_of_many_large_policies_gives_way_to_the_others_and_stays_isolated() {
    let mut cache = Cache::default();
    let policy = |namespace: &str, name: &str, bytes: usize| {
        raw(&json!({
            "metadata": {"namespace": namespace, "name": name, "annotations": {"note": "x".repeat(bytes)}},
            "spec": {"podSelector": {"matchLabels": {"app": "a"}}, "ingress": [{}]},
        }))
    };
    const LARGE: usize = 8 << 20;
    let put = |cache: &mut Cache, namespace: &str, name: &str, bytes: usize| {
        cache.put(Kind::MultiNetworkPolicy, &policy(namespace, name, bytes - 300));
        kept(&cache.take_changed().unwrap_or_default())
    };
    for number in 0..8 {
        cache.put(Kind::MultiNetworkPolicy, &policy("hostile", &number.to_string(), LARGE - 300));
    }
    let all = kept(&cache.take_changed().unwrap());
    assert_eq!((all.len(), &*all[7]), (8, "hostile/7 1"));
    let now = put(&mut cache, "shop", "web", 100_000);
    assert_eq!(now[6..], ["hostile/6 1", "hostile/7 1 isolates", "shop/web 1"]);
    let of = Content::Objects(Kind::MultiNetworkPolicy);
    assert!(!cache.wants_list(of), "there is no room for what has given way");
    // Writing it again does not restore it either.
    assert!(put(&mut cache, "hostile", "7", LARGE).is_empty());
    cache.remove(Kind::MultiNetworkPolicy, &policy("hostile", "0", 1));
    assert!(cache.wants_list(of));
    assert_eq!(put(&mut cache, "hostile", "7", LARGE)[6..], ["hostile/7 1", "shop/web 1"]);
}

#[test]
fn policies_count_by_what_they_take_where_that_is_more_than_their_text() {
    const RULES: usize = 100_000;
    let mut cache = Cache::default();
    // Three bytes for each rule.
    let rules = |name: &str, number: usize| {
        policy(name, &json!({"podSelector": {}, "ingress": vec![json!({}); number]}))
    };
    let large = rules("p000", RULES);
    let bytes = bytes_of(&api_object(Kind::MultiNetworkPolicy, &large).unwrap(), &large);
    assert!(bytes > RULES * size_of::<crate::objects::policy::Rule>(), "{bytes}");
    let fit = budget::POLICIES_OF_CLUSTER.most / bytes;
    for number in 0..fit + 3 {
        cache.put(Kind::MultiNetworkPolicy, &rules(&format!("p{number:03}"), RULES));
    }
    let expected = |number: usize| match number < fit {
        true => format!("shop/p{number:03} 0"),
        false => format!("shop/p{number:03} 0 isolates"),
    };
    assert_eq!(kept(&cache.take_changed().unwrap()), (0..fit + 3).map(expected).collect::<Vec<_>>());
    let of = Content::Objects(Kind::MultiNetworkPolicy);
    assert_eq!(cache.refused().map(|it| (it.0, it.1)).collect::<Vec<_>>(), [(of, 3)]);
}

#[test]
fn what_stands_for_a_policy_of_very_many_networks_isolates_on_every_one() {
    let networks = (0..300).map(|number| format!("n{number}")).collect::<Vec<_>>().join(",");
    let of_many = raw(&json!({
        "metadata": {
            "namespace": "shop", "name": "p", "annotations": {"k8s.v1.cni.cncf.io/policy-for": networks},
        },
        "spec": {"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress"]},
    }));
    let object = api_object(Kind::MultiNetworkPolicy, &of_many).unwrap();
    for policy in [merge::isolating(&object).unwrap(), object] {
        let Object::Policy(policy) = policy else { panic!("{policy:?}") };
        let seen = (policy.all_networks, policy.networks.len(), policy.pods.requirements.len());
        assert_eq!(seen, (true, 0, 1));
    }
}

#[test]
fn what_stands_for_policies_is_bounded_and_in_the_end_isolates_the_namespace() {
    let mut cache = Cache::default();
    let unreadable = |name: &str| {
        let networks = (0..200).map(|number| format!("network-{number:03}")).collect::<Vec<_>>().join(",");
        raw(&json!({
            "metadata": {
                "namespace": "shop", "name": name,
                "annotations": {"k8s.v1.cni.cncf.io/policy-for": networks},
            },
            "spec": {"podSelector": 7},
        }))
    };
    let begin = |cache: &mut Cache| cache.list_begins(Content::Objects(Kind::MultiNetworkPolicy));
    begin(&mut cache);
    for number in 0..100 {
        cache.put(Kind::MultiNetworkPolicy, &unreadable(&format!("p{number:02}")));
    }
    let objects = cache.take_changed().unwrap();
    let all = kept(&objects);
    assert!(all.len() < 10, "{all:?}");
    assert_eq!(all[all.len() - 1], "shop/policies beyond the bound 0 isolates");
    let last = objects.policies.values().last().unwrap();
    assert!(last.all_networks && last.rules(Direction::Egress).is_empty());
    // A list without most of them ends the isolation.
    let listed: BTreeSet<Key> = ["p00", "p01"]
        .map(|name| {
            begin(&mut cache);
            cache.put(Kind::MultiNetworkPolicy, &unreadable(name)).unwrap()
        })
        .into();
    cache.retain(Kind::MultiNetworkPolicy, &listed);
    assert_eq!(kept(&cache.take_changed().unwrap()), ["shop/p00 0 isolates", "shop/p01 0 isolates"]);
    assert!(cache.stand_ins.has(listed.first().unwrap()));
}

#[test]
fn of_very_many_unreadable_objects_the_first_are_problems() {
    let mut cache = Cache::default();
    let broken = |namespace: usize, number: usize| {
        raw(&json!({
            "metadata": {"namespace": format!("n{namespace}"), "name": format!("p{number:05}"), "uid": "1"},
            "spec": {"containers": [{"ports": [{"containerPort": 0}]}]},
        }))
    };
    for number in 0..UNREADABLE_OF_NAMESPACE + 10 {
        assert!(cache.has_more_problems().is_none() || number >= UNREADABLE_OF_NAMESPACE);
        cache.put(Kind::Pod, &broken(0, number));
    }
    assert_eq!(cache.take_changed().unwrap().problems.len(), UNREADABLE_OF_NAMESPACE);
    assert_eq!(cache.has_more_problems(), Some(MoreProblems::Of("n0")));
    // Read again, it is the same problem.
    cache.put(Kind::Pod, &broken(0, 0));
    assert_eq!(cache.take_changed(), None);
    cache.remove(Kind::Pod, &broken(0, 0));
    assert_eq!(cache.has_more_problems(), None);
    // One of another namespace is among them, until there are too many namespaces.
    cache.put(Kind::Pod, &broken(0, 0));
    for namespace in 1..2 * UNREADABLE / UNREADABLE_OF_NAMESPACE {
        (0..UNREADABLE_OF_NAMESPACE)
            .for_each(|number| drop(cache.put(Kind::Pod, &broken(namespace, number))));
    }
    assert_eq!(cache.take_changed().unwrap().problems.len(), UNREADABLE);
    assert_eq!(cache.has_more_problems(), Some(MoreProblems::OfAll));
}

#[test]
fn pods_of_other_nodes_that_did_not_fit_are_listed_again_when_there_is_room() {
    let mut cache = Cache::default();
    let remote = |name: &str, ip: &str| {
        let status = format!(r#"[{{"name":"shop/net-a","ips":["{ip}"]}}]"#);
        raw(&json!({"metadata": {
            "namespace": "shop", "name": name, "uid": name,
            "annotations": {"k8s.v1.cni.cncf.io/network-status": status},
        }}))
    };
    for number in 0..REMOTE_PODS - 1 {
        let name = ObjectName::new("far", format!("p{number}"));
        let pod = RemotePod::read(&name, Written::default(), &mut cache.interner);
        cache.objects.remote_pods.insert(Arc::new(pod)).unwrap();
    }
    let last = cache.put_remote(&remote("last", "10.1.0.1")).unwrap();
    let late = cache.put_remote(&remote("late", "10.1.0.2")).unwrap();
    let objects = cache.take_changed().unwrap();
    assert!(objects.remote_pods.get(&last).is_some() && objects.remote_pods.get(&late).is_none());
    assert_eq!(cache.refused().map(|it| (it.0, it.1)).collect::<Vec<_>>(), [(Content::RemotePods, 1)]);
    // Received again, it is refused again, and nothing has changed.
    cache.put_remote(&remote("late", "10.1.0.3"));
    assert_eq!((cache.take_changed(), cache.wants_list(Content::RemotePods)), (None, false));
    cache.remove_remote(&remote("last", "10.1.0.1"));
    assert!(cache.wants_list(Content::RemotePods));
    cache.list_begins(Content::RemotePods);
    cache.put_remote(&remote("late", "10.1.0.2"));
    let objects = cache.take_changed().unwrap();
    assert!(objects.remote_pods.get(&last).is_none() && objects.remote_pods.get(&late).is_some());
    assert_eq!((cache.refused().count(), cache.wants_lists()), (0, false));
}

#[test]
fn a_pod_that_was_asked_for_counts_until_the_watch_shows_it_or_its_time_is_over() {
    let start = Instant::now();
    let mut cache = Cache::default();
    assert!(cache.fetched(&pod("a", "1"), start).is_some());
    assert!(cache.fetched(&pod("b", "2"), start).is_some());
    cache.put(Kind::Pod, &pod("a", "1"));
    cache.expire(start + FETCHED - Duration::from_millis(1));
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/a 1", "shop/b 2"]);
    cache.expire(start + FETCHED);
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/a 1"]);
    // A watch that has not reached its version does not show that it is deleted.
    let newer = json!({"metadata": {"namespace": "shop", "name": "e", "uid": "5", "resourceVersion": "9"}});
    assert!(cache.fetched(&raw(&newer), start).is_some());
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/a 1", "shop/e 5"]);
    cache.expire(start + 10 * FETCHED);
    cache.passed(Kind::Pod, Some("8"));
    cache.expire(start + 10 * FETCHED);
    assert_eq!(cache.take_changed(), None);
    cache.passed(Kind::Pod, Some("9"));
    cache.expire(start + 10 * FETCHED);
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/a 1"]);
    // A pod that was deleted before the answer arrived is not restored.
    cache.remove(Kind::Pod, &pod("c", "3"));
    assert_eq!(cache.fetched(&pod("c", "3"), start), None);
    assert_eq!(cache.take_changed(), None);
    // A list that was in progress when the pod was requested need not contain it.
    assert!(cache.fetched(&pod("d", "4"), start).is_some());
    cache.retain(Kind::Pod, &BTreeSet::new());
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/d 4"]);
}

/// The server was restored from a backup: its versions are lower than before.
#[test]
fn a_list_of_an_earlier_version_is_the_one_that_counts() {
    let start = Instant::now();
    let fetched = |uid: &str, version: &str| {
        let metadata = json!({"namespace": "shop", "name": uid, "uid": uid, "resourceVersion": version});
        raw(&json!({ "metadata": metadata }))
    };
    let mut cache = Cache::default();
    cache.passed(Kind::Pod, Some("100"));
    assert!(cache.fetched(&fetched("over", "120"), start).is_some());
    cache.listed(Kind::Pod, "50");
    cache.retain(Kind::Pod, &BTreeSet::new());
    assert!(cache.fetched(&fetched("new", "60"), start).is_some());
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/new new", "shop/over over"]);
    cache.expire(start + FETCHED);
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/new new"], "the watch has not come to it");
    cache.passed(Kind::Pod, Some("60"));
    cache.expire(start + FETCHED);
    assert_eq!(names(&cache.take_changed().unwrap()), [""; 0]);
}

#[test]
fn what_the_watch_still_tells_of_an_earlier_pod_leaves_the_one_that_was_asked_for() {
    let pod = |uid: &str, version: &str| {
        let metadata = json!({"namespace": "shop", "name": "a", "uid": uid, "resourceVersion": version});
        raw(&json!({ "metadata": metadata }))
    };
    let mut cache = Cache::default();
    cache.put(Kind::Pod, &pod("1", "100"));
    assert!(cache.fetched(&pod("2", "200"), Instant::now()).is_some());
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/a 2"]);
    assert!(cache.put(Kind::Pod, &pod("1", "150")).is_some());
    cache.remove(Kind::Pod, &pod("1", "160"));
    assert_eq!(cache.take_changed(), None);
    cache.retain(Kind::Pod, &BTreeSet::new());
    assert_eq!(cache.take_changed(), None, "the watch has not shown it yet");
    // Once the watch has reached it, the pod is no longer requested, and its own events are not held back.
    cache.put(Kind::Pod, &pod("2", "200"));
    cache.retain(Kind::Pod, &BTreeSet::new());
    assert_eq!(names(&cache.take_changed().unwrap()), [""; 0]);
    // A later pod of the name replaces the one that was requested.
    assert!(cache.fetched(&pod("3", "300"), Instant::now()).is_some());
    cache.put(Kind::Pod, &pod("4", "400"));
    assert_eq!(names(&cache.take_changed().unwrap()), ["shop/a 4"]);
}

#[test]
fn pods_of_other_nodes_are_kept_by_what_their_agents_wrote() {
    let mut cache = Cache::default();
    let remote = |status: &str| {
        raw(&json!({"metadata": {
            "namespace": "shop", "name": "far", "uid": "9", "labels": {"app": "web"},
            "annotations": {"k8s.v1.cni.cncf.io/network-status": status, "other": "x".repeat(1000)},
        }}))
    };
    let status = r#"[{"name":"shop/net-a","interface":"net1","ips":["10.1.0.7"],"mac":"02:00:00:00:00:01"}]"#;
    let name = cache.put_remote(&remote(status)).unwrap();
    let objects = cache.take_changed().unwrap();
    let far = objects.remote_pods.get(&name).unwrap();
    let claims: Vec<String> = far.claims().map(|(place, address)| format!("{place} {address}")).collect();
    assert_eq!((claims, far.labels()["app"].as_str()), (vec!["shop/net-a 10.1.0.7".to_owned()], "web"));
    cache.put_remote(&remote(status));
    assert_eq!(cache.take_changed(), None);
    cache.remove_remote(&remote(status));
    assert!(cache.take_changed().unwrap().remote_pods.is_empty());
}

/// Another plugin's pods have one label, whichever their networks are, and so have those of agents of before.
#[test]
fn pods_on_the_default_network_alone_are_kept_while_policies_can_have_them_as_peers() {
    let own = || Some(NetworkRef::new("kube-system", "default"));
    let on = |name: &str, status: &serde_json::Value| {
        raw(&json!({"metadata": {
            "namespace": "shop", "name": name, "uid": name, "labels": {ATTACHED_LABEL: BY_ANOTHER},
            "annotations": {"k8s.v1.cni.cncf.io/network-status": status.to_string()},
        }}))
    };
    let of = |name: &str, default: bool| json!({"name": name, "default": default, "ips": ["10.1.0.7"]});
    let pods = [
        ("file", json!([of("cbr0", true)])),
        ("none", json!([{"name": "cbr0", "default": true}])),
        ("object", json!([of("kube-system/default", true)])),
        ("other", json!([of("kube-system/other", true)])),
        ("second", json!([of("cbr0", true), of("kube-system/default", false)])),
        ("third", json!([of("cbr0", true), of("lan", false)])),
    ];
    let kept = |cache: &mut Cache| -> Vec<String> {
        for (name, status) in &pods {
            cache.put_remote(&on(name, status));
        }
        let mut names: Vec<String> =
            cache.objects.remote_pods.iter().map(|pod| pod.name().to_owned()).collect();
        names.sort();
        names
    };
    let all = ["file", "none", "object", "other", "second", "third"];
    assert_eq!(kept(&mut Cache::default()), all, "NetworkPolicies are enforced");
    let mut cache = Cache::default();
    cache.leave_out_default(None);
    assert_eq!(kept(&mut cache), ["none", "object", "other", "second", "third"]);
    let mut cache = Cache::default();
    cache.leave_out_default(own());
    assert_eq!(kept(&mut cache), ["none", "other", "third"]);
    cache.read_pods_of_default(true);
    assert_eq!(kept(&mut cache), ["none", "object", "other", "second", "third"]);
    // One that was on another network is a peer no more.
    cache.put_remote(&on("third", &pods[0].1));
    let third = ObjectName::new("shop", "third");
    assert!(cache.objects.remote_pods.get(&third).is_none());
}

#[test]
fn policies_for_the_default_network_need_its_pods_where_a_pod_of_this_node_can_have_them() {
    let mut cache = Cache::default();
    cache.leave_out_default(Some(NetworkRef::new("kube-system", "default")));
    let spec = json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]});
    let annotations = json!({"k8s.v1.cni.cncf.io/policy-for": "kube-system/default"});
    let policy = raw(
        &json!({"metadata": {"namespace": "shop", "name": "p", "annotations": annotations}, "spec": spec}),
    );
    let pod = |namespace: &str, name: &str, host_network: bool| {
        let metadata = json!({"namespace": namespace, "name": name, "uid": name});
        raw(&json!({"metadata": metadata, "spec": {"hostNetwork": host_network, "containers": []}}))
    };
    cache.put(Kind::MultiNetworkPolicy, &policy);
    cache.put(Kind::Pod, &pod("shop-b", "a", false));
    assert!(!cache.wants_pods_of_default(), "no pod of its namespace is here");
    cache.put(Kind::Pod, &pod("shop", "a", true));
    assert!(!cache.wants_pods_of_default(), "it selects no pod of the node's network");
    cache.put(Kind::Pod, &pod("shop", "b", false));
    assert!(cache.wants_pods_of_default());
    cache.remove(Kind::Pod, &pod("shop", "b", false));
    assert!(!cache.wants_pods_of_default());
}

#[test]
fn pods_of_other_nodes_that_a_complete_list_does_not_have_are_gone() {
    let mut cache = Cache::default();
    let remote = |name: &str| raw(&json!({"metadata": {"namespace": "shop", "name": name, "uid": name}}));
    let known = |cache: &Cache| -> BTreeSet<String> {
        cache.objects.remote_pods.iter().map(|pod| pod.name().to_owned()).collect()
    };
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let list = |cache: &mut Cache, listed: &[&str]| {
        let mut unlisted = cache.unlisted_remote();
        for name in listed {
            unlisted.remove(&cache.put_remote(&remote(name)).unwrap());
        }
        cache.retain_remote(&unlisted);
    };
    list(&mut cache, &["a", "b", "c"]);
    assert_eq!(known(&cache), names(&["a", "b", "c"]));
    cache.refuse(Content::RemotePods, &ObjectName::new("shop", "refused"), 0);
    cache.refuse(Content::RemotePods, &ObjectName::new("shop", "d"), 0);
    list(&mut cache, &["b", "d"]);
    assert_eq!(known(&cache), names(&["b", "d"]));
    assert_eq!(cache.refused().count(), 0);
    // They are no longer needed.
    let all = cache.unlisted_remote();
    cache.retain_remote(&all);
    assert!(cache.objects.remote_pods.is_empty());
}
