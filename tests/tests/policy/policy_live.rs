//! MultiNetworkPolicy and anti-spoofing under real connections between attached pods.

use std::net::SocketAddr;
use std::time::Duration;

use netattach_tests::manifest::{NAMESPACE, network, pod, policy};
use netattach_tests::node::{DEFAULT_NETWORK, WIRE, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{
    Conversation, Echo, PATIENCE, SILENCE, connect, connects, datagram, eventually, exchange, ping,
};
use netattach_tests::{Node, Pod};
use serde_json::{Value, json};

/// Prefixes of the default network and of the routed one, both families.
const NETWORKS: [&str; 4] = ["10.50.0.", "fd00:50::", "10.51.0.", "fd00:51::"];
const SERVER: u8 = 2;
const CLIENT: u8 = 3;
const OTHER: u8 = 4;

/// Three attached pods: each has a default and a routed interface with the host number of its role in both.
struct Scene {
    node: Node,
    server: Pod,
    client: Pod,
    other: Pod,
}

impl Scene {
    fn new(policies: &[(&str, Value)]) -> Self {
        Self::with(&[], policies)
    }

    /// With these settings of the agent.
    fn with(settings: &[(&str, Value)], policies: &[(&str, Value)]) -> Self {
        Self::routed_by("veth", settings, policies)
    }

    /// With routed interfaces of that kind.
    fn routed_by(kind: &str, settings: &[(&str, Value)], policies: &[(&str, Value)]) -> Self {
        let mut node = Node::new(&[]).unwrap();
        for (key, value) in settings {
            node.set(key, value.clone());
        }
        let storage = json!({"cniVersion": "1.0.0", "type": kind, "ipam": node.host_local(&["10.51.0.0/24", "fd00:51::/64"])});
        node.write("storage", &network(NAMESPACE, "storage", &storage)).unwrap();
        let mut default = node.default_config();
        default["capabilities"] = json!({"ips": true});
        node.write("default", &network("kube-system", "default", &default)).unwrap();
        for name in ["server", "client", "other"] {
            node.write(name, &pod(name, &json!({"app": name}), &json!("storage"))).unwrap();
        }
        for (name, policy) in policies {
            node.write(name, policy).unwrap();
        }
        node.start().unwrap();
        let [server, client, other] = ["server", "client", "other"].map(|name| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        });
        Self { node, server, client, other }
    }

    /// The counters of one of a pod's interfaces.
    fn stats(&self, pod: &str, network: &str) -> Value {
        let stats = self.node.ctl(&["stats", "--pod", &format!("{NAMESPACE}/{pod}"), "--network", network]);
        let rows = stats.unwrap();
        assert_eq!(rows.as_array().unwrap().len(), 1, "{rows:#}");
        rows[0].clone()
    }

    /// The drops at one of a pod's interfaces, by reason.
    fn dropped(&self, pod: &str, network: &str) -> Value {
        self.stats(pod, network)["dropped"].clone()
    }

    /// Checks that packets were dropped at the pod's interface for these reasons and no others. A sender may have
    /// given up before its neighbour was resolved, and its packet arrives after that.
    #[track_caller]
    fn assert_reasons(&self, pod: &str, network: &str, reasons: &[&str]) {
        let mut counted = Vec::new();
        eventually(PATIENCE, || {
            counted = self.dropped(pod, network).as_object().unwrap().keys().cloned().collect();
            counted.len() >= reasons.len()
        });
        assert_eq!(counted, reasons, "{network}");
    }

    fn end(self) {
        for pod in [&self.server, &self.client, &self.other] {
            self.node.del(pod).success();
        }
        Snapshot::take(&self.node, &[&self.server, &self.client, &self.other])
            .unwrap()
            .assert_nothing_is_left();
    }
}

fn at(network: &str, host: u8, port: u16) -> SocketAddr {
    let bare = format!("{network}{host}");
    SocketAddr::new(bare.parse().unwrap(), port)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Via {
    Tcp,
    Udp,
}

/// Runs attempts at once and returns those with an unexpected outcome.
fn surprises(attempts: Vec<(&Pod, Via, SocketAddr, bool)>) -> Vec<String> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = attempts
            .into_iter()
            .map(|(from, via, to, expected)| {
                scope.spawn(move || {
                    let patience = if expected { PATIENCE } else { SILENCE };
                    let passed = match via {
                        Via::Tcp => connects(&from.namespace, to, patience),
                        Via::Udp => datagram(&from.namespace, to, patience).unwrap(),
                    };
                    (passed != expected).then(|| {
                        format!(
                            "{} {via:?} {to}: {}",
                            from.name,
                            if passed { "passed" } else { "did not pass" }
                        )
                    })
                })
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    })
}

fn serve(pod: &Pod, host: u8, ports: &[u16]) -> Vec<Echo> {
    let addresses = NETWORKS.iter().flat_map(|network| ports.iter().map(|port| at(network, host, *port)));
    addresses.map(|address| Echo::serve(&pod.namespace, address).unwrap()).collect()
}

const BOTH: &str = "kube-system/default, shop/storage";

fn only_the_client() -> Value {
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress"],
        "ingress": [{
            "from": [{"podSelector": {"matchLabels": {"app": "client"}}}],
            "ports": [
                {"protocol": "TCP", "port": 80},
                {"protocol": "TCP", "port": 1000, "endPort": 1010},
                {"protocol": "UDP", "port": 53}
            ]
        }]
    });
    policy("server", BOTH, &spec)
}

fn nobody() -> Value {
    let spec =
        json!({"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"], "ingress": []});
    policy("server", BOTH, &spec)
}

/// Rows: C07, C16, C20, C30, C66, C69, C78.
#[test]
fn ingress_lets_in_whom_a_rule_names_on_the_ports_it_names() {
    let scene = Scene::new(&[("policy", only_the_client())]);
    let Scene { server, client, other, .. } = &scene;
    let servers = serve(server, SERVER, &[80, 81, 53, 1000, 1005, 1010, 1011]);
    let peers = serve(client, CLIENT, &[7]);
    let mut attempts = Vec::new();
    for network in NETWORKS {
        let to = |port| at(network, SERVER, port);
        attempts.extend([
            (client, Via::Tcp, to(80), true),
            (client, Via::Tcp, to(81), false),
            (client, Via::Udp, to(80), false),
            (client, Via::Tcp, to(1000), true),
            (client, Via::Tcp, to(1005), true),
            (client, Via::Tcp, to(1010), true),
            (client, Via::Tcp, to(1011), false),
            (client, Via::Udp, to(1005), false),
            (client, Via::Udp, to(53), true),
            (client, Via::Tcp, to(53), false),
            (other, Via::Tcp, to(80), false),
            (other, Via::Udp, to(53), false),
            // The server's own connections are not judged, and their replies belong to them.
            (server, Via::Tcp, at(network, CLIENT, 7), true),
            (server, Via::Udp, at(network, CLIENT, 7), true),
        ]);
    }
    assert_eq!(surprises(attempts), Vec::<String>::new());
    for network in [DEFAULT_NETWORK, "shop/storage"] {
        scene.assert_reasons("server", network, &["ingress-peer", "ingress-port"]);
    }
    let report = scene.node.ctl(&["policy"]).unwrap();
    let selected: Vec<(&Value, bool, &Value)> = report["attachments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (&row["pod"]["name"], row["ingress"].is_u64(), &row["selected_by"]))
        .collect();
    let (none, one) = (json!([]), json!(["shop/server"]));
    let [c, o, s] = ["client", "other", "server"].map(Value::from);
    assert_eq!(
        selected,
        [
            (&c, false, &none),
            (&c, false, &none),
            (&o, false, &none),
            (&o, false, &none),
            (&s, true, &one),
            (&s, true, &one)
        ]
    );
    let flow = |from: &str, port: &str| {
        let paths = scene.node.ctl(&["explain", from, "shop/server", port]).unwrap();
        let verdict = |path: &Value| (path["network"].clone(), path["ingress"]["verdict"].clone());
        paths.as_array().unwrap().iter().map(verdict).collect::<Vec<_>>()
    };
    let on_both = |verdict: &str| {
        let row = |network: &str| (json!(network), json!(verdict));
        vec![row(DEFAULT_NETWORK), row(DEFAULT_NETWORK), row("shop/storage"), row("shop/storage")]
    };
    assert_eq!(flow("shop/client", "80"), on_both("allowed"));
    assert_eq!(flow("shop/client", "81"), on_both("denied"));
    assert_eq!(flow("shop/other", "80/tcp"), on_both("denied"));
    assert_eq!(flow("10.51.0.3", "53/udp"), [(json!("shop/storage"), json!("allowed"))]);
    let dumps = scene.node.ctl(&["policy", "dump", "shop/server"]).unwrap();
    let rules: Vec<&Value> = dumps.as_array().unwrap().iter().map(|dump| &dump["rules"]).collect();
    assert_eq!(rules, [&json!([{"rule": 1, "from": "shop/server ingress[0]"}])]);
    drop((servers, peers));
    scene.end();
}

/// Rows: C16.
#[test]
fn a_network_policy_holds_on_the_default_network_and_leaves_the_node_its_pods() {
    let deny = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": NAMESPACE, "name": "deny"},
        "spec": {"podSelector": {"matchLabels": {"app": "server"}}}
    });
    let scene = Scene::with(&[("networkPolicy", json!(true))], &[("policy", deny)]);
    let Scene { node, server, client, .. } = &scene;
    let servers = serve(server, SERVER, &[80]);
    let attempts = NETWORKS
        .iter()
        .map(|network| (client, Via::Tcp, at(network, SERVER, 80), network.contains("51")))
        .collect();
    assert_eq!(surprises(attempts), Vec::<String>::new());
    for network in ["10.50.0.", "fd00:50::"] {
        assert!(connects(&node.namespace, at(network, SERVER, 80), PATIENCE), "{network}: from the node");
    }
    drop(servers);
    scene.end();
}

/// Rows: PTP-policy.
#[test]
fn a_policy_holds_on_the_agents_own_ptp_links_also_on_the_fast_path() {
    let settings = [("fastPath", json!("on"))];
    let scene = Scene::routed_by("ptp", &settings, &[("policy", only_the_client())]);
    let Scene { node, server, client, other } = &scene;
    let servers = serve(server, SERVER, &[80, 81]);
    let told = || {
        let rows = node.ctl(&["attachments"]).unwrap();
        let routed = rows.as_array().unwrap().iter().filter(|row| row["network"] == "shop/storage");
        let what = |row: &Value| {
            [&row["pod"]["name"], &row["kind"], &row["enforcement"], &row["fast_path"]["state"]]
                .map(Value::clone)
        };
        routed.map(what).collect::<Vec<_>>()
    };
    let expected = ["client", "other", "server"].map(|name| [name, "ptp", "full", "on"].map(Value::from));
    assert!(eventually(PATIENCE, || told() == expected), "{:#?}", told());
    for _ in 0..2 {
        let mut attempts = Vec::new();
        for network in &NETWORKS[2..] {
            let to = |port| at(network, SERVER, port);
            attempts.extend([
                (client, Via::Tcp, to(80), true),
                (client, Via::Tcp, to(81), false),
                (other, Via::Tcp, to(80), false),
            ]);
        }
        assert_eq!(surprises(attempts), Vec::<String>::new());
    }
    scene.assert_reasons("server", "shop/storage", &["ingress-peer", "ingress-port"]);
    let counted = scene.stats("server", "shop/storage");
    assert!(counted["fast"]["packets"].as_u64() > Some(0), "none has taken the fast path: {counted:#}");
    drop(servers);
    scene.end();
}

/// Rows: C27, C52, C53, C78.
#[test]
fn egress_lets_out_to_a_block_without_its_exceptions() {
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "client"}},
        "policyTypes": ["Egress"],
        "egress": [
            {"to": [
                {"ipBlock": {"cidr": "10.50.0.0/24", "except": ["10.50.0.4/32"]}},
                {"ipBlock": {"cidr": "fd00:50::/64", "except": ["fd00:50::4/128"]}}
            ]},
            {"to": [{"ipBlock": {"cidr": "10.51.0.0/24"}}], "ports": [{"protocol": "TCP", "port": 80}]}
        ]
    });
    let scene = Scene::new(&[("policy", policy("client", BOTH, &spec))]);
    let Scene { server, client, other, .. } = &scene;
    let servers = [serve(server, SERVER, &[80, 81]), serve(other, OTHER, &[80])];
    let back = serve(client, CLIENT, &[7]);
    let mut attempts = Vec::new();
    for network in ["10.50.0.", "fd00:50::"] {
        attempts.extend([
            (client, Via::Tcp, at(network, SERVER, 80), true),
            (client, Via::Udp, at(network, SERVER, 81), true),
            (client, Via::Tcp, at(network, OTHER, 80), false),
            (client, Via::Udp, at(network, OTHER, 80), false),
        ]);
    }
    attempts.extend([
        (client, Via::Tcp, at("10.51.0.", SERVER, 80), true),
        (client, Via::Tcp, at("10.51.0.", SERVER, 81), false),
        (client, Via::Udp, at("10.51.0.", SERVER, 80), false),
        (client, Via::Tcp, at("fd00:51::", SERVER, 80), false),
    ]);
    for network in NETWORKS {
        // Replies of a pod that may not open connections.
        attempts.push((other, Via::Tcp, at(network, CLIENT, 7), true));
        attempts.push((other, Via::Udp, at(network, CLIENT, 7), true));
    }
    assert_eq!(surprises(attempts), Vec::<String>::new());
    scene.assert_reasons("client", DEFAULT_NETWORK, &["egress-peer"]);
    scene.assert_reasons("client", "shop/storage", &["egress-peer", "egress-port"]);
    drop((servers, back));
    scene.end();
}

/// Rows: C31, C51, C85.
#[test]
fn a_change_of_the_policy_comes_into_force_and_cuts_open_connections() {
    let scene = Scene::new(&[]);
    let Scene { node, server, client, other } = &scene;
    let servers = serve(server, SERVER, &[80]);
    let mut open = Vec::new();
    for network in NETWORKS {
        let to = at(network, SERVER, 80);
        open.push((to, connect(&client.namespace, to, PATIENCE).unwrap()));
        assert!(connects(&other.namespace, to, PATIENCE), "{to}");
    }
    let passes = |from: &Pod, patience: Duration| {
        std::thread::scope(|scope| {
            let attempts = NETWORKS.map(|network| {
                scope.spawn(move || connects(&from.namespace, at(network, SERVER, 80), patience))
            });
            attempts.map(|attempt| attempt.join().unwrap())
        })
    };

    node.write("policy", &only_the_client()).unwrap();
    assert!(eventually(PATIENCE, || passes(other, SILENCE) == [false; 4]), "others are kept out");
    assert_eq!(passes(client, PATIENCE), [true; 4]);
    for (to, connection) in &mut open {
        exchange(connection, PATIENCE).unwrap_or_else(|error| panic!("{to} is allowed on: {error}"));
    }

    node.write("policy", &nobody()).unwrap();
    assert!(eventually(PATIENCE, || passes(client, SILENCE) == [false; 4]), "everyone is kept out");
    for (to, connection) in &mut open {
        assert!(eventually(PATIENCE, || exchange(connection, SILENCE).is_err()), "{to}: it goes on");
        let error = exchange(connection, SILENCE).expect_err("an open connection is cut");
        assert!(
            matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut),
            "{to}: {error}"
        );
    }

    node.remove("policy").unwrap();
    assert!(eventually(PATIENCE, || passes(other, SILENCE) == [true; 4]), "everything is open again");
    assert_eq!(passes(client, PATIENCE), [true; 4]);
    drop((open, servers));
    scene.end();
}

/// Rows: C91, C92, C93, E44, E55.
#[test]
fn policies_stay_in_force_while_no_agent_runs_and_change_when_it_is_back() {
    let mut scene = Scene::new(&[("policy", only_the_client())]);
    let servers = serve(&scene.server, SERVER, &[80, 53]);
    let conversation = Conversation::start(&scene.client.namespace, at("10.51.0.", SERVER, 53)).unwrap();
    scene.node.kill().unwrap();
    let verdicts = |scene: &Scene, client: bool, other: bool| {
        let mut attempts = Vec::new();
        for network in NETWORKS {
            attempts.push((&scene.client, Via::Tcp, at(network, SERVER, 80), client));
            attempts.push((&scene.other, Via::Tcp, at(network, SERVER, 80), other));
        }
        assert_eq!(surprises(attempts), Vec::<String>::new());
    };
    verdicts(&scene, true, false);
    scene.node.start().unwrap();
    verdicts(&scene, true, false);
    let (sent, lost) = conversation.end();
    assert!(sent > 10 && lost == 0, "{lost} of {sent}");

    scene.node.kill().unwrap();
    scene.node.write("policy", &nobody()).unwrap();
    verdicts(&scene, true, false);
    scene.node.start().unwrap();
    verdicts(&scene, false, false);
    scene.node.kill().unwrap();
    scene.node.remove("policy").unwrap();
    scene.node.start().unwrap();
    verdicts(&scene, true, true);
    drop(servers);
    scene.end();
}

/// Rows: C51.
#[test]
fn a_pod_that_is_attached_again_is_known_by_its_new_addresses() {
    let scene = Scene::new(&[("policy", only_the_client())]);
    let Scene { node, server, client, other } = &scene;
    let servers = serve(server, SERVER, &[80]);
    for _ in 0..2 {
        let attempts = NETWORKS
            .iter()
            .flat_map(|network| [(client, true), (other, false)].map(|(pod, passes)| (pod, network, passes)))
            .map(|(pod, network, passes)| (pod, Via::Tcp, at(network, SERVER, 80), passes))
            .collect();
        assert_eq!(surprises(attempts), Vec::<String>::new());
        node.del(client).success();
        node.add(client).success();
    }
    // The client's former address is free again, and no longer covered by the policy.
    let asked = json!({"ips": ["10.50.0.3"]});
    let mut config = node.cni_config("1.0.0");
    config["runtimeConfig"] = asked;
    node.del(other).success();
    let result = node.call("ADD", other).stdin(&config).run().success();
    assert_eq!(result["ips"][0]["address"], json!("10.50.0.3/24"));
    let attempts = vec![
        (other, Via::Tcp, at("10.50.0.", SERVER, 80), false),
        (client, Via::Tcp, at("10.50.0.", SERVER, 80), true),
    ];
    assert_eq!(surprises(attempts), Vec::<String>::new());
    drop(servers);
    scene.end();
}

/// The pod has no status yet, as while its init containers run.
///
/// Rows: C14, C90.
#[test]
fn a_pod_is_isolated_when_its_add_returns() {
    let scene = Scene::new(&[("policy", nobody())]);
    let Scene { server, client, .. } = &scene;
    let attempts = NETWORKS.map(|network| (client, Via::Tcp, at(network, SERVER, 80), false));
    let servers = serve(server, SERVER, &[80]);
    assert_eq!(surprises(attempts.into()), Vec::<String>::new());
    for network in [DEFAULT_NETWORK, "shop/storage"] {
        scene.assert_reasons("server", network, &["ingress-peer"]);
    }
    drop(servers);
    scene.end();
}

/// As an ipvlan does, see `ipvlan`.
///
/// Rows: MVL-parent-mac.
#[test]
fn a_macvlan_in_mode_passthru_follows_a_parent_that_gets_another_ethernet_address() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "macvlan", "mode": "passthru", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    node.write("lan", &network(NAMESPACE, "lan", &config)).unwrap();
    node.write("a", &pod("a", &json!({"app": "a"}), &json!("lan"))).unwrap();
    node.start().unwrap();
    let a = Pod::new("a").unwrap();
    node.add(&a).success();
    ip(&node.namespace, &["link", "set", WIRE, "address", "02:00:00:00:00:77"]).unwrap();
    node.check(&a).success();
    node.del(&a).success();
}

/// Rows: C17.
#[test]
fn a_policy_on_a_network_without_enforcement_is_refused_or_reported_as_the_network_says() {
    let mut node = Node::new(&[]).unwrap();
    node.add_wire().unwrap();
    let config = json!({"cniVersion": "1.0.0", "type": "macvlan", "mode": "passthru", "master": WIRE, "ipam": node.host_local(&["10.52.0.0/24"])});
    let lan = |word: &str| {
        let mut lan = network(NAMESPACE, "lan", &config);
        lan["metadata"]["annotations"] = json!({"netattach.dev/unenforceable": word});
        lan
    };
    node.write("lan", &lan("refuse")).unwrap();
    for name in ["server", "client"] {
        node.write(name, &pod(name, &json!({"app": name}), &json!("lan"))).unwrap();
    }
    let deny = json!({"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"]});
    node.write("policy", &policy("deny", "lan", &deny)).unwrap();
    node.start().unwrap();
    let [server, client] = ["server", "client"].map(|name| Pod::new(name).unwrap());
    node.add(&client).success();
    let refused = (
        7,
        "attach net1 (shop/lan): enforcement there is none (interfaces of this kind are not judged), unenforceable is set to refuse by annotation netattach.dev/unenforceable of the network, and the pod is selected by shop/deny"
            .to_owned(),
    );
    assert_eq!(node.add(&server).failure(), refused);
    // There is room for one.
    node.del(&client).success();
    node.kill().unwrap();
    node.write("lan", &lan("warn")).unwrap();
    node.start().unwrap();
    node.add(&server).success();
    let report = node.ctl(&["policy"]).unwrap();
    assert_eq!(
        report["conditions"],
        json!([{
            "object": "multi-networkpolicy shop/deny",
            "problem": "selects net1 of shop/server on shop/lan, where nothing is enforced (interfaces of this kind are \
                        not judged): it has no effect there; change that, or take a network of another kind \
                        (docs/limits.md), and recreate the pod"
        }])
    );
    for pod in [&server, &client] {
        node.del(pod).success();
    }
    Snapshot::take(&node, &[&server, &client]).unwrap().assert_nothing_is_left();
}

/// A spoofing attempt of a pod with `CAP_NET_ADMIN`, and the drop reason of its packets.
type Disguise = (&'static str, fn(&Pod, &str), &'static str);

#[test]
fn a_pod_cannot_pretend_to_be_another() {
    let disguises: [Disguise; 4] = [
        ("MAC", |pod, _| run(pod, &["link", "set", "eth0", "address", "02:00:00:00:66:66"]), "source-mac"),
        (
            "ARP",
            |pod, _| {
                run(pod, &["-4", "addr", "flush", "dev", "eth0"]);
                run(pod, &["neigh", "flush", "dev", "eth0"]);
                run(pod, &["addr", "add", "10.50.0.2/24", "dev", "eth0"]);
            },
            "arp-sender-ip",
        ),
        (
            "IPv4",
            |pod, gateway| {
                run(pod, &["-4", "addr", "flush", "dev", "eth0"]);
                run(pod, &["addr", "add", "10.50.0.2/24", "dev", "eth0"]);
                run(
                    pod,
                    &["neigh", "replace", "10.50.0.1", "lladdr", gateway, "dev", "eth0", "nud", "permanent"],
                );
            },
            "source-ipv4",
        ),
        (
            "IPv6",
            |pod, gateway| {
                run(pod, &["-6", "addr", "flush", "dev", "eth0", "scope", "global"]);
                run(pod, &["addr", "add", "fd00:50::2/64", "dev", "eth0", "nodad"]);
                run(
                    pod,
                    &["neigh", "replace", "fd00:50::1", "lladdr", gateway, "dev", "eth0", "nud", "permanent"],
                );
            },
            "source-ipv6",
        ),
    ];
    let scene = Scene::new(&[]);
    let bridge = Snapshot::take(&scene.node, &[]).unwrap().node.links["br0"].mac.unwrap().to_string();
    for (what, disguise, reason) in disguises {
        let gateway = if what == "IPv6" { "fd00:50::1" } else { "10.50.0.1" }.parse().unwrap();
        assert!(ping(&scene.other.namespace, gateway, PATIENCE).unwrap(), "{what}: as itself");
        disguise(&scene.other, &bridge);
        assert!(!ping(&scene.other.namespace, gateway, SILENCE).unwrap(), "{what}: disguised");
        let dropped = scene.dropped("other", DEFAULT_NETWORK);
        assert!(dropped[reason].as_u64().is_some_and(|packets| packets > 0), "{what}: {dropped}");
        // With its own address again: a new sandbox. Its counters begin at zero.
        scene.node.del(&scene.other).success();
        scene.node.add(&scene.other).success();
        let dropped = scene.dropped("other", DEFAULT_NETWORK);
        assert_eq!(dropped.get(reason), None, "{what}: {dropped}");
    }
    scene.end();
}

fn run(pod: &Pod, words: &[&str]) {
    ip(&pod.namespace, words).unwrap();
}
