//! Follows every advice; afterwards the flow passes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::npwg::NetworkRef;
use crate::objects::Place;
use crate::objects::access::Restrictions;
use crate::objects::policy::POLICY_FOR_ANNOTATION;
use crate::objects::{ObjectName, Objects, Phase, Pod};
use crate::policy::diff::{Programmed, diff};
use crate::policy::explain::{End, Form, NodeRules, Question, View, explain};
use crate::policy::incremental::compile;
use crate::policy::index::Endpoint;
use crate::policy::options::Options;
use crate::source::read::policy;

/// `shop/web` and `shop/db` on `shop/lan`, both families, and policies.
struct Scene {
    objects: Objects,
    endpoints: Vec<Endpoint>,
    specs: BTreeMap<String, Value>,
    node: NodeRules,
}

impl Scene {
    fn new(specs: &[(&str, Value)]) -> Self {
        let mut objects = Objects::default();
        objects.namespaces.insert("shop".to_owned(), Default::default());
        let mut endpoints = Vec::new();
        for (id, name) in [(1, "web"), (2, "db")] {
            let pod = ObjectName::new("shop", name);
            endpoints.push(Endpoint {
                id,
                pod: pod.clone(),
                uid: None,
                at: Arc::new(BTreeSet::from([Place::Network(NetworkRef::new("shop", "lan"))])),
                addresses: [format!("10.0.0.{id}"), format!("fd00::{id}")]
                    .map(|address| address.parse().unwrap())
                    .into(),
                dhcp: None,
                ethertypes: Vec::new(),
            });
            objects.pods.insert(pod.clone(), self::pod(pod).into());
        }
        let specs = specs.iter().map(|(name, spec)| ((*name).to_owned(), spec.clone())).collect();
        Self { objects, endpoints, specs, node: NodeRules::default() }
    }

    fn explain(&mut self, from: &End, to: &End, traffic: Asked) -> Vec<Path> {
        let annotations = BTreeMap::from([(POLICY_FOR_ANNOTATION.to_owned(), "lan".to_owned())]);
        for (name, spec) in &self.specs {
            let name = ObjectName::new("shop", name);
            let policy = policy::read(name.clone(), &annotations, spec).unwrap();
            self.objects.policies.insert(name, policy.into());
        }
        let desired = compile(&self.objects, &self.endpoints, &Options::default());
        let mut programmed = Programmed::default();
        programmed.apply(&diff(&desired, &programmed));
        let view = View {
            objects: &self.objects,
            endpoints: &self.endpoints,
            limited: &BTreeMap::new(),
            programmed: &programmed,
            desired: &desired,
            node: self.node,
            behind_translation: false,
            routed: &BTreeMap::new(),
            restrictions: &Restrictions::default(),
        };
        explain(&view, &Question { from: from.clone(), to: to.clone(), traffic })
    }

    /// Follows the advice in the policy of that name.
    fn follow(&mut self, advice: &Advice, policy: &str) {
        let (rules, peers) = match advice.direction {
            Direction::Ingress => ("ingress", "from"),
            Direction::Egress => ("egress", "to"),
        };
        let spec = self.specs.get_mut(policy).unwrap();
        let net = ipnet::IpNet::from(advice.peer).to_string();
        let mut rule = json!({peers: [{"ipBlock": {"cidr": net}}]});
        if let Some(port) = advice.traffic.port {
            let protocol = ["TCP", "UDP", "SCTP"]
                [[6, 17, 132].iter().position(|number| *number == advice.traffic.protocol).unwrap()];
            rule["ports"] = json!([{"protocol": protocol, "port": port}]);
        }
        let list = spec.as_object_mut().unwrap().entry(rules).or_insert_with(|| json!([]));
        list.as_array_mut().unwrap().push(rule);
    }
}

fn pod(name: ObjectName) -> Pod {
    Pod {
        name,
        uid: None,
        mirror_of: None,
        labels: Default::default(),
        annotations: BTreeMap::new(),
        phase: Phase::Running,
        host_network: false,
        ports: Vec::new(),
        powers: Default::default(),
        on_this_node: false,
        terminating: false,
    }
}

fn policy(types: &[&str], rules: &Value) -> Value {
    let mut spec = json!({"podSelector": {}, "policyTypes": types});
    spec.as_object_mut().unwrap().extend(rules.as_object().unwrap().clone());
    spec
}

#[test]
fn every_advice_that_is_followed_lets_the_flow_pass_in_any_of_the_policies_that_it_names() {
    let web = json!({"protocol": "TCP", "port": 80});
    let scenes: Vec<Vec<(&str, Value)>> = vec![
        vec![("deny", policy(&["Ingress"], &json!({})))],
        vec![("deny", policy(&["Ingress", "Egress"], &json!({})))],
        // Only the second policy applies to egress, only the first to ingress.
        vec![("in", policy(&["Ingress"], &json!({}))), ("out", policy(&["Egress"], &json!({})))],
        vec![("port", policy(&["Ingress"], &json!({"ingress": [{"ports": [web]}]})))],
        vec![(
            "port",
            policy(
                &["Egress"],
                &json!({"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/24"}}], "ports": [web]}]}),
            ),
        )],
        vec![(
            "except",
            policy(
                &["Ingress"],
                &json!({"ingress": [{"from": [
                    {"ipBlock": {"cidr": "10.0.0.0/24", "except": ["10.0.0.1/32"]}},
                    {"ipBlock": {"cidr": "fd00::/64", "except": ["fd00::/126"]}},
                ], "ports": [web]}]}),
            ),
        )],
    ];
    let pod = |name: &str| End::Pod(ObjectName::new("shop", name));
    let ends = [
        (pod("web"), pod("db")),
        (End::Address([192, 0, 2, 1].into()), pod("db")),
        (pod("web"), End::Address([192, 0, 2, 1].into())),
    ];
    let traffic = [(6, Some(81)), (17, Some(53)), (132, Some(9)), (1, None), (58, None)];
    let mut followed = 0;
    for specs in &scenes {
        for ((from, to), (protocol, port)) in
            ends.iter().flat_map(|ends| traffic.iter().map(move |traffic| (ends, traffic)))
        {
            let asked = Asked { protocol: *protocol, port: *port, form: Form::Opening };
            let paths = Scene::new(specs).explain(from, to, asked);
            for (place, path) in paths.iter().enumerate().filter(|(_, path)| !path.passes()) {
                let advice = path.advice();
                assert!(!advice.is_empty(), "{path:?}");
                let choices = advice.iter().map(|it| it.policies.len()).max().unwrap();
                for choice in 0..choices {
                    let mut scene = Scene::new(specs);
                    for it in &advice {
                        let named = &it.policies[choice.min(it.policies.len() - 1)];
                        scene.follow(it, named.strip_prefix("shop/").unwrap());
                    }
                    let now = &scene.explain(from, to, asked)[place];
                    assert!(now.passes(), "{}: {now:?}", advice[0]);
                    followed += 1;
                }
                let mut scene = Scene::new(specs);
                for setting in advice.iter().filter_map(Advice::setting) {
                    scene.node.accept_icmp |= setting == "acceptICMP";
                    scene.node.accept_icmpv6 |= setting == "acceptICMPv6";
                    assert!(scene.explain(from, to, asked)[place].passes(), "{setting}");
                }
            }
        }
    }
    assert!(followed > 50, "{followed}");
}

#[test]
fn an_advice_is_a_sentence() {
    let advice = Advice {
        of: Named { pod: Some(ObjectName::new("shop", "db")), address: [10, 0, 0, 2].into() },
        direction: Direction::Ingress,
        policies: vec!["shop/a".to_owned(), "shop/b".to_owned()],
        peer: [10, 0, 0, 1].into(),
        is_named: false,
        traffic: Asked { protocol: 6, port: Some(81), form: Form::Opening },
    };
    let icmp = Asked { protocol: 1, port: None, form: Form::Opening };
    let end = "would allow it, in shop/a or shop/b or in another policy on shop/db (10.0.0.2)";
    let setting = "; so would acceptICMP: true in the agent's settings, for all pods";
    let cases = [
        (advice.clone(), format!("a rule with 10.0.0.1 in `from` and tcp/81 in `ports` {end}")),
        (
            Advice { traffic: icmp, ..advice.clone() },
            format!("a rule with 10.0.0.1 in `from` and without `ports` {end}{setting}"),
        ),
        (
            Advice { is_named: true, traffic: icmp, ..advice.clone() },
            format!("such a rule without `ports` {end}{setting}"),
        ),
        (
            Advice { is_named: true, direction: Direction::Egress, ..advice },
            format!("tcp/81 in `ports` of such a rule {end}"),
        ),
    ];
    for (advice, sentence) in cases {
        assert_eq!(advice.to_string(), sentence);
    }
}
