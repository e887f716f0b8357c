//! The conformance rows that compilation decides.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use serde_json::{Value, json};

use super::{Affected, Compiler, compile};
use crate::npwg::selection::PortProtocol;
use crate::npwg::{NetworkRef, STATUS_ANNOTATION};
use crate::objects::Place;
use crate::objects::access::{AllowedNamespaces, Isolation, Restrictions};
use crate::objects::budget::{
    ALLOWED_NAMESPACES, Excess, POLICIES, REQUIREMENTS, RULES_OF_NODE, WORK_OF_NAMESPACE, WORK_OF_UPDATE,
};
use crate::objects::labels::Labels;
use crate::objects::policy::{Direction, Inference, POLICY_FOR_ANNOTATION, PolicyName};
use crate::objects::{ContainerPort, Definition, ObjectName, Objects, Phase, Pod};
use crate::policy::classes::NOTHING;
use crate::policy::desired::{Condition, Desired, Subject};
use crate::policy::evaluate::evaluate;
use crate::policy::index::{Endpoint, Endpoints};
use crate::policy::lookup::{CompiledPolicy, Origin, PortPrefix, Traffic};
use crate::policy::options::{OnOverflow, Options};
use crate::source::read::policy;

/// Two namespaces, a pod with two networks, and every kind of peer.
pub(super) struct World {
    pub(super) objects: Objects,
    pub(super) endpoints: Vec<Endpoint>,
}

impl World {
    fn new() -> Self {
        let mut world = Self { objects: Objects::default(), endpoints: Vec::new() };
        world.objects.namespaces.insert("shop".to_owned(), labels(&[("team", "a")]));
        world.pod(
            "shop",
            "web",
            &[("http", 8080)],
            &[("shop/net-a", &["10.0.0.1", "fd00::1"]), ("shop/net-b", &["10.1.0.1"])],
        );
        world.pod(
            "shop",
            "db",
            &[("http", 9090)],
            &[("shop/net-a", &["10.0.0.2", "fd00::2"]), ("shop/net-b", &["10.1.0.2"])],
        );
        world.pod("other", "web", &[], &[("shop/net-a", &["10.0.0.3"])]);
        world.pod("shop", "done", &[], &[("shop/net-a", &["10.0.0.6"])]).phase = Phase::Succeeded;
        world.pod("shop", "host", &[], &[("shop/net-a", &["10.0.0.7"])]).host_network = true;
        world.pod("shop", "pending", &[], &[("shop/net-a", &["10.0.0.8"])]).phase = Phase::Pending;
        let status = json!([
            {"name": "cbr0", "default": true, "ips": ["10.9.0.9"]},
            {"name": "shop/net-a", "ips": ["10.0.0.9/24", "fd00::9"]},
            {"name": "shop/net-b", "ips": ["10.1.0.9"]},
        ]);
        let annotations = BTreeMap::from([(STATUS_ANNOTATION.to_owned(), status.to_string())]);
        world.pod("shop", "remote", &[("http", 7070)], &[]).annotations = annotations.clone();
        // The status that a pod of this node has is not trusted.
        world.pod("shop", "liar", &[], &[("shop/net-a", &["10.0.0.10"])]).annotations = BTreeMap::from([(
            STATUS_ANNOTATION.to_owned(),
            json!([{"name": "shop/net-a", "ips": ["10.0.0.66"]}]).to_string(),
        )]);
        world.pod("shop", "garbled", &[], &[]).annotations =
            BTreeMap::from([(STATUS_ANNOTATION.to_owned(), "[".to_owned())]);
        world
    }

    fn pod(
        &mut self,
        namespace: &str,
        name: &str,
        ports: &[(&str, u16)],
        on: &[(&str, &[&str])],
    ) -> &mut Pod {
        let pod_name = ObjectName::new(namespace, name);
        for (network, addresses) in on {
            let (network_namespace, network) = network.split_once('/').unwrap();
            self.endpoints.push(Endpoint {
                id: u32::try_from(self.endpoints.len()).unwrap() + 1,
                pod: pod_name.clone(),
                uid: None,
                at: Arc::new(BTreeSet::from([Place::Network(NetworkRef::new(network_namespace, network))])),
                addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
                dhcp: None,
                ethertypes: Vec::new(),
            });
        }
        let port = |(name, port): &(&str, u16)| ContainerPort {
            name: Some((*name).to_owned()),
            protocol: PortProtocol::Tcp,
            port: *port,
        };
        let pod = Pod {
            name: pod_name.clone(),
            uid: None,
            mirror_of: None,
            labels: labels(&[("app", name)]),
            annotations: BTreeMap::new(),
            phase: Phase::Running,
            host_network: false,
            ports: ports.iter().map(port).collect(),
            powers: Default::default(),
            on_this_node: false,
            terminating: false,
        };
        Arc::make_mut(self.objects.pods.entry(pod_name).insert_entry(Arc::new(pod)).into_mut())
    }

    /// Adds `shop/p0`, `shop/p1`, ...; the key `for` is the annotation, by default `net-a`.
    fn with(mut self, policies: &[Value]) -> Self {
        for (number, policy) in policies.iter().enumerate() {
            let mut spec = policy.clone();
            if spec.get("podSelector").is_none() {
                spec["podSelector"] = json!({"matchLabels": {"app": "web"}});
            }
            let networks = policy.get("for").and_then(Value::as_str).unwrap_or("net-a");
            spec.as_object_mut().unwrap().remove("for");
            let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), networks.to_owned())]);
            let policy = policy::read(ObjectName::new("shop", format!("p{number}")), &annotations, &spec);
            let policy = policy.unwrap();
            self.objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
        }
        self
    }

    pub(super) fn compile(&self) -> Desired {
        compile(&self.objects, &self.endpoints, &Options::default())
    }
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// `in 10.0.0.2 tcp/80`, for attachment 1 (`shop/web` on `net-a`), or `3 out ...` for another.
fn allowed(desired: &Desired, probe: &str) -> bool {
    let mut words: Vec<&str> = probe.split(' ').collect();
    let endpoint: u32 = if words.len() == 4 { words.remove(0).parse().unwrap() } else { 1 };
    let (protocol, port) = words[2].split_once('/').unwrap_or((words[2], "0"));
    let (protocol, port) = match protocol {
        "icmp" => (1, None),
        name => (PortProtocol::from_name(name).unwrap().number(), Some(port.parse().unwrap())),
    };
    let policies = &desired.endpoints[&endpoint];
    let policy = if words[0] == "in" { &policies.ingress } else { &policies.egress };
    match policy {
        None => true,
        Some(policy) => evaluate(policy, words[1].parse().unwrap(), protocol, port).is_some(),
    }
}

/// Row, policies, what is allowed, what is denied.
type Row<'a> = (&'a str, Vec<Value>, &'a [&'a str], &'a [&'a str]);

fn check(table: Vec<Row<'_>>) {
    for (row, policies, allows, denies) in table {
        let desired = World::new().with(&policies).compile();
        for probe in allows {
            assert!(allowed(&desired, probe), "{row}: {probe} must be allowed");
        }
        for probe in denies {
            assert!(!allowed(&desired, probe), "{row}: {probe} must be denied");
        }
    }
}

/// Rows: C01, C02, C04, C05, C09, C10, C13, C20.
#[test]
fn policies_select_attachments() {
    let deny = json!({"policyTypes": ["Ingress"]});
    let deny_for = |networks: &str| json!({"for": networks, "policyTypes": ["Ingress"]});
    let any = "10.9.9.9";
    let probe = |endpoint: u32| format!("{endpoint} in {any} tcp/80");
    let [web_a, web_b, db_a, db_b, other, done, host] = [1, 2, 3, 4, 5, 6, 7].map(probe);
    check(vec![
        ("C01", vec![deny.clone()], &[&other, &db_a], &[&web_a]),
        ("C02", vec![deny_for("")], &[&web_a, &web_b], &[]),
        ("C04", vec![deny_for("other/net-a")], &[&web_a], &[]),
        ("C05", vec![deny_for("shop/net-a,other/net-a")], &[&web_b], &[&web_a]),
        ("C09", vec![deny.clone()], &[&web_b], &[&web_a]),
        (
            "C10",
            vec![json!({"podSelector": {}, "policyTypes": ["Ingress"]})],
            &[&web_b, &db_b, &other],
            &[&web_a, &db_a, &done],
        ),
        ("C13", vec![json!({"podSelector": {}, "policyTypes": ["Ingress"]})], &[&host], &[]),
        ("both networks", vec![deny_for("net-a, net-b")], &[&db_a], &[&web_a, &web_b]),
        ("C20", vec![deny], &["out 10.9.9.9 tcp/80"], &[]),
    ]);
}

#[test]
fn addresses_that_pods_have_given_up_are_told_once() {
    let World { mut objects, endpoints } = World::new();
    let mut endpoints: Endpoints =
        endpoints.into_iter().map(|endpoint| (endpoint.id, Arc::new(endpoint))).collect();
    let mut compiler = Compiler::default();
    let mut options = Options::default();
    let mut departed = |objects: &Objects, endpoints: &Endpoints, options: &Options| -> Vec<String> {
        compiler.update(&Arc::new(objects.clone()), endpoints, options);
        let departed = compiler.take_departed().into_iter();
        let on_net_a = Place::Network(NetworkRef::new("shop", "net-a"));
        departed.filter(|(place, _)| *place == on_net_a).map(|(_, address)| address.to_string()).collect()
    };
    let nobody: [&str; 0] = [];
    assert_eq!(departed(&objects, &endpoints, &options), nobody);
    // Known by its status, like a pod of another node; and with changed settings, for which everything is compiled
    // again.
    let remote = objects.pods.remove(&ObjectName::new("shop", "remote")).unwrap();
    options.on_overflow = OnOverflow::Keep;
    assert_eq!(departed(&objects, &endpoints, &options), ["10.0.0.9", "fd00::9"]);
    assert_eq!(departed(&objects, &endpoints, &options), nobody);
    objects.pods.insert(remote.name.clone(), Arc::clone(&remote));
    assert_eq!(departed(&objects, &endpoints, &options), nobody);
    objects.pods.remove(&remote.name).unwrap();
    assert_eq!(departed(&objects, &endpoints, &options), ["10.0.0.9", "fd00::9"]);
    // Known by its attachment: the third is that of shop/db.
    endpoints.remove(&3).unwrap();
    assert_eq!(departed(&objects, &endpoints, &options), ["10.0.0.2", "fd00::2"]);
    // Changed labels do not change addresses.
    let web = objects.pods.get_mut(&ObjectName::new("shop", "web")).unwrap();
    Arc::make_mut(web).labels = labels(&[("app", "other")]);
    assert_eq!(departed(&objects, &endpoints, &options), nobody);
}

#[test]
fn another_address_of_the_node_concerns_network_policies_alone() {
    let of_db = json!({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"]});
    let mut world = World::new().with(&[of_db]);
    Arc::make_mut(&mut world.endpoints[0].at).insert(Place::Default);
    let of_web = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]});
    let of_web = policy::read_network_policy(ObjectName::new("shop", "n"), &of_web).unwrap();
    world.objects.network_policies.insert(of_web.name.object.clone(), Arc::new(of_web));
    let endpoints: Endpoints = world.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
    let (mut compiler, objects) = (Compiler::default(), Arc::new(world.objects.clone()));
    let mut update = |node: &str| {
        let node = BTreeSet::from([node.parse().unwrap()]);
        let options = Options { network_policy: true, node, ..Options::default() };
        let desired = compiler.update(&objects, &endpoints, &options);
        assert_eq!(desired, compile(&world.objects, &world.endpoints, &options));
        desired
    };
    let (before, now) = (update("192.0.2.1"), update("192.0.2.2"));
    let from_node = |desired: &Desired| {
        ["in 192.0.2.1 tcp/80", "in 192.0.2.2 tcp/80"].map(|probe| allowed(desired, probe))
    };
    assert_eq!((from_node(&before), from_node(&now)), ([true, false], [false, true]));
    let is_kept = |id: u32| Arc::ptr_eq(&before.endpoints[&id], &now.endpoints[&id]);
    assert_eq!([1, 3].map(is_kept), [false, true], "the third is that of shop/db");
}

/// Rows: C08.
#[test]
fn two_attachments_of_one_network_are_both_selected() {
    let mut world = World::new().with(&[json!({"policyTypes": ["Ingress"]})]);
    let again =
        Endpoint { id: 99, addresses: vec!["10.0.0.11".parse().unwrap()], ..world.endpoints[0].clone() };
    world.endpoints.push(again);
    let desired = world.compile();
    assert!(!allowed(&desired, "99 in 10.9.9.9 tcp/80") && !allowed(&desired, "1 in 10.9.9.9 tcp/80"));
}

/// Rows: C05, NPWG-7.4-restriction.
#[test]
fn a_policy_about_a_network_that_its_namespace_may_not_use_isolates_and_has_no_peers_there() {
    let mut world = World::new();
    let networks = ["infra/lan", "kube-system/default"];
    let on: Vec<(&str, &[&str])> = vec![(networks[0], &["10.2.0.1"]), (networks[1], &["10.3.0.1"])];
    world.pod("shop", "guest", &[], &on);
    let (lan, default) = (world.endpoints.len() - 1, world.endpoints.len());
    let peers = json!([{"from": [{"podSelector": {}}]}]);
    let policy = json!({"podSelector": {}, "for": networks.join(","), "ingress": peers});
    let world = world.with(&[policy]);
    let probes = [
        format!("{lan} in 10.2.0.1 tcp/80"),
        format!("{default} in 10.2.0.1 tcp/80"),
        format!("{default} in 10.3.0.1 tcp/80"),
    ];
    let compiled = |restrictions| {
        let options = Options { restrictions, ..Options::default() };
        let desired = compile(&world.objects, &world.endpoints, &options);
        let told =
            desired.conditions.iter().filter(|condition| matches!(condition.object, Subject::Policy(_)));
        let told: Vec<String> = told.map(|condition| condition.message.clone()).collect();
        (probes.clone().map(|probe| allowed(&desired, &probe)), told)
    };
    assert_eq!(compiled(Restrictions::default()), ([true, true, true], vec![]));
    let isolated = Restrictions {
        default_network: Some(NetworkRef::new("kube-system", "default")),
        isolation: Some(Isolation::default()),
    };
    let told = "annotation k8s.v1.cni.cncf.io/policy-for: namespace shop may not use network infra/lan: namespaceIsolation is on, and infra is not among globalNamespaces: no address there counts as a peer";
    assert_eq!(compiled(isolated.clone()), ([false, false, true], vec![told.to_owned()]));
    // Of very many, the first are named, and the number of the others.
    let many = (0..20).map(|number| format!("infra/n{number:02}")).collect::<Vec<_>>().join(",");
    let world = World::new().with(&[json!({"for": many, "policyTypes": ["Ingress"]})]);
    let options = Options { restrictions: isolated, ..Options::default() };
    let conditions = compile(&world.objects, &world.endpoints, &options).conditions;
    let told = conditions.iter().filter(|condition| condition.message.contains("namespace shop may not use"));
    let told: Vec<&str> = told.map(|condition| condition.message.as_str()).collect();
    let last = "annotation k8s.v1.cni.cncf.io/policy-for: namespace shop may not use 4 more of the networks: no address there counts as a peer";
    assert_eq!((told.len(), told[0], told[1].contains("infra/n00")), (17, last, true));
}

/// Rows: C21, C22, C23, C24, C25, C26, C27, C28, C29.
#[test]
fn directions_are_isolated_as_listed() {
    let (web_in, web_out) = ("in 10.9.9.9 tcp/80", "out 10.9.9.9 tcp/80");
    check(vec![
        (
            "C21",
            vec![json!({"policyTypes": ["Ingress"]}), json!({"policyTypes": ["Egress"]})],
            &[],
            &[web_in, web_out],
        ),
        ("C23", vec![json!({"ingress": [{"from": [{"podSelector": {}}]}]})], &[web_out], &[web_in]),
        ("C24", vec![json!({"egress": [{"to": [{"podSelector": {}}]}]})], &[web_in], &[web_out]),
        ("C25", vec![json!({})], &[web_in, web_out], &[]),
        ("C26", vec![json!({"policyTypes": ["Ingress"]})], &[web_out], &[web_in]),
        ("C27", vec![json!({"policyTypes": ["Egress"]})], &[web_in], &[web_out]),
        (
            "C28",
            vec![json!({"policyTypes": ["Ingress"], "egress": [{"to": [{"podSelector": {}}]}]})],
            &[web_out],
            &[web_in],
        ),
        ("C29", vec![json!({"policyTypes": ["Ingress"]}), json!({"ingress": [{}]})], &[web_in], &[]),
    ]);
    // C24 and C25 as defined by NetworkPolicy v1.
    let v1 = Options { policy_types_inference: Inference::V1, ..Options::default() };
    let world = World::new().with(&[json!({"egress": [{}]})]);
    let desired = compile(&world.objects, &world.endpoints, &v1);
    assert_eq!((allowed(&desired, web_in), allowed(&desired, web_out)), (false, true));
}

/// Rows: C13, C15, C40, C41, C42, C43, C44, C45, C46.
/// Rows: C47, C48, C49, C50, C57.
#[test]
fn peers_are_who_the_rule_means() {
    let from = |peers: Value| vec![json!({"ingress": [{"from": peers}]})];
    let db = json!({"matchLabels": {"app": "db"}});
    let web = json!({"matchLabels": {"app": "web"}});
    let other = json!({"matchLabels": {"kubernetes.io/metadata.name": "other"}});
    let (db_a, other_a, remote_a) = ("in 10.0.0.2 tcp/80", "in 10.0.0.3 tcp/80", "in 10.0.0.9 tcp/80");
    check(vec![
        ("C40", from(json!([])), &[db_a, "in 8.8.8.8 icmp", "in 2001:db8::1 udp/1"], &[]),
        (
            "C41",
            from(json!([{"podSelector": db}, {"ipBlock": {"cidr": "8.0.0.0/8"}}])),
            &[db_a, "in 8.8.8.8 tcp/1"],
            &[other_a],
        ),
        ("C42", from(json!([{"podSelector": web}])), &["in 10.0.0.1 tcp/80"], &[other_a]),
        (
            "C43",
            from(json!([{"namespaceSelector": {"matchLabels": {"team": "a"}}}])),
            &[db_a, remote_a],
            &[other_a],
        ),
        ("C43 by name", from(json!([{"namespaceSelector": other}])), &[other_a], &[db_a]),
        (
            "C44",
            from(json!([{"namespaceSelector": {}}])),
            &[db_a, other_a, remote_a],
            &["in 10.0.0.77 tcp/80"],
        ),
        ("C45", from(json!([{"namespaceSelector": {}, "podSelector": web}])), &[other_a], &[db_a]),
        (
            "C46",
            from(json!([{"namespaceSelector": other}, {"podSelector": db}])),
            &[db_a, other_a],
            &[remote_a],
        ),
        (
            "C47",
            from(json!([{"podSelector": {"matchLabels": {"app": "nobody"}}}])),
            &[],
            &[db_a, other_a, "in 8.8.8.8 tcp/1"],
        ),
        ("C48", from(json!([{"podSelector": db}])), &[db_a], &["in 10.1.0.2 tcp/80"]),
        ("C49", from(json!([{"podSelector": db}])), &[db_a, "in fd00::2 tcp/80"], &["in fd00::3 tcp/80"]),
        (
            "C50",
            from(json!([{"podSelector": {"matchLabels": {"app": "remote"}}}])),
            &[remote_a, "in fd00::9 tcp/80"],
            &["in 10.1.0.9 tcp/80", "in 10.9.0.9 tcp/80"],
        ),
        (
            "C13, C15",
            from(json!([{"podSelector": {}}])),
            &["in 10.0.0.8 tcp/80"],
            &["in 10.0.0.6 tcp/80", "in 10.0.0.7 tcp/80"],
        ),
        (
            "own record before annotation",
            from(json!([{"podSelector": {}}])),
            &["in 10.0.0.10 tcp/80"],
            &["in 10.0.0.66 tcp/80"],
        ),
        ("C57", from(json!([{}])), &[], &[db_a, "in 8.8.8.8 tcp/1"]),
    ]);
}

/// Rows: C52, C53, C54, C55, C58, C59, C61.
#[test]
fn blocks_and_exceptions_are_exact() {
    let block =
        |cidr: &str, except: &[&str]| json!({"from": [{"ipBlock": {"cidr": cidr, "except": except}}]});
    let ingress = |rules: Vec<Value>| vec![json!({"ingress": rules})];
    check(vec![
        (
            "C52",
            ingress(vec![block("192.168.1.1/24", &[])]),
            &["in 192.168.1.200 tcp/1"],
            &["in 192.168.2.1 tcp/1"],
        ),
        (
            "C53",
            ingress(vec![block("10.0.0.0/8", &["10.5.0.0/16"])]),
            &["in 10.4.0.1 tcp/1"],
            &["in 10.5.0.1 tcp/1"],
        ),
        (
            "C54 by another rule",
            ingress(vec![block("10.0.0.0/8", &["10.5.0.0/16"]), block("10.5.6.0/24", &[])]),
            &["in 10.5.6.7 tcp/1"],
            &["in 10.5.7.7 tcp/1"],
        ),
        (
            "C54 by a wider block",
            ingress(vec![block("10.5.0.0/16", &["10.5.6.0/24"]), block("10.0.0.0/8", &[])]),
            &["in 10.5.6.7 tcp/1"],
            &[],
        ),
        (
            "C54 by a pod",
            vec![
                json!({"ingress": [block("10.0.0.0/8", &["10.0.0.0/24"])]}),
                json!({"ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "db"}}}]}]}),
            ],
            &["in 10.0.0.2 tcp/1", "in 10.0.1.1 tcp/1"],
            &["in 10.0.0.3 tcp/1"],
        ),
        (
            "C55",
            ingress(vec![block("10.0.0.0/8", &["11.0.0.0/8"])]),
            &["in 10.0.0.1 tcp/1"],
            &["in 11.0.0.1 tcp/1"],
        ),
        (
            "an exception around the block",
            ingress(vec![block("10.1.0.0/16", &["10.0.0.0/8"])]),
            &[],
            &["in 10.1.0.1 tcp/1"],
        ),
        (
            "an exception that is the block",
            ingress(vec![block("10.1.0.0/16", &["10.1.0.0/16"])]),
            &[],
            &["in 10.1.0.1 tcp/1"],
        ),
        ("C58", ingress(vec![block("0.0.0.0/0", &[])]), &["in 1.2.3.4 icmp"], &["in 2001:db8::1 tcp/1"]),
        (
            "C59",
            ingress(vec![block("::/0", &["fd00::/8"])]),
            &["in 2001:db8::1 tcp/1"],
            &["in fd00::1 tcp/1", "in 1.2.3.4 tcp/1"],
        ),
        (
            "C61",
            vec![
                json!({"policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": "224.0.0.0/4"}}]}]}),
            ],
            &["out 224.0.0.251 udp/5353"],
            &["out 255.255.255.255 udp/67"],
        ),
    ]);
}

/// Rows: C65, C66, C67, C69, C70, C71, C72, C74, C75.
/// Rows: C76.
#[test]
fn ports_limit_the_traffic() {
    let ports = |ports: Value| vec![json!({"ingress": [{"ports": ports}]})];
    let with_egress = |rule: Value| vec![json!({"egress": [rule]})];
    check(vec![
        ("C65", ports(json!([])), &["in 8.8.8.8 tcp/1", "in 8.8.8.8 udp/65535", "in 8.8.8.8 icmp"], &[]),
        (
            "C66",
            ports(json!([{"port": 80}])),
            &["in 8.8.8.8 tcp/80"],
            &["in 8.8.8.8 udp/80", "in 8.8.8.8 tcp/81"],
        ),
        (
            "C67",
            ports(json!([{"protocol": "UDP"}])),
            &["in 8.8.8.8 udp/0", "in 8.8.8.8 udp/65535"],
            &["in 8.8.8.8 tcp/80"],
        ),
        (
            "C69",
            ports(json!([{"port": 5000, "endPort": 5900}])),
            &["in 8.8.8.8 tcp/5000", "in 8.8.8.8 tcp/5555", "in 8.8.8.8 tcp/5900"],
            &["in 8.8.8.8 tcp/4999", "in 8.8.8.8 tcp/5901"],
        ),
        (
            "C70, C76",
            ports(json!([{"endPort": 5}, {"protocol": "GRE"}])),
            &[],
            &["in 8.8.8.8 tcp/1", "in 8.8.8.8 icmp"],
        ),
        (
            "C71 at the target",
            ports(json!([{"port": "http"}])),
            &["in 8.8.8.8 tcp/8080"],
            &["in 8.8.8.8 tcp/9090", "in 8.8.8.8 udp/8080"],
        ),
        (
            "C71 of another protocol",
            ports(json!([{"port": "http", "protocol": "UDP"}])),
            &[],
            &["in 8.8.8.8 udp/8080"],
        ),
        (
            "C71 at each peer",
            with_egress(json!({"to": [{"podSelector": {}}], "ports": [{"port": "http"}, {"port": 22}]})),
            &[
                "out 10.0.0.2 tcp/9090",
                "out 10.0.0.9 tcp/7070",
                "out fd00::9 tcp/7070",
                "out 10.0.0.8 tcp/22",
            ],
            &[
                "out 10.0.0.2 tcp/7070",
                "out 10.0.0.9 tcp/9090",
                "out 10.0.0.8 tcp/9090",
                "out 8.8.8.8 tcp/22",
            ],
        ),
        (
            "C71 at a peer in a block",
            with_egress(
                json!({"to": [{"ipBlock": {"cidr": "10.0.0.0/24", "except": ["10.0.0.9/32"]}}], "ports": [{"port": "http"}]}),
            ),
            &["out 10.0.0.2 tcp/9090"],
            &["out 10.0.0.9 tcp/7070", "out 10.0.0.77 tcp/9090"],
        ),
        (
            "C71 at any peer",
            with_egress(json!({"ports": [{"port": "http"}]})),
            &["out 10.0.0.2 tcp/9090", "out 10.0.0.9 tcp/7070"],
            &["out 10.1.0.2 tcp/9090", "out 8.8.8.8 tcp/9090"],
        ),
        (
            "C72",
            ports(json!([{"protocol": "SCTP", "port": 7}])),
            &["in 8.8.8.8 sctp/7"],
            &["in 8.8.8.8 tcp/7", "in 8.8.8.8 udp/7"],
        ),
        (
            "C74",
            ports(json!([{"protocol": "TCP"}, {"protocol": "UDP"}, {"protocol": "SCTP"}])),
            &[],
            &["in 8.8.8.8 icmp"],
        ),
        (
            "C75",
            vec![json!({"ingress": [
                {"from": [{"ipBlock": {"cidr": "8.0.0.0/8"}}], "ports": [{"port": 80}]},
                {"from": [{"ipBlock": {"cidr": "9.0.0.0/8"}}], "ports": [{"port": 90}]},
            ]})],
            &["in 8.0.0.1 tcp/80", "in 9.0.0.1 tcp/90"],
            &["in 8.0.0.1 tcp/90", "in 9.0.0.1 tcp/80"],
        ),
    ]);
}

#[test]
fn the_tables_are_as_small_as_the_rules_allow() {
    let world = World::new().with(&[json!({
        "podSelector": {},
        "ingress": [
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.5.0.0/16"]}}], "ports": [{"port": 80}, {"port": 1, "endPort": 1023}]},
            {"from": [{"ipBlock": {"cidr": "10.6.0.0/16"}}], "ports": [{"port": 80}]},
        ],
    })]);
    let block = |port, bits| Traffic::Ports { protocol: 6, port, bits };
    let name = Arc::new(PolicyName::multi(ObjectName::new("shop", "p0")));
    let in_p0 =
        |position| Origin::Policy { name: Arc::clone(&name), direction: Direction::Ingress, position };
    let expected = CompiledPolicy {
        // 10.6.0.0/16 adds nothing to what 10.0.0.0/8 allows, so it needs no prefix of its own.
        peers: BTreeMap::from([
            ("10.0.0.0/8".parse().unwrap(), 2),
            ("10.5.0.0/16".parse().unwrap(), NOTHING),
        ]),
        // Port 80 is within 64 to 127.
        ports: [
            block(1, 16),
            block(2, 15),
            block(4, 14),
            block(8, 13),
            block(16, 12),
            block(32, 11),
            block(64, 10),
            block(128, 9),
            block(256, 8),
            block(512, 7),
        ]
        .map(|traffic| (PortPrefix { class: 2, traffic }, 1))
        .into(),
        rules: BTreeMap::from([(1, in_p0(0)), (2, in_p0(1))]),
    };
    let desired = world.compile();
    let [web, db] = [1, 3].map(|id| desired.endpoints[&id].clone());
    assert_eq!(web.ingress.as_deref(), Some(&expected));
    assert_eq!(
        (&web.egress, &web.policies),
        (&None, &vec![PolicyName::multi(ObjectName::new("shop", "p0"))])
    );
    assert_eq!(db, web);
}

#[test]
fn rules_that_are_not_enforced_as_written_are_reported() {
    let mut world = World::new().with(&[
        json!({"ingress": [{"ports": [{"port": "nope"}]}], "egress": [{"to": [{"podSelector": {}}], "ports": [{"port": "gone"}]}]}),
        json!({"egress": [{}]}),
    ]);
    let stray = Endpoint { id: 50, pod: ObjectName::new("shop", "unknown"), ..world.endpoints[0].clone() };
    world.endpoints.push(stray);
    let desired = world.compile();
    let lines: Vec<String> =
        desired.conditions.iter().map(|c| format!("{:?} {}: {}", c.severity, c.object, c.message)).collect();
    assert_eq!(
        lines,
        [
            "Warning multi-networkpolicy shop/p0: address 10.0.0.1 (and 1 more like it) is claimed by pods that no peer of the rule selects as well: it is not allowed",
            r#"Warning multi-networkpolicy shop/p0: port name "gone" is declared by no pod among the peers: matches nothing there"#,
            r#"Warning multi-networkpolicy shop/p0: port name "nope" is not declared by pod shop/web: matches nothing there"#,
            "Warning multi-networkpolicy shop/p1: spec.policyTypes: missing, and rules alone do not say whether ingress is isolated",
            "Error pod shop/garbled: is no policy's peer: read network-status annotation: EOF while parsing a list at line 1 column 1",
            "Warning pod shop/unknown: is attached to shop/net-a but not in the source, or another pod has its name: its policies are not changed",
        ]
    );
    assert_eq!(desired.undecided, BTreeSet::from([50]));
    assert!(!desired.endpoints.contains_key(&50));
}

/// Prefixes that enclose each other, each with an exception of its own, and hosts in all of them.
#[test]
fn what_rules_lead_to_is_bounded_and_isolates_beyond() {
    let hosts = |number: usize| -> Vec<Value> {
        let host = |it: usize| format!("10.{}.{}.{}/32", it >> 16, it >> 8 & 255, it & 255);
        (0..number).map(|it| json!({"ipBlock": {"cidr": host(it)}})).collect()
    };
    let ports = |number: usize| -> Vec<Value> { (1..=number).map(|port| json!({"port": port})).collect() };
    // Each host has a class of its own, with the ports that all peers have: hosts x ports.
    let entries = |each: usize| -> Value {
        let own = (0..each).map(|it| json!({"from": [hosts(it + 1)[it]], "ports": [{"port": 50_000 + it}]}));
        let all = json!({"ports": ports(each)});
        json!({"ingress": std::iter::once(all).chain(own).collect::<Vec<_>>()})
    };
    // Each host is compared once with each of the blocks that contain it.
    let work = |blocks: usize, single: usize| -> Value {
        let block = json!({"ipBlock": {"cidr": "10.0.0.0/8"}});
        let all = json!({"from": vec![block; blocks], "ports": [{"port": 80}]});
        json!({"ingress": [all, {"from": hosts(single)}]})
    };
    let table = [
        (entries(300), None),
        (entries(600), Some(Excess::Entries)),
        (work(1000, 1000), None),
        (work(7000, 8000), Some(Excess::Work)),
    ];
    for (spec, excess) in table {
        let desired = World::new().with(&[spec, json!({"ingress": [{"ports": [{"port": 7}]}]})]).compile();
        let conditions: Vec<&str> = desired.conditions.iter().map(|it| it.message.as_str()).collect();
        match excess {
            None => {
                assert!(conditions.iter().all(|it| !it.contains("isolated for")), "{conditions:?}");
                assert!(allowed(&desired, "in 10.0.0.1 tcp/80") && allowed(&desired, "in 10.0.0.1 tcp/7"));
            }
            Some(excess) => {
                let told = format!(
                    "{excess} together with the other policies of the pods that it selects: these are isolated for ingress"
                );
                assert_eq!(conditions.iter().filter(|it| **it == told).count(), 2, "{conditions:?}");
                assert!(!allowed(&desired, "in 10.0.0.1 tcp/80") && !allowed(&desired, "in 10.0.0.1 tcp/7"));
            }
        }
        assert!(allowed(&desired, "out 10.0.0.1 tcp/80"), "the other direction is as it was");
    }
}

/// More policies than a node supports: the author with the most loses the rules, whatever the order of creation and
/// however they are compiled.
#[test]
fn a_node_takes_as_many_rules_and_policies_as_its_budget_has() {
    let rules = |number: usize| json!({"ingress": vec![json!({"ports": [{"port": 80}]}); number]});
    let [one, less, half] = [1, RULES_OF_NODE / 2 - 1, RULES_OF_NODE / 2].map(rules);
    let put = |world: &mut World, name: &str, spec: &Value| {
        let mut spec = spec.clone();
        spec["podSelector"] = json!({"matchLabels": {"app": "db"}});
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "shop/net-a".to_owned())]);
        let policy = policy::read(name.parse().unwrap(), &annotations, &spec).unwrap();
        world.objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
    };
    let refused = |desired: &Desired| -> Vec<String> {
        let of_budget = |it: &&Condition| it.message.contains("none of its rules applies");
        desired.conditions.iter().filter(of_budget).map(|it| it.object.to_string()).collect()
    };
    let mut compiler = Compiler::default();
    let mut update = |world: &World| {
        let endpoints = world.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
        let desired = compiler.update(&Arc::new(world.objects.clone()), &endpoints, &Options::default());
        assert_eq!(desired, world.compile(), "as after a restart");
        desired
    };
    let mut world = World::new().with(&[half.clone(), less.clone()]);
    let desired = update(&world);
    assert_eq!((refused(&desired), allowed(&desired, "in 10.0.0.2 tcp/80")), (vec![], true));
    // The last one that fits, and one more.
    put(&mut world, "shop/a", &one);
    assert_eq!(refused(&update(&world)), Vec::<String>::new());
    put(&mut world, "shop/b", &one);
    let desired = update(&world);
    assert_eq!(refused(&desired), ["multi-networkpolicy shop/p0"]);
    assert!(allowed(&desired, "in 10.0.0.2 tcp/80") && allowed(&desired, "3 in 10.0.0.1 tcp/80"));
    // Another namespace, whose name is first, adds more: the existing rules stay.
    world.objects.policies.remove(&ObjectName::new("shop", "p0"));
    put(&mut world, "aaa/x", &less);
    put(&mut world, "aaa/y", &less);
    let desired = update(&world);
    assert_eq!(refused(&desired), ["multi-networkpolicy aaa/y"]);
    assert!(allowed(&desired, "in 10.0.0.2 tcp/80"));
    world.objects.policies.remove(&ObjectName::new("aaa", "x"));
    assert_eq!(refused(&update(&world)), Vec::<String>::new());
    // Pods of a policy that has lost its rules are isolated.
    world.objects.policies.remove(&ObjectName::new("shop", "p1"));
    put(&mut world, "shop/b", &half);
    assert!(allowed(&update(&world), "3 in 10.0.0.1 tcp/80"));
    world.objects.policies.remove(&ObjectName::new("shop", "a"));
    put(&mut world, "aaa/x", &less);
    put(&mut world, "bbb/x", &less);
    let desired = update(&world);
    assert_eq!(refused(&desired), ["multi-networkpolicy aaa/y", "multi-networkpolicy shop/b"]);
    assert!(!allowed(&desired, "3 in 10.0.0.1 tcp/80"));
    // The maximum number of policies, and one more.
    let mut many = World::new().with(&vec![one.clone(); POLICIES]);
    assert_eq!(refused(&update(&many)), Vec::<String>::new());
    put(&mut many, "aaa/x", &one);
    assert_eq!(refused(&update(&many)), ["multi-networkpolicy shop/p9999"]);
}

/// More addresses than one direction may have, and selectors that would have to be compared with every pod.
#[test]
fn peers_that_are_pods_are_counted_too() {
    let mut world = World::new();
    for number in 0..1000 {
        let addresses: Vec<String> =
            (0..2).map(|it| format!("10.7.{}.{}", number >> 2, number % 4 * 2 + it)).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        world.pod("shop", &format!("x{number}"), &[], &[("shop/net-a", &addresses)]);
    }
    // The last one matches every pod; the others match none, which costs a pass over the namespaces and is charged
    // for all pods.
    let nobody = json!({"namespaceSelector": {"matchLabels": {"no": "such"}}});
    let last = json!({"podSelector": {}});
    let peers = |number: usize| -> Vec<Value> {
        std::iter::repeat_n(nobody.clone(), number).chain([last.clone()]).collect()
    };
    let within = World { objects: world.objects.clone(), endpoints: world.endpoints.clone() };
    let desired = within.with(&[json!({"ingress": [{"from": peers(40_000)}]})]).compile();
    assert!(allowed(&desired, "in 10.7.0.1 tcp/80"));
    let desired = world.with(&[json!({"ingress": [{"from": peers(60_000)}]})]).compile();
    assert!(!allowed(&desired, "in 10.7.0.1 tcp/80"));
    let message = Excess::Work.to_string();
    assert!(desired.conditions.iter().any(|it| it.message.starts_with(&message)), "{:?}", desired.conditions);
}

/// Pods `shop/x0`, `shop/x1`, ..., on `net-a`.
const CROWD: usize = 1000;

/// A world with these pods, and the attachment of `shop/x0`.
fn crowd() -> (World, usize) {
    let mut world = World::new();
    let first = world.endpoints.len() + 1;
    for number in 0..CROWD {
        let address = format!("10.7.{}.{}", number / 250, number % 250);
        world.pod("shop", &format!("x{number}"), &[], &[("shop/net-a", &[address.as_str()])]);
    }
    (world, first)
}

/// Peers that nobody is. They are charged for comparisons with all pods: this many for each.
fn nobody(comparisons: usize) -> Vec<Value> {
    let labels: BTreeMap<String, &str> = (0..REQUIREMENTS).map(|it| (format!("no{it}"), "such")).collect();
    vec![json!({"namespaceSelector": {"matchLabels": labels}}); comparisons / REQUIREMENTS]
}

/// A policy for `shop/x0`, or another number. It costs 40,000,000 comparisons and a little more, so that a namespace has
/// room for four.
fn costly(number: usize) -> Value {
    costing(number, 40)
}

/// The same, for another number of millions of comparisons.
fn costing(number: usize, millions: usize) -> Value {
    let selected = json!({"matchLabels": {"app": format!("x{number}")}});
    let ingress = json!([{"from": nobody(millions * 1000)}, {"ports": [{"port": 7}]}]);
    json!({"podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress})
}

/// A world with such policies for `shop/x0`, `shop/x1`, ..., by their millions of comparisons.
fn crowd_with(millions: &[usize]) -> World {
    let policies: Vec<Value> = millions.iter().enumerate().map(|(number, it)| costing(number, *it)).collect();
    crowd().0.with(&policies)
}

fn update(compiler: &mut Compiler, world: &World) -> Desired {
    let endpoints: Endpoints = world.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
    compiler.update(&Arc::new(world.objects.clone()), &endpoints, &Options::default())
}

/// Adds a policy for all pods of its namespace on `shop/net-a`, which costs next to nothing.
fn add_cheap(world: &mut World, name: &str) {
    let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "shop/net-a".to_owned())]);
    let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"ports": [{"port": 7}]}]});
    let policy = policy::read(name.parse().unwrap(), &annotations, &spec).unwrap();
    world.objects.policies.insert(policy.name.object.clone(), Arc::new(policy));
}

/// The policies for which the namespace, or the update, had too little work left.
fn short(desired: &Desired) -> Vec<String> {
    let messages = [Excess::WorkOfNamespace, Excess::WorkOfUpdate].map(|excess| excess.to_string());
    let is_short = |it: &&Condition| messages.iter().any(|message| it.message.starts_with(message));
    let short = desired.conditions.iter().filter(is_short);
    short.map(|it| it.object.to_string()).collect()
}

/// The numbers of these among the policies `shop/p0`, `shop/p1`, ...
fn short_numbers(desired: &Desired) -> BTreeSet<usize> {
    let short = short(desired);
    short.iter().filter_map(|name| name.rsplit_once("/p")?.1.parse().ok()).collect()
}

/// Pods `shop/x0`, ... of these numbers are gone, with their attachments.
fn leave(world: &mut World, gone: Range<usize>) {
    for number in gone {
        let name = ObjectName::new("shop", format!("x{number}"));
        world.objects.pods.remove(&name).unwrap();
        world.endpoints.retain(|endpoint| endpoint.pod != name);
    }
}

fn relabel(world: &mut World, pod: &str, pairs: &[(&str, &str)]) {
    let pod = world.objects.pods.get_mut(&ObjectName::new("shop", pod)).unwrap();
    Arc::make_mut(pod).labels = labels(pairs);
}

/// The policies of one namespace take more together than it may: the last attachments are isolated, those of another
/// namespace are not, and they are tried again when there is room. What is in force stays.
#[test]
fn the_work_for_one_namespace_is_bounded() {
    const POLICIES: usize = 6;
    let (world, first) = crowd();
    let mut world = world.with(&(0..POLICIES).map(costly).collect::<Vec<_>>());
    add_cheap(&mut world, "other/q");
    let mut compiler = Compiler::default();
    let mut update = |world: &World| {
        let endpoints: Endpoints = world.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
        let desired = compiler.update(&Arc::new(world.objects.clone()), &endpoints, &Options::default());
        let is_known = |id: &usize| !desired.undecided.contains(&u32::try_from(*id).unwrap());
        let open = |id: &usize| is_known(id) && allowed(&desired, &format!("{id} in 8.8.8.8 tcp/7"));
        let open: Vec<usize> = (first..first + POLICIES).filter(open).map(|id| id - first).collect();
        assert!(allowed(&desired, "5 in 8.8.8.8 tcp/7") && !allowed(&desired, "5 in 8.8.8.8 tcp/8"));
        assert!(compiler.spent() < WORK_OF_NAMESPACE + 200 * CROWD, "{}", compiler.spent());
        (open, short(&desired))
    };
    let named = |number: usize| format!("multi-networkpolicy shop/p{number}");
    assert_eq!(update(&world), (vec![0, 1, 2, 3], vec![named(4), named(5)]));
    assert_eq!(update(&world), (vec![0, 1, 2, 3], vec![named(4), named(5)]), "nothing has changed");
    // No policy selects the first one any more: its table makes room for one.
    relabel(&mut world, "x0", &[("app", "y")]);
    assert_eq!(update(&world), (vec![0, 1, 2, 3, 4], vec![named(5)]));
    // Without their policies, the first two are not isolated.
    let gone =
        ["p0", "p1"].map(|gone| world.objects.policies.remove(&ObjectName::new("shop", gone)).unwrap());
    assert_eq!(update(&world), (vec![0, 1, 2, 3, 4, 5], vec![]));
    // A pod that changes keeps its table, though one before it would have room without.
    world.objects.policies.extend(gone.map(|policy| (policy.name.object.clone(), policy)));
    relabel(&mut world, "x0", &[("app", "x0")]);
    assert_eq!(update(&world), (vec![2, 3, 4, 5], vec![named(0), named(1)]));
    relabel(&mut world, "x5", &[("app", "x5"), ("more", "y")]);
    assert_eq!(update(&world), (vec![2, 3, 4, 5], vec![named(0), named(1)]));
    // The table of a pod that is gone makes room, while its attachment stays.
    world.objects.pods.remove(&ObjectName::new("shop", "x5")).unwrap();
    assert_eq!(update(&world), (vec![0, 2, 3, 4], vec![named(1)]));
}

/// The tables of before are of other policies and not counted: together they are more than a namespace may have.
#[test]
fn a_policy_that_is_added_isolates_nobody_for_whom_there_is_room() {
    let (world, _) = crowd();
    let mut world = world.with(&(0..3).map(costly).collect::<Vec<_>>());
    let mut compiler = Compiler::default();
    let mut update = |world: &World| {
        let endpoints: Endpoints = world.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
        let desired = compiler.update(&Arc::new(world.objects.clone()), &endpoints, &Options::default());
        assert_eq!(short(&desired), Vec::<String>::new());
        assert_eq!(desired, world.compile(), "as after a restart");
    };
    update(&world);
    add_cheap(&mut world, "shop/q");
    update(&world);
}

/// Beside attachments for which there is too little work left, all others have their tables, though one policy is for
/// them all. Nothing is put together twice but what is tried again.
#[test]
fn a_change_tries_again_what_has_room_and_nothing_else() {
    let (world, first) = crowd();
    let mut world = world.with(&(0..6).map(costly).collect::<Vec<_>>());
    add_cheap(&mut world, "shop/q");
    let mut compiler = Compiler::default();
    let mut counted = |world: &World| {
        let before = (compiler.keyed.get(), compiler.worked_out);
        let desired = update(&mut compiler, world);
        let open = |id: usize| allowed(&desired, &format!("{id} in 8.8.8.8 tcp/7"));
        let open = [3, 4, 5, 6].map(|number| open(first + number));
        (compiler.keyed.get() - before.0, compiler.worked_out - before.1, open)
    };
    let (keyed, worked_out, open) = counted(&world);
    assert_eq!(worked_out, 7, "one for each of six pods, and one that all others have");
    assert_eq!(
        keyed,
        2 * world.endpoints.len(),
        "nothing is there that those without room could have instead"
    );
    assert_eq!(open, [true, false, false, true]);
    assert_eq!(counted(&world), (0, 0, open), "nothing has changed");
    relabel(&mut world, "x50", &[("app", "x50"), ("more", "y")]);
    assert_eq!(counted(&world), (2, 0, open), "one for each direction, and no more room for others");
    relabel(&mut world, "x3", &[("app", "x3"), ("more", "y")]);
    assert_eq!(counted(&world), (2, 0, open), "nobody else has its table, which it keeps");
    relabel(&mut world, "x0", &[("app", "y")]);
    assert_eq!(counted(&world), (6, 1, [true, true, false, true]), "room for one of the two");
}

/// A table that does not fit takes nothing from those that do, whatever the order, and neither does one that exceeds a
/// bound of its own.
#[test]
fn what_is_refused_leaves_the_room_to_others() {
    // The cost of each in millions of comparisons, and those that are short.
    let table: [(&[usize], &[usize]); 5] = [
        (&[40, 40, 40, 40, 40, 10, 10, 10], &[4]),
        (&[40, 40, 40, 40, 40, 10, 10, 10, 10], &[4, 8]),
        (&[10, 10, 10, 40, 40, 40, 40, 40], &[7]),
        (&[60, 60, 60, 40, 40, 40, 40], &[]),
        (&[40, 40, 60, 40, 40, 40, 10], &[5]),
    ];
    for (millions, expected) in table {
        let mut compiler = Compiler::default();
        let desired = update(&mut compiler, &crowd_with(millions));
        let expected = BTreeSet::from_iter(expected.iter().copied());
        assert_eq!(short_numbers(&desired), expected, "{millions:?}");
        assert!(compiler.spent() < WORK_OF_NAMESPACE + 200 * CROWD, "{millions:?}: {}", compiler.spent());
    }
}

/// Ten tables that do not fit use up the work of an update before one that does: the next update has it.
#[test]
fn an_update_ends_trying_and_the_next_goes_on() {
    let mut millions = vec![40; 14];
    millions.push(10);
    let world = crowd_with(&millions);
    let mut compiler = Compiler::default();
    let mut counted = || {
        let before = compiler.worked_out;
        let short = short_numbers(&update(&mut compiler, &world));
        // Each may count one selector too many, which is not compared with anybody any more.
        let tried = compiler.work.tried("shop");
        assert!(tried < WORK_OF_UPDATE + 15 * 2 * CROWD * REQUIREMENTS, "{tried}");
        (short, compiler.worked_out - before, compiler.is_unfinished())
    };
    assert_eq!(counted(), ((4..15).collect(), 15, true));
    assert_eq!(
        counted(),
        ((4..14).collect(), 5, false),
        "the last one, and those that the first had no work left for"
    );
    assert_eq!(counted(), ((4..14).collect(), 0, false), "nothing has changed");
}

/// Each update concerns all attachments, and its work does not suffice for those that do not fit: the small one behind
/// them has its turn, and those in force stay.
#[test]
fn what_was_refused_is_tried_in_turn() {
    let mut millions = vec![40; 4];
    millions.extend([45; 14]);
    millions.push(10);
    let mut world = crowd_with(&millions);
    let mut compiler = Compiler::default();
    assert_eq!(short_numbers(&update(&mut compiler, &world)), (4..19).collect());
    let mut last = BTreeSet::new();
    for change in 0..8 {
        if change % 2 == 0 {
            add_cheap(&mut world, "shop/q");
        } else {
            world.objects.policies.remove(&ObjectName::new("shop", "q")).unwrap();
        }
        last = short_numbers(&update(&mut compiler, &world));
        assert!(last.is_disjoint(&(0..4).collect()), "{change}: {last:?}");
    }
    assert_eq!(last, (4..18).collect());
}

/// Adds pods `x0`, `x1`, ... to a namespace, beside those that it has, each with a policy that costs so many millions of
/// comparisons. `has_more`: with an egress in force besides.
fn add_pods(world: &mut World, namespace: &str, millions: &[usize], has_more: bool) {
    let of_namespace = |name: &&ObjectName| name.namespace == namespace && name.name.starts_with('x');
    let first = world.objects.pods.keys().filter(of_namespace).count();
    for (number, millions) in (first..).zip(millions) {
        let name = ObjectName::new(namespace, format!("x{number}"));
        world.pod(namespace, &name.name, &[], &[("shop/net-a", &[])]);
        // That many pods are there ([`many`]).
        let from = nobody(millions * 1_000_000 / MANY);
        let types = if has_more { vec!["Ingress", "Egress"] } else { vec!["Ingress"] };
        let selected = json!({"matchLabels": {"app": name.name}});
        let ingress = json!([{"from": from}, {"ports": [{"port": 7}]}]);
        let spec = json!({"podSelector": selected, "policyTypes": types, "ingress": ingress, "egress": []});
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "shop/net-a".to_owned())]);
        let policy = policy::read(name.clone(), &annotations, &spec).unwrap();
        world.objects.policies.insert(name, Arc::new(policy));
    }
}

/// Pods that policies are compared with: so many that few selectors cost much.
const MANY: usize = 12_500;

fn many() -> World {
    let mut world = World::new();
    for number in 0..MANY {
        world.pod("crowd", &format!("y{number}"), &[], &[]);
    }
    world
}

/// What the policies of a namespace take with four in force and so many that do not fit beside them. An update has the
/// work to try ten of these.
fn backlog(refused: usize) -> Vec<usize> {
    let mut millions = vec![40; 4];
    millions.extend(vec![45; refused]);
    millions
}

/// Whether the policy of pod `x0`, or another number, of a namespace is in force.
fn is_in_force(desired: &Desired, namespace: &str, number: usize) -> bool {
    !short(desired).contains(&format!("multi-networkpolicy {namespace}/x{number}"))
}

/// What waits in one namespace, whether it has something in force in the other direction or not, takes no turn of
/// another namespace, and neither do the pods that it gets, nor what it changes.
#[test]
fn a_namespace_has_its_turn_whatever_waits_in_another() {
    for (has_more, has_new, has_changes) in
        [(false, false, false), (true, false, false), (false, true, false), (true, true, true)]
    {
        let what = format!("{has_more} {has_new} {has_changes}");
        let mut world = many();
        add_pods(&mut world, "shop", &backlog(40), has_more);
        add_pods(&mut world, "other", &[40; 5], false);
        let mut compiler = Compiler::default();
        let desired = update(&mut compiler, &world);
        assert_eq!([3, 4].map(|number| is_in_force(&desired, "other", number)), [true, false], "{what}");
        assert_eq!([3, 4, 43].map(|number| is_in_force(&desired, "shop", number)), [true, false, false]);
        // There is room for the last one.
        world.objects.policies.remove(&ObjectName::new("other", "x0")).unwrap();
        if has_new {
            add_pods(&mut world, "shop", &[45; 12], has_more);
        }
        if has_changes {
            add_cheap(&mut world, "shop/q");
        }
        let desired = update(&mut compiler, &world);
        assert!(is_in_force(&desired, "other", 4), "{what}");
        assert!(compiler.is_unfinished(), "{what}");
    }
}

/// Twelve namespaces, each with two attachments that wait. The line is as long as the documentation says at most,
/// whatever two of them add and change at each update.
#[test]
fn namespaces_have_their_turns_one_after_the_other() {
    const NAMESPACES: usize = 12;
    let mut world = many();
    for number in 0..NAMESPACES {
        // The work of an update does not suffice for the last two; of the last namespace, the last one would fit.
        let mut millions = backlog(7);
        millions.push(if number + 1 == NAMESPACES { 20 } else { 45 });
        add_pods(&mut world, &format!("n{number:02}"), &millions, false);
    }
    let last = format!("n{:02}", NAMESPACES - 1);
    let mut compiler = Compiler::default();
    let mut updates = 0;
    while !is_in_force(&update(&mut compiler, &world), &last, 11) {
        updates += 1;
        // It has the second turn of its namespace.
        assert!(updates <= 2 * NAMESPACES.div_ceil(3), "{updates}");
        add_pods(&mut world, &format!("n{:02}", updates % 2), &[45; 12], true);
        match updates % 2 {
            0 => drop(world.objects.policies.remove(&ObjectName::new("n00", "q")).unwrap()),
            _ => add_cheap(&mut world, "n00/q"),
        }
    }
    assert!(updates > 1, "it had to wait");
}

/// Selectors count as compared with all pods. With one pod fewer, everything would be tried again to no avail.
#[test]
fn what_took_too_much_is_tried_again_once_an_eighth_of_the_peers_is_gone() {
    // The last one does not fit beside the others, or exceeds the bound for one.
    for millions in [vec![40; 5], vec![55]] {
        let (world, first) = crowd();
        let all = millions.iter().enumerate().map(|(number, it)| costing(number, *it));
        let mut world = world.with(&all.collect::<Vec<_>>());
        let last = first + millions.len() - 1;
        let mut compiler = Compiler::default();
        let mut counted = |world: &World| {
            let before = compiler.worked_out;
            let desired = update(&mut compiler, world);
            assert!(!compiler.is_unfinished());
            (compiler.worked_out - before, allowed(&desired, &format!("{last} in 8.8.8.8 tcp/7")))
        };
        assert_eq!(counted(&world), (millions.len(), false));
        leave(&mut world, 500..501);
        assert_eq!(counted(&world), (0, false), "one pod fewer");
        leave(&mut world, 501..640);
        assert_eq!(counted(&world), (1, true));
    }
}

/// The attachment that was there first, by its number, gets a policy last: with whatever changes for all, it takes no
/// room from those whose tables hold.
#[test]
fn what_is_new_or_was_short_comes_after_what_holds() {
    let mut world = crowd_with(&[40; 5]);
    let of_first = world.objects.policies.remove(&ObjectName::new("shop", "p0")).unwrap();
    let mut compiler = Compiler::default();
    let first = BTreeSet::from([0]);
    assert_eq!(short_numbers(&update(&mut compiler, &world)), BTreeSet::new());
    world.objects.policies.insert(of_first.name.object.clone(), of_first);
    add_cheap(&mut world, "shop/q");
    assert_eq!(short_numbers(&update(&mut compiler, &world)), first, "it is new");
    world.objects.policies.remove(&ObjectName::new("shop", "q")).unwrap();
    assert_eq!(short_numbers(&update(&mut compiler, &world)), first, "it was short");
    let anew = update(&mut Compiler::default(), &world);
    assert_eq!(short_numbers(&anew), BTreeSet::from([4]), "after a restart, numbers alone decide");
}

/// A policy whose ingress exceeds a bound of its own changes: its egress is in force, and comes before what is new.
#[test]
fn one_direction_in_force_is_enough_to_come_first() {
    let both = |ingress: usize| {
        json!({
            "podSelector": {"matchLabels": {"app": "x0"}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": nobody(ingress)}],
            "egress": [{"to": nobody(40_000)}],
        })
    };
    let mut policies = vec![both(60_000)];
    policies.extend((1..5).map(costly));
    let mut world = crowd().0.with(&policies);
    let new = world.objects.policies.remove(&ObjectName::new("shop", "p4")).unwrap();
    let mut compiler = Compiler::default();
    assert_eq!(short_numbers(&update(&mut compiler, &world)), BTreeSet::new());
    world.objects.policies.insert(new.name.object.clone(), new);
    world.objects.policies.extend(World::new().with(&[both(61_000)]).objects.policies);
    assert_eq!(short_numbers(&update(&mut compiler, &world)), BTreeSet::from([4]));
}

/// Attachments of a namespace may be many, and its policies too: what is refused has neither conditions nor lists of
/// policies for each of them.
#[test]
fn what_is_refused_takes_memory_once() {
    let (mut world, _) = crowd();
    let first = world.endpoints.len();
    for (name, network) in [("a0", "shop/net-a"), ("b0", "shop/net-b")] {
        world.pod("shop", name, &[], &[(network, &[])]);
    }
    let selected = json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a0", "b0"]}]});
    let ingress = json!([{"from": nobody(45_000)}]);
    let of_both = json!({"for": "net-a, net-b", "podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress});
    let world = world.with(&(0..4).map(costly).chain([of_both]).collect::<Vec<_>>());
    let mut compiler = Compiler::default();
    let desired = update(&mut compiler, &world);
    assert_eq!(short_numbers(&desired), BTreeSet::from([4]));
    let refused = || compiler.tables.values().filter(|tables| tables.refused.is_some());
    assert_eq!((refused().count(), refused().filter(|tables| tables.found.is_empty()).count()), (2, 2));
    let [one, other] = [1, 2].map(|number| &desired.endpoints[&u32::try_from(first + number).unwrap()]);
    assert!(Arc::ptr_eq(one, other));
}

/// Lists of policies are long where attachments are many: one that waits for its tables has let go of the list of
/// before.
#[test]
fn an_attachment_that_waits_has_one_list_of_policies() {
    let world = World::new().with(&[json!({"policyTypes": ["Ingress"]})]);
    let policy = &world.objects.policies[&ObjectName::new("shop", "p0")];
    let endpoint = Arc::new(world.endpoints[0].clone());
    let touched = Affected { touched: BTreeSet::from([policy.name.clone()]), ..Affected::default() };
    let moved = Affected { moved: BTreeSet::from([endpoint.id]), ..Affected::default() };
    // The second has one more for the other attachments of the pod, until all have been looked at.
    for (affected, more) in [(touched, 0), (moved, 1)] {
        let mut compiler = Compiler::default();
        drop(update(&mut compiler, &world));
        let before = Arc::strong_count(policy);
        let waiting = compiler.reselect(&endpoint, &affected).unwrap();
        assert_eq!(Arc::strong_count(policy), before + more);
        assert_eq!(waiting.selected.unwrap().1.len(), 1);
    }
}

/// One policy for two networks that give one address to different pods: each network has tables of its own, and there is
/// room for those of one.
#[test]
fn what_is_short_on_one_network_is_not_on_another() {
    let (mut world, _) = crowd();
    world.pod("shop", "peer", &[], &[("shop/net-a", &["10.8.0.1"])]);
    world.pod("shop", "no-peer", &[], &[("shop/net-b", &["10.8.0.1"])]);
    let first = world.endpoints.len() + 1;
    for (name, network) in [("a0", "shop/net-a"), ("b0", "shop/net-b"), ("a1", "shop/net-a")] {
        world.pod("shop", name, &[], &[(network, &[])]);
    }
    let selected =
        json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a0", "a1", "b0"]}]});
    let peer = json!({"podSelector": {"matchLabels": {"app": "peer"}}});
    let ingress = json!([{"from": nobody(30_000)}, {"from": [peer]}, {"ports": [{"port": 7}]}]);
    let of_both = json!({"for": "net-a, net-b", "podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress});
    let desired = world.with(&(0..4).map(costly).chain([of_both]).collect::<Vec<_>>()).compile();
    let open = [0, 1, 2].map(|number| allowed(&desired, &format!("{} in 8.8.8.8 tcp/7", first + number)));
    assert_eq!(open, [true, false, true]);
}

/// Each policy names ten definitions with long lists: another definition, or another configuration of one of them, is
/// of no concern to it.
#[test]
fn a_list_of_namespaces_concerns_the_policies_that_name_its_network() {
    const POLICIES: usize = 50;
    let define = |world: &mut World, name: &str, config: &str, allows_shop: bool| {
        let names = (1..ALLOWED_NAMESPACES).map(|number| format!("n{number}"));
        let last = if allows_shop { "shop" } else { "nobody" };
        let names: Vec<String> = names.chain([last.to_owned()]).collect();
        let definition = Definition {
            namespace: "infra".into(),
            name: name.into(),
            config: Some(config.into()),
            annotations: BTreeMap::new(),
            allowed: Some(AllowedNamespaces::read(&names.join(","))),
        };
        world.objects.definitions.insert(definition.reference(), Arc::new(definition));
    };
    let networks: Vec<String> = (0..10).map(|number| format!("lan{number}")).collect();
    let ingress = json!([{"from": [{"podSelector": {}}]}]);
    let of = |networks: &str| json!({"for": networks, "policyTypes": ["Ingress"], "ingress": ingress});
    let all: Vec<String> = networks.iter().map(|network| format!("infra/{network}")).collect();
    let mut policies = vec![of(&all.join(",")); POLICIES];
    policies.push(of("infra/other"));
    let mut world = World::new().with(&policies);
    networks.iter().for_each(|network| define(&mut world, network, "{}", true));
    define(&mut world, "other", "{}", false);
    let mut compiler = Compiler::default();
    let mut looked_again = |world: &World| {
        let before = compiler.looked_again;
        let endpoints: Endpoints = world.endpoints.iter().map(|it| (it.id, Arc::new(it.clone()))).collect();
        let desired = compiler.update(&Arc::new(world.objects.clone()), &endpoints, &Options::default());
        assert_eq!(desired, world.compile(), "as after a restart");
        let forbidden = desired.conditions.iter().filter(|it| it.message.contains("may not use network"));
        (compiler.looked_again - before, forbidden.count())
    };
    assert_eq!(looked_again(&world), (0, 1), "each is looked up once when it is new");
    define(&mut world, "lan0", "[]", true);
    world.objects.namespaces.insert("elsewhere".to_owned(), labels(&[("team", "b")]));
    assert_eq!(looked_again(&world), (0, 1));
    define(&mut world, "other", "{}", true);
    assert_eq!(looked_again(&world), (1, 0));
    define(&mut world, "lan0", "[]", false);
    assert_eq!(looked_again(&world), (POLICIES, POLICIES));
    world.objects.namespaces.insert("shop".to_owned(), labels(&[("team", "c")]));
    assert_eq!(looked_again(&world), (POLICIES + 1, POLICIES));
}
