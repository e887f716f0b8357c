//! The node's work for pods by plain executables, without an agent: masquerade, ports of the node, limits.
//!
//! `ports` has the chained plugin `portmap`, `masquerade` the key `ipMasq` of `bridge` and `ptp`, `limits` the
//! chained plugin `bandwidth`, `firewall` the one of that name, `senders` the key `macspoofchk` of `bridge`;
//! `loopback` devices by which packets of 127.0.0.1 leave; `at_once` several processes that change the node's packet
//! filter, `reference` the same configurations with the reference plugins.

mod at_once;
mod firewall;
mod limits;
mod loopback;
mod masquerade;
mod ports;
mod reference;
mod senders;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use netattach::netlink::nat::{self, View};
use netattach_tests::Namespace;
use netattach_tests::node::{executable, ip};
use netattach_tests::runtime::{Answer, Call, Runtime, config, with_result};
use netattach_tests::traffic::{PATIENCE, connect, eventually};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Addresses of the node and of the outside host, on the wire; by family.
const NODE: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
const OUTSIDE: [&str; 2] = ["192.0.2.2", "2001:db8::2"];
/// Gateways and first pods.
const GATEWAY: [&str; 2] = ["10.1.0.1", "fd00:1::1"];
const POD: [&str; 2] = ["10.1.0.2", "fd00:1::2"];

/// A node with plugins, and an outside host, behind a wire.
struct Scene {
    runtime: Runtime,
    outside: Namespace,
    dir: TempDir,
}

/// A pod, and the results of the chain's plugins.
struct Attached {
    container: &'static str,
    namespace: Namespace,
    chain: Vec<Value>,
    results: Vec<Value>,
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

fn run(namespace: &Namespace, line: &str) {
    ip(namespace, &line.split(' ').collect::<Vec<_>>()).unwrap();
}

impl Scene {
    /// With our executables.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let plugins = dir.path().join("plugins");
        std::fs::create_dir(&plugins).unwrap();
        let installed =
            Command::new(executable("netattach-cni").unwrap()).arg("install").arg(&plugins).output().unwrap();
        assert!(installed.status.success(), "{installed:?}");
        Self::with(&plugins, dir)
    }

    fn with(plugins: &Path, dir: TempDir) -> Self {
        let runtime = Runtime { node: Namespace::new().unwrap(), plugins: plugins.to_owned() };
        let scene = Self { runtime, outside: Namespace::new().unwrap(), dir };
        let (node, outside) = (&scene.runtime.node, &scene.outside);
        node.loopback_up().unwrap();
        outside.loopback_up().unwrap();
        run(node, &format!("link add wire0 up type veth peer name far0 netns {}", outside.task()));
        run(outside, "link set far0 up");
        for (family, bits, pods) in [(0, 24, "10.1.0.0/16"), (1, 64, "fd00:1::/64")] {
            let nodad = if family == 1 { " nodad" } else { "" };
            run(node, &format!("addr add {}/{bits} dev wire0{nodad}", NODE[family]));
            run(outside, &format!("addr add {}/{bits} dev far0{nodad}", OUTSIDE[family]));
            run(outside, &format!("route add {pods} via {}", NODE[family]));
        }
        scene
    }

    fn node(&self) -> &Namespace {
        &self.runtime.node
    }

    fn ipam(&self) -> Value {
        json!({
            "type": "host-local", "dataDir": self.dir.path(),
            "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]]
        })
    }

    /// Returns a bridge with these keys in addition to its usual ones.
    fn bridge(&self, keys: &Value) -> Value {
        self.routed("bridge", keys)
    }

    /// Returns a `bridge`, or a `ptp`, by which pods have default routes, with these keys in addition to its usual
    /// ones.
    fn routed(&self, kind: &str, keys: &Value) -> Value {
        let mut usual = json!({"ipam": self.ipam()});
        if kind == "bridge" {
            extend(&mut usual, &json!({"bridge": "br0", "isDefaultGateway": true}));
        } else {
            usual["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        }
        extend(&mut usual, keys);
        config("1.1.0", kind, &usual)
    }

    /// ADD by each plugin of a chain.
    fn add(&self, container: &'static str, chain: &[Value]) -> Attached {
        let namespace = Namespace::new().unwrap();
        namespace.loopback_up().unwrap();
        let mut attached = Attached { container, namespace, chain: chain.to_vec(), results: Vec::new() };
        for plugin in chain {
            let config = match attached.results.last() {
                Some(last) => with_result(plugin, last),
                None => plugin.clone(),
            };
            let result = self.runtime.add(attached.call(), &config).unwrap();
            attached.results.push(result);
        }
        attached
    }

    /// CHECK by each plugin.
    fn check(&self, attached: &Attached) {
        for plugin in &attached.chain {
            self.runtime.after("CHECK", attached.call(), plugin, attached.result()).unwrap();
        }
    }

    /// DEL by each plugin, from the last one on, with the last result.
    fn del(&self, attached: &Attached) {
        for plugin in attached.chain.iter().rev() {
            self.runtime.after("DEL", attached.call(), plugin, attached.result()).unwrap();
        }
    }

    /// The table that our executables share.
    fn table(&self) -> View {
        self.node().run(|| nat::view().unwrap())
    }

    /// `route_localnet` of a device of the node.
    fn loopback_by(&self, device: &str) -> String {
        let setting = format!("/proc/sys/net/ipv4/conf/{device}/route_localnet");
        self.node().run(|| std::fs::read_to_string(setting)).unwrap().trim().to_owned()
    }

    fn assert_table_is_gone(&self) {
        let listed = listing(self.node());
        assert!(!listed.contains(nat::SHARED_TABLE), "{listed}");
    }
}

impl Attached {
    fn call(&self) -> Call<'_> {
        Call { container: self.container, ifname: "eth0", netns: self.namespace.path(), args: "" }
    }

    fn result(&self) -> &Value {
        self.results.last().unwrap()
    }

    /// Its addresses, of IPv4 and of IPv6.
    fn addresses(&self) -> [IpAddr; 2] {
        [0, 1].map(|number: usize| {
            let text = self.result()["ips"][number]["address"].as_str().unwrap();
            text.split('/').next().unwrap().parse().unwrap()
        })
    }
}

/// Returns the packet filter of a namespace as text.
fn listing(namespace: &Namespace) -> String {
    let listed = namespace.run(|| Command::new("nft").args(["list", "ruleset"]).output().unwrap());
    assert!(listed.status.success(), "{listed:?}");
    String::from_utf8(listed.stdout).unwrap()
}

fn extend(object: &mut Value, keys: &Value) {
    object.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
}

/// `portmap` with these ports, as pairs of the node's and the pod's, and other keys.
fn portmap(ports: &[(u16, u16)], keys: &Value) -> Value {
    let ports: Vec<Value> = ports
        .iter()
        .map(|(host, pod)| json!({"hostPort": host, "containerPort": pod, "protocol": "tcp"}))
        .collect();
    let mut usual = json!({"runtimeConfig": {"portMappings": ports}});
    extend(&mut usual, keys);
    config("1.1.0", "portmap", &usual)
}

/// Returns the client address that a server in a namespace sees for a connection to an address; `None`: no
/// connection.
fn seen(server: &Namespace, served: SocketAddr, client: &Namespace, to: SocketAddr) -> Option<IpAddr> {
    seen_within(PATIENCE, (server, served), (client, to))
}

/// The same for a connection that has to be there within this time.
fn seen_within(
    patience: Duration,
    (server, served): (&Namespace, SocketAddr),
    (client, to): (&Namespace, SocketAddr),
) -> Option<IpAddr> {
    let mut listener = None;
    // A process that another test starts also has the last listener, until it executes its program.
    let is_bound = eventually(PATIENCE, || {
        listener = server.run(|| TcpListener::bind(served)).ok();
        listener.is_some()
    });
    assert!(is_bound, "{served}");
    let listener = listener.unwrap();
    listener.set_nonblocking(true).unwrap();
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| {
            let due = Instant::now() + patience;
            while Instant::now() < due {
                if let Ok((mut stream, peer)) = listener.accept() {
                    let mut asked = [0; 4];
                    stream.read_exact(&mut asked).unwrap();
                    stream.write_all(&asked).unwrap();
                    return Some(peer.ip());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        });
        let reached = connect(client, to, patience).is_ok();
        let seen = answering.join().unwrap();
        seen.filter(|_| reached)
    })
}

/// Code and message of an answer that has to be an error.
fn refused(answer: &Answer) -> (u64, &str) {
    assert_eq!(answer.exit, Some(1), "{answer:?}");
    (answer.stdout["code"].as_u64().unwrap(), answer.stdout["msg"].as_str().unwrap())
}
