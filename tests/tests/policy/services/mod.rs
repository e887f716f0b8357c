//! Policies with Services: with `networkPolicy` they apply to the real destination of a packet, not the one sent to.
//!
//! A node with the rules that kube-proxy writes. Pods of this node are on a bridge that shows its frames to the packet
//! filter, as kubeadm requires, or on routed links; a pod of another node is behind a wire.
//!
//! `translations` writes the rules. `translated` tests their destinations, `nftables` the same without iptables, `allowed_addresses`
//! addresses that pods share, `upstream` the cases of Kubernetes' own suite, `table` the node's packet filter.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use netattach_tests::manifest::{NAMESPACE, annotated, namespace, network, network_policy, pod};
use netattach_tests::node::{WIRE, executable, ip};
use netattach_tests::snapshot::Snapshot;
use netattach_tests::traffic::{Echo, PATIENCE, SILENCE, connects, datagram, datagram_from, eventually};
use netattach_tests::{Namespace, Node, Pod};
use serde_json::{Value, json};

mod allowed_addresses;
mod nftables;
mod table;
mod translated;
mod translations;
mod upstream;

use translations::{Service, kube_proxy};

/// Host numbers of the pods of this node, in the order in which they are attached.
const SERVER: u8 = 2;
const CLIENT: u8 = 3;
const OTHER: u8 = 4;
/// Prefixes of the default network, of Services, and of the network between nodes; by family.
const PODS: [&str; 2] = ["10.50.0.", "fd00:50::"];
const SERVICES: [&str; 2] = ["10.96.0.", "fd00:96::"];
const NODES: [&str; 2] = ["192.0.2.", "2001:db8::"];
/// A pod of another node.
const REMOTE: [&str; 2] = ["10.51.0.2", "fd00:51::2"];
/// Ports of Services, of their pods, and of the node.
const WEB: u16 = 80;
const ADMIN: u16 = 81;
const WEB_BEHIND: u16 = 8080;
const ADMIN_BEHIND: u16 = 8081;
const NODE_PORT: u16 = 30080;
const HOST_PORT: u16 = 9080;

/// The links of the node's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    /// By a bridge, whose frames the packet filter sees.
    Bridge,
    /// Each by a routed link of the node.
    Routed,
}

struct Scene {
    node: Node,
    server: Pod,
    client: Pod,
    other: Pod,
    /// Its policy shows which manifests are in force; see [`Scene::settle`].
    marker: Pod,
    /// The namespace of another node and its pod.
    remote: Namespace,
    _echoes: Vec<Echo>,
}

impl Scene {
    /// With rules for Services of both families.
    fn new(links: Links) -> Self {
        let scene = Self::untranslated(links);
        for family in [0, 1] {
            scene.restore(family, &kube_proxy(&scene.services(family)));
        }
        scene.await_stack();
        scene
    }

    /// Waits until the agent has noticed a translation that packets must not bypass.
    fn await_stack(&self) {
        let standings = || {
            let rows = self.node.ctl(&["attachments"]).unwrap();
            let states: Vec<String> =
                rows.as_array().unwrap().iter().map(|row| row["fast_path"]["state"].to_string()).collect();
            states
        };
        let off =
            || standings().iter().all(|state| ["\"ip-rules\"", "\"iptables\""].contains(&state.as_str()));
        assert!(eventually(PATIENCE, off), "{:?}", standings());
    }

    fn untranslated(links: Links) -> Self {
        Self::sharing(links, &[])
    }

    /// With addresses that each pod of the default network may send from.
    fn sharing(links: Links, shared: &[&str]) -> Self {
        let mut node = Node::new(&[]).unwrap();
        node.set("networkPolicy", json!(true));
        let mut config = node.default_config();
        if links == Links::Routed {
            let ipam = config["ipam"].take();
            config = json!({"cniVersion": "1.0.0", "type": "veth", "isDefaultGateway": true, "ipam": ipam});
        }
        if !shared.is_empty() {
            config["allowedAddresses"] = json!(shared);
        }
        node.write("default", &network("kube-system", "default", &config)).unwrap();
        for (name, of) in [(NAMESPACE, "shop"), ("elsewhere", "elsewhere")] {
            node.write(name, &namespace(name, &json!({"ns": of}))).unwrap();
        }
        for name in ["server", "client", "other", "marker"] {
            node.write(&format!("pod-{name}"), &labelled(name, name)).unwrap();
        }
        node.write("pod-remote", &remote_pod(&json!({"app": "remote"}))).unwrap();
        let remote = Namespace::new().unwrap();
        // Forwarding has to be on before there are routes.
        node.start().unwrap();
        let [server, client, other, marker] = ["server", "client", "other", "marker"].map(|name| {
            let pod = Pod::new(name).unwrap();
            node.add(&pod).success();
            pod
        });
        let mut scene = Self { node, server, client, other, marker, remote, _echoes: Vec::new() };
        scene.connect_remote();
        scene.serve();
        scene
    }

    fn connect_remote(&self) {
        let task = self.remote.task();
        let on_node = |words: &str| ip(&self.node.namespace, &words.split(' ').collect::<Vec<_>>()).unwrap();
        let beyond = |words: &str| ip(&self.remote, &words.split(' ').collect::<Vec<_>>()).unwrap();
        on_node(&format!("link add {WIRE} up type veth peer name far0 netns {task}"));
        beyond("link set far0 up");
        beyond("link set lo up");
        for (family, bits) in [(0, "24"), (1, "64")] {
            let nodad = if family == 1 { " nodad" } else { "" };
            let [prefix, pods, remote] = [NODES[family], PODS[family], REMOTE[family]];
            on_node(&format!("addr add {prefix}1/{bits} dev {WIRE}{nodad}"));
            beyond(&format!("addr add {prefix}2/{bits} dev far0{nodad}"));
            beyond(&format!("addr add {remote} dev lo{nodad}"));
            on_node(&format!("route add {remote} via {prefix}2"));
            on_node(&format!("route add default via {prefix}2"));
            beyond(&format!("route add {pods}0/{bits} via {prefix}1 src {remote}"));
        }
        let sysctl = || {
            Command::new("sysctl")
                .args(["-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"])
                .status()
        };
        assert!(self.node.namespace.run(sysctl).unwrap().success());
    }

    /// Starts servers on both ports of all pods and of the other node.
    fn serve(&mut self) {
        let local = [(&self.server, SERVER), (&self.client, CLIENT), (&self.other, OTHER)];
        for family in [0, 1] {
            for port in [WEB_BEHIND, ADMIN_BEHIND] {
                for (pod, host) in local {
                    self._echoes.push(Echo::serve(&pod.namespace, pod_at(family, host, port)).unwrap());
                }
                let remote = SocketAddr::new(REMOTE[family].parse().unwrap(), port);
                self._echoes.push(Echo::serve(&self.remote, remote).unwrap());
            }
        }
    }

    /// The Services: `1` is the server's with a port of the node and an external address, `2` the remote pod's, `3` the
    /// other pod's, each with two ports.
    fn services(&self, family: usize) -> Vec<Service> {
        let at = |prefix: &str, host: u8| -> IpAddr { format!("{prefix}{host}").parse().unwrap() };
        let pods = PODS[family];
        let backends = [at(pods, SERVER), REMOTE[family].parse().unwrap(), at(pods, OTHER)];
        let mut services = Vec::new();
        for (number, backend) in (1..).zip(backends) {
            for (port, behind) in [(WEB, WEB_BEHIND), (ADMIN, ADMIN_BEHIND)] {
                let exposed = number == 1 && port == WEB;
                services.push(Service {
                    name: format!("shop/s{number}:p{port}"),
                    address: at(SERVICES[family], number),
                    port,
                    backend: SocketAddr::new(backend, behind),
                    pods: format!("{pods}0/{}", [24, 64][family]),
                    node_port: exposed.then_some(NODE_PORT),
                    host_port: exposed.then_some(HOST_PORT),
                    external: exposed.then(|| at(["203.0.113.", "2001:db8:1::"][family], 7)),
                });
            }
        }
        services
    }

    fn on_node(&self, program: &str, words: &[&str], input: &str) {
        use std::io::Write;
        let run = || {
            let mut child = Command::new(program)
                .args(words)
                .stdin(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped())
                .spawn()?;
            child.stdin.take().expect("it is piped").write_all(input.as_bytes())?;
            child.wait_with_output()
        };
        let output = self.node.namespace.run(run).unwrap();
        assert!(output.status.success(), "{program}: {}\n{input}", String::from_utf8_lossy(&output.stderr));
    }

    /// Loads rules with the program that kube-proxy uses.
    fn restore(&self, family: usize, rules: &str) {
        self.on_node(["iptables-restore", "ip6tables-restore"][family], &["-w", "--noflush"], rules);
    }

    fn policy(&self, name: &str, spec: &Value) {
        self.node.write(&format!("policy-{name}"), &network_policy(name, spec)).unwrap();
        self.settle();
    }

    fn no_policy(&self, name: &str) {
        self.node.remove(&format!("policy-{name}")).unwrap();
        self.settle();
    }

    /// Waits until the manifests are in force: until the policy of the marker is, which is written after all others.
    fn settle(&self) {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("marker-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let spec = json!({"podSelector": {"matchLabels": {"app": "marker"}}, "policyTypes": ["Ingress"]});
        self.node.write("zz-marker", &network_policy(&name, &spec)).unwrap();
        let in_force = || self.node.ctl(&["policy"]).unwrap().to_string().contains(&name);
        assert!(eventually(PATIENCE, in_force), "{:#}", self.node.ctl(&["policy"]).unwrap());
    }

    fn pod(&self, name: &str) -> &Namespace {
        match name {
            "server" => &self.server.namespace,
            "client" => &self.client.namespace,
            "other" => &self.other.namespace,
            "remote" => &self.remote,
            "node" => &self.node.namespace,
            _ => panic!("no {name}"),
        }
    }

    /// Asserts which of these pass, in both families, by TCP and UDP.
    #[track_caller]
    fn expect(&self, attempts: &[(&str, To, bool)]) {
        let wrong = self.surprises(attempts);
        assert!(wrong.is_empty(), "{wrong:#?}\n{}", self.flows());
    }

    /// Whether the table of the node's agent is in place.
    fn guard_is_whole(&self) -> bool {
        let state = std::fs::canonicalize(self.node.path("state")).unwrap();
        let owner = state.to_string_lossy();
        self.node.namespace.run(|| netattach::netlink::guard_is_whole(&owner)).unwrap()
    }

    /// The records of flows and drops, one per line.
    fn flows(&self) -> String {
        let output = Command::new(executable("netattachctl").unwrap())
            .arg("--socket")
            .arg(self.node.socket())
            .args(["flows", "-o", "json"])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn surprises(&self, attempts: &[(&str, To, bool)]) -> Vec<String> {
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (from, to, expected) in attempts.iter().copied() {
                for family in [0, 1] {
                    for tcp in [true, false] {
                        threads.push(scope.spawn(move || {
                            let patience = if expected { PATIENCE } else { SILENCE };
                            let address = to.address(family);
                            let passed = if tcp {
                                connects(self.pod(from), address, patience)
                            } else {
                                datagram(self.pod(from), address, patience).unwrap()
                            };
                            let how = if tcp { "tcp" } else { "udp" };
                            (passed != expected)
                                .then(|| format!("{from} {how} {to:?} ({address}): passed: {passed}"))
                        }));
                    }
                }
            }
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn end(self) {
        let pods = [&self.server, &self.client, &self.other, &self.marker];
        for pod in pods {
            self.node.del(pod).success();
        }
        Snapshot::take(&self.node, &pods).unwrap().assert_nothing_is_left();
    }
}

/// The destination of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    /// A pod of this node directly.
    Pod(u8, u16),
    /// The pod of another node directly.
    Remote(u16),
    /// A Service.
    Service(u8, u16),
    /// A port of this node.
    Node(u16),
    /// A port of this node, by the address that is the pods' gateway.
    Gateway(u16),
    /// An external address of a Service.
    External(u16),
}

impl To {
    fn address(self, family: usize) -> SocketAddr {
        let at =
            |prefix: &str, host: u8, port| SocketAddr::new(format!("{prefix}{host}").parse().unwrap(), port);
        match self {
            Self::Pod(host, port) => pod_at(family, host, port),
            Self::Remote(port) => SocketAddr::new(REMOTE[family].parse().unwrap(), port),
            Self::Service(number, port) => at(SERVICES[family], number, port),
            Self::Node(port) => at(NODES[family], 1, port),
            Self::Gateway(port) => at(PODS[family], 1, port),
            Self::External(port) => at(["203.0.113.", "2001:db8:1::"][family], 7, port),
        }
    }
}

fn pod_at(family: usize, host: u8, port: u16) -> SocketAddr {
    SocketAddr::new(format!("{}{host}", PODS[family]).parse().unwrap(), port)
}

/// A pod whose ports have names.
fn labelled(name: &str, app: &str) -> Value {
    let mut pod = pod(name, &json!({"app": app}), &Value::Null);
    pod["spec"]["containers"][0]["ports"] = ports();
    pod
}

fn ports() -> Value {
    json!([
        {"name": "web", "containerPort": WEB_BEHIND}, {"name": "web", "containerPort": WEB_BEHIND, "protocol": "UDP"},
        {"name": "admin", "containerPort": ADMIN_BEHIND}
    ])
}

/// The object of the other node's pod.
fn remote_pod(labels: &Value) -> Value {
    let mut remote = pod("remote", labels, &Value::Null);
    remote["metadata"]["namespace"] = json!("elsewhere");
    remote["spec"]["containers"][0]["ports"] = ports();
    let status =
        json!([{"name": "kube-system/default", "interface": "eth0", "ips": REMOTE, "default": true}]);
    annotated(remote, "k8s.v1.cni.cncf.io/network-status", &status.to_string())
}

/// All of one port number, TCP and UDP.
fn both(port: u16) -> Value {
    json!([{"protocol": "TCP", "port": port}, {"protocol": "UDP", "port": port}])
}

fn app(name: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"app": name}}})
}
