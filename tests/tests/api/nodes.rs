//! Policies between pods of two nodes, in both families: each agent knows the other's pods only from the API server.
//! The scenarios are those of the tests of Multus' policy agent, which has all pods on one node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netattach_tests::api_server::{ApiServer, Credential, Options, TOKEN};
use netattach_tests::manifest::{self, NAMESPACE};
use netattach_tests::node::{WIRE, ip};
use netattach_tests::snapshot::{Snapshot, installed_policies};
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, datagram, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

const SEGMENT: &str = "shop/segment";
/// The ports that every pod serves, by TCP and UDP. A probe without a port uses the first.
const PORTS: [u16; 3] = [5432, 5555, 6666];
/// A second namespace, with a label `team` that no other has.
const ELSEWHERE: &str = "market";
/// The pods, each with its namespace, its node, and the number of the port that it calls `web`.
const PODS: [(&str, &str, usize, Option<u16>); 5] = [
    ("server", NAMESPACE, 0, Some(5555)),
    ("a", NAMESPACE, 1, Some(5555)),
    ("b", NAMESPACE, 1, Some(6666)),
    ("c", NAMESPACE, 1, None),
    ("d", ELSEWHERE, 1, None),
];
/// Connections between clients, which no policy of the server's is about.
const BESIDE: [&str; 4] = ["a>b", "b>c", "c>d", "d>a"];

fn node_name(number: usize) -> String {
    format!("node-{number}")
}

/// The addresses of a pod, by its place among [`PODS`].
fn addresses(pod: usize) -> [IpAddr; 2] {
    let host = u8::try_from(pod).unwrap() + 1;
    [Ipv4Addr::new(10, 9, 0, host).into(), Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, host.into()).into()]
}

fn place(name: &str) -> usize {
    PODS.iter().position(|(pod, ..)| *pod == name).unwrap_or_else(|| panic!("no pod {name}"))
}

/// A link on each node to a switch between them.
fn connect(nodes: &[Node; 2]) -> Namespace {
    let between = Namespace::new().unwrap();
    let run = |words: &str| ip(&between, &words.split(' ').collect::<Vec<_>>()).unwrap();
    run("link add switch up type bridge");
    for (number, node) in nodes.iter().enumerate() {
        run(&format!("link add port{number} type veth peer name {WIRE} netns {}", node.namespace.task()));
        run(&format!("link set port{number} master switch up"));
        ip(&node.namespace, &["link", "set", WIRE, "up"]).unwrap();
    }
    between
}

/// Two nodes, and the pods with their servers.
struct Scene {
    _echoes: Vec<Echo>,
    pods: Vec<Pod>,
    nodes: [Node; 2],
    server: ApiServer,
    _switch: Namespace,
}

impl Scene {
    fn new() -> Self {
        let mut nodes = [Node::new(&[]).unwrap(), Node::new(&[]).unwrap()];
        let switch = connect(&nodes);
        for node in &nodes {
            node.namespace.loopback_up().unwrap();
        }
        let mut server = ApiServer::start_in(&Options::default(), &nodes[0].namespace).unwrap();
        server.listen_in(&nodes[1].namespace).unwrap();
        server.create(&manifest::namespace(NAMESPACE, &json!({}))).unwrap();
        server.create(&manifest::namespace(ELSEWHERE, &json!({"team": ELSEWHERE}))).unwrap();
        let segment = json!({
            "cniVersion": "1.0.0", "type": "macvlan", "master": WIRE, "mode": "bridge",
            "capabilities": {"ips": true}, "ipam": {"type": "static"}
        });
        server.create(&manifest::network(NAMESPACE, "segment", &segment)).unwrap();
        for (number, node) in nodes.iter_mut().enumerate() {
            let name = node_name(number);
            server.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})).unwrap();
            let kubeconfig = server.kubeconfig(&node.path("kubeconfig"), &Credential::Token(TOKEN)).unwrap();
            node.join(kubeconfig, &name).unwrap();
            node.start().unwrap();
        }
        let (mut pods, mut echoes) = (Vec::new(), Vec::new());
        for (number, (name, _, node, _)) in PODS.iter().enumerate() {
            server.create(&object(number)).unwrap();
            let pod = Pod::new(name).unwrap();
            call(&nodes[*node], "ADD", number, &pod);
            let at = addresses(number).map(|address| PORTS.map(|port| SocketAddr::new(address, port)));
            echoes.extend(at.iter().flatten().map(|at| Echo::serve(&pod.namespace, *at).unwrap()));
            pods.push(pod);
        }
        Self { _echoes: echoes, pods, nodes, server, _switch: switch }
    }

    /// Checks which probes pass under these policies for the server. Clients send as before: their node enforces
    /// nothing, whichever probes are denied.
    fn check(&self, specs: &[Value], passing: &[&str], dropped: &[&str]) {
        let passing: Vec<&str> = passing.iter().chain(&BESIDE).copied().collect();
        let all: Vec<&str> = passing.iter().chain(dropped).copied().collect();
        self.waits_until_isolated(&[]);
        self.expect(&all, &[], "without a policy");
        for (number, spec) in specs.iter().enumerate() {
            let mut spec = spec.clone();
            spec["podSelector"] = of("server")["podSelector"].clone();
            self.server.create(&manifest::policy(&format!("policy-{number}"), SEGMENT, &spec)).unwrap();
        }
        // Policies that allow everything cannot be distinguished from none by traffic.
        self.waits_until_isolated(&["server"]);
        self.expect(&passing, dropped, &format!("{specs:?}"));
        self.is_enforced_by_the_servers_node_alone();
        for number in 0..specs.len() {
            self.server.delete("multi-networkpolicies", NAMESPACE, &format!("policy-{number}")).unwrap();
        }
    }

    /// Waits until the server's agent isolates these pods and no others.
    fn waits_until_isolated(&self, pods: &[&str]) {
        let mut found = Vec::new();
        let are_so = eventually(PATIENCE, || {
            found = isolated(&self.nodes[0]);
            found == pods
        });
        assert!(are_so, "isolated are {found:?}, not {pods:?}");
    }

    /// Waits until the first probes pass and none of the others, and checks once more: later knowledge of an agent
    /// must not change it.
    fn expect(&self, passing: &[&str], dropped: &[&str], why: &str) {
        let each = |texts: &[&str], passes: bool| {
            texts.iter().flat_map(|text| probes(text)).map(|it| (it, passes)).collect::<Vec<_>>()
        };
        let expected: BTreeMap<Probe, bool> =
            each(passing, true).into_iter().chain(each(dropped, false)).collect();
        let mut found = BTreeMap::new();
        let are_so = eventually(PATIENCE, || {
            found = self.look(&expected, false);
            found == expected
        });
        let others = |found: &BTreeMap<Probe, bool>| {
            found
                .iter()
                .filter(|(probe, passes)| expected[probe] != **passes)
                .map(|(it, _)| it.clone())
                .collect()
        };
        let others_at_last: Vec<Probe> = others(&found);
        assert!(are_so, "{why}: the other way round: {others_at_last:#?}");
        let later: Vec<Probe> = others(&self.look(&expected, true));
        assert_eq!(later, [], "{why}: once more, the other way round");
    }

    /// Checks that only the server is isolated, and packets were dropped there; the other node has no rule in its
    /// kernel.
    fn is_enforced_by_the_servers_node_alone(&self) {
        let [of_server, of_clients] = [0, 1].map(|node| isolated(&self.nodes[node]));
        assert_eq!((of_server, of_clients), (vec!["server".to_owned()], Vec::new()));
        let clients = &self.nodes[1];
        assert_eq!(Snapshot::take(clients, &[]).unwrap().dataplane.policies, BTreeMap::new());
        assert_eq!(installed_policies(clients).unwrap(), BTreeSet::new());
        let stats = clients.ctl(&["stats"]).unwrap();
        let rows = stats.as_array().unwrap();
        // On the default network and on the segment.
        assert_eq!(rows.len(), 2 * PODS.iter().filter(|(_, _, node, _)| *node == 1).count(), "{stats:#}");
        let by_policy = |reason: &String| reason.starts_with("ingress-") || reason.starts_with("egress-");
        assert!(
            !rows.iter().flat_map(|row| row["dropped"].as_object().unwrap().keys()).any(by_policy),
            "{stats:#}"
        );
    }

    /// Tries all at once. At the last attempt, those that should pass get all the time that they may need.
    fn look(&self, wanted: &BTreeMap<Probe, bool>, last: bool) -> BTreeMap<Probe, bool> {
        std::thread::scope(|scope| {
            let tries: Vec<_> = wanted
                .iter()
                .map(|(probe, passes)| {
                    let patience = if last && *passes { PATIENCE } else { SILENCE };
                    scope.spawn(move || {
                        let from = &self.pods[probe.from].namespace;
                        let passes = match probe.udp {
                            true => datagram(from, probe.to, patience).unwrap(),
                            false => connects(from, probe.to, patience),
                        };
                        (probe.clone(), passes)
                    })
                })
                .collect();
            tries.into_iter().map(|one| one.join().unwrap()).collect()
        })
    }

    fn end(self) {
        for (number, (pod, (_, _, node, _))) in self.pods.iter().zip(PODS).enumerate() {
            call(&self.nodes[node], "DEL", number, pod);
        }
    }
}

/// Returns the pods of a node that are isolated in either direction on some network, according to its agent.
fn isolated(node: &Node) -> Vec<String> {
    let report = node.ctl(&["policy"]).unwrap();
    let rows = report["attachments"].as_array().unwrap().iter();
    let isolated = rows.filter(|row| row["ingress"].is_u64() || row["egress"].is_u64());
    isolated.map(|row| row["pod"]["name"].as_str().unwrap().to_owned()).collect()
}

fn call(node: &Node, verb: &str, number: usize, pod: &Pod) {
    let (name, namespace, ..) = PODS[number];
    let args = format!(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID=uid-{name}",
        pod.container
    );
    node.call(verb, pod).with("CNI_ARGS", &args).run().success();
}

/// The object of a pod, with both addresses on the segment.
fn object(number: usize) -> Value {
    let (name, namespace, node, web) = PODS[number];
    let [v4, v6] = addresses(number);
    let ips = [format!("{v4}/24"), format!("{v6}/64")];
    let networks = json!([{"name": "segment", "namespace": NAMESPACE, "ips": ips}]);
    let mut pod = manifest::pod(name, &json!({"name": name}), &networks);
    pod["metadata"]["namespace"] = json!(namespace);
    pod["metadata"]["uid"] = json!(format!("uid-{name}"));
    pod["spec"]["nodeName"] = json!(node_name(node));
    if let Some(web) = web {
        pod["spec"]["containers"][0]["ports"] = json!([{"name": "web", "containerPort": web}]);
    }
    pod
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Probe {
    from: usize,
    udp: bool,
    to: SocketAddr,
}

/// Parses probes: `a>server` is a connection to the first of the ports by each family; a suffix `udp/5555` is another
/// protocol and port, `v4` or `v6` the only family.
fn probes(text: &str) -> Vec<Probe> {
    let mut words = text.split(' ');
    let (from, to) = words.next().unwrap().split_once('>').unwrap();
    let (mut udp, mut port, mut families) = (false, PORTS[0], [true; 2]);
    for word in words {
        match word.split_once('/') {
            Some((protocol, number)) => (udp, port) = (protocol == "udp", number.parse().unwrap()),
            None => families = [word == "v4", word == "v6"],
        }
    }
    let to = addresses(place(to)).into_iter().zip(families).filter(|(_, is_wanted)| *is_wanted);
    to.map(|(to, _)| Probe { from: place(from), udp, to: SocketAddr::new(to, port) }).collect()
}

/// A peer: the pod of that name.
fn of(name: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"name": name}}})
}

/// The blocks with a pod's addresses alone.
fn blocks(name: &str) -> Vec<Value> {
    let [v4, v6] = addresses(place(name));
    vec![json!({"ipBlock": {"cidr": format!("{v4}/32")}}), json!({"ipBlock": {"cidr": format!("{v6}/128")}})]
}

/// The blocks of the whole segment without a pod's addresses.
fn all_but(name: &str) -> Vec<Value> {
    let [v4, v6] = addresses(place(name));
    vec![
        json!({"ipBlock": {"cidr": "10.9.0.0/24", "except": [format!("{v4}/32")]}}),
        json!({"ipBlock": {"cidr": "fd00:9::/64", "except": [format!("{v6}/128")]}}),
    ]
}

fn ingress(rules: &Value) -> Value {
    json!({"policyTypes": ["Ingress"], "ingress": rules})
}

fn egress(rules: &Value) -> Value {
    json!({"policyTypes": ["Egress"], "egress": rules})
}

const IN: [&str; 3] = ["a>server", "b>server", "c>server"];
const OUT: [&str; 3] = ["server>a", "server>b", "server>c"];

/// Rows: C50, E40, E41, E42, E43, E45, E46, E47, E48, E49, E50.
/// Rows: E51, E52, E53, E54, E56, E57, E58, E59, E60, E61, E62, E63, E64, E65.
#[test]
fn pods_of_another_node_are_peers_of_ingress_rules_in_both_families() {
    let scene = Scene::new();
    let [a, b, c] = IN;
    let all = |others: &[&'static str]| OUT.iter().chain(others).copied().collect::<Vec<_>>();
    // Types that are not named are those that have rules.
    scene.check(&[json!({"ingress": [{"from": [of("a")]}]})], &all(&[a]), &[b, c]);
    scene.check(&[json!({"ingress": [{"from": [of("a")]}, {"from": [of("c")]}]})], &all(&[a, c]), &[b]);
    let stacked = ["a", "b"].map(|name| ingress(&json!([{"from": [of(name)]}])));
    scene.check(&stacked, &all(&[a, b]), &[c]);
    scene.end();
}

/// Rows: C50, E28, E29, E30, E31, E32, E34, E35, E36, E37, E38, E39.
#[test]
fn pods_of_another_node_are_peers_of_egress_rules_in_both_families() {
    let scene = Scene::new();
    let [a, b, c] = OUT;
    let all = |others: &[&'static str]| IN.iter().chain(others).copied().collect::<Vec<_>>();
    scene.check(&[json!({"egress": [{"to": [of("a")]}]})], &all(&[a]), &[b, c]);
    scene.check(&[json!({"egress": [{"to": [of("a")]}, {"to": [of("c")]}]})], &all(&[a, c]), &[b]);
    scene.end();
}

/// Rows: C47, E05, E06, E07, E08.
#[test]
fn namespaces_of_another_nodes_pods_are_peers_and_one_that_nobody_is_in_lets_nobody_in() {
    let scene = Scene::new();
    let of_team = |name: &str| json!({"namespaceSelector": {"matchLabels": {"team": name}}});
    let to_all = [OUT[0], OUT[1], OUT[2], "server>d"];
    let both = |others: &[&'static str]| to_all.iter().chain(others).copied().collect::<Vec<_>>();
    let nobody = [ingress(&json!([{"from": [of_team("nobody")]}]))];
    scene.check(&nobody, &to_all, &[IN[0], IN[1], IN[2], "d>server"]);
    // A namespace's label selects only its pods.
    let elsewhere = [ingress(&json!([{"from": [of_team(ELSEWHERE)]}]))];
    scene.check(&elsewhere, &both(&["d>server"]), &IN);
    scene.end();
}

/// Rows: C52, C53, C54, C58, E09, E10, E11, E12, E13, E14, E15, E16, E17, E18, E19.
#[test]
fn blocks_and_their_exceptions_hold_for_pods_of_another_node() {
    let scene = Scene::new();
    let [a, b, c] = IN;
    let two: Vec<Value> = blocks("a").into_iter().chain(blocks("b")).collect();
    scene.check(&[ingress(&json!([{"from": two}]))], &[a, b, OUT[0]], &[c]);
    scene.check(&[ingress(&json!([{"from": blocks("a")}, {"from": blocks("b")}]))], &[a, b], &[c]);
    scene.check(&["a", "b"].map(|name| ingress(&json!([{"from": blocks(name)}]))), &[a, b], &[c]);

    scene.check(&[ingress(&json!([{"from": all_but("b")}]))], &[a, c, OUT[1]], &[b]);
    // An address outside of one block is in another, of one family.
    let more = &blocks("b")[1..];
    scene.check(
        &[ingress(&json!([{"from": all_but("b")}, {"from": more}]))],
        &[a, c, "b>server v6"],
        &["b>server v4"],
    );
    // The same if another policy allows it, and by the pod's labels.
    let other = [ingress(&json!([{"from": all_but("b")}])), ingress(&json!([{"from": [of("b")]}]))];
    scene.check(&other, &[a, b, c], &[]);
    let [to_a, to_b, to_c] = OUT;
    scene.check(&[egress(&json!([{"to": all_but("b")}]))], &[to_a, to_c, b], &[to_b]);
    scene.check(
        &[egress(&json!([{"to": &all_but("b")[..1]}]))],
        &["server>a v4", "server>c v4"],
        &["server>a v6", to_b, "server>c v6"],
    );
    scene.end();
}

/// Rows: C65, C67, C69, C71, C72, C75, E20, E21, E22, E23, E24, E25, E26, E27.
#[test]
fn ports_ranges_and_names_hold_for_pods_of_another_node() {
    let scene = Scene::new();
    let both = |ingress: Value, egress: Value| json!({"policyTypes": ["Ingress", "Egress"], "ingress": [ingress], "egress": [egress]});
    let range = |first: u16| json!({"ports": [{"port": first, "endPort": first + 900}]});
    scene.check(
        &[both(range(6000), range(5000))],
        &["server>b tcp/5555", "server>b tcp/5432", "b>server tcp/6666"],
        &["server>b tcp/6666", "b>server tcp/5555", "server>b udp/5555", "b>server udp/6666"],
    );
    // Both ends of a range belong to it.
    scene.check(
        &[ingress(&json!([{"from": [of("a")], "ports": [{"port": 5432, "endPort": 5555}]}]))],
        &["a>server tcp/5432", "a>server tcp/5555"],
        &["a>server tcp/6666", "b>server tcp/5432", "b>server tcp/5555", "b>server tcp/6666"],
    );
    let protocol = |name: &str| json!({"ports": [{"protocol": name}]});
    scene.check(
        &[both(protocol("UDP"), protocol("TCP"))],
        &["server>b tcp/5555", "b>server udp/6666"],
        &["server>b udp/6666", "b>server tcp/5555"],
    );
    // A name is a port of the destination pod: for a pod of another node, the numbers that its agent has published.
    let web = json!([{"port": "web"}]);
    scene.check(
        &[ingress(&json!([{"ports": web}]))],
        &["a>server tcp/5555"],
        &["a>server tcp/6666", "a>server udp/5555"],
    );
    scene.check(
        &[egress(&json!([{"to": [{"podSelector": {}}], "ports": web}]))],
        &["server>a tcp/5555", "server>b tcp/6666"],
        &[
            "server>a tcp/6666",
            "server>b tcp/5555",
            "server>c tcp/5555",
            "server>c tcp/6666",
            "server>a udp/5555",
        ],
    );
    scene.end();
}
